"""Points its own command line at a mapping of argv[1] bytes, by prctl(PR_SET_MM, PR_SET_MM_MAP): no privilege is needed.

It begins with `python`. With `grow` as argv[2] it is one page at first, and grows a thousandfold with each input line.
"""
import ctypes
import struct
import sys

PR_SET_MM, PR_SET_MM_MAP = 35, 14
READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE = 3, 0x4022

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
size, grow = int(sys.argv[1]), sys.argv[2:] == ["grow"]
start = libc.mmap(None, size, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
assert start != ctypes.c_void_p(-1).value, "a mapping of %d bytes" % size
ctypes.memmove(start, b"python\0", 7)


def set_command_line(length):
    with open("/proc/self/stat") as file:
        fields = file.read().rsplit(") ", 1)[1].split()
    field = lambda number: int(fields[number - 3])  # as proc(5) numbers them
    start_code, end_code, start_stack, start_data, end_data, start_brk = map(field, (26, 27, 28, 45, 46, 47))
    end = start + length
    # struct prctl_mm_map: an auxv of no bytes and no other executable
    layout = (start_code, end_code, start_data, end_data, start_brk, start_brk, start_stack, start, end, end, end)
    layout = struct.pack("=11QQIi", *layout, 0, 0, -1)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_char_p(layout), len(layout), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")


length = 4096 if grow else size
set_command_line(length)
print("ready", flush=True)
for _ in sys.stdin:
    length = min(length * 1000, size)
    set_command_line(length)
    print(length, flush=True)
