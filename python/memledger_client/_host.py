"""Host memory of this process, and its files."""

import os
from contextlib import contextmanager
from typing import Iterator


def rss_bytes() -> int:
    """Returns the resident memory of this process, from /proc/self/statm."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Returns the highest resident memory of this program so far, from VmHWM in /proc/self/status.

    getrusage(2) would keep the peak of the program that this one replaced by exec.
    """
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmHWM:"))


@contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Returns a path to write to, which becomes ``path`` only if all was written."""
    part = f"{path}.{os.getpid()}.part"
    try:
        yield part
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.unlink(part)
