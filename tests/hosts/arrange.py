#!/usr/bin/env python3
"""Makes the arranged hosts from the recorded ones, so that what was changed can be read here.

usage: arrange.py      in this folder; writes v2-cgroupfs-psi.jsonl, v2-before-5.18.jsonl, v2-kubelet-cgroupfs.jsonl, v2-kind.jsonl and drm-*.jsonl
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


def with_kubelets_cgroupfs_driver():
    """The kubelet's cgroupfs driver, whose names have no slices. The pod without a limit becomes a guaranteed one, which
    lies at the top and has limits."""
    def named(text):
        def pod(match):
            return "pod" + match[1].replace("_", "-")

        text = re.sub(r"kubepods-besteffort\.slice/kubepods-besteffort-pod([0-9a-f_]+)\.slice", pod, text)
        text = re.sub(r"kubepods-burstable-pod([0-9a-f_]+)\.slice", pod, text)
        text = re.sub(r"cri-containerd-([0-9a-f]{64})\.scope", r"\1", text)
        return re.sub(r"kubepods-?(burstable|besteffort)?\.slice", lambda m: m[1] or "kubepods", text)

    moved = []
    for entry in load("v2-kubernetes"):
        entry["path"] = named(entry["path"])
        if entry["path"].startswith("proc/") and entry["path"].endswith("/cgroup"):
            entry["text"] = named(entry["text"])
        if re.fullmatch(r"cgroup/kubepods/pod[^/]+/[0-9a-f]{64}/memory\.max", entry["path"]):
            entry["text"] = f"{32 << 20}\n"
        moved.append(entry)
    save("v2-kubelet-cgroupfs", moved)


def kind():
    """Kubernetes in Docker: the kubelet's cgroups, made with `--cgroup-root=/kubelet`, in the cgroup of a container."""
    top = f"system.slice/docker-{'c0de' * 16}.scope/kubelet.slice"

    def named(text):
        return re.sub(r"kubepods(-[a-z]+)?(-pod[0-9a-f_]+)?\.slice", r"kubelet-\g<0>", text)

    moved = []
    for entry in load("v2-kubernetes"):
        path = entry["path"]
        above = re.fullmatch(r"cgroup/kubepods\.slice/([^/]+)", path)
        if above and "text" in entry:  # the levels above have as much memory, and no limit
            text = "max\n" if above[1] == "memory.max" else entry["text"]
            for level in ("system.slice", top.rsplit("/", 1)[0], top):
                moved.append({"path": f"cgroup/{level}/{above[1]}", "text": text})
        if path.startswith("cgroup/kubepods.slice"):
            entry["path"] = named(path).replace("cgroup/", f"cgroup/{top}/", 1)
        if path.startswith("proc/") and path.endswith("/cgroup"):
            entry["text"] = named(entry["text"]).replace("/kubelet-kubepods", f"/{top}/kubelet-kubepods", 1)
        moved.append(entry)
    # every cgroup below the outer container may have processes of its own; these have none
    paths = {entry["path"] for entry in moved}
    for path in sorted({path.rsplit("/", 1)[0] for path in paths if path.endswith("/memory.current")}):
        if "/docker-" in path and f"{path}/cgroup.procs" not in paths:
            moved.append({"path": f"{path}/cgroup.procs", "text": ""})
    save("v2-kind", moved)


# Processes of v2-docker: a trainer and the two workers that it forked, a notebook in a container of its own, and a
# process outside containers.
TRAINER, WORKERS, NOTEBOOK, OUTSIDE = 904, (917, 918), 949, 975


class Amd:
    """GPUs and the processes that compute on them, as the kernel's documentation and source say that sysfs shows them. Never
    seen on such hardware by whoever wrote this."""

    def __init__(self):
        self.entries = load("v2-docker")
        self.minor = 128

    def file(self, path, text):
        self.entries.append({"path": path, "text": text})

    def link(self, path, target):
        self.entries.append({"path": path, "link": target})

    def card(self, pci_id, slot, files):
        """A card with its render node."""
        card, render = f"card{self.minor - 128}", f"renderD{self.minor}"
        self.minor += 1
        device = f"sys/devices/pci0000:00/{slot}"
        for node in (card, render):
            self.file(f"{device}/drm/{node}/dev", f"226:{node.removeprefix('card').removeprefix('renderD')}\n")
            self.link(f"{device}/drm/{node}/device", f"../../../{slot}")
            self.link(f"sys/class/drm/{node}", f"../../devices/pci0000:00/{slot}/drm/{node}")
        self.file(f"{device}/uevent", f"DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_ID={pci_id}\nPCI_SLOT_NAME={slot}\n")
        self.file(f"{device}/power/runtime_status", "active\n")
        for name, text in files.items():
            self.file(f"{device}/{name}", text)

    def monitor(self, slot, files):
        """The hardware monitor of a card."""
        for name, text in files.items():
            self.file(f"sys/devices/pci0000:00/{slot}/hwmon/hwmon3/{name}", f"{text}\n")

    def compute(self, gpu, minor, memory):
        """The compute driver: its topology, a processor and a GPU, and the bytes of each process that computes."""
        kfd = "sys/devices/virtual/kfd/kfd"
        self.link("sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd")
        for node, (id, render) in enumerate([(0, 0), (gpu, minor)]):
            self.file(f"{kfd}/topology/nodes/{node}/gpu_id", f"{id}\n")
            self.file(f"{kfd}/topology/nodes/{node}/properties", f"location_id 768\ndomain 0\ndrm_render_minor {render}\n")
        for pid, size in memory.items():
            self.file(f"{kfd}/proc/{pid}/pasid", "32811\n")
            self.file(f"{kfd}/proc/{pid}/vram_{gpu}", f"{size}\n")


def amdgpu():
    """A discrete GPU, on which two containers and a process outside of them compute."""
    host = Amd()
    slot = "0000:03:00.0"
    host.card("1002:744C", slot, {
        "mem_info_vram_total": f"{24 << 30}\n", "mem_info_vram_used": f"{7680 << 20}\n",
        "mem_info_vis_vram_total": f"{24 << 30}\n", "gpu_busy_percent": "87\n", "unique_id": "7f3a00c19e5b1d42\n",
        "product_name": "\n", "vendor": "0x1002\n"})
    host.monitor(slot, {
        "name": "amdgpu", "power1_average": 211_000_000, "power1_cap": 327_000_000, "freq1_input": 2_482_000_000,
        "freq2_input": 1_249_000_000, "temp1_label": "edge", "temp1_input": 54_000, "temp2_label": "junction",
        "temp2_input": 71_000, "temp3_label": "mem", "temp3_input": 82_000})
    host.compute(30381, 128, {TRAINER: 6144 << 20, NOTEBOOK: 992 << 20, OUTSIDE: 256 << 20, WORKERS[0]: 0})
    save("amdgpu", host.entries)


with_cgroupfs_driver_and_psi()
before_5_18()
with_kubelets_cgroupfs_driver()
kind()
amdgpu()
