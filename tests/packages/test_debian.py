"""The deb and the tarball, in a clean Debian with a running systemd.

Its pid namespace is not the machine's, so memory by process is missing here; everything else is read.
"""

import hashlib
import json
import subprocess

import pytest

from machine import ROOT, counts_kill, eventually, is_verdict, oom_kill, output_of, unique


def deb(packages):
    (path,) = packages.glob("*.deb")
    return path


def install(machine, path):
    """Installs a package, as `apt install ./FILE` does: its dependencies are there."""
    target = machine.root / "var/tmp" / path.name
    target.write_bytes(path.read_bytes())
    return machine.run("dpkg", "-i", f"/var/tmp/{path.name}")


def check_service(machine, containers):
    """The service runs and answers `doctor`, `/metrics` and `why`."""
    machine.wait_until_ready()
    assert machine.status("is-active", "memledger") == "active"
    report = machine.run("memledger", "doctor")
    for source in ("cgroups", "docker", "kernel log", "state path", "control socket"):
        assert any(line.split()[:1] == ["ok"] and source in line for line in report.splitlines()), report
    containers.append(oom_kill())
    machine.why(containers[-1])
    eventually("its count", lambda: counts_kill(machine.metrics(), containers[-1]))


def kills(machine, name):
    """The OOM kills of a container in the ledger."""
    events = [json.loads(line) for line in machine.run("memledger", "events", "--container", name, "--json").splitlines()]
    return [event for event in events if event["type"] == "oom_kill"]


@pytest.fixture(scope="module")
def next_deb(packages, tmp_path_factory):
    """The same program as a package of a later version."""
    folder = tmp_path_factory.mktemp("next")
    (folder / "memledger").write_bytes((packages / "memledger").read_bytes())
    (folder / "memledger").chmod(0o755)
    output_of(ROOT / "deploy/packages/build.sh", folder, "99.0.0")
    return deb(folder)


def test_deb_installs_upgrades_without_losing_a_kill_and_leaves_nothing_after_purge(machine, packages, next_deb, containers):
    before = machine.files()
    install(machine, deb(packages))
    assert machine.status("is-enabled", "memledger") == "enabled"
    check_service(machine, containers)
    first = containers[-1]

    # kills all the time, from before the upgrade until after it
    names = [unique("upgrade") for _ in range(6)]
    containers += names
    upgrade = subprocess.Popen(["true"])
    for number, name in enumerate(names):
        if number == 1:
            target = machine.root / "var/tmp/next.deb"
            target.write_bytes(next_deb.read_bytes())
            upgrade = subprocess.Popen(machine.command("dpkg", "-i", "/var/tmp/next.deb"), stdout=subprocess.DEVNULL)
        oom_kill(name)
    assert upgrade.wait() == 0
    machine.wait_until_ready()
    assert machine.run("dpkg-query", "-W", "-f", "${Version}", "memledger") == "99.0.0"
    for name in [first, *names]:
        machine.why(name)
        eventually(f"one kill of {name}", lambda name=name: len(kills(machine, name)) == 1)

    # the ledger and the settings outlive the package
    machine.run("dpkg", "--remove", "memledger")
    assert machine.status("is-active", "memledger") != "active"
    assert (machine.root / "var/lib/memledger").is_dir() and (machine.root / "etc/default/memledger").exists()
    install(machine, deb(packages))
    machine.wait_until_ready()
    machine.why(first)

    machine.run("dpkg", "--purge", "memledger")
    left = {path for path in machine.files() - before if not path.startswith(("/var/tmp/", "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow"))}
    assert not left, left


def test_members_of_the_group_need_no_root_and_others_have_no_access(machine, packages, containers):
    install(machine, deb(packages))
    machine.wait_until_ready()
    containers.append(oom_kill())
    machine.why(containers[-1])

    def as_user(group):
        words = ["setpriv", "--reuid=65534", "--regid=65534", f"--groups={group}", "memledger", "why", containers[-1]]
        return subprocess.run(machine.command(*words), capture_output=True, text=True, check=False)

    assert is_verdict(as_user("memledger").stdout, containers[-1])
    refused = as_user("nogroup")
    assert refused.returncode == 1 and "OUT OF MEMORY" not in refused.stdout, refused


def test_service_runs_as_its_own_user_with_two_capabilities(machine, packages, containers):
    install(machine, deb(packages))
    socket_group = machine.run("stat", "-c", "%g", "/run/docker.sock").strip()
    folder = machine.root / "etc/systemd/system/memledger.service.d"
    folder.mkdir(parents=True)
    text = (ROOT / "docs/install.md").read_text()
    dropin = text.split("# user.conf\n", 1)[1].split("```", 1)[0]
    (folder / "user.conf").write_text(dropin.replace("docker", socket_group))
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "memledger")
    machine.wait_until_ready()
    pid = machine.run("systemctl", "show", "-p", "MainPID", "--value", "memledger").strip()
    assert machine.run("stat", "-c", "%U", f"/proc/{pid}/status").strip() == "memledger"
    check_service(machine, containers)


def test_deb_holds_the_same_program_as_the_tarball_and_files_for_man_and_shells(packages, tmp_path):
    output_of("dpkg-deb", "-x", deb(packages), tmp_path / "deb")
    (archive,) = packages.glob("*.tar.gz")
    output_of("tar", "-C", tmp_path, "-xzf", archive)
    (tar,) = tmp_path.glob("memledger-*")
    sums = {hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (packages / "memledger", tmp_path / "deb/usr/bin/memledger", tar / "bin/memledger")}
    assert len(sums) == 1
    for completion in ("usr/share/bash-completion/completions/memledger", "usr/share/zsh/vendor-completions/_memledger",
                       "usr/share/fish/vendor_completions.d/memledger.fish"):
        assert "state.path" in (tmp_path / "deb" / completion).read_text()
    pages = sorted(path.name for path in (tar / "share/man/man1").iterdir())
    assert "memledger.1" in pages and "memledger-why.1" in pages, pages
    for page in pages:
        done = subprocess.run(["man", "--warnings", "--no-justification", "-l", tar / "share/man/man1" / page], capture_output=True, text=True, check=True,
                              env={"LC_ALL": "C.UTF-8", "MANWIDTH": "120", "PATH": "/usr/bin:/bin"})
        assert not done.stderr and "memledger" in done.stdout, (page, done.stderr)
    completed = output_of("bash", "-c", f"source {tmp_path}/deb/usr/share/bash-completion/completions/memledger; COMP_WORDS=(memledger wh); "
                          "COMP_CWORD=1; _memledger memledger wh memledger; echo ${COMPREPLY[@]}")
    assert completed.split() == ["why"]


def test_tarball_runs_as_a_service_from_usr_local(machine, packages, containers):
    (archive,) = packages.glob("*.tar.gz")
    (machine.root / "var/tmp/memledger.tar.gz").write_bytes(archive.read_bytes())
    machine.run("tar", "-C", "/usr/local", "--strip-components=1", "-xzf", "/var/tmp/memledger.tar.gz")
    machine.run("systemctl", "enable", "--now", "memledger")
    check_service(machine, containers)
