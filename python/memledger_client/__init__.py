"""Reports the memory of this process to memledger: tensors, torch's cache, and the rest.

    import memledger_client

    memledger_client.start()                     # not needed with PYTHONPATH: see docs/inside-view.md
    for batch in loader:
        with memledger_client.track("model", "forward"):
            loss = model(batch)
        memledger_client.step(batch_size=32)     # one training step
    memledger_client.save_report("memory_usage.json")

Nothing here raises into the program: without memledger, torch or a GPU the calls do nothing or record the host memory only. All
amounts are bytes, unless a name says otherwise.
"""

import sys

if sys.version_info < (3, 8):  # in words that every Python can parse
    raise ImportError("memledger_client needs Python 3.8 or later, and this is Python %d.%d" % tuple(sys.version_info[:2]))

from memledger_client._api import (  # noqa: E402
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
from memledger_client._version import __version__  # noqa: E402

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
