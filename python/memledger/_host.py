"""Host memory of this process."""

import os
import resource


def rss_bytes() -> int:
    """Returns the resident memory of this process, from /proc/self/statm."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Returns the highest resident memory of this process so far, from getrusage(2), whose unit is KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
