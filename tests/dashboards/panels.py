"""Asks a real Prometheus every query of every dashboard, as Grafana would: `panels.py URL [--since TIME] [--wait S]`.

Variables are resolved in their order as Grafana's data source does it; each dashboard is asked with All and with the
first value of each. Every query must have data, not only NaN; no two series of a panel may have one legend; no label
of a legend may be missing. What may be empty stands in MAY_BE_EMPTY with its reason.

It asks again until all is well or the wait is over, because the things that are watched need a moment to happen.

Not here: what Grafana makes of the answers. No Grafana was asked.
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

NO_PSI = "of a container it exists only on cgroup v2; the demo's trainings may run on v1, and its paper host has it"
NO_XID = "the kernel log takes no line of a driver from anybody but the kernel"
NOT_DROPPED = "there is something to see only where a limit was reached"
NOT_GIVEN = "neither a kubelet nor NVIDIA's runtime hook can be played: nobody tells what was given"
# reasons that hold wherever the demo is played
NEVER = {NO_XID, NOT_GIVEN}
# (mode, dashboard, part of the panel or annotation) to the reason for which it may be empty
MAY_BE_EMPTY = {
    ("*", "why.json", "'Xids of containers'"): NO_XID,
    ("first", "container.json", "'Memory pressure'"): NO_PSI,
    ("first", "why.json", "'Standing still for memory' A"): NO_PSI,
    ("*", "overview.json", "'GPUs by container: given and used' A"): NOT_GIVEN,
    ("*", "overview.json", "'Faults and what was left out' B"): NOT_DROPPED,
}


class Prometheus:
    """The HTTP API of one server."""

    def __init__(self, url):
        self.url = url

    def get(self, path, **arguments):
        return self.fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments, doseq=True)}")["data"]

    @staticmethod
    def fetch(question):
        """The JSON at an address."""
        try:
            with urllib.request.urlopen(question, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{question}: {error.read().decode()}") from error


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

    def __init__(self, prometheus, name, board, mode, span):
        self.prometheus, self.name, self.board, self.mode = prometheus, name, board, mode
        self.end = time.time()
        self.start = self.end - span
        self.complaints, self.answered, self.empty = [], 0, []
        self.hosts = set(prometheus.get("label/instance/values", **{"match[]": "memledger_build_info"}))
        self.values = {"__rate_interval": "15s", "__interval": "1s", "__range": f"{span}s"}

    def say(self, where, what):
        self.complaints.append(f"{self.name} [{self.mode}] {where}: {what}")

    def resolve(self):
        for name, variable in boards.variables(self.board).items():
            if variable["type"] != "query":
                continue
            selector, label = boards.label_values(variable["query"]["query"])
            arguments = {"match[]": filled(selector, self.values), "start": self.start, "end": self.end}
            found = sorted(self.prometheus.get(f"label/{label}/values", **arguments))
            if not found:
                self.say(f"variable ${name}", "it has no values")
                found = [""]
            self.values[name] = variable["allValue"] if self.mode == "all" else [found[0]]

    def ask(self):
        self.resolve()
        legends = {}
        for where, expression, panel, target in boards.queries(self.board):
            query = filled(expression, self.values)
            if target and target["instant"]:
                rows = self.prometheus.get("query", query=query, time=self.end)["result"]
            else:
                arguments = {"query": query, "start": self.start, "end": self.end, "step": 1}
                rows = self.prometheus.get("query_range", **arguments)["result"]
            self.judge(where, query, rows)
            for stranger in {row["metric"].get("instance") for row in rows} - self.hosts - {None}:
                self.say(where, f"it shows {stranger}, which is no memledger: {query}")
            if target and target["format"] != "table":
                self.legends(where, target["legendFormat"], rows, legends.setdefault(panel["id"], {}))
        return self

    def judge(self, where, query, rows):
        points = [float(point[1]) for row in rows for point in row.get("values") or [row["value"]]]
        if any(map(math.isfinite, points)):
            self.answered += 1
            if any(reason in NEVER and name == self.name and part in where for (_, name, part), reason in MAY_BE_EMPTY.items()):
                self.say(where, "it has data and stands in MAY_BE_EMPTY: take it off")
        elif points:
            self.say(where, f"only NaN or infinite: {query}")
        else:
            for (mode, name, part), reason in MAY_BE_EMPTY.items():
                if mode in ("*", self.mode) and name == self.name and part in where:
                    self.empty.append(f"{self.name} [{self.mode}] {where}: {reason}")
                    return
            self.say(where, f"no data: {query}")

    def legends(self, where, form, rows, taken):
        """Within one panel each series needs a legend of its own, also over several queries."""
        for row in rows:
            for label in boards.LEGEND.findall(form):
                if label not in row["metric"] and label not in catalog.OPTIONAL | SETTINGS:
                    self.say(where, f"legend {form!r}, but the series has no {label}: {row['metric']}")
            legend = boards.LEGEND.sub(lambda found: row["metric"].get(found[1], ""), form)
            if legend in taken:
                self.say(where, f"two series are called {legend!r}: {row['metric']} and {taken[legend]}")
            taken[legend] = row["metric"]


# labels of a run that its environment need not set
SETTINGS = {"batch_size", "num_workers", "num_devices", "precision", "accum"}


def round_of_questions(prometheus, root, span):
    return [
        Asking(prometheus, name, board, mode, span).ask()
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
        asked = round_of_questions(Prometheus(given.url), given.root, span)
        complaints = [complaint for each in asked for complaint in each.complaints]
        complaints += stale_exceptions(given.root)
        if not complaints or time.monotonic() > deadline:
            break
        time.sleep(1)  # poll
    for line in sorted({line for each in asked for line in each.empty}):
        print("empty, as may be:", line)
    for complaint in complaints:
        print(complaint)
    print(f"{sum(each.answered for each in asked)} queries have data, {len(complaints)} complaints")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
