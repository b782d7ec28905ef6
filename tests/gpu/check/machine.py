"""What the check has of the machine: cgroups, processes in them, a running memledger, nvidia-smi."""
import glob
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

MIB = 1 << 20
PATIENCE_S = 20


def text(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def wait_for(condition, seconds=PATIENCE_S, pause=0.1):
    """Polls until `condition` returns a true value, which is returned; None at the deadline."""
    until = time.monotonic() + seconds
    while True:
        found = condition()
        if found or time.monotonic() > until:
            return found
        time.sleep(pause)


class Cgroups:
    """Cgroups that look like containers of Docker's cgroupfs driver. `why_not` is the reason if there are none. Each is named in
    the file `record` when it is made."""

    def __init__(self, record):
        self.record = record
        self.made, self.mounted, self.why_not = [], None, None
        self.root, self.kind = self._find()
        self.flags = []
        if self.root is None:
            self.why_not = "no cgroup file system with a memory controller, and none could be mounted"
            return
        try:
            parent = os.path.join(self.root, "docker")
            if self.kind == "v2":
                self._enable(self.root)
            if not os.path.isdir(parent):
                os.mkdir(parent)
                self.made.append(parent)
            if self.kind == "v2":
                self._enable(parent)
        except OSError as error:
            self.why_not = f"{error.strerror}: {error.filename}"
        if self.mounted:
            self.flags = [f"--path.cgroupfs={self.mounted[0]}"]

    def _find(self):
        for root, kind in (("/sys/fs/cgroup", "v2"), ("/sys/fs/cgroup/memory", "v1")):
            if kind == "v2" and "memory" in text(f"{root}/cgroup.controllers").split():
                return root, kind
            if kind == "v1" and os.path.exists(f"{root}/memory.usage_in_bytes"):
                return root, kind
        return self._mount()

    def _mount(self):
        """The memory controller's file system in a folder of our own: v2 there, else v1 in `memory` below it."""
        place = tempfile.mkdtemp(prefix="memledger-check-cgroup-")
        below = os.path.join(place, "memory")
        for target, kind, options in ((place, "v2", ["-t", "cgroup2"]), (below, "v1", ["-t", "cgroup", "-o", "memory"])):
            os.makedirs(target, exist_ok=True)
            if subprocess.run(["mount", *options, "none", target], capture_output=True).returncode:
                continue
            self.mounted = (place, target)
            if kind == "v1" or "memory" in text(f"{place}/cgroup.controllers").split():
                return target, kind
            self._unmount()
            os.mkdir(place)
        shutil.rmtree(place, ignore_errors=True)
        return None, None

    def _unmount(self):
        place, target = self.mounted
        self.mounted = None
        subprocess.run(["umount", target], capture_output=True)
        for path in dict.fromkeys((target, place)):
            try:
                os.rmdir(path)
            except OSError:
                pass
        return not os.path.exists(place)

    @staticmethod
    def _enable(path):
        """The memory controller for what lies below. Where that is rejected the cgroups still have processes."""
        try:
            with open(f"{path}/cgroup.subtree_control", "w") as file:
                file.write("+memory")
        except OSError:
            pass

    def container(self):
        """The id of a new one; None where there are none."""
        if self.why_not:
            return None
        id = secrets.token_hex(32)
        path = os.path.join(self.root, "docker", id)
        self.made.append(path)  # before it exists: a signal may come between
        try:
            os.mkdir(path)
        except OSError as error:
            self.why_not = f"{error.strerror}: {error.filename}"
            return None
        with open(self.record, "a") as file:
            file.write(path + "\n")
        return id

    def path(self, id):
        return os.path.join(self.root, "docker", id)

    def pids(self, id):
        return [int(line) for line in text(f"{self.path(id)}/cgroup.procs").split()]

    def remove(self):
        """Ends what still runs in the cgroups made here, and removes them."""
        left = []
        for path in reversed(self.made):
            def gone():
                for pid in text(f"{path}/cgroup.procs").split():
                    try:
                        os.kill(int(pid), signal.SIGKILL)
                    except OSError:
                        pass
                try:
                    os.rmdir(path)
                except FileNotFoundError:
                    return True
                except OSError:
                    return False
                return True
            # the level above has no process of ours: another may use it by now
            if path.endswith("/docker"):
                try:
                    os.rmdir(path)
                except OSError:
                    left.append(path)
            elif not wait_for(gone, 10):
                left.append(path)
        self.made = []
        if self.mounted and not self._unmount():
            left.append("a mounted cgroup file system")
        return left


class Process:
    """A process of ours, in a container if there is an id."""

    all = []

    def __init__(self, command, cgroups, id, env=None, **streams):
        if id:
            script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            command = ["/bin/sh", "-c", script, cgroups.path(id), *command]
        self.container = id
        self.child = subprocess.Popen(command, env=env, **streams)
        Process.all.append(self)

    @property
    def pid(self):
        return self.child.pid

    def end(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()

    @classmethod
    def end_all(cls):
        for process in cls.all:
            process.end()


class Worker(Process):
    """work.py: a PyTorch process that runs commands. Each response has a deadline."""

    def __init__(self, python, cgroups, id, env):
        program = os.path.join(os.path.dirname(__file__), "work.py")
        self.log = tempfile.TemporaryFile()
        super().__init__([python, "-u", program], cgroups, id, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=self.log, text=True)
        self.first = None

    def start(self):
        self.first = self._answer(120)
        return self.first

    def do(self, what, seconds=60, **order):
        self.child.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self.child.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds):
        line = []
        reader = threading.Thread(target=lambda: line.append(self.child.stdout.readline()), daemon=True)
        reader.start()
        reader.join(seconds)
        if not line or not line[0]:
            self.log.seek(0)
            tail = self.log.read().decode("utf-8", "replace")[-2000:]
            raise RuntimeError(f"PyTorch process {self.pid} did not respond within {seconds} s: {tail}")
        return json.loads(line[0])

    def finish(self):
        """Lets it end by itself."""
        try:
            self.child.stdin.write('{"do": "end"}\n')
            self.child.stdin.close()
            self.child.wait(20)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self.end()


class Background(threading.Thread):
    """A command that runs beside the check. `result` waits for its end, and raises its exception."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self.work, self.value, self.error = run, None, None
        self.start()

    def run(self):
        try:
            self.value = self.work()
        except Exception as error:  # raised again by `result`
            self.error = error

    def result(self):
        self.join()
        if self.error:
            raise self.error
        return self.value


LINE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-z0-9_]+)="((?:[^"\\]|\\.)*)"')


class Metrics:
    """One scrape."""

    def __init__(self, text):
        self.text = text
        self.series = []
        for line in text.splitlines():
            found = LINE.match(line)
            if found:
                self.series.append((found[1], dict(LABEL.findall(found[2] or "")), float(found[3])))

    def all(self, family, **labels):
        return [(own, value) for name, own, value in self.series
                if name == family and all(own.get(key, "") == str(want) for key, want in labels.items())]

    def get(self, family, **labels):
        """The value of the one series; None if there is none or there are several."""
        found = self.all(family, **labels)
        return found[0][1] if len(found) == 1 else None

    def sum(self, family, **labels):
        return sum(value for _, value in self.all(family, **labels))

    def has(self, family):
        return f"# TYPE {family} " in self.text


class Memledger:
    """The program that is checked, on a port of its own."""

    def __init__(self, binary, out, flags):
        self.log_path = os.path.join(out, "memledger.log")
        log = open(self.log_path, "wb")
        always = ["--web.listen-address=127.0.0.1:0", "--docker.socket=", "--podman.socket=", "--state.path=",
                  "--oom.kernel-log=off", "--sample.interval=250ms", "--gpu.interval=250ms", "--web.enable-api"]
        self.child = subprocess.Popen([binary, "serve", *always, *flags], stdout=log, stderr=log)
        self.address = None

    def start(self):
        def listening():
            found = re.search(r"message=listening address=(\S+)", text(self.log_path))
            return found and found[1]
        self.address = wait_for(listening)
        if not self.address:
            raise RuntimeError(f"memledger does not listen: {text(self.log_path)[-2000:]}")
        if not wait_for(self.is_ready):
            raise RuntimeError(f"memledger has no first snapshot: {text(self.log_path)[-2000:]}")

    def is_ready(self):
        """Returns whether the first snapshot exists; until then /metrics returns 503."""
        try:
            return bool(self.get("/-/ready"))
        except urllib.error.HTTPError:
            return False

    def get(self, path):
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as response:
            return response.read().decode()

    def metrics(self):
        return Metrics(self.get("/metrics"))

    def fresh(self):
        """A scrape whose cycle began after this call, and whose GPU reading did too unless the machine is very busy."""
        stamp = lambda metrics: metrics.get("memledger_snapshot_timestamp_seconds")
        seen = {stamp(self.metrics())}

        def newer():
            metrics = self.metrics()
            seen.add(stamp(metrics))
            return metrics if len(seen) > 4 else None
        return wait_for(newer, pause=0.05) or self.metrics()

    def containers(self):
        return json.loads(self.get("/api/v1/containers"))["containers"]

    def end(self):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()


class Smi:
    """nvidia-smi. `None`: it does not report the value."""

    def __init__(self, program):
        self.program = program

    def query(self, what, fields):
        command = [self.program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        return [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]

    @staticmethod
    def mib(cell):
        return int(cell) * MIB if cell.isdigit() else None

    def processes(self, gpu_uuid):
        """Bytes by pid on one GPU."""
        rows = self.query("compute-apps", ["gpu_uuid", "pid", "used_gpu_memory"])
        return {int(row["pid"]): self.mib(row["used_gpu_memory"]) for row in rows
                if row["gpu_uuid"] == gpu_uuid and row["pid"].isdigit()}

    def gpus(self):
        return self.query("gpu", ["uuid", "name", "driver_version", "memory.total", "memory.used", "memory.free",
                                "memory.reserved", "mig.mode.current"])


def in_first_pid_namespace():
    return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"


def facts():
    """What the machine is, for the report."""
    release = text("/proc/sys/kernel/osrelease").strip()
    return {"kernel": release, "pid namespace": "the host's" if in_first_pid_namespace() else "not the host's",
            "device nodes": " ".join(sorted(os.path.basename(node) for node in glob.glob("/dev/nvidia*"))) or "none"}
