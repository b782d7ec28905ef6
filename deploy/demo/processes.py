"""Programs that the demo starts, and their folder: nothing remains after the demo, however it ends.

The kernel kills the programs with the demo (PR_SET_PDEATHSIG), so that not even a SIGKILL leaves one running. What the kernel does
not clean up (containers, cgroups, mounts, the folder) carries the demo's mark, and the next demo removes it.
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
    """The demo cannot continue; the text says what to do."""


def die_with_the_demo():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def await_(what, look, deadline=DEADLINE):
    """Polls `look` until it returns a true value; raises Trouble at the deadline."""
    end = time.monotonic() + deadline
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise Trouble(f"timed out after {deadline} s: {what}")
        time.sleep(0.05)  # poll


class Interrupts:
    """The signals that end the demo: the first one raises KeyboardInterrupt, the others are ignored."""

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.delays, self.is_pending = 0, False

    def watch(self):
        for number in self.numbers:
            signal.signal(number, self.handle)

    def ignore(self):
        for number in self.numbers:
            signal.signal(number, signal.SIG_IGN)

    def handle(self, *_):
        self.ignore()
        self.is_pending = True
        self.raise_pending()

    def raise_pending(self):
        if self.is_pending and not self.delays:
            self.is_pending = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def delayed(self):
        """A signal that comes within is raised at the end."""
        self.delays += 1
        try:
            yield
        finally:
            self.delays -= 1
            self.raise_pending()


INTERRUPTS = Interrupts()


def run(*words, **more):
    """Runs a command that must succeed; returns its output. An interrupt waits for the end of the command: Docker may create a
    container after its client was killed, or not waited for, and nothing would remove it."""
    with INTERRUPTS.delayed():
        try:
            command = subprocess.run(
                [*map(str, words)], capture_output=True, text=True, start_new_session=True, timeout=DEADLINE, check=False, **more
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            raise Trouble(f"{' '.join(map(str, words))}: has not ended within {DEADLINE} s") from expired
    if command.returncode:
        raise Trouble(f"{' '.join(map(str, words))}: {(command.stderr or command.stdout).strip()}")
    return command.stdout.strip()


def attempt(*words):
    """Runs a command; its exit status does not matter."""
    subprocess.run([*map(str, words)], capture_output=True, start_new_session=True)


# below the ports that the kernel gives to whoever asks for any, so that none is taken before its program has it
PORTS = iter(range(10_000 + os.getpid() % 20_000, 32_000))
RESERVATIONS = []


def free_port(wanted):
    """Returns the wanted port of the loopback address, or another one if it is in use.

    It is reserved until the demo ends: whoever else asks here for the same port asks for the same abstract socket.
    """
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind(f"\0memledger-port-{wanted}")
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            reservation.close()
            return free_port(next(PORTS))
        RESERVATIONS.append(reservation)
        return wanted


def get(url):
    """Returns the body at a URL; None while nothing responds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


class Program:
    """A program in the background, with its log in a file. Stopped by SIGTERM, then by SIGKILL."""

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
        """Waits until it responds at a URL."""

        def look():
            if self.child.poll() is not None:
                raise Trouble(f"{self.words[0]} has exited; the end of its log:\n{self.tail()}")
            return get(url) is not None

        await_(f"response from {url}", look)

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
    """The demo's own folder, locked while the demo runs. Its name is the demo's mark."""

    def __init__(self):
        # images and cgroups of the demo have this name: of a test, with the run of the tests
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX + os.environ.get("MEMLEDGER_TEST_RUN", "")))
        self.path.chmod(0o755)  # the library and the rules are not secret
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
    """Removes a demo's folder and the mounts in it."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    for mount in reversed([line.split()[1] for line in mounts]):
        if Path(mount).is_relative_to(path):
            attempt("umount", "-l", mount)
    shutil.rmtree(path, ignore_errors=True)


def others():
    """Yields folders of other demos, each with whether that demo is running, which means that its lock is held."""
    for path in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
        try:
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue  # another user's
            with open(os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW), "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read() != SEAL:
                    continue
                yield path, False
        except BlockingIOError:
            yield path, True
        except OSError:
            continue  # not a demo's


@contextlib.contextmanager
def one_at_a_time():
    """Prevents another demo from starting at the same time: both would take the same names and ports."""
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def stop_thread(pid, name):
    """Stops one thread of a process, as a debugger does. Returns a function that resumes it.

    If the demo dies, the kernel resumes the thread.
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
