"""Renders the chart with the real `helm`, whose path is in $MEMLEDGER_TEST_HELM, as text and as objects."""
import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/memledger"
RELEASE, NAMESPACE = "memledger", "monitor"


# The same YAML; the C implementation takes a tenth of the time.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Rejected(Exception):
    """Helm failed; the text is its output."""


def helm(*arguments):
    """Runs helm and returns its output."""
    program = os.environ.get("MEMLEDGER_TEST_HELM")
    if not program:
        raise SystemExit("MEMLEDGER_TEST_HELM is not set; `tests/setup/setup.sh helm` installs helm")
    # independent of this machine's Helm configuration and cluster
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/dev/null"}
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise Rejected(f"{done.stderr}\n{done.stdout}")
    return done.stdout


def cases(chart=CHART):
    """Returns the values files of the chart's cases, by name."""
    return {path.name.removesuffix("-values.yaml"): path for path in sorted((chart / "ci").glob("*-values.yaml"))}


def render(chart=CHART, values=(), settings=(), release=RELEASE, version=None):
    """Returns the rendered text of the chart with values files and `--set-json` settings."""
    arguments = [f"--values={path}" for path in values] + [f"--set-json={one}" for one in settings]
    arguments += [f"--kube-version={version}"] * bool(version)
    return helm("template", release, chart, f"--namespace={NAMESPACE}", *arguments)


def objects(text):
    """Returns the objects of a rendered text, without empty documents."""
    return [document for document in yaml.load_all(text, LOADER) if document]


def of_kind(found, kind):
    return [each for each in found if each["kind"] == kind]


def pod(found):
    """Returns the pod spec of the DaemonSet."""
    (daemonset,) = of_kind(found, "DaemonSet")
    return daemonset["spec"]["template"]["spec"]


def container(found):
    (only,) = pod(found)["containers"]
    return only
