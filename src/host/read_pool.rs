//! Makes reads that the observed process can block, on threads that nothing waits for.
//!
//! Reading the command line or `smaps_rollup` of a process takes its mmap lock, which its other threads may hold for
//! any length of time; a path through its root may lead to a dead file server. A thread that hangs in the kernel cannot
//! be interrupted. So such reads are queued, and their results are collected in this cycle or a later one.
//!
//! * One thread serves a pool. If a read takes longer than the pool's `handover_after`, another thread continues with the
//!   queue; a thread that returns and is no longer needed ends. There are at most [`STUCK_READS`] threads, and all are
//!   idle while the queue is empty.
//! * A read that exceeds the pool's timeout has failed: the failure is reported once, and the queued reads of its owner
//!   are skipped. If the read returns later, that result is reported too.
//! * An owner has one read at a time, and a group of owners [`STUCK_READS_OF_GROUP`], so that one pod cannot use up the
//!   threads. After a slow read, its owner is paused for nine times the duration of the read.
//! * The pool rests in proportion to the CPU time that it used. Owners take turns of limited length, and the rest after an
//!   expensive read is mostly the pause of its owner: an owner whose reads are expensive delays the others little.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::hash::Hash;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::ReadError;
use super::bounds::{STUCK_READS, STUCK_READS_OF_GROUP};
use crate::clock::Timestamp;
use crate::parse::number;

/// A read that waits longer than this, but not for a CPU, is slow.
const SLOW_READ: Duration = Duration::from_millis(10);
/// After a slow read its owner is paused for this many times the duration of the read, at most [`MAX_PAUSE`].
const PAUSE_FACTOR: u32 = 9;
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Shorter rests are accumulated instead of interrupting short work.
const MIN_REST: Duration = Duration::from_millis(5);
/// After an expensive read the pool rests for this time, or for [`MIN_REST_FACTOR`] times the CPU time of the read if that is
/// longer. The remaining rest is a pause of the read's owner.
const MAX_REST: Duration = Duration::from_secs(1);
const MIN_REST_FACTOR: u32 = 3;
/// Reads have no recursion and no large arrays.
const STACK_BYTES: usize = 256 * 1024;

/// Configuration of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// Name of the threads.
    pub name: &'static str,
    /// If a read takes longer than this, another thread continues with the queue.
    pub handover_after: Duration,
    /// If a read takes longer than this, it has failed.
    pub timeout: Duration,
    /// The pool rests for this many times the CPU time that it used.
    pub rest_factor: u32,
    /// For how long the reads of one owner are made in sequence before the next owner's turn. Zero: owners alternate.
    pub turn: Duration,
}

/// Identifies whose read it is.
pub trait ReadOwner: Clone + Eq + Hash + Send + 'static {
    /// Returns the group, whose owners share a limit of concurrent reads.
    fn group(&self) -> &str;
}

/// The outcome of a queued read.
#[derive(Debug)]
pub enum ReadOutcome<T> {
    /// The read returned or timed out.
    Finished(Result<T, ReadError>),
    /// The read was not made: a read of the same owner hangs, or too many reads hang.
    Skipped,
}

type Read<K, T> = dyn Fn(&K, &mut Vec<u8>) -> Result<T, ReadError> + Send + Sync;

/// A queue of reads with its threads. `O` identifies the owner, `K` the read.
pub struct ReadPool<O, K, T> {
    shared: Arc<Shared<O, K, T>>,
}

struct Shared<O, K, T> {
    config: PoolConfig,
    read: Box<Read<K, T>>,
    state: Mutex<State<O, K, T>>,
    changed: Condvar,
}

struct State<O, K, T> {
    queues: HashMap<O, VecDeque<K>>,
    /// Owners with queued reads, in the order in which they are served.
    owner_order: VecDeque<O>,
    paused: HashMap<O, Timestamp>,
    /// The owner of the last read, and when its turn began.
    turn: Option<(O, Timestamp)>,
    /// When the pool will have rested for all reads so far.
    rested_at: Timestamp,
    /// The current read of each thread; `None` if it is idle.
    threads: HashMap<u64, Option<Running<O, K>>>,
    next_thread: u64,
    outcomes: Vec<(O, K, ReadOutcome<T>)>,
    is_blocked: bool,
    is_closed: bool,
}

struct Running<O, K> {
    owner: O,
    key: K,
    began: Timestamp,
    /// The timeout was reported.
    has_timed_out: bool,
}

impl<O, K, T> ReadPool<O, K, T>
where
    O: ReadOwner,
    K: Clone + Send + 'static,
    T: Send + 'static,
{
    /// Creates a pool without threads: the first one starts with the first read.
    pub fn new(
        config: PoolConfig,
        read: impl Fn(&K, &mut Vec<u8>) -> Result<T, ReadError> + Send + Sync + 'static,
    ) -> Self {
        let state = State {
            queues: HashMap::new(),
            owner_order: VecDeque::new(),
            paused: HashMap::new(),
            turn: None,
            rested_at: Timestamp::now(),
            threads: HashMap::new(),
            next_thread: 0,
            outcomes: vec![],
            is_blocked: false,
            is_closed: false,
        };
        let shared =
            Shared { config, read: Box::new(read), state: Mutex::new(state), changed: Condvar::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Queues reads.
    pub fn submit(&self, reads: impl IntoIterator<Item = (O, K)>) {
        let mut state = self.shared.lock();
        for (owner, key) in reads {
            if state.is_blocked || state.is_stuck(&owner) {
                state.outcomes.push((owner, key, ReadOutcome::Skipped));
                continue;
            }
            let queue = state.queues.entry(owner.clone()).or_default();
            queue.push_back(key);
            if queue.len() == 1 {
                state.owner_order.push_back(owner);
            }
        }
        self.supervise(&mut state, Timestamp::now());
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until all reads that finish promptly are done, at most `max_wait`.
    pub fn wait(&self, max_wait: Duration) {
        let began = Timestamp::now();
        let mut state = self.shared.lock();
        loop {
            let now = Timestamp::now();
            self.supervise(&mut state, now);
            let rest = max_wait.saturating_sub(now.since(began));
            if rest.is_zero() || !state.is_busy(now, max_wait) {
                return;
            }
            let pause = rest.min(self.shared.config.handover_after);
            let waited = self.shared.changed.wait_timeout(state, pause);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the outcomes so far.
    pub fn take(&self) -> Vec<(O, K, ReadOutcome<T>)> {
        let mut state = self.shared.lock();
        self.supervise(&mut state, Timestamp::now());
        std::mem::take(&mut state.outcomes)
    }

    /// Returns true if reads are blocked because too many hang.
    pub fn is_blocked(&self) -> bool {
        self.shared.lock().is_blocked
    }

    /// Reports timed-out reads, and starts a thread if the queue needs one.
    fn supervise(&self, state: &mut State<O, K, T>, now: Timestamp) {
        let config = self.shared.config;
        state.report_timeouts(now, config);
        let stuck = state.threads.values().flatten().filter(|running| running.has_timed_out).count();
        if stuck >= STUCK_READS.max && !state.is_blocked {
            state.is_blocked = true;
            state.skip_all();
            tracing::warn!(
                reads = config.name,
                stuck,
                "reads are blocked: too many hang; skipping further reads until one returns"
            );
        }
        let is_overdue = |running: &Running<O, K>| now.since(running.began) >= config.handover_after;
        let all_busy = state.threads.values().all(|running| running.as_ref().is_some_and(is_overdue));
        if !state.owner_order.is_empty() && all_busy && state.threads.len() < STUCK_READS.max {
            self.start(state);
        }
    }

    fn start(&self, state: &mut State<O, K, T>) {
        let (id, shared) = (state.next_thread, Arc::clone(&self.shared));
        let thread = std::thread::Builder::new().name(shared.config.name.into()).stack_size(STACK_BYTES);
        match thread.spawn(move || shared.run_thread(id)) {
            Ok(_) => {
                state.next_thread += 1;
                state.threads.insert(id, None);
            }
            Err(error) => {
                tracing::debug!(%error, reads = self.shared.config.name, "starting a thread failed; skipping queued reads");
                state.skip_all();
            }
        }
    }
}

impl<O, K, T> Shared<O, K, T>
where
    O: ReadOwner,
    K: Clone,
{
    fn lock(&self) -> MutexGuard<'_, State<O, K, T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of a thread: makes queued reads until the pool is dropped or another thread takes over.
    fn run_thread(&self, id: u64) {
        let (mut buffer, run_delay) = (Vec::new(), RunDelay::of_this_thread());
        while let Some(key) = self.next(id) {
            let (began, cpu, delay) = (Timestamp::now(), cpu_time(), run_delay.so_far());
            let read = catch_unwind(AssertUnwindSafe(|| (self.read)(&key, &mut buffer)));
            let cpu = cpu_time().saturating_sub(cpu);
            let mut waited = Timestamp::now().since(began).saturating_sub(cpu);
            if waited >= SLOW_READ {
                waited = waited.saturating_sub(run_delay.so_far().saturating_sub(delay));
            }
            buffer.clear();
            buffer.shrink_to(super::bounds::MAX_RETAINED_BYTES);
            let read = read.unwrap_or_else(|_| Err(ReadError::malformed("a read panicked")));
            self.finish(id, cpu, waited, read);
        }
    }

    /// Waits for the next read of this thread. Returns `None` when the thread should end.
    fn next(&self, id: u64) -> Option<K> {
        let mut state = self.lock();
        loop {
            let now = Timestamp::now();
            let others = state.threads.iter().filter(|(other, _)| **other != id);
            let is_surplus = others.map(|(_, running)| running).any(|running| {
                running.as_ref().is_none_or(|running| now.since(running.began) < self.config.handover_after)
            });
            if state.is_closed || is_surplus {
                state.threads.remove(&id);
                return None;
            }
            let rest = Some(state.rested_at.since(now)).filter(|rest| *rest >= MIN_REST);
            if rest.is_none()
                && let Some((owner, key)) = state.next_read(now, self.config.turn)
            {
                let running = Running { owner, key: key.clone(), began: now, has_timed_out: false };
                state.threads.insert(id, Some(running));
                return Some(key);
            }
            // until the pool is dropped, a read is queued, or a rest or pause ends
            state = match rest.or_else(|| state.next_resume(now)) {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(pause) => {
                    self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Notes the end of a read. `cpu`: for how long it ran; `waited`: for how long it did not, although there was a CPU.
    fn finish(&self, id: u64, cpu: Duration, waited: Duration, read: Result<T, ReadError>) {
        let mut state = self.lock();
        let now = Timestamp::now();
        let Some(running) = state.threads.get_mut(&id).and_then(Option::take) else { return };
        let slow_pause =
            if waited >= SLOW_READ { (waited * PAUSE_FACTOR).min(MAX_PAUSE) } else { Duration::ZERO };
        let own_rest = cpu * self.config.rest_factor;
        let rest = own_rest.min(MAX_REST.max(cpu * MIN_REST_FACTOR));
        state.rested_at = state.rested_at.max(now).plus(rest);
        let pause = if own_rest > rest { slow_pause.max(own_rest) } else { slow_pause };
        if !pause.is_zero() {
            state.paused.insert(running.owner.clone(), now.plus(pause));
        }
        if state.is_blocked {
            state.is_blocked = false;
            tracing::info!(reads = self.config.name, "reads are no longer blocked");
        }
        state.outcomes.push((running.owner, running.key, ReadOutcome::Finished(read)));
        // waking a waiting cycle costs more than most reads
        let is_last = !state.owner_order.iter().any(|owner| state.can_read(owner, now));
        let has_others = state.threads.len() > 1;
        drop(state);
        if is_last || has_others {
            self.changed.notify_all();
        }
    }
}

impl<O, K, T> State<O, K, T>
where
    O: ReadOwner,
    K: Clone,
{
    fn reads(&self) -> impl Iterator<Item = &Running<O, K>> {
        self.threads.values().flatten()
    }

    /// Returns true if a read of this owner, or all that its group may have, have timed out and have not returned.
    fn is_stuck(&self, owner: &O) -> bool {
        let stuck = self.reads().filter(|running| running.has_timed_out);
        let mut of_group = stuck.filter(|running| running.owner.group() == owner.group());
        let mut count = 0;
        of_group.any(|running| {
            count += 1;
            running.owner == *owner || count >= STUCK_READS_OF_GROUP.max
        })
    }

    fn is_running(&self, owner: &O) -> bool {
        self.reads().any(|running| running.owner == *owner)
    }

    fn can_read(&self, owner: &O, now: Timestamp) -> bool {
        let of_group = || self.reads().filter(|running| running.owner.group() == owner.group()).count();
        self.paused.get(owner).is_none_or(|until| *until <= now)
            && !self.is_running(owner)
            && of_group() < STUCK_READS_OF_GROUP.max
    }

    /// Starts a turn of this owner, or returns whether its turn goes on.
    fn is_in_turn(&mut self, owner: &O, now: Timestamp, turn: Duration) -> bool {
        match &self.turn {
            Some((current, began)) if current == owner => now.since(*began) < turn,
            _ => {
                self.turn = Some((owner.clone(), now));
                !turn.is_zero()
            }
        }
    }

    /// Returns true if a read is running or possible that will probably finish soon.
    fn is_busy(&self, now: Timestamp, soon: Duration) -> bool {
        let is_recent = |running: &Running<O, K>| !running.has_timed_out && now.since(running.began) < soon;
        self.threads.values().flatten().any(is_recent)
            || self.owner_order.iter().any(|owner| self.can_read(owner, now))
    }

    fn next_read(&mut self, now: Timestamp, turn: Duration) -> Option<(O, K)> {
        self.paused.retain(|_, until| *until > now);
        for _ in 0..self.owner_order.len() {
            let owner = self.owner_order.pop_front()?;
            if !self.can_read(&owner, now) {
                self.owner_order.push_back(owner);
                continue;
            }
            let Some(queue) = self.queues.get_mut(&owner) else { continue };
            let key = queue.pop_front();
            let is_last = queue.is_empty();
            let is_in_turn = self.is_in_turn(&owner, now, turn);
            if is_last {
                self.queues.remove(&owner);
            } else if is_in_turn {
                self.owner_order.push_front(owner.clone());
            } else {
                self.turn = None;
                self.owner_order.push_back(owner.clone());
            }
            if let Some(key) = key {
                return Some((owner, key));
            }
        }
        None
    }

    /// Returns the time until the first pause of an owner with queued reads ends.
    fn next_resume(&self, now: Timestamp) -> Option<Duration> {
        let pauses = self.owner_order.iter().filter_map(|owner| Some(self.paused.get(owner)?.since(now)));
        pauses.filter(|pause| !pause.is_zero()).min()
    }

    fn report_timeouts(&mut self, now: Timestamp, PoolConfig { name, timeout, .. }: PoolConfig) {
        let mut timed_out = Vec::new();
        for running in self.threads.values_mut().flatten() {
            if !running.has_timed_out && now.since(running.began) >= timeout {
                running.has_timed_out = true;
                timed_out.push((running.owner.clone(), running.key.clone()));
            }
        }
        if !timed_out.is_empty() {
            let (stuck, others) =
                std::mem::take(&mut self.owner_order).into_iter().partition(|owner| self.is_stuck(owner));
            self.owner_order = others;
            VecDeque::<O>::into_iter(stuck).for_each(|owner| self.skip(&owner));
        }
        for (owner, key) in timed_out {
            let error = ReadError::TimedOut(name.to_owned());
            self.outcomes.push((owner, key, ReadOutcome::Finished(Err(error))));
        }
    }

    fn skip(&mut self, owner: &O) {
        let queue = self.queues.remove(owner).unwrap_or_default();
        self.outcomes.extend(queue.into_iter().map(|key| (owner.clone(), key, ReadOutcome::Skipped)));
    }

    fn skip_all(&mut self) {
        for owner in std::mem::take(&mut self.owner_order) {
            self.skip(&owner);
        }
    }
}

impl<O, K, T> Drop for ReadPool<O, K, T> {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl<O, K, T> fmt::Debug for ReadPool<O, K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadPool({})", self.shared.config.name)
    }
}

/// Returns the CPU time of this thread: a read that only waits uses none.
pub fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or(Duration::ZERO)
}

/// For how long a thread was ready while other threads had the CPUs.
pub(crate) struct RunDelay(Option<File>);

impl RunDelay {
    /// Opens the file with it, since opening costs more than most reads.
    pub(crate) fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Returns the time since the thread began; zero on a kernel that does not count it.
    pub(crate) fn so_far(&self) -> Duration {
        let mut text = [0; 64];
        let length = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let nanos = text[..length].split(|byte| *byte == b' ').nth(1).and_then(number);
        Duration::from_nanos(nanos.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests;
