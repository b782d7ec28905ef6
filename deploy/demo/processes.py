"""Programs that the demo starts, and the folder that they live in: whatever happens to the demo, none of it stays.

Programs die with the demo, by the kernel's own hand (PR_SET_PDEATHSIG), so that not even a SIGKILL leaves one. What the kernel
does not clear away (containers, cgroups, mounts, the folder) carries the demo's mark, and the next demo clears it.
"""
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PREFIX = "memledger-demo-"
SEAL = "the folder of a demo of memledger, which the next one removes\n"
DEADLINE = 60
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class Trouble(Exception):
    """The demo cannot go on; the text says what to do."""


def die_with_the_demo():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def await_(what, look, deadline=DEADLINE):
    """Asks until `look` answers something; Trouble at the deadline."""
    end = time.monotonic() + deadline
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise Trouble(f"{what}: not within {deadline} s")
        time.sleep(0.05)  # poll


def run(*words, **more):
    """A command that must succeed; its output."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, start_new_session=True, **more)
    if done.returncode:
        raise Trouble(f"{' '.join(map(str, words))}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def attempt(*words):
    """A command of which the end does not matter."""
    subprocess.run([*map(str, words)], capture_output=True, start_new_session=True)


def free_port(wanted=0):
    """The wanted port of the loopback address, or another one if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
        return probe.getsockname()[1]


def get(url):
    """The body at an address; None while nothing answers there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


class Program:
    """A program in the background, with its log in a file. Stopped by SIGTERM, and by SIGKILL if that does not help."""

    def __init__(self, words, log, **more):
        self.words, self.log = [*map(str, words)], Path(log)
        with self.log.open("a") as out:
            self.child = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=die_with_the_demo, **more,
            )  # fmt: skip

    @property
    def pid(self):
        return self.child.pid

    def ready(self, url):
        """Waits until it answers at an address."""

        def look():
            if self.child.poll() is not None:
                raise Trouble(f"{self.words[0]} has ended; the end of its log:\n{self.tail()}")
            return get(url) is not None

        await_(f"an answer at {url}", look)

    def tail(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])

    def stop(self):
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
        self.child.wait()


class Folder:
    """A folder of the demo's own, locked for as long as the demo lives. Its name is the demo's mark."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.path.chmod(0o755)  # memledger's library and the rules are no secret
        self.lock = (self.path / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.lock.write(SEAL)
        self.lock.flush()

    @property
    def mark(self):
        return self.path.name

    def __truediv__(self, name):
        return self.path / name

    def remove(self):
        remove(self.path)
        self.lock.close()


def remove(path):
    """A demo's folder and what is mounted in it."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    for mount in reversed([line.split()[1] for line in mounts]):
        if Path(mount).is_relative_to(path):
            attempt("umount", "-l", mount)
    shutil.rmtree(path, ignore_errors=True)


def others():
    """Folders of other demos, each with whether that one lives: its lock is held then."""
    for path in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue  # somebody else's
            with open(os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW), "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read() != SEAL:
                    continue
                yield path, False
        except BlockingIOError:
            yield path, True
        except OSError:
            continue  # no demo's


@contextlib.contextmanager
def one_at_a_time():
    """While this lasts no other demo begins: two would take the same names and ports."""
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def stop_thread(pid, name):
    """Stops one thread of a process, and no other, as a debugger does. Returns what makes it go on.

    If the demo dies, the kernel lets the thread go on.
    """
    seize, interrupt, detach, wall = 0x4206, 0x4207, 17, 0x40000000
    found = [task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == name]
    if not found:
        raise Trouble(f"process {pid} has no thread {name!r}")
    thread = int(found[0].name)

    def ptrace(request):
        LIBC.ptrace.argtypes = [ctypes.c_long] * 4
        if LIBC.ptrace(request, thread, 0, 0) == -1:
            raise Trouble(f"ptrace of thread {name!r}: {os.strerror(ctypes.get_errno())}; it needs CAP_SYS_PTRACE")

    ptrace(seize)
    ptrace(interrupt)
    os.waitpid(thread, wall)
    return lambda: ptrace(detach)
