"""Starts the reporter of an unchanged program once it has initialised CUDA.

Nothing happens in a program that does not import torch, and no thread exists before CUDA is initialised. So DataLoader workers,
launchers such as torchrun, and every other Python program of the container stay as they are.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False  # every Python program of the container imports this, so it imports little
if TYPE_CHECKING:
    from typing import Any, Optional, Sequence


class _TorchFinder:
    """Notices the import of torch, which it leaves to Python's own finder."""

    def find_spec(self, name: str, path: Optional[Sequence[str]], target: Any = None) -> Optional[ModuleSpec]:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                _call_after_import(spec.loader)
            return spec
        except Exception:
            return None  # Python goes on with its own finders


def _call_after_import(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        execute(module)
        start_with_cuda(module)

    loader.exec_module = exec_module


def start_with_cuda(torch: Any) -> None:
    """Starts the reporter when CUDA is initialised, or now if it is."""
    try:
        # what torch itself does with calls that need CUDA, such as manual_seed
        torch.cuda._lazy_call(_start)
    except Exception:
        _record_error()


def _start() -> None:
    """Called by torch while it initialises CUDA, which fails if this raises.

    The import can fail: the program may have a module named memledger, or the client's files may be gone.
    """
    try:
        from memledger import _api

        _api.start()
    except Exception:
        _record_error()


def _record_error() -> None:
    try:
        from memledger._guard import record_error

        record_error()
    except Exception:
        pass  # the client is not there


def install() -> None:
    """Waits for the import of torch; if it was imported before, for the initialisation of CUDA."""
    if "torch" in sys.modules:
        start_with_cuda(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _TorchFinder())
