"""The highest memory of torch: of the process, of each ``track``, and as the program reads it.

torch has one peak for the whole process. ``track`` lets it begin again, so that each operation has its own, and what the program
reads stays as it would be without: three functions of ``torch._C`` are wrapped for that, the one that reads only after the first
``track``. A program that resets the peaks itself loses none of them here.
"""

import functools
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from memledger_client import _torch
from memledger_client._guard import record_error
from memledger_client._torch import ORIGINAL, Device

#: Fields of the protocol that are peaks, and those that only grow.
PEAKS, TOTALS = ("alloc_peak", "res_peak"), ("ooms", "retries")
#: Where the peaks are in torch's statistics.
PATHS = {"alloc_peak": ("allocated_bytes", "all"), "res_peak": ("reserved_bytes", "all")}
#: Functions that read statistics, begin the peaks again, and the totals: for CUDA, and for any accelerator (torch 2.9 and later).
READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
PEAK_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
TOTAL_RESETS = ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats")

Path = Tuple[str, ...]
Statistics = Dict[str, Any]
Amounts = Dict[int, Dict[str, int]]


class Interval:
    """An operation in progress, and torch's peak on each device since it began."""

    def __init__(self, device: Optional[int]) -> None:
        #: Its thread, and its task of asyncio: what runs one after the other.
        self.flow = _flow()
        #: The current device of its thread.
        self.device = device
        #: The current devices of other threads and tasks that had an operation meanwhile.
        self.others: Set[Optional[int]] = set()
        #: It neither contains nor follows another operation of its flow: they are generators.
        self.is_interleaved = False
        self.peaks: Dict[int, int] = {}

    def is_alone(self, index: int) -> bool:
        """Returns whether no other operation used a device meanwhile, as far as threads keep to their current devices."""
        is_own = not self.others or (index == self.device and index not in self.others)
        return is_own and not self.is_interleaved

    def is_of_others(self, index: int) -> bool:
        """Returns whether a device belongs to other threads only."""
        return index in self.others and self.device not in self.others


class Usage(NamedTuple):
    """Torch's memory at the end of an operation."""

    #: Each device that is not another thread's, with ``alloc_peak`` only where it is the peak of this operation. None: unknown.
    devices: Optional[List[Device]]
    #: The sum of the peaks; None where one is unknown.
    peak: Optional[int]


class Peaks:
    """The peaks of this process."""

    def __init__(self) -> None:
        self._is_watching = False
        self.reset()

    def reset(self) -> None:
        """Forgets all, as in a forked child, where torch's counters begin at 0."""
        #: Operations without a peak, because another one ran at the same time on the same device.
        self.overlapping = 0
        # reentrant: a signal handler of the program may track too
        self._lock = threading.RLock()
        self._open: List[Interval] = []
        self._of_process: Amounts = {}
        self._reported: Amounts = {}
        self._totals_before: Amounts = {}  # of what the program reset
        self._hidden: Dict[int, Dict[Path, int]] = {}  # what the program reads at least

    def watch(self) -> None:
        """Notices the program's own resets from now on, if torch is there."""
        if self._is_watching or _torch.loaded() is None:
            return
        self._is_watching = True
        for names, before in ((PEAK_RESETS, self._before_reset), (TOTAL_RESETS, self._before_total_reset)):
            for name in names:
                _wrap(name, functools.partial(_call_after, before))

    def devices(self) -> Optional[List[Device]]:
        """Returns the memory of each device in use, with the peaks since the process began or since ``forget``; see ``_torch.read``."""
        with self._lock:
            return self._with(self._reported)

    def of_process(self) -> Optional[List[Device]]:
        """Like ``devices``, with the peaks since the process began."""
        with self._lock:
            return self._with(self._of_process)

    def since_reset(self) -> Optional[List[Device]]:
        """Like ``devices``, with the peaks since the program last reset them, as it reads them itself."""
        with self._lock:
            found = _torch.devices()
            for device in found or []:
                self._note(device)
                hidden = self._hidden.get(device["i"], {})
                for key, path in PATHS.items():
                    device[key] = max(device.get(key, 0), hidden.get(path, 0))
            return found

    def _with(self, peaks: Amounts) -> Optional[List[Device]]:
        self.watch()
        found = _torch.devices()
        for device in found or []:
            self._note(device)
            device.update(peaks[device["i"]])
            for key, value in self._totals_before.get(device["i"], {}).items():
                device[key] = device.get(key, 0) + value
        return found

    def forget(self) -> None:
        """Lets the peaks that are reported begin again: what was before is not of the training."""
        with self._lock:
            for index, statistics in (_torch.read() or {}).items():
                self._begin_again(index, statistics)
            self._reported.clear()

    def enter(self) -> Interval:
        """Begins an operation of this thread. Returns what ``leave`` takes."""
        with self._lock:
            torch = _torch.initialized()
            self.watch()
            for index, statistics in (_torch.read() or {}).items():
                self._begin_again(index, statistics)
            interval = Interval(None if torch is None else torch.cuda.current_device())
            for other in self._open:
                if other.flow != interval.flow:
                    other.others.add(interval.device)
                    interval.others.add(other.device)
            self._open.append(interval)
            return interval

    def leave(self, interval: Interval) -> Usage:
        """Ends an operation, maybe in another thread than the one that began it."""
        with self._lock:
            found = _torch.devices()
            for device in found or []:
                self._note(device)
            is_open = interval in self._open  # not in a forked child
            for later in self._open[self._open.index(interval) + 1 :] if is_open else []:
                if later.flow == interval.flow:
                    later.is_interleaved = interval.is_interleaved = True
            if is_open:
                self._open.remove(interval)
            if found is None:
                return Usage(None, None)
            mine = [device for device in found if not interval.is_of_others(device["i"])]
            for device in mine:
                peak = interval.peaks.get(device["i"])
                del device["alloc_peak"]
                if is_open and peak is not None and interval.is_alone(device["i"]):
                    device["alloc_peak"] = peak
            self.overlapping += not all(interval.is_alone(device["i"]) for device in mine)
            return Usage(mine, _torch.total(mine, "alloc_peak"))

    def _note(self, device: Device) -> None:
        """Keeps the peaks of a device, which may begin again after this."""
        index = device["i"]
        for kept in (self._of_process.setdefault(index, {}), self._reported.setdefault(index, {})):
            for key in PEAKS:
                kept[key] = max(device.get(key, 0), kept.get(key, 0))
        for interval in self._open:
            interval.peaks[index] = max(device.get("alloc_peak", 0), interval.peaks.get(index, 0))

    def _begin_again(self, index: int, statistics: Statistics) -> None:
        """Lets torch's peaks of a device begin again, and keeps what the program would read."""
        self._note(_torch.pick(statistics, index))
        hidden = self._hidden.setdefault(index, {})
        for path, peak in _peaks_in(statistics):
            hidden[path] = max(peak, hidden.get(path, 0))
        for name in READERS:
            _wrap(name, self._read)
        reset = getattr(_torch.loaded()._C, PEAK_RESETS[0])  # type: ignore[union-attr]
        getattr(reset, ORIGINAL, reset)(index)

    def _read(self, original: Callable[..., Any], index: int, *rest: Any) -> Any:
        """Reads statistics for the program, with the peaks from before ``track`` reset them."""
        found = original(index, *rest)
        try:
            for path, peak in self._hidden.get(index, {}).items():
                figures: Any = found
                for key in path:
                    figures = figures.get(key, {})
                if figures.get("peak", peak) < peak:
                    figures["peak"] = peak
        except Exception:
            record_error()
        return found

    def _before_reset(self, index: int) -> None:
        with self._lock:
            self._hidden.pop(index, None)
            if _torch.initialized() is not None and not _torch.has_own_allocator():
                self._note(_torch.pick(_torch.statistics(index), index))

    def _before_total_reset(self, index: int) -> None:
        with self._lock:
            if _torch.initialized() is not None and not _torch.has_own_allocator():
                device, before = _torch.pick(_torch.statistics(index), index), self._totals_before.setdefault(index, {})
                for key in TOTALS:
                    before[key] = before.get(key, 0) + device.get(key, 0)


def _flow() -> Tuple[int, int]:
    """Returns what identifies the flow of control: its thread, and its task of asyncio.

    A thread that Python did not start, such as one of autograd, belongs to the main thread, which waits for it.
    """
    thread = threading.get_ident()
    if all(thread != each.ident for each in threading.enumerate()):
        thread = threading.main_thread().ident or 0
    task = None
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            pass  # no loop runs in this thread
    return thread, id(task)


def _peaks_in(statistics: Statistics) -> Iterator[Tuple[Path, int]]:
    """Returns all peaks in the nested statistics of a device, with the path of each."""
    for group, value in statistics.items():
        for pool, figures in value.items() if isinstance(value, dict) else ():
            if pool == "peak":
                yield (group,), figures
            elif isinstance(figures, dict) and "peak" in figures:
                yield (group, pool), figures["peak"]


def _wrap(name: str, call: Callable[..., Any]) -> None:
    """Lets ``call`` take the place of a function of ``torch._C``, which it gets as its first argument. Once."""
    extension = sys.modules["torch"]._C
    original = getattr(extension, name, None)
    if original is not None and not hasattr(original, ORIGINAL):
        wrapped = functools.partial(call, original)
        setattr(wrapped, ORIGINAL, original)
        setattr(extension, name, wrapped)


def _call_after(before: Callable[[int], None], original: Callable[..., Any], index: int, *rest: Any) -> Any:
    try:
        before(index)
    except Exception:
        record_error()
    return original(index, *rest)


#: The peaks of this process.
peaks = Peaks()
