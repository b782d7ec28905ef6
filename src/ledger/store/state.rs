//! The state beside events and runs: rows of one table, each with a kind, a key and a value as JSON.
//!
//! All rows are loaded at the start, and a row is written when it changed. A row that cannot be parsed is logged, counted and
//! skipped: it costs what it held, and nothing else.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use rusqlite::{Connection, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::clock::ClockStep;
use crate::discover::ContainerId;
use crate::events::{ContainerRef, Identity, LedgerEvent};
use crate::gpu_state::gpu_count::GpuCount;
use crate::ledger::container_state::ContainerState;
use crate::ledger::interval::Interval;
use crate::ledger::reconcile::{AccountingCheckpoint, CountingStart, PersistedKill};
use crate::ledger::totals::{ContainerCounters, Total};
use crate::lifecycle::RunNumber;
use crate::runs::RunRecord;

/// Maximum number of records of runs that wait for a full disk; beyond that the oldest are dropped.
const MAX_WAITING_RUNS: usize = 1_000;

/// What a row of state is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateKind {
    /// A counter of the host, by its name.
    Total,
    /// The counters of a container name, by `NAMESPACE/POD/NAME`.
    Counters,
    /// A known container, by its id.
    Container,
    /// What belongs to a pending kill beside its event, by the id of the event.
    PendingKill,
    /// Attributed kills, by the inode of the cgroup that counted them.
    CgroupKills,
    /// How far the kernel log and the kernel's counter were read.
    Accounting,
    /// Unix time of the last event of a runtime, by its name.
    RuntimeCursor,
    /// Id of the last event that a follower has processed, by its name.
    FollowerCursor,
    /// The highest number of GPUs that a driver counted, by its name.
    GpuCount,
    /// Unix time of the ledger's first start; its counters count from then.
    StartedAt,
    /// The highest number of a run.
    LastRun,
    /// Where the counting of a new ledger begins, until it has caught up with the past of its host.
    FirstStart,
}

impl StateKind {
    /// Returns the value of the column.
    pub fn label(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Counters => "counters",
            Self::Container => "container",
            Self::PendingKill => "pending_kill",
            Self::CgroupKills => "cgroup_kills",
            Self::Accounting => "accounting",
            Self::RuntimeCursor => "runtime_cursor",
            Self::FollowerCursor => "follower_cursor",
            Self::GpuCount => "gpu_count",
            Self::StartedAt => "started_at",
            Self::LastRun => "last_run",
            Self::FirstStart => "first_start",
        }
    }
}

/// New values of rows, as JSON; `None` removes a row.
pub type StateChanges = BTreeMap<(StateKind, String), Option<String>>;

/// The content of one transaction. All values are absolute, so writing them twice changes nothing.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    /// New and changed events; a later one replaces an earlier one with the same id. `None` removes an event, and the stored
    /// record of the run of an exit.
    pub events: BTreeMap<u64, Option<LedgerEvent>>,
    /// Records of runs that ended, by the id of the exit.
    pub runs: BTreeMap<u64, RunRecord>,
    /// All other state.
    pub state: StateChanges,
    /// Corrections of the times of the stored events from an id on, and of the runs that ended with them; before all else.
    pub corrections: Vec<(u64, ClockStep)>,
    /// New names of containers, for their stored events and runs.
    pub renames: BTreeMap<ContainerId, Identity>,
}

impl FromIterator<LedgerEvent> for WriteBatch {
    fn from_iter<T: IntoIterator<Item = LedgerEvent>>(events: T) -> Self {
        let mut batch = Self::default();
        events.into_iter().for_each(|event| batch.put_event(event));
        batch
    }
}

impl WriteBatch {
    /// Sets an event.
    pub fn put_event(&mut self, event: LedgerEvent) {
        self.events.insert(event.id(), Some(event));
    }

    /// Sets a row of state.
    pub fn put(&mut self, kind: StateKind, key: impl Display, value: &impl Serialize) {
        match serde_json::to_string(value) {
            Ok(json) => {
                self.state.insert((kind, key.to_string()), Some(json));
            }
            Err(error) => {
                tracing::error!(kind = kind.label(), %key, %error, "state cannot be written as JSON; skipped")
            }
        }
    }

    /// Removes a row of state.
    pub fn remove(&mut self, kind: StateKind, key: impl Display) {
        self.state.insert((kind, key.to_string()), None);
    }

    /// Returns true if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
            && self.runs.is_empty()
            && self.state.is_empty()
            && self.corrections.is_empty()
            && self.renames.is_empty()
    }

    /// Adds later changes.
    pub fn merge(&mut self, later: WriteBatch) {
        for (id, identity) in later.renames {
            self.rename(id, identity);
        }
        for (id, _) in later.events.iter().filter(|(_, event)| event.is_none()) {
            self.runs.remove(id);
        }
        self.events.extend(later.events);
        self.runs.extend(later.runs);
        self.state.extend(later.state);
        self.corrections.extend(later.corrections);
    }

    /// Gives a container another name in its events and runs, in these changes and in the store.
    pub fn rename(&mut self, id: ContainerId, identity: Identity) {
        let is_its = |subject: &ContainerRef| *subject.container_id == *id.as_str();
        let events = self.events.values_mut().flatten();
        events.filter(|event| event.subject().is_some_and(is_its)).for_each(|event| event.rename(&identity));
        self.runs.values_mut().filter(|run| is_its(&run.subject)).for_each(|run| run.rename(&identity));
        self.renames.insert(id, identity);
    }

    /// Corrects the times of these changes, and of the stored events from this id on: the clock was set.
    pub fn correct_times(&mut self, first_id: u64, step: ClockStep) {
        self.events.values_mut().flatten().for_each(|event| event.correct_times(&step));
        self.runs.values_mut().filter_map(|run| run.ended.as_mut()).for_each(|ended| step.correct(ended));
        self.corrections.push((first_id, step));
    }

    /// Drops the oldest settled events until the rest has at most this size, and the oldest records above a maximum. An event that is
    /// stored already is removed from the store, too: a row that stayed there unsettled would be counted again after a restart.
    /// `last_stored` is the highest id in the store.
    pub fn drop_oldest(&mut self, max_bytes: usize, last_stored: u64) {
        let size = |event: &Option<LedgerEvent>| event.as_ref().map_or(0, LedgerEvent::size_estimate);
        let mut excess = self.events.values().map(size).sum::<usize>().saturating_sub(max_bytes);
        self.events.retain(|id, event| {
            let is_dropped = excess > 0 && event.as_ref().is_some_and(LedgerEvent::settled);
            if is_dropped {
                excess = excess.saturating_sub(size(event));
                *event = None;
            }
            !is_dropped || *id <= last_stored
        });
        while self.runs.len() > MAX_WAITING_RUNS {
            self.runs.pop_first();
        }
    }
}

/// The content of the store when it was opened, without the settled events.
#[derive(Clone, Debug, Default)]
pub struct LedgerState {
    /// See [`StateKind::Total`].
    pub totals: BTreeMap<Total, u64>,
    /// See [`StateKind::Counters`].
    pub container_counters: BTreeMap<Identity, ContainerCounters>,
    /// See [`StateKind::Container`].
    pub containers: BTreeMap<ContainerId, ContainerState>,
    /// See [`StateKind::PendingKill`].
    pub pending_kills: BTreeMap<u64, PersistedKill>,
    /// See [`StateKind::CgroupKills`].
    pub cgroup_kills: BTreeMap<u64, u64>,
    /// See [`StateKind::Accounting`].
    pub accounting: Option<AccountingCheckpoint>,
    /// See [`StateKind::RuntimeCursor`].
    pub runtime_cursors: BTreeMap<String, f64>,
    /// See [`StateKind::FollowerCursor`].
    pub follower_cursors: BTreeMap<String, u64>,
    /// See [`StateKind::GpuCount`].
    pub gpu_counts: BTreeMap<String, GpuCount>,
    /// See [`StateKind::StartedAt`].
    pub started_at: Option<f64>,
    /// See [`StateKind::FirstStart`].
    pub first_start: Option<CountingStart>,
    /// Events that were not settled, by id.
    pub unsettled: Vec<LedgerEvent>,
    /// The highest id that any event ever had, even if it was removed; 0 if there was none.
    pub last_id: u64,
    /// See [`StateKind::LastRun`]; at least that of each record.
    pub last_run: RunNumber,
    /// Ids of the newest unattributed kills, and when they happened: they may explain an exit that is reported late.
    pub unattributed: Vec<(u64, Interval)>,
    /// Only if the row of the accounting is unreadable: by boot, the stamp of the newest record among the events.
    pub last_records: BTreeMap<String, u64>,
    /// Rows that could not be parsed and were skipped.
    pub unreadable_rows: u64,
}

impl LedgerState {
    /// Returns true if no ledger was ever written, but for where its counting begins.
    pub fn is_new(&self) -> bool {
        self.first_start.is_some() || self.accounting.is_none() && self.started_at.is_none()
    }

    /// Loads everything but what belongs to events.
    pub(super) fn load(connection: &Connection) -> rusqlite::Result<Self> {
        let mut statement = connection.prepare("SELECT kind, key, value FROM state")?;
        let mut rows = StateRows::default();
        let mut read = statement.query([])?;
        while let Some(row) = read.next()? {
            rows.add(row.get(0)?, row.get(1)?, row.get(2)?);
        }
        Ok(Self::of_rows(rows))
    }

    /// Parses rows.
    pub fn of_rows(mut rows: StateRows) -> Self {
        Self {
            totals: rows.parse(StateKind::Total),
            container_counters: rows.parse(StateKind::Counters),
            containers: rows.parse(StateKind::Container),
            pending_kills: rows.parse(StateKind::PendingKill),
            cgroup_kills: rows.parse(StateKind::CgroupKills),
            accounting: rows.parse::<String, _>(StateKind::Accounting).into_values().next(),
            runtime_cursors: rows.parse(StateKind::RuntimeCursor),
            follower_cursors: rows.parse(StateKind::FollowerCursor),
            gpu_counts: rows.parse(StateKind::GpuCount),
            started_at: rows.parse::<String, _>(StateKind::StartedAt).into_values().next(),
            first_start: rows.parse::<String, _>(StateKind::FirstStart).into_values().next(),
            last_run: rows.parse::<String, _>(StateKind::LastRun).into_values().next().unwrap_or_default(),
            unreadable_rows: rows.unreadable,
            ..Self::default()
        }
    }
}

/// Rows that are not parsed yet.
#[derive(Clone, Debug, Default)]
pub struct StateRows {
    by_kind: BTreeMap<String, Vec<(String, String)>>,
    unreadable: u64,
}

impl StateRows {
    /// Adds a row.
    pub fn add(&mut self, kind: String, key: String, value: String) {
        self.by_kind.entry(kind).or_default().push((key, value));
    }

    fn parse<K: FromStr + Ord, V: DeserializeOwned>(&mut self, kind: StateKind) -> BTreeMap<K, V> {
        let mut parsed = BTreeMap::new();
        for (key, value) in self.by_kind.remove(kind.label()).unwrap_or_default() {
            match (key.parse(), serde_json::from_str(&value)) {
                (Ok(key), Ok(value)) => {
                    parsed.insert(key, value);
                }
                (_, value) => {
                    self.unreadable += 1;
                    let error =
                        value.err().map_or_else(|| "unknown key".to_owned(), |error| error.to_string());
                    tracing::error!(
                        kind = kind.label(),
                        key,
                        error,
                        "row of the ledger is unreadable; skipped"
                    );
                }
            }
        }
        parsed
    }
}

/// Writes rows.
pub(super) fn write(transaction: &Transaction<'_>, changes: &StateChanges) -> rusqlite::Result<()> {
    let mut set = transaction.prepare(
        "INSERT INTO state (kind, key, value) VALUES (?1, ?2, ?3) \
         ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value WHERE value <> excluded.value",
    )?;
    let mut remove = transaction.prepare("DELETE FROM state WHERE kind = ?1 AND key = ?2")?;
    for ((kind, key), value) in changes {
        match value {
            Some(value) => set.execute(params![kind.label(), key, value])?,
            None => remove.execute(params![kind.label(), key])?,
        };
    }
    Ok(())
}
