"""`make sbom`: writes the crates that are linked into memledger, as CycloneDX 1.5, in one file.

cargo-cyclonedx generates it, from the same resolution as the build, without build dependencies. Added here: SQLite itself, whose C
source is in the crate libsqlite3-sys. Removed: paths of this machine. At the end it is compared with `cargo tree`: each linked crate,
with version, licence and checksum.

usage: sbom.py CARGO_CYCLONEDX FILE [TRIPLE]
"""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NAME = "memledger-sbom"


def output_of(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def generate(tool, triple):
    """Runs the tool, which writes a file for each workspace member; returns the one of the program."""
    time = output_of("git", "log", "-1", "--format=%ct").strip() if (ROOT / ".git").exists() else "0"
    environment = {"SOURCE_DATE_EPOCH": time, **os.environ}
    command = [tool, "cyclonedx", "--format", "json", "--spec-version", "1.5", "--target", triple, "--no-build-deps",
               "--override-filename", NAME]
    try:
        subprocess.run(command, cwd=ROOT, check=True, env=environment)
        return (ROOT / f"{NAME}.json").read_text()
    finally:
        for leftover in [ROOT / f"{NAME}.json", *ROOT.glob(f"tests/*/{NAME}.json")]:
            leftover.unlink(missing_ok=True)


def sqlite():
    """Returns the component SQLite, with the version of the compiled-in header."""
    packages = json.loads(output_of("cargo", "metadata", "--format-version", "1", "--locked"))["packages"]
    (crate,) = (package for package in packages if package["name"] == "libsqlite3-sys")
    header = (pathlib.Path(crate["manifest_path"]).parent / "sqlite3/sqlite3.h").read_text()
    version = re.search(r'#define SQLITE_VERSION\s+"([0-9.]+)"', header)[1]
    return {"type": "library", "bom-ref": f"sqlite@{version}", "name": "sqlite", "version": version, "scope": "required",
            "description": f"compiled in by libsqlite3-sys {crate['version']}", "purl": f"pkg:generic/sqlite@{version}",
            "cpe": f"cpe:2.3:a:sqlite:sqlite:{version}:*:*:*:*:*:*:*",
            "licenses": [{"expression": "blessing"}]}


def linked(triple):
    """Returns name and version of each linked crate: no macros, no build dependencies."""
    lines = output_of("cargo", "tree", "--locked", "--package", "memledger", "--target", triple, "--edges", "normal,no-proc-macro",
                 "--prefix", "none", "--format", "{p}").splitlines()
    crates = {tuple(line.split()[:2]) for line in lines if line}
    return {(name, version.lstrip("v")) for name, version in crates if name != "memledger"}


def find_errors(bom, crates):
    """Yields what is missing."""
    components = {(component["name"], component["version"]): component for component in bom["components"]}
    for crate in sorted(crates):
        component = components.get(crate)
        if component is None:
            yield f"{' '.join(crate)} is linked but not listed"
        elif not component.get("licenses"):
            yield f"{' '.join(crate)} has no licence"
        elif not component.get("hashes"):
            yield f"{' '.join(crate)} has no checksum"


def main():
    tool, file = sys.argv[1], pathlib.Path(sys.argv[2])
    triple = sys.argv[3] if len(sys.argv) > 3 else re.search(r"^host: (\S+)", output_of("rustc", "-vV"), re.M)[1]
    text = re.sub(r"path\+file://[^\"#]*#(?:memledger@)?", "memledger@", generate(tool, triple))
    bom = json.loads(text)
    bom["components"].append(sqlite())
    crates = linked(triple)
    errors = list(find_errors(bom, crates))
    if str(ROOT) in json.dumps(bom):
        errors.append(f"contains a path of this machine: {ROOT}")
    for error in errors:
        print(f"sbom: {error}", file=sys.stderr)
    if errors:
        return 1
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bom, indent=1, ensure_ascii=False) + "\n")
    print(f"{file}: {len(bom['components'])} components, including all {len(crates)} linked crates")
    return 0


if __name__ == "__main__":
    sys.exit(main())
