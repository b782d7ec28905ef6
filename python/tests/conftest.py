"""What the tests of the client share: a receiver in the place of memledger, and programs that run as processes of their own.

The receiver is a real SOCK_SEQPACKET socket, but it is not memledger: tests/inside.rs has the client report to the real one. No GPU
is needed: ``standin/torch`` has the place of torch, and says so.
"""

import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
STANDIN = ROOT / "tests" / "standin"
DEADLINE_SECONDS = 120
#: Versions of torch between which what the client uses differs.
TORCH_VERSIONS = ("2.4.1", "2.5.1", "2.8.0", "2.9.1", "2.15.0")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs in `make test-all`; what has no mark gates each change (`make test`)")


def eventually(what, check):
    """Returns the first true result of ``check``; fails at the deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.01)  # poll
    raise AssertionError(f"{what} did not happen within {DEADLINE_SECONDS} s")


class Receiver:
    """Accepts connections in a directory, and keeps each message with the pid that connected."""

    def __init__(self, directory, welcome=b'{"v":1,"t":"welcome","interval_ms":100}'):
        self.directory, self.welcome = directory, welcome
        self.messages = []
        self.connections = []
        self._readers = []
        self._lock = threading.Lock()
        self.path = str(directory / "reporter.sock")
        self._listener = None
        self.open()

    def open(self):
        """Listens, also again after ``close``."""
        if os.path.exists(self.path):
            os.unlink(self.path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(128)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self):
        """Ends the listener and all connections, as a memledger that is killed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()
        self.connections = []

    def _accept(self, listener):
        while True:
            try:
                select.select([listener], [], [])
                with self._lock:
                    connection, _ = listener.accept()
                    pid = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
                    reader = threading.Thread(target=self._read, args=(connection, pid), daemon=True)
                    reader.start()
                    self.connections.append(connection)
                    self._readers.append((pid, reader))
            except (OSError, ValueError):  # it was closed
                return

    def _is_read(self):
        """Returns whether all messages of programs that have ended are read."""
        with self._lock:
            try:
                is_waiting = select.select([self._listener], [], [], 0)[0]
            except (OSError, ValueError):  # it is closed
                is_waiting = []
            return not is_waiting and all(os.path.exists(f"/proc/{pid}") or not reader.is_alive() for pid, reader in self._readers)

    def _read(self, connection, pid):
        try:
            connection.send(self.welcome)
        except OSError:
            pass  # a short program has ended already, and its messages are here
        while True:
            try:
                packet = connection.recv(1 << 16)
            except ConnectionResetError:
                continue  # once, if the program ended without reading the welcome: what it sent is still there
            except OSError:
                return
            if not packet:
                return
            self.messages.append((pid, json.loads(packet)))

    def send(self, message):
        """Sends a message to every program that is connected."""
        for connection in self.connections:
            connection.send(json.dumps(message).encode())

    def of(self, kind, pid=None):
        """Returns the messages of a type. What a program that has ended sent is among them."""
        eventually("the last messages of programs that have ended", self._is_read)
        return [message for sender, message in list(self.messages) if message["t"] == kind and pid in (None, sender)]

    def wait(self, kind, check=lambda message: True):
        """Waits for a message of a type that passes a check."""
        found = eventually(f"a message {kind}", lambda: [each for each in self.of(kind) if check(each)])
        return found[-1]


@pytest.fixture
def receiver(tmp_path):
    found = Receiver(tmp_path)
    yield found
    found.close()


class Program:
    """A Python program in a process of its own, with the client and the stand-in."""

    def __init__(self, text, directory, path=(ROOT, STANDIN), environment=None, arguments=("-c",)):
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MEMLEDGER"))}
        variables.update(
            PYTHONPATH=os.pathsep.join(map(str, path)),
            MEMLEDGER_REPORTER_DIRECTORY=str(directory),
            MEMLEDGER_DEBUG="1",
            PYTHONDONTWRITEBYTECODE="1",
        )
        variables.update(environment or {})
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error::DeprecationWarning:__main__", *arguments, text],
            env=variables, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self.process.pid

    def line(self):
        """Returns the next line of the output; empty if the program hangs."""
        watchdog = threading.Timer(DEADLINE_SECONDS, self.process.kill)
        watchdog.start()
        try:
            return self.process.stdout.readline().rstrip("\n")
        finally:
            watchdog.cancel()

    def go(self):
        """Lets a program continue that waits in ``input()``."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """Waits for the end; returns exit code, rest of the output, and errors."""
        out, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, out, err


@pytest.fixture
def run(tmp_path):
    """Starts programs; all of their processes are ended with the test."""
    started = []

    def start(text, as_file=None, **options):
        if as_file is not None:
            as_file.write_text(text)
            text, options = str(as_file), dict(options, arguments=())
        started.append(Program(text, tmp_path, **options))
        return started[-1]

    yield start
    for program in started:
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        program.process.communicate()


#: Two GPUs of one kind: 12 GiB, of which 3 and 6 are used.
LIBRARY = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return index > 1; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { *handle = (void *)(long)(uuid[4] - 'a' + 1); return strlen(uuid) != 5; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { strcpy(name, KINDS == 2 && handle == (void *)2 ? "Other" : "Stand-in"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
  found->total = 12ull << 30; found->used = (long)handle * (3ull << 30); found->free = found->total - found->used; return 0;
}
"""


@pytest.fixture
def driver(tmp_path):
    """Builds a library with the functions of the driver's that are called, as a program loads it: by its name."""

    def build(kinds=1):
        (tmp_path / "nvml.c").write_text(LIBRARY)
        command = ["cc", "-shared", "-fPIC", f"-DKINDS={kinds}", "-o", "libnvidia-ml.so.1", "nvml.c"]
        subprocess.run(command, cwd=tmp_path, check=True)
        return {"LD_LIBRARY_PATH": str(tmp_path)}

    return build
