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
KIB, MIB = 1, 1024


class Drm:
    """GPUs and their clients, as the kernel's documentation says that sysfs and fdinfo show them. Never seen on such
    hardware by whoever wrote this."""

    def __init__(self):
        self.entries = load("v2-docker")
        self.minor = 128

    def file(self, path, text):
        self.entries.append({"path": path, "text": text})

    def link(self, path, target):
        self.entries.append({"path": path, "link": target})

    def card(self, driver, pci_id, slot, files=()):
        """A card with its render node; returns the paths of both nodes."""
        card, render = f"card{self.minor - 128}", f"renderD{self.minor}"
        self.minor += 1
        device = f"sys/devices/pci0000:00/{slot}"
        for node in (card, render):
            self.file(f"{device}/drm/{node}/dev", f"226:{node.removeprefix('card').removeprefix('renderD')}\n")
            self.link(f"{device}/drm/{node}/device", f"../../../{slot}")
            self.link(f"sys/class/drm/{node}", f"../../devices/pci0000:00/{slot}/drm/{node}")
        self.file(f"{device}/uevent", f"DRIVER={driver}\nPCI_CLASS=30000\nPCI_ID={pci_id}\nPCI_SLOT_NAME={slot}\n")
        self.file(f"{device}/power/runtime_status", "active\n")
        for name, text in dict(files).items():
            self.file(f"{device}/{name}", text)
        return f"/dev/dri/{card}", f"/dev/dri/{render}"

    def monitor(self, slot, files):
        """The hardware monitor of a card."""
        for name, text in files.items():
            self.file(f"sys/devices/pci0000:00/{slot}/hwmon/hwmon3/{name}", f"{text}\n")

    def compute(self, gpu, minor, memory):
        """AMD's compute driver: its topology, a processor and a GPU, and the bytes of each process that computes."""
        kfd = "sys/devices/virtual/kfd/kfd"
        self.link("sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd")
        for node, (id, render) in enumerate([(0, 0), (gpu, minor)]):
            self.file(f"{kfd}/topology/nodes/{node}/gpu_id", f"{id}\n")
            self.file(f"{kfd}/topology/nodes/{node}/properties", f"location_id 768\ndomain 0\ndrm_render_minor {render}\n")
        for pid, size in memory.items():
            self.file(f"{kfd}/proc/{pid}/pasid", "32811\n")
            self.file(f"{kfd}/proc/{pid}/vram_{gpu}", f"{size}\n")

    def descriptor(self, pid, number, target, lines=()):
        """An open file of a process, with the lines that its driver adds to what every file has."""
        self.link(f"proc/{pid}/fd/{number}", target)
        text = "pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t581\n"
        self.file(f"proc/{pid}/fdinfo/{number}", text + "".join(f"{key}:\t{value}\n" for key, value in lines))

    def quiet(self, *pids):
        """Processes without a GPU have open files too."""
        for pid in pids:
            self.descriptor(pid, 0, "/dev/null")
            self.descriptor(pid, 1, f"pipe:[{pid}1]")

    def save(self, name):
        save(name, self.entries)


def size(kib):
    return f"{kib} KiB" if kib else "0"


def client(driver, slot, id):
    return [("drm-driver", driver), ("drm-client-id", id), ("drm-pdev", slot)]


def memory(region, resident, shared=0, total=None):
    total = resident if total is None else total
    return [(f"drm-total-{region}", size(total)), (f"drm-shared-{region}", size(shared)),
            (f"drm-active-{region}", size(0)), (f"drm-resident-{region}", size(resident)),
            (f"drm-purgeable-{region}", size(0))]


def amdgpu():
    """A discrete GPU, two containers. The trainer has two descriptors of one client, which its workers inherited, and
    a second client; it computes through /dev/kfd. The process outside shows pictures, and shares some buffers."""
    host = Drm()
    slot = "0000:03:00.0"
    card, render = host.card("amdgpu", "1002:744C", slot, {
        "mem_info_vram_total": f"{24 << 30}\n", "mem_info_vram_used": f"{7680 << 20}\n",
        "mem_info_vis_vram_total": f"{24 << 30}\n", "gpu_busy_percent": "87\n", "unique_id": "7f3a00c19e5b1d42\n",
        "product_name": "\n", "vendor": "0x1002\n"})

    def of(id, vram, shared=0, gtt=2 * MIB):
        return (client("amdgpu", slot, id) + [("pasid", 32770 + id)] + memory("cpu", 0)
                + memory("gtt", gtt) + memory("vram", vram, shared)
                + [("drm-memory-vram", size(vram)), ("drm-memory-gtt", size(gtt)), ("drm-memory-cpu", "0 KiB"),
                   ("amd-memory-visible-vram", size(vram)), ("amd-evicted-vram", "0 KiB"),
                   ("drm-engine-gfx", "48211093 ns"), ("drm-engine-compute", "0 ns")])

    training = of(41, 6 * 1024 * MIB, gtt=64 * MIB)
    for pid in (TRAINER, *WORKERS):
        host.quiet(pid)
        host.descriptor(pid, 3, "/dev/kfd")
        host.descriptor(pid, 12, render, training)
        host.descriptor(pid, 15, render, training)
    host.descriptor(TRAINER, 16, render, of(42, 4 * MIB))
    host.quiet(NOTEBOOK, OUTSIDE)
    host.descriptor(NOTEBOOK, 8, render, of(57, 1024 * MIB, shared=32 * MIB))
    host.descriptor(OUTSIDE, 9, card, of(60, 256 * MIB, shared=96 * MIB))
    host.monitor(slot, {
        "name": "amdgpu", "power1_average": 211_000_000, "power1_cap": 327_000_000, "freq1_input": 2_482_000_000,
        "freq2_input": 1_249_000_000, "temp1_label": "edge", "temp1_input": 54_000, "temp2_label": "junction",
        "temp2_input": 71_000, "temp3_label": "mem", "temp3_input": 82_000})
    host.compute(30381, 128, {TRAINER: 6144 << 20})
    host.save("drm-amdgpu")


def intel():
    """A GPU in the processor, which has no memory of its own: i915."""
    host = Drm()
    slot = "0000:00:02.0"
    card, render = host.card("i915", "8086:46A6", slot)

    def of(id, system, shared=0, total=None):
        engines = [(f"drm-engine-{name}", f"{id}000000 ns") for name in ("render", "copy", "video", "video-enhance")]
        engines.insert(3, ("drm-engine-capacity-video", 2))
        return (client("i915", slot, id) + memory("system0", system, shared, total) + memory("stolen-system0", 0)
                + engines)

    host.quiet(*WORKERS, NOTEBOOK, TRAINER, OUTSIDE)
    host.descriptor(TRAINER, 7, render, of(11, 300 * MIB, total=420 * MIB))
    host.descriptor(OUTSIDE, 9, card, of(12, 120 * MIB))
    host.save("drm-intel")


def mixed():
    """An NVIDIA card, whose driver makes render nodes and keeps no statistics there, beside a discrete Intel one with
    xe, which counts cycles and does not tell how much memory the card has."""
    host = Drm()
    nvidia_card, nvidia_render = host.card("nvidia", "10DE:2684", "0000:01:00.0")
    slot = "0000:0a:00.0"
    card, render = host.card("xe", "8086:56A0", slot)

    def of(id, vram, gtt=0):
        cycles = [line for name in ("rcs", "bcs", "ccs") for line in
                  ((f"drm-cycles-{name}", id * 1000), (f"drm-total-cycles-{name}", 7655183225))]
        return (client("xe", slot, id) + memory("system", 0) + memory("gtt", gtt) + memory("vram0", vram)
                + memory("stolen", 0) + cycles)

    host.quiet(TRAINER, *WORKERS, NOTEBOOK, OUTSIDE)
    host.descriptor(TRAINER, 20, "/dev/nvidia0")
    host.descriptor(TRAINER, 21, nvidia_render, [("drm-driver", "nvidia-drm"), ("drm-pdev", "0000:01:00.0")])
    host.descriptor(OUTSIDE, 9, nvidia_card)
    host.descriptor(NOTEBOOK, 5, render, of(3, 2048 * MIB, gtt=16 * MIB))
    host.descriptor(OUTSIDE, 10, card, of(4, 64 * MIB))
    host.save("drm-mixed")


with_cgroupfs_driver_and_psi()
before_5_18()
with_kubelets_cgroupfs_driver()
kind()
amdgpu()
intel()
mixed()
