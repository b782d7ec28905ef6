//! Followers of the ledger. Each hands what is settled, events or records of runs, to a [`Sink`]: the log, an OTLP endpoint, a directory
//! or a bucket of reports.
//!
//! A follower reads from the store by id, so it gets each item only after it was committed, in order and once it is settled. Its
//! cursor, the id of the last item that its sink has written or given up, is stored with the next commit. So nothing is lost while a sink is
//! away, within `--state.retention` and `--state.max-size`, and after a crash the last items are repeated. What waits is in the store:
//! in memory is one batch.
//!
//! Not here: what becomes of a batch. A sink has the connection, the back-off and the health of its target.

use std::future::Future;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use super::exchange::Followers;
use super::store::{EventReader, SettledEvents, StoreError, StoreReader};
use crate::clock::Timestamp;
use crate::connect::run_blocking;
use crate::host::Health;

/// How often the number of commits is compared.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before a ledger that could not be read is read again.
const UNREADABLE_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Events in a batch.
const MAX_EVENTS: usize = 200;
/// A file system that hangs blocks one thread of all followers.
static LEDGER_PERMIT: Semaphore = Semaphore::const_new(1);

/// The stop request: the time until which the last batch may take.
pub type Stop = watch::Receiver<Option<Timestamp>>;

/// A batch with the id of its last item; `None` if there is nothing after the cursor.
pub type ReadBatch<B> = Result<Option<(u64, B)>, StoreError>;

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// Each item was written, or counted as lost.
    All,
    /// Those up to this id.
    UpTo(u64),
    /// None; the next attempt is due after this time.
    Retry(Duration),
}

/// Takes what a follower reads.
pub trait Sink {
    /// What is read and written at once.
    type Batch: Send + 'static;

    /// Returns a function that reads the batch after a cursor. It is called where it may block.
    fn reader(&self) -> impl FnOnce(&StoreReader, u64) -> ReadBatch<Self::Batch> + Send + 'static;

    /// Writes a batch.
    fn write(&mut self, batch: Self::Batch) -> impl Future<Output = WriteOutcome>;

    /// Notes that nothing is left to write.
    fn up_to_date(&mut self) {}

    /// Notes that the ledger cannot be read.
    fn ledger_unreadable(&mut self) {}
}

/// Reads the next settled events, for sinks that take these. What happened before the first start is no news.
///
/// # Errors
/// The ledger cannot be read.
pub fn read_events(store: &StoreReader, cursor: u64) -> ReadBatch<SettledEvents> {
    let mut settled = store.settled_after(cursor, MAX_EVENTS)?;
    let last = settled.last_id();
    settled.events.retain(|event| !event.is_before_counting());
    Ok(last.map(|last| (last, settled)))
}

/// Hands what is settled to a sink.
#[derive(Debug)]
pub struct Follower<S> {
    cursor_name: String,
    sink: S,
    /// The number of commits when nothing was left.
    followed: Option<u64>,
    ledger: Health,
}

impl<S: Sink> Follower<S> {
    /// Creates a follower whose cursor has this name in the ledger.
    pub fn new(cursor_name: impl Into<String>, sink: S) -> Self {
        Self { cursor_name: cursor_name.into(), sink, followed: None, ledger: Health::default() }
    }

    /// Follows the ledger until the stop request, and once more then.
    pub async fn run(mut self, event_reader: &EventReader, followers: &Followers, mut stop: Stop) {
        let read = async |sink: &S, cursor| {
            let (event_reader, read) = (event_reader.clone(), sink.reader());
            run_blocking(&LEDGER_PERMIT, move || event_reader.read(|store| read(store, cursor))).await
        };
        loop {
            let is_stopping = stop.borrow().is_some();
            let delay = self.catch_up(followers, read).await;
            if is_stopping {
                return;
            }
            if let Ok(Err(_)) = tokio::time::timeout(delay, stop.wait_for(Option::is_some)).await {
                return; // the sender of the stop request is gone
            }
        }
    }

    /// Writes all that is settled, if anything was committed since it last did. Returns the delay before the next call.
    pub async fn catch_up(
        &mut self,
        followers: &Followers,
        read: impl AsyncFn(&S, u64) -> ReadBatch<S::Batch>,
    ) -> Duration {
        let written = followers.written();
        while self.followed != Some(written) {
            let Some(cursor) = followers.cursor(&self.cursor_name) else { break }; // the ledger is not open yet
            let found = read(&self.sink, cursor).await;
            if found.is_ok() && self.ledger.recovered() {
                tracing::info!(follower = self.cursor_name, "the ledger can be read again");
            }
            let (last, batch) = match found {
                Ok(Some(batch)) => batch,
                Ok(None) => {
                    self.followed = Some(written);
                    self.sink.up_to_date();
                    break;
                }
                Err(error) => {
                    if self.ledger.failed(Timestamp::now()) {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(
                            follower = self.cursor_name,
                            error,
                            "reading the ledger failed; retrying"
                        );
                    }
                    self.sink.ledger_unreadable();
                    return UNREADABLE_RETRY_INTERVAL;
                }
            };
            match self.sink.write(batch).await {
                WriteOutcome::All => followers.acknowledge(&self.cursor_name, last),
                WriteOutcome::UpTo(id) => followers.acknowledge(&self.cursor_name, id),
                WriteOutcome::Retry(delay) => return delay,
            }
        }
        POLL_INTERVAL
    }
}

#[cfg(test)]
mod tests;
