"""The image of `make image`: run by Docker with the options of services.yml, without root, and by Compose."""

import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from machine import ROOT, counts_kill, eventually, free_port, get, is_verdict, oom_kill, output_of, remove, unique


@pytest.fixture(scope="module")
def image(packages):
    name = f"{unique('image')}:1"
    output_of(ROOT / "deploy/packages/image.sh", packages / "memledger", name)
    yield name
    output_of("docker", "rmi", "-f", name)


def words_of(options):
    """The options of `docker run` that compose.py prints, each as one word."""
    return [word for flag in options for word in ([flag] if "=" not in flag else flag.split("=", 1))]


def compose_command():
    """The memledger of services.yml as a `docker run`."""
    flags = output_of(sys.executable, "-B", ROOT / "tests/dashboards/compose.py", "flags").splitlines()
    return ["docker", "run", *words_of(flags), "-v", "state:/var/lib/memledger", "IMAGE"]


def documented_command(page, start, section=None):
    """Returns the words of a command of a page of docs/, or of one of its sections, which begins with these words."""
    text = (ROOT / "docs" / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n", 1)[1].split("\n## ")[0]
    return shlex.split(re.search(rf"(?m)^{start}(?:.*\\\n)*.*$", text)[0].replace("\\\n", " "))


def documented_run(section):
    return documented_command("install.md", "docker run -d --name memledger", section)


class Command:
    """A `docker run`, with directories of the test in place of the host's and of named volumes, which would outlive the test or be
    those of a memledger of this machine. Left out: the name, the published port, because the tests' engine has no network, and GPUs."""

    OWN = ("--name", "-p", "--gpus")
    ALONE = ("-d", "--read-only")
    HOST = ("/sys/fs/cgroup", "/var/run/docker.sock")  # not written

    def __init__(self, words, folder):
        self.flags, self.folders = [], {}
        words = iter(words[2:])
        for word in words:
            if word in self.ALONE:
                self.flags.append(word)
            elif word.startswith("-"):
                value = next(words)
                if word in ("-v", "--volume"):
                    value = self._volume(value, folder)
                if word not in self.OWN:
                    self.flags += [word, value]
            else:
                break
        self.arguments = [*words] or ["serve"]

    def _volume(self, value, folder):
        source, target = value.split(":")[:2]
        if source in self.HOST:
            return value
        own = folder / target.strip("/").replace("/", "-")
        own.mkdir(exist_ok=True)
        self.folders[target] = own
        return ":".join([str(own), *value.split(":")[1:]])

    def start(self, image, containers):
        """Starts it in the network of the host; returns its name and its port."""
        name, port = unique("memledger"), free_port()
        containers.append(name)
        output_of("docker", "run", "--name", name, "--network", "host", *(["-d"] if "-d" not in self.flags else []), *self.flags, image,
                  *self.arguments, f"--web.listen-address=127.0.0.1:{port}")
        return name, port


def started(metrics):
    """Returns the Unix time at which the program that responds was started."""
    return float(re.search(r"(?m)^process_start_time_seconds (\S+)", metrics)[1])


def check(container, containers, port, **verdict):
    """The container serves `doctor`, `/metrics` and `why`."""
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


def verdict_inside(container, name, **verdict):
    eventually("the verdict", lambda: is_verdict(output_of("docker", "exec", container, "/memledger", "why", name), name, **verdict))


def check_control_socket(container):
    """A verb that needs the control socket works."""
    refused = subprocess.run(["docker", "exec", container, "/memledger", "cleanup", "nobody"], capture_output=True, text=True, check=False)
    assert refused.returncode and "control.sock" not in refused.stderr, refused


@pytest.mark.parametrize("words", [compose_command, lambda: documented_run("Image")], ids=["compose", "documented"])
def test_image_answers_and_its_ledger_outlives_the_container(image, packages, containers, tmp_path, words):
    command = Command(words(), tmp_path)
    name, port = command.start(image, containers)
    output_of("docker", "cp", f"{name}:/memledger", tmp_path / "memledger")
    assert (tmp_path / "memledger").read_bytes() == (packages / "memledger").read_bytes()
    report = check(name, containers, port)
    assert re.search(r"(?m)^ *ok +kernel log", report), report
    check_control_socket(name)
    # only the ledger has the name of a removed container
    killed = containers[-1]
    remove(name, killed)
    name, port = command.start(image, containers)
    verdict_inside(name, killed)


def test_printed_command_for_more_rights_runs(image, containers):
    words = documented_command("why.md", "docker run --rm")
    source = (ROOT / "src/cli/coverage.rs").read_text()
    in_error = "".join(re.findall(r'"(.*)"', re.search(r"(?s)const IN_IMAGE.*?\);", source)[0].split("env!")[0]))
    version = re.search(r'(?m)^version = "(.*)"', (ROOT / "Cargo.toml").read_text())[1]
    assert " ".join(words[:-2]) == in_error + version
    assert words[-3] in (ROOT / "deploy/services.yml").read_text()
    containers.append(oom_kill())
    verb = [image if word == words[-3] else word for word in words[:-1]]
    eventually("the verdict", lambda: is_verdict(output_of(*verb, containers[-1]), containers[-1]))


def test_documented_image_gets_all_gpus():
    """No test has a GPU: without `all`, Docker gives it one of them."""
    words = documented_run("Image")
    assert words[words.index("--gpus") + 1] == "all,capabilities=utility"


def test_documented_image_of_another_user_keeps_its_ledger_without_a_capability(image, containers, tmp_path):
    command = Command(documented_run("Not as root"), tmp_path)
    command.flags = [str(os.stat("/var/run/docker.sock").st_gid) if word.startswith("$(stat") else word for word in command.flags]
    made = shlex.split(re.search(r"(?m)^sudo (install -d .*) /var/lib/memledger$", (ROOT / "docs/install.md").read_text())[1])
    output_of(*made, command.folders["/var/lib/memledger"])
    name, port = command.start(image, containers)
    # without CAP_SYSLOG the kernel's record of the kill is missing
    weaker = {"verdict": "OUT OF MEMORY, known from the kernel's counters only"}
    report = check(name, containers, port, **weaker)
    assert re.search(r"(?m)^ *ok +state path", report), report
    check_control_socket(name)
    with open(f"/proc/{output_of('docker', 'inspect', '-f', '{{.State.Pid}}', name).strip()}/status") as file:
        text = file.read()
    assert re.search(r"(?m)^Uid:\t65534\t65534", text) and re.search(r"(?m)^CapEff:\t0+$", text), text
    killed = containers[-1]
    remove(name, killed)
    name, port = command.start(image, containers)
    verdict_inside(name, killed, **weaker)


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


def test_container_of_the_chart_answers(image, containers, tmp_path):
    state, port, name = tmp_path / "state", free_port(), unique("pod")
    values = ["docker.enabled=true", "runtime.enabled=false", f"state.hostPath={json.dumps(str(state))}", f"port={port}"]
    printed = output_of(sys.executable, "-B", ROOT / "tests/helm/container.py", *values)
    flags, arguments = (part.splitlines() for part in printed.strip().split("\n--\n"))
    containers.append(name)
    output_of("docker", "run", "-d", "--name", name, "--network", "host", *flags, image, *arguments)
    check(name, containers, port)


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


@pytest.fixture
def forwarder(tmp_path):
    """An image in place of the socket proxy's, which cannot be pulled: it takes the same options and forwards everything."""
    name = f"{unique('forwarder')}:1"
    output_of("cc", "-static", "-O1", "-Wall", "-Werror", "-o", tmp_path / "forward", ROOT / "tests/packages/forward.c")
    (tmp_path / "Dockerfile").write_text('FROM scratch\nCOPY forward /\nENTRYPOINT ["/forward"]\n')
    output_of("docker", "build", "--quiet", "--network", "none", "--tag", name, tmp_path, env={**os.environ, "DOCKER_BUILDKIT": "0"})
    yield name
    output_of("docker", "rmi", "-f", name)


class Project:
    """Compose files as they are shipped, with a name, a network and a directory for reports of the test's own."""

    def __init__(self, folder, files, services, environment):
        self.name = unique("project")
        overlay = folder / f"{self.name}.yml"
        overlay.write_text("services:\n" + services)
        self.words = ["-p", self.name, *(word for file in files for word in ("-f", f"deploy/{file}")), "-f", str(overlay)]
        self.environment = {**os.environ, **environment}

    def up(self, *words):
        compose(*self.words, "up", "-d", "--pull", "never", "--no-build", *words, env=self.environment)

    def down(self):
        compose(*self.words, "down", "--volumes", "--timeout", "30", env=self.environment)


def own_memledger(name, port, folder):
    """The part of an overlay that the tests' engine needs: it has no bridge; and what belongs to the host."""
    return f"""
  memledger:
    container_name: {name}
    network_mode: host
    ports: !reset []
    deploy: !reset null
    volumes: ["{folder}/reporter:/run/memledger-reporter", "{folder}/runs:/var/lib/memledger-runs"]
    command: [serve, "--web.listen-address=127.0.0.1:{port}"]
"""


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.no-gpu.yml"])
def test_compose_starts_the_image_that_is_set(image, containers, tmp_path, file):
    name, port = unique("memledger"), free_port()
    project = Project(tmp_path, [file], own_memledger(name, port, tmp_path), {"MEMLEDGER_IMAGE": image})
    try:
        project.up()
        report = check(name, containers, port)
        assert re.search(r"(?m)^ *ok +kernel log", report), report
        # the ledger outlives the container, and only the ledger has the name of a removed container
        remove(containers[-1])
        project.up("--force-recreate")
        verdict_inside(name, containers[-1])
    finally:
        project.down()


def test_compose_with_the_proxy_reads_docker_through_it_alone(image, forwarder, containers, tmp_path):
    name, port, proxy = unique("memledger"), free_port(), unique("proxy")
    services = own_memledger(name, port, tmp_path) + f"  docker-proxy:\n    image: {forwarder}\n    container_name: {proxy}\n    stop_signal: SIGKILL\n"
    project = Project(tmp_path, ["docker-compose.no-gpu.yml", "docker-compose.socket-proxy.yml"], services, {"MEMLEDGER_IMAGE": image})

    def docker_is(up):
        return re.search(rf'(?m)^memledger_runtime_up{{[^}}]*runtime="docker"[^}}]*}} {up}$', get(f"http://127.0.0.1:{port}/metrics"))

    try:
        project.up()
        check(name, containers, port)
        # nothing is read beside it
        output_of("docker", "stop", "-t", "0", proxy)
        eventually("Docker is out of reach", lambda: docker_is(0))
        output_of("docker", "start", proxy)
        eventually("Docker is back", lambda: docker_is(1))
    finally:
        project.down()


def test_example_training_is_shown_with_its_name_and_settings(image, containers, tmp_path):
    name, port = unique("memledger"), free_port()
    serving = Project(tmp_path, ["docker-compose.no-gpu.yml"], own_memledger(name, port, tmp_path), {"MEMLEDGER_IMAGE": image})
    # Python's image cannot be pulled
    hog = os.environ["MEMLEDGER_TEST_HOG"]
    train = f"""
  train:
    image: {os.environ["MEMLEDGER_TEST_IMAGE"]}
    network_mode: none
    volumes: ["{hog}:/hog:ro"]
    command: [/hog, hold]
    stop_signal: SIGKILL
"""
    example = Project(tmp_path, ["example-training.yml"], train, {})

    def shown():
        lines = [line for line in get(f"http://127.0.0.1:{port}/metrics").splitlines() if f'container_name="{example.name}-train-1"' in line]
        runs = [line for line in lines if line.startswith("memledger_container_run_info{")]
        limits = [float(line.split()[-1]) for line in lines if line.startswith("memledger_container_memory_limit_bytes{")]
        assert len(runs) == 1 and 'batch_size="32"' in runs[0] and limits == [2 << 30], lines
        return True

    try:
        serving.up()
        example.up()
        eventually("the training", shown)
    finally:
        example.down()
        serving.down()
