"""`train.py` with the calls of memledger's client: components, steps, and `memory_usage.json` at the end.

    PYTHONPATH=/run/memledger-reporter/python python train_reported.py
"""

import os

import memledger_client
import torch
from torch.utils.data import DataLoader
from train import Images


def main():
    batch_size = int(os.environ.get("BATCH_SIZE", "64"))
    steps = int(os.environ.get("STEPS", "200"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(
        Images(batch_size * steps), batch_size=batch_size, num_workers=int(os.environ.get("NUM_WORKERS", "2"))
    )
    with memledger_client.track("model", "load"):
        layers = [torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 10)]
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
    for images, labels in loader:
        with memledger_client.track("model", "forward"):
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        with memledger_client.track("model", "backward"):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        memledger_client.step(batch_size=batch_size)
    memledger_client.save_report("memory_usage.json")
    print("peak:", memledger_client.peak(), flush=True)


if __name__ == "__main__":
    main()
