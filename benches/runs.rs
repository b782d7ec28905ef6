//! What a thousand records of runs cost: how long the verbs take to read them, and what they add to each cycle.
//!
//! `make bench` writes a ledger of 1,000 records, each with sixty points over time, settings, roles and a GPU, and one without records;
//! times the verbs of the real binary in turn with `memledger --version`, which shows what a start of the program takes; and compares
//! two `memledger serve` that run at the same time, one on each ledger. It writes its part of docs/performance.md.

mod document;
#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memledger::clock::Timestamp;
use memledger::events::{ContainerRef, Exit, ExitReason, Identity, LedgerEvent, Role};
use memledger::ledger::store::{FILE, Store, WriteBatch};
use memledger::runs::{GpuPeak, RolePeak, RunRecord, TimelinePoint};
use support::{Memledger, cpu_nanos};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const RUNS: u64 = 1_000;
/// Runs of one group.
const IN_GROUP: u64 = 20;
const ROUNDS: usize = 15;
/// More than a minute: the figures of running containers are written once a minute.
const DURATION: Duration = Duration::from_secs(65);
/// Goal of `memledger runs`.
const MAX_RUNS_TIME: Duration = Duration::from_millis(100);
/// Goal of `memledger why`, which also reads the kernel log and queries the engines.
const MAX_WHY_TIME: Duration = Duration::from_secs(2);

fn record(number: u64, now: f64) -> RunRecord {
    let (group, batch) = (number / IN_GROUP, 8 << (number % 4));
    let (started, bytes) = (now - 600.0 * (RUNS - number) as f64, (4 + batch) << 28);
    let point = |at: u64| TimelinePoint {
        at: started + 9.0 * at as f64,
        unreclaimable_bytes: Some(bytes - (at << 20)),
        gpu_bytes: Some(2 * bytes),
        torch_reserved_bytes: Some(bytes),
        torch_allocated_min_bytes: Some(bytes / 2),
    };
    let settings =
        [("batch_size", batch.to_string()), ("num_workers", "4".into()), ("precision", "16-mixed".into())];
    let role = |processes| RolePeak {
        processes,
        process_rss_bytes: bytes / 4,
        process_anon_bytes: Some(bytes / 5),
        pss_bytes: Some(bytes / 2),
        process_pss_bytes: Some(bytes / 8),
    };
    RunRecord {
        run: format!("{number:012x}-20261123T120000Z").into(),
        group: format!("vision/train-{group}").into(),
        subject: ContainerRef {
            identity: Identity { name: format!("train-{number}").into(), ..Identity::default() },
            container_id: format!("{number:064x}").into(),
            run_number: Some(number),
            started: Some(started),
            ..ContainerRef::default()
        },
        settings: settings.map(|(name, value)| (name.into(), value.into())).into(),
        ended: Some(started + 540.0),
        duration_seconds: Some(540.0),
        exit_reason: Some(ExitReason::Completed),
        samples: 540,
        observed_seconds: Some(539.0),
        limit_bytes: Some(64 << 30),
        unreclaimable_peak_bytes: Some(bytes),
        unreclaimable_mean_bytes: Some(bytes / 2),
        roles: BTreeMap::from([(Role::Trainer, role(1)), (Role::DataloaderWorker, role(4))]),
        gpus: BTreeMap::from([(
            "GPU-a".into(),
            GpuPeak { total_bytes: Some(80 << 30), peak_bytes: Some(2 * bytes), ..GpuPeak::default() },
        )]),
        timeline: (0..60).map(point).collect(),
        ..RunRecord::default()
    }
}

fn write_ledger(directory: &Path, runs: u64) -> Outcome<()> {
    let now = Timestamp::now().unix_seconds();
    let mut store = Store::open(directory, Duration::ZERO)?.store;
    let runs = (0..runs).map(|number| (number + 1, record(number, now))).collect();
    let name = Identity { name: "train-500".into(), ..Identity::default() };
    let subject = ContainerRef { identity: name, ..ContainerRef::default() };
    let exit = Exit {
        id: 1,
        at: now,
        subject,
        reason: Some(ExitReason::Error),
        exit_code: Some(1),
        ..Exit::default()
    };
    store.commit(&WriteBatch { runs, ..WriteBatch::from_iter([LedgerEvent::Exit(exit)]) })?;
    Ok(())
}

/// Returns how long the program took, in milliseconds. Without a ledger that can be read, `why` finds nothing.
#[allow(clippy::disallowed_methods)]
fn timed(arguments: &[&str], has_ledger: bool) -> Outcome<f64> {
    let began = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_memledger")).args(arguments).output()?;
    let took = began.elapsed();
    let is_unknown = output.status.code() == Some(1) && output.stdout.starts_with(b"Nothing is known about");
    if !(if has_ledger { output.status.success() } else { is_unknown }) {
        return Err(format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(took.as_secs_f64() * 1e3)
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// What one memledger used.
struct Cost {
    cycle_us: f64,
    all_ms_per_second: f64,
    resident_mib: f64,
}

/// Returns what two memledgers used in the same time.
#[allow(clippy::disallowed_methods)]
fn costs(memledgers: [&Memledger; 2]) -> [Cost; 2] {
    let used =
        |memledger: &Memledger| [Some("cycle"), None].map(|thread| cpu_nanos(memledger.pid(), thread) / 1e3);
    let (began, before) = (Instant::now(), memledgers.map(used));
    while let Some(rest) = DURATION.checked_sub(began.elapsed()).filter(|rest| !rest.is_zero()) {
        std::thread::park_timeout(rest); // a bench measures time
    }
    let seconds = began.elapsed().as_secs_f64();
    let cost = |number: usize| {
        let after = used(memledgers[number]);
        let grown = [after[0] - before[number][0], after[1] - before[number][1]];
        Cost {
            cycle_us: grown[0] / seconds,
            all_ms_per_second: grown[1] / 1e3 / seconds,
            resident_mib: memledgers[number].resident_bytes() as f64 / f64::from(1 << 20),
        }
    };
    [cost(0), cost(1)]
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let (full, empty) = (tempfile::tempdir()?, tempfile::tempdir()?);
    write_ledger(full.path(), RUNS)?;
    write_ledger(empty.path(), 0)?;
    let [state, no_runs] =
        [&full, &empty].map(|directory| format!("--state.path={}", directory.path().display()));
    let hanging = full.path().join("hangs.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&hanging)?; // accepts, and never responds
    let hung_serve = format!("--local.socket={}", hanging.display());
    let hanging = format!("--docker.socket={}", hanging.display());
    let locked = tempfile::tempdir()?;
    write_ledger(locked.path(), 1)?;
    let lock = rusqlite::Connection::open(locked.path().join(FILE))?;
    lock.execute_batch("BEGIN EXCLUSIVE")?; // as a memledger that was stopped within a commit
    let locked = format!("--state.path={}", locked.path().display());
    let verbs: [(&[&str], &str); 10] = [
        (&["--version"], ""),
        (&["runs"], ""),
        (&["runs", "train-500"], ""),
        (&["runs", "--json"], ""),
        (&["compare", "vision/train-25"], ""),
        (&["advise", "vision/train-25"], ""),
        (&["why", "train-500"], ""),
        (&["why", "train-500", &hanging], "the same, with an engine that never answers"),
        (
            &["why", "train-500", &hanging, "--state.path=", &hung_serve],
            "and with a memledger that never answers",
        ),
        (&["why", "train-500", &hanging, &locked, "--local.socket="], "and with a ledger that is locked"),
    ];
    let mut took = vec![Vec::new(); verbs.len()];
    for _ in 0..ROUNDS {
        for ((verb, _), took) in std::iter::zip(verbs, &mut took) {
            let is_set = verb.iter().any(|word| word.starts_with("--local.socket="));
            let ledger: &[&str] =
                if verb[0] == "--version" || is_set { &[] } else { &[&state, "--local.socket="] };
            let has_ledger = !verb.iter().any(|word| *word == "--state.path=" || *word == locked);
            took.push(timed(&[verb, ledger].concat(), has_ledger)?);
        }
    }
    let medians: Vec<f64> = took.into_iter().map(median).collect();
    let rows = std::iter::zip(verbs, &medians).map(|((verb, what), median)| match verb[0] {
        "--version" => format!("| the start alone, `--version` | {median:.1} |\n"),
        _ if !what.is_empty() => format!("| {what} | {median:.1} |\n"),
        _ => format!("| `memledger {}` | {median:.1} |\n", verb.join(" ")),
    });
    let rows: String = rows.collect();

    let memledgers = [&state, &no_runs].map(|state| {
        Memledger::start(&[state, "--local.socket=", "--sample.interval=1s", "--no-collector.gpu"])
    });
    let [with, without] = costs([&memledgers[0], &memledgers[1]]);
    let row = |what: &str, digits: usize, of: fn(&Cost) -> f64| {
        let (with, without) = (of(&with), of(&without));
        format!("| {what} | {without:.digits$} | {with:.digits$} | {:.2} |\n", with / without)
    };
    let verdict = |met: bool| match met {
        _ if cfg!(debug_assertions) => "not judged in this build",
        true => "met",
        false => "**missed**",
    };
    let size = std::fs::metadata(full.path().join(FILE)).map_or(0, |file| file.len());
    document::write(&format!(
        "{}\n\nA ledger of {RUNS} runs in {} groups, each with sixty points over time, {} KiB. Medians of {ROUNDS}, in turn:\n\n\
         | verb | ms |\n| --- | ---: |\n{rows}\n\
         Two `memledger serve` at the same time, for {} s, on this ledger and on one without runs:\n\n\
         | | without runs | with {RUNS} | ratio |\n| --- | ---: | ---: | ---: |\n{}{}{}\n\
         Goals: `runs` in less than {} ms ({}); `why` in less than {} s, whatever hangs ({}); no cycle costs more because of records ({}).\n",
        document::HEADINGS[9],
        RUNS / IN_GROUP,
        size / 1024,
        DURATION.as_secs(),
        row("processor time of a cycle, us", 0, |cost| cost.cycle_us),
        row("processor time of all threads, ms/s", 2, |cost| cost.all_ms_per_second),
        row("resident, MiB", 1, |cost| cost.resident_mib),
        MAX_RUNS_TIME.as_millis(),
        verdict(medians[1] <= MAX_RUNS_TIME.as_secs_f64() * 1e3),
        MAX_WHY_TIME.as_secs(),
        verdict(medians[6..].iter().all(|median| *median <= MAX_WHY_TIME.as_secs_f64() * 1e3)),
        verdict(with.cycle_us <= 1.1 * without.cycle_us),
    ))?;
    Ok(())
}
