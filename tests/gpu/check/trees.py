"""Records the process trees of real PyTorch training, as test data for the roles.

One JSON object a line, one tree each: how it was started, and its processes with what the roles depend on (src/attribute/
roles.rs): pid, parent, name, program, the shape of the command line, whether that is the parent's (a fork without exec),
whether the process holds GPU memory, and which role it really has, as the training itself reports it.

No argument is recorded as it is: paths and values become `*`.
"""
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time

from machine import Process, text, wait_for

TREES = [("dataloader-fork", "fork", "none", 0), ("dataloader-spawn", "spawn", "none", 0),
         ("dataloader-forkserver", "forkserver", "none", 0), ("ddp-gloo-2-ranks", "fork", "gloo", 2),
         ("ddp-nccl-1-rank", "spawn", "nccl", 1)]


def shape(argument, first):
    """An argument without anything that could be a secret or a path."""
    if first:
        return os.path.basename(argument)
    if argument.startswith("from multiprocessing."):
        return argument.split("(")[0][:120]
    if argument.startswith("-") and "=" not in argument and len(argument) <= 30:
        return argument
    if argument.startswith("--"):
        return argument.split("=")[0] + "=*"
    if argument in ("torch.distributed.run", "fork", "spawn", "forkserver", "gloo", "nccl", "none"):
        return argument
    return "*.py" if argument.endswith(".py") else "*"


def process(pid, holders, truth):
    """One process; None if it ended meanwhile."""
    stat = text(f"/proc/{pid}/stat")
    if ")" not in stat:
        return None
    fields = stat[stat.rindex(")") + 2:].split()
    arguments = text(f"/proc/{pid}/cmdline")
    words = arguments.rstrip("\0").split("\0")
    parent = text(f"/proc/{fields[1]}/cmdline")
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        program = ""
    return {"pid": pid, "ppid": int(fields[1]), "start_ticks": int(fields[19]),
            "comm": stat[stat.index("(") + 1:stat.rindex(")")], "program": program,
            "arguments": [shape(word, at == 0) for at, word in enumerate(words)],
            "arguments_are_the_parents": bool(arguments) and arguments == parent,
            "threads": int(fields[17]), "holds_gpu": pid in holders, "role": truth.get(pid, "other")}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(python, cgroups, id, env, workers, backend, ranks, folder):
    program = os.path.join(os.path.dirname(__file__), "train.py")
    command = [python, "-u"]
    if ranks:
        # spelt as all versions know it; no rendezvous by host name: the machine may not know its own
        command += ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}",
                    "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command += [program, "--workers", workers, "--backend", backend, "--folder", folder]
    env = {**env, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with open(os.path.join(folder, "log"), "wb") as log:
        return Process(command, cgroups, id, env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def record(check, name, workers, backend, ranks):
    """Runs one training, records its tree, and compares the roles that memledger gives."""
    id = check.cgroups.container()
    folder = tempfile.mkdtemp(prefix="memledger-check-")
    training = start(check.python, check.cgroups, id, check.env, workers, backend, ranks, folder)
    try:
        files = [os.path.join(folder, f"rank-{rank}.json") for rank in range(ranks or 1)]
        ready = wait_for(lambda: training.child.poll() is not None or all(map(os.path.exists, files)), 90)
        if not ready or not all(map(os.path.exists, files)):
            raise RuntimeError(f"the training {name} did not get ready: {text(folder + '/log')[-1500:]}")
        truth = {}
        for file in files:
            reported = json.loads(text(file))
            truth[reported["trainer"]] = "trainer"
            truth.update(dict.fromkeys(reported["workers"], "dataloader_worker"))
        holders = check.smi.processes(check.uuid)
        pids = check.cgroups.pids(id) if id else sorted(descendants(training.pid))
        tree = [found for pid in sorted(pids) if (found := process(pid, holders, truth))]
        line = {"tree": name, "torch": reported["torch"], "python": check.python_version,
                "processes": tree, "memledger": None}
        if id:
            line["memledger"] = roles(check, id, {one["pid"]: one["role"] for one in tree})
        with open(os.path.join(check.out, "trees.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")
        check.note(f"{name}: {len(tree)} processes recorded, {sum(one['holds_gpu'] for one in tree)} use the GPU")
    finally:
        open(os.path.join(folder, "stop"), "w").close()
        try:
            training.child.wait(15)
        except subprocess.TimeoutExpired:
            pass
        training.end()
        shutil.rmtree(folder, ignore_errors=True)


def roles(check, id, truth):
    """Compares memledger's roles with the truth; returns them by pid."""
    def same():
        listed = [one for one in check.memledger.containers() if one["name"] == id[:12]]
        found = {one["pid"]: one["role"] for one in (listed[0]["processes"] if listed else [])}
        same.last = found
        return {pid: found.get(pid) for pid in truth} == truth
    same.last = {}
    # names are read again after pauses that grow with the age of a process
    wait_for(same, 20, 0.3)
    found = {pid: same.last.get(pid) for pid in truth}
    wrong = {pid: (truth[pid], role) for pid, role in found.items() if role != truth[pid]}
    check.compare_text("roles of all processes", "as the training reported" if not wrong else f"{wrong}",
                       "as the training reported", f"{len(truth)} processes; (truth, memledger) by pid where they differ")
    return {str(pid): role for pid, role in found.items()}


def descendants(pid):
    """A process and all below it, without a cgroup of their own."""
    parents = {}
    for name in os.listdir("/proc"):
        stat = text(f"/proc/{name}/stat") if name.isdigit() else ""
        if ")" in stat:
            parents[int(name)] = int(stat[stat.rindex(")") + 2:].split()[1])
    found, before = {pid}, 0
    while len(found) != before:
        before = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def run(check, wanted):
    """Records the wanted trees, by name, or all of them."""
    if os.path.exists(os.path.join(check.out, "trees.jsonl")):
        os.remove(os.path.join(check.out, "trees.jsonl"))
    for name, workers, backend, ranks in TREES:
        if "trees" not in wanted and name not in wanted:
            continue
        began = time.monotonic()
        check.guarded(f"tree {name}", 75, lambda: record(check, name, workers, backend, ranks))
        check.note(f"{name}: {time.monotonic() - began:.0f} s")
