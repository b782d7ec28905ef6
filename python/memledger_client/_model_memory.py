"""The memory of a model by part: counted to the byte where that is possible, measured where not, and never guessed silently."""

import dataclasses
import random
import sys
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, NamedTuple, Optional, Tuple

#: Makes the inputs of a batch: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a ``Call`` with both.
Sample = Callable[[int], Any]


class Call(NamedTuple):
    """The arguments of a model."""

    arguments: Tuple[Any, ...]
    named: Dict[str, Any]


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
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
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


def bytes_on(device: Any, model: Any, optimizer: Any = None) -> int:
    """Returns the bytes that a model, its gradients and its optimizer have on a device now."""
    found = [*model.parameters(), *model.buffers()]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if optimizer is not None:
        found += tensors_in([dict(entry) for entry in optimizer.state.values()])
    return sum(tensor_bytes(tensor) for tensor in found if tensor.device == device)


_measuring = threading.local()


def is_measuring() -> bool:
    """Returns whether a measurement calls a model in this thread: its inputs are not those of the program."""
    return getattr(_measuring, "depth", 0) > 0


def call(model: Any, inputs: Any) -> Any:
    """Calls a model with the inputs that a ``sample`` returned."""
    _measuring.depth = getattr(_measuring, "depth", 0) + 1
    try:
        if isinstance(inputs, Call):
            return model(*inputs.arguments, **inputs.named)
        if isinstance(inputs, dict):
            return model(**inputs)
        if isinstance(inputs, tuple):
            return model(*inputs)
        return model(inputs)
    finally:
        _measuring.depth -= 1


def in_type(inputs: Any, kind: Any) -> Any:
    """Returns the inputs of a batch with their floating-point numbers in a type, such as that of the model's parameters."""
    if isinstance(inputs, dict):
        return {key: in_type(value, kind) for key, value in inputs.items()}
    return inputs.to(kind) if hasattr(inputs, "is_floating_point") and inputs.is_floating_point() else inputs


def moved(inputs: Any, device: Any) -> Any:
    """Returns the inputs of a batch on a device."""
    if isinstance(inputs, Call):
        return Call(*(moved(part, device) for part in inputs))
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

    Those are its devices, mode, buffers (such as the statistics of BatchNorm) and gradients, and the states of the random number
    generators of torch, Python and numpy. ``device`` is a further one that the code uses.
    """
    import torch

    parameters = [(each, each.data, each.grad) for each in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(each, each.detach().clone()) for _, of_module in buffers for each in of_module.values() if each is not None]
    devices = {data.device for _, data, _ in parameters} | ({torch.device(device)} if device is not None else set())
    gpus = {each.index or 0 for each in devices if each.type == "cuda"}
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        with torch.random.fork_rng(devices=sorted(gpus)), torch.enable_grad():
            yield
    finally:
        for parameter, data, gradient in parameters:
            parameter.grad = None  # on the other device
            parameter.data = data
            parameter.grad = gradient
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        for module, is_training in modes:
            module.training = is_training
        for module, of_module in buffers:
            module._buffers.update(of_module)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):  # one that is expanded cannot be written, nor changed
                    buffer.copy_(value)
