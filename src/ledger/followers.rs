//! The follower that appends events to `--events.file`, on a thread of its own: a disk that hangs there delays no kill.
//!
//! A follower reads events from the store by id, so it gets each only after it was committed, in order and once it is
//! settled. Its cursor, the id of the last event that it has processed, is stored with the next commit. After a crash the file
//! repeats nothing, because its own last line shows how far it is.
//!
//! The OTLP exporter follows the store in the same way; see `otlp::event_consumer`. The log is written by [`super::writer`].

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::exchange::SharedState;
use super::jsonl_sink::EventsFile;
use super::store::{EventReader, SettledEvents, StoreError};
use crate::host::panics::run_essential;

/// Name of the cursor.
pub const EVENTS_FILE: &str = "events file";
/// Events per read of the store.
const MAX_EVENTS: usize = 200;
/// Delay before a failed read or write is retried.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// Appends events to the file.
#[derive(Debug)]
struct FileFollower {
    file: EventsFile,
    reader: EventReader,
    shared_state: Arc<SharedState>,
    cursor: Option<u64>,
    /// Writing fails, and that was logged.
    is_failing: bool,
    /// Reading fails, and that was logged.
    is_unreadable: bool,
}

/// Starts the thread. It appends the last events once `stop` is set and it is woken.
///
/// # Errors
/// The thread cannot be created.
pub fn start(
    path: &Path,
    reader: EventReader,
    shared_state: &Arc<SharedState>,
    stop: Arc<AtomicBool>,
) -> std::io::Result<JoinHandle<()>> {
    let mut follower = FileFollower {
        file: EventsFile::new(path),
        reader,
        shared_state: Arc::clone(shared_state),
        cursor: None,
        is_failing: false,
        is_unreadable: false,
    };
    let body = move || {
        let mut followed = None;
        loop {
            let is_stopping = stop.load(Ordering::Acquire);
            let written = follower.shared_state.written();
            if followed != Some(written) && follower.follow() {
                followed = Some(written);
            }
            if is_stopping {
                return;
            }
            std::thread::park_timeout(RETRY_DELAY);
        }
    };
    let thread = std::thread::Builder::new().name("events-file".into());
    let thread = thread.spawn(move || run_essential("events file", body))?;
    shared_state.set_follower(thread.thread().clone());
    Ok(thread)
}

impl FileFollower {
    /// Appends the events after the cursor. Returns whether none is left.
    fn follow(&mut self) -> bool {
        let Some(opened) = self.shared_state.cursor(EVENTS_FILE) else { return false };
        // the last line may be newer than the stored cursor
        let mut cursor =
            *self.cursor.get_or_insert_with(|| self.file.last_id().max(Some(opened)).unwrap_or(opened));
        loop {
            let settled = match self.next(cursor) {
                Ok(settled) => settled,
                Err(error) => {
                    if !std::mem::replace(&mut self.is_unreadable, true) {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(error, "reading new events for --events.file failed; retrying");
                    }
                    return false;
                }
            };
            self.is_unreadable = false;
            let Some(last) = settled.last_id() else { return true };
            let appended = self.append(&settled);
            cursor = appended.unwrap_or(last);
            self.cursor = Some(cursor);
            self.shared_state.acknowledge(EVENTS_FILE, cursor);
            if appended.is_some() {
                return false;
            }
        }
    }

    fn next(&self, cursor: u64) -> Result<SettledEvents, StoreError> {
        self.reader.read(|store| store.settled_after(cursor, MAX_EVENTS))
    }

    /// Appends events. Returns the id of the last one that was written, and logs the first failure, if not all could be written.
    fn append(&mut self, settled: &SettledEvents) -> Option<u64> {
        let Err(error) = self.file.append(&settled.events) else {
            self.is_failing = false;
            return None;
        };
        let last = error.written().checked_sub(1).and_then(|last| settled.events.get(last));
        if !std::mem::replace(&mut self.is_failing, true) {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, "appending to --events.file failed; retrying");
        }
        Some(last.map_or(self.cursor.unwrap_or(0), |event| event.id()))
    }
}
