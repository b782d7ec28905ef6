"""A small PyTorch training whose process tree is recorded. Every rank writes the pids that it knows, and what
each is, to `rank-N.json` in --folder, and runs until a file `stop` exists.

usage: train.py --workers fork|spawn|forkserver|none --backend none|gloo|nccl --folder DIR
"""
import argparse
import json
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

LONGEST_S = 120


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index))


def main():
    parser = argparse.ArgumentParser()
    for name in ("workers", "backend", "folder"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", 0))
    torch.ones(1, device="cuda")
    model = torch.nn.Linear(8, 1).cuda()
    if options.backend != "none":
        torch.distributed.init_process_group(options.backend)
        model = torch.nn.parallel.DistributedDataParallel(model)
    workers = []
    if options.workers != "none":
        loader = DataLoader(Numbers(), batch_size=8, num_workers=2, persistent_workers=True,
                            multiprocessing_context=options.workers)
        batches = iter(loader)
        for _ in range(2):
            model(next(batches).cuda()).sum().backward()
        workers = [worker.pid for worker in batches._workers]
    torch.cuda.synchronize()
    path = os.path.join(options.folder, f"rank-{rank}.json")
    with open(path + ".new", "w") as file:
        json.dump({"torch": torch.__version__, "trainer": os.getpid(), "workers": workers}, file)
    os.rename(path + ".new", path)
    until = time.monotonic() + LONGEST_S
    while not os.path.exists(os.path.join(options.folder, "stop")) and time.monotonic() < until:
        time.sleep(0.05)
    if options.backend != "none":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
