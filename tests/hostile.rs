//! Containers and processes that try to take memledger down, against the real binary.
//!
//! Each test has a container that does no harm beside the one that attacks. [`Siege::endure`] is what all assert:
//! memledger's memory stays bounded, snapshots go on, the harmless container's figures are right and fresh, and the log
//! stays short. What the attack costs beyond that (who is named for it) is asserted by the test itself.
//!
//! Attackers are processes without privileges in a cgroup of their own, as in a container; a test that needs more says why.
//! memledger runs with 4 GiB of address space, so that a bound that is missing fails the test and not the machine.

mod command_lines;
mod crowds;
mod kernel_log;
mod locks;
mod mounts;
mod names;
mod reporter;
mod runtimes;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support::cgroups::TestCgroup;
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually, processor_nanos, waited_nanos};

const MIB: f64 = 1_048_576.0;
/// The most that memledger may ever have resident under an attack.
const MAX_RESIDENT_BYTES: f64 = 60.0 * MIB;
/// Cycles that an attack is watched for at least. 30 of them take 6 s.
const CYCLES: usize = 30;
/// Seconds of processor time that memledger may take for a cycle, with all its threads.
const MAX_WORK_PER_CYCLE: f64 = 0.1;
/// Half of all cycles take no longer than this many seconds, without the time in which the thread of the cycles waits
/// for a processor: attackers of processors and other tests share the machine's two cores.
const MAX_MEDIAN_CYCLE: f64 = 0.3;
/// Seconds between the beginnings of two cycles.
const INTERVAL: f64 = 0.2;
/// Seconds for an attack to have its effect in [`CYCLES`] cycles, without the waiting for a processor.
const MAX_ATTACK: f64 = 40.0;
/// From the moment that the harmless container grows until that is shown, without the time in which the thread of the cycles waits for
/// a processor.
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Lines in the log after which an attack counts as a flood of it.
const MAX_LOG_LINES: usize = 40;
const LABEL: &str = "container_name";
/// The thread of the cycles.
const CYCLE: &str = "cycle";
const STAMP: &str = "memledger_snapshot_timestamp_seconds";

/// An attacking program: a cgroup of its own, and Python as a user that owns nothing, without capabilities.
struct Attacker {
    cgroup: TestCgroup,
    process: Option<Python>,
}

impl Attacker {
    /// A cgroup with this memory limit and no process yet.
    fn limited(mib: u64) -> Self {
        let cgroup = TestCgroup::container();
        cgroup.limit(mib << 20);
        Self { cgroup, process: None }
    }

    /// Runs a program unprivileged, and waits for its first line, which is returned.
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

    /// As [`Attacker::run`], as root.
    fn run_as_root(&mut self, program: &str, arguments: &[&str]) -> String {
        self.start(&[], program, arguments)
    }

    fn start(&mut self, wrapper: &[&str], program: &str, arguments: &[&str]) -> String {
        let python = ["/usr/bin/python3", "-u", "-c", program];
        let process = Python::command(&self.cgroup, &[wrapper, &python, arguments].concat());
        self.process.insert(process).line()
    }

    /// Lets the program go on, and waits for its next line.
    fn step(&mut self) -> String {
        self.process.as_mut().expect("it runs").step()
    }

    /// Lets the program go on.
    fn go(&mut self) {
        self.process.as_mut().expect("it runs").go();
    }

    fn name(&self) -> &str {
        self.cgroup.name()
    }
}

/// memledger, and a container that does no harm.
struct Siege {
    memledger: Memledger,
    innocent: TestCgroup,
    process: Python,
    held_mib: f64,
    lines_before: usize,
    /// In seconds; see [`MAX_WORK_PER_CYCLE`].
    max_work_per_cycle: f64,
}

impl Siege {
    /// Watches the harmless container and containers of these names.
    fn of(names: &[&str], flags: &[&str]) -> Self {
        let innocent = TestCgroup::container();
        let mut process = Python::start(&innocent, include_str!("hostile/innocent.py"));
        assert_eq!(process.line(), "ready");
        let names = [names, &[innocent.name()]].concat();
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
        let memledger = Memledger::start_through(&["prlimit", "--as=4294967296"], &all);
        let max_work_per_cycle = MAX_WORK_PER_CYCLE;
        let mut this =
            Self { memledger, innocent, process, held_mib: 32.0, lines_before: 0, max_work_per_cycle };
        this.memledger.eventually("the harmless container", |metrics| this.is_right(metrics));
        this.lines_before = log_lines(&this.memledger.log());
        this
    }

    /// The harmless container's figures: its one process, and the memory that it holds.
    fn is_right(&self, metrics: &Metrics) -> Result<(), String> {
        let labels = [(LABEL, self.innocent.name())];
        let rss = metrics.ask("memledger_container_memory_rss_bytes", &labels)? / MIB;
        let processes = metrics.sum("memledger_container_processes", &labels);
        let has_grown = (self.held_mib - 1.0..self.held_mib + 15.0).contains(&rss);
        let is_right = has_grown && processes == 1.0;
        is_right.then_some(()).ok_or_else(|| format!("{rss} MiB of {}, {processes} processes", self.held_mib))
    }

    /// Watches [`CYCLES`] cycles of the attack, until `seen` holds too, and asserts what every attack must leave alone.
    /// Returns the last metrics.
    #[allow(clippy::disallowed_methods)]
    fn endure(&mut self, mut seen: impl FnMut(&Metrics) -> Result<(), String>) -> Metrics {
        let first = self.memledger.metrics();
        let pid = self.memledger.pid();
        let (worked, delayed) = (processor_nanos(pid, None), waited_nanos(pid, CYCLE) / 1e9);
        let mut cycles = BTreeMap::new();
        let mut delays = vec![];
        let began = Instant::now();
        let last = loop {
            let metrics = self.memledger.metrics();
            let cycle = metrics.value("memledger_cycle_duration_seconds", &[]);
            cycles.insert(metrics.value(STAMP, &[]).to_bits(), cycle);
            if delays.len() < 3 && cycles.len() > delays.len() * CYCLES / 4 {
                delays.push(self.grow());
            }
            let answer = seen(&metrics);
            if answer.is_ok() && cycles.len() >= CYCLES {
                break metrics;
            }
            let waited = began.elapsed();
            assert!(
                waited.as_secs_f64() < MAX_ATTACK + waited_nanos(pid, CYCLE) / 1e9 - delayed,
                "{} cycles in {waited:?}, {answer:?}; log: {}",
                cycles.len(),
                self.memledger.log()
            );
            std::thread::park_timeout(Duration::from_millis(50)); // poll
        };
        self.is_right(&last).unwrap_or_else(|error| panic!("the harmless container: {error}"));
        let worked = (processor_nanos(pid, None) - worked) / 1e9;
        let delayed = waited_nanos(pid, CYCLE) / 1e9 - delayed;
        eprintln!(
            "growth shown after {delays:.1?}; {worked:.1} s of processor time in {:.1} s, {delayed:.1} s without a processor",
            began.elapsed().as_secs_f64()
        );
        self.assert_bounded(&first, &last, cycles.into_values().collect(), worked, delayed);
        last
    }

    /// Asserts the bounds of memory, work, time and log between two scrapes, with the durations of cycles between them, all in
    /// seconds.
    fn assert_bounded(
        &self,
        first: &Metrics,
        last: &Metrics,
        mut durations: Vec<f64>,
        worked: f64,
        delayed: f64,
    ) {
        durations.sort_by(f64::total_cmp);
        let (median, longest) = (durations[durations.len() / 2], durations[durations.len() - 1]);
        let grown = |family: &str| last.value(family, &[]) - first.value(family, &[]);
        let skipped = grown("memledger_cycles_skipped_total");
        let peak = peak_resident(self.memledger.pid());
        let log = self.memledger.log();
        let lines = log_lines(&log) - self.lines_before;
        eprintln!(
            "peak {:.1} MiB; {} cycles, median {:.1} ms, longest {:.1} ms, {skipped} skipped; {lines} lines in the log",
            peak / MIB,
            durations.len(),
            median * 1e3,
            longest * 1e3,
        );
        let collectors: BTreeMap<_, _> = last
            .all("memledger_collector_duration_seconds", &[])
            .into_iter()
            .map(|(_, labels, seconds)| (labels["collector"].as_str(), (seconds * 1e3).round()))
            .filter(|(_, millis)| *millis > 0.0)
            .collect();
        eprintln!("milliseconds of each collector in the last cycle: {collectors:?}");
        assert!(peak <= MAX_RESIDENT_BYTES, "resident at most: {:.1} MiB", peak / MIB);
        // also those between two scrapes
        let count = (grown(STAMP) / INTERVAL - skipped).max(durations.len() as f64);
        let per_cycle = worked / count;
        assert!(per_cycle <= self.max_work_per_cycle, "{per_cycle} s of processor time for each cycle");
        let median = median - delayed / count;
        assert!(median <= MAX_MEDIAN_CYCLE, "half of the cycles take longer than {median} s: {durations:?}");
        let skipped = skipped - delayed / INTERVAL;
        assert!(skipped <= count / 4.0, "{skipped} skipped beside {durations:?}");
        assert!(lines <= MAX_LOG_LINES, "{lines} lines in the log: {log}");
    }

    /// Lets the harmless container grow; how long it took until that was shown.
    #[allow(clippy::disallowed_methods)]
    fn grow(&mut self) -> Duration {
        assert_eq!(self.process.step(), "grown");
        self.held_mib += 16.0;
        let pid = self.memledger.pid();
        let delayed = || Duration::from_secs_f64(waited_nanos(pid, CYCLE) / 1e9);
        let (began, before) = (Instant::now(), delayed());
        eventually("the growth of the harmless container", || {
            let right = self.is_right(&self.memledger.metrics());
            let waited = began.elapsed().saturating_sub(delayed() - before);
            assert!(
                waited < MAX_DELAY,
                "not shown after {waited:?}: {right:?}; log: {}",
                self.memledger.log()
            );
            right
        });
        began.elapsed()
    }
}

/// Lines of the log, but for the kills of the machine, which other tests make.
fn log_lines(log: &str) -> usize {
    log.lines().filter(|line| !line.contains("target=memledger::ledger::event_log")).count()
}

/// The most memory that a process ever had resident.
fn peak_resident(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    peak.expect("VmHWM").parse::<f64>().expect("a number") * 1024.0
}

/// The attacker's memory, which its cgroup knows whatever its processes do.
fn has_memory(metrics: &Metrics, name: &str) -> Result<(), String> {
    metrics.ask("memledger_container_memory_usage_bytes", &[(LABEL, name)]).map(drop)
}

/// Something that memledger did not read, or not whole, was counted for this reason.
fn is_counted(metrics: &Metrics, reason: &str) -> Result<(), String> {
    let count = metrics.sum("memledger_collector_read_errors_total", &[("reason", reason)]);
    if count > 0.0 { Ok(()) } else { Err(format!("nothing was counted as {reason}")) }
}
