"""Each query of each dashboard at Prometheus 3 and at VictoriaMetrics, on the same samples: the results must be equal, or differ for a reason.

A simulated fleet (tests/dashboards/fleet.py) has all families that the queries read, with what makes servers differ: series that begin, end,
restart and are reset, a gap, hosts that are new or cut off, by scrape with staleness markers and by OTLP without. Prometheus evaluates the recording
rules once, and both get their series, so that only the queries of the dashboards are compared.

A difference has one of the reasons in REASONS: which of them a query may have follows from its functions, and each is verified, as far as the
servers can compute it, by another query. Queries that are changed (MUTATIONS) must have an error: a comparison that accepts everything looks the same.
"""
import math
import random
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import remote_write
import replay
from replay import BIN, ROOT, get

sys.path.insert(0, str(ROOT / "tests/dashboards"))
import boards  # noqa: E402
import fleet  # noqa: E402
import panels  # noqa: E402
import promql  # noqa: E402
from processes import await_  # noqa: E402

PACE = 60  # seconds between two samples
MINUTES = 130  # of samples; the dashboards show the last RANGE seconds
RANGE = 3600
LATE = 7  # seconds: samples are never at the time of a point of a graph
END = int(time.time()) // 86_400 * 86_400
BEGIN = END - 60 * MINUTES
# What happens to hosts, in minutes: one is away, and is back with another version of memledger, which has reset its counters; one is
# cut off; one is new; one sends by OTLP, and is upgraded when containers of it restart. Nothing happens to containers of the first one.
HOSTS = ["always", "away", "busy", "cutoff", "new", "otlp"]
AWAY, CUT_OFF, NEW = (85, 105), 118, 75
# What happens to some containers of the others. By OTLP a restart is so late that both runs are there at the end.
BEGINS, RESTARTS, RESTARTS_BY_OTLP, ENDS = 90, 95, 127, 98
OF_HOSTS = {"away": AWAY, "cutoff": (CUT_OFF,), "new": (NEW,)}
OF_CONTAINERS = {"begins": BEGINS, "ends": ENDS}  # a restart begins and ends no counters
LOOKBACK = 5  # minutes for which Prometheus has a series without a staleness marker
fleet.CONTAINERS = 20  # of each host; a table shows 50
# What the ledger keeps after the end of a container, and what is there without a container.
KEPT = re.compile("exit|oom|restart|_info|_last_")
OF_A_RUN = {"container_id", "run", "pid"}
# How the variables of a dashboard are set, and the seconds between two points of its graphs: all values, or one, by its place among them.
MODES = {"all": (None, 60), "first": (0, 300), "third": (0.4, 60), "last": (1, 60)}
TOLERANCE = 1e-9
RISES = "rises: extrapolated to the ends of the window, or from the sample before it"
PARTS = "rate() of a window in which a series began or ended: per second of the window, or of the time between its samples"
ENDED = "a series that ended without a staleness marker: for five minutes, or for about two intervals"
TIES = "which of equal values topk() takes"
BIRTHS = "births, in the order of topk(increase())"
REASONS = [RISES, PARTS, ENDED, TIES, BIRTHS]


# --- the history


def hosts():
    """Yields the hosts, in two clusters."""
    for number, name in enumerate(HOSTS):
        yield fleet.Subject((("cluster", f"east-{number % 2 + 1}"), ("job", "memledger"), ("instance", name)), number, ())


def there(host):
    """Returns the minutes in which a host has samples: [(first, first after them)]."""
    spans = {"away": [(0, AWAY[0]), (AWAY[1], MINUTES)], "new": [(NEW, MINUTES)], "cutoff": [(0, CUT_OFF)]}
    return spans.get(host, [(0, MINUTES)])


def within(spans, first, end):
    """Returns the parts of spans that are in another one."""
    return [(max(begin, first), min(after, end)) for begin, after in spans if max(begin, first) < min(after, end)]


def event(labels):
    """Returns what happens to the container of a series, which is the same for all containers of its pod."""
    pod = labels.get("instance", "") + labels.get("k8s_pod_name", "")
    can_change = "container_name" in labels and labels["instance"] != "always"
    return random.Random(pod).choice(["", "begins", "restarts", "ends"]) if can_change else ""


def events(labels):
    """Returns the names of what may happen to the containers that are in a series of a result."""
    if labels.get("instance") == "always":
        return set()
    return {event(labels)} if "instance" in labels and "k8s_pod_name" in labels else {"begins", "restarts", "ends"}


def changes(labels):
    """Returns the minutes in which counters begin or end that are in a series of a result."""
    of_hosts = OF_HOSTS.get(labels["instance"], ()) if "instance" in labels else [minute for each in OF_HOSTS.values() for minute in each]
    return {*of_hosts, *(OF_CONTAINERS[name] for name in events(labels) & OF_CONTAINERS.keys())}


def values(name, series, labels):
    """Returns a value for each minute; of what can be any number, no two series have the same."""
    chance = random.Random(f"{name} {sorted(labels.items())}")
    if name.endswith(("_info", "_up", "_success", "_allocated")) or name in ("up", "ALERTS"):
        return [1] * MINUTES
    if "snapshot" in name:
        return [BEGIN + PACE * minute + LATE - 1 for minute in range(MINUTES)]
    if series.unit == "time":
        return [END - chance.randrange(300, 5000) - (0 if "_last_" in name else 86_400)] * MINUTES
    if series.counter:
        is_seldom = fleet.SELDOM.search(name)
        value, pace, found = chance.randrange(4) if is_seldom else chance.uniform(1000, 2000), chance.uniform(0.5, 40), []
        for _ in range(MINUTES):
            value = value + (chance.random() < 0.02) if is_seldom else round(value + pace * chance.uniform(0.5, 1.5), 3)
            found.append(value)
        return found
    if series.unit == "ratio":
        return [round(chance.uniform(0.05, 0.95), 4) for _ in range(MINUTES)]
    if series.unit == "bytes":
        total = fleet.GIB * (2048 if "host_" in name else 80 if "gpu" in name else 32)
        return [total if fleet.FIXED.search(name) else int(total * chance.uniform(0.1, 0.8)) for _ in range(MINUTES)]
    return [chance.randrange(1, 6)] * MINUTES


def parts(name, series, labels):
    """Yields a series as it is in the history, of which another one takes the place when labels change: (labels, values, minutes)."""
    host, what, found, spans = labels["instance"], event(labels), values(name, series, labels), there(labels["instance"])
    if what == "begins":
        spans = within(spans, BEGINS, MINUTES)
    if what == "ends" and not KEPT.search(name):
        spans = within(spans, 0, ENDS)
    restart = RESTARTS_BY_OTLP if host == "otlp" else RESTARTS
    if what == "restarts" and name == "memledger_container_start_time_seconds":
        found = found[:restart] + [BEGIN + PACE * restart] * (MINUTES - restart)
    if host == "away" and series.counter and "container" not in name:
        found = found[: AWAY[1]] + [round(value - found[AWAY[1]], 3) for value in found[AWAY[1] :]]
    if name == "up":
        spans = [] if host == "otlp" else [(NEW if host == "new" else 0, MINUTES)]
        found = [int(any(begin <= minute < after for begin, after in there(host))) for minute in range(MINUTES)]
    changed = restart if what == "restarts" and OF_A_RUN & labels.keys() else MINUTES
    if name == "memledger_build_info":
        changed = {"away": AWAY[1], "otlp": RESTARTS_BY_OTLP}.get(host, MINUTES)
    yield labels, found, within(spans, 0, changed)
    yield {label: f"{value}2" if label in OF_A_RUN | {"version"} else value for label, value in labels.items()}, found, within(spans, changed, MINUTES)


def read():
    """Returns the names of all series that dashboards and recording rules read."""
    every = boards.load(ROOT).values()
    texts = [boards.plain(query[1]) for board in every for query in boards.queries(board)]
    texts += [boards.label_values(each["query"]["query"])[0] for board in every for each in boards.variables(board).values() if each["type"] == "query"]
    texts += [rule["expr"] for rule in recording_rules()]
    return {node.name for text in texts for node in promql.walk(promql.parse(text)) if isinstance(node, promql.Selector)}


def recording_rules():
    return [rule for group in replay.groups() for rule in group["rules"] if "record" in rule]


def history():
    """Yields all series: (labels, [(time, value)]); None is a staleness marker."""
    simulated = fleet.Fleet(ROOT, 0)
    for name in sorted(read() & simulated.families.keys()):
        for host in hosts():
            for every, _ in simulated.series(name, host):
                labels = {label: value for label, value in every.items() if value}
                for its, numbers, spans in parts(name, simulated.families[name], labels):
                    points = []
                    for begin, after in spans:
                        points += [(BEGIN + PACE * minute + LATE, numbers[minute]) for minute in range(begin, after)]
                        if after < MINUTES and its["instance"] != "otlp":
                            points.append((BEGIN + PACE * after + LATE, None))
                    if points:
                        yield {**its, "__name__": name}, points


class Servers:
    """A Prometheus and a VictoriaMetrics with the history."""

    def __init__(self):
        self.programs, self.count = [], 0

    def start(self, folder):
        # the modifier `anchored` gives rate() and increase() the sample before the window
        flags = ["--enable-feature=promql-extended-range-selectors", "--storage.tsdb.retention.time=1y"]
        for start in (lambda: replay.Prometheus(folder / "prometheus", str(BIN / "prometheus"), flags), lambda: replay.VictoriaMetrics(folder / "vm")):
            self.programs.append(start())
        self.prometheus, self.victoria_metrics = (program.url for program in self.programs)

    def write(self, series):
        series = list(series)
        for at in range(0, len(series), 1000):
            body = remote_write.encode(series[at : at + 1000])
            for url in (self.prometheus, self.victoria_metrics):
                remote_write.send(f"{url}/api/v1/write", body)
        self.count += len(series)

    def fill(self):
        self.write(history())
        for rule in recording_rules():
            arguments = {"query": rule["expr"], "start": BEGIN + 30, "end": END, "step": PACE}
            rows = get(f"{self.prometheus}/api/v1/query_range", **arguments)["result"]
            self.write(replay.recorded(rule["record"], rows, PACE, END))
        urllib.request.urlopen(f"{self.victoria_metrics}/internal/force_flush", timeout=60).close()
        for url in (self.prometheus, self.victoria_metrics):
            await_(f"all series at {url}", lambda url=url: self.count == sum(
                int(row["value"][1]) for row in get(f"{url}/api/v1/query", query='count(last_over_time({job="memledger"}[3h]))', time=END)["result"]
            ))  # fmt: skip

    def stop(self):
        for program in self.programs:
            program.stop()


# --- queries as text, as the parser does not keep where a part is


def closing(text, at):
    """Returns the place of the bracket that closes the one here; brackets in strings are in pairs."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    raise ValueError(text)


def anchored(query):
    """Gives rate() and increase() the sample before the window, and no extrapolation, which is what they are at VictoriaMetrics."""
    for found in reversed(list(re.finditer(r"\b(rate|increase)\(", query))):
        end = closing(query, found.end() - 1)
        query = query[: found.end()] + re.sub(r"\](?=[^\]]*$)", "] anchored", query[found.end() : end], count=1) + query[end:]
    return query


LIMIT = re.compile(r"\b(topk|bottomk)(?: by \(([^)]*)\) ?)?\((\d+), ")


def limits(query):
    """Returns each topk and bottomk: (function, labels of its groups, number, its rank)."""
    return [
        (found[1], re.split(", ", found[2]) if found[2] else [], int(found[3]), query[found.end() : closing(query, query.index("(", found.start(3) - 1))])
        for found in LIMIT.finditer(query)
    ]  # fmt: skip


def unlimited(query):
    """Returns a query with the rank in the place of each topk and bottomk: all rows."""
    return LIMIT.sub("(", query)


def counters_of(rank):
    """Returns a rank with the plain counters in the place of their increase."""
    for found in reversed(list(re.finditer(r"\bincrease\(", rank))):
        end = closing(rank, found.end() - 1)
        rank = rank[: found.end()] + rank[found.end() : end].rpartition("[")[0] + rank[end:]
    return re.sub(r"\bincrease\(", "(", rank)


# --- the comparison


def points(rows):
    """Returns the points of a result by series and time, without those that are no number, which VictoriaMetrics does not have."""
    found = {}
    for row in rows:
        series = frozenset(row["metric"].items())
        for at, value in row.get("values") or [row["value"]]:
            if value != "NaN":
                found[series, float(at)] = float(value)
    return found


def nameless(found):
    """Removes the name of series, which VictoriaMetrics keeps in max_over_time() and its like."""
    return {(frozenset(pair for pair in series if pair[0] != "__name__"), at): value for (series, at), value in found.items()}


def differences(one, other):
    """Returns what is not the same: {(series, time)}."""
    same = {key for key in one.keys() & other.keys() if one[key] == other[key] or math.isclose(one[key], other[key], rel_tol=TOLERANCE)}
    return (one.keys() | other.keys()) - same


class Query:
    """One query of a dashboard with values of its variables."""

    def __init__(self, servers, where, text, step, window):
        self.servers, self.where, self.text, self.step, self.window = servers, where, text, step, window
        self.at_vm = text

    def send(self, url, text, step):
        if not step:
            return points(get(f"{url}/api/v1/query", query=text, time=END)["result"])
        return points(get(f"{url}/api/v1/query_range", query=text, start=END - RANGE, end=END, step=step)["result"])

    def compare(self):
        """Returns (reasons why the results differ, errors, whether there is any result)."""
        at_prometheus, at_vm = (self.send(url, text, self.step) for url, text in ((self.servers.prometheus, self.text), (self.servers.victoria_metrics, self.at_vm)))
        reasons, left = self.explain(self.text, at_prometheus, at_vm)
        if left and LIMIT.search(self.text):
            left = self.choice(left, reasons)
        errors = [f"{self.where}: {len(left)} points, such as {self.example(left, at_prometheus, at_vm)}: {self.text}"] if left else []
        return reasons, errors, bool(at_prometheus or at_vm)

    @staticmethod
    def example(left, at_prometheus, at_vm):
        series, at = min(left, key=lambda key: (key[1], sorted(key[0])))
        return f"{dict(series)} in minute {(at - BEGIN) / 60:g}: {at_prometheus.get((series, at))} at Prometheus, {at_vm.get((series, at))} at VictoriaMetrics"

    def explain(self, text, at_prometheus, at_vm):
        """Returns the reasons, and the differences that have none: {(series, time)}."""
        reasons, left = set(), differences(at_prometheus, at_vm)
        if left and (changed := anchored(text)) != text:
            fewer = differences(self.send(self.servers.prometheus, changed, self.step), at_vm)
            reasons |= {RISES} if left - fewer else set()
            left = fewer
        has_rate = re.search(r"\brate\(", text)
        for reason, is_explained in ((ENDED, self.is_ended), (PARTS, self.is_part if has_rate else lambda *_: False)):
            explained = {(series, at) for series, at in left if self.step and is_explained(dict(series), (at - BEGIN) / 60)}
            reasons |= {reason} if explained else set()
            left -= explained
        return reasons, left

    def is_ended(self, labels, minute):
        """Returns whether a point is of what ended on the host without staleness markers."""
        ends = [end for name, end in (("restarts", RESTARTS_BY_OTLP), ("ends", ENDS)) if name in events(labels)]
        return labels.get("instance", "otlp") == "otlp" and any(end <= minute <= end + LOOKBACK for end in ends)

    def is_part(self, labels, minute):
        return any(change <= minute <= change + self.window / 60 + 1 for change in changes(labels))

    def choice(self, left, reasons):
        """Returns the differences that are not a choice among equal ranks, at one of the servers."""
        prometheus, vm = self.servers.prometheus, self.servers.victoria_metrics
        text, text_at_vm = unlimited(self.text), unlimited(self.at_vm)
        more, unexplained = self.explain(text, self.send(prometheus, text, self.step), self.send(vm, text_at_vm, self.step))
        if unexplained or [each[:3] for each in limits(self.text)] != [each[:3] for each in limits(self.at_vm)]:
            return left
        allowed, why = [], set()
        for one, other in zip(limits(self.text), limits(self.at_vm), strict=True):
            ranks, ranks_at_vm = (nameless(self.send(url, rank, None)) for url, rank in ((prometheus, anchored(one[3])), (vm, other[3])))
            if others := differences(ranks, ranks_at_vm):
                if "increase(" not in one[3]:
                    return left
                # what was there before the range has no birth in it
                old = nameless(points(get(f"{prometheus}/api/v1/query", query=counters_of(one[3]), time=END - RANGE)["result"]))
                if {series for series, _ in old} & {series for series, _ in others}:
                    return left
                why.add(BIRTHS)
                allowed += [series for series, _ in others]
            elif one[2] == 1:
                return left  # it chooses one of several, and must choose the same each time
            allowed += between(ranks, ranks_at_vm, one)
            why |= set() if others else {TIES}
        reasons |= more | why
        return {(series, at) for series, at in left if not any(is_of(series, each) for each in allowed)}


def cuts(ranks, limit):
    """Returns the least or greatest rank that topk or bottomk takes of each group."""
    function, labels, number, _ = limit
    groups = {}
    for (series, _), value in ranks.items():
        groups.setdefault(group_of(series, labels), []).append(value)
    return {group: sorted(found, reverse=function == "topk")[number - 1] for group, found in groups.items() if len(found) >= number}


def group_of(series, labels):
    """Returns the group of a series by these labels."""
    return tuple(dict(series).get(label) for label in labels)


def between(ranks, ranks_at_vm, limit):
    """Returns the series from the cut of one server to that of the other: those with equal ranks, and those that births move over the cut."""
    both = cuts(ranks, limit), cuts(ranks_at_vm, limit)
    found = []
    for at_one in (ranks, ranks_at_vm):
        for (series, _), value in at_one.items():
            least, most = (pick((each[group] for each in both if (group := group_of(series, limit[1])) in each), default=math.inf) for pick in (min, max))
            if least * (1 - TOLERANCE) <= value <= most * (1 + TOLERANCE):
                found.append(series)
    return found


def is_of(series, other):
    """Returns whether two series have the same values of the labels that both have."""
    one, other = dict(series), dict(other)
    return all(one[label] == other[label] for label in one.keys() & other.keys() - {"__name__"})


class Dashboard:
    """A dashboard with one choice of values."""

    def __init__(self, servers, name, board, mode):
        self.servers, self.name, self.board, self.mode, self.errors = servers, name, board, mode, []
        self.place, self.step = MODES[mode]
        self.window = max(self.step + PACE, 4 * PACE)  # as Grafana computes it
        self.values = {"__rate_interval": f"{self.window}s", "__interval": f"{self.step}s", "__range": f"{RANGE}s", "__range_s": f"{RANGE}"}
        for variable in boards.variables(board).values():
            if variable["type"] == "query":
                self.values[variable["name"]] = self.value(variable)

    def value(self, variable):
        """Returns the value of a variable, whose values must be the same at both."""
        selector, label = boards.label_values(variable["query"]["query"])
        arguments = {"match[]": panels.filled(selector, self.values), "start": END - RANGE, "end": END}
        found, at_vm = (sorted(panels.Prometheus(url).get(f"label/{label}/values", **arguments)) for url in (self.servers.prometheus, self.servers.victoria_metrics))
        if not found or found != at_vm:
            self.errors.append(f"{self.name} [{self.mode}] variable ${variable['name']}: {found} at Prometheus, {at_vm} at VictoriaMetrics")
        if self.place is None and variable["multi"]:
            return variable["allValue"]
        one = found[min(int((self.place or 0) * len(found)), len(found) - 1)] if found else ""
        return [one] if variable["multi"] else one

    def queries(self):
        """Yields the queries of all panels and annotations."""
        for where, expression, _, target in boards.queries(self.board):
            step = None if target and target["instant"] else self.step
            yield Query(self.servers, f"{self.name} [{self.mode}] {where}", panels.filled(expression, self.values), step, self.window)


# A part of queries, what it becomes, and whether at VictoriaMetrics alone; there must be errors.
MUTATIONS = [
    (r"last_over_time\(([^()]*(?:\([^()]*\))?[^()]*)\) - min_over_time\(\1\)", r"increase(\1)", False),
    (r"max_over_time\(", "min_over_time(", True),
    (r" @ end\(\)", "", True),
    (r"\brate\(", "irate(", True),
    (r"topk\(20, ", "topk(19, ", True),
    (r"timestamp\(", "-timestamp(", True),
]


def mutated(dashboards, mutation):
    """Returns what is wrong if no query that is changed has an error."""
    old, new, is_vm_alone = mutation
    changed = 0
    for dashboard in dashboards:
        for query in dashboard.queries():
            other = re.sub(old, new, query.text)
            if other == query.text:
                continue
            query.at_vm, changed = other, changed + 1
            query.text = query.text if is_vm_alone else other
            if query.compare()[1]:
                return []
    return [f"{old!r} became {new!r} in {changed} queries, without an error"]


def check(folder):
    """Prints how many results are equal, and why others are not; returns the errors."""
    servers, counts, errors = Servers(), Counter(), []
    try:
        servers.start(folder)
        servers.fill()
        print(f"{servers.count} series", flush=True)
        by_mode = {mode: [Dashboard(servers, name, board, mode) for name, board in boards.load(ROOT).items()] for mode in MODES}
        for mode, dashboards in by_mode.items():
            for dashboard in dashboards:
                errors += dashboard.errors
                for query in dashboard.queries():
                    reasons, wrong, has_result = query.compare()
                    errors += wrong
                    if not has_result and mode == "all":
                        errors.append(f"{query.where}: no data: {query.text}")
                    counts.update(["results", *(["different"] if reasons or wrong else ["equal"] if has_result else ["empty at both"]), *reasons])
        for mutation in MUTATIONS:
            errors += mutated(by_mode["all"], mutation)
    finally:
        servers.stop()
    for what in ("results", "equal", "empty at both", "different", *REASONS):
        print(f"{counts[what]:5} {what}")
    return errors


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the servers are stopped and the folder is removed
    with tempfile.TemporaryDirectory(prefix="memledger-servers-") as folder:
        errors = check(Path(folder))
    for error in errors:
        print(error)
    print(f"{len(MUTATIONS)} mutations, {len(errors)} errors")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
