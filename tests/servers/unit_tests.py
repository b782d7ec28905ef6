"""Runs the shipped unit tests of the rules with vmalert-tool, which evaluates MetricsQL, and promtool 3: `unit_tests.py VMALERT_TOOL PROMTOOL [ROOT]`.

vmalert-tool gets the files of promtool with three changes that it needs: the name of the part with queries, no label `alertgroup`, and
points in time, because its clock begins in 2000 and promtool's in 1970. Where both evaluators are right and differ, by a minute or two, the
tests ask a minute or two later.
"""
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

# The first second of vmalert-tool's clock.
EPOCH = 946684800
# One item of promtool's notation: a number, its increment, and how often it is repeated.
ITEM = re.compile(r"(?P<value>-?\d+(?:\.\d+)?)(?P<step>[+-]\d+(?:\.\d+)?)?(?P<times>x\d+)?")


def is_time(name):
    """Returns whether values of the series are points in time."""
    return re.search(r"(timestamp_seconds|start_time_seconds)\b", name.partition("{")[0]) is not None


def shifted(values):
    """Adds the epoch to each number of promtool's notation for the values of a series."""

    def shift(item):
        found = ITEM.fullmatch(item)
        if not found:
            return item  # a gap, or a staleness marker
        return f"{float(found['value']) + EPOCH:.0f}{found['step'] or ''}{found['times'] or ''}"

    return " ".join(map(shift, values.split()))


def convert(document):
    """Changes a test file of promtool into one of vmalert-tool."""
    for test in document["tests"]:
        for series in test["input_series"]:
            if is_time(series["series"]):
                series["values"] = shifted(str(series["values"]))
        queries = test.pop("promql_expr_test", [])
        for query in queries:
            for sample in query["exp_samples"]:
                if is_time(sample["labels"]):
                    sample["value"] += EPOCH
        if queries:
            test["metricsql_expr_test"] = queries
    return document


def of_vmalert(tool, path, folder):
    """Runs a test file with vmalert-tool; returns what it prints if that fails."""
    document = convert(yaml.safe_load(path.read_text()))
    document["rule_files"] = [str((path.parent / name).resolve()) for name in document["rule_files"]]
    converted = Path(folder) / path.name
    converted.write_text(yaml.safe_dump(document))
    return output([tool, "unittest", "-disableAlertgroupLabel", f"--files={converted}"], folder)


def of_promtool(tool, path, folder):
    return output([tool, "test", "rules", str(path)], folder)


def output(command, folder):
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    return f"{result.stdout[-8000:]}{result.stderr[-4000:]}" if result.returncode else ""


def main():
    vmalert_tool, promtool = sys.argv[1:3]
    root = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(__file__).resolve().parents[2]
    files = sorted((root / "deploy/prometheus/tests").glob("*.yml"))
    runs = [(run, tool, path) for path in files for run, tool in ((of_vmalert, vmalert_tool), (of_promtool, promtool))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as several:
        outputs = list(several.map(lambda each: each[0](each[1], each[2], folder), runs))
    failed = [(Path(tool).name, path.name, text) for (_, tool, path), text in zip(runs, outputs, strict=True) if text]
    for tool, name, text in failed:
        print(f"{name} at {tool}:\n{text}")
    print(f"{len(failed)} of {len(runs)} runs of unit tests fail")
    sys.exit(bool(failed or not files))


if __name__ == "__main__":
    main()
