"""A day with twelve incidents: each fires the alerts of its row, within its minutes, and sends the notifications of its row."""
from dataclasses import dataclass, field

from fleet import GIB, LENGTH, at, each_minute, new_day, ramp

FLEET = [f"node-{number:02}" for number in range(3, 8)]


@dataclass
class Incident:
    """A row of the table. Times are minutes of the day."""

    name: str
    begin: int
    end: int  # the fault is repaired
    alerts: dict  # (alert, severity, host, container) to the minutes after `begin` within which it fires
    notified: list  # (alert, severity, host) of each notification that Alertmanager sends; the order does not matter
    resolved: int = 12  # minutes after `end` within which all are resolved
    lasting: tuple = ()  # alerts that fire until the end
    info: list = field(default_factory=list)  # (alert, host, container): what may be displayed besides
    more_than_one: str = ""  # why the incident sends more than one notification


def new_incident_day():
    """Returns the day and its table."""
    day = new_day()
    return day, [happen(day.hosts) for happen in (gpu_lost, host_out_of_memory, fleet_down, uncorrectable, leak, full_shm,
                                                  crash_loop, cuda_oom, hung_driver, lost_kernel_log, outage, throttling)]  # fmt: skip


def gpu_lost(hosts):
    """It falls off the bus; the host is restarted and comes back without it; a power cycle brings it back."""
    host, begin, end = hosts["gpu-1"], at("08:00"), at("10:00")
    host.gpus[3].xids.append((begin, 79))
    host.gpus[3].lost.append((begin, end))
    host.containers["", "train-a"].end(begin + 1, "error", 1, again=begin + 3)
    host.reboot(at("08:40"))
    host.reboot(end - 7)
    return Incident(
        "a GPU is lost, also after a restart of its host", begin, end,
        {("MemledgerGpuLost", "critical", "gpu-1", ""): 3, ("MemledgerGpuXid", "critical", "gpu-1", ""): 1},
        [("MemledgerGpuXid", "critical", "gpu-1"), ("MemledgerGpuLost", "critical", "gpu-1"), ("MemledgerGpuLost", "critical", "gpu-1")],
        lasting=("MemledgerGpuLost",), info=[("MemledgerContainerEndsWithErrors", "gpu-1", "train-a")],
        more_than_one="Xid 79 is reported at once, the lost GPU two minutes later, and again when the host is back without it",
    )  # fmt: skip


def host_out_of_memory(hosts):
    """A container without a limit takes all memory within six minutes; six minutes later the kernel kills it."""
    host, begin = hosts["node-02"], at("09:00")
    killed = begin + 12
    host.available = [*ramp(begin, begin + 6, 200 * GIB, 6 * GIB), (begin + 6, killed, 6 * GIB)]
    host.stalled = each_minute(begin + 6, killed, 24)
    host.container("notebook", namespace="ml", pod="notebook-0", limit=0).kill(killed, "host", again=killed + 1)
    return Incident(
        "a host out of memory", begin, killed,
        {("MemledgerHostMemoryHigh", "critical", "node-02", ""): 11, ("MemledgerHostOOMKilled", "critical", "node-02", ""): 12,
         ("MemledgerContainerOOMKilled", "warning", "node-02", "notebook"): 12},
        [("MemledgerHostMemoryHigh", "critical", "node-02"), ("MemledgerHostOOMKilled", "critical", "node-02")],
        more_than_one="the kernel may kill, then it has",
    )  # fmt: skip


def fleet_down(hosts):
    """A switch fails: a quarter of the hosts cannot be scraped."""
    begin, end = at("11:00"), at("11:40")
    for name in FLEET:
        hosts[name].down.append((begin, end))
    return Incident(
        "a fleet down", begin, end,
        {("MemledgerExporterDown", "critical", "", ""): 11, **{("MemledgerExporterDown", "warning", name, ""): 16 for name in FLEET}},
        [("MemledgerExporterDown", "critical", "")],
        lasting=("MemledgerExporterDown",),
    )  # fmt: skip


def uncorrectable(hosts):
    """One memory error: the driver logs four Xids, and the row is remapped at the reset 50 minutes later."""
    host, begin, end = hosts["gpu-2"], at("12:00"), at("12:50")
    gpu = host.gpus[5]
    gpu.xids += [(begin, xid) for xid in (48, 63, 94, 154)]
    gpu.uncorrected.append((begin, 1))
    gpu.pending.append((begin, end, 1))
    host.containers["", "train-b"].end(begin + 1, "error", 1, again=end + 5)
    host.driver["released"].append((end - 5, end))
    alerts = {("MemledgerGpuEcc", "critical", "gpu-2", ""): 1, ("MemledgerGpuMemoryRepairPending", "warning", "gpu-2", ""): 6}
    return Incident(
        "an uncorrectable ECC error", begin, end,
        alerts | {("MemledgerGpuXid", severity, "gpu-2", ""): 1 for severity in ("critical", "warning")},
        [("MemledgerGpuEcc", "critical", "gpu-2")],
        info=[("MemledgerContainerEndsWithErrors", "gpu-2", "train-b")],
    )  # fmt: skip


def leak(hosts):
    """A service gains 2.5 GiB an hour, from the half of its limit; its owner restarts it."""
    begin, end = at("13:00"), at("14:40")
    service = hosts["node-08"].containers["worker-08", "worker"]
    service.limit = 16 * GIB
    service.used = lambda age, minute: 8 * GIB + GIB // 5 + (min(max(minute - begin, 0), 100) * GIB // 24 if minute < end else 0)
    service.end(end, "stopped", 143, again=end)
    return Incident(
        "a leak", begin, end,
        {("MemledgerContainerMemoryLeakSuspected", "warning", "node-08", "worker"): 90},
        [("MemledgerContainerMemoryLeakSuspected", "warning", "node-08")],
    )  # fmt: skip


def full_shm(hosts):
    """Workers fill /dev/shm for ten minutes, then one dies with a bus error."""
    begin, end = at("14:50"), at("15:00")
    training = hosts["gpu-6"].containers["", "train-a"]
    training.shm = [(0, LENGTH, 0.4), (begin, end, 0.97)]
    training.end(end, "signal", 135, again=end + 1)
    return Incident(
        "a full /dev/shm", begin, end,
        {("MemledgerContainerShmNearlyFull", "warning", "gpu-6", "train-a"): 3},
        [("MemledgerContainerShmNearlyFull", "warning", "gpu-6")],
        info=[("MemledgerContainerEndsWithErrors", "gpu-6", "train-a")],
    )  # fmt: skip


def crash_loop(hosts):
    """A container exits with an error every five minutes, twelve times."""
    begin, end = at("15:30"), at("16:30")
    container = hosts["node-10"].containers["api-10", "api"]
    for minute in range(begin, end, 5):
        container.end(minute, "error", 1, again=minute + 2)
    return Incident(
        "a crash loop", begin, end,
        {("MemledgerContainerCrashLooping", "warning", "node-10", "api"): 15},
        [("MemledgerContainerCrashLooping", "warning", "node-10")],
        resolved=60, info=[("MemledgerContainerEndsWithErrors", "node-10", "api")],
    )  # fmt: skip


def cuda_oom(hosts):
    """A training runs out of GPU memory, ends and is started again."""
    begin = at("16:40")
    training = hosts["gpu-3"].containers["", "train-b"]
    training.cuda_ooms.append(begin)
    training.end(begin, "cuda_oom", 1, again=begin + 1)
    return Incident(
        "a CUDA OOM", begin, begin + 1,
        {("MemledgerContainerCudaOOM", "warning", "gpu-3", "train-b"): 1},
        [("MemledgerContainerCudaOOM", "warning", "gpu-3")],
    )  # fmt: skip


def hung_driver(hosts):
    """A call of NVML does not return, and the process cannot be killed, until the host is restarted."""
    host, begin, end = hosts["gpu-4"], at("17:00"), at("18:00")
    host.driver["hung"].append((begin, end))
    host.driver_restarts["timeout"] = [(begin, 1)]
    host.reboot(end)
    return Incident(
        "a hung driver", begin, end,
        {("MemledgerGpuLost", "critical", "gpu-4", ""): 3, ("MemledgerCollectorFailing", "warning", "gpu-4", ""): 16,
         ("MemledgerGpuDriverFailing", "warning", "gpu-4", ""): 11},
        [("MemledgerGpuLost", "critical", "gpu-4")],
        lasting=("MemledgerGpuLost", "MemledgerGpuDriverFailing"),
    )  # fmt: skip


def lost_kernel_log(hosts):
    begin, end = at("18:20"), at("19:20")
    hosts["node-01"].sources["kmsg"] = [(begin, end, 0)]
    return Incident(
        "a lost kernel log", begin, end,
        {("MemledgerOOMSourceDown", "warning", "node-01", ""): 11},
        [("MemledgerOOMSourceDown", "warning", "node-01")],
        lasting=("MemledgerOOMSourceDown",),
    )  # fmt: skip


def outage(hosts):
    """A host runs out of memory within a minute, hangs for two hours while the kernel kills, and is power-cycled."""
    host, begin, end = hosts["big-1"], at("19:30"), at("21:30")
    host.available = [(begin - 1, begin, 8 * GIB)]
    host.kills["host"] = [(begin + 20, 2)]
    host.containers["", "spark"].kill(end, "host", again=end, at_time=begin + 5)
    host.reboot(begin, length=end - begin)
    return Incident(
        "kills during an outage", begin, end,
        {("MemledgerExporterDown", "warning", "big-1", ""): 16, ("MemledgerHostOOMKilled", "critical", "big-1", ""): end - begin + 1,
         ("MemledgerContainerOOMKilled", "warning", "big-1", "spark"): end - begin + 1},
        [("MemledgerExporterDown", "warning", ""), ("MemledgerHostOOMKilled", "critical", "big-1")],
        more_than_one="what the kernel killed is known only when the host is back",
    )  # fmt: skip


def throttling(hosts):
    """A fan fails: the hardware lowers the clocks half of the time."""
    begin, end = at("22:00"), at("22:50")
    hosts["gpu-5"].gpus[2].throttled |= {reason: each_minute(begin, end, 30) for reason in ("hw_slowdown", "hw_thermal")}
    return Incident(
        "throttling", begin, end,
        {("MemledgerGpuThrottled", "warning", "gpu-5", ""): 15},
        [("MemledgerGpuThrottled", "warning", "gpu-5")],
        lasting=("MemledgerGpuThrottled",),
    )  # fmt: skip
