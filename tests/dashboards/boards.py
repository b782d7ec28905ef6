"""Reads the dashboards: their panels, queries and variables. check.py checks them."""
import json
import re

VARIABLE = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)|\[\[(\w+)\]\]")
# variables that Grafana defines, with a value for the parser
BUILT_IN = {"__rate_interval": "1m", "__interval": "15s", "__range": "6h", "__range_s": "21600"}
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def load(root):
    """All dashboards: file name to its JSON."""
    return {path.name: json.loads(path.read_text()) for path in sorted((root / "dashboards").glob("*.json"))}


def panels(dashboard):
    """Yields all panels, including those in collapsed rows; rows themselves are not panels."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def queries(dashboard):
    """Every query: (where, expression, panel or None, target or None)."""
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield f"panel {panel['title']!r} {target['refId']}", target["expr"], panel, target
    for note in dashboard["annotations"]["list"]:
        yield f"annotation {note['name']!r}", note["expr"], None, None


def variables(dashboard):
    """The variables by name."""
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def used(text):
    """Names of the variables in a text."""
    return {next(filter(None, found)) for found in VARIABLE.findall(text)}


def plain(expression):
    """The expression with Grafana's own variables filled in; the dashboard's own variables stay, inside strings."""
    return VARIABLE.sub(lambda found: BUILT_IN.get(found[1] or found[2] or found[3], found[0]), expression)


def label_values(query):
    """(series, label) of a variable's `label_values(series, label)`; None for any other query."""
    found = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", query)
    return found and (found[1], found[2])
