"""A fleet of simulated hosts over one day: which series memledger would export, one sample a minute.

A day begins with 20 healthy hosts (`new_day`). busy.py and incidents.py then change them: hosts reboot, containers start, end and are
killed, counters rise. `Day.series` makes of that the input of promtool's rule tests: of the families that alerts read, all series that
could make one fire. The figures are made up and always the same; a series is absent where memledger would not export it.
"""
import random
from dataclasses import dataclass, field
from itertools import groupby

MINUTES = 24 * 60
LENGTH = MINUTES + 1  # samples, from 00:00 to 24:00
MIB, GIB = 1 << 20, 1 << 30
KEPT = 60  # minutes for which a container's counters are exported after its end: --container.keep-ended
BEFORE = -3000  # minute in which what runs at midnight was started

THROTTLE_REASONS = ["sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal", "hw_power_brake"]
COLLECTORS = ["host", "own", "cgroup", "process", "pss", "shm"]
DRIVER_RESTARTS = ["ended", "timeout", "invalid_message", "driver"]
GPU_HOSTS, GPUS, NODES = 6, 8, 12


def at(clock):
    """Returns the minute of the day of "HH:MM"."""
    hours, minutes = clock.split(":")
    return 60 * int(hours) + int(minutes)


def level(value, *changes):
    """Returns a value of each minute: `value`, but another one in each (begin, end, value)."""
    values = [value] * LENGTH
    for begin, end, other in changes:
        values[begin:end] = [other] * (min(end, LENGTH) - begin)
    return values


def ramp(begin, end, first, last):
    """Returns changes for `level`: a straight line from `first` to `last`."""
    return [(minute, minute + 1, first + (last - first) * (minute - begin) // max(end - begin - 1, 1)) for minute in range(begin, end)]


def total(*events, resets=()):
    """Returns a counter: the sum of the amounts of all (minute, amount) so far; it begins at 0 again in each minute of `resets`."""
    added = [0] * LENGTH
    for minute, amount in events:
        if minute < LENGTH:
            added[minute] += amount
    values, value = [], 0
    for minute, amount in enumerate(added):
        value = (0 if minute in resets else value) + amount
        values.append(value)
    return values


def each_minute(begin, end, amount):
    """Returns events for `total`."""
    return [(minute, amount) for minute in range(begin, end)]


def shifted(name, minute, size):
    """Returns a small deterministic deviation, in steps of ten minutes."""
    return random.Random(f"{name} {minute // 10}").randint(-size, size)


@dataclass
class Container:
    """A container by name: one or several runs of it."""

    host: "Host"
    name: str
    namespace: str = ""
    pod: str = ""
    limit: int = 16 * GIB  # 0: none
    used: object = None  # of (minute of the run, minute of the day), in bytes; default: a third of the limit
    runs: list = field(default_factory=lambda: [(BEFORE, LENGTH)])  # (first minute, first minute after it)
    exits: list = field(default_factory=list)  # (minute, reason, code)
    kills: list = field(default_factory=list)  # (minute, victim, scope, number)
    last_kill: dict = field(default_factory=dict)  # time in minutes of the kill that is counted in this minute, if it is another
    cuda_ooms: list = field(default_factory=list)  # minutes
    stalled: list = field(default_factory=list)  # (minute, seconds)
    shm: list = field(default_factory=list)  # changes of the used share of /dev/shm
    gpus: tuple = ()  # indexes of the GPUs that it uses
    gpu_used: object = None  # of (minute of the run, minute of the day)
    tensors: object = None  # the same; a training that reports
    workers: float = 0.0  # share of DataLoader workers in its memory
    page_cache: int = 0  # bytes, in active use
    owner: str = ""

    def labels(self):
        pod = {"k8s_namespace_name": self.namespace, "k8s_pod_name": self.pod} if self.pod else {}
        return pod | {"container_name": self.name}

    def end(self, minute, reason, code, again=None):
        """Ends the current run; starts another one in the minute `again`."""
        begin, _ = self.runs.pop()
        self.runs.append((begin, minute))
        self.exits.append((minute, reason, code))
        if again is not None:
            self.runs.append((again, LENGTH))
        return self

    def kill(self, minute, scope, again, at_time=None):
        """The kernel kills its main process."""
        self.kills.append((minute, "main", scope, 1))
        if at_time is not None:
            self.last_kill[minute] = at_time
        return self.end(minute, f"oom_{scope}", 137, again)

    def run_at(self, minute):
        return next((run for run in self.runs if run[0] <= minute < run[1]), None)

    def series(self):
        """Yields (name, labels, values)."""
        labels = self.labels()
        runs = [self.run_at(minute) for minute in range(LENGTH)]

        def while_running(value):
            return [None if run is None else value(minute - run[0], minute) for minute, run in enumerate(runs)]

        used = while_running(self.used or (lambda age, minute: self.limit // 3 or 2 * GIB))
        yield "memledger_container_start_time_seconds", labels, while_running(lambda age, minute: 60 * (minute - age))
        yield "memledger_container_memory_unreclaimable_bytes", labels, used
        if self.limit:
            yield "memledger_container_memory_effective_limit_bytes", labels, while_running(lambda age, minute: self.limit)
            ratio = [None if u is None else round(u / self.limit, 4) for u in used]
            yield "memledger_container_memory_limit_utilization_ratio", labels, ratio
            yield "memledger_container_at_memory_limit", labels, while_running(lambda age, minute: 0)
            yield "memledger_container_memory_level_utilization_ratio", labels | {"level": "container"}, ratio
        stalled = total(*self.stalled)
        yield "memledger_container_memory_pressure_stalled_seconds_total", labels, while_running(lambda age, minute: stalled[minute])
        if self.shm:
            size, share = 8 * GIB, level(0.1, *self.shm)
            yield "memledger_container_shm_size_bytes", labels, while_running(lambda age, minute: size)
            yield "memledger_container_shm_used_bytes", labels, while_running(lambda age, minute: int(size * share[minute]))
        if self.page_cache:
            usage = [None if u is None else u + self.page_cache for u in used]
            yield "memledger_container_memory_usage_bytes", labels, usage
            yield "memledger_container_memory_working_set_bytes", labels, usage
        roles = {"trainer": 1 - self.workers, "dataloader_worker": self.workers} if self.workers else {}
        for role, part in roles.items():
            yield "memledger_container_processes", labels | {"role": role}, while_running(lambda age, minute, r=role: 4 if r == "dataloader_worker" else 1)
            yield "memledger_container_process_pss_bytes", labels | {"role": role}, [None if u is None else int(u * part) for u in used]
        for index in self.gpus:
            yield from self.gpu_series(labels | self.host.gpus[index].labels(), index, while_running)
        yield from self.of_the_ledger(labels)
        if self.namespace:
            yield "memledger_container_memory_level_utilization_ratio", labels | {"level": "node"}, while_running(lambda age, minute: 0.7)

    def gpu_series(self, labels, index, while_running):
        gpu = self.host.gpus[index]

        def on_gpu(values):
            return [value if gpu.is_read(minute) else None for minute, value in enumerate(values)]

        yield "memledger_container_gpu_allocated", labels, on_gpu(while_running(lambda age, minute: 1))
        held = on_gpu(while_running(self.gpu_used or (lambda age, minute: 40 * GIB)))
        gpu.held = [of_others + (own or 0) for of_others, own in zip(gpu.held, held)]
        yield "memledger_container_gpu_memory_used_bytes", labels, held
        yield "memledger_container_gpu_processes", labels, [1 if own else None for own in held]
        if self.tensors:
            rank = labels | {"rank": str(self.gpus.index(index))}
            yield "memledger_container_torch_allocated_bytes", rank, while_running(self.tensors)

    def of_the_ledger(self, labels):
        """Yields what the ledger remembers, from the first start to KEPT minutes after each end; without counts that are always 0."""
        shown = [any(begin <= minute < end + KEPT for begin, end in self.runs) for minute in range(LENGTH)]

        def while_shown(values):
            return [value if is_shown else None for value, is_shown in zip(values, shown)]

        for victim, scope in sorted(({("main", "host")} if self.gpus else set()) | {(victim, scope) for _, victim, scope, _ in self.kills}):
            kills = [(minute, number) for minute, v, s, number in self.kills if (v, s) == (victim, scope)]
            yield "memledger_container_oom_kills_total", labels | {"victim": victim, "scope": scope}, while_shown(total(*kills))
        for reason in sorted({"error"} | {reason for _, reason, _ in self.exits}):
            exits = total(*[(minute, 1) for minute, other, _ in self.exits if other == reason])
            yield "memledger_container_exits_total", labels | {"reason": reason}, while_shown(exits)
        yield "memledger_container_restarts_total", labels, while_shown(total(*[(begin, 1) for begin, _ in self.runs[1:]]))
        code, kill, cuda = [None] * LENGTH, [None] * LENGTH, [None] * LENGTH
        for minute, _, number in self.exits:
            code[minute:] = [number] * (LENGTH - minute)
        for minute, *_ in self.kills:
            kill[minute:] = [60 * self.last_kill.get(minute, minute)] * (LENGTH - minute)
        for minute in self.cuda_ooms:
            cuda[minute:] = [60 * minute] * (LENGTH - minute)
        if self.owner:
            yield "memledger_container_owner_info", labels | {"owner": self.owner, "label_team": self.owner}, while_shown(level(1))
        yield "memledger_container_last_exit_code", labels, while_shown(code)
        yield "memledger_container_last_oom_kill_timestamp_seconds", labels, while_shown(kill)
        yield "memledger_container_last_cuda_oom_timestamp_seconds", labels, while_shown(cuda)


@dataclass
class Gpu:
    """One GPU of a host."""

    host: "Host"
    index: int
    size: int = 80 * GIB
    is_before_ampere: bool = False
    busy: list = field(default_factory=list)  # changes of its utilization
    throttled: dict = field(default_factory=dict)  # reason to (minute, seconds)
    corrected: list = field(default_factory=list)  # (minute, errors)
    uncorrected: list = field(default_factory=list)
    pending: list = field(default_factory=list)  # (begin, end, 1)
    xids: list = field(default_factory=list)  # (minute, xid)
    lost: list = field(default_factory=list)  # (begin, end)
    held: list = field(default_factory=lambda: [0] * LENGTH)  # by containers

    def labels(self):
        return {"gpu": str(self.index), "gpu_uuid": f"GPU-{self.host.name}-{self.index}"}

    def is_read(self, minute):
        return self.host.is_driver_read(minute) and not any(begin <= minute < end for begin, end in self.lost)

    def series(self):
        labels, restarts = self.labels(), self.host.restarts

        def while_read(values):
            return [value if self.is_read(minute) else None for minute, value in enumerate(values)]

        reserved = GIB // 2
        yield "memledger_gpu_memory_total_bytes", labels, while_read(level(self.size))
        yield "memledger_gpu_memory_free_bytes", labels, while_read([self.size - reserved - held for held in self.held])
        yield "memledger_gpu_memory_unattributed_bytes", labels, while_read(level(200 * MIB))
        yield "memledger_gpu_utilization_ratio", labels, while_read(level(0.9 if any(self.held) else 0, *self.busy))
        for reason in THROTTLE_REASONS:
            seconds = total(*self.throttled.get(reason, ()), resets=restarts)
            yield "memledger_gpu_throttle_seconds_total", labels | {"reason": reason}, while_read(seconds)
        for kind, errors in (("corrected", self.corrected), ("uncorrected", self.uncorrected)):
            yield "memledger_gpu_ecc_errors_total", labels | {"kind": kind}, while_read(total((0, 3), *errors))
        if self.is_before_ampere:
            yield "memledger_gpu_retired_pages_pending", labels, while_read(level(0, *self.pending))
        else:
            yield "memledger_gpu_remapped_rows_pending", labels, while_read(level(0, *self.pending))
            yield "memledger_gpu_remapped_rows_failure", labels, while_read(level(0))
        yield from self.counted_xids(labels)

    def counted_xids(self, labels):
        """Yields what memledger has counted since its start, also while the GPU is lost."""
        readable = [self.host.is_driver_read(minute) for minute in range(LENGTH)]
        for xid in sorted({xid for _, xid in self.xids}):
            own = [minute for minute, other in self.xids if other == xid]
            count = total(*[(minute, 1) for minute in own], resets=self.host.restarts)
            last = [max((e for e in own if e <= minute), default=0) if count[minute] else None for minute in range(LENGTH)]
            numbered = labels | {"xid": str(xid)}
            yield "memledger_gpu_last_xid_timestamp_seconds", numbered, [60 * s if r and s is not None else None for s, r in zip(last, readable)]


@dataclass
class Host:
    """A host with memledger."""

    name: str
    size: int = 512 * GIB
    runtime: str = "docker"
    added: int = 0  # first minute as a target of Prometheus
    removed: int = LENGTH
    down: list = field(default_factory=list)  # (begin, end): cannot be scraped
    restarts: list = field(default_factory=list)  # first minutes after a start of memledger
    version: list = field(default_factory=list)  # changes of memledger's version
    clock: list = field(default_factory=list)  # changes of the deviation of its clock, in seconds
    available: list = field(default_factory=list)  # changes of the available bytes
    stalled: list = field(default_factory=list)  # (minute, seconds)
    kills: dict = field(default_factory=dict)  # scope to (minute, number): processes outside containers
    sources: dict = field(default_factory=dict)  # source of kills to changes
    otlp: list = field(default_factory=list)
    gpus: list = field(default_factory=list)
    forgets_gpus: bool = False  # a restart of memledger forgets how many there were, as without a ledger on disk
    driver: dict = field(default_factory=lambda: {"absent": [], "released": [], "hung": []})  # (begin, end)
    driver_restarts: dict = field(default_factory=dict)  # reason to (minute, number)
    containers: dict = field(default_factory=dict)

    def container(self, name, **settings):
        container = Container(self, name, **settings)
        self.containers[container.pod, name] = container
        return container

    def is_up(self, minute):
        return not any(begin <= minute < end for begin, end in self.down)

    def is_driver_read(self, minute):
        return not any(begin <= minute < end for spans in self.driver.values() for begin, end in spans)

    def reboot(self, minute, length=7, driver_after=2):
        """Restarts the host: its containers start again when it is back, the driver is there some minutes later."""
        back = minute + length
        self.down.append((minute, back))
        self.restarts.append(back)
        if self.gpus:
            self.driver["absent"].append((back, back + driver_after))
        for container in self.containers.values():
            if container.run_at(minute) and container.runs[-1][0] < minute:
                container.end(back, "host_restart", 137, back)  # counted when memledger is back

    def upgrade(self, minute, version):
        """Replaces memledger within ten seconds: one scrape fails."""
        self.down.append((minute, minute + 1))
        self.restarts.append(minute + 1)
        self.version.append((minute + 1, LENGTH, version))

    def series(self):
        """Yields (name, labels, values), as if it could always be scraped."""
        yield "memledger_build_info", {"version": "1.4.0", "revision": "a", "rustversion": "1.90"}, level(1, *[(begin, end, None) for begin, end, _ in self.version])
        for begin, end, version in self.version:
            yield "memledger_build_info", {"version": version, "revision": "b", "rustversion": "1.90"}, level(None, (begin, end, 1))
        deviation = level(0, *self.clock)
        yield "memledger_snapshot_timestamp_seconds", {}, [60 * minute - 1 + deviation[minute] for minute in range(LENGTH)]
        for collector in COLLECTORS:
            yield "memledger_collector_success", {"collector": collector}, level(1)
        yield "memledger_runtime_up", {"runtime": self.runtime}, level(1)
        yield "memledger_host_memory_total_bytes", {}, level(self.size)
        usual = [self.size * 2 // 5 + shifted(self.name, minute, 8) * GIB for minute in range(LENGTH)]
        changed = level(None, *self.available)
        yield "memledger_host_memory_available_bytes", {}, [u if c is None else c for u, c in zip(usual, changed)]
        yield "memledger_host_memory_pressure_stalled_seconds_total", {}, total(*self.stalled)
        for scope in ("host", "limit"):
            yield "memledger_host_process_oom_kills_total", {"scope": scope}, total(*self.kills.get(scope, ()))
        yield "memledger_oom_kills_unattributed_total", {}, level(0)
        for source in ("kmsg", "vmstat", "cgroup", "runtime"):
            yield "memledger_oom_source_up", {"source": source}, level(1, *self.sources.get(source, ()))
        yield "memledger_store_up", {}, level(1)
        yield "memledger_panics_total", {}, level(0)
        yield "memledger_web_config_success", {}, level(1)
        yield "memledger_report_up", {"target": "directory"}, level(1)
        for signal in ("metrics", "logs"):
            yield "memledger_otlp_up", {"signal": signal}, level(1, *self.otlp)
        for container in self.containers.values():
            yield from container.series()
        if self.gpus:
            yield from self.gpu_series()

    def gpu_series(self):
        spans, visible, expected, most = self.driver, [], [], None
        for minute in range(LENGTH):
            now = sum(gpu.is_read(minute) for gpu in self.gpus) if self.is_driver_read(minute) else None
            most = None if self.forgets_gpus and minute in self.restarts else most
            most = max(most or 0, now or 0) or None
            visible.append(now)
            expected.append(most)
        yield "memledger_gpus_visible", {"source": "nvml"}, visible
        yield "memledger_gpus_expected", {"source": "nvml"}, expected
        not_read = [(begin, end, None) for kind in ("absent", "released") for begin, end in spans[kind]]
        hung = [(begin, end, 0) for begin, end in spans["hung"]]
        yield "memledger_collector_success", {"collector": "gpu"}, level(1, *not_read, *hung)
        yield "memledger_collector_success", {"collector": "gpu_attribution"}, level(1, *not_read, *[(b, e, None) for b, e, _ in hung])
        yield "memledger_gpu_unkillable_driver_processes", {}, level(0, *[(b, e, 1) for b, e, _ in hung])
        for reason in DRIVER_RESTARTS:
            yield "memledger_gpu_driver_process_restarts_total", {"reason": reason}, total(*self.driver_restarts.get(reason, ()), resets=self.restarts)
        if spans["released"]:
            left = [max((60 * (end - minute) for begin, end in spans["released"] if begin <= minute < end), default=None) for minute in range(LENGTH)]
            yield "memledger_gpu_release_remaining_seconds", {}, left
        for gpu in self.gpus:
            yield from gpu.series()


@dataclass
class Day:
    """One day of the fleet."""

    hosts: dict

    def host(self, name, **settings):
        self.hosts[name] = Host(name, **settings)
        return self.hosts[name]

    def series(self):
        """Yields (name, labels, values) as Prometheus has them: None where a sample is missing."""
        for host in self.hosts.values():
            target = {"job": "memledger", "instance": host.name}
            present = [host.added <= minute < host.removed for minute in range(LENGTH)]
            scraped = [is_present and host.is_up(minute) for minute, is_present in enumerate(present)]
            yield "up", target, [int(is_up) if is_present else None for is_up, is_present in zip(scraped, present)]
            for name, labels, values in host.series():
                yield name, target | labels, [value if is_up else None for value, is_up in zip(values, scraped)]


def train(age, _minute):
    """RAM of a training: it loads 10 GiB in its first minutes, later it rises and falls with its epochs of 40 minutes."""
    return (2 * GIB + min(age, 4) * 10 * GIB // 4) + age % 40 * 64 * MIB


def tensors(age, minute):
    """GPU memory of a training: less while it validates, which is five minutes of each hour."""
    return (22 if age % 60 < 5 else 30) * GIB if age > 3 else 4 * GIB


def new_day():
    """Returns a day on which nothing happens: six hosts with eight GPUs, twelve with containers of services, two large ones."""
    day = Day({})
    for number in range(1, GPU_HOSTS + 1):
        host = day.host(f"gpu-{number}", size=1024 * GIB, forgets_gpus=number == 1)
        host.gpus = [Gpu(host, index, is_before_ampere=number == GPU_HOSTS) for index in range(GPUS)]
        for gpu in host.gpus[:7]:
            gpu.throttled["sw_power_cap"] = each_minute(0, LENGTH, 55)  # at its power limit: it has much to do
            gpu.throttled["sync_boost"] = each_minute(0, LENGTH, 3)
        host.gpus[6].busy = [(0, LENGTH, 0.2)]
        trainer = {"limit": 64 * GIB, "used": train, "tensors": tensors, "shm": [(0, LENGTH, 0.4)], "workers": 0.5, "owner": "vision"}
        host.container("train-a", gpus=(0, 1, 2, 3), **trainer)
        host.container("train-b", gpus=(4, 5), **trainer)
        host.container("infer", gpus=(6,), gpu_used=lambda age, minute: 60 * GIB, limit=32 * GIB)
    for number in range(1, NODES + 1):
        host = day.host(f"node-{number:02}", runtime="cri")
        for index, name in enumerate(("api", "worker")):
            host.container(name, namespace="shop", pod=f"{name}-{number:02}", limit=(4 << index) * GIB)
        host.container("agent", namespace="system", pod=f"agent-{number:02}", limit=0)
    for number in (1, 2):
        host = day.host(f"big-{number}", size=2048 * GIB)
        host.container("spark", limit=0, used=lambda age, minute: 700 * GIB, owner="data")
        host.container("etl", limit=128 * GIB)
    return day


def written(value):
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def text(values):
    """Returns values in promtool's notation; the first missing one is a marker, as where a series ends."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    tokens, place, was_present = [], 0, False
    while place < len(runs):
        value, length = runs[place]
        if value is None:
            tokens += ["stale"] * was_present
            if blanks := length - was_present:
                tokens.append(f"_x{blanks}")
        elif length > 1:
            tokens.append(f"{written(value)}x{length - 1}")
        elif steps := straight(runs, place):
            tokens.append(f"{value}{runs[place + 1][0] - value:+d}x{steps}")
            place += steps
        else:
            tokens.append(written(value))
        was_present = value is not None
        place += 1
    return " ".join(tokens)


def straight(runs, place):
    """Returns how many of the next single values continue a straight line."""
    end = place
    while end + 1 < len(runs) and runs[end + 1][1] == 1 and isinstance(runs[end + 1][0], int) and isinstance(runs[place][0], int):
        if runs[end + 1][0] - runs[end][0] != runs[place + 1][0] - runs[place][0]:
            break
        end += 1
    return end - place
