//! `memledger why --kernel-log FILE`: explains the OOM kills in a saved kernel log, on any machine.
//!
//! Reads nothing but the file. Memory is bounded: long lines are cut, and only the newest kills are kept.

use std::io::{BufRead, BufReader, Read};
use std::process::ExitCode;

use anyhow::Context;

use crate::clock::Timestamp;
use crate::diagnose::{Diagnosis, LoggedKills, PasteRemedy, explain_logged, explain_notice, explain_refusal};
use crate::export::words::screen::{render, render_all, render_head};
use crate::export::words::{self, WhyDocument};
use crate::parse::kernel_log::entries::{EntryReader, TextEntry};
use crate::parse::kernel_log::refusals::{KernelRefusal, RefusalReader};
use crate::parse::kernel_log::text_log::{MissingLines, TextLine, TextLog};
use crate::parse::kill_notice::NoticeReader;

/// Longer lines are cut. One string of JSON can have a whole log.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// So much of a log is kept, with [`ENTRY_OVERHEAD`] for each line, in case that its newest lines come first.
const MAX_REVERSED_BYTES: usize = 8 << 20;
const ENTRY_OVERHEAD: usize = size_of::<TextEntry>();
/// Programs of Windows write UTF-16. So much of it is read.
const MAX_UTF16_BYTES: u64 = 64 << 20;

/// The newest kills, which are printed with details, and those before them, of which the first lines are.
const MAX_DETAILED: usize = 3;
const MAX_BRIEF: usize = 10;

/// What is printed of a log.
#[derive(Debug)]
pub struct LogQuery<'a> {
    /// The file; `-` for standard input.
    pub file: &'a str,
    /// Only kills in this container or cgroup, or of processes with this name.
    pub container: Option<&'a str>,
    /// Only the newest.
    pub last: bool,
    /// Everything of each.
    pub all: bool,
    /// As JSON, one object a line.
    pub json: bool,
}

/// Prints the diagnosis of each kill, the newest last. Exit status 1 if there is none.
///
/// # Errors
/// The input cannot be read.
pub fn run(query: &LogQuery<'_>) -> anyhow::Result<ExitCode> {
    let name = if query.file == "-" { "standard input" } else { query.file };
    let input: Box<dyn Read> = match query.file {
        "-" => Box::new(std::io::stdin().lock()),
        file => Box::new(std::fs::File::open(file).with_context(|| format!("{file} cannot be opened"))?),
    };
    let LogReader { entries, notices, refusals, log, kills, .. } =
        read(BufReader::new(input)).with_context(|| format!("{name} cannot be read"))?;
    let events = events_of_kubernetes(&notices);
    let (mut kills, omitted) = kills.finish();
    let all = kills.len() as u64 + omitted;
    kills.retain(|logged| query.container.is_none_or(|wanted| logged.matches(wanted)));
    if query.last {
        kills.drain(..kills.len().saturating_sub(1));
    }
    let now = Timestamp::now().unix_seconds();
    if all == 0 {
        let mut found = notices.finish();
        found.retain(|notice| query.container.is_none_or(|wanted| notice.matches(wanted)));
        let mut diagnoses: Vec<Diagnosis> = found.iter().map(|notice| explain_notice(notice, now)).collect();
        let is_wanted =
            |refusal: &KernelRefusal| query.container.is_none_or(|wanted| refusal.matches(wanted));
        let refusals = refusals.finish().into_iter().filter(is_wanted);
        diagnoses.extend(refusals.map(|refusal| explain_refusal(&refusal, now)));
        diagnoses.drain(..if query.last { diagnoses.len().saturating_sub(1) } else { 0 });
        if !diagnoses.is_empty() {
            print(query, diagnoses)?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    if kills.is_empty() {
        let none = words::NoKillInLog {
            name,
            wanted: query.container,
            kills: all,
            omitted,
            lines: entries.lines(),
            kernel_lines: log.kernel_lines(),
            unread: log.unread_kill(),
            is_cut: log.is_in_block(),
        };
        eprintln!("memledger: {}", words::no_kill_in_log(&none));
        return Ok(ExitCode::from(super::NO));
    }
    let missing = events.or_else(|| missing_lines(&log, &entries));
    let diagnoses = kills
        .iter()
        .map(|logged| explain_logged(logged, (missing.as_ref(), entries.words().has_context), now))
        .collect();
    print(query, diagnoses)?;
    if omitted > 0 {
        eprintln!("{}", words::omitted_kills(name, omitted));
    }
    if let Some(unread) = log.unread_kill() {
        eprintln!("{}", words::unread_kill(name, unread));
    }
    if log.is_in_block() {
        eprintln!("{}", words::log_is_cut(name));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns what is missing in a log because of how its lines were selected.
fn missing_lines(log: &TextLog, entries: &EntryReader) -> Option<PasteRemedy> {
    log.missing(entries.words()).map(|missing| match missing {
        MissingLines::Searched => PasteRemedy::WholeReport,
        MissingLines::Priority => PasteRemedy::LowerPriority,
    })
}

/// Returns where the rest of a kill is that events of Kubernetes have.
fn events_of_kubernetes(notices: &NoticeReader) -> Option<PasteRemedy> {
    let (node, restarted) = notices.events();
    (!node.is_empty()).then(|| PasteRemedy::KernelLogOfNode {
        node: node.to_owned(),
        restarted_pod: (!restarted.is_empty()).then(|| restarted.to_owned()),
    })
}

fn print(query: &LogQuery<'_>, diagnoses: Vec<Diagnosis>) -> anyhow::Result<()> {
    if query.json {
        let lines = diagnoses
            .iter()
            .map(|diagnosis| serde_json::to_string(&WhyDocument::of(diagnosis)).map(|line| line + "\n"));
        return Ok(super::print(&lines.collect::<Result<String, _>>()?)?);
    }
    let kills = diagnoses.len();
    let brief = if query.all { 0 } else { kills.saturating_sub(MAX_DETAILED) };
    let hidden = brief.saturating_sub(MAX_BRIEF);
    let mut screens: Vec<String> = diagnoses
        .iter()
        .enumerate()
        .skip(hidden)
        .map(|(at, diagnosis)| match query.all {
            true => render_all(diagnosis),
            false if at < brief => render_head(diagnosis),
            false => render(diagnosis),
        })
        .collect();
    if brief > 0 {
        screens.insert(0, words::first_of_several(kills, hidden, MAX_DETAILED));
    }
    Ok(super::print(&screens.join("\n"))?)
}

/// Reads a log, from its end if the newest lines come first.
fn read(mut input: impl BufRead) -> std::io::Result<LogReader> {
    let utf16 = match input.fill_buf()? {
        [0xff, 0xfe, ..] => Some(u16::from_le_bytes as fn([u8; 2]) -> u16),
        [0xfe, 0xff, ..] => Some(u16::from_be_bytes as fn([u8; 2]) -> u16),
        _ => None,
    };
    let Some(from_bytes) = utf16 else { return read_lines(input) };
    let mut bytes = Vec::new();
    input.by_ref().take(MAX_UTF16_BYTES).read_to_end(&mut bytes)?;
    if !input.fill_buf()?.is_empty() {
        eprintln!("{}", words::utf16_is_cut(MAX_UTF16_BYTES));
    }
    let units = bytes.as_chunks().0.iter().map(|pair| from_bytes(*pair));
    let text: String =
        char::decode_utf16(units).map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect();
    read_lines(text.as_bytes())
}

fn read_lines(mut input: impl BufRead) -> std::io::Result<LogReader> {
    let (mut line, mut entries, mut notices) = (Vec::new(), EntryReader::default(), NoticeReader::default());
    let (mut reader, mut refusals) = (LogReader::default(), RefusalReader::default());
    let (mut found, mut first, mut first_bytes) = (Vec::new(), Vec::new(), 0);
    loop {
        line.clear();
        let is_end = input.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0;
        if is_end {
            entries.finish(&mut found);
        } else {
            if line.pop_if(|byte| *byte == b'\n').is_none() && line.len() as u64 == MAX_LINE_BYTES {
                input.skip_until(b'\n')?;
            }
            entries.push(&line, &mut found);
        }
        for entry in found.drain(..) {
            notices.push(&entry.text, entry.stamp.as_ref().map(|stamp| &*stamp.text));
            refusals.push(&entry);
            reader.push(&entry);
            first_bytes += entry.text.len() + ENTRY_OVERHEAD;
            if first_bytes <= MAX_REVERSED_BYTES {
                first.push(entry);
            }
        }
        if is_end {
            break;
        }
    }
    let is_newest_first = reader.log.is_newest_first();
    if is_newest_first {
        reader = LogReader::default();
        first.iter().rev().for_each(|entry| reader.push(entry));
        if first_bytes > MAX_REVERSED_BYTES {
            let (read, all) = (first.last().map_or(0, |entry| entry.number), entries.lines());
            eprintln!("{}", words::reversed_is_cut(read, all));
        }
    }
    reader.finish();
    Ok(LogReader { entries, notices, refusals, ..reader })
}

/// A log, and the kills in it.
#[derive(Default)]
struct LogReader {
    entries: EntryReader,
    notices: NoticeReader,
    refusals: RefusalReader,
    log: TextLog,
    kills: LoggedKills,
    found: Vec<TextLine>,
}

impl LogReader {
    fn push(&mut self, entry: &TextEntry) {
        self.log.push(entry, &mut self.found);
        self.read_found();
    }

    fn read_found(&mut self) {
        let began = self.log.began_usec();
        self.found.drain(..).for_each(|line| self.kills.read(line, began));
    }

    fn finish(&mut self) {
        self.log.finish(&mut self.found);
        self.read_found();
    }
}
