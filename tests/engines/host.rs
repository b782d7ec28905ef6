//! A memledger beside an engine, and what holds at the end of each test of the tier.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde_json::Value;

use super::{EXITS, INFO, KILLS, UP};
use crate::support::docker::{Engine, of};
use crate::support::podman::Podman;
use crate::support::{Memledger, Metrics, eventually, run};

/// A memledger beside an engine, with its state. Each test ends with [`Host::finish`].
pub struct Host {
    /// The flags with which commands see the same as the service.
    flags: Vec<String>,
    /// Those of the service alone.
    serve: Vec<String>,
    pub memledger: Option<Memledger>,
    is_finished: bool,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Starts a memledger by this flag for its engine. It shows the containers of other tests too, without their names.
    pub fn start(engine: String, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::create_dir(path("run")).expect("a folder");
        let other = if engine.starts_with("--docker") { "--podman.socket=" } else { "--docker.socket=" };
        let mut flags =
            vec![engine, other.to_owned(), "--cri.endpoint=".to_owned(), "--run.spool=".to_owned()];
        flags.push(format!("--state.path={}", path("state")));
        flags.push(format!("--local.socket={}", path("run/control.sock")));
        let serve = more.iter().map(|&flag| flag.to_owned()).collect();
        let mut host = Self { flags, serve, memledger: None, is_finished: false, _folder: folder };
        host.serve();
        host
    }

    /// Starts the service.
    pub fn serve(&mut self) {
        let flags: Vec<&str> = self.flags.iter().chain(&self.serve).map(String::as_str).collect();
        self.memledger = Some(Memledger::start(&flags));
    }

    pub fn memledger(&self) -> &Memledger {
        self.memledger.as_ref().expect("it runs")
    }

    /// Returns the standard output of a command.
    pub fn output(&self, arguments: &[&str]) -> String {
        let flags = self.flags.iter().map(String::as_str);
        let all: Vec<&str> = arguments.iter().copied().chain(flags).collect();
        let (_, out, error) = run(&all);
        assert!(!out.is_empty(), "{arguments:?}: {error}");
        // the lines are wrapped
        out.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    pub fn why(&self, name: &str) -> String {
        self.output(&["why", name])
    }

    /// Waits until `why` contains each of these texts, and returns it.
    pub fn explains(&self, name: &str, expected: &[&str]) -> String {
        eventually(&format!("why {name}: {expected:?}"), || {
            let text = self.why(name);
            if expected.iter().all(|part| text.contains(part)) { Ok(text) } else { Err(text) }
        })
    }

    /// Waits until memledger shows the container.
    pub fn knows(&self, name: &str) {
        self.memledger().eventually("its name", |metrics| {
            metrics
                .try_value(INFO, &of(name))
                .map_err(|error| format!("{error}; log: {}", self.memledger().log()))
        });
    }

    /// Waits until `ps` shows the container in this state.
    pub fn shows(&self, name: &str, state: &str) {
        eventually(&format!("{name} {state}"), || {
            let text = self.output(&["ps"]);
            if text.contains(&format!("{name} {state}")) { Ok(()) } else { Err(text) }
        });
    }

    /// Waits until memledger has noticed that Docker does not respond.
    pub fn loses_docker(&self) {
        self.memledger().eventually("the lost connection", |metrics| {
            match metrics.try_value(UP, &[("runtime", "docker")])? {
                0.0 => Ok(()),
                other => Err(format!("{other}")),
            }
        });
    }

    /// Waits until the container has so many OOM kills.
    pub fn killed(&self, name: &str, times: f64) {
        self.memledger().eventually(&format!("{times} kills of {name}"), |metrics| {
            let kills = metrics.sum(KILLS, &of(name));
            if kills == times { Ok(()) } else { Err(format!("{kills}")) }
        });
    }

    /// Waits until the container has ended so many times, each for this reason, and returns what ends it has.
    pub fn ended(&self, name: &str, times: f64, reason: &str) {
        self.memledger().eventually(&format!("{name}: {times} {reason}"), |metrics| {
            let ends = metrics.all(EXITS, &of(name));
            let ends: Vec<_> = ends.into_iter().filter(|(.., ends)| *ends > 0.0).collect();
            match &ends[..] {
                [(_, labels, found)] if labels["reason"] == reason && *found == times => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    /// Returns the events of a container, or all, oldest first.
    pub fn events(&self, name: Option<&str>) -> Vec<Value> {
        let flags = self.flags.iter().map(String::as_str);
        let of = name.iter().flat_map(|name| ["--container", name]);
        let all: Vec<&str> = ["events", "--json", "--limit=0"].into_iter().chain(of).chain(flags).collect();
        let (_, out, _) = run(&all);
        let events = out.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events
            .map(|mut event| {
                event.as_object_mut().expect("an object").remove("before"); // long, where a check prints it
                event
            })
            .collect()
    }

    /// Returns the exits of a container, or of all, oldest first.
    pub fn exits(&self, name: Option<&str>) -> Vec<Value> {
        self.events(name).into_iter().filter(|event| event["type"] == "exit").collect()
    }

    /// Returns the times of the ends of a container, oldest first, and how many seconds each run took.
    pub fn ends(&self, name: &str) -> Vec<(f64, f64)> {
        let took = |exit: &Value| exit["duration_seconds"].as_f64().unwrap_or(-1.0);
        self.exits(Some(name)).iter().map(|exit| (exit["at"].as_f64().expect("a time"), took(exit))).collect()
    }

    /// Checks that the kills of all containers, those outside, and those without an owner are all of the host. Other tests have kills
    /// all the time, and the newest are not decided yet: all that there were at first have to be.
    pub fn parts_sum(&self) {
        let mut first = None;
        self.memledger().eventually("the parts", |metrics: &Metrics| {
            let total = metrics.try_value("memledger_host_oom_kills_total", &[])?;
            let others = metrics.sum("memledger_host_process_oom_kills_total", &[])
                + metrics.try_value("memledger_oom_kills_unattributed_total", &[])?;
            let parts = metrics.sum(KILLS, &[]) + others;
            let first = *first.get_or_insert(total);
            if (first..=total).contains(&parts) {
                Ok(())
            } else {
                Err(format!("{parts} of {first} to {total}"))
            }
        });
    }

    /// Checks, while the containers of a test still exist, that the parts sum, and that each run that ended is one exit: of each container,
    /// as many as its engine counts, the last with the engine's code and time.
    pub fn finish(&mut self, engine: &impl Inspects) {
        self.finish_except(engine, &[]);
    }

    /// The same, but for containers of which the engine itself missed the end: they have one exit per run.
    pub fn finish_except(&mut self, engine: &impl Inspects, missed: &[&str]) {
        self.is_finished = true;
        self.parts_sum();
        eventually("one exit per run, as the engine has it", || {
            let by_container = self.exits_by_container();
            by_container.values().try_for_each(|exits| are_of_different_runs(exits))?;
            for container in engine.inspected() {
                let exits = by_container.get(&container.id).map_or(&[][..], Vec::as_slice);
                container.check(exits, missed.contains(&&*container.name))?;
            }
            self.count_like_events(&by_container)
        });
    }

    fn exits_by_container(&self) -> BTreeMap<String, Vec<Value>> {
        let mut by_container: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for exit in self.exits(None) {
            let id = exit["container_id"].as_str().expect("an id").to_owned();
            by_container.entry(id).or_default().push(exit);
        }
        by_container
    }

    /// Checks that the metrics have as many exits of the engine's containers as the events: under the names of their time.
    fn count_like_events(&self, by_container: &BTreeMap<String, Vec<Value>>) -> Result<(), String> {
        // other tests have containers too, which have no runtime here
        let exits: Vec<_> =
            by_container.values().flatten().filter(|exit| !exit["runtime"].is_null()).collect();
        let former = |exit: &&Value| exit["former_names"].as_array().cloned().unwrap_or_default();
        let names =
            exits.iter().flat_map(|exit| [vec![exit["container_name"].clone()], former(exit)].concat());
        let names: BTreeSet<String> = names.map(|name| name.as_str().expect("a name").to_owned()).collect();
        let metrics = self.memledger().metrics();
        let counted: f64 = names.iter().map(|name| metrics.sum(EXITS, &of(name))).sum();
        let found = exits.len() as f64;
        if counted == found { Ok(()) } else { Err(format!("{counted} exits in metrics, {found} events")) }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        assert!(self.is_finished || std::thread::panicking(), "a test ends with `finish`");
    }
}

/// A busy engine sends the event of an end, which has a time of its own, at most so many seconds after the end.
const MAX_EVENT_DELAY: f64 = 5.0;

/// A container as its engine reports it.
pub struct InspectedContainer {
    id: String,
    name: String,
    is_running: bool,
    /// How many runs its restart policy began.
    restarts: usize,
    exit_code: i64,
    /// Unix time of its last end; `None` if it has not ended yet.
    finished: Option<f64>,
    /// It has run at all.
    was_started: bool,
}

impl InspectedContainer {
    /// Reads a response of `docker inspect` or `podman inspect`.
    fn read(inspect: &Value) -> Self {
        let state = &inspect["State"];
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let time = |name: &str| {
            let at: Timestamp = text(&state[name]).parse().expect("a time");
            let at = at.as_nanosecond() as f64 / 1e9;
            (at > 0.0).then_some(at) // none is the year 1
        };
        Self {
            id: text(&inspect["Id"]),
            name: text(&inspect["Name"]).trim_start_matches('/').to_owned(),
            is_running: ["running", "paused"].contains(&state["Status"].as_str().expect("a status")),
            restarts: inspect["RestartCount"].as_u64().expect("a number") as usize,
            exit_code: state["ExitCode"].as_i64().expect("a number"),
            finished: time("FinishedAt"),
            was_started: time("StartedAt").is_some(),
        }
    }

    /// Compares its exits, oldest first. `is_missed`: its engine does not know when and how it ended.
    fn check(&self, exits: &[Value], is_missed: bool) -> Result<(), String> {
        let Self { name, restarts, exit_code, .. } = self;
        let runs = restarts + usize::from(self.was_started && !self.is_running);
        if exits.len() != runs {
            return Err(format!("{name} has ended {runs} times, not {}: {exits:#?}", exits.len()));
        }
        let (Some(last), Some(finished)) = (exits.last(), self.finished.filter(|_| !is_missed)) else {
            return Ok(());
        };
        let at = last["at"].as_f64().expect("a time");
        // of a busy engine the event of an end is later than the end
        if last["exit_code"] != *exit_code || !(-1.0..MAX_EVENT_DELAY).contains(&(at - finished)) {
            return Err(format!("{name} ended with {exit_code} at {finished}: {last:#}"));
        }
        if last["reason"].is_null() { Err(format!("{name} has no reason yet")) } else { Ok(()) }
    }
}

/// Checks that no two exits of one container are of the same run.
fn are_of_different_runs(exits: &[Value]) -> Result<(), String> {
    for pair in exits.windows(2) {
        let is_same = |key: &str| pair[0][key] == pair[1][key] && !pair[0][key].is_null();
        if is_same("at") || is_same("started") {
            return Err(format!("two exits of one run: {pair:#?}"));
        }
    }
    Ok(())
}

/// An engine that lists its containers.
pub trait Inspects {
    /// Runs a command of its client.
    fn client(&self, arguments: &[&str]) -> String;

    /// Returns its containers that exist.
    fn inspected(&self) -> Vec<InspectedContainer> {
        let ids = self.client(&["ps", "-aq", "--no-trunc"]);
        let ids: Vec<_> = ids.lines().collect();
        if ids.is_empty() {
            return vec![];
        }
        let text = self.client(&[&["inspect", "--type", "container"], &ids[..]].concat());
        let all: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        all.iter().map(InspectedContainer::read).collect()
    }
}

impl Inspects for Engine {
    fn client(&self, arguments: &[&str]) -> String {
        self.docker(arguments)
    }
}

impl Inspects for Podman {
    fn client(&self, arguments: &[&str]) -> String {
        self.ok(arguments)
    }
}

pub fn unix_now() -> f64 {
    Timestamp::now().as_nanosecond() as f64 / 1e9
}
