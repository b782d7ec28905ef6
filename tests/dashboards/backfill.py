"""A real Prometheus with the simulated history (simulated.py): `backfill.py check`, or `backfill.py serve FILE`.

promtool writes the history's blocks, then those of the shipped recording rules, which it evaluates on a Prometheus with the history.
`check` queries it for all panels of *Compare runs*, and for the panels of other dashboards that are empty in the demo because no
program reports there; it compares each run's line with the run as it was simulated. `serve` writes its address to the file and
keeps it until SIGTERM. $MEMLEDGER_TEST_PROMETHEUS and $MEMLEDGER_TEST_PROMTOOL are the programs; it listens on the loopback address.
"""
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import boards
import catalog
import panels
import promql
import simulated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/demo"))
from processes import Program, free_port, run  # noqa: E402

PORT = 9290
RULES = ROOT / "deploy/prometheus/rules/recording.yml"
SPAN = simulated.END - simulated.START
PACE = 300  # seconds between two points of a graph
# Backfilled series have no staleness markers: without this, two runs of one container name would overlap for five minutes.
LOOKBACK = f"--query.lookback-delta={simulated.STEP - 1}s"
# Instead of a block for every two hours of the history, and of each rule: each of them waits for the disk.
LARGE_BLOCKS = f"--max-block-duration={SPAN // 3600}h"


class Server:
    """A Prometheus that scrapes nothing and keeps what promtool writes."""

    def __init__(self, folder):
        self.folder, self.program = folder, None
        self.url = f"http://127.0.0.1:{free_port(PORT)}"
        (folder / "prometheus.yml").write_text("global: {}\n")

    def start(self):
        words = [os.environ["MEMLEDGER_TEST_PROMETHEUS"], "--config.file=prometheus.yml", "--storage.tsdb.path=data", LOOKBACK]
        words += [f"--web.listen-address={self.url.removeprefix('http://')}", "--storage.tsdb.retention.time=10y"]
        self.program = Program(words, self.folder / "log", cwd=self.folder)
        self.program.ready(f"{self.url}/-/ready")

    def stop(self):
        if self.program:
            self.program.stop()
            self.program = None


def write_blocks(folder, kind, *words):
    promtool = os.environ["MEMLEDGER_TEST_PROMTOOL"]
    run(promtool, "tsdb", "create-blocks-from", "--quiet", LARGE_BLOCKS, kind, *words, cwd=folder)


@contextlib.contextmanager
def prometheus():
    """Runs one with the history and what the recording rules make of it; yields its address."""
    with tempfile.TemporaryDirectory(prefix="memledger-history-") as name:
        folder = Path(name)
        (folder / "history").write_text("".join(f"{line}\n" for line in simulated.history()))
        write_blocks(folder, "openmetrics", "history", "data")
        server = Server(folder)
        try:
            server.start()
            period = [f"--start={simulated.START}", f"--end={simulated.END}", f"--eval-interval={simulated.STEP}s"]
            write_blocks(folder, "rules", f"--url={server.url}", *period, "--output-dir=data", RULES)
            server.stop()  # it reads new blocks when it starts
            server.start()
            yield server.url
        finally:
            server.stop()


def conformance(root):
    """Yields the names and labels of the history that are not those of the catalog."""
    families = catalog.families(root)
    custom = {"memledger_container_run_info": {"optimizer"}}  # a label memledger.run.KEY
    known = set()
    for line in simulated.history():
        name = line.partition("{")[0]
        if line.startswith("#") or (series := line.partition("} ")[0]) in known:
            continue
        known.add(series)
        labels = {label for label, _, _ in promql.parse(f"{series}}}").matchers}
        family = families.get(name)
        if not family:
            yield f"{name} is not in the catalog"
        elif extra := labels - family.labels - custom.get(name, set()):
            yield f"{name} has no label {sorted(extra)}"
        elif missing := family.required - labels:
            yield f"{name} lacks label {sorted(missing)}"


class Simulated(panels.Asking):
    """A dashboard queried for the whole history, with a point every PACE seconds. Nothing may be empty."""

    STEP, MAY_BE_EMPTY = PACE, {}
    COMPARED = dict.fromkeys(("all", "first"), simulated.COMPARED)
    RATE_INTERVAL = f"{4 * simulated.STEP}s"

    def __init__(self, server, name, board, mode):
        super().__init__(server, name, board, mode, SPAN, end=simulated.END)

    def queries(self):
        """All of *Compare runs*; of the others those that need a program that reports."""
        unreported = [part for (_, file, part), why in panels.MAY_BE_EMPTY.items() if why == panels.NOT_REPORTING and file == self.name]
        for query in super().queries():
            if self.name == "compare.json" or any(part in query[0] for part in unreported):
                yield query


def lines_of_trends(asked):
    """The trends of a dashboard: yields the title and, by line, the first and the last value on the x axis."""
    for where, expression, panel, target in asked.queries():
        if panel and panel["type"] == "trend" and target["refId"] == "B":
            query = panels.filled(expression, asked.values)
            arguments = {"query": query, "start": asked.start, "end": asked.end, "step": PACE}
            rows = asked.prometheus.get("query_range", **arguments)["result"]
            yield panel["title"], {row["metric"]["line"]: [float(row["values"][at][1]) for at in (0, -1)] for row in rows}


def axes(asked):
    """Yields what is wrong with the x axes: each run of the group, and no other, from its start to its end."""
    compared = [run for run in simulated.runs() if run.setup.group == simulated.COMPARED]
    for title, lines in lines_of_trends(asked):
        if len(lines) != len(compared):
            yield f"{title}: {len(lines)} lines, expected {len(compared)}: {sorted(lines)}"
        for simulation in compared:
            own = [ends for line, ends in lines.items() if simulation.name in line and simulation.settings in line]
            if len(own) != 1:
                yield f"{title}: {len(own)} lines for {simulation.name}"
                continue
            in_steps = title.endswith("by training step")
            length = simulation.steps(simulation.usages[-1]) if in_steps else simulation.end - simulation.start
            # the first and the last point are up to PACE seconds from the start and the end
            slack = PACE * (simulation.setup.speed / 192 * 1.1 if in_steps else 1) + simulated.FIRST_STEP / 2 + simulated.STEP
            first, last = own[0] if in_steps else (hours * 3600 for hours in own[0])
            if first > slack or not length - slack <= last <= length + simulated.STEP:
                yield f"{title}: {simulation.name} is from {first} to {last}, expected 0 to {length}"


# what is changed in compare.json, and a part of the error that it must cause
MUTATIONS = [
    ("container_run:memledger_training_steps_total:max{", "container_run:memledger_training_step_total:max{", "no data"),
    ("{{settings}} {{run}}", "{{precision}}", "two series have the legend"),
    ('group=\\"$group\\", run=~', "run=~", "8 lines, expected 7"),
    ("(time() - container_run:", "(0 * time() + container_run:", "expected 0 to"),
]


def errors_of(server, name, board, modes):
    """Returns the errors of one dashboard, and how many of its queries have data."""
    asked = [Simulated(server, name, board, mode).query_all() for mode in modes]
    errors = [error for each in asked for error in each.errors]
    if name == "compare.json":
        errors += axes(asked[0])
    return errors, sum(each.with_data for each in asked)


def check():
    """Prints the errors; returns whether there are any."""
    errors, answered = list(conformance(ROOT)), 0
    with prometheus() as url:
        server = panels.Prometheus(url)
        dashboards = boards.load(ROOT)
        for name, board in dashboards.items():
            found, count = errors_of(server, name, board, ("all", "first"))
            errors, answered = errors + found, answered + count
        good = json.dumps(dashboards["compare.json"])
        for old, new, expected in MUTATIONS:
            assert old in good, f"compare.json has no {old} any more: choose another mutation"
            found, _ = errors_of(server, "compare.json", json.loads(good.replace(old, new)), ["all"])
            if not any(expected in error for error in found):
                errors.append(f"{old} became {new}, and no error has {expected!r}: {found}")
    for error in errors:
        print(error)
    print(f"{answered} queries have data, {len(MUTATIONS)} mutations, {len(errors)} errors")
    return bool(errors)


def serve(file):
    """Writes the address to the file once it can be queried; keeps the server until SIGTERM."""
    with prometheus() as url:
        new = file.with_suffix(".new")
        new.write_text(url)
        new.replace(file)
        while True:
            signal.pause()


def main():
    if sys.argv[1:] == ["check"]:
        sys.exit(check())
    if len(sys.argv) != 3 or sys.argv[1] != "serve":
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the server and its folder are removed
    serve(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
