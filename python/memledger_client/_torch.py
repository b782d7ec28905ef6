"""What torch's CUDA allocator says, without importing torch and without initialising CUDA.

``torch.cuda.mem_get_info`` and others would create a CUDA context, which costs hundreds of megabytes; only the allocator's own
counters are read here, and only once the program has initialised CUDA.
"""

import gc
import sys
from typing import Any, Dict, List, Optional, Set

from memledger_client._guard import never_raises

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
#: Attribute of a function of ours that took the place of another: that one.
ORIGINAL = "_original_of_memledger"

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


#: Devices on which torch held memory: after a reset of its peaks nothing else shows that.
_held: Set[int] = set()
#: An allocator of the program's own exists. Torch calls it while it holds its lock, and it may call Python (vLLM's sleep mode does):
#: a thread that reads statistics then waits for that lock with the GIL, which the allocator waits for.
_has_own_allocator = False


def watch_allocators() -> None:
    """Notices from now on when the program makes an allocator of its own; finds one that it has made before."""
    global _has_own_allocator
    torch = loaded()
    make = getattr(torch._C, "_cuda_customAllocator", None) if torch is not None else None
    if make is None or hasattr(make, ORIGINAL):
        return

    def custom_allocator(*arguments: Any) -> Any:
        global _has_own_allocator
        _has_own_allocator = True
        return make(*arguments)

    setattr(custom_allocator, ORIGINAL, make)
    torch._C._cuda_customAllocator = custom_allocator  # type: ignore[union-attr]
    kind = getattr(getattr(torch.cuda, "memory", None), "_CUDAAllocator", None)  # type: ignore[union-attr]
    if kind is not None:  # not isinstance, which calls the code of proxies
        _has_own_allocator = _has_own_allocator or any(issubclass(type(each), kind) for each in gc.get_objects())


def has_own_allocator() -> bool:
    """Returns whether the program made an allocator of its own, with which statistics must not be read."""
    return _has_own_allocator


def statistics(index: int) -> Dict[str, Any]:
    """Returns torch's nested statistics of a device, as its allocator counts them."""
    torch = sys.modules["torch"]
    # the flat memory_stats() takes a hundred times as long
    read = getattr(torch._C, "_cuda_memoryStats", None)
    read = getattr(read, ORIGINAL, read)
    found: Dict[str, Any] = read(index) if read is not None else torch.cuda.memory.memory_stats_as_nested_dict(device=index)
    if pick(found, index).get("res_peak", 0) > 0:
        _held.add(index)
    return found


def pick(found: Dict[str, Any], index: int, is_native: bool = True) -> Device:
    """Returns the fields of the protocol from the statistics of a device."""
    device: Device = {"i": index}
    for field, path in FIELDS if is_native else COMMON_FIELDS:
        value: Any = found
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int):
            device[field] = value
    return device


def _with_context(torch: Any) -> List[int]:
    """Returns the devices on which the process has a CUDA context, so that no other one is read: a rank sees all of its host."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    visible = range(min(torch.cuda.device_count(), MAX_DEVICES))
    return [index for index in visible if has_context is None or has_context(index)]


@never_raises()
def read() -> Optional[Dict[int, Dict[str, Any]]]:
    """Returns torch's nested statistics of each device with a context, by device.

    None before CUDA is initialised, with an allocator that has no statistics (a pluggable one), and once the program has made an
    allocator of its own, such as for a ``MemPool``.
    """
    torch = initialized()
    watch_allocators()
    if torch is None or _has_own_allocator or allocator() == "pluggable":
        return None
    return {index: statistics(index) for index in _with_context(torch)}


@never_raises()
def devices() -> Optional[List[Device]]:
    """Reads the memory of each device on which torch holds or held memory, in bytes; None as for ``read``."""
    found = read()
    if found is None:
        return None
    is_native = allocator() in (NATIVE_ALLOCATOR, None)
    every = [pick(of_device, index, is_native) for index, of_device in found.items()]
    if any("res_peak" not in device for device in every):
        return None
    return [device for device in every if device["i"] in _held]


def forget_devices() -> None:
    """Forgets which devices held memory, as in a forked child."""
    _held.clear()


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
