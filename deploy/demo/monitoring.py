"""A Prometheus with the shipped rules in time-lapse, and an Alertmanager with the shipped configuration without its
receivers, where they are installed. Both listen on the loopback address only, keep their data in the demo's folder, and end with it.
"""
import json
import os
import re
import shutil
import threading
from pathlib import Path

import timelapse
from hosts import REPOSITORY
from processes import Program, Trouble, free_port, get

PORT = 9190
RULES = REPOSITORY / "deploy/prometheus/rules"
ALERTMANAGER = REPOSITORY / "deploy/prometheus/alertmanager.yml"
# Debian's program reads its templates from /usr/share; the tests only unpack its package, so they are mounted there
WITH_TEMPLATES = (
    'share="${0%/bin/*}/share"; [ "$share" = /usr/share ] || '
    'mount -t overlay -o lowerdir="$share":/usr/share none /usr/share; exec "$0" "$@"'
)


def installed(variable, *names):
    """Returns the path of a program: from the variable, on PATH, or unpacked by the tests."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memledger-tests"
    cache = Path(os.environ.get("MEMLEDGER_TEST_CACHE") or cache)
    unpacked = [str(path) for name in names for path in cache.glob(f"*/usr/bin/{name}")]
    candidates = [os.environ.get(variable), *map(shutil.which, names), *unpacked]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def without_receivers(config):
    """Returns the shipped configuration without its receivers, so that the demo sends no notifications."""
    before, _, receivers = config.partition("\nreceivers:\n")
    bare = [line for line in receivers.splitlines() if re.fullmatch(r"\s*- name: [\w-]+", line)]
    if not bare:
        raise Trouble(f"{ALERTMANAGER} does not end with its receivers, as in the shipped file")
    return "\n".join([before, "receivers:", *bare, ""])


class Monitoring:
    """Prometheus and Alertmanager."""

    def __init__(self, folder, hosts, factor):
        self.prometheus_binary = installed("MEMLEDGER_TEST_PROMETHEUS", "prometheus")
        self.alertmanager_binary = installed("MEMLEDGER_TEST_ALERTMANAGER", "prometheus-alertmanager", "alertmanager")
        self.folder, self.hosts, self.factor = folder / "monitoring", hosts, factor
        self.folder.mkdir()
        self.targets, self.programs, self.url, self.alertmanager_url = set(hosts), [], None, None

    def start(self):
        """Starts the installed programs."""
        if not self.prometheus_binary:
            return
        if self.alertmanager_binary:
            self.start_alertmanager()
        self.start_prometheus()

    def start_alertmanager(self):
        port = free_port(PORT + 1)
        url = f"http://127.0.0.1:{port}"
        words = ["unshare", "-m", "--propagation", "private", "/bin/sh", "-c", WITH_TEMPLATES, self.alertmanager_binary]
        config = self.folder / "alertmanager.yml"
        config.write_text(without_receivers(ALERTMANAGER.read_text()))
        words += [f"--config.file={config}", f"--storage.path={self.folder / 'alertmanager'}"]
        words += ["--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{port}"]
        program = Program(words, self.folder / "alertmanager.log", cwd=self.folder)
        self.programs.append(program)
        program.ready(f"{url}/-/ready")
        self.alertmanager_url = url

    def start_prometheus(self):
        port = free_port(PORT)
        url = f"http://127.0.0.1:{port}"
        rules = self.folder / "rules"
        rules.mkdir()
        for file in RULES.glob("*.yml"):
            (rules / file.name).write_text(timelapse.rules(file.read_text(), self.factor))
        self.write_targets()
        others = {"prometheus": url, "alertmanager": self.alertmanager_url}
        config = "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: ['rules/*.yml']\n"
        if self.alertmanager_url:
            address = self.alertmanager_url.removeprefix("http://")
            config += f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{address}']}}]}}]}}\n"
        config += "scrape_configs:\n- job_name: memledger\n  file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]\n"
        for job, address in others.items():
            if address:
                config += f"- job_name: {job}\n  static_configs: [{{targets: ['{address.removeprefix('http://')}']}}]\n"
        (self.folder / "prometheus.yml").write_text(config)
        words = [self.prometheus_binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        words += [f"--web.listen-address=127.0.0.1:{port}", "--rules.alert.resend-delay=1s"]
        program = Program(words, self.folder / "prometheus.log", cwd=self.folder)
        self.programs.append(program)
        program.ready(f"{url}/-/ready")
        self.url = url

    def write_targets(self):
        groups = [
            {"targets": [host.address], "labels": {"instance": name}}
            for name, host in sorted(self.hosts.items()) if name in self.targets
        ]  # fmt: skip
        new = self.folder / "targets.new"
        new.write_text(json.dumps(groups))
        os.replace(new, self.folder / "targets.json")

    def forget(self, *names):
        """Removes hosts from Prometheus' configuration."""
        self.targets -= set(names)
        self.write_targets()

    def remember(self, *names):
        self.targets |= set(names)
        self.write_targets()

    def alerts(self):
        """Returns the firing alerts, each as its sorted labels; None while Prometheus does not respond."""
        text = self.url and get(f"{self.url}/api/v1/alerts")
        if text is None:
            return None
        alerts = json.loads(text)["data"]["alerts"]
        return [tuple(sorted(alert["labels"].items())) for alert in alerts if alert["state"] == "firing"]

    def stop(self):
        for program in reversed(self.programs):
            program.stop()


class Watch:
    """Polls alerts on its own thread, so that the demo never waits for Prometheus."""

    def __init__(self, monitoring, report):
        self.monitoring, self.report = monitoring, report
        self.firing, self.ended = set(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.ended.wait(0.5):
            found = self.monitoring.alerts()
            if found is None:
                continue
            now = set(found)
            for labels in sorted(now - self.firing):
                self.report("FIRING", labels)
            for labels in sorted(self.firing - now):
                self.report("resolved", labels)
            self.firing = now

    def fires(self, wanted):
        """Whether an alert with these labels among others is firing."""
        return any(set(wanted.items()) <= set(labels) for labels in tuple(self.firing))

    def stop(self):
        self.ended.set()
        self.thread.join(10)
