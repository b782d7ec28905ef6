"""The deb and the tarball, in a clean Debian with a running systemd.

Its pid namespace is not the machine's, so memory by process is missing here; everything else is read.
"""

import gzip
import hashlib
import json
import os
import re
import stat
import subprocess

import pytest

from machine import DEADLINE_S, ROOT, counts_kill, eventually, is_verdict, oom_kill, output_of

CAP_SYS_PTRACE, CAP_SYSLOG = 19, 34


def deb(packages):
    (path,) = packages.glob("*.deb")
    return path


def install(machine, path):
    """Installs a package, as documented; its dependencies are there."""
    return machine.run(*install_command(machine, path))


def install_command(machine, path):
    (machine.root / "var/tmp" / path.name).write_bytes(path.read_bytes())
    return ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "install", f"/var/tmp/{path.name}"]


def check_service(machine, containers):
    """The service runs and serves `doctor`, `/metrics` and `why`."""
    machine.wait_until_ready()
    assert machine.status("is-active", "memledger") == "active"
    report = machine.run("memledger", "doctor")
    for source in ("cgroups", "docker", "kernel log", "state path", "control socket"):
        assert any(line.split()[:1] == ["ok"] and source in line for line in report.splitlines()), report
    containers.append(oom_kill())
    machine.why(containers[-1])
    eventually("its count", lambda: counts_kill(machine.metrics(), containers[-1]))


def main_pid(machine):
    """The pid of the service in the machine; "0" while its program does not run."""
    return machine.run("systemctl", "show", "-p", "MainPID", "--value", "memledger").strip()


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


def test_deb_installs_and_reads_its_settings(machine, packages, containers):
    install(machine, deb(packages))
    assert machine.status("is-enabled", "memledger") == "enabled"
    check_service(machine, containers)
    settings = machine.root / "etc/memledger/memledger.yml"
    settings.write_text(settings.read_text() + "\nweb.listen-address: 127.0.0.1:10999\n")
    machine.run("systemctl", "restart", "memledger")
    eventually("its other address", lambda: machine.run("curl", "--silent", "--fail", "http://127.0.0.1:10999/-/ready"))


def test_deb_runs_its_own_program_beside_another_in_usr_local(machine, packages):
    other = machine.root / "usr/local/bin/memledger"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    install(machine, deb(packages))
    machine.wait_until_ready()
    assert machine.run("readlink", f"/proc/{main_pid(machine)}/exe").strip() == "/usr/bin/memledger"


@pytest.fixture
def held_start(machine):
    """The start of the service waits until this file exists: its downtime is as long as a test wants."""
    gate = "/etc/memledger.start"
    folder = machine.root / "etc/systemd/system/memledger.service.d"
    folder.mkdir(parents=True)
    (folder / "hold.conf").write_text(f"[Service]\nExecStartPre=/bin/sh -c 'until [ -e {gate} ]; do sleep 0.05; done'\n")
    path = machine.root / gate[1:]
    yield path
    path.unlink(missing_ok=True)


def test_upgrade_restarts_the_service_and_loses_no_kill(machine, packages, next_deb, containers, held_start):
    held_start.touch()
    install(machine, deb(packages))
    machine.wait_until_ready()
    settings = machine.root / "etc/memledger/memledger.yml"
    settings.write_text(settings.read_text() + "\n# of the administrator\n")
    containers.append(oom_kill())
    machine.why(containers[-1])
    first = main_pid(machine)

    held_start.unlink()
    command = machine.command(*install_command(machine, next_deb))
    upgrade = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        eventually("the old program ends", lambda: main_pid(machine) == "0")
        assert upgrade.poll() is None and machine.status("show", "-p", "SubState", "--value", "memledger") == "start-pre"
        containers.append(oom_kill())
        assert main_pid(machine) == "0"
    finally:
        held_start.touch()
        assert upgrade.wait(timeout=DEADLINE_S) == 0
    machine.wait_until_ready()
    assert main_pid(machine) not in ("0", first)
    assert machine.run("dpkg-query", "-W", "-f", "${Version}", "memledger") == "99.0.0"
    assert "# of the administrator" in settings.read_text()
    containers.append(oom_kill())
    for name in containers:
        eventually(f"one kill of {name}", lambda name=name: len(kills(machine, name)) == 1)
        machine.why(name)


def test_removal_keeps_ledger_and_settings_and_purge_leaves_nothing(machine, packages, containers):
    before = machine.files()
    install(machine, deb(packages))
    machine.wait_until_ready()
    containers.append(oom_kill())
    machine.why(containers[-1])

    machine.run("apt-get", "-q", "-y", "remove", "memledger")
    assert machine.status("is-active", "memledger") != "active"
    assert (machine.root / "var/lib/memledger").is_dir() and (machine.root / "etc/memledger/memledger.yml").exists()
    install(machine, deb(packages))
    machine.wait_until_ready()
    machine.why(containers[-1])

    machine.run("apt-get", "-q", "-y", "purge", "memledger")
    # the user stays, as Debian's policy advises
    left = {path for path in machine.files() - before if not path.startswith(("/var/tmp/", "/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow"))}
    left |= set(machine.run("find", "/run", "/var/lib/systemd", "/var/lib/dpkg/info", "-xdev", "-name", "*memledger*").split())
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
    assert refused.returncode == 3 and "OUT OF MEMORY" not in refused.stdout, refused


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
    status = machine.run("cat", f"/proc/{main_pid(machine)}/status")
    assert re.search(r"(?m)^Uid:\t(\d+)", status)[1] == machine.run("id", "-u", "memledger").strip()
    capabilities = int(re.search(r"(?m)^CapEff:\t(\S+)", status)[1], 16)
    assert capabilities == 1 << CAP_SYS_PTRACE | 1 << CAP_SYSLOG, hex(capabilities)
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
    of_deb = {path.stem: gzip.decompress(path.read_bytes()) for path in (tmp_path / "deb/usr/share/man/man1").iterdir()}
    assert of_deb == {page: (tar / "share/man/man1" / page).read_bytes() for page in pages}
    for page in pages:
        done = subprocess.run(["man", "--warnings", "--no-justification", "-l", tar / "share/man/man1" / page], capture_output=True, text=True, check=True,
                              env={"LC_ALL": "C.UTF-8", "MANWIDTH": "120", "PATH": "/usr/bin:/bin"})
        assert not done.stderr and "memledger" in done.stdout, (page, done.stderr)
    completed = output_of("bash", "-c", f"source {tmp_path}/deb/usr/share/bash-completion/completions/memledger; COMP_WORDS=(memledger wh); "
                          "COMP_CWORD=1; _memledger memledger wh memledger; echo ${COMPREPLY[@]}")
    assert completed.split() == ["why"]


def archive_in(machine, path):
    """Copies a tarball into the machine, as memledger.tar.gz in its /var/tmp."""
    (machine.root / "var/tmp/memledger.tar.gz").write_bytes(path.read_bytes())


def documented(section, word):
    """The commands of a section of docs/install.md, with this word, for the tarball; its path is that of the test's copy."""
    text = (ROOT / "docs/install.md").read_text().split(f"\n## {section}\n", 1)[1]
    (block,) = [block for block in re.findall(r"(?ms)^```sh\n(.*?)^```", text.split("\n## ")[0]) if word in block]
    return re.sub(r"\S*memledger-\*-linux\.tar\.gz", "/var/tmp/memledger.tar.gz", block.replace("sudo ", ""))


def test_tarball_runs_as_a_service_is_upgraded_and_removed(machine, packages, next_deb, containers):
    before = machine.files()
    # Debian's /usr/local once belonged to the group staff: modes and owners of the host's folders stay
    (local,) = machine.root.glob("usr/local/bin")
    local.chmod(0o2775)
    os.chown(local, 0, 50)
    (archive,) = packages.glob("*.tar.gz")
    archive_in(machine, archive)
    machine.run("sh", "-ec", documented("Tarball, for every other distribution with systemd", "enable"))
    assert (stat.S_IMODE(local.stat().st_mode), local.stat().st_gid) == (0o2775, 50)
    check_service(machine, containers)
    assert machine.run("readlink", f"/proc/{main_pid(machine)}/exe").strip() == "/usr/local/bin/memledger"
    first, killed = main_pid(machine), containers[-1]

    (archive,) = next_deb.parent.glob("*.tar.gz")
    archive_in(machine, archive)
    machine.run("sh", "-ec", documented("Tarball, for every other distribution with systemd", "enable"))
    assert main_pid(machine) == first
    machine.run("sh", "-ec", documented("Upgrade and removal", "restart"))
    machine.wait_until_ready()
    assert main_pid(machine) not in ("0", first)
    machine.why(killed)

    machine.run("sh", "-ec", documented("Upgrade and removal", "disable"))
    assert machine.status("is-active", "memledger") != "active"
    left = [path for path in machine.files() - before if os.path.lexists(f"{machine.root}{path}") and not (machine.root / path[1:]).is_dir()]
    assert all(path.startswith(("/var/lib/memledger/", "/var/tmp/")) for path in left), left
    local.chmod(0o755)
    os.chown(local, 0, 0)
