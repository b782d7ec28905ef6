"""Checks the time-lapse of the shipped rules (deploy/demo/timelapse.py) with independent parsers: a YAML
parser, and promql.py, which knows units from the catalog.

A factor of 1 returns the files unchanged. Any other factor divides every duration and every number that is compared to seconds,
and nothing else. What it cannot parse is rejected.
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
# must be rejected: constructs that a future rule could use, and a factor that does not divide the durations
REJECTED = {
    "a subquery with the server's step": "    expr: max_over_time(a[1h:]) > 1\n",
    "a subquery with a step that does not divide": "    expr: max_over_time(a[1h:1ms]) > 1\n",
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
    """Yields the numbers in a tree that are seconds, in order: thresholds of ages, and prediction horizons."""
    for node in promql.walk(tree):
        if isinstance(node, promql.Binary) and node.op in promql.COMPARISONS and isinstance(node.right, promql.Number):
            if reader.unit(node.left) == "s":
                yield node.right.value
        if isinstance(node, promql.Call) and node.function == "predict_linear":
            yield value(node.arguments[1])


def other_numbers(tree, reader):
    """Returns all other numbers."""
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
    """Yields errors of one expression before and after."""
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
    """Yields errors of one rule file."""
    text = path.read_text()
    if timelapse.rules(text, 1) != text:
        yield f"{path.name}: a factor of 1 changes the file"
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
        yield f"{path.name}: more than durations has changed"
    if path.name == "alerts.yml" and changed < 20:
        yield f"{path.name}: only {changed} alerts wait: was the file parsed?"


def main():
    reader = promql.Reader(catalog.table(ROOT))
    errors = [each for path in sorted((ROOT / "deploy/prometheus/rules").glob("*.yml")) for each in file(path, reader)]
    for what, rule in REJECTED.items():
        try:
            timelapse.rules(HEAD + rule, FACTOR)
            errors.append(f"{what} is not rejected")
        except timelapse.Unknown:
            pass
    for error in errors:
        print(error)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
