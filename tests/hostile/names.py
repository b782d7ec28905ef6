"""Starts two processes whose names are control characters and invalid UTF-8: one by prctl(2), one by a command line of 64 KiB."""
import ctypes
import os
import signal
import sys

read_end, write_end = os.pipe()
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, ctypes.c_char_p(b"\x1b[2J\r\n\xff\xfe\x07\x7f\xc3"), 0, 0, 0)
    os.write(write_end, b"x")
    while True:
        signal.pause()
os.read(read_end, 1)
argument = bytes(range(1, 256)) * 257  # 64 KiB
os.posix_spawn("/bin/sleep", [b"python\x1b]0;title\x07" + argument, b"1000"], {})
print("ready", flush=True)
sys.stdin.readline()
