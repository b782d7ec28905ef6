"""A FUSE server that does not respond, in a mount namespace of its own. It ends when standard input is closed. argv[1]:

shm     /dev/shm is a FUSE mount that responds to no request
lock    after an input line, locks the memory map of this process: reads a mapped FUSE file through /proc/self/mem, which needs
        the lock until FUSE responds to the read. Another thread waits to lock it for writing, so all later readers wait too

tests/support/passthrough.py is a second server because it serves a folder to a program that it starts.
"""
import ctypes
import os
import select
import struct
import sys
import tempfile
import threading

CLONE_NEWNS, MS_NOSUID_NODEV, MS_REC_PRIVATE = 0x20000, 6, 0x44000
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 18, 25, 26

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)


def mount(folder):
    device = os.open("/dev/fuse", os.O_RDWR)
    options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % device
    check(libc.mount(b"hostile", folder.encode(), b"fuse", MS_NOSUID_NODEV, options), "mount FUSE")
    return device


def attributes(inode):
    mode = 0o040755 if inode == 1 else 0o100644
    return struct.pack("=6Q10I", inode, 4096, 8, *[0] * 6, mode, 1, 0, 0, 0, 4096, 0)


def serve(device):
    """Responds to all requests but reads, until standard input is closed: when the test has ended, also by a failure."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    poll.register(0, 0)
    while not any(file == 0 for file, _ in poll.poll()):
        request = os.read(device, 1 << 17)
        operation, unique, inode = struct.unpack("=4xIQQ", request[:24])
        if operation in (READ, FORGET):
            continue
        error, response = 0, b""
        if operation == INIT:
            response = struct.pack("=IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 32, *[0] * 9)
        elif operation == LOOKUP:
            response = struct.pack("=QQQQII", 2, 0, 1000, 1000, 0, 0) + attributes(2)
        elif operation == GETATTR:
            response = struct.pack("=QII", 1000, 0, 0) + attributes(inode)
        elif operation == OPEN:
            response = struct.pack("=QII", 1, 0, 0)
        elif operation not in (RELEASE, FLUSH):
            error = -38  # ENOSYS
        os.write(device, struct.pack("=IiQ", 16 + len(response), error, unique) + response)


def lock_memory_map():
    folder = tempfile.mkdtemp()
    device = mount(folder)
    # a process of its own: a thread that waits for FUSE cannot be killed, and would keep the device open
    if os.fork() == 0:
        print("ready", flush=True)
        serve(device)
        os._exit(0)
    os.close(device)
    file = os.open(folder + "/file", os.O_RDONLY)
    area = libc.mmap(None, 4096, 1, 2, file, 0)  # PROT_READ, MAP_PRIVATE
    libc.umount2(folder.encode(), 2)  # MNT_DETACH: open files keep it
    os.rmdir(folder)
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    lock_for_writing = threading.Timer(0.2, lambda: libc.mmap(None, 4096, 3, 0x22, -1, 0))
    sys.stdin.readline()
    lock_for_writing.start()
    os.pread(memory, 1, area)


check(libc.unshare(CLONE_NEWNS), "unshare")
check(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "private mounts")
if sys.argv[1] == "lock":
    lock_memory_map()
else:
    device = mount("/dev/shm")
    print("ready", flush=True)
    sys.stdin.readline()
