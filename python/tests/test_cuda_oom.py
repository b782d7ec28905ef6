"""CUDA out-of-memory errors, with the stand-in's allocator, which calls the observer as torch does."""

import signal

import pytest
from conftest import TORCH_VERSIONS

GIB = 1 << 30
OOM = "torch.cuda.standin_allocate(20 << 30)"
#: Of that error after 10 GiB were allocated and 6 freed.
NUMBERS = {
    "i": 0, "uuid": "00000000-0000-0000-0000-000000000000", "tried": 20 * GIB, "total": 12 * GIB, "free": 2 * GIB,
    "alloc": 4 * GIB, "res": 10 * GIB, "split": 6 * GIB,
}  # fmt: skip
HOLDS = """
import memledger_client, torch
torch.cuda.standin_allocate(10 << 30)
torch.cuda.standin_free(6 << 30)
memledger_client.start()
input()
"""


def timeless(message):
    """Returns a message without the time that it waited."""
    assert 0 <= message.get("ago_ms", 0) < 10_000
    return {key: value for key, value in message.items() if key != "ago_ms"}


def of(receiver):
    return [timeless(message) for message in receiver.of("oom")]


def await_observer(receiver):
    """Waits until the observer is attached, which is tried before each sample: before the first one CUDA may not be initialised yet."""
    receiver.wait("sample", lambda _: len(receiver.of("sample")) > 1)


def end_after_sample(receiver, program):
    """Lets a program go on once its observer is attached, and returns its end."""
    await_observer(receiver)
    program.go()
    return program.end()


@pytest.mark.parametrize("version", TORCH_VERSIONS)
def test_error_by_which_the_program_ends_has_the_numbers_of_torch(receiver, run, version):
    program = run(
        f"""{HOLDS}
with memledger_client.track("model", "forward"):
    with memledger_client.track("model", "attention"):
        {OOM}
""",
        environment={"STANDIN_TORCH": version},
    )
    code, _, err = end_after_sample(receiver, program)
    assert code == 1 and err.rstrip().splitlines()[-1].startswith("torch.cuda.OutOfMemoryError: CUDA out of memory")
    receiver.wait("oom", lambda message: message.get("uncaught"))
    numbers = {key: value for key, value in NUMBERS.items() if key != "uuid" or version != "2.4.1"}
    observed = {"t": "oom", "n": 1, **numbers, "operation": ["model", "attention"], "skipped": 0}
    assert of(receiver) == [observed, {"t": "oom", "n": 1, "uncaught": True}]


def test_survived_errors_are_the_newest_and_the_number_of_the_others(receiver, run):
    program = run(
        f"""{HOLDS}
for _ in range(1000):
    try:
        {OOM}
    except torch.cuda.OutOfMemoryError:
        pass
print("trained")
"""
    )
    assert end_after_sample(receiver, program) == (0, "trained\n", "")
    receiver.wait("oom", lambda message: message["n"] == 1000)
    found = of(receiver)
    # a busy machine may skip the first ones, too
    assert found[0] == {"t": "oom", **NUMBERS, "n": found[0]["n"], "skipped": found[0]["n"] - 1}
    assert len(found) < 100 and len(found) + sum(message["skipped"] for message in found) == 1000


def test_failure_of_the_observer_does_not_replace_the_error(receiver, run):
    program = run(
        f"""{HOLDS}
from memledger_client import _torch
_torch.uuid = lambda device: 1 // 0
try:
    {OOM}
except torch.cuda.OutOfMemoryError:
    print("caught")
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert end_after_sample(receiver, program) == (0, "caught\n", "")
    assert receiver.of("oom") == []  # the observer was called, and failed


def test_first_allocation_that_fails_has_no_memory_of_torch(receiver, run):
    program = run(f"import memledger_client, torch\ntorch.cuda.init()\nmemledger_client.start()\ninput()\n{OOM}\n")
    end_after_sample(receiver, program)
    message = receiver.wait("oom", lambda message: "tried" in message)
    assert (message["uuid"], message["alloc"], message["res"], message["split"]) == (NUMBERS["uuid"], 0, 0, 0)


@pytest.mark.parametrize("what", ["cause", "context", "thread", "library", "wrapped", "other", "old", "none", "interrupt"])
def test_error_that_ends_the_program_is_found(receiver, run, what):
    caught = f"""
try:
    {OOM}
except RuntimeError as error:
"""
    raising = {
        "cause": caught + "    raise ValueError('the step failed') from error",
        "context": caught + "    raise ValueError('the step failed')",
        "old": caught + "    memledger_client._cuda_oom.MAX_CONTEXT_AGE = 0.0\n    raise KeyError('an hour later')",
        "none": caught + "    raise ValueError('not because of it') from None",
        "interrupt": caught + "    raise KeyboardInterrupt",
        "thread": f"""
import threading
thread = threading.Thread(target=lambda: {OOM})
thread.start()
thread.join()
""",
        "library": 'raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")',
        "wrapped": caught + '    text = "Caught OutOfMemoryError in replica 0" + 3000 * " "\n    raise RuntimeError(text + str(error)) from None',
        "other": 'raise RuntimeError("no memory of another kind")',
    }[what]
    program = run(f"import memledger_client, torch\ntorch.cuda.init()\nmemledger_client.start()\ninput()\nmemledger_client.step()\n{raising}\n")
    assert end_after_sample(receiver, program)[0] == {"thread": 0, "interrupt": -signal.SIGINT}.get(what, 1)
    receiver.wait("step")  # sent last
    found = of(receiver)
    if what == "other":
        assert found == []
    elif what == "library":
        text = found[0]["text"]
        assert found == [{"t": "oom", "n": 1, "uncaught": True, "text": text, "skipped": 0}]
        assert text.startswith("CUBLAS_STATUS_ALLOC_FAILED when calling")
    elif what in ("thread", "old", "none", "interrupt"):
        assert [message.get("uncaught", False) for message in found] == [False]
    else:
        assert [(message["n"], message.get("uncaught", False)) for message in found] == [(1, False), (1, True)]


def test_allocator_without_observer_has_the_text(receiver, run):
    program = run(
        f"""
import memledger_client, torch
torch.cuda.init()
torch.cuda.STANDIN_ALLOCATOR_IS_PLUGGABLE = True
memledger_client.start()
{OOM}
""",
        environment={"MEMLEDGER_DEBUG": ""},
    )
    assert program.end()[0] == 1
    message = receiver.wait("oom")
    assert message["uncaught"] and "has a total capacity of 12.00 GiB" in message["text"]


def test_error_is_sent_after_a_restart_of_memledger(receiver, run):
    program = run(
        f"""{HOLDS}
try:
    {OOM}
except RuntimeError:
    pass
input()
"""
    )
    await_observer(receiver)
    receiver.close()
    program.go()
    receiver.open()
    assert timeless(receiver.wait("oom")) == {"t": "oom", "n": 1, **NUMBERS, "skipped": 0}
    program.go()
    assert program.end() == (0, "", "")


def test_forked_child_counts_its_own_errors(receiver, run):
    program = run(
        f"""{HOLDS}
import os
try:
    {OOM}
except RuntimeError:
    pass
child = os.fork()
if child == 0:
    assert memledger_client._cuda_oom.operations.current() is None and memledger_client._reporter.reporter._ooms._observed == 0
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )
    assert end_after_sample(receiver, program) == (0, "", "")
    receiver.wait("oom")
    assert len(of(receiver)) == 1


def test_history_that_the_program_records_is_written_and_named(receiver, run, tmp_path):
    program = run(
        f"""{HOLDS}
torch._C.STANDIN_HISTORY = True
def fail():
    try:
        {OOM}
    except torch.cuda.OutOfMemoryError:
        pass
fail()
fail()
from memledger_client._reporter import reporter
reporter._ooms._snapshot_at -= 60
fail()
""",
        environment={"MEMLEDGER_SNAPSHOT_DIRECTORY": str(tmp_path)},
    )
    assert end_after_sample(receiver, program)[0] == 0
    # one a minute, because it may be large, and only the newest stays
    (path,) = [each for each in tmp_path.iterdir() if each.name.startswith(f"memledger-cuda-oom-{program.pid}-")]
    assert path.read_text() == "a history of allocations"
    # after the error itself, because the program may be killed while it writes
    last = receiver.wait("oom", lambda message: message["n"] == 3 and "snapshot" in message)
    assert "tried" in receiver.of("oom")[0] and last == {"t": "oom", "n": 3, "snapshot": str(path)}


@pytest.mark.parametrize("reason", ["unwritable", "own allocator"])
def test_history_that_is_not_written_does_not_lose_the_error(receiver, run, reason):
    before = "torch._C._cuda_customAllocator(1, 2)" if reason == "own allocator" else ""
    program = run(
        f"{HOLDS}\ntorch._C.STANDIN_HISTORY = True\n{before}\n{OOM}",
        environment={"MEMLEDGER_SNAPSHOT_DIRECTORY": "/nowhere", "MEMLEDGER_DEBUG": "1" if before else ""},
    )
    code, _, err = end_after_sample(receiver, program)
    assert code == 1 and "nowhere" not in err
    receiver.wait("oom", lambda message: message.get("tried"))
    assert not any("snapshot" in message for message in receiver.of("oom"))


def test_exception_that_takes_no_attribute_is_reported(receiver, run):
    program = run(
        """
import memledger_client
class Frozen(RuntimeError):
    def __setattr__(self, *_):
        raise TypeError("frozen")
memledger_client.start()
input()
raise Frozen("CUDA error: out of memory")
"""
    )
    receiver.wait("hello")
    program.go()
    assert program.end()[0] == 1
    assert receiver.wait("oom")["uncaught"]
