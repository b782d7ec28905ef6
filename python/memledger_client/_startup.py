"""Starts the reporter of an unchanged program once it has initialised CUDA.

Nothing happens in a program that does not import torch, and no thread exists before CUDA is initialised. So DataLoader workers,
launchers such as torchrun, and every other Python program of the container stay as they are.
"""

from __future__ import annotations

import sys
from _thread import get_ident

TYPE_CHECKING = False  # every Python program of the container imports this, so it imports little
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any, Optional, Sequence, Set


class _TorchFinder:
    """Wraps the loader of torch, which the finders after this one find.

    It stays in ``sys.meta_path``: programs look for torch before they import it, or import it again after a failure, and an import in
    another thread would skip a finder if one were removed meanwhile.
    """

    def __init__(self) -> None:
        self._searching: Set[int] = set()  # threads in find_spec: a finder may search all of sys.meta_path itself

    def find_spec(self, name: str, path: Optional[Sequence[str]], target: Any = None) -> Optional[ModuleSpec]:
        if name != "torch" or get_ident() in self._searching:
            return None
        self._searching.add(get_ident())
        try:
            spec = self._search_others(name, path, target)
        finally:
            self._searching.discard(get_ident())
        try:
            if spec is not None and spec.loader is not None:
                _call_after_import(spec.loader)
        except Exception:
            _record_error()  # a loader that takes no attributes: torch is imported without us
        return spec

    def _search_others(self, name: str, path: Optional[Sequence[str]], target: Any) -> Optional[ModuleSpec]:
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            find_spec = getattr(finder, "find_spec", None)
            spec: Optional[ModuleSpec] = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def _call_after_import(loader: Any) -> None:
    execute = loader.exec_module
    if hasattr(execute, "is_of_memledger"):
        return

    def exec_module(module: Any) -> None:
        execute(module)
        if module.__name__ == "torch":  # the loader of a zip file has other modules too
            start_with_cuda(module)

    exec_module.is_of_memledger = True  # type: ignore[attr-defined]
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

    The import can fail: the program may have a module named memledger_client, or the client's files may be gone.
    """
    try:
        from memledger_client._reporter import reporter

        reporter.start()
    except Exception:
        _record_error()


def _record_error() -> None:
    try:
        from memledger_client._guard import record_error

        record_error()
    except Exception:
        pass  # the client is not there


def install() -> None:
    """Waits for the import of torch; if it was imported before, for the initialisation of CUDA."""
    if "torch" in sys.modules:
        start_with_cuda(sys.modules["torch"])
    elif not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder())
