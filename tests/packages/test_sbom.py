"""The list of linked crates, written by the real cargo-cyclonedx."""

import copy
import importlib.util
import json
import os
import re
import sys

import pytest

from machine import ROOT, output_of


@pytest.fixture(scope="module")
def sbom():
    """deploy/supply/sbom.py as a module."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy/supply/sbom.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The list that `make sbom` writes."""
    file = tmp_path_factory.mktemp("sbom") / "memledger.cdx.json"
    tool = f"{os.environ['MEMLEDGER_TEST_CACHE']}/cargo-cyclonedx/cargo-cyclonedx"
    output_of(sys.executable, "-B", ROOT / "deploy/supply/sbom.py", tool, file)
    return json.loads(file.read_text())


def test_list_has_the_program_its_crates_and_sqlite(written):
    version = re.search(r'(?m)^version = "(.*)"', (ROOT / "Cargo.toml").read_text())[1]
    assert (written["bomFormat"], written["specVersion"]) == ("CycloneDX", "1.5")
    assert (written["metadata"]["component"]["name"], written["metadata"]["component"]["version"]) == ("memledger", version)
    names = {component["name"] for component in written["components"]}
    # of Cargo.toml, not of the tool
    for crate in ("hyper", "rustls", "ring", "rusqlite", "libsqlite3-sys", "sqlite", "tokio"):
        assert crate in names, crate
    # what only tests and build scripts use
    assert not {"tempfile", "proptest", "cc"} & names


def test_each_missing_fact_about_a_linked_crate_is_an_error(sbom, written):
    crates = {(component["name"], component["version"]) for component in written["components"] if component["name"] in ("hyper", "ring")}
    assert len(crates) == 2 and not list(sbom.find_errors(written, crates))

    def errors(change):
        changed = copy.deepcopy(written)
        change(changed["components"], next(one for one in changed["components"] if one["name"] == "ring"))
        return list(sbom.find_errors(changed, crates))

    assert "linked but not listed" in errors(lambda components, ring: components.remove(ring))[0]
    assert "no licence" in errors(lambda _, ring: ring.pop("licenses"))[0]
    assert "no checksum" in errors(lambda _, ring: ring.pop("hashes"))[0]
