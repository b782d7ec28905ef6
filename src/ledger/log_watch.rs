//! Reads the kernel log the moment something is written there, and lets the witness look at each victim at once.
//!
//! The ledger's own thread may be busy for longer than a victim is there: when the machine is out of memory, which is when
//! kills happen, a disk can take seconds to sync. So a thread of its own waits for the device and keeps what it has read
//! until the ledger takes it. Where the log is had by syslog(2) there is nothing to wait for: taking is reading.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::desk::Desk;
use super::machine::Hint;
use super::witness::Witness;
use crate::clock::Moment;
use crate::collect::kernel_log::{Entry, KernelLog, Position};
use crate::host::ReadError;

/// Entries that wait for the ledger; the rest stay in the kernel's own buffer.
const MOST_WAITING: usize = 20_000;
/// The thread sees so often whether it is still wanted, and whether there is room again.
const LOOK_UP: Duration = Duration::from_secs(5);

/// The kernel log, being read.
#[derive(Debug)]
pub struct LogWatch {
    shared: Arc<Mutex<Shared>>,
    is_waited_for: bool,
}

#[derive(Debug)]
struct Shared {
    log: KernelLog,
    witness: Witness,
    desk: Arc<Desk>,
    taken: Taken,
}

/// What was read since it was last taken.
#[derive(Debug, Default)]
pub struct Taken {
    /// Lines of interest, in order.
    pub entries: Vec<(Entry, Hint)>,
    /// Records were overwritten before they could be read.
    pub lost: bool,
    /// The log was put back to an earlier state, see [`crate::collect::kernel_log::Seen`].
    pub rewound: bool,
    /// All up to here was read.
    pub position: Position,
}

impl LogWatch {
    /// Watches an open log; the desk's bell rings when there is something to take. Without a thread to be had, taking is
    /// reading.
    pub fn start(log: KernelLog, witness: Witness, desk: &Arc<Desk>) -> Self {
        let device = log.fd().and_then(|fd| fd.try_clone_to_owned().ok());
        let shared =
            Arc::new(Mutex::new(Shared { log, witness, desk: Arc::clone(desk), taken: Taken::default() }));
        let theirs = Arc::downgrade(&shared);
        let thread = std::thread::Builder::new().name("kernel-log".into()).stack_size(256 * 1024);
        let is_waited_for =
            device.is_some_and(|device| thread.spawn(move || watch(&device, &theirs)).is_ok());
        Self { shared, is_waited_for }
    }

    /// The bell rings for new lines. If not, the log has to be asked.
    pub fn is_waited_for(&self) -> bool {
        self.is_waited_for
    }

    /// Takes what was read, and all that can be read now.
    ///
    /// # Errors
    /// The log cannot be read any more, and nothing is left to take.
    pub fn take(&self) -> Result<Taken, ReadError> {
        let mut shared = lock(&self.shared);
        match shared.read() {
            Err(error) if shared.taken.entries.is_empty() => Err(error),
            _ => Ok(std::mem::take(&mut shared.taken)),
        }
    }
}

impl Shared {
    fn read(&mut self) -> Result<(), ReadError> {
        let seen = self.log.read()?;
        let entries = self.desk.keep_xids(Moment::now(), seen.entries);
        self.taken.entries.extend(self.witness.look_at(entries));
        self.taken.lost |= seen.lost;
        self.taken.rewound |= seen.rewound;
        self.taken.position = self.log.position();
        Ok(())
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Until nobody holds the log any more.
fn watch(device: &OwnedFd, shared: &Weak<Mutex<Shared>>) {
    // before others if it may: a busy machine overwrites its log within a second. It has next to nothing to do
    let _ = rustix::process::nice(-10);
    let timeout = rustix::event::Timespec { tv_sec: LOOK_UP.as_secs() as i64, tv_nsec: 0 };
    loop {
        let polled = poll(&mut [PollFd::new(device, PollFlags::IN | PollFlags::PRI)], Some(&timeout));
        let Some(shared) = shared.upgrade() else { return };
        if polled == Ok(0) {
            continue;
        }
        let mut shared = lock(&shared);
        let is_full = shared.taken.entries.len() >= MOST_WAITING;
        let failed = !is_full && shared.read().is_err();
        if failed || !shared.taken.entries.is_empty() || shared.taken.lost {
            shared.desk.bell.ring();
        }
        drop(shared);
        if failed || is_full || polled.is_err() {
            std::thread::park_timeout(LOOK_UP); // the ledger finds out by itself; never a busy loop
        }
    }
}
