"""What a release does besides building: the workflow, the chart as a package, the documentation of the routes."""

import os
import re
import shutil
import subprocess
import tarfile

import pytest
import yaml

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
    assert f'__version__ = "{version}"' in (ROOT / "python/memledger_client/_version.py").read_text()
    tags = {}
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md"), *(ROOT / "deploy").rglob("*.y*ml")]:
        for tag in re.findall(r"memledger/memledger:(\d[\w.]*)|newTag: (\S+?)}?$", path.read_text(), re.M):
            tags.setdefault("".join(tag), []).append(path.name)
    assert set(tags) == {version}, tags
    assert {"services.yml", "kustomization.yaml", "install.md", "kubernetes.md", "why.md"} <= set(tags[version]), tags


def test_no_step_of_a_workflow_ignores_a_failed_command():
    # in `A && B` a failing A ends a script only on its last line
    for path in workflows():
        workflow = yaml.safe_load(path.read_text())
        assert workflow.get("defaults", {}).get("run", {}).get("shell") == "bash", f"{path.name}: no pipefail"
        steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
        for script in filter(None, (step.get("run") for step in steps)):
            assert "&&" not in script and "||" not in script, (path.name, script)


@pytest.fixture
def source(tmp_path):
    """The files of the repository that a release publishes, to be changed by a test."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("README.md", "CHANGELOG.md", "Cargo.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "helm", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("pictures"))
    return folder


def release(source, *words):
    return subprocess.run([ROOT / "deploy/supply/release.sh", *words], env={**os.environ, "MEMLEDGER_SOURCE": str(source)},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_release_is_rejected_while_a_file_denies_it(source):
    version = re.search(r'(?m)^version = "(.*)"', (source / "Cargo.toml").read_text())[1]
    denial = re.compile(r"(?i)nothing is published|not published yet|no published image|is published yet")
    for path in [source / "README.md", source / "CHANGELOG.md", *source.glob("docs/*.md"), *source.rglob("*.yaml"), *source.glob("helm/*/*.md")]:
        path.write_text(denial.sub("available", path.read_text()))
    accepted = release(source, "check", version)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    for path, old, new in [
        ("helm/memledger/README.md", "\n", "\nNone is published yet.\n"),
        ("Cargo.toml", f'version = "{version}"', 'version = "99.0.0"'),
        ("helm/memledger/Chart.yaml", f"appVersion: {version}", "appVersion: 99.0.0"),
        ("docs/install.md", f"memledger/memledger:{version}", "memledger/memledger:99.0.0"),
        ("CHANGELOG.md", f"## {version}", "## 99.0.0"),
    ]:
        before = (source / path).read_text()
        assert old in before, path
        (source / path).write_text(before.replace(old, new, 1))
        rejected = release(source, "check", version)
        assert rejected.returncode and path in rejected.stdout, (path, rejected.stdout)
        (source / path).write_text(before)


def test_notes_of_a_release_are_its_part_of_the_changelog(source):
    (source / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.30 (x)\nother\n\n## 1.2.3\nthis\n\n### Added\n- one\n\n## 1.2.2\nolder\n")
    assert release(source, "notes", "1.2.3").stdout.strip() == "this\n\n### Added\n- one"


def test_packaged_chart_is_complete(tmp_path):
    output_of(os.environ["MEMLEDGER_TEST_HELM"], "package", ROOT / "helm/memledger", "-d", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        members = archive.getmembers()
    names = {member.name for member in members}
    for path in [*(ROOT / "dashboards").glob("*.json"), *(ROOT / "deploy/prometheus/rules").glob("*.yml")]:
        assert any(name.endswith(f"/{path.name}") for name in names), path.name
    rendered = output_of(os.environ["MEMLEDGER_TEST_HELM"], "template", "m", package, "--set", "dashboards.enabled=true,prometheusRule.enabled=true")
    boards = list((ROOT / "dashboards").glob("*.json"))
    assert rendered.count("kind: PrometheusRule") == 2 and rendered.count("grafana_dashboard") == len(boards) >= 6


def test_each_route_of_the_documentation_has_at_most_five_lines():
    text = (ROOT / "docs/install.md").read_text()
    routes = re.findall(r"(?ms)^## (.*?)\n.*?^```sh\n(.*?)^```", text)
    assert len(routes) >= 6, routes
    for name, commands in routes:
        assert len(commands.splitlines()) <= 5, name
