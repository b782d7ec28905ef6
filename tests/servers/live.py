"""A real memledger at each server, by scrape and by OTLP, with the flags of docs/otlp.md and docs/fleet.md: `live.py MEMLEDGER`.

One memledger for each way, of one recorded host (tests/hosts), so all have the same series. At each server: all rules are evaluated without an
error; by OTLP the names and labels are those of a scrape; each query of each dashboard is accepted. And: the shipped configurations of
VictoriaMetrics' scraper, created timestamps as zeros, and what memledger says of a receiver that takes no logs.

Two collectors run the configurations of docs/otlp.md: one forwards to a Prometheus, one converts to deltas. Both get the event of an OOM kill.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "deploy/demo"), str(ROOT / "tests/dashboards")]
import boards  # noqa: E402
import panels  # noqa: E402
from hosts import RECORDED, PaperHost, in_place  # noqa: E402
from processes import Program, Trouble, await_, free_port  # noqa: E402

BIN = Path(os.environ["MEMLEDGER_TEST_SERVERS"])
COLLECTOR = os.environ["MEMLEDGER_TEST_COLLECTOR"]
RULES = ROOT / "deploy/prometheus/rules"
HOST = "gpu-07"
P3_OTLP = ["--web.enable-otlp-receiver", "--enable-feature=created-timestamp-zero-ingestion"]
# Labels that OTLP must not add: each upgrade would make all series new, or joins would need them.
FOREIGN = re.compile(r"service_|scope_|host_(name|id)|otel_")
# Of every scrape, not of memledger.
SELECTOR = '{job="memledger",__name__!~"up|target_info|scrape_.*|ALERTS.*|.*:.*"}'
DEADLINE = 60
os.environ["TZ"] = "UTC"  # of the times of rules


def fetch(url, **arguments):
    query = f"?{urllib.parse.urlencode(arguments)}" if arguments else ""
    with urllib.request.urlopen(url + query, timeout=30) as response:
        return json.load(response)["data"]


PROGRAMS = []


def start(words, log, url, **more):
    """Starts a program, which ends with this one, and waits until it responds."""
    PROGRAMS.append(Program(words, log, **more))
    PROGRAMS[-1].ready(url)


class Memledger:
    """A memledger of the recorded host, as a user starts it."""

    def __init__(self, binary, folder, base, port, flags=(), variables=()):
        self.binary, self.folder, self.address = binary, folder, f"127.0.0.1:{free_port(port)}"
        folder.mkdir()
        self.flags = [f"--path.{key}={base / name}" for key, name in
                      (("procfs", "proc"), ("sysfs", "sys"), ("cgroupfs", "cgroup"), ("devfs", "dev"))]  # fmt: skip
        self.flags += ["--docker.socket=", "--podman.socket=", "--oom.kernel-log=off", f"--state.path={folder / 'state'}", "--no-collector.gpu"]
        self.flags += ["--sample.interval=1s", "--local.socket=", f"--reporter.directory={folder / 'reporter'}", *flags]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MEMLEDGER_", "OTEL_"))}
        self.variables = {**kept, **dict(variables)}

    def start(self):
        words = [self.binary, "serve", f"--web.listen-address={self.address}", *self.flags]
        start(words, self.folder / "log", f"http://{self.address}/-/ready", env=self.variables)
        return self

    def doctor(self):
        command = [self.binary, "doctor", *self.flags]
        return subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False, timeout=60).stdout


def prometheus(folder, program, port, address=None, flags=()):
    """Starts one with the shipped rules; it scrapes, or receives as the flags say. Returns its address."""
    folder.mkdir()
    jobs = []
    if address:
        jobs = [{"job_name": "memledger", "static_configs": [{"targets": [address], "labels": {"instance": HOST}}]}]
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "2s"}, "rule_files": [f"{RULES}/*.yml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    url = f"http://127.0.0.1:{free_port(port)}"
    words = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={url.removeprefix('http://')}", *flags]
    start(words, folder / "log", f"{url}/-/ready", cwd=folder)
    return url, url


def victoria_metrics(folder, port, address=None, label=()):
    """Starts one, and vmalert with the shipped rules. Returns their addresses."""
    folder.mkdir()
    url, alert = (f"http://127.0.0.1:{free_port(port + number)}" for number in range(2))
    words = [BIN / "victoria-metrics", "-storageDataPath=data", f"-httpListenAddr={url.removeprefix('http://')}", "-memory.allowedBytes=256MiB"]
    if address:
        # the shipped configuration, with the address and the interval of this test
        text = (ROOT / "deploy/fleet/victoriametrics.yml").read_text().replace("scrape_interval: 15s", "scrape_interval: 1s")
        (folder / "scrape.yml").write_text(text)
        (folder / "hosts.yml").write_text(json.dumps([{"targets": [address]}]))
        words += ["-promscrape.config=scrape.yml"]
    else:
        words += ["-opentelemetry.usePrometheusNaming", f"-relabelConfig={ROOT / 'deploy/fleet/victoriametrics-otlp.yml'}"]
    start(words, folder / "log", f"{url}/health", cwd=folder)
    words = [BIN / "vmalert", f"-rule={RULES}/*.yml", f"-datasource.url={url}", f"-remoteWrite.url={url}", f"-remoteRead.url={url}"]
    words += [f"-httpListenAddr={alert.removeprefix('http://')}", "-evaluationInterval=2s", "-rule.evalDelay=0s", "-notifier.blackhole", *label]
    start(words, folder / "vmalert.log", f"{alert}/health", cwd=folder)
    return url, alert


class Collector:
    """An OpenTelemetry Collector with the configuration of docs/otlp.md, of which only addresses are replaced."""

    def __init__(self, folder, port, remote_write, deltas=False):
        folder.mkdir()
        self.grpc, self.http = (f"127.0.0.1:{free_port(port + number)}" for number in range(2))
        addresses = {"0.0.0.0:4317": self.grpc, "0.0.0.0:4318": self.http, "http://prometheus:9090": remote_write}
        configs = {"collector": documented("A collector", addresses)}
        # its own metrics would be at port 8888
        configs["own"] = json.dumps({"service": {"telemetry": {"metrics": {"level": "none"}}}})
        if deltas:
            configs["deltas"] = documented("Deltas", {"[...]": "[debug]"})
            configs["detailed"] = json.dumps({"exporters": {"debug": {"verbosity": "detailed"}}})
        for name, text in configs.items():
            (folder / f"{name}.yml").write_text(text)
        self.program = Program([COLLECTOR, *(f"--config={name}.yml" for name in configs)], folder / "log", cwd=folder)
        PROGRAMS.append(self.program)
        await_("the collector is ready", self.is_ready, DEADLINE)

    def log(self):
        return self.program.log.read_text(errors="replace")

    def is_ready(self):
        if self.program.child.poll() is not None:
            raise Trouble(f"the collector has exited; the end of its log:\n{self.program.tail()}")
        return "Everything is ready" in self.log()

    def delta(self, metric, container):
        """Returns the sum of the deltas of one metric of a container."""
        metrics = [text for text in self.log().split("Metric #") if f"Name: {metric}\n" in text and "AggregationTemporality: Delta" in text]
        points = [point for text in metrics for point in text.split("NumberDataPoints #")[1:] if f"Str({container})" in point]
        # the newest may be written in part
        return sum(float(value) for point in points for value in re.findall(r"^Value: (\S+)\n", point, re.M))

    def warnings(self):
        """Yields what it warns of, such as a setting that is deprecated."""
        for line in self.log().splitlines():
            if re.match(r"\S+\t(warn|error)\t", line):
                yield f"the collector: {line}"


def documented(section, replaced):
    """Returns the YAML of a section of docs/otlp.md, with each of the texts replaced."""
    text = (ROOT / "docs/otlp.md").read_text()
    text = re.search(rf"^### {section}\n(?:(?!#).*\n)*?```yaml\n((?:.*\n)*?)```\n", text, re.M)[1]
    for old, new in replaced.items():
        if text.count(old) != 1:
            raise Trouble(f"docs/otlp.md: {section}: {old} is not there once")
        text = text.replace(old, new)
    return text


def kill(base):
    """Counts one more OOM kill in a container of the recorded host. Returns its name."""
    events = min(base.glob("cgroup/docker/*/memory.events"))
    for path in (events, base / "proc/vmstat"):
        in_place(path, re.sub(r"(?m)^oom_kill 0$", "oom_kill 1", path.read_text()))
    return events.parent.name[:12]


class Way:
    """A server that has the series of the recorded host."""

    def __init__(self, name, url, rules):
        self.name, self.url, self.rules = name, url, rules

    def series(self):
        return fetch(f"{self.url}/api/v1/series", **{"match[]": SELECTOR})

    def names(self):
        return {each["__name__"] for each in self.series()}

    def rule_errors(self):
        """Waits until each rule was evaluated with the series of now; yields those that fail."""
        # once more after the first one, as a chain of recorded series takes two
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 5))

        def evaluated():
            rules = [rule for group in fetch(f"{self.rules}/api/v1/rules")["groups"] for rule in group["rules"]]
            return rules if rules and all(rule.get("lastEvaluation", "")[:19] > since for rule in rules) else None

        for rule in await_(f"the rules of {self.name}", evaluated, DEADLINE):
            if rule["health"] not in ("ok",) or rule.get("lastError"):
                yield f"{self.name}: rule {rule['name']}: {rule['health']} {rule.get('lastError')}"

    def query_errors(self):
        """Sends each query of each dashboard; yields those that the server rejects."""
        server = panels.Prometheus(self.url)
        for name, board in boards.load(ROOT).items():
            for mode in ("all", "first"):
                try:
                    Queries(server, name, board, mode, 60).query_all()
                except SystemExit as error:
                    yield f"{self.name}: {name} [{mode}]: {error}"


class Queries(panels.Asking):
    """Whether queries are accepted: a recorded host has no data for many."""

    COMPARED = {"all": "c", "first": "c"}

    def check_data(self, *_):
        pass

    def legends(self, *_):
        pass


def equal_series(scraped, received):
    """Yields what differs by OTLP from a scrape."""
    names, others = scraped.names(), {name for name in received.names() if not name.startswith("memledger_otlp")}
    names = {name for name in names if not name.startswith("memledger_otlp")}
    # counters of failures appear when there is one
    for name in sorted(names ^ others):
        yield f"{received.name}: {name} is only {'scraped' if name in names else 'received'}"
    for labels in received.series():
        if labels.get("instance") != HOST or any(map(FOREIGN.match, labels)):
            yield f"{received.name}: the labels are {labels}"
            break


def no_logs(memledger, what):
    """Yields what is wrong with what memledger says of a receiver that takes no logs."""
    said = memledger.doctor()
    if not re.search(r"MISSING +OTLP logs", said) or "--no-otlp.logs" not in said:
        yield f"{what}: doctor does not name --no-otlp.logs: {said}"
    if not re.search(r"ok +OTLP metrics", said):
        yield f"{what}: doctor on metrics: {said}"


def takes_all(memledger, what):
    """Yields what is wrong with what memledger says of a receiver that takes all."""
    said = memledger.doctor()
    for signal in ("metrics", "logs"):
        if not re.search(rf"ok +OTLP {signal}", said):
            yield f"{what}: doctor on {signal}: {said}"


def lost_event(collector, container):
    """Waits until the collector has written the event of the kill; yields an error if it does not."""
    try:
        await_(f"the event of the kill of {container} at the collector", lambda: f"oom kill: {container}:" in collector.log(), DEADLINE)
    except Trouble as error:
        yield str(error)


def dry_runs():
    """Yields the shipped configurations that VictoriaMetrics' scraper rejects."""
    for path in (ROOT / "deploy/fleet/victoriametrics.yml",):
        command = [BIN / "victoria-metrics", "-dryRun", f"-promscrape.config={path}", f"-relabelConfig={ROOT / 'deploy/fleet/victoriametrics-otlp.yml'}"]
        result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=60, cwd="/tmp")
        if result.returncode:
            yield f"{path.name}: {result.stderr[-600:]}"
    for command in (["-dryRun", f"-rule={RULES}/*.yml"],):
        result = subprocess.run([str(BIN / "vmalert"), *command], capture_output=True, text=True, check=False, timeout=60)
        if result.returncode:
            yield f"vmalert: {result.stderr[-600:]}"


def check(binary, folder):
    base = folder / "host"
    base.mkdir()
    for line in RECORDED.read_text().splitlines():
        PaperHost.unpack(base, json.loads(line))
    name = {"OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id={HOST}"}
    otlp = ["--otlp.interval=1s", "--no-otlp.logs"]
    scraped = Memledger(binary, folder / "scraped", base, 9610).start()
    new, old = str(BIN / "prometheus"), os.environ["MEMLEDGER_TEST_PROMETHEUS"]
    address = scraped.address
    ways = [
        Way("Prometheus 3, scrape", *prometheus(folder / "p3", new, 9620, address)),
        Way("Prometheus 2, scrape", *prometheus(folder / "p2", old, 9630, address)),
        Way("VictoriaMetrics, scrape", *victoria_metrics(folder / "vm", 9640, address)),
        Way("VictoriaMetrics, external label", *victoria_metrics(folder / "vml", 9650, address, ["-external.label=site=x"])),
        Way("Prometheus 3, OTLP", *prometheus(folder / "p3o", new, 9660, flags=P3_OTLP)),
        Way("VictoriaMetrics, OTLP", *victoria_metrics(folder / "vmo", 9670)),
        Way("Prometheus 3, collector", *prometheus(folder / "p3c", new, 9710, flags=["--web.enable-remote-write-receiver"])),
    ]
    p3, _, vm, _, p3_otlp, vm_otlp, p3_collector = ways
    to_p3, to_vm = f"--otlp.endpoint={p3_otlp.url}/api/v1/otlp", f"--otlp.endpoint={vm_otlp.url}/opentelemetry"
    Memledger(binary, folder / "to-p3", base, 9680, [to_p3, *otlp], name).start()
    Memledger(binary, folder / "to-vm", base, 9690, [to_vm, *otlp], name).start()
    collector = Collector(folder / "collector", 9720, p3_collector.url)
    deltas = Collector(folder / "deltas", 9730, p3_collector.url, deltas=True)
    http = Memledger(binary, folder / "to-http", base, 9740, [f"--otlp.endpoint=http://{collector.http}", "--otlp.interval=1s"], name).start()
    flags = [f"--otlp.endpoint=http://{deltas.grpc}", "--otlp.protocol=grpc", "--otlp.interval=5s"]
    grpc = Memledger(binary, folder / "to-grpc", base, 9750, flags, name).start()
    for way in ways:
        await_(f"series at {way.name}", lambda way=way: "memledger_container_memory_usage_bytes" in way.names(), DEADLINE)
    await_("deltas at the collector", lambda: "AggregationTemporality: Delta" in deltas.log(), DEADLINE)
    container = kill(base)
    found = list(dry_runs())
    with ThreadPoolExecutor(2) as several:
        for errors in several.map(lambda way: [*way.rule_errors(), *way.query_errors()], ways):
            found += errors
    for way in (p3_otlp, vm_otlp, p3_collector):
        found += equal_series(p3, way)
    for memledger, receiver in ((http, collector), (grpc, deltas)):
        found += [*lost_event(receiver, container), *takes_all(memledger, "the collector"), *receiver.warnings()]
    least = fetch(f"{p3_otlp.url}/api/v1/query", query='min_over_time(process_cpu_seconds_total{job="memledger"}[1h])')["result"]
    if [row["value"][1] for row in least] != ["0"]:
        found.append(f"Prometheus 3, OTLP: a counter does not begin with 0 at its start: {least}")
    for what, endpoint in (("Prometheus", to_p3), ("VictoriaMetrics", to_vm)):
        found += no_logs(Memledger(binary, folder / f"logs-{what}", base, 9700, [endpoint, "--otlp.interval=1s"], name), what)
    await_("the delta of the kill", lambda: deltas.delta("memledger.container.oom.kills", container), DEADLINE)
    if (sum_of_deltas := deltas.delta("memledger.container.oom.kills", container)) != 1:
        found.append(f"the collector: the deltas of one kill add up to {sum_of_deltas}")
    for way in ways:
        print(f"{way.name}: {len(way.names())} names")
    return found


def main():
    with tempfile.TemporaryDirectory(prefix="memledger-servers-") as folder:
        try:
            found = check(sys.argv[1], Path(folder))
        finally:
            for program in PROGRAMS:
                program.stop()
    print("\n".join(found))
    print(f"{len(found)} errors at real servers")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
