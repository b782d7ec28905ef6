"""The stand-in's ``torch.cuda``; see the package."""

import os
import threading
import types

import torch

from . import memory

TOTAL_BYTES = 12 << 30
STANDIN_ALLOCATOR_IS_PLUGGABLE = False  # set by tests
STANDIN_ALLOCATOR = "native"  # set by tests
STANDIN_CAPTURES = None  # set by tests: the device whose current stream captures a graph
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})

if memory.version() >= (2, 8):  # what errors of CUDA itself are since then
    torch.AcceleratorError = type("AcceleratorError", (RuntimeError,), {})

standin_contexts = set()  # devices on which the real one would hold memory for the process. Not in torch
_initialized_by = None
_is_initializing = False
_current = threading.local()  # each thread has a current device
_queued = []


def _uuids():
    return os.environ.get("STANDIN_GPUS", "00000000-0000-0000-0000-000000000000").split(",")


def is_available():
    return True


def is_initialized():
    return _initialized_by == os.getpid()


def init():
    """Makes the queued calls and then counts CUDA as initialised, as the first use of a device does."""
    global _initialized_by, _is_initializing
    if is_initialized() or _is_initializing:
        return
    if _initialized_by is not None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
    _is_initializing = True
    for call in _queued:
        call()
    _is_initializing = False
    _initialized_by = os.getpid()
    _queued.clear()


def _lazy_call(call, **kwargs):
    if is_initialized():
        call()
    else:
        _queued.append(call)


def get_allocator_backend():
    return "pluggable" if STANDIN_ALLOCATOR_IS_PLUGGABLE else STANDIN_ALLOCATOR


def device_count():
    return len(_uuids())


def current_device():
    init()
    return getattr(_current, "device", 0)


def set_device(index):
    _current.device = index


def get_device_properties(device):
    init()
    properties = types.SimpleNamespace(
        name="Stand-in", total_memory=TOTAL_BYTES, major=8, minor=6, multi_processor_count=28
    )
    if memory.version() >= (2, 5):
        properties.uuid = _uuids()[device]  # a uuid without prefix, as in torch
    return properties


def mem_get_info(device=None):
    """Free and total memory. The real one creates a context: a program that only observes must not call it before."""
    init()
    standin_contexts.add(device or 0)
    held = memory.of(device or 0).reserved
    return TOTAL_BYTES - held, TOTAL_BYTES


class device:
    """Makes a device the current one for a while. Creates no context, there nor on the one before."""

    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_):
        set_device(self.before)


def is_current_stream_capturing():
    """The real one creates a context on the current device."""
    standin_contexts.add(current_device())
    return current_device() == STANDIN_CAPTURES


def empty_cache():
    if is_initialized():
        standin_contexts.add(current_device())  # as the real one
        memory.empty_cache()


def ipc_collect():
    pass


def synchronize(device=None):
    init()
    standin_contexts.add(device or 0)


def reset_peak_memory_stats(device=None):
    init()
    torch._C._cuda_resetPeakMemoryStats(device or 0)


def reset_accumulated_memory_stats(device=None):
    init()
    torch._C._cuda_resetAccumulatedMemoryStats(device or 0)


def memory_allocated(device=None):
    return memory.of(device or 0).allocated if is_initialized() else 0


def max_memory_allocated(device=None):
    return memory.memory_stats(device)["allocated_bytes.all.peak"] if is_initialized() else 0


def max_memory_reserved(device=None):
    return memory.memory_stats(device)["reserved_bytes.all.peak"] if is_initialized() else 0


def memory_reserved(device=None):
    return memory.of(device or 0).reserved if is_initialized() else 0


def standin_allocate(count, device=0):
    """Holds this many bytes of tensors; raises OutOfMemoryError where the device is full. Not in torch."""
    init()
    standin_contexts.add(device)
    held = memory.of(device)
    if held.allocate(count, TOTAL_BYTES):
        return
    free = TOTAL_BYTES - held.reserved
    for observer in torch._C.observers:
        observer(device, count, TOTAL_BYTES, free)
    size = lambda bytes: f"{bytes / (1 << 30):.2f} GiB"
    raise OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {size(count)}. GPU {device} has a total capacity of {size(TOTAL_BYTES)} of which "
        f"{size(free)} is free. Including non-PyTorch memory, this process has {size(held.reserved)} memory in use. Of the "
        f"allocated memory {size(held.allocated)} is allocated by PyTorch, and {size(held.reserved - held.allocated)} is reserved "
        "by PyTorch but unallocated. (stand-in)"
    )


def standin_free(count, device=0):
    """Frees this many bytes of tensors; they stay in the cache. Not in torch."""
    memory.of(device).allocated -= count
