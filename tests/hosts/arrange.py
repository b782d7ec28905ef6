#!/usr/bin/env python3
"""Makes the arranged hosts from the recorded ones, so that what was changed can be read here.

usage: arrange.py      in this folder; writes v2-cgroupfs-psi.jsonl and v2-before-5.18.jsonl
"""
import json
import re


def load(name):
    with open(f"{name}.jsonl") as file:
        return [json.loads(line) for line in file]


def save(name, entries):
    with open(f"{name}.jsonl", "w") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


def with_cgroupfs_driver_and_psi():
    """Docker's cgroupfs driver names a cgroup /docker/ID; a kernel with PSI has memory.pressure in each and one for all."""
    def stalls(some, full):
        line = "{} avg10=0.00 avg60=0.12 avg300=1.05 total={}\n"
        return line.format("some", some) + line.format("full", full)

    moved = []
    containers = 0
    for entry in load("v2-docker"):
        entry = json.loads(re.sub(r"system\.slice/docker-([0-9a-f]{64})\.scope", r"docker/\1", json.dumps(entry)))
        entry["path"] = entry["path"].replace("cgroup/system.slice", "cgroup/docker")
        moved.append(entry)
        if entry["path"].endswith("/memory.current") and entry["path"].count("/") == 3:
            containers += 1
            path = entry["path"].replace("memory.current", "memory.pressure")
            moved.append({"path": path, "text": stalls(1_500_000 * containers, 250_000 * containers)})
    moved.append({"path": "proc/pressure/memory", "text": stalls(7_654_321, 1_234_567)})
    save("v2-cgroupfs-psi", moved)


def before_5_18():
    """memory.stat without the sum `kernel` (5.18) and what is younger still, and no memory.peak (5.19)."""
    young = ("kernel ", "sec_pagetables ", "vmalloc ", "zswap", "zswpin", "zswpout", "zswpwb")
    old = []
    for entry in load("v2-podman"):
        if entry["path"].endswith("memory.peak"):
            continue
        if entry["path"].endswith("memory.stat"):
            lines = entry["text"].splitlines(keepends=True)
            entry["text"] = "".join(line for line in lines if not line.startswith(young))
        old.append(entry)
    save("v2-before-5.18", old)


with_cgroupfs_driver_and_psi()
before_5_18()
