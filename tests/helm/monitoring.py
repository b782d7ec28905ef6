"""Compares what the chart renders for Prometheus and Grafana with the source files: `monitoring.py [ROOT]`.

The dashboards are the files, byte for byte. The rules are theirs, also after promtool has checked them and run the files'
own unit tests on what was rendered. The labels of a target are what a real relabeling makes of Kubernetes' metadata.
promtool is $MEMLEDGER_TEST_PROMTOOL.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

import chart

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dashboards"))
import check as shipped
import mutations as tree

RULES, DASHBOARDS = "deploy/prometheus/rules", "dashboards"


def promtool(*arguments):
    program = os.environ["MEMLEDGER_TEST_PROMTOOL"]
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def case(root, name):
    folder = root / "helm/memledger"
    return chart.objects(chart.render(folder, [chart.cases(folder)[name]]))


def rules_of(found):
    """Returns the rendered rules: file name to content."""
    return {
        each["metadata"]["name"].removeprefix("memledger-") + ".yml": each["spec"]
        for each in chart.of_kind(found, "PrometheusRule")
    }


def dashboards(root):
    """Each dashboard has one ConfigMap with the text of the file."""
    maps = chart.of_kind(case(root, "monitoring"), "ConfigMap")
    given = {name: text for each in maps for name, text in each["data"].items()}
    for path in sorted((root / DASHBOARDS).glob("*.json")):
        if given.pop(f"memledger-{path.name}", "").encode() != path.read_bytes():
            yield f"{path.name} is not the file"
    for name in given:
        yield f"missing dashboard {name}"
    for each in maps:
        if len(each["data"]) != 1 or len(json.dumps(each)) > 1 << 20:
            yield f"{each['metadata']['name']} is too large for a ConfigMap, or contains several dashboards"
        if each["metadata"]["labels"].get("grafana_dashboard") != "1":
            yield f"{each['metadata']['name']}: Grafana's sidecar does not find it"


def in_its_namespace(text):
    """Returns the rules with commands for the namespace of the release."""
    return text.replace("-n memledger ", f"-n {chart.NAMESPACE} ")


def as_they_are(root):
    """With default values, the rules equal the files."""
    given = rules_of(case(root, "monitoring"))
    wanted = {path.name: yaml.load(in_its_namespace(path.read_text()), chart.LOADER) for path in (root / RULES).glob("*.yml")}
    if set(given) != set(wanted):
        yield f"rules of {sorted(given)}, files {sorted(wanted)}"
    for name in set(given) & set(wanted):
        if given[name] != wanted[name]:
            yield f"{name} is not the file's"


def checked(root):
    """The rendered rules and dashboards pass promtool and check.py, as the files do."""
    found = case(root, "monitoring")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree.copy(root, folder)
        for path in (folder / "deploy/prometheus/tests").glob("*.yml"):
            path.write_text(in_its_namespace(path.read_text()))
        for path in [*(folder / RULES).iterdir(), *(folder / DASHBOARDS).iterdir()]:
            path.unlink()
        for file, content in rules_of(found).items():
            (folder / RULES / file).write_text(yaml.safe_dump(content))
        for each in chart.of_kind(found, "ConfigMap"):
            for file, text in each["data"].items():
                (folder / DASHBOARDS / file.removeprefix("memledger-")).write_text(text)
        code, output = promtool("check", "rules", *sorted((folder / RULES).iterdir()))
        if code:
            yield f"promtool check rules: {output}"
        code, output = promtool("test", "rules", *sorted((folder / "deploy/prometheus/tests").glob("*.yml")))
        if code or output.count("SUCCESS") != len(list((folder / "deploy/prometheus/tests").glob("*.yml"))):
            yield f"promtool test rules: {output}"
        yield from shipped.Check(folder).all()


def change_alert(rule, change):
    """Applies one of `prometheusRule.alerts`."""
    if "for" in change:
        rule["for"] = change["for"]
    if "threshold" in change:
        head, old = re.fullmatch(r"(?s)(.*[<>]=?\s*)([0-9.]+)\s*", rule["expr"]).groups()
        rule["expr"] = f"{head}{change['threshold']}"
        percent = [f"{number * 100:g} %" for number in (float(old), change["threshold"])]
        rule["annotations"]["summary"] = rule["annotations"]["summary"].replace(*percent)
    for series, threshold in change.get("thresholds", {}).items():
        compared = rf"(\b{series}(?:\[\w+\]\))?\s*[<>] )[0-9.]+"
        rule["expr"], count = re.subn(compared, rf"\g<1>{threshold}", rule["expr"])
        assert count == 1, f"{series} is compared {count} times"


def mixed(root):
    """The two releases of a mixed cluster run on each node once, and only that of GPU nodes needs the RuntimeClass."""
    specs = {}
    for name in ("mixed-gpu", "mixed-cpu"):
        (daemonset,) = chart.of_kind(case(root, name), "DaemonSet")
        specs[name] = daemonset["spec"]["template"]["spec"]
    gpu, cpu = specs["mixed-gpu"], specs["mixed-cpu"]
    if gpu.get("runtimeClassName") != "nvidia" or "runtimeClassName" in cpu:
        yield "the RuntimeClass is not that of the GPU nodes alone"
    if gpu["nodeSelector"].get("nvidia.com/gpu.present") != "true":
        yield "the release of GPU nodes does not select them"
    (term,) = cpu["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    if {"key": "nvidia.com/gpu.present", "operator": "NotIn", "values": ["true"]} not in term["matchExpressions"]:
        yield "the release of other nodes runs on GPU nodes too"
    names = [{(each["kind"], each["metadata"]["name"]) for each in case(root, name)} for name in specs]
    if both := names[0] & names[1]:
        yield f"both releases have {sorted(both)}"


def changed(root):
    """The values of the case `rules` change what they should, and nothing else."""
    values = yaml.load((root / "helm/memledger/ci/rules-values.yaml").read_text(), chart.LOADER)["prometheusRule"]
    given = rules_of(case(root, "rules"))
    for path in (root / RULES).glob("*.yml"):
        wanted = yaml.load(in_its_namespace(path.read_text()), chart.LOADER)
        for group in wanted["groups"]:
            kept = []
            for rule in group["rules"]:
                if "alert" not in rule:
                    kept.append(rule)
                    continue
                names = [rule["alert"], f"{rule['alert']}/{rule['labels']['severity']}"]
                if set(names) & set(values["disabledAlerts"]):
                    continue
                for name in names:
                    rule["labels"]["severity"] = values["severities"].get(name, rule["labels"]["severity"])
                for name in names:
                    change_alert(rule, values["alerts"].get(name, {}))
                rule["labels"] |= values["alertLabels"]
                rule["annotations"].pop("dashboard_url", None)  # there is no grafanaUrl
                rule["annotations"]["runbook_url"] = f"https://books.example/memledger/{rule['alert']}.md"
                kept.append(rule)
            group["rules"] = kept
        wanted["groups"] = [group for group in wanted["groups"] if group["rules"]]
        if given[path.name] != wanted:
            yield f"{path.name} is not the file with what the values change"


# Labels that Kubernetes' discovery gives a pod, or an endpoint with its pod.
ADDRESS = "10.1.2.3:10853"
DISCOVERED = {
    "__meta_kubernetes_namespace": "monitor",
    "__meta_kubernetes_pod_name": "memledger-x7f2p",
    "__meta_kubernetes_pod_node_name": "gpu-node-7",
    "__meta_kubernetes_pod_container_name": "memledger",
    "__meta_kubernetes_pod_container_port_name": "metrics",
    "__meta_kubernetes_endpoint_port_name": "metrics",
    "__meta_kubernetes_service_name": "memledger",
}
# Relabelings that the operator puts before a monitor's own, if they create labels that stay.
OPERATOR_RELABELINGS = [
    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
    {"source_labels": ["__meta_kubernetes_service_name"], "target_label": "service"},
    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    {"source_labels": ["__meta_kubernetes_pod_container_name"], "target_label": "container"},
    {"target_label": "job", "replacement": "monitor/other"},
    {"target_label": "endpoint", "replacement": "metrics"},
]
WANTED = {"job": "memledger", "instance": "gpu-node-7", "node": "gpu-node-7", "namespace": "monitor"}


def relabeled(relabelings, folder, discovered=DISCOVERED):
    """Returns the labels of a target after the real relabeling; None if it is dropped."""
    job = {
        "job_name": "memledger",
        "static_configs": [{"targets": [ADDRESS], "labels": discovered}],
        "relabel_configs": relabelings,
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    code, output = promtool("check", "service-discovery", config, "memledger", "--timeout=5s")
    if code:
        raise SystemExit(f"promtool check service-discovery: {output}")
    (target,) = json.loads(output[output.index("[") :])
    return {key: value for key, value in target["labels"].items() if not key.startswith("__")} or None


def of_monitor(relabelings):
    """Returns a monitor's relabelings as the operator writes them into a scrape configuration."""
    snake = lambda key: re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), key)
    return OPERATOR_RELABELINGS + [{snake(key): value for key, value in each.items()} for each in relabelings]


def scraped(root):
    """A target has job memledger and instance NODE, and no label that changes with the pod."""
    for name, kind, key in (("monitoring", "ServiceMonitor", "endpoints"), ("podmonitor", "PodMonitor", "podMetricsEndpoints")):
        (monitor,) = chart.of_kind(case(root, name), kind)
        (endpoint,) = monitor["spec"][key]
        with tempfile.TemporaryDirectory() as folder:
            labels = relabeled(of_monitor(endpoint["relabelings"]), Path(folder))
        wanted = WANTED | ({"cluster": "c1"} if name == "podmonitor" else {})
        if labels != wanted:
            yield f"{kind}: a target has {labels}, expected {wanted}"
        if endpoint["port"] != "metrics" or endpoint["path"] != "/metrics":
            yield f"{kind}: scrapes {endpoint['port']}{endpoint['path']}"
    (monitor,) = chart.of_kind(case(root, "everything"), "ServiceMonitor")
    if monitor["spec"]["endpoints"][0]["path"] != "/m":
        yield "ServiceMonitor: it does not scrape web.telemetry-path"


def documented(root):
    """The scrape configuration in docs/kubernetes.md gives a pod the same labels, and keeps no other.

    Its discovery is left out: Debian's Prometheus is built without that of Kubernetes.
    """
    text = (root / "docs/kubernetes.md").read_text()
    (block,) = (block for block in re.findall(r"(?s)```yaml\n(.*?)```", text) if "scrape_configs" in block)
    (job,) = yaml.load(block, chart.LOADER)["scrape_configs"]
    (daemonset,) = chart.of_kind(case(root, "default"), "DaemonSet")
    of_pod = daemonset["spec"]["template"]["metadata"]["labels"]
    discovered = DISCOVERED | {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): value for key, value in of_pod.items()}
    rules = job["relabel_configs"]
    for what, change, wanted in [
        ("a pod of memledger", {}, {key: WANTED[key] for key in ("job", "instance", "node")}),
        ("another pod", {"__meta_kubernetes_pod_label_app_kubernetes_io_name": "other"}, None),
        ("another port", {"__meta_kubernetes_pod_container_port_name": "web"}, None),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            labels = relabeled(rules, Path(folder), discovered | change)
        if labels != wanted:
            yield f"{what} has {labels}, expected {wanted}"


CHECKS = [dashboards, as_they_are, checked, changed, mixed, scraped, documented]


def errors(root, checks=None):
    for check in checks or CHECKS:
        try:
            yield from (f"{check.__name__}: {what}" for what in check(root))
        except chart.Rejected as refusal:
            yield f"{check.__name__}: rendering failed: {refusal}"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else chart.ROOT).resolve()
    found = list(errors(root))
    for error in found:
        print(error)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
