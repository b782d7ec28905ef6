"""A PyTorch process that runs commands: one JSON object a line in, one out. Run by the check, in its cgroup."""
import json
import os
import sys
import time

MIB = 1 << 20
allocated = {}


def memory_stats(torch, **more):
    """Returns torch's figures of itself and of the GPU."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"pid": os.getpid(), "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
            "free": free, "total": total, **more}


def block(torch, mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def spike(torch, mib, ms):
    """Allocates a block for `ms`, and empties the caching allocator right after."""
    began = time.monotonic()
    peak_block = block(torch, mib)
    torch.cuda.synchronize()
    time.sleep(max(0, ms / 1000 - (time.monotonic() - began)))
    at_peak = torch.cuda.memory_reserved()
    del peak_block
    torch.cuda.empty_cache()
    return {"at_peak": at_peak, "took_ms": round((time.monotonic() - began) * 1000)}


def leak(torch, mib, times, ms):
    """Allocates another block `times` times, and frees none."""
    for number in range(times):
        allocated[f"leak {number}"] = block(torch, mib)
        time.sleep(ms / 1000)
    return {}


def exhaust(torch, mib, ms):
    """Allocates blocks until the GPU is full, and frees all of them after `ms`."""
    torch.cuda.reset_peak_memory_stats()
    blocks, error = [], None
    while error is None and len(blocks) < 4096:
        try:
            blocks.append(block(torch, mib))
        except torch.cuda.OutOfMemoryError as caught:
            error = str(caught).splitlines()[0]
    at_peak = torch.cuda.max_memory_reserved()
    time.sleep(ms / 1000)
    blocks.clear()
    torch.cuda.empty_cache()
    return {"error": error, "at_peak": at_peak}


def steps(torch, for_s):
    """A training whose steps do nothing."""
    import memledger_client
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        time.sleep(0.05)
        memledger_client.step()
    return {}


def compute(torch, for_s):
    side = 4096
    a = torch.ones(side, side, device="cuda")
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    del a
    torch.cuda.empty_cache()
    return {}


def main():
    import torch
    torch.cuda.init()
    torch.ones(1, device="cuda")  # makes the context
    torch.cuda.empty_cache()
    print(json.dumps(memory_stats(torch, version=torch.__version__, cuda=torch.version.cuda)), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        more = {}
        if do == "alloc":
            allocated[order["name"]] = block(torch, order["mib"])
        elif do == "free":
            allocated.pop(order["name"], None)
            torch.cuda.empty_cache()
        elif do == "drop":  # stays in torch's cache
            allocated.pop(order["name"], None)
        elif do == "end":
            break
        elif do != "stats":
            more = {"spike": spike, "leak": leak, "exhaust": exhaust, "compute": compute, "steps": steps}[do](torch, **order)
        print(json.dumps(memory_stats(torch, **more)), flush=True)


main()
