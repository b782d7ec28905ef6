//! Containers and processes that attack memledger, against the real binary.
//!
//! Each test runs another container, the neighbour, beside the attacker. [`AttackTest::run`] has the assertions of all tests:
//! memledger's memory is bounded, cycles continue, the neighbour's figures are correct and current, and the log stays short.
//! Each test asserts its own effects beyond that, such as the attacker's name in the log.
//!
//! Attackers are processes without privileges in a cgroup of their own, as in a container; a test that needs more gives the reason.
//! memledger runs with 4 GiB of address space, so that a missing bound fails the test and does not exhaust the machine.

mod command_lines;
mod kernel_log;
mod locks;
mod mounts;
mod names;
mod reporter;
mod runtimes;
mod scale;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support::cgroups::TestCgroup;
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, cpu_nanos, eventually, in_v2_guest, run_delay_nanos};

const MIB: f64 = 1_048_576.0;
/// Limit of memledger's peak of resident memory.
const MAX_RESIDENT_BYTES: f64 = 60.0 * MIB;
/// Resident pages of the released program. A debug build has twice as many; what exceeds this does not count.
const PROGRAM_BYTES: f64 = 16.0 * MIB;
/// Minimum number of cycles during an attack. 30 of them take 6 s.
const MIN_CYCLES: usize = 30;
/// Limit of memledger's CPU time per cycle in seconds, with all its threads. A debug build needs up to 0.11, a thread that runs without a pause 0.2.
const MAX_CPU_PER_CYCLE: f64 = if cfg!(debug_assertions) { 0.18 } else { 0.1 };
/// Limit of the duration of each cycle in seconds, without the run delay of its thread: attackers and other tests use the
/// machine's two CPUs too. A debug build computes several times as long.
const MAX_CYCLE: f64 = if cfg!(debug_assertions) { 1.0 } else { 0.1 };
/// Seconds between the starts of two cycles.
const INTERVAL: f64 = 0.2;
/// Limit of seconds until an attack has its effect and [`MIN_CYCLES`] cycles are complete, without the run delay.
const MAX_ATTACK: f64 = 40.0;
/// Limit of the time until the neighbour's growth is shown, without the run delay of the cycles' thread.
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Factor of all times in the guest: user-mode Linux on one CPU that other tests use too.
const GUEST_FACTOR: f64 = 10.0;
/// Limit of log lines during an attack.
const MAX_LOG_LINES: usize = 40;
const LABEL: &str = "container_name";
/// Name of the thread that runs the cycles.
const CYCLE_THREAD: &str = "cycle";
const SNAPSHOT_TIME: &str = "memledger_snapshot_timestamp_seconds";

/// A container that attacks: a cgroup of its own, and a Python program in it.
struct Attacker {
    cgroup: TestCgroup,
    process: Option<Python>,
}

impl Attacker {
    /// Creates a cgroup with this memory limit and no process yet.
    fn limited(mib: u64) -> Self {
        let cgroup = TestCgroup::container();
        cgroup.limit(mib << 20);
        Self { cgroup, process: None }
    }

    /// Starts a program as a user without files and capabilities, and returns its first line.
    fn run(&mut self, program: &str, arguments: &[&str]) -> String {
        let nobody = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        ];
        self.start(&nobody, program, arguments)
    }

    /// Like [`Attacker::run`], as root.
    fn run_as_root(&mut self, program: &str, arguments: &[&str]) -> String {
        self.start(&[], program, arguments)
    }

    fn start(&mut self, wrapper: &[&str], program: &str, arguments: &[&str]) -> String {
        let python = ["/usr/bin/python3", "-u", "-c", program];
        let process = Python::command(&self.cgroup, &[wrapper, &python, arguments].concat());
        self.process.insert(process).line()
    }

    /// Sends an input line, and returns the program's next line.
    fn step(&mut self) -> String {
        self.process.as_mut().expect("it runs").step()
    }

    /// Returns the program's next line.
    fn line(&mut self) -> String {
        self.process.as_mut().expect("it runs").line()
    }

    /// Sends an input line.
    fn go(&mut self) {
        self.process.as_mut().expect("it runs").go();
    }

    fn name(&self) -> &str {
        self.cgroup.name()
    }

    /// Returns the pid of the program.
    fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").pid()
    }
}

/// memledger, and a container that does not attack it: the neighbour.
struct AttackTest {
    memledger: Memledger,
    neighbour: TestCgroup,
    neighbour_process: Python,
    neighbour_mib: f64,
    log_lines_before: usize,
    /// In seconds; see [`MAX_CPU_PER_CYCLE`].
    max_cpu_per_cycle: f64,
}

fn time_factor() -> f64 {
    if in_v2_guest() { GUEST_FACTOR } else { 1.0 }
}

/// The run delay of the cycles' thread since its start in seconds, at each scrape.
struct RunDelays {
    pid: u32,
    samples: Vec<(Instant, f64)>,
}

impl RunDelays {
    fn new(pid: u32) -> Self {
        let mut this = Self { pid, samples: vec![] };
        this.sample();
        this
    }

    #[allow(clippy::disallowed_methods)]
    fn sample(&mut self) {
        self.samples.push((Instant::now(), run_delay_nanos(self.pid, CYCLE_THREAD) / 1e9));
    }

    /// Returns the run delay between the first and the last sample.
    fn total(&self) -> f64 {
        self.samples[self.samples.len() - 1].1 - self.samples[0].1
    }

    /// Returns the longest possible run delay of a cycle of this duration that ended between the last two samples.
    fn max_within(&self, duration: f64) -> f64 {
        let [.., (before, _), (_, newest)] = &self.samples[..] else { return 0.0 };
        let began = before.checked_sub(Duration::from_secs_f64(duration));
        let earlier = self.samples.iter().rev().find(|(at, _)| began.is_some_and(|began| *at <= began));
        newest - earlier.map_or(self.samples[0].1, |(_, delay)| *delay)
    }
}

impl AttackTest {
    /// Starts memledger for the neighbour and containers with these names.
    fn new(names: &[&str], flags: &[&str]) -> Self {
        let neighbour = TestCgroup::container();
        let mut neighbour_process = Python::start(&neighbour, include_str!("hostile/neighbour.py"));
        assert_eq!(neighbour_process.line(), "ready");
        let names = [names, &[neighbour.name()]].concat();
        let include = format!("--container.include=^({})$", names.join("|"));
        let mut all = vec![include.as_str(), "--sample.interval=200ms", "--pss.interval=1s"];
        for (flag, value) in
            [("--docker.socket", "--docker.socket="), ("--podman.socket", "--podman.socket=")]
        {
            if !flags.iter().any(|given| given.starts_with(flag)) {
                all.push(value);
            }
        }
        all.extend(flags);
        let mut this = Self {
            memledger: Memledger::start_through(&["prlimit", "--as=4294967296"], &all),
            neighbour,
            neighbour_process,
            neighbour_mib: 32.0,
            log_lines_before: 0,
            max_cpu_per_cycle: MAX_CPU_PER_CYCLE,
        };
        this.memledger.eventually("the neighbour's figures", |metrics| this.check_neighbour(metrics));
        this.log_lines_before = count_log_lines(&this.memledger.log());
        this
    }

    /// Checks the neighbour's figures: one process, and the memory that it uses.
    fn check_neighbour(&self, metrics: &Metrics) -> Result<(), String> {
        let labels = [(LABEL, self.neighbour.name())];
        let rss = metrics.try_value("memledger_container_memory_rss_bytes", &labels)? / MIB;
        let processes = metrics.sum("memledger_container_processes", &labels);
        let is_grown = (self.neighbour_mib - 1.0..self.neighbour_mib + 15.0).contains(&rss);
        (is_grown && processes == 1.0)
            .then_some(())
            .ok_or_else(|| format!("{rss} MiB instead of {}, {processes} processes", self.neighbour_mib))
    }

    /// Waits for [`MIN_CYCLES`] cycles during the attack and until `check` succeeds. Asserts the limits of every attack and the
    /// neighbour's figures. Returns the last metrics.
    #[allow(clippy::disallowed_methods)]
    fn run(&mut self, mut check: impl FnMut(&Metrics) -> Result<(), String>) -> Metrics {
        let first = self.memledger.metrics();
        let pid = self.memledger.pid();
        let (cpu_before, mut run_delays) = (cpu_nanos(pid, None), RunDelays::new(pid));
        let mut cycles = BTreeMap::new();
        let mut growth_delays = vec![];
        let began = Instant::now();
        let last = loop {
            let metrics = self.memledger.metrics();
            run_delays.sample();
            let cycle = metrics.value("memledger_cycle_duration_seconds", &[]);
            cycles
                .entry(metrics.value(SNAPSHOT_TIME, &[]).to_bits())
                .or_insert_with(|| cycle - run_delays.max_within(cycle));
            if growth_delays.len() < 3 && cycles.len() > growth_delays.len() * MIN_CYCLES / 4 {
                growth_delays.push(self.grow_neighbour());
            }
            let result = check(&metrics);
            if result.is_ok() && cycles.len() >= MIN_CYCLES {
                break metrics;
            }
            let elapsed = began.elapsed();
            assert!(
                elapsed.as_secs_f64() < MAX_ATTACK * time_factor() + run_delays.total(),
                "{} cycles in {elapsed:?}, {result:?}; log: {}",
                cycles.len(),
                self.memledger.log()
            );
            std::thread::park_timeout(Duration::from_millis(50)); // poll
        };
        self.check_neighbour(&last).unwrap_or_else(|error| panic!("the neighbour: {error}"));
        let cpu_seconds = (cpu_nanos(pid, None) - cpu_before) / 1e9;
        run_delays.sample();
        let run_delay = run_delays.total();
        eprintln!(
            "growth shown after {growth_delays:.1?}; {cpu_seconds:.1} s of CPU time in {:.1} s, {run_delay:.1} s of run delay",
            began.elapsed().as_secs_f64()
        );
        self.assert_limits(&first, &last, cycles.into_values().collect(), cpu_seconds, run_delay);
        self.memledger.eventually("the neighbour's proportional share", |metrics| {
            let labels = [(LABEL, self.neighbour.name())];
            let share = metrics.sum("memledger_container_process_pss_bytes", &labels) / MIB;
            (share >= self.neighbour_mib - 1.0)
                .then_some(())
                .ok_or_else(|| format!("{share} of {} MiB", self.neighbour_mib))
        });
        last
    }

    /// Asserts that the log has the attacker's id with this reason: once for each collector that was limited, and for one at least.
    fn assert_logged(&self, attacker: &Attacker, reason: &str) {
        let log = self.memledger.log();
        let expected = [format!("container={}", attacker.cgroup.id), format!("reason={reason}")];
        let lines = log.lines().filter(|line| expected.iter().all(|part| line.contains(part)));
        let mut collectors: Vec<_> =
            lines.filter_map(|line| line.split(' ').find(|part| part.starts_with("collector="))).collect();
        let count = collectors.len();
        collectors.sort_unstable();
        collectors.dedup();
        assert!(count > 0 && count == collectors.len(), "{expected:?} in {count} lines: {log}");
    }

    /// Asserts the limits of memory, CPU time, durations and log lines between two scrapes. Times are in seconds, the durations of
    /// cycles are without run delay.
    fn assert_limits(
        &self,
        first: &Metrics,
        last: &Metrics,
        mut durations: Vec<f64>,
        cpu_seconds: f64,
        run_delay: f64,
    ) {
        durations.sort_by(f64::total_cmp);
        // the machine may stop once, which is in no run delay; what an attack makes slow is slow more than once
        let [.., second, longest] = durations[..] else { panic!("no cycles") };
        let median = durations[durations.len() / 2];
        let increase = |family: &str| last.value(family, &[]) - first.value(family, &[]);
        let skipped = increase("memledger_cycles_skipped_total");
        let peak = self.memledger.peak_bytes() as f64;
        let peak = peak - (self.memledger.program_bytes() as f64 - PROGRAM_BYTES).max(0.0);
        let log = self.memledger.log();
        let log_lines = count_log_lines(&log) - self.log_lines_before;
        eprintln!(
            "peak {:.1} MiB; {} cycles, median {:.1} ms, longest {:.1} and {:.1} ms, {skipped} skipped; {log_lines} lines in the log",
            peak / MIB,
            durations.len(),
            median * 1e3,
            second * 1e3,
            longest * 1e3,
        );
        let collectors: BTreeMap<_, _> = last
            .all("memledger_collector_duration_seconds", &[])
            .into_iter()
            .map(|(_, labels, seconds)| (labels["collector"].as_str(), (seconds * 1e3).round()))
            .filter(|(_, millis)| *millis > 0.0)
            .collect();
        eprintln!("milliseconds of each collector in the last cycle: {collectors:?}");
        assert!(peak <= MAX_RESIDENT_BYTES, "peak of resident memory: {:.1} MiB", peak / MIB);
        // with the cycles between two scrapes
        let count = (increase(SNAPSHOT_TIME) / INTERVAL - skipped).max(durations.len() as f64);
        let per_cycle = cpu_seconds / count;
        assert!(
            per_cycle <= self.max_cpu_per_cycle * time_factor(),
            "{per_cycle} s of CPU time for each cycle"
        );
        assert!(second <= MAX_CYCLE * time_factor(), "two cycles took {second} s and longer: {durations:?}");
        assert!(longest <= 3.0 * MAX_CYCLE * time_factor(), "a cycle took {longest} s: {durations:?}");
        let skipped = skipped - run_delay / INTERVAL;
        assert!(skipped <= count * time_factor() / 4.0, "{skipped} cycles skipped: {durations:?}");
        assert!(log_lines <= MAX_LOG_LINES, "{log_lines} lines in the log: {log}");
    }

    /// Lets the neighbour grow, and returns the time until its growth is shown.
    #[allow(clippy::disallowed_methods)]
    fn grow_neighbour(&mut self) -> Duration {
        assert_eq!(self.neighbour_process.step(), "grown");
        self.neighbour_mib += 16.0;
        let pid = self.memledger.pid();
        let run_delay = || Duration::from_secs_f64(run_delay_nanos(pid, CYCLE_THREAD) / 1e9);
        let (began, before) = (Instant::now(), run_delay());
        eventually("the growth of the neighbour", || {
            let result = self.check_neighbour(&self.memledger.metrics());
            let waited = began.elapsed().saturating_sub(run_delay() - before);
            assert!(
                waited < MAX_DELAY.mul_f64(time_factor()),
                "not shown after {waited:?}: {result:?}; log: {}",
                self.memledger.log()
            );
            result
        });
        began.elapsed()
    }
}

/// Counts the lines of the log, without the machine's kills, which other tests cause.
fn count_log_lines(log: &str) -> usize {
    log.lines().filter(|line| !line.contains("target=memledger::ledger::event_log")).count()
}

/// Checks that a container has its memory from its cgroup, which its processes cannot hide.
fn has_memory(metrics: &Metrics, name: &str) -> Result<(), String> {
    metrics.try_value("memledger_container_memory_usage_bytes", &[(LABEL, name)]).map(drop)
}

/// Checks that a read error was counted for this reason.
fn is_counted(metrics: &Metrics, reason: &str) -> Result<(), String> {
    let count = metrics.sum("memledger_collector_read_errors_total", &[("reason", reason)]);
    if count > 0.0 { Ok(()) } else { Err(format!("no read error was counted as {reason}")) }
}
