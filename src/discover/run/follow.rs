//! Follows the spools for `memledger serve`.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::record::SpooledRun;
use super::spool;
use crate::clock::Timestamp;
use crate::config::Filter;
use crate::discover::{ConnectionState, ContainerId, EventKind, RuntimeEvent, RuntimeKind, RuntimeState};
use crate::host::bounds::{NEW_RUNS, NEW_RUNS_AT_ONCE};
use crate::host::{HostPaths, RateLimit};

/// Interval of looking for new records, and for runs whose processes are gone.
const INTERVAL: Duration = Duration::from_secs(1);
/// The times of files are those of the kernel's tick: a second change may have the same.
const MODIFIED_RECENTLY: f64 = 2.0;

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
    /// Runs of the first reading: those that are older than the ledger's last start are in the ledger. `None` before it.
    first: Option<HashSet<ContainerId>>,
    /// Limits the new runs of each user.
    new_runs: HashMap<u32, RateLimit>,
    /// Some runs wait because of that.
    has_waiting: bool,
    /// A run has no end.
    has_running: bool,
    /// Times of the last changes of the directories in the newest reading.
    changed: Vec<SystemTime>,
}

impl RunFollower {
    fn new(
        spools: Vec<PathBuf>,
        filter: Filter,
        host_paths: HostPaths,
        state: Arc<RuntimeState>,
        resume: RunResumeState,
    ) -> Self {
        Self {
            boot_id: host_paths.boot_id().unwrap_or_default(),
            spools,
            filter,
            host_paths,
            state,
            resume,
            published: HashMap::new(),
            first: None,
            new_runs: HashMap::new(),
            has_waiting: false,
            has_running: false,
            changed: vec![],
        }
    }

    /// Reads the spools if they changed, or if a command may have ended without a record.
    fn step(&mut self, now: Timestamp) {
        let changed = self.changes();
        let is_recent = |at: &SystemTime| {
            let age = now.unix_seconds() - unix_seconds(*at);
            (-MODIFIED_RECENTLY..MODIFIED_RECENTLY).contains(&age)
        };
        let is_same = self.first.is_some() && changed == self.changed && !changed.iter().any(is_recent);
        self.changed = changed;
        if is_same && !self.has_running && !self.has_waiting {
            return;
        }
        let mut seen = HashSet::new();
        let mut runs: Vec<SpooledRun> =
            self.spools.iter().flat_map(|spool| spool::read(spool, &self.host_paths)).collect();
        runs.retain(|run| seen.insert(run.container_id())); // one may be in two spools
        self.apply(&runs, now);
    }

    /// Returns the times of the last changes of the spools and of the directories in them.
    fn changes(&self) -> Vec<SystemTime> {
        let mut times = Vec::new();
        for spool in &self.spools {
            times.extend(std::fs::symlink_metadata(spool).and_then(|spool| spool.modified()));
            let directories = spool::directories(spool).into_values().flatten();
            times.extend(directories.filter_map(|(_, modified)| modified));
        }
        times
    }

    fn apply(&mut self, runs: &[SpooledRun], now: Timestamp) {
        let present: HashSet<ContainerId> = runs.iter().map(SpooledRun::container_id).collect();
        if self.first.is_none() {
            self.first = Some(present.clone());
        }
        let (mut commands, mut ended_ids) = (HashMap::new(), HashSet::new());
        (self.has_running, self.has_waiting) = (false, false);
        for run in runs {
            let (id, is_running) = (run.container_id(), run.is_running(&self.boot_id));
            if !self.publish(run, is_running, now) {
                self.has_waiting = true;
            } else if is_running {
                self.has_running = true;
                self.state.add_running(run.container(&self.filter));
                commands.extend(run.command.map(|command| (id, command)));
            } else {
                ended_ids.insert(id);
            }
        }
        self.end_missing(&present, now);
        self.state.set_commands(commands, ended_ids);
        let has_spool = self.spools.iter().any(|spool| spool.is_dir());
        self.state.set_connection(if has_spool { ConnectionState::Up } else { ConnectionState::NoSocket });
    }

    /// Publishes what is new of a run. Returns false if it is new and waits, because its user has too many new ones.
    fn publish(&mut self, run: &SpooledRun, is_running: bool, now: Timestamp) -> bool {
        let id = run.container_id();
        let is_open = self.resume.open.remove(&id);
        let is_new = !self.published.contains_key(&id);
        let is_first = self.first.as_ref().is_some_and(|first| first.contains(&id));
        // later ones are new whatever their start is: the clock may have been set
        let is_after = !is_first || self.resume.since.is_some_and(|since| run.started > since);
        if is_new && (is_after && !is_open) {
            let (per_second, burst) = (NEW_RUNS.max as u32, NEW_RUNS_AT_ONCE.max as u32);
            let full = || RateLimit::new(now, per_second, burst);
            if !self.new_runs.entry(run.uid).or_insert_with(full).take(now) {
                return false;
            }
        }
        let published = self.published.entry(id.clone()).or_default();
        if is_new && !is_running && !is_open && !is_after {
            published.has_ended = true; // the ledger has it, or began after it
        }
        if published.has_ended {
            return true;
        }
        let filter = &self.filter;
        let mut events = Vec::new();
        if is_new && is_after && !is_open {
            events.push(run.event(run.started, EventKind::Started, filter));
        }
        if is_new && is_running {
            events.push(run.running(filter));
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
        true
    }

    /// Ends the runs whose record is gone: removed by hand, or with its directory.
    fn end_missing(&mut self, present: &HashSet<ContainerId>, now: Timestamp) {
        let running = self.published.iter().filter(|(_, run)| !run.has_ended).map(|(id, _)| id.clone());
        let missing = running.chain(self.resume.open.drain()).filter(|id| !present.contains(id));
        let what = EventKind::Ended { exit_code: None, oom_flag: None };
        for id in missing.collect::<Vec<_>>() {
            self.state.end_run(&id, now.unix_seconds(), None);
            let (socket, at) = (Arc::default(), now.unix_seconds());
            self.state.publish([RuntimeEvent {
                runtime: RuntimeKind::Run,
                socket,
                id,
                at,
                named: None,
                what: what.clone(),
            }]);
        }
        self.published.retain(|id, _| present.contains(id));
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |age| age.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::spooled;
    use super::super::record::{RecordedEnd, new_id};
    use super::*;
    use crate::host::process::ProcessId;

    fn follower(since: Option<f64>, open: &[&SpooledRun]) -> RunFollower {
        let open = open.iter().map(|run| run.container_id()).collect();
        let state = RuntimeState::new(RuntimeKind::Run, Arc::default());
        let resume = RunResumeState::new(since, open);
        RunFollower::new(vec![], Filter::default(), HostPaths::default(), state, resume)
    }

    fn run(follower: &RunFollower, started: f64) -> SpooledRun {
        let supervisor = ProcessId::new(1, 0);
        let boot_id = follower.boot_id.clone();
        SpooledRun { supervisor, boot_id, is_alive: true, ..spooled(&new_id(7).unwrap(), "train", started) }
    }

    fn ended(run: &SpooledRun, at: f64) -> SpooledRun {
        let end = Some(RecordedEnd { at, exit_code: 3, oom_kills: None });
        SpooledRun { end, ..run.clone() }
    }

    fn kinds(follower: &RunFollower) -> Vec<&'static str> {
        let kind = |event: RuntimeEvent| match event.what {
            EventKind::Started => "started",
            EventKind::Running { .. } => "running",
            EventKind::Ended { exit_code: None, .. } => "ended unknown",
            EventKind::Ended { .. } => "ended",
            _ => "other",
        };
        follower.state.drain_events().into_iter().map(kind).collect()
    }

    #[test]
    fn each_run_is_published_once_also_over_a_restart() {
        let now = Timestamp::now();
        let mut first = follower(Some(100.0), &[]);
        let (old, new) = (run(&first, 50.0), run(&first, 150.0));
        first.apply(&[ended(&old, 60.0), new.clone()], now);
        assert_eq!(kinds(&first), ["started", "running"]);
        first.apply(std::slice::from_ref(&new), now);
        assert_eq!(kinds(&first), [""; 0]);
        first.apply(&[ended(&new, 160.0)], now);
        first.apply(&[ended(&new, 160.0)], now);
        assert_eq!(kinds(&first), ["ended"]);
        // one that began before the last event, while the clock was set back
        let early = run(&first, 20.0);
        first.apply(&[ended(&early, 21.0)], now);
        assert_eq!(kinds(&first), ["started", "ended"]);
        let mut second = follower(Some(150.0), &[&new]);
        second.apply(&[ended(&new, 160.0), ended(&early, 21.0)], now);
        assert_eq!(kinds(&second), ["ended"], "it ended while no service ran");
    }

    #[test]
    fn missing_record_and_missing_processes_end_a_run_for_unknown_reasons() {
        let now = Timestamp::now();
        let mut followed = follower(Some(100.0), &[]);
        let (removed, killed) = (run(&followed, 150.0), run(&followed, 151.0));
        followed.apply(&[removed.clone(), killed.clone()], now);
        assert_eq!(kinds(&followed), ["started", "running", "started", "running"]);
        followed.apply(&[SpooledRun { is_alive: false, ..killed }], now);
        assert_eq!(kinds(&followed), ["ended unknown", "ended unknown"]);
        assert!(followed.state.lock().running.is_empty());
        let mut next = follower(Some(200.0), &[&removed]);
        next.apply(&[], now);
        assert_eq!(kinds(&next), ["ended unknown"]);
    }

    #[test]
    fn new_runs_of_a_user_are_taken_at_a_limited_rate() {
        let now = Timestamp::now();
        let mut followed = follower(None, &[]);
        followed.apply(&[], now);
        let runs: Vec<_> = (0..NEW_RUNS_AT_ONCE.max + 2).map(|_| ended(&run(&followed, 1.0), 2.0)).collect();
        followed.apply(&runs, now);
        assert_eq!(kinds(&followed).len(), 2 * NEW_RUNS_AT_ONCE.max);
        assert!(followed.has_waiting);
        followed.apply(&runs, now.plus(Duration::from_secs(60)));
        assert_eq!(kinds(&followed).len(), 4);
        assert!(!followed.has_waiting);
    }
}
