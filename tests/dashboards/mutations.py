"""Proves that check.py finds defects: each mutation of a copy of the shipped files must cause the expected error.

A check that accepts everything looks the same as files without a defect.
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

import check

RULES, TESTS, BOOKS = "deploy/prometheus/rules/", "deploy/prometheus/tests/", "docs/runbooks/"


def text(file, old, new):
    """Replaces the first `old` in a file."""

    def change(root):
        path = root / file
        before = path.read_text()
        assert old in before, f"{file} has no {old!r} any more: choose another mutation"
        path.write_text(before.replace(old, new, 1))

    return change


def board(file, change_it):
    """Changes the JSON of a dashboard."""

    def change(root):
        path = root / "dashboards" / file
        dashboard = json.loads(path.read_text())
        change_it(dashboard)
        path.write_text(json.dumps(dashboard))

    return change


def first(dashboard):
    """The first panel that is no row."""
    return next(panel for panel in dashboard["panels"] if panel["type"] != "row")


def series(dashboard):
    """The first panel with a legend made of labels."""
    return next(p for p in dashboard["panels"] if p["type"] == "timeseries")


def put(target, **values):
    target.update(values)


def unlimited(dashboard, title):
    """Removes the topk of a panel's first query."""
    target = next(panel for panel in dashboard["panels"] if panel["title"] == title)["targets"][0]
    target["expr"] = target["expr"].partition(" and topk(")[0]


# name of the mutation, how it is made, and a part of the error that it must cause
MUTATIONS = [
    ("a typo in a metric of a dashboard", text("dashboards/container.json", "memledger_container_memory_usage_bytes{", "memledger_container_memory_usge_bytes{"), "memledger_container_memory_usge_bytes: no such series"),
    ("a typo in a recorded series", text("dashboards/container.json", "container:memledger_memory_unreclaimable_bytes:deriv1h{", "container:memledger_memory_unreclaimable_bytes:deriv2h{"), "no such series"),
    ("a wrong label in a matcher", text("dashboards/container.json", 'container_name=\\"$container\\"', 'container=\\"$container\\"'), "it has no such label"),
    ("a wrong label in by", board("overview.json", lambda d: put(series(d)["targets"][0], expr='sum by (host) (memledger_host_swap_used_bytes{cluster=~"$cluster", job=~"$job", instance=~"$instance"})')), "by (host): the series have no such label"),
    ("a wrong label in on", text(RULES + "recording.yml", "* on (cluster, job, instance, k8s_namespace_name, k8s_pod_name, container_name)", "* on (cluster, job, instance, k8s_namespace_name, k8s_pod_name, container)"), "on (container): a side has no such label"),
    ("a wrong label in group_left", text(RULES + "recording.yml", "settings, batch_size", "settings, batchsize"), "group_left (batchsize)"),
    ("a label in a legend that the result cannot have", board("overview.json", lambda d: put(series(d)["targets"][0], legendFormat="{{container_name}}")), "the legend names container_name"),
    ("a value that a label never has", text(RULES + "alerts.yml", 'scope="host"', 'scope="hosts"'), "the catalog has no value 'hosts'"),
    ("a typo in a metric of a rule", text(RULES + "alerts.yml", "memledger_store_up", "memledger_stores_up"), "memledger_stores_up: no such series"),
    ("a label in an annotation that the alert does not have", text(RULES + "alerts.yml", "{{ $labels.collector }}", "{{ $labels.colector }}"), "the annotation names label colector"),
    ("a typo in a series of a rule test", text(TESTS + "memory.yml", "memledger_container_memory_headroom_bytes{", "memledger_container_memory_headrom_bytes{"), "no such series"),
    ("a missing label in a series of a rule test", text(TESTS + "oom.yml", ', victim="main"', ""), "lacks label victim"),
    ("a wrong label in a series of a rule test", text(TESTS + "oom.yml", 'victim="main"', 'who="main"'), "it has no such label"),
    ("a typo in a query of a runbook", text(BOOKS + "MemledgerGpuLost.md", "memledger_gpus_expected", "memledger_gpu_expected"), "no such series"),
    ("a command that does not exist", text(BOOKS + "MemledgerGpuLost.md", "## Do", "`memledger fix`\n\n## Do"), "no such command: `memledger fix`"),
    ("a command without its form in Compose", text(BOOKS + "MemledgerRuntimeDown.md", "`docker exec memledger /memledger doctor`", "there"), "not its form in Compose"),
    ("a panel that does not exist", text(BOOKS + "MemledgerGpuXid.md", "*GPU errors (Xid)*", "*Xid errors*"), "no panel or dashboard has the title 'Xid errors'"),
    ("an alert without a runbook", lambda root: (root / BOOKS / "MemledgerGpuEcc.md").unlink(), "alert MemledgerGpuEcc has no page"),
    ("a runbook without an alert", lambda root: (root / BOOKS / "MemledgerOld.md").write_text("# MemledgerOld\n\n\n\n"), "page MemledgerOld has no alert"),
    ("an alert that fires in no test", text(RULES + "alerts.yml", "warning}\n    annotations:\n      summary: The ledger of OOM", "critical}\n    annotations:\n      summary: The ledger of OOM"), "no test in which"),
    ("a variable that is not defined", board("why.json", lambda d: put(first(d)["targets"][0], expr='up{job=~"$job", instance=~"$host"}')), "variable $host is not defined"),
    ("a query that shows other hosts too", board("overview.json", lambda d: put(series(d)["targets"][0], expr="memledger_host_swap_used_bytes")), "is not filtered by instance"),
    ("a query without the cluster", text("dashboards/why.json", '(memledger_oom_kills_without_record_total{cluster=~\\"$cluster\\", ', "(memledger_oom_kills_without_record_total{"), 'is not filtered by cluster=~"$cluster"'),
    ("a variable of all clusters", text("dashboards/budget.json", '{cluster=~\\"$cluster\\"}, job)', ", job)"), 'memledger_build_info is not filtered by cluster=~"$cluster"'),
    ("alerts of other hosts", text("dashboards/overview.json", 'instance=~\\"$instance|\\", ', ""), 'ALERTS is not filtered by instance=~"$instance|"'),
    ("on without the cluster", text("dashboards/budget.json", "unless on (cluster, job, instance", "unless on (job, instance"), "on (job, instance, k8s_namespace_name, k8s_pod_name, container_name) lacks cluster"),
    ("by without the cluster", text("dashboards/compare.json", "max by (cluster, instance", "max by (instance"), "by (instance, k8s_namespace_name, k8s_pod_name, container_name, run, settings) lacks cluster"),
    ("a graph that grows with the containers", board("why.json", lambda d: unlimited(d, "Used of limit")), "grows with the number of container_name"),
    ("a graph that grows with the hosts", board("overview.json", lambda d: unlimited(d, "Host RAM used")), "grows with the number of instance"),
    ("a table that grows with the containers", text("dashboards/overview.json", "(memledger_container_memory_headroom_bytes{", "(memledger_container_memory_headroom_bytes{} or memledger_container_memory_headroom_bytes{"), "grows with the number of container_name"),
    ("one value and several under one name", text("dashboards/why.json", '"name": "pods"', '"name": "pod"'), "variable $pod: has one value, but several in why.json"),
    ("several values where one is wanted", board("budget.json", lambda d: put(d["templating"]["list"][3], multi=True)), "variable $host: must have one value"),
    ("a link without the cluster", text("dashboards/overview.json", "&var-cluster=${__data.fields.cluster}&var-host=${__data.fields.instance}&${__url", "&var-host=${__data.fields.instance}&${__url"), "does not pass cluster"),
    ("a link that passes what is not known there", text("dashboards/container.json", "&var-containers=", "&var-container="), "passes container to memledger-why, which has no such variable"),
    ("two panels with one id", board("budget.json", lambda d: put(first(d), id=d["panels"][-1]["id"])), "two panels have id"),
    ("two panels in one position", board("budget.json", lambda d: put(first(d), gridPos=d["panels"][2]["gridPos"])), "overlap"),
    ("seconds on an axis in hours", text("dashboards/compare.json", " / 3600", ""), "s is shown as h"),
    ("a panel without a description", board("compare.json", lambda d: put(first(d), description="")), "no description"),
    ("a wrong unit", board("overview.json", lambda d: put(series(d)["fieldConfig"]["defaults"], unit="s")), "is shown as s"),
    ("a broken link", text("dashboards/overview.json", "/d/memledger-container?", "/d/memledger-containers?"), "links to dashboard memledger-containers"),
    ("a link without the pod", text("dashboards/overview.json", "&var-pod=${__data.fields.k8s_pod_name}", ""), "its link does not pass k8s_pod_name as pod"),
    ("a link from a query without the pod", text("dashboards/container.json", "max by (cluster, instance, k8s_namespace_name, k8s_pod_name, container_name, gpu,", "max by (cluster, instance, k8s_namespace_name, container_name, gpu,"), "its link needs k8s_pod_name"),
    ("a counter shown plain", board("overview.json", lambda d: put(series(d)["targets"][0], expr='memledger_host_oom_kills_total{job=~"$job", instance=~"$instance"}')), "the plain value of counter"),
    ("a series that other programs have too", board("overview.json", lambda d: put(series(d)["targets"][0], expr='process_open_fds{job=~"$job", instance=~"$instance"}')), "other programs export process_open_fds too"),
    ("a legend for two compute instances", text("dashboards/overview.json", " {{gpu_instance_id}} {{compute_instance_id}}", " {{gpu_instance_id}}"), "without compute_instance_id"),
    ("PromQL that cannot be read", board("overview.json", lambda d: put(series(d)["targets"][0], expr="sum by (cluster, instance (up)")), "where"),
    ("increase() in an alert", text(RULES + "alerts.yml", "last_over_time(memledger_panics_total[1h]) - min_over_time(memledger_panics_total[1h])", "increase(memledger_panics_total[1h])"), "increase(memledger_panics_total) counts the births of series"),
    ("increase() in a sum within an alert", text(RULES + "alerts.yml", "last_over_time(memledger_gpu_driver_process_restarts_total[1h]) - min_over_time(memledger_gpu_driver_process_restarts_total[1h])", "increase(memledger_gpu_driver_process_restarts_total[1h])"), "increase(memledger_gpu_driver_process_restarts_total) counts the births of series"),
    ("changes() in an alert that does not bear it", text(RULES + "alerts.yml", "expr: memledger_store_up == 0", "expr: changes(memledger_store_up[5m]) > 0"), "changes(memledger_store_up) counts the births of series"),
    ("increase() on a panel", text("dashboards/fleet.json", 'last_over_time(memledger_oom_kills_unattributed_total{cluster=~\\"$cluster\\", job=~\\"$job\\"}[1h]) - min_over_time(memledger_oom_kills_unattributed_total{cluster=~\\"$cluster\\", job=~\\"$job\\"}[1h])', 'increase(memledger_oom_kills_unattributed_total{cluster=~\\"$cluster\\", job=~\\"$job\\"}[1h])'), "increase(memledger_oom_kills_unattributed_total) counts the births of series"),
    ("increase() on a panel of series that were not reset", text("dashboards/fleet.json", "unless resets(memledger_host_oom_kills_total{", "unless resets(memledger_host_process_oom_kills_total{"), "increase(memledger_host_oom_kills_total) counts the births of series"),
    ("a difference of two windows", text(RULES + "alerts.yml", "min_over_time(memledger_panics_total[1h])", "min_over_time(memledger_panics_total[2h])"), "subtracts min_over_time"),
    ("a join on an info series with two values", text(RULES + "recording.yml", "(memledger_container_run_info and topk by (cluster, job, instance, k8s_namespace_name, k8s_pod_name, container_name) (1, timestamp(memledger_container_run_info)))", "memledger_container_run_info"), "joins memledger_container_run_info, which has two values"),
    ("a recorded series matched on all labels", text(RULES + "alerts.yml", "expr: 1 - memledger_host_memory_available_bytes / memledger_host_memory_total_bytes > 0.9 and", "expr: instance:memledger_host_memory_used_per_total:ratio > 0.9 and"), "matches a recorded series with another on all labels"),
    ("one of equal values chosen in a rule", text(RULES + "alerts.yml", "max_over_time(timestamp(memledger_container_owner_info)[1h:1m])", "last_over_time(memledger_container_owner_info[1h])"), "rank by timestamp()"),
    ("one of equal values chosen for a join", text(RULES + "recording.yml", "(1, timestamp(memledger_container_run_info))", "(1, memledger_container_run_info)"), "rank by timestamp()"),
    ("increase() in a query of a runbook", text(BOOKS + "MemledgerGpuEcc.md", 'last_over_time(memledger_gpu_ecc_errors_total{instance="HOST"}[1d]) - min_over_time(memledger_gpu_ecc_errors_total{instance="HOST"}[1d])', 'increase(memledger_gpu_ecc_errors_total{instance="HOST"}[1d])'), "MemledgerGpuEcc.md: increase(memledger_gpu_ecc_errors_total) counts the births of series"),
    ("increase() in a query of a document", text("docs/oom.md", "last_over_time(memledger_host_oom_kills_total[10m]) - min_over_time(memledger_host_oom_kills_total[10m])", "increase(memledger_host_oom_kills_total[10m])"), "oom.md: increase(memledger_host_oom_kills_total) counts the births of series"),
    ("a typo in a query of a document", text("docs/oom.md", "memledger_oom_source_up == 0", "memledger_oom_sources_up == 0"), "memledger_oom_sources_up: no such series"),
    ("a family that no panel shows", text("docs/metrics.md", "| `memledger_build_info`", "| `memledger_new_bytes` | gauge |  | 1 | New. |\n| `memledger_build_info`"), "memledger_new_bytes is not shown"),
]  # fmt: skip


def copy(root, folder):
    for part in ("dashboards", "deploy", "docs", "src/cli", "README.md"):
        source = root / part
        if source.is_dir():
            shutil.copytree(source, folder / part)
        else:
            shutil.copy(source, folder / part)
    (folder / "src").mkdir(exist_ok=True)
    # Links in the documents point to files that are not copied.
    for part in root.iterdir():
        if not (folder / part.name).exists() and part.name not in ("target", ".git"):
            (folder / part.name).symlink_to(part)


def main():
    root = Path(__file__).resolve().parents[2]
    undetected = 0
    for what, change, wanted in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            copy(root, Path(folder))
            change(Path(folder))
            errors = check.Check(Path(folder)).all()
        if not any(wanted in error for error in errors):
            undetected += 1
            print(f"{what}: no error contains {wanted!r}, only {errors[:3]}")
    print(f"{len(MUTATIONS)} mutations, {undetected} not detected")
    sys.exit(bool(undetected))


if __name__ == "__main__":
    main()
