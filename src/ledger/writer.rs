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
    /// Nowhere: there is a ledger that cannot be read. Counts from 0 would later jump, and it gave the ids of new events to
    /// others, so there are neither counts nor events until it can be read.
    Unreadable,
}

/// A store, or what is used instead of one that cannot be opened.
struct OpenedMedium {
    store: Store,
    state: LoadedState,
    medium: Medium,
    /// Why the directory cannot be used.
    error: Option<StoreError>,
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
    /// The directory has another ledger than at the start; this was logged.
    is_replaced: bool,
    /// Reading new events failed, and this was logged.
    is_reading_failed: bool,
    /// The content of a ledger that could not be read before.
    reloaded: Option<LoadedState>,
    last_retention: Option<Timestamp>,
}

impl LedgerWriter {
    /// Opens the ledger in the configured directory. If that fails, logs an error and keeps the ledger in memory.
    ///
    /// # Errors
    /// Another memledger writes to the same ledger: two would count everything twice.
    pub fn open(settings: &StateSettings, now: Timestamp) -> Result<(Self, LoadedState), StoreError> {
        let OpenedMedium { store, state, medium, error } = open_medium(settings, PREDECESSOR_TIMEOUT)?;
        if let Some(error) = error {
            let consequence = match &medium {
                Medium::Unreadable => {
                    "no counts and no events are shown, because those of the existing ledger cannot be read; retrying"
                }
                _ => "keeping it in memory and retrying; the counts continue from those that can be read",
            };
            tracing::error!(
                error = &error as &dyn std::error::Error,
                consequence,
                "opening the ledger failed"
            );
        }
        Ok(Self::with(settings, Arc::new(Mutex::new(store)), state, medium, now))
    }

    /// Creates a writer. Returns it with the state, in which later ids are unused.
    fn with(
        settings: &StateSettings,
        store: Arc<Mutex<Store>>,
        mut state: LoadedState,
        medium: Medium,
        now: Timestamp,
    ) -> (Self, LoadedState) {
        let followers = Followers::new(&state, settings.events_file.as_deref());
        let mut cursors = state.follower_cursors.clone();
        cursors.extend(followers.cursors());
        // an id that a follower has seen is never given to another event, even if the state directory was emptied
        state.last_id = cursors.values().fold(state.last_id, |last, cursor| last.max(*cursor));
        // a store without that row has counted at least since its oldest event
        let oldest = || {
            let store = store.lock().unwrap_or_else(PoisonError::into_inner);
            store.oldest().ok().flatten().map_or(now.unix_seconds(), |at| at.min(now.unix_seconds()))
        };
        let started_at = state.started_at.unwrap_or_else(oldest);
        let pending = WriteBatch {
            started_at: state.started_at.is_none().then_some(started_at),
            follower_cursors: followers.cursors(),
            ..WriteBatch::default()
        };
        let writer = Self {
            store,
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
            is_replaced: false,
            is_reading_failed: false,
            reloaded: None,
            last_retention: None,
        };
        (writer, state)
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
        if matches!(self.medium, Medium::Unreadable) {
            self.reload(now, shared_state);
            return self.drop_changes();
        }
        self.reopen(now, reconciler);
        let is_damaged = self.store.lock().unwrap_or_else(PoisonError::into_inner).is_damaged();
        if self.pending.is_empty() && !is_damaged {
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

    /// Drops the changes of a ledger without a store; its kills are only logged.
    fn drop_changes(&mut self) {
        if matches!(self.medium, Medium::Unreadable) {
            self.pending = WriteBatch::default();
        }
        // they have no id: the ledger that cannot be read may have given it to another event
        for kill in std::mem::take(&mut self.noticed) {
            event_log::log_noticed(&Kill { id: 0, ..kill });
        }
    }

    /// Tries to read a ledger that could not be read before. See [`LedgerWriter::take_reloaded`].
    fn reload(&mut self, now: Timestamp, shared_state: &SharedState) {
        if self.reopen_failed.is_some_and(|failed| now.since(failed) < REOPEN_DELAY) {
            return;
        }
        self.reopen_failed = Some(now);
        let Ok(opened) = open_medium(&self.settings, Duration::ZERO) else { return };
        if matches!(opened.medium, Medium::Unreadable) {
            return;
        }
        *self.store.lock().unwrap_or_else(PoisonError::into_inner) = opened.store;
        let store = Arc::clone(&self.store);
        let noticed = std::mem::take(&mut self.noticed);
        let (writer, state) = Self::with(&self.settings.clone(), store, opened.state, opened.medium, now);
        *self = Self { reloaded: Some(state), noticed, ..writer };
        shared_state.set_loaded_cursors(self.cursors.clone());
        shared_state.mark_written();
        tracing::info!("the ledger can be read again; its counts continue");
    }

    /// Takes the content of a ledger that could not be read when memledger started, and can be read now. What the reconciler
    /// knows until then is not of this ledger.
    pub fn take_reloaded(&mut self) -> Option<LoadedState> {
        self.reloaded.take()
    }

    /// Tries to move a ledger that is kept in memory to its directory.
    fn reopen(&mut self, now: Timestamp, reconciler: &mut Reconciler) {
        let (Medium::Waiting(seed), Some(directory)) = (&self.medium, &self.settings.path) else { return };
        if self.reopen_failed.is_some_and(|failed| now.since(failed) < REOPEN_DELAY) {
            return;
        }
        self.reopen_failed = Some(now);
        let Ok(OpenedStore { store: mut disk, state, moved_aside }) = Store::open(directory, Duration::ZERO)
        else {
            return;
        };
        if let Some(aside) = moved_aside {
            tracing::error!(moved_to = %aside.display(), "ledger file is damaged; moved it aside");
        }
        if (state.last_id, &state.totals) != (seed.last_id, &seed.totals) {
            if !std::mem::replace(&mut self.is_replaced, true) {
                tracing::error!(
                    "another memledger wrote the ledger meanwhile; keeping this one in memory: restart memledger to continue the counts of the file"
                );
            }
            return;
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
            if !std::mem::replace(&mut self.is_reading_failed, true) {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "reading new events failed; retrying"
                );
            }
        } else {
            self.is_reading_failed = false;
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

/// Opens the store in the configured directory, or what can be used instead.
///
/// # Errors
/// Another memledger writes to the same ledger.
fn open_medium(settings: &StateSettings, timeout: Duration) -> Result<OpenedMedium, StoreError> {
    let Some(directory) = &settings.path else {
        let (store, state, medium) = (Store::in_memory(0)?, LoadedState::default(), Medium::Memory);
        return Ok(OpenedMedium { store, state, medium, error: None });
    };
    let error = match Store::open(directory, timeout) {
        Ok(OpenedStore { store, state, moved_aside }) => {
            if let Some(aside) = moved_aside {
                let aside: PathBuf = aside;
                tracing::error!(moved_to = %aside.display(), "ledger file is damaged; moved it aside and created a new one, with all counts at 0");
            }
            return Ok(OpenedMedium { store, state, medium: Medium::Disk, error: None });
        }
        Err(error @ StoreError::InUse { .. }) => return Err(error),
        Err(error) => error,
    };
    let mut events = Vec::new();
    let read = StoreConnection::open(directory).and_then(|reader| {
        let state = reader.load()?;
        // what the followers have not processed yet
        let cursor = state.follower_cursors.values().min().copied().unwrap_or(state.last_id);
        events = reader.newest_after(cursor, MAX_WAITING)?;
        Ok(state)
    });
    let (state, medium) = match read {
        Ok(state) => (state.clone(), Medium::Waiting(Box::new(state))),
        Err(StoreError::Foreign { .. } | StoreError::Corrupt { .. } | StoreError::NoLedger { .. }) => {
            (LoadedState::default(), Medium::Waiting(Box::default()))
        }
        Err(_) if !directory.join(FILE).exists() => (LoadedState::default(), Medium::Waiting(Box::default())),
        Err(_) => (LoadedState::default(), Medium::Unreadable),
    };
    let mut store = Store::in_memory(state.last_id)?;
    events.extend(state.unsettled.iter().cloned());
    let events = events.into_iter().map(|event| (event.id(), event)).collect();
    store.commit(&WriteBatch { events, ..WriteBatch::default() })?;
    Ok(OpenedMedium { store, state, medium, error: Some(error) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::events::LedgerEvent;

    fn kill(id: u64) -> (u64, LedgerEvent) {
        let owner = crate::ledger::events::KillOwner::Unattributed;
        (id, LedgerEvent::OomKill(Kill { id, at: id as f64, owner, ..Kill::unknown() }))
    }

    fn settings(directory: &std::path::Path) -> StateSettings {
        StateSettings {
            path: Some(directory.to_path_buf()),
            retention: Duration::MAX,
            max_size_bytes: 64 << 20,
            events_file: None,
        }
    }

    /// Writes a ledger with three events, of which a follower has processed the first.
    fn ledger_with_backlog() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path(), Duration::from_secs(5)).unwrap().store;
        let batch = WriteBatch {
            events: (1..4).map(kill).collect(),
            follower_cursors: [("otlp x".to_owned(), 1), ("log".to_owned(), 3)].into(),
            totals: [(crate::ledger::totals::Total::Host, 3)].into(),
            started_at: Some(1.0),
            ..WriteBatch::default()
        };
        store.commit(&batch).unwrap();
        folder
    }

    #[test]
    fn events_that_no_follower_processed_wait_in_memory_while_the_file_cannot_be_written() {
        let folder = ledger_with_backlog();
        // nobody but the test holds the lock file: a folder in its place cannot be opened for writing
        let lock = std::fs::read_dir(folder.path()).unwrap().flatten();
        let lock =
            lock.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("lock")).unwrap();
        std::fs::remove_file(&lock).unwrap();
        std::fs::create_dir(&lock).unwrap();
        let (writer, state) = LedgerWriter::open(&settings(folder.path()), Timestamp::now()).unwrap();
        assert!(matches!(writer.medium, Medium::Waiting(_)));
        assert_eq!((state.last_id, writer.cursor("otlp x")), (3, 1));
        let waiting = writer.event_reader().settled_after(1, 10).unwrap();
        assert_eq!(waiting.events.iter().map(LedgerEvent::id).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn ledger_that_could_not_be_read_continues_once_it_can() {
        let folder = ledger_with_backlog();
        let (file, aside) = (folder.path().join(FILE), folder.path().join("aside"));
        let newer = |version: i64| {
            let connection = rusqlite::Connection::open(&file).unwrap();
            let before: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
            connection.pragma_update(None, "user_version", version).unwrap();
            before
        };
        let version = newer(99);
        std::fs::copy(&file, &aside).unwrap();
        let shared_state = SharedState::default();
        let now = Timestamp::now();
        let (mut writer, state) = LedgerWriter::open(&settings(folder.path()), now).unwrap();
        let mut reconciler = Reconciler::new(Default::default(), &state, now, now.kernel_usec());
        let mut step = |writer: &mut LedgerWriter, seconds: u64| {
            writer.write(now.plus(Duration::from_secs(seconds)), &mut reconciler, &shared_state);
            writer.take_reloaded()
        };
        assert!(step(&mut writer, 20).is_none() && !writer.has_counts());
        assert!(writer.event_reader().events(&Query::default()).unwrap().is_empty(), "ids of others");
        assert!(std::fs::read(&file).unwrap() == std::fs::read(&aside).unwrap(), "unchanged");
        newer(version);
        let state = step(&mut writer, 40).expect("it is read");
        assert_eq!((state.last_id, state.totals[&crate::ledger::totals::Total::Host]), (3, 3));
        assert!(writer.has_counts() && writer.is_up() == Some(true));
        assert_eq!(shared_state.loaded_cursor("otlp x"), Some(1));
        assert_eq!(writer.event_reader().events(&Query::default()).unwrap().len(), 3);
    }
}
