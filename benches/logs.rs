//! What it costs to look for errors in the logs of containers: each known text is tried on each line.
//!
//! `make bench` reads 10,000 lines of several kinds, and writes its part of docs/performance.md. The texts of real programs are those of
//! `tests/log-texts`.

mod document;

use std::hint::black_box;
use std::time::Instant;

use memledger::parse::log_error::{ErrorFinder, known_texts};

const LINES: usize = 10_000;
const ROUNDS: usize = 9;
/// Goal: milliseconds of 10,000 lines.
const MAX_MS: f64 = 20.0;

/// Returns lines of a kind: each with its number in place of `{}`.
fn lines(kind: &str) -> Vec<String> {
    (0..LINES).map(|number| kind.replace("{}", &number.to_string())).collect()
}

/// Returns the lines of all recorded texts, over and over.
fn recorded() -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/log-texts");
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).expect("the texts").map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let texts: Vec<String> = paths.iter().map(|path| std::fs::read_to_string(path).expect("text")).collect();
    texts.iter().flat_map(|text| text.lines()).cycle().take(LINES).map(str::to_owned).collect()
}

/// Returns the median milliseconds of these lines, and how many errors they have.
#[allow(clippy::disallowed_methods)] // a bench measures time
fn measure(lines: &[String]) -> (f64, usize) {
    let mut errors = 0;
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            let mut finder = ErrorFinder::default();
            errors = lines.iter().filter(|line| black_box(finder.find(line)).is_some()).count();
            began.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[ROUNDS / 2], errors)
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let json = r#"{"time":"2026-01-01T00:00:00Z","level":"info","msg":"step","step":{},"loss":1.25,"lr":0.0003,"tokens_per_second":48211,"memory_gib":61.5,"grad_norm":0.81}"#;
    let kinds = [
        ("a trainer's steps", lines("epoch 3: step {}/90000 loss 1.2345 lr 3.0e-04 412.7 samples/s")),
        ("records in JSON, with the word memory", lines(json)),
        ("lines of 1,000 characters", lines(&format!("DEBUG {{}} {}", "abcdefghij ".repeat(90)))),
        ("what the recorded programs printed", recorded()),
    ];
    let mut rows = String::new();
    let mut most = 0.0_f64;
    for (name, lines) in &kinds {
        let (ms, errors) = measure(lines);
        // no program prints a thousand errors in a second
        if errors == 0 {
            most = most.max(ms);
        }
        rows.push_str(&format!("| {name} | {ms:.1} | {errors} |\n"));
    }
    let verdict = match most <= MAX_MS {
        _ if cfg!(debug_assertions) => "not judged in this build",
        true => "met",
        false => "**missed**",
    };
    document::write(&format!(
        "{}\n\nMilliseconds of 10,000 lines, medians of {ROUNDS}: {} texts, besides those of GPU memory. With `--container.logs` a log is read as it is written.\n\n\
         | lines | ms | errors in them |\n| --- | ---: | ---: |\n{rows}\n\
         Goal: 10,000 lines without an error in less than {MAX_MS:.0} ms ({verdict}). Lines that have one cost tens of microseconds each.\n",
        document::HEADINGS[11],
        known_texts().count(),
    ))
}
