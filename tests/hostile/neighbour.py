"""Allocates 32 MiB, and 16 MiB more for each input line."""
import mmap
import sys

areas = []


def allocate(mib):
    area = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, mib << 20, 4096):
        area[at] = 1
    areas.append(area)


allocate(32)
print("ready", flush=True)
for _ in sys.stdin:
    allocate(16)
    print("grown", flush=True)
