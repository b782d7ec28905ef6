"""Four hours of a fleet in which most stands still, and what has to alert there: once, and nothing else.

Two hours of constant counters; then one host is away for 20 minutes and one for 90, as each way of receiving leaves it: by scrape `up` is 0 and
series end with a staleness marker, by OTLP they just end. Then, at once: a host that is new, a container that loops, on it and on a host that is
known, each loop another run and beside a neighbour that never restarts, an upgrade of memledger, which costs a sample, one of each kind of kill and
error, and a host that is cut off.
"""
STEP = 60
END = 250  # minutes
BACK20, BACK90 = (120, 140), (120, 210)
NEW, KILLS, CUT_OFF, UPGRADE = 212, 220, 216, 225
LOOP = (214, 222)  # a kill in each minute after the first
RUNS = {f"run-{loops}" for loops in range(LOOP[1] - LOOP[0] + 1)} | {"run-upgraded"}
QUIET = [f"quiet-{number}" for number in range(26)]
HOSTS = [*QUIET, "back20", "back90", "new", "known", "killed", "full", "leak", "cutoff"]
GIB = 1 << 30
ALWAYS = {("MemledgerWatchdog", "none", "")}
# What is to fire, each once: (alert, severity, host).
EXPECTED = {
    ("MemledgerHostOOMKilled", "critical", "killed"),
    ("MemledgerUnitOOMKilled", "warning", "killed"),
    ("MemledgerOOMKillUnattributed", "warning", "killed"),
    ("MemledgerContainerEndsWithErrors", "info", "killed"),
    ("MemledgerGpuEcc", "critical", "killed"),
    ("MemledgerPanicked", "warning", "killed"),
    ("MemledgerContainerOOMKilled", "warning", "new"),
    ("MemledgerContainerOOMKilled", "warning", "known"),
    ("MemledgerContainerCrashLooping", "warning", "new"),
    ("MemledgerContainerCrashLooping", "warning", "known"),
    ("MemledgerHostMemoryHigh", "info", "full"),
    ("MemledgerHostMemoryHigh", "warning", "full"),
    ("MemledgerHostMemoryHigh", "critical", "full"),
    ("MemledgerContainerMemoryLeakSuspected", "warning", "leak"),
    ("MemledgerContainerMemoryHigh", "info", "leak"),
}
AWAY = ("back20", "back90", "cutoff")
# Alerts of hosts that are away, and of those alone: by scrape, and by OTLP.
OF_SCRAPE = {("MemledgerExporterDown", "warning", host) for host in AWAY}
OF_OTLP = {("MemledgerNotReceived", "warning", host) for host in AWAY}


def is_there(host, minute):
    """Returns whether the server gets samples of a host."""
    away = {"back20": BACK20, "back90": BACK90, "cutoff": (CUT_OFF, END + 1), "new": (-1, NEW)}.get(host)
    is_upgrade = host == "known" and minute == UPGRADE
    return not is_upgrade and (away is None or not away[0] < minute < away[1])


def loops_of(host, minute):
    """Returns how often the container has been killed in its loop."""
    return max(0, min(minute, LOOP[1]) - LOOP[0]) if host in ("known", "new") else 0


def counters(host, minute):
    """Returns the series of a host at a minute but those of its memory: {(name, labels as pairs): value}."""
    has = host == "killed"
    rise = 1 if has and minute >= KILLS else 0
    loops = loops_of(host, minute)
    is_upgraded = host == "known" and minute >= UPGRADE
    run = "run-upgraded" if host == "known" and minute > UPGRADE + 1 else f"run-{loops}"
    container, neighbour = (("container_name", "c"),), (("container_name", "neighbour"),)
    ecc = (("gpu", "0"), ("gpu_uuid", f"GPU-{host}"))
    found = {
        ("memledger_build_info", (("revision", "a"), ("rustversion", "1"), ("version", "2" if is_upgraded else "1"))): 1,
        ("memledger_host_process_oom_kills_total", (("scope", "host"),)): 4 + rise,
        ("memledger_host_process_oom_kills_total", (("scope", "limit"),)): 3 + rise,
        ("memledger_oom_kills_unattributed_total", ()): 2 + rise,
        ("memledger_panics_total", ()): 0 if is_upgraded else 2 + rise,
        ("memledger_gpu_ecc_errors_total", (*ecc, ("kind", "uncorrected"))): 3 + rise,
        ("memledger_gpu_ecc_errors_total", (*ecc, ("kind", "corrected"))): 105,
        ("memledger_gpu_driver_process_restarts_total", (("reason", "ended"),)): 7,
        ("memledger_series_dropped_total", (("family", "memledger_container_info"),)): 5,
        ("memledger_container_exits_total", (*container, ("reason", "error"))): 5 + rise,
        ("memledger_container_exits_total", (*container, ("reason", "oom_container"))): 5 + loops,
        ("memledger_container_restarts_total", container): 10 + rise + loops,
        ("memledger_container_oom_kills_total", (*container, ("scope", "host"), ("victim", "main"))): 2,
        ("memledger_container_oom_kills_total", (*container, ("scope", "container"), ("victim", "main"))): 5 + loops,
        ("memledger_container_owner_info", (*container, ("owner", "vision"))): 1,
        ("memledger_container_run_info", (*container, ("group", "c"), ("run", run))): 1,
        ("memledger_container_memory_unreclaimable_bytes", container): GIB,
        ("memledger_container_run_info", (*neighbour, ("group", "n"), ("run", "run-neighbour"))): 1,
        ("memledger_container_memory_unreclaimable_bytes", neighbour): GIB,
    }
    return found


def series(host, minute, begin):
    """Returns all series of a host at a minute; `begin` is the Unix time of minute 0."""
    found = counters(host, minute)
    container = (("container_name", "c"),)
    loops = loops_of(host, minute)
    found["memledger_container_last_oom_kill_timestamp_seconds", container] = begin - 5000 if not loops else begin + 60 * (LOOP[0] + loops) - 10
    found["memledger_snapshot_timestamp_seconds", ()] = begin + 60 * minute - 3
    available = 8 if host == "full" else 900
    found["memledger_host_memory_available_bytes", ()] = available * GIB
    found["memledger_host_memory_total_bytes", ()] = 1000 * GIB
    if host == "leak":
        grown = (70 + minute * 0.15) * GIB
        found["memledger_container_memory_unreclaimable_bytes", container] = grown
        found["memledger_container_memory_effective_limit_bytes", container] = 128 * GIB
        found["memledger_container_memory_limit_utilization_ratio", container] = grown / (128 * GIB)
        found["memledger_container_memory_headroom_bytes", container] = 128 * GIB - grown
    found["memledger_container_start_time_seconds", container] = begin - 3600
    return found


def samples(begin, by_scrape):
    """Yields minute by minute [(labels, [(time, value)])], as a server gets them; None is a staleness marker."""
    before = {host: {} for host in HOSTS}
    for minute in range(END + 1):
        at, found = begin + 60 * minute, []
        for host in HOSTS:
            target = {"job": "memledger", "instance": host}
            now = series(host, minute, begin) if is_there(host, minute) else {}
            if by_scrape and (host != "new" or minute >= NEW):
                found.append(({**target, "__name__": "up"}, [(at, 1 if now else 0)]))
            for (name, labels), value in now.items():
                found.append(({**target, **dict(labels), "__name__": name}, [(at, value)]))
            for name, labels in before[host].keys() - now.keys() if by_scrape else ():
                found.append(({**target, **dict(labels), "__name__": name}, [(at, None)]))
            before[host] = now
        yield found
