#!/usr/bin/env python3
"""Prints the lines of code of each module of src/, without tests, comments and blank lines, and the longest functions.

usage: size.py [--functions N] [PATH...]      N: how many functions to list, 10 unless given

With paths below the repository only these are counted, each with its own line. A module is a file or folder directly below src/. Tests are items under `#[cfg(test)]` or `#[cfg(any(test, fuzzing))]`, files
called tests.rs, invariants.rs or *_invariants.rs, and folders called tests. The script relies on rustfmt's layout: an item
ends at the first closing brace at its own indentation.
"""

import argparse
import collections
import pathlib
import re
import sys

SRC = pathlib.Path(__file__).resolve().parent.parent / "src"
TEST_ATTRIBUTES = ("#[cfg(test)]", "#[cfg(any(test, fuzzing))]")
FUNCTION = re.compile(r"^( *)(?:pub(?:\([a-z]+\))? )?(?:async |const |unsafe )*fn (\w+)")


def is_test_file(path):
    parts = path.relative_to(SRC).parts
    return "tests" in parts[:-1] or parts[-1] == "tests.rs" or parts[-1].endswith("invariants.rs")


def without_tests(lines):
    """Returns (line number, line) of everything outside `#[cfg(test)]` items."""
    kept, skip_until = [], None
    for number, line in enumerate(lines, 1):
        if skip_until is not None:
            if line == skip_until or (skip_until == "" and line.endswith(";")):
                skip_until = None
            continue
        if line.strip() in TEST_ATTRIBUTES:
            indent = line[: len(line) - len(line.lstrip())]
            following = next((text for text in lines[number:] if not text.strip().startswith("#[")), "")
            skip_until = "" if following.endswith(";") else indent + "}"
            continue
        kept.append((number, line))
    return kept


def is_code(line):
    text = line.strip()
    return bool(text) and not text.startswith("//")


def functions(path, lines):
    """Yields (lines of code, place, name) of each function."""
    begun = None
    for number, line in lines:
        if begun is None:
            match = FUNCTION.match(line)
            if not match or line.rstrip().endswith((";", "}")):
                continue
            begun = (number, match.group(1) + "}", match.group(2), 0)
        first, end, name, code = begun
        begun = (first, end, name, code + is_code(line))
        if line == end:
            yield begun[3], f"src/{path.relative_to(SRC)}:{first}", name
            begun = None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", type=int, default=10)
    parser.add_argument("paths", nargs="*", type=lambda path: (SRC.parent / path).resolve())
    arguments = parser.parse_args()
    for path in arguments.paths:
        if not path.exists():
            sys.exit(f"size.py: {path} does not exist: paths are relative to the repository")
    modules, longest = collections.Counter(), []
    for path in sorted(SRC.rglob("*.rs")):
        within = next((given for given in arguments.paths if path.is_relative_to(given)), None)
        if is_test_file(path) or (arguments.paths and within is None):
            continue
        lines = without_tests(path.read_text().split("\n"))
        module = within.relative_to(SRC.parent) if within else path.relative_to(SRC).parts[0].removesuffix(".rs")
        modules[str(module)] += sum(is_code(line) for _, line in lines)
        longest.extend(functions(path, lines))
    if not modules:
        sys.exit(f"size.py: no Rust files below {', '.join(map(str, arguments.paths or [SRC]))}")
    print("lines of code, without tests, comments and blank lines")
    for module, count in modules.most_common():
        print(f"{count:>8,}  {module}")
    print(f"{sum(modules.values()):>8,}  all\n\nlongest functions")
    for count, place, name in sorted(longest, reverse=True)[: arguments.functions]:
        print(f"{count:>8,}  {name}  {place}")


main()
