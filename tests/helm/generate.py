"""Writes what is made of the chart, or with `--check` compares: `generate.py [--check] [ROOT]`.

* the table of values in helm/memledger/README.md, from the comments in values.yaml;
* the settings that values.schema.json lets through, from docs/config.md;
* deploy/kubernetes/memledger.yaml, rendered from the chart, for people without Helm.
"""
import json
import re
import sys
from pathlib import Path

import yaml

import chart

# Settings that have values of their own, or that would contradict what is mounted.
OF_THE_CHART = re.compile(r"path\.|web\.listen-address|state\.path|docker\.socket|podman\.socket|cri\.endpoint|kubelet\.pod-resources|gpu\.nvml-library")
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
MANIFEST = """\
# memledger on every node, without Helm. Made of the chart helm/memledger by `make manifests`; do not edit.
#
#   kubectl apply -k deploy/kubernetes
#
# kustomization.yaml beside it is the place for your registry and for changes; docs/kubernetes.md says what each right is for.
apiVersion: v1
kind: Namespace
metadata:
  name: memledger
  labels:
    # the node's processes and folders of the node are not for lower levels
    pod-security.kubernetes.io/enforce: privileged
"""


def values(text):
    """The values with their comments: (path, comment). A comment belongs to the key below it."""
    comment, path = [], []
    for line in text.splitlines():
        if row := re.match(r"( *)# (?!---)(.*)", line):
            comment.append(row[2])
        elif row := re.match(r"( *)([\w.]+):", line):
            depth = len(row[1]) // 2
            path = [*path[:depth], row[2]]
            if comment:
                yield tuple(path), " ".join(comment)
            comment = []
        else:
            comment = []


def leaves(tree, above=()):
    """The paths of a tree of values that have no value below them."""
    for key, value in tree.items():
        if isinstance(value, dict) and value and (*above, key) not in WHOLE:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


# One value each, though they hold others.
WHOLE = {("resources",), ("nodeSelector",), ("affinity",), ("seccompProfile",)}


def table(folder):
    """The rows of the README. A value without a comment is refused."""
    text = (folder / "values.yaml").read_text()
    said = dict(values(text))
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, default in leaves(yaml.safe_load(text)):
        if path not in said:
            raise SystemExit(f"values.yaml: {'.'.join(path)} has no comment")
        shown = f"`{json.dumps(default)}`".replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | {shown} | {said[path].replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def readme(root):
    text = (root / "helm/memledger/README.md").read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(root / 'helm/memledger')}\n{END}{rest.split(END)[1]}"


def settings(root):
    """What the schema says of each setting of docs/config.md that the chart leaves to its user."""
    for line in (root / "docs/config.md").read_text().splitlines():
        row = re.match(r"\| `--([\w.-]+)` \| `(MEMLEDGER_\w+)` \| .*? \| ([^|]+) \| [^|]* \|$", line)
        if not row or OF_THE_CHART.match(row[1]):
            continue
        takes = row[3].removesuffix(", repeats")
        if takes == "true or false":
            kind = {"type": "boolean"}
        elif takes == "a whole number":
            kind = {"type": "integer", "minimum": 0}
        elif takes.startswith("one of "):
            kind = {"enum": takes.removeprefix("one of ").split(", ")}
        elif takes.startswith("a duration"):
            kind = {"$ref": "#/$defs/duration"}
        else:
            kind = {"type": "string"}
        yield row[1], {"type": "array", "items": kind} if takes != row[3] else kind


def schema(root):
    tree = json.loads((root / "helm/memledger/values.schema.json").read_text())
    tree["properties"]["settings"]["properties"] = dict(settings(root))
    return shown(tree) + "\n"


def shown(tree, indent=0, width=130):
    """JSON with what fits into a line on one."""
    flat = json.dumps(tree)
    if not isinstance(tree, (dict, list)) or not tree or indent + len(flat) <= width:
        return flat
    inner = " " * (indent + 2)
    if isinstance(tree, dict):
        lines = [f"{inner}{json.dumps(key)}: {shown(value, indent + 2, width)}" for key, value in tree.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + shown(value, indent + 2, width) for value in tree) + "\n" + " " * indent + "]"


def manifest(root):
    arguments = ["template", "memledger", root / "helm/memledger", "--namespace=memledger", "--skip-tests"]
    text = chart.helm(*arguments)
    # of Helm alone
    return MANIFEST + re.sub(r"(?m)^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|^# Source: .*\n", "", text)


GENERATED = {
    "helm/memledger/README.md": readme,
    "helm/memledger/values.schema.json": schema,
    "deploy/kubernetes/memledger.yaml": manifest,
}


def stale(root):
    """The files that are not what they are made of."""
    for name, make in GENERATED.items():
        path = root / name
        if not path.exists() or path.read_text() != make(root):
            yield name


def main():
    arguments = sys.argv[1:]
    is_check = "--check" in arguments
    root = Path(next((each for each in arguments if each != "--check"), chart.ROOT)).resolve()
    for name in stale(root):
        if is_check:
            print(f"{name} is not what `make manifests` writes")
        else:
            (root / name).write_text(GENERATED[name](root))
            print(f"wrote {name}")
    sys.exit(is_check and any(stale(root)))


if __name__ == "__main__":
    main()
