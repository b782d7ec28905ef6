"""A model of the stand-in, in place of check/models.py: 256 MiB of parameters, and 64 MiB of activations for each sample."""
import gpu
import torch

PARAMETERS, EACH = 256 * gpu.MIB, 64 * gpu.MIB
#: Batches from which the falsified model takes a quarter more.
LIE_FROM = 24


class Loss(torch.Tensor):
    def __init__(self, model, activations):
        super().__init__(0, "cpu")
        self.model, self.activations = model, activations

    def backward(self):
        self.activations = None
        self.model.parameter.grad = torch.Tensor(PARAMETERS, "cuda")


class Model:
    training = True
    _buffers = {}

    def __init__(self):
        self.parameter = torch.Tensor(PARAMETERS, "cuda")
        self.parameter.data = self.parameter

    def parameters(self):
        return iter([self.parameter])

    def buffers(self):
        return []

    def modules(self):
        return [self]

    def to(self, _device):
        return self

    cuda = train = lambda self: self

    def zero_grad(self, set_to_none):
        self.parameter.grad = None

    def __call__(self, batch):
        more = gpu.LIE == "training" and batch.numbers >= LIE_FROM
        size = batch.numbers * 5 // 4 if more else batch.numbers
        return Loss(self, torch.Tensor(size * EACH, "cuda"))


MODELS = {"stand-in": (Model, lambda size: torch.Tensor(size, "cpu"), lambda outputs: outputs)}
