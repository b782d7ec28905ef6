"""Starts argv[1] processes and prints how many there are; then they end, and others come for them that live for a second each."""
import os
import random
import sys
import time

gate, door = os.pipe()


def child(wait):
    if os.fork() == 0:
        wait()
        os._exit(0)


def wait_for_gate():
    os.close(door)
    os.read(gate, 1)
    time.sleep(random.random() * 2)


for _ in range(int(sys.argv[1])):
    child(wait_for_gate)
print(sys.argv[1], flush=True)
os.close(door)
os.close(gate)
while True:
    os.wait()
    child(lambda: time.sleep(1))
