"""memledger without a GPU host: `make demo`, or `python3 deploy/demo --help`.

Simulates failures of a GPU host, in rounds of a few minutes: real containers grow, leak, and are killed by the kernel, as trainings
are (they do not train, they only allocate memory), and the shipped memledger monitors them, without any special mode. Only the GPU
driver's library is a fake (gpus.py). Where Prometheus is installed, the shipped alerts fire too, in time-lapse (timelapse.py).

It removes everything that it started, however it ends; what a killed demo left behind, the next demo removes while its folder
exists.
"""
import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import scenes
import stage
from hosts import REPOSITORY, GpuHost, PaperHost, PlainHost
from monitoring import Monitoring, Watch
from processes import INTERRUPTS, Folder, Trouble, one_at_a_time, others, remove
from timelapse import Unknown

TICK = 0.5
PATIENCE = 400  # seconds for which an act waits for its alerts on a slow machine
STAYS = 3  # seconds for which an act continues after all its alerts fired


class Play:
    """The running demo: hosts, trainings and monitoring."""

    def __init__(self, given, folder, reporter, alone):
        self.given, self.folder, self.reporter = given, folder, reporter
        self.running, self.acts, self.thawing = {}, [], None
        self.began = time.monotonic()
        names = [training.name for training in scenes.TRAININGS]
        engine = not given.no_docker and stage.engine_answers()
        self.stage = (stage.Docker if engine else stage.Cgroups)(folder, given.hog, names, alone)
        self.stage.trainings = scenes.TRAININGS
        self.gpu_host = GpuHost(given.memledger, folder, self.stage, given.nvml)
        self.plain = PlainHost(given.memledger, folder, self.stage, scenes.SERVICE)
        self.paper = PaperHost(given.memledger, folder)
        self.gpus = self.gpu_host.gpus
        self.hosts = {host.name: host for host in (self.gpu_host, self.plain, self.paper)}
        self.monitoring = Monitoring(folder, self.hosts, given.factor)
        self.watch = None

    def open(self):
        """Starts the hosts and the monitoring."""
        for host in self.hosts.values():
            host.start()
        self.monitoring.start()
        self.began = time.monotonic()
        if self.monitoring.url:
            self.watch = Watch(self.monitoring, self.reporter.alert)

    def now(self):
        return time.monotonic() - self.began

    def close(self):
        """Stops and removes everything that was started."""
        steps = [self.thaw, self.watch and self.watch.stop, self.monitoring.stop]
        steps += [host.stop for host in self.hosts.values()]
        for step in [*steps, self.stage.clear, lambda: stage.clear_cgroups(self.stage.mark)]:
            if step:
                with contextlib.suppress(Trouble, OSError):
                    step()

    # actions of the acts

    def start(self, training):
        self.stage.remove(training)
        self.stage.start(training)
        pid = self.stage.pid(training)
        if training.gpu is not None and pid:
            self.gpus.holders.setdefault(training.gpu, []).append(pid)

    def stop(self, training):
        self.stage.stop(training)

    def kill_host_job(self):
        cgroup = stage.Cgroup(self.stage.mark, "backup-job", 24)
        child = cgroup.spawn([self.given.hog, "name=backup", "eat"], {})
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
        cgroup.remove()

    def freeze(self):
        self.thawing = self.plain.freeze()

    def thaw(self):
        if self.thawing:
            thaw, self.thawing = self.thawing, None
            thaw()

    # the rounds

    def tick(self):
        now = self.now()
        for gpu, pids in self.gpus.holders.items():
            self.gpus.holders[gpu] = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        self.gpus.write(now)
        self.paper.write(now)

    def expected(self, act):
        """Returns the expected alerts of an act, each as a subset of its labels."""
        return [
            {"alertname": alert.name, "severity": alert.severity, **alert.labels,
             **({"container_name": self.stage.name(alert.of)} if alert.of else {})}
            for alert in act.alerts
        ]  # fmt: skip

    def text(self, act):
        """Returns the description of the act, with the names that memledger shows."""
        text = act.text
        for name, training in {training.name: training for training in scenes.TRAININGS}.items():
            known = self.stage.name(training)
            text = text.replace(name, known if self.stage.has_names else f"{name} ({known})")
        return text

    def round(self, until):
        """Plays one round. Returns False if the time ended before the round."""
        start = self.now()
        coming = [act for act in self.acts if self.stage.has_names or not act.needs_names]
        on = []
        while (coming or on) and self.now() < until:
            now = self.now() - start
            self.tick()
            for act in [act for act in coming if act.at <= now]:
                if any(each.is_in_the_way_of(act) for each in on):
                    continue
                coming.remove(act)
                act.begin(self)
                on.append(OnStage(act, self.now() - start, self.expected(act)))
                self.reporter.act(self.text(act))
                if coming and coming[0].at - now > 4:
                    self.reporter.act(f"  ... in {coming[0].at - now:.0f} s: {self.text(coming[0])}")
            for each in [each for each in on if each.is_over(now, self.watch)]:
                each.act.end(self)
                on.remove(each)
            if not self.reporter.all_on and (not coming or coming[0].at > scenes.ALL_ON):
                self.reporter.status("all-on")
            time.sleep(TICK)
        return self.now() < until

    def advice(self):
        """Returns what `memledger advise` prints for the group of runs of which one was killed."""
        command = [self.given.memledger, "advise", "ocr", f"--state.path={self.folder / 'gpu-host/state'}"]
        output = subprocess.run(command, capture_output=True, text=True, check=False)
        return output.stdout or output.stderr

    def curtain(self):
        for training in scenes.TRAININGS:
            self.stage.remove(training)


class OnStage:
    """An act that is running."""

    def __init__(self, act, began, missing):
        self.act, self.began, self.missing, self.shown = act, began, missing, None

    def is_in_the_way_of(self, act):
        return (act.is_last and bool(self.act.alerts)) or (act.queue != "" and act.queue == self.act.queue)

    def is_over(self, now, watch):
        """Whether all of its alerts have fired; without alerts or Prometheus, whether it has reached its maximum duration."""
        if watch and self.act.alerts and self.shown is None:
            self.missing = [labels for labels in self.missing if not watch.fires(labels)]
            self.shown = None if self.missing else now
        lasted = now - self.began
        has_shown = self.shown is not None and now >= self.shown + STAYS
        most = max(self.act.most, PATIENCE) if watch and self.act.alerts else self.act.most
        return lasted >= most or (has_shown and lasted >= self.act.least)


class Reporter:
    """Prints progress for people, and writes the status file for programs."""

    def __init__(self, file):
        self.file, self.facts, self.all_on = file, {}, False
        self.began, self.lock = time.monotonic(), threading.Lock()

    def write(self, text=""):
        with self.lock:
            print(text, flush=True)

    def line(self, what, text):
        seconds = int(time.monotonic() - self.began)
        self.write(f"  {seconds // 60:3}:{seconds % 60:02}  {what:9} {text}")

    def act(self, text):
        self.line("", text)

    def alert(self, what, labels):
        labels = dict(labels)
        names = ("container_name", "gpu", "xid", "kind", "source", "collector", "runtime", "instance")
        of = " ".join(labels[name] if name != "gpu" else f"GPU {labels[name]}" for name in names if name in labels)
        self.line(what, f"{labels['alertname']} ({labels['severity']}) {of}")

    def status(self, state, **facts):
        """Writes the status file for programs that wait for the demo."""
        self.all_on = self.all_on or state == "all-on"
        self.facts.update(facts, state=state)
        if self.file:
            new = self.file.with_name(self.file.name + ".new")
            new.write_text(json.dumps(self.facts, indent=1) + "\n")
            os.replace(new, self.file)


def print_introduction(play, reporter):
    """Prints what is running, the addresses, and the timetable."""
    monitoring = play.monitoring
    reporter.write("\nmemledger without a GPU host. Real: the program, the containers, the OOM kills. Simulated: the GPUs.\n")
    reporter.write(f"  trainings      {play.stage.kind}")
    for name, host in play.hosts.items():
        reporter.write(f"  {name:14} {host.url}/metrics")
    if monitoring.url:
        reporter.write(f"  Prometheus     {monitoring.url}/alerts   (the shipped rules, {play.given.factor} times faster)")
        alerts = monitoring.alertmanager_url or "not started: not installed, so alerts are not routed"
        reporter.write(f"  Alertmanager   {alerts}")
        reporter.write("  Grafana        not started; docs/dashboards.md shows how to add one")
    else:
        reporter.write("  Prometheus     not started: not installed (apt install prometheus), so no alert will fire")
    if not play.stage.has_names:
        reporter.write("\nWithout a container runtime there are no names: containers are shown by the short ids of their cgroups.")
    reporter.write("\nTry in another terminal:\n")
    reporter.write(f"  curl -s {play.gpu_host.url}/metrics | grep {play.stage.name(scenes.PIPER)}")
    state = f"--state.path={play.folder / 'gpu-host/state'}"
    name = play.stage.name(scenes.PIPER)
    advised = "ocr" if play.stage.has_names else name
    for verb in ("why --last", "runs", f"compare {name}", f"advise {advised}"):
        reporter.write(f"  {play.given.memledger} {verb} {state}")
    reporter.write("\nTimetable of a round (minutes:seconds):\n")
    for act in play.acts:
        note = "" if play.stage.has_names or not act.needs_names else "   - skipped: needs a Docker engine"
        reporter.write(f"  {int(act.at) // 60:3}:{int(act.at) % 60:02}  {play.text(act)}{note}")
    reporter.write("\nPress Ctrl-C to stop and clean up.\n")


def perform(play, reporter, given):
    play.acts = scenes.acts(play.paper.container)
    innocent = {training.name for training in scenes.TRAININGS} - {
        alert.of.name for act in play.acts for alert in act.alerts if alert.of
    }
    reporter.status(
        "playing", prometheus=play.monitoring.url, alertmanager=play.monitoring.alertmanager_url,
        memledger={name: host.url for name, host in play.hosts.items()}, since=time.time(), factor=given.factor,
        mark=play.stage.mark, state_path=str(play.folder / "gpu-host/state"),
        expected=[labels for act in play.acts for labels in play.expected(act)
                  if play.stage.has_names or not act.needs_names],
        innocent=sorted(play.stage.name(t) for t in scenes.TRAININGS if t.name in innocent),
        containers=sorted({play.stage.name(training) for training in scenes.TRAININGS}),
        always=sorted(scenes.ALWAYS), not_played=scenes.NOT_PLAYED,
    )  # fmt: skip
    print_introduction(play, reporter)
    reporter.began = time.monotonic()
    until = float("inf") if given.minutes is None else given.minutes * 60
    rounds = 0
    while play.round(until):
        rounds += 1
        reporter.line("", "end of the round")
        if play.stage.has_names:
            reporter.write(f"\n$ memledger advise ocr\n{play.advice()}")
        is_last = rounds == given.rounds
        reporter.status("round-over" if is_last else "all-on", rounds=rounds)
        if is_last:
            break
        play.curtain()
    while play.now() < until:  # the rounds are over: keep the state until the time ends
        play.tick()
        time.sleep(TICK)


def clean_up_after_others(reporter):
    """Removes what killed demos left behind. Returns whether no other demo is running."""
    found = list(others())
    for path in [path for path, lives in found if not lives]:
        reporter.write(f"removing what a killed demo left behind: {path}")
        if stage.engine_answers():
            stage.clear_engine(path.name)
        stage.clear_cgroups(path.name)
        remove(path)
    return not any(lives for _, lives in found)


def arguments():
    words = argparse.ArgumentParser(prog="make demo", description=__doc__.split("\n\n")[1])
    words.add_argument("--minutes", type=float, help="end after this many minutes (default: at Ctrl-C)")
    words.add_argument("--rounds", type=int, help="play this many rounds, then keep the state")
    words.add_argument("--factor", type=int, default=60, help="speed-up of the rules (default: 60, which the timing of the demo assumes)")
    words.add_argument("--status", type=Path, help="write addresses and progress to this file, as JSON, for programs")
    words.add_argument("--no-docker", action="store_true", help="use processes in cgroups, even if a Docker engine is running")
    words.add_argument("--target", type=Path, default=REPOSITORY / "target", help="cargo's target folder")
    built = {"memledger": "release/memledger", "nvml": "release/libfake_nvml.so", "hog": "demo/release/hog"}
    for name, path in built.items():
        words.add_argument(f"--{name}", type=Path, help=f"use this file instead of {path} in the target folder")
    given = words.parse_args()
    for name, path in built.items():
        path = (getattr(given, name) or given.target / path).resolve()
        setattr(given, name, path)
        if not path.is_file():
            words.error(f"{path} is missing; `make demo` builds it")
    if given.factor < 1:
        words.error("--factor must be a whole number of at least 1")
    return given


def main():
    given = arguments()
    if os.geteuid():
        sys.exit("The demo creates cgroups and a mount, and reads the kernel log: it must run as root (sudo make demo).")

    INTERRUPTS.watch()
    reporter = Reporter(given.status)
    status, play, folder = 0, None, None
    try:
        with one_at_a_time():
            alone = clean_up_after_others(reporter)
            folder = Folder()
            reporter.status("starting")
            play = Play(given, folder, reporter, alone)
            play.open()
        perform(play, reporter, given)
    except KeyboardInterrupt:
        reporter.write("\nstopping; cleaning up takes some seconds")
    except (Trouble, Unknown) as trouble:
        reporter.write(f"\nthe demo failed: {trouble}")
        status = 1
    finally:
        INTERRUPTS.ignore()
        if play:
            play.close()
        elif folder:
            with contextlib.suppress(Trouble, OSError):
                stage.clear_engine(folder.mark)
        if folder:
            folder.remove()
        reporter.status("ended")
    sys.exit(status)


if __name__ == "__main__":
    main()
