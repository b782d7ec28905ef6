"""What a release does besides building: the workflow, the chart as a package, the documentation of the routes."""

import os
import re
import tarfile

import pytest

from machine import ROOT, output_of

TOOLS = f"{os.environ.get('MEMLEDGER_TEST_CACHE', '')}/routes/bin"


def workflows():
    return sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_workflows_pass_actionlint():
    output_of(f"{TOOLS}/actionlint", *workflows())


def test_workflows_pass_zizmor():
    output_of(f"{TOOLS}/zizmor", "--offline", "--no-progress", "--min-severity=low", *workflows())


def test_a_mistake_in_a_workflow_is_found(tmp_path):
    text = next(path.read_text() for path in workflows() if path.name == "release.yml")
    broken = tmp_path / "release.yml"
    broken.write_text(text.replace("runs-on:", "run-on:", 1))
    with pytest.raises(AssertionError, match="run-on"):
        output_of(f"{TOOLS}/actionlint", broken)
    broken.write_text(re.sub(r"@[0-9a-f]{40}", "@v4", text, count=1))
    with pytest.raises(AssertionError, match="unpinned|pinned"):
        output_of(f"{TOOLS}/zizmor", "--offline", "--no-progress", "--min-severity=low", broken)


def test_versions_of_program_client_and_chart_are_one():
    version = re.search(r'(?m)^version = "(.*)"', (ROOT / "Cargo.toml").read_text())[1]
    chart = (ROOT / "helm/memledger/Chart.yaml").read_text()
    assert re.search(rf'(?m)^appVersion: "?{re.escape(version)}"?$', chart)
    assert f'__version__ = "{version}"' in (ROOT / "python/memledger/_version.py").read_text()
    for path in ("deploy/services.yml", "deploy/kubernetes/kustomization.yaml", "docs/install.md"):
        assert version in (ROOT / path).read_text(), path


def test_packaged_chart_is_complete(tmp_path):
    output_of(os.environ["MEMLEDGER_TEST_HELM"], "package", ROOT / "helm/memledger", "-d", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    names = {member.name for member in members}
    for path in [*(ROOT / "dashboards").glob("*.json"), *(ROOT / "deploy/prometheus/rules").glob("*.yml")]:
        assert any(name.endswith(f"/{path.name}") for name in names), path.name
    rendered = output_of(os.environ["MEMLEDGER_TEST_HELM"], "template", "m", package, "--set", "dashboards.enabled=true,prometheusRule.enabled=true")
    assert rendered.count("kind: PrometheusRule") == 2 and rendered.count("grafana_dashboard") == 5


def test_each_route_of_the_documentation_has_at_most_five_lines():
    text = (ROOT / "docs/install.md").read_text()
    routes = re.findall(r"(?ms)^## (.*?)\n.*?^```sh\n(.*?)^```", text)
    assert len(routes) >= 6, routes
    for name, commands in routes:
        assert len(commands.splitlines()) <= 5, name
