"""The names of the programs that memledger replaces, so that an import line is all that changes in them.

    from memledger_client.compat import MemoryTracker             # memory per component and operation, memory_usage.json
    from memledger_client.compat import gpu_manager, cleanup_gpu  # thresholds and cleanup
    from memledger_client.compat import print_memory_analysis     # estimates for a batch size

GB is 2**30 bytes and MB is 2**20 bytes, as in those programs. No context is made on a GPU that the program does not use, but to
measure a model there. Only facts of a GPU, such as its name, make torch initialise CUDA. As a program it prints the GPUs:
``python -m memledger_client.compat``.

Further arguments of the old functions are accepted and not used.
"""

import gc
import os
from typing import Any, Dict, Optional

from memledger_client import _nvml, _torch
from memledger_client._api import cleanup, save_records, start
from memledger_client._guard import never_raises, warn_once
from memledger_client._peaks import peaks
from memledger_client._records import Record, Records, as_entry
from memledger_client._reporter import reporter
from memledger_client._report import GIB
from memledger_client.analyze import (
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


#: Arguments of the old class that name the directory of its file.
DIRECTORIES = ("output_dir", "save_dir", "log_dir", "output_path", "save_path", "directory")
#: Names of its file, and where the experiments have theirs.
FILE_NAME, EXPERIMENTS = "memory_usage.json", "outputs"
#: Series of its scalars.
SERIES = ("cpu_ram_used_mb", "gpu_ram_used_mb", "gpu_ram_peak_mb", "reserved_gpu_ram_mb")


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _file_in(place: Any) -> str:
    """Returns the path of the file: ``place`` itself if it names a file, else in that directory."""
    path = os.fspath(place)
    is_file = path.endswith(".json") and not os.path.isdir(path)
    return path if is_file else os.path.join(path, FILE_NAME)


class MemoryTracker:
    """Records memory at points of a program, such as ``log_memory("model", "before_generate")``, each tracker its own.

    Each record is reported to memledger, and kept for ``save_log``. The file goes where the arguments say: to a directory (the first
    argument that is a path, ``output_dir``, ``save_dir``, ``log_dir``), else to ``outputs/NAME`` with ``experiment_name``, else to the working
    directory. A ClearML task or logger among the arguments gets the scalars ``memory/COMPONENT``. Other arguments are not used, with a warning.
    """

    @never_raises()
    def __init__(self, *destinations: Any, experiment_name: Optional[str] = None, **options: Any) -> None:
        self.records, self.output_dir = Records(), "."
        self._counts: Dict[str, int] = {}
        self._logger: Any = None
        places = [options.pop(name, None) for name in DIRECTORIES] + [each for each in destinations if _is_path(each)]
        given = [each for each in places if each is not None]
        others = {**{f"argument {number}": each for number, each in enumerate(destinations, 1) if not _is_path(each)}, **options}
        loggers = [each for each in others.values() if hasattr(each, "report_scalar") or hasattr(each, "get_logger")]
        self._logger = loggers[0] if loggers else None
        for name, value in options.items():
            if value is not None and all(value is not logger for logger in loggers):
                warn_once(f"MemoryTracker {name}", f"MemoryTracker: {name} is not used", stacklevel=4)
        name = str(experiment_name) if experiment_name is not None else None
        # a name that is a path says itself where
        named = None if name is None else name if os.path.dirname(name) else os.path.join(EXPERIMENTS, name)
        self.output_dir = os.fspath(given[0]) if given else named or "."
        start()

    @never_raises()
    def log_memory(self, component: str, operation: str, *_args: Any, **_kwargs: Any) -> None:
        """Records host memory, tensors and torch's cache; the highest of tensors is torch's, since the program last reset it."""
        devices = peaks.since_reset()
        record = reporter.memory_now((str(component), str(operation)), devices, _torch.total(devices, "alloc_peak"))
        self.records.add(record)
        for device in devices or []:
            device.pop("alloc_peak", None)  # not of this operation
        reporter.record(record, devices)
        self._report_scalars(record)
        reporter.clean_if_due()

    @never_raises()
    def _report_scalars(self, record: Record) -> None:
        if self._logger is None:
            return
        logger = self._logger if hasattr(self._logger, "report_scalar") else self._logger.get_logger()
        number = self._counts[record.component] = self._counts.get(record.component, 0) + 1
        entry = as_entry(record)
        for series in SERIES:
            if entry[series] is not None:
                logger.report_scalar(f"memory/{record.component}", series, entry[series], number)

    def clear_memory(self, *_args: Any, **_kwargs: Any) -> None:
        """Collects garbage and gives torch's cache back to the GPU."""
        cleanup_gpu()

    @never_raises(default=bool)
    def save_log(self, path: Any = None, *_args: Any, **options: Any) -> bool:
        """Writes ``memory_usage.json`` into ``output_dir``, or into another directory or file. Returns whether it was written."""
        given = [options.get(name) for name in DIRECTORIES if options.get(name) is not None]
        place = path if path is not None else given[0] if given else self.output_dir
        return save_records(self.records, _file_in(place))


@never_raises()
def _at_safe_point() -> None:
    """Answers a request of memledger: the loop of a service calls these functions between its requests, and has no steps."""
    reporter.start_unless_stopped()
    reporter.clean_if_due()


def cleanup_gpu(*_args: Any, **_kwargs: Any) -> Optional[int]:
    """Collects garbage and gives torch's cache back to the GPU. Returns the bytes, None without a GPU. A safe point, as ``step`` is."""
    _at_safe_point()
    return cleanup()


@never_raises()
def aggressive_cleanup_gpu(*_args: Any, **_kwargs: Any) -> Optional[int]:
    """Like ``cleanup_gpu``, after waiting for the GPUs in use, and with the memory that other processes have released by CUDA IPC."""
    _at_safe_point()
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
        """Returns whether the GPU is used by at least this much; False where that is unknown. A safe point, as ``step`` is."""
        _at_safe_point()
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
