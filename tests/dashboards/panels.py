"""Sends every query of every dashboard to a real Prometheus, as Grafana would: `panels.py URL [--since TIME] [--wait S]`.

Variables are resolved in order, as Grafana's data source does; each dashboard is queried with All and with the first value of
each variable. A variable with one value has the first both times. Every query must return data, not only NaN; no two series of a
panel may have the same legend; no label of a legend may be missing. Queries that may be empty are listed in
MAY_BE_EMPTY with the reason.

The queries are repeated until all succeed or the wait is over, because the observed events take a moment to happen.

Not here: how Grafana displays the results. No Grafana server was used.
"""
import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import boards
import catalog

ONLY_V2 = "for containers it exists only on cgroup v2; the demo's trainings may run on v1, and its paper host has it"
NO_XID = "user space cannot write a driver's line into the kernel log"
NOT_DROPPED = "has data only where a limit was reached"
NOT_STUCK = "has data only while a process cannot be killed"
NOT_ALLOCATED = "the demo has neither a kubelet nor NVIDIA's runtime hook, so nothing reports allocations"
NO_POD = "the demo has no pods"
NO_OWNER = "a container has an owner only where a label for it is configured"
NOT_REPORTING = "no program of the demo reports from inside; backfill.py queries these panels in a simulated history"
# reasons that hold wherever the demo runs
NEVER = {NO_XID, NOT_ALLOCATED, NOT_REPORTING, NO_POD}
# Groups of runs of the demo: by itself Grafana selects the first in alphabetical order, which may have one run without a GPU.
COMPARED = {"all": "piper", "first": "aligner"}
# (mode, dashboard, part of the panel or annotation) to the reason for which it may be empty
MAY_BE_EMPTY = {
    ("*", "why.json", "'Xids by container'"): NO_XID,
    ("*", "container.json", "'Memory pressure'"): ONLY_V2,
    ("first", "why.json", "'Stalled on memory' A"): ONLY_V2,
    ("*", "container.json", "'RAM and limit' E"): ONLY_V2,
    ("*", "container.json", "'RAM and limit' F"): NO_POD,
    ("*", "container.json", "'RAM and limit' G"): NO_POD,
    ("*", "container.json", "'RAM by kind' B"): NO_POD,
    ("*", "container.json", "'Swap' B"): ONLY_V2,
    ("*", "container.json", "'At the limits' A"): ONLY_V2,
    ("*", "container.json", "'Faults and refaults' B"): ONLY_V2,
    ("*", "overview.json", "'GPUs by container: allocated and used' A"): NOT_ALLOCATED,
    ("*", "overview.json", "'Containers by distance to their limit' I"): NO_OWNER,
    ("*", "container.json", "'Container' B"): NO_OWNER,
    ("*", "overview.json", "'Read errors and dropped data' B"): NOT_DROPPED,
    ("*", "overview.json", "'Read errors and dropped data' F"): NOT_STUCK,
    ("*", "container.json", "'torch: allocated and reserved'"): NOT_REPORTING,
    ("*", "container.json", "'torch: peaks'"): NOT_REPORTING,
    ("*", "container.json", "'torch: failed allocations'"): NOT_REPORTING,
    ("*", "container.json", "'VRAM by component and operation'"): NOT_REPORTING,
    ("*", "container.json", "'RAM by component and operation'"): NOT_REPORTING,
    ("*", "container.json", "'Training speed'"): NOT_REPORTING,
    ("*", "compare.json", "'RAM by training step'"): NOT_REPORTING,
    ("*", "compare.json", "'VRAM by training step'"): NOT_REPORTING,
}


class Prometheus:
    """The HTTP API of one server."""

    def __init__(self, url):
        self.url = url

    def get(self, path, **arguments):
        return self.fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments, doseq=True)}")["data"]

    @staticmethod
    def fetch(url):
        """The JSON at an address."""
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{url}: {error.read().decode()}") from error


def escaped(value):
    """A value for a regular expression inside a string of PromQL, as Grafana escapes it."""
    return re.sub(r"([$^*{}\[\]+?.()|\\])", r"\\\\\1", value)


def filled(text, values):
    def value(found):
        chosen = values[found[1] or found[2] or found[3]]
        if isinstance(chosen, str):
            return chosen
        return escaped(chosen[0]) if len(chosen) == 1 else "(" + "|".join(map(escaped, chosen)) + ")"

    return boards.VARIABLE.sub(value, text)


class Asking:
    """One dashboard with one choice of values."""

    STEP, RATE_INTERVAL = 1, "15s"  # of queries; the demo is scraped every second
    COMPARED, MAY_BE_EMPTY = COMPARED, MAY_BE_EMPTY

    def __init__(self, prometheus, name, board, mode, span, end=None):
        self.prometheus, self.name, self.board, self.mode = prometheus, name, board, mode
        self.end = end or time.time()
        self.start = self.end - span
        self.errors, self.with_data, self.empty = [], 0, []
        self.hosts = set(prometheus.get("label/instance/values", **{"match[]": "memledger_build_info"}))
        self.values = {"__rate_interval": self.RATE_INTERVAL, "__interval": f"{self.STEP}s"}
        self.values |= {"__range": f"{span}s", "__range_s": str(span)}

    def error(self, where, what):
        self.errors.append(f"{self.name} [{self.mode}] {where}: {what}")

    def resolve(self):
        for name, variable in boards.variables(self.board).items():
            if variable["type"] != "query":
                continue
            selector, label = boards.label_values(variable["query"]["query"])
            arguments = {"match[]": filled(selector, self.values), "start": self.start, "end": self.end}
            found = sorted(self.prometheus.get(f"label/{label}/values", **arguments))
            if label in catalog.OPTIONAL:
                found = [""]  # the containers of the demo are in no pod, but those of its paper host
            if not found:
                self.error(f"variable ${name}", "no values")
                found = [""]
            if name == "group":
                self.values[name] = self.COMPARED[self.mode]
            elif not variable["multi"]:
                self.values[name] = found[0]  # Grafana escapes only the values of variables that can have several
            else:
                self.values[name] = variable["allValue"] if self.mode == "all" else [found[0]]

    def queries(self):
        return boards.queries(self.board)

    def query_all(self):
        self.resolve()
        legends = {}
        for where, expression, panel, target in self.queries():
            query = filled(expression, self.values)
            if target and target["instant"]:
                rows = self.prometheus.get("query", query=query, time=self.end)["result"]
            else:
                arguments = {"query": query, "start": self.start, "end": self.end, "step": self.STEP}
                rows = self.prometheus.get("query_range", **arguments)["result"]
            self.check_data(where, query, rows)
            for unknown in {row["metric"].get("instance") for row in rows} - self.hosts - {None}:
                self.error(where, f"shows {unknown}, which is not a memledger: {query}")
            if target and target["format"] != "table":
                self.legends(where, target["legendFormat"], rows, legends.setdefault(panel["id"], {}))
        return self

    def check_data(self, where, query, rows):
        points = [float(point[1]) for row in rows for point in row.get("values") or [row["value"]]]
        if any(map(math.isfinite, points)):
            self.with_data += 1
            if any(reason in NEVER and name == self.name and part in where for (_, name, part), reason in self.MAY_BE_EMPTY.items()):
                self.error(where, "has data but is in MAY_BE_EMPTY: remove it there")
        elif points:
            self.error(where, f"only NaN or infinite: {query}")
        else:
            for (mode, name, part), reason in self.MAY_BE_EMPTY.items():
                if mode in ("*", self.mode) and name == self.name and part in where:
                    self.empty.append(f"{self.name} [{self.mode}] {where}: {reason}")
                    return
            self.error(where, f"no data: {query}")

    def legends(self, where, form, rows, taken):
        """Checks that each series of a panel has its own legend, also over several queries."""
        for row in rows:
            for label in boards.LEGEND.findall(form):
                if label not in row["metric"] and label not in catalog.OPTIONAL | SETTINGS:
                    self.error(where, f"legend {form!r}, but the series has no {label}: {row['metric']}")
            legend = boards.LEGEND.sub(lambda found: row["metric"].get(found[1], ""), form)
            if legend in taken:
                self.error(where, f"two series have the legend {legend!r}: {row['metric']} and {taken[legend]}")
            taken[legend] = row["metric"]


# labels of a run that may be unset in its environment
SETTINGS = {"settings", "batch_size", "num_workers", "num_devices", "precision", "accum"}


def query_dashboards(prometheus, root, span):
    return [
        Asking(prometheus, name, board, mode, span).query_all()
        for name, board in boards.load(root).items()
        for mode in ("all", "first")
    ]


def stale_exceptions(root):
    """Exceptions for what is not there any more."""
    there = [(name, query[0]) for name, board in boards.load(root).items() for query in boards.queries(board)]
    for _, name, part in MAY_BE_EMPTY:
        if not any(name == file and part in where for file, where in there):
            yield f"MAY_BE_EMPTY names {part} of {name}, which is not there"


def main():
    words = argparse.ArgumentParser()
    words.add_argument("url")
    words.add_argument("--since", type=float, help="Unix time; without it, two minutes ago")
    words.add_argument("--wait", type=float, default=0)
    words.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    given = words.parse_args()
    deadline = time.monotonic() + given.wait
    while True:
        span = int(time.time() - given.since) if given.since else 120
        dashboards = query_dashboards(Prometheus(given.url), given.root, span)
        errors = [error for each in dashboards for error in each.errors]
        errors += stale_exceptions(given.root)
        if not errors or time.monotonic() > deadline:
            break
        time.sleep(1)  # poll
    for line in sorted({line for each in dashboards for line in each.empty}):
        print("empty, as may be:", line)
    for error in errors:
        print(error)
    print(f"{sum(each.with_data for each in dashboards)} queries have data, {len(errors)} errors")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
