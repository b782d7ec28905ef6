"""Generates files from the chart, or compares them with `--check`: `generate.py [--check] [ROOT]`.

* the table of values in helm/memledger/README.md, from the comments in values.yaml;
* the settings that values.schema.json allows, from docs/config.md;
* helm/memledger/files: copies of the rules and dashboards, since a package cannot reach outside its chart, and tools that
  archive a chart omit symbolic links;
* deploy/kubernetes/memledger.yaml, rendered from the chart, for people without Helm.
"""
import json
import re
import sys
from pathlib import Path

import yaml

import chart

# Settings that have their own values, or that would contradict the mounts.
OF_THE_CHART = re.compile(r"path\.|web\.listen-address|state\.path|reporter\.directory|docker\.socket|podman\.socket|cri\.endpoint|kubelet\.pod-resources|gpu\.nvml-library")
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
MANIFEST = """\
# memledger on every node, without Helm. Generated from the chart helm/memledger by `make manifests`; do not edit.
#
#   kubectl apply -k deploy/kubernetes
#
# Set your registry, and make changes, in kustomization.yaml; docs/kubernetes.md explains each privilege.
apiVersion: v1
kind: Namespace
metadata:
  name: memledger
  labels:
    # stricter levels reject hostPID and hostPath
    pod-security.kubernetes.io/enforce: privileged
"""


def values(text):
    """Yields the values with their comments: (path, comment). A comment belongs to the key below it."""
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
    """Yields the paths of a tree of values that have no value below them."""
    for key, value in tree.items():
        if isinstance(value, dict) and value and (*above, key) not in WHOLE:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


# Shown as one value, although they contain others.
WHOLE = {("resources",), ("nodeSelector",), ("affinity",), ("seccompProfile",)}


def table(folder):
    """Returns the table of the README. A value without a comment is an error."""
    text = (folder / "values.yaml").read_text()
    comments = dict(values(text))
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, default in leaves(yaml.safe_load(text)):
        if path not in comments:
            raise SystemExit(f"values.yaml: {'.'.join(path)} has no comment")
        shown = f"`{json.dumps(default)}`".replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | {shown} | {comments[path].replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def readme(root):
    text = (root / "helm/memledger/README.md").read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(root / 'helm/memledger')}\n{END}{rest.split(END)[1]}"


def settings(root):
    """Yields the schema of each setting of docs/config.md that users of the chart may set."""
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
        elif takes.startswith("a number"):
            kind = {"type": ["number", "string"]}
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
    """Returns JSON in which everything that fits into a line is on one line."""
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
    # used by Helm only
    return MANIFEST + re.sub(r"(?m)^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|^# Source: .*\n", "", text)


GENERATED = {
    "helm/memledger/README.md": readme,
    "helm/memledger/values.schema.json": schema,
    "deploy/kubernetes/memledger.yaml": manifest,
}


# Folder of the chart: folder of the originals, and which of its files.
COPIED = {
    "helm/memledger/files/rules": ("deploy/prometheus/rules", "*.yml"),
    "helm/memledger/files/dashboards": ("dashboards", "*.json"),
}


def copies(root):
    """The copies in the chart: name of the copy, and its original; `None` for a copy without one."""
    for folder, (source, pattern) in COPIED.items():
        originals = {f"{folder}/{path.name}": path for path in sorted((root / source).glob(pattern))}
        present = [f"{folder}/{path.name}" for path in sorted((root / folder).glob("*"))]
        yield from originals.items()
        yield from ((name, None) for name in present if name not in originals)


def stale(root):
    """Yields the generated files that are out of date."""
    for name, original in copies(root):
        path = root / name
        if original is None or path.is_symlink() or not path.exists() or path.read_bytes() != original.read_bytes():
            yield name
    for name, make in GENERATED.items():
        path = root / name
        if not path.exists() or path.read_text() != make(root):
            yield name


def write(root, name):
    """Writes one generated file; removes a copy whose original is gone."""
    path = root / name
    if name in GENERATED:
        path.write_text(GENERATED[name](root))
        return
    original = dict(copies(root))[name]
    if original is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(original.read_bytes())


def main():
    arguments = sys.argv[1:]
    is_check = "--check" in arguments
    root = Path(next((each for each in arguments if each != "--check"), chart.ROOT)).resolve()
    for name in stale(root):
        if is_check:
            print(f"{name} is out of date: run `make manifests`")
        else:
            write(root, name)
            print(f"wrote {name}")
    sys.exit(is_check and any(stale(root)))


if __name__ == "__main__":
    main()
