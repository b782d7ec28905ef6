"""The names of the programs that memledger replaces."""

import json

import pytest

MIB = 1 << 20


def test_memory_tracker_writes_the_old_file(receiver, run, tmp_path):
    program = run(
        """
import torch
from memledger_client.compat import MemoryTracker
tracker = MemoryTracker("a ClearML task", output_dir="logs")
tracker.log_memory("system", "experiment_start")
torch.cuda.standin_allocate(300 << 20)
torch.cuda.standin_free(100 << 20)
tracker.log_memory("model", "after_generate")
tracker.clear_memory()
tracker.log_memory("model", "after_clear")
tracker.save_log()
"""
    )
    assert program.end() == (0, "", "")
    report = json.loads((tmp_path / "logs/memory_usage.json").read_text())
    amounts = ["cpu_ram_used_mb", "gpu_ram_used_mb", "gpu_ram_peak_mb", "reserved_gpu_ram_mb"]
    assert list(report) == ["detailed_log", "peak_usage"]
    assert list(report["peak_usage"]) == amounts
    start, generate, clear = report["detailed_log"]
    assert list(start) == ["component", "operation", "timestamp", *amounts]
    # before the program uses a GPU, and without one, as numbers
    assert start["component"] == "system" and [start[key] for key in amounts[1:]] == [0.0, 0.0, 0.0]
    assert all(isinstance(entry["timestamp"], float) and entry["timestamp"] > 1e9 for entry in report["detailed_log"])
    assert [generate[key] for key in amounts[1:]] == [200, 300, 300]
    assert [clear[key] for key in amounts[1:]] == [200, 300, 200]
    assert [report["peak_usage"][key] for key in amounts[1:]] == [200, 300, 300]
    operation = receiver.wait("operation", lambda message: message["operation"] == "after_generate")
    assert operation["dev"] == [{"i": 0, "alloc": 200 * MIB, "res": 300 * MIB}]  # the peak is not that of an operation


def test_each_tracker_has_its_own_records_and_the_programs_own_peaks(receiver, run, tmp_path):
    program = run(
        """
import torch
from memledger_client.compat import MemoryTracker
for name, gib in (("fp32", 10), ("int8", 5)):
    tracker = MemoryTracker(output_dir="outputs/" + name)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.standin_allocate(gib << 30)
    tracker.log_memory("model", "after_generate")
    torch.cuda.standin_free(gib << 30)
    tracker.clear_memory()
    tracker.save_log()
"""
    )
    assert program.end() == (0, "", "")
    for name, gib in (("fp32", 10), ("int8", 5)):
        report = json.loads((tmp_path / "outputs" / name / "memory_usage.json").read_text())
        assert [entry["gpu_ram_used_mb"] for entry in report["detailed_log"]] == [1024 * gib]
        assert [report["peak_usage"][key] for key in ("gpu_ram_used_mb", "gpu_ram_peak_mb")] == [1024 * gib] * 2


@pytest.mark.parametrize(
    "arguments, saved, place",
    [
        ("'outputs/x'", "", "outputs/x"),
        ("pathlib.Path('outputs/x')", "", "outputs/x"),
        ("object(), 'outputs/x'", "", "outputs/x"),
        ("experiment_name='x'", "", "outputs/x"),
        ("experiment_name='outputs/x'", "", "outputs/x"),
        ("save_dir='outputs/x'", "", "outputs/x"),
        ("log_dir='outputs/x'", "", "outputs/x"),
        ("output_dir='outputs/x', experiment_name='y'", "", "outputs/x"),
        ("'a task', output_dir='outputs/x'", "", "outputs/x"),
        ("", "", "."),
        ("", "'outputs/x'", "outputs/x"),
        ("", "'outputs/x/memory_usage.json'", "outputs/x"),
        ("experiment_name='y'", "output_dir='outputs/x'", "outputs/x"),
        ("", "pathlib.Path('there')", "there"),
    ],
)
def test_tracker_writes_where_its_arguments_say(receiver, run, tmp_path, arguments, saved, place):
    (tmp_path / "there").mkdir()
    program = run(f"import pathlib\nfrom memledger_client.compat import MemoryTracker\nprint(MemoryTracker({arguments}).save_log({saved}))")
    assert program.end() == (0, "True\n", "")
    assert list(tmp_path.rglob("memory_usage.json")) == [tmp_path / place / "memory_usage.json"]


def test_argument_of_the_tracker_that_is_not_used_is_a_warning(receiver, run):
    program = run("from memledger_client.compat import MemoryTracker\nMemoryTracker(interval=5, task=None)")
    code, out, err = program.end()
    assert (code, out) == (0, "") and "MemoryTracker: interval is not used" in err and "task" not in err


def test_names_in_any_script_stay_apart_and_are_whole_in_the_file(receiver, run, tmp_path):
    program = run(
        """
import memledger_client
from memledger_client.compat import MemoryTracker
tracker = MemoryTracker()
for component in ("модель", "ретрив", "モデル", "x" * 70, "x" * 71):
    tracker.log_memory(component, "до генерации")
tracker.save_log()
with memledger_client.track("модель", "шаг"):
    pass
memledger_client.save_report("tracked.json")
"""
    )
    assert program.end()[0] == 0
    names = [entry["component"] for entry in json.loads((tmp_path / "memory_usage.json").read_text())["detailed_log"]]
    assert names == ["модель", "ретрив", "モデル", "x" * 70, "x" * 71]
    tracked = json.loads((tmp_path / "tracked.json").read_text())["detailed_log"][-1]
    assert (tracked["component"], tracked["operation"]) == ("модель", "шаг")
    reported = {message["component"] for message in receiver.of("operation")}
    assert len(reported) == 5 and all(len(name) <= 64 and name.isascii() for name in reported), reported


def test_each_record_is_reported_with_its_own_time_and_peak(receiver, run):
    program = run(
        """
import torch
from memledger_client.compat import MemoryTracker
tracker = MemoryTracker()
for number in range(300):
    torch.cuda.standin_allocate(1 << 20)
    tracker.log_memory("model", "after_generate")
"""
    )
    assert program.end() == (0, "", "")
    records = [record for message in receiver.of("records") for record in message["of"]]
    assert [record[4] for record in records] == [(number + 1) << 20 for number in range(300)]  # allocated
    assert [record[5] for record in records] == [record[4] for record in records]  # their peaks
    assert all(record[:2] == ["model", "after_generate"] and 0 <= record[2] < 60_000_000 for record in records)


def test_tracker_gives_clearml_its_scalars(receiver, run):
    program = run(
        """
from memledger_client.compat import MemoryTracker
class Logger:
    def report_scalar(self, title, series, value, iteration):
        print(title, series, value > 0 if series.startswith("cpu") else value, iteration)
class Task:
    def get_logger(self):
        return Logger()
tracker = MemoryTracker(Task(), output_dir="x")
tracker.log_memory("model", "before_generate")
tracker.log_memory("model", "after_generate")
"""
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[:4] == [f"memory/model {series} {value} 1" for series, value in (
        ("cpu_ram_used_mb", True), ("gpu_ram_used_mb", 0.0), ("gpu_ram_peak_mb", 0.0), ("reserved_gpu_ram_mb", 0.0))]  # fmt: skip
    assert len(out.splitlines()) == 8 and out.endswith(" 2\n")


@pytest.mark.parametrize("call", ["cleanup_gpu()", "gpu_manager.check_memory_threshold(85)", "aggressive_cleanup_gpu()"])
def test_loop_of_a_service_answers_a_request_to_clean_up(receiver, run, call):
    program = run(
        f"""
import threading, torch
from memledger_client.compat import aggressive_cleanup_gpu, cleanup_gpu, gpu_manager
torch.cuda.standin_allocate(4 << 30)
torch.cuda.standin_free(3 << 30)
stop = threading.Event()
def requests():
    while not stop.wait(0.01):
        {call}
thread = threading.Thread(target=requests)
print("ready", flush=True)
thread.start()
input()
stop.set()
thread.join()
"""
    )
    assert program.line() == "ready"
    receiver.wait("hello")
    receiver.send({"t": "cleanup", "id": 7, "deadline_ms": 60_000})
    cleaned = receiver.wait("cleaned")
    assert cleaned["id"] == 7 and cleaned["dev"][0]["after"] == 1 << 30
    program.go()
    assert program.end()[0] == 0


def test_gpu_manager_knows_nothing_before_cuda_and_does_not_initialise_it(receiver, run):
    program = run(
        """
import torch
from memledger_client.compat import gpu_manager, cleanup_gpu, aggressive_cleanup_gpu, monitor_gpu
print(gpu_manager.get_gpu_memory_info(), gpu_manager.check_memory_threshold(85), cleanup_gpu(), aggressive_cleanup_gpu())
print(gpu_manager.get_optimal_batch_size(base_batch_size=32))
monitor_gpu()
print(torch.cuda.is_initialized())
"""
    )
    expected = "{} False None None\n32\nGPU memory: unknown (no GPU that this process uses or can see)\nFalse\n"
    assert program.end() == (0, expected, "")


def test_gpus_that_the_program_does_not_use_get_no_context(receiver, run):
    program = run(
        """
import torch
from memledger_client import compat
def use_all():
    compat.cleanup_gpu()
    compat.aggressive_cleanup_gpu(True, wait=1)
    compat.monitor_gpu()
    compat.monitor_gpu_memory(1, reset=True)
    compat.print_gpu_info()
    return compat.get_gpu_info(), compat.gpu_manager.get_gpu_memory_info(), sorted(torch.cuda.standin_contexts)
print("RESULT", use_all())
torch.cuda.standin_allocate(1 << 30, 1)
print("RESULT", use_all())
""",
        environment={"STANDIN_GPUS": "a,b,c"},
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    before, after = (eval(line[6:]) for line in out.splitlines() if line.startswith("RESULT"))
    assert [gpu["used_memory_gb"] for gpu in before[0]] == [None] * 3 and before[1:] == ({}, [])
    assert [gpu["used_memory_gb"] for gpu in after[0]] == [None, 1, None] and after[2] == [1]
    assert after[1]["used_memory_gb"] == 1  # that of the GPU in use, not of the current one
    assert "12.00 GB total, used: unknown" in out and "12.00 GB total, 1.00 GB used" in out
    assert "GPU 1 (measured): allocated 1.00 GB" in out


def test_gpu_manager_follows_thresholds(receiver, run):
    program = run(
        """
import torch
from memledger_client.compat import gpu_manager, cleanup_gpu
torch.cuda.init()
for used in (6, 9.24, 10.32, 10.92):
    torch.cuda.standin_allocate(int(used * 2**30) - torch.cuda.memory_allocated())
    info = gpu_manager.get_gpu_memory_info()
    print(round(info["memory_usage_percent"]), round(info["free_memory_gb"], 2),
          gpu_manager.check_memory_threshold(85), gpu_manager.get_optimal_batch_size(base_batch_size=32))
torch.cuda.standin_free(1 << 30)
print(cleanup_gpu() >> 20)
"""
    )
    expected = "50 6.0 False 32\n77 2.76 False 16\n86 1.68 True 8\n91 1.08 True 4\n1024\n"
    assert program.end() == (0, expected, "")


def test_many_loads_and_unloads_leave_nothing(receiver, run):
    """The stress test of the old RAG system: models are loaded and unloaded, and each time the memory comes back."""
    program = run(
        """
import torch
from memledger_client.compat import MemoryTracker, cleanup_gpu
tracker = MemoryTracker()
for _ in range(200):
    torch.cuda.standin_allocate(500 << 20)
    tracker.log_memory("model", "loaded")
    torch.cuda.standin_free(500 << 20)
    cleanup_gpu()
    tracker.log_memory("model", "unloaded")
torch.cuda.standin_allocate(2 << 20)
print(torch.cuda.memory_reserved() >> 20, tracker.save_log())
"""
    )
    assert program.end() == (0, "2 True\n", "")
    last = receiver.wait("operation", lambda message: message["operation"] == "unloaded" and not message["dev"][0]["res"])
    assert last["dev"][0]["alloc"] == 0


def test_analyze_prints_facts_of_each_gpu(receiver, run):
    code, out, err = run("--batch-size", arguments=("-m", "memledger_client.analyze"), environment={"STANDIN_GPUS": "a,b"}).end()
    assert code == 2 and "expected one argument" in err
    code, out, err = run("", arguments=("-c", "import sys; sys.argv[1:] = []; from memledger_client.analyze import main; main([])"), environment={"STANDIN_GPUS": "a,b"}).end()  # fmt: skip
    assert (code, err) == (0, "")
    assert "GPUs: 2" in out and "12.00 GB total" in out and "compute capability 8.6, 28 multiprocessors" in out


#: Programs of the kinds that memledger replaces, each with another import line.
EXPERIMENT = """
import os, torch
from memledger_client.compat import MemoryTracker

class Task:
    name = "nq-llama"

def run(examples):
    tracker = MemoryTracker(Task(), output_dir=os.path.join("outputs", "nq-llama"))
    tracker.log_memory("system", "experiment_start")
    torch.cuda.standin_allocate(2 << 30)
    for number in range(examples):
        tracker.log_memory("retriever", "before_retrieve")
        tracker.log_memory("retriever", "after_retrieve")
        tracker.log_memory("model", "before_generate")
        torch.cuda.standin_allocate(512 << 20)
        torch.cuda.standin_free(512 << 20)
        tracker.log_memory("model", "after_generate")
        if number % 100 == 0:
            tracker.clear_memory()
    tracker.log_memory("system", "experiment_end")
    tracker.save_log()

run(3)
import json
data = json.load(open("outputs/nq-llama/memory_usage.json"))
for key in ("cpu_ram_used_mb", "gpu_ram_used_mb", "gpu_ram_peak_mb", "reserved_gpu_ram_mb"):
    print(f"{key}: {data['peak_usage'][key]:.0f}")
times = [entry["timestamp"] for entry in data["detailed_log"]]
print(len(times), times[-1] - times[0] >= 0)
"""
TRAINER = """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
from memledger_client.compat import cleanup_gpu, monitor_gpu_memory
cleanup_gpu()
torch.cuda.standin_allocate(5 << 30)
for batch in range(100):
    if batch % 50 == 0:
        cleanup_gpu()
stats = monitor_gpu_memory(0)
print(f"{stats['allocated_gb']:.2f} {stats['reserved_gb']:.2f} {stats['allocated_peak_gb']:.2f}")
"""
SERVICE = """
import atexit, signal, sys, torch
from memledger_client.compat import aggressive_cleanup_gpu, cleanup_gpu, gpu_manager, monitor_gpu
atexit.register(cleanup_gpu)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(0))

def memory_info():
    info = gpu_manager.get_gpu_memory_info()
    return {"usage": round(info["memory_usage_percent"], 1), "free_gb": round(info["free_memory_gb"], 1)}

def request():
    if gpu_manager.check_memory_threshold(85):
        aggressive_cleanup_gpu()
    torch.cuda.standin_allocate(2 << 30)
    torch.cuda.standin_free(2 << 30)
    cleanup_gpu()

print(memory_info())  # before anything is on the GPU
torch.cuda.standin_allocate(int(10.5 * 2**30))
print(memory_info(), gpu_manager.check_memory_threshold(85), gpu_manager.get_optimal_batch_size(base_batch_size=32))
torch.cuda.standin_free(9 << 30)
for _ in range(3):
    request()
print(memory_info())
monitor_gpu()
signal.raise_signal(signal.SIGTERM)
"""
GPU_CHECK = """
from memledger_client.compat import get_gpu_info, print_gpu_info
for gpu in get_gpu_info():
    print(f"{gpu['name']}: {gpu['total_memory_gb']:.1f} GB, {gpu['used_memory_gb']:.1f} used, {gpu['compute_capability']}, {gpu['multiprocessors']}")
print_gpu_info()
"""


@pytest.mark.parametrize(
    "program, wanted",
    [
        (EXPERIMENT, ["gpu_ram_used_mb: 2048", "gpu_ram_peak_mb: 2560", "reserved_gpu_ram_mb: 2560", "14 True"]),
        (TRAINER, ["5.00 5.00 5.00"]),
        (SERVICE, ["{'usage': 25.0, 'free_gb': 9.0}", "{'usage': 87.5, 'free_gb': 1.5} True 8", "{'usage': 12.5, 'free_gb': 10.5}"]),
        (GPU_CHECK, ["Stand-in: 12.0 GB, 3.0 used, 8.6, 28", "GPUs: 1"]),
    ],
    ids=["experiment", "trainer", "service", "gpu-check"],
)
def test_old_programs_work_after_their_import_line(receiver, run, driver, program, wanted):
    code, out, err = run(program, environment={**driver(), "STANDIN_GPUS": "a"}).end()
    assert (code, err) == (0, "")
    assert [line for line in wanted if line not in out.splitlines()] == [], out
