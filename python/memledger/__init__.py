"""Reports the memory of this process to memledger: tensors, torch's cache, and the rest.

    import memledger

    memledger.start()                            # not needed with PYTHONPATH: see docs/inside-view.md
    for batch in loader:
        with memledger.track("model", "forward"):
            loss = model(batch)
        memledger.step(batch_size=32)            # one training step
    memledger.save_report("memory_usage.json")

Nothing here raises into the program, and nothing waits: without memledger, torch or a GPU the calls do nothing or
record the host memory only. All amounts are bytes, unless a name says otherwise.

The import loads only this file; the first use of a function loads the client, which Python compiles each time from a read-only mount.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

    from memledger._api import (
        batch_search,
        cleanup,
        cleanup_on,
        install_shutdown,
        load_ipython_extension,
        peak,
        save_report,
        start,
        step,
        stop,
        track,
    )
from memledger._version import __version__

__all__ = [
    "__version__",
    "batch_search",
    "cleanup",
    "cleanup_on",
    "install_shutdown",
    "load_ipython_extension",
    "peak",
    "save_report",
    "start",
    "step",
    "stop",
    "track",
]


class _NullContext:
    """Takes the place of ``track`` and ``batch_search`` if the client cannot be loaded, such as after its mount is gone."""

    def __init__(self, *_args: "Any", **_kwargs: "Any") -> None:
        pass

    def __enter__(self) -> "_NullContext":
        return self

    def __exit__(self, *_exception: "Any") -> None:
        return None

    def __call__(self, function: "Any") -> "Any":
        return function


def _without_client(name: str) -> "Any":
    """Returns what a program can call as before if the client cannot be loaded: it does nothing."""
    if name in ("track", "batch_search"):
        return _NullContext
    return lambda *_args, **_kwargs: {"peak": {}, "save_report": False}.get(name)


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module 'memledger' has no attribute {name!r}")
    try:
        from memledger import _api
    except Exception:  # the program goes on without
        return _without_client(name)
    globals().update({each: getattr(_api, each) for each in __all__ if each != "__version__"})
    return globals()[name]


def __dir__() -> "List[str]":
    return sorted({*globals(), *__all__})

