//! Writes what the reconciler decides: commits it to the store, then serves the followers.
//!
//! A commit that fails is retried, merged with later changes. A damaged file is replaced by a new one with the whole
//! state. If the directory cannot be used at the start, the ledger is kept in memory, with the counts of a file that
//! can be read, and is written once the directory can be used.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::event_log;
use super::events::Kill;
use super::exchange::SharedState;
use super::followers::Followers;
use super::reconcile::Reconciler;
use super::store::{
    EventReader, FILE, LoadedState, OpenedStore, Query, Store, StoreConnection, StoreError, WriteBatch,
};
use crate::clock::Timestamp;
use crate::config::StateSettings;

/// How long to wait for another memledger to exit while it is being replaced.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before a failed commit is retried.
const COMMIT_RETRY_DELAY: Duration = Duration::from_secs(2);
/// Delay before a directory that could not be used is tried again.
const REOPEN_DELAY: Duration = Duration::from_secs(10);
/// Interval between removals of old events.
const RETENTION_INTERVAL: Duration = Duration::from_secs(600);
/// Maximum number of events that wait for a full disk; beyond that the oldest settled ones are dropped.
const MAX_WAITING: usize = 20_000;

/// Where the ledger is kept.
#[derive(Debug)]
enum Medium {
    /// In the file.
    Disk,
    /// In memory, by configuration.
    Memory,
    /// In memory until the directory can be used; this is what its file has.
    Waiting(Box<LoadedState>),
    /// In memory. There is a ledger whose counts cannot be read: counts from 0 would later jump, so none is shown.
    Unreadable,
}

/// Writes the ledger.
#[derive(Debug)]
pub struct LedgerWriter {
    store: Arc<Mutex<Store>>,
    medium: Medium,
    settings: StateSettings,
    followers: Followers,
    /// The cursors of all followers.
    cursors: BTreeMap<String, u64>,
    started_at: f64,
    unreadable_rows: u64,
    pending: WriteBatch,
    /// Kills that were noticed and are not committed yet.
    noticed: Vec<Kill>,
    /// Highest id of an event in the store.
    stored_id: u64,
    has_new_events: bool,
    commit_failed: Option<Timestamp>,
    reopen_failed: Option<Timestamp>,
    last_retention: Option<Timestamp>,
}

impl LedgerWriter {
    /// Opens the ledger in the configured directory. If that fails, logs an error and keeps the ledger in memory.
    ///
    /// # Errors
    /// Another memledger writes to the same ledger: two would count everything twice.
    pub fn open(settings: &StateSettings, now: Timestamp) -> Result<(Self, LoadedState), StoreError> {
        let (store, mut state, medium) = open_store(settings)?;
        let followers = Followers::new(&state, settings.events_file.as_deref());
        let mut cursors = state.follower_cursors.clone();
        cursors.extend(followers.cursors());
        // an id that a follower has seen is never given to another event, even if the state directory was emptied
        state.last_id = cursors.values().fold(state.last_id, |last, cursor| last.max(*cursor));
        // a store without that row has counted at least since its oldest event
        let oldest =
            || store.oldest().ok().flatten().map_or(now.unix_seconds(), |at| at.min(now.unix_seconds()));
        let started_at = state.started_at.unwrap_or_else(oldest);
        let pending = WriteBatch {
            started_at: state.started_at.is_none().then_some(started_at),
            follower_cursors: followers.cursors(),
            ..WriteBatch::default()
        };
        let writer = Self {
            store: Arc::new(Mutex::new(store)),
            medium,
            settings: settings.clone(),
            followers,
            cursors,
            started_at,
            unreadable_rows: state.unreadable_rows,
            pending,
            noticed: vec![],
            stored_id: state.last_id,
            has_new_events: true, // an earlier process may have left some
            commit_failed: None,
            reopen_failed: Some(now),
            last_retention: None,
        };
        Ok((writer, state))
    }

    /// Returns the id of the last event that a follower has processed, also in an earlier run; 0 if there is none.
    pub fn cursor(&self, follower: &str) -> u64 {
        self.cursors.get(follower).copied().unwrap_or(0)
    }

    /// Returns a reader of the events.
    pub fn event_reader(&self) -> EventReader {
        match (&self.medium, &self.settings.path) {
            (Medium::Disk, Some(directory)) => EventReader::Disk(directory.clone()),
            _ => EventReader::Memory(Arc::clone(&self.store)),
        }
    }

    /// Returns the Unix time of the ledger's first start.
    pub fn started_at(&self) -> f64 {
        self.started_at
    }

    /// Returns whether events are written to disk; `None` if that is disabled.
    pub fn is_up(&self) -> Option<bool> {
        match self.medium {
            Medium::Memory => None,
            Medium::Disk => Some(self.commit_failed.is_none()),
            Medium::Waiting(_) | Medium::Unreadable => Some(false),
        }
    }

    /// Returns false if there is a ledger whose counts cannot be read.
    pub fn has_counts(&self) -> bool {
        !matches!(self.medium, Medium::Unreadable)
    }

    /// Returns the number of rows that could not be parsed when the store was opened.
    pub fn unreadable_rows(&self) -> u64 {
        self.unreadable_rows
    }

    /// Commits what the reconciler decides in this step. Returns whether that is anything.
    pub fn write(&mut self, now: Timestamp, reconciler: &mut Reconciler, shared_state: &SharedState) -> bool {
        let has_changes = self.take_changes(now, reconciler);
        self.set_cursors(shared_state.take_acknowledged());
        self.commit(now, reconciler, shared_state);
        self.apply_retention(now);
        self.run_followers();
        has_changes
    }

    fn set_cursors(&mut self, cursors: BTreeMap<String, u64>) {
        self.pending.follower_cursors.extend(cursors.clone());
        self.cursors.extend(cursors);
    }

    fn take_changes(&mut self, now: Timestamp, reconciler: &mut Reconciler) -> bool {
        let (changes, noticed) = reconciler.settle(now);
        let has_changes = !changes.is_empty();
        self.pending.merge(changes);
        self.noticed.extend(noticed);
        has_changes
    }

    /// Commits pending changes.
    pub fn commit(&mut self, now: Timestamp, reconciler: &mut Reconciler, shared_state: &SharedState) {
        if self.commit_failed.is_some_and(|failed| now.since(failed) < COMMIT_RETRY_DELAY) {
            return;
        }
        self.reopen(now, reconciler);
        if self.pending.is_empty() {
            return;
        }
        match self.try_commit(now, reconciler) {
            Ok(()) => {
                let written = std::mem::take(&mut self.pending);
                if let Some(last) = written.events.keys().next_back() {
                    self.stored_id = self.stored_id.max(*last);
                    self.has_new_events = true;
                    shared_state.mark_written();
                }
                std::mem::take(&mut self.noticed).iter().for_each(event_log::log_noticed);
                self.commit_failed = None;
            }
            Err(error) => {
                if self.commit_failed.replace(now).is_none() {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "writing the ledger failed; keeping it in memory and retrying");
                }
                self.pending.drop_oldest_events(MAX_WAITING, self.stored_id);
                let excess = self.noticed.len().saturating_sub(MAX_WAITING);
                self.noticed.drain(..excess);
            }
        }
    }

    fn try_commit(&mut self, now: Timestamp, reconciler: &mut Reconciler) -> Result<(), StoreError> {
        let store = Arc::clone(&self.store);
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        let span = tracing::info_span!("ledger transaction", events = self.pending.events.len() as i64);
        let outcome = span.in_scope(|| store.commit(&self.pending));
        if !store.is_damaged() {
            return outcome;
        }
        self.add_whole_state(now, reconciler);
        let moved_to = store.replace(&self.pending, reconciler.last_id())?;
        tracing::error!(
            moved_to = %moved_to.display(),
            "ledger file is damaged; moved it aside and wrote a new one with all counts; older events and runs are only in the damaged file"
        );
        Ok(())
    }

    /// Adds everything that a new file needs to the pending changes.
    fn add_whole_state(&mut self, now: Timestamp, reconciler: &mut Reconciler) {
        reconciler.mark_all_changed();
        self.take_changes(now, reconciler);
        self.pending.follower_cursors.extend(self.cursors.clone());
        self.pending.started_at = Some(self.started_at);
    }

    /// Tries to move a ledger that is kept in memory to its directory.
    fn reopen(&mut self, now: Timestamp, reconciler: &mut Reconciler) {
        let (Medium::Waiting(seed), Some(directory)) = (&self.medium, &self.settings.path) else { return };
        if self.reopen_failed.is_some_and(|failed| now.since(failed) < REOPEN_DELAY) {
            return;
        }
        self.reopen_failed = Some(now);
        let Ok(OpenedStore { store: mut disk, state, .. }) = Store::open(directory, Duration::ZERO) else {
            return;
        };
        if (state.last_id, &state.totals) != (seed.last_id, &seed.totals) {
            return; // another memledger wrote it meanwhile: only a restart continues its counts
        }
        self.add_whole_state(now, reconciler);
        let store = Arc::clone(&self.store);
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        let mut batch = self.pending.clone();
        for event in store.events(&Query::default()).unwrap_or_default() {
            batch.events.entry(event.id()).or_insert(event);
        }
        for (id, run) in store.all_runs().unwrap_or_default() {
            batch.runs.entry(id).or_insert(run);
        }
        if disk.commit(&batch).is_ok() {
            *store = disk;
            self.medium = Medium::Disk;
            tracing::info!("the directory of the ledger can be used again; the ledger is written to it");
        }
    }

    fn run_followers(&mut self) {
        if !self.has_new_events && !self.followers.is_failing() {
            return;
        }
        self.has_new_events = false;
        let before = self.followers.cursors();
        let store = Arc::clone(&self.store);
        if let Err(error) = self.followers.follow(&store.lock().unwrap_or_else(PoisonError::into_inner)) {
            self.has_new_events = true;
            tracing::warn!(error = &error as &dyn std::error::Error, "reading new events failed; retrying");
        }
        let cursors = self.followers.cursors();
        if cursors != before {
            self.set_cursors(cursors);
        }
    }

    /// Removes old events. Applies the age limit only if both clocks agree on the time since the last removal: a wall
    /// clock that jumped ahead must not delete events.
    fn apply_retention(&mut self, now: Timestamp) {
        let last = self.last_retention;
        if last.is_some_and(|last| now.since(last) < RETENTION_INTERVAL) {
            return;
        }
        self.last_retention = Some(now);
        let steady = last.is_some_and(|last| {
            (now.unix_seconds() - last.unix_seconds() - now.since(last).as_secs_f64()).abs() < 60.0
        });
        let keep = if steady { self.settings.retention.as_secs_f64() } else { f64::MAX };
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        match store.retain(now.unix_seconds(), keep, self.settings.max_size_bytes) {
            Ok(0) => {}
            Ok(removed) => tracing::info!(removed, "removed old events from the ledger"),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "removing old events from the ledger failed"
                )
            }
        }
    }
}

fn open_store(settings: &StateSettings) -> Result<(Store, LoadedState, Medium), StoreError> {
    let Some(directory) = &settings.path else {
        return Ok((Store::in_memory(0)?, LoadedState::default(), Medium::Memory));
    };
    let error = match Store::open(directory, PREDECESSOR_TIMEOUT) {
        Ok(OpenedStore { store, state, moved_aside }) => {
            if let Some(aside) = moved_aside {
                let aside: PathBuf = aside;
                tracing::error!(moved_to = %aside.display(), "ledger file is damaged; moved it aside and created a new one, with all counts at 0");
            }
            return Ok((store, state, Medium::Disk));
        }
        Err(error @ StoreError::InUse { .. }) => return Err(error),
        Err(error) => error,
    };
    let (state, medium) = match StoreConnection::open(directory).and_then(|reader| reader.load()) {
        Ok(state) => (state.clone(), Medium::Waiting(Box::new(state))),
        Err(StoreError::Foreign { .. } | StoreError::Corrupt { .. } | StoreError::NoLedger { .. }) => {
            (LoadedState::default(), Medium::Waiting(Box::default()))
        }
        Err(_) if !directory.join(FILE).exists() => (LoadedState::default(), Medium::Waiting(Box::default())),
        Err(_) => (LoadedState::default(), Medium::Unreadable),
    };
    let consequence = match &medium {
        Medium::Unreadable => "no counts are shown, because those of the existing ledger cannot be read",
        _ => "keeping it in memory and retrying; the counts continue from those that can be read",
    };
    tracing::error!(error = &error as &dyn std::error::Error, consequence, "opening the ledger failed");
    let mut store = Store::in_memory(state.last_id)?;
    let events = state.unsettled.iter().map(|event| (event.id(), event.clone())).collect();
    store.commit(&WriteBatch { events, ..WriteBatch::default() })?;
    Ok((store, state, medium))
}
