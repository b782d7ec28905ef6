//! `memledger why --kernel-log FILE`: explains the OOM kills in a saved kernel log, on any machine.
//!
//! Reads nothing but the file. Memory is bounded: long lines are cut, and only the newest kills are kept.

use std::io::{BufRead, BufReader, Read};
use std::process::ExitCode;

use anyhow::Context;

use crate::clock::Timestamp;
use crate::explain::{LoggedKills, Verdict, WhyDocument, explain_logged, explain_notice, explain_refusal};
use crate::export::verdict_text::{render, render_all, render_head};
use crate::parse::kernel_log::entries::{EntryReader, TextEntry};
use crate::parse::kernel_log::refusals::{KernelRefusal, RefusalReader};
use crate::parse::kernel_log::text_log::{MissingLines, TextLine, TextLog, UnreadKill};
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

/// Prints the verdict on each kill, the newest last. Exit status 1 if there is none.
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
        let mut verdicts: Vec<Verdict> = found.iter().map(|notice| explain_notice(notice, now)).collect();
        let is_wanted =
            |refusal: &KernelRefusal| query.container.is_none_or(|wanted| refusal.matches(wanted));
        let refusals = refusals.finish().into_iter().filter(is_wanted);
        verdicts.extend(refusals.map(|refusal| explain_refusal(&refusal, now)));
        verdicts.drain(..if query.last { verdicts.len().saturating_sub(1) } else { 0 });
        if !verdicts.is_empty() {
            print(query, verdicts)?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    if kills.is_empty() {
        eprintln!("memledger: {}", none_found(name, query.container, (all, omitted), (&log, &entries)));
        return Ok(ExitCode::from(super::NO));
    }
    let missing = events.or(missing_lines(&log, &entries).map(str::to_owned));
    let verdicts = kills
        .iter()
        .map(|logged| explain_logged(logged, (missing.as_deref(), entries.words()), now))
        .collect();
    print(query, verdicts)?;
    if omitted > 0 {
        eprintln!("{omitted} older OOM kills in {name} are not shown");
    }
    if let Some(unread) = log.unread_kill() {
        eprintln!("{}", unread_text(name, unread));
    }
    if log.is_in_block() {
        eprintln!("{name} ends within a report of the OOM killer: it is cut, or that kill was not logged");
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what is missing in a log because of how its lines were selected.
fn missing_lines(log: &TextLog, entries: &EntryReader) -> Option<&'static str> {
    log.missing(entries.words()).map(|missing| match missing {
        MissingLines::Searched => {
            "The log seems to have only lines that were searched for: the whole report says what used the memory (journalctl -k or dmesg, without grep)."
        }
        MissingLines::Priority => {
            "Lines of priority info seem to be missing, which name the cgroup and the processes: journalctl -k without -p."
        }
    })
}

/// Says where the rest of a kill is that events of Kubernetes have.
fn events_of_kubernetes(notices: &NoticeReader) -> Option<String> {
    let (node, restarted) = notices.events();
    let pod = if restarted.is_empty() {
        String::new()
    } else {
        format!(" The pod {restarted} is restarted in these events.")
    };
    (!node.is_empty()).then(|| {
        format!("The kernel log of the node {node} names the container, and what each process held: journalctl -k there.{pod}")
    })
}

fn unread_text(name: &str, unread: UnreadKill) -> String {
    let UnreadKill { line, words, is_shortened } = unread;
    let hint = if is_shortened {
        "its end is missing: a screen or a program shortened it (journalctl --no-pager, or dmesg into a file, does not)"
    } else {
        "it could not be read"
    };
    format!("line {line} of {name} has `{words}`, but {hint}")
}

fn print(query: &LogQuery<'_>, verdicts: Vec<Verdict>) -> anyhow::Result<()> {
    if query.json {
        let lines = verdicts
            .iter()
            .map(|verdict| serde_json::to_string(&WhyDocument::verdict(verdict)).map(|line| line + "\n"));
        return Ok(super::print(&lines.collect::<Result<String, _>>()?)?);
    }
    let kills = verdicts.len();
    let brief = if query.all { 0 } else { kills.saturating_sub(MAX_DETAILED) };
    let hidden = brief.saturating_sub(MAX_BRIEF);
    let mut screens: Vec<String> = verdicts
        .iter()
        .enumerate()
        .skip(hidden)
        .map(|(at, verdict)| match query.all {
            true => render_all(verdict),
            false if at < brief => render_head(verdict),
            false => render(verdict),
        })
        .collect();
    if brief > 0 {
        let newest = if hidden > 0 { format!("The newest {} of ", kills - hidden) } else { String::new() };
        let first = format!(
            "{newest}{kills} OOM kills, the last {MAX_DETAILED} with details: --all has those of each.\n"
        );
        screens.insert(0, first);
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
        let read = MAX_UTF16_BYTES >> 20;
        eprintln!(
            "the log is UTF-16: only its first {read} MiB were read; convert it to UTF-8 to have all of it read (iconv -f UTF-16)"
        );
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
            eprintln!("the newest lines of the log come first: only the newest {read} of {all} were read");
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

/// Says what was found instead of a kill. `all` and `omitted`: kills in the log, and those of them that were not kept.
fn none_found(
    name: &str,
    container: Option<&str>,
    (all, omitted): (u64, u64),
    (log, entries): (&TextLog, &EntryReader),
) -> String {
    let cut = if log.is_in_block() {
        "; it ends within a report of the OOM killer, before the line `Killed process`"
    } else {
        ""
    };
    match (container, all, entries.lines()) {
        (Some(wanted), 1.., _) => format!(
            "none of the {} in {name} is of {wanted:?}: a kernel log has ids of containers, names of cgroups and of \
             processes, but no names of containers{cut}",
            if omitted > 0 {
                format!("newest {} of {all} OOM kills", all - omitted)
            } else {
                format!("{all} OOM kills")
            }
        ),
        (_, _, 0) => format!("{name} is empty"),
        (_, _, lines) => match log.unread_kill() {
            Some(unread) => format!("no OOM kill could be read: {}{cut}", unread_text(name, unread)),
            None if log.kernel_lines() == 0 => {
                format!("no OOM kill in {name}: none of its {lines} lines has the form of a kernel log{cut}")
            }
            None => {
                format!("no OOM kill in {name} ({lines} lines, {} with a stamp){cut}", log.kernel_lines())
            }
        },
    }
}
