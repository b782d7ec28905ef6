"""Mounts file systems in a user namespace and a mount namespace of its own: no privilege is needed. argv[1]:

a number    this many bind mounts, each a line of about 30 KB in mountinfo, and then a /dev/shm of 8 MiB
link        /dev/shm is a symbolic link to another folder
"""
import ctypes
import os
import sys

CLONE_NEWUSER_NEWNS, MS_BIND = 0x10020000, 0x1000

libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)


user, group = os.getuid(), os.getgid()
check(libc.unshare(CLONE_NEWUSER_NEWNS), "unshare")
for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{file}", "w") as map_file:
        map_file.write(text)
if sys.argv[1] == "link":
    check(libc.mount(b"none", b"/dev", b"tmpfs", 0, b"size=8m"), "a /dev")
    os.mkdir("/dev/elsewhere")
    os.symlink("/dev/elsewhere", "/dev/shm")
else:
    check(libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"size=8m"), "a /tmp")
    # nearly the longest path that mount(2) accepts, of characters that mountinfo escapes with four each
    path = "/tmp"
    while len(path) < 3800:
        path += "/" + " " * 200
    os.makedirs(path)
    for _ in range(int(sys.argv[1])):
        check(libc.mount(path.encode(), path.encode(), None, MS_BIND, None), "a bind mount")
    check(libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=8m"), "a /dev/shm")  # the last line of mountinfo
print("ready", flush=True)
sys.stdin.readline()
