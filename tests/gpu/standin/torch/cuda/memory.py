"""The statistics of the stand-in's allocator that memledger's client reads."""
from torch import cuda

import gpu


def memory_stats_as_nested_dict(device):
    from torch import _C

    return _C._cuda_memoryStats(device)


def statistics():
    wrong = 64 * gpu.MIB if gpu.LIE == "torch-statistics" else 0

    def stat(current, peak):
        return {"all": {"current": current, "peak": peak}}

    return {
        "allocated_bytes": stat(cuda.allocated - wrong, cuda.most_allocated - wrong),
        "reserved_bytes": stat(cuda.reserved, cuda.most),
    }
