"""What a program reports, with the real client in processes of their own."""

import os

import pytest
from conftest import ROOT, STANDIN, Receiver, eventually

MIB = 1 << 20

UNMODIFIED = """
import torch
torch.cuda.init()
torch.cuda.standin_allocate(300 << 20)
torch.cuda.standin_free(100 << 20)
print("ready", flush=True)
input()
"""


def test_unmodified_program_reports_tensors_and_cache(receiver, run):
    program = run(UNMODIFIED, environment={"LOCAL_RANK": "1", "RANK": "5", "STANDIN_GPUS": "abc,def"})
    device = receiver.wait("sample")["dev"][0]
    assert (device["alloc"], device["alloc_peak"], device["res"]) == (200 * MIB, 300 * MIB, 300 * MIB)
    assert (device["i"], device["ooms"], device["retries"]) == (0, 0, 0)
    hello = receiver.wait("hello", lambda message: message["devices"])
    assert hello["devices"] == [{"i": 0, "uuid": "abc"}]
    assert (hello["v"], hello["rank"], hello["local_rank"], hello["torch"]) == (1, 5, 1, "2.9.1+standin")
    program.go()
    assert program.end() == (0, "ready\n", "")


def test_torch_before_2_5_reports_no_uuid(receiver, run):
    run(UNMODIFIED, environment={"STANDIN_TORCH": "2.4.1"})
    assert receiver.wait("hello", lambda message: message["devices"])["devices"] == [{"i": 0}]


def test_program_without_torch_or_cuda_has_no_thread_and_no_connection(receiver, run):
    for text in (
        "import threading; print(threading.active_count())",
        "import torch, threading; print(threading.active_count())",
    ):
        assert run(text).end() == (0, "1\n", "")
    assert receiver.messages == []


def test_steps_scopes_and_samples_arrive_even_if_the_program_ends_at_once(receiver, run):
    program = run(
        """
import memledger
for _ in range(3):
    with memledger.track("model", "forward"):
        pass
    memledger.step(batch_size=32)
memledger.step(2, samples=7)
"""
    )
    assert program.end() == (0, "", "")
    assert receiver.wait("step", lambda message: message["n"] == 5)["samples"] == 3 * 32 + 7
    scope = receiver.wait("scope")
    assert (scope["component"], scope["operation"], scope["dev"]) == ("model", "forward", [])
    assert scope["rss"] > MIB


def test_peak_of_a_scope_is_exact_or_absent(receiver, run):
    run(
        """
import torch, memledger
with memledger.track("model", "grows"):
    torch.cuda.standin_allocate(100 << 20)
    torch.cuda.standin_free(60 << 20)
with memledger.track("model", "below"):
    torch.cuda.standin_allocate(10 << 20)
"""
    ).end()
    grows = receiver.wait("scope", lambda message: message["operation"] == "grows")["dev"][0]
    assert (grows["alloc"], grows["alloc_peak"]) == (40 * MIB, 100 * MIB)
    below = receiver.wait("scope", lambda message: message["operation"] == "below")["dev"][0]
    assert below["alloc"] == 50 * MIB and "alloc_peak" not in below


def test_connects_again_after_a_restart_and_counts_what_was_lost(receiver, run):
    program = run(UNMODIFIED)
    receiver.wait("sample")
    receiver.close()
    receiver.messages.clear()
    receiver.open()
    assert receiver.wait("hello", lambda message: message["devices"])
    assert receiver.wait("sample")["dev"][0]["alloc"] == 200 * MIB
    program.go()
    assert program.end() == (0, "ready\n", "")


@pytest.mark.parametrize("what", ["absent", "a_file", "a_stream_socket", "never_accepts", "garbage", "no_descriptors"])
def test_training_ends_well_whatever_is_at_the_socket(tmp_path, run, what):
    import socket

    path, held = tmp_path / "reporter.sock", []
    if what == "a_file":
        path.write_text("no socket")
    elif what == "a_stream_socket":
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        held[0].bind(str(path))
        held[0].listen()
    elif what == "never_accepts":
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        held[0].bind(str(path))
        held[0].listen(0)
    elif what == "garbage":
        held.append(Receiver(tmp_path, welcome=b'\xff[[[{"t":7,"interval_ms":"soon"'))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))" if what == "no_descriptors" else ""
    program = run(
        f"""
import memledger, os, torch, time
{limit}
begin = time.monotonic()
torch.cuda.init()
for _ in range(2000):
    with memledger.track("model", "forward"):
        torch.cuda.standin_allocate(1024)
    memledger.step()
memledger.stop()
print("trained")
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert program.end() == (0, "trained\n", "")
    for each in held:
        each.close()


def test_deleted_socket_and_directory_do_not_stop_the_training(receiver, run):
    program = run(UNMODIFIED)
    receiver.wait("sample")
    os.unlink(receiver.path)
    count = len(receiver.of("sample"))
    eventually("samples over the open connection", lambda: len(receiver.of("sample")) > count)
    program.go()
    assert program.end()[0] == 0


def test_other_sitecustomize_runs_too(tmp_path, receiver, run):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins; builtins.other_ran = True\n")
    assert run("print(other_ran)", path=(ROOT, STANDIN, other)).end() == (0, "True\n", "")


def test_module_runs_a_script_as_python_does(tmp_path, receiver, run):
    script = tmp_path / "train.py"
    script.write_text("import sys, torch, neighbour\ntorch.cuda.init()\nprint(__name__, sys.argv[1:])\ninput()\n")
    (tmp_path / "neighbour.py").write_text("")
    program = run(str(script), arguments=("-m", "memledger"))
    program.process.stdin.write("\n")
    receiver.wait("hello")
    code, out, err = program.end()
    assert (code, out, err) == (0, "__main__ []\n", "")


def test_calls_never_raise_and_interrupts_pass(receiver, run):
    program = run(
        """
import memledger, memledger._guard as guard
memledger.step("no number")
memledger.step(samples=object())
print(memledger.save_report("/proc/nowhere/memory_usage.json"), guard.swallowed > 0)
try:
    with memledger.track("model", "forward"):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("passed on")
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert program.end() == (0, "False True\npassed on\n", "")


def test_allocator_without_statistics_reports_steps_and_host_memory(receiver, run):
    program = run(
        """
import memledger, torch
torch.cuda.init()
torch.cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE = True
with memledger.track("model", "forward"):
    pass
memledger.step()
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert program.end() == (0, "", "")
    assert receiver.wait("step")["n"] == 1
    assert receiver.wait("scope")["dev"] == [] and receiver.of("sample") == []


def test_steps_from_many_threads_are_all_counted(receiver, run):
    program = run(
        """
import memledger, threading
def train():
    for _ in range(5000):
        memledger.step()
threads = [threading.Thread(target=train) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    )
    assert program.end()[0] == 0
    assert receiver.wait("step", lambda message: message["n"] == 40_000)
