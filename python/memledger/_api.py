"""The functions of ``import memledger``."""

import gc
from contextlib import ContextDecorator
from typing import Any, Dict, Optional

from memledger import _host, _torch
from memledger._guard import never_raises
from memledger._reporter import reporter


@never_raises()
def start() -> None:
    """Starts to report the memory of this process. Further calls change nothing.

    Not needed where PYTHONPATH has memledger's directory: a program then reports once it has initialised CUDA.
    """
    reporter.start()


@never_raises()
def stop() -> None:
    """Sends what is left and stops reporting, within half a second. ``start`` begins again."""
    reporter.stop()


@never_raises()
def step(n: int = 1, samples: Optional[int] = None, batch_size: Optional[int] = None) -> None:
    """Counts ``n`` training steps, and the training samples in them.

    Without ``samples``, each step has ``batch_size`` of them; with neither they are not counted.
    """
    reporter.count_step(n, samples, batch_size)
    reporter.start()


class track(ContextDecorator):
    """Records the memory of an operation of a component, as a context or a decorator.

        with memledger.track("model", "generate"):
            ...

    Host memory, tensors and torch's cache are those at the end of the operation. The peak is exact if torch's peak rose
    within the operation, and absent otherwise: torch has one peak for the whole process, which is not reset here because
    the program may use it. Names have 1 to 64 of the characters A-Z a-z 0-9 _ . : -
    """

    def __init__(self, component: str, operation: str) -> None:
        self.component = component
        self.operation = operation
        self._peak_before: Optional[int] = None

    def _recreate_cm(self) -> "track":
        return track(self.component, self.operation)  # a decorated function may call itself

    @never_raises()
    def __enter__(self) -> "track":
        self._peak_before = _torch.total(_torch.devices(), "alloc_peak")
        reporter.start()
        return self

    @never_raises()
    def __exit__(self, *exception: Any) -> None:
        devices = _torch.devices()
        peak, before = _torch.total(devices, "alloc_peak"), self._peak_before
        rose = peak is not None and peak > (before or 0)
        reporter.note(self.component, self.operation, peak if rose else None, devices)


@never_raises(default=dict)
def peak() -> Dict[str, int]:
    """Returns the highest memory of this process so far, in bytes.

    ``cpu_ram_bytes`` is resident memory; ``gpu_allocated_bytes`` and ``gpu_reserved_bytes`` are torch's, summed over the
    devices, and missing without a GPU.
    """
    peaks = {"cpu_ram_bytes": _host.peak_rss_bytes()}
    devices = _torch.devices()
    for key, field in (("gpu_allocated_bytes", "alloc_peak"), ("gpu_reserved_bytes", "res_peak")):
        value = _torch.total(devices, field)
        if value is not None:
            peaks[key] = value
    return peaks


@never_raises(default=bool)
def save_report(path: str = "memory_usage.json") -> bool:
    """Writes what ``track`` recorded, with the peaks, as JSON. Returns whether the file was written."""
    reporter.records.save(path)
    return True


@never_raises()
def cleanup() -> Optional[int]:
    """Collects garbage and gives torch's cache back to the GPU. Returns how many bytes the cache shrank.

    It waits for the GPU and makes the next allocations slower, and torch itself gains no memory by it: it helps other
    processes on the same GPU. None without a GPU.
    """
    gc.collect()
    torch = _torch.initialized()
    before = _torch.total(_torch.devices(), "res")
    if torch is None:
        return None
    torch.cuda.empty_cache()
    after = _torch.total(_torch.devices(), "res")
    return before - after if before is not None and after is not None else None


def load_ipython_extension(ipython: Any) -> None:
    """Starts to report from a notebook: ``%load_ext memledger``."""
    start()
