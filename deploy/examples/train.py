"""A small real training with DataLoader workers, on a GPU if there is one: nothing in it knows memledger.

    BATCH_SIZE=64 NUM_WORKERS=2 STEPS=200 python train.py

With `PYTHONPATH=/run/memledger-reporter/python` it reports from inside all the same, once it uses a GPU. `train_reported.py` is
the same with the client's calls.
"""

import os

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Random images, made in the workers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.rand(3, 32, 32, generator=generator), number % 10


def main():
    batch_size = int(os.environ.get("BATCH_SIZE", "64"))
    steps = int(os.environ.get("STEPS", "200"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(
        Images(batch_size * steps), batch_size=batch_size, num_workers=int(os.environ.get("NUM_WORKERS", "2"))
    )
    layers = [torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 10)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (images, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
