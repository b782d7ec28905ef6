"""Not PyTorch: a stand-in for the dry run of check.sh. See README.md beside this folder."""
from . import _C, cuda, distributed, nn, utils  # noqa: F401

__version__ = "0.0-stand-in"
uint8, float32 = "uint8", "float32"


class version:
    cuda = "0.0"


class Tensor:
    def __init__(self, numbers, device):
        self.bytes = 0  # until it is taken: what cannot be taken is not given back
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
