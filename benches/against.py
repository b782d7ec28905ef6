#!/usr/bin/env python3
"""Compares this tree with another commit: time and memory of builds, size of files, resident memory and CPU time of the program.

usage: against.py REV [--builds N] [--turns N] [--only WHAT]...

Both are built and run on this machine in one call, so that the ratios can be compared and the absolute figures need not be.
Builds: on an empty target folder, all crates downloaded; N times each, in turn. Programs: N turns; in each all four (release and dist of
both) serve beside each other, started in another order each time, on a host without containers of theirs and then beside 50 idle ones,
scraped every 5 s with gzip. Writes its part of docs/performance.md. Needs root, git, and a Docker engine with the tests' image.

WHAT: builds, resident; both without it. Where builds are left out, the programs and figures of the last call are used.
"""

import argparse
import gzip
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADING = "## Against another commit"
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
CONTAINERS = 50
WARM_UP, MEASURED, SCRAPE_INTERVAL = 20, 40, 5
MIB = 1 << 20


def run(*command, **options):
    return subprocess.run(command, check=True, **options)


def output(*command, **options):
    return run(*command, stdout=subprocess.PIPE, text=True, **options).stdout.strip()


def descendants(pid):
    """The pids of a process and of all below it."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                    parents.setdefault(int(file.read().rsplit(")", 1)[1].split()[1]), []).append(int(entry))
            except (OSError, IndexError):
                pass
    found = [pid]
    for parent in found:
        found.extend(parents.get(parent, []))
    return found


def resident(pid):
    try:
        with open(f"/proc/{pid}/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def build(source, target, profile):
    """Builds the program; returns seconds, CPU seconds, the most memory of the compilers at one time, and its path."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "CARGO_INCREMENTAL": "0"}
    environment["MEMLEDGER_REVISION"] = output("git", "-C", str(source), "rev-parse", "--short=12", "HEAD")
    out = target / "packages"
    if profile == "release":
        command = ["cargo", "build", "--release", "--locked"]
    else:
        command = ["deploy/supply/dist.sh", str(out)]
    before = os.times()
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=source, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(resident, descendants(process.pid))))
        time.sleep(0.5)
    reader.join()
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed in {source}:\n{errors[0].decode(errors='replace')[-4000:]}")
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    program = target / "release/memledger" if profile == "release" else out / "memledger"
    return {"seconds": seconds, "cpu": cpu, "peak": peak, "program": program}


class Program:
    """A memledger that serves."""

    def __init__(self, path, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        state = pathlib.Path(tempfile.mkdtemp(dir=folder))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMLEDGER_")}
        flags = [f"--web.listen-address=127.0.0.1:{self.port}", f"--state.path={state}", "--sample.interval=1s"]
        self.log = open(state / "log", "wb")
        self.process = subprocess.Popen(
            [path, "serve", *flags], env=environment, stdout=self.log, stderr=self.log, cwd=state
        )

    def cpu(self):
        with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def scrape(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return gzip.decompress(text).decode() if answer.getheader("Content-Encoding") == "gzip" else text.decode()

    def wait(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                return self.scrape()
            except OSError:
                if self.process.poll() is not None:
                    sys.exit(f"memledger ended: {pathlib.Path(self.log.name).read_text(errors='replace')[-2000:]}")
                time.sleep(0.2)
        sys.exit("memledger did not answer in 60 s")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self.log.close()


def turn(programs, order, folder):
    """Runs all programs beside each other; returns resident bytes and CPU milliseconds per second of each."""
    running = {}
    try:
        for name in order:
            running[name] = Program(programs[name], folder)
        for program in running.values():
            program.wait()

        def scrape_for(seconds):
            for _ in range(seconds // SCRAPE_INTERVAL):
                for program in running.values():
                    program.scrape()
                time.sleep(SCRAPE_INTERVAL)

        scrape_for(WARM_UP)
        began, before = time.monotonic(), {name: program.cpu() for name, program in running.items()}
        scrape_for(MEASURED)
        lasted = time.monotonic() - began
        return {
            name: (resident(program.process.pid), (program.cpu() - before[name]) * 1000 / lasted)
            for name, program in running.items()
        }
    finally:
        for program in running.values():
            program.end()


def turns(programs, count, folder):
    found = {name: [] for name in programs}
    for number in range(count):
        names = list(programs)
        order = names[number % len(names) :] + names[: number % len(names)]
        for name, figures in turn(programs, order, folder).items():
            found[name].append(figures)
    return {name: [statistics.median(column) for column in zip(*rows)] for name, rows in found.items()}


def spread(programs, count, folder):
    """Measures on an empty host and beside idle containers."""
    docker = os.environ.get("MEMLEDGER_TEST_DOCKER", "docker")
    image = os.environ["MEMLEDGER_TEST_IMAGE"]
    empty = turns(programs, count, folder)
    containers = []
    try:
        for _ in range(CONTAINERS):
            containers.append(output(docker, "run", "-d", "--label=memledger.bench", image, "/busybox/sleep", "100000"))
        return empty, turns(programs, count, folder)
    finally:
        if containers:
            run(docker, "rm", "-f", *containers, stdout=subprocess.DEVNULL)


def row(label, before, after, goal, unit, digits=1):
    ratio = after / before if before else 0
    wanted = "" if goal is None else f"{goal}, {'met' if ratio <= goal else '**missed**'}"
    return f"| {label} | {before:.{digits}f} {unit} | {after:.{digits}f} {unit} | {ratio:.2f} | {wanted} |\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev")
    parser.add_argument("--builds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", action="append", choices=["builds", "resident"])
    options = parser.parse_args()
    only = options.only or ["builds", "resident"]
    rev = output("git", "-C", str(ROOT), "rev-parse", "--short=12", options.rev)
    work = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "against"
    sources = {"before": work / f"source-{rev}", "after": ROOT}
    if not sources["before"].exists():
        work.mkdir(parents=True, exist_ok=True)
        run("git", "-C", str(ROOT), "worktree", "add", "--detach", str(sources["before"]), rev)
    figures, programs, kept_figures = {}, {}, work / f"builds-{rev}.json"
    for profile in ("release", "dist"):
        for which, source in sources.items():
            kept = work / f"memledger-{profile}-{rev if which == 'before' else 'here'}"
            programs[f"{profile} {which}"] = kept
    if "builds" in only or not all(path.exists() for path in programs.values()):
        for source in sources.values():
            run("cargo", "fetch", "--locked", cwd=source)
        for profile, count in (("release", options.builds), ("dist", 1)):
            for number in range(count):
                for which, source in sources.items():
                    target = work / "target"
                    shutil.rmtree(target, ignore_errors=True)
                    measured = build(source, target, profile)
                    figures.setdefault(f"{profile} {which}", []).append(measured)
                    print(f"{profile} {which} {number + 1}: {measured['seconds']:.0f} s", file=sys.stderr, flush=True)
                    shutil.copy2(measured.pop("program"), programs[f"{profile} {which}"])
                    shutil.rmtree(target, ignore_errors=True)
        kept_figures.write_text(json.dumps(figures), encoding="utf-8")
    elif kept_figures.exists():
        figures = json.loads(kept_figures.read_text(encoding="utf-8"))
    text = f"{HEADING}\n\nBefore: {rev}. Made by `make bench-against REV={rev}`: "
    text += "the figures are of one machine in one call, and only the ratios are to be compared.\n\n"
    text += "| what | before | after | ratio | goal |\n| --- | ---: | ---: | ---: | --- |\n"
    if figures:
        mean = lambda profile, which, what: statistics.mean(it[what] for it in figures[f"{profile} {which}"])
        for label, profile, what, scale, unit, goal in (
            ("`make run` on an empty cache", "release", "seconds", 1, "s", 0.5),
            ("the same, CPU time", "release", "cpu", 1, "s", None),
            ("the same, the most memory of all compilers", "release", "peak", MIB, "MiB", None),
            ("`make dist` on an empty cache", "dist", "seconds", 1, "s", None),
            ("the same, the most memory of all compilers", "dist", "peak", MIB, "MiB", None),
        ):
            before, after = (mean(profile, which, what) / scale for which in ("before", "after"))
            text += row(label, before, after, goal, unit, 0)
    for profile in ("release", "dist"):
        before, after = (programs[f"{profile} {which}"].stat().st_size / 1e6 for which in ("before", "after"))
        text += row(f"the {profile} file", before, after, None, "MB")
    if "resident" in only:
        with tempfile.TemporaryDirectory(prefix="memledger-against-") as folder:
            empty, full = spread(programs, options.turns, folder)
        for profile in ("release", "dist"):
            for label, found, goal in (
                (f"resident on a host without containers of ours, {profile}", empty, 0.5),
                (f"resident with {CONTAINERS} more, {profile}", full, 0.65 if profile == "release" else 0.55),
            ):
                before, after = (found[f"{profile} {which}"][0] / MIB for which in ("before", "after"))
                text += row(label, before, after, goal, "MiB")
            for label, found in (("without them", empty), (f"with {CONTAINERS}", full)):
                before, after = (found[f"{profile} {which}"][1] for which in ("before", "after"))
                text += row(f"CPU {label}, {profile}", before, after, 1.05, "ms/s", 2)
    print(text)
    path = ROOT / "docs/performance.md"
    parts = path.read_text(encoding="utf-8").split("\n## ")
    parts = [part for part in parts if not part.startswith(HEADING.removeprefix("## "))]
    path.write_text("\n## ".join([part.rstrip("\n") + "\n" for part in [*parts, text.removeprefix("## ")]]), encoding="utf-8")


main()
