//! The state beside the events: one table per kind, each with the columns `key` and `value`.
//!
//! All tables are loaded at the start, and a row is written when it changed. A row that cannot be parsed is logged,
//! counted and skipped: it costs what it held, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::discover::ContainerId;
use crate::ledger::container_state::ContainerState;
use crate::ledger::events::{ContainerLabels, LedgerEvent};
use crate::ledger::interval::Interval;
use crate::ledger::reconcile::{AccountingCheckpoint, PersistedKill};
use crate::ledger::run_record::RunRecord;
use crate::ledger::totals::{ContainerCounters, Total};

/// Maximum number of records of runs that wait for a full disk; beyond that the oldest are dropped.
const MAX_WAITING_RUNS: usize = 1_000;

/// The content of one transaction. All values are absolute, so writing them twice changes nothing; `None` removes a row.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    /// New and changed events; a later one replaces an earlier one with the same id.
    pub events: BTreeMap<u64, LedgerEvent>,
    /// Events that are removed.
    pub removed_events: BTreeSet<u64>,
    /// Records of runs that ended, by the id of the exit.
    pub runs: BTreeMap<u64, RunRecord>,
    /// Counters of the host.
    pub totals: BTreeMap<Total, u64>,
    /// Counters of each container name.
    pub container_counters: BTreeMap<ContainerLabels, Option<ContainerCounters>>,
    /// Known containers.
    pub containers: BTreeMap<ContainerId, Option<ContainerState>>,
    /// What belongs to a pending kill beside its event, by the id of the event.
    pub pending_kills: BTreeMap<u64, Option<PersistedKill>>,
    /// Attributed kills by the inode of the cgroup that counted them.
    pub cgroup_kills: BTreeMap<u64, Option<u64>>,
    /// How far the kernel log and the kernel's counter were read.
    pub accounting: Option<AccountingCheckpoint>,
    /// Unix time of the last event of each runtime.
    pub runtime_cursors: BTreeMap<String, f64>,
    /// Id of the last event that each follower has processed.
    pub follower_cursors: BTreeMap<String, u64>,
    /// Unix time of the ledger's first start; its counters count from then.
    pub started_at: Option<f64>,
}

/// The content of the store when it was opened.
#[derive(Clone, Debug, Default)]
pub struct LoadedState {
    /// See [`WriteBatch`].
    pub totals: BTreeMap<Total, u64>,
    /// See [`WriteBatch`].
    pub container_counters: BTreeMap<ContainerLabels, ContainerCounters>,
    /// See [`WriteBatch`].
    pub containers: BTreeMap<ContainerId, ContainerState>,
    /// See [`WriteBatch`].
    pub pending_kills: BTreeMap<u64, PersistedKill>,
    /// See [`WriteBatch`].
    pub cgroup_kills: BTreeMap<u64, u64>,
    /// See [`WriteBatch`].
    pub accounting: Option<AccountingCheckpoint>,
    /// See [`WriteBatch`].
    pub runtime_cursors: BTreeMap<String, f64>,
    /// See [`WriteBatch`].
    pub follower_cursors: BTreeMap<String, u64>,
    /// See [`WriteBatch`].
    pub started_at: Option<f64>,
    /// Events that were not settled, by id.
    pub unsettled: Vec<LedgerEvent>,
    /// The highest id that any event ever had, even if it was removed; 0 if there was none.
    pub last_id: u64,
    /// When the newest unattributed kills happened: they may explain an exit that is reported late.
    pub unattributed: Vec<Interval>,
    /// Only if the row of `accounting` is unreadable: by boot, the stamp of the newest record among the events.
    pub last_records: BTreeMap<String, u64>,
    /// Rows that could not be parsed and were skipped.
    pub unreadable_rows: u64,
}

impl LoadedState {
    /// Returns true if no ledger was ever written.
    pub fn is_new(&self) -> bool {
        self.accounting.is_none() && self.started_at.is_none()
    }
}

impl WriteBatch {
    /// Returns true if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        let Self { events, removed_events, runs, totals, container_counters, containers, .. } = self;
        let Self { pending_kills, cgroup_kills, accounting, runtime_cursors, follower_cursors, .. } = self;
        events.is_empty()
            && removed_events.is_empty()
            && runs.is_empty()
            && totals.is_empty()
            && container_counters.is_empty()
            && containers.is_empty()
            && pending_kills.is_empty()
            && cgroup_kills.is_empty()
            && accounting.is_none()
            && runtime_cursors.is_empty()
            && follower_cursors.is_empty()
            && self.started_at.is_none()
    }

    /// Adds later changes.
    pub fn merge(&mut self, later: WriteBatch) {
        self.events.extend(later.events);
        self.removed_events.extend(later.removed_events);
        self.runs.extend(later.runs);
        self.totals.extend(later.totals);
        self.container_counters.extend(later.container_counters);
        self.containers.extend(later.containers);
        self.pending_kills.extend(later.pending_kills);
        self.cgroup_kills.extend(later.cgroup_kills);
        self.accounting = later.accounting.or(self.accounting.take());
        self.runtime_cursors.extend(later.runtime_cursors);
        self.follower_cursors.extend(later.follower_cursors);
        self.started_at = later.started_at.or(self.started_at);
    }

    /// Removes the oldest settled events above this number, also from the store: a row that stayed there unsettled
    /// would be counted again after a restart. `last_stored` is the highest id in the store.
    pub fn drop_oldest_events(&mut self, max_events: usize, last_stored: u64) {
        let excess = self.events.len().saturating_sub(max_events);
        let oldest: Vec<u64> =
            self.events.iter().filter(|(_, event)| event.settled()).map(|(id, _)| *id).take(excess).collect();
        for id in oldest {
            self.events.remove(&id);
            if id <= last_stored {
                self.removed_events.insert(id);
            }
        }
        while self.runs.len() > MAX_WAITING_RUNS {
            self.runs.pop_first();
        }
    }

    /// Writes everything but events and runs.
    pub(super) fn write_state(&self, transaction: &Transaction<'_>) -> rusqlite::Result<()> {
        let writer = TableWriter { transaction };
        writer.set("totals", &self.totals)?;
        writer.set_or_remove("container_counters", &self.container_counters)?;
        writer.set_or_remove("containers", &self.containers)?;
        writer.set_or_remove("pending_kills", &self.pending_kills)?;
        writer.set_or_remove("cgroup_kills", &self.cgroup_kills)?;
        writer.set("accounting", self.accounting.iter().map(|value| (&Only, value)))?;
        writer.set("runtime_cursors", &self.runtime_cursors)?;
        writer.set("follower_cursors", &self.follower_cursors)?;
        writer.set("started_at", self.started_at.iter().map(|value| (&Only, value)))
    }
}

/// Loads everything but the events.
pub fn load_state(connection: &Connection) -> rusqlite::Result<LoadedState> {
    let mut reader = TableReader { connection, unreadable_rows: 0 };
    Ok(LoadedState {
        totals: reader.load("totals")?,
        container_counters: reader.load("container_counters")?,
        containers: reader.load("containers")?,
        pending_kills: reader.load("pending_kills")?,
        cgroup_kills: reader.load("cgroup_kills")?,
        accounting: reader.load::<Only, _>("accounting")?.remove(&Only),
        runtime_cursors: reader.load("runtime_cursors")?,
        follower_cursors: reader.load("follower_cursors")?,
        started_at: reader.load::<Only, _>("started_at")?.remove(&Only),
        unreadable_rows: reader.unreadable_rows,
        ..LoadedState::default()
    })
}

struct TableWriter<'a> {
    transaction: &'a Transaction<'a>,
}

impl TableWriter<'_> {
    fn set<'r, K: ColumnValue + 'r, V: ColumnValue + 'r>(
        &self,
        table: &str,
        rows: impl IntoIterator<Item = (&'r K, &'r V)>,
    ) -> rusqlite::Result<()> {
        let mut statement = self.transaction.prepare(&format!(
            "INSERT INTO {table} (key, value) VALUES (?1, ?2) \
             ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE value <> excluded.value"
        ))?;
        for (key, value) in rows {
            let columns = key.to_value().and_then(|key| Ok((key, value.to_value()?)));
            let (key, value) = columns.map_err(rusqlite::Error::ToSqlConversionFailure)?;
            statement.execute(params![key, value])?;
        }
        Ok(())
    }

    fn set_or_remove<K: ColumnValue, V: ColumnValue>(
        &self,
        table: &str,
        rows: &BTreeMap<K, Option<V>>,
    ) -> rusqlite::Result<()> {
        self.set(table, rows.iter().filter_map(|(key, value)| Some((key, value.as_ref()?))))?;
        let mut statement = self.transaction.prepare(&format!("DELETE FROM {table} WHERE key = ?1"))?;
        for key in rows.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| key) {
            statement.execute(params![key.to_value().map_err(rusqlite::Error::ToSqlConversionFailure)?])?;
        }
        Ok(())
    }
}

struct TableReader<'a> {
    connection: &'a Connection,
    unreadable_rows: u64,
}

impl TableReader<'_> {
    fn load<K: ColumnValue + Ord, V: ColumnValue>(
        &mut self,
        table: &str,
    ) -> rusqlite::Result<BTreeMap<K, V>> {
        let mut statement = self.connection.prepare(&format!("SELECT key, value FROM {table}"))?;
        let mut rows = statement.query([])?;
        let mut loaded = BTreeMap::new();
        while let Some(row) = rows.next()? {
            let (key, value) = (row.get_ref(0)?, row.get_ref(1)?);
            match K::from_value(key).and_then(|key| Ok((key, V::from_value(value)?))) {
                Ok((key, value)) => {
                    loaded.insert(key, value);
                }
                Err(error) => {
                    self.unreadable_rows += 1;
                    tracing::error!(table, ?key, %error, "row of the ledger is unreadable; skipped");
                }
            }
        }
        Ok(loaded)
    }
}

type ColumnError = Box<dyn Error + Send + Sync>;

/// A key or a value of a table.
trait ColumnValue: Sized {
    fn to_value(&self) -> Result<Value, ColumnError>;
    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError>;
}

/// The key of a table with one row.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Only;

impl ColumnValue for Only {
    fn to_value(&self) -> Result<Value, ColumnError> {
        Ok(Value::Integer(1))
    }

    fn from_value(_: ValueRef<'_>) -> Result<Self, ColumnError> {
        Ok(Only)
    }
}

/// SQLite's integers are signed; the bits are kept, because an inode may use all of them.
impl ColumnValue for u64 {
    fn to_value(&self) -> Result<Value, ColumnError> {
        Ok(Value::Integer(self.cast_signed()))
    }

    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
        Ok(value.as_i64()?.cast_unsigned())
    }
}

impl ColumnValue for f64 {
    fn to_value(&self) -> Result<Value, ColumnError> {
        Ok(Value::Real(*self))
    }

    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
        Ok(value.as_f64()?)
    }
}

impl ColumnValue for String {
    fn to_value(&self) -> Result<Value, ColumnError> {
        Ok(Value::Text(self.clone()))
    }

    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
        Ok(value.as_str()?.to_owned())
    }
}

impl ColumnValue for ContainerId {
    fn to_value(&self) -> Result<Value, ColumnError> {
        Ok(Value::Text(self.as_str().to_owned()))
    }

    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
        Ok(ContainerId::new(value.as_str()?))
    }
}

impl ColumnValue for Total {
    fn to_value(&self) -> Result<Value, ColumnError> {
        Ok(Value::Text(self.key().to_owned()))
    }

    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
        let key = value.as_str()?;
        Total::ALL.into_iter().find(|total| total.key() == key).ok_or_else(|| "unknown counter".into())
    }
}

/// `NAMESPACE/POD/NAME`: namespace and pod cannot contain a slash.
impl ColumnValue for ContainerLabels {
    fn to_value(&self) -> Result<Value, ColumnError> {
        let Self { k8s_namespace_name, k8s_pod_name, container_name } = self;
        Ok(Value::Text(format!("{k8s_namespace_name}/{k8s_pod_name}/{container_name}")))
    }

    fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
        let mut parts = value.as_str()?.splitn(3, '/');
        let mut part = || parts.next().ok_or("expected NAMESPACE/POD/NAME");
        let (namespace, pod, name) = (part()?, part()?, part()?);
        Ok(Self {
            k8s_namespace_name: namespace.into(),
            k8s_pod_name: pod.into(),
            container_name: name.into(),
        })
    }
}

fn to_json(value: &impl Serialize) -> Result<Value, ColumnError> {
    Ok(Value::Text(serde_json::to_string(value)?))
}

fn from_json<T: DeserializeOwned>(value: ValueRef<'_>) -> Result<T, ColumnError> {
    Ok(serde_json::from_str(value.as_str()?)?)
}

macro_rules! json_columns {
    ($($type:ty),*) => {$(
        impl ColumnValue for $type {
            fn to_value(&self) -> Result<Value, ColumnError> {
                to_json(self)
            }

            fn from_value(value: ValueRef<'_>) -> Result<Self, ColumnError> {
                from_json(value)
            }
        }
    )*};
}

json_columns!(ContainerState, ContainerCounters, PersistedKill, AccountingCheckpoint);
