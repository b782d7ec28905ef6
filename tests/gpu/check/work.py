"""A PyTorch process that does what it is told: one JSON object a line in, one out. Run by the check, in its cgroup."""
import json
import os
import sys
import time

MIB = 1 << 20
held = {}


def tell(torch, **more):
    """What torch knows of itself and of the GPU."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"pid": os.getpid(), "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
            "free": free, "total": total, **more}


def block(torch, mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def spike(torch, mib, ms):
    """Holds a block for so long, with the caching allocator emptied right after."""
    began = time.monotonic()
    block_held = block(torch, mib)
    torch.cuda.synchronize()
    time.sleep(max(0, ms / 1000 - (time.monotonic() - began)))
    at_peak = torch.cuda.memory_reserved()
    del block_held
    torch.cuda.empty_cache()
    return {"at_peak": at_peak, "took_ms": round((time.monotonic() - began) * 1000)}


def leak(torch, mib, times, ms):
    """Keeps another block each time."""
    for number in range(times):
        held[f"leak {number}"] = block(torch, mib)
        time.sleep(ms / 1000)
    return {}


def exhaust(torch, mib, ms):
    """Takes blocks until the GPU has no more; holds them for so long, and gives all of them back."""
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
    import memledger
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        time.sleep(0.05)
        memledger.step()
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
    print(json.dumps(tell(torch, version=torch.__version__, cuda=torch.version.cuda)), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        more = {}
        if do == "alloc":
            held[order["name"]] = block(torch, order["mib"])
        elif do == "free":
            held.pop(order["name"], None)
            torch.cuda.empty_cache()
        elif do == "drop":  # stays in torch's cache
            held.pop(order["name"], None)
        elif do == "end":
            break
        elif do != "tell":
            more = {"spike": spike, "leak": leak, "exhaust": exhaust, "compute": compute, "steps": steps}[do](torch, **order)
        print(json.dumps(tell(torch, **more)), flush=True)


main()
