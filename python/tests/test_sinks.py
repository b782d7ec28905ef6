"""Records that are handed to functions of the program."""

AMOUNTS = ["cpu_ram_used_mb", "gpu_ram_used_mb", "gpu_ram_peak_mb", "reserved_gpu_ram_mb"]


def test_function_gets_what_is_tracked_and_sampled(receiver, run):
    program = run(
        """
import json, threading, memledger_client, torch
from memledger_client.compat import MemoryTracker
records, sampled = [], threading.Event()
@memledger_client.on_record
def keep(record):
    (sampled.set if record["component"] == "process" else lambda: records.append(record))()
    with memledger_client.track("sink", "own"):  # handed to none
        pass
memledger_client.on_record(keep)  # once is enough
memledger_client.step(3)
with memledger_client.track("model", "forward"):
    torch.cuda.standin_allocate(300 << 20)
    torch.cuda.standin_free(100 << 20)
MemoryTracker().log_memory("model", "after")
sampled.wait(20)
print(json.dumps(records))
"""
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    first, second = eval(out)
    assert list(first) == ["component", "operation", "timestamp", *AMOUNTS, "step"]
    assert (first["component"], first["operation"], first["step"]) == ("model", "forward", 3)
    assert first["cpu_ram_used_mb"] > 1 and [first[key] for key in AMOUNTS[1:]] == [200, 300, 300]
    assert second["operation"] == "after" and isinstance(second["timestamp"], float)


def test_samples_come_without_memledger_and_torch(run):
    program = run(
        """
import memledger_client, threading
sampled = threading.Event()
memledger_client.on_record(lambda record: (print([record[key] for key in ("component", "operation", "gpu_ram_used_mb")]), sampled.set()))
sampled.wait(20)
""",
        environment={"MEMLEDGER_REPORTER_DIRECTORY": ""},
    )
    code, out, err = program.end()
    assert (code, err) == (0, "") and out.startswith("['process', 'sample', 0.0]\n")


def test_errors_of_a_function_do_not_reach_the_program(receiver, run):
    program = run(
        """
import memledger_client
def fails(record):
    raise OSError("the server of the dashboard is gone")
memledger_client.on_record(fails)
memledger_client.on_record("no function")
for _ in range(3):
    with memledger_client.track("model", "forward"):
        pass
print("done")
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    code, out, err = program.end()
    assert (code, out) == (0, "done\n")
    assert err.count("a function of on_record failed: OSError: the server of the dashboard is gone") == 1
    assert err.count("on_record ignored: 'no function' is no function") == 1


def test_function_ends_with_stop_and_is_replaced_by_its_namesake(receiver, run):
    program = run(
        """
import memledger_client
for number in (1, 2):
    def keep(record, number=number):
        record["component"] == "model" and print(number)
    memledger_client.on_record(keep)
def one():
    with memledger_client.track("model", "forward"):
        pass
one()
with memledger_client.batch_search():
    one()
memledger_client.stop()
one()
"""
    )
    assert program.end() == (0, "2\n", "")


def test_process_that_a_function_starts_gets_its_signals(run):
    program = run(
        """
import memledger_client, subprocess, threading
sampled = threading.Event()
@memledger_client.on_record
def keep(record):
    if not sampled.is_set():
        blocked = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True).stdout
        print(int(blocked.split()[1], 16))
        sampled.set()
sampled.wait(20)
""",
        environment={"MEMLEDGER_REPORTER_DIRECTORY": ""},
    )
    assert program.end() == (0, "0\n", "")


def test_forked_child_hands_out_nothing(receiver, run):
    program = run(
        """
import memledger_client, os
memledger_client.on_record(lambda record: record["component"] == "model" and print(os.getpid() == owner, flush=True))
owner = os.getpid()
if os.fork() == 0:
    with memledger_client.track("model", "forward"):
        pass
    os._exit(0)
os.wait()
with memledger_client.track("model", "forward"):
    pass
"""
    )
    assert program.end() == (0, "True\n", "")
