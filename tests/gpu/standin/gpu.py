"""The pretended GPU: its state is the fake NVML library's file, changed under a lock."""
import atexit
import contextlib
import fcntl
import json
import os
import time

MIB = 1 << 20
CONTEXT = 320 * MIB
LIE = os.environ.get("STANDIN_LIE", "")
PATH = os.environ["STANDIN_STATE"]


@contextlib.contextmanager
def state():
    """The state, to be changed; written as a whole at the end."""
    with open(PATH + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(PATH) as file:
            now = json.load(file)
        yield now
        gpu = now["gpus"][0]
        gpu["processes"] = [one for one in gpu["processes"] if os.path.exists(f"/proc/{one['pid']}")]
        gpu["memory"]["used"] = 400 * MIB + sum(one["used"] for one in gpu["processes"])
        with open(PATH + ".new", "w") as file:
            json.dump(now, file)
        os.rename(PATH + ".new", PATH)


def read():
    with open(PATH) as file:
        return json.load(file)


def free():
    memory = read()["gpus"][0]["memory"]
    return memory["total"] - memory["reserved"] - memory["used"]


def hold(reserved):
    """This process holds a context and so much beside it; None: it holds nothing any more."""
    with state() as now:
        gpu = now["gpus"][0]
        gpu["processes"] = [one for one in gpu["processes"] if one["pid"] != os.getpid()]
        if reserved is not None:
            gpu["processes"].append({"pid": os.getpid(), "used": CONTEXT + reserved, "kind": "C"})


def busy(percent):
    with state() as now:
        now["gpus"][0]["utilization"] = {"gpu": percent, "memory": percent // 2}
        sample = {"pid": os.getpid(), "time_us": int(time.time() * 1e6), "sm": percent}
        now["gpus"][0]["utilization_samples"] = [sample] if percent else []


def hold_until_the_end():
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and hold(None))
