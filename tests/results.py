#!/usr/bin/env python3
"""Reads the results of all runners of the tests: which tests to retry, which are flaky, and the counts.

A file of results has a line "RUNNER RESULT NAME" for each test; RESULT is passed, failed, skipped, or flaky: failed, then passed when
it was retried. The runner "run" is the run itself, with what failed besides tests.

usage: results.py retry JUNIT...      prints nextest's filter for the tests that failed; fails if there is none, or if they are more
                                      than can be flaky
       results.py collect RUNNER FOLDER JUNIT... [--retried JUNIT]
                                      prints the lines of a runner; writes what a flaky test printed when it failed into FOLDER
       results.py summary SECONDS FILE...
                                      prints the flaky tests, what failed, and a summary like nextest's
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

#: With more failures than this the change is wrong, or the machine: retrying them one by one could take hours.
MAX_RETRIED = 10


def read(path):
    """Returns the result of each test of a JUnit file, and what it printed, by its binary and its name."""
    tests = {}
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        tags = {part.tag for part in case}
        result = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        printed = [part.text or "" for part in case if part.tag in ("failure", "error", "system-out", "system-err")]
        key = case.get("classname", ""), case.get("name", "")
        before, printed_before = tests.get(key, ("passed", []))  # of pytest, a test and its teardown are two cases
        tests[key] = ("failed" if "failed" in (before, result) else result, printed_before + printed)
    return tests


def read_all(paths):
    tests = {}
    for path in paths:
        if pathlib.Path(path).exists():
            tests.update(read(path))
    return tests


def retry(paths):
    failed = [test for test, (result, _) in read_all(paths).items() if result == "failed"]
    if not 0 < len(failed) <= MAX_RETRIED:
        print(f"{len(failed)} tests failed: not retried", file=sys.stderr)
        return 1
    print(" + ".join(f"(binary_id(={binary}) & test(={name}))" for binary, name in failed))
    return 0


def collect(runner, folder, paths, retried):
    again = read_all([retried] if retried else [])
    for (binary, name), (result, printed) in read_all(paths).items():
        if result == "failed" and again.get((binary, name), ("failed", []))[0] == "passed":
            result = "flaky"
        full_name = f"{binary}::{name}" if binary else name
        print(runner, result, full_name)
        if result == "flaky":
            file = pathlib.Path(folder, re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{runner}-{full_name}")[:200])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(printed))
    for path in map(pathlib.Path, paths):
        if not path.exists():
            print(runner, "failed", f"there is no {path.name}")


def summary(seconds, paths):
    names = collections.defaultdict(list)
    for path in paths:
        for line in pathlib.Path(path).read_text().splitlines():
            runner, result, name = line.split(" ", 2)
            names[result].append(f"  {runner:<9} {name}")
    print()
    for result, title in (("flaky", "flaky: failed, and passed when retried; see tests/flaky.md"), ("failed", "failed")):
        print(f"{len(names[result])} {title}", *sorted(names[result]), sep="\n")
    passed, flaky, failed, skipped = (len(names[result]) for result in ("passed", "flaky", "failed", "skipped"))
    counts = f"{passed + flaky} passed" + f" ({flaky} flaky)" * (flaky > 0) + f", {failed} failed" * (failed > 0)
    print(f"     Summary [{seconds:>8}.000s] {passed + flaky + failed} tests run: {counts}, {skipped} skipped")


def main(arguments):
    match arguments:
        case ["retry", *paths]:
            return retry(paths)
        case ["collect", runner, folder, *paths, "--retried", retried]:
            collect(runner, folder, paths, retried)
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
