"""Notebooks: real kernels of Jupyter, with cells that are run, interrupted and run again after a restart."""

import os

import pytest
from conftest import DEADLINE_SECONDS, ROOT, STANDIN, eventually
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.slow
MIB = 1 << 20


class Notebook:
    """A kernel, and the cells that are sent to it."""

    def __init__(self, directory, path=(ROOT, STANDIN)):
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MEMLEDGER", "JUPYTER"))}
        variables.update(
            PYTHONPATH=os.pathsep.join(map(str, path)),
            PYTHONDONTWRITEBYTECODE="1",
            MEMLEDGER_REPORTER_DIRECTORY=str(directory),
            MEMLEDGER_DEBUG="1",
            IPYTHONDIR=str(directory / "ipython"),
            JUPYTER_RUNTIME_DIR=str(directory / "runtime"),
            JUPYTER_DATA_DIR=str(directory / "data"),
        )
        self._options = {"env": variables, "cwd": str(directory), "stderr": (directory / "stderr").open("w")}
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", ip=str(directory / "ipc"), connection_file=str(directory / "kernel.json")
        )
        self.manager.start_kernel(**self._options)
        self._connect()

    def _connect(self):
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE_SECONDS)

    def run(self, text):
        """Runs a cell; returns what it printed, or the name of the exception that ended it."""
        return self.result(self.send(text))

    def send(self, text):
        return self.client.execute(text, stop_on_error=False)  # else the kernel drops the cells after one that failed

    def result(self, cell):
        printed, failure = [], None
        while True:
            message = self.client.get_iopub_msg(timeout=DEADLINE_SECONDS)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                failure = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return failure or "".join(printed).strip()

    def restart(self):
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        self._connect()

    def end(self, now=False):
        if self.manager.has_kernel:
            self.client.stop_channels()
            self.manager.shutdown_kernel(now=now)
        self.manager.cleanup_resources()
        self._options["stderr"].close()


@pytest.fixture
def notebook(tmp_path, receiver):
    found = Notebook(tmp_path)
    yield found
    found.end(now=True)


@pytest.fixture
def notebook_with_package_only(tmp_path, receiver):
    """A kernel in which the client is installed, but does not start by itself."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "memledger_client").symlink_to(ROOT / "memledger_client")
    found = Notebook(tmp_path, (packages, STANDIN))
    yield found
    found.end(now=True)


ALLOCATE = f"""
import os, torch
torch.cuda.init()
torch.cuda.standin_allocate({MIB})
print(os.getpid())
"""


def test_kernel_reports_without_a_line_in_the_notebook(notebook, receiver):
    pid = int(notebook.run(ALLOCATE))
    receiver.wait("sample")
    assert {sender for sender, _ in receiver.messages} == {pid}
    assert notebook.run("import subprocess; print(subprocess.check_output(['echo', 'child'], text=True))") == "child"
    assert notebook.run("!echo shell") == "shell"
    count = len(receiver.of("sample"))
    eventually("more samples", lambda: len(receiver.of("sample")) > count + 1)
    assert {sender for sender, _ in receiver.messages} == {pid}


def test_load_ext_starts_the_client(notebook_with_package_only, receiver):
    notebook = notebook_with_package_only
    pid = int(notebook.run(ALLOCATE))
    assert receiver.messages == []
    assert notebook.run("%load_ext memledger_client") == ""
    receiver.wait("sample")
    assert {sender for sender, _ in receiver.messages} == {pid}
    assert notebook.run("%reload_ext memledger_client") == ""
    assert notebook.run("import memledger_client; memledger_client.stop(); memledger_client.start(); print('on')") == "on"
    count = len(receiver.of("sample"))
    eventually("more samples", lambda: len(receiver.of("sample")) > count + 1)


def test_interrupted_cell_ends_its_operation_and_the_kernel_reports_on(notebook, receiver):
    notebook.run(ALLOCATE)
    assert notebook.run("import memledger_client; memledger_client.step()") == ""
    cell = notebook.send("""
import threading
with memledger_client.track("notebook", "endless"):
    print("begun", flush=True)
    while True:
        threading.Event().wait(1)
""")
    while True:
        message = notebook.client.get_iopub_msg(timeout=DEADLINE_SECONDS)
        if message["msg_type"] == "stream" and "begun" in message["content"]["text"]:
            break
    notebook.manager.interrupt_kernel()
    assert notebook.result(cell) == "KeyboardInterrupt"
    assert notebook.run("memledger_client.step(); print('on')") == "on"
    receiver.wait("operation", lambda message: message["operation"] == "endless")
    count = len(receiver.of("sample"))
    eventually("more samples", lambda: len(receiver.of("sample")) > count + 1)


def test_restarted_kernel_is_a_process_of_its_own(notebook, receiver, tmp_path):
    first = int(notebook.run(ALLOCATE))
    eventually("the first kernel's samples", lambda: receiver.of("sample", first))
    notebook.restart()
    second = int(notebook.run(ALLOCATE))
    assert second != first
    eventually("the second kernel's samples", lambda: receiver.of("sample", second))
    notebook.end()
    assert "memledger" not in (tmp_path / "stderr").read_text()
