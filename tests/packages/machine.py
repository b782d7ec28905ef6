"""What the tests of packages share: processes, OOM kills in real containers, and a booted Debian."""

import itertools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 120
_numbers = itertools.count(1)


def unique(what):
    """A name of containers, images, projects of Compose (whose volumes have it too) and cgroups, with the run of the tests in it."""
    return f"mlt-{os.environ.get('MEMLEDGER_TEST_RUN', 'local')}-{os.getpid()}-{next(_numbers)}-{what}"


def output_of(*command, **options):
    """Returns the standard output of a command that must succeed."""
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def eventually(what, check):
    """Calls `check` until it returns something true, and returns that; its last error is the message at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            found, error = check(), None
        except (AssertionError, OSError) as failed:
            found, error = None, failed
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s: {error}"
        time.sleep(0.1)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(address):
    with urllib.request.urlopen(address, timeout=10) as response:
        return response.read().decode()


def oom_kill(name=None):
    """Runs a container that is killed at its own limit, and returns its name. It stays, exited, until `remove`."""
    name = name or unique("train")
    output_of("docker", "run", "-d", "--name", name, "--network", "none", "--memory", "24m", "--memory-swap", "24m", "-v",
              f"{os.environ['MEMLEDGER_TEST_HOG']}:/hog:ro", os.environ["MEMLEDGER_TEST_IMAGE"], "/hog", "eat")
    assert output_of("docker", "wait", name).strip() == "137"
    return name


def remove(*names):
    subprocess.run(["docker", "rm", "-f", "-v", *names], capture_output=True, check=False)


def is_verdict(text, name, verdict="OUT OF MEMORY at its own limit"):
    assert name in text and verdict in text, text
    return True


def counts_kill(metrics, name):
    counts = [line for line in metrics.splitlines()
              if line.startswith("memledger_container_oom_kills_total{") and f'container_name="{name}"' in line]
    assert sum(float(line.split()[-1]) for line in counts) == 1, counts
    return True


class Machine:
    """A Debian root with a running systemd. `run` executes in it."""

    def __init__(self, archive, folder):
        self.root = folder / "root"
        self.name = unique("machine")
        self.root.mkdir()
        output_of("tar", "-C", self.root, "-xf", archive)
        self.log = open(folder / "boot.log", "w")
        boot = ROOT / "tests/packages/boot.sh"
        self.process = subprocess.Popen([boot, self.root, self.name], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                        start_new_session=True)
        try:
            self.pid = eventually("its first process", self._first_process)
            eventually("systemd", lambda: self.status("is-system-running") == "running")
        except BaseException:
            self.stop()
            raise

    def _first_process(self):
        assert self.process.poll() is None, (self.root.parent / "boot.log").read_text()
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        executable = os.readlink(f"/proc/{children[0]}/exe") if children else ""
        return executable.endswith("/systemd") and int(children[0])

    def command(self, *words):
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-n", *(str(word) for word in words)]

    def run(self, *words):
        return output_of(*self.command(*words))

    def status(self, *words):
        """Returns the output of systemctl, whatever its exit status is."""
        done = subprocess.run(self.command("systemctl", *words), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def metrics(self):
        return self.run("curl", "--silent", "--fail", "http://127.0.0.1:10853/metrics")

    def wait_until_ready(self):
        eventually("memledger is ready", lambda: self.run("curl", "--silent", "--fail", "http://127.0.0.1:10853/-/ready"))

    def why(self, name):
        eventually(f"the verdict about {name}", lambda: is_verdict(self.run("memledger", "why", name), name))

    def files(self):
        """Returns all files but those that apt, dpkg, systemd and the log write on their own account."""
        skipped = "proc|sys|dev|run|tmp|var/(log|cache|tmp|lib/(dpkg|systemd|apt))"
        found = self.run("find", "/", "-xdev", "-regextype", "egrep", "-regex", f"/({skipped})", "-prune", "-o", "-print")
        return set(found.splitlines())

    def remove_memledger(self):
        """Removes it, by whatever route it was installed."""
        self.status("disable", "--now", "memledger")
        subprocess.run(self.command("dpkg", "--purge", "memledger"), capture_output=True, check=False)
        shutil.rmtree(self.root / "etc/systemd/system/memledger.service.d", ignore_errors=True)
        self.run("sh", "-c", "find /usr/local -name '*memledger*' -prune -exec rm -r {} +; rm -rf /var/lib/memledger /var/lib/memledger-runs /run/memledger*")
        self.run("systemctl", "daemon-reload")

    def stop(self):
        pid = getattr(self, "pid", None)
        if pid:
            os.kill(pid, signal.SIGKILL)  # ends its whole pid namespace
        else:
            self.process.kill()
        self.process.wait()
        self.log.close()
        eventually("its cgroups go", self._remove_cgroups)
        shutil.rmtree(self.root)

    def _remove_cgroups(self):
        tops = [path for pattern in ("*/", "") for path in pathlib.Path("/sys/fs/cgroup").glob(f"{pattern}{self.name}")]
        for top in tops:
            for folder in sorted(top.rglob("*/"), key=lambda path: len(path.parts), reverse=True):
                folder.rmdir()
            top.rmdir()
        return True
