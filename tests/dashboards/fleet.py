"""Measures the dashboards at 200 hosts with 50 containers each: `fleet.py [--hosts N]`. It writes its part of docs/fleet.md.

A simulated hour of a fleet becomes the blocks of a real Prometheus: promtool writes the series that the queries select (labels from
the catalog, made-up values), then those of the shipped recording rules. Then every query of every panel, variable and enabled
annotation is sent, with the variables that a dashboard opens with. Exit status 1 if the answers to one panel are over LIMIT, or a query
fails. $MEMLEDGER_TEST_PROMETHEUS and $MEMLEDGER_TEST_PROMTOOL are the programs; Prometheus listens on the loopback address.

Not here: how long a browser draws the answers.
"""
import argparse
import functools
import itertools
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import backfill
import boards
import catalog
import panels
import promql
import simulated
import yaml
from backfill import ROOT, Program

HOSTS, CONTAINERS, GPUS = 200, 50, 8
HOSTS_IN_CLUSTER, CHUNK = 50, 25
LIMIT = 1_000_000  # bytes of JSON for one panel
PACE = simulated.STEP  # seconds between two samples
SAMPLES = 61
END = simulated.END - PACE  # within one block of Prometheus
START = END - (SAMPLES - 1) * PACE
STEP = 15  # seconds: Grafana's minimum between two points, for the range of a rate
POINTS = 1_000  # of a graph as wide as a page, whatever its range; a panel may say less
RATE_INTERVAL = 4 * PACE  # where the data source knows the scrape interval
DOCUMENT, BEGIN, FINISH = ROOT / "docs/fleet.md", "<!-- make bench-fleet -->", "<!-- end -->"
SHOWN = 15  # panels in the document
GIB = 1 << 30

# Values of labels: label to (part of the family's name, values); the first that fits.
VALUES = {
    "role": [("", ["trainer", "dataloader_worker", "other"])],
    "runtime": [("", ["containerd"])],
    "collector": [("", ["host", "own", "cgroup", "process", "pss", "shm", "gpu", "oom"])],
    "source": [("gpus_", ["nvml"]), ("oom", ["kmsg", "vmstat", "cgroup"]), ("", ["reporter"])],
    "component": [
        ("host_", ["containers", "processes", "page_cache", "kernel", "free"]),
        ("pod_memory", ["containers", "rest"]),
        ("operation", ["model", "validation"]),
        ("", ["anon", "file", "shmem", "kernel", "other"]),
    ],
    "operation": [("", ["forward", "backward"])],
    "reason": [
        ("exits", ["completed", "error", "oom_container", "stopped"]),
        ("throttle", ["sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal", "hw_power_brake"]),
        ("restarts", ["ended", "timeout", "invalid_message", "driver"]),
        ("rejected", ["peer", "no_container", "connections", "rate", "too_large", "malformed"]),
        ("withheld", ["stale", "negative", "unknown_gpu"]),
        ("read_errors", ["permission", "io"]),
    ],
    "kind": [
        ("refaults", ["anon", "file"]),
        ("nvlink", ["crc_flit", "crc_data", "replay", "recovery", "ecc_data"]),
        ("retired", ["single_bit", "double_bit"]),
        ("", ["corrected", "uncorrected"]),
    ],
    "victim": [("", ["main", "child"])],
    "scope": [("process_oom", ["host", "limit"]), ("", ["container"])],
    "event": [("", ["high", "max"])],
    "mode": [("", ["user", "system"])],
    "clock": [("", ["sm", "memory"])],
    "direction": [("", ["transmitted", "received"])],
    "holder": [("", ["tensors", "torch_cache", "outside_torch", "not_reporting"])],
    "rank": [("", ["0"])],
    "process": [("", ["python3"])],
    "xid": [("container", ["31"])],
}
# Labels of one value for each container or host, filled in from its names.
DESCRIPTION = {
    "version": "0.1.0", "revision": "3cc55c2", "rustversion": "1.90.0", "family": "memledger_process_gpu_memory_used_bytes",
    "container_id": "{id}", "image": "registry.example.com/team/train:2026.11", "cgroup_version": "2", "pid": "{pid}",
    "run": "{id}-20261119T220000Z", "group": "group-{group:03}", "batch_size": "32", "num_workers": "4", "num_devices": "1",
    "precision": "bf16", "accum": "6", "settings": "accum=6 batch_size=32 num_devices=1 num_workers=4 precision=bf16", "owner": "{team}",
    "owner_label": "team", "label_team": "{team}", "model": "NVIDIA H100 80GB HBM3", "vendor": "nvidia", "driver_version": "580.159.04",
    "cuda_version": "13.0", "compute_capability": "9.0", "cuda_cores": "16896", "pci_bus_id": "00000000:{gpu}1:00.0",
}  # fmt: skip
UNSET = {"gpu_instance_id", "compute_instance_id", "mig_uuid", "compose_project", "compose_service", "pytorch_alloc_conf", "pytorch_cuda_alloc_conf"}
# families that only containers with a GPU have
ON_GPUS = re.compile("torch|training|operation|cuda|gpu")
SELDOM = re.compile("kill|exit|oom|xid|restart|error|lost|reject|withheld|dropped|skipped|conflict|replay|throttle")
FIXED = re.compile("(total|limit|high|size|reserved)_bytes$")
ONE_IN_TEN = re.compile("last_oom_kill|last_cuda_oom|last_xid|dropped")  # absent until the first


@dataclass(frozen=True)
class Subject:
    """A host, a container or a GPU: its labels, and what describes it."""

    labels: tuple
    number: int
    about: tuple


def hosts(count):
    for number in range(count):
        cluster = f"east-{number // HOSTS_IN_CLUSTER + 1}"
        yield Subject((("cluster", cluster), ("job", "memledger"), ("instance", f"gpu-{number + 1:03}")), number, ())


@functools.lru_cache(CHUNK)
def containers(host):
    """The containers of a host: two in each pod; those in the slots of GPUS also have a number of a GPU."""
    found = []
    for slot in range(CONTAINERS):
        number, pod = host.number * CONTAINERS + slot, slot // 2
        team, name = f"team-{(host.number + pod) % 40:02}", "main" if slot % 2 == 0 else "sync"
        gpu = f"{pod}" if name == "main" and pod < GPUS else ""
        identity = f"{number * 2654435761 % 2**48:012x}"
        labels = (("k8s_namespace_name", team), ("k8s_pod_name", f"train-{pod:02}-{identity[:5]}"), ("container_name", name))
        about = {"id": identity, "team": team, "group": number // 20, "gpu": gpu, "pid": 4000 + number}
        found.append(Subject(host.labels + labels, number, tuple(about.items())))
    return found


def gpu_labels(host, gpu):
    return (("gpu", gpu), ("gpu_uuid", f"GPU-{host.number:08x}-4f21-8a44-c1f0-e2b7d913{gpu:>04}"))


def subjects(host, name, labels):
    """What of a host has series of a family."""
    if "container_name" not in labels:
        if "gpu" not in labels:
            yield host
            return
        for gpu in range(GPUS):
            yield Subject(host.labels + gpu_labels(host, f"{gpu}"), host.number * GPUS + gpu, (("gpu", gpu),))
        return
    for container in containers(host):
        gpu = dict(container.about)["gpu"]
        if not gpu and ("gpu" in labels or ON_GPUS.search(name)):
            continue
        if gpu == "7" and name in ("memledger_container_gpu_processes", "memledger_container_gpu_memory_used_bytes"):
            continue  # allocated and idle
        more = gpu_labels(host, gpu) if "gpu" in labels else ()
        yield Subject(container.labels + more, container.number, container.about)


class Fleet:
    """The series of all families, host by host."""

    def __init__(self, root, count):
        self.families = catalog.families(root) | catalog.of_prometheus()
        self.xids = sorted(word for word in catalog.values(root)["xid"] if re.fullmatch(r"[1-9]\d+", word))
        self.hosts = list(hosts(count))

    def combinations(self, name, labels):
        """All values of a family's own labels that are lists."""
        found = []
        for label in sorted(labels & VALUES.keys()):
            options = next((values for part, values in VALUES[label] if part in name), self.xids if label == "xid" else None)
            if not options:
                raise SystemExit(f"{name}: no values for its label {label}: add them to VALUES")
            found.append([(label, value) for value in options])
        return list(itertools.product(*found))

    def series(self, name, host):
        """Yields the labels of each series of a family that a host has, and a number that chooses its values."""
        if name == "ALERTS":
            alert = (("alertname", "MemledgerHostMemoryHigh"), ("alertstate", "firing"), ("severity", "warning"))
            yield from [(dict(host.labels + alert), 0)] if host.number % 10 == 0 else []
            return
        labels = self.families[name].labels
        combinations = self.combinations(name, labels)
        plain = sorted(labels & DESCRIPTION.keys())
        for subject in subjects(host, name, labels):
            if ONE_IN_TEN.search(name) and subject.number % 10 or "owner" in name and subject.number % 10 == 3:
                continue
            own = [(label, DESCRIPTION[label].format(**dict(subject.about))) for label in plain]
            for position, combination in enumerate(combinations):
                yield dict(subject.labels) | dict(own) | dict(combination), subject.number + position

    def unknown_labels(self, name):
        found = self.families[name].labels - catalog.TARGET - catalog.CLUSTER - UNSET - VALUES.keys() - DESCRIPTION.keys()
        return found - {"k8s_namespace_name", "k8s_pod_name", "container_name", "gpu", "gpu_uuid", "alertname", "alertstate", "severity"}

    def select(self, tree):
        """Yields the labels that a selector matches."""
        for host in self.hosts:
            yield from (labels for labels, _ in self.series(tree.name, host) if all(matcher(labels) for matcher in compiled(tree)))


def compiled(tree):
    """The matchers of a selector as functions, without those that match everything."""
    found = []
    for label, op, text in tree.matchers:
        value = json.loads(f'"{text}"')
        if op == "=~" and value == ".*":
            continue
        pattern = re.compile(value if "~" in op else re.escape(value))
        found.append(lambda labels, label=label, op=op, pattern=pattern: bool(pattern.fullmatch(labels.get(label, ""))) == (op[0] == "="))
    return found


# --- values


def numbers(name, series, kind):
    """Returns SAMPLES values of a family; `kind` is the number of one of several courses."""
    chance = random.Random(f"{name} {kind}")
    if name.endswith(("_info", "_up", "_success")) or name in ("up", "ALERTS", "memledger_container_gpu_allocated"):
        return [1] * SAMPLES
    if "_last_" in name:
        return [END - 900 - chance.randrange(900)] * SAMPLES
    if series.unit == "time":
        return [END - 86_400 + chance.randrange(3600)] * SAMPLES
    if series.counter:
        if SELDOM.search(name):
            return [3] * (SAMPLES // 2) + [3 + (kind == 0)] * (SAMPLES - SAMPLES // 2)
        start, pace = chance.uniform(1000, 2000), chance.uniform(0.5, 40)
        return [round(start + pace * at, 3) for at in range(SAMPLES)]
    if series.unit == "ratio":
        return [chance.uniform(0.05, 0.95) for _ in range(SAMPLES)]
    if series.unit == "bytes":
        total = 2048 * GIB if "host_" in name else 80 * GIB if "gpu" in name else 32 * GIB
        share = chance.uniform(0.1, 0.9)
        return [total if FIXED.search(name) else int(total * (share + 0.001 * at) * 0.9) for at in range(SAMPLES)]
    if "gpus_" in name:
        return [GPUS] * SAMPLES
    return [chance.randrange(1, 6)] * SAMPLES


@functools.lru_cache(None)
def template(name, series_of, kind):
    """The lines of one series, with a NUL for its name and labels."""
    values = numbers(name, series_of(name), kind)
    return "".join(f"\0 {value!r} {START + at * PACE}\n" for at, value in enumerate(values))


def write_samples(file, fleet, wanted, some):
    """Writes the samples of some hosts that `wanted` selects (a family to lists of matchers); returns how many series."""
    count = 0
    for name, selectors in wanted.items():
        for host in some:
            for labels, kind in fleet.series(name, host):
                if any(all(matcher(labels) for matcher in matchers) for matchers in selectors):
                    named = ",".join(f'{label}="{value}"' for label, value in labels.items())
                    file.write(template(name, fleet.families.get, kind % 10).replace("\0", f"{name}{{{named}}}"))
                    count += 1
    file.write("# EOF\n")
    return count


# --- queries


class Opened:
    """A dashboard as it opens: its variables have the values that Grafana chooses by itself."""

    def __init__(self, fleet, board):
        self.fleet, self.board, self.label_queries = fleet, board, []
        span = END - START
        self.values = {"__rate_interval": f"{RATE_INTERVAL}s", "__interval": f"{STEP}s", "__range": f"{span}s", "__range_s": f"{span}"}
        self.resolve()

    def resolve(self):
        for name, variable in boards.variables(self.board).items():
            if variable["type"] != "query":
                continue
            selector, label = boards.label_values(variable["query"]["query"])
            selector = panels.filled(selector, self.values)
            self.label_queries.append((f"variable ${name}", selector, label))
            if variable["includeAll"] and variable["current"]["value"] == ["$__all"]:
                self.values[name] = variable["allValue"]
                continue
            tree = promql.parse(selector)
            if tree.name.startswith("container_run:"):
                tree.name = "memledger_container_run_info"  # which gives a rule's series its labels
            found = sorted({labels.get(label, "") for labels in self.fleet.select(tree)})
            self.values[name] = next(filter(None, found), "")

    def parts(self):
        """Yields (panel or annotation, query, points of a graph; None for an instant query)."""
        for panel in boards.panels(self.board):
            for target in panel.get("targets", []):
                points = None if target["instant"] else panel.get("maxDataPoints", POINTS)
                yield panel["title"], panels.filled(target["expr"], self.values), points
        for note in self.board["annotations"]["list"]:
            if note["enable"]:
                yield f"annotation {note['name']}", panels.filled(note["expr"], self.values), POINTS


def selectors(opened, rules, families):
    """Returns which series the queries need: family to its selectors as lists of matchers, and the names of the rules used."""
    texts = [query for each in opened for _, query, _ in each.parts()] + [query for each in opened for _, query, _ in each.label_queries]
    wanted, used, unknown = {}, set(), set()
    while texts:
        for node in promql.walk(promql.parse(texts.pop())):
            if not isinstance(node, promql.Selector) or node.name in used:
                continue
            if node.name in rules:
                used.add(node.name)
                texts.append(rules[node.name]["expr"])
            elif node.name in families:
                matchers = wanted.setdefault(node.name, [])
                matchers.append(compiled(node))
            else:
                unknown.add(node.name)
    return {name: [[]] if [] in found else found for name, found in wanted.items()}, used, unknown


@dataclass
class Row:
    """What a panel costs."""

    board: str
    part: str
    series: int = 0
    size: int = 0
    seconds: float = 0.0

    def cells(self):
        return [self.board, self.part, f"{self.series:,}", f"{self.size / 1000:,.0f}", f"{self.seconds:.2f}"]


MARK = b'"metric":{'


def ask(url, path, arguments):
    """Sends a query as Grafana does; returns the number of series, the size of the answer and the seconds. It is not kept."""
    begin, size, count, rest = time.monotonic(), 0, 0, b""
    data = urllib.parse.urlencode(arguments).encode()
    if path.startswith("label/"):
        path, data = f"{path}?{data.decode()}", None
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}", data, timeout=180) as response:
            while part := response.read(1 << 20):
                size += len(part)
                count += (rest + part).count(MARK)
                rest = part[-len(MARK) + 1 :]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{arguments}: {error.read().decode()}") from error
    return count, size, time.monotonic() - begin


def measure(url, opened):
    """Returns the rows of a dashboard, one for each panel, annotation and variable."""
    rows, title = {}, opened.board["title"].removeprefix("memledger / ")

    def add(part, path, arguments):
        row = rows.setdefault(part, Row(title, part))
        count, size, seconds = ask(url, path, arguments)
        row.series, row.size, row.seconds = row.series + count, row.size + size, row.seconds + seconds

    for part, selector, label in opened.label_queries:
        add(part, f"label/{label}/values", {"match[]": selector, "start": START, "end": END})
    for part, query, points in opened.parts():
        if points is None:
            add(part, "query", {"query": query, "time": END})
        else:
            add(part, "query_range", {"query": query, "start": START, "end": END, "step": (END - START) / points})
    return list(rows.values())


# --- the server


class Server(backfill.Server):
    def write_rules(self, rules):
        """Writes the series of these rules: first of those that need no other rule, then of the others."""
        names = {rule["record"] for rule in rules}
        later = [rule for rule in rules if names & {getattr(node, "name", "") for node in promql.walk(promql.parse(rule["expr"]))}]
        for number, some in enumerate(([rule for rule in rules if rule not in later], later)):
            if not some:
                continue
            file = self.folder / f"rules-{number}.yml"
            file.write_text(yaml.safe_dump({"groups": [{"name": "fleet", "rules": some}]}))
            period = [f"--start={START}", f"--end={END}", f"--eval-interval={PACE}s"]
            self.start()
            # by its name: the path is a part of what shifts the times of the evaluation
            wait(promtool(self.folder, "rules", f"--url={self.url}", *period, "--output-dir=data", file.name))
            self.stop()  # it reads new blocks when it starts


def promtool(folder, kind, *words):
    command = [os.environ["MEMLEDGER_TEST_PROMTOOL"], "tsdb", "create-blocks-from", "--quiet", kind, *words]
    return Program(command, folder / "promtool.log", cwd=folder)


def wait(program):
    """Waits for the end of promtool, which must succeed; it is stopped if this is interrupted."""
    if program is None:
        return
    try:
        status = program.child.wait()
    finally:
        program.stop()
    if status:
        raise SystemExit(f"{' '.join(program.words)}: {program.tail()}")


def write_blocks(folder, fleet, wanted):
    """Writes the blocks of all hosts: while promtool reads some hosts, the text of the next ones is written. Returns the number of series."""
    running, count = None, 0
    try:
        for number, at in enumerate(range(0, len(fleet.hosts), CHUNK)):
            path = folder / f"samples-{number}"
            with path.open("w") as file:
                count += write_samples(file, fleet, wanted, fleet.hosts[at : at + CHUNK])
            wait(running)
            (folder / f"samples-{number - 1}").unlink(missing_ok=True)
            running = promtool(folder, "openmetrics", path.name, "data")
        wait(running)
    finally:
        if running:
            running.stop()
    path.unlink()
    return count


# --- the report


def table(head, rows):
    right = {"series", "kB", "s", "panels"}
    lines = [head, ["---:" if cell in right else "---" for cell in head], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(rows, count, number_of_hosts):
    """The part of the document."""
    largest = sorted(rows, key=lambda row: -row.size)[:SHOWN]
    per_board = []
    for _, own in itertools.groupby(rows, key=lambda row: row.board):
        own = list(own)
        most = max(own, key=lambda row: row.size)
        slowest = max(own, key=lambda row: row.seconds)
        total = sum(row.size for row in own)
        per_board.append([most.board, f"{total / 1000:,.0f}", f"{most.part}: {most.size / 1000:,.0f}", f"{slowest.part}: {slowest.seconds:.2f}"])
    over = [f"{row.board}, {row.part}" for row in rows if row.size > LIMIT]
    judged = "met" if not over else f"**missed** by {'; '.join(over)}"
    return (
        f"Written by `make bench-fleet`; do not edit. Measured on {os.cpu_count()} cores with a Prometheus that has {count:,} simulated series of "
        f"{number_of_hosts} hosts with {CONTAINERS} containers and {GPUS} GPUs each: those that the queries and the recording rules read. Each dashboard "
        f"with the variables that it opens with, over 1 h in {POINTS:,} points, as many as a graph as wide as a page has over any range, or in as many as a panel asks for (`maxDataPoints`). "
        f"kB: the answers to all queries of a panel, as JSON without compression. s: the sum of their durations, one after another.\n\n"
        + table(["dashboard", "kB, all rows open", "largest, kB", "slowest, s"], per_board)
        + f"\nThe {len(largest)} largest:\n\n"
        + table(["dashboard", "panel", "series", "kB", "s"], [row.cells() for row in largest])
        + f"\nGoal: at most {LIMIT // 1000:,} kB for each panel, annotation and variable ({judged}).\n"
    )


def write_document(text):
    old = DOCUMENT.read_text()
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(FINISH)
    if not rest or FINISH not in rest:
        raise SystemExit(f"{DOCUMENT}: no {BEGIN} and {FINISH}")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}{FINISH}{after}")


def bench(count):
    """Returns the rows of all dashboards and the number of series written."""
    fleet = Fleet(ROOT, count)
    rules = {rule["record"]: rule for _, _, rule in catalog.rules(ROOT) if "record" in rule}
    opened = [Opened(fleet, board) for board in boards.load(ROOT).values()]
    wanted, used, unknown = selectors(opened, rules, fleet.families)
    for name in sorted(unknown):
        print(f"not in the catalog, so without data: {name}")
    for name in sorted(wanted):
        if labels := fleet.unknown_labels(name):
            raise SystemExit(f"{name}: no values for its labels {sorted(labels)}: add them to VALUES or DESCRIPTION")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memledger-fleet-") as name:
        folder = Path(name)
        series = write_blocks(folder, fleet, wanted)
        print(f"{series:,} series of {len(wanted)} families written after {time.monotonic() - begin:.0f} s")
        server = Server(folder)
        try:
            server.write_rules([rules[name] for name in rules if name in used])
            print(f"{len(used)} recording rules evaluated after {time.monotonic() - begin:.0f} s")
            server.start()
            rows = [row for each in opened for row in measure(server.url, each)]
        finally:
            server.stop()
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"measured after {time.monotonic() - begin:.0f} s; the largest process had {memory:.1f} GiB")
    print("without data:", "; ".join(f"{row.board}, {row.part}" for row in rows if not row.series and "variable" not in row.part) or "none")
    return rows, series


def main():
    words = argparse.ArgumentParser()
    words.add_argument("--hosts", type=int, default=HOSTS, help="for a try: docs/fleet.md is then not written")
    given = words.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the programs are stopped and the folder is removed
    rows, series = bench(given.hosts)
    print(table(["dashboard", "panel", "series", "kB", "s"], [row.cells() for row in sorted(rows, key=lambda row: -row.size)]))
    text = report(rows, series, given.hosts)
    print(text)
    if given.hosts == HOSTS:
        write_document(text)
    sys.exit(any(row.size > LIMIT for row in rows))


if __name__ == "__main__":
    main()
