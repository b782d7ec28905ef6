"""The caching allocator of the stand-in: blocks are kept in steps of 2 MiB until the cache is emptied."""
import os
import time
import types

import gpu

from . import memory  # noqa: F401

STEP = 2 * gpu.MIB
allocated = reserved = most = most_allocated = 0
started = None  # the process that did it
queued = []
worked = 0.0


class OutOfMemoryError(RuntimeError):
    pass


def is_available():
    return True


def is_bf16_supported():
    return True


def is_initialized():
    return started == os.getpid()


def init():
    global started
    if started is None:
        started = os.getpid()
        gpu.hold_until_the_end()
        gpu.hold(0)
        while queued:
            queued.pop()()


def _lazy_call(call):
    if is_initialized():
        call()
    else:
        queued.append(call)


def device_count():
    return 1


def get_device_properties(index):
    found = gpu.read()["gpus"][getattr(index, "index", index)]
    return types.SimpleNamespace(uuid=found["uuid"].removeprefix("GPU-"), name="stand-in", total_memory=found["memory"]["total"])


def take(size):
    global allocated, reserved, most, most_allocated
    init()
    if not size:
        return
    size = -(-size // STEP) * STEP
    grow = max(0, allocated + size - reserved)
    free, total = mem_get_info()
    if grow > free:
        from torch import _C

        for observe in _C.observers:
            observe(0, size, total, free + (1 << 30 if gpu.LIE == "torch-oom" else 0))
        raise OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / (1 << 30):.2f} GiB. GPU 0 has a total capacity of"
            f" {total / (1 << 30):.2f} GiB of which {free / (1 << 30):.2f} GiB is free."
            f" Of the allocated memory {allocated / (1 << 30):.2f} GiB is allocated by PyTorch, and"
            f" {(reserved - allocated) / (1 << 30):.2f} GiB is reserved by PyTorch but unallocated. (stand-in)"
        )
    allocated += size
    most_allocated = max(most_allocated, allocated)
    if grow:
        reserved += grow
        most = max(most, reserved)
        gpu.hold(reserved)


def give(size):
    global allocated
    allocated -= -(-size // STEP) * STEP


class device:
    """Makes a device the current one; there is only one."""

    def __init__(self, index):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def is_current_stream_capturing():
    return False


def empty_cache():
    global reserved
    if reserved != allocated:
        reserved = allocated
        gpu.hold(reserved)


def work():
    global worked
    if time.monotonic() - worked > 0.1:
        worked = time.monotonic()
        gpu.busy(90)


def synchronize():
    if worked:
        time.sleep(0.1)
        if time.monotonic() - worked > 0.5:
            gpu.busy(0)


def mem_get_info(device=None):
    memory = gpu.read()["gpus"][0]["memory"]
    total = memory["total"] - memory["reserved"]
    return gpu.free(), total - (4096 * gpu.MIB if gpu.LIE == "torch-total" else 0)


def memory_allocated(device=None):
    return allocated


def memory_reserved(device=None):
    return reserved + (reserved // 10 if gpu.LIE == "torch-growth" else 0)


def max_memory_allocated():
    return memory.memory_stats_as_nested_dict(0)["allocated_bytes"]["all"]["peak"]


def max_memory_reserved():
    return memory.memory_stats_as_nested_dict(0)["reserved_bytes"]["all"]["peak"]


def reset_peak_memory_stats():
    from torch import _C

    _C._cuda_resetPeakMemoryStats(0)


def current_device():
    init()
    return 0
