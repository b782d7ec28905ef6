"""What memledger costs on this machine, beside `nvidia-smi -l 1`, and what each of its calls costs the driver. Notes of the
report: a machine that is slow is no failure."""
import ctypes
import os
import statistics
import subprocess
import time

SECONDS = 20
CALLS = 15


def children(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(child) for child in file.read().split()]
    return found


def cpu_seconds(pid):
    """CPU time of all threads of a process, by the scheduler: the times in `stat` are too coarse."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def by_thread(pid):
    """CPU seconds by the name of the thread."""
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/comm") as name, open(f"/proc/{pid}/task/{task}/schedstat") as times:
            name = name.read().strip()
            found[name] = found.get(name, 0) + int(times.read().split()[0]) / 1e9
    return found


def milliseconds(pids):
    """CPU of these processes in milliseconds per second."""
    before = sum(map(cpu_seconds, pids))
    time.sleep(SECONDS)
    return 1e3 * (sum(map(cpu_seconds, pids)) - before) / SECONDS


def of_memledger(binary, library, flags):
    """CPU of memledger's NVML process, and of its own by thread, unscraped, in milliseconds per second."""
    always = ["--web.listen-address=127.0.0.1:0", "--docker.socket=", "--podman.socket=", "--state.path=", "--local.socket=",
              "--reporter.directory=", "--oom.kernel-log=off"]
    library = [f"--gpu.nvml-library={library}"] if library else []
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([binary, "serve", *always, *flags, *library], **quiet) as child:
        try:
            time.sleep(5)
            driver = children(child.pid)
            before = by_thread(child.pid)
            of_driver = milliseconds(driver)
            own = {name: 1e3 * (seconds - before.get(name, 0)) / SECONDS for name, seconds in by_thread(child.pid).items()}
            return of_driver, own
        finally:
            child.terminate()


def of_nvidia_smi(program):
    with subprocess.Popen([program, "-l", "1"], stdout=subprocess.DEVNULL) as child:
        try:
            time.sleep(3)
            return milliseconds([child.pid])
        finally:
            child.terminate()


def of_calls(library, uuid):
    """Microseconds of each call of memledger: the median by the clock, and by the CPU time of the thread."""
    nvml = ctypes.CDLL(library or "libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
        return {}
    device = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device))
    number, long = ctypes.c_uint(), ctypes.c_ulonglong()
    buffer = (ctypes.c_ubyte * (1 << 16))()
    events = ctypes.c_void_p()
    nvml.nvmlEventSetCreate(ctypes.byref(events))
    nvml.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(8), events)
    ref = ctypes.byref

    def memory():
        ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint))[0] = 2 << 24 | 40
        return nvml.nvmlDeviceGetMemoryInfo_v2(device, buffer)

    def listed(kind):
        def call():
            count = ctypes.c_uint(64)
            return getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")(device, ref(count), buffer)
        return call

    def utilization():
        count = ctypes.c_uint(1000)
        since = ctypes.c_ulonglong(int((time.time() - 5) * 1e6))
        return nvml.nvmlDeviceGetProcessUtilization(device, buffer, ref(count), since)

    def fields():
        ids = [38, 39, 45, 52, 160, 82, 138, 139]
        for at, field in enumerate(ids):
            ctypes.cast(ref(buffer, 40 * at), ctypes.POINTER(ctypes.c_uint))[0] = field
        return nvml.nvmlDeviceGetFieldValues(device, len(ids), buffer)

    def pages():
        count = ctypes.c_uint(64)
        return nvml.nvmlDeviceGetRetiredPages(device, 0, ref(count), buffer)

    simple = {name: lambda name=name, kind=kind: getattr(nvml, f"nvmlDevice{name}")(device, ref(kind)) for name, kind in [
        ("GetUtilizationRates", buffer), ("GetPowerUsage", number), ("GetCurrentClocksThrottleReasons", long),
        ("GetTotalEnergyConsumption", long), ("GetEnforcedPowerLimit", number), ("GetPcieReplayCounter", number),
        ("GetRetiredPagesPendingStatus", number)]}
    calls = {
        "nvmlEventSetWait_v2": lambda: nvml.nvmlEventSetWait_v2(events, buffer, 0),
        "GetMemoryInfo_v2": memory,
        **{f"Get{kind}RunningProcesses_v3": listed(kind) for kind in ("Compute", "Graphics", "MPSCompute")},
        "GetMigMode": lambda: nvml.nvmlDeviceGetMigMode(device, ref(number), ref(ctypes.c_uint())),
        "GetTemperature": lambda: nvml.nvmlDeviceGetTemperature(device, 0, ref(number)),
        "GetClockInfo": lambda: nvml.nvmlDeviceGetClockInfo(device, 1, ref(number)),
        "GetProcessUtilization": utilization,
        "GetTotalEccErrors": lambda: nvml.nvmlDeviceGetTotalEccErrors(device, 0, 0, ref(long)),
        "GetRemappedRows": lambda: nvml.nvmlDeviceGetRemappedRows(device, *[ref(ctypes.c_uint()) for _ in range(4)]),
        "GetRetiredPages": pages,
        "GetFieldValues": fields,
        **simple,
    }
    found = {}
    for name, call in calls.items():
        waited, used = [], []
        for _ in range(CALLS):
            clock, cpu = time.perf_counter(), time.thread_time()
            code = call()
            used.append(time.thread_time() - cpu)
            waited.append(time.perf_counter() - clock)
        found[name] = (code, 1e6 * statistics.median(waited), 1e6 * statistics.median(used))
    nvml.nvmlShutdown()
    return found


def run(check, library):
    smi = of_nvidia_smi(check.options.nvidia_smi)
    for name, flags in (("memledger", []), ("memledger --gpu.sample-interval=0s", ["--gpu.sample-interval=0s"])):
        driver, own = of_memledger(check.options.binary, library, [*check.cgroups.flags, *flags])
        threads = ", ".join(f"{thread} {used:.2f}" for thread, used in sorted(own.items(), key=lambda row: -row[1]) if used > 0.02)
        check.note(f"cost: {name}: {driver + sum(own.values()):.2f} ms of CPU per second, {driver:.2f} of it in the NVML process "
                   f"({threads}); nvidia-smi -l 1 {smi:.2f}; {len(check.workers)} PyTorch processes")
    for name, (code, waited, used) in sorted(of_calls(library, check.uuid).items(), key=lambda row: -row[1][1]):
        check.note(f"call: {name}: {waited:.0f} us, of which {used:.0f} us CPU; code {code}")
