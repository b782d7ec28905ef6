//! The containers that the ledger knows, running or not, and the run that each is in.
//!
//! Two sources: the runtime's facts, which come at once and in order, and the cycle's inventory, which also knows
//! containers without a runtime. A run is told twice then; the times of its start say that it is one.
//!
//! A container that is gone stays known for a while, so that a kill that is told late finds its name.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::desk::{Handed, Held};
use super::entries::{Before, Holder, Name, Scope, Subject};
use super::history::{History, by_role};
use crate::clock::Moment;
use crate::config::Filter;
use crate::discover::{ContainerId, Fact, Identity, Inventory, What};
use crate::parse::kubernetes;

/// Two tellings of one start may differ by so many seconds.
const SAME_START: f64 = 1.0;
/// A container that is there so many seconds after its end has not ended: somebody was wrong.
const STILL_THERE: f64 = 10.0;
/// The kernel's clock and the runtime's may differ by so many seconds.
const SAME_INSTANT: f64 = 0.02;
/// A container that its runtime does not tell the end of, and that has no processes any more, has ended after this.
const RUNTIME_TELLS_WITHIN: Duration = Duration::from_secs(15);
/// As long while its runtime is away: it may come back and tell.
const RUNTIME_COMES_BACK_WITHIN: Duration = Duration::from_secs(600);
/// As long where there is no runtime to ask.
const NOBODY_TELLS_AFTER: Duration = Duration::from_secs(3);
/// Somebody's wish that a container ends explains its end for so many seconds.
const ASKED_LASTS: f64 = 600.0;
/// Wishes for its end that are remembered of one run.
const WISHES: usize = 8;
/// Names of killed processes that are remembered of one container. Processes choose their names.
const NAMES_REMEMBERED: usize = 64;
/// Ended runs of one container that are remembered, for kills that are told late.
const RUNS_REMEMBERED: usize = 4;
/// Containers that ended and are still known, at most.
const MOST_ENDED: usize = 5_000;

/// One container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Known {
    /// The labels of its series.
    pub name: Name,
    /// A runtime told the name; else it is the short id.
    #[serde(default)]
    pub named: bool,
    /// Image; empty if no runtime told.
    pub image: Arc<str>,
    /// Which runtime; empty if none told.
    pub runtime: Arc<str>,
    /// When its runtime last told of an OOM, which may be before it tells of the start.
    #[serde(default)]
    pub oom_told: Option<f64>,
    /// Its cgroup, relative to the root of the hierarchy, as the inventory has it.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Uid of its pod; empty outside Kubernetes, and if no runtime told.
    #[serde(default)]
    pub pod_uid: Arc<str>,
    /// The filters leave it out.
    #[serde(default)]
    pub hidden: bool,
    /// Its last run; `None` if it was never seen running.
    pub run: Option<Run>,
    /// Unix time when it was first told of.
    #[serde(default)]
    pub told: f64,
    #[serde(skip)]
    missing_since: Option<Moment>,
    /// Unix time of the last kill that was stored with what the container held.
    #[serde(skip)]
    pub before_stored: Option<f64>,
    /// Names of its processes that were certainly killed, some of them.
    #[serde(skip)]
    killed: HashSet<Arc<str>>,
    /// The last ends before the present run, oldest first.
    #[serde(default, skip_serializing_if = "VecDeque::is_empty")]
    ended_runs: VecDeque<Run>,
    #[serde(skip)]
    history: History,
    #[serde(skip)]
    held: Option<Arc<Held>>,
    #[serde(skip)]
    settings: Vec<(Arc<str>, Arc<str>)>,
}

/// From a start to an end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// Unix time of its start.
    pub started: Option<f64>,
    /// Host pid of its first process.
    pub pid: Option<u32>,
    /// Unix time of its end.
    pub ended: Option<f64>,
    /// Exit code.
    pub exit_code: Option<i64>,
    /// The runtime's OOMKilled flag.
    pub oom_flag: Option<bool>,
    /// The runtime told of an OOM during it.
    #[serde(default)]
    pub oom_told: bool,
    /// When somebody asked for its end, and by which signals; the last ones, oldest first.
    #[serde(default)]
    pub asked: Vec<(f64, Option<i32>)>,
    /// Kills of its processes.
    #[serde(default)]
    pub kills: u64,
    /// What ran out when its first process was killed for memory.
    #[serde(default)]
    pub ended_by: Option<Scope>,
}

/// What changed in the runs.
#[derive(Clone, Debug)]
pub enum Turn {
    /// A run began.
    Began(ContainerId),
    /// A run ended.
    Ended(Box<End>),
}

/// The end of a run.
#[derive(Clone, Debug)]
pub struct End {
    /// Which container.
    pub id: ContainerId,
    /// Who it was.
    pub subject: Subject,
    /// The run, with its end.
    pub run: Run,
    /// What it held before.
    pub before: Option<Before>,
    /// Highest usage of the run.
    pub peak_usage_bytes: Option<u64>,
    /// Highest sample of what the kernel cannot drop.
    pub peak_unreclaimable_bytes: Option<u64>,
}

impl Known {
    /// It runs, as far as is known.
    pub fn runs(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.ended.is_none())
    }

    /// As the subject of an event.
    pub fn subject(&self, id: &ContainerId) -> Subject {
        Subject {
            name: self.name.clone(),
            container_id: Arc::clone(id.shared()),
            image: Arc::clone(&self.image),
            runtime: Arc::clone(&self.runtime),
            started: self.run.as_ref().and_then(|run| run.started),
        }
    }

    /// The run in which something happened at this Unix time: the first that had not ended, else the last.
    pub fn run_at(&self, at: f64) -> Option<&Run> {
        self.all_runs().find(|run| run.was_there(at)).or(self.run.as_ref())
    }

    /// As [`Known::run_at`], to be changed.
    pub fn run_at_mut(&mut self, at: f64) -> Option<&mut Run> {
        match self.ended_runs.iter().position(|run| run.was_there(at)) {
            Some(earlier) => self.ended_runs.get_mut(earlier),
            None => self.run.as_mut(),
        }
    }

    /// True if a path of the kernel's is its own cgroup or lies below it.
    pub fn lies_on(&self, path: &str) -> bool {
        let path = Path::new(path.trim_start_matches('/'));
        self.cgroup.as_ref().is_some_and(|cgroup| path.starts_with(cgroup))
    }

    /// It is, or was, one of the pod with this cgroup.
    pub fn is_of_pod(&self, pod: &str) -> bool {
        let uid = kubernetes::pod(pod).map(|(_, uid)| uid);
        let cgroup = self.cgroup.as_ref();
        cgroup.is_some_and(|cgroup| cgroup.starts_with(pod.trim_start_matches('/')))
            || uid.is_some_and(|uid| kubernetes::is_uid(uid, &self.pod_uid))
    }

    /// True if a run that was told of had not ended at this Unix time. A container's first process may be killed before
    /// its runtime has told of the start.
    pub fn ran_at(&self, at: f64) -> bool {
        self.all_runs().any(|run| run.was_there(at))
    }

    /// The runs that are remembered, oldest first.
    pub fn all_runs(&self) -> impl Iterator<Item = &Run> {
        self.ended_runs.iter().chain(&self.run)
    }

    /// Those of them before the last.
    pub fn earlier_runs(&self) -> impl Iterator<Item = &Run> {
        self.ended_runs.iter()
    }

    /// The run that ended at this Unix time.
    pub fn run_ended_at(&self, at: f64) -> Option<&Run> {
        self.all_runs().find(|run| run.ended == Some(at))
    }

    /// A process of this name was certainly its own.
    pub fn note_killed(&mut self, process: &Arc<str>) {
        if self.killed.len() < NAMES_REMEMBERED {
            self.killed.insert(Arc::clone(process));
        }
    }

    fn end(&self, id: &ContainerId) -> Option<Turn> {
        let held = self.held();
        Some(Turn::Ended(Box::new(End {
            id: id.clone(),
            subject: self.subject(id),
            run: self.run.clone()?,
            before: self.before(),
            peak_usage_bytes: held.and_then(|held| held.peak_usage_bytes),
            peak_unreclaimable_bytes: held.and_then(|held| held.peak_unreclaimable_bytes),
        })))
    }

    /// Its processes and peaks, as the newest cycle saw them.
    pub fn held(&self) -> Option<&Held> {
        self.held.as_deref()
    }

    fn remember(&mut self, now: Moment, held: &Held) {
        if let Some(sample) = held.sample {
            self.history.enter(now, sample);
        }
        if held.sample.is_some() || !held.processes.is_empty() {
            self.held = Some(Arc::new(held.clone()));
        }
    }

    /// It had a process of this name; `None` if nothing is known of its processes.
    pub fn had(&self, process: &str) -> Option<bool> {
        let held = self.held().map_or(&[][..], |held| &held.processes);
        let some = !self.killed.is_empty() || !held.is_empty();
        some.then(|| self.killed.contains(process) || held.iter().any(|held| *held.comm == *process))
    }

    /// What it held before now.
    pub fn before(&self) -> Option<Before> {
        let samples = self.history.samples()?;
        let roles = self.held().map_or(vec![], |held| by_role(&held.processes));
        Some(Before { samples, roles, settings: self.settings.clone(), ..Before::default() })
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Runs {
    filter: Filter,
    known: HashMap<ContainerId, Known>,
    /// What the runtimes tell of ends is not used, so nobody waits for it.
    without_runtimes: bool,
    /// Runtimes: whether they are connected.
    links: Vec<(&'static str, bool)>,
    host_memory: Option<(u64, u64)>,
    changed: Vec<ContainerId>,
}

impl Runs {
    /// Those that were stored.
    pub fn new(
        filter: Filter,
        without_runtimes: bool,
        stored: impl Iterator<Item = (ContainerId, Known)>,
    ) -> Self {
        Self { filter, without_runtimes, known: stored.collect(), ..Self::default() }
    }

    /// One container.
    pub fn get(&self, id: &ContainerId) -> Option<&Known> {
        self.known.get(id)
    }

    /// One container, to be changed and stored. Of one that nobody told of, the filters see what they would in the inventory:
    /// its short id, and no labels.
    pub fn change(&mut self, id: &ContainerId) -> &mut Known {
        self.changed.push(id.clone());
        let filter = &self.filter;
        self.known.entry(id.clone()).or_insert_with(|| Known {
            name: Name { container_name: id.short().into(), ..Name::default() },
            hidden: !filter.labels.is_empty() || !filter.shows(&[id.short()]),
            ..Known::default()
        })
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&ContainerId, &Known)> {
        self.known.iter()
    }

    /// Those that changed since this was asked last.
    pub fn take_changed(&mut self) -> Vec<ContainerId> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort();
        changed.dedup();
        changed
    }

    /// Enters what a runtime told.
    pub fn tell(&mut self, fact: &Fact) -> Vec<Turn> {
        let id = &fact.id;
        if !self.known.contains_key(id) && fact.named.is_none() && !matches!(fact.what, What::Running { .. })
        {
            return vec![]; // of one that ended long ago
        }
        let named = fact.named.as_ref().map(|named| {
            let identity = Identity::lasting(&named.name, named.pod.as_deref());
            (named, named.labels_match && identity.is_shown(&self.filter), identity)
        });
        let known = self.change(id);
        if known.runtime.is_empty() {
            known.runtime = fact.runtime.into();
            known.told = fact.at;
        }
        if let Some((named, shown, identity)) = named {
            // the inventory's name wins: it is made unique over all runtimes
            if !known.named || matches!(fact.what, What::Renamed) {
                known.name = Name::from(&identity);
                known.named = true;
            }
            known.image = Arc::clone(&named.image);
            known.pod_uid = named.pod.as_ref().map_or_else(|| "".into(), |pod| Arc::clone(&pod.uid));
            known.hidden = !shown;
        }
        match &fact.what {
            What::Exists | What::Renamed => vec![],
            What::Started => self.began(id, Some(fact.at), None),
            What::Running { pid } => self.began(id, Some(fact.at), *pid),
            What::Ended { exit_code, oom_flag } => {
                ended(known, fact, *exit_code, *oom_flag).into_iter().collect()
            }
            What::Oom => {
                known.oom_told = Some(fact.at);
                if let Some(run) = known.run_at_mut(fact.at) {
                    run.oom_told = true;
                }
                vec![]
            }
            What::Asked { signal } => {
                let asked = (fact.at, *signal);
                // told again after a restart, it may be of an earlier run
                let concerns = |run: &&mut Run| {
                    run.ended.is_none()
                        && run.started.is_none_or(|started| started <= fact.at + SAME_INSTANT)
                        && !run.asked.contains(&asked)
                };
                if let Some(run) = known.run.as_mut().filter(concerns) {
                    run.asked.push(asked);
                    if run.asked.len() > WISHES {
                        run.asked.remove(0);
                    }
                }
                vec![]
            }
        }
    }

    /// A run began at `started`, or is found running since then.
    fn began(&mut self, id: &ContainerId, started: Option<f64>, pid: Option<u32>) -> Vec<Turn> {
        let known = self.change(id);
        let mut turns = Vec::new();
        if let Some(run) = known.run.as_mut() {
            let same = match (run.started, started, run.ended) {
                // told late, when it had ended already; a start after that end is another run, however soon it came
                (_, Some(other), Some(ended)) => other <= ended,
                (Some(one), Some(other), None) => (one - other).abs() < SAME_START,
                (_, _, ended) => ended.is_none(),
            };
            if same {
                run.pid = run.pid.or(pid);
                run.started = run.started.or(started);
                return turns;
            }
            if run.started.zip(started).is_some_and(|(known, told)| told < known) {
                return turns; // an earlier run, told late
            }
            if run.ended.is_none() {
                run.ended = started; // nobody told of its end, and here is the next one
                turns.extend(known.end(id));
            }
        }
        if let Some(run) = known.run.take() {
            known.ended_runs.push_back(run);
            if known.ended_runs.len() > RUNS_REMEMBERED {
                known.ended_runs.pop_front();
            }
        }
        known.run = Some(Run { started, pid, ..Run::default() });
        known.missing_since = None;
        known.history = History::default();
        known.held = None;
        turns.push(Turn::Began(id.clone()));
        turns
    }

    /// Enters what a cycle saw.
    pub fn see(&mut self, now: Moment, handed: &Handed) -> Vec<Turn> {
        let mut turns = Vec::new();
        if !self.without_runtimes {
            self.links.clone_from(&handed.inventory.runtimes);
        }
        self.host_memory = handed.host_memory;
        for (container, held) in std::iter::zip(&handed.inventory.containers, &handed.containers) {
            let name = Name::from(&container.identity);
            let cgroup = container.cgroup.as_ref().map(|cgroup| &cgroup.path);
            let named = *name.container_name != *container.id.short();
            let new = self.known.get(&container.id).is_none_or(|known| {
                let renamed = known.name != name && (named || !known.named);
                let moved = cgroup.is_some() && known.cgroup.as_ref() != cgroup;
                renamed || moved || known.hidden || known.run.is_none()
            });
            let known = if new { self.change(&container.id) } else { self.present(&container.id) };
            if new && (named || !known.named) {
                known.named = named;
                known.name = name;
                known.image = Arc::clone(&container.image);
                known.runtime = container.runtime.into();
            }
            if new {
                known.hidden = false;
                known.cgroup = cgroup.cloned().or(known.cgroup.take());
            }
            known.missing_since = None;
            known.settings.clone_from(&container.settings);
            let another = match &mut known.run {
                None => true,
                // the inventory may be older than the runtime's word that it ended; but not by much
                Some(run) if run.ended.is_some_and(|ended| now.unix_seconds() - ended > STILL_THERE) => {
                    (run.ended, run.exit_code) = (None, None);
                    false
                }
                Some(run) => {
                    run.started.zip(container.started).is_some_and(|(one, other)| other >= one + SAME_START)
                }
            };
            if another {
                turns.extend(self.began(&container.id, container.started, None));
            }
            self.present(&container.id).remember(now, held);
        }
        turns.extend(self.vanished(now, &handed.inventory));
        turns
    }

    fn present(&mut self, id: &ContainerId) -> &mut Known {
        self.known.entry(id.clone()).or_default()
    }

    /// Runs that nobody told the end of and that are not there any more.
    fn vanished(&mut self, now: Moment, inventory: &Inventory) -> Vec<Turn> {
        let there: HashSet<_> = inventory.containers.iter().map(|c| &c.id).collect();
        let mut turns = Vec::new();
        for (id, known) in &mut self.known {
            if !known.runs() || known.hidden || there.contains(id) {
                continue;
            }
            let since = *known.missing_since.get_or_insert(now);
            let patience = match self.links.iter().find(|(runtime, _)| **runtime == *known.runtime) {
                Some((_, true)) => RUNTIME_TELLS_WITHIN,
                Some((_, false)) => RUNTIME_COMES_BACK_WITHIN,
                // whose it is nobody has told yet
                None if !known.named && self.links.iter().any(|(_, is_up)| *is_up) => RUNTIME_TELLS_WITHIN,
                None => NOBODY_TELLS_AFTER,
            };
            if now.since(since) >= patience
                && let Some(run) = known.run.as_mut()
            {
                run.ended = Some(now.unix_seconds() - now.since(since).as_secs_f64());
                turns.extend(known.end(id));
                self.changed.push(id.clone());
            }
        }
        turns
    }

    /// Who held memory of the host that the kernel could not drop, most first.
    pub fn holders(&self) -> (Vec<Holder>, Option<(u64, u64)>) {
        let mut holders: Vec<_> = self
            .known
            .values()
            .filter_map(|known| {
                let held = known.history.newest()?.unreclaimable_bytes?;
                Some(Holder { name: Arc::clone(&known.name.container_name), unreclaimable_bytes: held })
            })
            .collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.unreclaimable_bytes));
        holders.truncate(5);
        (holders, self.host_memory)
    }

    /// The container that a live process belongs to, by what the newest cycle saw and by the runtimes' word.
    pub fn of_pid(&self, pid: u32, comm: &str, at: f64) -> Option<ContainerId> {
        let first = |run: &Run| {
            run.pid == Some(pid)
                && run.started.is_none_or(|started| started <= at + SAME_START)
                && run.ended.is_none_or(|ended| ended + SAME_START >= at)
        };
        let mut found = self.known.iter().filter(|(_, known)| {
            known.run.as_ref().is_some_and(first)
                || known.runs()
                    && known.held().is_some_and(|held| {
                        held.processes.iter().any(|process| process.pid == pid && &*process.comm == comm)
                    })
        });
        let id = found.next()?.0.clone();
        found.next().is_none().then_some(id)
    }

    /// Forgets containers that ended before this Unix time, and those over the cap. Returns their ids.
    pub fn forget(&mut self, before: f64, keep: impl Fn(&ContainerId) -> bool) -> Vec<ContainerId> {
        let ended = |known: &Known| match &known.run {
            Some(run) => run.ended,
            None => Some(known.told),
        };
        let mut gone: Vec<(f64, ContainerId)> = self
            .known
            .iter()
            .filter_map(|(id, known)| Some((ended(known)?, id.clone())))
            .filter(|(_, id)| !keep(id))
            .collect();
        gone.sort_by(|one, other| one.0.total_cmp(&other.0));
        let over = gone.len().saturating_sub(MOST_ENDED);
        let gone: Vec<_> = gone
            .into_iter()
            .enumerate()
            .filter(|(n, (at, _))| *n < over || *at < before)
            .map(|(_, (_, id))| id)
            .collect();
        for id in &gone {
            self.known.remove(id);
        }
        gone
    }
}

/// Enters the end of a run. Nothing if it was told already, or is that of an earlier run.
fn ended(known: &mut Known, fact: &Fact, exit_code: Option<i64>, oom_flag: Option<bool>) -> Option<Turn> {
    let run = known.run.as_mut()?;
    if run.started.is_some_and(|started| fact.at < started) {
        let same = |run: &&mut Run| run.ended.is_some_and(|ended| (ended - fact.at).abs() < SAME_START);
        if let Some(earlier) = known.ended_runs.iter_mut().rev().find(same) {
            earlier.exit_code = earlier.exit_code.or(exit_code);
            earlier.oom_flag = earlier.oom_flag.or(oom_flag);
            return None;
        }
    }
    if run.started.is_some_and(|started| fact.at + SAME_START < started) {
        return None;
    }
    if run.ended.is_some() {
        // told already, or given up: what is known better now is kept
        run.exit_code = run.exit_code.or(exit_code);
        run.oom_flag = run.oom_flag.or(oom_flag);
        return None;
    }
    run.ended = Some(fact.at);
    run.exit_code = exit_code;
    run.oom_flag = oom_flag;
    known.end(&fact.id)
}

impl Run {
    /// It had not ended at this Unix time, by clocks that differ by a few milliseconds.
    pub fn was_there(&self, at: f64) -> bool {
        self.ended.is_none_or(|ended| ended + SAME_INSTANT >= at)
    }

    /// The signals that somebody asked for not long before this end, oldest first.
    pub fn asked_before(&self, at: f64) -> impl Iterator<Item = Option<i32>> {
        self.asked.iter().filter(move |(asked, _)| at - asked < ASKED_LASTS).map(|(_, signal)| *signal)
    }
}
