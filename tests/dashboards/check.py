"""Checks the shipped dashboards, rules and documents against the catalog and against each other: `check.py [ROOT]`.

Dashboards, rules, the rules' tests, runbooks and documents may name only series and labels that exist; every family is
shown on a dashboard; dashboards are well formed; every alert has a runbook, a test in which it fires and one in which it does not.
Prints one error per line; exit status 1 if there is any. Needs no server: panels.py queries a real Prometheus.
"""
import itertools
import json
import re
import sys
from pathlib import Path

import yaml

import boards
import catalog
import portable
import promql

# The variables of the dashboard of a container, and the labels that they select by.
CONTAINER_VARIABLES = {
    "cluster": "cluster",
    "host": "instance",
    "namespace": "k8s_namespace_name",
    "pod": "k8s_pod_name",
    "container": "container_name",
}
GRAFANA_UNITS = {
    "bytes": {"bytes"},
    "bytes/s": {"bytes", "Bps"},
    "ratio": {"percentunit"},
    "s": {"s"},
    "h": {"h"},
    "time": {"dateTimeAsIso", "dateTimeFromNow"},
    "watt": {"watt"},
    "joule": {"joule"},
    "celsius": {"celsius"},
    "hertz": {"hertz"},
    "count": {"none", "short"},
}
PANEL_TYPES = {"timeseries", "trend", "stat", "bargauge", "table", "state-timeline", "text"}
# It shows all hosts at once, so it has no variable for a host.
FLEET = "fleet.json"
# Variables with one value: only runs of one group are comparable, and all panels of a host or a container show one of them.
SINGLE = {
    ("compare.json", "group"),
    ("budget.json", "host"),
    *(("container.json", name) for name in ("host", "namespace", "pod", "container")),
}
# The matchers that select by the variables; an alert may belong to no host.
MATCHERS = {
    "cluster": {("=~", "$cluster")},
    "job": {("=~", "$job")},
    "instance": {("=~", "$instance"), ("=", "$host")},
}
ALERT_MATCHERS = {"cluster": {("=~", "$cluster|"), ("=~", "$cluster")}, "instance": {("=~", "$instance|")}}
DIFFERENCES = {"rate", "irate", "increase", "last_over_time", "max_over_time", "min_over_time"}
# Counters whose plain value is shown: it continues over restarts, or counts over the lifetime of the device.
PLAIN_COUNTERS = {"memledger_gpu_ecc_errors_total", "memledger_container_restarts_total"}
# Words in italics in runbooks that are not titles of panels or dashboards: lines of `memledger doctor` and `why`, pages of
# Prometheus, messages of programs.
NOT_TITLES = {
    "state path", "kernel log", "kernel counter", "cgroup counters", "What to try", "What each source adds",
    "Status, Targets", "Status, Runtime", "Service Discovery", "bus error", "unable to write to file",
    "CUDA out of memory", "context deadline exceeded", "fallen off the bus",
}  # fmt: skip


# Flags of other programs in the documents.
OTHER_FLAGS = {"web.enable-otlp-receiver", "web.enable-remote-write-receiver"}


class Check:
    """The errors found in one tree of files."""

    def __init__(self, root):
        self.root = root
        self.errors = []
        # each function that would count births at VictoriaMetrics: (where, function, series, why it is safe)
        self.differences = []
        self.families = catalog.families(root)
        self.table = catalog.table(root)
        self.reader = promql.Reader(self.table)
        self.values = catalog.values(root)
        self.boards = boards.load(root)

    def error(self, where, what):
        self.errors.append(f"{where}: {what}")

    def query(self, where, expression):
        """Reports errors in an expression; returns its tree, or None."""
        try:
            tree = promql.parse(expression)
        except promql.Unreadable as error:
            self.error(where, f"{error} in {expression!r}")
            return None
        for message in self.reader.errors(tree):
            self.error(where, message)
        for node in promql.walk(tree):
            for label, _, value in node.matchers if isinstance(node, promql.Selector) else ():
                # "$variable", "" and ".+" are not values
                for word in value.split("|") if re.fullmatch(r"[\w|]+", value) else ():
                    if label in self.values and word not in self.values[label]:
                        self.error(where, f"{node.name}{{{label}}}: the catalog has no value {word!r}")
        return tree

    # --- dashboards

    def dashboards(self):
        uids = [board["uid"] for board in self.boards.values()]
        if len(uids) != len(set(uids)) or len(uids) < 6:
            self.error("dashboards", f"expected six different uids, found {uids}")
        for name, board in self.boards.items():
            self.settings(name, board, set(uids))
            self.layout(name, board)
            self.variables(name, board)
            self.links_to_dashboards(name, json.dumps(board))
            for panel in boards.panels(board):
                self.panel(f"{name} panel {panel['title']!r}", panel)
            for where, expression, panel, target in boards.queries(board):
                self.panel_query(f"{name} {where}", expression, panel, target)

    def settings(self, name, board, uids):
        wanted = {"editable": False, "tags": ["memledger"], "schemaVersion": 39, "uid": f"memledger-{Path(name).stem}"}
        for key, value in wanted.items():
            if board.get(key) != value:
                self.error(name, f"{key} is {board.get(key)!r}, not {value!r}")
        if not any(link["type"] == "dashboards" and link["tags"] == ["memledger"] for link in board["links"]):
            self.error(name, "no link to the other dashboards")
        for uid in re.findall(r"/d/([\w-]+)[\w/-]*[^\w/?-]", json.dumps(board)):
            if uid not in uids:
                self.error(name, f"links to dashboard {uid}, which does not exist")

    def layout(self, name, board):
        every = [*board["panels"], *(inner for row in board["panels"] for inner in row.get("panels", []))]
        ids = [panel["id"] for panel in every]
        for number in {number for number in ids if ids.count(number) > 1}:
            self.error(name, f"two panels have id {number}")
        titles = [panel["title"] for panel in boards.panels(board)]
        for title in {title for title in titles if titles.count(title) > 1}:
            self.error(name, f"two panels are called {title!r}")
        groups = [board["panels"], *(row["panels"] for row in board["panels"] if row.get("panels"))]
        for one, other in (pair for group in groups for pair in itertools.combinations(group, 2)):
            a, b = one["gridPos"], other["gridPos"]
            if a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]:
                self.error(name, f"{one['title']!r} and {other['title']!r} overlap")
        for panel in every:
            if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24:
                self.error(name, f"{panel['title']!r} is wider than the page")

    def variables(self, name, board):
        known = boards.variables(board)
        if list(known)[:3] != ["datasource", "cluster", "job"] or name != FLEET and list(known)[3] not in ("instance", "host"):
            self.error(name, f"the first variables are {list(known)[:4]}")
        text = json.dumps({key: value for key, value in board.items() if key != "templating"})
        for variable in boards.used(text):
            if variable not in known and variable not in boards.BUILT_IN and not variable.startswith(("__", "datasource")):
                self.error(name, f"variable ${variable} is not defined")
        for variable in known:
            if variable != "datasource" and f"${variable}" not in text and f"${{{variable}" not in text:
                self.error(name, f"variable ${variable} is not used")
        for position, variable in enumerate(known.values()):
            if variable["type"] != "query":
                continue
            where = f"{name} variable ${variable['name']}"
            label_query = boards.label_values(variable["query"]["query"])
            if not label_query:
                self.error(where, "not a label_values(series, label) query")
                continue
            tree = self.query(where, label_query[0])
            if tree and variable["name"] != "cluster" and ("cluster", "=~", "$cluster") not in tree.matchers:
                self.error(where, f'{tree.name} is not filtered by cluster=~"$cluster"')
            if tree and label_query[1] not in (self.reader.labels(tree, []) or ()):
                self.error(where, f"{label_query[0]} has no label {label_query[1]}")
            for used in boards.used(label_query[0]):
                if used not in list(known)[:position]:
                    self.error(where, f"uses ${used}, which is defined later or not at all")
            if (name, variable["name"]) in SINGLE:
                if variable["multi"] or variable["includeAll"]:
                    self.error(where, "must have one value")
                # a link to all dashboards passes All, which Grafana keeps, and no series has
                for other, its in self.boards.items():
                    if boards.variables(its).get(variable["name"], variable)["multi"]:
                        self.error(where, f"has one value, but several in {other}: give one of them another name")
                continue
            # series without a pod have no such label
            every = ".*" if label_query and label_query[1] in catalog.OPTIONAL else ".+"
            if not (variable["multi"] and variable["includeAll"] and variable["allValue"] == every and variable["refresh"] == 2):
                self.error(where, f"must be multi-value with All as {every} and refresh on time range change")

    def panel(self, where, panel):
        if panel["type"] not in PANEL_TYPES:
            self.error(where, f"panel type {panel['type']} is not in use here")
        if len(panel.get("description", "")) < 20:
            self.error(where, "no description of what to do")
        if panel["type"] == "text":
            return
        if not panel.get("targets"):
            self.error(where, "no query")
        for source in [panel, *panel["targets"]]:
            if source["datasource"]["uid"] != "${datasource}":
                self.error(where, "the data source is not ${datasource}")
        refs = [target["refId"] for target in panel["targets"]]
        if len(refs) != len(set(refs)):
            self.error(where, f"two queries have one refId: {refs}")
        if panel["type"] in ("timeseries", "trend") and panel["options"]["legend"]["displayMode"] != "table":
            self.error(where, "the legend is not a table")

    def panel_query(self, where, expression, panel, target):
        tree = self.query(where, boards.plain(expression))
        if tree is None:
            return
        for node in promql.walk(tree):
            if isinstance(node, promql.Selector):
                self.filtered(where, node)
            if isinstance(node, promql.Call) and node.function in ("rate", "irate"):
                if "$__rate_interval" not in expression:
                    self.error(where, "rate() over a fixed window: use $__rate_interval")
            self.grouped(where, node)
        self.counters(where, tree)
        self.own(where, tree)
        self.portable(where, tree)
        if panel is None:
            return
        legend = boards.LEGEND.findall(target["legendFormat"])
        # Two compute instances of one GPU instance would have the same legend.
        if "gpu_instance_id" in legend and "compute_instance_id" in (self.reader.labels(tree, []) or set()) - set(legend):
            self.error(where, "the legend names gpu_instance_id without compute_instance_id")
        for label in legend:
            if label not in (self.reader.labels(tree, []) or ()):
                self.error(where, f"the legend names {label}, which the result cannot have")
        self.bounded(where, panel, target, tree)
        self.fits(where, panel, target, tree)
        self.links(where, panel, tree)

    def grouped(self, where, node):
        """Hosts of two clusters may have one name."""
        if isinstance(node, (promql.Aggregation, promql.Binary)):
            mode = node.mode if isinstance(node, promql.Aggregation) else node.matching
            if mode in ("by", "on") and {"job", "instance"} & set(node.labels) and "cluster" not in node.labels:
                self.error(where, f"{mode} ({', '.join(node.labels)}) lacks cluster")

    def bounded(self, where, panel, target, tree):
        """An answer must not grow with the fleet: a row per container, or a line per host or container, needs topk or bottomk."""
        name = where.partition(" ")[0]
        if any(file == name for file, _ in SINGLE) or promql.is_limited(tree):
            return
        grows = {"container_name"} if target["instant"] else {"container_name", "instance"}
        for label in sorted(grows & (self.reader.labels(tree, []) or set())):
            self.error(where, f"its answer grows with the number of {label}: use topk or bottomk")

    def links_to_dashboards(self, where, text):
        """A link must pass only variables that the other dashboard has."""
        known = {its["uid"]: boards.variables(its) for its in self.boards.values()}
        for uid, query in re.findall(r"/d/([\w-]+)[\w/-]*\?([^\"]*)", text):
            if uid not in known:
                self.error(where, f"links to dashboard {uid}, which does not exist")
                continue
            passed = set(re.findall(r"\bvar-(\w+)=", query)) | set(re.findall(r"\$\{(\w+):queryparam\}", query))
            for variable in sorted(passed - known[uid].keys()):
                self.error(where, f"a link passes {variable} to {uid}, which has no such variable")
            if "cluster" not in passed:
                self.error(where, f"a link to {uid} does not pass cluster")

    def links(self, where, panel, tree):
        """A link that lacks a label of a container opens every container of the same name: those of two pods on one node."""
        urls = re.findall(r"/d/memledger-container\?[^\"]*", json.dumps(panel))
        labels = self.reader.labels(tree, []) or set()
        for url in urls:
            passed = dict(re.findall(r"var-(\w+)=\$\{__(?:field\.labels|data\.fields)\.(\w+)\}", url))
            for variable, label in CONTAINER_VARIABLES.items() - passed.items():
                self.error(where, f"its link does not pass {label} as {variable}")
        # a missing label selects the series without it, which is wrong where the query has dropped it
        if urls and "container_name" in labels:
            for label in sorted(set(CONTAINER_VARIABLES.values()) - labels):
                self.error(where, f"its link needs {label}, which the result cannot have")

    def own(self, where, tree):
        """With All selected, job=~".+" also matches series of the same name from other programs, such as Prometheus itself."""
        names = {node.name for node in promql.walk(tree) if isinstance(node, promql.Selector)}
        for name in sorted(names):
            if name.startswith(("process_", "up")) and "memledger_build_info" not in names:
                self.error(where, f"other programs export {name} too: join it with memledger_build_info")

    def filtered(self, where, node):
        """A selector without the variables shows hosts that are not selected."""
        wanted = ALERT_MATCHERS if node.name == "ALERTS" else MATCHERS
        for label, allowed in wanted.items():
            if label == "instance" and where.startswith(FLEET):
                continue
            if not any((label, *matcher) in node.matchers for matcher in allowed):
                matchers = " or ".join(f'{label}{op}"{value}"' for op, value in sorted(allowed))
                self.error(where, f"{node.name} is not filtered by {matchers}")

    def counters(self, where, tree):
        def look(node, inside):
            if isinstance(node, promql.Selector):
                series = self.table.get(node.name)
                if series and series.counter and not inside and node.name not in PLAIN_COUNTERS:
                    self.error(where, f"shows the plain value of counter {node.name}")
                return
            within = isinstance(node, promql.Call) and node.function in DIFFERENCES
            # The right side of `unless` only filters, so it may be a counter.
            sides = promql.children(node)
            for child in sides[:1] if isinstance(node, promql.Binary) and node.op == "unless" else sides:
                look(child, inside or within)

        look(tree, False)

    def portable(self, where, tree, name=""):
        self.differences += [(where, *found) for found in portable.differences(tree, name)]
        for message in portable.errors(tree, name):
            self.error(where, message)

    def fits(self, where, panel, target, tree):
        unit = self.reader.unit(tree)
        if unit not in GRAFANA_UNITS:
            self.error(where, f"a result in {unit}")
            return
        shown = panel["fieldConfig"]["defaults"].get("unit")
        if panel["type"] == "table":
            shown = self.unit_of_column(panel, target)
        if panel["type"] == "trend" and target["refId"] == "B":
            shown = self.unit_of_x(panel)
        if shown not in GRAFANA_UNITS[unit]:
            self.error(where, f"{unit} is shown as {shown}")

    def unit_of_column(self, panel, target):
        column = "Value" if len(panel["targets"]) == 1 else f"Value #{target['refId']}"
        return self.unit_of_field(panel, panel["transformations"][-1]["options"]["renameByName"].get(column))

    def unit_of_x(self, panel):
        """The second query of a trend is its x axis; Grafana names the column as below."""
        matrix = next(each["options"] for each in panel["transformations"] if each["id"] == "groupingToMatrix")
        return self.unit_of_field(panel, f"{matrix['rowField']}\\{matrix['columnField']}")

    @staticmethod
    def unit_of_field(panel, name):
        for override in panel["fieldConfig"]["overrides"]:
            if override["matcher"] == {"id": "byName", "options": name}:
                return next((each["value"] for each in override["properties"] if each["id"] == "unit"), None)
        return None

    def every_family_is_shown(self):
        shown = set()
        exprs = {rule["record"]: rule["expr"] for _, _, rule in catalog.rules(self.root) if "record" in rule}
        texts = [boards.plain(query[1]) for board in self.boards.values() for query in boards.queries(board)]
        while texts:
            try:
                names = {node.name for node in promql.walk(promql.parse(texts.pop())) if isinstance(node, promql.Selector)}
            except promql.Unreadable:
                continue  # reported by query()
            texts += [exprs[name] for name in names - shown if name in exprs]
            shown |= names
        hidden = catalog.hidden(self.root)
        for name in self.families.keys() - shown - hidden:
            self.error("dashboards", f"{name} is not shown; show it, or add the reason to its row of the catalog (hidden)")
        for name in hidden & shown:
            self.error("dashboards", f"{name} is hidden in the catalog, but is shown")

    # --- rules, their tests and their runbooks

    def rules(self):
        for file, group, rule in catalog.rules(self.root):
            name = rule.get("record") or rule["alert"]
            where = f"{file} {name}"
            tree = self.query(where, rule["expr"])
            if tree:
                self.portable(where, tree, name)
            if "record" in rule:
                if not re.fullmatch(r"[a-z_]+:memledger_\w+:\w+", name):
                    self.error(where, "the name does not have the form level:metric:operations")
                continue
            notes = rule["annotations"]
            if set(notes) - {"command", "dashboard_url"} != {"summary", "description", "runbook_url"}:
                self.error(where, f"annotations are {sorted(notes)}")
            if not notes.get("runbook_url", "").endswith(f"/docs/runbooks/{name}.md"):
                self.error(where, "runbook_url is not the page of this alert")
            if "container_name" in notes["description"] and not {"command", "dashboard_url"} <= set(notes):
                self.error(where, "an alert of a container has no command or no dashboard")
            # reduced to one series, or a container with two would fail the rule for all
            stand_in = r"container:memledger_owner:last1h or on \(([^)]*)\) group by \(\1\)"
            if "container_name" in notes["description"] and not re.search(stand_in, rule["expr"]):
                self.error(where, "an alert of a container does not join its owner")
            self.links_to_dashboards(where, notes.get("dashboard_url", ""))
            if rule["labels"].get("severity") not in ("critical", "warning", "info", "none"):
                self.error(where, "no severity")
            labels = (self.reader.labels(tree, []) if tree else None) or set()
            for label in re.findall(r"\$labels\.(\w+)", " ".join(map(str, notes.values()))):
                if label not in labels | {"severity"}:
                    self.error(where, f"the annotation names label {label}, which the result cannot have")

    def rule_tests(self):
        fires, silent = set(), set()
        for path in sorted((self.root / "deploy/prometheus/tests").glob("*.yml")):
            for test in yaml.safe_load(path.read_text())["tests"]:
                where = f"{path.name} {test['name']!r}"
                for entry in test["input_series"]:
                    self.input_series(where, entry["series"])
                for entry in test.get("promql_expr_test", []):
                    self.query(where, entry["expr"])
                for entry in test.get("alert_rule_test", []):
                    expected = entry["exp_alerts"]
                    fires |= {(entry["alertname"], each["exp_labels"]["severity"]) for each in expected}
                    if not expected:
                        silent.add(entry["alertname"])
        for _, _, rule in catalog.rules(self.root):
            if "alert" in rule and (rule["alert"], rule["labels"]["severity"]) not in fires:
                self.error("rule tests", f"no test in which {rule['alert']} ({rule['labels']['severity']}) fires")
            if "alert" in rule and rule["alert"] not in silent and rule["labels"]["severity"] != "none":
                self.error("rule tests", f"no test in which {rule['alert']} does not fire")

    def input_series(self, where, text):
        # a label that the scrape adds to each series of a target
        tree = self.query(where, re.sub(r', rack="\w+"', "", text))
        series = self.table.get(tree.name) if tree else None
        if series:
            given = {label for label, _, _ in tree.matchers}
            for label in sorted(series.required - given):
                self.error(where, f"{tree.name} lacks label {label}")

    def runbooks(self):
        alerts = {rule["alert"] for _, _, rule in catalog.rules(self.root) if "alert" in rule}
        pages = {path.stem: path for path in (self.root / "docs/runbooks").glob("*.md")}
        for name in alerts - pages.keys():
            self.error("docs/runbooks", f"alert {name} has no page")
        for name in pages.keys() - alerts:
            self.error("docs/runbooks", f"page {name} has no alert")
        titles = {panel["title"] for board in self.boards.values() for panel in boards.panels(board)}
        titles |= {board["title"].removeprefix("memledger / ") for board in self.boards.values()}
        titles |= {panel["title"] for board in self.boards.values() for panel in board["panels"]}
        for name, path in pages.items():
            text = path.read_text()
            if "`memledger " in text and "`docker exec memledger /memledger " not in text:
                self.error(path.name, "names a memledger command, but not its form in Compose")
            if not text.startswith(f"# {name}\n"):
                self.error(path.name, "the title is not the alert name")
            for part in ("## Look first", "## Do", "## Silence"):
                if part not in text:
                    self.error(path.name, f"section {part!r} is missing")
            for block in re.findall(r"```promql\n(.*?)```", text, re.S):
                for line in block.splitlines():
                    self.typed(path.name, line, name)
            self.titles(path.name, text.split("\n\n", 2)[2], titles)
        page = self.root / "docs/dashboards.md"
        self.titles(page.name, page.read_text().split("## Installing")[0].split("Terms on the panels")[0], titles | {"i"})

    def typed(self, where, expression, name=""):
        """Reports errors in a query for people, who may have VictoriaMetrics."""
        tree = self.query(where, expression)
        if tree:
            self.portable(where, tree, name)

    def titles(self, where, text, known):
        """Every word in italics must be the title of a panel or dashboard."""
        body = re.sub(r"```.*?```|`[^`]*`|\*\*", "", text, flags=re.S)
        for title in re.findall(r"\*([^*\n]+)\*", body.replace("\n* ", "\n- ")):
            if title not in known | NOT_TITLES:
                self.error(where, f"no panel or dashboard has the title {title!r}")

    # --- documents

    def documents(self):
        verbs = set(re.findall(r'Command::new\("([\w-]+)"\)', "".join(p.read_text() for p in (self.root / "src/cli").rglob("*.rs"))))
        settings = set(re.findall(r"^\| `--([\w.-]+)`", (self.root / "docs/config.md").read_text(), re.M)) | {"config.file"}
        pages = [*(self.root / "docs").glob("*.md"), *(self.root / "docs/runbooks").glob("*.md"), self.root / "README.md"]
        for path in pages:
            text = path.read_text()
            for table in re.findall(r"^\| question \| query \|\n\|.*\n((?:\|.*\n)+)", text, re.M):
                for query in re.findall(r"\| `(.*)` \|$", table, re.M):
                    self.typed(path.name, query)
            # a digit begins the version in the file name of the deb
            packages = {"memledger_client", "memledger_exporter"}  # the import, and the wheel in the name of its file
            for name in set(re.findall(r"\b(?:\w+:)?memledger_[a-z]\w+(?::\w+)?", text)) - self.table.keys() - packages:
                self.error(path.name, f"{name}: no such series")
            for verb in re.findall(r"`memledger ([a-z][\w-]*)", text):
                if verb not in verbs:
                    self.error(path.name, f"no such command: `memledger {verb}`")
            for setting in re.findall(r"--((?:no-)?[a-z]+\.[a-z.-]+[a-z])", text):
                if setting not in settings | OTHER_FLAGS and setting.removeprefix("no-") not in settings:
                    self.error(path.name, f"no such setting: --{setting}")
            for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
                if not (path.parent / link).exists():
                    self.error(path.name, f"broken link: {link}")

    def all(self):
        self.dashboards()
        self.every_family_is_shown()
        self.rules()
        self.rule_tests()
        self.runbooks()
        self.documents()
        return self.errors


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    check = Check(root)
    for message in check.all():
        print(message)
    for where, function, series, why in check.differences:
        print(f"{function}({series}) in {where}: {why or 'not safe'}")
    queries = sum(len(list(boards.queries(board))) for board in check.boards.values())
    print(f"{queries} queries of {len(check.boards)} dashboards, {len(check.families)} families, {len(check.errors)} errors")
    sys.exit(bool(check.errors))


if __name__ == "__main__":
    main()
