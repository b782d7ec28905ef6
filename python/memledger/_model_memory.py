"""The memory of a model by part: counted to the byte where that is possible, measured where not, and never guessed silently."""

import random
import sys
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

#: Makes the inputs of a batch: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
Sample = Callable[[int], Any]


class ModelMemory(NamedTuple):
    """Bytes of a model that do not depend on the batch."""

    parameters: int
    buffers: int
    #: Of all parameters that are trained, whether they exist yet or not.
    gradients: int
    #: Counted from the optimizer's state; None without an optimizer that has made a step.
    optimizer: Optional[int]
    #: What Adam would hold: two values for each trained parameter. An estimate.
    optimizer_estimate: int

    @property
    def fixed(self) -> int:
        """Everything but activations, with the estimate where the optimizer's state is unknown."""
        optimizer = self.optimizer_estimate if self.optimizer is None else self.optimizer
        return self.parameters + self.buffers + self.gradients + optimizer


def tensor_bytes(tensor: Any) -> int:
    """Returns the bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def tensors_in(value: Any) -> Iterable[Any]:
    """Returns the tensors in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "element_size"):
        yield value


def of_model(model: Any, optimizer: Any = None) -> ModelMemory:
    """Counts the memory of a model. A parameter that is used twice counts once."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = sum(tensor_bytes(parameter) for parameter in trained)
    state: Optional[int] = None
    if optimizer is not None and optimizer.state:
        state = sum(tensor_bytes(tensor) for tensor in tensors_in([dict(entry) for entry in optimizer.state.values()]))
    return ModelMemory(
        parameters=sum(tensor_bytes(parameter) for parameter in parameters),
        buffers=sum(tensor_bytes(buffer) for buffer in model.buffers()),
        gradients=gradients,
        optimizer=state,
        optimizer_estimate=2 * gradients,
    )


def call(model: Any, inputs: Any) -> Any:
    """Calls a model with the inputs that a ``sample`` returned."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def moved(inputs: Any, device: Any) -> Any:
    """Returns the inputs of a batch on a device."""
    if isinstance(inputs, dict):
        return {key: moved(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(moved(value, device) for value in inputs)
    if isinstance(inputs, list):
        return [moved(value, device) for value in inputs]
    return inputs.to(device) if hasattr(inputs, "to") else inputs


@contextmanager
def unchanged(model: Any, device: Any = None) -> Iterator[None]:
    """Lets code run or move a model, without gradients of before, and then restores what that changed.

    Those are its devices, buffers (such as the statistics of BatchNorm) and gradients, and the states of the random number
    generators of torch, Python and numpy. ``device`` is a further one that the code uses.
    """
    import torch

    parameters = [(each, each.device, each.grad) for each in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(each, each.detach().clone()) for _, of_module in buffers for each in of_module.values() if each is not None]
    devices = {where for _, where, _ in parameters} | ({torch.device(device)} if device is not None else set())
    gpus = {each.index or 0 for each in devices if each.type == "cuda"}
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        with torch.random.fork_rng(devices=sorted(gpus)), torch.enable_grad():
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        for module, of_module in buffers:
            module._buffers.update(of_module)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for parameter, where, gradient in parameters:
            parameter.grad = None  # on the other device
            parameter.data = parameter.data.to(where)
            parameter.grad = gradient


def _storage(tensor: Any) -> Any:
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()  # before torch 2.0


def activation_bytes(model: Any, inputs: Any) -> int:
    """Runs the model forward and returns the bytes that autograd keeps for the backward pass.

    Each storage counts once; parameters, which exist anyway, and the inputs do not count. What an operation needs for a moment
    is not in it. The model changes as by any step: see ``unchanged``.
    """
    import torch

    first = next(model.parameters(), None)
    if first is not None:
        inputs = moved(inputs, first.device)
    known: Set[int] = {_storage(parameter).data_ptr() for parameter in model.parameters()}
    known.update(_storage(buffer).data_ptr() for buffer in model.buffers())
    known.update(_storage(tensor).data_ptr() for tensor in tensors_in(inputs))
    kept: List[Any] = []  # so that no address is used again meanwhile
    sizes: Dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = _storage(tensor)
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call(model, inputs)
    del outputs
    return sum(sizes.values())


def measure_activations(
    model: Any, sample: Sample, batch_sizes: Tuple[int, int], mixed_precision: bool = False
) -> Tuple[int, int]:
    """Returns the bytes of activations per sample and those that do not grow with the batch, by two measurements.

    With ``mixed_precision`` half of what was measured is the estimate. The model stays as it is.
    """
    small, large = batch_sizes
    with unchanged(model):
        first, second = (activation_bytes(model, sample(size)) for size in batch_sizes)
    each = max(0, -(-(second - first) // (large - small)))
    constant = max(0, first - each * small)
    return (-(-each // 2), -(-constant // 2)) if mixed_precision else (each, constant)
