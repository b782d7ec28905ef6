//! `memledger why --kernel-log FILE`: explains the OOM kills in a saved kernel log, on any machine.
//!
//! Reads nothing but the file. Memory is bounded: long lines are cut, and only the newest kills are kept.

use std::io::{BufRead, BufReader, Read};
use std::process::ExitCode;

use anyhow::Context;

use crate::clock::Timestamp;
use crate::explain::{LoggedKill, LoggedKills, WhyDocument, explain_logged};
use crate::export::verdict_text::{render, render_all, render_head};
use crate::parse::kernel_log::text_log::{MissingLines, TextLine, TextLog, UnreadKill};

/// Longer lines are cut: a record of the kernel has at most one kilobyte, and four if each byte is escaped.
const MAX_LINE_BYTES: u64 = 8 * 1024;
/// So much of a log is kept, with [`LINE_OVERHEAD`] for each line, in case that its newest lines come first.
const MAX_REVERSED_BYTES: usize = 8 << 20;
const LINE_OVERHEAD: usize = 32;
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
    let (log, kills) = read(BufReader::new(input)).with_context(|| format!("{name} cannot be read"))?;
    let (mut kills, omitted) = kills.finish();
    let all = kills.len() as u64 + omitted;
    kills.retain(|logged| query.container.is_none_or(|wanted| logged.matches(wanted)));
    if query.last {
        kills.drain(..kills.len().saturating_sub(1));
    }
    if kills.is_empty() {
        eprintln!("memledger: {}", none_found(name, query.container, (all, omitted), &log));
        return Ok(ExitCode::from(super::NO));
    }
    print(query, &kills, missing_lines(&log))?;
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
fn missing_lines(log: &TextLog) -> Option<&'static str> {
    log.missing().map(|missing| match missing {
        MissingLines::Searched => {
            "The log seems to have only lines that were searched for: the whole report says what used the memory (journalctl -k or dmesg, without grep)."
        }
        MissingLines::Priority => {
            "Lines of priority info seem to be missing, which name the cgroup and the processes: journalctl -k without -p."
        }
    })
}

fn unread_text(name: &str, unread: UnreadKill) -> String {
    let UnreadKill { line, words, is_shortened } = unread;
    let hint = if is_shortened {
        "it is not complete: a screen or a program shortened it (journalctl --no-pager, or dmesg into a file, does not)"
    } else {
        "what stands before the kernel's text is of no known form"
    };
    format!("line {line} of {name} has `{words}`, but {hint}")
}

fn print(query: &LogQuery<'_>, kills: &[LoggedKill], missing: Option<&str>) -> anyhow::Result<()> {
    let now = Timestamp::now().unix_seconds();
    let verdicts = kills.iter().map(|logged| explain_logged(logged, missing, now));
    if query.json {
        let lines = verdicts
            .map(|verdict| serde_json::to_string(&WhyDocument::verdict(&verdict)).map(|line| line + "\n"));
        return Ok(super::print(&lines.collect::<Result<String, _>>()?)?);
    }
    let brief = if query.all { 0 } else { kills.len().saturating_sub(MAX_DETAILED) };
    let hidden = brief.saturating_sub(MAX_BRIEF);
    let mut screens: Vec<String> = verdicts
        .enumerate()
        .skip(hidden)
        .map(|(at, verdict)| match query.all {
            true => render_all(&verdict),
            false if at < brief => render_head(&verdict),
            false => render(&verdict),
        })
        .collect();
    if brief > 0 {
        let kills = kills.len();
        let newest = if hidden > 0 { format!("The newest {} of ", kills - hidden) } else { String::new() };
        let first = format!(
            "{newest}{kills} OOM kills, the last {MAX_DETAILED} with details: --all has those of each.\n"
        );
        screens.insert(0, first);
    }
    Ok(super::print(&screens.join("\n"))?)
}

/// Reads a log, from its end if the newest lines come first.
fn read(mut input: impl BufRead) -> std::io::Result<(TextLog, LoggedKills)> {
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

fn read_lines(mut input: impl BufRead) -> std::io::Result<(TextLog, LoggedKills)> {
    let mut reader = LogReader::default();
    let (mut line, mut first_lines, mut first_bytes) = (Vec::new(), Vec::new(), 0);
    loop {
        line.clear();
        if input.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if line.pop_if(|byte| *byte == b'\n').is_none() && line.len() as u64 == MAX_LINE_BYTES {
            input.skip_until(b'\n')?;
        }
        first_bytes += line.len() + LINE_OVERHEAD;
        if first_bytes <= MAX_REVERSED_BYTES {
            first_lines.push(line.clone());
        }
        reader.push(&line);
    }
    if reader.log.is_newest_first() {
        let mut reversed = LogReader::default();
        first_lines.iter().rev().for_each(|line| reversed.push(line));
        let (mut log, kills) = reversed.finish();
        log.set_reversed(first_lines.len() as u64);
        if first_bytes > MAX_REVERSED_BYTES {
            let all = reader.log.lines();
            eprintln!(
                "the newest lines of the log come first: only the newest {} of {all} were read",
                first_lines.len()
            );
        }
        return Ok((log, kills));
    }
    Ok(reader.finish())
}

/// A log, and the kills in it.
#[derive(Default)]
struct LogReader {
    log: TextLog,
    kills: LoggedKills,
    found: Vec<TextLine>,
}

impl LogReader {
    fn push(&mut self, line: &[u8]) {
        self.log.push(line, &mut self.found);
        self.read_found();
    }

    fn read_found(&mut self) {
        let began = self.log.began_usec();
        self.found.drain(..).for_each(|line| self.kills.read(line, began));
    }

    fn finish(mut self) -> (TextLog, LoggedKills) {
        self.log.finish(&mut self.found);
        self.read_found();
        (self.log, self.kills)
    }
}

/// Says what was found instead of a kill. `all` and `omitted`: kills in the log, and those of them that were not kept.
fn none_found(name: &str, container: Option<&str>, (all, omitted): (u64, u64), log: &TextLog) -> String {
    let cut = if log.is_in_block() {
        "; it ends within a report of the OOM killer, before the line `Killed process`"
    } else {
        ""
    };
    match (container, all, log.lines()) {
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
