"""The statistics of the stand-in's allocator that memledger's client reads."""
from torch import cuda

import gpu


def memory_stats_as_nested_dict(device):
    wrong = 64 * gpu.MIB if gpu.LIE == "torch-statistics" else 0

    def stat(current):
        return {"all": {"current": current, "peak": max(current, cuda.most)}}

    return {"allocated_bytes": stat(cuda.allocated - wrong), "reserved_bytes": stat(cuda.reserved)}
