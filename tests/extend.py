#!/usr/bin/env python3
"""Adds a metric, a collector and a label of containers to a copy of the tree and compiles it: each touches two or three source files.

What a contributor writes stands here, in EDITS; the count of files is the promise of ARCHITECTURE.md. Compiles only memledger
itself, with the dependencies of this tree's target directory: some 30 s. Run by `make test-all`.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

METRIC_ROW = '''    EXAMPLE_METRIC = Counter Global "memledger_host_example_total" ["kind"] max 2, since Boot, hidden "an example",
        "An example.";
'''
COLLECTOR_ROW = '''    EXAMPLE_COLLECTED = Gauge Global "memledger_host_example_bytes" [] max 1, like "system.example", hidden "an example",
        "Another example.";
'''
COLLECTOR = '''//! An example.

use super::{CollectOutcome, Collector, Context, Output};
use crate::catalog::*;

/// The collector.
#[derive(Debug, Default)]
pub struct Example;

impl Collector for Example {
    fn name(&self) -> &'static str {
        "example"
    }

    fn collect(&mut self, _: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        output.series.global(EXAMPLE_COLLECTED, [], 1.0);
        CollectOutcome::Ok
    }
}
'''
# for each addition: file, the line after or before which the text stands, and the text; an empty place is a new file
EDITS = {
    "metric": [
        ("src/catalog.rs", "    HOST_OOM_KILLS = ", METRIC_ROW),
        ("src/collect/host.rs", "        let containers = container_memory(", '        series.global(EXAMPLE_METRIC, ["a".into()], 1.0);\n'),
    ],
    "collector": [
        ("src/catalog.rs", "    HOST_OOM_KILLS = ", COLLECTOR_ROW),
        ("src/catalog.rs", '    ("collector.own"', '    ("collector.example", "An example."),\n'),
        ("src/collect/example.rs", "", COLLECTOR),
        ("src/collect/mod.rs", "pub mod host;", "pub mod example;\n"),
        ("src/collect/mod.rs", "        Box::new(host::HostCollector", "        Box::new(example::Example),\n"),
    ],
    "label of containers": [
        ("src/discover/spec.rs", "    /// Compose service; empty without.", "    /// An example.\n    pub example: Arc<str>,\n"),
        ("src/discover/spec.rs", "            compose_service: label(", '            example: label("com.example.label"),\n'),
        ("src/catalog.rs", '"cgroup_version"] max CONTAINERS', '"example", '),
        ("src/runs/peaks.rs", "            cgroup_version.into(),", "            (&container.spec.example).into(),\n"),
    ],
}
FILES = {"metric": 2, "collector": 3, "label of containers": 3}


def copy(to):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith("docs/pictures"):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())


def apply(to, edits):
    for name, place, text in edits:
        path = to / name
        if not place:
            path.write_text(text)
            continue
        before, found, after = path.read_text().partition(place)
        if not found:
            sys.exit(f"extend: {name} has no line {place!r}: say in EDITS what a contributor writes now")
        path.write_text(before + text + found + after)


def main():
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    with tempfile.TemporaryDirectory() as folder:
        to = pathlib.Path(folder)
        copy(to)
        for what, edits in EDITS.items():
            files = {name for name, _, _ in edits}
            if len(files) != FILES[what]:
                sys.exit(f"extend: a new {what} touches {sorted(files)}, not {FILES[what]} files")
            apply(to, edits)
        command = [os.environ.get("CARGO", "cargo"), "check", "--locked", "--lib", "--quiet", "--target-dir", str(target)]
        if subprocess.run(command, cwd=to).returncode:
            sys.exit(f"extend: the copy with a new {', a new '.join(EDITS)} does not compile")
    print("extend: " + ", ".join(f"a new {what} touches {count} source files" for what, count in FILES.items()))


if __name__ == "__main__":
    main()
