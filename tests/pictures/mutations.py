"""Proves that draw.mjs sees what is wrong: `mutations.py ANSWERS`, with answers that it draws without a complaint.

Each mutation breaks the dashboard Overview in one way, or what Prometheus answered for it; all are drawn in one go, and each
must bring the complaint that belongs to it. `make pictures` ends with this.
"""
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def panels(dashboard):
    for panel in dashboard["board"]["panels"]:
        yield from [panel, *panel.get("panels", [])]


def first(dashboard, kind):
    """The first panel of a type that has overrides, or the first at all."""
    found = [panel for panel in panels(dashboard) if panel["type"] == kind]
    return next((panel for panel in found if panel["fieldConfig"]["overrides"]), found[0])


def answers(dashboard, panel):
    return dashboard["panels"][str(panel["id"])]


def unit(dashboard):
    first(dashboard, "timeseries")["fieldConfig"]["defaults"]["unit"] = "byte"


def unit_of_a_column(dashboard):
    properties = first(dashboard, "table")["fieldConfig"]["overrides"][0]["properties"]
    next(each for each in properties if each["id"] == "unit")["value"] = "percent0-1"


def column(dashboard):
    first(dashboard, "table")["fieldConfig"]["overrides"][0]["matcher"]["options"] = "Takn"


def option(dashboard):
    first(dashboard, "timeseries")["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1


def property_of_an_override(dashboard):
    first(dashboard, "timeseries")["fieldConfig"]["overrides"][0]["properties"][0]["id"] = "custom.lineStile"


def matcher(dashboard):
    first(dashboard, "timeseries")["fieldConfig"]["overrides"][0]["matcher"]["id"] = "byRefID"


def transformation(dashboard):
    first(dashboard, "table")["transformations"][0]["id"] = "join"


def no_transformation(dashboard):
    del first(dashboard, "table")["transformations"][0]


def link(dashboard):
    for each in first(dashboard, "table")["fieldConfig"]["overrides"]:
        for wanted in each["properties"]:
            if wanted["id"] == "links":
                wanted["value"][0]["url"] = "/d/x?var-container=${__data.fields.container}"


def kind(dashboard):
    first(dashboard, "timeseries")["type"] = "graph"


def nothing(dashboard):
    for answer in answers(dashboard, first(dashboard, "timeseries")):
        answer["rows"] = []


def nothing_in_a_stat(dashboard):
    answers(dashboard, first(dashboard, "stat"))[0]["rows"] = []


def twice(dashboard):
    rows = answers(dashboard, first(dashboard, "timeseries"))[0]["rows"]
    rows.append(copy.deepcopy(rows[0]))


def unnamed(dashboard):
    answers(dashboard, first(dashboard, "timeseries"))[0]["legendFormat"] = "{{nothing}}"


EXPECTED = {
    unit: "Grafana knows no unit byte",
    unit_of_a_column: "Grafana knows no unit percent0-1",
    column: "an override is for Takn",
    option: "Grafana ignores the field option custom.lineWidht",
    property_of_an_override: "Grafana ignores the field option custom.lineStile",
    matcher: "Grafana has no matcher byRefID",
    transformation: "Grafana has no transformation join",
    no_transformation: "of which Grafana shows the first",
    link: "a link takes container of the row",
    kind: "a panel of type graph cannot be drawn",
    nothing: "it has no data",
    nothing_in_a_stat: "it has no data",
    twice: "two series are called",
    unnamed: "a series is called",
}


def main():
    good = json.loads(Path(sys.argv[1]).read_text())["overview"]
    broken = {}
    for mutate in EXPECTED:
        broken[mutate.__name__] = copy.deepcopy(good)
        mutate(broken[mutate.__name__])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers.json")
        path.write_text(json.dumps(broken))
        drawn = subprocess.run(["node", HERE / "draw.mjs", path, folder], capture_output=True, text=True)
    unseen = [
        name
        for name, complaint in ((mutate.__name__, complaint) for mutate, complaint in EXPECTED.items())
        if not any(line.startswith(f"{name}.json ") and complaint in line for line in drawn.stdout.splitlines())
    ]
    for name in unseen:
        print(f"{name}: nothing was said of it")
    print(f"{len(EXPECTED)} mutations, {len(unseen)} unseen")
    if unseen or drawn.returncode != 1:
        print(drawn.stdout, drawn.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
