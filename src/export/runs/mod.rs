//! Renders records of runs: as tables and text for people, and as files for other tools.
//!
//! Names come from containers that may be hostile: [`sanitize_for_terminal`] escapes control sequences in them.

mod comparison;
mod files;
mod graph;
mod page;

use std::fmt::Write;

use jiff::tz::TimeZone;

use super::events::time;
use crate::config::GROUP_SETTING;
use crate::events::ExitReason;
use crate::runs::advice::lines::Advice;
use crate::runs::advice::{has_failed, was_killed};
use crate::runs::hit_limit::LimitPosition;
use crate::runs::leak::torch_leak;
use crate::runs::{GpuPeak, RolePeak, RunRecord};
use crate::text::{bytes as human, duration, human_bytes, sanitize_for_terminal};

pub use comparison::{MAX_COMPARED, comparison};
pub use files::{csv, memory_usage};
pub use page::page;

/// Maximum characters of a name in the list, and of a value in a comparison.
const MAX_NAME_CHARS: usize = 18;
/// The same of a pod and its container in the list.
const MAX_POD_CHARS: usize = 20;
/// Before a peak of a run that needed more.
const MORE: &str = ">";

/// Returns a table with one line per run, at the Unix time `now`.
pub fn table(runs: &[RunRecord], now: f64) -> String {
    let is_pod = |run: &RunRecord| !run.subject.identity.k8s_pod.is_empty();
    let name = if runs.iter().any(is_pod) { "POD/CONTAINER" } else { "CONTAINER" };
    let header = ["RUN", name, "LASTED", "EXIT", "RAM PEAK", "VRAM PEAK"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(header).chain(runs.iter().map(|run| row(run, now))).collect();
    let mut widths = [0; 6];
    for row in &rows {
        for (width, text) in std::iter::zip(&mut widths, row) {
            *width = (*width).max(text.chars().count());
        }
    }
    rows.iter().fold(String::new(), |mut text, row| {
        let line = std::iter::zip(row, widths).fold(String::new(), |mut line, (cell, width)| {
            let _ = write!(line, "{cell:<width$}  ");
            line
        });
        let _ = writeln!(text, "{}", line.trim_end());
        text
    })
}

fn row(run: &RunRecord, now: f64) -> [String; 6] {
    let lasted = match run.duration_seconds {
        Some(seconds) => duration(seconds),
        None => state(run, now),
    };
    [
        safe(&run.run, 40),
        name_in_pod(run),
        lasted,
        exit(run) + &lost(run),
        peak(run.unreclaimable_peak_bytes, was_killed(run)),
        peak(run.gpu_peak_bytes(), has_failed(run)),
    ]
}

/// Returns a peak, marked if the run needed more than what was sampled of it.
fn peak(peak: Option<u64>, needed_more: bool) -> String {
    peak.map_or_else(|| bytes(None), |peak| peak_text(peak as f64, needed_more))
}

fn peak_text(bytes: f64, needed_more: bool) -> String {
    format!("{}{}", if needed_more { MORE } else { "" }, human_bytes(bytes))
}

/// Returns the name of the container, in a pod after the end of that one's name: replicas differ there.
fn name_in_pod(run: &RunRecord) -> String {
    let name = &run.subject.identity;
    match &*name.k8s_pod {
        "" => safe(&name.name, MAX_NAME_CHARS),
        pod => safe_end(&format!("{pod}/{}", name.name), MAX_POD_CHARS),
    }
}

/// Returns the state of a run whose duration is unknown.
fn state(run: &RunRecord, now: f64) -> String {
    let state = match run.ended {
        Some(_) => "-",
        None if run.is_fresh(now) => "running",
        // memledger does not run, or has not stored anything for minutes
        None => "not seen",
    };
    state.to_owned()
}

/// Returns everything about a run as text, at the Unix time `now`.
pub fn report(run: &RunRecord, now: f64, zone: &TimeZone) -> String {
    let mut text = String::new();
    super::words::screen::wrap(&mut text, "", &heading(run));
    for (what, words) in report_rows(run, now, zone) {
        super::words::screen::wrap(&mut text, &format!("  {what:<17} "), &words);
    }
    text
}

/// Returns the name of a run for people.
fn heading(run: &RunRecord) -> String {
    let name = &run.subject.identity;
    let in_pod = match &*name.k8s_pod {
        "" => String::new(),
        pod => format!(" in pod {}/{}", safe(&name.k8s_namespace, 48), safe(pod, 48)),
    };
    format!("{}{in_pod}: run {}", safe(&name.name, 48), safe(&run.run, 40))
}

/// Returns what is known about a run: pairs of what it is, and words.
fn report_rows(run: &RunRecord, now: f64, zone: &TimeZone) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    let mut row = |what: &str, words: String| {
        if !words.is_empty() {
            rows.push((what.to_owned(), words));
        }
    };
    row("group", safe(&run.group, 64));
    row("settings", settings(run));
    row("started", run.subject.started.map_or_else(String::new, |at| time(at, zone)));
    row("ended", end(run, now, zone));
    row("RAM", ram(run));
    row("/dev/shm", run.shm_peak_bytes.map_or_else(String::new, |bytes| format!("peak {}", human(bytes))));
    row("CPU", run.cpu_mean_cores.map_or_else(String::new, |cores| format!("mean {cores:.2} cores")));
    for (role, peak) in run.roles.iter().filter(|(_, peak)| peak.process_rss_bytes > 0) {
        row(role.label(), processes(peak));
    }
    for (uuid, gpu) in &run.gpus {
        row("GPU", format!("{}: {}", safe(uuid, 48), gpu_words(gpu)));
    }
    row("steps", speed(run));
    for operation in &run.operations {
        let peak = operation.torch_allocated_peak_bytes.or(operation.torch_allocated_bytes);
        let vram = peak.map(|peak| format!("tensors {}", human(peak)));
        let rss = operation.rss_bytes.map(|rss| format!("resident {}", human(rss)));
        let words: Vec<_> = [vram, rss].into_iter().flatten().collect();
        row(
            "operation",
            format!(
                "{}/{}: {}",
                safe(&operation.component, 32),
                safe(&operation.operation, 32),
                words.join(", ")
            ),
        );
    }
    row("CUDA OOM", cuda_ooms(run));
    row("GPU memory leak", leak(run));
    row("sampled", sampled(run));
    rows
}

/// Returns the growth of GPU memory between the steps of a training.
fn leak(run: &RunRecord) -> String {
    let Some(leak) = torch_leak(run) else { return String::new() };
    let per_hour = leak.grown_bytes as f64 * 3_600.0 / leak.seconds;
    format!(
        "what PyTorch holds between two steps grew by {} in {} ({} an hour): something keeps tensors, such as a list of losses with their graphs",
        human(leak.grown_bytes),
        duration(leak.seconds),
        human(per_hour as u64)
    )
}

/// Returns how many errors about GPU memory there were, and who counted them.
fn cuda_ooms(run: &RunRecord) -> String {
    let of = |count: Option<u64>, what: &str| {
        count.filter(|count| *count > 0).map(|count| format!("{count} {what}"))
    };
    let counts = [of(run.torch_ooms, "by PyTorch"), of(run.cuda_ooms_in_log, "in its log")];
    counts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Returns in how many cycles and for how much of its time the run was sampled.
fn sampled(run: &RunRecord) -> String {
    let cycles = if run.samples == 1 { "1 cycle".to_owned() } else { format!("{} cycles", run.samples) };
    match (run.observed_seconds, run.duration_seconds) {
        (Some(seconds), Some(lasted)) => format!("{cycles}, {} of {}", duration(seconds), duration(lasted)),
        _ => cycles,
    }
}

fn end(run: &RunRecord, now: f64, zone: &TimeZone) -> String {
    let Some(at) = run.ended else {
        let state = if run.is_fresh(now) { "it is running" } else { "no exit is known" };
        let seen = run.last_sampled.map(|at| format!(", last seen at {}", time(at, zone)));
        return format!("{state}{}", seen.unwrap_or_default());
    };
    let mut words = time(at, zone);
    if let Some(seconds) = run.duration_seconds {
        let _ = write!(words, " after {}", duration(seconds));
    }
    let _ = write!(words, ": {}", exit(run));
    if let Some(code) = run.exit_code {
        let _ = write!(words, ", exit code {code}");
    }
    match run.oom_kills {
        0 => {}
        1 => words.push_str(", 1 OOM kill"),
        kills => {
            let _ = write!(words, ", {kills} OOM kills");
        }
    }
    words
}

fn ram(run: &RunRecord) -> String {
    let Some(peak) = run.unreclaimable_peak_bytes else {
        return if run.samples == 0 {
            "not measured: no cycle saw the run".to_owned()
        } else {
            String::new()
        };
    };
    let hit = run.oom_limit.and_then(|hit| hit.bytes);
    let is_killed = run.exit_reason == Some(ExitReason::OomContainer);
    let mut words = match (run.oom_limit.map(|hit| hit.position), hit.or(run.limit_bytes)) {
        (Some(LimitPosition::Above | LimitPosition::Inside), _) if is_killed => {
            let of = hit.map_or_else(String::new, |limit| format!(" of {}", human(limit)));
            let is_above = run.oom_limit.is_some_and(|hit| hit.position == LimitPosition::Above);
            let place = if is_above { "above" } else { "inside" };
            format!("a limit{of} {place} the container was reached; highest sample {}", human(peak))
        }
        (_, Some(limit)) if is_killed => {
            format!("reached its limit of {}; highest sample {}", human(limit), human(peak))
        }
        (_, _) => peak_words(run, peak),
    };
    if let Some(mean) = run.unreclaimable_mean_bytes {
        let _ = write!(words, ", mean {}", human(mean));
    }
    if let Some(usage) = run.usage_peak_bytes {
        let _ = write!(words, "; with page cache {}", human(usage));
    }
    words
}

/// Returns a peak beside the limit, or beside the memory of the host.
fn peak_words(run: &RunRecord, peak: u64) -> String {
    if let Some(limit) = run.limit_bytes {
        return format!(
            "peak {} of {} ({:.0} %)",
            human(peak),
            human(limit),
            100.0 * peak as f64 / limit as f64
        );
    }
    let host = run.host_total_bytes.zip(run.host_others_peak_bytes);
    let host = host.map(|(total, others)| {
        format!(" of the host's {}, of which others held {}", human(total), human(others))
    });
    format!("peak {}{}", human(peak), host.unwrap_or_default())
}

fn processes(peak: &RolePeak) -> String {
    let resident = human(peak.process_rss_bytes);
    let share = peak
        .process_pss_bytes
        .map_or_else(String::new, |share| format!(", proportional share {}", human(share)));
    match peak.processes {
        1 => format!("1 process, at most {resident} resident{share}"),
        count => format!("{count} processes, each at most {resident} resident{share}"),
    }
}

fn gpu_words(gpu: &GpuPeak) -> String {
    let mut words = Vec::new();
    if let Some(peak) = gpu.peak_bytes {
        let total = gpu.total_bytes.map_or_else(String::new, |total| {
            format!(" of {} ({:.0} %)", human(total), 100.0 * peak as f64 / total as f64)
        });
        words.push(format!("peak {}{total}", human(peak)));
    }
    words.extend(gpu.mean_bytes.map(|mean| format!("mean {}", human(mean))));
    words.extend(gpu.torch_allocated_peak_bytes.map(|peak| format!("tensors {}", human(peak))));
    words.extend(gpu.torch_reserved_peak_bytes.map(|peak| format!("reserved by PyTorch {}", human(peak))));
    words.extend(gpu.utilization_mean.map(|share| format!("busy {:.0} % of the time", 100.0 * share)));
    words.join(", ")
}

fn speed(run: &RunRecord) -> String {
    let Some(steps) = run.steps_per_second else { return String::new() };
    let samples = run.samples_per_second.map(|samples| format!(", {samples:.1} samples per second"));
    format!("{steps:.2} per second{}", samples.unwrap_or_default())
}

/// Returns advice as text.
pub fn advice(advice: &Advice) -> String {
    let mut text = String::new();
    let group = safe(&advice.group, 64);
    let heading = match &*advice.run {
        "" => format!("{group}: checklist before the first run"),
        run => format!("{group}: advice for the next run, after {}", safe(run, 40)),
    };
    super::words::screen::wrap(&mut text, "", &heading);
    for line in &advice.lines {
        let mark = if line.is_ok { " " } else { "!" };
        let words = sanitize_for_terminal(&line.text);
        super::words::screen::wrap(&mut text, &format!("{mark} {:<10} ", line.topic), &words);
        let others: Vec<_> =
            line.runs.iter().filter(|run| **run != advice.run).map(|run| safe(run, 40)).collect();
        if !others.is_empty() {
            super::words::screen::wrap(
                &mut text,
                &format!("  {:<10} ", ""),
                &format!("measured also in {}", others.join(", ")),
            );
        }
    }
    text
}

fn settings(run: &RunRecord) -> String {
    let shown = run.settings.iter().filter(|(name, _)| ***name != *GROUP_SETTING);
    let pairs = shown.map(|(name, value)| format!("{}={}", safe(name, 64), safe(value, 64)));
    pairs.collect::<Vec<_>>().join(" ")
}

/// Returns how many processes of a run were OOM-killed, beside the kill that its exit names.
fn lost(run: &RunRecord) -> String {
    let is_named = matches!(run.exit_reason, Some(ExitReason::OomContainer | ExitReason::OomHost));
    match (run.oom_kills, is_named) {
        (0, _) | (1, true) => String::new(),
        (1, false) => " (1 OOM kill)".to_owned(),
        (kills, _) => format!(" ({kills} OOM kills)"),
    }
}

fn exit(run: &RunRecord) -> String {
    match (run.ended, run.exit_reason) {
        (None, _) => "-".to_owned(),
        (Some(_), None) => "undecided".to_owned(),
        (Some(_), Some(reason)) => reason.label().to_owned(),
    }
}

fn bytes(value: Option<u64>) -> String {
    value.map_or_else(|| "-".to_owned(), human)
}

fn safe(text: &str, max: usize) -> String {
    let text = sanitize_for_terminal(text);
    match text.char_indices().nth(max) {
        Some(_) => text.chars().take(max - 1).chain(['…']).collect(),
        None => text,
    }
}

/// Like [`safe`], but keeps the end.
fn safe_end(text: &str, max: usize) -> String {
    let text = sanitize_for_terminal(text);
    let excess = text.chars().count().saturating_sub(max);
    match excess {
        0 => text,
        _ => std::iter::once('…').chain(text.chars().skip(excess + 1)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::events::{ContainerRef, Identity};

    pub(super) fn run(name: &str, batch: &str, peak: u64) -> RunRecord {
        let gpu = GpuPeak { total_bytes: Some(12 << 30), peak_bytes: Some(peak), ..GpuPeak::default() };
        RunRecord {
            run: "3f2a1b4c5d6e-20261123T112233Z".into(),
            group: "vision".into(),
            subject: ContainerRef {
                identity: Identity { name: name.into(), ..Identity::default() },
                started: Some(1_795_432_953.0),
                ..ContainerRef::default()
            },
            settings: [("batch_size".into(), batch.into())].into(),
            ended: Some(1_795_436_553.5),
            duration_seconds: Some(3600.5),
            exit_reason: Some(ExitReason::OomContainer),
            exit_code: Some(137),
            oom_kills: 1,
            samples: 3600,
            limit_bytes: Some(6 << 30),
            unreclaimable_peak_bytes: Some(peak / 2),
            gpus: [("GPU-a".into(), gpu)].into(),
            ..RunRecord::default()
        }
    }

    #[test]
    fn no_line_is_longer_than_a_hundred_columns() {
        let long = "\u{1b}[2J\u{202e}".repeat(80);
        let mut hostile = run(&long, &long, 900 << 40);
        (hostile.group, hostile.subject.identity.k8s_pod) = (long.as_str().into(), long.as_str().into());
        let advised = Advice {
            group: "a-namespace-of-a-team/a-long-name-of-a-job-7/pytorch".into(),
            run: Arc::clone(&hostile.run),
            batch_size: None,
            maximum_batch_size: None,
            recommended_batch_size: None,
            safe_batch_size: None,
            ram_budget: None,
            lines: vec![],
        };
        hostile.settings.extend((0..40).map(|n| (format!("key_{n}").into(), long.as_str().into())));
        let mut runs = [hostile, run("b", "64", 9 << 30), run("c", "64", 1 << 20), run("d", "7", 2)];
        let mut screens = vec![
            table(&runs, 0.0),
            comparison(&runs, 0.0),
            report(&runs[0], 0.0, &TimeZone::UTC),
            advice(&advised),
        ];
        // the smallest first: the others are many times as large
        runs.reverse();
        runs[0].unreclaimable_peak_bytes = Some(1);
        screens.push(comparison(&runs, 0.0));
        for text in screens {
            for line in text.lines() {
                assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
                assert!(!line.chars().any(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn report_says_whether_a_run_without_an_exit_runs() {
        let seen = 1_795_436_553.0;
        let run = RunRecord { ended: None, last_sampled: Some(seen), ..run("train", "32", 1) };
        let ended = |now| {
            let text = report(&run, now, &TimeZone::UTC);
            text.lines()
                .find_map(|line| line.trim().strip_prefix("ended "))
                .map(|words| words.trim().to_owned())
        };
        let at = "last seen at 2026-11-23 12:22:33+00:00";
        assert_eq!(ended(seen + 60.0), Some(format!("it is running, {at}")));
        assert_eq!(ended(seen + 3600.0), Some(format!("no exit is known, {at}")));
    }

    #[test]
    fn report_has_limit_exit_and_gpu() {
        let text = report(&run("train", "32", 4 << 30), 0.0, &TimeZone::UTC);
        for part in [
            "train: run 3f2a1b4c5d6e-20261123T112233Z\n",
            "settings          batch_size=32",
            "after 1h 00m: oom_container, exit code 137, 1 OOM kill",
            "RAM               reached its limit of 6.0 GiB; highest sample 2.0 GiB",
            "GPU               GPU-a: peak 4.0 GiB of 12.0 GiB (33 %)",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
    }
}
