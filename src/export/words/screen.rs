//! Renders a diagnosis as one screen of plain text: diagnosis, evidence, memory use before, what to try.
//!
//! The usual case fits in 24 lines of 100 columns, and each in 30; `--all` and `--json` have the rest. All texts from outside are
//! sanitized, so that a name cannot control the terminal.

use std::fmt::Write;

use super::terms::{roles, short_ids};
use super::{advice, evidence, findings, title, what};
use crate::diagnose::{Confidence, Diagnosis, is_cuda_oom};
use crate::events::{Evidence, OomReport, PriorUsage, Role, RoleRange, UsageSample};
use crate::text::{first_chars, human_bytes, lasted, sanitize_for_terminal};

/// Maximum columns of a line.
const WIDTH: usize = 100;
/// Maximum characters of a piece of evidence, which is one line, and of one whose numbers are at its end: a kernel log record of a kill,
/// and what is known of a CUDA out-of-memory error.
const MAX_EVIDENCE_CHARS: usize = 88;
const MAX_RECORD_CHARS: usize = 178;
const RECORD: &str = "Killed process ";
const GPU_SOURCES: [&str; 3] = ["reporter", "log", "driver"];
/// Less memory is not shown as unaccounted.
const MIN_UNACCOUNTED: u64 = 16 << 20;
/// Lines of a screen.
const MAX_LINES: usize = 30;
/// How much of each part is shown, from the most: the first that fits is taken, and without any the last.
const SCREENS: [Shown; 4] = [
    Shown { others: usize::MAX, processes: 4, evidence: 4, samples: 3, advice: 4, is_reduced: false },
    Shown { others: 8, processes: 4, evidence: 0, samples: 3, advice: 4, is_reduced: true },
    Shown { others: 3, processes: 2, evidence: 0, samples: 2, advice: 4, is_reduced: true },
    Shown { others: 2, processes: 0, evidence: 0, samples: 0, advice: 3, is_reduced: true },
];
const ALL: Shown = Shown {
    others: usize::MAX,
    processes: usize::MAX,
    evidence: usize::MAX,
    samples: usize::MAX,
    advice: usize::MAX,
    is_reduced: false,
};

/// Maximum lines or pieces of each part of a diagnosis.
struct Shown {
    /// Other events.
    others: usize,
    /// Processes of the kernel's report.
    processes: usize,
    /// Lines of evidence.
    evidence: usize,
    /// Samples before: the first, the last, and some between them.
    samples: usize,
    advice: usize,
    /// Less than usual: the end says so.
    is_reduced: bool,
}

/// Renders the screen.
pub fn render(diagnosis: &Diagnosis) -> String {
    let [usual @ .., shortest] = &SCREENS;
    let mut screens = usual.iter().map(|shown| render_parts(diagnosis, shown));
    screens
        .find(|text| text.lines().count() <= MAX_LINES)
        .unwrap_or_else(|| render_parts(diagnosis, shortest))
}

/// Renders everything, without a bound on lines.
pub fn render_all(diagnosis: &Diagnosis) -> String {
    render_parts(diagnosis, &ALL)
}

/// Renders who, what, and why: the first lines of a screen.
pub fn render_head(diagnosis: &Diagnosis) -> String {
    let mut text = String::new();
    heading(&mut text, diagnosis);
    wrap(&mut text, "", &what(diagnosis));
    text
}

fn render_parts(diagnosis: &Diagnosis, shown: &Shown) -> String {
    let mut text = render_head(diagnosis);
    for line in findings(diagnosis).iter().take(shown.others) {
        wrap(&mut text, "", line);
    }
    if let Some(report) = &diagnosis.report {
        at_the_kill(&mut text, diagnosis, report, shown);
    }
    let pieces = evidence(diagnosis);
    if !pieces.is_empty() && shown.evidence > 0 {
        text.push_str("\nEvidence\n");
        write_evidence(&mut text, &pieces, shown.evidence);
    }
    if is_cuda_oom(diagnosis.cause) {
        // host memory says nothing about it
    } else if let (Some(before), Some(at)) = (&diagnosis.held, diagnosis.at) {
        usage_before(&mut text, before, at, shown.samples);
    } else if diagnosis.at.is_some() && diagnosis.pid.is_some() {
        text.push_str("\nWhat it held before was not recorded.\n");
    }
    if !diagnosis.advice.is_empty() {
        text.push_str("\nWhat to try\n");
        for line in advice(diagnosis).iter().take(shown.advice) {
            wrap(&mut text, "  - ", line);
        }
    }
    if shown.is_reduced {
        text.push_str("\nNot all is shown: --all\n");
    }
    text
}

fn heading(text: &mut String, diagnosis: &Diagnosis) {
    if let Some(subject) = &diagnosis.subject {
        let mut who = String::new();
        for part in [&subject.identity.k8s_namespace, &subject.identity.k8s_pod] {
            if !part.is_empty() {
                let _ = write!(who, "{}/", sanitize_for_terminal(part));
            }
        }
        who.push_str(&sanitize_for_terminal(&subject.identity.name));
        let id = subject.container_id.get(..12).unwrap_or(&subject.container_id);
        let details: Vec<String> = [subject.runtime.as_str(), id, &*subject.image]
            .into_iter()
            .filter(|it| !it.is_empty() && *it != &*subject.identity.name)
            .map(sanitize_for_terminal)
            .collect();
        if !details.is_empty() {
            let _ = write!(who, " ({})", details.join(", "));
        }
        wrap(text, "", &cut(&who, WIDTH));
    }
    let sure = match diagnosis.confidence {
        Confidence::Certain => "",
        Confidence::Likely => " (most likely)",
        Confidence::Unsure => " (not certain)",
    };
    let ago = diagnosis.at.map(|at| diagnosis.requested_at - at).filter(|ago| *ago >= 0.0);
    let ago = ago.map_or_else(String::new, |ago| format!(", {} ago", lasted(ago)));
    wrap(text, "", &format!("{}{sure}{ago}", title(diagnosis)));
}

fn write_evidence(text: &mut String, lines: &[Evidence], max: usize) {
    let pieces: Vec<String> = lines.iter().map(|line| piece(line, max == usize::MAX)).collect();
    let all: usize = pieces.iter().map(|piece| piece.lines().count()).sum();
    let mut left = if all > max { max - 1 } else { all };
    let fits = |piece: &&String| {
        let rest = left.checked_sub(piece.lines().count());
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    let shown = pieces.iter().take_while(fits).map(|piece| text.push_str(piece)).count();
    if pieces.len() > shown {
        let _ = writeln!(text, "  and {} more: --all", pieces.len() - shown);
    }
}

/// Renders one piece of evidence after its source.
fn piece(line: &Evidence, is_whole: bool) -> String {
    let source = cut(&sanitize_for_terminal(&line.source), 8);
    let is_record = line.text.contains(RECORD) || GPU_SOURCES.contains(&&*line.source);
    let max = match (is_whole, is_record) {
        (true, _) => usize::MAX,
        (false, true) => MAX_RECORD_CHARS,
        (false, false) => MAX_EVIDENCE_CHARS,
    };
    let mut text = String::new();
    wrap(&mut text, &format!("  {source:<9}"), &cut(&sanitize_for_terminal(&short_ids(&line.text)), max));
    text
}

/// Writes what the kernel logged at the kill: memory by kind, then the largest processes.
fn at_the_kill(text: &mut String, diagnosis: &Diagnosis, report: &OomReport, shown: &Shown) {
    let size = |bytes: u64| human_bytes(bytes as f64);
    let amount = |name: &str, bytes: Option<u64>| bytes.map(|bytes| format!("{name} {}", size(bytes)));
    let mut head = vec![match (report.usage_bytes, report.limit_bytes) {
        (Some(usage), Some(limit)) => format!("{} of {} in use", size(usage), size(limit)),
        (Some(usage), None) => format!("{} in use", size(usage)),
        (None, _) => "memory in use not logged".to_owned(),
    }];
    if report.with_swap {
        head[0].push_str(", memory and swap together");
    }
    if !report.nodes.is_empty() {
        head[0].push_str(" on all nodes together");
    }
    head.extend(amount("free", report.free_bytes));
    head.extend(match (report.swap_bytes, report.swap_limit_bytes) {
        _ if report.host_swap_bytes == Some(0) => Some("no swap".to_owned()),
        (_, Some(0)) => Some("no swap".to_owned()),
        (Some(used), Some(limit)) => Some(format!("swap {} of {}", size(used), size(limit))),
        (Some(used), None) => Some(format!("swap {}", size(used))),
        (None, _) => None,
    });
    if report.incomplete {
        head.push("part of the kernel's report is missing".to_owned());
    }
    text.push('\n');
    wrap(text, "At the kill  ", &head.join("; "));
    let kinds = [
        amount("anonymous", report.anon_bytes),
        amount("page cache", report.file_bytes),
        amount("shared", report.shmem_bytes),
        amount("kernel", report.kernel_bytes),
        amount("huge pages", report.hugetlb_bytes),
        amount("GPU driver", report.gpu_bytes),
        amount("GPU driver pool", report.gpu_pool_bytes),
        amount("compressed swap", report.compressed_swap_bytes),
        amount("balloon", report.balloon_bytes),
        amount("unaccounted", report.unaccounted_bytes.filter(|bytes| is_shown(*bytes, report))),
    ];
    let kinds: Vec<String> = kinds.into_iter().flatten().collect();
    if !kinds.is_empty() {
        wrap(text, "  ", &kinds.join(", "));
    }
    let holders = diagnosis.held.as_ref().filter(|_| report.host).map(|held| held.holders.as_slice());
    let holders: Vec<String> = holders
        .unwrap_or_default()
        .iter()
        .map(|holder| {
            format!("{} {}", cut(&sanitize_for_terminal(&holder.name), 40), size(holder.unreclaimable_bytes))
        })
        .collect();
    if !holders.is_empty() {
        wrap(text, "  ", &format!("largest holders at the last sample: {}", holders.join(", ")));
    }
    if shown.processes > 0 {
        processes(text, diagnosis, report, shown.processes);
    }
}

/// Returns whether what no counter explains is more than what they differ by: those of a cgroup are some hundred kilobytes late for each CPU.
fn is_shown(unaccounted: u64, report: &OomReport) -> bool {
    report.usage_bytes.is_some_and(|usage| unaccounted >= MIN_UNACCOUNTED && unaccounted >= usage / 50)
}

/// Writes the largest processes of the kernel's table, and the range of each role. Sizes of processes are not added up:
/// forked processes share pages.
fn processes(text: &mut String, diagnosis: &Diagnosis, report: &OomReport, max: usize) {
    let Some(count) = report.process_count else { return };
    let size = |bytes: u64| human_bytes(bytes as f64);
    let has_kinds = report.processes.iter().any(|row| row.anon_bytes.is_some());
    let kinds = if has_kinds { format!("{:>13}{:>13}", "anonymous", "shared") } else { String::new() };
    let _ = writeln!(text, "  {:>11}{kinds}  process (of {count})", "resident");
    for row in report.processes.iter().take(max) {
        let cell = |bytes: Option<u64>| format!("{:>13}", bytes.map_or_else(|| "-".to_owned(), size));
        let kinds = if has_kinds { cell(row.anon_bytes) + &cell(row.shmem_bytes) } else { String::new() };
        let mut who = vec![format!("pid {}", row.pid)];
        who.extend(row.role.filter(|role| *role != Role::Other).map(|role| role.label().replace('_', " ")));
        if !row.container.is_empty() {
            who.push(format!("in {}", cut(&sanitize_for_terminal(&row.container), 24)));
        }
        let victim = diagnosis.pid.and_then(|pid| report.victim(pid));
        let killed = if victim.is_some_and(|victim| victim.pid == row.pid) { ", killed" } else { "" };
        let name = sanitize_for_terminal(&row.process);
        let _ = writeln!(text, "  {:>11}{kinds}  {name} ({}){killed}", size(row.rss_bytes), who.join(", "));
    }
    let ranges: Vec<String> =
        report.roles.iter().filter(|range| range.processes > 1).map(role_range).collect();
    if !ranges.is_empty() {
        wrap(text, "  ", &format!("{} (shared pages are in each)", ranges.join("; ")));
    }
}

fn role_range(range: &RoleRange) -> String {
    let who = roles(range.role, range.processes);
    let (min, max) = (human_bytes(range.min_rss_bytes as f64), human_bytes(range.max_rss_bytes as f64));
    if min == max { format!("{who} {min} each") } else { format!("{who} {min} to {max} each") }
}

/// A column: its heading and its value.
type Column = (&'static str, fn(&UsageSample) -> Option<u64>);

fn usage_before(text: &mut String, before: &PriorUsage, at: f64, max: usize) {
    let columns: [Column; 5] = [
        ("cannot drop", |sample| sample.unreclaimable_bytes),
        ("anonymous", |sample| sample.anon_bytes),
        ("shared", |sample| sample.shmem_bytes),
        ("page cache", |sample| sample.file_bytes),
        ("limit", |sample| lowest(sample.limit_bytes, sample.effective_limit_bytes)),
    ];
    let samples = if max > 0 { while_alive(&before.samples) } else { &[] };
    if !samples.is_empty() {
        let _ = write!(text, "\n{:<14}", "Held before");
        for (name, _) in &columns {
            let _ = write!(text, "{name:>13}");
        }
        text.push('\n');
    }
    let shown: Vec<_> = spread(samples, max).map(|sample| (earlier(at - sample.at), sample)).collect();
    for (row, (when, sample)) in shown.iter().enumerate() {
        if shown.get(row + 1).is_some_and(|(next, _)| next == when) {
            continue; // the same time in words: print only the later sample
        }
        let _ = write!(text, "  {when:<12}");
        for (_, value) in &columns {
            // absent is not zero
            let value = value(sample).map_or_else(|| "-".to_owned(), |bytes| human_bytes(bytes as f64));
            let _ = write!(text, "{value:>13}");
        }
        text.push('\n');
    }
    let mut parts: Vec<String> =
        before.roles.iter().filter(|role| role.processes > 0 && role.rss_bytes > 0).map(role_usage).collect();
    let shm = before.samples.last().and_then(|last| Some((last.shm_used_bytes?, last.shm_size_bytes?)));
    parts.extend(
        shm.map(|(used, size)| format!("/dev/shm {}/{}", human_bytes(used as f64), human_bytes(size as f64))),
    );
    if !parts.is_empty() {
        wrap(text, "  ", &parts.join("; "));
    }
}

/// Formats the time before the event, also below a second.
fn earlier(seconds: f64) -> String {
    if seconds < 1.0 { "just before".to_owned() } else { format!("-{}", lasted(seconds)) }
}

/// Returns the samples without those at the end that have no processes: every process has anonymous memory.
fn while_alive(samples: &[UsageSample]) -> &[UsageSample] {
    let has_processes = |sample: &UsageSample| sample.anon_bytes != Some(0);
    samples.iter().rposition(has_processes).map_or(samples, |last| &samples[..=last])
}

fn lowest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.into_iter().chain(b).min()
}

fn role_usage(held: &crate::events::RoleUsage) -> String {
    let who = roles(held.role, held.processes);
    match held.pss_bytes {
        Some(pss) => format!("{who} {}", human_bytes(pss as f64)),
        None => format!("{who} {} resident, shared pages counted again", human_bytes(held.rss_bytes as f64)),
    }
}

/// Returns the first, the last, and some samples between, evenly spread.
fn spread(samples: &[UsageSample], max: usize) -> impl Iterator<Item = &UsageSample> {
    let shown = samples.len().min(max);
    let newest = samples.len().saturating_sub(1);
    (0..shown).map(move |at| &samples[if shown > 1 { at * newest / (shown - 1) } else { newest }])
}

/// Cuts a text to at most `max` characters, and marks that with dots.
fn cut(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some(_) => format!("{}...", first_chars(text, max.saturating_sub(3))),
        None => text.to_owned(),
    }
}

/// Writes lines of at most [`WIDTH`] characters, broken at spaces if possible; later lines are indented by the width of
/// `mark`, which begins the first. Not cut: a command in it can be copied.
pub fn wrap(out: &mut String, mark: &str, text: &str) {
    let indent = mark.chars().count();
    let width = WIDTH - indent;
    let text: Vec<char> = sanitize_for_terminal(text).chars().collect();
    let mut lines: Vec<Vec<char>> = vec![];
    for piece in text.split(|character| *character == ' ').flat_map(|word| word.chunks(width)) {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + piece.len() <= width => {
                line.push(' ');
                line.extend(piece);
            }
            _ => lines.push(piece.to_vec()),
        }
    }
    for (number, line) in lines.iter().enumerate() {
        let before = if number == 0 { mark.to_owned() } else { " ".repeat(indent) };
        let _ = writeln!(out, "{before}{}", String::from_iter(line));
    }
}
