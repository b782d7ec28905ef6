"""The image of `make image`: run by Docker with the options of services.yml, without root, and by Compose."""

import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from machine import ROOT, counts_kill, eventually, free_port, get, is_verdict, oom_kill, output_of, remove, unique

NON_ROOT = "65534:65534"


@pytest.fixture(scope="module")
def image(packages):
    name = f"{unique('image')}:1"
    output_of(ROOT / "deploy/packages/image.sh", packages / "memledger", name)
    yield name
    output_of("docker", "rmi", "-f", name)


def compose_flags():
    flags = output_of(sys.executable, "-B", ROOT / "tests/dashboards/compose.py", "flags").splitlines()
    # of the machine, and not removed with the container
    return [flag for flag in flags if "memledger-reporter" not in flag]


def documented_command(page, start):
    """Returns the words of a command of a page of docs/, which begins with these words."""
    text = (ROOT / "docs" / page).read_text()
    return shlex.split(re.search(rf"(?m)^{start}(?:.*\\\n)*.*$", text)[0].replace("\\\n", " "))


def documented_flags():
    """Returns the options of docs/install.md, without those that the test sets itself and that need a GPU."""
    words = documented_command("install.md", "docker run -d --name memledger")
    pairs = [(word, value) for word, value in zip(words, words[1:]) if word.startswith("-")]
    own = ("-d", "--name", "--restart", "--gpus", "-p")
    flags = [[word] if value.startswith("-") else [word, value] for word, value in pairs if word not in own]
    return [part for flag in flags if "memledger-reporter" not in flag[-1] for part in flag]


def started(metrics):
    """Returns the Unix time at which the program that answered was started."""
    return float(re.search(r"(?m)^process_start_time_seconds (\S+)", metrics)[1])


def check(container, containers, port, **verdict):
    """The container answers `doctor`, `/metrics` and `why`."""
    eventually("it is ready", lambda: get(f"http://127.0.0.1:{port}/-/ready"))
    inside = ["docker", "exec", container, "/memledger"]
    report = output_of(*inside, "doctor")
    assert re.search(r"(?m)^ *ok +cgroups", report), report
    # without the kernel log, an exit in the ledger's first second may be that of an earlier kill
    eventually("it is some seconds old", lambda: time.time() - started(get(f"http://127.0.0.1:{port}/metrics")) > 3)
    containers.append(oom_kill())
    eventually("the verdict", lambda: is_verdict(output_of(*inside, "why", containers[-1]), containers[-1], **verdict))
    eventually("its count", lambda: counts_kill(get(f"http://127.0.0.1:{port}/metrics"), containers[-1]))
    return report


def run(image, containers, *flags):
    """Starts the image; the network is the machine's, because the tests' engine publishes no ports."""
    name, port = unique("memledger"), free_port()
    containers.append(name)
    output_of("docker", "run", "-d", "--name", name, "--network", "host", *flags, image, "serve", f"--web.listen-address=127.0.0.1:{port}",
              "--reporter.directory=")
    return name, port


@pytest.mark.parametrize("flags", [compose_flags, documented_flags])
def test_image_runs_with_the_options_of_compose_and_of_the_docs(image, packages, containers, tmp_path, flags):
    name, port = run(image, containers, *flags())
    output_of("docker", "cp", f"{name}:/memledger", tmp_path / "memledger")
    assert (tmp_path / "memledger").read_bytes() == (packages / "memledger").read_bytes()
    report = check(name, containers, port)
    assert re.search(r"(?m)^ *ok +kernel log", report), report
    # the control socket is there
    refused = subprocess.run(["docker", "exec", name, "/memledger", "cleanup", "nobody"], capture_output=True, text=True, check=False)
    assert refused.returncode and "control.sock" not in refused.stderr, refused


def test_why_runs_in_an_image_as_the_docs_and_the_error_print_it(image, containers):
    words = documented_command("why.md", "docker run --rm")
    source = (ROOT / "src/cli/why.rs").read_text()
    in_error = "".join(re.findall(r'"(.*)"', re.search(r"(?s)const IN_IMAGE.*?\);", source)[0].split("env!")[0]))
    assert " ".join(words[:-2]) == in_error + "0.1.0"
    assert words[-3] in (ROOT / "deploy/services.yml").read_text()
    containers.append(oom_kill())
    asked = [image if word == words[-3] else word for word in words[:-1]]
    eventually("the verdict", lambda: is_verdict(output_of(*asked, containers[-1]), containers[-1]))


def test_image_runs_as_another_user_without_a_capability(image, containers):
    group = os.stat("/var/run/docker.sock").st_gid
    flags = [flag for flag in compose_flags() if not flag.startswith(("--cap-add", "--device", "--tmpfs"))]
    name, port = run(image, containers, *flags, f"--user={NON_ROOT}", f"--group-add={group}", "--tmpfs=/run/memledger:mode=0750,uid=65534",
                     "--tmpfs=/var/lib/memledger:mode=0750,uid=65534")
    # without CAP_SYSLOG the kernel's record of the kill is missing
    check(name, containers, port, verdict="OUT OF MEMORY, known from the kernel's counters only")
    status = output_of("docker", "inspect", "-f", "{{.State.Pid}}", name).strip()
    with open(f"/proc/{status}/status") as file:
        text = file.read()
    assert re.search(r"(?m)^Uid:\t65534\t65534", text) and re.search(r"(?m)^CapEff:\t0+$", text), text


@pytest.fixture
def registry(tmp_path):
    """The address of a real registry, on this machine."""
    address = f"localhost:{free_port()}"
    (tmp_path / "registry.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\nhttp: {{addr: '{address}'}}\n")
    program = f"{os.environ['MEMLEDGER_TEST_CACHE']}/registry/usr/bin/docker-registry"
    with open(tmp_path / "registry.log", "w") as log:
        serving = subprocess.Popen([program, "serve", tmp_path / "registry.yml"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        eventually("the registry", lambda: get(f"http://{address}/v2/"))
        yield address
    finally:
        serving.terminate()
        serving.wait(timeout=60)


def test_image_and_chart_go_through_a_registry(image, registry, tmp_path):
    pushed = f"{registry}/memledger/memledger:9.9.9"
    output_of("docker", "tag", image, pushed)
    output_of("docker", "push", pushed)
    output_of("docker", "rmi", pushed)
    output_of("docker", "pull", pushed)
    try:
        same = [output_of("docker", "image", "inspect", "-f", "{{.Id}}", name) for name in (image, pushed)]
        assert same[0] == same[1]
    finally:
        output_of("docker", "rmi", pushed)
    helm = os.environ["MEMLEDGER_TEST_HELM"]
    environment = {**os.environ, "HELM_CACHE_HOME": str(tmp_path / "cache"), "HELM_CONFIG_HOME": str(tmp_path / "config")}
    output_of(helm, "package", ROOT / "helm/memledger", "--version", "9.9.9", "--app-version", "9.9.9", "-d", tmp_path)
    output_of(helm, "push", tmp_path / "memledger-9.9.9.tgz", f"oci://{registry}/charts", "--plain-http", env=environment)
    rendered = output_of(helm, "template", "m", f"oci://{registry}/charts/memledger", "--version", "9.9.9", "--plain-http",
                         "--set", f"image.registry={registry}", env=environment)
    assert f"image: {pushed}" in rendered or f'image: "{pushed}"' in rendered, rendered


def compose(*words, **options):
    program = f"{os.environ['MEMLEDGER_TEST_CACHE']}/compose/docker-compose"
    return output_of(program, *words, cwd=ROOT, **options)


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.no-gpu.yml"])
@pytest.mark.parametrize("overlays", [[], ["docker-compose.socket-proxy.yml"], ["docker-compose.build.yml"]])
def test_compose_accepts_every_combination_of_files(file, overlays):
    files = [word for name in [file, *overlays] for word in ("-f", f"deploy/{name}")]
    shown = compose(*files, "--profile", "monitoring", "config", env={**os.environ, "MEMLEDGER_IMAGE": "registry.example/m:7"})
    assert ("image: memledger:local" if "docker-compose.build.yml" in overlays else "image: registry.example/m:7") in shown
    assert ("build:" in shown) == ("docker-compose.build.yml" in overlays)


def test_compose_starts_the_image_that_is_set(image, containers, tmp_path):
    # a name and a network of the test's own; everything else is that of the shipped files
    name, port, project = unique("memledger"), free_port(), unique("project")
    overlay = tmp_path / "overlay.yml"
    overlay.write_text(f"""
services:
  memledger:
    container_name: {name}
    network_mode: host
    ports: !reset []
    command: [serve, --web.listen-address=127.0.0.1:{port}]
""")
    is_there = os.path.exists("/run/memledger-reporter")
    words = ["-p", project, "-f", "deploy/docker-compose.no-gpu.yml", "-f", str(overlay)]
    environment = {**os.environ, "MEMLEDGER_IMAGE": image}
    try:
        compose(*words, "up", "-d", "--pull", "never", "--no-build", env=environment)
        report = check(name, containers, port)
        assert re.search(r"(?m)^ *ok +kernel log", report), report
        # the ledger outlives the container
        compose(*words, "up", "-d", "--pull", "never", "--no-build", "--force-recreate", env=environment)
        killed = containers[-1]
        eventually("the old verdict", lambda: is_verdict(output_of("docker", "exec", name, "/memledger", "why", killed), killed))
    finally:
        compose(*words, "down", "--volumes", "--timeout", "30", env=environment)
        remove(name)
        if not is_there:
            subprocess.run(["rm", "-rf", "/run/memledger-reporter"], check=False)
