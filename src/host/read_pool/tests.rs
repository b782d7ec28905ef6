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

impl ReadOwner for &'static str {
    /// Its name up to a slash.
    fn group(&self) -> &str {
        self.split('/').next().unwrap_or_default()
    }
}

fn pool(timeout: Duration) -> (Pool, mpsc::Sender<()>) {
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    // a thread that the scheduler delays must not look like one that hangs
    let handover_after = if timeout == LONG { LONG } else { 2 * MS };
    let config =
        PoolConfig { name: "test-reads", handover_after, timeout, rest_factor: 0, turn: Duration::ZERO };
    (pool_of(config, released), release)
}

fn pool_of(config: PoolConfig, released: Mutex<mpsc::Receiver<()>>) -> Pool {
    let read = move |task: &Task, _: &mut Vec<u8>| match task {
        Task::Number(number) => Ok(*number),
        Task::Hang => {
            let _ = released.lock().unwrap().recv();
            Ok(0)
        }
        Task::Compute(time) => {
            let before = cpu_time();
            compute(|| cpu_time() - before >= *time);
            Ok(0)
        }
    };
    ReadPool::new(config, read)
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
    let owners: Vec<&'static str> =
        (0..STUCK_READS.max).map(|number| &*format!("owner {number}").leak()).collect();
    pool.submit(owners.iter().map(|owner| (*owner, Task::Hang)));
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
fn hanging_reads_of_a_group_skip_its_other_reads_and_no_others() {
    let (pool, release) = pool(5 * MS);
    let pod: [&'static str; 4] = ["pod/a", "pod/b", "pod/c", "pod/d"];
    assert!(pod.len() > STUCK_READS_OF_GROUP.max);
    pool.submit(pod.map(|owner| (owner, Task::Hang)));
    let (mut timed_out, mut skipped) = (0, 0);
    until("its reads time out or are skipped", || {
        let (_, more_timed_out, more_skipped) = outcomes(&pool);
        timed_out += more_timed_out;
        skipped += more_skipped;
        timed_out + skipped == pod.len()
    });
    assert_eq!(timed_out, STUCK_READS_OF_GROUP.max);
    pool.submit([("pod/c", Task::Number(1)), ("other", Task::Number(2))]);
    let mut seen = outcomes(&pool);
    until("the other's read", || {
        seen.0.extend(outcomes(&pool).0);
        !seen.0.is_empty()
    });
    assert_eq!(seen, (vec![2], 0, 1));
    drop(release);
    until("they return", || pool.shared.lock().threads.len() == 1);
    pool.submit([("pod/c", Task::Number(1))]);
    until("its group is read again", || outcomes(&pool).0.contains(&1));
}

#[test]
fn expensive_reads_of_one_owner_delay_others_for_a_turn_at_most() {
    let config = PoolConfig {
        name: "test-reads",
        handover_after: LONG,
        timeout: LONG,
        rest_factor: 19,
        turn: 200 * MS,
    };
    let (_release, released) = mpsc::channel();
    let pool = pool_of(config, Mutex::new(released));
    // 100 reads that take 19 s with the rests
    pool.submit((0..100).map(|_| ("expensive", Task::Compute(10 * MS))));
    pool.submit((0..3).map(|number| ("other", Task::Number(number))));
    let began = Timestamp::now();
    let mut numbers = vec![];
    let mut before = 0;
    until("the other's reads", || {
        for (owner, _, outcome) in pool.take() {
            match outcome {
                ReadOutcome::Finished(Ok(number)) if owner == "other" => numbers.push(number),
                _ => before += 1,
            }
        }
        numbers.len() == 3
    });
    assert_eq!(numbers, [0, 1, 2]);
    assert!(
        (1..50).contains(&before),
        "{before} expensive reads before, {:?}",
        Timestamp::now().since(began)
    );
}

#[test]
fn rest_after_one_very_expensive_read_is_its_owners_own() {
    let config =
        PoolConfig { name: "test-reads", handover_after: LONG, timeout: LONG, rest_factor: 1000, turn: LONG };
    let (_release, released) = mpsc::channel();
    let pool = pool_of(config, Mutex::new(released));
    pool.submit([("expensive", Task::Compute(60 * MS)), ("expensive", Task::Number(1))]);
    pool.submit([("other", Task::Number(2))]);
    let mut numbers = vec![];
    until("the other's read", || {
        numbers.extend(outcomes(&pool).0);
        numbers.contains(&2)
    });
    assert!(!numbers.contains(&1), "its own further reads wait for a minute");
    let rest = pool.shared.lock().rested_at.since(Timestamp::now());
    assert!(rest <= MAX_REST, "{rest:?}");
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
    let (has_begun, begun) = mpsc::channel::<()>();
    let busy = std::thread::spawn(move || {
        let mut has_begun = Some(has_begun); // it is dropped when it computes
        compute(|| {
            has_begun = None;
            seen.load(std::sync::atomic::Ordering::Relaxed)
        });
    });
    let (pool, _release) = pool(LONG);
    begun.recv().unwrap_err();
    let began = Timestamp::now();
    pool.submit([("a", Task::Compute(10 * SLOW_READ))]);
    until("it returns", || !outcomes(&pool).0.is_empty());
    let now = Timestamp::now();
    let pause = pool.shared.lock().paused.get("a").map_or(Duration::ZERO, |until| until.since(now));
    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    busy.join().unwrap();
    let took = now.since(began);
    assert!(took > 12 * SLOW_READ, "it had to wait for the CPU: {took:?}");
    // interrupts and a hypervisor take some of the time, of which nothing knows; the whole time would be a pause of nine times as long
    assert!(pause < 3 * took, "{pause:?} after {took:?}");
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
