"""Holds 32 MiB, and 16 MiB more for every line that comes in."""
import mmap
import sys

kept = []


def take(mib):
    area = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, mib << 20, 4096):
        area[at] = 1
    kept.append(area)


take(32)
print("ready", flush=True)
for _ in sys.stdin:
    take(16)
    print("grown", flush=True)
