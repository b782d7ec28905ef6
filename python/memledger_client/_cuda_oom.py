"""CUDA out-of-memory errors: what torch reports about each, and by which of them the program ends.

torch calls an observer for each error of its own allocator, also for one that the program survives. The observer does not see errors
of libraries such as cuBLAS, nor those of other allocators; these are found in the text of the exception by which the program ends.
"""

import os
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from memledger_client import _torch
from memledger_client._guard import never_raises, record_error

Pair = Tuple[str, str]
Message = Dict[str, Any]

#: Texts of errors that the observer sees.
OBSERVED_MARKERS = ("CUDA out of memory", "HIP out of memory")
#: Texts of all such errors. memledger itself reads the numbers in them.
MARKERS = (
    *OBSERVED_MARKERS,
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: Seconds between two snapshots of torch's history of allocations, which may be large.
SNAPSHOT_INTERVAL_SECONDS = 60.0
#: Attribute of our hooks for exceptions.
HOOK_MARK = _torch.ORIGINAL
#: Attribute of an exception that one of them examined.
EXAMINED_MARK = "_memledger_examined"
#: Characters of a text that are sent.
MAX_TEXT = 2_000
#: Exceptions of a chain that are looked at.
MAX_CAUSES = 16
#: An exception while an older error was handled is not caused by it: the error has to be as new as this, in seconds.
MAX_CONTEXT_AGE = 5.0


class Operations:
    """Operations in progress by thread, innermost last: see ``track``."""

    def __init__(self) -> None:
        self._stacks: Dict[int, List[Pair]] = {}

    def enter(self, pair: Pair) -> Tuple[int, List[Pair]]:
        """Begins an operation of this thread. Returns what ``leave`` takes."""
        thread = threading.get_ident()
        stack = self._stacks.setdefault(thread, [])
        stack.append(pair)
        return thread, stack

    def leave(self, entered: Tuple[int, List[Pair]], pair: Pair) -> None:
        """Ends an operation, maybe in another thread than the one that began it."""
        thread, stack = entered
        if pair in stack:
            del stack[len(stack) - 1 - stack[::-1].index(pair)]
        if not stack and self._stacks.get(thread) is stack:
            self._stacks.pop(thread, None)

    def current(self) -> Optional[Pair]:
        """Returns the operation of this thread, else that of the main thread, which waits for autograd's threads in ``backward``."""
        stack = self._stacks.get(threading.get_ident()) or self._stacks.get(threading.main_thread().ident or 0)
        return stack[-1] if stack else None

    def clear(self) -> None:
        """Forgets all, as in a forked child."""
        self._stacks.clear()


#: The operations of this process.
operations = Operations()


@never_raises()
def mark_operation(error: Any, pair: Pair) -> None:
    """Marks an error with the innermost operation that it ended."""
    if error is not None and not hasattr(error, "_memledger_operation") and _text_of(error) is not None:
        error._memledger_operation = pair


def _text_of(error: Any) -> Optional[str]:
    """Returns the text of a CUDA out-of-memory error from its first marker; None for others."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    found = [text.index(marker) for marker in MARKERS if marker in text]
    if not found and any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        found = [0]  # torch's own class, with other words: cudaMallocAsync
    return text[min(found) :][:MAX_TEXT] if found else None


def is_cuda_oom(error: BaseException) -> bool:
    """Returns whether an error says that a GPU, or a library of CUDA on it, had no memory left."""
    return _text_of(error) is not None


class CudaOoms:
    """Makes a message of each error in this process, and passes it on.

    Each has a number; a second message with the number of an earlier one says that the program ended by it.
    """

    def __init__(self, report: Callable[[Message], None], is_searching: Callable[[], bool]) -> None:
        self._report, self._is_searching = report, is_searching
        self._is_attached = False
        self.reset()

    def reset(self) -> None:
        """Begins to count at 0, as in a forked child."""
        # another thread may have held the one before the fork; reentrant for signal handlers of the program
        self._attaching = threading.RLock()
        self._count = 0
        self._observed = self._reported = 0  # numbers of the newest errors that the observer saw, and reported
        self._observed_at = 0.0
        self._snapshot_at = -SNAPSHOT_INTERVAL_SECONDS
        self._snapshot: Optional[str] = None

    def attach(self) -> None:
        """Lets torch call the observer. Only once CUDA is initialised: before, this would initialise it."""
        if self._is_attached:
            return
        torch = _torch.initialized()
        if torch is None:
            return
        with self._attaching:  # the reporter's thread and the program call this; two observers would count each error twice
            if self._is_attached:
                return
            self._is_attached = True  # also after a failure: other allocators refuse observers
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            try:
                attach(self._observe)
            except RuntimeError:
                record_error()

    def watch_exceptions(self) -> None:
        """Examines each exception by which the program or a thread of it ends, before it is printed as ever.

        To be called again and again: the program may set hooks of its own.
        """
        previous, previous_of_thread = sys.excepthook, threading.excepthook

        def excepthook(kind: Any, error: Any, traceback: Any) -> None:
            self._report_exception(error, True)
            previous(kind, error, traceback)

        def threading_excepthook(arguments: Any) -> None:
            self._report_exception(arguments.exc_value, False)
            previous_of_thread(arguments)

        if not hasattr(previous, HOOK_MARK):
            setattr(excepthook, HOOK_MARK, previous)
            sys.excepthook = excepthook
        if not hasattr(previous_of_thread, HOOK_MARK):
            setattr(threading_excepthook, HOOK_MARK, previous_of_thread)
            threading.excepthook = threading_excepthook

    # An exception here would replace the error of the program, which may catch that one.
    @never_raises()
    def _observe(self, device: int, tried: int, total: int, free: int) -> None:
        """``total`` is the memory of the device, or what the process may take of it. Torch holds no lock meanwhile."""
        self._count += 1
        self._observed, self._observed_at = self._count, time.monotonic()
        message: Message = {"t": "oom", "n": self._count, "i": device, "tried": tried, "total": total, "free": free}
        uuid = _torch.uuid(device)
        if uuid is not None:
            message["uuid"] = uuid
        devices = _torch.devices()
        if devices is not None:  # a device that is not listed never had memory of torch
            memory: Dict[str, int] = next((each for each in devices if each["i"] == device), {"alloc": 0, "res": 0, "split": 0})
            message.update({key: memory[key] for key in ("alloc", "res", "split") if key in memory})
        operation = operations.current()
        if operation is not None:
            message["operation"] = list(operation)
        if self._is_searching():
            return  # it is reported, by its text, if the program ends by it
        self._reported = self._count
        self._report(message)
        snapshot = self._dump_snapshot()
        if snapshot is not None:
            self._report({"t": "oom", "n": self._reported, "snapshot": snapshot})

    @never_raises()
    def _dump_snapshot(self) -> Optional[str]:
        """Writes torch's history of allocations, if the program has it recorded, into one file of this process. Returns its path."""
        torch, now = _torch.initialized(), time.monotonic()
        is_recorded = getattr(torch._C, "_cuda_isHistoryEnabled", None) if torch is not None else None
        is_due = now - self._snapshot_at >= SNAPSHOT_INTERVAL_SECONDS
        if is_recorded is None or not is_recorded() or not is_due or _torch.has_own_allocator():
            return None
        self._snapshot_at = now
        # a new name each time: the directory may be that of all users, or of several containers
        directory = os.environ.get("MEMLEDGER_SNAPSHOT_DIRECTORY") or tempfile.gettempdir()
        descriptor, path = tempfile.mkstemp(".pickle", f"memledger-cuda-oom-{os.getpid()}-", directory)
        os.close(descriptor)
        try:
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[union-attr]
        except BaseException:
            os.unlink(path)
            raise
        before, self._snapshot = self._snapshot, path
        if before is not None:
            os.unlink(before)
        return path

    @never_raises()
    def _report_exception(self, error: Any, is_uncaught: bool) -> None:
        if hasattr(error, EXAMINED_MARK):
            return  # one hook called the other
        try:
            setattr(error, EXAMINED_MARK, True)
        except Exception:
            pass  # it is immutable
        found, text = self._find(error)
        if text is None:
            return
        if self._observed > 0 and text.startswith(OBSERVED_MARKERS) and self._reported == self._observed:
            if is_uncaught:
                self._report({"t": "oom", "n": self._observed, "uncaught": True})
            return
        self._count += 1
        message: Message = {"t": "oom", "n": self._count, "text": text, "uncaught": is_uncaught}
        operation = getattr(found, "_memledger_operation", None)
        if operation is not None:
            message["operation"] = list(operation)
        self._report(message)

    def _find(self, error: Any) -> Tuple[Any, Optional[str]]:
        """Returns the CUDA out-of-memory error among an exception and its causes, with its text.

        An exception that was raised while such an error was handled counts only if that was just now: a program may go on within
        ``except`` for hours.
        """
        for _ in range(MAX_CAUSES):
            text = _text_of(error)
            if text is not None:
                return error, text
            if error is None:
                break
            is_recent = self._observed > 0 and time.monotonic() - self._observed_at < MAX_CONTEXT_AGE
            if isinstance(error, KeyboardInterrupt):
                is_recent = False  # a person ended the program while it handled the error
            if error.__cause__ is not None:
                error = error.__cause__
            elif is_recent and not error.__suppress_context__:
                error = error.__context__
            else:
                break
        return None, None
