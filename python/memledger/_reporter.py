"""The reporter of this process: counters that the program raises, and a thread that sends them.

The program's own threads only count and note; the reporter's thread does everything that touches the socket, once a second or as
often as memledger wants. A forked child reports nothing until it starts a reporter of its own: its parent's connection is the
parent's.
"""

import atexit
import collections
import operator
import os
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from memledger import _host, _torch
from memledger._connection import Connection
from memledger._guard import never_raises, record_error
from memledger._records import Record, Records
from memledger._version import __version__

#: Seconds between two samples until memledger asks for another interval, and the limits of what it may ask for.
INTERVAL_SECONDS = 1.0
MIN_INTERVAL_SECONDS = 0.1
MAX_INTERVAL_SECONDS = 60.0
#: Scopes that are sent with one sample: memledger accepts twenty messages per second.
SCOPES_PER_SAMPLE = 12
#: Scopes that wait to be sent: the newest of each pair of component and operation.
MAX_PENDING_SCOPES = 64
#: Longest wait for the reporter's thread when the program ends.
EXIT_WAIT_SECONDS = 0.2

Pair = Tuple[str, str]


def _environment_number(name: str) -> Optional[int]:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


class Reporter:
    """Everything that this process reports."""

    def __init__(self) -> None:
        self.records = Records()
        self._steps = 0
        self._samples: Optional[int] = None
        self._batch_size: Optional[int] = None
        self._reset()

    def _reset(self) -> None:
        """Forgets connection and thread, as in a forked child, where both are the parent's."""
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()  # held for a few additions only, so a training never waits for a send
        self._connection = Connection()
        self._stopping = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._pending: "collections.OrderedDict[Pair, Dict[str, Any]]" = collections.OrderedDict()
        self._announced: List[int] = []
        self._sequence = 0
        self._interval = INTERVAL_SECONDS
        self._sent_steps: Tuple[int, Optional[int]] = (0, None)

    def after_fork(self) -> None:
        """Makes the child silent: its own descriptor is closed, locks are new, counters begin at 0."""
        connection = self._connection
        self._steps, self._samples = 0, None
        self.records = Records()
        self._reset()
        connection.close()

    def start(self) -> None:
        """Starts the thread, once. Not in a DataLoader worker, whose code may call ``track`` too: there are many of them."""
        if self._thread is not None or _torch.in_dataloader_worker():
            return
        with self._lock:
            if self._thread is None:
                self._stopping.clear()
                thread = threading.Thread(target=self._run, name="memledger", daemon=True)
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """Sends what is left and ends the connection."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        thread.join(EXIT_WAIT_SECONDS)
        if self._lock.acquire(timeout=EXIT_WAIT_SECONDS):
            try:
                self._report(MAX_PENDING_SCOPES)
                self._connection.close()
                self._announced = []
            finally:
                self._lock.release()

    def count_step(self, steps: int, samples: Optional[int], batch_size: Optional[int]) -> None:
        """Counts training steps. ``batch_size`` gives the samples of each step where ``samples`` is not given."""
        steps = operator.index(steps)  # a number of numpy is one; what JSON cannot carry would stop all reports
        samples = None if samples is None else operator.index(samples)
        batch_size = None if batch_size is None else operator.index(batch_size)
        if samples is None and batch_size is not None:
            samples = steps * batch_size
        with self._count_lock:
            self._steps += steps
            if samples is not None:
                self._samples = (self._samples or 0) + samples
            if batch_size is not None:
                self._batch_size = batch_size

    def note(self, component: str, operation: str, peak: Optional[int], devices: List[_torch.Device]) -> None:
        """Records the memory of an operation now, and lets the thread send it. ``peak`` is in bytes, of all devices."""
        rss = _host.rss_bytes()
        allocated, reserved = _torch.total(devices, "alloc"), _torch.total(devices, "res")
        self.records.add(Record(component, operation, time.time(), rss, allocated, peak, reserved))
        short: List[_torch.Device] = [
            {key: device[key] for key in ("i", "alloc", "res") if key in device} for device in devices
        ]
        if short and peak is not None:
            # only the sum over the devices is known; memledger exports no other
            short[0]["alloc_peak"] = peak
            for device in short[1:]:
                device["alloc_peak"] = 0
        message = {"t": "scope", "component": component, "operation": operation, "rss": rss, "dev": short}
        self._pending[(component, operation)] = message
        while len(self._pending) > MAX_PENDING_SCOPES:
            self._pending.popitem(last=False)
            self._connection.lost += 1

    def _run(self) -> None:
        while not self._stopping.wait(self._interval if self._sequence else 0):
            try:
                with self._lock:
                    if not self._stopping.is_set():
                        self._report(SCOPES_PER_SAMPLE)
            except Exception:
                record_error()
            self._sequence += 1  # also after a failure: never a busy loop

    def _report(self, max_scopes: int) -> None:
        if self._connection.connect():
            self._announced = []
            self._sent_steps = (0, None)
            self._connection.send(self._hello([]))
        if not self._connection.is_open():
            return
        for message in self._connection.receive():
            self._handle(message)
        devices = _torch.devices()
        indices = [device["i"] for device in devices]
        if any(index not in self._announced for index in indices):
            self._announced = indices
            self._connection.send(self._hello(indices))
        if devices:
            sample = {"t": "sample", "seq": self._sequence, "lost": self._connection.lost, "dev": devices}
            self._connection.send(sample)
        self._report_steps()
        for _ in range(min(max_scopes, len(self._pending))):
            _, message = self._pending.popitem(last=False)
            self._connection.send(message)

    def _report_steps(self) -> None:
        progress = (self._steps, self._samples)
        if progress == self._sent_steps:
            return
        message: Dict[str, Any] = {"t": "step", "n": progress[0]}
        if progress[1] is not None:
            message["samples"] = progress[1]
        if self._batch_size is not None:
            message["batch_size"] = self._batch_size
        if self._connection.send(message):
            self._sent_steps = progress

    def _hello(self, indices: List[int]) -> Dict[str, Any]:
        message: Dict[str, Any] = {"v": 1, "t": "hello", "client": __version__, "devices": []}
        for index in indices:
            device: Dict[str, Any] = {"i": index}
            uuid = _torch.uuid(index)
            if uuid is not None:
                device["uuid"] = uuid
            message["devices"].append(device)
        torch = _torch.loaded()
        if torch is not None:
            message["torch"] = str(torch.__version__)
        for key, name in (("rank", "RANK"), ("local_rank", "LOCAL_RANK")):
            number = _environment_number(name)
            if number is not None:
                message[key] = number
        return message

    def _handle(self, message: Dict[str, Any]) -> None:
        interval = message.get("interval_ms")
        if message.get("t") == "welcome" and isinstance(interval, (int, float)):
            self._interval = min(max(interval / 1000, MIN_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)


#: The reporter of this process.
reporter = Reporter()


@never_raises()
def _after_fork_in_child() -> None:
    reporter.after_fork()


@never_raises()
def _at_exit() -> None:
    reporter.stop()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
