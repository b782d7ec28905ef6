#!/usr/bin/env python3
"""Records what memledger reads of a machine: a few files of the host, the cgroups on the way to some containers and below
them, and the processes in them. One JSON object a line: {"path", "text"} is a file, {"path", "link"} a symbolic link and
{"path", "dir"} a directory. A text is bytes as Latin-1, so that any byte survives.

Only for machines whose containers are ours: command lines are recorded as they are.

usage: record.py [--cgroup PATH]... [--process PID]... [--unified] CONTAINER_ID... >NAME.jsonl
       --cgroup   also this cgroup (below the root of the memory controller), such as a monitor's beside its container
       --process  also this process, which lies in no container
       --unified  also the v2 tree of a hybrid host
"""
import argparse
import glob
import json
import os
import sys

CGROUPFS = "/sys/fs/cgroup"
HOST = ["meminfo", "uptime", "vmstat", "pressure/memory"]
V1 = ["memory.usage_in_bytes", "memory.stat", "memory.limit_in_bytes", "memory.max_usage_in_bytes",
      "memory.kmem.usage_in_bytes"]
V2 = ["memory.current", "memory.stat", "memory.max", "memory.high", "memory.peak", "memory.events",
      "memory.swap.current", "memory.swap.max", "memory.pressure", "cgroup.controllers"]
PROCESS = ["stat", "statm", "cmdline", "cgroup", "smaps_rollup"]
GPU = ["uevent", "unique_id", "product_name", "mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent",
       "power/runtime_status"]


def emit(path, **what):
    json.dump({"path": path, **what}, sys.stdout)
    print()


def record(path, name):
    """A file, if this kernel has it and it is readable."""
    try:
        with open(path, "rb") as file:
            emit(name, text=file.read().decode("latin-1"))
    except OSError:
        pass


def record_cgroup(root, relative, name, files):
    name = os.path.join(name, relative).rstrip("/")
    emit(name, dir=True)
    for file in files:
        record(os.path.join(root, relative, file), os.path.join(name, file))


def pids(path):
    with open(os.path.join(path, "cgroup.procs")) as file:
        return [int(line) for line in file]


def record_tree(root, name, files, wanted, also):
    """The cgroups on the way to the wanted ones and below them. Returns the processes of the wanted ones."""
    found = []
    for path, children, _ in os.walk(root):
        relative = "" if path == root else os.path.relpath(path, root)
        inside = any(id in relative for id in wanted) or relative in also
        children[:] = sorted(child for child in children
                             if inside or any(holds(os.path.join(path, child), id) for id in wanted)
                             or any(other.startswith(os.path.join(relative, child)) for other in also))
        record_cgroup(root, relative, name, files)
        if inside:
            record(os.path.join(path, "cgroup.procs"), os.path.join(name, relative, "cgroup.procs"))
            found += pids(path)
    return found


def holds(path, id):
    """Whether a cgroup whose name has this id is here or below."""
    return any(id in at for at, _, _ in os.walk(path))


def record_gpus():
    """GPUs of DRM drivers, and what AMD's compute driver reports of processes."""
    for node in sorted(glob.glob("/sys/class/drm/card[0-9]*") + glob.glob("/sys/class/drm/renderD*")):
        if "-" in os.path.basename(node):
            continue  # a connector
        device = os.path.realpath(f"{node}/device").lstrip("/")
        emit(node.lstrip("/"), link=os.readlink(node))
        emit(os.path.realpath(node).lstrip("/") + "/device", link=os.readlink(f"{node}/device"))
        for file in GPU:
            record(f"/{device}/{file}", f"{device}/{file}")
    kfd = "/sys/devices/virtual/kfd/kfd"
    if os.path.exists(kfd):
        emit("sys/class/kfd/kfd", link=os.readlink("/sys/class/kfd/kfd"))
    for path in glob.glob(f"{kfd}/topology/nodes/*/gpu_id") + glob.glob(f"{kfd}/topology/nodes/*/properties"):
        record(path, path.lstrip("/"))
    for path in glob.glob(f"{kfd}/proc/*/vram_*"):
        record(path, path.lstrip("/"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cgroup", action="append", default=[])
    parser.add_argument("--process", action="append", default=[], type=int)
    parser.add_argument("--unified", action="store_true")
    parser.add_argument("container", nargs="+")
    options = parser.parse_args()
    for file in HOST:
        record(f"/proc/{file}", f"proc/{file}")
    with open("/proc/stat") as file:  # the other lines say how busy each processor is
        emit("proc/stat", text="".join(line for line in file if line.startswith(("btime ", "processes "))))
    emit("proc/self/ns/pid", link=os.readlink("/proc/self/ns/pid"))
    emit("dev", dir=True)
    if os.path.exists(f"{CGROUPFS}/cgroup.controllers"):
        processes = record_tree(CGROUPFS, "cgroup", V2, options.container, options.cgroup)
    else:
        processes = record_tree(f"{CGROUPFS}/memory", "cgroup/memory", V1, options.container, options.cgroup)
        if options.unified:
            record_tree(f"{CGROUPFS}/unified", "cgroup/unified", ["cgroup.controllers"], options.container, [])
    pids = sorted({*processes, *options.process})
    record_gpus()
    for pid in pids:
        for file in PROCESS:
            record(f"/proc/{pid}/{file}", f"proc/{pid}/{file}")


if __name__ == "__main__":
    main()
