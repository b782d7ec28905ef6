"""The memory of GPUs as the driver counts it, without a CUDA context: that would take some hundred megabytes of each."""

import contextlib
import ctypes
import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from memledger_client._guard import never_raises

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
NAME_BYTES = 96


class GpuMemory(NamedTuple):
    """Bytes of a GPU, of all its processes together. What the driver keeps for itself is used."""

    total: int
    used: int
    free: int


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@contextlib.contextmanager
def _library() -> Iterator[Optional[Any]]:
    """Gives the driver's library, or None where there is none that responds."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        library = None
    if library is None or library.nvmlInit_v2() != SUCCESS:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _memory(library: Any, find: str, key: Any) -> Optional[GpuMemory]:
    """Returns the memory of the GPU that a function of the library finds by a key."""
    handle, memory = ctypes.c_void_p(), _Memory()
    if getattr(library, find)(key, ctypes.byref(handle)) != SUCCESS:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != SUCCESS:
        return None
    return GpuMemory(memory.total, memory.used, memory.free)


def _by_uuid(library: Any, uuid: str) -> Optional[GpuMemory]:
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"  # as torch writes it
    return _memory(library, "nvmlDeviceGetHandleByUUID", name.encode())


@never_raises(default=dict)
def memory_of(uuids: List[str]) -> Dict[str, GpuMemory]:
    """Returns the memory of GPUs by UUID: of those that the driver knows."""
    with _library() as library:
        found = {uuid: _by_uuid(library, uuid) for uuid in uuids} if library is not None else {}
    return {uuid: memory for uuid, memory in found.items() if memory is not None}


@never_raises(default=int)
def count() -> int:
    """Returns how many GPUs the driver has, also those that are hidden from CUDA; 0 without it."""
    found = ctypes.c_uint()
    with _library() as library:
        if library is not None:
            library.nvmlDeviceGetCount_v2(ctypes.byref(found))
    return found.value


@never_raises()
def memory_of_first_visible() -> Optional[GpuMemory]:
    """Returns the memory of the GPU that CUDA will call 0 in this process. None where that cannot be known before, and without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    with _library() as library:
        if library is None:
            return None
        if visible.startswith("GPU-"):
            return _by_uuid(library, visible)
        if not visible.isdigit() or not _has_order_of_cuda(library):
            return None
        return _memory(library, "nvmlDeviceGetHandleByIndex_v2", int(visible))


def _has_order_of_cuda(library: Any) -> bool:
    """Returns whether CUDA numbers the GPUs as the driver does: it puts the fastest first where they differ."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    count, names = ctypes.c_uint(), set()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES)
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        library.nvmlDeviceGetName(handle, name, NAME_BYTES)
        names.add(name.value)
    return len(names) <= 1
