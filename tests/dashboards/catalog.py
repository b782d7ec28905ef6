"""All series: the families of the catalog, those of the recording rules, and those that Prometheus itself adds.

The families come from docs/metrics.md, which tests/tables.rs keeps equal to src/catalog.rs; the settings that become
labels of memledger_container_run_info from docs/config.md.
"""
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

import promql

TARGET = {"job", "instance"}  # added to every series by the scrape
CLUSTER = {"cluster"}  # added where several clusters share a ruler
# Empty labels are omitted in the text format, so a result may lack them.
OPTIONAL = {"cluster", "k8s_namespace_name", "k8s_pod_name", "gpu_instance_id", "compute_instance_id"}
# labels of a scope that its series always have
IDENTIFYING = {"container_name", "gpu", "gpu_uuid"}

# labels whose values the catalog lists
ENUMERATED = {"role", "reason", "kind", "victim", "scope", "component", "source", "xid"}


@dataclass
class Series:
    labels: set
    unit: str
    counter: bool = False
    required: frozenset = frozenset()  # labels that each of its series has


def unit_of(name):
    """Returns the unit in a family's name."""
    base = name.removesuffix("_total")
    for ending, unit in [
        ("_timestamp_seconds", "time"),
        ("_time_seconds", "time"),
        ("_seconds", "s"),
        ("_bytes", "bytes"),
        ("_ratio", "ratio"),
        ("_watts", "watt"),
        ("_celsius", "celsius"),
        ("_joules", "joule"),
        ("_hertz", "hertz"),
    ]:
        if base.endswith(ending):
            return unit
    return "count"


def hidden(root):
    """The families that no dashboard shows, with a reason in the catalog."""
    rows = (root / "docs/metrics.md").read_text().splitlines()
    return {row.split("`")[1] for row in rows if row.startswith("| `") and " Not on a dashboard: " in row}


def families(root):
    """The catalog: name to Series."""
    settings = re.search(r"`--container\.settings`.*?\[(.*?)\]", (root / "docs/config.md").read_text())[1]
    found, scope = {}, []
    for line in (root / "docs/metrics.md").read_text().splitlines():
        if line.startswith("## "):
            scope = []
        elif line.startswith("Labels of all of them"):
            scope = re.findall(r"`(\w+)`", line)
        elif row := re.match(r"\| `(\w+)` \| (\w+) \| ([^|]*) \|", line):
            name, kind = row[1], row[2]
            own = [label for label in re.split(r",\s*", row[3].strip()) if label]
            labels = TARGET | CLUSTER | set(scope) | set(own)
            if name == "memledger_container_run_info":
                labels |= {setting.strip().lower() for setting in settings.split(",")}
            required = TARGET | set(own) | (set(scope) & IDENTIFYING)
            if kind == "info" and name != "memledger_build_info":
                required -= set(own)  # unknown values are omitted
            found[name] = Series(labels, unit_of(name), kind == "counter", frozenset(required))
    if len(found) < 50:
        raise SystemExit("docs/metrics.md: no table of families found")
    return found


def values(root):
    """Returns the possible values of labels that have few: label to the words in the help of its families."""
    found = {label: set() for label in ENUMERATED}
    for line in (root / "docs/metrics.md").read_text().splitlines():
        row = re.match(r"\| `\w+` \| \w+ \| ([^|]*) \| \d+ \| (.*) \|", line)
        for label in re.split(r",\s*", row[1]) if row else []:
            if label in found:
                found[label] |= set(re.findall(r"\w+", row[2]))
    runbook = (root / "docs/runbooks/MemledgerGpuXid.md").read_text()  # tests/tables.rs keeps its table equal to the source
    found["xid"] |= set(re.findall(r"^\| (\d+) \|", runbook, re.MULTILINE))
    return found


def of_prometheus():
    """Returns the series that Prometheus itself creates for targets and alerts."""
    anything = {"alertname", "alertstate", "severity", "owner", "k8s_namespace_name", "k8s_pod_name", "container_name"}
    return {
        "up": Series(TARGET | CLUSTER, "count"),
        "prometheus_build_info": Series(set(TARGET), "count"),
        "ALERTS": Series(TARGET | CLUSTER | anything, "count"),
    }


def rules(root):
    """All rules: (file, group, rule) in the order of the files."""
    for path in sorted((root / "deploy/prometheus/rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield path.name, group["name"], rule


def table(root):
    """Returns every series that a query may name."""
    found = families(root) | of_prometheus()
    for _, _, rule in rules(root):
        if "record" in rule:
            reader, tree = promql.Reader(found), promql.parse(rule["expr"])
            found[rule["record"]] = Series(reader.labels(tree, []) or set(), reader.unit(tree) or "count")
    return found


if __name__ == "__main__":
    for name, series in table(Path(__file__).resolve().parents[2]).items():
        print(name, series.unit, sorted(series.labels - TARGET - CLUSTER))
