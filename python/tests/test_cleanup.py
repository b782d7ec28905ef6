"""Cleanup at safe points, asked for by memledger or by the program itself, and an orderly end."""

import signal

import pytest
from conftest import TORCH_VERSIONS

GIB = 1 << 30
#: A program whose cache has 6 of 10 GiB to give back.
HOLDS = """
import gc, os, signal, sys, threading, time, memledger_client, torch
from memledger_client._cleanup import cleaner
reserved = torch.cuda.memory_reserved
torch.cuda.standin_allocate(10 << 30)
torch.cuda.standin_free(6 << 30)
memledger_client.start()
"""
#: Waits until the reporter's thread has a request.
IS_ASKED = """
while cleaner._request is None:
    time.sleep(0.01)
"""
FREED = [{"i": 0, "before": 10 * GIB, "after": 4 * GIB}]


@pytest.mark.parametrize("version", TORCH_VERSIONS)
@pytest.mark.parametrize("point", ["memledger_client.step()", "with memledger_client.track('model', 'forward'): pass"])
def test_request_is_done_at_the_next_safe_point_by_the_thread_of_the_program(receiver, run, point, version):
    program = run(
        f"""{HOLDS}
class Cycle:
    def __del__(self):
        print(threading.current_thread().name, flush=True)
cycle = Cycle()
cycle.itself = cycle
del cycle
{IS_ASKED}
print(reserved() >> 30, flush=True)
{point}
print(reserved() >> 30, flush=True)
input()
""",
        environment={"STANDIN_TORCH": version},
    )
    receiver.wait("sample")
    receiver.send({"t": "cleanup", "id": 7, "deadline_ms": 60_000})
    assert [program.line() for _ in range(3)] == ["10", "MainThread", "4"]
    answer = receiver.wait("cleaned")
    assert (answer["id"], answer["dev"]) == (7, FREED) and answer["ms"] >= 0
    program.go()
    assert program.end()[0] == 0
    assert len(receiver.of("cleaned")) == 1


def test_answer_of_a_cleanup_that_lasts_longer_than_a_report_arrives(receiver, run):
    program = run(
        f"""{HOLDS}
from memledger_client._reporter import reporter
empty_cache = torch.cuda.empty_cache
def lasts():
    before = reporter._sequence
    while reporter._sequence < before + 3:
        time.sleep(0.01)
    empty_cache()
torch.cuda.empty_cache = lasts
{IS_ASKED}
memledger_client.step()
print("cleaned", flush=True)
input()
"""
    )
    receiver.wait("sample")
    receiver.send({"t": "cleanup", "id": 7, "deadline_ms": 60_000})
    assert program.line() == "cleaned"
    assert receiver.wait("cleaned")["dev"] == FREED
    program.go()
    assert program.end()[0] == 0


def test_moments_that_are_not_due_read_no_gpu(receiver, run):
    program = run(
        f"""{HOLDS}
memledger_client.step()
from memledger_client import _torch
statistics = _torch.statistics
reads = []
def counted(device):
    if threading.current_thread() is threading.main_thread():
        reads.append(device)
    return statistics(device)
_torch.statistics = counted
memledger_client.cleanup_on("error", "step", every=1000)
for _ in range(999):
    memledger_client.step()
print(len(reads))
memledger_client.step()
print(len(reads) > 0, reserved() >> 30)
memledger_client.cleanup_on()
"""
    )
    assert program.end() == (0, "0\nTrue 4\n", "")


def test_moment_during_a_capture_is_made_up_for(receiver, run):
    text = """
memledger_client.cleanup_on("step", every=2)
memledger_client.step()
torch.cuda.STANDIN_CAPTURES = 0
memledger_client.step()
print(reserved() >> 30)
torch.cuda.STANDIN_CAPTURES = None
memledger_client.step()
print(reserved() >> 30)
"""
    assert run(f"{HOLDS}{text}").end() == (0, "10\n4\n", "")


@pytest.mark.parametrize("captures", [0, 1])
def test_request_waits_while_a_graph_is_captured_on_any_gpu(receiver, run, captures):
    program = run(
        f"""{HOLDS}
torch.cuda.standin_allocate(1 << 30, 1)
{IS_ASKED}
torch.cuda.STANDIN_CAPTURES = {captures}
memledger_client.step()
print(reserved() >> 30, flush=True)
torch.cuda.STANDIN_CAPTURES = None
memledger_client.step()
print(reserved() >> 30, flush=True)
input()
""",
        environment={"STANDIN_GPUS": "a,b"},
    )
    receiver.wait("sample")
    receiver.send({"t": "cleanup", "id": 7, "deadline_ms": 60_000})
    assert [program.line(), program.line()] == ["10", "4"]
    assert receiver.wait("cleaned")["id"] == 7
    program.go()
    assert program.end()[0] == 0


def test_request_is_dropped_after_its_deadline(receiver, run):
    text = "cleaner._request = (7, 0.0)\nmemledger_client.step()\nprint(reserved() >> 30, cleaner._request, len(cleaner._answers))"
    assert run(f"{HOLDS}\n{text}").end() == (0, "10 None 0\n", "")


def test_cleanup_that_fails_is_answered(receiver, run):
    program = run(
        f"""{HOLDS}
{IS_ASKED}
def fails():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.empty_cache = fails
memledger_client.step()
print("goes on", flush=True)
input()
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    receiver.wait("sample")
    receiver.send({"t": "cleanup", "id": 7, "deadline_ms": 60_000})
    assert program.line() == "goes on"
    assert receiver.wait("cleaned") == {"t": "cleaned", "id": 7, "failed": True}
    program.go()
    assert program.end()[0] == 0


def test_cleanup_touches_no_gpu_that_the_process_does_not_use(receiver, run):
    text = """
import memledger_client, torch
torch.cuda.init()
print(memledger_client.cleanup(), torch.cuda.standin_contexts)
torch.cuda.standin_allocate(1 << 30, 1)
torch.cuda.standin_free(1 << 30, 1)
print(memledger_client.cleanup() >> 30, torch.cuda.standin_contexts)
"""
    assert run(text, environment={"STANDIN_GPUS": "a,b"}).end() == (0, "0 set()\n1 {1}\n", "")


def test_malformed_requests_are_ignored(receiver, run):
    program = run(f"{HOLDS}\ninput()\nprint(cleaner._request, flush=True)\nmemledger_client.step()\ninput()")
    receiver.wait("sample")
    for message in ({}, {"id": True, "deadline_ms": 1}, {"id": 1}, {"id": 1, "deadline_ms": 1e999}, {"id": "1", "deadline_ms": 5}):
        receiver.send({"t": "cleanup", **message})
    count = len(receiver.of("sample"))
    receiver.wait("sample", lambda message: len(receiver.of("sample")) > count + 3)
    program.go()
    assert program.line() == "None"
    program.go()
    assert program.end()[0] == 0


def test_own_moments(receiver, run):
    program = run(
        f"""{HOLDS}
def held(what):
    print(what, reserved() >> 30, flush=True)
    torch.cuda.standin_allocate(6 << 30)
    torch.cuda.standin_free(6 << 30)
memledger_client.cleanup_on("step", every=3)
for _ in range(3):
    memledger_client.step()
    print(reserved() >> 30, flush=True)
held("step")
memledger_client.cleanup_on("error")
try:
    with memledger_client.track("model", "forward"):
        raise ValueError
except ValueError:
    held("still")
with memledger_client.track("model", "forward"):
    pass
held("error")
memledger_client.cleanup_on("threshold", threshold=90)
memledger_client.step()
held("below")
cleaner._next_check = 0
memledger_client.cleanup_on("threshold", threshold=50)
for _ in range(2):
    memledger_client.step()
    held("above, at most once a minute")
memledger_client.cleanup_on()
memledger_client.step()
held("never")
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "10", "10", "4", "step 4", "still 10", "error 4", "below 10",
        "above, at most once a minute 4", "above, at most once a minute 10", "never 10",
    ]  # fmt: skip


def test_wrong_moments_are_warned_of(receiver, run):
    text = "import memledger_client\nfor each in ('stepp', ), ('step', ):\n    memledger_client.cleanup_on(*each, threshold=101)\nmemledger_client.step()"
    code, _, err = run(text, environment={"MEMLEDGER_DEBUG": ""}).end()
    assert code == 0 and "cleanup_on ignored: 'stepp' is none of step, threshold, error" in err


SHUTDOWN = f"""
import signal
{{before}}
{HOLDS}
memledger_client.install_shutdown()
memledger_client.install_shutdown()
memledger_client.step(5)
try:
    print("ready", flush=True)
    while True:
        time.sleep(60)
finally:
    print("finally", flush=True)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signal_ends_the_program_by_way_of_finally_and_exit_functions(receiver, run, number, code):
    program = run(SHUTDOWN.format(before=""))
    assert program.line() == "ready"
    program.process.send_signal(number)
    found, out, err = program.end()
    assert (found, out) == (code, "finally\n"), err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT) and "SystemExit" not in err
    assert receiver.wait("step")["n"] == 5


def test_handler_of_the_program_stays_and_so_do_ignored_signals(receiver, run):
    own = "signal.signal(signal.SIGTERM, lambda *_: exit(7))\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"
    program = run(SHUTDOWN.format(before=own))
    assert program.line() == "ready"
    program.process.send_signal(signal.SIGINT)
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == (7, "finally\n", "")


def test_sigterm_ends_a_forked_child_at_once(receiver, run):
    program = run(
        f"""{HOLDS}
memledger_client.install_shutdown()
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    os.write(writes, b"x")
    while True:
        signal.pause()
os.read(reads, 1)
os.kill(child, signal.SIGTERM)
print(-os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
"""
    )
    assert program.end() == (0, "-15\n", "")


def test_shutdown_outside_the_main_thread_is_warned_of(receiver, run):
    text = "import memledger_client, threading\nthread = threading.Thread(target=memledger_client.install_shutdown)\nthread.start()\nthread.join()"
    code, _, err = run(text, environment={"MEMLEDGER_DEBUG": ""}).end()
    assert code == 0 and "install_shutdown ignored: signal only works in main thread" in err


def test_forked_child_has_no_request_of_its_parent(receiver, run):
    program = run(
        f"""{HOLDS}
memledger_client.cleanup_on("step")
{IS_ASKED}
if os.fork() == 0:
    print(cleaner._request, cleaner._moments, flush=True)
    os._exit(0)
os.wait()
"""
    )
    receiver.wait("sample")
    receiver.send({"t": "cleanup", "id": 7, "deadline_ms": 60_000})
    assert program.line() == "None ()"
    assert program.end()[0] == 0


def test_last_error_of_an_interactive_python_is_dropped(receiver, run):
    program = run(f"{HOLDS}\nsys.last_value = ValueError()\nprint(memledger_client.cleanup() >> 30, hasattr(sys, 'last_value'))")
    assert program.end() == (0, "6 False\n", "")
