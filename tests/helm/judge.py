"""Checks the chart: `judge.py [ROOT]`. Prints one error per line; exit status 1 if there is any.

helm lints and renders every case of ci/, and what it renders is held against the API's own schemas, strictly, of several
versions; against what the API server refuses besides them; and against what we promise: no privilege that nobody asked for,
no mount without a reason. Needs no cluster, and so proves nothing of one.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import kubernetes_validate
import yaml

import chart
import generate

VERSIONS = ["1.30.0", "1.33.0", "1.35.0", "1.37.0"]
CUSTOM = "monitoring.coreos.com/v1"
# Mounts of the node, and the reason for each.
HOST_PATHS = {
    "/sys/fs/cgroup": "the memory of containers",
    "/proc": "the node's processes, with host.proc",
    "/var/lib/memledger": "the ledger",
    "/run/memledger-reporter": "the socket and the client of programs that report from inside",
    "/var/lib/kubelet/pod-resources": "which GPU is whose",
    "/run/containerd/containerd.sock": "names of containers",
    "/run/k3s/containerd/containerd.sock": "names of containers",
    "/run/k0s/containerd.sock": "names of containers",
    "/var/lib/k0s/kubelet/pod-resources": "which GPU is whose",
    "/var/snap/microk8s/common/run/containerd.sock": "names of containers",
    "/var/snap/microk8s/common/var/lib/kubelet/pod-resources": "which GPU is whose",
    "/run/crio": "names of containers",
    "/var/run/docker.sock": "names of containers of a Docker engine beside",
    "/var/log/pods": "CUDA out-of-memory errors in logs, with container.logs",
    "/dev/kmsg": "the kernel log, with kmsg.enabled",
    "/dev/null": "a marker for NVIDIA's toolkit, from the case `everything`",
}
# Writable; every other mount of the node is read-only.
WRITABLE = {"/var/lib/memledger", "/run/memledger-reporter"}
CAPABILITIES = {"SYSLOG", "SYS_PTRACE"}
# Cases with more privileges than the default.
PRIVILEGED = {"kmsg"}
OURS = "MEMLEDGER_"


def variables(root):
    """Returns the environment variables of all settings."""
    return set(re.findall(r"\| `--[\w.-]+` \| `(\w+)` \|", (root / "docs/config.md").read_text()))


def rendered(root, case):
    """Renders a case as text and as objects."""
    folder = root / "helm/memledger"
    text = chart.render(folder, [chart.cases(folder)[case]])
    return text, chart.objects(text)


# --- Each check yields errors. Arguments: root, name of the case, its objects, its text.


def deterministic(root, case, found, text):
    """Rendering is deterministic, and no object appears twice."""
    if text != rendered(root, case)[0]:
        yield "two renders differ"
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in found]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"duplicate object {name}"


def linted(root, case, found, text):
    folder = root / "helm/memledger"
    try:
        output = chart.helm("lint", "--strict", folder, f"--values={chart.cases(folder)[case]}")
        if "[WARNING]" in output or "[ERROR]" in output:
            yield f"helm lint: {output}"
    except chart.Rejected as refusal:
        yield f"helm lint: {refusal}"


def valid(root, case, found, text):
    """The objects are valid by the API's schemas; unknown fields are rejected."""
    for each in found:
        if each["apiVersion"] == CUSTOM:
            continue  # see custom
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{each['kind']} is not valid in {version}: {'.'.join(map(str, error.path))}: {error.message[:200]}"


def object_metadata(root, case, found, text):
    """Every object has a name, labels and a namespace."""
    for each in found:
        metadata, what = each["metadata"], f"{each['kind']} {each['metadata']['name']}"
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"]):
            yield f"{what}: invalid name"
        if each["kind"] in {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}:
            yield f"{what}: memledger needs no permission at the API server"
        for label, value in metadata.get("labels", {}).items():
            if not re.fullmatch(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", value):
                yield f"{what}: label {label} has the value {value!r}"


def selected(root, case, found, text):
    """All selectors match the DaemonSet's pods, and no others."""
    (daemonset,) = chart.of_kind(found, "DaemonSet")
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    wanted = daemonset["spec"]["selector"]["matchLabels"]
    selectors = [("DaemonSet", wanted)]
    selectors += [("Service", each["spec"]["selector"]) for each in chart.of_kind(found, "Service")]
    selectors += [("NetworkPolicy", each["spec"]["podSelector"]["matchLabels"]) for each in chart.of_kind(found, "NetworkPolicy")]
    selectors += [("PodMonitor", each["spec"]["selector"]["matchLabels"]) for each in chart.of_kind(found, "PodMonitor")]
    for kind, selector in selectors:
        if not selector.items() <= labels.items():
            yield f"{kind}: {selector} does not match the pods, which have {labels}"
    for each in chart.of_kind(found, "Pod"):
        if wanted.items() <= each["metadata"]["labels"].items():
            yield f"Pod {each['metadata']['name']}: the DaemonSet's selector matches it"
    for monitor in chart.of_kind(found, "ServiceMonitor"):
        (service,) = chart.of_kind(found, "Service")
        if not monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items():
            yield "ServiceMonitor: it does not find the Service"
        if monitor["spec"]["namespaceSelector"]["matchNames"] != [service["metadata"]["namespace"]]:
            yield "ServiceMonitor: it looks for the Service in another namespace"


def privileges(root, case, found, text):
    """No privilege that the values do not request."""
    pod, container = chart.pod(found), chart.container(found)
    context = container["securityContext"]
    if context.get("privileged") and case not in PRIVILEGED:
        yield "the container is privileged"
    if context.get("privileged") and (context.get("allowPrivilegeEscalation") is False or context.get("capabilities")):
        yield "the API server refuses, or nobody heeds, limits of a privileged container"
    if not context.get("privileged"):
        if context["capabilities"]["drop"] != ["ALL"]:
            yield "it keeps capabilities that it does not need"
        allowed = CAPABILITIES
        if extra := set(context["capabilities"].get("add", [])) - allowed:
            yield f"has the extra privileges {sorted(extra)}"
        if context.get("allowPrivilegeEscalation") is not False:
            yield "it may gain privileges"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield "it has no seccomp profile"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "its root can be written"
    if pod.get("hostIPC") or (pod.get("hostNetwork") and case != "hostnetwork"):
        yield "it has namespaces of the node that it does not need"
    if pod.get("automountServiceAccountToken") is not False:
        yield "it gets a token of the API server"
    if pod.get("enableServiceLinks") is not False:
        yield "variables of a Service called memledger would begin as the settings do"
    for port in container["ports"]:
        if "hostPort" in port:
            yield f"port {port} is open on the node"


def mounted(root, case, found, text):
    """Each directory of the node is on the list, never its root, and read-only; volumes and mounts match."""
    pod, container = chart.pod(found), chart.container(found)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = container["volumeMounts"]
    if len(volumes) != len(pod["volumes"]) or len({mount["mountPath"] for mount in mounts}) != len(mounts):
        yield "two volumes have one name, or two mounts one place"
    if {mount["name"] for mount in mounts} != set(volumes):
        yield f"volumes {sorted(volumes)} differ from the mounts: {sorted(mount['name'] for mount in mounts)}"
    for mount in mounts:
        path = volumes.get(mount["name"], {}).get("hostPath", {}).get("path")
        if path is None:
            continue
        if path not in HOST_PATHS:
            yield f"mounts {path} of the node"
        if not volumes[mount["name"]]["hostPath"].get("type"):
            yield f"{path}: without a type the runtime creates a missing directory"
        if path not in WRITABLE and not mount.get("readOnly"):
            yield f"{path} of the node is writable"
        if path == "/sys/fs/cgroup" and mount.get("recursiveReadOnly") != "IfPossible":
            yield f"{path}: the mounts below it are writable"
        if mount.get("recursiveReadOnly") and mount.get("mountPropagation", "None") != "None":
            yield f"{path}: the API server rejects recursiveReadOnly with propagation"


def environment(root, case, found, text):
    """The environment names settings that exist, once, and paths that are mounted."""
    container = chart.container(found)
    known, seen = variables(root), set()
    for variable in container["env"]:
        name, value = variable["name"], variable.get("value")
        if name in seen:
            yield f"{name} is set twice"
        seen.add(name)
        if name.startswith(OURS) and name not in known:
            yield f"unknown setting {name}"
        places = [mount["mountPath"] for mount in container["volumeMounts"]]
        if isinstance(value, str) and value.startswith("/host/") and not any(f"{value}/".startswith(f"{place}/") for place in places):
            yield f"{name}: {value} is not mounted"
    state = next(variable["value"] for variable in container["env"] if variable["name"] == f"{OURS}STATE_PATH")
    if state not in [mount["mountPath"] for mount in container["volumeMounts"]]:
        yield f"the ledger at {state} is not on a writable mount"


def probed(root, case, found, text):
    """Probes use existing routes, one handler each, existing ports, and TLS if the web configuration may require it."""
    container = chart.container(found)
    secured = next((variable["value"] for variable in container["env"] if variable["name"] == f"{OURS}WEB_CONFIG_FILE"), None)
    for kind, key in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        for each in chart.of_kind(found, kind):
            if secured and (scheme := each["spec"][key][0]["scheme"]) != "https":
                yield f"{kind} uses {scheme}, but {secured} may require TLS"
    ports = {port["name"] for port in container["ports"]}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(name)
        if probe is None:
            continue
        ways = [way for way in ("httpGet", "tcpSocket", "exec", "grpc") if way in probe]
        if len(ways) != 1:
            yield f"{name} has {len(ways)} handlers, the API server accepts one"
        elif probe[ways[0]].get("port", "metrics") not in ports:
            yield f"{name}: unknown port {probe[ways[0]]['port']}"
        if "httpGet" in probe and probe["httpGet"]["path"] not in ("/-/healthy", "/-/ready"):
            yield f"{name}: unknown route {probe['httpGet']['path']}"
        if "httpGet" in probe and secured:
            yield f"{name} uses HTTP, but {secured} may require TLS"
    listens = next(variable["value"] for variable in container["env"] if variable["name"] == f"{OURS}WEB_LISTEN_ADDRESS")
    if listens != f":{container['ports'][0]['containerPort']}":
        yield f"listens on {listens}, but declares {container['ports']}"


def custom(root, case, found, text):
    """Objects of the Prometheus Operator have only fields on our list: no Python package has its schemas."""
    fields = {
        "port", "path", "interval", "scrapeTimeout", "scheme", "tlsConfig", "basicAuth", "honorLabels", "relabelings",
        "metricRelabelings",
    }  # fmt: skip
    limits = {"sampleLimit", "labelLimit", "labelNameLengthLimit", "labelValueLengthLimit"}
    for kind, key in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        for each in chart.of_kind(found, kind):
            if odd := set(each["spec"]) - limits - {"selector", "namespaceSelector", key}:
                yield f"{kind}: unknown fields {sorted(odd)}"
            for endpoint in each["spec"][key]:
                if odd := set(endpoint) - fields:
                    yield f"{kind}: unknown endpoint fields {sorted(odd)}"
                if "job" not in [rule.get("targetLabel") for rule in endpoint["relabelings"]]:
                    yield f"{kind}: the job is not memledger, which rules and dashboards require"


CASE_CHECKS = [deterministic, linted, valid, object_metadata, selected, privileges, mounted, environment, probed, custom]

# --- checks of the whole chart


def versions(root):
    """Chart and program have the same version, and an API that is too old is rejected."""
    about = yaml.load((root / "helm/memledger/Chart.yaml").read_text(), chart.LOADER)
    crate = re.search(r'^version = "(.*)"$', (root / "Cargo.toml").read_text(), re.M)[1]
    for key in ("version", "appVersion"):
        if about[key] != crate:
            yield f"Chart.yaml: {key} is {about[key]}, Cargo.toml has {crate}"
    try:
        chart.render(root / "helm/memledger", version="1.29.0")
        yield "Kubernetes 1.29, which lacks fields that are used, is not rejected"
    except chart.Rejected:
        pass


def schemas(root):
    """The schema rejects unknown values everywhere, and has every value and no other."""
    folder = root / "helm/memledger"
    schema = json.loads((folder / "values.schema.json").read_text())
    if schema["$schema"] != "https://json-schema.org/draft/2020-12/schema":
        yield f"values.schema.json is of {schema['$schema']}"

    def walk(given, values, path):
        node = schema["$defs"][given["$ref"].rsplit("/", 1)[1]] if "$ref" in given else given
        if "properties" not in node:
            return
        if node.get("additionalProperties") is not False and path != ["global"]:
            yield f"values.schema.json: {'.'.join(path)} accepts anything"
        if isinstance(values, dict) and (tuple(path) not in generate.WHOLE and values):
            for key in set(node["properties"]) ^ set(values):
                yield f"{'.'.join([*path, key])} is missing in values.yaml or values.schema.json"
        for key, inner in node["properties"].items():
            yield from walk(inner, (values or {}).get(key) if isinstance(values, dict) else None, [*path, key])

    yield from walk(schema, yaml.load((folder / "values.yaml").read_text(), chart.LOADER), [])


def packaged_chart(root):
    """A package contains the rules and dashboards, byte for byte, and fits into the Secret in which Helm stores a release."""
    with tempfile.TemporaryDirectory() as folder:
        output = chart.helm("package", root / "helm/memledger", f"--destination={folder}")
        (package,) = Path(folder).glob("*.tgz")
        if package.stat().st_size > 300_000:
            yield f"the package has {package.stat().st_size} bytes; a release of more than 1 MiB cannot be stored"
        with tarfile.open(package) as tar:
            inside = {name: tar.extractfile(name).read() for name in tar.getnames()}
        for source, place in (("deploy/prometheus/rules", "rules"), ("dashboards", "dashboards")):
            for path in sorted((root / source).iterdir()):
                if inside.get(f"memledger/files/{place}/{path.name}") != path.read_bytes():
                    yield f"{source}/{path.name} differs in the package"
        if any("/ci/" in name for name in inside):
            yield "the cases of the tests are in the package"
        case = [root / "helm/memledger/ci/monitoring-values.yaml"]
        if chart.render(package, case) != chart.render(root / "helm/memledger", case):
            yield f"the package renders differently from the directory: {output}"


def incomplete_chart(root):
    """A chart without its rules or dashboards is rejected and never rendered."""
    values = {
        "rules": ("prometheusRule.enabled=true", "the chart holds no files/rules/*.yml"),
        "dashboards": ("dashboards.enabled=true", "the chart holds no files/dashboards/*.json"),
    }
    for part, (value, wanted) in values.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "memledger"
            shutil.copytree(root / "helm/memledger", folder, symlinks=True)
            lost = folder / "files" / part
            lost.unlink() if lost.is_symlink() else shutil.rmtree(lost)
            try:
                chart.render(folder, settings=[value])
                output = "no error: it is rendered"
            except chart.Rejected as rejection:
                output = str(rejection)
        if wanted not in output:
            yield f"without files/{part}: expected {wanted!r}, got {output}"
    for path in sorted((root / "helm/memledger").rglob("*")):
        if path.is_symlink():
            yield f"{path.relative_to(root)} is a symbolic link, which some tools leave out of an archive"


def install_notes(root):
    """The notes list the next steps, and warn about the values that were set."""
    folder = root / "helm/memledger"
    for case, wanted in {
        "default": ["pod-security.kubernetes.io/enforce=privileged", "/memledger doctor", "helm test", "Nothing scrapes it yet", "nvidia.runtimeClassName is empty"],
        "kmsg": ["WARNING: kmsg.enabled makes the container PRIVILEGED"],
        "minimal": ["hostPID is off", "delete memledger's pod on that", "runtime.enabled is off", "capabilities.syslog is off", "capabilities.sysPtrace is off", "state.hostPath is empty"],
        "podmonitor": ["scraped through a PodMonitor"],
        "monitoring": ["scraped through a ServiceMonitor"],
    }.items():  # fmt: skip
        output = chart.helm("install", "memledger", folder, "--dry-run=client", "--namespace=monitor", f"--values={chart.cases(folder)[case]}")
        notes = output.split("NOTES:")[1]
        for part in wanted:
            if part not in notes:
                yield f"{case}: the notes lack {part!r}"
        if "<no value>" in notes or "\n\n\n" in notes.strip():
            yield f"{case}: the notes have gaps: {notes}"


def plain_manifests(root):
    """The plain manifests are valid, as kustomize reads them, and equal the chart's default."""
    kubectl = [os.environ["MEMLEDGER_TEST_KUBECTL"], "kustomize", root / "deploy/kubernetes"]
    done = subprocess.run(kubectl, capture_output=True, text=True)
    if done.returncode:
        yield f"kubectl kustomize: {done.stderr}"
        return
    found = chart.objects(done.stdout)
    yield from valid(root, "", found, "")
    default = chart.objects(chart.helm("template", "memledger", root / "helm/memledger", "--namespace=memledger"))
    if chart.pod(found) != chart.pod(default):
        yield "deploy/kubernetes: the pod differs from the chart's"
    (namespace,) = chart.of_kind(found, "Namespace")
    if any(each["metadata"]["namespace"] != namespace["metadata"]["name"] for each in found if each is not namespace):
        yield "deploy/kubernetes: an object is in another namespace"


def doctor_values(root):
    """The values that `memledger doctor` names in a pod are values of the chart."""
    text = (root / "src/cli/checks/pods.rs").read_text()
    tree = yaml.load((root / "helm/memledger/values.yaml").read_text(), chart.LOADER)
    named = re.findall(r"[\"\s]((?:\w+\.)*\w+): (?:true|a folder|nvidia|the socket|the folder|\{type)", text.split("#[cfg(test)]")[0])
    if len(named) < 8:
        yield f"doctor names only {named}"
    for name in named:
        value = tree
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            yield f"doctor names the value {name}, which does not exist"


def generated(root):
    for name in generate.stale(root):
        yield f"{name} is out of date: run `make manifests`"


CHART_CHECKS = [versions, schemas, packaged_chart, incomplete_chart, install_notes, plain_manifests, doctor_values, generated]


def errors(root, cases=None, checks=None):
    """Yields all errors, or those of some cases and checks."""
    for check in CHART_CHECKS if checks is None else [check for check in checks if check in CHART_CHECKS]:
        yield from (f"{check.__name__}: {what}" for what in check(root))
    for case in cases or chart.cases(root / "helm/memledger"):
        try:
            text, found = rendered(root, case)
        except chart.Rejected as refusal:
            yield f"{case}: rendering failed: {refusal}"
            continue
        for check in CASE_CHECKS if checks is None else [check for check in checks if check in CASE_CHECKS]:
            yield from (f"{case}: {check.__name__}: {what}" for what in check(root, case, found, text))


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else chart.ROOT).resolve()
    found = list(errors(root))
    for error in found:
        print(error)
    print(f"{len(chart.cases())} cases, {len(VERSIONS)} versions of the API")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
