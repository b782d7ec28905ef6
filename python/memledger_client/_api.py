"""The functions of ``import memledger_client``."""

import functools
from contextlib import ContextDecorator
from typing import Any, Dict, Mapping, Optional

from memledger_client import _host, _startup, _torch
from memledger_client._cleanup import clean, cleaner, is_capturing, raise_on_sigterm
from memledger_client._cuda_oom import mark_operation, operations
from memledger_client._guard import never_raises, warn_once
from memledger_client._peaks import peaks
from memledger_client._records import Records, Sink, sinks
from memledger_client._reporter import Pair, reporter, valid_name

peaks.watch()

CO_COROUTINE = 0x80  # of an `async def`; the module inspect takes long to import


@never_raises(is_public=True)
def start(settings: Optional[Mapping[str, Any]] = None) -> None:
    """Starts to report the memory of this process. A further call only adds its ``settings``.

    ``settings`` describe the training, such as ``{"batch_size": 32, "optimizer": "adamw"}``: at most 16 names, with numbers or texts of
    up to 64 characters. They stand in the record of the run, and `memledger advise` uses them.

    Not needed where PYTHONPATH has memledger's directory: a program then reports once it has initialised CUDA. While
    multiprocessing prepares a process, for which it runs the main module again, a call has only that effect too.
    """
    if settings is not None:
        reporter.add_settings(settings)
    if _torch.is_being_spawned():
        _startup.install()
    else:
        reporter.start()


@never_raises(is_public=True)
def stop() -> None:
    """Sends what is left and stops reporting, also to functions of ``on_record``: at once, or after two seconds where the machine is too busy. Only ``start`` begins again."""
    reporter.stop()


@never_raises(is_public=True)
def step(n: int = 1, samples: Optional[int] = None, batch_size: Optional[int] = None) -> None:
    """Counts ``n`` training steps, and the training samples in them.

    Without ``samples``, each step has ``batch_size`` of them; with neither they are not counted.
    """
    reporter.observe_ooms()
    reporter.count_step(n, samples, batch_size)
    reporter.start_unless_stopped()
    reporter.clean_if_due(steps=n)


class track(ContextDecorator):
    """Records the memory of an operation of a component, as a context or a decorator.

        with memledger_client.track("model", "generate") as tracked:
            ...
        print(tracked.peak_bytes)

    Host memory, tensors and torch's cache are those at the end of the operation, the peak of tensors is that of the operation. One
    within another counts for both. Where operations of several threads, or of several tasks of asyncio, overlap on a device, torch cannot
    tell their peaks apart: they are absent, and counted. A thread's device is its current one. What the program reads of torch's own peaks stays as
    it would be without. Names of any text stay as they are in the report file; memledger gets 1 to 64 of the characters A-Z a-z 0-9 _ . : -
    with a warning where that changes them. Does nothing within what torch.compile compiles.
    """

    #: Highest memory of tensors within the operation in bytes, the sum over the devices in use; None before its end, and where unknown.
    peak_bytes: Optional[int] = None
    _names: Pair = ("invalid", "invalid")  # where the arguments were wrong
    _pair: Pair = _names  # as memledger gets them

    @never_raises(is_public=True)
    def __init__(self, component: str, operation: str) -> None:
        self._names = (str(component), str(operation))
        self._pair = (valid_name(component), valid_name(operation))

    def _recreate_cm(self) -> "track":
        return track(*self._names)  # a decorated function may call itself

    def __call__(self, function: Any) -> Any:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_flags & CO_COROUTINE:
            return super().__call__(function)

        @functools.wraps(function)
        async def tracked(*arguments: Any, **named: Any) -> Any:
            with self._recreate_cm():
                return await function(*arguments, **named)

        return tracked

    def __enter__(self) -> "track":
        self._enter()
        return self

    @never_raises(is_public=True)
    def _enter(self) -> None:
        reporter.start_unless_stopped()
        reporter.observe_ooms()
        # a list, because an object may be entered again within itself
        self.__dict__.setdefault("_entered", []).append((peaks.enter(), operations.enter(self._pair)))

    @never_raises(is_public=True)
    def __exit__(self, *exception: Any) -> None:
        mark_operation(exception[1] if len(exception) > 1 else None, self._pair)
        entered = self.__dict__.get("_entered")
        if entered:
            interval, operation = entered.pop()
            usage = peaks.leave(interval)
            operations.leave(operation, self._pair)
            self.peak_bytes = usage.peak
            reporter.record(reporter.memory_now(self._names, usage.devices, usage.peak), usage.devices)
        if exception and exception[0] is not None:
            cleaner.note_error()
        else:
            reporter.clean_if_due()


class batch_search(ContextDecorator):
    """Marks a search for a batch size, such as that of a trainer, so that it does not count as the training.

        with memledger_client.batch_search():
            tuner.scale_batch_size(trainer.model)

    Its steps are not counted, and of its out-of-memory errors only one by which the program ends is an event. At its end memledger forgets
    the GPU peaks and failures of the run so far. ``auto_select_batch_size`` of ``memledger_client.analyze`` does this itself.
    """

    @never_raises(is_public=True)
    def __enter__(self) -> None:
        reporter.begin_search()

    @never_raises(is_public=True)
    def __exit__(self, *exception: Any) -> None:
        reporter.end_search()


@never_raises(default=dict, is_public=True)
def peak() -> Dict[str, int]:
    """Returns the highest memory of this process so far, in bytes.

    ``cpu_ram_bytes`` is resident memory; ``gpu_allocated_bytes`` and ``gpu_reserved_bytes`` are torch's, the sum of each device's own
    highest, also from before a reset of torch's peaks, and missing without a GPU.
    """
    found = {"cpu_ram_bytes": _host.peak_rss_bytes()}
    devices = peaks.of_process()
    for key, field in (("gpu_allocated_bytes", "alloc_peak"), ("gpu_reserved_bytes", "res_peak")):
        value = _torch.total(devices, field)
        if value is not None:
            found[key] = value
    return found


@never_raises(default=bool, is_public=True)
def save_report(path: str = "memory_usage.json") -> bool:
    """Writes what ``track`` recorded, with the peaks of the process, as JSON. Returns whether the file was written."""
    devices = peaks.of_process()
    if _torch.initialized() is None:
        devices = []  # what is on no GPU takes none
    reporter.records.add_peaks(
        _host.peak_rss_bytes(), _torch.total(devices, "alloc_peak"), _torch.total(devices, "res_peak")
    )
    return save_records(reporter.records, path)


def save_records(records: Records, path: str) -> bool:
    """Writes records to a file. Returns whether that succeeded, and warns where not."""
    try:
        records.save(path)
    except OSError as error:
        warn_once("save_report", f"{path} was not written: {error}", stacklevel=4)
        return False
    return True


@never_raises(is_public=True)
def cleanup() -> Optional[int]:
    """Collects garbage and gives torch's cache back to the GPU. Returns how many bytes the cache shrank.

    It waits for the GPU and makes the next allocations slower, and torch itself gains no memory by it: it helps other
    processes on the same GPU. An interactive Python forgets its last error, whose frames hold tensors. None without a GPU, and
    while a CUDA graph is captured.
    """
    if is_capturing():
        return None
    found = clean()
    return None if _torch.initialized() is None else sum(before - after for before, after in found.values())


@never_raises(is_public=True)
def cleanup_on(*moments: str, threshold: float = 85, every: int = 1) -> None:
    """Cleans up at these moments from now on; without any, no longer.

    ``"step"``: after each ``every`` steps. ``"threshold"``: where a GPU that this process uses is at least ``threshold`` percent full, at
    most once a minute. ``"error"``: after an operation of ``track`` failed. It happens at the end of ``step``, or of an operation of
    ``track``.
    """
    cleaner.clean_on(moments, threshold, every)
    reporter.start_unless_stopped()


@never_raises(is_public=True)
def install_shutdown() -> None:
    """Lets the program end in order at SIGTERM, and send its last report. Call it in the main thread.

    SIGTERM then raises ``SystemExit(143)``, so that ``finally`` and ``atexit`` run; a handler of the program, or an ignored signal, stays
    as it is. SIGINT raises KeyboardInterrupt as always. A program that waits in a call outside Python ends only after that call.
    """
    raise_on_sigterm()


@never_raises(is_public=True)
def on_record(function: Sink) -> Sink:
    """Hands each record of ``track``, and a sample of the process each second, to a function, as a dict, until ``stop``.

    It has the keys of ``memory_usage.json``, in MB (2**20 bytes), and ``step``, the training steps so far; samples have the component
    ``process`` and the operation ``sample``, and come from a thread of memledger's. Also where memledger does not run. Only one call is made
    at a time: ``track`` waits for a slow function. Its errors are counted, and do not reach the program. A function of the same name takes
    the place of the earlier one. Not in forked children and in workers of a DataLoader, and nothing of a search for a batch size. May be
    used as a decorator.
    """
    sinks.add(function)
    reporter.start_sampling()
    return function


def load_ipython_extension(ipython: Any) -> None:
    """Starts to report from a notebook: ``%load_ext memledger_client``."""
    start()
