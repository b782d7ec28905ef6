"""Runs the trainings: as real containers of a Docker engine, or, without one, as real processes in their own cgroups.

The image of the containers is built here from one static program (`tests/hog`), so that nothing has to be pulled.

Not here: what the trainings do (scenes.py).
"""
import contextlib
import hashlib
import os
import signal
import subprocess
import tarfile
from pathlib import Path

from processes import Trouble, attempt, await_, die_with_the_demo, run

LABEL = "memledger.demo"
# of a demo that a test runs: by it the tests find what they left behind
OF_A_TEST = [f"--label=memledger.test.run={os.environ['MEMLEDGER_TEST_RUN']}"] if os.environ.get("MEMLEDGER_TEST_RUN") else []
SOCKET = "/var/run/docker.sock"
DOCKER = ("docker", "-H", f"unix://{SOCKET}")  # the engine of this machine, whatever the client's configuration
MIB = 1 << 20


def engine_answers():
    try:
        run(*DOCKER, "version", "-f", "{{.Server.Version}}")
        return True
    except (Trouble, OSError):
        return False


class Docker:
    """Containers of the local engine, all with the demo's label."""

    kind = "containers in the Docker engine"
    has_names = True

    def __init__(self, folder, hog, names, alone):
        self.mark, self.image = folder.mark, f"memledger-demo:{folder.mark}"
        archive = folder / "image.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(hog, "hog")
        run(*DOCKER, "import", "--change", 'ENTRYPOINT ["/hog"]', archive, self.image)
        archive.unlink()
        # a container of such a name may exist, and with another demo it does
        taken = not alone or set(run(*DOCKER, "ps", "-a", "--format", "{{.Names}}").split()) & set(names)
        self.suffix = f"-{os.getpid()}" if taken else ""
        self.ids = {}  # containers are stopped and removed by id, because their name may belong to another one

    def name(self, training):
        """Returns the name of its container in memledger."""
        return training.name + self.suffix

    def start(self, training):
        name = self.name(training)
        words = [*DOCKER, "run", "-d", "--name", name, "--network", "none", f"--label={LABEL}={self.mark}", *OF_A_TEST]
        words += [f"--memory={training.limit}m", f"--memory-swap={training.limit}m", f"--hostname={training.name[:60]}"]
        words += [f"--env={key}={value}" for key, value in training.settings.items()]
        words += [f"--label={key}={value}" for key, value in training.labels.items()]
        words += [f"--shm-size={training.shm}m"] if training.shm else []
        words += [f"--restart={training.restart}"] if training.restart else []
        self.ids[training.name] = run(*words, self.image, *training.steps).strip()

    def pid(self, training):
        """Returns the pid of its first process; None if it is not running."""
        if training.name not in self.ids:
            return None
        try:
            return int(run(*DOCKER, "inspect", "-f", "{{.State.Pid}}", self.ids[training.name])) or None
        except Trouble:
            return None

    def stop(self, training):
        """Stops the container."""
        if training.name in self.ids:
            attempt(*DOCKER, "stop", "-t", "0", self.ids[training.name])

    def remove(self, training):
        if training.name in self.ids:
            attempt(*DOCKER, "rm", "-f", "-v", self.ids.pop(training.name))

    def clear(self):
        clear_engine(self.mark)


def clear_engine(mark):
    """Removes a demo's containers and image. Removing may fail for a moment, as of a container that the engine just starts."""

    def gone():
        try:
            found = run(*DOCKER, "ps", "-aq", "--filter", f"label={LABEL}={mark}").split()
        except Trouble:
            return False  # a busy engine
        if found:
            attempt(*DOCKER, "rm", "-f", "-v", *found)
        return not found

    with contextlib.suppress(Trouble):
        await_("removal of the demo's containers", gone, 20)
    attempt(*DOCKER, "rmi", "-f", f"memledger-demo:{mark}")


def cgroup_root():
    """Returns the hierarchy with the memory controller, and whether it is cgroup v2."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers")
    if unified.exists() and "memory" in unified.read_text():
        return Path("/sys/fs/cgroup"), True
    return Path("/sys/fs/cgroup/memory"), False


class Cgroup:
    """A cgroup below the demo's own cgroup."""

    def __init__(self, mark, name, limit):
        try:
            self.path = self.make(mark, name, limit)
        except OSError as error:
            raise Trouble(f"creating a cgroup failed: {error}") from error

    @staticmethod
    def make(mark, name, limit):
        path, v2 = cgroup_root()
        for part in (mark, name):
            if v2:
                (path / "cgroup.subtree_control").write_text("+memory")
            path = path / part
            path.mkdir(exist_ok=True)
        # without swap, so that memory over the limit is not swapped out; not every kernel accounts swap
        files = {"memory.max": limit, "memory.swap.max": 0}
        if not v2:
            files = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        for file, mib in files.items():
            if (path / file).exists():
                (path / file).write_text(str(mib * MIB))
        return path

    def spawn(self, words, env):
        """Starts a process that enters the cgroup before it executes the command."""
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return subprocess.Popen(
            ["/bin/sh", "-c", script, str(self.path), *map(str, words)], env={**os.environ, **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=die_with_the_demo,
        )  # fmt: skip

    def remove(self):
        empty(self.path)


def empty(path):
    """Kills the processes in a cgroup, and removes it."""

    def gone():
        try:
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass  # it exited by itself
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    if path.exists():
        await_(f"removal of {path}", gone, 20)


def clear_cgroups(mark):
    """Removes a demo's cgroups and their processes."""
    top = cgroup_root()[0] / mark
    if top.exists():
        for below in [path for path in top.iterdir() if path.is_dir()]:
            empty(below)
        empty(top)


class Cgroups:
    """Processes in cgroups that are named like containers. Names, settings and exit reasons are unknown."""

    kind = "processes in cgroups (no Docker engine responds)"
    has_names = False

    def __init__(self, folder, hog, _names, _alone):
        if os.geteuid():
            raise Trouble("without a Docker engine the demo creates cgroups, which needs root: sudo make demo")
        self.mark, self.hog, self.running = folder.mark, hog, {}

    def identity(self, training):
        return hashlib.sha256(f"{self.mark} {training.name}".encode()).hexdigest()

    def name(self, training):
        return self.identity(training)[:12]

    def start(self, training):
        cgroup = Cgroup(self.mark, self.identity(training), training.limit)
        words = [self.hog, *training.steps]
        if training.shm:
            mount = f'mount -t tmpfs -o size={training.shm}m tmpfs /dev/shm && exec "$0" "$@"'
            words = ["unshare", "-m", "--propagation", "private", "/bin/sh", "-c", mount, *words]
        self.running[training.name] = (cgroup, cgroup.spawn(words, training.settings))

    def pid(self, training):
        _, child = self.running.get(training.name, (None, None))
        return child.pid if child and child.poll() is None else None

    def stop(self, training):
        self.remove(training)

    def remove(self, training):
        if training.name in self.running:
            cgroup, child = self.running.pop(training.name)
            cgroup.remove()
            child.wait()

    def clear(self):
        for cgroup, child in self.running.values():
            cgroup.remove()
            child.wait()
        self.running.clear()
