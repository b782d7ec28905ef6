"""Keeps its own memory map locked, with nothing but page tables of a container's limit: no privilege is needed.

madvise(MADV_POPULATE_READ) of argv[1] GiB maps the zero page everywhere and holds the lock for reading all the while; a second
thread waits for the same lock to write, and whoever wants to read after it waits for both. After each round it begins anew.
"""
import ctypes
import sys
import threading

READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, PRIVATE_ANONYMOUS = 3, 0x4022, 0x22
MADV_NOHUGEPAGE, MADV_POPULATE_READ = 15, 22

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
size = int(sys.argv[1]) << 30


def want_to_write():
    while True:
        page = libc.mmap(None, 4096, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        libc.munmap(page, 4096)


threading.Thread(target=want_to_write, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
while True:
    area = libc.mmap(None, size, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    libc.madvise(area, size, MADV_NOHUGEPAGE)
    libc.madvise(area, size, MADV_POPULATE_READ)
    libc.munmap(area, size)
