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
//! * An owner has one read at a time. After a slow read, its owner is paused for nine times the duration of the read.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::ReadError;
use super::bounds::STUCK_READS;
use crate::clock::Timestamp;

/// A read that waits longer than this, but not for a CPU, is slow.
const SLOW_READ: Duration = Duration::from_millis(10);
/// After a slow read its owner is paused for this many times the duration of the read, at most [`MAX_PAUSE`].
const PAUSE_FACTOR: u32 = 9;
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Shorter rests are accumulated instead of interrupting short work.
const MIN_REST: Duration = Duration::from_millis(5);
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
    /// A thread rests for this many times the CPU time that it used.
    pub rest_factor: u32,
    /// Reads alternate between owners; otherwise all reads of one owner are made in sequence.
    pub round_robin: bool,
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
    O: Clone + Eq + Hash + Send + 'static,
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
            if state.is_blocked || state.has_stuck_read(&owner) {
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
    O: Clone + Eq + Hash,
    K: Clone,
{
    fn lock(&self) -> MutexGuard<'_, State<O, K, T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of a thread: makes queued reads until the pool is dropped or another thread takes over.
    fn run_thread(&self, id: u64) {
        let mut buffer = Vec::new();
        let (mut pending_rest, mut since) = (Duration::ZERO, Timestamp::now());
        while let Some(key) = self.next(id) {
            pending_rest = pending_rest.saturating_sub(Timestamp::now().since(since));
            let (cpu, delay) = (cpu_time(), run_delay());
            let read = catch_unwind(AssertUnwindSafe(|| (self.read)(&key, &mut buffer)));
            let cpu = cpu_time().saturating_sub(cpu);
            let delay = run_delay().saturating_sub(delay);
            buffer.clear();
            buffer.shrink_to(super::bounds::MAX_RETAINED_BYTES);
            let read = read.unwrap_or_else(|_| Err(ReadError::malformed("a read panicked")));
            self.finish(id, cpu + delay, read);
            pending_rest += cpu * self.config.rest_factor;
            since = Timestamp::now();
            if pending_rest >= MIN_REST {
                std::thread::sleep(pending_rest);
            }
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
            if let Some((owner, key)) = state.next_read(now, self.config.round_robin) {
                let running = Running { owner, key: key.clone(), began: now, has_timed_out: false };
                state.threads.insert(id, Some(running));
                return Some(key);
            }
            // until the pool is dropped, a read is queued, or a pause ends
            state = match state.next_resume(now) {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(pause) => {
                    self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Notes the end of a read. `cpu`: for how long it ran, or could have.
    fn finish(&self, id: u64, cpu: Duration, read: Result<T, ReadError>) {
        let mut state = self.lock();
        let now = Timestamp::now();
        let Some(running) = state.threads.get_mut(&id).and_then(Option::take) else { return };
        let waited = now.since(running.began).saturating_sub(cpu);
        if waited >= SLOW_READ {
            let pause = (waited * PAUSE_FACTOR).min(MAX_PAUSE);
            state.paused.insert(running.owner.clone(), now.plus(pause));
        }
        if state.is_blocked {
            state.is_blocked = false;
            tracing::info!(reads = self.config.name, "reads are no longer blocked");
        }
        state.outcomes.push((running.owner, running.key, ReadOutcome::Finished(read)));
        drop(state);
        self.changed.notify_all();
    }
}

impl<O, K, T> State<O, K, T>
where
    O: Clone + Eq + Hash,
    K: Clone,
{
    /// Returns true if a read of this owner has timed out and has not returned.
    fn has_stuck_read(&self, owner: &O) -> bool {
        self.threads.values().flatten().any(|running| running.has_timed_out && running.owner == *owner)
    }

    fn is_running(&self, owner: &O) -> bool {
        self.threads.values().flatten().any(|running| running.owner == *owner)
    }

    fn can_read(&self, owner: &O, now: Timestamp) -> bool {
        self.paused.get(owner).is_none_or(|until| *until <= now) && !self.is_running(owner)
    }

    /// Returns true if a read is running or possible that will probably finish soon.
    fn is_busy(&self, now: Timestamp, soon: Duration) -> bool {
        let is_recent = |running: &Running<O, K>| !running.has_timed_out && now.since(running.began) < soon;
        self.threads.values().flatten().any(is_recent)
            || self.owner_order.iter().any(|owner| self.can_read(owner, now))
    }

    fn next_read(&mut self, now: Timestamp, round_robin: bool) -> Option<(O, K)> {
        self.paused.retain(|_, until| *until > now);
        for _ in 0..self.owner_order.len() {
            let owner = self.owner_order.pop_front()?;
            if !self.can_read(&owner, now) {
                self.owner_order.push_back(owner);
                continue;
            }
            let Some(queue) = self.queues.get_mut(&owner) else { continue };
            let key = queue.pop_front();
            if queue.is_empty() {
                self.queues.remove(&owner);
            } else if round_robin {
                self.owner_order.push_back(owner.clone());
            } else {
                self.owner_order.push_front(owner.clone());
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
        for (owner, key) in timed_out {
            self.skip(&owner);
            self.owner_order.retain(|other| *other != owner);
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
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or(Duration::ZERO)
}

/// Returns for how long this thread was ready while other threads had the CPUs; zero on a kernel that does not count that.
pub(crate) fn run_delay() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split(' ').nth(1).and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const MS: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    /// Behaviour of a read.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Task {
        Number(u32),
        /// Hangs until the test releases it.
        Hang,
        /// Uses so much CPU time, on the first CPU.
        Compute(Duration),
    }

    /// Keeps the first CPU busy from this thread.
    fn compute(mut is_done: impl FnMut() -> bool) {
        let mut first = rustix::thread::CpuSet::new();
        first.set(0);
        rustix::thread::sched_setaffinity(None, &first).unwrap();
        while !is_done() {
            std::hint::spin_loop();
        }
    }

    type Pool = ReadPool<&'static str, Task, u32>;

    fn pool(timeout: Duration) -> (Pool, mpsc::Sender<()>) {
        let (release, released) = mpsc::channel();
        let released = Mutex::new(released);
        // a thread that the scheduler delays must not look like one that hangs
        let handover_after = if timeout == LONG { LONG } else { 2 * MS };
        let config =
            PoolConfig { name: "test-reads", handover_after, timeout, rest_factor: 0, round_robin: true };
        let read = move |task: &Task, _: &mut Vec<u8>| match task {
            Task::Number(number) => Ok(*number),
            Task::Hang => {
                let _ = released.lock().unwrap().recv();
                Ok(0)
            }
            Task::Compute(time) => {
                compute(|| cpu_time() >= *time);
                Ok(0)
            }
        };
        (ReadPool::new(config, read), release)
    }

    /// Returns the numbers read, and the counts of timed-out and skipped reads.
    fn outcomes(pool: &Pool) -> (Vec<u32>, usize, usize) {
        let mut counted = (vec![], 0, 0);
        for (_, _, outcome) in pool.take() {
            match outcome {
                ReadOutcome::Finished(Ok(number)) => counted.0.push(number),
                ReadOutcome::Finished(Err(error)) => {
                    counted.1 += usize::from(error.reason_label() == Some("timeout"))
                }
                ReadOutcome::Skipped => counted.2 += 1,
            }
        }
        counted
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let began = Timestamp::now();
        while !is_so() {
            assert!(Timestamp::now().since(began) < LONG, "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn wait_returns_after_all_reads_and_owners_alternate() {
        let (pool, _release) = pool(LONG);
        let of = |owner, from| (from..from + 3).map(move |number| (owner, Task::Number(number)));
        pool.submit(of("a", 0).chain(of("b", 10)));
        pool.wait(LONG);
        assert_eq!(outcomes(&pool), (vec![0, 10, 1, 11, 2, 12], 0, 0));
    }

    #[test]
    fn hanging_read_delays_no_other_owner_and_is_reported_once() {
        let (pool, release) = pool(500 * MS);
        pool.submit([("a", Task::Hang), ("a", Task::Number(1)), ("b", Task::Number(2))]);
        pool.wait(20 * MS);
        let mut seen = outcomes(&pool);
        until("it times out", || {
            let (read, timed_out, skipped) = outcomes(&pool);
            seen.0.extend(read);
            seen.1 += timed_out;
            seen.2 += skipped;
            seen.1 > 0 && !seen.0.is_empty()
        });
        assert_eq!(seen, (vec![2], 1, 1), "queued reads of the same owner are skipped");
        pool.submit([("a", Task::Number(3)), ("b", Task::Number(4))]);
        pool.wait(LONG);
        assert_eq!(outcomes(&pool), (vec![4], 0, 1), "the owner waits for the read that hangs");
        release.send(()).unwrap();
        until("it returns", || outcomes(&pool).0 == [0]);
        until("a surplus thread ends", || pool.shared.lock().threads.len() == 1);
    }

    #[test]
    fn blocks_reads_while_the_limit_of_reads_hangs() {
        let (pool, release) = pool(5 * MS);
        let owners = ["a", "b", "c", "d"];
        assert_eq!(owners.len(), STUCK_READS.max);
        pool.submit(owners.map(|owner| (owner, Task::Hang)));
        until("all hang", || {
            pool.take();
            pool.is_blocked()
        });
        pool.submit([("e", Task::Number(1))]);
        assert_eq!(outcomes(&pool), (vec![], 0, 1));
        assert_eq!(pool.shared.lock().threads.len(), STUCK_READS.max);
        release.send(()).unwrap();
        until("one returns", || !pool.is_blocked());
        pool.submit([("e", Task::Number(1))]);
        until("it is read again", || outcomes(&pool).0.contains(&1));
        drop(release);
        until("the others return", || pool.shared.lock().threads.len() == 1);
    }

    #[test]
    fn pauses_only_the_slow_owner() {
        let (pool, release) = pool(LONG);
        pool.submit([("slow", Task::Hang)]);
        until("it is read", || pool.shared.lock().is_running(&"slow"));
        let began = Timestamp::now();
        // so slow that its pause, of nine times as long, is not over before the next reads
        until("it is slow", || Timestamp::now().since(began) > 20 * SLOW_READ);
        release.send(()).unwrap();
        until("it returns", || !outcomes(&pool).0.is_empty());
        pool.submit([("slow", Task::Number(1)), ("other", Task::Number(2))]);
        pool.wait(LONG);
        assert_eq!(outcomes(&pool).0, [2]);
        until("its pause is over", || outcomes(&pool).0 == [1]);
        assert!(Timestamp::now().since(began) >= SLOW_READ * PAUSE_FACTOR);
    }

    #[test]
    fn waiting_for_a_cpu_is_not_slow() {
        let is_over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let busy = std::thread::spawn(move || compute(|| seen.load(std::sync::atomic::Ordering::Relaxed)));
        let (pool, _release) = pool(LONG);
        let began = Timestamp::now();
        pool.submit([("a", Task::Compute(10 * SLOW_READ))]);
        until("it returns", || !outcomes(&pool).0.is_empty());
        let now = Timestamp::now();
        let pause = pool.shared.lock().paused.get("a").map_or(Duration::ZERO, |until| until.since(now));
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        busy.join().unwrap();
        let took = now.since(began);
        assert!(took > 12 * SLOW_READ, "it had to wait for the CPU: {took:?}");
        // interrupts and a hypervisor take some of the time, of which nothing knows
        assert!(pause < took, "{pause:?} after {took:?}");
    }

    #[test]
    fn threads_end_when_pool_is_dropped() {
        let (pool, _release) = pool(LONG);
        pool.submit([("a", Task::Number(1))]);
        pool.wait(LONG);
        let shared = Arc::clone(&pool.shared);
        drop(pool);
        until("the thread ends", || Arc::strong_count(&shared) == 1);
    }
}
