"""Cleanup: garbage collection, and torch's cache back to the GPU, between two operations of the program.

The reporter's thread must not do it: finalizers would run there, torch refuses it while a CUDA graph is captured, and in a training
of several processes each of them would wait for the slowest. So a request waits until a thread of the program itself ends a ``step``
or a ``track``: that is a safe point.
"""

import collections
import gc
import signal
import sys
import threading
import time
from typing import Any, Callable, Deque, Dict, Optional, Tuple

from memledger_client import _torch
from memledger_client._guard import record_error

#: When ``cleanup_on`` can clean up.
MOMENTS = ("step", "threshold", "error")
#: Seconds between two readings of the GPUs for the threshold, and between two cleanups because of it.
THRESHOLD_CHECK_SECONDS, THRESHOLD_PAUSE_SECONDS = 1.0, 60.0
#: memledger requests no longer deadline.
MAX_DEADLINE_SECONDS = 60.0

Message = Dict[str, Any]


def is_capturing() -> bool:
    """Returns whether this thread captures a CUDA graph on any GPU, during which torch cannot empty its cache.

    A capture of another thread is not seen: CUDA knows only those of the current streams of this thread.
    """
    torch = _torch.initialized()
    if torch is None:
        return False
    for device in _torch.devices() or []:  # on a GPU that the process does not use, a call would create a context
        with torch.cuda.device(device["i"]):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def clean() -> Dict[int, Tuple[int, int]]:
    """Cleans up now. Returns the bytes of torch's allocator before and after, by device."""
    # an interactive Python keeps the last error, whose frames hold tensors
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    torch, before = _torch.initialized(), _torch.devices()
    gc.collect()
    if torch is None or not before:
        return {}
    with torch.cuda.device(before[0]["i"]):  # empty_cache creates a context on the current device, and empties the caches of all
        torch.cuda.empty_cache()
    after = {device["i"]: device.get("res") for device in _torch.devices() or []}
    found = {}
    for device in before:
        held, holds = device.get("res"), after.get(device["i"])
        if held is not None and holds is not None:
            found[device["i"]] = (held, holds)
    return found


def _fullest_percent() -> float:
    """Returns how full the fullest GPU is on which this process holds memory, with what other processes hold there."""
    torch, fullest = _torch.initialized(), 0.0
    if torch is not None:
        for device in _torch.devices() or []:
            free, total = torch.cuda.mem_get_info(device["i"])  # it has a context there
            fullest = max(fullest, 100 * (total - free) / total)
    return fullest


class Cleaner:
    """Who wants this process cleaned up, and what came of it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all requests, as in a forked child."""
        self._lock = threading.Lock()
        self._request: Optional[Tuple[int, float]] = None
        # the program appends while the reporter's thread sends
        self._answers: Deque[Message] = collections.deque()
        self._moments: Tuple[str, ...] = ()
        self._threshold, self._every = 85.0, 1
        self._steps = 0
        self._has_failed = False
        self._is_owed = False  # a moment came while a graph was captured
        self._next_check = 0.0

    def request(self, message: Message) -> None:
        """Notes a request of memledger. A newer one replaces one that waits: memledger no longer waits for that."""
        number, deadline_ms = message.get("id"), message.get("deadline_ms")
        if type(number) is int and type(deadline_ms) is int:  # JSON has true, 1e999 and NaN too
            seconds = min(max(deadline_ms / 1000, 0.0), MAX_DEADLINE_SECONDS)
            self._request = (number, time.monotonic() + seconds)

    def clean_on(self, moments: Tuple[str, ...], threshold: float, every: int) -> None:
        """Cleans up at these moments from now on."""
        unknown = [moment for moment in moments if moment not in MOMENTS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(MOMENTS)}")
        if not 1 <= threshold <= 100 or every < 1:
            raise ValueError(f"threshold={threshold!r} is not from 1 to 100 percent, or every={every!r} is below 1")
        self._moments, self._threshold, self._every = moments, float(threshold), every
        self._is_owed = False

    def note_error(self) -> None:
        """Notes that an operation failed. Its frames still hold its tensors, so it is cleaned up at the next safe point."""
        self._has_failed = True

    def run_due(self, steps: int) -> bool:
        """Cleans up if that is due, at a safe point after so many steps. Returns whether there is an answer to send."""
        if self._request is None and not self._moments:
            return False
        if not self._lock.acquire(False):
            return False  # another thread of the program is at it
        try:
            self._is_owed = self._is_due(steps) or self._is_owed
            # last, because it reads each GPU: most safe points have nothing to do
            if (self._request is None and not self._is_owed) or is_capturing():
                return False
            request, self._request = self._request, None
            is_owed, self._is_owed = self._is_owed, False
            if request is not None and time.monotonic() <= request[1]:
                answer = self._answer(request[0])
                self._answers.append(answer)
            elif is_owed:
                clean()
            return bool(self._answers)
        finally:
            self._lock.release()

    def _answer(self, number: int) -> Message:
        """Cleans up and returns what to answer."""
        self._has_failed = False
        began = time.monotonic()
        try:
            found = clean()
        except Exception:
            record_error()
            return {"t": "cleaned", "id": number, "failed": True}
        devices = [{"i": index, "before": before, "after": after} for index, (before, after) in found.items()]
        return {"t": "cleaned", "id": number, "ms": int(1000 * (time.monotonic() - began)), "dev": devices}

    def send_answers(self, send: Callable[[Message], bool]) -> None:
        """Sends the answers. What cannot be sent now stays."""
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            if not send(answer):
                self._answers.append(answer)

    def _is_due(self, steps: int) -> bool:
        if "error" in self._moments and self._has_failed:
            self._has_failed = False
            return True
        if "step" in self._moments and steps:
            self._steps += steps
            if self._steps >= self._every:
                self._steps = 0
                return True
        now = time.monotonic()
        if "threshold" in self._moments and now >= self._next_check:
            is_full = not is_capturing() and _fullest_percent() >= self._threshold
            self._next_check = now + (THRESHOLD_PAUSE_SECONDS if is_full else THRESHOLD_CHECK_SECONDS)
            return is_full
        return False


#: The cleaner of this process.
cleaner = Cleaner()


def raise_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that ``finally`` and ``atexit`` run, where it would end the program at once."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


def restore_sigterm() -> None:
    """Lets SIGTERM end a forked child at once again: only its parent wanted another way."""
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
