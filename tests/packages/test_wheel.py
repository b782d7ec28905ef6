"""The wheel, in an empty virtual environment."""

import hashlib
import os
import re
import subprocess

import pytest

from machine import ROOT, counts_kill, eventually, free_port, get, is_verdict, oom_kill, output_of


def build_paths():
    """The folders that compilers read from: the source, the crates, and the compilers themselves."""
    return {str(ROOT), os.environ["MEMLEDGER_TEST_CARGO_HOME"], os.environ["MEMLEDGER_TEST_CACHE"]}


@pytest.fixture
def venv(packages, tmp_path):
    """The folder bin of a virtual environment with nothing but the wheel."""
    output_of("/usr/bin/python3", "-m", "venv", tmp_path / "venv")
    (wheel,) = packages.glob("*.whl")
    output_of(tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel)
    return tmp_path / "venv/bin"


def test_wheel_holds_the_program_and_the_client(venv, packages):
    assert hashlib.sha256((venv / "memledger").read_bytes()).digest() == hashlib.sha256((packages / "memledger").read_bytes()).digest()
    version = output_of(venv / "memledger", "--version").split()[1]
    script = "import memledger; memledger.start(); memledger.step(); memledger.stop(); print(memledger.__version__, memledger.__file__)"
    client, path = output_of(venv / "python", "-c", script, cwd="/").split()
    assert client == version and path.startswith(str(venv.parent))
    # PYTHONPATH's sitecustomize is for containers: in a virtual environment it would run in every program
    assert not list(venv.parent.rglob("sitecustomize.py"))


def test_no_file_contains_a_path_of_the_build(venv, packages):
    # pip itself writes where it found the wheel
    client = [path for path in venv.parent.rglob("*memledger*/**/*")
              if path.is_file() and path.suffix != ".pyc" and path.name != "direct_url.json"]
    assert client
    for path in [packages / "memledger", venv / "memledger", *client]:
        content = path.read_bytes()
        found = [folder for folder in build_paths() if folder.encode() in content]
        assert not found, f"{path} contains {found}"


def test_uninstalled_wheel_leaves_nothing(venv):
    output_of(venv / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "memledger")
    assert not list(venv.parent.rglob("*memledger*"))


def test_program_of_the_wheel_answers(venv, tmp_path, containers):
    port = free_port()
    flags = [f"--web.listen-address=127.0.0.1:{port}", f"--state.path={tmp_path}/state", f"--local.socket={tmp_path}/control.sock",
             f"--reporter.directory={tmp_path}/reporter"]
    report = output_of(venv / "memledger", "doctor", *flags)
    assert re.search(r"(?m)^ *ok +cgroups", report), report
    with open(tmp_path / "log", "w") as log:
        served = subprocess.Popen([venv / "memledger", "serve", *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        eventually("it is ready", lambda: get(f"http://127.0.0.1:{port}/-/ready"))
        containers.append(oom_kill())
        why = [venv / "memledger", "why", containers[-1], f"--state.path={tmp_path}/state"]
        eventually("the verdict", lambda: is_verdict(output_of(*why), containers[-1]))
        eventually("its count", lambda: counts_kill(get(f"http://127.0.0.1:{port}/metrics"), containers[-1]))
    finally:
        served.terminate()
        assert served.wait(timeout=60) == 0


def test_program_needs_no_newer_glibc_than_the_name_of_the_wheel_says(packages):
    (wheel,) = packages.glob("*.whl")
    major, minor = map(int, re.search(r"manylinux_(\d+)_(\d+)_", wheel.name).groups())
    needed = re.findall(r"GLIBC_(\d+)\.(\d+)", output_of("objdump", "-T", packages / "memledger"))
    assert needed and max((int(one), int(two)) for one, two in needed) <= (major, minor), needed
