#!/usr/bin/env python3
"""Prints the list of functions from the symbols that `record.py` left: first those in FOLDER/serve, then those that many of the
processes in FOLDER/tests called.

A Rust symbol (of mangling v0) has hashes of crates, which change with the compiler and with versions: each becomes `*`, as linkers
understand it in names. A hash of another length also moves the back-references behind it, so that some names are lost then. A
demangled name has neither, but does not say which instance of generic code it is: the list would then select twice the code.

usage: names.py FOLDER
"""

import collections
import pathlib
import re
import sys

# Of all processes that the tests start, so many have to call a function: what one feature alone needs is read when it is used.
SHARE = 0.2


def name(symbol):
    """Returns the pattern of a symbol; `None` for what has no name of its own."""
    base, dot, _ = symbol.partition(".")  # the compiler numbers copies of one function
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", base):
        return None
    if base.startswith("_R"):
        base = re.sub("Cs[0-9A-Za-z]+_", "Cs*_", base)
    return base + ".*" if dot else base


def calls(folder):
    """Returns how many processes called each function, and how many there were."""
    files = list(folder.glob("*.symbols"))
    counted = collections.Counter()
    for path in files:
        counted.update({name(symbol) for symbol in path.read_text(encoding="utf-8").split()} - {None})
    return counted, len(files)


def main():
    folder = pathlib.Path(sys.argv[1])
    serving, _ = calls(folder / "serve")
    tests, processes = calls(folder / "tests")
    common = [found for found, count in tests.items() if count >= SHARE * processes and found not in serving]
    for names in (list(serving), common):
        names.sort(key=lambda found: (-tests[found], found))
        print(*names, sep="\n")


main()
