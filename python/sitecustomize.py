"""Loads memledger's client in every Python program of a container that has this directory in PYTHONPATH.

Python imports only the first ``sitecustomize`` that it finds, so this one runs the next one too: Debian has one, for example. Another
copy of this file may be the next one, or the next one may run this one again.
"""

import importlib.machinery
import os
import sys


def _execute(name, entries):
    """Executes the module of this name in these directories, without its package, which takes longer to import."""
    spec = importlib.machinery.PathFinder.find_spec(name, entries)
    if spec is None or spec.loader is None:
        return None
    module = type(sys)(name)
    module.__spec__, module.__file__ = spec, spec.origin
    spec.loader.exec_module(module)
    return module


def _start():
    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    # directories whose copy of this file ran, shared by all copies
    executed = sys.modules.setdefault("_memledger_sitecustomize", type(sys)("_memledger_sitecustomize")).__dict__
    directories = executed.setdefault("directories", [])
    if here in directories:
        return
    directories.append(here)
    if len(directories) == 1:
        try:
            _execute("_startup", [os.path.join(here, "memledger_client")]).install()
        except Exception:  # a program must start as it would without memledger
            pass
    _execute("sitecustomize", [entry for entry in sys.path if os.path.realpath(entry or ".") not in directories])


_start()
