"""The history of history.py at each way to receive it, with the shipped rules: `replay.py`.

VictoriaMetrics: vmalert itself evaluates the rules over the history (`-replay`), without and with an external label. Prometheus has no replay of
alerts: the queries of the rules are evaluated by it over the history, and how long they hold is counted here. At each, all rules are without an
error, and what is in EXPECTED fires once, and nothing else.
"""
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/demo"))
import history  # noqa: E402
import remote_write  # noqa: E402
from processes import Program, await_, free_port  # noqa: E402

RULES = [ROOT / f"deploy/prometheus/rules/{name}.yml" for name in ("recording", "alerts")]
EVALUATION = 30  # seconds
BIN = Path(os.environ.get("MEMLEDGER_TEST_SERVERS", ""))
# Recorded series that answer a question of their own below.
JOINED = "container_run:memledger_memory_unreclaimable_bytes:join"


def port(ports=itertools.count(9390, 10)):  # noqa: B008
    """Returns a port that nothing listens on, and that no other thread takes."""
    return free_port(next(ports))


def get(url, **arguments):
    """The data of a query; an error of the server is raised with its text."""
    body = urllib.parse.urlencode(arguments).encode()
    try:
        with urllib.request.urlopen(url, body, timeout=120) as response:
            return json.load(response)["data"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{arguments.get('query')}: {error.read().decode()}") from error


def groups():
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]


def seconds(duration):
    number, unit = re.fullmatch(r"(\d+)([smhd])", duration).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


def recorded(name, rows, interval, end):
    """Returns the series of a recording rule, of its result over a range, with staleness markers, as Prometheus writes them."""
    found = []
    for row in rows:
        points = {float(at): float(value) for at, value in row["values"]}
        ends = {at + interval: None for at in points if at + interval not in points and at < end}
        found.append(({**row["metric"], "__name__": name}, sorted({**ends, **points}.items())))
    return found


def fill(url, begin, by_scrape):
    for found in history.samples(begin, by_scrape):
        remote_write.write(url, found)


class Prometheus:
    """A Prometheus that scrapes nothing and has the history."""

    def __init__(self, folder, program, flags=()):
        self.url = f"http://127.0.0.1:{port()}"
        folder.mkdir()
        # what the recording rules make of the history is written after it
        (folder / "prometheus.yml").write_text("storage: {tsdb: {out_of_order_time_window: 12h}}\n")
        words = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.enable-remote-write-receiver", *flags]
        self.program = Program([*words, f"--web.listen-address={self.url.removeprefix('http://')}"], folder / "log", cwd=folder)
        self.program.ready(f"{self.url}/-/ready")

    def evaluate(self, begin, query):
        arguments = {"query": query, "start": begin, "end": begin + 60 * history.END, "step": EVALUATION}
        return get(f"{self.url}/api/v1/query_range", **arguments)["result"]

    def record(self, begin, rule):
        """Evaluates a recording rule and writes its result."""
        if written := recorded(rule["record"], self.evaluate(begin, rule["expr"]), EVALUATION, begin + 60 * history.END):
            remote_write.write(f"{self.url}/api/v1/write", written)

    def replay(self, begin):
        """Returns the episodes of each alert: {(alert, severity, host): [(first minute, last minute)]}."""
        found = defaultdict(list)
        for rule in (rule for group in groups() for rule in group["rules"]):
            if "record" in rule:
                self.record(begin, rule)
                continue
            wait = seconds(rule["for"]) if "for" in rule else 0
            for row in self.evaluate(begin, rule["expr"]):
                key = rule["alert"], rule["labels"]["severity"], row["metric"].get("instance", "")
                found[key] += episodes([float(at) for at, _ in row["values"]], wait, begin)
        return found

    def stop(self):
        self.program.stop()


class VictoriaMetrics:
    """A VictoriaMetrics that has the history, and vmalert, which evaluates the rules over it."""

    def __init__(self, folder, labels=()):
        self.url, self.folder, self.labels = f"http://127.0.0.1:{port()}", folder, labels
        folder.mkdir()
        words = [BIN / "victoria-metrics", "-storageDataPath=data", f"-httpListenAddr={self.url.removeprefix('http://')}", "-memory.allowedBytes=256MiB"]
        # no cache, and no offset of the newest samples: the history is written after it happened
        self.program = Program([*map(str, words), "-search.disableCache", "-search.latencyOffset=0s"], folder / "log", cwd=folder)
        self.program.ready(f"{self.url}/health")

    def evaluate(self, begin, query):
        arguments = {"query": query, "start": begin, "end": begin + 60 * history.END, "step": EVALUATION}
        return get(f"{self.url}/api/v1/query_range", **arguments)["result"]

    def replay(self, begin):
        await_("the history", lambda: get(f"{self.url}/api/v1/query", query="count({job='memledger'})", time=begin + 60)["result"])
        at = lambda minute: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin + 60 * minute))  # noqa: E731
        words = [str(BIN / "vmalert"), *(f"-rule={path}" for path in RULES), f"-datasource.url={self.url}", f"-remoteWrite.url={self.url}"]
        words += [f"-remoteRead.url={self.url}", f"-replay.timeFrom={at(0)}", f"-replay.timeTo={at(history.END)}", "-replay.rulesDelay=500ms"]
        words += [f"-evaluationInterval={EVALUATION}s", "-replay.disableProgressBar", "-remoteWrite.flushInterval=100ms", *self.labels]
        words += ["-httpListenAddr=127.0.0.1:0"]
        result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240, cwd=self.folder)
        if result.returncode:
            raise RuntimeError(f"vmalert: {result.stderr[-3000:]}")
        found = defaultdict(list)
        urllib.request.urlopen(f"{self.url}/internal/force_flush", timeout=60).close()  # else a part may be searched before another
        await_("the alerts", lambda: self.evaluate(begin, 'ALERTS{alertname="MemledgerWatchdog"}'))
        for row in self.evaluate(begin, 'last_over_time(ALERTS{alertstate="firing"}[30s])'):
            labels = row["metric"]
            key = labels["alertname"], labels["severity"], labels.get("instance", "")
            found[key] += episodes([float(at) for at, _ in row["values"]], 0, begin)
        return found

    def stop(self):
        self.program.stop()


def episodes(times, wait, begin):
    """Returns when something held for at least `wait` seconds: [(first, last)] in minutes."""
    found = []
    for at in times:
        if found and at - found[-1][1] <= EVALUATION:
            found[-1][1] = at
        else:
            found.append([at, at])
    return [(round((first + wait - begin) / 60, 1), round((last - begin) / 60, 1)) for first, last in found if last - first >= wait]


def errors(name, server, begin, is_otlp):
    """Yields what is wrong at one way to receive."""
    expected = history.EXPECTED | (history.OF_OTLP if is_otlp else history.OF_SCRAPE)
    found = server.replay(begin)
    found = {key: spans for key, spans in found.items() if spans and key not in history.ALWAYS}
    for key in sorted(expected - found.keys()):
        yield f"{name}: {' '.join(key)} does not fire"
    for key in sorted(found.keys() - expected):
        yield f"{name}: {' '.join(key)} fires falsely, at {found[key]}"
    for key in sorted(found.keys() & expected):
        if len(found[key]) > 1:
            yield f"{name}: {' '.join(key)} fires {len(found[key])} times, at {found[key]}"
    # these containers never restart: a restart of another one must leave no hole in their lines
    for steady in ('instance="leak", container_name="c"', 'instance="known", container_name="neighbour"'):
        rows = server.evaluate(begin, f"count(last_over_time({JOINED}{{{steady}}}[{EVALUATION}s]))")
        points = sum(len(row["values"]) for row in rows)
        if points < 60 * history.END // EVALUATION - 5:
            yield f"{name}: {JOINED} of {steady}, which never restarted, has {points} points of {60 * history.END // EVALUATION}"
    rows = server.evaluate(begin, f'count by (run) (last_over_time({JOINED}{{instance="known", container_name="c"}}[{EVALUATION}s]))')
    runs = {row["metric"].get("run"): sorted(float(value) for _, value in row["values"]) for row in rows}
    if set(runs) != history.RUNS or any(values[-1] != 1 for values in runs.values()):
        yield f"{name}: {JOINED} has the runs {sorted(map(str, runs))}"


def ways(folder):
    """Returns each way to receive: (name, server, by OTLP)."""
    old, new = os.environ["MEMLEDGER_TEST_PROMETHEUS"], str(BIN / "prometheus")
    return [
        ("Prometheus 2, scrape", lambda: Prometheus(folder / "p2", old), False),
        ("Prometheus 3, scrape", lambda: Prometheus(folder / "p3", new), False),
        ("Prometheus 3, OTLP", lambda: Prometheus(folder / "p3o", new), True),
        ("VictoriaMetrics, scrape", lambda: VictoriaMetrics(folder / "vm"), False),
        ("VictoriaMetrics, scrape, external label", lambda: VictoriaMetrics(folder / "vml", ["-external.label=cluster=eu", "-external.label=site=x"]), False),
        ("VictoriaMetrics, OTLP", lambda: VictoriaMetrics(folder / "vmo"), True),
    ]


def check(way):
    name, start, is_otlp = way
    began = time.monotonic()
    begin = (int(time.time()) - 60 * history.END) // 60 * 60
    server = start()
    try:
        fill(f"{server.url}/api/v1/write", begin, by_scrape=not is_otlp)
        found = list(errors(name, server, begin, is_otlp))
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        found = [f"{name}: {error}"]
    finally:
        server.stop()
    return name, found, time.monotonic() - began


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory(prefix="memledger-servers-") as folder:
        with ThreadPoolExecutor(3) as several:
            results = list(several.map(check, (way for way in ways(Path(folder)) if wanted in way[0])))
    for name, found, took in results:
        print(f"{name}: {len(found)} errors, {took:.0f} s")
        for error in found:
            print(f"  {error}")
    sys.exit(any(found for _, found, _ in results))


if __name__ == "__main__":
    main()
