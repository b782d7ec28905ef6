"""Not PyTorch: a stand-in for the dry run of check.sh. See README.md beside this folder."""
import contextlib
import types

from . import _C, cuda, distributed, nn, utils  # noqa: F401

__version__ = "0.0-stand-in"
uint8, float32, float16, bfloat16 = "uint8", "float32", "float16", "bfloat16"
IS_STANDIN = True


class version:
    cuda = "0.0"


class device:
    def __init__(self, name, index=None):
        name, _, number = str(name).partition(":")
        self.type, self.index = name, int(number) if number else index

    def __eq__(self, other):
        return (self.type, self.index or 0) == (other.type, other.index or 0)

    def __hash__(self):
        return hash(self.type)

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor:
    requires_grad, grad = True, None

    def __init__(self, numbers, device):
        self.bytes = 0  # until it is taken: what cannot be taken is not given back
        self.numbers, self.device = numbers, globals()["device"](device)
        if device == "cuda":
            cuda.take(numbers)
            self.bytes = numbers

    def __del__(self):
        if getattr(self, "bytes", 0):
            cuda.give(self.bytes)

    def __matmul__(self, other):
        cuda.work()
        return Tensor(0, "cpu")

    def cuda(self):
        return self

    def to(self, _device):
        return self

    def element_size(self):
        return 1

    def numel(self):
        return self.numbers

    def zero_(self):
        pass

    def sum(self):
        return self

    def backward(self):
        pass


def count(shape):
    numbers = 1
    for size in shape:
        numbers *= size
    return numbers


def empty(*shape, dtype=float32, device="cpu"):
    return Tensor(count(shape) * (1 if dtype == uint8 else 4), device)


ones = empty


def full(shape, value):
    return Tensor(0, "cpu")


def nothing(*_, **__):
    """For what the stand-in leaves as it is: precision, gradients on or off, random numbers."""
    return contextlib.nullcontext()


autocast = enable_grad = no_grad = nothing
random = types.SimpleNamespace(fork_rng=nothing)


class AdamW:
    """Two values for each parameter, from the first step on."""

    def __init__(self, parameters, lr=1e-3, weight_decay=1e-2):
        self.param_groups, self.defaults, self.state = [{"params": list(parameters)}], {}, {}

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state.setdefault(parameter, {"exp_avg": Tensor(2 * parameter.numbers, "cuda")})

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


optim = types.SimpleNamespace(AdamW=AdamW)
