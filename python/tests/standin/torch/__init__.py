"""A stand-in for torch, for tests on machines without a GPU: this is NOT torch.

It has the part of ``torch.cuda`` that memledger's client uses, with the names and the behaviour of torch 2.4 to 2.15: statistics are
empty before CUDA is initialised and in forked children, and ``_lazy_call`` queues calls until then. Its memory is a
number: ``torch.cuda.standin_allocate`` raises it.

STANDIN_TORCH  the version that it claims (default 2.9.1); before 2.5 devices have no UUID
STANDIN_GPUS   UUIDs of its devices, separated by commas (default: one device)
"""

import os

__version__ = os.environ.get("STANDIN_TORCH", "2.9.1") + "+standin"
IS_STANDIN = True

from . import _C, cuda  # noqa: E402,F401 # after the version, which cuda reads
from .standin_cpu import autograd, device, enable_grad, no_grad, optim, random  # noqa: E402,F401
