"""Facts about GPUs, and what a batch size needs: ``python -m memledger.analyze [MODULE:FUNCTION]``.

Every amount says what it is: *measured* (counted or observed), *estimated* (computed from a rule) or *unknown*. Activations are
measured with ``sample``, a function that makes the inputs for a batch size; without it they are unknown. MB is 2**20 and GB is
2**30 bytes.
"""

import argparse
import importlib
import os
import sys
from typing import Any, Callable, Dict, List, Optional

from memledger import _model_memory, _torch
from memledger._api import batch_search
from memledger._cuda_oom import is_cuda_oom
from memledger._guard import never_raises, record_error
from memledger._model_memory import Sample
from memledger._peaks import peaks
from memledger._records import MIB

GIB = 1 << 30
#: Share of the GPU's memory that a training should use at most; the rest is for the CUDA context, fragmentation and peaks.
SAFETY_MARGIN = 0.7
#: Shares of that memory.
RECOMMENDED_SHARE = 0.6
SAFE_SHARE = 0.4
#: The search for a batch size ends here.
MAX_BATCH_SIZE = 1 << 16


#: Why nothing is said about batch sizes.
NO_ACTIVATIONS = (
    "the model keeps no activations that grow with the batch: its parameters are frozen, or it checkpoints them. Measure on the GPU with"
    " auto_select_batch_size"
)


def _cuda() -> Optional[Any]:
    """Returns torch if it has a GPU. The facts of a GPU need CUDA to be initialised, but no context on it."""
    try:
        import torch

        return torch if torch.cuda.is_available() else None
    except ImportError:
        return None
    except Exception:  # a broken library of CUDA, for example
        record_error()
        return None


@never_raises(default=lambda: {"gpu_count": 0, "gpus": []}, warns=True)
def get_gpu_info(every_gpu: bool = False) -> Dict[str, Any]:
    """Returns ``gpu_count`` and, for each of ``gpus``, its facts.

    ``name``, ``total_memory_gb``, ``used_memory_gb``, ``free_memory_gb``, ``compute_capability`` and ``multiprocessors``. Used and free
    memory are None for GPUs that this process does not use: to read them makes a context there, of some hundred megabytes.
    ``every_gpu`` reads them nevertheless.
    """
    torch = _cuda()
    in_use = {device["i"] for device in _torch.devices() or []}
    gpus: List[Dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch is not None else 0):
        assert torch is not None
        properties = torch.cuda.get_device_properties(index)
        total, free = properties.total_memory, None
        if every_gpu or index in in_use:
            free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "total_memory_gb": total / GIB,
                "used_memory_gb": None if free is None else (total - free) / GIB,
                "free_memory_gb": None if free is None else free / GIB,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return {"gpu_count": len(gpus), "gpus": gpus}


@never_raises(warns=True)
def print_gpu_info(every_gpu: bool = False) -> None:
    """Prints the facts of each GPU; see ``get_gpu_info``."""

    def amount(value: Optional[float]) -> str:
        return "unknown" if value is None else f"{value:.2f} GB"

    info = get_gpu_info(every_gpu)
    print(f"GPUs: {info['gpu_count']}")
    for gpu in info["gpus"]:
        print(f"  GPU {gpu['index']}: {gpu['name']}")
        print(
            f"    memory (measured): {gpu['total_memory_gb']:.2f} GB total,"
            f" {amount(gpu['used_memory_gb'])} used, {amount(gpu['free_memory_gb'])} free"
        )
        print(f"    compute capability {gpu['compute_capability']}, {gpu['multiprocessors']} multiprocessors")


@never_raises(default=dict, warns=True)
def monitor_gpu_memory(device_id: int = 0, reset: bool = False) -> Dict[str, float]:
    """Returns and prints torch's memory on a device in GB; ``reset`` begins new peaks. Empty before CUDA is initialised."""
    torch = _torch.initialized()
    if torch is None:
        print("GPU memory: unknown (CUDA is not initialised in this process)")
        return {}
    if reset:
        torch.cuda.reset_peak_memory_stats(device_id)
    devices = [device for device in peaks.since_reset() or [] if device["i"] == device_id]
    fields = {"allocated_gb": "alloc", "allocated_peak_gb": "alloc_peak", "reserved_gb": "res", "reserved_peak_gb": "res_peak"}
    result = {}
    for key, field in fields.items():
        value = _torch.total(devices, field)
        if value is not None:
            result[key] = value / GIB
    print(f"GPU {device_id} (measured): " + ", ".join(f"{key[:-3]} {value:.2f} GB" for key, value in result.items()))
    return result


def _power_of_two(number: float) -> int:
    """Returns the largest power of two that is not larger; 0 below 1."""
    return 1 << (int(number).bit_length() - 1) if number >= 1 else 0


def recommendations(available: float, fixed: int, each: int) -> Dict[str, int]:
    """Returns the batch sizes that fit into all, 60 % and 40 % of the memory, powers of two; 0 if none fits.

    ``available`` are the bytes that may be used, ``fixed`` those that do not grow with the batch, and ``each`` those of a sample.
    Raises ValueError if that is 0.
    """
    if each <= 0:
        raise ValueError(NO_ACTIVATIONS)
    shares = {"maximum": 1.0, "recommended": RECOMMENDED_SHARE, "safe": SAFE_SHARE}
    return {name: _power_of_two(min((share * available - fixed) / each, MAX_BATCH_SIZE)) for name, share in shares.items()}


def recommend_batch_size(
    model: Any,
    gpu_memory_gb: float,
    safety_margin: float = SAFETY_MARGIN,
    mixed_precision: bool = False,
    sample: Optional[Sample] = None,
    optimizer: Any = None,
) -> Dict[str, int]:
    """Returns the ``maximum``, ``recommended`` and ``safe`` batch size, all powers of two; 0: none fits.

    ``safety_margin`` is the share of ``gpu_memory_gb`` (GB) that may be used. The recommended size fits into 60 % of that memory, the
    safe one into 40 %, as in ``memledger advise``. With ``mixed_precision`` half of the measured
    activations is the estimate. Raises ValueError without ``sample``, and for a model that keeps no activations: nothing can
    be said about them then. The model stays as it is.
    """
    if sample is None:
        raise ValueError("recommend_batch_size needs sample=, a function that makes the model's inputs for a batch size")
    each, constant = _model_memory.measure_activations(model, sample, (2, 4), mixed_precision)
    fixed = _model_memory.of_model(model, optimizer).fixed + constant
    return recommendations(gpu_memory_gb * GIB * safety_margin, fixed, each)


@never_raises(warns=True)
def print_memory_analysis(
    model: Any,
    batch_size: int,
    device_id: int = 0,
    mixed_precision: bool = False,
    sample: Optional[Sample] = None,
    optimizer: Any = None,
) -> None:
    """Prints what a model needs with a batch size, what the GPU has, and the recommendations with the current one marked."""
    memory = _model_memory.of_model(model, optimizer)

    def line(name: str, amount: Optional[int], kind: str) -> None:
        print(f"  {name:<12}" + (f"{amount / MIB:12.2f} MB  {kind}" if amount is not None else f"{'unknown':>12}     {kind}"))

    print(f"Memory of the model with batch size {batch_size}:")
    line("parameters", memory.parameters, "measured")
    line("buffers", memory.buffers, "measured")
    line("gradients", memory.gradients, "computed: one value per trained parameter, whether it exists yet or not")
    if memory.optimizer is None:
        line("optimizer", memory.optimizer_estimate, "estimated: two values per trained parameter, as in Adam")
    else:
        line("optimizer", memory.optimizer, "measured")
    if sample is None:
        line("activations", None, "give sample=, which makes the inputs for a batch size")
        print("  The total is unknown without activations.")
        return
    each, constant = _model_memory.measure_activations(model, sample, (2, 4), mixed_precision)
    activations = each * batch_size + constant
    measured = "half of what was measured" if mixed_precision else "measured"
    line("activations", activations, f"estimated: {each} bytes per sample, {measured} with batch sizes 2 and 4")
    line("total", memory.fixed + activations, "estimated: sum of the above")
    torch = _cuda()
    if torch is None:
        print("No GPU: the recommendations need its memory; see recommend_batch_size(gpu_memory_gb=...).")
        return
    if each == 0:
        print(f"Batch sizes: unknown; {NO_ACTIVATIONS}.")
        return
    total = torch.cuda.get_device_properties(device_id).total_memory
    _print_recommendations(recommendations(total * SAFETY_MARGIN, memory.fixed + constant, each), total, batch_size)


def _print_recommendations(sizes: Dict[str, int], total: int, current: int) -> None:
    print(f"Batch sizes within {SAFETY_MARGIN:.0%} of {total / GIB:.2f} GB (estimated):")
    for name, size in sizes.items():
        print(f"  {name:<12}{size:>8}" + ("  <- current" if size == current else ""))
    if current not in sizes.values():
        print(f"  {'current':<12}{current:>8}" + ("  over the maximum" if current > sizes["maximum"] else ""))


def auto_select_batch_size(model: Any, device: Any, start_batch: int = 1, sample: Optional[Sample] = None) -> int:
    """Returns the largest batch size, doubling from ``start_batch``, whose forward and backward pass fits on ``device``.

    Measured by running them: on a GPU until one runs out of memory or would use more than 70 % of it, with two values for each
    trained parameter for the optimizer, as in Adam. It is no part of the training's peaks and out-of-memory errors: see
    ``memledger.batch_search``. On the CPU, where the host would be driven out of memory instead, the activations are measured against the available
    memory. The model is then on its device again, and as it was. 0: not even ``start_batch`` fits. Of DistributedDataParallel the model
    within is measured, so that no rank waits for another; ranks may find different sizes: use the smallest. Raises ValueError without
    ``sample``, for a ``start_batch`` below 1, and on the CPU for a model that keeps no activations.
    """
    if sample is None:
        raise ValueError("auto_select_batch_size needs sample=, a function that makes the model's inputs for a batch size")
    if start_batch < 1:
        raise ValueError(f"start_batch is {start_batch}, and must be at least 1")
    if type(model).__name__ == "DistributedDataParallel":
        model = model.module
    with batch_search(), _model_memory.unchanged(model, device):
        model = model.to(device)
        fits = _fits_gpu if str(device).startswith("cuda") else _host_check(model, sample)
        best, size = 0, start_batch
        while size <= MAX_BATCH_SIZE and fits(model, device, sample, size):
            best, size = size, 2 * size
        return best


def _fits_gpu(model: Any, device: Any, sample: Sample, size: int) -> bool:
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    try:
        _run_step(model, device, sample, size)
        peak = torch.cuda.max_memory_reserved(device)
    except RuntimeError as error:  # of libraries such as cuBLAS too
        if not is_cuda_oom(error):
            raise
        peak = None
    # not before: the exception holds the tensors of the step
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    total, optimizer = torch.cuda.get_device_properties(device).total_memory, _model_memory.of_model(model).optimizer_estimate
    return peak is not None and bool(peak + optimizer <= SAFETY_MARGIN * total)


def _run_step(model: Any, device: Any, sample: Sample, size: int) -> None:
    outputs = _model_memory.call(model, _model_memory.moved(sample(size), device))
    sum(tensor.float().sum() for tensor in _model_memory.tensors_in(_values(outputs))).backward()


def _host_check(model: Any, sample: Sample) -> Callable[[Any, Any, Sample, int], bool]:
    """Returns a check whether a batch size fits into the host's available memory, from one measurement."""
    each, constant = _model_memory.measure_activations(model, sample, (2, 4))
    if each == 0:
        raise ValueError(NO_ACTIVATIONS)
    memory = _model_memory.of_model(model)
    fixed = constant + memory.gradients + memory.optimizer_estimate
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) * 1024
    return lambda _model, _device, _sample, size: each * size + fixed <= SAFETY_MARGIN * available


def _values(outputs: Any) -> Any:
    """Returns the values of a dict-like output, such as those of transformers."""
    return list(outputs.values()) if hasattr(outputs, "values") and not hasattr(outputs, "element_size") else outputs


def main(arguments: Optional[List[str]] = None) -> int:
    """Prints the GPUs and, of a model, what a batch size needs."""
    parser = argparse.ArgumentParser(prog="python -m memledger.analyze", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="?", metavar="MODULE:FUNCTION", help="a function that returns a model, and a function that makes its inputs for a batch size")
    parser.add_argument("--batch-size", type=int, default=1, help="what this batch size needs (default: 1)")
    parser.add_argument("--auto-batch-size", action="store_true", help="search the largest batch size")
    options = parser.parse_args(arguments)
    if options.auto_batch_size and options.target is None:
        parser.error("--auto-batch-size needs MODULE:FUNCTION")
    print_gpu_info(every_gpu=True)
    if options.target is None:
        return 0
    try:
        model, sample = _load(options.target)
    except Exception as error:
        print(f"{options.target}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print_memory_analysis(model, options.batch_size, sample=sample)
    if options.auto_batch_size:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            size = auto_select_batch_size(model, device, 1, sample)
        except ValueError as error:  # nothing grows with the batch
            print(f"{options.target}: {error}", file=sys.stderr)
            return 1
        print(f"Largest batch size on {device} (measured): {size}")
    return 0


def _load(target: str) -> Any:
    """Returns what a function ``MODULE:FUNCTION`` returns, with modules of the working directory too."""
    module, separator, function = target.partition(":")
    if not separator:
        raise ValueError("expected MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    model, sample = getattr(importlib.import_module(module), function)()
    return model, sample


if __name__ == "__main__":
    raise SystemExit(main())
