"""The check itself; tests/gpu/check.sh describes it and how to run it.

Every comparison has a tolerance and can fail. A part that cannot run on this machine is skipped, and its reason stands in
the report. A part that breaks is a failure of its own; the others go on.
"""
import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import cost  # noqa: E402
import trees  # noqa: E402
from machine import Background, Cgroups, Memledger, Process, Smi, Worker, facts, in_first_pid_namespace, text, wait_for  # noqa: E402
from report import Report, size  # noqa: E402

MIB = 1 << 20
LIMIT_S = 440
# nvidia-smi rounds to MiB, and two readings are never of the same moment
PROCESS_TOLERANCE = 4 * MIB
DEVICE_TOLERANCE = 16 * MIB
# CUDA and NVML count what the driver keeps for itself differently
TOTAL_TOLERANCE = 512 * MIB
# what a CUDA context may take beside torch's own memory
OVERHEAD = (16 * MIB, 3072 * MIB)
PARTS = ["known", "devices", "two", "inside", "tracked", "analyze", "spike", "leak", "compute", "exhaust", "cleanup", "cost", "ends", "trees"]

#: Of a part that takes longer than others.
SECONDS = {"cost": 90, "analyze": 150}

PROCESS = "memledger_process_gpu_memory_used_bytes"
CONTAINER = "memledger_container_gpu_memory_used_bytes"
HOLDER = "memledger_container_gpu_memory_holder_bytes"
HOST = "memledger_gpu_host_processes_memory_bytes"
REST = "memledger_gpu_memory_unattributed_bytes"


def keep_output(command, path):
    """What a program prints, beside the report. That it fails is no result."""
    with open(path, "wb") as file:
        try:
            subprocess.run(command, stdout=file, stderr=file, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            file.write(str(error).encode())


def nvml_elsewhere():
    """Where the driver's library lies, if the loader does not find it by its name."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        return None
    except OSError:
        places = ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
        return next((path for place in places if os.path.exists(path := f"{place}/libnvidia-ml.so.1")), None)


class Scraper(threading.Thread):
    """Scrapes in a loop, and checks what must be true in each scrape."""

    def __init__(self, memledger):
        super().__init__(daemon=True)
        self.memledger, self.stopped = memledger, threading.Event()
        self.scrapes, self.unbalanced, self.garbage, self.failed, self.errors = 0, [], [], 0, []

    def run(self):
        while not self.stopped.wait(0.15):
            try:
                self.check(self.memledger.metrics())
            except OSError as error:
                self.errors.append(str(error))

    def check(self, metrics):
        self.scrapes += 1
        self.failed += metrics.get("memledger_collector_success", collector="gpu") != 1
        for labels, used in metrics.all("memledger_gpu_memory_used_bytes", gpu_instance_id=""):
            gpu = {"gpu_uuid": labels["gpu_uuid"]}
            rest = metrics.get(REST, **gpu, gpu_instance_id="")
            races = metrics.get("memledger_gpu_memory_accounting_conflicts_total", **gpu, gpu_instance_id="")
            attributed = metrics.sum(CONTAINER, **gpu) + metrics.sum(HOST, **gpu)
            # where the readings raced, nothing is unattributed and the race is counted
            if rest is None or (used != attributed + rest and not (rest == 0 and races)):
                self.unbalanced.append(f"used {used:.0f}, attributed {attributed:.0f}, unattributed {rest}")
        for family, labels, value in metrics.series:
            if value >= 2 ** 62 or (family.endswith("_bytes") and value < 0):
                self.garbage.append(f"{family} {labels} {value}")


class Check:
    def __init__(self, options):
        self.options, self.out, self.python = options, options.out, sys.executable
        self.report, self.began = Report(), time.monotonic()
        self.env = dict(os.environ)
        if options.stand_in:
            self.env["PYTHONPATH"] = options.stand_in
            self.env["STANDIN_STATE"] = options.nvml_library + ".json"
            os.environ["STANDIN_STATE"] = self.env["STANDIN_STATE"]
        # the path of a socket has at most 107 bytes, and that of the report may have more
        self.reporter = tempfile.mkdtemp(prefix="memledger-check-reporter-")
        record = os.path.join(self.out, "cgroups.txt")
        open(record, "w").close()
        self.cgroups, self.smi = Cgroups(record), Smi(options.nvidia_smi)
        self.memledger = self.scraper = self.uuid = None
        self.torch_version, self.python_version = "", platform.python_version()
        self.workers, self.baseline, self.names_processes, self.launched = {}, None, False, False

    def note(self, words):
        self.report.notes.append(words)
        print(f"         {words}", flush=True)

    def compare(self, name, got, wanted, tolerance, note=""):
        state = "ok" if None not in (got, wanted) and abs(got - wanted) <= tolerance else "FAILED"
        return self.report.add(name, state, size(got), f"{size(wanted)} ± {size(tolerance)}", note)

    def between(self, name, got, least, most, note="", show=size):
        state = "ok" if got is not None and least <= got <= most else "FAILED"
        return self.report.add(name, state, show(got) if got is not None else "none",
                               f"{show(least)} to {show(most)}", note)

    def compare_text(self, name, got, wanted, note=""):
        return self.report.add(name, "ok" if got == wanted else "FAILED", got, wanted, note)

    def skip(self, name, why):
        self.report.add(name, "skipped", note=why)

    def guarded(self, part, seconds, run):
        """Runs a part if there is time for it; its failure is its own."""
        self.report.part = part
        left = LIMIT_S - (time.monotonic() - self.began)
        if left < seconds:
            return self.skip("all of it", f"only {left:.0f} s are left, it may take {seconds} s")
        try:
            run()
        except Exception as error:  # whatever breaks is a result, and the others go on
            self.report.add("it ran to its end", "FAILED", f"{type(error).__name__}: {error}")
            traceback.print_exc()

    # -- what memledger, nvidia-smi and torch say -------------------------------------------------------------------

    def start(self):
        self.report.part = "start"
        self.report.facts = {**facts(), "cgroups": self.cgroups.why_not or f"{self.cgroups.kind} at {self.cgroups.root}",
                             "python": self.python_version}
        if self.options.stand_in:
            self.report.facts = {"stand-in": "yes", **self.report.facts}
        if self.cgroups.why_not:
            self.note(f"no cgroups that look like containers: {self.cgroups.why_not}. All processes are the host's, and "
                      "what concerns containers is skipped")
        gpu = self.smi.gpus()[0]
        self.uuid = gpu["uuid"]
        self.report.facts.update({"GPU": gpu["name"], "driver": gpu["driver_version"], "MIG": gpu["mig.mode.current"]})
        # PyTorch may count GPUs in another order
        self.env["CUDA_VISIBLE_DEVICES"] = self.uuid
        self.baseline = self.smi.mib(gpu["memory.used"])
        self.control = f"--local.socket={self.reporter}/control.sock"
        flags = [*self.cgroups.flags, f"--reporter.directory={self.reporter}"]
        library = self.options.nvml_library or nvml_elsewhere()
        if library:
            flags.append(f"--gpu.nvml-library={library}")
        if not self.options.stand_in:
            keep_output([self.options.nvidia_smi, "-q"], os.path.join(self.out, "nvidia-smi-q.txt"))
        keep_output([self.options.binary, "doctor", "--all", "--state.path=", *flags], os.path.join(self.out, "doctor.txt"))
        self.memledger = Memledger(self.options.binary, self.out, [*flags, self.control])
        self.memledger.start()
        first = wait_for(lambda: self.memledger.metrics().get("memledger_gpu_info", gpu_uuid=self.uuid,
                                                              gpu_instance_id=""), 30)
        if not self.compare_text("the GPU is shown", "yes" if first else "no", "yes"):
            self.note(f"memledger's log: {text(self.memledger.log_path)[-1500:]}")
        version = self.memledger.metrics().all("memledger_build_info")
        self.report.facts["memledger"] = " ".join(version[0][0].values()) if version else "?"
        self.scraper = Scraper(self.memledger)
        self.scraper.start()

    def launch(self):
        """Four PyTorch processes at once: two in one container, one in another, one in none."""
        a, b = self.cgroups.container(), self.cgroups.container()
        places = {"first": a, "second": a, "other": b, "host": None}
        # as in a container that mounts the directory: nothing else makes them report
        paths = [os.path.join(self.reporter, "python"), self.env.get("PYTHONPATH")]
        env = {**self.env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        for name, place in places.items():
            self.workers[name] = Worker(self.python, self.cgroups, place, env)
        for worker in self.workers.values():
            worker.start()
        stats = self.workers["first"].first
        self.torch_version = stats["version"]
        self.report.facts.update({"torch": stats["version"], "CUDA of torch": stats["cuda"]})
        listed = wait_for(lambda: self.workers["first"].pid in self.smi.processes(self.uuid), 5)
        self.names_processes = bool(listed) and in_first_pid_namespace()
        if not listed:
            self.note("nvidia-smi does not list our processes by the pids that they have here (a sandbox, or another pid "
                      "namespace): what concerns processes is skipped")
        elif not in_first_pid_namespace():
            self.note("not the host's pid namespace: memledger is right to attribute nothing")
        self.launched = True
        if not self.names_processes:
            rows = self.memledger.fresh().all(PROCESS, gpu_uuid=self.uuid)
            self.compare_text("memledger names no process either", str(len(rows)), "0")

    def needs_processes(self):
        if not self.names_processes:
            self.skip("all of it", "the driver lists no processes that exist here")
        return self.names_processes

    def needs_containers(self, name):
        if self.cgroups.why_not:
            self.skip(name, f"no cgroups: {self.cgroups.why_not}")
        return not self.cgroups.why_not

    def of_process(self, metrics, worker):
        return metrics.get(PROCESS, gpu_uuid=self.uuid, pid=worker.pid)

    def settle(self, worker):
        """Waits until memledger shows what nvidia-smi shows of a process. Returns both, whether they agree or not."""
        def read():
            smi = self.smi.processes(self.uuid).get(worker.pid)
            metrics = self.memledger.fresh()
            read.last = (metrics, smi)
            ours = self.of_process(metrics, worker)
            return None not in (ours, smi) and abs(ours - smi) <= PROCESS_TOLERANCE
        wait_for(read, 12 if self.options.stand_in else 8)
        return read.last

    def compare_process(self, name, worker):
        metrics, smi = self.settle(worker)
        self.compare(f"{name}: as nvidia-smi", self.of_process(metrics, worker), smi, PROCESS_TOLERANCE)
        return self.of_process(metrics, worker)

    # -- the parts ----------------------------------------------------------------------------------------------------

    def known(self):
        """Known amounts: against nvidia-smi, against torch's reserved, and their growth."""
        if not self.needs_processes():
            return
        worker = self.workers["first"]
        one = worker.do("alloc", name="one", mib=1024)
        ours = self.compare_process("1 GiB", worker)
        if ours is not None:
            self.between("1 GiB: context beside torch's reserved", ours - one["reserved"], *OVERHEAD)
        two = worker.do("alloc", name="two", mib=2048)
        more = self.compare_process("3 GiB", worker)
        self.compare("growth by 2 GiB, as torch's reserved", more - ours if None not in (more, ours) else None,
                     two["reserved"] - one["reserved"], PROCESS_TOLERANCE)
        worker.do("free", name="two")
        less = self.compare_process("back at 1 GiB", worker)
        self.compare("falls by 2 GiB", more - less if None not in (more, less) else None, 2048 * MIB, PROCESS_TOLERANCE)

    def devices(self):
        """The memory of the device: against nvidia-smi and against CUDA's own total and free."""
        stats = self.workers["host"].do("stats")
        smi = next(gpu for gpu in self.smi.gpus() if gpu["uuid"] == self.uuid)
        metrics = self.memledger.fresh()
        part = {name: metrics.get(f"memledger_gpu_memory_{name}_bytes", gpu_uuid=self.uuid, gpu_instance_id="")
                for name in ("total", "used", "free", "reserved")}
        for name, value in part.items():
            wanted = self.smi.mib(smi[f"memory.{name}"])
            if wanted is None:
                self.skip(f"{name}: as nvidia-smi", f"nvidia-smi reports {smi[f'memory.{name}']}")
            else:
                self.compare(f"{name}: as nvidia-smi", value, wanted, DEVICE_TOLERANCE)
        if None not in part.values():
            self.compare("total = used + free + reserved", part["used"] + part["free"] + part["reserved"],
                         part["total"], 0)
        self.compare("total: as CUDA's, which leaves out what is reserved",
                     part["total"] - (part["reserved"] or 0) if part["total"] else None, stats["total"], TOTAL_TOLERANCE)
        self.compare("free: as CUDA's", part["free"], stats["free"], TOTAL_TOLERANCE)

    def two(self):
        """Two processes of one container, one of another, one of none, on one GPU."""
        if not self.needs_processes():
            return
        for name, mib in (("second", 512), ("other", 768), ("host", 256)):
            self.workers[name].do("alloc", name="two", mib=mib)
        for name in ("second", "other", "host"):
            self.compare_process(name, self.workers[name])
        metrics = self.memledger.fresh()
        own = {name: self.of_process(metrics, worker) or 0 for name, worker in self.workers.items()}
        if self.needs_containers("sums of containers"):
            a, b = (self.workers[name].container[:12] for name in ("first", "other"))
            of = lambda family, name: metrics.get(family, gpu_uuid=self.uuid, container_name=name)
            smi = self.smi.processes(self.uuid)
            both = sum(smi.get(self.workers[name].pid) or 0 for name in ("first", "second"))
            self.compare("a container with two processes: as nvidia-smi's sum", of(CONTAINER, a), both,
                         2 * PROCESS_TOLERANCE)
            self.compare("that container: sum of its processes", of(CONTAINER, a), own["first"] + own["second"], 0)
            self.compare("the other container: its one process", of(CONTAINER, b), own["other"], 0)
            self.compare_text("processes of the containers", str([of("memledger_container_gpu_processes", name)
                                                                  for name in (a, b)]), "[2.0, 1.0]")
        else:
            own["host"] = sum(own.values())
        ours = sum(value for labels, value in metrics.all(PROCESS, gpu_uuid=self.uuid) if not labels.get("container_name"))
        self.compare("processes of the host: their sum", metrics.get(HOST, gpu_uuid=self.uuid, gpu_instance_id=""), ours, 0)
        self.between("processes of the host: ours among them", ours, own["host"], 1 << 50)

    def inside(self):
        """What the two processes of a container report of themselves: torch's own figures, and with the rest the driver's."""
        if not self.needs_processes() or not self.needs_containers("all of it"):
            return
        workers = [self.workers[name] for name in ("first", "second")]
        for worker, mib in zip(workers, (512, 384)):
            worker.do("alloc", name="tensors", mib=mib)
        workers[0].do("alloc", name="cache", mib=256)
        workers[0].do("drop", name="cache")
        stats = [worker.do("stats") for worker in workers]
        tensors = sum(one["allocated"] for one in stats)
        wanted = {"tensors": tensors, "torch_cache": sum(one["reserved"] for one in stats) - tensors, "not_reporting": 0}
        labels = {"gpu_uuid": self.uuid, "container_name": workers[0].container[:12]}

        def read():
            self.settle(workers[0])
            metrics = self.settle(workers[1])[0]
            holders = {own["holder"]: value for own, value in metrics.all(HOLDER, **labels)}
            read.last = (metrics, holders)
            return all(holders.get(holder) == value for holder, value in wanted.items())
        wait_for(read, 10)
        metrics, holders = read.last
        for holder, value in wanted.items():
            self.compare(f"{holder}: as torch's", holders.get(holder), value, 0)
        self.between("outside of torch: two contexts", holders.get("outside_torch"), *(2 * bytes for bytes in OVERHEAD))
        smi = self.smi.processes(self.uuid)
        together = sum(smi.get(worker.pid) or 0 for worker in workers)
        self.compare("tensors, cache and outside together: as nvidia-smi's sum",
                     sum(holders.values()) if holders else None, together, 2 * PROCESS_TOLERANCE)
        rejected = {own["reason"]: count for own, count in metrics.all("memledger_reporter_rejected_total") if count}
        rejected.pop("no_container", None)  # the process of the host
        self.compare_text("every message of torch's processes was accepted", str(rejected or "yes"), "yes")
        for worker in workers:
            worker.do("free", name="tensors")

    def spike(self):
        """300 ms at 3 GiB more, which a scrape would miss and the peak must not."""
        if not self.needs_processes():
            return
        worker = self.workers["other"]
        before = self.settle(worker)[0]
        # in the dry run longer: other tests keep the machine busy, and a late sample would be no finding
        stats = worker.do("spike", mib=3072, ms=1500 if self.options.stand_in else 300)
        metrics = self.settle(worker)[0]
        self.note(f"the spike took {stats['took_ms']} ms")
        self.compare("after it, as before it", self.of_process(metrics, worker), self.of_process(before, worker),
                     PROCESS_TOLERANCE)
        wanted = (self.of_process(before, worker) or 0) + 3072 * MIB
        places = {"process": {"pid": worker.pid}, "container": {"container_name": (worker.container or "")[:12]}}
        for scope, labels in places.items():
            for kind in ("peak", "recent_peak"):
                family = f"memledger_{scope}_gpu_memory_{kind}_bytes"
                if not metrics.has(family):
                    self.skip(f"{kind} of the {scope}", f"this memledger has no {family}")
                elif scope == "process" or self.needs_containers(f"{kind} of the {scope}"):
                    self.compare(f"{kind} of the {scope}", metrics.get(family, gpu_uuid=self.uuid, **labels), wanted,
                                 PROCESS_TOLERANCE)

    def leak(self):
        """Eight times 128 MiB more: every step up, none down, the end as torch's reserved."""
        if not self.needs_processes():
            return
        worker, seen = self.workers["second"], []
        before = self.of_process(self.settle(worker)[0], worker)
        begin = worker.do("stats")["reserved"]
        leaking = Background(lambda: worker.do("leak", mib=128, times=8, ms=1000 if self.options.stand_in else 400))
        while leaking.is_alive():
            seen.append(self.of_process(self.memledger.metrics(), worker))
            time.sleep(0.1)
        after = self.of_process(self.settle(worker)[0], worker)
        seen = [value for value in seen if value is not None] + [after or 0]
        self.compare_text("every reading at least the one before", str(sorted(seen) == seen), "True",
                          f"{len(set(seen))} different values")
        self.between("different values seen on the way", len(set(seen)), 4, 64, show=str)
        self.compare("growth, as torch's reserved", after - before if None not in (after, before) else None,
                     leaking.result()["reserved"] - begin, PROCESS_TOLERANCE)

    def compute(self):
        """Five seconds of work: utilisation, where this memledger has it."""
        families = ["memledger_gpu_utilization_ratio", "memledger_process_gpu_utilization_ratio",
                    "memledger_container_gpu_utilization_ratio"]
        most, worker = dict.fromkeys(families), self.workers["first"]
        working = Background(lambda: worker.do("compute", for_s=5))
        while working.is_alive():
            metrics = self.memledger.metrics()
            container = worker.container[:12] if worker.container else None
            for family, labels in zip(families, ({"gpu_instance_id": ""}, {"pid": worker.pid},
                                                 {"container_name": container})):
                most[family] = max([value for _, value in metrics.all(family, gpu_uuid=self.uuid, **labels)]
                                   + [most[family] if most[family] is not None else -1])
            time.sleep(0.2)
        working.result()
        metrics = self.memledger.metrics()
        for family in families:
            if not metrics.has(family) and most[family] in (None, -1):
                self.skip(family, "this memledger has no such family, or the driver gives none")
            else:
                self.between(f"{family}: the most that was seen", most[family], 0.3, 1.0, show=lambda value: f"{value:.2f}")

    def tracked(self):
        """The exact peaks of operations, in a process of its own."""
        for name, got, wanted in self.lines_of("tracked.py", 90):
            self.compare(f"peak {name}", got, wanted, 0)

    def analyze(self):
        """What is said of trainings before they run, against what they take."""
        for name, got, least, most, words in self.lines_of("estimates.py", 150):
            self.between(name, got, least, most, words)

    def lines_of(self, program, seconds):
        """The JSON lines of a program beside this one, which has memledger's client."""
        paths = [os.path.join(self.reporter, "python"), self.env.get("PYTHONPATH")]
        env = {**self.env, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MEMLEDGER_DEBUG": "1"}
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), program)
        ended = subprocess.run([self.python, path], env=env, capture_output=True, text=True, timeout=seconds)
        self.compare_text("the program ended well", str(ended.returncode), "0", ended.stderr.strip()[-600:])
        return [json.loads(line) for line in ended.stdout.splitlines()]

    def exhaust(self):
        """Takes all memory there is, until PyTorch has no more."""
        if not self.needs_processes():
            return
        worker = self.workers["other"]
        before = self.of_process(self.settle(worker)[0], worker)
        stats = worker.do("exhaust", 90, mib=1024, ms=2000 if self.options.stand_in else 500)
        self.compare_text("PyTorch ran out of GPU memory", "yes" if stats["error"] and "out of memory" in stats["error"] else
                          str(stats["error"]), "yes", f"torch had reserved {size(stats['at_peak'])}")
        metrics = self.settle(worker)[0]
        self.compare("afterwards, as before", self.of_process(metrics, worker), before, PROCESS_TOLERANCE)
        family = "memledger_process_gpu_memory_peak_bytes"
        if metrics.has(family):
            self.between("peak: at least what torch had reserved", metrics.get(family, gpu_uuid=self.uuid, pid=worker.pid),
                         stats["at_peak"] - PROCESS_TOLERANCE, stats["at_peak"] + OVERHEAD[1])
        else:
            self.skip("peak", f"this memledger has no {family}")
        if self.needs_containers("the event of that error"):
            self.compare_event(worker, stats)

    def compare_event(self, worker, stats):
        """The event of the error, by torch's observer, against the text that torch raised."""
        def read():
            events = json.loads(self.memledger.get(f"/api/v1/events?container={worker.container[:12]}"))["events"]
            read.last = next((event for event in events if event["type"] == "cuda_oom"), {})
            return read.last
        wait_for(read, 10)
        event, error = read.last, stats["error"] or ""
        # to two decimals of a unit
        sizes = {unit: float(number) * scale for number, unit, scale in
                 ((number, what, {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}[unit]) for what, pattern in
                  (("tried", r"Tried to allocate ([0-9.]+) (\w+)"), ("free", r"of which ([0-9.]+) (\w+) is free"),
                   ("total", r"total capac\w* of ([0-9.]+) (\w+)"),
                   ("allocated", r"Of the allocated memory ([0-9.]+) (\w+) is allocated"))
                  for number, unit in re.findall(pattern, error)[:1])}
        for what in ("tried", "total", "free", "allocated"):
            self.compare(f"event: {what}: as in torch's text", event.get(f"{what}_bytes"), sizes.get(what), DEVICE_TOLERANCE)
        self.compare("event: reserved: as torch's", event.get("reserved_bytes"), stats["at_peak"], PROCESS_TOLERANCE)
        self.compare_text("event: the GPU", event.get("gpu_uuid", "none"), self.uuid)

    def cleanup(self):
        """A training frees its cache on request."""
        if not self.needs_processes() or not self.needs_containers("all of it"):
            return
        worker = self.workers["other"]
        worker.do("alloc", name="tensors", mib=256)
        worker.do("alloc", name="cache", mib=768)
        before = worker.do("drop", name="cache")
        held = self.of_process(self.settle(worker)[0], worker)
        steps = Background(lambda: worker.do("steps", 60, for_s=12))
        command = [self.options.binary, "cleanup", worker.container[:12], "--json", self.control]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=40)
        steps.result()
        after = worker.do("stats")
        self.compare_text("all processes responded", str(ended.returncode), "0", ended.stderr.strip()[:300])
        process = (json.loads(ended.stdout)["processes"] if ended.stdout else [{}])[0]
        self.compare("reserved before: as torch's", process.get("reserved_before_bytes"), before["reserved"], 0)
        self.compare("reserved after: as torch's", process.get("reserved_after_bytes"), after["reserved"], 0)
        self.between("given back", before["reserved"] - after["reserved"], 512 * MIB, 2048 * MIB)
        holds = self.of_process(self.settle(worker)[0], worker)
        self.compare("the driver's memory falls by as much", held - holds if None not in (held, holds) else None,
                     before["reserved"] - after["reserved"], PROCESS_TOLERANCE)
        worker.do("free", name="tensors")

    def cost(self):
        """CPU of memledger and of nvidia-smi, for the report."""
        if self.options.stand_in:
            return self.skip("all of it", "the stand-ins cost nothing like a driver")
        cost.run(self, self.options.nvml_library or nvml_elsewhere())

    def ends(self):
        """All processes end: their memory is freed."""
        pids = [worker.pid for worker in self.workers.values()]
        for worker in self.workers.values():
            worker.finish()
        def gone():
            rows = self.memledger.fresh().all(PROCESS, gpu_uuid=self.uuid)
            return not any(labels["pid"] in map(str, pids) for labels, _ in rows)
        self.compare_text("no process that has ended is listed", "none" if wait_for(gone, 10) else "some", "none")
        def back():
            back.last = self.memledger.fresh().get("memledger_gpu_memory_used_bytes", gpu_uuid=self.uuid, gpu_instance_id="")
            return back.last is not None and abs(back.last - self.baseline) <= 4 * DEVICE_TOLERANCE
        wait_for(back, 10)
        self.compare("used memory of the GPU, as before the check", back.last, self.baseline, 4 * DEVICE_TOLERANCE)

    def closing(self):
        """The checks of every scrape, and memledger's own cost."""
        self.report.part = "always"
        self.scraper.stopped.set()
        self.scraper.join(10)
        scraper = self.scraper
        self.compare_text("the memory adds up in every scrape", (scraper.unbalanced or ["all add up"])[0], "all add up",
                          f"{scraper.scrapes} scrapes, {len(scraper.unbalanced)} that do not add up")
        self.compare_text("no sentinel and nothing negative in any scrape", (scraper.garbage or ["none"])[0], "none")
        self.compare_text("the driver responded in every scrape", str(scraper.failed), "0", "scrapes without a response")
        self.compare_text("every scrape had a response", (scraper.errors or ["yes"])[0], "yes")
        metrics = self.memledger.metrics()
        with open(os.path.join(self.out, "metrics.prom"), "w") as file:
            file.write(metrics.text)
        lived = metrics.get("memledger_snapshot_timestamp_seconds") - metrics.get("process_start_time_seconds")
        self.note(f"memledger used {100 * metrics.get('process_cpu_seconds_total') / lived:.1f} % of a core over {lived:.0f} s, "
                  f"scraped 6 times a second; resident {size(metrics.get('process_resident_memory_bytes'))}; the newest reading "
                  f"of NVML took {1000 * (metrics.get('memledger_collector_duration_seconds', collector='gpu') or 0):.1f} ms")
        races = metrics.get("memledger_gpu_memory_accounting_conflicts_total", gpu_uuid=self.uuid, gpu_instance_id="")
        rest = metrics.get(REST, gpu_uuid=self.uuid, gpu_instance_id="")
        self.note(f"races: {races}; unattributed at the end: {size(rest)}")

    def run(self):
        wanted = self.options.only.split(",") if self.options.only else PARTS
        self.guarded("start", 30, self.start)
        if self.scraper is None:
            return
        if set(wanted) & set(PARTS[:-1]):
            self.guarded("launch", 120, self.launch)
        for part in [part for part in PARTS[:-1] if part in wanted]:
            if self.launched:
                self.guarded(part, SECONDS.get(part, 40), getattr(self, part))
        trees.run(self, wanted)
        self.guarded("always", 0, self.closing)

    def clean(self):
        if self.scraper:
            self.scraper.stopped.set()
        Process.end_all()
        if self.memledger:
            self.memledger.end()
        shutil.rmtree(self.reporter, ignore_errors=True)
        left = self.cgroups.remove()
        if left:
            self.note(f"left behind: {left}")


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop(*_):
    # timeout(1) passes a signal on twice, to its child and to the group: the second must not end the cleanup
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit("stopped by a signal")


def give_up(code, why):
    print(why, file=sys.stderr)
    sys.exit(code)


def main():
    parser = argparse.ArgumentParser()
    for name in ("out", "binary"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    for name in ("nvml-library", "stand-in"):
        parser.add_argument(f"--{name}", default=None)
    options = parser.parse_args()
    known = [*PARTS, *(tree[0] for tree in trees.TREES)]
    unknown = set(options.only.split(",")) - set(known) - {""}
    if unknown:
        give_up(64, f"--only has {' '.join(known)}, not {' '.join(unknown)}")
    if not shutil.which(options.nvidia_smi):
        give_up(2, f"no {options.nvidia_smi}: this check needs an NVIDIA driver with its tools")
    for number in SIGNALS:
        signal.signal(number, stop)
    check = Check(options)
    try:
        check.run()
    except SystemExit as stopped:
        check.report.add("the check ran to its end", "FAILED", str(stopped))
    finally:
        check.clean()
        path = os.path.join(options.out, "report.md")
        with open(path, "w") as file:
            file.write(check.report.text())
        print(f"{check.report.count('ok')} ok, {check.report.count('FAILED')} failed, "
              f"{check.report.count('skipped')} skipped: {path}", flush=True)
    return check.report.status()


if __name__ == "__main__":
    sys.exit(main())
