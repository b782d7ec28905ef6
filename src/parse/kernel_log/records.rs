//! From the log's bytes to lines of the OOM killer.
//!
//! /dev/kmsg gives records: numbered, with odd bytes escaped, so that a record is one line whatever a process is called.
//! A long record comes in fragments.
//!
//! syslog(2) gives lines: a line feed inside a record starts a new line with the same level and stamp, and so text that
//! a user chose may stand at the beginning of a line. The names of processes are too short to hold a line that counts,
//! but the kernel also prints longer things that users choose (mount options, paths). So a line counts only where a
//! record certainly begins: level or stamp differ from those of the line before, or the lines of that level and stamp so
//! far are understood to their ends. What cannot be told is not given: the ledger then finds a kill more in the kernel's
//! counter than it has records, and says so.
//!
//! In both, whatever user space wrote has another facility than the kernel's, 0, and is passed over.

use super::{Line, digits};
use crate::parse::find;

/// One record of /dev/kmsg, or a fragment of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Facility and level: `facility << 3 | level`.
    pub priority: u32,
    /// Its number; no two have the same, and none is left out.
    pub sequence: u64,
    /// Microseconds of the kernel's clock.
    pub usec: u64,
    /// It goes on where the record before it ended.
    pub is_continuation: bool,
    /// Which thread or CPU printed it, if this kernel says so.
    pub caller: Option<&'a [u8]>,
    /// The text, escapes undone.
    pub text: Vec<u8>,
}

impl<'a> Record<'a> {
    /// Reads `priority,sequence,usec,flags[,caller=...];text`. Lines after the first are a dictionary.
    pub fn of(bytes: &'a [u8]) -> Option<Self> {
        let line = bytes.split(|&byte| byte == b'\n').next()?;
        let semicolon = find(line, b";")?;
        let mut fields = line[..semicolon].split(|&byte| byte == b',');
        let priority = u32::try_from(digits(fields.next()?)?).ok()?;
        let (sequence, usec) = (digits(fields.next()?)?, digits(fields.next()?)?);
        // kernels before 4.10 mark all but the first fragment with +
        let is_continuation = matches!(fields.next()?, b"c" | b"+");
        let caller = fields.find_map(|field| field.strip_prefix(b"caller="));
        let text = unescaped(&line[semicolon + 1..]);
        Some(Self { priority, sequence, usec, is_continuation, caller, text })
    }

    /// True if the kernel itself printed it.
    pub fn is_kernel(&self) -> bool {
        self.priority >> 3 == 0
    }
}

/// Undoes `\xNN`. The kernel escapes the backslash too, so nobody else can have written one.
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

/// A line of the OOM killer and where it stood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Number of its record; of the first one if it came in fragments. `None` from syslog(2).
    pub sequence: Option<u64>,
    /// Its stamp in microseconds of the kernel's clock.
    pub usec: u64,
    /// What it says.
    pub line: Line,
    /// All of its text.
    pub text: Vec<u8>,
}

/// Joins fragments: a long path makes a record come as several.
#[derive(Debug, Default)]
pub struct Joiner {
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    sequence: u64,
    usec: u64,
    caller: Option<Vec<u8>>,
    text: Vec<u8>,
}

impl Joiner {
    /// Longer than all fragments that the kernel makes of one line.
    const MOST_BYTES: usize = 32 * 1024;

    /// Takes the next record; what it completes goes to `out`. A kill is never held back: the kernel prints it at once,
    /// and it is too short to come in fragments.
    pub fn push(&mut self, record: Record<'_>, out: &mut Vec<Found>) {
        if !record.is_kernel() {
            return; // user space may write in the middle of the kernel's own
        }
        if record.is_continuation {
            match &mut self.held {
                Some(held)
                    if held.caller.as_deref() == record.caller && held.text.len() < Self::MOST_BYTES =>
                {
                    held.text.extend_from_slice(&record.text);
                }
                _ => self.held = None,
            }
            return;
        }
        self.finish(out);
        let Record { sequence, usec, text, .. } = record;
        if comes_in_fragments(&text) {
            self.held = Some(Held { sequence, usec, caller: record.caller.map(<[u8]>::to_vec), text });
        } else if let Some(line) = Line::of(&text) {
            out.push(Found { sequence: Some(sequence), usec, line, text });
        }
    }

    /// The log is drained: a held line that is whole is given. One that is not waits for its rest.
    pub fn drained(&mut self, out: &mut Vec<Found>) {
        if self.held.as_ref().is_some_and(|held| Line::of(&held.text).is_some()) {
            self.finish(out);
        }
    }

    /// Number of the first record of a line that is not whole yet.
    pub fn held_sequence(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.sequence)
    }

    /// Forgets a line that is not whole: its rest was overwritten.
    pub fn reset(&mut self) {
        self.held = None;
    }

    fn finish(&mut self, out: &mut Vec<Found>) {
        let Some(Held { sequence, usec, text, .. }) = self.held.take() else { return };
        if let Some(line) = Line::of(&text) {
            out.push(Found { sequence: Some(sequence), usec, line, text });
        }
    }
}

/// Lines with a path, which the kernel prints piece by piece.
fn comes_in_fragments(text: &[u8]) -> bool {
    [&b"oom-kill:"[..], b"Task in ", b"Tasks in "].iter().any(|head| text.starts_with(head))
}

/// One line of syslog(2).
#[derive(Clone, Copy, Debug)]
struct SyslogLine<'a> {
    /// From the start of the text.
    start: usize,
    /// Level, stamp and caller as they are written: the same for all lines of one record.
    prefix: &'a [u8],
    priority: u32,
    usec: u64,
    text: &'a [u8],
}

impl<'a> SyslogLine<'a> {
    /// Reads `<6>[  846.857491] text`, or with the caller `<6>[  846.857491][ T1234] text`.
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

/// What a text of syslog(2) holds.
#[derive(Debug, Default)]
pub struct SyslogText {
    /// The lines of the OOM killer, in order.
    pub found: Vec<Found>,
    /// Stamp of the first line and of the last one that is settled.
    pub stamps: Option<(u64, u64)>,
    /// So many bytes are settled: after them begins a line whose rest is not there yet.
    pub settled: usize,
}

impl SyslogText {
    /// Reads it. It has to begin with a record, as what the kernel gives does.
    pub fn of(text: &[u8]) -> Self {
        let mut at = 0;
        let mut lines = Vec::new();
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            // what has no stamp is a part of nothing
            lines.extend(SyslogLine::of(at, line.strip_suffix(b"\n").unwrap_or(line)));
            at += line.len();
        }
        let mut this = Self { settled: text.len(), ..Self::default() };
        let mut from = 0;
        while from < lines.len() {
            let same = lines[from..].iter().take_while(|line| line.prefix == lines[from].prefix).count();
            this.read_block(&lines, from, from + same);
            from += same;
        }
        if let Some(first) = lines.first() {
            let last = lines.iter().rev().find(|line| line.start < this.settled).unwrap_or(first);
            this.stamps = Some((first.usec, last.usec));
        }
        this
    }

    /// Lines of one level and stamp: one record, or several.
    fn read_block(&mut self, lines: &[SyslogLine<'_>], from: usize, to: usize) {
        if lines[from].priority >> 3 != 0 {
            return;
        }
        let mut next = from;
        while next < to {
            if let Some((found, after)) = joined(&lines[next..to]) {
                self.found.push(found);
                next += after;
            } else if comes_in_fragments(lines[next].text) {
                match with_fragments(&lines[next..]) {
                    Some(found) => self.found.push(found),
                    None if to == lines.len() => self.settled = lines[next].start,
                    None => {}
                }
                return;
            } else {
                match task_row(&lines[next..to]) {
                    Some(rows) => next += rows,
                    None => return, // from here on nobody can tell where a record begins
                }
            }
        }
    }
}

/// A line of the OOM killer at the beginning of these lines of one level and stamp, and how many they are: a name may
/// hold line feeds, at most 15. Where a name makes the line look whole too early, the longer reading is the kernel's.
fn joined(lines: &[SyslogLine<'_>]) -> Option<(Found, usize)> {
    const MOST_LINES: usize = 16;
    let first = lines.first()?;
    let mut text = Vec::new();
    let mut best = None;
    for (index, part) in lines.iter().take(MOST_LINES).enumerate() {
        if index > 0 {
            text.push(b'\n');
        }
        text.extend_from_slice(part.text);
        if let Some(line) = Line::of(&text).filter(|line| line.fits(first.priority)) {
            let may_go_on = matches!(line, Line::Context(_));
            best = Some((Found { sequence: None, usec: first.usec, line, text: text.clone() }, index + 1));
            if !may_go_on {
                break;
            }
        }
    }
    best
}

/// A line that came in fragments: the rest stands in the lines after it, at the level that the kernel gives to what
/// goes on.
fn with_fragments(lines: &[SyslogLine<'_>]) -> Option<Found> {
    const MOST_FRAGMENTS: usize = 16;
    const LEVEL: u32 = 4;
    let first = lines.first()?;
    let mut text = first.text.to_vec();
    for part in lines.iter().skip(1).take(MOST_FRAGMENTS).take_while(|part| part.priority == LEVEL) {
        text.extend_from_slice(part.text);
        if let Some(line) = Line::of(&text).filter(|line| line.fits(first.priority)) {
            return Some(Found { sequence: None, usec: first.usec, line, text });
        }
    }
    None
}

/// How many lines the row of the kernel's table of tasks takes that begins here: it ends in a name, which may hold line
/// feeds. The last rows may have the stamp of the line that counts.
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
