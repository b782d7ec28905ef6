"""What a program reports, with the real client in processes of their own."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, STANDIN, TORCH_VERSIONS, Receiver, eventually

MIB = 1 << 20

UNMODIFIED = """
import torch
torch.cuda.init()
torch.cuda.standin_allocate(300 << 20)
torch.cuda.standin_free(100 << 20)
print("ready", flush=True)
input()
"""


@pytest.mark.parametrize("version", TORCH_VERSIONS)
def test_unmodified_program_reports_tensors_and_cache(receiver, run, version):
    variables = {"LOCAL_RANK": "1", "RANK": "5", "STANDIN_GPUS": "abc,def", "STANDIN_TORCH": version}
    program = run(UNMODIFIED, environment=variables)
    device = receiver.wait("sample", lambda message: message["dev"] and message["dev"][0]["alloc"] == 200 * MIB)["dev"][0]
    assert (device["alloc"], device["alloc_peak"], device["res"]) == (200 * MIB, 300 * MIB, 300 * MIB)
    assert (device["i"], device["ooms"], device["retries"]) == (0, 0, 0)
    hello = receiver.wait("hello", lambda message: message["devices"])
    assert hello["devices"] == [{"i": 0} if version == "2.4.1" else {"i": 0, "uuid": "abc"}]
    found = [hello[key] for key in ("v", "rank", "local_rank", "torch", "backend")]
    assert found == [1, 5, 1, f"{version}+standin", "native"]
    program.go()
    assert program.end() == (0, "ready\n", "")


@pytest.mark.parametrize(
    "variables, rank",
    [
        ({"SLURM_LOCALID": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "PMI_RANK": "9"}, 2),
        ({"MPI_LOCALRANKID": "1"}, 1),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "3"}, 0),
        ({}, None),
    ],
)
def test_local_rank_is_that_of_the_launcher(receiver, run, variables, rank):
    run("import torch; torch.cuda.standin_allocate(1 << 20, 1); input()", environment={**variables, "STANDIN_GPUS": "a,b"})
    assert receiver.wait("hello", lambda message: message["devices"]).get("local_rank") == rank


def test_other_allocators_report_only_what_they_count(receiver, run):
    run("import torch; torch.cuda.STANDIN_ALLOCATOR = 'cudaMallocAsync'; torch.cuda.standin_allocate(2 << 20); input()")
    device = receiver.wait("sample", lambda message: message["dev"])["dev"][0]
    assert device == {"i": 0, "alloc": 2 * MIB, "alloc_peak": 2 * MIB, "res": 2 * MIB, "res_peak": 2 * MIB}
    assert receiver.wait("hello")["backend"] == "cudaMallocAsync"


SEARCH = """
import memledger_client, torch
torch.cuda.standin_allocate(300 << 20)
torch.cuda.standin_free(200 << 20)
memledger_client.start()
input()
with memledger_client.batch_search():
    torch.cuda.standin_allocate(900 << 20)
    memledger_client.step()
    try:
        torch.cuda.standin_allocate(20 << 30)
    except torch.cuda.OutOfMemoryError:
        pass
    with memledger_client.track("model", "search"):
        torch.cuda.standin_allocate(10 << 20)
    {inside}
    torch.cuda.standin_free(910 << 20)
    torch.cuda.empty_cache()
memledger_client.step(7)
print("searched", flush=True)
input()
try:
    torch.cuda.standin_allocate(20 << 30)
except torch.cuda.OutOfMemoryError:
    print("out of memory", flush=True)
input()
"""


def test_search_for_a_batch_size_does_not_count_as_the_training(receiver, run):
    program = run(SEARCH.format(inside="input()"))
    assert receiver.wait("sample", lambda message: message["dev"])["dev"][0]["alloc_peak"] == 300 * MIB
    program.go()
    receiver.wait("sample", lambda message: message["dev"] and message["dev"][0]["alloc"] == 1010 * MIB)
    assert receiver.of("forget_peaks") == []
    program.go()
    assert program.line() == "searched"
    receiver.wait("forget_peaks")
    after = receiver.wait("sample", lambda message: message["dev"] and message["dev"][0]["alloc"] == 100 * MIB
                          and message["dev"][0]["alloc_peak"] < 300 * MIB)["dev"][0]  # fmt: skip
    assert after["alloc_peak"] == 100 * MIB
    assert receiver.wait("step")["n"] == 7 and receiver.of("oom") == [] and receiver.of("operation") == []
    program.go()
    assert program.line() == "out of memory"
    assert receiver.wait("oom")["n"] == 2
    assert len(receiver.of("forget_peaks")) == 1


def test_error_by_which_a_search_ends_the_program_is_reported(receiver, run):
    program = run(
        """
import memledger_client, torch
torch.cuda.standin_allocate(1 << 20)
memledger_client.start()
input()
with memledger_client.batch_search():
    torch.cuda.standin_allocate(20 << 30)
"""
    )
    receiver.wait("sample")
    program.go()
    assert program.end()[0] == 1
    message = receiver.wait("oom")
    assert (message["n"], message["uncaught"]) == (2, True) and "Tried to allocate 20.00 GiB" in message["text"]
    assert len(receiver.of("oom")) == 1


def test_program_without_torch_or_cuda_has_no_thread_and_no_connection(receiver, run):
    for text in (
        "import threading; print(threading.active_count())",
        "import torch, threading; print(threading.active_count())",
    ):
        assert run(text).end() == (0, "1\n", "")
    assert receiver.messages == []


def test_steps_operations_and_samples_arrive_even_if_the_program_ends_at_once(receiver, run):
    program = run(
        """
import memledger_client
for _ in range(3):
    with memledger_client.track("model", "forward"):
        pass
    memledger_client.step(batch_size=32)
memledger_client.step(2, samples=7)
"""
    )
    assert program.end() == (0, "", "")
    assert receiver.wait("step", lambda message: message["n"] == 5)["samples"] == 3 * 32 + 7
    operation = receiver.wait("operation")
    assert (operation["component"], operation["operation"], operation["dev"]) == ("model", "forward", [])
    assert operation["rss"] > MIB


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


@pytest.mark.parametrize("what", ["absent", "a_file", "a_stream_socket", "never_accepts", "never_reads", "garbage", "no_descriptors"])
def test_training_ends_well_whatever_is_at_the_socket(tmp_path, run, what):
    import socket

    path, held = tmp_path / "reporter.sock", []
    if what == "a_file":
        path.write_text("no socket")
    elif what == "a_stream_socket":
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        held[0].bind(str(path))
        held[0].listen()
    elif what in ("never_accepts", "never_reads"):
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        held[0].bind(str(path))
        held[0].listen(0 if what == "never_accepts" else 9)
    elif what == "garbage":
        held.append(Receiver(tmp_path, welcome=b'\xff[[[{"t":7,"interval_ms":"soon"'))
    # Python 3.8 ends threads with a library that it loads then
    limit = "import ctypes, resource; ctypes.CDLL('libgcc_s.so.1'); resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"
    limit = limit if what == "no_descriptors" else ""
    program = run(
        f"""
import memledger_client, os, torch, time
from memledger_client._reporter import reporter
{limit}
begin = time.monotonic()
torch.cuda.init()
for _ in range(2000):
    with memledger_client.track("model", "forward"):
        torch.cuda.standin_allocate(1024)
    memledger_client.step()
while {what == "never_reads"} and not reporter._connection.lost:  # until the socket is full
    memledger_client.step()
    with reporter._lock:
        reporter._report(1)
memledger_client.stop()
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
    program = run(str(script), arguments=("-m", "memledger_client"))
    program.process.stdin.write("\n")
    receiver.wait("hello")
    code, out, err = program.end()
    assert (code, out, err) == (0, "__main__ []\n", "")


@pytest.mark.parametrize("is_safe", [False, True])
def test_module_finds_the_modules_that_python_would(tmp_path, run, is_safe):
    (tmp_path / "real").mkdir()
    (tmp_path / "library").mkdir()
    (tmp_path / "real" / "train.py").write_text("import neighbour\nprint('found')\n")
    (tmp_path / ("library" if is_safe else "real") / "neighbour.py").write_text("")
    link = tmp_path / "train.py"
    link.symlink_to("real/train.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), str(ROOT)])}
    if is_safe:
        environment["PYTHONSAFEPATH"] = "1"
    for arguments in ([str(link)], ["-m", "memledger_client", str(link)]):
        ended = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (0, "found\n"), ended.stderr


def test_tracked_coroutine_function_is_tracked_until_it_ends(run, receiver):
    program = run(
        """
import asyncio, memledger_client
from memledger_client._cuda_oom import operations
@memledger_client.track("model", "generate")
async def generate():
    await asyncio.sleep(0)
    return operations.current()
print(asyncio.run(generate()), operations.current())
input()
"""
    )
    program.go()
    code, out, err = program.end()
    assert (code, out, err) == (0, "('model', 'generate') None\n", "")


def test_setting_that_is_no_utf8_does_not_lose_the_others(run, receiver):
    program = run("import memledger_client\nmemledger_client.start({'data': 'caf\\udce9', 'lr': 0.5})\ninput()\n")
    settings = receiver.wait("settings")["kv"]
    assert settings == {"data": "caf?", "lr": 0.5}
    program.go()
    assert program.end()[0] == 0


def test_calls_never_raise_and_interrupts_pass(receiver, run):
    program = run(
        """
import memledger_client, memledger_client._guard as guard
for _ in range(2):
    memledger_client.step("no number")
    memledger_client.step(-1)
    memledger_client.step(samples=object())
    memledger_client.step(batch_size="32")
    memledger_client.step(nonsense=1)
    memledger_client.track("only one name").__enter__()
print(memledger_client.save_report("/proc/nowhere/memory_usage.json"), guard.swallowed > 0)
try:
    with memledger_client.track("a model", None):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("passed on")
input()
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    # those with a number of steps
    receiver.wait("step", lambda message: message["n"] == 4)
    operation = receiver.wait("operation", lambda message: message["component"] == "a_model")
    assert operation["operation"] == "None"
    program.go()
    code, out, err = program.end()
    assert (code, out) == (0, "False True\npassed on\n")
    warnings = [line.split("RuntimeWarning: memledger: ")[1] for line in err.splitlines() if "RuntimeWarning" in line]
    starts = ["step ignored", "step: samples ignored", "step: batch_size ignored", "track.__init__", "/proc/nowhere", "the name 'a mod"]
    assert all(warning.startswith(start) for warning, start in zip(warnings, starts)), err
    assert len(warnings) == len(starts), err
    assert "Traceback" not in err
    assert run("import memledger_client; memledger_client.step('x'); print('trained')",
               arguments=("-W", "error", "-c"), environment={"MEMLEDGER_DEBUG": ""}).end() == (0, "trained\n", "")  # fmt: skip


def test_tracked_objects_are_not_kept(receiver, run):
    """A model in the place of its name would keep its GPU memory."""
    text = """
import gc, memledger_client, weakref
class Model: pass
model = Model()
reference = weakref.ref(model)
with memledger_client.track(model, "forward"): pass
del model
gc.collect()
print(reference())
"""
    code, out, _ = run(text).end()
    assert (code, out) == (0, "None\n")


def test_signal_handler_may_report_while_it_interrupts_a_call(receiver, run):
    program = run(
        """
import memledger_client, signal, torch
from memledger_client._reporter import reporter
def handle(*_):
    memledger_client.start()
    memledger_client.step()
    with memledger_client.track("signal", "handler"):
        pass
torch.cuda.init()
memledger_client.start()
signal.signal(signal.SIGTERM, handle)
with reporter._lock, reporter._count_lock, reporter._ooms._attaching:
    reporter._ooms._is_attached = False  # as at the first call
    signal.raise_signal(signal.SIGTERM)
print("handled", flush=True)
input()
"""
    )
    assert program.line() == "handled"
    assert receiver.wait("step")["n"] == 1
    program.go()
    assert program.end() == (0, "", "")


def test_thread_leaves_signals_to_the_program(receiver, run):
    program = run(
        """
import memledger_client, os, threading
memledger_client.start()
input()
thread = next(each for each in threading.enumerate() if each.name == "memledger")
status = open(f"/proc/self/task/{thread.native_id}/status").read()
blocked = int(status.split("SigBlk:")[1].split()[0], 16)
print([number for number in (1, 2, 10, 11, 15, 17) if blocked & 1 << (number - 1)])
"""
    )
    receiver.wait("hello")
    program.go()
    assert program.end() == (0, "[1, 2, 10, 15, 17]\n", "")


def test_errors_are_swallowed_when_standard_error_is_closed(receiver, run):
    for close in ("sys.stderr.close()", "sys.stderr = None"):
        text = f"import memledger_client, sys; {close}; memledger_client.step('no number'); print('trained')"
        assert run(text).end() == (0, "trained\n", "")


def test_steps_after_stop_are_counted_and_do_not_report(receiver, run):
    program = run(
        """
import memledger_client, threading
memledger_client.step()
input()
memledger_client.stop()
memledger_client.step()
with memledger_client.track("model", "forward"): pass
print(memledger_client._reporter.reporter._thread, flush=True)
input()
memledger_client.start()
input()
"""
    )
    assert receiver.wait("step")["n"] == 1
    program.go()
    assert program.line() == "None"
    assert {message["n"] for message in receiver.of("step")} == {1}
    program.go()
    receiver.wait("step", lambda message: message["n"] == 2)


def test_empty_directory_in_the_environment_switches_reporting_off(receiver, run):
    text = "import torch, memledger_client, threading; memledger_client.start(); torch.cuda.init(); memledger_client.step(); print(threading.active_count())"
    assert run(text, environment={"MEMLEDGER_REPORTER_DIRECTORY": ""}).end() == (0, "1\n", "")
    assert receiver.messages == []


def test_settings_are_sent_on_each_connection(receiver, run):
    run("import memledger_client; memledger_client.start(settings={'lr': 3e-4, 'optimizer': 'adamw'}); input()")
    wanted = {"t": "settings", "kv": {"lr": 3e-4, "optimizer": "adamw"}}
    assert receiver.wait("settings") == wanted
    receiver.close()
    receiver.messages.clear()
    receiver.open()
    assert receiver.wait("settings") == wanted


def test_setting_of_the_allocator_is_that_of_the_process(receiver, run):
    run(
        """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:64,expandable_segments:True"
import memledger_client
memledger_client.start(settings={"batch_size": 8})
input()
"""
    )
    found = receiver.wait("settings")["kv"]
    # what advice depends on comes first, and the whole has at most 64 characters
    assert found["pytorch_cuda_alloc_conf"].startswith("expandable_segments:True") and len(found["pytorch_cuda_alloc_conf"]) <= 64
    assert found["batch_size"] == 8


def test_memory_is_reported_soon_after_cuda_is_initialised(tmp_path, run):
    """torch counts CUDA as initialised after it has started the reporter, and the next sample is a minute away."""
    receiver = Receiver(tmp_path, welcome=b'{"v":1,"t":"welcome","interval_ms":60000}')
    run("import torch; torch.cuda.init(); input()")
    assert receiver.wait("sample")["dev"] == []  # nothing is allocated yet
    receiver.close()


def test_report_has_the_peaks_of_the_process_and_none_from_before_exec(receiver, run, tmp_path):
    program = run(
        """
import os, sys
if len(sys.argv) == 1:
    held = bytearray(400 << 20)
    os.execv(sys.executable, [sys.executable, __file__, "again"])
import torch, memledger_client
torch.cuda.standin_allocate(300 << 20)
torch.cuda.standin_free(300 << 20)
with memledger_client.track("model", "after"):
    held = bytearray(60 << 20)
    del held
memledger_client.save_report("report.json")
""",
        as_file=tmp_path / "program.py",
    )
    assert program.end() == (0, "", "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["peak_usage"]["gpu_ram_peak_mb"], report["peak_usage"]["reserved_gpu_ram_mb"]) == (300, 300)
    record = report["detailed_log"][0]["cpu_ram_used_mb"]
    assert record + 40 < report["peak_usage"]["cpu_ram_used_mb"] < 400


def test_allocator_without_statistics_reports_steps_and_host_memory(receiver, run):
    program = run(
        """
import memledger_client, torch
torch.cuda.init()
torch.cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE = True
with memledger_client.track("model", "forward"):
    pass
memledger_client.step()
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert program.end() == (0, "", "")
    assert receiver.wait("step")["n"] == 1
    assert receiver.wait("operation")["dev"] == [] and receiver.of("sample") == []


def test_steps_from_many_threads_are_all_counted(receiver, run):
    program = run(
        """
import memledger_client, threading
def train():
    for _ in range(5000):
        memledger_client.step()
threads = [threading.Thread(target=train) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    )
    assert program.end()[0] == 0
    assert receiver.wait("step", lambda message: message["n"] == 40_000)
