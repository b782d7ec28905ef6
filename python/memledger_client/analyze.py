"""Facts about GPUs, and what a batch size needs: ``python -m memledger_client.analyze [MODULE:FUNCTION]``.

What a training takes is measured on the GPU, by steps with small batches that leave the model as it was; without a GPU it is
estimated on the CPU, and the text says so. MB is 2**20 and GB is 2**30 bytes.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from memledger_client import _inputs, _model_memory, _nvml, _torch
from memledger_client._api import batch_search
from memledger_client._bounded import HostMemoryError
from memledger_client._cuda_oom import is_cuda_oom
from memledger_client._guard import never_raises, record_error, warn_once
from memledger_client._host_memory import HostMemory, host_memory
from memledger_client._model_memory import Sample
from memledger_client._peaks import peaks
from memledger_client._records import MIB
from memledger_client._report import GIB, SAFETY_MARGIN, Report, print_report, gpu_budget
from memledger_client._training_memory import (
    MAX_BATCH_SIZE,
    PROBE_SIZES,
    Loss,
    TrainingMemory,
    EstimateError,
    NothingFitsError,
    estimate_on_cpu,
    fit,
    fits_on_cpu,
    on_cpu,
    precision_of,
    steps_on_gpu,
    trainable,
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


@never_raises(default=list, warns=True)
def get_gpu_info() -> List[Dict[str, Any]]:
    """Returns the facts of each GPU.

    ``index``, ``name``, ``total_memory_gb``, ``used_memory_gb``, ``free_memory_gb``, ``compute_capability`` and ``multiprocessors``. Used
    memory is that of all processes, as the driver counts it, so that no context is made; None where the driver does not say, and
    before torch 2.5.
    """
    torch = _cuda()
    if torch is None:
        return []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    uuids = [str(getattr(properties, "uuid", "")) for properties in every]
    memory = _nvml.memory_of(uuids)
    in_use = {device["i"] for device in _torch.devices() or []}
    gpus: List[Dict[str, Any]] = []
    for index, properties in enumerate(every):
        of_driver, used, free = memory.get(uuids[index]), None, None
        total = properties.total_memory
        if of_driver is not None:
            total, used, free = of_driver
        elif index in in_use:
            free, total = torch.cuda.mem_get_info(index)
            used = total - free
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "total_memory_gb": total / GIB,
                "used_memory_gb": None if used is None else used / GIB,
                "free_memory_gb": None if free is None else free / GIB,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return gpus


@never_raises(warns=True)
def print_gpu_info() -> None:
    """Prints the facts of each GPU; see ``get_gpu_info``."""
    gpus = get_gpu_info()
    of_driver = 0 if gpus else _nvml.count()
    print(f"GPUs: {of_driver}, by the driver; torch has none here" if of_driver else f"GPUs: {len(gpus)}")
    for gpu in gpus:
        _print_gpu(gpu)


def _print_gpu(gpu: Dict[str, Any]) -> None:
    total, used = gpu["total_memory_gb"], gpu["used_memory_gb"]
    state = "used: unknown" if used is None else f"{used:.2f} GB used ({used / total:.0%}), {gpu['free_memory_gb']:.2f} GB free"
    print(f"  GPU {gpu['index']}: {gpu['name']}")
    print(f"    memory: {total:.2f} GB total, {state}")
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


def _gpu_of(model: Any, device: Any = None) -> Optional[Any]:
    """Returns the GPU to measure on, with its index: ``device``, the model's, or the current one. None without."""
    torch = _cuda()
    if torch is None:
        return None
    if device is None:
        first = next(model.parameters(), None)
        device = first.device if first is not None and first.device.type == "cuda" else "cuda"
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index) if found.type == "cuda" else None


def training_memory(
    model: Any, sample: Optional[Sample] = None, mixed_precision: Any = False, optimizer: Any = None, loss: Optional[Loss] = None, device: Any = None
) -> TrainingMemory:
    """Returns what training steps of a model take in bytes, by batch size: ``training_memory(model).at(32)``.

    On the GPU ``device``, else the model's, else the current one, it is measured: steps with small batches in train mode, with ``loss``
    (a function of what the model returns; else the ``loss`` of that, else its sum), mixed precision where it is asked for (True, "bf16",
    "fp16"), and an optimizer like ``optimizer``, else AdamW. Without a GPU it is estimated. Afterwards the model is as it was. A measurement
    is a ``batch_search``: at its end memledger forgets the GPU peaks of the run so far, so make it before the training.

    ``sample`` makes inputs for a batch size: a tensor, a tuple, or a dict by name. Without it they are like those of the first batch after a
    call without inputs, or what the model has with it; ValueError if there are none. EstimateError, a ValueError, says why a model
    cannot be measured.
    """
    return _measure(model, sample, mixed_precision, optimizer, loss, _gpu_of(model, device)).memory


class _Measurement(NamedTuple):
    """What was measured of a model."""

    memory: TrainingMemory
    #: Bytes with the batch size of the program, where that was measured itself.
    of_batch: Optional[int]
    #: Bytes of the inputs of a sample.
    input_bytes: int
    #: Of mixed precision; empty without.
    precision: str


def _measure(
    model: Any, sample: Optional[Sample], mixed_precision: Any, optimizer: Any, loss: Optional[Loss], gpu: Any, batch_size: int = 0
) -> _Measurement:
    is_compiled = hasattr(model, "_orig_mod")
    model = trainable(model)
    sample, inputs = (sample, "") if sample is not None else _inputs.sample_of(model)
    precision = precision_of(mixed_precision, gpu is not None)
    of_batch = None
    with _explained(PROBE_SIZES[0]):
        with _model_memory.unchanged(model):
            input_bytes = sum(map(_model_memory.tensor_bytes, _model_memory.tensors_in(sample(PROBE_SIZES[0])))) // PROBE_SIZES[0]
        if gpu is None:
            memory = estimate_on_cpu(model, sample, optimizer, loss, precision)
        else:
            available = gpu_budget(gpu, model, optimizer).available
            with batch_search(), steps_on_gpu(model, gpu, sample, optimizer, loss, precision) as steps:
                memory = fit(steps, _model_memory.of_model(model).gradients, available)
                if batch_size and memory.at(batch_size) <= min(available, steps.limit):
                    of_batch = _highest(steps, batch_size)
    source = " ".join(filter(None, (memory.source, inputs, "without torch.compile" if is_compiled else "")))
    name = "" if precision is None else str(precision).replace("torch.", "")
    return _Measurement(memory._replace(source=source), of_batch, input_bytes, name)


@contextlib.contextmanager
def _explained(batch_size: int) -> Iterator[None]:
    """Says of errors of a step that they are those of the measurement, with the model and the inputs that it was given."""
    try:
        yield
    except EstimateError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_cuda_oom(error):
            raise EstimateError(f"not even a batch of {batch_size} fits into what is free on the GPU") from error
        raise EstimateError(f"a training step for the measurement failed: {type(error).__name__}: {error}") from error


def _highest(steps: Any, batch_size: int) -> Optional[int]:
    """Returns the highest bytes of steps with a batch size; None if the memory does not suffice."""
    try:
        return max(steps.measure(batch_size))
    except HostMemoryError:  # its inputs are made in the host's memory
        return None
    except RuntimeError as error:  # of libraries such as cuBLAS too
        if not is_cuda_oom(error):
            raise
        return None


def recommend_batch_size(
    model: Any,
    gpu_memory_gb: float,
    safety_margin: float = SAFETY_MARGIN,
    mixed_precision: Any = False,
    sample: Optional[Sample] = None,
    optimizer: Any = None,
    loss: Optional[Loss] = None,
) -> Dict[str, int]:
    """Returns the ``maximum``, ``recommended`` and ``safe`` batch size for a GPU, all powers of two; 0: none fits.

    ``safety_margin`` is the share of ``gpu_memory_gb`` (GB) that may be used; the recommended size fits into 60 % of that memory, the safe
    one into 40 %, as in ``memledger advise``. For what else there is, and for errors, see ``training_memory``.
    """
    memory = training_memory(model, sample, mixed_precision, optimizer, loss)
    if sample is None:
        warn_once("sample", f"batch sizes {memory.source}", stacklevel=3)
    return memory.sizes(gpu_memory_gb * GIB * safety_margin)


@never_raises(warns=True)
def print_memory_analysis(
    model: Any,
    batch_size: int,
    device_id: Optional[int] = None,
    mixed_precision: Any = False,
    sample: Optional[Sample] = None,
    optimizer: Any = None,
    loss: Optional[Loss] = None,
) -> None:
    """Prints what a training with a batch size takes, what the GPU has, and which batch sizes fit; see ``training_memory``.

    ``device_id`` is the index of the GPU; without it the model's, or the current one.
    """
    _print_analysis(model, batch_size, device_id, mixed_precision, sample, optimizer, loss)


def _print_analysis(
    model: Any, batch_size: int, device_id: Optional[int], mixed_precision: Any, sample: Optional[Sample], optimizer: Any = None, loss: Optional[Loss] = None
) -> None:
    gpu = _gpu_of(model, None if device_id is None else f"cuda:{device_id}")
    try:
        found = _measure(model, sample, mixed_precision, optimizer, loss, gpu, batch_size)
    except ValueError as error:
        print_report(Report(model, batch_size, None, None, gpu, optimizer), unknown=str(error))
        return
    without = None
    if found.precision:  # what it saves
        try:
            without = _measure(model, sample, False, optimizer, loss, gpu).memory.at(batch_size)
        except ValueError:
            pass  # it does not fit without
    print_report(Report(model, batch_size, found.memory, found.of_batch, gpu, optimizer, found.precision, found.input_bytes, without))


def auto_select_batch_size(
    model: Any,
    device: Any,
    start_batch: int = 1,
    sample: Optional[Sample] = None,
    optimizer: Any = None,
    loss: Optional[Loss] = None,
    mixed_precision: Any = False,
) -> int:
    """Returns the largest batch size whose training steps fit on ``device``: ``start_batch`` doubled, or halved until one fits; 0: none does.

    On a GPU each is measured, with its optimizer's step: until the next would take more than 70 % of what others leave of the GPU. It is no part
    of the training's peaks: see ``memledger_client.batch_search``. On the CPU the estimate is compared with 70 % of the memory that is left, the
    least that the host and the cgroups of the process have, and two steps with the answer are tried; a warning has that limit, and what it leaves. The
    model is then on its device again, and as it was. Of DistributedDataParallel the model within is measured, so that no rank waits for
    another; ranks may find different sizes: use the smallest. Raises ValueError for a ``start_batch`` below 1; for more see ``training_memory``.
    """
    found = _search(model, device, start_batch, sample, optimizer, loss, mixed_precision)
    if found.words:
        warn_once(found.words, f"batch size {found.batch_size}, {found.words}", stacklevel=3)
    return found.batch_size


class _Found(NamedTuple):
    """The result of a search for a batch size."""

    batch_size: int
    #: What it depends on, where that is no measurement with inputs of the program.
    words: str
    #: Where it is for the CPU.
    host: Optional[HostMemory] = None


def _search(
    model: Any, device: Any, start_batch: int, sample: Optional[Sample], optimizer: Any, loss: Optional[Loss], mixed_precision: Any
) -> _Found:
    if start_batch < 1:
        raise ValueError(f"start_batch is {start_batch}, and must be at least 1")
    model = trainable(model)
    sample, inputs = (sample, "") if sample is not None else _inputs.sample_of(model)
    gpu = _gpu_of(model, device)
    precision = precision_of(mixed_precision, gpu is not None)
    with _explained(start_batch):
        if gpu is not None:
            available = gpu_budget(gpu, model, optimizer).available
            with batch_search(), steps_on_gpu(model, gpu, sample, optimizer, loss, precision) as steps:
                return _Found(_double(steps, start_batch, min(available, steps.limit)), inputs if "assumed" in inputs else "")
        return _search_on_cpu(model, start_batch, sample, optimizer, loss, precision, inputs)


def _search_on_cpu(
    model: Any, start_batch: int, sample: Sample, optimizer: Any, loss: Optional[Loss], precision: Any, inputs: str
) -> _Found:
    """Compares the estimate with the host memory that is left. It has what the model and its optimizer hold already."""
    host = host_memory()
    try:
        memory = estimate_on_cpu(model, sample, optimizer, loss, precision)
    except NothingFitsError as error:
        return _Found(0, str(error), host)
    if host is None:
        raise EstimateError("the memory of the host cannot be read: /proc/meminfo")
    held = sum(_model_memory.bytes_on(kind, model, optimizer) for kind in {each.device for each in model.parameters()} if kind.type == "cpu")
    available = SAFETY_MARGIN * host.left
    memory.largest(available)  # raises where the memory does not grow

    def fits(size: int) -> bool:
        return on_cpu(memory, model, size) - held <= available

    size = start_batch
    while size > 1 and not fits(size):
        size //= 2
    while 2 * size <= MAX_BATCH_SIZE and fits(2 * size):
        size *= 2
    while size > 1 and fits(size) and not fits_on_cpu(model, sample, optimizer, loss, precision, size):
        size //= 2
    words = f"estimated within {SAFETY_MARGIN:.0%} of what is left: {host}"
    if not fits(size) or (size == 1 and not fits_on_cpu(model, sample, optimizer, loss, precision, 1)):
        needed = (on_cpu(memory, model, size) - held) / MIB
        size, words = 0, f"not even 1 fits {words}; a step with it takes {needed:.2f} MB more than the process holds now"
    return _Found(size, "; ".join(filter(None, (words, inputs))), host)


def _double(steps: Any, start_batch: int, available: float) -> int:
    """Measures doubled batch sizes until one takes too much, or the next one would; halved ones where the first does."""
    best, size, before = 0, start_batch, 0
    while size <= MAX_BATCH_SIZE:
        taken = _highest(steps, size)
        if taken is None or taken > available:
            return best or _halve(steps, size // 2, available)
        # at least as much more as the last doubling brought, twice
        if best and taken + 2 * (taken - before) > available:
            return size
        best, size, before = size, 2 * size, taken
    return best


def _halve(steps: Any, size: int, available: float) -> int:
    while size >= 1:
        taken = _highest(steps, size)
        if taken is not None and taken <= available:
            return size
        size //= 2
    return 0


def main(arguments: Optional[List[str]] = None) -> int:
    """Prints the GPUs and, of a model, what a batch size needs."""
    parser = argparse.ArgumentParser(prog="python -m memledger_client.analyze", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="a function that returns a model, and a function that makes its inputs for a batch size; or the model alone",
    )
    parser.add_argument("--batch-size", type=int, default=None, help="what this batch size needs (default: 1)")
    parser.add_argument("--auto-batch-size", action="store_true", help="search the largest batch size")
    parser.add_argument("--mixed-precision", action="store_true", help="with autocast")
    parser.add_argument("--json", action="store_true", help="one JSON document, in bytes")
    options = parser.parse_args(arguments)
    if options.auto_batch_size and options.target is None:
        parser.error("--auto-batch-size needs MODULE:FUNCTION")
    if options.batch_size is not None and options.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    if options.batch_size is not None and options.target is None:
        parser.error("--batch-size needs MODULE:FUNCTION")
    options.batch_size = options.batch_size or 1
    try:
        model, sample = _load(options.target) if options.target is not None else (None, None)
    except Exception as error:
        print(f"{options.target}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    try:
        found = _as_json(model, sample, options) if options.json else _print_all(model, sample, options)
    except Exception as error:  # nothing grows with the batch, for example
        print(f"{options.target}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found))
    return 0


def _print_all(model: Any, sample: Optional[Sample], options: Any) -> None:
    print_gpu_info()
    if model is None:
        return
    _print_analysis(model, options.batch_size, None, options.mixed_precision, sample)
    if options.auto_batch_size:
        device = "cuda" if _cuda() is not None else "cpu"
        found = _search(model, device, 1, sample, None, None, options.mixed_precision)
        how = "measured" if device == "cuda" else "estimated"
        print(f"Largest batch size on {device} ({how}): {found.batch_size}" + (f", {found.words}" if found.words else ""))


def _as_json(model: Any, sample: Optional[Sample], options: Any) -> Dict[str, Any]:
    document: Dict[str, Any] = {"gpus": get_gpu_info()}
    if model is None:
        return document
    gpu = _gpu_of(model, "cuda")
    found = _measure(model, sample, options.mixed_precision, None, None, gpu, options.batch_size)
    counted = _model_memory.of_model(model)
    document.update(
        batch_size=options.batch_size,
        highest_bytes=found.memory.at(options.batch_size) if found.of_batch is None else found.of_batch,
        source=found.memory.source,
        parameters_bytes=counted.parameters,
        buffers_bytes=counted.buffers,
        gradients_bytes=counted.gradients,
    )
    if gpu is not None:
        document["batch_sizes"] = found.memory.sizes(gpu_budget(gpu, model).available)
    if options.auto_batch_size:
        found_size = _search(model, gpu or "cpu", 1, sample, None, None, options.mixed_precision)
        document["auto_batch_size"] = found_size.batch_size
        if found_size.host is not None:
            host = found_size.host
            document["host_memory"] = {"left_bytes": host.left, "limit_bytes": host.limit, "limit_of": host.owner}
    return document


def _load(target: str) -> Any:
    """Returns what a function ``MODULE:FUNCTION`` returns, with modules of the working directory too."""
    module, separator, function = target.partition(":")
    if not separator:
        raise ValueError("expected MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), function)()
    return found if isinstance(found, tuple) else (found, None)


if __name__ == "__main__":
    raise SystemExit(main())
