//! Writes what the reconciler decides: commits it to the store, logs it, and removes what is old.
//!
//! A commit that fails is retried, merged with later ones; so is one to a directory that cannot be used yet. A damaged file is
//! replaced by a new one with the whole state.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;

use super::event_log::{self, LogSink};
use super::exchange::SharedState;
use super::follow::{Follower, Sink};
use super::reconcile::{CountingStart, Reconciler};
use super::store::{
    EventReader, LedgerState, OpenedStore, StateKind, Store, StoreError, StoreReader, WriteBatch,
};
use super::totals::Total;
use crate::clock::{ClockStep, Timestamp};
use crate::config::StateSettings;
use crate::events::{Kill, LedgerEvent};
use crate::gpu_state::gpu_count::GpuCount;
use crate::host::Health;
use crate::stats::report_stats::{ReportStats, ReportTarget};

/// How long to wait for another memledger to exit while it is being replaced.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before a failed commit is retried.
const COMMIT_RETRY_DELAY: Duration = Duration::from_secs(2);
/// Interval between removals of old events.
const RETENTION_INTERVAL: Duration = Duration::from_secs(600);
/// They are also removed once this share of the maximum size was written.
const RETENTION_SHARE: u64 = 16;
/// Maximum size of the events that wait for a disk, in bytes of memory; beyond that the oldest settled ones are dropped.
const MAX_WAITING_BYTES: usize = 16 << 20;
/// The cursor of the log.
const LOG: &str = "log";

/// Where the ledger is kept.
#[derive(Debug)]
enum Medium {
    /// In the file of a directory; `None` while it cannot be opened for writing.
    Disk(PathBuf, Option<Store>),
    /// In memory, by configuration.
    Memory(Arc<Mutex<Store>>),
}

/// A locked store in memory, or the one on disk.
enum OpenStore<'a> {
    Locked(MutexGuard<'a, Store>),
    Own(&'a mut Store),
}

impl std::ops::Deref for OpenStore<'_> {
    type Target = Store;

    fn deref(&self) -> &Store {
        match self {
            Self::Locked(store) => store,
            Self::Own(store) => store,
        }
    }
}

impl std::ops::DerefMut for OpenStore<'_> {
    fn deref_mut(&mut self) -> &mut Store {
        match self {
            Self::Locked(store) => store,
            Self::Own(store) => store,
        }
    }
}

impl Medium {
    /// Returns the store if it is open.
    fn store(&mut self) -> Option<OpenStore<'_>> {
        match self {
            Self::Disk(_, store) => store.as_mut().map(OpenStore::Own),
            Self::Memory(store) => {
                Some(OpenStore::Locked(store.lock().unwrap_or_else(PoisonError::into_inner)))
            }
        }
    }
}

/// Writes the ledger.
#[derive(Debug)]
pub struct LedgerWriter {
    medium: Medium,
    settings: StateSettings,
    /// What the store had when it was read.
    loaded: (u64, BTreeMap<Total, u64>),
    /// The cursors of all followers.
    cursors: BTreeMap<String, u64>,
    /// How many GPUs each driver counted.
    gpu_counts: BTreeMap<String, GpuCount>,
    started_at: f64,
    unreadable_rows: u64,
    pending: WriteBatch,
    /// Kills that were noticed and are not logged yet.
    noticed: Vec<Kill>,
    /// Highest id of an event in the store.
    stored_id: u64,
    commits: Health,
    log: Follower<LogSink>,
    last_retention: Option<Timestamp>,
    /// Bytes that were written since.
    written_bytes: u64,
    last_step: Timestamp,
}

impl LedgerWriter {
    /// Opens the ledger in the configured directory, or reads it where it can only be read. Returns its state, in which later ids are
    /// unused.
    ///
    /// # Errors
    /// Another memledger writes to the same ledger: two would count everything twice. Or there is a ledger that cannot be read: counts
    /// from 0 would later jump.
    pub fn open(settings: &StateSettings, now: Timestamp) -> Result<(Self, LedgerState), StoreError> {
        let Some(directory) = &settings.path else {
            let medium = Medium::Memory(Arc::new(Mutex::new(Store::in_memory()?)));
            return Ok(Self::with(settings, LedgerState::default(), medium, now));
        };
        let error = match Store::open(directory, PREDECESSOR_TIMEOUT) {
            Ok(opened) => {
                let (store, state) = log_opened(opened);
                return Ok(Self::with(settings, state, Medium::Disk(directory.clone(), Some(store)), now));
            }
            Err(error @ StoreError::InUse { .. }) => return Err(error),
            Err(error) => error,
        };
        let state = match StoreReader::open(directory).and_then(|reader| reader.load()) {
            Ok(state) => state,
            Err(StoreError::Foreign { .. } | StoreError::Corrupt { .. } | StoreError::NoLedger { .. }) => {
                LedgerState::default()
            }
            Err(_) => return Err(error),
        };
        tracing::error!(
            error = &error as &dyn std::error::Error,
            consequence =
                "keeping it in memory and retrying; the counts continue from those that can be read",
            "opening the ledger failed"
        );
        Ok(Self::with(settings, state, Medium::Disk(directory.clone(), None), now))
    }

    fn with(
        settings: &StateSettings,
        state: LedgerState,
        mut medium: Medium,
        now: Timestamp,
    ) -> (Self, LedgerState) {
        let mut cursors = state.follower_cursors.clone();
        // a new follower starts with the next event that settles
        let newest = state.unsettled.first().map_or(state.last_id, |event| event.id().saturating_sub(1));
        cursors.entry(LOG.to_owned()).or_insert(newest);
        let loaded = (state.last_id, state.totals.clone());
        // a store without that row has counted at least since its oldest event
        let mut oldest = || medium.store()?.reader().oldest().ok()?;
        let now_unix = now.unix_seconds();
        let started_at = state.started_at.unwrap_or_else(|| oldest().map_or(now_unix, |at| at.min(now_unix)));
        let mut writer = Self {
            medium,
            settings: settings.clone(),
            loaded,
            cursors,
            gpu_counts: state.gpu_counts.clone(),
            started_at,
            unreadable_rows: state.unreadable_rows,
            pending: WriteBatch::default(),
            noticed: vec![],
            stored_id: state.last_id,
            commits: Health::default(),
            log: Follower::new(LOG, LogSink),
            last_retention: None,
            written_bytes: 0,
            last_step: now,
        };
        if state.started_at.is_none() {
            writer.pending.put(StateKind::StartedAt, "", &started_at);
        }
        writer.put_cursors(writer.cursors.clone());
        (writer, state)
    }

    /// Returns the cursors of all followers.
    pub fn cursors(&self) -> BTreeMap<String, u64> {
        self.cursors.clone()
    }

    /// Returns how many GPUs each driver counted.
    pub fn gpu_counts(&self) -> BTreeMap<String, GpuCount> {
        self.gpu_counts.clone()
    }

    /// Returns the store in memory, if there is one.
    pub fn memory(&self) -> Option<Arc<Mutex<Store>>> {
        match &self.medium {
            Medium::Disk(..) => None,
            Medium::Memory(store) => Some(Arc::clone(store)),
        }
    }

    /// Returns the Unix time of the ledger's first start.
    pub fn started_at(&self) -> f64 {
        self.started_at
    }

    /// Returns whether events are written to disk; `None` if that is disabled.
    pub fn is_up(&self) -> Option<bool> {
        match &self.medium {
            Medium::Memory(_) => None,
            Medium::Disk(_, store) => Some(store.is_some() && !self.commits.is_failing()),
        }
    }

    /// Returns the number of rows that could not be parsed when the store was opened.
    pub fn unreadable_rows(&self) -> u64 {
        self.unreadable_rows
    }

    /// Writes where the counting of a new ledger begins.
    pub fn put_first_start(
        &mut self,
        now: Timestamp,
        start: &CountingStart,
        reconciler: &mut Reconciler,
        shared_state: &SharedState,
    ) {
        self.pending.put(StateKind::FirstStart, "", start);
        self.commit(now, reconciler, shared_state);
    }

    /// Adds what was decided before the first step. A kill from before the first start is no news.
    pub fn add(&mut self, changes: WriteBatch, noticed: Vec<Kill>) {
        self.pending.merge(changes);
        self.noticed.extend(noticed.into_iter().filter(|kill| !kill.before_counting));
    }

    /// Commits what the reconciler decides in this step. Returns whether that is anything.
    pub fn write(&mut self, now: Timestamp, reconciler: &mut Reconciler, shared_state: &SharedState) -> bool {
        let has_changes = self.take_changes(now, reconciler);
        self.put_gpu_counts(shared_state.take_gpu_counts());
        self.commit(now, reconciler, shared_state);
        self.apply_retention(now, &shared_state.followers.report_stats);
        self.log_events(shared_state);
        has_changes
    }

    /// Corrects the times of what this process has recorded if the wall clock was set since the last step. Must come before what this
    /// step applies.
    pub fn apply_clock(&mut self, now: Timestamp, reconciler: &mut Reconciler) {
        let before = std::mem::replace(&mut self.last_step, now);
        let Some(step) = ClockStep::between(before, now) else { return };
        reconciler.correct_times(&step);
        self.pending.correct_times(self.loaded.0 + 1, step);
        tracing::warn!(seconds = step.seconds(), "the clock was set; corrected the times that it had given");
    }

    fn put_cursors(&mut self, cursors: BTreeMap<String, u64>) {
        for (follower, cursor) in &cursors {
            self.pending.put(StateKind::FollowerCursor, follower, cursor);
        }
        self.cursors.extend(cursors);
    }

    fn put_gpu_counts(&mut self, counts: BTreeMap<String, GpuCount>) {
        for (source, count) in &counts {
            self.pending.put(StateKind::GpuCount, source, count);
        }
        self.gpu_counts.extend(counts);
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
        self.put_cursors(shared_state.followers.take_acknowledged());
        let is_backing_off = self.commits.has_failed_within(now, COMMIT_RETRY_DELAY);
        let is_damaged = self.medium.store().is_some_and(|store| store.is_damaged());
        if is_backing_off || self.pending.is_empty() && !is_damaged {
            return;
        }
        match self.try_commit(now, reconciler) {
            Ok(()) => {
                let written = std::mem::take(&mut self.pending);
                let size = |event: &Option<LedgerEvent>| event.as_ref().map_or(0, LedgerEvent::size_estimate);
                self.written_bytes += written.events.values().map(size).sum::<usize>() as u64;
                if let Some(last) = written.events.keys().next_back() {
                    self.stored_id = self.stored_id.max(*last);
                    shared_state.followers.mark_written();
                }
                std::mem::take(&mut self.noticed).iter().for_each(event_log::log_noticed);
                self.commits.recovered();
            }
            Err(error) => {
                if self.commits.failed(now) {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "writing the ledger failed; keeping it in memory and retrying");
                }
                self.pending.drop_oldest(MAX_WAITING_BYTES, self.stored_id);
                // without the id, which is another event's if memledger ends before it can write
                let unwritten =
                    std::mem::take(&mut self.noticed).into_iter().map(|kill| Kill { id: 0, ..kill });
                unwritten.for_each(|kill| event_log::log_noticed(&kill));
            }
        }
    }

    fn try_commit(&mut self, now: Timestamp, reconciler: &mut Reconciler) -> Result<(), StoreError> {
        if let Medium::Disk(directory, store @ None) = &mut self.medium {
            let (opened, state) = log_opened(Store::open(directory, Duration::ZERO)?);
            if (state.last_id, &state.totals) != (self.loaded.0, &self.loaded.1) {
                return Err(StoreError::Replaced { directory: directory.clone() });
            }
            *store = Some(opened);
            tracing::info!("the directory of the ledger can be used again; the ledger is written to it");
        }
        let Some(mut store) = self.medium.store() else { return Ok(()) };
        let span = tracing::info_span!("ledger transaction", events = self.pending.events.len() as i64);
        let outcome = span.in_scope(|| store.commit(&self.pending));
        if !store.is_damaged() {
            return outcome;
        }
        drop(store);
        self.add_whole_state(now, reconciler);
        let Some(mut store) = self.medium.store() else { return Ok(()) };
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
        self.put_cursors(self.cursors.clone());
        self.put_gpu_counts(self.gpu_counts.clone());
        self.pending.put(StateKind::StartedAt, "", &self.started_at);
    }

    /// Logs the settled events that were not logged yet.
    fn log_events(&mut self, shared_state: &SharedState) {
        let Some(store) = self.medium.store() else { return };
        let read = async |sink: &LogSink, cursor| sink.reader()(store.reader(), cursor);
        // neither reads nor writes wait for anything but this thread
        let _ = self.log.catch_up(&shared_state.followers, read).now_or_never();
    }

    /// Removes old events, and moves those from the future to now. Both only a day after the boot, and if both clocks agree on the time
    /// since the last removal: a wall clock that is wrong for a while must neither delete events nor change their times.
    fn apply_retention(&mut self, now: Timestamp, report_stats: &ReportStats) {
        let last = self.last_retention;
        let is_full = self.written_bytes > self.settings.max_size_bytes / RETENTION_SHARE;
        if last.is_some_and(|last| now.since(last) < RETENTION_INTERVAL) && !is_full {
            return;
        }
        (self.last_retention, self.written_bytes) = (Some(now), 0);
        let is_right = last.is_some_and(|last| now.is_likely_right(last)) && !is_full;
        let keep = if is_right { self.settings.retention.as_secs_f64() } else { f64::MAX };
        let max_bytes = self.settings.max_size_bytes;
        let Some(mut store) = self.medium.store() else { return };
        if is_right && let Ok(moved @ 1..) = store.move_from_future(now.unix_seconds()) {
            tracing::warn!(
                moved,
                "moved events from the future to now: the clock was wrong when they were recorded"
            );
        }
        let unreported = |store: &Store| -> Vec<_> {
            let of = |(target, cursor): (ReportTarget, String)| {
                let after = self.cursors.get(&cursor).copied().unwrap_or(0);
                Some((target, store.reader().count_runs_after(after).ok()?))
            };
            report_stats.cursors().into_iter().filter_map(of).collect()
        };
        let before = unreported(&store);
        let retained = store.retain(now.unix_seconds(), keep, max_bytes);
        let after = unreported(&store);
        for (target, before) in before {
            let Some((_, after)) = after.iter().find(|(other, _)| *other == target) else { continue };
            let lost = before.saturating_sub(*after);
            report_stats.count_lost(target, lost);
            if lost > 0 {
                let advice = "raise --state.retention or --state.max-size, or mend the target";
                tracing::error!(
                    target = target.label(),
                    lost,
                    advice,
                    "removed runs from the ledger before their reports were written"
                );
            }
        }
        match retained {
            Ok(0) => {}
            Ok(removed) => tracing::info!(removed, "removed old events from the ledger"),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "removing old events from the ledger failed");
            }
        }
    }
}

/// Returns how this process's own ledger is read by others.
pub fn event_reader(settings: &StateSettings, memory: Option<Arc<Mutex<Store>>>) -> Option<EventReader> {
    settings.path.clone().map(EventReader::Disk).or(memory.map(EventReader::Memory))
}

/// Logs what was moved aside when a store was opened.
fn log_opened(opened: OpenedStore) -> (Store, LedgerState) {
    if let Some(moved_to) = opened.moved_aside {
        tracing::error!(moved_to = %moved_to.display(), "ledger file is damaged; moved it aside and created a new one, with all counts at 0");
    }
    if let Some(moved_to) = opened.older {
        tracing::warn!(moved_to = %moved_to.display(), "ledger file is of an older version; moved it aside and created a new one, with all counts at 0");
    }
    (opened.store, opened.state)
}

#[cfg(test)]
mod tests;
