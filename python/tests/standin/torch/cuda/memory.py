"""The stand-in's ``torch.cuda.memory``: statistics of an allocator that is a few numbers."""

import torch

SEGMENT_BYTES = 2 << 20
STANDIN_IS_SPLIT = True  # set by tests: all of the cache is free parts of split blocks. The stand-in gives them back all the same


def version():
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class Allocator:
    def __init__(self):
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = 0
        self.ooms = self.retries = 0

    def allocate(self, count, total):
        needed = self.allocated + count
        if needed > self.reserved:
            reserved = -(-needed // SEGMENT_BYTES) * SEGMENT_BYTES
            if reserved > total:
                self.retries += 1
                self.ooms += 1
                return False
            self.reserved = reserved
        self.allocated = needed
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def reset_peaks(self):
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved


_allocators = {}


def of(device):
    return _allocators.setdefault(device, Allocator())


def empty_cache():
    for allocator in _allocators.values():
        allocator.reserved = -(-allocator.allocated // SEGMENT_BYTES) * SEGMENT_BYTES


def memory_stats_as_nested_dict(device=None):
    return torch._C._cuda_memoryStats(device or 0) if torch.cuda.is_initialized() else {}


def memory_stats(device=None):
    """Has only the figures that tests read."""
    nested = memory_stats_as_nested_dict(device)
    return {f"{name}.all.peak": nested[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes")}


def _dump_snapshot(filename):
    with open(filename, "w") as file:
        file.write("a history of allocations")


class _CUDAAllocator:
    def __init__(self, allocator):
        self._allocator = allocator


class CUDAPluggableAllocator(_CUDAAllocator):
    def __init__(self, path, allocate, free):
        super().__init__(torch._C._cuda_customAllocator(allocate, free))


def statistics(device):
    """What the allocator counts."""
    if torch.cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
    held = of(device)

    def stat(current=0, peak=0):
        figures = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
        return {"all": figures, "small_pool": dict.fromkeys(figures, 0), "large_pool": dict(figures)}

    is_native = torch.cuda.STANDIN_ALLOCATOR == "native"
    split = held.reserved - held.allocated if STANDIN_IS_SPLIT else 0
    statistics = {
        "allocated_bytes": stat(held.allocated, held.allocated_peak),
        "reserved_bytes": stat(held.reserved, held.reserved_peak),
        "active_bytes": stat(held.allocated, held.allocated_peak),
        # other allocators leave these as they are, which is 0
        "inactive_split_bytes": stat(split, held.reserved_peak) if is_native else stat(),
        "requested_bytes": stat(held.allocated, held.allocated_peak) if is_native else stat(),
        "num_ooms": held.ooms if is_native else 0,
        "num_alloc_retries": held.retries if is_native else 0,
    }
    for name in ("allocation", "segment", "active", "inactive_split"):
        statistics[name] = stat()
    for name in ("oversize_allocations", "oversize_segments"):
        statistics[name] = stat()["all"]
    for name in ("max_split_size", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
        statistics[name] = 0
    if version() >= (2, 15):
        statistics["num_oom_rejections"] = 0
        for name in ("allocated_bytes_by_private_pools", "reserved_bytes_by_private_pools"):
            statistics[name] = {(0, 1): 0}  # keys that are no JSON
    return statistics
