"""What memledger says a training takes, and what it takes, as JSON lines. See check.sh.

usage: estimates.py [MODEL...]    default: all
"""
import gc
import importlib
import json
import sys

import torch
from memledger_client import analyze

# the stand-in has a model of its own
MODELS = importlib.import_module("standin_models" if hasattr(torch, "IS_STANDIN") else "models").MODELS
GIB = 1 << 30
BATCH_SIZE = 32
#: GPU whose largest batch is asked for, and the share of it that a training may use.
CARD, SHARE = 24 * GIB, 0.7


def trained(make, sample, loss, precision, batch_size):
    """Trains a new model for three steps, as programs do. Returns torch's highest memory of tensors in bytes."""
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = make().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        inputs = sample(batch_size)
        inputs = {key: value.cuda() for key, value in inputs.items()} if isinstance(inputs, dict) else inputs.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            value = loss(outputs) if loss is not None else outputs.loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def note(name, got, least, most, words=""):
    print(json.dumps([name, got, least, most, words]), flush=True)


def compare(name, precision):
    make, sample, loss = MODELS[name]
    model, mixed = make().cuda(), "bf16" if precision == "bf16" else False
    memory = analyze.training_memory(model, sample, mixed, loss=loss)
    maximum = analyze.recommend_batch_size(model, CARD / GIB, SHARE, mixed, sample, loss=loss)["maximum"]
    del model
    free = torch.cuda.mem_get_info()[0]
    for batch_size in sorted({BATCH_SIZE, maximum} - {0}):
        if memory.at(batch_size) > 0.9 * free:
            continue  # for a larger GPU than this one
        real = trained(make, sample, loss, precision, batch_size)
        note(f"{name} {precision}: a batch of {batch_size}", memory.at(batch_size), real, 1.1 * real, memory.source)
        if batch_size == maximum:
            note(f"{name} {precision}: the maximum for {CARD // GIB} GiB, {batch_size}, stays within {SHARE:.0%}", real, 0, SHARE * CARD)


def main(names):
    for name in names or MODELS:
        for precision in ("fp32", "bf16"):
            compare(name, precision)
    make, sample, loss = MODELS[name]
    model = make().cuda()
    free, total = torch.cuda.mem_get_info()
    found = analyze.auto_select_batch_size(model, "cuda", 1, sample, loss=loss)
    note("auto_select_batch_size: at most 70 % of the GPU", trained(make, sample, loss, "fp32", found), 0.3 * SHARE * total, SHARE * total)


if __name__ == "__main__":
    main(sys.argv[1:])
