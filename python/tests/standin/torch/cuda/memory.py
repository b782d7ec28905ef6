"""The stand-in's ``torch.cuda.memory``: statistics of an allocator that is a few numbers."""

import torch

SEGMENT_BYTES = 2 << 20
STANDIN_IS_SPLIT = True  # set by tests: all of the cache is free parts of split blocks. The stand-in gives them back all the same


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
    if not torch.cuda.is_initialized():
        return {}
    if torch.cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
    held = of(device or 0)

    def stat(current, peak):
        return {"all": {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}}

    return {
        "allocated_bytes": stat(held.allocated, held.allocated_peak),
        "reserved_bytes": stat(held.reserved, held.reserved_peak),
        "inactive_split_bytes": stat(held.reserved - held.allocated if STANDIN_IS_SPLIT else 0, held.reserved_peak),
        "requested_bytes": stat(held.allocated, held.allocated_peak),
        "num_ooms": held.ooms,
        "num_alloc_retries": held.retries,
    }
