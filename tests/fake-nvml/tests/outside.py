"""Reads the fake library with NVIDIA's own Python binding and prints what it sees, as JSON.

Exit status 77: the binding (nvidia-ml-py) is not installed. LD_LIBRARY_PATH
names the directory of the library.
"""

import json
import sys

try:
    import pynvml
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)


def attempt(function, *arguments):
    """What the function returns, or the code of its NVML error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return {"error": error.value}


def memory(device):
    info = attempt(pynvml.nvmlDeviceGetMemoryInfo, device, pynvml.nvmlMemory_v2)
    if isinstance(info, dict):
        return info
    return {"total": info.total, "reserved": info.reserved, "used": info.used, "free": info.free}


def processes(device):
    running = attempt(pynvml.nvmlDeviceGetComputeRunningProcesses, device)
    if isinstance(running, dict):
        return running
    return [[process.pid, process.usedGpuMemory, process.gpuInstanceId] for process in running]


def mig(device):
    if attempt(pynvml.nvmlDeviceGetMigMode, device) != [1, 1]:
        return []
    instances = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        instance = attempt(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, index)
        if not isinstance(instance, dict):
            get_ids = [pynvml.nvmlDeviceGetGpuInstanceId, pynvml.nvmlDeviceGetComputeInstanceId]
            instances.append({
                "uuid": pynvml.nvmlDeviceGetUUID(instance),
                "ids": [get_id(instance) for get_id in get_ids],
                "memory": memory(instance),
                "processes": processes(instance),
            })
    return instances


def gpu(index):
    device = attempt(pynvml.nvmlDeviceGetHandleByIndex, index)
    if isinstance(device, dict):
        return device
    field = pynvml.nvmlDeviceGetFieldValues(device, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    return {
        "uuid": pynvml.nvmlDeviceGetUUID(device),
        "name": pynvml.nvmlDeviceGetName(device),
        "bus_id": pynvml.nvmlDeviceGetPciInfo(device).busId,
        "memory": memory(device),
        "processes": processes(device),
        "power_mw": attempt(pynvml.nvmlDeviceGetPowerUsage, device),
        "temperature_c": attempt(pynvml.nvmlDeviceGetTemperatureV, device, pynvml.NVML_TEMPERATURE_GPU),
        "corrected": attempt(pynvml.nvmlDeviceGetTotalEccErrors, device, 0, pynvml.NVML_AGGREGATE_ECC),
        "remapped_rows": attempt(pynvml.nvmlDeviceGetRemappedRows, device),
        "field_186": [field[0].nvmlReturn, field[0].valueType, field[0].value.ullVal],
        "mig": mig(device),
    }


def main():
    pynvml.nvmlInit()
    seen = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "gpus": [gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
    }
    pynvml.nvmlShutdown()
    json.dump(seen, sys.stdout)


main()
