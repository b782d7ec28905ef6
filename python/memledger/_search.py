"""Searches for a batch size, which use more memory than the training after them, and run out of it on purpose."""

from typing import Dict, List, Optional

from memledger import _torch
from memledger._torch import Device

#: Counters of torch that only grow, and its peaks.
COUNTERS = ("ooms", "retries")
PEAKS = ("alloc_peak", "res_peak")

Counts = Dict[int, Dict[str, int]]


def _counts(devices: Optional[List[Device]]) -> Counts:
    return {device["i"]: {key: device[key] for key in COUNTERS if key in device} for device in devices or []}


class BatchSearch:
    """Takes what a search did out of torch's figures. Only its owner's lock protects it."""

    def __init__(self) -> None:
        #: Searches in progress, one within another.
        self.depth = 0
        #: A search ran since the last sample.
        self.is_recent = False
        self._before: Counts = {}
        self._of_searches: Counts = {}

    def begin(self) -> None:
        """Begins a search."""
        self.depth += 1
        self.is_recent = True
        if self.depth == 1:
            self._before = _counts(_torch.devices())

    def end(self) -> None:
        """Ends a search. Torch's peaks begin again: those of the search say nothing about the training."""
        self.depth = max(0, self.depth - 1)
        torch, devices = _torch.initialized(), _torch.devices()
        if self.depth > 0 or torch is None:
            return
        for index, counts in _counts(devices).items():
            before, of_searches = self._before.get(index, {}), self._of_searches.setdefault(index, {})
            for key, value in counts.items():
                of_searches[key] = of_searches.get(key, 0) + value - before.get(key, 0)
        for device in devices or []:
            torch.cuda.reset_peak_memory_stats(device["i"])

    def without(self, devices: Optional[List[Device]]) -> Optional[List[Device]]:
        """Returns torch's memory without the peaks of a search in progress, and without the failures of all searches."""
        return None if devices is None else [self._without(device) for device in devices]

    def _without(self, device: Device) -> Device:
        if self.depth > 0:
            before = self._before.get(device["i"], {})
            device = {key: before.get(key, 0) if key in COUNTERS else value for key, value in device.items() if key not in PEAKS}
        for key, count in self._of_searches.get(device["i"], {}).items():
            if key in device:
                device[key] = max(0, device[key] - count)
        return device
