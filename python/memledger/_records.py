"""Memory by component and operation, kept in the process, and the file ``memory_usage.json``.

MB is 2**20 bytes in that file, as in the programs that it comes from. An amount that is unknown is null: without a GPU all
amounts of GPU memory are.
"""

import collections
import json
import os
import time
from typing import Any, Deque, Dict, List, NamedTuple, Optional

#: Records in the file; the oldest go first. The peaks are those of all records.
MAX_RECORDS = 10_000
MIB = 1 << 20


class Record(NamedTuple):
    """Memory at one point of the program, in bytes. GPU memory is the sum over all devices of the process."""

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
    """The newest records and the peaks of all, and of the process."""

    def __init__(self) -> None:
        self._newest: Deque[Record] = collections.deque(maxlen=MAX_RECORDS)
        self._peaks: Dict[str, float] = {}

    def add(self, record: Record) -> None:
        """Adds a record."""
        self._newest.append(record)
        for key, value in _amounts(record).items():
            if value is not None:
                self._peaks[key] = max(value, self._peaks.get(key, value))

    def add_peaks(self, rss: int, allocated: Optional[int], reserved: Optional[int]) -> None:
        """Adds peaks of the whole process, in bytes: of host memory, tensors and torch's allocator."""
        for key, peak in (("cpu_ram_used_mb", rss), ("gpu_ram_peak_mb", allocated), ("reserved_gpu_ram_mb", reserved)):
            if peak is not None:
                self._peaks[key] = max(peak / MIB, self._peaks.get(key, 0.0))

    def as_dict(self) -> Dict[str, Any]:
        """Returns the content of ``memory_usage.json``."""
        log: List[Dict[str, Any]] = []
        for record in list(self._newest):
            seconds, micros = divmod(round(1e6 * record.timestamp), 1_000_000)
            at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{micros:06}+00:00"
            entry = {"component": record.component, "operation": record.operation, "timestamp": at}
            entry.update(_amounts(record))  # type: ignore[arg-type]
            log.append(entry)
        keys = ("cpu_ram_used_mb", "gpu_ram_used_mb", "gpu_ram_peak_mb", "reserved_gpu_ram_mb")
        return {"detailed_log": log, "peak_usage": {key: self._peaks.get(key) for key in keys}}

    def save(self, path: str) -> None:
        """Writes ``memory_usage.json``: all of it or nothing."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        part = f"{path}.{os.getpid()}.part"
        try:
            with open(part, "w", encoding="utf-8") as file:
                json.dump(self.as_dict(), file, indent=2)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)


def _amounts(record: Record) -> Dict[str, Optional[float]]:
    def mib(value: Optional[int]) -> Optional[float]:
        return None if value is None else value / MIB

    return {
        "cpu_ram_used_mb": mib(record.rss),
        "gpu_ram_used_mb": mib(record.allocated),
        "gpu_ram_peak_mb": mib(record.allocated_peak),
        "reserved_gpu_ram_mb": mib(record.reserved),
    }
