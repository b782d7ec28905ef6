"""`make sbom`: what is linked into memledger, as CycloneDX 1.5, in one file.

cargo-cyclonedx writes it, from the same resolution that the build uses; build dependencies and macros that leave nothing in
the program are not in it. Added here: SQLite itself, whose C source lies in the crate libsqlite3-sys. Taken away: paths
of this machine. At the end it is compared with `cargo tree`: each crate that is linked, with version, licence and checksum.

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


def told(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def written(tool, triple):
    """What the tool writes, beside the manifest of each member of the workspace; only that of the program is wanted."""
    time = told("git", "log", "-1", "--format=%ct").strip() if (ROOT / ".git").exists() else "0"
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
    """SQLite, by the header that is compiled in."""
    packages = json.loads(told("cargo", "metadata", "--format-version", "1", "--locked"))["packages"]
    (crate,) = (package for package in packages if package["name"] == "libsqlite3-sys")
    header = (pathlib.Path(crate["manifest_path"]).parent / "sqlite3/sqlite3.h").read_text()
    version = re.search(r'#define SQLITE_VERSION\s+"([0-9.]+)"', header)[1]
    return {"type": "library", "bom-ref": f"sqlite@{version}", "name": "sqlite", "version": version, "scope": "required",
            "description": f"compiled in by libsqlite3-sys {crate['version']}", "purl": f"pkg:generic/sqlite@{version}",
            "cpe": f"cpe:2.3:a:sqlite:sqlite:{version}:*:*:*:*:*:*:*",
            "licenses": [{"expression": "blessing"}]}


def linked(triple):
    """Name and version of each crate whose code may be in the program: no macros, nothing that only builds."""
    lines = told("cargo", "tree", "--locked", "--package", "memledger", "--target", triple, "--edges", "normal,no-proc-macro",
                 "--prefix", "none", "--format", "{p}").splitlines()
    crates = {tuple(line.split()[:2]) for line in lines if line}
    return {(name, version.lstrip("v")) for name, version in crates if name != "memledger"}


def wrong(bom, crates):
    """What is missing, in words."""
    components = {(component["name"], component["version"]): component for component in bom["components"]}
    for crate in sorted(crates):
        component = components.get(crate)
        if component is None:
            yield f"{' '.join(crate)} is linked and not listed"
        elif not component.get("licenses"):
            yield f"{' '.join(crate)} has no licence"
        elif not component.get("hashes"):
            yield f"{' '.join(crate)} has no checksum"


def main():
    tool, file = sys.argv[1], pathlib.Path(sys.argv[2])
    triple = sys.argv[3] if len(sys.argv) > 3 else re.search(r"^host: (\S+)", told("rustc", "-vV"), re.M)[1]
    text = re.sub(r"path\+file://[^\"#]*#(?:memledger@)?", "memledger@", written(tool, triple))
    bom = json.loads(text)
    bom["components"].append(sqlite())
    crates = linked(triple)
    faults = list(wrong(bom, crates))
    if str(ROOT) in json.dumps(bom):
        faults.append(f"a path of this machine is in it: {ROOT}")
    for fault in faults:
        print(f"sbom: {fault}", file=sys.stderr)
    if faults:
        return 1
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bom, indent=1, ensure_ascii=False) + "\n")
    print(f"{file}: {len(bom['components'])} components; each of the {len(crates)} crates that are linked is one of them")
    return 0


sys.exit(main())
