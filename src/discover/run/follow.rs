//! Follows the spools for `memledger serve`.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::record::SpooledRun;
use super::spool;
use crate::clock::Timestamp;
use crate::config::Filter;
use crate::discover::{ConnectionState, ContainerId, EventKind, RuntimeState};
use crate::host::HostPaths;

/// Interval of looking for new records, and for runs whose processes are gone.
const INTERVAL: Duration = Duration::from_secs(1);

/// What the ledger knows of runs when memledger starts.
#[derive(Debug, Default)]
pub struct RunResumeState {
    /// Unix time of the last start in the ledger.
    since: Option<f64>,
    /// Runs without an end so far.
    open: HashSet<ContainerId>,
}

impl RunResumeState {
    /// Creates the state. `since`: Unix time of the last event in the ledger. `open`: runs that ran then.
    pub fn new(since: Option<f64>, open: HashSet<ContainerId>) -> Self {
        Self { since, open }
    }
}

/// Follows the spools for ever, and writes runs and events to `state`.
pub async fn follow(
    spools: Vec<PathBuf>,
    filter: Filter,
    host_paths: HostPaths,
    state: Arc<RuntimeState>,
    resume: RunResumeState,
) {
    let mut follower = Some(RunFollower::new(spools, filter, host_paths, state, resume));
    while let Some(mut current) = follower.take() {
        // a spool may be in a home directory, which can hang
        let stepped = tokio::task::spawn_blocking(move || {
            current.step(Timestamp::now());
            current
        });
        match stepped.await {
            Ok(current) => follower = Some(current),
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return, // memledger stops
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// What was published of a run.
#[derive(Debug, Default)]
struct PublishedRun {
    /// Unix time of the newest signal.
    signal_at: f64,
    has_ended: bool,
}

struct RunFollower {
    spools: Vec<PathBuf>,
    filter: Filter,
    host_paths: HostPaths,
    boot_id: String,
    state: Arc<RuntimeState>,
    resume: RunResumeState,
    published: HashMap<ContainerId, PublishedRun>,
    /// The runs without an end, by the newest reading.
    running: Vec<SpooledRun>,
    /// Times of the last changes of the directories in the newest reading; `None` before the first.
    changed: Option<Vec<SystemTime>>,
}

impl RunFollower {
    fn new(
        spools: Vec<PathBuf>,
        filter: Filter,
        host_paths: HostPaths,
        state: Arc<RuntimeState>,
        resume: RunResumeState,
    ) -> Self {
        let boot_id = host_paths.boot_id().unwrap_or_default();
        let (published, running, changed) = (HashMap::new(), vec![], None);
        Self { spools, filter, host_paths, boot_id, state, resume, published, running, changed }
    }

    /// Reads the spools if they changed, and looks whether the running commands still exist.
    fn step(&mut self, now: Timestamp) {
        let changed = self.changes();
        let is_settled = |at: &SystemTime| {
            let age = now.unix_seconds() - unix_seconds(*at);
            !(0.0..2.0).contains(&age) // another change may have the same time
        };
        let is_same = self.changed.as_ref() == Some(&changed) && changed.iter().all(is_settled);
        let is_gone = |run: &SpooledRun| !run.is_running(&self.host_paths, &self.boot_id);
        if is_same && !self.running.iter().any(is_gone) {
            return;
        }
        self.changed = Some(changed);
        let runs: Vec<SpooledRun> = self.spools.iter().flat_map(|spool| spool::read(spool)).collect();
        self.apply(runs, now);
    }

    /// Returns the times of the last changes of the spools and of the directories in them.
    fn changes(&self) -> Vec<SystemTime> {
        let modified = |path: &std::path::Path| std::fs::symlink_metadata(path)?.modified();
        let mut times = Vec::new();
        for spool in &self.spools {
            times.extend(modified(spool));
            let users = std::fs::read_dir(spool).into_iter().flatten().flatten();
            let bounded = users.take(crate::host::bounds::SPOOL_USERS.max);
            times.extend(bounded.filter_map(|user| modified(&user.path()).ok()));
        }
        times
    }

    fn apply(&mut self, runs: Vec<SpooledRun>, now: Timestamp) {
        let (mut commands, mut ended_ids) = (HashMap::new(), HashSet::new());
        let mut present = HashSet::new();
        self.running.clear();
        for run in runs {
            let id = run.container_id();
            if !present.insert(id.clone()) {
                continue; // in two spools
            }
            let is_running = run.is_running(&self.host_paths, &self.boot_id);
            self.publish(&run, is_running, now);
            if is_running {
                self.state.add_running(run.container(&self.filter));
                commands.extend(run.command.map(|command| (id, command.id())));
                self.running.push(run);
            } else {
                ended_ids.insert(id);
            }
        }
        // whose record is gone: removed by hand, or with its home directory
        for id in self.resume.open.drain().filter(|id| !present.contains(id)) {
            let what = EventKind::Ended { exit_code: None, oom_flag: None };
            let (runtime, socket, at) = (super::RUNTIME, Arc::default(), now.unix_seconds());
            self.state.publish([crate::discover::RuntimeEvent {
                runtime,
                socket,
                id,
                at,
                named: None,
                what,
            }]);
        }
        self.published.retain(|id, _| present.contains(id));
        self.state.set_commands(commands, ended_ids);
        let has_spool = self.spools.iter().any(|spool| spool.is_dir());
        self.state.set_connection(if has_spool { ConnectionState::Up } else { ConnectionState::NoSocket });
    }

    /// Publishes what is new of a run.
    fn publish(&mut self, run: &SpooledRun, is_running: bool, now: Timestamp) {
        let id = run.container_id();
        let is_open = self.resume.open.contains(&id);
        let is_new = !self.published.contains_key(&id);
        let is_after = self.resume.since.is_some_and(|since| run.started > since);
        let published = self.published.entry(id.clone()).or_default();
        if is_new && !is_running && !is_open && !is_after {
            published.has_ended = true; // the ledger has it, or began after it
        }
        if published.has_ended {
            return;
        }
        let filter = &self.filter;
        let mut events = Vec::new();
        if is_new && is_after {
            events.push(run.event(run.started, EventKind::Started, filter));
        }
        if is_new || run.command.is_some() {
            events.extend(is_running.then(|| run.running(filter)));
        }
        let signals = run.signals.iter().filter(|received| received.at > published.signal_at);
        events.extend(signals.map(|received| run.signal(*received, filter)));
        published.signal_at = run.signals.last().map_or(published.signal_at, |received| received.at);
        if !is_running {
            published.has_ended = true;
            let at = run.end.as_ref().map_or(now.unix_seconds(), |end| end.at);
            self.state.end_run(&id, at, Some(run.container(filter)).filter(|_| is_new));
            // with its boot, unless its end is recorded: the ledger knows that
            if run.end.is_some() || run.boot_id == self.boot_id {
                let what = EventKind::Ended { exit_code: None, oom_flag: None };
                events.push(run.ended(filter).unwrap_or_else(|| run.event(at, what, filter)));
            }
        }
        self.state.publish(events);
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |age| age.as_secs_f64())
}
