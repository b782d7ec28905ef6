"""The names of the programs that memledger replaces, so that an import line is all that changes in them.

    from memledger.compat import MemoryTracker            # memory per component and operation, memory_usage.json
    from memledger.compat import gpu_manager, cleanup_gpu  # thresholds and cleanup
    from memledger.compat import print_memory_analysis     # estimates for a batch size

GB is 2**30 bytes and MB is 2**20 bytes, as in those programs. No context is made on a GPU that the program does not use, but to
measure a model there. Only facts of a GPU, such as its name, make torch initialise CUDA. As a program it prints the GPUs:
``python -m memledger.compat``.

Further arguments of the old functions are accepted and not used.
"""

import gc
import os
from typing import Any, Dict, Optional

from memledger import _nvml, _torch
from memledger._api import cleanup, save_report, start
from memledger._guard import never_raises
from memledger._peaks import peaks
from memledger._reporter import reporter, valid_name
from memledger._report import GIB
from memledger.analyze import (
    auto_select_batch_size,
    get_gpu_info,
    monitor_gpu_memory,
    print_gpu_info,
    print_memory_analysis,
    recommend_batch_size,
)

__all__ = [
    "GpuManager",
    "MemoryTracker",
    "aggressive_cleanup_gpu",
    "auto_select_batch_size",
    "cleanup_gpu",
    "get_gpu_info",
    "gpu_manager",
    "monitor_gpu",
    "monitor_gpu_memory",
    "print_gpu_info",
    "print_memory_analysis",
    "recommend_batch_size",
]


class MemoryTracker:
    """Records memory at points of a program, such as ``log_memory("model", "before_generate")``.

    Each record is reported to memledger, and kept for ``save_log``. Arguments of the old class that named where its scalars
    went (a ClearML task, a logger) are accepted and not used: dashboards read memledger's metrics.
    """

    def __init__(self, *_destinations: Any, output_dir: str = ".", **_options: Any) -> None:
        self.output_dir = output_dir
        start()

    @never_raises()
    def log_memory(self, component: str, operation: str, *_args: Any, **_kwargs: Any) -> None:
        """Records host memory, tensors and torch's cache; the file also has the highest of tensors so far."""
        devices = peaks.of_process()
        peak = _torch.total(devices, "alloc_peak")
        for device in devices or []:
            del device["alloc_peak"]  # not of this operation
        reporter.record((valid_name(component), valid_name(operation)), devices, peak)
        reporter.clean_if_due()

    def clear_memory(self, *_args: Any, **_kwargs: Any) -> None:
        """Collects garbage and gives torch's cache back to the GPU."""
        cleanup()

    def save_log(self, path: Optional[str] = None, *_args: Any, **_kwargs: Any) -> bool:
        """Writes ``memory_usage.json`` into ``output_dir``, or to ``path``. Returns whether it was written."""
        return bool(save_report(path or os.path.join(self.output_dir, "memory_usage.json")))


def cleanup_gpu(*_args: Any, **_kwargs: Any) -> Optional[int]:
    """Collects garbage and gives torch's cache back to the GPU. Returns the bytes, None without a GPU."""
    return cleanup()


@never_raises()
def aggressive_cleanup_gpu(*_args: Any, **_kwargs: Any) -> Optional[int]:
    """Like ``cleanup_gpu``, after waiting for the GPUs in use, and with the memory that other processes have released by CUDA IPC."""
    torch, devices = _torch.initialized(), _torch.devices()
    if torch is not None and devices:
        for device in devices:
            torch.cuda.synchronize(device["i"])
        gc.collect()
        torch.cuda.ipc_collect()
    return cleanup()


@never_raises()
def monitor_gpu(*_args: Any, **_kwargs: Any) -> None:
    """Prints the memory of the current GPU."""
    memory = gpu_manager.get_gpu_memory_info()
    if not memory:
        print("GPU memory: unknown (no GPU that this process uses or can see)")
        return
    print(
        f"GPU memory: {memory['used_memory_gb']:.2f} of {memory['total_memory_gb']:.2f} GB used"
        f" ({memory['memory_usage_percent']:.1f} %), {memory['free_memory_gb']:.2f} GB free;"
        f" this process: {memory['allocated_memory_gb']:.2f} GB in tensors,"
        f" {memory['cached_memory_gb']:.2f} GB in torch's cache"
    )


class GpuManager:
    """Memory of the current GPU, or of the first one in use, against thresholds. Use the one instance, ``gpu_manager``."""

    @never_raises(default=dict)
    def get_gpu_memory_info(self) -> Dict[str, float]:
        """Returns the memory of the whole GPU and of this process; nothing without a GPU, or where it is not known which one.

        ``total_memory_gb``, ``used_memory_gb``, ``free_memory_gb`` and ``memory_usage_percent`` are those of the GPU with all its
        processes; ``allocated_memory_gb`` and ``cached_memory_gb`` are those of torch in this process. Before the process uses a
        GPU they come from the driver.
        """
        torch, in_use = _torch.initialized(), [device["i"] for device in _torch.devices() or []]
        allocated = reserved = 0
        if torch is not None and in_use:
            current = torch.cuda.current_device()
            index = current if current in in_use else in_use[0]
            free, total = torch.cuda.mem_get_info(index)
            allocated, reserved = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
        else:
            memory = _nvml.memory_of_first_visible()
            if memory is None:
                return {}
            free, total = memory.free, memory.total
        return {
            "total_memory_gb": total / GIB,
            "used_memory_gb": (total - free) / GIB,
            "free_memory_gb": free / GIB,
            "memory_usage_percent": 100 * (total - free) / total,
            "allocated_memory_gb": allocated / GIB,
            "cached_memory_gb": (reserved - allocated) / GIB,
        }

    def check_memory_threshold(self, threshold_percent: float = 85) -> bool:
        """Returns whether the GPU is used by at least this much; False where that is unknown."""
        usage = self.get_gpu_memory_info().get("memory_usage_percent")
        return usage is not None and usage >= threshold_percent

    def get_optimal_batch_size(self, base_batch_size: int = 32) -> int:
        """Returns the batch size for the memory that is free now: a rule of thumb, not a measurement.

        All of it below 75 % usage, half from 75 %, a quarter from 85 %, an eighth from 90 %; at least 1. For measured
        advice: ``recommend_batch_size``.
        """
        usage = self.get_gpu_memory_info().get("memory_usage_percent", 0.0)
        divisor = 8 if usage >= 90 else 4 if usage >= 85 else 2 if usage >= 75 else 1
        return max(1, base_batch_size // divisor)


#: The manager that the old program imported.
gpu_manager = GpuManager()

if __name__ == "__main__":
    print_gpu_info()
