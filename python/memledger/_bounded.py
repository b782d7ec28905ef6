"""Lets an allocation fail where it would take the memory that a cgroup or the host has left: an error, and no OOM kill."""

import contextlib
import threading
from typing import Any, Iterator, Optional

from memledger._host_memory import HostMemory


#: One bound at a time: it is that of the process.
_lock = threading.RLock()


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
            except (MemoryError, RuntimeError) as error:
                if not _is_refused(error):
                    raise
                raise HostMemoryError(f"a step does not fit into the host memory: {memory}") from None  # its frames hold tensors


@contextlib.contextmanager
def _data_limit(allowance: int) -> Iterator[None]:
    """Lets the process map so many bytes more, unless its limit is lower."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = _mapped_bytes() + allowance
    is_lower = any(limit != resource.RLIM_INFINITY and limit <= allowed for limit in (soft, hard))
    if not is_lower:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    try:
        yield
    finally:
        if not is_lower:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _is_refused(error: Exception) -> bool:
    """Returns whether an allocation of host memory failed, by the texts of torch, of its libraries and of C++."""
    texts = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc", "could not create a primitive", "out_of_memory", "start new thread")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _start_threads() -> None:
    """Lets torch start its threads: with the bound, their stacks might not fit, and their library then ends the program."""
    import torch

    ones: Any = getattr(torch, "ones", None)
    if ones is not None:
        ones(1 << 20, device="cpu").add_(1)


def _mapped_bytes() -> int:
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmData:"))
