//! The kernel log as text, as people save and send it: of `dmesg`, `journalctl`, rsyslog, raw /dev/kmsg, or quoted in a mail.
//!
//! Each line may begin with a stamp in one of many forms, which is kept as it is. A line without any is the continuation of a
//! record, or a log without stamps: the parsers of records decide by the text. Unlike in the kernel's own interfaces, who wrote a
//! line is mostly unknown: a text proves what its author wants.

use std::sync::Arc;

use super::fragments::{MAX_FRAGMENTS, is_complete, is_unfinished, may_continue};
use super::records::{KmsgRecord, OomLine, RecordAssembler};
use super::report::ReportAssembler;
use super::{Line, digits_before};
use crate::parse::{find, number, printable};

/// A stamp, with the name of a host, is shorter.
const MAX_PREFIX_BYTES: usize = 200;
/// A stamp that is this many microseconds before the last one is of the next day or boot.
const MAX_DISORDER_USEC: u64 = 10_000_000;
const HOUR_USEC: u64 = 3_600_000_000;

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
    /// A line that comes in fragments, and the number of them.
    fragments: Option<(Vec<u8>, usize)>,
    lines: u64,
    kernel_lines: u64,
    stamp: String,
    clock: TextClock,
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

/// A line without its prefix.
#[derive(Debug, PartialEq, Eq)]
struct Prefixed<'a> {
    /// The stamp as it is in the text.
    stamp: Option<&'a [u8]>,
    /// The time in it in microseconds: since boot, or since midnight.
    usec: Option<u64>,
    /// The date before a time of day; empty without one. `None`: the time is since boot.
    day: Option<&'a [u8]>,
    is_kernel: bool,
    text: &'a [u8],
}

impl TextLog {
    /// Returns the number of lines so far.
    pub fn lines(&self) -> u64 {
        self.lines
    }

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

    /// Reads a line without its line feed. Appends what is relevant to `out`.
    pub fn push(&mut self, line: &[u8], out: &mut Vec<TextLine>) {
        self.lines += 1;
        let mut line = line.strip_suffix(b"\r").unwrap_or(line);
        while let Some(rest) = line.strip_prefix(b">") {
            line = rest.strip_prefix(b" ").unwrap_or(rest);
        }
        if line.starts_with(b"{") {
            if let Some(entry) = JournalEntry::of(line) {
                self.kernel_lines += 1;
                self.clock.set(entry.usec, None);
                self.stamp = entry.stamp;
                self.push_text(&entry.message, out);
            }
            return;
        }
        if let Some(record) = KmsgRecord::of(line) {
            return self.push_record(record, out);
        }
        let Prefixed { stamp, usec, day, is_kernel, text } = Prefixed::of(line);
        if !is_kernel {
            return;
        }
        self.kernel_lines += u64::from(stamp.is_some());
        // `dmesg --human` has a time for the first line of a minute, and differences for the others
        if let Some(stamp) =
            stamp.filter(|stamp| !stamp.starts_with(b"+") || !has_time_of_day(self.stamp.as_bytes()))
        {
            self.stamp = printable(stamp);
        }
        if let Some(usec) = usec {
            self.clock.set(usec, day);
        }
        let text = if stamp.is_none() { text.trim_ascii_start() } else { text };
        self.push_text(text, out);
    }

    fn push_record(&mut self, record: KmsgRecord<'_>, out: &mut Vec<TextLine>) {
        self.kernel_lines += u64::from(record.is_kernel());
        let mut found = Vec::new();
        self.clock.set(record.usec, None);
        self.records.push(record, &mut found);
        self.records.flush(&mut found);
        for found in found {
            let stamp = since_boot(found.usec);
            out.push(TextLine { found: OomLine { sequence: Some(self.lines), ..found }, stamp });
        }
    }

    fn push_text(&mut self, text: &[u8], out: &mut Vec<TextLine>) {
        // rsyslog writes a line feed inside a record as #012
        let unescaped = (text.starts_with(b"anon ") || text.starts_with(b"active_anon:"))
            .then(|| replace(text, b"#012", b'\n'));
        let text = unescaped.as_deref().unwrap_or(text);
        match self.fragments.take() {
            Some((before, count)) if count < MAX_FRAGMENTS && may_continue(&before, text) => {
                let joined = [before.as_slice(), text].concat();
                if !is_complete(&joined) {
                    self.fragments = Some((joined, count + 1));
                    return;
                }
                return self.push_line(&joined, out);
            }
            // the rest is missing
            Some((before, _)) => self.push_line(&before, out),
            None => {}
        }
        if is_unfinished(text) {
            self.fragments = Some((text.to_vec(), 1));
            return;
        }
        self.push_line(text, out);
    }

    /// Reads the text of a complete line.
    fn push_line(&mut self, text: &[u8], out: &mut Vec<TextLine>) {
        let line = Line::of(text);
        // of a line without a stamp the time is not known, but it has one: 0 is before the begin of a ledger
        let usec = self.clock.usec.max(1);
        let report = self.reports.push(usec, text, line.as_ref()).map(Arc::new);
        let sequence = Some(self.lines);
        out.extend(line.map(|line| TextLine {
            found: OomLine { sequence, usec, line, text: text.to_vec(), report },
            stamp: self.stamp.clone(),
        }));
    }
}

/// Formats a time since boot as `dmesg` does.
fn since_boot(usec: u64) -> String {
    format!("{}.{:06}", usec / 1_000_000, usec % 1_000_000)
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

impl<'a> Prefixed<'a> {
    fn of(line: &'a [u8]) -> Self {
        let mut this = Self { stamp: None, usec: None, day: None, is_kernel: true, text: line };
        if let Some((priority, rest)) = level(line) {
            (this.is_kernel, this.text) = (priority >> 3 == 0, rest);
        }
        // `dmesg --decode`
        if let Some(rest) = this.text.strip_prefix(b"kern  :") {
            this.text = find(rest, b": ").filter(|at| *at <= 6).map_or(this.text, |at| &rest[at + 2..]);
        }
        if let Some((stamp, rest)) = bracketed(this.text) {
            this.set_stamp(stamp);
            this.text = rest;
            this.strip_caller();
        }
        let is_stripped = this.strip_host();
        if let (false, None, Some((stamp, rest))) = (is_stripped, this.stamp, iso_stamp(this.text)) {
            this.set_stamp(stamp);
            this.text = rest;
            this.strip_caller();
        }
        this
    }

    fn set_stamp(&mut self, stamp: &'a [u8]) {
        (self.stamp, self.usec, self.day) = (Some(stamp), time_in(stamp), day_in(stamp));
    }

    /// Strips `Nov 22 08:49:56 host kernel: [ 3124.417658] `, with its stamp. Returns false if the line does not begin so.
    fn strip_host(&mut self) -> bool {
        const KERNEL: &[u8] = b" kernel: ";
        let head = &self.text[..self.text.len().min(MAX_PREFIX_BYTES)];
        let Some(at) = find(head, KERNEL) else { return false };
        let before = &head[..at];
        let time = before.iter().rposition(|&byte| byte == b' ').map(|host| before[..host].trim_ascii());
        let time = time.filter(|time| !time.is_empty());
        let is_time =
            |time: &[u8]| is_seconds(time) || (has_time_of_day(time) && find(time, b": ").is_none());
        let is_stamp = time.is_some_and(is_time);
        // of `journalctl -o short-monotonic` the stamp is in brackets, before the name of the host
        if !is_stamp && (self.stamp.is_none() || time.is_some()) {
            return false;
        }
        if let Some(time) = time.filter(|_| is_stamp) {
            self.set_stamp(time);
        }
        self.text = &self.text[at + KERNEL.len()..];
        if let Some((inner, rest)) = bracketed(self.text) {
            if let Some(usec) = time_in(inner) {
                (self.usec, self.day) = (Some(usec), day_in(inner));
            }
            self.text = rest;
            self.strip_caller();
        }
        true
    }

    /// Removes `[    T2]` or `[ C1] `: the thread or CPU that printed the line.
    fn strip_caller(&mut self) {
        let Some(rest) = self.text.strip_prefix(b"[") else { return };
        let Some(close) = rest.iter().take(16).position(|&byte| byte == b']') else { return };
        let inner = rest[..close].trim_ascii();
        let is_caller =
            matches!(inner.first(), Some(b'T' | b'C')) && inner[1..].iter().all(u8::is_ascii_digit);
        if is_caller && inner.len() > 1 {
            let rest = &rest[close + 1..];
            self.text = rest.strip_prefix(b" ").unwrap_or(rest);
        }
    }
}

/// Strips `<6>`.
fn level(line: &[u8]) -> Option<(u64, &[u8])> {
    let (priority, rest) = digits_before(line.strip_prefix(b"<")?, b">")?;
    Some((priority, rest))
}

/// Strips a stamp in brackets: `[ 3124.417658] `, `[  +0.000012] `, `[ 3124.417658 <    0.000012>] `, `[Nov22 08:49] `,
/// `[Sun Nov 22 08:49:56 2026] `; and `[<    0.000012>] `, which is no time but a difference, so the stamp is empty. A row of the table of
/// processes begins with a pid in brackets.
fn bracketed(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = text.strip_prefix(b"[")?;
    let close = rest.iter().take(64).position(|&byte| byte == b']')?;
    let difference = rest[..close].strip_prefix(b"<").and_then(|inner| inner.strip_suffix(b">"));
    let inner = rest[..close].split(|&byte| byte == b'<').next().unwrap_or_default().trim_ascii();
    let seconds = inner.strip_prefix(b"+").unwrap_or(inner);
    let has_time = is_seconds(seconds) || has_time_of_day(inner);
    if !has_time && !difference.is_some_and(|seconds| is_seconds(seconds.trim_ascii())) {
        return None;
    }
    let rest = &rest[close + 1..];
    Some((inner, rest.strip_prefix(b" ").unwrap_or(rest)))
}

/// Strips `2026-11-22T08:49:56,417658+00:00 `, of `dmesg --time-format iso`.
fn iso_stamp(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = text.iter().take(40).position(|&byte| byte == b' ')?;
    let (stamp, rest) = (&text[..end], &text[end + 1..]);
    let is_date = stamp.get(4) == Some(&b'-') && stamp.get(7) == Some(&b'-') && stamp.get(10) == Some(&b'T');
    (is_date && has_time_of_day(stamp)).then_some((stamp, rest))
}

/// Returns whether a text is a number like `3124.417658`.
fn is_seconds(text: &[u8]) -> bool {
    let is_number = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    find(text, b".").is_some_and(|dot| is_number(&text[..dot]) && is_number(&text[dot + 1..]))
}

/// Returns whether a text has `08:49`.
fn has_time_of_day(text: &[u8]) -> bool {
    time_of_day(text).is_some()
}

/// Returns the position of `08:49`.
fn position_of_time(text: &[u8]) -> Option<usize> {
    text.windows(5).position(|window| {
        let [a, b, colon, c, d] = window else { return false };
        *colon == b':' && [a, b, c, d].into_iter().all(u8::is_ascii_digit)
    })
}

/// Returns the date of a stamp with a time of day: what is before that.
fn day_in(stamp: &[u8]) -> Option<&[u8]> {
    position_of_time(stamp).map(|at| &stamp[..at])
}

fn time_of_day(text: &[u8]) -> Option<u64> {
    let at = position_of_time(text)?;
    let two = |at: usize| {
        let pair = text.get(at..at + 2).filter(|pair| pair.iter().all(u8::is_ascii_digit))?;
        Some(u64::from(pair[0] - b'0') * 10 + u64::from(pair[1] - b'0'))
    };
    let seconds = text.get(at + 5).filter(|byte| **byte == b':').and_then(|_| two(at + 6));
    Some((two(at)? * 60 + two(at + 3)?) * 60 + seconds.unwrap_or(0))
}

/// Returns the microseconds of a stamp: since boot, or since midnight. They order the lines of one block.
fn time_in(stamp: &[u8]) -> Option<u64> {
    if stamp.starts_with(b"+") {
        return None; // a difference
    }
    if let Some(seconds) = time_of_day(stamp) {
        return Some(seconds * 1_000_000);
    }
    let (seconds, micros) = digits_before(stamp, b".")?;
    let micros = micros.get(..6).and_then(number)?;
    seconds.checked_mul(1_000_000)?.checked_add(micros)
}

/// An entry of `journalctl -o json`.
struct JournalEntry {
    message: Vec<u8>,
    usec: u64,
    stamp: String,
}

impl JournalEntry {
    fn of(line: &[u8]) -> Option<Self> {
        let entry: serde_json::Value = serde_json::from_slice(line).ok()?;
        let text = |key: &str| entry.get(key).and_then(serde_json::Value::as_str);
        if text("_TRANSPORT").is_some_and(|transport| transport != "kernel") {
            return None;
        }
        let message = match entry.get("MESSAGE")? {
            serde_json::Value::String(message) => message.clone().into_bytes(),
            // bytes that are no valid text
            serde_json::Value::Array(bytes) => {
                let bytes = bytes.iter().map(|byte| u8::try_from(byte.as_u64()?).ok());
                bytes.collect::<Option<Vec<u8>>>()?
            }
            _ => return None,
        };
        let time = |key: &str| text(key).and_then(|time| time.parse::<u64>().ok());
        let realtime = time("__REALTIME_TIMESTAMP");
        let usec = time("_SOURCE_MONOTONIC_TIMESTAMP").or(realtime)?;
        let utc = realtime.and_then(|usec| jiff::Timestamp::from_microsecond(i64::try_from(usec).ok()?).ok());
        let stamp =
            utc.map_or_else(|| since_boot(usec), |time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string());
        Some(Self { message, usec, stamp })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: &str = "Memory cgroup out of memory: Killed process 7 (a [b] kernel: c) total-vm:8kB, anon-rss:4kB, file-rss:0kB";

    /// Returns the stamp and the time of the only line that is found.
    fn found(line: &str) -> Option<(String, u64)> {
        let (mut log, mut out) = (TextLog::default(), vec![]);
        log.push(line.as_bytes(), &mut out);
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
            prefixes.iter().for_each(|prefix| log.push(format!("{prefix}{KILLED}").as_bytes(), &mut out));
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
            log.push(format!("[ 3124.417658] {text}").as_bytes(), &mut out);
        }
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
            format!("{{\"MESSAGE\":\"{KILLED}\",\"_TRANSPORT\":\"journal\",\"__REALTIME_TIMESTAMP\":\"1\"}}"),
            format!("{{\"MESSAGE\":\"{KILLED}\""),
        ] {
            assert_eq!(found(&line), None, "{line}");
        }
    }

    #[test]
    fn joins_context_line_in_fragments() {
        let (mut log, mut out) = (TextLog::default(), vec![]);
        for line in [
            "[    1.000001] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a",
            "[    1.000001] /b,task_memcg=/a/b,task=x,pid=7,uid=0",
        ] {
            log.push(line.as_bytes(), &mut out);
        }
        assert!(
            matches!(&out[0].found.line, Line::Context(context) if context.task_cgroups == ["/a/b"]),
            "{out:?}"
        );
        assert_eq!((log.lines(), log.kernel_lines()), (2, 2));
    }
}
