"""The scenario: the trainings, and the acts, each with the alerts that it makes fire. Data only.

Times are seconds after the start of a round. An act ends when all its alerts fire, so that a slow machine gets the time that it
needs; without Prometheus after `most` seconds.

The trainings allocate memory by the steps of tests/hog. Sizes and limits are small; only their ratio matters.
"""
from dataclasses import dataclass, field
from typing import Callable

import gpus

LIVES_ON = ("name=python3", "eat=8", "hold")
WORKER = "name=pt_data_worker"
CRITICAL, WARNING, INFO = "critical", "warning", "info"


@dataclass(frozen=True)
class Training:
    """A container, its limit in MiB, and what it does."""

    name: str
    limit: int
    steps: tuple
    settings: dict = field(default_factory=dict, hash=False)
    labels: dict = field(default_factory=dict, hash=False)
    shm: int = 0  # MiB of its /dev/shm; 0: the engine's default
    restart: str = ""  # Docker's restart policy
    gpu: int | None = None  # the GPU on which its first process has memory


@dataclass(frozen=True)
class Alert:
    """An alert that an act makes fire. `of`: the training in its container_name label."""

    name: str
    severity: str
    labels: dict = field(hash=False)
    of: Training | None = None


@dataclass(eq=False)
class Act:
    """A step of the scenario, with a start and an end."""

    at: float
    text: str
    begin: Callable
    end: Callable = lambda play: None
    alerts: tuple = ()
    most: float = 60
    least: float = 0
    needs_names: bool = False  # needs a Docker engine: names, exits, runtime_up
    queue: str = ""  # starts when no other act of this queue runs: they would hide each other
    is_last: bool = False  # starts when every act with alerts is over: the end of one would undo it


def run_of(batch_size, workers):
    settings = {"BATCH_SIZE": batch_size, "NUM_WORKERS": workers, "PRECISION": "bf16", "ACCUM": 4, "NUM_DEVICES": 1}
    return {name: str(value) for name, value in settings.items()}


def in_group(name, optimizer):
    return {"memledger.run.group": name, "memledger.run.optimizer": optimizer}


def spawn(count, mib, *more):
    return f"spawn={count}:" + ",".join([WORKER, f"eat={mib}", *more])


PIPER = Training(
    "piper1-gpl-train-1", 512, ("name=python3", spawn(2, 18, "hold"), "shm=4", "grow=60:250", "pause=22000"),
    run_of(8, 2), in_group("piper", "adamw"), gpu=gpus.TRAINS,
)  # fmt: skip
PIPER_AGAIN = Training(
    PIPER.name, 512, ("name=python3", spawn(2, 30, "hold"), "shm=8", "grow=140:1500", "hold"), run_of(16, 2), in_group("piper", "lion"), gpu=gpus.TRAINS
)
LEAK = Training("whisper-finetune-1", 256, ("name=python3", "eat=70", "grow=110:1600", "hold"), run_of(32, 0), gpu=gpus.FULL)
SAW = Training("segmenter-train-1", 160, ("name=python3", "grow=90:25", "pause=1500", "free", "pause=800", "again"))
SERVICE = Training(
    "rag-api-1", 192, ("name=uvicorn", "eat=40", "hold"), gpu=gpus.SPLIT,
    labels={"com.docker.compose.project": "rag", "com.docker.compose.service": "api"},
)  # fmt: skip
NOTEBOOK = Training("jupyter-anna-1", 192, LIVES_ON, gpu=gpus.IDLE)
LOADER = Training("detector-train-1", 160, ("name=python3", spawn(4, 28, "hold"), "eat=12", "hold"), run_of(64, 4), gpu=gpus.SICK)
FILLED = Training("tokenizer-batch-1", 160, ("name=python3", "grow=147:20", "hold"))
SHM = Training("image-cache-1", 128, ("name=python3", "shm=29", "hold"), shm=32)
KILLED = Training("asr-train-1", 64, ("name=python3", "grow=40:100", "eat"), run_of(128, 0))
# What PyTorch prints, for a program without PyTorch: memledger reads it in the container's log.
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.81 GiB is"
    " free. Including non-PyTorch memory, this process has 77.42 GiB memory in use. Of the allocated memory 75.93 GiB is allocated by"
    " PyTorch, and 320.00 MiB is reserved by PyTorch but unallocated."
)
# First in alphabetical order, and so the default of the dashboards' variable: its runs have data for every panel.
FAILS = Training(
    "aligner-train-1", 160, ("name=python3", spawn(2, 12, "hold"), "shm=6", "eat=20", "pause=12000", f"say={CUDA_OOM}", "exit=1"),
    run_of(96, 2), in_group("aligner", "adamw"), gpu=gpus.TRAINS,
)  # fmt: skip
WORKER_KILLED = Training(
    FAILS.name, 160,
    ("name=python3", spawn(2, 14, "hold"), "shm=6", "eat=20", "pause=20000", f"spawn=1:{WORKER},eat", "hold"), run_of(24, 2),
    in_group("aligner", "adamw"), gpu=gpus.TRAINS,
)  # fmt: skip
OCR = "ocr-train-1"  # its memory: 20 MiB, and one for each sample of a batch


def ocr(batch_size, *steps):
    return Training(OCR, 80, ("name=python3", *steps), run_of(batch_size, 0), in_group("ocr", "adamw"))


OCR_SMALL, OCR_LARGER = (ocr(size, f"eat={20 + size}", "pause=9000") for size in (8, 16))
OCR_KILLED = ocr(64, "grow=50:100", "eat")
CRASHES = Training("api-gateway-1", 64, ("name=node", "eat=6", "pause=1500", "exit=1"), restart="on-failure:5")
TRAININGS = [WORKER_KILLED, PIPER, LEAK, SAW, SERVICE, NOTEBOOK, LOADER, FILLED, SHM, KILLED, CRASHES, OCR_SMALL]


def container(at, training, text, *alerts, **more):
    """A training that is stopped once its alerts fired. Another one of its name starts after that: it would be stopped instead."""
    here = tuple(Alert(name, severity, {"instance": "gpu-host"}, training) for name, severity in alerts)
    return Act(at, f"{training.name} {text}", lambda play: play.start(training), lambda play: play.stop(training), here,
               queue=training.name, **more)  # fmt: skip


def lives_on(at, training, text, *alerts):
    """As `container`, but it is not stopped."""
    act = container(at, training, text, *alerts)
    act.end = lambda play: None
    return act


def stays(at, training, text, most=0, **more):
    """A training that runs until the end of the round, or until it completes, after less than `most` seconds."""
    return Act(at, f"{training.name} {text}", lambda play: play.start(training), most=most, queue=training.name, **more)


def gpu(at, state, text, *alerts, **more):
    """A temporary state of the GPUs."""
    here = tuple(Alert(name, severity, {"instance": "gpu-host", **labels}) for name, severity, labels in alerts)
    on = lambda play: play.gpus.on.add(state)
    return Act(at, text, on, lambda play: play.gpus.on.discard(state), here, **more)


def once(at, do, text, *alerts, **more):
    """A single event of a GPU; its alerts resolve by themselves."""
    here = tuple(Alert(name, severity, {"instance": "gpu-host", **labels}) for name, severity, labels in alerts)
    return Act(at, text, do, alerts=here, **more)


def on_plain(at, begin, end, text, alert, severity, labels=(), **more):
    here = Alert(alert, severity, {"instance": "plain-host", **dict(labels)})
    return Act(at, f"plain-host: {text}", begin, end, (here,), queue="plain-host", **more)


def on_paper(at, state, text, *alerts):
    def switch(on):
        def do(play):
            (play.paper.on.add if on else play.paper.on.discard)(state)

        return do

    here = tuple(Alert(name, severity, {"instance": "paper-host", **labels}) for name, severity, labels in alerts)
    return Act(at, f"paper-host: {text}", switch(True), switch(False), here)


def ecc(kind, count):
    def do(play):
        setattr(play.gpus, kind, getattr(play.gpus, kind) + count)

    return do


def high(severity):
    return ("MemledgerContainerMemoryHigh", severity)


SICK = {"gpu": str(gpus.SICK)}


def acts(paper_container):
    """Returns all acts of a round, ordered by time."""
    return sorted(of_containers() + of_gpus() + of_hosts(paper_container), key=lambda act: act.at)


def of_containers():
    return [
        container(0, LEAK, "leaks steadily", ("MemledgerContainerMemoryLeakSuspected", WARNING), most=400),
        stays(1, SAW, "allocates and frees repeatedly: a saw-tooth, not a leak"),
        stays(2, SERVICE, "serves, in a Compose project and on a MIG instance"),
        stays(3, PIPER, "trains with BATCH_SIZE=8, reaches its plateau, and completes"),
        container(4, NOTEBOOK, "holds 24 GiB of VRAM and is idle", ("MemledgerGpuMemoryHeldButIdle", WARNING), most=75),
        container(5, LOADER, "has four DataLoader workers that hold most of its memory",
                  ("MemledgerDataLoaderMemoryShareHigh", INFO), high(INFO)),
        container(6, FILLED, "fills its memory up to 94 % of the limit", high(INFO), high(WARNING)),
        container(8, SHM, "fills its /dev/shm", ("MemledgerContainerShmNearlyFull", WARNING), least=15),
        container(28, CRASHES, "fails and is restarted repeatedly", ("MemledgerContainerEndsWithErrors", INFO),
                  ("MemledgerContainerCrashLooping", WARNING), needs_names=True, most=40),
        container(35, KILLED, "reaches its limit: the kernel kills it", ("MemledgerContainerOOMKilled", WARNING), most=30),
        stays(10, OCR_SMALL, "trains with BATCH_SIZE=8, and completes", most=14),
        stays(24, OCR_LARGER, "trains with BATCH_SIZE=16, and completes", most=14),
        container(38, OCR_KILLED, "trains with BATCH_SIZE=64, and is killed: at the end of the round, the advice for its next run",
                  ("MemledgerContainerOOMKilled", WARNING), most=30),
        container(2, FAILS, "runs out of GPU memory: BATCH_SIZE=96 was too large", ("MemledgerContainerCudaOOM", WARNING),
                  needs_names=True, most=22),
        lives_on(26, WORKER_KILLED, "trains with BATCH_SIZE=24; 20 s later a third DataLoader worker is killed, and training continues",
                 ("MemledgerContainerOOMKilled", WARNING)),
        stays(52, PIPER_AGAIN, "trains again, with BATCH_SIZE=16: a second run of one name"),
    ]  # fmt: skip


def of_gpus():
    driver = {"source": "nvml"}
    return [
        gpu(5, "nobody", f"GPU {gpus.NOBODY}: 31 GiB of VRAM are unattributed",
            ("MemledgerGpuMemoryUnattributed", WARNING, {"gpu": str(gpus.NOBODY)})),
        gpu(7, "full", f"GPU {gpus.FULL} is nearly full", ("MemledgerGpuMemoryHigh", INFO, {"gpu": str(gpus.FULL)})),
        gpu(15, "hot", f"GPU {gpus.SICK} overheats and throttles", ("MemledgerGpuThrottled", WARNING, SICK), least=45, most=45),
        gpu(18, "rows", f"GPU {gpus.SICK} waits for a reset to replace a row of memory",
            ("MemledgerGpuMemoryRepairPending", WARNING, {**SICK, "kind": "pending"})),
        once(30, lambda play: play.gpus.xid(gpus.TRAINS, 31), f"GPU {gpus.TRAINS} reports Xid 31, an application error",
             ("MemledgerGpuXid", WARNING, {"gpu": str(gpus.TRAINS), "xid": "31"})),
        once(38, ecc("corrected", 400), f"GPU {gpus.SICK} corrects 400 memory errors",
             ("MemledgerGpuEcc", WARNING, {**SICK, "kind": "corrected"})),
        once(42, ecc("uncorrected", 2), f"GPU {gpus.SICK} finds 2 memory errors that it cannot correct",
             ("MemledgerGpuEcc", CRITICAL, {**SICK, "kind": "uncorrected"})),
        once(62, lambda play: play.gpus.xid(gpus.SICK, 79), f"GPU {gpus.SICK} reports Xid 79",
             ("MemledgerGpuXid", CRITICAL, {**SICK, "xid": "79"})),
        gpu(68, "lost", f"GPU {gpus.SICK} has fallen off the bus", ("MemledgerGpuLost", CRITICAL, driver)),
        gpu(95, "driver", "the GPU driver returns an error: all GPUs are missing",
            ("MemledgerCollectorFailing", WARNING, {"collector": "gpu"}), ("MemledgerGpuLost", CRITICAL, driver)),
    ]  # fmt: skip


def of_hosts(paper_container):
    def absent(play):
        play.monitoring.forget(*play.hosts)

    not_scraped = [Alert("MemledgerNotScraped", INFO, {"instance": name}) for name in ("gpu-host", "plain-host", "paper-host")]
    return [
        on_plain(0, lambda play: play.plain.lose_kernel_log(True), lambda play: play.plain.lose_kernel_log(False),
                 "the kernel log is missing", "MemledgerOOMSourceDown", WARNING, {"source": "kmsg"}, most=40, least=30),
        Act(12, "a backup job outside containers reaches the limit of its cgroup: the kernel kills it",
            lambda play: play.kill_host_job(), alerts=(
                Alert("MemledgerUnitOOMKilled", WARNING, {"instance": "gpu-host"}),
                Alert("MemledgerOOMKillUnattributed", WARNING, {"instance": "plain-host"}))),
        on_plain(50, lambda play: play.plain.fill_disk(), lambda play: play.plain.empty_disk(),
                 "the disk of the ledger is full", "MemledgerStoreDown", WARNING),
        on_plain(55, lambda play: play.plain.forbid("anna: letmein"), lambda play: play.plain.allow(),
                 "its web configuration has a password in plain text instead of a hash", "MemledgerWebConfigRejected", WARNING),
        on_plain(60, lambda play: play.plain.relay.close(), lambda play: play.plain.relay.open(),
                 "the container runtime does not respond", "MemledgerRuntimeDown", WARNING, {"runtime": "docker"}, needs_names=True),
        on_plain(78, lambda play: play.freeze(), lambda play: play.thaw(),
                 "sampling hangs, but HTTP still responds", "MemledgerSnapshotStale", CRITICAL),
        Act(95, "plain-host: memledger is stopped", lambda play: play.plain.stop(), lambda play: play.plain.start(),
            (Alert("MemledgerExporterDown", WARNING, {"instance": "plain-host"}), Alert("MemledgerExporterDown", CRITICAL, {})), queue="plain-host"),
        on_plain(108, lambda play: play.monitoring.forget("plain-host"), lambda play: play.monitoring.remember("plain-host"),
                 "it is removed from Prometheus' configuration", "MemledgerNotScraped", INFO),
        Act(135, "all hosts are removed from Prometheus' configuration", absent,
            lambda play: play.monitoring.remember(*play.hosts),
            (Alert("MemledgerExporterAbsent", CRITICAL, {}), *not_scraped), most=180, is_last=True),
        on_paper(5, "full", "96 % of its memory is in use",
                 *(("MemledgerHostMemoryHigh", severity, {}) for severity in (INFO, WARNING, CRITICAL))),
        on_paper(9, "stalls", "its tasks are stalled on memory", ("MemledgerHostMemoryPressure", WARNING, {}),
                 ("MemledgerContainerMemoryPressure", WARNING, {"container_name": paper_container}),
                 ("MemledgerContainerAtMemoryLimit", INFO, {"container_name": paper_container})),
    ]  # fmt: skip


# Seconds after which every act has run, except those that remove hosts.
ALL_ON = 90

# Alerts that no act can provoke, with the reason.
NOT_PLAYED = {
    "MemledgerHostOOMKilled": "the host would have to run out of memory, and with it whoever watches the demo",
    "MemledgerGpuAllocatedButUnused": "the engine of the demo has no container toolkit, so it allocates no GPU",
    "MemledgerNodeLimitHigh": "the containers of the demo share no limit",
    "MemledgerSeriesDropped": "that takes thousands of containers",
    "MemledgerPanicked": "each one is a bug",
    "MemledgerOtlpDown": "the demo exports nothing by OTLP",
    "MemledgerNotReceived": "the demo exports nothing by OTLP",
    "MemledgerReportsFailing": "the demo writes no reports of runs",
    "MemledgerContainerGpuMemoryLeakSuspected": "no program of the demo reports from inside, and one would have to for two hours",
    "MemledgerGpuDriverFailing": "it fires by chance: an hour of restarts is a minute of the demo; a process that hangs in the kernel needs a real driver",
}
# Alerts that always fire.
ALWAYS = {"MemledgerWatchdog"}
