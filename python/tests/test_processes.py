"""Forks, spawns and other ways in which one process becomes several: real processes, each reports for itself or not at all."""

import pytest
from conftest import eventually

MIB = 1 << 20


def test_forked_child_is_silent_and_its_parent_goes_on(receiver, run):
    program = run(
        """
import memledger_client, os, torch
torch.cuda.init()
torch.cuda.standin_allocate(1 << 20)
memledger_client.step()
for _ in range(50):  # while the thread holds its lock now and then
    child = os.fork()
    if child == 0:
        with memledger_client._reporter.reporter._lock:
            os._exit(0 if memledger_client._reporter.reporter._thread is None else 1)
    assert os.waitpid(child, 0)[1] == 0
print("forked", flush=True)
input()
"""
    )
    assert program.line() == "forked"
    count = len(receiver.of("sample"))
    eventually("samples of the parent", lambda: len(receiver.of("sample")) > count + 1)
    assert {pid for pid, _ in receiver.messages} == {program.pid}
    assert len(receiver.connections) == 1
    program.go()
    assert program.end() == (0, "", "")


def test_child_that_was_forked_before_cuda_reports_for_itself(receiver, run):
    program = run(
        """
import os, torch
child = os.fork()
torch.cuda.init()
torch.cuda.standin_allocate(1 << 20)
print(os.getpid(), flush=True)
input() if child else os.read(0, 1)
if child:
    os.waitpid(child, 0)
"""
    )
    pids = {int(program.line()), int(program.line())}
    eventually("both to report", lambda: {pid for pid, message in receiver.messages if message["t"] == "sample"} == pids)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing_have_their_first_gpu_as_rank(receiver, run, tmp_path, method):
    script = f"""
import multiprocessing

def train(gpu, goes_on):
    import memledger_client, torch
    torch.cuda.standin_allocate(1 << 20, gpu)
    memledger_client.step(5)
    goes_on.wait()
    torch.cuda.standin_allocate(1 << 20, 0)
    memledger_client.step(2)

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    goes_on = context.Event()
    processes = [context.Process(target=train, args=(gpu, goes_on)) for gpu in range(3)]
    [process.start() for process in processes]
    input()
    goes_on.set()
    [process.join() for process in processes]
"""
    program = run(script, as_file=tmp_path / "train.py", environment={"STANDIN_GPUS": "a,b,c"})

    def ranks():
        return {pid: message["local_rank"] for pid, message in receiver.messages if message["t"] == "hello" and message["devices"]}

    eventually("three processes with a GPU", lambda: sorted(ranks().values()) == [0, 1, 2])
    program.go()
    assert program.end() == (0, "", "")
    # their last steps arrive, although they end without exit functions; and no further GPU changes the rank
    last = lambda pid: max((message["n"] for message in receiver.of("step", pid)), default=0)
    eventually("all steps", lambda: all(last(pid) == 7 for pid in ranks()))
    assert sorted(ranks().values()) == [0, 1, 2]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_dataloader_workers_do_not_report(receiver, run, tmp_path, method):
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import multiprocessing, torch

def load(number):
    import torch  # as a DataLoader worker has it
    return number * 2

if __name__ == "__main__":
    torch.cuda.init()
    torch.cuda.standin_allocate(1 << 20)
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        assert pool.map(load, range(20)) == [2 * number for number in range(20)]
        print("loaded", flush=True)
        input()
"""
    )
    program = run(str(script), arguments=())
    assert program.line() == "loaded"
    receiver.wait("sample")
    assert {pid for pid, _ in receiver.messages} == {program.pid}
    program.go()
    assert program.end() == (0, "", "")


UNGUARDED = """
import multiprocessing, os, memledger_client
memledger_client.start(settings={"lr": 1})  # also in the processes that multiprocessing prepares
memledger_client.step()

def load(number):
    import threading
    return [each.name for each in threading.enumerate() if each.name == "memledger"]

def train(number):
    import threading, torch
    torch.cuda.init()
    print(os.getpid(), flush=True)
    threading.Event().wait(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    with context.Pool(2) as pool:
        assert pool.map(load, range(20)) == [[]] * 20
    rank = context.Process(target=train, args=(0,))
    rank.start()
    input()
    rank.kill()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_unguarded_start_reports_in_ranks_and_not_in_workers(receiver, run, tmp_path, method):
    program = run(UNGUARDED.replace("METHOD", repr(method)), as_file=tmp_path / "train.py")
    rank = int(program.line())
    eventually("the rank to report", lambda: receiver.of("sample", rank))
    assert {pid for pid, _ in receiver.messages} == {program.pid, rank}
    program.go()
    assert program.end() == (0, "", "")


def test_process_that_becomes_a_dataloader_worker_disconnects(receiver, run):
    """torch says that a process is a worker only once it runs; ``get_worker_info`` is the stand-in's here."""
    program = run(
        """
import sys, threading, types, memledger_client
memledger_client.start()
input()
sys.modules["torch.utils.data"] = types.SimpleNamespace(get_worker_info=lambda: object())
next(each for each in threading.enumerate() if each.name == "memledger").join()
print(memledger_client._reporter.reporter._connection.is_open())
"""
    )
    receiver.wait("hello")
    program.go()
    assert program.end() == (0, "False\n", "")


def test_ranks_report_their_own_local_rank(receiver, run):
    """As torchrun starts them: one process each, with LOCAL_RANK in its environment."""
    text = "import torch; torch.cuda.init(); torch.cuda.standin_allocate(1 << 20); input()"
    for rank in range(4):
        run(text, environment={"LOCAL_RANK": str(rank), "RANK": str(rank)})
    def ranks():
        return {message.get("local_rank") for message in receiver.of("hello")} == {0, 1, 2, 3}
    eventually("all ranks", ranks)


def test_exec_ends_the_connection_and_the_new_program_reports(receiver, run):
    program = run(
        """
import os, sys, torch
torch.cuda.init()
torch.cuda.standin_allocate(1 << 20)
print("first", flush=True)
input()
os.execv(sys.executable, [sys.executable, "-c",
    "import torch; torch.cuda.init(); torch.cuda.standin_allocate(7 << 20); print('second', flush=True); input()"])
"""
    )
    assert program.line() == "first"
    receiver.wait("sample")
    program.go()
    assert program.line() == "second"
    receiver.wait("sample", lambda message: message["dev"] and message["dev"][0]["alloc"] == 7 * MIB)
    assert {pid for pid, _ in receiver.messages} == {program.pid}


def test_notebook_extension_starts_to_report(receiver, run):
    run("import memledger_client; memledger_client.load_ipython_extension(None); input()")
    receiver.wait("hello")
