"""memledger without a GPU host: `make demo`, or `python3 deploy/demo --help`.

Plays what goes wrong on a GPU host, in rounds of some minutes: real containers grow, leak, and are killed by the kernel, as
trainings are (they train nothing: they eat memory), and the shipped memledger watches. Nothing in memledger knows of it; the one thing that is not real is the library that stands in for
the GPU driver (gpus.py). Where Prometheus is installed, the shipped alerts fire too, in time-lapse (timelapse.py).

What it started it clears away, however it ends; what a killed one left, the next one does while its folder is there.
"""
import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import scenes
import stage
from hosts import REPOSITORY, GpuHost, PaperHost, PlainHost
from monitoring import Monitoring, Watch
from processes import Folder, Trouble, one_at_a_time, others, remove
from timelapse import Unknown

TICK = 0.5
STAYS = 3  # seconds for which an act that has shown everything stays


class Play:
    """All that is on stage."""

    def __init__(self, given, folder, tell, alone):
        self.given, self.folder, self.tell = given, folder, tell
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
        """Starts what watches."""
        for host in self.hosts.values():
            host.start()
        self.monitoring.start()
        self.began = time.monotonic()
        if self.monitoring.url:
            self.watch = Watch(self.monitoring, self.tell.alert)

    def now(self):
        return time.monotonic() - self.began

    def close(self):
        """Ends all, whatever of it there is."""
        steps = [self.thaw, self.watch and self.watch.stop, self.monitoring.stop]
        steps += [host.stop for host in self.hosts.values()]
        for step in [*steps, self.stage.clear, lambda: stage.clear_cgroups(self.stage.mark)]:
            if step:
                with contextlib.suppress(Trouble, OSError):
                    step()

    # what acts do

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

    # the play

    def tick(self):
        now = self.now()
        for gpu, pids in self.gpus.holders.items():
            self.gpus.holders[gpu] = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        self.gpus.write(now)
        self.paper.write(now)

    def expected(self, act):
        """The alerts of an act, each as the labels that it will have among others."""
        return [
            {"alertname": alert.name, "severity": alert.severity, **alert.labels,
             **({"container_name": self.stage.name(alert.of)} if alert.of else {})}
            for alert in act.alerts
        ]  # fmt: skip

    def text(self, act):
        """What the act shows, with the names that memledger knows."""
        text = act.text
        for name, training in {training.name: training for training in scenes.TRAININGS}.items():
            known = self.stage.name(training)
            text = text.replace(name, known if self.stage.has_names else f"{name} ({known})")
        return text

    def round(self, until):
        """One round. False if the time was over before its end."""
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
                self.tell.act(self.text(act))
                if coming and coming[0].at - now > 4:
                    self.tell.act(f"  ... in {coming[0].at - now:.0f} s: {self.text(coming[0])}")
            for each in [each for each in on if each.is_over(now, self.watch)]:
                each.act.end(self)
                on.remove(each)
            if not self.tell.all_on and (not coming or coming[0].at > scenes.ALL_ON):
                self.tell.status("all-on")
            time.sleep(TICK)
        return self.now() < until

    def curtain(self):
        for training in scenes.TRAININGS:
            self.stage.remove(training)


class OnStage:
    """An act that goes on."""

    def __init__(self, act, began, missing):
        self.act, self.began, self.missing, self.shown = act, began, missing, None

    def is_in_the_way_of(self, act):
        return (act.is_last and bool(self.missing)) or (act.queue != "" and act.queue == self.act.queue)

    def is_over(self, now, watch):
        """It has lasted as long as it may, or all of its alerts have been seen to fire."""
        if watch and self.act.alerts and self.shown is None:
            self.missing = [labels for labels in self.missing if not watch.fires(labels)]
            self.shown = None if self.missing else now
        lasted = now - self.began
        has_shown = self.shown is not None and now >= self.shown + STAYS
        return lasted >= self.act.most or (has_shown and lasted >= self.act.least)


class Tell:
    """What people and programs are told."""

    def __init__(self, file):
        self.file, self.facts, self.all_on = file, {}, False
        self.began, self.lock = time.monotonic(), threading.Lock()

    def say(self, text=""):
        with self.lock:
            print(text, flush=True)

    def line(self, what, text):
        seconds = int(time.monotonic() - self.began)
        self.say(f"  {seconds // 60:3}:{seconds % 60:02}  {what:9} {text}")

    def act(self, text):
        self.line("", text)

    def alert(self, what, labels):
        labels = dict(labels)
        names = ("container_name", "gpu", "xid", "kind", "source", "collector", "runtime", "instance")
        of = " ".join(labels[name] if name != "gpu" else f"GPU {labels[name]}" for name in names if name in labels)
        self.line(what, f"{labels['alertname']} ({labels['severity']}) {of}")

    def status(self, state, **facts):
        """Writes the file for programs that wait for the demo."""
        self.all_on = self.all_on or state == "all-on"
        self.facts.update(facts, state=state)
        if self.file:
            new = self.file.with_name(self.file.name + ".new")
            new.write_text(json.dumps(self.facts, indent=1) + "\n")
            os.replace(new, self.file)


def introduce(play, tell):
    """Says what runs, where to look, and what will happen."""
    monitoring = play.monitoring
    tell.say("\nmemledger, without a GPU host. Real: the program, the containers, the kills. Made up: what the GPUs do.\n")
    tell.say(f"  trainings      {play.stage.kind}")
    for name, host in play.hosts.items():
        tell.say(f"  {name:14} {host.url}/metrics")
    if monitoring.url:
        tell.say(f"  Prometheus     {monitoring.url}/alerts   (the shipped rules, {play.given.factor} times as fast)")
        alerts = monitoring.alertmanager_url or "not started: none is installed, so alerts go nowhere"
        tell.say(f"  Alertmanager   {alerts}")
        tell.say("  Grafana        not started; docs/dashboards.md says how to look at all of this with one")
    else:
        tell.say("  Prometheus     not started: none is installed (apt install prometheus), so no alert will fire")
    if not play.stage.has_names:
        tell.say("\nWithout a runtime nobody knows names: containers are called by the short ids of their cgroups.")
    tell.say("\nAsk it, in another terminal:\n")
    tell.say(f"  curl -s {play.gpu_host.url}/metrics | grep {play.stage.name(scenes.PIPER)}")
    tell.say(f"  {play.given.memledger} why --last --state.path={play.folder / 'gpu-host/state'}")
    tell.say("\nWhat will happen (minutes:seconds of a round):\n")
    for act in play.acts:
        note = "" if play.stage.has_names or not act.needs_names else "   - left out: it needs a Docker engine"
        tell.say(f"  {int(act.at) // 60:3}:{int(act.at) % 60:02}  {play.text(act)}{note}")
    tell.say("\nCtrl-C ends it and clears everything away.\n")


def perform(play, tell, given):
    play.acts = scenes.acts(play.paper.container)
    innocent = {training.name for training in scenes.TRAININGS} - {
        alert.of.name for act in play.acts for alert in act.alerts if alert.of
    }
    tell.status(
        "playing", prometheus=play.monitoring.url, alertmanager=play.monitoring.alertmanager_url,
        memledger={name: host.url for name, host in play.hosts.items()}, since=time.time(), factor=given.factor,
        mark=play.stage.mark, state_path=str(play.folder / "gpu-host/state"),
        expected=[labels for act in play.acts for labels in play.expected(act)
                  if play.stage.has_names or not act.needs_names],
        innocent=sorted(play.stage.name(t) for t in scenes.TRAININGS if t.name in innocent),
        containers=sorted({play.stage.name(training) for training in scenes.TRAININGS}),
        always=sorted(scenes.ALWAYS), not_played=scenes.NOT_PLAYED,
    )  # fmt: skip
    introduce(play, tell)
    tell.began = time.monotonic()
    until = float("inf") if given.minutes is None else given.minutes * 60
    rounds = 0
    while play.round(until):
        rounds += 1
        tell.line("", "the end of a round")
        is_last = rounds == given.rounds
        tell.status("round-over" if is_last else "all-on", rounds=rounds)
        if is_last:
            break
        play.curtain()
    while play.now() < until:  # the rounds are over, and somebody still looks
        play.tick()
        time.sleep(TICK)


def clear_up_after_others(tell):
    """Removes what demos left that were killed. Whether no other one lives."""
    found = list(others())
    for path in [path for path, lives in found if not lives]:
        tell.say(f"clearing away what a demo that was killed has left: {path}")
        if stage.engine_answers():
            stage.clear_engine(path.name)
        stage.clear_cgroups(path.name)
        remove(path)
    return not any(lives for _, lives in found)


def arguments():
    words = argparse.ArgumentParser(prog="make demo", description=__doc__.split("\n\n")[1])
    words.add_argument("--minutes", type=float, help="end after so many minutes; without it, go on until Ctrl-C")
    words.add_argument("--rounds", type=int, help="play so many rounds, and then stand still")
    words.add_argument("--factor", type=int, default=60, help="how many times as fast the rules are (default: 60, for which it is timed)")
    words.add_argument("--status", type=Path, help="write addresses and progress into this file, as JSON, for programs")
    words.add_argument("--no-docker", action="store_true", help="processes in cgroups, also where an engine answers")
    words.add_argument("--target", type=Path, default=REPOSITORY / "target", help="cargo's target folder")
    built = {"memledger": "release/memledger", "nvml": "release/libfake_nvml.so", "hog": "demo/release/hog"}
    for name, path in built.items():
        words.add_argument(f"--{name}", type=Path, help=f"a file instead of {path} in the target folder")
    given = words.parse_args()
    for name, path in built.items():
        path = (getattr(given, name) or given.target / path).resolve()
        setattr(given, name, path)
        if not path.is_file():
            words.error(f"{path} is not there; `make demo` builds it")
    if given.factor < 1:
        words.error("--factor is a whole number, and at least 1")
    return given


def main():
    given = arguments()
    if os.geteuid():
        sys.exit("The demo makes cgroups and a mount, and reads the kernel log: it must run as root (sudo make demo).")

    def asked_to_end(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, asked_to_end)
    signal.signal(signal.SIGHUP, asked_to_end)
    tell = Tell(given.status)
    status, play, folder = 0, None, None
    try:
        with one_at_a_time():
            alone = clear_up_after_others(tell)
            folder = Folder()
            tell.status("starting")
            play = Play(given, folder, tell, alone)
            play.open()
        perform(play, tell, given)
    except KeyboardInterrupt:
        tell.say("\nending; clearing up takes some seconds")
    except (Trouble, Unknown) as trouble:
        tell.say(f"\nthe demo cannot go on: {trouble}")
        status = 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if play:
            play.close()
        elif folder:
            with contextlib.suppress(Trouble, OSError):
                stage.clear_engine(folder.mark)
        if folder:
            folder.remove()
        tell.status("ended")
    sys.exit(status)


if __name__ == "__main__":
    main()
