"""Proves that the checks of the chart find defects: each mutation of a copy must cause the expected error.

A row: name, mutation, the check that must detect it, the case, and a part of the error.
"""
import multiprocessing
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import chart
import judge
import monitoring

HELM, T = "helm/memledger/", "helm/memledger/templates/"


def text(file, old, new):
    """Replaces `old`, which must occur once in a file: of two, the first could be a comment."""

    def change(root):
        path = root / file
        before = path.read_text()
        assert before.count(old) == 1, f"{file} has {old!r} {before.count(old)} times: choose another mutation"
        path.write_text(before.replace(old, new))

    return change


def default(old, new):
    return text(HELM + "values.yaml", old, new)


MUTATIONS = [
    ("privileged by default", default("  enabled: false\n\nruntime:", "  enabled: true\n\nruntime:"), judge.privileges, "default", "the container is privileged"),
    ("all of the node's files", text(T + "_node.tpl", "{path: /sys/fs/cgroup,", "{path: /,"), judge.mounted, "default", "mounts / of the node"),
    ("a folder that is on no list", default("path: /var/lib/kubelet/pod-resources", "path: /var/lib/kubelet"), judge.mounted, "default", "mounts /var/lib/kubelet of the node"),
    ("a mount that can be written", text(T + "_node.tpl", "mountPath: /host/cgroup, readOnly: true,", "mountPath: /host/cgroup,"), judge.mounted, "default", "/sys/fs/cgroup of the node is writable"),
    ("the mounts of cgroup v1", text(T + "_node.tpl", "/host/cgroup, readOnly: true, recursiveReadOnly: IfPossible", "/host/cgroup, readOnly: true"), judge.mounted, "default", "the mounts below it are writable"),
    ("a path that is made where nothing is", text(T + "_node.tpl", "{path: /sys/fs/cgroup, type: Directory}", "{path: /sys/fs/cgroup}"), judge.mounted, "default", "without a type"),
    ("a volume that nobody mounts", text(T + "_node.tpl", "- {name: state, mountPath: /var/lib/memledger}", ""), judge.mounted, "default", "differ from the mounts"),
    ("a capability more", text(T + "_helpers.tpl", '$add "SYSLOG"', '$add "SYS_ADMIN"'), judge.privileges, "default", "has the extra privileges ['SYS_ADMIN']"),
    ("capabilities that are kept", text(T + "_helpers.tpl", "drop: [ALL]", "drop: [NET_RAW]"), judge.privileges, "default", "it keeps capabilities"),
    ("a root that can be written", text(T + "_helpers.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"), judge.privileges, "minimal", "its root can be written"),
    ("limits of a privileged container", text(T + "_helpers.tpl", "privileged: true", "privileged: true\nallowPrivilegeEscalation: false"), judge.privileges, "kmsg", "the API server re"),
    ("a token of the API server", text(T + "daemonset.yaml", "automountServiceAccountToken: false", "automountServiceAccountToken: true"), judge.privileges, "default", "a token of the API server"),
    ("variables of Services", text(T + "daemonset.yaml", "enableServiceLinks: false", "enableServiceLinks: true"), judge.privileges, "default", "variables of a Service"),
    ("a port of the node", text(T + "daemonset.yaml", "protocol: TCP}", "protocol: TCP, hostPort: 10853}"), judge.privileges, "default", "is open on the node"),
    ("no seccomp profile", default("  type: RuntimeDefault", "  type: Unconfined"), judge.privileges, "default", "no seccomp profile"),
    ("a right at the API server", lambda root: (root / T / "role.yaml").write_text("apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: m}\nrules: []\n"), judge.object_metadata, "default", "memledger needs no permission"),
    ("a field that is none", text(T + "daemonset.yaml", "hostPID:", "hostPid:"), judge.valid, "default", "DaemonSet is not valid in 1.30.0"),
    ("a value of a wrong kind", text(T + "service.yaml", "port: {{ .Values.service.port }}", 'port: "{{ .Values.service.port }}"'), judge.valid, "default", "Service is not valid"),
    ("a setting that is none", text(T + "_node.tpl", "MEMLEDGER_PATH_PROCFS", "MEMLEDGER_PATH_PROC"), judge.environment, "default", "unknown setting MEMLEDGER_PATH_PROC"),
    ("a path that is not mounted", text(T + "_node.tpl", '"/host/cgroup" "/sys', '"/host/cgroups" "/sys'), judge.environment, "default", "/host/cgroups is not mounted"),
    ("a variable twice", text(T + "_node.tpl", "- {name: MEMLEDGER_STATE_PATH", "- {name: MEMLEDGER_PATH_PROCFS, value: /}\n- {name: MEMLEDGER_STATE_PATH"), judge.environment, "default", "is set twice"),
    ("a ledger on nothing", text(T + "_node.tpl", "MEMLEDGER_STATE_PATH, value: /var/lib/memledger", "MEMLEDGER_STATE_PATH, value: /var/lib/ledger"), judge.environment, "default", "is not on a writable mount"),
    ("a probe of no route", text(T + "daemonset.yaml", '"/-/healthy"', '"/healthz"'), judge.probed, "default", "unknown route /healthz"),
    ("a probe with two ways", default("livenessProbe: {}", "livenessProbe: {httpGet: {path: /-/healthy, port: metrics}}"), judge.probed, "everything", "has 2 handlers"),
    ("a probe that does not know TLS", text(T + "daemonset.yaml", "{{- if $secured }}", "{{- if false }}"), judge.probed, "tls", "livenessProbe uses HTTP"),
    ("a scrape that does not know TLS", text(T + "_helpers.tpl", 'ternary "https" "http"', 'ternary "http" "http"'), judge.probed, "tls", "ServiceMonitor uses http"),
    ("another port than the one it listens on", text(T + "daemonset.yaml", "containerPort: {{ $v.port }}", "containerPort: 10853"), judge.probed, "hostnetwork", "listens on :19853"),
    ("a Service that finds nothing", text(T + "service.yaml", '{{- include "memledger.selectorLabels" . | nindent 4 }}', "app: memledger"), judge.selected, "default", "does not match the pods"),
    ("a test that the DaemonSet adopts", text(T + "tests/answers.yaml", '"labels" $labels ', ""), judge.selected, "default", "selector matches it"),
    ("a monitor that looks elsewhere", text(T + "servicemonitor.yaml", "matchNames: [{{ include", "matchNames: [monitoring, {{ include"), judge.selected, "monitoring", "in another namespace"),
    ("a field that a monitor has not", text(T + "_helpers.tpl", "scheme: {{", "schema: {{"), judge.custom, "podmonitor", "unknown endpoint fields ['schema']"),
    ("a random value", text(T + "daemonset.yaml", "kubectl.kubernetes.io/default-container: memledger", "a: {{ randAlpha 9 }}"), judge.deterministic, "default", "two renders differ"),
    ("an object twice", text(T + "serviceaccount.yaml", "automountServiceAccountToken: false", "automountServiceAccountToken: false\n---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {name: memledger, namespace: monitor}"), judge.deterministic, "default", "duplicate object"),
    ("a template that helm does not take", text(T + "service.yaml", "  type: {{", "type: {{"), judge.linted, "default", "rendering failed"),
    # of the chart as a whole
    ("another version than the crate's", text(HELM + "Chart.yaml", "\nversion: 0.1.0", "\nversion: 0.0.9"), judge.versions, None, "Chart.yaml: version is 0.0.9"),
    ("an API that is too old", text(HELM + "Chart.yaml", ">=1.30.0-0", ">=1.20.0-0"), judge.versions, None, "is not rejected"),
    ("a schema that takes anything", text(HELM + "values.schema.json", '{"type": "object", "additionalProperties": false, "properties": {"enabled"', '{"type": "object", "properties": {"enabled"'), judge.schemas, None, "accepts anything"),
    ("a value that only the schema has", text(HELM + "values.schema.json", '"hostPID": {', '"hostUsers": {"type": "boolean"}, "hostPID": {'), judge.schemas, None, "hostUsers is missing in"),
    ("a rule changed in the chart alone", text(HELM + "files/rules/alerts.yml", "expr: vector(1)", "expr: vector(2)"), judge.packaged_chart, None, "alerts.yml differs in the package"),
    ("a copy that is old", text("deploy/prometheus/rules/alerts.yml", "expr: vector(1)", "expr: vector(2)"), judge.generated, None, "files/rules/alerts.yml is out of date"),
    ("a copied file without its original", lambda root: (root / HELM / "files/dashboards/old.json").write_text("{}"), judge.generated, None, "files/dashboards/old.json is out of date"),
    ("dashboards that are links", lambda root: (shutil.rmtree(root / HELM / "files/dashboards"), (root / HELM / "files/dashboards").symlink_to("../../../dashboards")), judge.incomplete_chart, None, "files/dashboards is a symbolic link"),
    ("lost rules that nobody misses", text(T + "prometheusrule.yaml", "{{- fail (printf \"the chart holds no %s", "{{- print (printf \"the chart holds no %s"), judge.incomplete_chart, None, "without files/rules: expected"),
    ("cases in the package", lambda root: (root / HELM / ".helmignore").unlink(), judge.packaged_chart, None, "the cases of the tests are in the package"),
    ("notes without what to do", text(T + "NOTES.txt", "pod-security.kubernetes.io", "pod.security"), judge.install_notes, None, "the notes lack"),
    ("notes that do not say what a restart takes", text(T + "NOTES.txt", "delete memledger's pod", "look at memledger's pod"), judge.install_notes, None, "the notes lack"),
    ("manifests of before", text(T + "daemonset.yaml", "hostNetwork: {{", "hostIPC: false\n      hostNetwork: {{"), judge.plain_manifests, None, "the pod differs from the chart's"),
    ("an image of another name", text("deploy/kubernetes/kustomization.yaml", "newTag: 0.1.0", "newTag: 0.0.9"), judge.plain_manifests, None, "the pod differs from the chart's"),
    ("advice that is none", text("src/cli/checks/pods.rs", "podResources.enabled: true", "kubelet.enabled: true"), judge.doctor_values, None, "names the value kubelet.enabled, which does not exist"),
    ("values without their row", default("# Labels of all objects.", "# Labels of everything."), judge.generated, None, "README.md is out of date"),
    ("a setting that the schema has not", text("docs/config.md", "| `--web.max-requests`", "| `--web.new` | `MEMLEDGER_WEB_NEW` |  | text | New. |\n| `--web.max-requests`"), judge.generated, None, "values.schema.json is out of date"),
    # rules, dashboards, targets
    ("a dashboard that is templated", text(T + "dashboards.yaml", "$.Files.Get $path |", 'tpl ($.Files.Get $path | replace "{{" "<" | replace "}}" ">") $ |'), monitoring.dashboards, None, "is not the file"),
    ("dashboards that Grafana does not find", default("label: grafana_dashboard", "label: dashboard"), monitoring.dashboards, None, "sidecar does not find it"),
    ("a rule that is lost", text(T + "prometheusrule.yaml", "{{- $rules = append $rules $rule -}}", ""), monitoring.changed, None, "is not the file with"),
    ("a threshold that is not changed", text(T + "prometheusrule.yaml", '"expr" $expr', '"expr" $rule.expr'), monitoring.changed, None, "is not the file with"),
    ("a named threshold that is not changed", text(T + "prometheusrule.yaml", '(printf "${1}%v" $threshold)', '"${0}"'), monitoring.changed, None, "is not the file with"),
    ("two releases on one node", text(HELM + "ci/mixed-cpu-values.yaml", "{key: nvidia.com/gpu.present,", "{key: nvidia.com/gpu.count,"), monitoring.mixed, None, "runs on GPU nodes too"),
    ("a changed expression", text(T + "prometheusrule.yaml", "toYaml $groups", 'toYaml $groups | replace "> 0.75" "> 0.7"'), monitoring.as_they_are, None, "alerts.yml is not the file's"),
    ("rules that promtool does not take", text(T + "prometheusrule.yaml", "toYaml $groups", 'toYaml $groups | replace "min_over_time(" "min_over_tme("'), monitoring.checked, None, "promtool check rules"),
    ("alerts that do not fire", text(T + "prometheusrule.yaml", "toYaml $groups", 'toYaml $groups | replace "> 0.85" "> 0.99"'), monitoring.checked, None, "promtool test rules"),
    ("a job of another name", text(T + "_helpers.tpl", "- {targetLabel: job, replacement: memledger}\n", ""), monitoring.scraped, None, "'job': 'monitor/other'"),
    ("labels that end with the pod", text(T + "_helpers.tpl", "regex: pod|container", "regex: container"), monitoring.scraped, None, "'pod': 'memledger-x7f2p'"),
    ("targets without their node", text(T + "_helpers.tpl", "targetLabel: instance", "targetLabel: host"), monitoring.scraped, None, "'host': 'gpu-node-7'"),
    ("a documented job of all pods", text("docs/kubernetes.md", "regex: memledger, action: keep", "regex: .*, action: keep"), monitoring.documented, None, "another pod has"),
    ("a documented target without its node", text("docs/kubernetes.md", "target_label: instance", "target_label: host"), monitoring.documented, None, "a pod of memledger has"),
    ("a monitor that forgets the path", text(T + "_helpers.tpl", "path: {{ .path }}", "path: /metrics"), monitoring.scraped, None, "web.telemetry-path"),
]  # fmt: skip


def copy(folder):
    """Copies what the checks read."""
    for part in ("helm", "deploy", "dashboards", "docs", "src/cli"):
        shutil.copytree(chart.ROOT / part, folder / part, symlinks=True)
    for part in ("Cargo.toml", "README.md"):
        shutil.copy(chart.ROOT / part, folder / part)
    for part in chart.ROOT.iterdir():
        if not (folder / part.name).exists() and part.name not in ("target", ".git"):
            (folder / part.name).symlink_to(part)


def errors_of(root, look, case):
    if look in monitoring.CHECKS:
        return monitoring.errors(root, [look])
    return judge.errors(root, [case or "default"], [look])


def check_mutation(number):
    """Returns an error if no check detects this mutation."""
    what, change, look, case, wanted = MUTATIONS[number]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        copy(root)
        change(root)
        found = list(errors_of(root, look, case))
    if not any(wanted in error for error in found):
        return f"{what}: no error contains {wanted!r}, only {found[:3]}"
    return None


def main():
    # forked, because a mutation is a function without a name; each waits for helm, kubectl or promtool in between
    with ProcessPoolExecutor(max_workers=4, mp_context=multiprocessing.get_context("fork")) as pool:
        undetected = [error for error in pool.map(check_mutation, range(len(MUTATIONS))) if error]
    looks = {look for _, _, look, _, _ in MUTATIONS}
    for idle in {*judge.CASE_CHECKS, *judge.CHART_CHECKS, *monitoring.CHECKS} - looks:
        undetected.append(f"no mutation covers {idle.__name__}")
    print("\n".join([*undetected, f"{len(MUTATIONS)} mutations, {len(undetected)} not detected"]))
    sys.exit(bool(undetected))


if __name__ == "__main__":
    main()
