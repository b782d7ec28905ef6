"""Writes the state of the fake NVML library at each moment: the only simulated part of the demo.

The processes that hold VRAM are the real processes of the trainings. The figures of the GPUs are simulated, and change as on a real
host: a training's VRAM grows to a plateau, and power follows utilisation.

The format is that of tests/fake-nvml.
"""
import json
import math
import os

GIB = 1 << 30
MIB = 1 << 20
# purpose of each GPU; the number is its index
TRAINS, FULL, IDLE, NOBODY, SICK, SPLIT = range(6)
# nvmlClocksThrottleReason
SW_POWER_CAP, HW_THERMAL = 0x4, 0x40
# field ids of NVLink's CRC errors, replays and recoveries, summed over the links
CRC_FLIT, REPLAY, RECOVERY = 38, 45, 52
MEMORY_TEMPERATURE = 82
NVLINK_SENT, NVLINK_RECEIVED = 138, 139  # KiB
UNKNOWN_ERROR = 999
EVENT_LASTS = 5  # seconds


class Gpus:
    """Writes the state file repeatedly. `on` is the set of active failures; `holders` the pids that hold VRAM, by GPU."""

    def __init__(self, library):
        self.file = library.with_name(library.name + ".json")
        self.on, self.holders, self.events, self.happened = set(), {}, [], 0
        self.corrected = self.uncorrected = self.replays = 0
        self.energy = [0.0] * 6
        self.before = 0.0
        self.write(0.0)

    def xid(self, gpu, number):
        """Simulates a GPU error that the driver reports."""
        self.happened += 1
        self.events.append((self.before, {"seq": self.happened, "gpu": gpu, "data": number}))

    def write(self, now):
        """Writes the state for this many seconds after the start."""
        passed, self.before = now - self.before, now
        made = (self.trains, self.full, self.idle, self.nobody, self.sick, self.split)
        gpus = []
        for number, make in enumerate(made):
            gpu = make(now)
            self.energy[number] += passed * gpu.setdefault("power_mw", 71_000)
            gpus.append(
                {"uuid": f"GPU-de300000-0000-4000-8000-{number:012}", "minor": number, "serial": f"165{number:010}",
                 "bus_id": f"00000000:{0x10 + number:02X}:00.0", "energy_mj": int(self.energy[number]), **gpu}
            )  # fmt: skip
        # a driver reports an event once; the fake library reports it again to each process that loads it
        self.events = [(when, event) for when, event in self.events if now - when < EVENT_LASTS]
        errors = {"nvmlDeviceGetCount_v2": UNKNOWN_ERROR} if "driver" in self.on else {}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"gpus": gpus, "events": [event for _, event in self.events], "errors": errors}))
        os.replace(new, self.file)

    def held(self, gpu, size, **more):
        """Returns the processes of a GPU, each with this much memory."""
        return [{"pid": pid, "used": int(size), **more} for pid in self.holders.get(gpu, ())]

    def busy(self, gpu, used, percent, **more):
        """Returns a busy GPU."""
        pids = self.holders.get(gpu, ())
        share = percent // max(len(pids), 1)
        return {
            "memory": {"used": int(used)},
            "utilization": {"gpu": percent, "memory": percent // 2},
            "utilization_samples": [{"pid": pid, "sm": share, "memory": share // 2} for pid in pids],
            "power_mw": 90_000 + 6000 * percent, "temperature_c": 38 + percent // 3, **more,
        }  # fmt: skip

    def trains(self, now):
        """Two trainings on one GPU, which load, then compute, with an evaluation at intervals."""
        held = self.held(TRAINS, min(12 + now / 6, 30) * GIB)
        percent = int(88 + 8 * math.sin(now / 3)) if now % 40 < 34 else 12
        used = sum(process["used"] for process in held) + 700 * MIB
        gpu = self.busy(TRAINS, used, percent if held else 0, processes=held)
        # as on a card before Ampere, so that those metrics have values too
        return {**gpu, "throttle_reasons": SW_POWER_CAP if percent > 90 else 0,
                "retired_pages": {"single_bit": [4096], "double_bit": []},
                "pcie": {"replays": int(now // 20)},
                "fields": {str(CRC_FLIT): int(now // 15), str(REPLAY): int(now // 30), str(RECOVERY): 0,
                           str(MEMORY_TEMPERATURE): 60 + percent // 4,
                           str(NVLINK_SENT): int(now * 4e6), str(NVLINK_RECEIVED): int(now * 4e6)}}  # fmt: skip

    def full(self, now):
        size = 78 * GIB if "full" in self.on else 40 * GIB
        held = self.held(FULL, size)
        return self.busy(FULL, sum(process["used"] for process in held), int(75 + 5 * math.sin(now)), processes=held)

    def idle(self, _now):
        held = self.held(IDLE, 24 * GIB)
        return {"memory": {"used": sum(process["used"] for process in held)}, "processes": held}

    def nobody(self, _now):
        """Memory of a host process, which is the demo itself, and unattributed memory."""
        mine = 2 * GIB
        used = mine + (31 * GIB if "nobody" in self.on else 0)
        return {"memory": {"used": used}, "processes": [{"pid": os.getpid(), "used": mine}]}

    def sick(self, now):
        held = self.held(SICK, 16 * GIB)
        used = sum(process["used"] for process in held)
        hot = "hot" in self.on
        gpu = self.busy(SICK, used, int(60 + 10 * math.sin(now / 2)) if held else 0, processes=held)
        return {**gpu, "lost": "lost" in self.on, "throttle_reasons": HW_THERMAL if hot else 0,
                "temperature_c": 92 if hot else gpu["temperature_c"],
                "ecc": {"corrected": self.corrected, "uncorrected": self.uncorrected},
                "remapped_rows": {"correctable": 1, "pending": "rows" in self.on}}  # fmt: skip

    def split(self, _now):
        """MIG mode, with one instance that a service uses."""
        held = self.held(SPLIT, 3 * GIB, gi=1, ci=0)
        used = sum(process["used"] for process in held) + 200 * MIB
        instance = {"uuid": "MIG-de300000-0000-4000-8000-000000000001", "gi": 1, "ci": 0,
                    "memory": {"total": 10 * GIB, "reserved": 16 * MIB, "used": used}}  # fmt: skip
        return {"memory": {"used": used + 100 * MIB}, "mig": [instance], "processes": held}
