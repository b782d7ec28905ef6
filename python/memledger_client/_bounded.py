"""Lets an allocation fail where it would take the memory that a cgroup or the host has left: an error, and no OOM kill."""

import contextlib
import errno
import mmap
import os
import threading
from typing import Any, Iterator, Optional, Tuple

from memledger_client._host_memory import HostMemory


#: More than a process frees at once.
PROBE_BYTES = 1 << 30
#: One bound at a time: it is that of the process.
_lock = threading.RLock()
#: The limit that the process has without the bound; None while there is no bound.
_unbounded: Optional[Tuple[int, int]] = None


def _after_fork_in_child() -> None:
    """Gives a child of the search the limit of its parent, and a lock of its own."""
    global _lock, _unbounded
    _lock = threading.RLock()
    limit, _unbounded = _unbounded, None
    if limit is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, limit)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)


class HostMemoryError(RuntimeError):
    """A measurement would take more host memory than is left."""


@contextlib.contextmanager
def bounded(memory: Optional[HostMemory]) -> Iterator[None]:
    """Lets code take at most what ``memory`` has for a measurement. Raises HostMemoryError where it would take more.

    The bound is that of private writable memory (RLIMIT_DATA), which the kernel counts as it is mapped: before it is charged.
    """
    if memory is None:
        yield
        return
    with _lock:
        _start_threads()
        with _data_limit(memory.for_measurement):
            try:
                yield
            except (MemoryError, RuntimeError, OSError) as error:
                if not _is_refused(error):
                    raise
                error.__traceback__ = None  # its frames hold tensors
                raise HostMemoryError(f"a step does not fit into the host memory: {memory}") from None


@contextlib.contextmanager
def _data_limit(allowance: int) -> Iterator[None]:
    """Lets the process map so many bytes more, unless its limit is lower."""
    import resource

    global _unbounded
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = _mapped_bytes() + allowance
    is_lower = any(limit != resource.RLIM_INFINITY and limit <= allowed for limit in (soft, hard))
    before = _unbounded
    if not is_lower:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
        _unbounded = before or (soft, hard)
    try:
        if not is_lower and _can_map(2 * allowance + PROBE_BYTES):  # what is freed meanwhile may be mapped again
            raise HostMemoryError("this kernel does not bound the memory of a process (RLIMIT_DATA, Linux 4.7), so that nothing is tried")
        yield
    finally:
        if not is_lower:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            _unbounded = before


def _can_map(size: int) -> bool:
    """Returns whether the process can map so many bytes more. None of them is used."""
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE).close()
    except (OSError, ValueError, OverflowError, MemoryError):
        return False
    return True


def _is_refused(error: Exception) -> bool:
    """Returns whether an allocation of host memory failed, by the texts of torch, of its libraries and of C++."""
    texts = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc", "could not create a primitive", "out_of_memory", "start new thread")
    is_by_number = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return is_by_number or any(text in str(error) for text in texts)


def _start_threads() -> None:
    """Lets torch start its threads: with the bound, their stacks might not fit, and their library then ends the program."""
    import torch

    ones: Any = getattr(torch, "ones", None)
    if ones is not None:
        ones(1 << 20, device="cpu").add_(1)


def _mapped_bytes() -> int:
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmData:"))
