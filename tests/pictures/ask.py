"""Asks a Prometheus what a browser with Grafana would ask it for the dashboards, and writes the answers as JSON.

`ask.py URL --out FILE [--range S] [--scrape S] [--set BOARD.VARIABLE=VALUE]... [--when QUERY] [--without BOARD]...`, or
`ask.py URL --out FILE --simulated` for *Compare runs* alone, over the whole history of tests/dashboards/simulated.py.

Variables are All, or what --set says. Range, step and rate interval are counted as Grafana does it: a point for each
pixel of the panel, never finer than a scrape; four scrapes for a rate. The queries themselves are filled in by
tests/dashboards/panels.py. With --when it waits, up to three minutes, until that query has a result.

Nothing is judged here but a variable without values; draw.mjs looks at the rest.
"""
import argparse
import json
import math
import re
import sys
import time
import urllib.error
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/dashboards"))

import boards  # noqa: E402
import panels  # noqa: E402
import simulated  # noqa: E402

# steps that Grafana rounds to, in seconds
STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600]
PAGE = 1600  # pixels
WAIT = 180  # seconds


def may_be_empty(name):
    """Titles of panels that need not have data in the demo: panels.py has the reasons."""
    return {part.split("'")[1] for _, file, part in panels.MAY_BE_EMPTY if file == name}


def step_of(panel, span, scrape):
    """Seconds between two points of a panel."""
    width = PAGE * panel["gridPos"]["w"] / 24
    wanted = max(span / width, scrape)
    return next((step for step in STEPS if step >= wanted), STEPS[-1])


class Drawing(panels.Asking):
    """One dashboard with its variables, asked as its panels would be."""

    def __init__(self, prometheus, name, board, chosen, span, scrape, end):
        super().__init__(prometheus, name, board, "all", span, end)
        self.chosen, self.span, self.scrape = chosen, span, scrape

    def choose(self):
        self.resolve()
        for name, value in self.chosen.items():
            if name not in self.values:
                self.error("--set", f"it has no variable {name}")
            self.values[name] = [value] if boards.variables(self.board)[name]["multi"] else value

    def rows(self, expression, instant, step):
        values = self.values | {"__interval": f"{step}s", "__rate_interval": f"{max(step + self.scrape, 4 * self.scrape)}s"}
        query = panels.filled(expression, values)
        if instant:
            return self.prometheus.get("query", query=query, time=self.end)["result"]
        # times are multiples of the step, as Grafana aligns them
        start, end = (math.floor(moment / step) * step for moment in (self.start, self.end))
        return self.prometheus.get("query_range", query=query, start=start, end=end, step=step)["result"]

    def panel(self, panel):
        step = step_of(panel, self.span, self.scrape)
        for target in panel.get("targets", []):
            kept = {key: target[key] for key in ("refId", "legendFormat", "format", "instant")}
            yield kept | {"step": step, "rows": self.rows(target["expr"], target["instant"], step)}

    def annotation(self, note):
        kept = {"name": note["name"], "color": note["iconColor"], "useValueForTime": note["useValueForTime"]}
        return kept | {"rows": self.rows(note["expr"], False, self.scrape)}

    def answers(self):
        self.choose()
        notes = [note for note in self.board["annotations"]["list"] if note["enable"]]
        return {
            "board": self.board,
            "from": self.start * 1000,
            "to": self.end * 1000,
            "variables": [
                {"label": variable.get("label") or name, "value": self.chosen.get(name, "All" if variable["multi"] else self.values[name])}
                for name, variable in boards.variables(self.board).items()
                if name in self.values
            ],
            "panels": {panel["id"]: list(self.panel(panel)) for panel in boards.panels(self.board)},
            "annotations": [self.annotation(note) for note in notes],
            "mayBeEmpty": sorted(may_be_empty(self.name)),
        }


def await_result(prometheus, query):
    """Waits until the query has a result; goes on without one in the end."""
    deadline = time.monotonic() + WAIT
    while not prometheus.get("query", query=query)["result"] and time.monotonic() < deadline:
        time.sleep(1)  # poll


def everything(prometheus, given):
    """The answers for all dashboards, and what is wrong with them."""
    if given.when:
        await_result(prometheus, given.when)
    chosen = {}
    for board, variable, value in given.set:
        chosen.setdefault(board, {})[variable] = value
    answers, complaints = {}, []
    for file, board in boards.load(ROOT).items():
        name = Path(file).stem
        if name in given.without:
            continue
        drawing = Drawing(prometheus, file, board, chosen.get(name, {}), given.range, given.scrape, given.end)
        answers[name] = drawing.answers()
        if given.simulated:
            answers[name]["mayBeEmpty"] = []
        complaints += drawing.errors
    return answers, complaints


def setting(word):
    """The parts of BOARD.VARIABLE=VALUE."""
    parts = re.fullmatch(r"(\w+)\.(\w+)=(.+)", word)
    if not parts or not (ROOT / f"dashboards/{parts[1]}.json").exists():
        raise argparse.ArgumentTypeError(f"{word} is no BOARD.VARIABLE=VALUE with a file of dashboards/, as in container.container=train-1")
    return parts.groups()


def simulated_history(given):
    """The options for the whole simulated history."""
    given.without = [Path(name).stem for name in boards.load(ROOT) if name != "compare.json"]
    given.range, given.end, given.scrape = simulated.END - simulated.START, simulated.END, simulated.STEP
    given.set = [("compare", "group", simulated.COMPARED)]


def main():
    words = argparse.ArgumentParser()
    words.add_argument("url")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--range", type=int, default=900, help="seconds back from now")
    words.add_argument("--scrape", type=int, default=15, help="seconds between two scrapes")
    words.add_argument("--set", type=setting, action="append", default=[])
    words.add_argument("--when")
    words.add_argument("--without", action="append", default=[], help="a dashboard that is left out")
    words.add_argument("--simulated", action="store_true")
    given = words.parse_args()
    given.end = None
    if given.simulated:
        simulated_history(given)
    prometheus = panels.Prometheus(given.url)
    try:
        answers, complaints = everything(prometheus, given)
    except urllib.error.URLError as error:
        raise SystemExit(f"{given.url} does not answer as a Prometheus does: {error.reason}") from error
    given.out.write_text(json.dumps(answers))
    for complaint in complaints:
        print(complaint)
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
