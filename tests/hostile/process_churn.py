"""Starts argv[1] processes and prints their number. After an input line they exit within two seconds, and each is replaced by
processes that run for a second."""
import os
import random
import sys
import time

read_end, write_end = os.pipe()


def fork(wait):
    if os.fork() == 0:
        wait()
        os._exit(0)


def wait_for_end_of_pipe():
    os.close(write_end)
    os.read(read_end, 1)
    time.sleep(random.random() * 2)


for _ in range(int(sys.argv[1])):
    fork(wait_for_end_of_pipe)
print(sys.argv[1], flush=True)
sys.stdin.readline()
os.close(write_end)
os.close(read_end)
while True:
    os.wait()
    fork(lambda: time.sleep(1))
