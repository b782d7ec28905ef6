//! Reads what the runtimes know of the past beside a ledger that goes on.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::past::read_runtimes;
use super::replay::unknown_of;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::RuntimeEvent;
use crate::discover::history::RuntimeHistory;
use crate::host::Waker;
use crate::ledger::store::LedgerState;

/// How long the runtimes may take at the start to describe all containers; the first start waits for it.
pub const MAX_DETAILS_TIME: Duration = Duration::from_secs(5);

/// A thread that reads what the runtimes know of the past, for a ledger that goes on meanwhile.
#[derive(Debug)]
pub struct PastReader {
    /// The ledger as it was loaded.
    state: LedgerState,
    runtimes: mpsc::Receiver<Vec<RuntimeHistory>>,
}

impl PastReader {
    /// Starts the thread.
    pub fn start(config: &Config, state: LedgerState, waker: Arc<Waker>) -> Self {
        let (sender, runtimes) = mpsc::channel();
        let config = config.clone();
        let read = move || {
            let now = Timestamp::now();
            let _ = sender.send(read_runtimes(&config, now, None, MAX_DETAILS_TIME));
            waker.wake();
        };
        // without the thread the ledger has what the runtimes report themselves
        let _ = std::thread::Builder::new().name("ledger-past".into()).spawn(read);
        Self { state, runtimes }
    }

    /// Returns what the ledger does not know yet; `None` while it is read.
    pub fn take(&self) -> Option<Vec<RuntimeEvent>> {
        let runtimes = match self.runtimes.try_recv() {
            Ok(runtimes) => runtimes,
            Err(mpsc::TryRecvError::Empty) => return None,
            Err(mpsc::TryRecvError::Disconnected) => vec![],
        };
        warn_of_unread(&runtimes);
        let events = runtimes.into_iter().flat_map(|history| history.events);
        Some(unknown_of(&self.state, events.collect()))
    }
}

/// Logs how many containers were not described.
pub fn warn_of_unread(runtimes: &[RuntimeHistory]) {
    for history in runtimes.iter().filter(|history| history.unread > 0) {
        let (runtime, unread) = (history.runtime.as_str(), history.unread);
        tracing::warn!(
            runtime,
            unread,
            "containers were not described in time; their last ends are not recorded"
        );
    }
}
