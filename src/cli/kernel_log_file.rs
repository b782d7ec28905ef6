//! `memledger why --kernel-log FILE`: explains the OOM kills in a saved kernel log, on any machine.
//!
//! Reads nothing but the file. Memory is bounded: long lines are cut, and only the newest kills are kept.

use std::io::{BufRead, BufReader, Read};
use std::process::ExitCode;

use anyhow::Context;

use crate::clock::Timestamp;
use crate::explain::explain_logged;
use crate::explain::{LoggedKill, LoggedKills};
use crate::export::verdict_text::render;
use crate::parse::kernel_log::text_log::TextLog;

/// Longer lines are cut: a record of the kernel has at most one kilobyte, and four if each byte is escaped.
const MAX_LINE_BYTES: u64 = 8 * 1024;

/// What is printed of a log.
#[derive(Debug)]
pub struct LogQuery<'a> {
    /// The file; `-` for standard input.
    pub file: &'a str,
    /// Only kills in this container or cgroup, or of processes with this name.
    pub container: Option<&'a str>,
    /// Only the newest.
    pub last: bool,
    /// As JSON.
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
        if query.json {
            super::print("[]\n")?;
        }
        eprintln!("memledger: {}", none_found(name, query.container, (all, omitted), &log));
        return Ok(ExitCode::FAILURE);
    }
    print(query, &kills)?;
    if omitted > 0 {
        eprintln!("{omitted} older OOM kills in {name} are not shown");
    }
    if log.is_in_block() {
        eprintln!("{name} ends within a report of the OOM killer: it is cut, or that kill was not logged");
    }
    Ok(ExitCode::SUCCESS)
}

fn print(query: &LogQuery<'_>, kills: &[LoggedKill]) -> anyhow::Result<()> {
    let now = Timestamp::now().unix_seconds();
    let verdicts = kills.iter().map(|logged| explain_logged(&logged.kill, &logged.log_time, now));
    if query.json {
        let verdicts: Vec<_> = verdicts.collect();
        return Ok(super::print(&(serde_json::to_string_pretty(&verdicts)? + "\n"))?);
    }
    let screens: Vec<String> = verdicts.map(|verdict| render(&verdict)).collect();
    Ok(super::print(&screens.join("\n"))?)
}

fn read(mut input: impl BufRead) -> std::io::Result<(TextLog, LoggedKills)> {
    let (mut log, mut kills) = (TextLog::default(), LoggedKills::default());
    let (mut line, mut found) = (Vec::new(), Vec::new());
    loop {
        line.clear();
        if input.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            return Ok((log, kills));
        }
        if line.pop_if(|byte| *byte == b'\n').is_none() && line.len() as u64 == MAX_LINE_BYTES {
            input.skip_until(b'\n')?;
        }
        log.push(&line, &mut found);
        found.drain(..).for_each(|line| kills.read(line, log.began_usec()));
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
        (_, _, lines) if log.kernel_lines() == 0 => {
            format!("no OOM kill in {name}: none of its {lines} lines has the form of a kernel log{cut}")
        }
        (_, _, lines) => format!(
            "no OOM kill in {name} ({lines} lines, {} of the kernel){cut}. A log of `dmesg` begins where the kernel's ring buffer was \
             overwritten; `journalctl -k` reaches further back",
            log.kernel_lines()
        ),
    }
}
