"""What the client must not do to a program: hang it, make it deaf to signals, or lose its hooks."""

import signal
import subprocess

import pytest

#: Torch's allocator as it is with a pool that has an allocator of its own: ``statistics`` waits for its lock with the GIL, and
#: ``allocate`` calls Python while it holds the lock, as vLLM's does.
LIBRARY = """
#include <pthread.h>
#include <unistd.h>
int PyGILState_Ensure(void);
void PyGILState_Release(int);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
void statistics(void) { pthread_mutex_lock(&lock); pthread_mutex_unlock(&lock); }
void allocate(void) {
    pthread_mutex_lock(&lock);
    usleep(2000);
    PyGILState_Release(PyGILState_Ensure());
    pthread_mutex_unlock(&lock);
}
"""
ALLOCATES = """
import ctypes, memledger_client, threading
{first}
import torch
torch.cuda.standin_allocate(1 << 20)
def with_pool():
    return torch.cuda.memory.CUDAPluggableAllocator("lib.so", "allocate", "free")
{start}
original = torch._C._cuda_memoryStats
def memory_stats(device):
    ctypes.PyDLL("./lib.so").statistics()  # with the GIL
    return original(device)
torch._C._cuda_memoryStats = memory_stats
def allocate():
    library = ctypes.CDLL("./lib.so")  # without
    for _ in range(500):
        library.allocate()
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print("done", flush=True)
input()
"""


def build(directory):
    (directory / "lib.c").write_text(LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "lib.so", "lib.c"], cwd=directory, check=True)


def test_allocator_that_calls_python_is_never_waited_for(receiver, run, tmp_path):
    build(tmp_path)
    start = "memledger_client.start()\ninput()\npool = with_pool()"
    program = run(ALLOCATES.format(first="", start=start))
    assert receiver.wait("sample")["dev"][0]["alloc"] == 1 << 20
    program.go()
    assert program.line() == "done"
    # figures of before do not stay: a new connection has none
    hello = receiver.wait("hello", lambda message: message is not receiver.of("hello")[0])
    assert hello["devices"] == []
    count = len(receiver.of("sample"))
    program.go()
    assert program.end()[0] == 0
    assert len(receiver.of("sample")) == count


@pytest.mark.parametrize("first", ["", "memledger_client.start()"])
def test_allocator_of_before_the_start_is_found(receiver, run, tmp_path, first):
    build(tmp_path)
    program = run(ALLOCATES.format(first=first, start="pool = with_pool()\nmemledger_client.start()\nmemledger_client.step()"))
    assert program.line() == "done"
    receiver.wait("step")
    assert all(message["dev"] == [] for message in receiver.of("sample"))
    program.go()
    assert program.end()[0] == 0


def test_program_of_gevent_gets_its_signals(receiver, run):
    program = run(
        """
from gevent import monkey
monkey.patch_all()
import memledger_client, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
memledger_client.start()
time.sleep(0.01)  # the reporter's greenlet runs
print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)
while True:
    time.sleep(0.05)
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert program.line() == "0"
    receiver.wait("hello")
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == 7


def test_hook_that_the_program_sets_later_does_not_lose_the_error(receiver, run):
    program = run(
        """
import memledger_client, sys, threading
memledger_client.start()
ours = sys.excepthook
def hook(kind, error, traceback):
    print("hook of the program", error, flush=True)
    ours(kind, error, traceback)  # it calls the one of before, as rich and sentry do
sys.excepthook = hook
input()
raise RuntimeError("CUDA error: out of memory")
"""
    )
    count = len(receiver.of("hello"))
    receiver.wait("hello")
    assert count <= 1
    program.go()
    code, out, err = program.end()
    assert code == 1 and "hook of the program" in out and "CUDA error: out of memory" in err
    receiver.wait("oom")
    assert [message["uncaught"] for message in receiver.of("oom")] == [True]


def test_torch_without_the_question_whether_it_traces_changes_nothing(receiver, run):
    """As torch 2.1 and 2.2: their ``torch.compiler`` has less."""
    text = """
import memledger_client, torch, types
torch.compiler = types.SimpleNamespace()
with memledger_client.track("model", "forward") as tracked:
    torch.cuda.standin_allocate(1 << 20)
memledger_client.step()
print(tracked.peak_bytes, memledger_client.peak()["gpu_allocated_bytes"])
"""
    assert run(text).end() == (0, f"{1 << 20} {1 << 20}\n", "")
