#!/usr/bin/env python3
"""Reads the results of all runners of the tests: which tests to repeat, which are flaky, and the counts.

A file of results has a line "RUNNER RESULT NAME" for each test; RESULT is passed, failed, or flaky: failed, then passed when it was
repeated.

usage: results.py repeat JUNIT...                      prints nextest's filter for the tests that failed; fails if there is none, or
                                                       if they are more than can be flaky
       results.py collect RUNNER FOLDER JUNIT... [--repeated JUNIT]
                                                       prints the lines of a runner; writes what a flaky test printed when it
                                                       failed into FOLDER
       results.py summary SECONDS FILE...              prints a table of the flaky tests and then a closing line like nextest's
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

#: With more failures than this the change is wrong, or the machine: repeating them one by one could take hours.
MAX_REPEATED = 10


def read(path):
    """Returns whether each test of a JUnit file passed, and what it printed, by its binary and its name."""
    tests = {}
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        broken = [part for part in case if part.tag in ("failure", "error")]
        printed = [part.text or "" for part in case if part.tag in ("failure", "error", "system-out", "system-err")]
        tests[case.get("classname", ""), case.get("name", "")] = (not broken, "\n".join(printed))
    return tests


def read_all(paths):
    tests = {}
    for path in paths:
        tests.update(read(path))
    return tests


def repeat(paths):
    failed = [test for test, (passed, _) in read_all(paths).items() if not passed]
    if not 0 < len(failed) <= MAX_REPEATED:
        print(f"{len(failed)} failed" if failed else "none failed", file=sys.stderr)
        return 1
    print(" + ".join(f"(binary_id(={binary}) & test(={name}))" for binary, name in failed))
    return 0


def collect(runner, folder, paths, repeated):
    tests = read_all(paths)
    again = read(repeated) if repeated else {}
    for (binary, name), (passed, printed) in tests.items():
        flaky = not passed and again.get((binary, name), (False, ""))[0]
        full_name = f"{binary}::{name}" if binary else name
        print(runner, "passed" if passed else "flaky" if flaky else "failed", full_name)
        if flaky:
            file = pathlib.Path(folder, re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{runner}-{full_name}")[:200])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(printed)


def summary(seconds, paths):
    lines = [line.split(" ", 2) for path in paths for line in pathlib.Path(path).read_text().splitlines()]
    names = collections.defaultdict(list)
    for runner, result, name in lines:
        names[result].append((runner, name))
    for result, what in (("flaky", "failed, and passed when repeated: see tests/flaky.md"), ("failed", "failed")):
        if names[result]:
            print(f"\n{len(names[result])} {result} ({what}):" if result == "flaky" else f"\n{len(names[result])} failed:")
        for runner, name in sorted(names[result]):
            print(f"  {runner:<9} {name}")
    flaky, failed = len(names["flaky"]), len(names["failed"])
    passed = f"{len(names['passed']) + flaky} passed" + (f" ({flaky} flaky)" if flaky else "")
    print(f"     Summary [{seconds:>8}.000s] {len(lines)} tests run: {passed}" + (f", {failed} failed" if failed else "")
          + ", 0 skipped")


def main(arguments):
    match arguments:
        case ["repeat", *paths]:
            return repeat(paths)
        case ["collect", runner, folder, *paths, "--repeated", repeated]:
            collect(runner, folder, paths, repeated)
        case ["collect", runner, folder, *paths]:
            collect(runner, folder, paths, None)
        case ["summary", seconds, *paths]:
            summary(seconds, paths)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
