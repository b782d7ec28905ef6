"""The chart through the real `helm`, whose path is in $MEMLEDGER_TEST_HELM: what it renders, as text and as objects."""
import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/memledger"
RELEASE, NAMESPACE = "memledger", "monitor"


class Refused(Exception):
    """What helm said when it would not."""


def helm(*arguments):
    """What helm prints; its remarks on links are dropped."""
    program = os.environ.get("MEMLEDGER_TEST_HELM")
    if not program:
        raise SystemExit("MEMLEDGER_TEST_HELM names no helm: tests/setup/setup.sh helm installs one")
    # nothing of this machine's Helm or cluster
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/dev/null"}
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env=environment)
    said = "\n".join(line for line in done.stderr.splitlines() if "found symbolic link in path" not in line)
    if done.returncode:
        raise Refused(f"{said}\n{done.stdout}")
    return done.stdout


def cases(chart=CHART):
    """The values files of the chart's cases, by name."""
    return {path.name.removesuffix("-values.yaml"): path for path in sorted((chart / "ci").glob("*-values.yaml"))}


def render(chart=CHART, values=(), settings=(), release=RELEASE, version=None):
    """The text of the chart with files of values and `--set`s."""
    arguments = [f"--values={path}" for path in values] + [f"--set-json={one}" for one in settings]
    arguments += [f"--kube-version={version}"] * bool(version)
    return helm("template", release, chart, f"--namespace={NAMESPACE}", *arguments)


def objects(text):
    """The objects of a rendered text, without the empty ones that comments leave."""
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(found, kind):
    return [each for each in found if each["kind"] == kind]


def pod(found):
    """The pod of the DaemonSet."""
    (daemonset,) = of_kind(found, "DaemonSet")
    return daemonset["spec"]["template"]["spec"]


def container(found):
    (only,) = pod(found)["containers"]
    return only
