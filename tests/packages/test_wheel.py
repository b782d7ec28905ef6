"""The wheel, in an empty virtual environment."""

import hashlib
import os
import re
import subprocess
import zipfile

import pytest

from machine import ROOT, counts_kill, eventually, free_port, get, is_verdict, oom_kill, output_of


def build_paths():
    """The folders that compilers read from: the source, the crates, and the compilers themselves."""
    return {str(ROOT), os.environ["MEMLEDGER_TEST_CARGO_HOME"], os.environ["MEMLEDGER_TEST_CACHE"]}


def pip(venv, *arguments):
    output_of(venv / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


@pytest.fixture
def wheel(packages):
    (found,) = packages.glob("memledger_exporter-*.whl")
    return found


@pytest.fixture
def empty_venv(tmp_path):
    """The folder bin of an empty virtual environment."""
    output_of("/usr/bin/python3", "-m", "venv", tmp_path / "venv")
    return tmp_path / "venv/bin"


@pytest.fixture
def venv(empty_venv, wheel):
    """The folder bin of a virtual environment with nothing but the wheel."""
    pip(empty_venv, "install", "--no-index", wheel)
    return empty_venv


@pytest.fixture
def other_project(tmp_path):
    """A wheel in the place of PyPI's `memledger`: another project, with a module and a program of that name."""
    files = {
        "memledger/__init__.py": "def main():\n    print('memledger 2.0.1 of others')\n",
        "memledger-2.0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: memledger\nVersion: 2.0.1\n",
        "memledger-2.0.1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test_wheel.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "memledger-2.0.1.dist-info/entry_points.txt": "[console_scripts]\nmemledger = memledger:main\n",
    }
    record = "memledger-2.0.1.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    path = tmp_path / "memledger-2.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def is_ours(venv):
    """Returns whether the program is this one, by what it says itself."""
    said = output_of(venv / "memledger", "--version")
    assert said.startswith("memledger "), said
    return "(memledger-exporter, " in said


def imported(venv):
    """Returns which of the two modules can be imported, both in one process."""
    script = f"""
import importlib
for name in ("memledger", "memledger_client"):
    try:
        module = importlib.import_module(name)
    except ImportError:
        continue
    assert module.__file__.startswith({str(venv.parent)!r}), module.__file__
    assert hasattr(module, "main" if name == "memledger" else "track"), module.__file__
    print(name)
"""
    return output_of(venv / "python", "-c", script, cwd="/").split()


def test_wheel_holds_the_program_and_the_client(venv, packages):
    assert hashlib.sha256((venv / "memledger").read_bytes()).digest() == hashlib.sha256((packages / "memledger").read_bytes()).digest()
    version = output_of(venv / "memledger", "--version").split()[1]
    script = "import memledger_client as it; it.start(); it.step(); it.stop(); print(it.__version__, it.__file__)"
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
    pip(venv, "uninstall", "--yes", "memledger-exporter")
    assert not list(venv.parent.rglob("*memledger*"))


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("removed", ["memledger", "memledger-exporter"])
def test_project_named_memledger_works_beside_the_wheel(empty_venv, wheel, other_project, is_last, removed):
    """As docs/install.md says it: of the two programs the last one stays, and each uninstallation removes it."""
    for each in (other_project, wheel) if is_last else (wheel, other_project):
        pip(empty_venv, "install", "--no-index", each)
    assert imported(empty_venv) == ["memledger", "memledger_client"]
    assert is_ours(empty_venv) == is_last
    pip(empty_venv, "uninstall", "--yes", removed)
    kept, module = (wheel, "memledger_client") if removed == "memledger" else (other_project, "memledger")
    assert imported(empty_venv) == [module]
    assert not (empty_venv / "memledger").exists()
    pip(empty_venv, "install", "--no-index", "--force-reinstall", kept)
    assert imported(empty_venv) == [module] and is_ours(empty_venv) == (kept == wheel)


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


def test_program_needs_no_newer_glibc_than_the_name_of_the_wheel_says(packages, wheel):
    major, minor = map(int, re.search(r"manylinux_(\d+)_(\d+)_", wheel.name).groups())
    needed = re.findall(r"GLIBC_(\d+)\.(\d+)", output_of("objdump", "-T", packages / "memledger"))
    assert needed and max((int(one), int(two)) for one, two in needed) <= (major, minor), needed


def test_functions_that_are_called_lie_together(packages):
    sections = output_of("readelf", "--sections", "--wide", packages / "memledger")
    sizes = {name: int(size, 16) for name, size in re.findall(r"\] (\.text\S*) +PROGBITS +\w+ \w+ (\w+)", sections)}
    # a list of another compiler or of older sources matches little: `make layout` writes it anew
    assert sizes.keys() == {".text.called", ".text"}, sizes
    assert sizes[".text.called"] > 2 << 20, sizes
