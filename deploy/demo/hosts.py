"""The three hosts of the demo, each monitored by its own memledger: the shipped program, configured by flags only.

* `gpu-host` is this machine with the trainings, and the fake NVML library instead of a driver.
* `plain-host` is this machine too, monitored by a misconfigured memledger: its kernel log is missing, its disk is full, its runtime
  disappears, it is stopped. These failures are real.
* `paper-host` is a tree of files recorded on another machine, some of which the demo changes, for conditions that this machine cannot
  have (memory pressure of a container needs cgroup v2) or must not have (it would have to run out of memory).
"""
import contextlib
import json
import os
import re
import shutil
import socket
import threading
from pathlib import Path

from gpus import Gpus
from processes import Program, free_port, run, stop_thread
from stage import LABEL, SOCKET

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = REPOSITORY / "tests/hosts/v2-cgroupfs-psi.jsonl"
# short intervals: in the time-lapse a snapshot is stale after 2 s
SHORT_INTERVALS = ["--sample.interval=500ms", "--pss.interval=1s", "--podman.socket="]
PORT = 10953


class Host:
    """A memledger that can be stopped and started at its address."""

    def __init__(self, name, binary, folder, port, flags):
        self.name, self.binary, self.folder = name, binary, folder / name
        self.folder.mkdir(exist_ok=True)
        self.address = f"127.0.0.1:{free_port(port)}"
        self.url = f"http://{self.address}"
        self.flags = [*SHORT_INTERVALS, f"--reporter.directory={self.folder / 'reporter'}", *flags]
        self.program = None

    def start(self):
        words = [self.binary, "serve", f"--web.listen-address={self.address}", "--local.socket=", *self.flags]
        # environment variables for the user's own memledger must not apply here
        env = {key: value for key, value in os.environ.items() if not key.startswith("MEMLEDGER_")}
        self.program = Program(words, self.folder / "log", env=env)
        self.program.ready(f"{self.url}/-/ready")

    def stop(self):
        if self.program:
            self.program.stop()


class GpuHost(Host):
    """This machine with the trainings and GPUs."""

    def __init__(self, binary, folder, stage, library):
        driver = folder / "driver"
        driver.mkdir()
        mine = driver / "libnvidia-ml.so.1"
        shutil.copyfile(library, mine)
        self.gpus = Gpus(mine)
        flags = [f"--gpu.nvml-library={mine}", "--gpu.interval=500ms", f"--state.path={folder / 'gpu-host/state'}", "--container.logs=all"]
        super().__init__("gpu-host", binary, folder, PORT, flags + of_trainings(stage))


def of_trainings(stage):
    """Returns flags that limit memledger to the demo's containers. Without a runtime the short ids are the names."""
    if stage.has_names:
        return [f"--docker.socket={SOCKET}", f"--container.label={LABEL}={stage.mark}"]
    names = "|".join(stage.name(training) for training in stage.trainings)
    return ["--docker.socket=", f"--container.include=^({names})$"]


class PlainHost(Host):
    """This machine again, misconfigured."""

    def __init__(self, binary, folder, stage, shown):
        base = folder / "plain-host"
        base.mkdir()
        self.log_device = base / "dev/kmsg"
        self.log_device.parent.mkdir()
        self.disk = base / "state"
        self.disk.mkdir()
        run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", self.disk)
        self.relay = Relay(base / "docker.sock") if stage.has_names else None
        self.web = base / "web.yml"
        self.allow()
        flags = ["--no-collector.gpu", f"--path.devfs={self.log_device.parent}", f"--state.path={self.disk}"]
        flags += [f"--web.config.file={self.web}"]
        flags += ["--oom.kernel-log=device", f"--docker.socket={self.relay.path if self.relay else ''}"]
        flags += [f"--container.include=^{re.escape(stage.name(shown))}$"]
        super().__init__("plain-host", binary, folder, PORT + 1, flags)

    def start(self):
        if self.relay:
            self.relay.open()
        super().start()

    def stop(self):
        super().stop()
        if self.relay:
            self.relay.close()

    def lose_kernel_log(self, lost):
        """Removes the device, as in a container without it, or restores it."""
        if not lost:
            self.log_device.symlink_to("/dev/kmsg")
        elif self.log_device.exists():
            self.log_device.unlink()
            self.stop()  # an open file stays open
            self.start()

    def fill_disk(self):
        """Fills the disk: the journal of each commit needs space."""
        with contextlib.suppress(OSError), (self.disk / "other-data").open("wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()

    def empty_disk(self):
        (self.disk / "other-data").unlink(missing_ok=True)

    def allow(self):
        """Writes a web configuration without authentication."""
        self.web.write_text("{}\n")

    def forbid(self, user):
        self.web.write_text(f"basic_auth_users:\n  {user}\n")

    def freeze(self):
        """Stops its sampling, as if reading a kernel file hung. Returns a function that resumes it."""
        return stop_thread(self.program.pid, "cycle")


class Relay:
    """A socket in front of Docker's, which can be closed without harm to the engine."""

    def __init__(self, path):
        self.path, self.listener, self.open_ones = path, None, set()

    def open(self):
        if self.listener:
            return
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        threading.Thread(target=self.serve, args=(self.listener,), daemon=True).start()

    def serve(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            engine = socket.socket(socket.AF_UNIX)
            try:
                engine.connect(SOCKET)
            except OSError:
                client.close()
                continue
            self.open_ones |= {client, engine}
            for source, sink in ((client, engine), (engine, client)):
                threading.Thread(target=self.pump, args=(source, sink), daemon=True).start()

    def pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self.open_ones.discard(end)

    def close(self):
        if not self.listener:
            return
        self.path.unlink(missing_ok=True)
        for end in (self.listener, *tuple(self.open_ones)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.listener = None
        self.open_ones.clear()


class PaperHost(Host):
    """A recorded host, of which some files change. A file is changed in place, because memledger keeps it open."""

    def __init__(self, binary, folder):
        base = folder / "paper-host"
        base.mkdir()
        for line in RECORDED.read_text().splitlines():
            self.unpack(base, json.loads(line))
        self.meminfo = base / "proc/meminfo"
        self.plain = self.meminfo.read_text()
        self.limited = next(
            path.parent for path in base.glob("cgroup/docker/*/memory.max") if path.read_text().strip() != "max"
        )
        flags = [f"--path.{key}={base / name}" for key, name in
                 (("procfs", "proc"), ("sysfs", "sys"), ("cgroupfs", "cgroup"), ("devfs", "dev"))]  # fmt: skip
        flags += ["--docker.socket=", "--oom.kernel-log=off", "--state.path=", "--no-collector.gpu"]
        super().__init__("paper-host", binary, folder, PORT + 2, flags)
        (self.limited / "memory.high").write_text(f"{int((self.limited / 'memory.max').read_text()) * 9 // 10}\n")
        self.usage = int((self.limited / "memory.current").read_text())
        self.on, self.stalled, self.before = set(), 2.0, 0.0
        self.write(0.0)

    @staticmethod
    def unpack(base, entry):
        path = base / entry["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.get("dir"):
            path.mkdir(exist_ok=True)
        elif "link" in entry:
            path.symlink_to(entry["link"])
        else:
            path.write_bytes(entry["text"].encode("latin-1"))

    @property
    def container(self):
        return self.limited.name[:12]

    def write(self, now):
        """Writes the state for this many seconds after the start. When stalled, tasks wait for memory 40 % of the time, at the limit."""
        passed, self.before = now - self.before, now
        self.stalled += passed * (0.4 if "stalls" in self.on else 0.001)
        text = "".join(
            f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={int(self.stalled * share * 1e6):014}\n"
            for kind, share in (("some", 1.5), ("full", 1))
        )
        for path in (self.limited / "memory.pressure", self.meminfo.parent / "pressure/memory"):
            in_place(path, text)
        limit = int((self.limited / "memory.max").read_text())
        used = limit if "stalls" in self.on else self.usage
        in_place(self.limited / "memory.current", f"{used:0{len(str(limit))}}\n")
        available = int(re.search(r"MemAvailable: +(\d+)", self.plain)[1])
        total = int(re.search(r"MemTotal: +(\d+)", self.plain)[1])
        if "full" in self.on:
            taken = available - total // 25  # 96 % are in use
            in_place(self.meminfo, shifted(self.plain, taken))
        else:
            in_place(self.meminfo, self.plain)


def shifted(meminfo, kib):
    """Returns the text after processes allocated this much of free and available memory."""
    free = int(re.search(r"MemFree: +(\d+)", meminfo)[1])
    from_free = min(kib, free - 20_000)
    for name, change in (("MemFree", -from_free), ("MemAvailable", -kib), ("AnonPages", from_free)):
        meminfo = re.sub(
            rf"(?m)^{name}:( +)(\d+)", lambda m: f"{name}:{int(m[2]) + change:>{len(m[1] + m[2])}}", meminfo
        )
    return meminfo


def in_place(path, text):
    """Overwrites the file with one write of the same length: a reader sees the old text or the new one."""
    if not path.exists() or len(path.read_text()) != len(text):
        path.write_text(text)
        return
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), text.encode(), 0)


