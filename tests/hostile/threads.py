"""Starts argv[1] threads, or as many as the machine allows, and prints their number."""
import signal
import sys
import threading

threading.stack_size(32 * 1024)
started = 0
try:
    for _ in range(int(sys.argv[1])):
        threading.Thread(target=signal.pause, daemon=True).start()
        started += 1
except (RuntimeError, MemoryError):
    pass
print(started, flush=True)
sys.stdin.readline()
