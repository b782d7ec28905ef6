"""Checks that the demo makes every alert fire: `alerts.py STATUS [--wait S]`, where STATUS is the file that the demo writes.

The alerts are those of the rules file; the demo lists the labels that each must have. The check queries a real Prometheus with
the rules in time-lapse, and the real Alertmanager behind it. Each alert must have fired for everything that the demo lists, and
for no other container or GPU; all but the heartbeat must have resolved; each must have reached the receiver of its severity.
Alerts that the demo cannot provoke are listed by it with the reason, and must not fire.

Not here: the exact minute at which an alert fires, and cases in which it must not fire (deploy/prometheus/tests).
"""
import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import yaml

from panels import Prometheus

ROOT = Path(__file__).resolve().parents[2]
RECEIVERS = {"critical": "critical", "warning": "default", "info": "info", "none": "heartbeat"}
# Labels that identify the subject of an alert: two alerts that differ in any of them are different alerts.
SUBJECT = ("alertname", "severity", "instance", "container_name", "gpu", "source", "kind", "xid", "collector", "runtime")
# Kills are counted host-wide: tests that run at the same time may make these fire too, and again.
OF_THE_KERNEL = {"MemledgerUnitOOMKilled", "MemledgerOOMKillUnattributed", "MemledgerContainerOOMKilled"}

# They fire too, and end, if the machine gives a part of the demo no processor for seconds: its time runs sixty times as fast.
OF_A_BUSY_MACHINE = {"MemledgerSnapshotStale", "MemledgerExporterDown", "MemledgerCollectorFailing"}

# It counts the restarts of an hour, which is a minute of the demo: the GPUs that hang and disappear in it are enough.
OF_THE_TIME_LAPSE = {"MemledgerGpuDriverFailing"}


def rules():
    """(alert, severity) of every alert in the rules file."""
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())["groups"]
    return {(rule["alert"], rule["labels"]["severity"]) for group in groups for rule in group["rules"] if "alert" in rule}


def subject(labels):
    return tuple((name, labels[name]) for name in SUBJECT if name in labels)


# Longest time, in seconds, that they may fire for that reason.
MAX_BUSY = 15


class Seen(NamedTuple):
    has_ended: bool
    is_firing: bool
    seconds: float


class Watcher:
    """The alerts observed so far."""

    def __init__(self, status):
        self.status = status
        self.prometheus = Prometheus(status["prometheus"])
        self.receivers = {}

    def record_receivers(self):
        """Records which receivers got which alerts, because Alertmanager forgets them."""
        for alert in self.prometheus.fetch(f"{self.status['alertmanager']}/api/v2/alerts"):
            names = {receiver["name"] for receiver in alert["receivers"]}
            self.receivers.setdefault(alert["labels"]["alertname"], {}).setdefault(alert["labels"]["severity"], set()).update(names)

    def fired(self):
        """Maps the subject of each alert that fired since the demo began to whether it has ended and whether it fires now."""
        now = time.time()
        rows = self.prometheus.get(
            "query_range", query='ALERTS{alertstate="firing"}', start=self.status["since"], end=now, step=1
        )["result"]
        found = {}
        for row in rows:
            times = [point[0] for point in row["values"]]
            gap = any(later - earlier > 2 for earlier, later in zip(times, times[1:]))
            found[subject(row["metric"])] = Seen(gap or now - times[-1] > 2, now - times[-1] <= 2, len(times))
        return found

    def rows(self, query):
        return self.prometheus.get("query", query=query)["result"]

    def errors(self):
        """Yields what is still missing; then what is wrong."""
        fired, wanted, always = self.fired(), self.status["expected"], set(self.status["always"])
        played = {(labels["alertname"], labels["severity"]) for labels in wanted}
        unplayable = self.status["not_played"]
        for name, severity in sorted(rules() - played):
            if name not in always and name not in unplayable:
                yield f"{name} ({severity}): the demo does not provoke it, and gives no reason"
        for labels in wanted:
            seen = [one for one in fired if set(labels.items()) <= set(one)]
            if not seen:
                yield f"{labels} has not fired"
            elif not all(fired[one].has_ended for one in seen):
                yield f"{labels} has not resolved"
            elif labels["alertname"] not in OF_THE_KERNEL and any(fired[one].is_firing for one in seen):
                yield f"{labels} fires again"
        for one, (has_ended, is_firing, seconds) in fired.items():
            labels = dict(one)
            if labels["alertname"] in OF_THE_TIME_LAPSE:
                continue
            if labels["alertname"] in OF_A_BUSY_MACHINE and has_ended and seconds <= MAX_BUSY:
                continue
            if labels["alertname"] in unplayable:
                yield f"{labels} fired, but the demo lists it as impossible"
            elif labels["alertname"] in always:
                if not is_firing:
                    yield f"{labels} has stopped firing, but must always fire"
            elif not self.is_external(labels) and not any(set(each.items()) <= set(one) for each in wanted):
                yield f"{labels} fired without a cause"
            if labels.get("container_name") in self.status["innocent"]:
                yield f"{labels} fired for a container that must have no alerts"
        for name in always - {dict(one)["alertname"] for one in fired}:
            yield f"{name} does not fire"
        # alerts that a busy machine or a kill outside the demo causes may end before a receiver gets them
        delivered = [labels for labels in map(dict, fired)
                     if labels["alertname"] not in OF_A_BUSY_MACHINE and not self.is_external(labels)]
        for name, severity in {(labels["alertname"], labels["severity"]) for labels in delivered}:
            if self.receivers.get(name, {}).get(severity) != {RECEIVERS[severity]}:
                yield f"{name} ({severity}) went to {self.receivers.get(name, {}).get(severity)}"
        yield from self.check_runs()

    def is_external(self, labels):
        """Whether the alert may be caused by an OOM kill outside the demo: no container of the demo is in its labels."""
        return labels["alertname"] in OF_THE_KERNEL and labels.get("container_name") not in self.status["containers"]

    def check_runs(self):
        """Checks that two runs of one name, with two batch sizes, are two rows of one query."""
        rows = self.rows(
            "max by (container_name, run, batch_size) (max_over_time("
            'container_run:memledger_memory_unreclaimable_peak_bytes:join{container_name=~"piper.+"}[10m]))'
        )
        sizes = sorted(row["metric"].get("batch_size") for row in rows)
        if sizes != ["16", "8"] or len({row["metric"]["run"] for row in rows}) != 2:
            yield f"the two runs are {[row['metric'] for row in rows]}"
        failures = self.rows("sum(prometheus_rule_evaluation_failures_total)")
        if [row["value"][1] for row in failures] != ["0"]:
            yield f"rules failed: {failures}"


def read(file):
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}


def wait_for_alerts(file, deadline):
    """Waits until the demo has finished and all alerts are resolved, or until the deadline; returns the errors."""
    while "expected" not in (status := read(file)):
        if time.monotonic() > deadline or status.get("state") == "ended":
            return [f"the demo did not start: {status}"]
        time.sleep(0.2)  # poll
    watcher = Watcher(status)
    while True:
        watcher.record_receivers()
        state = read(file)["state"]
        over = time.monotonic() > deadline
        errors = list(watcher.errors()) if over or state == "round-over" else [f"the demo is {state}"]
        if not errors or over or state == "ended":
            return errors
        time.sleep(0.5)  # poll


def main():
    words = argparse.ArgumentParser()
    words.add_argument("status", type=Path)
    words.add_argument("--wait", type=float, default=240)
    given = words.parse_args()
    errors = wait_for_alerts(given.status, time.monotonic() + given.wait)
    for error in errors:
        print(error)
    print(f"{len(rules())} alerts by severity, {len(errors)} errors")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
