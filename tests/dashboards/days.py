"""Two simulated days of 20 hosts, evaluated with the shipped rules and the inhibition of the shipped Alertmanager: `days.py [--mutations]`.

On the busy day (days/busy.py) everything normal happens: nothing critical may fire, and only the warnings of a short list, each with
its reason. On the other (days/incidents.py) twelve incidents happen: each fires the alerts of its row within its minutes, sends the
notifications of its row, and no others. promtool evaluates the rules once a minute ($MEMLEDGER_TEST_PROMTOOL); all alerts of the day
come from the results of its failed comparisons with nothing. What Alertmanager sends is computed here, from the routes and rules of
inhibition of its configuration.

`--mutations` changes copies of the rules: each must cause the expected error.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import catalog
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).with_name("days")))
import busy  # noqa: E402
import incidents  # noqa: E402
from fleet import LENGTH, text  # noqa: E402

RULES = [ROOT / f"deploy/prometheus/rules/{name}.yml" for name in ("recording", "alerts")]
ALERTMANAGER = ROOT / "deploy/prometheus/alertmanager.yml"
HEARTBEAT = "MemledgerWatchdog"
# Absent until something fails, so neither day has them.
ABSENT = {"memledger_series_dropped_total"}
# Labels that a setting adds to a family.
OF_SETTINGS = {"memledger_container_owner_info": {"label_team"}}
FIRING = 'ALERTS{alertstate="firing"}'
LAST = 10  # minutes before the end of an incident in which its alert may be resolved, as while the host restarts
GROUP_INTERVAL = 5  # minutes, as in the route of Alertmanager
SERIES = re.compile(r"[a-z_]+:\w+:\w+|\bmemledger_\w+\b(?!:)")
NOT_INTERESTING = {"__name__", "alertstate"}


@dataclass(frozen=True)
class Alert:
    """An alert that fired, from its first minute to the minute after its last one."""

    labels: tuple
    begin: int
    end: int

    def __getitem__(self, label):
        return dict(self.labels).get(label, "")

    def key(self):
        return self["alertname"], self["severity"], self["instance"], self["container_name"]

    def fires_at(self, minute):
        return self.begin <= minute < self.end


def clock(minute):
    return f"{minute // 60:02}:{minute % 60:02}"


# The evaluation


def written(series):
    """Returns series in promtool's notation, as a list of a rule test."""
    found = []
    for name, labels, values in series:
        if any(value is not None for value in values):
            matchers = ", ".join(f'{label}="{value}"' for label, value in labels.items())
            found.append({"series": f"{name}{{{matchers}}}", "values": text(values)})
    return found


def all_rules(groups=None):
    """Returns the rules of these groups, by default of the shipped ones."""
    return [rule for group in groups or shipped_groups() for rule in group["rules"]]


def shipped_groups():
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]


def read_by(expressions):
    """Returns the names of all series that expressions read, also by recorded ones."""
    recorded = {rule["record"]: rule["expr"] for rule in all_rules() if "record" in rule}
    read = {name for expression in expressions for name in SERIES.findall(expression)}
    while new := {name for record in read & recorded.keys() for name in SERIES.findall(recorded[record])} - read:
        read |= new
    return read


def evaluated(groups, alerts=None):
    """Returns the groups without the recorded series that none of the alerts reads; `alerts`: only those, and the heartbeat."""
    kept = [rule for rule in all_rules(groups) if "alert" in rule and (not alerts or rule["alert"] in {*alerts, HEARTBEAT})]
    read = read_by(rule["expr"] for rule in kept)
    kept = [{**group, "rules": [rule for rule in group["rules"] if rule in kept or rule.get("record") in read]} for group in groups]
    return [group for group in kept if group["rules"]]


def evaluate(series, groups):
    """Returns all alerts of a day, in the order in which they begin: for each minute, promtool prints which begin and which end."""
    queries = [f"{FIRING} unless {FIRING} offset 1m", f"{FIRING} offset 1m unless {FIRING}"]
    tests = [{"expr": query, "eval_time": f"{minute}m", "exp_samples": []} for minute in range(LENGTH) for query in queries]
    day = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    order = [group["name"] for group in groups]
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "group_eval_order": order, "tests": [day]}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("rules.yml", {"groups": groups}), ("day.yml", test)):
            (Path(folder) / name).write_text(json.dumps(content))  # JSON is YAML, and is written faster
        command = [os.environ["MEMLEDGER_TEST_PROMTOOL"], "test", "rules", f"{folder}/day.yml"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"GOGC": "400"})
    return read_alerts(done.stdout + done.stderr)


COMPARED = re.compile(r'^ *expr: "(.*)", time: (?:(\d+)h)?(?:(\d+)m)?(?:0?s)?, *\n *exp: *nil *\n *got: *(.*)$', re.MULTILINE)
NOISE = re.compile(r"Unit Testing: .*|FAILED:")


def read_alerts(output):
    """Reads what promtool prints for comparisons that fail."""
    rest = COMPARED.sub("", output)
    if unknown := [line for line in rest.splitlines() if line.strip() and not NOISE.fullmatch(line.strip())]:
        raise SystemExit("promtool: " + "\n".join(unknown[:20]))
    running, alerts = {}, []
    for found in COMPARED.finditer(output):
        minute = 60 * int(found[2] or 0) + int(found[3] or 0)
        is_begin = found[1].startswith(FIRING.replace('"', '\\"') + " unless")
        for sample in re.findall(r"\{(.*?)\} 1", found[4]):
            labels = tuple(sorted((label, value) for label, value in re.findall(r'(\w+)="(.*?)"', sample) if label not in NOT_INTERESTING))
            if is_begin:
                running[labels] = minute
            else:
                alerts.append(Alert(labels, running.pop(labels), minute))
    alerts += [Alert(labels, begin, LENGTH) for labels, begin in running.items()]
    if [alert.begin for alert in alerts if alert["alertname"] == HEARTBEAT] != [0]:
        raise SystemExit(f"promtool: {HEARTBEAT} was not found in its output")
    return sorted((alert for alert in alerts if alert["alertname"] != HEARTBEAT), key=lambda alert: (alert.begin, alert.labels))


# Alertmanager


def matches(alert, matchers):
    """Whether an alert has all labels of a list of matchers."""
    for matcher in matchers:
        label, operator, value = re.fullmatch(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"?(.*?)"?\s*', matcher).groups()
        is_equal = bool(re.fullmatch(value, alert[label])) if "~" in operator else alert[label] == value
        if is_equal == ("!" in operator):
            return False
    return True


def is_inhibited(alert, minute, alerts, config):
    """Whether another alert that fires in this minute inhibits it."""
    for rule in config["inhibit_rules"]:
        source, target = rule["source_matchers"], rule["target_matchers"]
        if not matches(alert, target):
            continue
        both = matches(alert, source)
        for other in alerts:
            is_source = other.fires_at(minute) and matches(other, source) and not (both and matches(other, target))
            if is_source and all(alert[label] == other[label] for label in rule["equal"]):
                return True
    return False


def route(alert, config):
    """Returns the receiver of an alert, and the labels by which it is grouped."""
    top = config["route"]
    own = next((each for each in top["routes"] if matches(alert, each["matchers"])), top)
    return own["receiver"], own.get("group_by", top["group_by"])


def notifications(alerts, config):
    """Returns the notifications of new alerts, without those of info: (minute, alertname, severity, instance or "").

    A group waits 30 seconds and then for each GROUP_INTERVAL; it ends when none of its alerts fires.
    """
    groups = defaultdict(list)
    for alert in alerts:
        receiver, labels = route(alert, config)
        if receiver != "info":
            groups[receiver, tuple(labels), tuple(alert[label] for label in labels)].append(alert)
    found = []
    for (_, labels, _), members in groups.items():
        sent, minute = set(), 0
        while (minute := next((m for m in range(minute, LENGTH) if any(a.fires_at(m) for a in members)), None)) is not None:
            while any(alert.fires_at(minute) for alert in members):
                firing = {a for a in members if a.fires_at(minute) and not is_inhibited(a, minute, alerts, config)}
                if new := firing - sent:
                    first = min(new, key=lambda alert: alert.labels)
                    found.append((minute, first["alertname"], first["severity"], first["instance"] if "instance" in labels else ""))
                sent |= firing
                minute += GROUP_INTERVAL
    return sorted(found)


# What is checked


def conformance(series):
    """Yields names and labels that docs/metrics.md does not have, and families that alerts read and neither day has."""
    families, seen = catalog.families(ROOT), set()
    for name, labels in {(name, tuple(labels)) for name, labels, _ in series}:
        seen.add(name)
        family = families.get(name)
        if name == "up":
            continue
        if not family:
            yield f"{name} is not in the catalog"
        elif extra := set(labels) - family.labels - OF_SETTINGS.get(name, set()):
            yield f"{name} has no label {sorted(extra)}"
        elif missing := family.required - set(labels):
            yield f"{name} lacks label {sorted(missing)}"
    for name in sorted(read_by(rule["expr"] for rule in all_rules() if "alert" in rule) & families.keys() - seen - ABSENT):
        yield f"neither day has {name}, which an alert reads"


def errors_of_busy_day(alerts, sent):
    """Yields what the busy day has that it must not have, and what it lacks."""
    found = defaultdict(list)
    for alert in alerts:
        if alert["severity"] != "info":
            found[alert["alertname"], alert["instance"], alert["container_name"]].append(alert)
    for key, same in found.items():
        if any(alert["severity"] == "critical" for alert in same):
            yield f"critical: {' '.join(key)} at {clock(same[0].begin)}"
        elif key not in busy.WARNINGS:
            yield f"not in the list of warnings: {' '.join(key)} at {clock(same[0].begin)}, {len(same)} times"
    for key in set(busy.WARNINGS) - set(found):
        yield f"in the list of warnings, but does not fire: {' '.join(key)}"
    if len(sent) > busy.MOST:
        yield f"{len(sent)} notifications, at most {busy.MOST} are allowed"


def errors_of_incidents(table, alerts, sent):
    """Yields the alerts that a row lacks, is late with, or that belong to no row; the same for notifications."""
    owner = {}
    for row in table:
        info = {(name, "info", *rest) for name, *rest in row.info}
        for key in row.alerts.keys() | info:
            owner[key] = row
            own = [alert for alert in alerts if alert.key() == key]
            if not own:
                yield f"{row.name}: {' '.join(key)} does not fire"
                continue
            first, last = own[0].begin, max(alert.end for alert in own)
            latest = row.begin + row.alerts[key] if key in row.alerts else row.end + row.resolved
            if not row.begin <= first <= latest:
                yield f"{row.name}: {' '.join(key)} fires at {clock(first)}, expected {clock(row.begin)} to {clock(latest)}"
            if key[0] in row.lasting and last < row.end - LAST:
                yield f"{row.name}: {' '.join(key)} is resolved at {clock(last)}, while it lasts until {clock(row.end)}"
            if key in row.alerts and last > row.end + row.resolved:
                yield f"{row.name}: {' '.join(key)} is resolved at {clock(last)}, expected by {clock(row.end + row.resolved)}"
    for alert in alerts:
        if alert.key() not in owner:
            yield f"in no row: {' '.join(alert.key())} at {clock(alert.begin)}"
    for row in table:
        own = Counter(each[1:] for each in sent if is_of(row, each, table))
        for each in own - Counter(row.notified):
            yield f"{row.name}: notified of {' '.join(each)}, which its row does not name"
        for each in Counter(row.notified) - own:
            yield f"{row.name}: no notification of {' '.join(each)}"
        if own.total() > 1 and not row.more_than_one:
            yield f"{row.name}: {own.total()} notifications for one fault"


def is_of(row, notification, table):
    """Whether a notification belongs to this incident: by its alert, and of several with the same alert by its time."""
    minute, name, severity, host = notification
    alike = [each for each in table if any(key[:2] == (name, severity) and host in ("", key[2]) for key in each.alerts)]
    begun = [each for each in alike if each.begin <= minute]
    return bool(begun) and max(begun, key=lambda each: each.begin) is row


def report_busy_day(alerts, sent):
    print("The busy day")
    for (name, host, container), reason in busy.WARNINGS.items():
        times = [clock(minute) for minute, *rest in sent if rest == [name, "warning", host]]
        print(f"  warning  {name} {host} {container}: {reason}; notified at {', '.join(times)}")
    info = defaultdict(set)
    for alert in alerts:
        if alert["severity"] == "info":
            info[alert["alertname"]].add((alert["instance"], alert["k8s_pod_name"], alert["container_name"], alert["gpu"]))
    for name, subjects in sorted(info.items()):
        print(f"  info     {name}: {len(subjects)}")


def report_incidents(table, alerts, sent):
    print("The day with incidents")
    for row in table:
        print(f"  {clock(row.begin)} to {clock(row.end)}  {row.name}")
        for key in row.alerts:
            own = [alert for alert in alerts if alert.key() == key]
            if own:
                print(f"    {' '.join(filter(None, key))}: after {own[0].begin - row.begin} min, at most {row.alerts[key]}; resolved at {clock(max(a.end for a in own))}")
        times = [f"{each[1]} ({each[2]}) {clock(each[0])}" for each in sent if is_of(row, each, table)]
        print(f"    notified: {', '.join(times)}{'. Several: ' + row.more_than_one if row.more_than_one else ''}")


def check(config):
    """Prints what happens on both days; returns the errors."""
    incident_day, table = incidents.new_incident_day()
    days = [list(busy.new_busy_day().series()), list(incident_day.series())]
    errors = list(conformance([series for day in days for series in day]))
    groups = evaluated(shipped_groups())
    with ThreadPoolExecutor() as both:
        busy_alerts, incident_alerts = both.map(lambda day: evaluate(written(day), groups), days)
    busy_sent, incident_sent = notifications(busy_alerts, config), notifications(incident_alerts, config)
    report_busy_day(busy_alerts, busy_sent)
    report_incidents(table, incident_alerts, incident_sent)
    errors += errors_of_busy_day(busy_alerts, busy_sent)
    errors += errors_of_incidents(table, incident_alerts, incident_sent)
    return errors


# what is changed in the rules or in the configuration of Alertmanager, the alerts that are evaluated then, and a part of the error
MUTATIONS = [
    (RULES[1], "max_over_time(memledger_gpus_visible[1d]) - ", "memledger_gpus_expected - ",
     {"MemledgerGpuLost"}, "MemledgerGpuLost critical gpu-1  is resolved at 08:40, while it lasts"),
    (RULES[1], "up{job=\"memledger\"} == 0\n    for: 15m", "up{job=\"memledger\"} == 0\n    for: 5m",
     {"MemledgerExporterDown"}, "not in the list of warnings: MemledgerExporterDown gpu-1"),
    (ALERTMANAGER, "48|63|64|94|95|140|154", "48|63|64|94|95|140", {"MemledgerGpuEcc", "MemledgerGpuXid"}, "ECC error: notified of MemledgerGpuXid critical gpu-2"),
]  # fmt: skip


def undetected(mutation):
    """Returns what is wrong if none of the errors is the expected one."""
    file, old, new, names, wanted = mutation
    texts = {path: path.read_text() for path in (*RULES, ALERTMANAGER)}
    assert old in texts[file], f"{file.name} has no {old!r} any more: choose another mutation"
    texts[file] = texts[file].replace(old, new)
    groups = evaluated([group for path in RULES for group in yaml.safe_load(texts[path])["groups"]], names)
    config, read = yaml.safe_load(texts[ALERTMANAGER]), read_by(rule["expr"] for rule in all_rules(groups))
    incident_day, table = incidents.new_incident_day()
    errors = []
    for day, errors_of in ((busy.new_busy_day(), errors_of_busy_day), (incident_day, lambda *found: errors_of_incidents(table, *found))):
        alerts = evaluate(written(series for series in day.series() if series[0] in read | {"up"}), groups)
        errors += errors_of(alerts, notifications(alerts, config))
    if not any(wanted in error for error in errors):
        return f"{old!r} became {new!r}: no error has {wanted!r}, only {[error for error in errors if 'does not fire' not in error][:5]}"
    return None


def main():
    if is_mutated := sys.argv[1:] == ["--mutations"]:
        with ThreadPoolExecutor() as several:
            errors = [error for error in several.map(undetected, MUTATIONS) if error]
    else:
        errors = check(yaml.safe_load(ALERTMANAGER.read_text()))
    for error in errors:
        print(error)
    print(f"{len(errors)} of {len(MUTATIONS)} mutations not detected" if is_mutated else f"{len(errors)} errors")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
