"""A busy day on which everything normal happens: nothing may page, and at most MOST notifications of warnings are sent."""
from fleet import GIB, LENGTH, at, each_minute, new_day

MOST = 5

# (alert, host, container): why a warning is right. No other warning may fire, and each of these must.
WARNINGS = {
    ("MemledgerContainerMemoryHigh", "node-01", "redis"): "Redis runs at 91 % of its limit: its owner may silence it, which the page says",
    ("MemledgerContainerOOMKilled", "big-1", "etl"): "a container was killed at its own limit: its owner lost work",
    ("MemledgerContainerCudaOOM", "gpu-3", "train-b"): "a program ran out of GPU memory and survived: its owner may want a smaller batch",
    ("MemledgerGpuXid", "gpu-4", ""): "Xids 13, 31 and 43 of one program's error: one notification",
}

REBOOTED = ["gpu-1", "gpu-2", "gpu-6", "node-02", "node-03", "big-2"]
ARRAY, FAILED = 200, range(37, 200, 40)  # jobs, and those that exit with an error
DEPLOYED = 30


def new_busy_day():
    day = new_day()
    hosts = day.hosts
    reboots_and_upgrades(hosts)
    deploys_and_jobs(hosts)
    autoscaler(day)
    memory(hosts)
    gpus(hosts)
    faults_of_seconds(hosts)
    return day


def reboots_and_upgrades(hosts):
    """Six hosts are rebooted one after another; later memledger is upgraded on all of them, in four waves."""
    for number, name in enumerate(REBOOTED):
        hosts[name].reboot(at("03:00") + 12 * number, driver_after=4)
    for number, host in enumerate(hosts.values()):
        host.upgrade(at("14:00") + 10 * (number % 4), "1.5.0")


def deploys_and_jobs(hosts):
    nodes = [hosts[f"node-{number:02}"] for number in range(1, 11)]
    # The runtime says of a deleted pod's container only that it ended by SIGTERM, or by SIGKILL after the grace period.
    for number in range(DEPLOYED):
        host, at_minute = nodes[number % 10], at("11:00") + number // 5
        reason, code = ("killed", 137) if number % 4 == 0 else ("signal", 143)
        host.container("web", namespace="shop", pod=f"web-6c5f-{number:02}", limit=2 * GIB).end(at_minute + 1, reason, code)
        host.container("web", namespace="shop", pod=f"web-7d9b-{number:02}", limit=2 * GIB, runs=[(at_minute, LENGTH)])
    # A job array: 20 start every four minutes and run for three.
    for number in range(ARRAY):
        begin = at("16:00") + 4 * (number // 20)
        job = nodes[number % 10].container("main", namespace="jobs", pod=f"array-{number:03}", limit=8 * GIB, runs=[(begin, LENGTH)])
        job.end(begin + 3, *(("error", 1) if number in FAILED else ("completed", 0)))
    # Containers that are stopped by request, and one that is started again.
    hosts["gpu-5"].containers["", "train-b"].end(at("09:30"), "stopped", 143, again=at("10:10"))
    hosts["gpu-6"].containers["", "train-b"].end(at("18:00"), "stopped", 137)
    hosts["big-2"].containers["", "etl"].end(at("12:00"), "completed", 0, again=at("20:00"))


def autoscaler(day):
    """Nodes that are added and removed: their targets appear and disappear."""
    for number, (begin, end) in enumerate([("08:00", "12:00"), ("08:05", "15:30"), ("13:00", "24:00")]):
        host = day.host(f"spot-{number}", runtime="cri", added=at(begin), removed=at(end))
        host.container("batch", namespace="jobs", pod=f"batch-{number}", limit=16 * GIB, runs=[(at(begin), LENGTH)])


def memory(hosts):
    node, big = hosts["node-01"], hosts["big-1"]
    node.container("redis", namespace="shop", pod="redis-0", limit=16 * GIB, used=lambda age, minute: 16 * GIB * 91 // 100)
    # 2 TiB, 91 % of it used, 190 GiB available
    big.available = [(0, LENGTH, 190 * GIB)]
    # the page cache fills a container's limit; what cannot be reclaimed is constant
    hosts["node-04"].container("reader", namespace="shop", pod="reader-0", limit=8 * GIB, page_cache=5 * GIB)
    # rises for 45 minutes and is freed, from 40 to 84 % of the limit
    hosts["node-05"].container("sawtooth", namespace="shop", pod="sawtooth-0", limit=10 * GIB, used=lambda age, minute: 4 * GIB + age % 45 * GIB // 10)
    # a cache that fills in six hours and then stays
    hosts["node-06"].container("warm", namespace="shop", pod="warm-0", limit=16 * GIB, used=lambda age, minute: 4 * GIB + min(minute, 360) * GIB // 60)
    # loads 10 of 16 GiB in its first minutes
    hosts["node-07"].container(
        "loader", namespace="ml", pod="loader-0", limit=16 * GIB, runs=[(at("10:00"), LENGTH)], used=lambda age, minute: GIB + min(age, 3) * 10 * GIB // 3
    )
    # killed at its own limit, and started again
    etl = big.containers["", "etl"]
    etl.used = lambda age, minute: 40 * GIB + (max(minute - at("17:00"), 0) * 17 * GIB if at("17:00") <= minute < at("17:06") else 0)
    etl.kill(at("17:06"), "container", at("17:06"))
    # short stalls while a large file is read
    hosts["node-08"].stalled = each_minute(at("05:00"), at("05:06"), 20)
    hosts["node-09"].containers["worker-09", "worker"].stalled = each_minute(at("06:00"), at("06:05"), 30)


def gpus(hosts):
    # idle for 20 minutes at night, with their memory held
    for gpu in hosts["gpu-1"].gpus[:6]:
        gpu.busy = [(at("01:30"), at("01:50"), 0)]
    # a notebook that works for ten minutes in each half hour
    hosts["gpu-6"].container("notebook", gpus=(7,), gpu_used=lambda age, minute: 12 * GIB, limit=32 * GIB)
    hosts["gpu-6"].gpus[7].busy = [(minute, minute + 10, 0.7) for minute in range(0, LENGTH - 10, 30)]
    # 97 % of the memory, as a caching allocator takes it
    hosts["gpu-6"].containers["", "train-a"].gpu_used = lambda age, minute: 78 * GIB
    # the driver is replaced: jobs are stopped, memledger releases it for a quarter of an hour
    host = hosts["gpu-5"]
    host.containers["", "train-a"].end(at("09:30"), "stopped", 143, again=at("10:10"))
    host.containers["", "infer"].end(at("09:30"), "stopped", 143, again=at("10:10"))
    host.driver["released"].append((at("09:40"), at("09:55")))
    host.driver["absent"].append((at("09:55"), at("09:56")))
    # a program runs out of GPU memory and survives
    hosts["gpu-3"].containers["", "train-b"].cuda_ooms.append(at("13:10"))
    # an error of an application: it ends, and its container with it
    begin = at("19:20")
    hosts["gpu-4"].gpus[4].xids += [(begin, 13), (begin, 31), (begin, 43), (begin, 45)]
    hosts["gpu-4"].containers["", "train-b"].end(begin, "error", 1, again=begin + 5)
    # five corrected errors in an hour
    hosts["gpu-6"].gpus[2].corrected = [(minute, 1) for minute in range(7, LENGTH, 12)]
    # short heat
    hosts["gpu-6"].gpus[3].throttled |= {reason: each_minute(at("15:00"), at("15:05"), 30) for reason in ("hw_slowdown", "hw_thermal")}
    # the driver's process crashes twice and is replaced at once
    hosts["gpu-2"].driver_restarts["ended"] = [(at("07:00"), 1), (at("21:00"), 1)]


def faults_of_seconds(hosts):
    # a clock that is set three minutes ahead, and back half an hour later
    hosts["node-10"].clock = [(at("04:30"), at("05:00"), 180)]
    # Prometheus cannot scrape one host for three minutes
    hosts["node-09"].down.append((at("22:00"), at("22:03")))
    # the OTLP endpoint is down for ten minutes
    for host in hosts.values():
        host.otlp = [(at("02:10"), at("02:20"), 0)]
