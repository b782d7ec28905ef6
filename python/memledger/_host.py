"""Host memory of this process."""

import os


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
