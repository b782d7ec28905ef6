//! The kernel log as text, as people save and send it: of `dmesg`, `journalctl`, rsyslog, raw /dev/kmsg, or quoted in a mail.
//!
//! Each line may begin with a stamp in one of many forms, which is kept as it is ([`super::text_line`]). A line without any is the
//! continuation of a record, the rest of a line that was wrapped, or of a log without stamps: the parsers of records decide by the
//! text. Unlike in the kernel's own interfaces, who wrote a line is mostly unknown: a text proves what its author wants.

use std::sync::Arc;

use super::entries::{TextEntry, TextWords};
use super::fragments::{MAX_FRAGMENTS, is_complete, is_unfinished, may_continue};
use super::record_fields::since_boot_text;
use super::records::{KmsgRecord, OomLine, RecordAssembler};
use super::report::{ReportAssembler, is_part_of_block, is_table_header};
use super::text_line::{PrefixedLine, has_time_of_day, is_counters, undecorated};
use super::{Killed, Line};
use crate::parse::find;
use crate::text::printable;

/// A stamp that is this many microseconds before the last one is of the next day or boot.
const MAX_DISORDER_USEC: u64 = 10_000_000;
const HOUR_USEC: u64 = 3_600_000_000;
/// Lines into which one line is wrapped.
const MAX_PARTS: usize = 32;

/// A relevant line of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextLine {
    /// The line. Its `sequence` is the number of the line in the text.
    pub found: OomLine,
    /// The stamp as the text has it; empty without one.
    pub stamp: String,
}

/// Reads a text line by line.
#[derive(Debug, Default)]
pub struct TextLog {
    reports: ReportAssembler,
    records: RecordAssembler,
    /// A line that comes in fragments, how many there are, and the number of the first line.
    fragments: Option<(Vec<u8>, usize, u64)>,
    kernel_lines: u64,
    stamp: String,
    clock: TextClock,
    has_kernel_stamps: bool,
    /// Texts have stamps, and not only the fields beside them.
    has_own_stamps: bool,
    /// The newest line, which the next ones may continue.
    pending: Option<PendingText>,
    /// The first line that looks like a kill and could not be read.
    unread: Option<UnreadKill>,
    order: LineOrder,
    contents: LogContents,
}

/// A line with its stamp, and the parts of it that follow on further lines.
#[derive(Debug)]
struct PendingText {
    number: u64,
    parts: Vec<Vec<u8>>,
}

/// A line that looks like a kill, and could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadKill {
    /// Number of the line in the text, from 1 on.
    pub line: u64,
    /// Words of the line that the kernel writes at a kill.
    pub words: &'static str,
    /// It ends before the kernel's text does.
    pub is_shortened: bool,
}

/// Evidence of the order of lines: a step in time, or for two the order in which the kernel writes.
#[derive(Debug, Default)]
struct LineOrder {
    forward: u64,
    backward: u64,
    last_usec: u64,
    last_day: Option<Vec<u8>>,
    last_context: Option<u32>,
    last_killed: Option<u32>,
    /// The last line was the header of a table, or a row.
    last_table: Option<bool>,
}

impl LineOrder {
    /// Adds a time. Dates have no order here: times of two days say nothing.
    fn add_stamp(&mut self, usec: u64, day: Option<&[u8]>) {
        if self.last_day.as_deref() == day {
            self.forward += u64::from(usec > self.last_usec && self.last_usec > 0);
            self.backward += u64::from(usec < self.last_usec);
        } else {
            self.last_day = day.map(<[u8]>::to_vec);
        }
        self.last_usec = usec;
    }

    /// Adds a line of no known kind: the header of a table comes before its rows.
    fn add_text(&mut self, text: &[u8]) {
        let table = is_table_header(text);
        match (self.last_table, table) {
            (Some(true), Some(false)) => self.forward += 2,
            (Some(false), Some(true)) => self.backward += 2,
            _ => {}
        }
        self.last_table = table;
    }

    /// Adds a line: the kernel names the victim in the context line, and then kills it.
    fn add_line(&mut self, line: &Line) {
        match line {
            Line::Context(context) => {
                self.backward += 2 * u64::from(context.pid.is_some() && self.last_killed == context.pid);
                (self.last_context, self.last_killed) = (context.pid, None);
            }
            Line::Killed(killed) => {
                self.forward += 2 * u64::from(self.last_context == Some(killed.pid));
                (self.last_context, self.last_killed) = (None, Some(killed.pid));
            }
            _ => (self.last_context, self.last_killed) = (None, None),
        }
    }
}

/// What kinds of lines a text has.
#[derive(Debug, Default)]
struct LogContents {
    /// Lines of the kernel without a word that people search for.
    has_other_lines: bool,
    has_begin: bool,
    /// A kill has the form of Linux 5.1 and later, which name the cgroup before it.
    has_message: bool,
}

/// What is missing in a text because of how it was selected from the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingLines {
    /// All lines have a word that was searched for.
    Searched,
    /// The lines of the lower priorities are missing.
    Priority,
}

/// The time of a text's lines in microseconds, which goes on where its stamps begin anew: at midnight, or with another boot.
#[derive(Debug, Default)]
struct TextClock {
    usec: u64,
    first: Option<u64>,
    /// The newest stamp, and what is added to it.
    stamp: u64,
    offset: u64,
    /// The date of the newest stamp, if it is a time of day.
    day: Option<Vec<u8>>,
}

impl TextClock {
    /// Sets the time of a stamp. `day`: its date, which may be empty, if it is a time of day.
    fn set(&mut self, stamp: u64, day: Option<&[u8]>) {
        let is_back = stamp.saturating_add(MAX_DISORDER_USEC) < self.stamp;
        let is_next_day = self.day.as_deref().zip(day).is_some_and(|(before, day)| before != day);
        if day.is_some() && (is_back || is_next_day) {
            self.offset = self.offset.saturating_add(24 * HOUR_USEC);
        } else if is_back {
            self.offset = self.offset.saturating_add(self.stamp - stamp).saturating_add(HOUR_USEC);
        }
        if self.day.as_deref() != day {
            self.day = day.map(<[u8]>::to_vec);
        }
        self.stamp = stamp;
        self.usec = stamp.saturating_add(self.offset);
        self.first.get_or_insert(self.usec);
    }
}

impl TextLog {
    /// Returns the number of lines with the prefix of a kernel log so far.
    pub fn kernel_lines(&self) -> u64 {
        self.kernel_lines
    }

    /// Returns the time of the first line with a stamp in microseconds, by the clock of the lines that are found; 0 without one.
    pub fn began_usec(&self) -> u64 {
        self.clock.first.unwrap_or(0)
    }

    /// Returns true if a block is open: a log that ends here is cut.
    pub fn is_in_block(&self) -> bool {
        self.reports.is_in_block() || self.records.is_in_block()
    }

    /// Returns true if the newest lines come first: such a text is to be read from its end.
    pub fn is_newest_first(&self) -> bool {
        // one step back is another boot
        self.order.backward > self.order.forward.max(1)
    }

    /// Returns the first line that looks like a kill and could not be read.
    pub fn unread_kill(&self) -> Option<UnreadKill> {
        self.unread
    }

    /// Returns what is missing in the text; `None` if it does not look selected. `words`: what stands in it, read or not.
    pub fn missing(&self, words: TextWords) -> Option<MissingLines> {
        let LogContents { has_other_lines, has_begin, has_message } = self.contents;
        if !has_other_lines && !words.has_memory {
            return Some(MissingLines::Searched);
        }
        (has_begin && has_message && !words.has_table && !words.has_context).then_some(MissingLines::Priority)
    }

    /// Reads an entry. Appends what is relevant of those before it to `out`.
    pub fn push(&mut self, entry: &TextEntry, out: &mut Vec<TextLine>) {
        if entry.is_other {
            return self.flush(out);
        }
        let line = &*undecorated(&entry.text);
        if let Some(record) = KmsgRecord::of(line) {
            self.flush(out);
            return self.push_record(record, entry.number, out);
        }
        let PrefixedLine { stamp, usec, day, is_kernel, text } = PrefixedLine::of(line);
        if !is_kernel {
            return self.flush(out);
        }
        if stamp.is_none() && !entry.is_record && self.continue_pending(text) {
            return;
        }
        self.flush(out);
        match (stamp, &entry.stamp) {
            // the kernel's own stamps are of another clock
            (None, Some(_)) if self.has_own_stamps => self.kernel_lines += 1,
            (None, Some(beside)) => {
                self.kernel_lines += 1;
                self.stamp.clone_from(&beside.text);
                self.set_time(beside.usec, beside.day.as_deref());
            }
            _ => {
                self.kernel_lines += u64::from(stamp.is_some());
                self.has_own_stamps |= stamp.is_some();
                // `dmesg --human` has a time for the first line of a minute, and differences for the others
                let is_difference = |stamp: &[u8]| stamp.starts_with(b"+");
                let is_shown =
                    |stamp: &&[u8]| !is_difference(stamp) || !has_time_of_day(self.stamp.as_bytes());
                if let Some(stamp) = stamp.filter(is_shown) {
                    self.stamp = printable(stamp);
                }
                // behind the stamp of a program that stores logs, only the first line of a record has the kernel's
                self.has_kernel_stamps |= usec.is_some() && day.is_none();
                if let Some(usec) = usec.filter(|_| day.is_none() || !self.has_kernel_stamps) {
                    self.set_time(usec, day);
                }
            }
        }
        self.pending = Some(PendingText { number: entry.number, parts: vec![text.to_vec()] });
    }

    /// Reads what is left at the end of the text.
    pub fn finish(&mut self, out: &mut Vec<TextLine>) {
        self.flush(out);
        if let Some((before, _, number)) = self.fragments.take() {
            self.push_line(&before, number, out);
        }
    }

    fn set_time(&mut self, usec: u64, day: Option<&[u8]>) {
        self.order.add_stamp(usec, day);
        self.clock.set(usec, day);
    }

    /// Adds a line without a stamp to the one before it, if that was wrapped. Lines of a record of several lines are records here.
    fn continue_pending(&mut self, text: &[u8]) -> bool {
        let has_stamps = self.kernel_lines > 0;
        let Some(pending) = self.pending.as_mut().filter(|_| has_stamps) else { return false };
        let is_own_line = Line::of(text).is_some() || is_part_of_block(text) || is_counters(text);
        let may_continue = text.iter().any(u8::is_ascii_alphanumeric)
            && pending.parts.len() < MAX_PARTS
            && !is_own_line
            && may_be_rest_of(&unwrapped(&pending.parts), text);
        if may_continue {
            pending.parts.push(text.to_vec());
        }
        may_continue
    }

    fn flush(&mut self, out: &mut Vec<TextLine>) {
        let Some(PendingText { number, parts }) = self.pending.take() else { return };
        match &parts[..] {
            [text] => self.push_text(text, number, out),
            _ => self.push_text(&unwrapped(&parts), number, out),
        }
    }

    fn push_record(&mut self, record: KmsgRecord<'_>, number: u64, out: &mut Vec<TextLine>) {
        self.kernel_lines += u64::from(record.is_kernel());
        let mut found = Vec::new();
        self.set_time(record.usec, None);
        self.contents.add(&record.text, Line::of(&record.text).as_ref());
        self.records.push(record, &mut found);
        self.records.flush(&mut found);
        for found in found {
            self.order.add_line(&found.line);
            let stamp = since_boot_text(found.usec);
            out.push(TextLine { found: OomLine { sequence: Some(number), ..found }, stamp });
        }
    }

    fn push_text(&mut self, text: &[u8], number: u64, out: &mut Vec<TextLine>) {
        // rsyslog writes a line feed inside a record as #012
        let unescaped = (text.starts_with(b"anon ") || text.starts_with(b"active_anon:"))
            .then(|| replace(text, b"#012", b'\n'));
        let text = unescaped.as_deref().unwrap_or(text);
        match self.fragments.take() {
            Some((before, count, first)) if count < MAX_FRAGMENTS && may_continue(&before, text) => {
                let joined = [before.as_slice(), text].concat();
                if !is_complete(&joined) {
                    self.fragments = Some((joined, count + 1, first));
                    return;
                }
                return self.push_line(&joined, first, out);
            }
            // the rest is missing
            Some((before, _, first)) => self.push_line(&before, first, out),
            None => {}
        }
        if is_unfinished(text) {
            self.fragments = Some((text.to_vec(), 1, number));
            return;
        }
        self.push_line(text, number, out);
    }

    /// Reads the text of a complete line.
    fn push_line(&mut self, text: &[u8], number: u64, out: &mut Vec<TextLine>) {
        let line = Line::of(text).or_else(|| Killed::of_shortened(text).map(Line::Killed));
        self.contents.add(text, line.as_ref());
        match &line {
            Some(line) => self.order.add_line(line),
            None => {
                self.order.add_text(text);
                self.unread = self.unread.or_else(|| UnreadKill::of(text, number));
            }
        }
        // of a line without a stamp the time is not known, but it has one: 0 is before the begin of a ledger
        let usec = self.clock.usec.max(1);
        let report = self.reports.push(usec, text, line.as_ref()).map(Arc::new);
        let sequence = Some(number);
        out.extend(line.map(|line| TextLine {
            found: OomLine { sequence, usec, line, text: text.to_vec(), report },
            stamp: self.stamp.clone(),
        }));
    }
}

impl LogContents {
    fn add(&mut self, text: &[u8], line: Option<&Line>) {
        match line {
            Some(Line::Invoked) => self.has_begin = true,
            Some(Line::Killed(killed)) => self.has_message |= killed.global.is_some(),
            Some(_) => {}
            None => {
                let lower = text.to_ascii_lowercase();
                let is_searched =
                    [&b"oom"[..], b"out of memory", b"kill"].iter().any(|word| find(&lower, word).is_some());
                self.has_other_lines |= !is_searched;
            }
        }
    }
}

impl UnreadKill {
    fn of(text: &[u8], line: u64) -> Option<Self> {
        // the words of each, and what stands near its end
        const KINDS: [(&str, &[u8]); 3] = [
            ("Killed process", b" file-rss:"),
            ("Kill process", b" score "),
            ("oom-kill:constraint=", b",uid="),
        ];
        let is_in = |words: &[u8]| find(text, words).is_some();
        let (words, end) = KINDS.into_iter().find(|(words, _)| is_in(words.as_bytes()))?;
        let begins_so = |begin: &[u8]| text.starts_with(begin);
        let is_kernels =
            begins_so(words.as_bytes()) || begins_so(b"Memory cgroup out") || begins_so(b"Out of memory");
        // old kernels end with the name
        let is_whole = is_in(end) || text.ends_with(b")") || text.ends_with(b").");
        Some(Self { line, words, is_shortened: is_kernels && !is_whole })
    }
}

/// Returns whether a line may be the rest of another one: one that is whole has only the figures of a kill behind it.
fn may_be_rest_of(line: &[u8], text: &[u8]) -> bool {
    let is_figure = |word: &[u8]| {
        let value = find(word, b":").map(|colon| &word[colon + 1..]);
        value.is_some_and(|value| value.first().is_some_and(|byte| byte.is_ascii_digit() || *byte == b'-'))
    };
    match Line::of(line) {
        None => true,
        Some(Line::Killed(_)) => {
            text.split(|&byte| byte == b' ').filter(|word| !word.is_empty()).all(is_figure)
        }
        Some(_) => false,
    }
}

/// Joins the parts of a wrapped line: where the kernel writes no space, a break is inside a word.
fn unwrapped(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut text: Vec<u8> = Vec::new();
    for part in parts {
        let is_in_path = text.starts_with(b"Memory cgroup stats for /") && find(&text, b":").is_none();
        if !text.is_empty() && !is_in_path && !text.starts_with(b"oom-kill:") {
            text.push(b' ');
        }
        text.extend_from_slice(part);
    }
    let is_known = |text: &[u8]| Line::of(text).is_some() || is_part_of_block(text);
    let joined = parts.concat();
    if !is_known(&text) && is_known(&joined) { joined } else { text }
}

fn replace(text: &[u8], from: &[u8], to: u8) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some(at) = find(rest, from) {
        out.extend_from_slice(&rest[..at]);
        out.push(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::super::entries::EntryReader;
    use super::*;

    const KILLED: &str = "Memory cgroup out of memory: Killed process 7 (a [b] kernel: c) total-vm:8kB, anon-rss:4kB, file-rss:0kB";

    /// Reads lines of a text.
    fn read(text: &str, log: &mut TextLog, out: &mut Vec<TextLine>) {
        let (mut reader, mut entries) = (EntryReader::default(), vec![]);
        text.lines().for_each(|line| reader.push(line.as_bytes(), &mut entries));
        reader.finish(&mut entries);
        entries.iter().for_each(|entry| log.push(entry, out));
    }

    /// Returns the stamp and the time of the only line that is found.
    fn found(line: &str) -> Option<(String, u64)> {
        let (mut log, mut out) = (TextLog::default(), vec![]);
        read(line, &mut log, &mut out);
        log.finish(&mut out);
        assert!(out.len() <= 1, "{out:?}");
        let line = out.pop()?;
        assert!(
            matches!(&line.found.line, Line::Killed(killed) if killed.process == "a [b] kernel: c"),
            "{line:?}"
        );
        Some((line.stamp, line.found.usec))
    }

    #[test]
    fn time_goes_on_at_midnight_and_with_another_boot() {
        let usecs = |prefixes: &[&str]| {
            let (mut log, mut out) = (TextLog::default(), vec![]);
            prefixes.iter().for_each(|prefix| read(&format!("{prefix}{KILLED}"), &mut log, &mut out));
            log.finish(&mut out);
            out.iter().map(|line| line.found.usec).collect::<Vec<_>>()
        };
        let days = usecs(&[
            "[Sun Nov 22 08:49:56 2026] ",
            "[Sun Nov 22 23:59:59 2026] ",
            "[Mon Nov 23 00:00:00 2026] ",
            "[Wed Nov 25 00:00:01 2026] ",
        ]);
        let between: Vec<u64> = days.windows(2).map(|pair| (pair[1] - pair[0]) / 1_000_000).collect();
        assert_eq!(between, [15 * 3600 + 10 * 60 + 3, 1, 24 * 3600 + 1], "a day is at least one");
        let boots = usecs(&["[ 3124.417658] ", "[ 3124.417600] ", "[    7.000000] "]);
        assert_eq!(boots[..2], [3_124_417_658, 3_124_417_600], "two CPUs disagree a little");
        assert!(boots[2] > boots[0] + 60_000_000, "{boots:?}");
    }

    #[test]
    fn joins_fragments_of_a_long_path_before_5_3() {
        let path = format!("/docker/{}", "a/".repeat(400));
        let head = "hog invoked oom-killer: gfp_mask=0x14000c0(GFP_KERNEL), nodemask=(null),  order=0, oom_score_adj=0";
        let counters =
            " cache:0KB rss:65024KB rss_huge:0KB shmem:0KB mapped_file:0KB dirty:0KB writeback:0KB";
        let (mut log, mut out) = (TextLog::default(), vec![]);
        for text in [
            head.to_owned(),
            "memory: usage 65536kB, limit 65536kB, failcnt 9".to_owned(),
            format!("Memory cgroup stats for {path}"),
            format!(":{counters}"),
            " inactive_anon:0KB active_anon:65024KB inactive_file:0KB active_file:0KB unevictable:0KB"
                .to_owned(),
            KILLED.to_owned(),
        ] {
            read(&format!("[ 3124.417658] {text}"), &mut log, &mut out);
        }
        log.finish(&mut out);
        let report = out.last().and_then(|line| line.found.report.clone()).expect("a report");
        assert_eq!((report.anon_bytes, report.incomplete), (Some(65_024 << 10), false));
    }

    #[test]
    fn strips_every_prefix_and_keeps_its_stamp() {
        let boot = 3_124_417_658;
        let day = ((8 * 60 + 49) * 60 + 56) * 1_000_000;
        for (prefix, stamp, usec) in [
            ("", "", 1),
            ("> ", "", 1),
            (">> ", "", 1),
            ("[ 3124.417658] ", "3124.417658", boot),
            ("> [ 3124.417658] ", "3124.417658", boot),
            ("<3>[ 3124.417658] ", "3124.417658", boot),
            ("[ 3124.417658][    T2] ", "3124.417658", boot),
            ("[ 3124.417658 <    0.000012>] ", "3124.417658", boot),
            ("kern  :err   : [ 3124.417658] ", "3124.417658", boot),
            ("2026-11-22T08:49:56,417658+00:00 ", "2026-11-22T08:49:56,417658+00:00", day),
            ("3124.417658 host kernel: ", "3124.417658", boot),
            ("[ 3124.417658][ C1] ", "3124.417658", boot),
            ("[ 3124.417658] [    T2] ", "3124.417658", boot),
            ("[  +0.000012] ", "+0.000012", 1),
            ("[<    0.500000>] ", "", 1),
            ("1795337396.123456 host kernel: ", "1795337396.123456", 1_795_337_396_123_456),
            ("[Nov22 08:49] ", "Nov22 08:49", day - 56_000_000),
            ("[Sun Nov 22 08:49:56 2026] ", "Sun Nov 22 08:49:56 2026", day),
            ("[dim. nov. 22 08:49:56 2026] ", "dim. nov. 22 08:49:56 2026", day),
            ("[日 11月 22 08:49:56 2026] ", "日 11月 22 08:49:56 2026", day),
            ("Nov 22 08:49:56 gpu-1 kernel: ", "Nov 22 08:49:56", day),
            ("Nov 22 08:49:56 gpu-1 kernel: [ 3124.417658] ", "Nov 22 08:49:56", boot),
            ("[ 3124.417658] gpu-1 kernel: ", "3124.417658", boot),
            ("2026-11-22T08:49:56.123456+00:00 gpu-1 kernel: ", "2026-11-22T08:49:56.123456+00:00", day),
            (
                "2026-11-22T08:49:56.123456+00:00 gpu-1 kernel: [ 3124.417658] ",
                "2026-11-22T08:49:56.123456+00:00",
                boot,
            ),
            ("2026-11-22T08:49:56+0100 gpu-1 kernel: ", "2026-11-22T08:49:56+0100", day),
            ("3,1123,3124417658,-;", "3124.417658", boot),
            ("3,1123,3124417658,-,caller=T2;", "3124.417658", boot),
        ] {
            assert_eq!(found(&format!("{prefix}{KILLED}")), Some((stamp.to_owned(), usec)), "{prefix}");
            assert_eq!(found(&format!("{prefix}{KILLED}\r")).map(|(_, usec)| usec), Some(usec), "{prefix}");
        }
        let json = |fields: &str| format!("{{\"MESSAGE\":\"{KILLED}\",{fields}}}");
        let at = "\"__REALTIME_TIMESTAMP\":\"1795337396123456\"";
        assert_eq!(found(&json(at)), Some(("2026-11-22 08:49:56 UTC".to_owned(), 1_795_337_396_123_456)));
        let both = format!("{at},\"_TRANSPORT\":\"kernel\",\"_SOURCE_MONOTONIC_TIMESTAMP\":\"3124417658\"");
        assert_eq!(found(&json(&both)), Some(("2026-11-22 08:49:56 UTC".to_owned(), boot)));
    }

    #[test]
    fn lines_of_user_space_are_skipped_where_the_log_shows_them() {
        for line in [
            format!("<11>[ 3124.417658] {KILLED}"),
            format!("11,1123,3124417658,-;{KILLED}"),
            format!("Nov 22 08:49:56 gpu-1 app[12]: {KILLED}"),
            format!("Nov 22 08:49:56 gpu-1 app[12]: at 08:49 kernel: {KILLED}"),
            format!("Nov 22 08:49:56 gpu-1 app[12]: kernel: {KILLED}"),
            format!("Nov 22 08:49:56 gpu-1 app: [ 3124.417658] {KILLED}"),
            format!("17:Nov 22 08:49:56 gpu-1 app: [ 3124.417658] {KILLED}"),
            format!("Nov 22 08:49:56 app: {KILLED}"),
            format!("2026-11-22T08:49:56Z gpu-1 app: <6>[ 3124.417658] {KILLED}"),
            format!("2026-11-22T08:49:56+0000 gpu-1 app: {KILLED}"),
            format!("Nov 22 08:49:56 gpu-1 app: kern: warning: [2026-11-22T08:49:56Z]: {KILLED}"),
            format!("1795337396.123456 gpu-1 app: {KILLED}"),
            format!("[ 3124.417658] gpu-1 app[12]: {KILLED}"),
            format!("{{\"MESSAGE\":\"{KILLED}\",\"_TRANSPORT\":\"journal\",\"__REALTIME_TIMESTAMP\":\"1\"}}"),
        ] {
            assert_eq!(found(&line), None, "{line}");
        }
    }

    #[test]
    fn line_of_a_program_or_a_mark_is_no_part_of_a_whole_line() {
        let context = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=x,pid=7,uid=0";
        for between in [
            "Nov 22 08:49:56 host app[12]: total-vm:9kB, anon-rss:99999999kB, file-rss:0kB",
            "Nov 22 08:49:56 host dockerd[900]: level=info msg=x",
            "--",
            "and this is what I saw",
        ] {
            let (mut log, mut out) = (TextLog::default(), vec![]);
            for line in [context, between, KILLED, between] {
                let prefix = if line == between { "" } else { "Nov 22 08:49:55 host kernel: " };
                read(&format!("{prefix}{line}"), &mut log, &mut out);
            }
            log.finish(&mut out);
            let [one, two] = &out[..] else { panic!("{between}: {out:?}") };
            assert!(
                matches!(&one.found.line, Line::Context(context) if context.pid == Some(7)),
                "{between}: {out:?}"
            );
            assert!(
                matches!(&two.found.line, Line::Killed(killed) if killed.anon_bytes == Some(4096)),
                "{between}: {out:?}"
            );
            assert!(log.unread_kill().is_none(), "{between}");
        }
    }

    #[test]
    fn name_that_imitates_a_prefix_hides_nothing() {
        let (mut log, mut out) = (TextLog::default(), vec![]);
        let line = "[ 3124.417658] Killed process 7 (-<6>[1.5] x) total-vm:8kB, anon-rss:4kB, file-rss:0kB";
        read(line, &mut log, &mut out);
        read("[ 3124.417658]  a>[x", &mut log, &mut out);
        log.finish(&mut out);
        assert!(
            matches!(&out[0].found.line, Line::Killed(killed) if killed.process == "-<6>[1.5] x"),
            "{out:?}"
        );
    }

    #[test]
    fn two_days_or_boots_are_no_reverse_order() {
        let is_newest_first = |lines: &[&str]| {
            let (mut log, mut out) = (TextLog::default(), vec![]);
            lines.iter().for_each(|prefix| read(&format!("{prefix}{KILLED}"), &mut log, &mut out));
            log.finish(&mut out);
            log.is_newest_first()
        };
        assert!(!is_newest_first(&["Nov 22 23:00:00 host kernel: ", "Nov 23 01:00:00 host kernel: "]));
        assert!(!is_newest_first(&["[ 3124.417658] ", "[   12.000000] "]));
        assert!(is_newest_first(&["[ 3124.417658] ", "[ 3000.000000] ", "[ 2999.000000] "]));
    }

    #[test]
    fn joins_context_line_in_fragments() {
        let (mut log, mut out) = (TextLog::default(), vec![]);
        for line in [
            "[    1.000001] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a",
            "[    1.000001] /b,task_memcg=/a/b,task=x,pid=7,uid=0",
        ] {
            read(line, &mut log, &mut out);
        }
        log.finish(&mut out);
        assert!(
            matches!(&out[0].found.line, Line::Context(context) if context.task_cgroups == ["/a/b"]),
            "{out:?}"
        );
        assert_eq!(log.kernel_lines(), 2);
    }
}
