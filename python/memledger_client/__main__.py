"""``python -m memledger_client script.py ARGUMENT...``: runs a script that reports from inside, without a change to it."""

import os
import runpy
import sys

from memledger_client import _startup


def main() -> None:
    """Runs the script as Python would."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m memledger_client SCRIPT [ARGUMENT...]", file=sys.stderr)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):  # with it, Python adds no directory of the script, and -m none to replace
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _startup.install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
