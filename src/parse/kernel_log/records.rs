//! From the log's bytes to lines of the OOM killer.
//!
//! /dev/kmsg has records: numbered, with special bytes escaped, so that a record is one line whatever the name of a process. A
//! long record is split into fragments.
//!
//! syslog(2) has lines: a line feed inside a record starts a new line with the same level and time stamp, so text that a user
//! chose may be at the beginning of a line. The names of processes are too short for a relevant line, but the kernel also prints
//! longer text that users choose (mount options, paths). So a line counts only where a record certainly begins: its level or
//! stamp differs from the line before, or all lines of that level and stamp so far have been parsed completely. Ambiguous lines
//! are dropped: the ledger then finds more kills in the kernel's counter than it has records, and reports the difference.
//!
//! In both, messages from user space have another facility than the kernel's, 0, and are skipped.

use std::sync::Arc;

use super::fragments::{MAX_FRAGMENTS, is_complete, may_have_fragments};
use super::report::{OomReport, ReportAssembler};
use super::{Line, digits};
use crate::parse::find;

/// One record of /dev/kmsg, or a fragment of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KmsgRecord<'a> {
    /// Facility and level: `facility << 3 | level`.
    pub priority: u32,
    /// Its number: unique and without gaps.
    pub sequence: u64,
    /// Microseconds of the kernel's clock.
    pub usec: u64,
    /// It continues the previous record.
    pub is_continuation: bool,
    /// The thread or CPU that printed it, if this kernel reports it.
    pub caller: Option<&'a [u8]>,
    /// The text, unescaped.
    pub text: Vec<u8>,
}

impl<'a> KmsgRecord<'a> {
    /// Parses `priority,sequence,usec,flags[,caller=...];text`. Lines after the first are a dictionary.
    pub fn of(bytes: &'a [u8]) -> Option<Self> {
        let line = bytes.split(|&byte| byte == b'\n').next()?;
        let semicolon = find(line, b";")?;
        let mut fields = line[..semicolon].split(|&byte| byte == b',');
        let priority = u32::try_from(digits(fields.next()?)?).ok()?;
        let (sequence, usec) = (digits(fields.next()?)?, digits(fields.next()?)?);
        // kernels before 4.10 mark all fragments but the first with +
        let is_continuation = matches!(fields.next()?, b"c" | b"+");
        let caller = fields.find_map(|field| field.strip_prefix(b"caller="));
        let text = unescaped(&line[semicolon + 1..]);
        Some(Self { priority, sequence, usec, is_continuation, caller, text })
    }

    /// Returns whether the kernel itself printed it.
    pub fn is_kernel(&self) -> bool {
        self.priority >> 3 == 0
    }
}

/// Replaces `\xNN` by the byte. The kernel escapes the backslash too, so every escape is its own.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let escape = rest.strip_prefix(b"\\x").and_then(|hex| std::str::from_utf8(hex.get(..2)?).ok());
        match escape.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &rest[4..];
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    out
}

/// A relevant line with its position in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomLine {
    /// Number of its record; of the first one if it came in fragments. `None` from syslog(2).
    pub sequence: Option<u64>,
    /// Its stamp in microseconds of the kernel's clock.
    pub usec: u64,
    /// The parsed line.
    pub line: Line,
    /// Its whole text.
    pub text: Vec<u8>,
    /// Of a kill: the report that the kernel printed before it, which can be of another kill.
    pub report: Option<Arc<OomReport>>,
}

/// Joins the fragments of long records, and folds those around a kill into its report.
#[derive(Debug, Default)]
pub struct RecordAssembler {
    pending: Option<PendingLine>,
    reports: ReportAssembler,
}

#[derive(Debug)]
struct PendingLine {
    sequence: u64,
    usec: u64,
    caller: Option<Vec<u8>>,
    text: Vec<u8>,
}

impl RecordAssembler {
    /// Longer than all fragments that the kernel makes of one line.
    const MAX_BYTES: usize = 32 * 1024;

    /// Adds the next record; appends completed lines to `out`. A kill is never delayed: it is too short for fragments.
    pub fn push(&mut self, record: KmsgRecord<'_>, out: &mut Vec<OomLine>) {
        if !record.is_kernel() {
            return; // user space may write between the kernel's fragments
        }
        if record.is_continuation {
            match &mut self.pending {
                Some(pending)
                    if pending.caller.as_deref() == record.caller && pending.text.len() < Self::MAX_BYTES =>
                {
                    pending.text.extend_from_slice(&record.text);
                }
                _ => self.pending = None,
            }
            return;
        }
        self.finish(out);
        let KmsgRecord { sequence, usec, text, .. } = record;
        if may_have_fragments(&text) {
            self.pending =
                Some(PendingLine { sequence, usec, caller: record.caller.map(<[u8]>::to_vec), text });
        } else {
            self.complete(sequence, usec, text, out);
        }
    }

    /// Completes a pending line at the end of the log. An incomplete line stays pending.
    pub fn flush(&mut self, out: &mut Vec<OomLine>) {
        if self.pending.as_ref().is_some_and(|pending| Line::of(&pending.text).is_some()) {
            self.finish(out);
        }
    }

    /// Returns the number of the first record of the pending line.
    pub fn held_sequence(&self) -> Option<u64> {
        self.pending.as_ref().map(|pending| pending.sequence)
    }

    /// Drops the pending line and the open report: their rest was overwritten.
    pub fn reset(&mut self) {
        self.pending = None;
        self.reports.records_lost();
    }

    /// Returns true if the begin of a block around a kill was read, and not its end.
    pub fn is_in_block(&self) -> bool {
        self.reports.is_in_block()
    }

    /// Sets the page size of the kernel that writes the log.
    pub fn set_page_bytes(&mut self, page_bytes: u64) {
        self.reports.page_bytes = Some(page_bytes);
    }

    /// Continues the report that another assembler began: it read the records before.
    pub fn continue_report_of(&mut self, other: &mut Self) {
        self.reports = std::mem::take(&mut other.reports);
    }

    fn finish(&mut self, out: &mut Vec<OomLine>) {
        if let Some(PendingLine { sequence, usec, text, .. }) = self.pending.take() {
            self.complete(sequence, usec, text, out);
        }
    }

    fn complete(&mut self, sequence: u64, usec: u64, text: Vec<u8>, out: &mut Vec<OomLine>) {
        let line = Line::of(&text);
        let report = self.reports.push(usec, &text, line.as_ref()).map(Arc::new);
        out.extend(line.map(|line| OomLine { sequence: Some(sequence), usec, line, text, report }));
    }
}

/// One line of syslog(2).
#[derive(Clone, Copy, Debug)]
struct SyslogLine<'a> {
    /// Offset from the start of the text.
    start: usize,
    /// Level, stamp and caller as text: the same for all lines of one record.
    prefix: &'a [u8],
    priority: u32,
    usec: u64,
    text: &'a [u8],
}

impl<'a> SyslogLine<'a> {
    /// Parses `<6>[  846.857491] text`, or with the caller `<6>[  846.857491][ T1234] text`.
    fn of(start: usize, line: &'a [u8]) -> Option<Self> {
        let close = find(line.get(..8).unwrap_or(line), b">[")?;
        let priority = u32::try_from(digits(line.strip_prefix(b"<")?.get(..close - 1)?)?).ok()?;
        let end = close + 2 + line[close + 2..].iter().position(|&byte| byte == b']')?;
        let stamp = line[close + 2..end].trim_ascii_start();
        let dot = find(stamp, b".")?;
        let micros = stamp.get(dot + 1..).filter(|micros| micros.len() == 6)?;
        let usec = digits(&stamp[..dot])?.checked_mul(1_000_000)?.checked_add(digits(micros)?)?;
        let mut end = end + 1;
        if line[end..].starts_with(b"[") {
            end += line[end..].iter().position(|&byte| byte == b']')? + 1;
        }
        let text = line[end..].strip_prefix(b" ").unwrap_or(&line[end..]);
        Some(Self { start, prefix: &line[..end], priority, usec, text })
    }
}

/// The relevant lines of a text of syslog(2).
#[derive(Debug, Default)]
pub struct SyslogText {
    /// The relevant lines, in order.
    pub found: Vec<OomLine>,
    /// Stamps of the first line and of the last complete one.
    pub stamps: Option<(u64, u64)>,
    /// Number of processed bytes: after them begins an incomplete line.
    pub settled: usize,
}

impl SyslogText {
    /// Parses the text, which must begin with a record, as the kernel's buffer does.
    pub fn of(text: &[u8]) -> Self {
        Self::read(text, &mut ReportAssembler::default())
    }

    /// Parses the text, and folds its lines into reports. A block may begin in an earlier text.
    ///
    /// Unlike the lines that are found, what is in a report is not protected from text of users that the kernel prints after a
    /// line feed: a report explains a kill and counts none.
    pub fn read(text: &[u8], reports: &mut ReportAssembler) -> Self {
        let mut at = 0;
        let mut lines = Vec::new();
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            // lines without a stamp are skipped
            lines.extend(SyslogLine::of(at, line.strip_suffix(b"\n").unwrap_or(line)));
            at += line.len();
        }
        let mut this = Self { settled: text.len(), ..Self::default() };
        let mut from = 0;
        while from < lines.len() {
            let same = lines[from..].iter().take_while(|line| line.prefix == lines[from].prefix).count();
            this.read_stamp_group(&lines, from, from + same, reports);
            from += same;
        }
        if let Some(first) = lines.first() {
            let last = lines.iter().rev().find(|line| line.start < this.settled).unwrap_or(first);
            this.stamps = Some((first.usec, last.usec));
        }
        this
    }

    /// Reads the lines of one level and stamp: one record, or several.
    fn read_stamp_group(
        &mut self,
        lines: &[SyslogLine<'_>],
        from: usize,
        to: usize,
        reports: &mut ReportAssembler,
    ) {
        if lines[from].priority >> 3 != 0 {
            return;
        }
        let mut next = from;
        while next < to {
            if let Some((mut found, after)) = joined(&lines[next..to]) {
                found.report = reports.push(found.usec, &found.text, Some(&found.line)).map(Arc::new);
                self.found.push(found);
                next += after;
            } else if may_have_fragments(lines[next].text) && !is_complete(lines[next].text) {
                match with_fragments(&lines[next..]) {
                    Some(text) => {
                        let (usec, line) = (lines[next].usec, Line::of(&text));
                        reports.push(usec, &text, line.as_ref());
                        self.found.extend(line.map(|line| OomLine {
                            sequence: None,
                            usec,
                            line,
                            text,
                            report: None,
                        }));
                    }
                    None if to == lines.len() => self.settled = lines[next].start,
                    None => {}
                }
                return;
            } else {
                match task_row(&lines[next..to]) {
                    Some(rows) => {
                        fold_row(&lines[next..next + rows], reports);
                        next += rows;
                    }
                    None => {
                        // from here on the beginning of a record is unknown
                        let rest = &lines[next..to];
                        rest.iter().for_each(|line| drop(reports.push(line.usec, line.text, None)));
                        return;
                    }
                }
            }
        }
    }
}

/// Folds a row of the table of processes, whose name may contain line feeds.
fn fold_row(lines: &[SyslogLine<'_>], reports: &mut ReportAssembler) {
    let text: Vec<&[u8]> = lines.iter().map(|line| line.text).collect();
    reports.push(lines[0].usec, &text.join(&b'\n'), None);
}

/// Returns the relevant line at the beginning of these lines of one level and stamp, and the number of lines in it: a name may
/// contain up to 15 line feeds. If a name makes the line look complete too early, the longer reading is the kernel's.
fn joined(lines: &[SyslogLine<'_>]) -> Option<(OomLine, usize)> {
    const MAX_LINES: usize = 16;
    let first = lines.first()?;
    let mut text = Vec::new();
    let mut best = None;
    for (index, part) in lines.iter().take(MAX_LINES).enumerate() {
        if index > 0 {
            text.push(b'\n');
        }
        text.extend_from_slice(part.text);
        if let Some(line) = Line::of(&text).filter(|line| line.has_level(first.priority)) {
            let may_go_on = matches!(line, Line::Context(_));
            let found = OomLine { sequence: None, usec: first.usec, line, text: text.clone(), report: None };
            best = Some((found, index + 1));
            if !may_go_on {
                break;
            }
        }
    }
    best
}

/// Returns the text of a line that was printed in fragments: the rest is in the following lines, at the kernel's level for
/// continuations.
fn with_fragments(lines: &[SyslogLine<'_>]) -> Option<Vec<u8>> {
    const LEVEL: u32 = 4;
    let first = lines.first()?;
    let mut text = first.text.to_vec();
    for part in lines.iter().skip(1).take(MAX_FRAGMENTS).take_while(|part| part.priority == LEVEL) {
        text.extend_from_slice(part.text);
        if is_complete(&text) && Line::of(&text).is_none_or(|line| line.has_level(first.priority)) {
            return Some(text);
        }
    }
    None
}

/// Returns the number of lines in the row of the kernel's table of tasks that begins here: it ends in a name, which may
/// contain line feeds. The last rows may have the same stamp as the relevant line.
fn task_row(lines: &[SyslogLine<'_>]) -> Option<usize> {
    const NUMBERS: usize = 7;
    const NAME_BYTES: usize = 15;
    let text = lines.first()?.text;
    if text.starts_with(b"Tasks state (memory values in pages):") || text.starts_with(b"[  pid  ]") {
        return Some(1);
    }
    let close = find(text, b"]")?;
    digits(text.strip_prefix(b"[")?.get(..close - 1)?.trim_ascii_start())?;
    let fields = text[close + 1..].split(|&byte| byte == b' ').filter(|field| !field.is_empty());
    let is_number = |field: &[u8]| digits(field.strip_prefix(b"-").unwrap_or(field)).is_some();
    if fields.take(NUMBERS).filter(|field| is_number(field)).count() < NUMBERS {
        return None;
    }
    let mut left = NAME_BYTES;
    let rest = lines[1..].iter().take_while(|line| {
        let fits = line.text.len() < left && !line.text.starts_with(b"[");
        left = left.saturating_sub(line.text.len() + 1);
        fits
    });
    Some(1 + rest.count())
}
