"""The names of the programs that memledger replaces."""

import json

MIB = 1 << 20


def test_memory_tracker_writes_the_old_file(receiver, run, tmp_path):
    program = run(
        """
import torch
from memledger.compat import MemoryTracker
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
    assert (start["component"], start["gpu_ram_used_mb"]) == ("system", None)
    assert [generate[key] for key in amounts[1:]] == [200, 300, 300]
    assert [clear[key] for key in amounts[1:]] == [200, 300, 200]
    assert [report["peak_usage"][key] for key in amounts[1:]] == [200, 300, 300]
    operation = receiver.wait("operation", lambda message: message["operation"] == "after_generate")
    assert operation["dev"] == [{"i": 0, "alloc": 200 * MIB, "res": 300 * MIB}]  # the peak is not that of an operation


def test_gpu_manager_knows_nothing_before_cuda_and_does_not_initialise_it(receiver, run):
    program = run(
        """
import torch
from memledger.compat import gpu_manager, cleanup_gpu, aggressive_cleanup_gpu, monitor_gpu
print(gpu_manager.get_gpu_memory_info(), gpu_manager.check_memory_threshold(85), cleanup_gpu(), aggressive_cleanup_gpu())
print(gpu_manager.get_optimal_batch_size(base_batch_size=32))
monitor_gpu()
print(torch.cuda.is_initialized())
"""
    )
    expected = "{} False None None\n32\nGPU memory: unknown (this process uses no GPU)\nFalse\n"
    assert program.end() == (0, expected, "")


def test_gpus_that_the_program_does_not_use_get_no_context(receiver, run):
    program = run(
        """
import torch
from memledger import compat
def use_all():
    compat.cleanup_gpu()
    compat.aggressive_cleanup_gpu(True, wait=1)
    compat.monitor_gpu()
    compat.monitor_gpu_memory(1, reset=True)
    compat.print_gpu_info()
    return compat.get_gpu_info()["gpus"], compat.gpu_manager.get_gpu_memory_info(), sorted(torch.cuda.standin_contexts)
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
    assert "12.00 GB total, unknown used" in out and "12.00 GB total, 1.00 GB used" in out
    assert "GPU 1 (measured): allocated 1.00 GB" in out


def test_gpu_manager_follows_thresholds(receiver, run):
    program = run(
        """
import torch
from memledger.compat import gpu_manager, cleanup_gpu
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
from memledger.compat import MemoryTracker, cleanup_gpu
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
    code, out, err = run("--batch-size", arguments=("-m", "memledger.analyze"), environment={"STANDIN_GPUS": "a,b"}).end()
    assert code == 2 and "expected one argument" in err
    code, out, err = run("", arguments=("-c", "import sys; sys.argv[1:] = []; from memledger.analyze import main; main([])"), environment={"STANDIN_GPUS": "a,b"}).end()  # fmt: skip
    assert (code, err) == (0, "")
    assert "GPUs: 2" in out and "12.00 GB total" in out and "compute capability 8.6, 28 multiprocessors" in out
