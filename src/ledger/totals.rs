//! Counters that never decrease: of the host, and of each container name. They outlive the events that they count.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::exchange::ContainerFigures;
use super::store::{LedgerState, StateKind, WriteBatch};
use crate::clock::{ClockStep, MIN_CLOCK_STEP};
use crate::events::{CudaOomSource, ExitReason, Identity, OomScope, Victim};

/// Maximum number of names; beyond that those without recent events are removed.
const MAX_NAMES: usize = 20_000;

/// Counters of one container name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ContainerCounters {
    /// Unix time of the first event of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since: Option<f64>,
    kills: [[u64; 2]; 2],
    #[serde(skip_serializing_if = "Option::is_none")]
    last_kill: Option<f64>,
    exits: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_exit_code: Option<i64>,
    starts: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cuda_ooms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cuda_ooms_in_log: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_cuda_oom: Option<f64>,
    touched: f64,
}

impl ContainerCounters {
    /// Adds what was counted under another name.
    fn add(&mut self, other: Self) {
        let earliest = |one: Option<f64>, other: Option<f64>| one.into_iter().chain(other).reduce(f64::min);
        let latest = |one: Option<f64>, other: Option<f64>| one.into_iter().chain(other).reduce(f64::max);
        let sum = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).reduce(|a, b| a + b);
        self.since = earliest(self.since, other.since);
        for (kills, others) in std::iter::zip(self.kills.as_flattened_mut(), other.kills.as_flattened()) {
            *kills += others;
        }
        for (reason, exits) in other.exits {
            *self.exits.entry(reason).or_default() += exits;
        }
        // the newer of both is of the one that was counted last
        if other.touched >= self.touched {
            self.last_exit_code = other.last_exit_code.or(self.last_exit_code);
        } else {
            self.last_exit_code = self.last_exit_code.or(other.last_exit_code);
        }
        self.last_kill = latest(self.last_kill, other.last_kill);
        self.starts += other.starts;
        self.cuda_ooms = sum(self.cuda_ooms, other.cuda_ooms);
        self.cuda_ooms_in_log = sum(self.cuda_ooms_in_log, other.cuda_ooms_in_log);
        self.last_cuda_oom = latest(self.last_cuda_oom, other.last_cuda_oom);
        self.touched = self.touched.max(other.touched);
    }

    fn cuda_ooms_mut(&mut self, source: CudaOomSource) -> &mut Option<u64> {
        match source {
            CudaOomSource::Reporter => &mut self.cuda_ooms,
            CudaOomSource::Log => &mut self.cuda_ooms_in_log,
        }
    }
}

/// Counters of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Total {
    /// All OOM kills.
    Host,
    /// Kills of processes outside containers, because the host ran out of memory.
    HostProcess,
    /// The same, at the limit of a cgroup: of a unit, a job, a session.
    HostProcessAtLimit,
    /// Kills without an owner.
    Unattributed,
    /// Kills without a record.
    WithoutRecord,
    /// Second records of the same kill.
    Duplicates,
}

impl Total {
    /// All of them.
    pub const ALL: [Total; 6] = [
        Total::Host,
        Total::HostProcess,
        Total::HostProcessAtLimit,
        Total::Unattributed,
        Total::WithoutRecord,
        Total::Duplicates,
    ];

    /// Returns the key in the store.
    fn key(self) -> &'static str {
        match self {
            Total::Host => "host_oom_kills",
            Total::HostProcess => "host_process_oom_kills",
            Total::HostProcessAtLimit => "host_process_oom_kills_at_limit",
            Total::Unattributed => "oom_kills_unattributed",
            Total::WithoutRecord => "oom_kills_without_record",
            Total::Duplicates => "oom_duplicate_lines",
        }
    }
}

impl FromStr for Total {
    type Err = UnknownTotal;

    fn from_str(key: &str) -> Result<Self, UnknownTotal> {
        Total::ALL.into_iter().find(|total| total.key() == key).ok_or(UnknownTotal)
    }
}

/// A counter of the host that this version does not have.
#[derive(Debug)]
pub struct UnknownTotal;

/// All counters.
#[derive(Debug, Default)]
pub struct Totals {
    host: BTreeMap<Total, u64>,
    names: HashMap<Identity, ContainerCounters>,
    changed: BTreeSet<Identity>,
    host_changed: bool,
}

impl Totals {
    /// Creates the counters from the stored values.
    pub fn new(state: &LedgerState) -> Self {
        let names = state.container_counters.clone().into_iter().collect();
        Self { host: state.totals.clone(), names, ..Self::default() }
    }

    /// Writes all counters with the next changes: the store lost them.
    pub fn mark_all_changed(&mut self) {
        self.host_changed = true;
        self.changed.extend(self.names.keys().cloned());
    }

    /// Adds to a counter of the host; a negative number only corrects what was never published.
    pub fn add(&mut self, total: Total, number: i64) {
        let count = self.host.entry(total).or_insert(0);
        *count = count.saturating_add_signed(number);
        self.host_changed = true;
    }

    /// Returns a counter of the host.
    pub fn get(&self, total: Total) -> u64 {
        self.host.get(&total).copied().unwrap_or(0)
    }

    fn entry(&mut self, name: &Identity, at: f64) -> &mut ContainerCounters {
        self.changed.insert(name.clone());
        let counts = self.names.entry(name.clone()).or_default();
        counts.since = counts.since.or(Some(at));
        counts.touched = counts.touched.max(at);
        counts
    }

    /// Counts a kill in a container of this name.
    pub fn count_kill(&mut self, name: &Identity, victim: Victim, scope: OomScope, at: f64) {
        let counts = self.entry(name, at);
        counts.kills[victim as usize][scope as usize] += 1;
    }

    /// Sets the time of the last kill of a container of this name, before the kill is settled; `now` is the Unix time.
    pub fn set_last_kill(&mut self, name: &Identity, at: f64, now: f64) {
        let counts = self.entry(name, at);
        // of two that are read late, the later one; but a later one than now is of a wrong clock
        let later = counts.last_kill.filter(|last| *last > at && *last <= now + MIN_CLOCK_STEP);
        counts.last_kill = Some(later.unwrap_or(at));
    }

    /// Moves what was counted under a short id to the name that became known. Returns whether there was anything.
    pub fn move_to(&mut self, before: &Identity, name: &Identity) -> bool {
        let Some(moved) = self.names.remove(before) else { return false };
        self.changed.insert(before.clone());
        let counts = self.entry(name, moved.since.unwrap_or(moved.touched));
        counts.add(moved);
        true
    }

    /// Corrects the last times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        for (name, counts) in &mut self.names {
            let before = counts.clone();
            let [since, kill, cuda_oom] =
                [&mut counts.since, &mut counts.last_kill, &mut counts.last_cuda_oom].map(Option::as_mut);
            [since, kill, cuda_oom, Some(&mut counts.touched)]
                .into_iter()
                .flatten()
                .for_each(|last| step.correct(last));
            if *counts != before {
                self.changed.insert(name.clone());
            }
        }
    }

    /// Counts a start of a container of this name.
    pub fn count_start(&mut self, name: &Identity, at: f64) {
        self.entry(name, at).starts += 1;
    }

    /// Begins to count CUDA out-of-memory errors of containers of this name, whose processes report or whose log is read.
    pub fn begin_cuda_ooms(&mut self, name: &Identity, source: CudaOomSource, at: f64) {
        if self.names.get_mut(name).is_none_or(|counts| counts.cuda_ooms_mut(source).is_none()) {
            *self.entry(name, at).cuda_ooms_mut(source) = Some(0);
        }
    }

    /// Counts CUDA out-of-memory errors in a container of this name.
    pub fn count_cuda_ooms(&mut self, name: &Identity, source: CudaOomSource, errors: u64, at: f64) {
        let counts = self.entry(name, at);
        let count = counts.cuda_ooms_mut(source);
        *count = Some(count.unwrap_or(0).saturating_add(errors));
        counts.last_cuda_oom = Some(at);
    }

    /// Counts an exit of a container of this name.
    pub fn count_exit(&mut self, name: &Identity, reason: ExitReason, exit_code: Option<i64>, at: f64) {
        let counts = self.entry(name, at);
        *counts.exits.entry(reason.label().to_owned()).or_insert(0) += 1;
        counts.last_exit_code = exit_code.or(counts.last_exit_code);
    }

    /// Returns the figures of one name; all 0 if it has no events.
    pub fn figures(&self, name: &Identity) -> ContainerFigures {
        let counts = self.names.get(name).cloned().unwrap_or_default();
        ContainerFigures {
            identity: name.clone(),
            since: counts.since,
            kills: counts.kills,
            last_kill: counts.last_kill,
            exits: ExitReason::ALL.map(|reason| counts.exits.get(reason.label()).copied().unwrap_or(0)),
            last_exit_code: counts.last_exit_code,
            restarts: counts.starts.saturating_sub(1),
            cuda_ooms: [counts.cuda_ooms, counts.cuda_ooms_in_log],
            last_cuda_oom: counts.last_cuda_oom,
            ..ContainerFigures::default()
        }
    }

    /// Writes the changes. If there are too many names, removes unused ones, those without kills first.
    pub fn write(&mut self, changes: &mut WriteBatch, is_used: impl Fn(&Identity) -> bool) {
        if std::mem::take(&mut self.host_changed) {
            for (total, count) in &self.host {
                changes.put(StateKind::Total, total.key(), count);
            }
        }
        for name in std::mem::take(&mut self.changed) {
            match self.names.get(&name) {
                Some(counters) => changes.put(StateKind::Counters, &name, counters),
                None => changes.remove(StateKind::Counters, &name),
            }
        }
        if self.names.len() > MAX_NAMES {
            let mut by_age: Vec<_> = self
                .names
                .iter()
                .filter(|(name, _)| !is_used(name))
                .map(|(name, counts)| ((counts.last_kill.is_some(), counts.touched), name.clone()))
                .collect();
            by_age.sort_by(|one, other| one.0.0.cmp(&other.0.0).then(one.0.1.total_cmp(&other.0.1)));
            for (_, name) in by_age.into_iter().take(MAX_NAMES / 10) {
                self.names.remove(&name);
                changes.remove(StateKind::Counters, &name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_counted_since_its_first_event() {
        let name = Identity { name: "train".into(), ..Identity::default() };
        let mut totals = Totals::default();
        assert_eq!(totals.figures(&name).since, None);
        totals.count_start(&name, 5.0);
        totals.count_kill(&name, Victim::Child, OomScope::Host, 9.0);
        assert_eq!(totals.figures(&name).since, Some(5.0));
        let stored = serde_json::to_string(&totals.names[&name]).unwrap();
        assert_eq!(serde_json::from_str::<ContainerCounters>(&stored).unwrap(), totals.names[&name]);
    }

    #[test]
    fn counters_continue_from_the_stored_values() {
        let name = Identity { name: "train".into(), ..Identity::default() };
        let mut totals = Totals::default();
        totals.add(Total::Host, 2);
        totals.add(Total::Host, -1);
        totals.count_start(&name, 1.0);
        totals.count_start(&name, 2.0);
        totals.count_kill(&name, Victim::Child, OomScope::Host, 3.0);
        totals.count_exit(&name, ExitReason::OomHost, Some(137), 4.0);
        let mut changes = WriteBatch::default();
        totals.write(&mut changes, |_| true);
        let mut rows = crate::ledger::store::StateRows::default();
        for ((kind, key), value) in changes.state {
            rows.add(kind.label().to_owned(), key, value.unwrap());
        }
        let stored = LedgerState::of_rows(rows);
        let again = Totals::new(&stored);
        assert_eq!(again.get(Total::Host), 1);
        assert_eq!(again.figures(&name), totals.figures(&name));
        let figures = again.figures(&name);
        assert_eq!((figures.restarts, figures.kills[1][1], figures.last_exit_code), (1, 1, Some(137)));
    }

    #[test]
    fn removes_least_recently_used_names_above_the_limit() {
        let name = |number: usize| Identity { name: number.to_string().into(), ..Identity::default() };
        let mut totals = Totals::default();
        for number in 0..=MAX_NAMES {
            totals.count_start(&name(number), number as f64);
        }
        let mut changes = WriteBatch::default();
        totals.write(&mut changes, |_| false);
        assert_eq!(totals.names.len(), MAX_NAMES + 1 - MAX_NAMES / 10);
        let row = |number: usize| changes.state[&(StateKind::Counters, name(number).to_string())].is_some();
        assert!(!row(0) && row(MAX_NAMES), "also removed from the store");
    }
}
