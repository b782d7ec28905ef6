//! The followers that run on the ledger's thread: the log and `--events.file`.
//!
//! A follower reads events from the store by id, so it gets each only after it was committed, in order and once it is
//! settled. Its cursor, the id of the last event that it has processed, is stored with the next commit. After a crash
//! the log therefore repeats the last lines; the file does not, because its own last line shows how far it is.
//!
//! The OTLP exporter follows the store in the same way, on its own thread; see `otlp::event_consumer`.

use std::collections::BTreeMap;
use std::path::Path;

use super::event_log;
use super::jsonl_sink::EventsFile;
use super::store::{LoadedState, SettledEvents, Store, StoreError};

const LOG: &str = "log";
const FILE: &str = "events file";
/// Events per read of the store.
const MAX_EVENTS: usize = 200;

/// The followers.
#[derive(Debug)]
pub struct Followers {
    log_cursor: u64,
    file: Option<FileFollower>,
}

#[derive(Debug)]
struct FileFollower {
    file: EventsFile,
    cursor: u64,
    is_failing: bool,
}

impl Followers {
    /// Continues at the stored cursors. A new follower starts with the next event that settles.
    pub fn new(state: &LoadedState, events_file: Option<&Path>) -> Self {
        let stored = |name| state.follower_cursors.get(name).copied();
        let newest = state.unsettled.first().map_or(state.last_id, |event| event.id().saturating_sub(1));
        let file = events_file.map(|path| {
            let file = EventsFile::new(path);
            let cursor = stored(FILE).max(file.last_id()).unwrap_or(newest);
            FileFollower { file, cursor, is_failing: false }
        });
        Self { log_cursor: stored(LOG).unwrap_or(newest), file }
    }

    /// Returns the cursors.
    pub fn cursors(&self) -> BTreeMap<String, u64> {
        let file = self.file.iter().map(|file| (FILE.to_owned(), file.cursor));
        [(LOG.to_owned(), self.log_cursor)].into_iter().chain(file).collect()
    }

    /// Returns true if the file cannot be written: its events wait in the store.
    pub fn is_failing(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.is_failing)
    }

    /// Processes the events after the cursors.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn follow(&mut self, store: &Store) -> Result<(), StoreError> {
        while let Some(settled) = next(store, self.log_cursor)? {
            settled.events.iter().for_each(event_log::log_settled);
            self.log_cursor = settled.last_id().unwrap_or(self.log_cursor);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        while let Some(settled) = next(store, file.cursor)? {
            if !file.append(&settled) {
                break;
            }
        }
        Ok(())
    }
}

fn next(store: &Store, cursor: u64) -> Result<Option<SettledEvents>, StoreError> {
    let settled = store.settled_after(cursor, MAX_EVENTS)?;
    Ok(settled.last_id().is_some().then_some(settled))
}

impl FileFollower {
    /// Appends events. Returns false, and logs the first failure, if not all could be written.
    fn append(&mut self, settled: &SettledEvents) -> bool {
        match self.file.append(&settled.events) {
            Ok(()) => {
                self.is_failing = false;
                self.cursor = settled.last_id().unwrap_or(self.cursor);
            }
            Err(error) => {
                let last = error.written().checked_sub(1).and_then(|last| settled.events.get(last));
                self.cursor = last.map_or(self.cursor, |event| event.id());
                if !std::mem::replace(&mut self.is_failing, true) {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "appending to --events.file failed; retrying");
                }
            }
        }
        !self.is_failing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::events::{Kill, LedgerEvent};

    #[test]
    fn new_follower_gets_events_that_settle_later() {
        let pending = LedgerEvent::OomKill(Kill { id: 4, ..Kill::unknown() });
        let state = LoadedState { last_id: 6, unsettled: vec![pending], ..LoadedState::default() };
        assert_eq!(Followers::new(&state, None).cursors()[LOG], 3);
        let stored = LoadedState { follower_cursors: [(LOG.to_owned(), 2)].into(), ..state };
        assert_eq!(Followers::new(&stored, None).cursors()[LOG], 2);
        let settled = LoadedState { last_id: 6, ..LoadedState::default() };
        assert_eq!(Followers::new(&settled, None).cursors()[LOG], 6);
    }
}
