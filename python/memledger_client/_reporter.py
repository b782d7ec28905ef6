"""The reporter of this process: counters that the program raises, and a thread that sends them.

The program's own threads only count and record; the reporter's thread does everything that touches the socket, once a second or as
often as memledger wants. A forked child reports nothing until it starts a reporter of its own: its parent's connection is the
parent's.
"""

import atexit
import collections
import operator
import os
import sys
import threading
import time
import zlib
from typing import Any, Deque, Dict, List, Mapping, Optional, Tuple

from memledger_client import _guard, _host, _torch
from memledger_client._cleanup import cleaner, restore_sigterm
from memledger_client._connection import Connection, directory
from memledger_client._cuda_oom import CudaOoms, operations
from memledger_client._guard import never_raises, record_error, warn_once
from memledger_client._peaks import peaks
from memledger_client._records import Record, Records, sinks
from memledger_client._version import __version__

#: Seconds between two samples until memledger asks for another interval, and the limits of what it may ask for.
INTERVAL_SECONDS = 1.0
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 60_000
#: torch counts CUDA as initialised only after it has started the reporter: so many reports follow at this interval until then.
EARLY_REPORTS, EARLY_INTERVAL_SECONDS = 10, 0.1
#: Operations that are sent with one sample: memledger accepts twenty messages per second.
OPERATIONS_PER_SAMPLE = 12
#: Operations that wait to be sent: the newest of each pair of component and operation.
MAX_PENDING_OPERATIONS = 64
#: Records for the run's memory_usage.json that wait to be sent, that a message has, and messages that are sent with one sample.
MAX_PENDING_RECORDS, RECORDS_PER_MESSAGE, RECORD_MESSAGES = 2_048, 64, 4
#: Seconds between two out-of-memory errors that are sent at once, and the longest wait for the reporter's thread before.
OOM_INTERVAL_SECONDS, OOM_WAIT_SECONDS = 0.2, 0.05
#: Longest wait for the reporter's thread before an answer is sent at once.
ANSWER_WAIT_SECONDS = 0.05
#: Longest wait for the reporter's thread, and then for its lock, when the program ends. Only a machine without CPU time needs it.
EXIT_WAIT_SECONDS = 1.0
#: Highest steps or samples of one call. memledger accepts totals up to 2**50.
MAX_COUNT = 1 << 40
#: Settings of the program, beside two of torch's allocator, and characters of a name and of a text.
MAX_OWN_SETTINGS = 16
MAX_NAME = 64
#: Variables with the setting of torch's allocator: the name since torch 2.9, and the older one.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Where launchers write the rank of a process among those of its host: torchrun and accelerate, Slurm, Open MPI, Intel MPI and MPICH.
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-")

Pair = Tuple[str, str]

#: Component and operation of what the thread samples, for sinks.
SAMPLE: Pair = ("process", "sample")


def valid_name(value: Any) -> str:
    """Returns the name of a component, an operation or a setting; what memledger would reject is replaced by ``_``."""
    text = str(value)  # never the object itself, which may be a model
    name = "".join(each if each in NAME_CHARACTERS else "_" for each in text[:MAX_NAME]) or "_"
    if len(text) > MAX_NAME or any(ord(each) > 127 for each in text):  # names of another script, or with one beginning, stay apart
        ending = f"-{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
        name = name[: MAX_NAME - len(ending)].rstrip("_") + ending
    if name != text:
        allowed = "1 to 64 of the characters A-Z a-z 0-9 _ . : -"
        warn_once("name", f"the name {text[:MAX_NAME]!r} is reported as {name!r}: names have {allowed}", stacklevel=5)
    return name


def _count(value: Any) -> int:
    number = operator.index(value)  # a number of numpy is one; what JSON cannot carry would stop all reports
    if not 0 <= number <= MAX_COUNT:
        raise ValueError(f"{number} is no count")
    return number


def _optional_count(name: str, value: Any) -> Optional[int]:
    """Returns a count, or None with a warning: a wrong number of samples does not lose the step."""
    try:
        return None if value is None else _count(value)
    except (TypeError, ValueError) as error:
        warn_once(name, f"step: {name} ignored: {error}", stacklevel=5)
        return None


def _setting(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):  # a file name that is not UTF-8 has surrogates, which are no JSON
        return value[:MAX_NAME].encode("utf-8", "replace").decode()
    if isinstance(value, (int, float)) and abs(value) <= 1 << 50:  # not NaN, which is no JSON
        return value
    return _setting(str(value))


def _parsed_allocator_setting() -> Optional[str]:
    """Returns the allocator's setting as torch parsed it: it reads the environment once. None where torch does not say (before 2.9)."""
    read = getattr(getattr(sys.modules.get("torch"), "_C", None), "_accelerator_getAllocatorSettings", None)
    return None if read is None else str(read())


def _allocator_settings() -> Dict[str, str]:
    """Returns the setting of torch's allocator, as torch parsed it; before torch says that, as the process has it in its environment."""
    found = {}
    texts = {name: os.environ.get(name) for name in ALLOCATOR_VARIABLES}
    if _torch.initialized() is not None:  # before, the call would parse the environment, and the program may set it yet
        parsed = _parsed_allocator_setting()
        if parsed is not None:
            # the program's own name for it, the old one if it has both: that one counts in torch 2.15
            name = next((name for name in reversed(ALLOCATOR_VARIABLES) if texts[name] is not None), ALLOCATOR_VARIABLES[0])
            texts = {**dict.fromkeys(ALLOCATOR_VARIABLES), name: parsed}
    for name, text in texts.items():
        options = [option.strip() for option in (text or "").split(",") if option.strip()]
        options.sort(key=lambda option: not option.startswith("expandable_segments"))  # the first that must fit
        while len(",".join(options)) > MAX_NAME:
            options.pop()
        if options or text is not None:  # an empty one switches the other one off
            found[name.lower()] = _setting(",".join(options))
    return found


def _environment_number(name: str) -> Optional[int]:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _is_started_by_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _block_signals() -> None:
    """Leaves signals to the program's threads, whose system calls they interrupt. Faults of this thread stay its own."""
    import signal

    if threading.get_native_id() == os.getpid():
        return  # threads of gevent and eventlet run in the main thread of the program
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - faults)


class Reporter:
    """Everything that this process reports."""

    def __init__(self) -> None:
        self._is_stopped = False
        self._ooms = CudaOoms(self._report_oom, self.is_searching)
        self._clear()
        self._reset()

    def _clear(self) -> None:
        """Forgets what the program reported."""
        self.records = Records()
        self._steps = 0
        self._samples: Optional[int] = None
        self._settings: Dict[str, Any] = {}
        self._searches = 0  # in progress, one within another
        self._has_searched = False  # and memledger does not know it yet

    def _reset(self) -> None:
        """Forgets connection and thread, as in a forked child, where both are the parent's."""
        # reentrant: a signal handler of the program may report while it interrupts a call that holds one
        self._lock = threading.RLock()
        self._count_lock = threading.RLock()  # held for a few additions only, so a training never waits for a send
        self._connection = Connection()
        self._stopping = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._sampling: Optional[threading.Event] = None  # set to end it
        self._pending: "collections.OrderedDict[Pair, Dict[str, Any]]" = collections.OrderedDict()
        self._pending_records: Deque[Record] = collections.deque()
        # the newest error, with its time, and how many before it were not sent
        self._pending_oom: Optional[Tuple[float, Dict[str, Any]]] = None
        self._skipped_ooms = 0
        # what came of an error that was sent: that the program ended by it, and where its snapshot is
        self._oom_updates: Dict[str, Dict[str, Any]] = {}
        self._last_oom = 0.0
        self._sequence = 0
        self._interval = INTERVAL_SECONDS
        self._first_device: Optional[int] = None
        self._forget_sent()

    def _forget_sent(self) -> None:
        """Forgets what was sent on an earlier connection."""
        self._announced: Optional[List[int]] = None
        self._sent_steps: Tuple[int, Optional[int]] = (0, None)
        self._sent_settings: Dict[str, Any] = {}

    def after_fork(self) -> None:
        """Makes the child silent: its own descriptor is closed, locks are new, counters begin at 0."""
        connection = self._connection
        self._ooms.reset()
        operations.clear()
        peaks.reset()
        _torch.forget_devices()
        cleaner.reset()
        sinks.reset()
        restore_sigterm()
        _guard.swallowed = 0
        self._clear()
        self._reset()
        connection.close()

    def start(self) -> None:
        """Starts the thread, once. Not in a DataLoader worker, whose code may call ``track`` too: there are many of them."""
        if self._thread is not None or _torch.in_dataloader_worker() or not directory():
            return
        with self._lock:
            if self._thread is None:
                self._is_stopped = False
                peaks.watch()
                self._ooms.watch_exceptions()
                self._stopping = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stopping,), name="memledger", daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    raise
                if _is_started_by_multiprocessing():
                    _end_with_multiprocessing()

    def start_unless_stopped(self) -> None:
        """Starts the thread for a step or an operation. Not after ``stop``, nor in a process that may become a DataLoader worker."""
        if self._thread is None and not self._is_stopped and not _torch.is_being_spawned():
            self.start()

    def start_sampling(self) -> None:
        """Starts the thread that samples for the sinks, once. It is not the other one, which gets no signals: a sink may start processes."""
        if self._sampling is None and not _torch.in_dataloader_worker() and not _torch.is_being_spawned():
            self._sampling = stopping = threading.Event()
            threading.Thread(target=self._sample_for_sinks, args=(stopping,), name="memledger-sinks", daemon=True).start()

    def _sample_for_sinks(self, stopping: threading.Event) -> None:
        while not stopping.wait(INTERVAL_SECONDS):
            try:
                if self._searches == 0 and not _torch.in_dataloader_worker():
                    devices = peaks.of_process()
                    sinks.emit(self.memory_now(SAMPLE, devices, _torch.total(devices, "alloc_peak")), self._steps)
            except Exception:
                record_error()

    def stop(self) -> None:
        """Sends what is left and ends the connection, and forgets the sinks."""
        self._is_stopped = True
        if self._sampling is not None:
            self._sampling.set()
            self._sampling = None
        sinks.reset()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        thread.join(EXIT_WAIT_SECONDS)
        if self._lock.acquire(timeout=EXIT_WAIT_SECONDS):
            try:
                self._report(MAX_PENDING_OPERATIONS)
                self._connection.close()
            finally:
                self._lock.release()

    def count_step(self, steps: int, samples: Optional[int], batch_size: Optional[int]) -> None:
        """Counts training steps. ``batch_size`` gives the samples of each step where ``samples`` is not given."""
        steps = _count(steps)
        samples = _optional_count("samples", samples)
        batch_size = _optional_count("batch_size", batch_size)
        if self._searches > 0:
            return  # they train nothing
        if samples is None and batch_size is not None:
            samples = steps * batch_size
        with self._count_lock:
            self._steps += steps
            if samples is not None:
                self._samples = (self._samples or 0) + samples

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """Adds settings of the training, to be sent on each connection."""
        merged = dict(self._settings)
        for key, value in settings.items():
            merged[valid_name(key)] = _setting(value)
        if len(merged) > MAX_OWN_SETTINGS:
            warn_once("settings", f"{len(merged)} settings: only the first {MAX_OWN_SETTINGS} are reported", stacklevel=5)
        self._settings = dict(list(merged.items())[:MAX_OWN_SETTINGS])

    def record(self, record: Record, devices: Optional[List[_torch.Device]]) -> None:
        """Records the memory of an operation, and lets the thread send it. ``devices`` have an ``alloc_peak`` where it is that of the operation."""
        self.records.add(record)
        if self._searches > 0:
            return
        if not _torch.in_dataloader_worker():
            sinks.emit(record, self._steps)
        keys = ("i", "alloc", "res", "alloc_peak")
        short = [{key: device[key] for key in keys if key in device} for device in devices or []]
        pair = (valid_name(record.component), valid_name(record.operation))
        message = {"t": "operation", "component": pair[0], "operation": pair[1], "rss": record.rss, "dev": short}
        with self._count_lock:
            if len(self._pending_records) < MAX_PENDING_RECORDS:  # the operation itself has the newest
                self._pending_records.append(record._replace(component=pair[0], operation=pair[1]))
            self._pending[pair] = message
            if len(self._pending) > MAX_PENDING_OPERATIONS:
                self._pending.popitem(last=False)
                self._connection.lost += 1

    @staticmethod
    def memory_now(pair: Pair, devices: Optional[List[_torch.Device]], peak: Optional[int]) -> Record:
        """Returns the memory of this process now; ``peak`` is that of tensors on all devices, in bytes."""
        amounts = (_torch.total(devices, "alloc"), peak, _torch.total(devices, "res"))
        if _torch.initialized() is None:
            amounts = (0, 0, 0)  # what is on no GPU takes none, as torch says too
        return Record(*pair, time.time(), _host.rss_bytes(), *amounts)

    def begin_search(self) -> None:
        """Begins a search for a batch size; its failures and steps are not those of the training."""
        self._searches += 1

    def end_search(self) -> None:
        """Ends a search. What it used of the GPUs says nothing about the training."""
        self._searches = max(0, self._searches - 1)
        if self._searches == 0:
            peaks.forget()
            self._has_searched = True

    def is_searching(self) -> bool:
        """Returns whether a search for a batch size is in progress, which finds the limit by errors."""
        return self._searches > 0

    def observe_ooms(self) -> None:
        """Lets torch call the observer of out-of-memory errors, once CUDA is initialised, and notices resets of its peaks."""
        peaks.watch()
        if self._thread is not None:
            self._ooms.attach()

    def clean_if_due(self, steps: int = 0) -> None:
        """A safe point of the program: cleans up if one is due, and answers memledger at once."""
        if cleaner.run_due(steps) and self._lock.acquire(timeout=ANSWER_WAIT_SECONDS):
            try:
                cleaner.send_answers(self._connection.send)
            finally:
                self._lock.release()

    def _report_oom(self, message: Dict[str, Any]) -> None:
        """Sends an out-of-memory error at once, because the program may be about to end; of many in a short time the newest."""
        if self._thread is None:
            return
        now = time.monotonic()
        with self._count_lock:
            update = [key for key in ("uncaught", "snapshot") if set(message) == {"t", "n", key}]
            if update:
                self._oom_updates[update[0]] = message  # after the error itself, if that waits
            else:
                self._skipped_ooms += self._pending_oom is not None
                self._pending_oom = (now, message)
        if now - self._last_oom < OOM_INTERVAL_SECONDS and not message.get("uncaught"):
            return
        self._last_oom = now
        if self._lock.acquire(timeout=OOM_WAIT_SECONDS):
            try:
                if not self._connection.is_open() or self._announced is None:
                    self._report(0)  # CUDA was initialised just now
                else:
                    self._send_ooms()
            finally:
                self._lock.release()

    def _send_ooms(self) -> None:
        """Sends the newest error and what is known of its consequences. What cannot be sent now stays."""
        with self._count_lock:  # an error that comes while this one is sent must not count it as skipped
            pending, skipped = self._pending_oom, self._skipped_ooms
            self._pending_oom, self._skipped_ooms = None, 0
        if pending is not None:
            at, message = pending
            ago = int(1000 * (time.monotonic() - at))
            if not self._connection.send({**message, "skipped": skipped, "ago_ms": ago}):
                self._connection.lost -= 1  # it is sent later, unless there is a newer one then
                with self._count_lock:
                    self._skipped_ooms += skipped + (self._pending_oom is not None)
                    self._pending_oom = self._pending_oom or pending
                return
        for key, update in list(self._oom_updates.items()):
            if self._connection.send(update):
                self._oom_updates.pop(key, None)

    def _run(self, stopping: threading.Event) -> None:
        try:
            _block_signals()
        except Exception:
            record_error()  # no descriptor is left to import with
        wait = 0.0
        while not stopping.wait(wait):
            is_early = self._sequence < EARLY_REPORTS and _torch.is_loaded_only()
            try:
                with self._lock:
                    if stopping.is_set():
                        return
                    if _torch.in_dataloader_worker():
                        self._connection.close()
                        return
                    self._ooms.watch_exceptions()
                    self.observe_ooms()
                    self._report(1 if is_early else OPERATIONS_PER_SAMPLE)
            except Exception:
                record_error()
            self._sequence += 1  # also after a failure: never a busy loop
            wait = min(EARLY_INTERVAL_SECONDS, self._interval) if is_early else self._interval

    def _report(self, max_operations: int) -> None:
        if self._connection.connect():
            self._forget_sent()
        if not self._connection.is_open():
            return
        for message in self._connection.receive():
            self._handle(message)
        has_searched, devices = self._has_searched, peaks.devices()
        if _torch.has_own_allocator() and self._announced:
            self._connection.close()  # a new one has no figures, and no old ones
            return
        if not self._announce([device["i"] for device in devices or []]):
            return
        self._send_ooms()
        if devices is not None:
            lost = self._connection.lost + _guard.swallowed
            sample: Dict[str, Any] = {"t": "sample", "seq": self._sequence, "lost": lost, "dev": devices}
            if peaks.overlapping:
                sample["overlapping"] = peaks.overlapping
            self._connection.send(sample)
        # after the failures of the search, which are in the sample
        if has_searched and self._connection.send({"t": "forget_peaks"}):
            self._has_searched = False
        cleaner.send_answers(self._connection.send)
        self._report_steps()
        for _ in range(max_operations):
            with self._count_lock:
                if not self._pending:
                    break
                _, message = self._pending.popitem(last=False)
            self._connection.send(message)
        self._report_records(RECORD_MESSAGES if max_operations < MAX_PENDING_OPERATIONS else MAX_PENDING_RECORDS // RECORDS_PER_MESSAGE)

    def _report_records(self, max_messages: int) -> None:
        """Sends what waits for the run's memory_usage.json. What cannot be sent now is lost there, and not in the program's own file."""
        for _ in range(max_messages):
            with self._count_lock:
                count = min(len(self._pending_records), RECORDS_PER_MESSAGE)
                records = [self._pending_records.popleft() for _ in range(count)]
            if not records:
                return
            now = time.time()
            rows = [
                [each.component, each.operation, max(0, int(1e6 * (now - each.timestamp))), each.rss, each.allocated, each.allocated_peak, each.reserved]
                for each in records
            ]
            self._connection.send({"t": "records", "of": rows})

    def _announce(self, indices: List[int]) -> bool:
        """Sends the hello, again with further devices, and the settings. Returns False if memledger did not get a first one."""
        if self._announced is None or any(index not in self._announced for index in indices):
            if self._connection.send(self._hello(indices)):
                self._announced = indices
        settings = {**_allocator_settings(), **self._settings}
        if self._announced is not None and settings != self._sent_settings:
            if self._connection.send({"t": "settings", "kv": settings}):
                self._sent_settings = settings
        return self._announced is not None

    def _report_steps(self) -> None:
        with self._count_lock:
            progress = (self._steps, self._samples)
        if progress == self._sent_steps:
            return
        message: Dict[str, Any] = {"t": "step", "n": progress[0]}
        if progress[1] is not None:
            message["samples"] = progress[1]
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
        backend = _torch.allocator()
        if backend is not None:
            message["backend"] = backend
        for key, number in (("rank", _environment_number("RANK")), ("local_rank", self._local_rank(indices))):
            if number is not None:
                message[key] = number
        return message

    def _local_rank(self, indices: List[int]) -> Optional[int]:
        """Returns the rank that a launcher gave this process, or the first GPU of one that multiprocessing started."""
        for name in LOCAL_RANKS:
            number = _environment_number(name)
            if number is not None:
                return number
        if self._first_device is None and indices and _is_started_by_multiprocessing():
            self._first_device = min(indices)
        return self._first_device

    def _handle(self, message: Dict[str, Any]) -> None:
        if message.get("t") == "cleanup":
            cleaner.request(message)
        if message.get("t") != "welcome":
            return
        self._connection.mark_accepted()
        interval_ms = message.get("interval_ms")
        if type(interval_ms) is int and interval_ms > 0:  # JSON has true, 1e999 and NaN too
            self._interval = min(max(interval_ms, MIN_INTERVAL_MS), MAX_INTERVAL_MS) / 1000


#: The reporter of this process.
reporter = Reporter()


@never_raises()
def _after_fork_in_child() -> None:
    reporter.after_fork()


@never_raises()
def _at_exit() -> None:
    """Sends what is left."""
    reporter.stop()


def _end_with_multiprocessing() -> None:
    """Makes a process of multiprocessing send what is left: it ends without the functions of ``atexit``."""
    from multiprocessing import util

    util.Finalize(None, _at_exit, exitpriority=-100)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
