"""What a training step takes by batch size: measured on the GPU, and estimated on the CPU where there is none."""

import contextlib
import inspect
import math
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from memledger_client import _model_memory
from memledger_client._bounded import HostMemoryError, bounded
from memledger_client._cuda_oom import is_cuda_oom
from memledger_client._host_memory import host_memory
from memledger_client._model_memory import Sample
from memledger_client._peaks import peaks

#: Makes the number that a training minimizes, from what the model returned.
Loss = Callable[[Any], Any]

#: The two batch sizes that are always measured: with 1, BatchNorm may fail.
PROBE_SIZES = (2, 4)
#: Larger ones are measured up to this one, and to this share of the memory that may be used: the nearer, the better.
MAX_MEASURED, MEASURED_SHARE = 64, 0.25
#: As long as the gradients hide what a batch takes, up to this one, and to all of that memory.
MAX_HIDDEN = 1024
#: What a line through two batch sizes does not know: libraries choose their algorithms by the batch size.
HEADROOM = 1.01
#: Share of the free memory that a measurement takes.
FREE_SHARE = 0.9
#: The search for a batch size ends here.
MAX_BATCH_SIZE = 1 << 16
#: Shares of the memory that may be used, by the name of the batch size that fits into it.
SHARES = {"maximum": 1.0, "recommended": 0.6, "safe": 0.4}


class EstimateError(ValueError):
    """Nothing can be said of this model; the text says why."""


class TrainingMemory(NamedTuple):
    """Bytes of a training step by batch size."""

    #: With any batch size: the model, its gradients and optimizer, and what the step of the optimizer takes for a moment.
    optimizer_step: int
    #: Of the forward and backward pass: ``fixed`` and ``per_sample`` times the batch size.
    fixed: int
    per_sample: int
    #: How these were found.
    source: str

    def at(self, batch_size: int) -> int:
        """Returns the highest memory of a step with this batch size."""
        return max(self.optimizer_step, self.fixed + self.per_sample * batch_size)

    def largest(self, available: float) -> int:
        """Returns the largest batch size that fits, a power of two; 0: none. Raises EstimateError where none takes more than another."""
        if self.per_sample <= 0:
            raise EstimateError(
                "its memory does not grow with the batch: the parameters are frozen, or activations are not kept. Try batch sizes on the GPU"
            )
        if self.optimizer_step > available:
            return 0
        number = min((available - self.fixed) / self.per_sample, MAX_BATCH_SIZE)
        return 1 << (int(number).bit_length() - 1) if number >= 1 else 0

    def sizes(self, available: float) -> Dict[str, int]:
        """Returns the batch sizes that fit into all, 60 % and 40 % of the bytes that may be used; powers of two, 0 where none fits."""
        return {name: self.largest(share * available) for name, share in SHARES.items()}


class Steps:
    """Training steps of a model on a GPU, to measure them. They change nothing but what ``unchanged`` restores."""

    def __init__(self, model: Any, gpu: Any, sample: Sample, optimizer: Any, loss: Optional[Loss], precision: Any) -> None:
        import torch

        self._model, self._gpu, self._sample, self._loss = model, gpu, sample, loss
        self._precision = precision
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()  # a training has them too
        memory = _model_memory.of_model(model)
        own, allocated = memory.parameters + memory.buffers, torch.cuda.memory_allocated(gpu)
        #: Bytes on the GPU that are not of this training.
        self._others = allocated - own
        #: Bytes that a step may take without running out of memory.
        self.limit = own + FREE_SHARE * (torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - allocated)
        self._optimizer = _without_effect(model, optimizer)
        #: Bytes of the inputs of a sample, which are made in the host's memory; 0 before the first.
        self._input_bytes = 0.0
        self._is_warm = False
        #: The newest inputs and outputs: a loop keeps them in variables until it makes the next.
        self._inputs: Any = None
        self._outputs: Any = None

    def close(self) -> None:
        """Gives up what the steps hold."""
        self._optimizer = self._inputs = self._outputs = None
        self._model.zero_grad(set_to_none=True)

    def measure(self, batch_size: int) -> Tuple[int, int]:
        """Returns the highest bytes of a forward and backward pass, and of the optimizer's step."""
        try:
            return self._measure(batch_size)
        except ValueError:
            if batch_size != 1:
                raise
            return self._measure(2)  # BatchNorm needs more than one

    def _measure(self, batch_size: int) -> Tuple[int, int]:
        if not self._is_warm:  # the first makes the optimizer's state, and libraries choose their algorithms
            self._pass(batch_size)
            self._step()
        self._is_warm = True
        return self._highest(lambda: self._pass(batch_size)), self._highest(self._step)

    def _highest(self, run: Callable[[], None]) -> int:
        interval = peaks.enter()
        try:
            run()
        finally:
            usage = peaks.leave(interval)
        for device in usage.devices or []:
            if device["i"] == self._gpu.index and "alloc_peak" in device:
                return device["alloc_peak"] - self._others
        raise EstimateError("torch has no exact peak here: its allocator counts none, or another thread is tracked at the same time")

    def _pass(self, batch_size: int) -> None:
        if not self._input_bytes:
            self._input_bytes = _bytes_of(self._sample(1))
        host = host_memory()
        # twice: while they are converted
        if host is not None and 2 * self._input_bytes * batch_size > host.for_measurement:
            raise HostMemoryError(f"inputs of {batch_size} samples do not fit into the host memory: {host}")
        inputs = self._sample(batch_size)
        self._input_bytes = _bytes_of(inputs) / batch_size
        self._inputs = _model_memory.moved(inputs, self._gpu)
        del inputs
        with _autocast("cuda", self._precision):
            self._outputs = _model_memory.call(self._model, self._inputs)
            loss = _loss_of(self._outputs, self._loss)
        loss.backward()

    def _step(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # so that the step changes nothing
        if self._optimizer is not None:
            self._optimizer.step()
        self._model.zero_grad(set_to_none=True)


def _bytes_of(inputs: Any) -> float:
    return float(sum(map(_model_memory.tensor_bytes, _model_memory.tensors_in(inputs))))


def _without_effect(model: Any, optimizer: Any) -> Any:
    """Returns a new optimizer like this one, or AdamW, whose steps change no parameter while gradients are 0. None without parameters.

    It has only the parameters of the model.
    """
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        return torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0) if trained else None
    own = {id(parameter) for parameter in trained}
    groups = []
    for group in optimizer.param_groups:
        group = {**group, "params": [parameter for parameter in group["params"] if id(parameter) in own]}
        group.update({name: 0.0 for name in ("lr", "weight_decay") if name in group})
        groups += [group] if group["params"] else []
    try:
        known = inspect.signature(type(optimizer)).parameters
        return type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in known})
    except Exception as error:
        raise EstimateError(f"the optimizer cannot be made again for the measurement ({error}): leave optimizer= out for AdamW") from error


@contextlib.contextmanager
def _autocast(kind: str, precision: Any) -> Iterator[None]:
    """Runs code in mixed precision where ``precision`` is a type of torch; else as the program does."""
    import torch

    with torch.autocast(kind, dtype=precision) if precision is not None else contextlib.nullcontext():
        yield


def precision_of(mixed_precision: Any, on_gpu: bool) -> Any:
    """Returns the type of ``mixed_precision``: "bf16", "fp16", a type of torch, or True for the one that the GPU has. None: no mixed precision."""
    import torch

    if mixed_precision is True:
        return torch.bfloat16 if not on_gpu or torch.cuda.is_bf16_supported() else torch.float16
    if isinstance(mixed_precision, str):
        names = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16, "no": None}
        if mixed_precision not in names:
            raise ValueError(f"mixed_precision is {mixed_precision!r}, and must be one of {', '.join(names)}, True or False")
        return names[mixed_precision]
    return mixed_precision or None


def _loss_of(outputs: Any, loss: Optional[Loss]) -> Any:
    """Returns the loss of a model's outputs: by the function, else its own, else the sum of what has a gradient."""
    if loss is not None:
        return loss(outputs)
    own = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    if own is not None:
        return own.mean()
    values = list(outputs.values()) if hasattr(outputs, "values") and not hasattr(outputs, "element_size") else outputs
    found = [tensor for tensor in _model_memory.tensors_in(values) if tensor.requires_grad]
    if not found:
        raise EstimateError("its outputs have no gradient: the parameters are frozen. Give loss=, if it is made elsewhere")
    return sum(tensor.float().sum() for tensor in found)


def trainable(model: Any) -> Any:
    """Returns the model within wrappers for several GPUs and compilers.

    Raises EstimateError for one whose steps cannot be made here, or would not be without effect.
    """
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        if getattr(model, "static_graph", False):
            raise EstimateError("DistributedDataParallel with static_graph counts backward passes: measure the model before it is wrapped")
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    parameters = list(model.parameters())
    sharded = {"FullyShardedDataParallel", "DeepSpeedEngine"}
    if any(type(module).__name__ in sharded for module in model.modules()) or any(hasattr(each, "_local_tensor") for each in parameters):
        raise EstimateError("it is sharded over several processes, which would have to measure together")
    if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters):
        raise EstimateError("hooks of its parameters train during the backward pass: a measurement would train too")
    if any(type(each).__name__.startswith("Uninitialized") for each in parameters):
        raise EstimateError("it has parameters without a size: call it with a batch before")
    if len({each.device for each in parameters}) > 1 or any(each.device.type == "meta" for each in parameters):
        raise EstimateError("its parameters are on several devices")
    return model


@contextlib.contextmanager
def steps_on_gpu(
    model: Any, gpu: Any, sample: Sample, optimizer: Any = None, loss: Optional[Loss] = None, precision: Any = None
) -> Iterator[Steps]:
    """Lets code measure steps of a model in train mode, and then restores what that changed; see ``unchanged``."""
    import torch

    try:
        with _model_memory.unchanged(model, gpu):
            if any(each.device != gpu for each in model.parameters()):
                model.to(gpu)
            model.train()
            steps = Steps(model, gpu, sample, optimizer, loss, precision)
            try:
                yield steps
            finally:
                steps.close()
    finally:
        torch.cuda.empty_cache()


def fit(steps: Any, gradients: int, available: float) -> TrainingMemory:
    """Measures small batch sizes, and larger ones while they are a small part of the memory. The last two give the line.

    The highest memory is that of the beginning of the backward pass, with all activations, or that of its end, with all ``gradients``. Only
    where the activations are more than those does it tell what a sample takes.
    """
    available = min(available, steps.limit)
    small, large = PROBE_SIZES
    (before, optimizer_step), (after, _) = steps.measure(small), steps.measure(large)
    while True:
        per_sample = (after - before) / (large - small)
        is_hidden = per_sample * small < gradients
        most, share = (MAX_HIDDEN, 1.0) if is_hidden else (MAX_MEASURED, MEASURED_SHARE)
        if large >= most or after + per_sample * large >= share * available:
            break
        try:
            further = steps.measure(2 * large)[0]
        except RuntimeError as error:  # it took more than was expected
            if not is_cuda_oom(error) and not isinstance(error, HostMemoryError):
                raise
            break
        (small, before), (large, after) = (large, after), (2 * large, further)
    per_sample = max(0.0, per_sample)
    fixed = max(0.0, after - per_sample * large)
    if 0 < per_sample < gradients / large:
        per_sample = gradients / large  # it may be as much: it is hidden still
    amounts = (math.ceil(HEADROOM * amount) for amount in (optimizer_step, fixed, per_sample))
    return TrainingMemory(*amounts, f"measured on the GPU with batch sizes {small} and {large}")


class NothingFitsError(EstimateError):
    """Not even one sample fits into the host memory that is left; the text has the limit."""


def estimate_on_cpu(model: Any, sample: Sample, optimizer: Any = None, loss: Optional[Loss] = None, precision: Any = None) -> TrainingMemory:
    """Estimates what a training takes on a GPU from what forward passes keep on the CPU, with two batch sizes.

    No pass takes more than what the cgroups of the process and the host have left: where that does not suffice, smaller batches count.
    """
    memory, kept = _model_memory.of_model(model, optimizer), {}
    with _model_memory.unchanged(model):
        model.train()

        def has_tried(size: int) -> bool:
            host = host_memory()
            expected = max((each * size / known for known, each in kept.items()), default=0)
            if host is not None and expected > host.for_measurement:
                return False
            try:
                with bounded(host):
                    kept[size] = _kept_bytes(model, sample(size), loss, precision)
            except HostMemoryError:
                return False
            return True

        if not all(map(has_tried, PROBE_SIZES)):
            try:
                has_tried(1)
            except ValueError:
                if not kept:  # else it is BatchNorm, which needs more than one
                    raise
    if not kept:
        raise NothingFitsError(f"not even a forward pass of one sample fits into the host memory: {host_memory()}")
    (small, before), (large, after) = min(kept.items()), max(kept.items())
    if small == large:
        before = small = 0  # all of it counts for the samples
    per_sample = max(0, -((before - after) // (large - small)))
    sizes = " and ".join(map(str, sorted(kept)))
    return TrainingMemory(memory.fixed, memory.fixed + max(0, after - per_sample * large), per_sample, ON_CPU.format(sizes))


#: Source and direction of an estimate on the CPU.
ON_CPU = (
    "estimated on the CPU with batch sizes {}: mostly too high, for there operations keep more than on a GPU;"
    " too low for what operations take for a moment"
)


def on_cpu(memory: TrainingMemory, model: Any, batch_size: int) -> int:
    """Returns what a step takes in the host's memory, from an estimate: also what operations take for a moment.

    Those are the gradients of the activations, at most as large as these, and two values of the parameter whose step the optimizer makes.
    """
    largest = max((_model_memory.tensor_bytes(each) for each in model.parameters() if each.requires_grad), default=0)
    return memory.at(batch_size) + memory.per_sample * batch_size + 2 * largest


def fits_on_cpu(model: Any, sample: Sample, optimizer: Any, loss: Optional[Loss], precision: Any, batch_size: int) -> bool:
    """Returns whether training steps fit into the host memory that is left: makes two, which change nothing.

    What libraries take for a moment is in no estimate. A step that would take more than is left fails, and nothing is killed.
    """
    try:
        with _model_memory.unchanged(model), bounded(host_memory()):
            model.train()
            own = _without_effect(model, optimizer)
            for _ in range(2):  # the first makes the optimizer's state
                with _autocast("cpu", precision):
                    result = _loss_of(_model_memory.call(model, _model_memory.moved(sample(batch_size), _device_of(model))), loss)
                result.backward()
                del result
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.zero_()
                if own is not None:
                    _try_step(own)
                model.zero_grad(set_to_none=True)
        return True
    except HostMemoryError:
        return False
    except ValueError:
        if batch_size != 1:
            raise
        return False  # BatchNorm needs more than one


def _try_step(optimizer: Any) -> None:
    """Makes a step, unless that needs a closure, as of LBFGS: then only the estimate has what it takes."""
    try:
        optimizer.step()
    except TypeError:
        pass


def _device_of(model: Any) -> Any:
    return next(model.parameters()).device


def _kept_bytes(model: Any, inputs: Any, loss: Optional[Loss], precision: Any) -> int:
    """Runs the model forward and returns the bytes that autograd keeps for the backward pass.

    Each storage counts once, and so do the inputs; parameters, which exist anyway, do not.
    """
    import torch

    first = next(model.parameters(), None)
    kind = first.device.type if first is not None else "cpu"
    inputs = _model_memory.moved(inputs, first.device) if first is not None else inputs
    known = {_storage(each).data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = list(_model_memory.tensors_in(inputs))  # so that no address is used again meanwhile
    sizes = {_storage(each).data_ptr(): _storage(each).nbytes() for each in kept}

    def pack(tensor: Any) -> Any:
        storage = _storage(tensor)
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())
        return tensor.detach()  # what autograd keeps must not lead back to itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _autocast(kind, precision):
        outputs = _loss_of(_model_memory.call(model, inputs), loss)
    del outputs
    return sum(sizes.values())


def _storage(tensor: Any) -> Any:
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()  # before torch 2.0


