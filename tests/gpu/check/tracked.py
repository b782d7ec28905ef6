"""The peaks of `memledger_client.track`, and torch's own beside them, as JSON lines: name, what was read, what was allocated. See check.sh."""
import json

import memledger_client
import torch

MIB = 1 << 20
found = []


def allocate(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def spike(mib):
    tensor = allocate(mib)
    del tensor


def note(name, got, mib):
    found.append([name, got, mib * MIB])


spike(512)
with memledger_client.track("model", "outer") as outer:
    kept = allocate(64)
    with memledger_client.track("model", "first") as first:
        spike(256)
    with memledger_client.track("model", "second") as second:
        spike(32)
note("of an operation", first.peak_bytes, 320)
note("of one after it with less", second.peak_bytes, 96)
note("of the one around both", outer.peak_bytes, 320)
note("torch's own, as without us", torch.cuda.max_memory_allocated(), 512)
with memledger_client.track("model", "reset") as reset:
    torch.cuda.reset_peak_memory_stats()
    spike(16)
    note("torch's own after the program reset it", torch.cuda.max_memory_allocated(), 80)
note("of an operation with a reset", reset.peak_bytes, 80)
note("of the process", memledger_client.peak()["gpu_allocated_bytes"], 512)
if hasattr(torch, "compile"):

    def forward(tensor):
        with memledger_client.track("model", "compiled"):
            return tensor + 1

    torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(2, device="cuda"))  # an error where the graph breaks
for each in found:
    print(json.dumps(each))
