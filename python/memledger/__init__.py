"""Reports the memory of this process to memledger: tensors, torch's cache, and the rest.

    import memledger

    memledger.start()                            # not needed with PYTHONPATH: see docs/inside-view.md
    for batch in loader:
        with memledger.track("model", "forward"):
            loss = model(batch)
        memledger.step(batch_size=32)            # one training step
    memledger.save_report("memory_usage.json")

Nothing here raises into the program: without memledger, torch or a GPU the calls do nothing or record the host memory only. All
amounts are bytes, unless a name says otherwise.
"""

import sys

if sys.version_info < (3, 8):  # in words that every Python can parse
    raise ImportError("memledger needs Python 3.8 or later, and this is Python %d.%d" % tuple(sys.version_info[:2]))

from memledger._api import (  # noqa: E402
    batch_search,
    cleanup,
    cleanup_on,
    install_shutdown,
    load_ipython_extension,
    on_record,
    peak,
    save_report,
    start,
    step,
    stop,
    track,
)
from memledger._version import __version__  # noqa: E402

__all__ = [
    "__version__",
    "batch_search",
    "cleanup",
    "cleanup_on",
    "install_shutdown",
    "load_ipython_extension",
    "on_record",
    "peak",
    "save_report",
    "start",
    "step",
    "stop",
    "track",
]
