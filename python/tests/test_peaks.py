"""Peaks: of each operation, of the process, and as the program itself reads them."""

import json

import pytest

MIB = 1 << 20
BEGIN = """
import sys, threading, memledger_client, torch
from torch.cuda import standin_allocate, standin_free
M = 1 << 20
def spike(size, device=0):
    standin_allocate(size * M, device)
    standin_free(size * M, device)
"""


def figures(run, text, **options):
    """Returns what a program prints as its result."""
    code, out, err = run(f"{BEGIN}{text}", **options).end()
    assert (code, err) == (0, "")
    return eval(out)


def test_peak_of_each_operation_is_exact_also_below_earlier_ones(run):
    text = """
spike(900)
with memledger_client.track("model", "outer") as outer:
    standin_allocate(100 * M)
    with memledger_client.track("model", "first") as first:
        spike(300)
    spike(50)
    with memledger_client.track("model", "second") as second:
        spike(20)
    standin_free(100 * M)
with memledger_client.track("model", "later") as later:
    spike(30)
print([each.peak_bytes // M for each in (outer, first, second, later)])
"""
    assert figures(run, text) == [400, 400, 120, 30]


def test_peak_is_sent_and_in_the_report(receiver, run, tmp_path):
    program = run(
        f"""{BEGIN}
spike(900)
spike(10, 1)
with memledger_client.track("model", "forward"):
    spike(300)
    spike(20, 1)
memledger_client.save_report("report.json")
sys.stdin.readline()
""",
        environment={"STANDIN_GPUS": "a,b"},
    )
    devices = receiver.wait("operation")["dev"]
    assert [device["alloc_peak"] for device in devices] == [300 * MIB, 20 * MIB]
    program.go()
    assert program.end()[0] == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["detailed_log"][0]["gpu_ram_peak_mb"] == 320
    assert (report["peak_usage"]["gpu_ram_peak_mb"], report["peak_usage"]["reserved_gpu_ram_mb"]) == (920, 920)


#: The operations of two threads overlap, each on its current device.
OVERLAP = """
barrier, found = threading.Barrier(2, timeout=60), {{}}
spike(900)
def work(name, device, size):
    torch.cuda.set_device(device)
    with memledger_client.track("model", name) as tracked:
        barrier.wait()
        spike(size, device)
        barrier.wait()
    found[name] = tracked.peak_bytes and tracked.peak_bytes // M
threads = [threading.Thread(target=work, args=each) for each in (("a", 0, 100), ("b", {device}, 200))]
[each.start() for each in threads]
[each.join() for each in threads]
with memledger_client.track("model", "alone") as alone:
    spike(50)
print(found, alone.peak_bytes // M)
"""


def test_operations_of_two_threads_on_one_device_have_no_peak(receiver, run):
    program = run(f"{BEGIN}{OVERLAP.format(device=0)}sys.stdin.readline()")
    assert receiver.wait("sample", lambda message: message.get("overlapping") == 2)
    assert "alloc_peak" not in receiver.wait("operation", lambda message: message["operation"] == "b")["dev"][0]
    program.go()
    assert program.end()[1] in ("{'a': None, 'b': None} 50\n", "{'b': None, 'a': None} 50\n")


def test_operations_of_two_threads_on_two_devices_have_their_own_peaks(run):
    code, out, err = run(f"{BEGIN}{OVERLAP.format(device=1)}", environment={"STANDIN_GPUS": "a,b"}).end()
    assert (code, err) == (0, "")
    found, _, alone = out.rpartition(" ")
    assert (eval(found), alone) == ({"a": 100, "b": 200}, "50\n")


@pytest.mark.parametrize("order", ["first", "second"])
def test_coroutines_that_overlap_have_no_peak(run, order):
    text = """
import asyncio
found = {}
async def work(name, before, after):
    with memledger_client.track("model", name) as tracked:
        await asyncio.sleep(before)
        spike(100)
        await after.wait()
    found[name] = tracked.peak_bytes
async def main():
    first, second = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.ensure_future(work("a", 0, first)), asyncio.ensure_future(work("b", 0, second))]
    await asyncio.sleep(0.1)
    events = [first, second] if ORDER == "first" else [second, first]
    events[0].set()
    await asyncio.sleep(0.1)
    events[1].set()
    await asyncio.gather(*tasks)
asyncio.run(main())
print(found)
"""
    assert figures(run, text.replace("ORDER", repr(order))) == {"a": None, "b": None}


READERS = {
    "max_memory_allocated": "torch.cuda.max_memory_allocated()",
    "max_memory_reserved": "torch.cuda.max_memory_reserved()",
    "memory_stats": "torch.cuda.memory.memory_stats()['allocated_bytes.all.peak']",
    "nested": "torch.cuda.memory.memory_stats_as_nested_dict()['reserved_bytes']['large_pool']['peak']",
    "accelerator": "torch._C._accelerator_getDeviceStats(0)['allocated_bytes']['all']['peak']",
}


@pytest.mark.parametrize("reset", ["torch.cuda.reset_peak_memory_stats()", "torch._C._accelerator_resetPeakStats(0)"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_program_reads_its_own_peaks_as_without_us(run, reader, reset):
    text = """
seen = []
def read():
    seen.append(READER // M)
def work(tracked):
    with tracked("a"):
        spike(500)
        with tracked("b"):
            spike(100)
            read()
        RESET
        read()
        spike(40)
    with tracked("c"):
        spike(20)
        read()
    read()
spike(700)
torch.cuda.empty_cache()
read()
import contextlib
work(lambda name: contextlib.nullcontext())
without = seen[:]
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
spike(700)
torch.cuda.empty_cache()
seen.clear()
read()
work(lambda name: memledger_client.track("model", name))
print(seen == without, seen)
"""
    same, seen = figures(run, text.replace("READER", reader).replace("RESET", reset).replace("print(", "print((").rstrip() + ")")
    assert same and seen[0] == 700, seen


def test_no_function_that_reads_is_wrapped_without_track(receiver, run):
    text = "before = torch._C._cuda_memoryStats\ntorch.cuda.init()\nmemledger_client.start()\nmemledger_client.step()\nprint(torch._C._cuda_memoryStats is before)"
    assert figures(run, text) is True


def test_peaks_of_the_process_outlive_resets_by_the_program(receiver, run, tmp_path):
    program = run(
        f"""{BEGIN}
standin_allocate(M)
memledger_client.start()
sys.stdin.readline()
spike(800)
torch.cuda.reset_peak_memory_stats()
spike(10)
print(memledger_client.peak()["gpu_allocated_bytes"] // M, torch.cuda.max_memory_allocated() // M, memledger_client.save_report("r.json"), flush=True)
sys.stdin.readline()
"""
    )
    receiver.wait("sample", lambda message: message["dev"])
    program.go()
    assert program.line() == "801 11 True"
    assert json.loads((tmp_path / "r.json").read_text())["peak_usage"]["gpu_ram_peak_mb"] == 801
    # the spike lay between two samples
    assert receiver.wait("sample", lambda message: message["dev"][0]["alloc_peak"] > 11 * MIB)["dev"][0]["alloc_peak"] == 801 * MIB
    program.go()
    assert program.end()[0] == 0


def test_failures_are_counted_across_resets_by_the_program(receiver, run):
    program = run(
        f"""{BEGIN}
memledger_client.start()
def fail():
    try:
        standin_allocate(20 << 30)
    except torch.cuda.OutOfMemoryError:
        pass
spike(1)
memledger_client.step()
fail()
torch.cuda.reset_accumulated_memory_stats()
fail()
sys.stdin.readline()
"""
    )
    assert receiver.wait("sample", lambda message: message["dev"] and message["dev"][0]["ooms"] > 1)["dev"][0]["ooms"] == 2
    program.go()
    assert program.end()[0] == 0


def test_only_devices_in_use_are_asked(run):
    text = """
spike(1, 5)
torch.cuda.set_device(5)
with memledger_client.track("model", "warm"):
    pass
torch._C.standin_queries.clear()
with memledger_client.track("model", "forward"):
    pass
print(torch._C.standin_queries)
"""
    assert figures(run, text, environment={"STANDIN_GPUS": "a,b,c,d,e,f,g,h", "MEMLEDGER_REPORTER_DIRECTORY": ""}) == [5, 5]


def test_object_that_is_entered_again_within_itself(run):
    text = """
tracked = memledger_client.track("model", "forward")
with tracked:
    spike(100)
    with tracked:
        spike(10)
    inner = tracked.peak_bytes
from memledger_client._peaks import peaks
print(inner // M, tracked.peak_bytes // M, peaks._open)
"""
    assert figures(run, text.replace("print(", "print((").rstrip() + ")") == (10, 100, [])


def test_peak_of_a_device_that_holds_nothing_any_more_stays(receiver, run, tmp_path):
    text = """
spike(900)
torch.cuda.empty_cache()
RESET
print(memledger_client.peak()["gpu_allocated_bytes"] // M)
"""
    for reset in ("with memledger_client.track('model', 'forward'): pass", "torch.cuda.reset_peak_memory_stats()"):
        assert figures(run, text.replace("RESET", reset)) == 900


def test_program_reads_its_own_peaks_after_it_made_an_allocator(run):
    text = """
spike(700)
with memledger_client.track("model", "forward"):
    pass
torch._C._cuda_customAllocator(1, 2)
torch.cuda.reset_peak_memory_stats()
spike(10)
print(torch.cuda.max_memory_allocated() // M)
"""
    assert figures(run, text) == 10


def test_operation_of_a_thread_of_torch_is_within_that_of_the_main_thread(run):
    text = """
import _thread, time
done = []
def recompute():  # as checkpointing does in a thread of autograd
    with memledger_client.track("model", "recompute") as inner:
        spike(100)
    done.append(inner.peak_bytes // M)
with memledger_client.track("model", "backward") as outer:
    _thread.start_new_thread(recompute, ())
    while not done:
        time.sleep(0.001)
    spike(10)
print((done, outer.peak_bytes // M))
"""
    assert figures(run, text) == ([100], 100)


def test_child_that_is_forked_within_an_operation_goes_on(run):
    text = """
import os
with memledger_client.track("model", "forward") as tracked:
    child = os.fork()
if child == 0:
    from memledger_client._reporter import reporter
    from memledger_client._peaks import peaks
    os._exit(len(reporter.records._kept) + 10 * (tracked.peak_bytes is None) + 100 * peaks.overlapping)
print(os.WEXITSTATUS(os.waitpid(child, 0)[1]))
"""
    # what its parent counted is not its own
    before = "from memledger_client._peaks import peaks\npeaks.overlapping = 1"
    assert figures(run, before + text) == 11
