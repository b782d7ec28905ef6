//! A verdict as one screen of plain text: verdict, evidence, what it held, what to try.
//!
//! The usual case fits 24 lines of 100 columns. What does not fit is cut and said to be; `--json` has all. Every text
//! that somebody else chose is made printable, so that a name cannot steer the terminal.

use std::fmt::Write;

use crate::ledger::entries::{Before, Evidence, Sample};
use crate::ledger::why::{Confidence, Verdict, lasted, printable, roles, short_ids};
use crate::series::human_bytes;

/// Columns of the screen.
const WIDTH: usize = 100;
/// Lines for evidence; characters of a piece, which is one line, and of a kernel's record of a kill, whose figures stand at
/// its end.
const MOST_EVIDENCE: usize = 4;
const LONGEST_EVIDENCE: usize = 88;
const LONGEST_RECORD: usize = 178;
const RECORD: &str = "Killed process ";
/// Samples that are shown: the first, the last, and some between them.
const MOST_SAMPLES: usize = 3;
/// Pieces of advice that are shown.
const MOST_ADVICE: usize = 6;

/// The screen.
pub fn render(verdict: &Verdict) -> String {
    let mut text = String::new();
    heading(&mut text, verdict);
    wrap(&mut text, "", &verdict.what);
    for line in &verdict.also {
        wrap(&mut text, "", line);
    }
    if !verdict.evidence.is_empty() {
        text.push_str("\nEvidence\n");
        evidence(&mut text, &verdict.evidence);
    }
    if let (Some(before), Some(at)) = (&verdict.held, verdict.at) {
        held(&mut text, before, at);
    } else if verdict.at.is_some() {
        text.push_str("\nWhat it held before was not recorded.\n");
    }
    if !verdict.advice.is_empty() {
        text.push_str("\nWhat to try\n");
        for line in verdict.advice.iter().take(MOST_ADVICE) {
            wrap(&mut text, "  - ", line);
        }
    }
    text
}

fn heading(text: &mut String, verdict: &Verdict) {
    if let Some(subject) = &verdict.subject {
        let mut who = String::new();
        for part in [&subject.name.k8s_namespace_name, &subject.name.k8s_pod_name] {
            if !part.is_empty() {
                let _ = write!(who, "{}/", printable(part));
            }
        }
        who.push_str(&printable(&subject.name.container_name));
        let id = subject.container_id.get(..12).unwrap_or(&subject.container_id);
        let details: Vec<String> = [&*subject.runtime, id, &*subject.image]
            .into_iter()
            .filter(|it| !it.is_empty())
            .map(printable)
            .collect();
        if !details.is_empty() {
            let _ = write!(who, " ({})", details.join(", "));
        }
        wrap(text, "", &cut(&who, WIDTH));
    }
    let sure = match verdict.confidence {
        Confidence::Certain => "",
        Confidence::Likely => " (most likely)",
        Confidence::Unsure => " (not certain)",
    };
    let ago = verdict.at.map(|at| verdict.asked_at - at).filter(|ago| *ago >= 0.0);
    let ago = ago.map_or_else(String::new, |ago| format!(", {} ago", lasted(ago)));
    wrap(text, "", &format!("{}{sure}{ago}", verdict.cause.title()));
}

fn evidence(text: &mut String, lines: &[Evidence]) {
    let pieces: Vec<String> = lines.iter().map(piece).collect();
    let all: usize = pieces.iter().map(|piece| piece.lines().count()).sum();
    let mut left = if all > MOST_EVIDENCE { MOST_EVIDENCE - 1 } else { all };
    let fits = |piece: &&String| {
        let rest = left.checked_sub(piece.lines().count());
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    let shown = pieces.iter().take_while(fits).map(|piece| text.push_str(piece)).count();
    if pieces.len() > shown {
        let _ = writeln!(text, "  and {} more: --json", pieces.len() - shown);
    }
}

/// One piece of evidence, with its source in front.
fn piece(line: &Evidence) -> String {
    let source = cut(&printable(&line.source), 8);
    let most = if line.text.contains(RECORD) { LONGEST_RECORD } else { LONGEST_EVIDENCE };
    let mut text = String::new();
    wrap(&mut text, &format!("  {source:<9}"), &cut(&printable(&short_ids(&line.text)), most));
    text
}

/// One column: its heading and its figure.
type Column = (&'static str, fn(&Sample) -> Option<u64>);

fn held(text: &mut String, before: &Before, at: f64) {
    let columns: [Column; 5] = [
        ("cannot drop", |sample| sample.unreclaimable_bytes),
        ("anonymous", |sample| sample.anon_bytes),
        ("shared", |sample| sample.shmem_bytes),
        ("page cache", |sample| sample.file_bytes),
        ("limit", |sample| lowest(sample.limit_bytes, sample.effective_limit_bytes)),
    ];
    let samples = alive(&before.samples);
    if !samples.is_empty() {
        let _ = write!(text, "\n{:<14}", "Held before");
        for (name, _) in &columns {
            let _ = write!(text, "{name:>13}");
        }
        text.push('\n');
    }
    let shown: Vec<_> = spread(samples).map(|sample| (earlier(at - sample.at), sample)).collect();
    for (row, (when, sample)) in shown.iter().enumerate() {
        if shown.get(row + 1).is_some_and(|(next, _)| next == when) {
            continue; // a moment later it was the same time: the later one tells
        }
        let _ = write!(text, "  {when:<12}");
        for (_, figure) in &columns {
            // absent is not zero
            let figure = figure(sample).map_or_else(|| "-".to_owned(), |bytes| human_bytes(bytes as f64));
            let _ = write!(text, "{figure:>13}");
        }
        text.push('\n');
    }
    let mut parts: Vec<String> =
        before.roles.iter().filter(|role| role.processes > 0 && role.rss_bytes > 0).map(of_role).collect();
    let shm = before.samples.last().and_then(|last| Some((last.shm_used_bytes?, last.shm_size_bytes?)));
    parts.extend(
        shm.map(|(used, size)| format!("/dev/shm {}/{}", human_bytes(used as f64), human_bytes(size as f64))),
    );
    if !parts.is_empty() {
        wrap(text, "  ", &parts.join("; "));
    }
}

/// How long before, in words that are true of less than a second too.
fn earlier(seconds: f64) -> String {
    if seconds < 1.0 { "just before".to_owned() } else { format!("-{}", lasted(seconds)) }
}

/// Samples without those at the end that were taken when no process was left: every process has anonymous memory.
fn alive(samples: &[Sample]) -> &[Sample] {
    let left = |sample: &Sample| sample.anon_bytes != Some(0);
    samples.iter().rposition(left).map_or(samples, |last| &samples[..=last])
}

fn lowest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.into_iter().chain(b).min()
}

fn of_role(held: &crate::ledger::entries::RoleHeld) -> String {
    let who = roles(&held.role, held.processes);
    match held.pss_bytes {
        Some(pss) => format!("{who} {}", human_bytes(pss as f64)),
        None => format!("{who} {} resident, shared pages counted again", human_bytes(held.rss_bytes as f64)),
    }
}

/// The first and the last sample and some between, as far apart as can be.
fn spread(samples: &[Sample]) -> impl Iterator<Item = &Sample> {
    let shown = samples.len().min(MOST_SAMPLES);
    (0..shown).map(move |at| &samples[if shown > 1 { at * (samples.len() - 1) / (shown - 1) } else { 0 }])
}

/// At most so many characters, and a mark where something is missing.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some(_) => text.chars().take(most.saturating_sub(3)).chain("...".chars()).collect(),
        None => text.to_owned(),
    }
}

/// Writes lines of at most [`WIDTH`] characters, broken at spaces where there are some; lines after the first are
/// indented as far as the first one's mark reaches.
fn wrap(out: &mut String, mark: &str, text: &str) {
    let indent = mark.chars().count();
    let room = WIDTH - indent;
    let text = printable(text);
    let mut lines: Vec<String> = vec![String::new()];
    let mut length = 0;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let mut word: Vec<char> = word.chars().collect();
        if length > 0 && length + 1 + word.len() > room {
            lines.push(String::new());
            length = 0;
        }
        while word.len() > room {
            let rest = word.split_off(room);
            // the line is empty: a word that does not fit began it
            if let Some(line) = lines.last_mut() {
                line.extend(word);
            }
            lines.push(String::new());
            word = rest;
        }
        if let Some(line) = lines.last_mut() {
            if length > 0 {
                line.push(' ');
                length += 1;
            }
            length += word.len();
            line.extend(word);
        }
    }
    for (number, line) in lines.iter().filter(|line| !line.is_empty()).enumerate() {
        let before = if number == 0 { mark.to_owned() } else { " ".repeat(indent) };
        let _ = writeln!(out, "{before}{line}");
    }
}
