"""A simulated history of trainings, as OpenMetrics text: `simulated.py >FILE`. backfill.py makes a Prometheus of it.

One host with two GPUs of 24 GiB, for two days. On the first GPU one after another are the runs of the group `piper`, with other
batch sizes, numbers of DataLoader workers and, as a setting of its own, optimizers; one of them is killed by its memory limit. On the
second GPU is a run of another group. The figures are made up: they have the shape of trainings (warm-up, plateau, noise, validation
after each epoch), and the names, labels and units of docs/metrics.md. The same text is written each time.
"""
import random
import sys
import time
from dataclasses import dataclass, field
from math import exp

GIB = 1 << 30
STEP = 60  # seconds between two samples
DAY = 86_400
END = 1_795_132_800  # 2026-11-20, midnight in UTC: fixed, so that a picture of the history changes only with the dashboard
START = END - 2 * DAY
COMPARED = "piper"  # the group with several runs
HOST = {"job": "memledger", "instance": "train-01"}
LIMIT = 44 * GIB
KEPT = 3600  # --container.keep-ended
SAMPLES_OF_EPOCH, EPOCHS = 95_000, 8
FIRST_STEP = 240  # seconds until the first training step: imports, the index of the data, the first batches
VALIDATION = 0.12  # share of an epoch's time
GPUS = {"0": "GPU-5d0c1a6e-93b7-4f21-8a44-c1f0e2b7d913", "1": "GPU-b8e47f02-1d5c-4e9a-9f36-07a2c95e6d10"}


@dataclass(frozen=True)
class Setup:
    """A container that trains, and its settings."""

    container_id: str
    batch: int
    workers: int
    speed: float  # samples per second
    busy: float  # share of the time in which the GPU works
    optimizer: str = "adamw"
    group: str = COMPARED
    gpu: str = "0"

    @property
    def container(self):
        return f"{self.group}-train-1"

    @property
    def settings(self):
        """By label; the effective batch of all runs is 192."""
        return {
            "accum": f"{192 // self.batch}",
            "batch_size": f"{self.batch}",
            "num_devices": "1",
            "num_workers": f"{self.workers}",
            "optimizer": self.optimizer,  # of a label memledger.run.optimizer
            "precision": "bf16",
        }


SETUPS = [
    Setup("3b8f0c5de214", 16, 1, 23, 0.51),
    Setup("a41d97e6630b", 32, 1, 25, 0.46),
    Setup("0f6c2ab98d75", 32, 2, 39, 0.72),
    Setup("d92e5b170c48", 64, 2, 41, 0.70),
    Setup("71c4e83fa09d", 64, 4, 56, 0.93),
    Setup("c80a3d46b5f1", 96, 4, 57, 0.94),
    Setup("5e97f1d20ba6", 64, 4, 56, 0.94, optimizer="lion"),
]
PAUSES = [11, 26, 18, 34, 9, 42, 15]  # minutes before each run
OTHER = Setup("e6b1409cd37a", 32, 2, 44, 0.81, group="vocoder", gpu="1")


@dataclass
class Usage:
    """What a run holds and has done at one time."""

    elapsed: int
    ram: float
    main: float  # PSS of the main process
    worker: float  # PSS of one worker
    workers: int
    tensors: float
    reserved: float
    vram: float
    busy: float
    samples: int
    validating: bool


class Training:
    """One run over time."""

    def __init__(self, setup):
        self.setup, self.random = setup, random.Random(setup.container_id)
        self.samples, self.cached = 0.0, 1.10
        self.epoch = SAMPLES_OF_EPOCH / setup.speed / (1 - VALIDATION)

    def noise(self, size):
        return self.random.gauss(0, size)

    def at(self, elapsed):
        """Returns the usage so many seconds after the start; to be called for each STEP in turn."""
        setup, warm = self.setup, 1 - exp(-elapsed / 260)
        begun = elapsed >= FIRST_STEP
        position = (elapsed - FIRST_STEP) % self.epoch / self.epoch if begun else 0.0
        validating = position > 1 - VALIDATION
        workers = setup.workers if elapsed >= FIRST_STEP / 2 else 0
        # losses of each step are kept in a list
        main = 2.2 + (5.0 + 0.09 * setup.batch) * warm + 0.2 * self.samples / SAMPLES_OF_EPOCH + self.noise(0.05)
        # it grows within an epoch, as objects are copied on write; each epoch has new workers
        worker = 0.4 + (4.2 + 0.01 * setup.batch) * warm + 0.5 * position + self.noise(0.03)
        validation = 0.12 * main + 0.35 * workers if validating else 0.0
        if begun and not validating:
            self.samples += setup.speed * STEP * (1 + self.noise(0.02))
        tensors = self.tensors(warm, begun, validating)
        reserved = tensors * self.cached
        return Usage(
            elapsed=elapsed,
            ram=main + workers * worker + validation + abs(self.noise(0.06)),
            main=main + validation,
            worker=worker,
            workers=workers,
            tensors=tensors,
            reserved=reserved,
            vram=reserved + 0.55 * warm + 0.35,
            busy=self.utilization(begun, validating, position),
            samples=int(self.samples),
            validating=validating,
        )

    def tensors(self, warm, begun, validating):
        """Returns GiB: weights and the state of the optimizer, then what each sample takes. Torch keeps what the first validation took."""
        state = 3.4 if self.setup.optimizer == "adamw" else 2.3
        if validating:
            self.cached = 1.16
        return state * warm + (0.165 * self.setup.batch * (1 + self.noise(0.004)) if begun else 0.0)

    def utilization(self, begun, validating, position):
        if not begun:
            return 0.0
        if position > 0.985:
            return 0.04  # writes a checkpoint
        return min(max(self.setup.busy * (0.6 if validating else 1) + self.noise(0.02), 0.0), 1.0)


@dataclass
class Run:
    """A run of the history."""

    setup: Setup
    start: int
    usages: list = field(default_factory=list)
    killed: bool = False

    @property
    def name(self):
        return f"{self.setup.container_id}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(self.start))}"

    @property
    def settings(self):
        return " ".join(f"{key}={value}" for key, value in self.setup.settings.items())

    @property
    def end(self):
        return self.start + self.usages[-1].elapsed

    def steps(self, usage):
        """Optimizer steps."""
        return usage.samples // 192


def simulate(setup, start):
    """Returns the run of a training from its start until it has its epochs, or its RAM reaches the limit."""
    run, training = Run(setup, start), Training(setup)
    while True:
        usage = training.at(len(run.usages) * STEP)
        if usage.ram * GIB >= LIMIT:
            run.killed = True
            return run
        run.usages.append(usage)
        if usage.samples >= SAMPLES_OF_EPOCH * EPOCHS and not usage.validating:
            return run


def runs():
    """Returns all runs, by their start."""
    found, at = [], START
    for setup, pause in zip(SETUPS, PAUSES, strict=True):
        found.append(simulate(setup, at + pause * 60))
        at = found[-1].end
    found.append(simulate(OTHER, START + 5 * 3600))
    return sorted(found, key=lambda run: run.start)


class Text:
    """Samples by family and series."""

    def __init__(self):
        self.families = {}

    def add(self, family, labels, moment, value):
        series = self.families.setdefault(f"memledger_{family}", {})
        number = f"{value:.4f}" if isinstance(value, float) else f"{value}"
        series.setdefault(tuple((HOST | labels).items()), []).append(f"{number} {moment}")

    def lines(self):
        for family, every in self.families.items():
            counter = family.endswith("_total")
            yield f"# TYPE {family.removesuffix('_total')} {'counter' if counter else 'gauge'}"
            for labels, samples in every.items():
                named = ",".join(f'{key}="{value}"' for key, value in labels)
                yield from (f"{family}{{{named}}} {sample}" for sample in samples)
        yield "# EOF"


def size(gib):
    return int(gib * GIB)


def add_identity(text, run, moment):
    """Adds what is exported while a run lasts, and for an hour after it."""
    name = {"container_name": run.setup.container}
    info = {"container_id": run.setup.container_id, "image": f"{run.setup.group}:1", "runtime": "docker", "cgroup_version": "2"}
    text.add("container_info", name | info, moment, 1)
    labels = {"run": run.name, "group": run.setup.group, "settings": run.settings} | run.setup.settings
    text.add("container_run_info", name | labels, moment, 1)


def add_peaks(text, run, moment, peaks):
    """Adds the highest samples since the start."""
    name = {"container_name": run.setup.container}
    gpu = name | {"gpu": run.setup.gpu, "gpu_uuid": GPUS[run.setup.gpu]}
    text.add("container_memory_unreclaimable_peak_bytes", name, moment, size(peaks["ram"]))
    text.add("container_gpu_memory_peak_bytes", gpu, moment, size(peaks["vram"]))


def add_usage(text, run, moment, usage):
    """Adds what the kernel and the driver report."""
    name = {"container_name": run.setup.container}
    gpu = name | {"gpu": run.setup.gpu, "gpu_uuid": GPUS[run.setup.gpu]}
    text.add("container_start_time_seconds", name, moment, run.start)
    text.add("container_memory_unreclaimable_bytes", name, moment, size(usage.ram))
    text.add("container_memory_effective_limit_bytes", name, moment, LIMIT)
    text.add("container_memory_limit_utilization_ratio", name, moment, usage.ram * GIB / LIMIT)
    roles = {"trainer": (1, usage.main), "dataloader_worker": (usage.workers, usage.workers * usage.worker), "other": (1, 0.01)}
    for role, (count, pss) in roles.items():
        text.add("container_processes", name | {"role": role}, moment, count)
        text.add("container_process_pss_bytes", name | {"role": role}, moment, size(pss))
    text.add("container_gpu_memory_used_bytes", gpu, moment, size(usage.vram))
    text.add("container_gpu_processes", gpu, moment, 1)
    text.add("container_gpu_utilization_ratio", gpu, moment, usage.busy)


def add_reports(text, run, moment, usage, peaks):
    """Adds what the program reports to memledger (docs/inside-view.md)."""
    name = {"container_name": run.setup.container}
    gpu = name | {"gpu": run.setup.gpu, "gpu_uuid": GPUS[run.setup.gpu]}
    rank = gpu | {"rank": "0"}
    tensors, reserved = size(usage.tensors), size(usage.reserved)
    holders = {"tensors": tensors, "torch_cache": reserved - tensors, "outside_torch": size(usage.vram) - reserved, "not_reporting": 0}
    for holder, held in holders.items():
        text.add("container_gpu_memory_holder_bytes", gpu | {"holder": holder}, moment, held)
    text.add("container_torch_allocated_bytes", rank, moment, tensors)
    text.add("container_torch_reserved_bytes", rank, moment, reserved)
    text.add("container_torch_inactive_split_bytes", rank, moment, (reserved - tensors) // 5)
    text.add("container_torch_allocated_peak_bytes", rank, moment, size(peaks["tensors"]))
    text.add("container_torch_reserved_peak_bytes", rank, moment, size(peaks["reserved"]))
    text.add("container_torch_ooms_total", gpu, moment, 0)
    text.add("container_torch_alloc_retries_total", gpu, moment, 0)
    text.add("container_training_steps_total", name | {"rank": "0"}, moment, run.steps(usage))
    text.add("container_training_samples_total", name | {"rank": "0"}, moment, usage.samples)
    for component, operation, share in [("model", "forward", 0.92), ("model", "backward", 1.0), ("validation", "forward", 0.8)]:
        labels = name | {"component": component, "operation": operation}
        text.add("container_operation_torch_allocated_bytes", labels, moment, int(tensors * share))
        text.add("container_operation_torch_allocated_peak_bytes", labels, moment, int(tensors * share * 1.03))
        text.add("container_operation_torch_reserved_bytes", labels, moment, reserved)
        text.add("container_operation_rss_bytes", labels, moment, size(usage.main))


def add_run(text, run, replaced):
    """Adds all samples of a run; `replaced` is when a container of the same name starts."""
    peaks = dict.fromkeys(("ram", "vram", "tensors", "reserved"), 0.0)
    for usage in run.usages:
        moment = run.start + usage.elapsed
        peaks = {what: max(highest, getattr(usage, what)) for what, highest in peaks.items()}
        add_identity(text, run, moment)
        add_peaks(text, run, moment, peaks)
        add_usage(text, run, moment, usage)
        add_reports(text, run, moment, usage, peaks)
    for moment in range(run.end + STEP, min(run.end + KEPT, replaced, END), STEP):
        add_identity(text, run, moment)
        add_peaks(text, run, moment, peaks)


def add_exits(text, every):
    """Adds how the runs ended, counted by container."""
    for container in {run.setup.container for run in every}:
        own = [run for run in every if run.setup.container == container]
        for moment in range(own[0].start, END, STEP):
            ended = [run.killed for run in own if run.end < moment]
            name = {"container_name": container}
            text.add("container_exits_total", name | {"reason": "completed"}, moment, ended.count(False))
            text.add("container_exits_total", name | {"reason": "oom_container"}, moment, ended.count(True))


def history():
    """Returns the lines of the whole history."""
    text, every = Text(), runs()
    for moment in range(START, END, STEP):
        text.add("build_info", {"version": "simulated", "revision": "none", "rustversion": "none"}, moment, 1)
    for run in every:
        later = [other.start for other in every if other.setup.container == run.setup.container and other.start > run.start]
        add_run(text, run, min(later, default=END))
    add_exits(text, every)
    return text.lines()


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in history())
