"""The stand-in's tensors in the host's memory: what a search for a batch size on the CPU calls. They hold bytes, and compute nothing."""

import contextlib
import types

FLOAT_BYTES = 4
_hooks = []  # of saved_tensors_hooks, innermost last


class device:
    def __init__(self, name, index=None):
        self.type, _, number = str(name).partition(":")
        self.index = int(number) if number else index

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __eq__(self, other):
        return str(self) == str(other)

    def __hash__(self):
        return hash(str(self))


class Storage:
    """Memory whose pages are in use; a MemoryError where there is none, as of C++."""

    def __init__(self, count):
        self.bytes = bytearray(count)
        for page in range(0, count, 4096):
            self.bytes[page] = 1

    def data_ptr(self):
        return id(self)

    def nbytes(self):
        return len(self.bytes)


class Tensor:
    requires_grad, dtype, grad = False, types.SimpleNamespace(is_floating_point=True), None

    def __init__(self, count, requires_grad=False):
        self.count, self.requires_grad, self.device = count, requires_grad, device("cpu")
        self.storage_, self.backwards = Storage(count * FLOAT_BYTES), []

    def numel(self):
        return self.count

    def element_size(self):
        return FLOAT_BYTES

    def untyped_storage(self):
        return self.storage_

    def dim(self):
        return 1

    def to(self, *_):
        return self

    def detach(self):
        return self

    def float(self):
        return self

    def sum(self):
        return self

    def __radd__(self, _):
        return self

    def zero_(self):
        return self

    @property
    def data(self):
        return self

    @data.setter
    def data(self, _):
        pass

    def backward(self):
        """Makes the gradients of the activations, one after the other, and of the parameters."""
        for activation, parameter in reversed(self.backwards):
            Tensor(activation.count)
            parameter.grad = Tensor(parameter.count)


class Layers:
    """A model of layers with so many parameters each, whose activations have so many numbers a sample."""

    training = True

    def __init__(self, layers, parameters, activations):
        self.activations = activations
        self.layers = [Tensor(parameters, requires_grad=True) for _ in range(layers)]
        self._buffers, self._forward_pre_hooks = {}, {}

    def parameters(self, recurse=True):
        return iter(self.layers)

    def buffers(self):
        return iter(())

    def modules(self):
        return iter([self])

    def train(self):
        self.training = True

    def zero_grad(self, set_to_none=True):
        for parameter in self.layers:
            parameter.grad = None

    def __call__(self, inputs):
        kept, result = [], inputs
        for parameter in self.layers:
            result = Tensor(inputs.count * self.activations, requires_grad=True)
            kept.append((_hooks[-1](result) if _hooks else result, parameter))
        result.backwards = kept
        return result


class AdamW:
    def __init__(self, parameters, **_):
        self.parameters, self.state = list(parameters), {}

    def step(self):
        for parameter in self.parameters:
            if parameter.grad is not None and id(parameter) not in self.state:
                self.state[id(parameter)] = [Tensor(parameter.count), Tensor(parameter.count)]


@contextlib.contextmanager
def saved_tensors_hooks(pack, _unpack):
    _hooks.append(pack)
    try:
        yield
    finally:
        _hooks.pop()


@contextlib.contextmanager
def nothing(*_, **__):
    yield


optim = types.SimpleNamespace(AdamW=AdamW)
autograd = types.SimpleNamespace(graph=types.SimpleNamespace(saved_tensors_hooks=saved_tensors_hooks))
random = types.SimpleNamespace(fork_rng=nothing)
enable_grad = no_grad = nothing
