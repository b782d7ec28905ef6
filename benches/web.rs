//! Measures sampling and memory with and without many concurrent requests, in one run.
//!
//! The release binary samples a host of 10,000 series once a second, in turn without requests and with 10,000 requests on
//! 40 connections. Clients and memledger share the cores of one machine, so the duration of a cycle includes its waiting for a
//! core; its processor time does not. `make bench` writes this part of docs/performance.md.

mod document;
#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use support::load::{CONNECTIONS, crowded, send_requests};
use support::{Memledger, cpu_nanos, eventually};

const REQUESTS: usize = 10_000;
const ROUNDS: usize = 3;
const QUIET: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Goal: memory under load, in responses of `/metrics` beyond that before it, as in tests/web/slow.rs: a snapshot and its
/// texts are replaced each second.
const MAX_RESPONSES: f64 = 4.0;

#[allow(clippy::disallowed_methods)]
fn now() -> Instant {
    Instant::now()
}

/// Measurements over some time.
#[derive(Default)]
struct Measurement {
    cycles_ms: Vec<f64>,
    left_out: f64,
    cpu_ms: f64,
    most_bytes: u64,
    seconds: f64,
}

/// Returns of the newest snapshot: its time, the duration of its cycle, and cycles skipped so far.
fn newest(memledger: &Memledger) -> [f64; 3] {
    let (status, text) = memledger.get("/metrics");
    assert_eq!(status, 200, "{text}");
    let names = [
        "memledger_snapshot_timestamp_seconds ",
        "memledger_cycle_duration_seconds ",
        "memledger_cycles_skipped_total ",
    ];
    names.map(|name| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name}"))
    })
}

/// Waits for a snapshot after this time.
fn newer_than(memledger: &Memledger, finished: f64) -> [f64; 3] {
    eventually("a newer snapshot", || match newest(memledger) {
        newest if newest[0] > finished => Ok(newest),
        _ => Err("it is the same".to_owned()),
    })
}

impl Measurement {
    /// Polls five times a second while `goes_on`, from one snapshot on.
    fn measure(&mut self, memledger: &Memledger, goes_on: impl Fn() -> bool) {
        let processor = || cpu_nanos(memledger.pid(), Some("cycle")) / 1e6;
        let ([mut last, _, left_out], before, began) = (newest(memledger), processor(), now());
        while goes_on() {
            std::thread::park_timeout(POLL_INTERVAL); // a bench measures time
            let [finished, took, _] = newest(memledger);
            self.most_bytes = self.most_bytes.max(memledger.resident_bytes());
            if finished > last {
                self.cycles_ms.push(took * 1e3);
                last = finished;
            }
        }
        self.seconds += began.elapsed().as_secs_f64();
        self.cpu_ms += processor() - before;
        let [.., left_out_now] = newer_than(memledger, last); // the next snapshot counts the last skipped cycle
        self.left_out += left_out_now - left_out;
    }

    fn merge(mut self, mut other: Self) -> Self {
        self.cycles_ms.append(&mut other.cycles_ms);
        self.left_out += other.left_out;
        self.cpu_ms += other.cpu_ms;
        self.most_bytes = self.most_bytes.max(other.most_bytes);
        self.seconds += other.seconds;
        self
    }

    fn mean_ms(&self) -> f64 {
        self.cycles_ms.iter().sum::<f64>() / self.cycles_ms.len() as f64
    }

    fn worst_ms(&self) -> f64 {
        self.cycles_ms.iter().copied().fold(0.0, f64::max)
    }

    /// Returns the processor time of the thread `cycle` per cycle.
    fn cpu_each_ms(&self) -> f64 {
        self.cpu_ms / self.cycles_ms.len() as f64
    }
}

/// Measures during 10,000 requests.
fn loaded(memledger: &Memledger, measurement: &mut Measurement) {
    std::thread::scope(|scope| {
        let load = scope.spawn(|| send_requests(memledger, REQUESTS, 2));
        measurement.measure(memledger, || !load.is_finished());
    });
}

fn quiet(memledger: &Memledger, measurement: &mut Measurement) {
    let began = now();
    measurement.measure(memledger, || began.elapsed() < QUIET);
}

fn table(quiet: &Measurement, loaded: &Measurement) -> String {
    let row = |what: &str, digits: usize, of: fn(&Measurement) -> f64| {
        let (without, with) = (of(quiet), of(loaded));
        format!("| {what} | {without:.digits$} | {with:.digits$} | {:.2} |\n", with / without)
    };
    format!(
        "| | one watcher only | with the requests | ratio |\n| --- | ---: | ---: | ---: |\n\
         | cycles seen | {} | {} | |\n| cycles left out | {:.0} | {:.0} | |\n{}{}{}",
        quiet.cycles_ms.len(),
        loaded.cycles_ms.len(),
        quiet.left_out,
        loaded.left_out,
        row("a cycle, mean ms", 1, Measurement::mean_ms),
        row("a cycle, worst ms", 1, Measurement::worst_ms),
        row(
            "processor time of the thread of the cycles, for each cycle seen, ms",
            1,
            Measurement::cpu_each_ms
        ),
    )
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let (_host, memledger) = crowded(CONNECTIONS + 2); // the bench polls too
    let response = memledger.get("/metrics").1;
    let series = response.lines().filter(|line| !line.starts_with('#')).count();
    send_requests(&memledger, 1_000, 2);
    let (mut alone, mut under_load) = (Measurement::default(), [(); ROUNDS].map(|()| Measurement::default()));
    quiet(&memledger, &mut alone);
    let before = alone.most_bytes;
    for round in &mut under_load {
        quiet(&memledger, &mut alone);
        loaded(&memledger, round);
    }
    let mut after = Measurement::default();
    quiet(&memledger, &mut after);
    let most = under_load.each_ref().map(|round| round.most_bytes);
    let all = under_load.into_iter().fold(Measurement::default(), Measurement::merge);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let responses = (mib(most.into_iter().fold(0, u64::max)) - mib(before)) / mib(response.len() as u64);
    let verdict = |met: bool| match met {
        _ if cfg!(debug_assertions) => "not judged in this build",
        true => "met",
        false => "**missed**",
    };
    let build = if cfg!(debug_assertions) { "A build WITHOUT optimisation" } else { "The release binary" };
    document::write(&format!(
        "{}\n\n{build}, which samples a host of {series} series once a second, and {REQUESTS} requests for `/metrics` on \
         {CONNECTIONS} connections, half of them compressed; {ROUNDS} times, each after {} s without. An answer has {} KiB, not \
         compressed. The clients take the same cores: a cycle waits for one, which is in its time and not in its processor time.\n\n\
         {}\n{:.0} requests a second.\n\n\
         Resident, the most: {:.1} MiB before, {} MiB during each {REQUESTS}, {:.1} MiB after the last.\n\n\
         Goals: no cycle left out ({}); at most {MAX_RESPONSES:.0} answers more in memory than without requests ({responses:.1}, {}).\n",
        document::HEADINGS[7],
        QUIET.as_secs(),
        response.len() / 1024,
        table(&alone, &all),
        (REQUESTS * ROUNDS) as f64 / all.seconds,
        mib(before),
        most.map(|bytes| format!("{:.1}", mib(bytes))).join(", "),
        mib(after.most_bytes),
        verdict(all.left_out == 0.0),
        verdict(responses <= MAX_RESPONSES),
    ))
}
