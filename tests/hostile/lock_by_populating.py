"""Locks its own memory map in a loop, within the memory limit of a container: no privilege is needed.

madvise(MADV_POPULATE_READ) of a large area maps the zero page everywhere, with the lock held for reading: for about argv[1]
seconds, by the time that a small area takes. A second thread waits to lock it for writing, so all later readers wait for both.
"""
import ctypes
import sys
import threading
import time

READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, PRIVATE_ANONYMOUS = 3, 0x4022, 0x22
MADV_NOHUGEPAGE, MADV_POPULATE_READ = 15, 22

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(size):
    area = libc.mmap(None, size, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    libc.madvise(area, size, MADV_NOHUGEPAGE)
    libc.madvise(area, size, MADV_POPULATE_READ)
    libc.munmap(area, size)


def lock_for_writing():
    while True:
        page = libc.mmap(None, 4096, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        libc.munmap(page, 4096)


SMALL, MAX_SIZE = 8 << 30, 3 << 39
begin = time.monotonic()
populate(SMALL)
size = min(int(SMALL * float(sys.argv[1]) / (time.monotonic() - begin)), MAX_SIZE)
threading.Thread(target=lock_for_writing, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
while True:
    populate(size)
