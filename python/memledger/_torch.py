"""What torch's CUDA allocator says, without importing torch and without initialising CUDA.

``torch.cuda.mem_get_info`` and others would create a CUDA context, which costs hundreds of megabytes; only the allocator's own
counters are read here, and only once the program has initialised CUDA.
"""

import sys
from typing import Any, Dict, List, Optional

from memledger._guard import never_raises

#: Field of the protocol, and where it is in torch's nested statistics.
FIELDS = (
    ("alloc", ("allocated_bytes", "all", "current")),
    ("alloc_peak", ("allocated_bytes", "all", "peak")),
    ("res", ("reserved_bytes", "all", "current")),
    ("res_peak", ("reserved_bytes", "all", "peak")),
    ("split", ("inactive_split_bytes", "all", "current")),
    ("req", ("requested_bytes", "all", "current")),
    ("ooms", ("num_ooms",)),
    ("retries", ("num_alloc_retries",)),
)
#: The fields that torch's other allocators count too; they report 0 for the rest.
COMMON_FIELDS = FIELDS[:4]
NATIVE_ALLOCATOR = "native"
#: memledger accepts no more.
MAX_DEVICES = 64

Device = Dict[str, int]


def loaded() -> Optional[Any]:
    """Returns torch if the program has imported it completely."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "cuda") and hasattr(torch, "__version__") else None


def initialized() -> Optional[Any]:
    """Returns torch if the program has initialised CUDA in this process."""
    torch = loaded()
    return torch if torch is not None and torch.cuda.is_initialized() else None


def is_loaded_only() -> bool:
    """Returns whether the program has imported torch and not initialised CUDA."""
    return loaded() is not None and initialized() is None


def in_dataloader_worker() -> bool:
    """Returns whether this process is a worker of a DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def is_being_spawned() -> bool:
    """Returns whether multiprocessing is still preparing this process, and runs the main module again for it.

    It may become a worker of a DataLoader: torch says so only later.
    """
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


def allocator() -> Optional[str]:
    """Returns the name of torch's allocator, such as ``native`` or ``cudaMallocAsync``; None before CUDA is initialised."""
    torch = initialized()
    name = getattr(torch.cuda, "get_allocator_backend", None) if torch is not None else None
    return None if name is None else str(name())


def _pick(statistics: Dict[str, Any], index: int, is_native: bool) -> Device:
    device: Device = {"i": index}
    for field, path in FIELDS if is_native else COMMON_FIELDS:
        value: Any = statistics
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int):
            device[field] = value
    return device


@never_raises()
def devices() -> Optional[List[Device]]:
    """Returns the memory of each device on which torch holds or held memory, in bytes.

    None before CUDA is initialised, and with an allocator that has no statistics (a pluggable one).
    """
    torch = initialized()
    if torch is None:
        return None
    found, is_native = [], allocator() in (NATIVE_ALLOCATOR, None)
    for index in range(min(torch.cuda.device_count(), MAX_DEVICES)):
        # the flat memory_stats() takes a hundred times as long
        statistics = torch.cuda.memory.memory_stats_as_nested_dict(device=index)
        device = _pick(statistics, index, is_native)
        if "res_peak" not in device:
            return None
        if device["res_peak"] > 0:
            found.append(device)
    return found


def uuid(index: int) -> Optional[str]:
    """Returns the UUID of a device that the process uses; None before torch 2.5."""
    torch = initialized()
    if torch is None:
        return None
    value = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if value is None else str(value)


def total(found: Optional[List[Device]], field: str) -> Optional[int]:
    """Returns the sum of a field over devices; None if a part of it is unknown."""
    values = [None] if found is None else [device.get(field) for device in found]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
