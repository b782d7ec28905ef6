"""Checks the time-lapse of the shipped rules (deploy/demo/timelapse.py) with readers that share nothing with it: YAML's own, and
the reader of PromQL beside this, which knows units from the catalog.

A factor of 1 gives the files back. Any other divides every span of time and every number that is compared to seconds, and leaves
all else. What it cannot read it refuses.
"""
import re
import sys
from pathlib import Path

import yaml

import catalog
import promql

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/demo"))
import timelapse  # noqa: E402

FACTOR = 60
SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
HEAD = "groups:\n- name: g\n  rules:\n  - alert: A\n"
# what it must refuse: the constructs that another rule could bring, and a factor that does not go into the spans
REFUSED = {
    "a subquery": "    expr: max_over_time(a[1h:5m]) > 1\n",
    "a point in time": "    expr: a @ 1609746000\n",
    "an unknown function": "    expr: holt_winters(a[1h], 0.5, 0.5) > 1\n",
    "an offset into the future": "    expr: a offset -5m\n",
    "a span of two units": "    expr: rate(a[1h30m]) > 1\n",
    "an age compared to a series": "    expr: time() - a > b\n",
    "an age on the right": "    expr: 600 > time() - a\n",
    "an age in brackets": "    expr: (time() - a) < 600\n",
    "seconds that are no age": "    expr: memledger_rest_seconds > 120\n",
    "an age that is no whole number": "    expr: time() - a > 90\n",
    "a horizon that is a series": "    expr: predict_linear(a[1h], b) > 1\n",
    "a quoted expression": "    expr: 'a > 1'\n",
    "a folded expression": "    expr: >\n      a > 1\n",
    "an unknown key": "    expr: a\n    limit: 5\n",
    "a span in words": "    expr: a\n    for: an hour\n",
    "a span that does not divide": "    expr: a\n    for: 1ms\n",
    "unbalanced brackets": "    expr: sum(a))\n",
    "a comment behind an expression": "    expr: a # or b\n",
}  # fmt: skip


def seconds(span):
    number, unit = re.fullmatch(r"(\d+)(\w+)", span).groups()
    return int(number) * SECONDS[unit]


def numbers_of_seconds(tree, reader):
    """The numbers in a tree that count seconds, in their order: what an age is compared to, and how far is predicted."""
    for node in promql.walk(tree):
        if isinstance(node, promql.Binary) and node.op in promql.COMPARISONS and isinstance(node.right, promql.Number):
            if reader.unit(node.left) == "s":
                yield node.right.value
        if isinstance(node, promql.Call) and node.function == "predict_linear":
            yield value(node.arguments[1])


def other_numbers(tree, reader):
    """All the others."""
    found = sorted(node.value for node in promql.walk(tree) if isinstance(node, promql.Number))
    inside = [
        inner.value for node in promql.walk(tree) if isinstance(node, promql.Call) and node.function == "predict_linear"
        for inner in promql.walk(node.arguments[1]) if isinstance(inner, promql.Number)
    ]  # fmt: skip
    alone = [
        node.right.value for node in promql.walk(tree)
        if isinstance(node, promql.Binary) and node.op in promql.COMPARISONS and isinstance(node.right, promql.Number)
        and reader.unit(node.left) == "s"
    ]  # fmt: skip
    for number in inside + alone:
        found.remove(number)
    return found


def value(node):
    return node.value if isinstance(node, promql.Number) else value(node.left) * value(node.right)


def expression(where, before, after, reader):
    """Complaints about one expression before and after."""
    spans = [[token for kind, token in promql.Parser(text).tokens if kind == "duration"] for text in (before, after)]
    if [seconds(span) for span in spans[0]] != [seconds(span) * FACTOR for span in spans[1]]:
        yield f"{where}: spans {spans[0]} became {spans[1]}"
    plain = [[token for kind, token in promql.Parser(text).tokens if kind not in ("duration", "number")] for text in (before, after)]
    if plain[0] != plain[1]:
        yield f"{where}: more than numbers has changed"
    trees = [promql.parse(text) for text in (before, after)]
    if [n for n in numbers_of_seconds(trees[0], reader)] != [n * FACTOR for n in numbers_of_seconds(trees[1], reader)]:
        yield f"{where}: numbers of seconds: {[list(numbers_of_seconds(tree, reader)) for tree in trees]}"
    if other_numbers(trees[0], reader) != other_numbers(trees[1], reader):
        yield f"{where}: a threshold has changed"


def file(path, reader):
    """Complaints about one file of rules."""
    text = path.read_text()
    if timelapse.rules(text, 1) != text:
        yield f"{path.name}: a factor of 1 does not give it back"
    before, after = (yaml.safe_load(each)["groups"] for each in (text, timelapse.rules(text, FACTOR)))
    changed = 0
    for group, other in zip(before, after, strict=True):
        for rule, lapsed in zip(group["rules"], other["rules"], strict=True):
            where = f"{path.name} {rule.get('alert') or rule['record']}"
            yield from expression(where, rule.pop("expr"), lapsed.pop("expr"), reader)
            if "for" in rule:
                changed += 1
                if seconds(rule.pop("for")) != seconds(lapsed.pop("for")) * FACTOR:
                    yield f"{where}: for"
    if before != after:
        yield f"{path.name}: more than spans has changed"
    if path.name == "alerts.yml" and changed < 20:
        yield f"{path.name}: only {changed} alerts wait: is it read?"


def main():
    reader = promql.Reader(catalog.table(ROOT))
    complaints = [each for path in sorted((ROOT / "deploy/prometheus/rules").glob("*.yml")) for each in file(path, reader)]
    for what, rule in REFUSED.items():
        try:
            timelapse.rules(HEAD + rule, FACTOR)
            complaints.append(f"{what} is not refused")
        except timelapse.Unknown:
            pass
    for complaint in complaints:
        print(complaint)
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
