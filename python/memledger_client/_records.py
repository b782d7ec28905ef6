"""Memory by component and operation, kept in the process, and the file ``memory_usage.json``.

MB is 2**20 bytes in that file, as in the programs that it comes from. An amount that is unknown is null. Before the program uses a GPU
those of GPU memory are 0.
"""

import json
import os
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from memledger_client import _host
from memledger_client._guard import record_error, warn_once

#: Records in the file: fewer than there were, from the first to the newest. The peaks are those of all records.
MAX_RECORDS = 10_000
MIB = 1 << 20


class Record(NamedTuple):
    """Memory at one point of the program, in bytes. GPU memory is the sum over all devices of the process; None: unknown."""

    component: str
    operation: str
    #: Unix time in seconds.
    timestamp: float
    rss: int
    allocated: Optional[int]
    #: Within the operation, or since the program started; None where it is not exact.
    allocated_peak: Optional[int]
    reserved: Optional[int]


class Records:
    """Records from the first to the newest, and the peaks of all, and of the process."""

    def __init__(self) -> None:
        self._kept: List[Record] = []
        self._newest: Optional[Record] = None
        #: Of each pair of component and operation one in so many records is kept, and how many it had.
        self._stride = 1
        self._counts: Dict[Tuple[str, str], int] = {}
        self._peaks: Dict[str, float] = {}
        self._lock = threading.RLock()

    def add(self, record: Record) -> None:
        """Adds a record. Above the maximum every other one of each pair is dropped, and they are kept half as often."""
        for key, value in _amounts(record).items():
            if value is not None:
                self._peaks[key] = max(value, self._peaks.get(key, value))
        with self._lock:
            self._newest = record
            pair = (record.component, record.operation)
            number = self._counts[pair] = self._counts.get(pair, -1) + 1
            if number % self._stride == 0:
                self._kept.append(record)
            if len(self._kept) > MAX_RECORDS:
                self._halve()

    def _halve(self) -> None:
        seen: Dict[Tuple[str, str], int] = {}
        kept = []
        for record in self._kept:
            pair = (record.component, record.operation)
            seen[pair] = seen.get(pair, -1) + 1
            if seen[pair] % 2 == 0:
                kept.append(record)
        if 4 * len(kept) > 3 * MAX_RECORDS:  # nearly each has a name of its own
            kept = self._kept[::2]
        if len(self._counts) > MAX_RECORDS:
            self._counts = {}
        self._kept, self._stride = kept, 2 * self._stride

    def add_peaks(self, rss: int, allocated: Optional[int], reserved: Optional[int]) -> None:
        """Adds peaks of the whole process, in bytes: of host memory, tensors and torch's allocator."""
        for key, peak in (("cpu_ram_used_mb", rss), ("gpu_ram_peak_mb", allocated), ("reserved_gpu_ram_mb", reserved)):
            if peak is not None:
                self._peaks[key] = max(peak / MIB, self._peaks.get(key, 0.0))

    def as_dict(self) -> Dict[str, Any]:
        """Returns the content of ``memory_usage.json``."""
        log: List[Dict[str, Any]] = []
        with self._lock:
            newest = [self._newest] if self._newest is not None and self._newest not in self._kept[-1:] else []
            records = self._kept + newest
        for record in records:
            log.append(as_entry(record))
        keys = ("cpu_ram_used_mb", "gpu_ram_used_mb", "gpu_ram_peak_mb", "reserved_gpu_ram_mb")
        return {"detailed_log": log, "peak_usage": {key: self._peaks.get(key) for key in keys}}

    def save(self, path: str) -> None:
        """Writes ``memory_usage.json``: all of it or nothing."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with _host.whole_file(path) as part, open(part, "w", encoding="utf-8") as file:
            json.dump(self.as_dict(), file, indent=2)


def as_entry(record: Record) -> Dict[str, Any]:
    """Returns a record as it stands in ``memory_usage.json``."""
    named = {"component": record.component, "operation": record.operation, "timestamp": record.timestamp}
    return {**named, **_amounts(record)}


Sink = Callable[[Dict[str, Any]], Any]


def _name(function: Sink) -> Any:
    """Returns what tells a function from others: one that a notebook defines again takes the place of the older."""
    name = getattr(function, "__qualname__", None)
    return function if name is None or "<lambda>" in name else (getattr(function, "__module__", None), name)


class Sinks:
    """Functions of the program that get each record, one call at a time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all functions, as in a forked child."""
        self._functions: Dict[Any, Sink] = {}
        self._lock = threading.RLock()
        self._is_busy = False  # what a function itself tracks is handed to none

    def add(self, function: Sink) -> None:
        """Hands each record to a function from now on."""
        if not callable(function):
            raise TypeError(f"{function!r} is no function")
        self._functions = {**self._functions, _name(function): function}

    def is_empty(self) -> bool:
        """Returns whether there is no function."""
        return not self._functions

    def emit(self, record: Record, steps: int) -> None:
        """Calls each function. Its errors are counted, and the first is a warning."""
        if not self._functions:
            return
        with self._lock:
            if not self._is_busy:
                self._is_busy = True
                try:
                    self._call_each(record, steps)
                finally:
                    self._is_busy = False

    def _call_each(self, record: Record, steps: int) -> None:
        for function in self._functions.values():
            try:
                function({**as_entry(record), "step": steps})
            except Exception as error:
                record_error()
                warn_once("sink", f"a function of on_record failed: {type(error).__name__}: {error}")


#: The sinks of this process.
sinks = Sinks()


def _amounts(record: Record) -> Dict[str, Optional[float]]:
    def mib(value: Optional[int]) -> Optional[float]:
        return None if value is None else value / MIB

    return {
        "cpu_ram_used_mb": mib(record.rss),
        "gpu_ram_used_mb": mib(record.allocated),
        "gpu_ram_peak_mb": mib(record.allocated_peak),
        "reserved_gpu_ram_mb": mib(record.reserved),
    }
