#!/usr/bin/env python3
"""Prints the list of functions from the symbols that `record.py` left: first those in FOLDER/serve, then those that many of the
processes in FOLDER/tests called.

A Rust symbol (of mangling v0) has hashes of crates, which change with the compiler and with versions: each becomes `*`, as linkers
understand it in names. A demangled name would say the same, but for generic code not which instance: the list would then place twice
the code.

usage: names.py FOLDER
"""

import collections
import pathlib
import re
import sys

# Of all processes that the tests start, so many have to call a function: what one feature alone needs is read when it is used.
SHARE = 0.2


def name(symbol):
    """Returns a symbol without what changes with each build; `None` for what the linker cannot place by its name."""
    symbol = re.sub(r"\.(llvm|cold|part|isra|constprop)\.?[0-9.]*$", "", symbol)
    if symbol.startswith("_R"):
        return re.sub("Cs[0-9A-Za-z]+_", "Cs*_", symbol)
    return symbol if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", symbol) else None


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
