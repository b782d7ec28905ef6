#!/usr/bin/env python3
"""Compares this commit with another one: time and memory of builds, size of files, resident memory and CPU time of the program.

usage: against.py REV [--builds N] [--rounds N] [--only WHAT]...

Both are built and run on this machine in one call, so that the ratios can be compared; the absolute figures are those of the machine.
Builds: on an empty target folder, all crates downloaded; `make run` N times for each commit, in turn, `make dist` once. Programs: in each
of N rounds all four (release and dist of both) serve beside each other, started in another order each time, on a host without containers of
ours, then beside 50 idle ones, scraped every 5 s with gzip. Writes its part of docs/performance.md. Needs root, git, and a Docker engine with
the tests' image.

WHAT: builds, resident; both without it. What is left out is taken from the last call for the same two commits.
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


def proportional(pid):
    """The proportional set size of a process: pages that several share count once in a sum."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def build(source, target, profile):
    """Builds the program; returns seconds, CPU seconds, the most memory of the compilers at one time, and its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RUSTC", "CARGO_PROFILE"))}
    for name in ("RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"):
        environment.pop(name, None)
    environment |= {"CARGO_TARGET_DIR": str(target), "CARGO_INCREMENTAL": "0"}
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
        peak = max(peak, sum(map(proportional, descendants(process.pid))))
        time.sleep(1)
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
        """The CPU time of its threads in milliseconds."""
        total = 0
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            total += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        return total / 1e6

    def scrape(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            raise OSError(f"/metrics: {answer.status} {body[:200]}")
        return (gzip.decompress(body) if answer.getheader("Content-Encoding") == "gzip" else body).decode()

    def wait(self):
        deadline, last = time.monotonic() + 60, None
        while time.monotonic() < deadline:
            try:
                return self.scrape()
            except OSError as error:  # it does not listen yet, or answers 503 until the first cycle has ended
                last = error
                if self.process.poll() is not None:
                    sys.exit(f"memledger ended: {pathlib.Path(self.log.name).read_text(errors='replace')[-2000:]}")
                time.sleep(0.2)
        sys.exit(f"memledger did not answer in 60 s: {last}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def measure_round(programs, order, folder, containers):
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
        for name, program in running.items():
            shown = program.scrape().count("\nmemledger_container_memory_usage_bytes{")
            if shown < containers:
                sys.exit(f"{name} shows {shown} containers of {containers}")
        began, before = time.monotonic(), {name: program.cpu() for name, program in running.items()}
        scrape_for(MEASURED)
        lasted = time.monotonic() - began
        return {
            name: (resident(program.process.pid), (program.cpu() - before[name]) / lasted)
            for name, program in running.items()
        }
    finally:
        for program in running.values():
            program.stop()


def measure_rounds(programs, count, folder, containers):
    found = {name: [] for name in programs}
    names = list(programs)
    for number in range(count):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name, figures in measure_round(programs, order, folder, containers).items():
            found[name].append(figures)
    return {name: [statistics.median(column) for column in zip(*rows)] for name, rows in found.items()}


def measure_programs(programs, count):
    """Measures on a host without containers of ours, and beside idle ones."""
    image = os.environ["MEMLEDGER_TEST_IMAGE"]
    containers = []
    with tempfile.TemporaryDirectory(prefix="memledger-against-") as folder:
        try:
            empty = measure_rounds(programs, count, folder, 0)
            for _ in range(CONTAINERS):
                containers.append(output("docker", "run", "-d", image, "/busybox/sleep", "100000"))
            return {"empty": empty, "containers": measure_rounds(programs, count, folder, CONTAINERS)}
        finally:
            if containers:
                run("docker", "rm", "-f", *containers, stdout=subprocess.DEVNULL)


def measure_builds(rev, programs, count):
    """Builds both commits; copies the programs to where `programs` says."""
    figures = {}
    with tempfile.TemporaryDirectory(prefix="memledger-against-") as folder:
        # cargo reads the settings of all folders above: of this tree's, none may be
        source = pathlib.Path(folder) / "source"
        run("git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(source), rev)
        try:
            sources = {"before": source, "after": ROOT}
            for source in sources.values():
                run("cargo", "fetch", "--locked", cwd=source)
            for profile, times in (("release", count), ("dist", 1)):
                for number in range(times):
                    for which, source in sources.items():
                        target = pathlib.Path(folder) / "target"
                        measured = build(source, target, profile)
                        shutil.copy2(measured.pop("program"), programs[f"{profile} {which}"])
                        figures.setdefault(f"{profile} {which}", []).append(measured)
                        print(f"{profile} {which} {number + 1}: {measured['seconds']:.0f} s", file=sys.stderr, flush=True)
                        shutil.rmtree(target)
        finally:
            run("git", "-C", str(ROOT), "worktree", "remove", "--force", str(sources["before"]))
    return figures


def row(label, before, after, unit, digits=1):
    ratio = f"{after / before:.2f}" if before else ""
    return f"| {label} | {before:.{digits}f} {unit} | {after:.{digits}f} {unit} | {ratio} |\n"


def table(rev, here, figures, programs):
    text = f"{HEADING}\n\nBefore: {rev}, after: {here}. Made by `make bench-against REV={rev}`: figures of one machine, of which only the "
    text += "ratios are to be compared. Builds: the mean. Memory of the compilers: the most at one time, as the sum of their proportional set sizes, read once a second. "
    text += f"Programs: medians; each served for {WARM_UP + MEASURED} s and was scraped every {SCRAPE_INTERVAL} s.\n\n"
    text += "| what | before | after | ratio |\n| --- | ---: | ---: | ---: |\n"
    builds = figures.get("builds")
    if builds:
        for label, profile, what, scale, unit in (
            ("`make run` from nothing", "release", "seconds", 1, "s"),
            ("the same, CPU time", "release", "cpu", 1, "s"),
            ("the same, memory of the compilers", "release", "peak", MIB, "MiB"),
            ("`make dist` from nothing", "dist", "seconds", 1, "s"),
            ("the same, memory of the compilers", "dist", "peak", MIB, "MiB"),
        ):
            means = (statistics.mean(it[what] for it in builds[f"{profile} {which}"]) / scale for which in ("before", "after"))
            text += row(label, *means, unit, 0)
    for profile, name in (("release", "the file of `make run`"), ("dist", "the file that is shipped")):
        sizes = (programs[f"{profile} {which}"].stat().st_size / 1e6 for which in ("before", "after"))
        text += row(name, *sizes, "MB")
    for profile, name in (("release", "`make run`"), ("dist", "shipped")):
        for load, label in (("empty", "no containers of ours"), ("containers", f"{CONTAINERS} containers")):
            if measured := figures.get("programs", {}).get(load):
                before, after = (measured[f"{profile} {which}"] for which in ("before", "after"))
                text += row(f"resident, {name}, {label}", before[0] / MIB, after[0] / MIB, "MiB")
                text += row(f"CPU, {name}, {label}", before[1], after[1], "ms/s", 2)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev")
    parser.add_argument("--builds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=["builds", "resident"])
    options = parser.parse_args()
    only = options.only or ["builds", "resident"]
    rev = output("git", "-C", str(ROOT), "rev-parse", "--short=12", options.rev)
    here = output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if output("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!docs"):
        sys.exit("against: uncommitted changes: the figures would belong to no commit")
    work = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "against"
    work.mkdir(parents=True, exist_ok=True)
    revisions = {"before": rev, "after": here}
    programs = {
        f"{profile} {which}": work / f"memledger-{profile}-{revision}"
        for profile in ("release", "dist")
        for which, revision in revisions.items()
    }
    kept = work / f"{rev}-{here}.json"
    figures = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if "builds" in only or not all(path.exists() for path in programs.values()):
        figures["builds"] = measure_builds(rev, programs, options.builds)
        kept.write_text(json.dumps(figures), encoding="utf-8")
    if "resident" in only:
        figures["programs"] = measure_programs(programs, options.rounds)
        kept.write_text(json.dumps(figures), encoding="utf-8")
    text = table(rev, here, figures, programs)
    print(text)
    path = ROOT / "docs/performance.md"
    parts = path.read_text(encoding="utf-8").split("\n## ")
    parts = [part for part in parts if not part.startswith(HEADING.removeprefix("## "))]
    path.write_text("\n## ".join([part.rstrip("\n") + "\n" for part in [*parts, text.removeprefix("## ")]]), encoding="utf-8")


main()
