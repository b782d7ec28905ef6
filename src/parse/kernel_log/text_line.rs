//! The form of a line in a saved kernel log: what stands before the kernel's text, and around it.
//!
//! Programs put a stamp, the name of the host or a priority before it; people quote it, indent it, number it, or copy it from a
//! screen. A line of another program than the kernel is recognised by its prefix.

use std::borrow::Cow;

use super::fragments::may_have_fragments;
use super::report::is_part_of_block;
use super::{Line, digits_before};
use crate::parse::{find, number};

/// A stamp, with the name of a host, is shorter.
const MAX_PREFIX_BYTES: usize = 200;
/// A date and a time of day are shorter.
const MAX_STAMP_BYTES: usize = 48;
/// Words from a stamp to the name of a program: the host, and with busybox the facility.
const MAX_WORDS_TO_PROGRAM: usize = 3;
/// Decorations and prefixes around each other.
const MAX_LAYERS: usize = 6;

/// Removes what is around a line in a mail, a ticket or a terminal: quotes, list marks, back quotes, colours, white space.
pub(super) fn undecorated(line: &[u8]) -> Cow<'_, [u8]> {
    let is_plain = !line.iter().any(|byte| matches!(byte, 0x1b | 0xa0 | 0xe2));
    let line = if is_plain { Cow::Borrowed(line) } else { Cow::Owned(without_controls(line)) };
    let range = |text: &[u8]| {
        let mut rest = text.trim_ascii_end();
        for _ in 0..MAX_LAYERS {
            let before = rest.len();
            rest = rest.trim_ascii_start();
            for mark in [&b">"[..], b"* ", b"- ", b"+ ", b"| ", b"&gt;", b"<p>", b"<li>"] {
                rest = rest.strip_prefix(mark).unwrap_or(rest);
            }
            for mark in [&b" |"[..], b"<br>", b"<br/>", b"</p>", b"</li>"] {
                rest = rest.strip_suffix(mark).unwrap_or(rest).trim_ascii_end();
            }
            if let Some(inner) = rest.strip_prefix(b"`") {
                rest = inner.strip_suffix(b"`").unwrap_or(inner).trim_ascii_end();
            }
            if rest.len() == before {
                break;
            }
        }
        let from = rest.as_ptr() as usize - text.as_ptr() as usize;
        from..from + rest.len()
    };
    let range = range(&line);
    match line {
        Cow::Borrowed(line) => Cow::Borrowed(&line[range]),
        Cow::Owned(line) => Cow::Owned(line[range].to_vec()),
    }
}

/// Replaces spaces that do not break by others, bullets by stars, and removes sequences that colour text.
fn without_controls(line: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(line.len());
    let mut rest = line;
    while let Some((&first, after)) = rest.split_first() {
        if let Some(sequence) = rest.strip_prefix(b"\x1b[") {
            let end = sequence.iter().position(|byte| (0x40..=0x7e).contains(byte));
            rest = end.map_or(&[], |end| &sequence[end + 1..]);
        } else if let Some(after) = rest.strip_prefix("\u{a0}".as_bytes()) {
            out.push(b' ');
            rest = after;
        } else if let Some(after) = rest.strip_prefix("\u{2022}".as_bytes()) {
            out.push(b'*');
            rest = after;
        } else {
            out.push(first);
            rest = after;
        }
    }
    out
}

/// A line without its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefixedLine<'a> {
    /// The stamp as it is in the text.
    pub(super) stamp: Option<&'a [u8]>,
    /// The time in it in microseconds: since boot, or since midnight.
    pub(super) usec: Option<u64>,
    /// The date before a time of day; empty without one. `None`: the time is since boot.
    pub(super) day: Option<&'a [u8]>,
    /// The kernel wrote it, as far as its prefix shows.
    pub(super) is_kernel: bool,
    /// The kernel's text.
    pub(super) text: &'a [u8],
}

impl<'a> PrefixedLine<'a> {
    /// Strips the prefixes of a line: those of a kernel log, or of a program that shows or stores one.
    pub(super) fn of(line: &'a [u8]) -> Self {
        if program(line).is_some_and(|program| program != b"kernel") {
            return Self { is_kernel: false, ..Self::of_text(line) };
        }
        let plain = Self::of_log(line);
        if !plain.is_kernel || is_kernel_text(plain.text) {
            return plain; // also where a name imitates a prefix
        }
        let head = &plain.text[..plain.text.len().min(MAX_PREFIX_BYTES)];
        // a priority and a stamp, behind those of the program that stored it
        if plain.stamp.is_some() && find(head, b">[").is_some() {
            return behind_mark(plain.text).filter(|inner| inner.stamp.is_some()).unwrap_or(plain);
        }
        if plain.stamp.is_some() {
            // in the log of a container, words before a stamp are what its program says
            let prefix = &line[..line.len() - plain.text.len()];
            let has_stream = prefix.ends_with(b" F ") || prefix.ends_with(b" P ");
            return behind_names(plain).filter(|_| !has_stream).unwrap_or(plain);
        }
        rfc5424(line).or_else(|| talos(line)).or_else(|| behind_mark(line)).unwrap_or(plain)
    }

    /// Strips the stamp of `dmesg`, `journalctl` or syslog, and one before it of a program that stores logs of containers.
    fn of_log(line: &'a [u8]) -> Self {
        let mut this = Self::of_text(line);
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
            this.text = without_stream(rest).unwrap_or(rest);
            let inner = Self::of_log(this.text);
            if inner.stamp.is_some() || !inner.is_kernel {
                return Self { stamp: Some(stamp), ..inner };
            }
            this.text = inner.text;
            this.strip_caller();
        }
        this
    }

    fn of_text(text: &'a [u8]) -> Self {
        Self { stamp: None, usec: None, day: None, is_kernel: true, text }
    }

    fn set_stamp(&mut self, stamp: &'a [u8]) {
        let stamp = without_mark(stamp);
        (self.stamp, self.usec, self.day) = (Some(stamp), time_in(stamp), day_in(stamp));
    }

    /// Strips `Nov 22 08:49:56 host kernel: [ 3124.417658] `, with its stamp. Returns false if the line does not begin so.
    fn strip_host(&mut self) -> bool {
        const KERNEL: &[u8] = b" kernel: ";
        let head = &self.text[..self.text.len().min(MAX_PREFIX_BYTES)];
        let Some(at) = find(head, KERNEL) else { return false };
        let before = &head[..at];
        let is_time =
            |time: &[u8]| is_seconds(time) || (has_time_of_day(time) && find(time, b": ").is_none());
        let host = before.iter().rposition(|&byte| byte == b' ');
        // of `journalctl --no-hostname` the time stands alone
        let host = host.filter(|host| !has_time_of_day(&before[*host..]) || is_time(&before[..*host]));
        let time = before[..host.unwrap_or(before.len())].trim_ascii();
        let time = Some(time).filter(|time| !time.is_empty() && (host.is_some() || is_time(time)));
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

/// Strips what `grep` puts before a stamp: `17:Nov 22 08:49:56`, `kern.log-2026-11-22T08:49:56Z`.
fn without_mark(stamp: &[u8]) -> &[u8] {
    let word = stamp.split(|&byte| byte == b' ').next().unwrap_or_default();
    let is_date =
        |text: &[u8]| text.get(4) == Some(&b'-') && text.get(7) == Some(&b'-') && text.get(10) == Some(&b'T');
    let is_month = |text: &[u8]| text.len() == 3 && text.iter().all(u8::is_ascii_alphabetic);
    let marks = (1..word.len()).filter(|at| matches!(word[at - 1], b':' | b'-'));
    let begin = marks.into_iter().find(|at| is_date(&word[*at..]) || is_month(&word[*at..]));
    &stamp[begin.unwrap_or(0)..]
}

/// Returns whether a text is known to be of the kernel's OOM killer.
fn is_kernel_text(text: &[u8]) -> bool {
    Line::of(text).is_some()
        || is_part_of_block(text)
        || may_have_fragments(text)
        || text.starts_with(b"Node ")
}

/// Returns the program that wrote a line of syslog or of the journal: `app` of `Nov 22 08:49:56 host app[12]: `. `None` if the line has
/// no such form, or could be the kernel's own text behind a stamp.
fn program(line: &[u8]) -> Option<&[u8]> {
    let line = level(line).map_or(line, |(_, rest)| rest);
    let (rest, is_bracketed) = match bracketed(line) {
        Some((_, rest)) => (rest, true),
        None => {
            let line = without_mark(line);
            let end = match position_of_time(&line[..line.len().min(MAX_STAMP_BYTES)]) {
                Some(at) if !line[..at].iter().any(|byte| b":[".contains(byte)) => {
                    at + line[at..].iter().position(|&byte| byte == b' ')?
                }
                _ => line.iter().position(|&byte| byte == b' ').filter(|end| is_seconds(&line[..*end]))?,
            };
            // of `dmesg --time-format iso`: with a `T`, and no space before the time of day
            let is_iso = line[..end].contains(&b',') && line.get(10) == Some(&b'T');
            // of CSV
            if is_iso || line[..end].contains(&b'"') {
                return None;
            }
            (line[end..].trim_ascii_start(), false)
        }
    };
    let has_inner_stamp = bracketed(rest).is_some() || level(rest).is_some();
    if has_inner_stamp || is_kernel_text(rest) || is_counters(rest) {
        return None;
    }
    let mut words = rest.split(|&byte| byte == b' ').take(MAX_WORDS_TO_PROGRAM);
    let tag = words.find(|word| word.ends_with(b":"))?.strip_suffix(b":")?;
    if tag.iter().any(|byte| b"\"{".contains(byte)) {
        return None; // JSON
    }
    let open = tag.iter().position(|&byte| byte == b'[').filter(|_| tag.ends_with(b"]"));
    // behind a stamp of the kernel, only a number shows that a name is no part of its text
    (!is_bracketed || open.is_some()).then(|| &tag[..open.unwrap_or(tag.len())])
}

/// Strips `stdout F `, which follows the stamp in a log file of CRI.
fn without_stream(text: &[u8]) -> Option<&[u8]> {
    let rest = text.strip_prefix(b"stdout ").or_else(|| text.strip_prefix(b"stderr "))?;
    rest.strip_prefix(b"F ").or_else(|| rest.strip_prefix(b"P "))
}

/// Strips `<4>1 2026-11-22T08:49:56.123456Z host kernel - - - `, of syslog by RFC 5424.
fn rfc5424(line: &[u8]) -> Option<PrefixedLine<'_>> {
    let (priority, rest) = level(line).unwrap_or((0, line));
    let (stamp, rest) = iso_stamp(rest.strip_prefix(b"1 ")?)?;
    let mut fields = rest.splitn(5, |&byte| byte == b' ');
    let (_host, program) = (fields.next()?, fields.next()?);
    let (_process, _message_id, data) = (fields.next()?, fields.next()?, fields.next()?);
    let text = match data.strip_prefix(b"-") {
        Some(text) => text,
        None => &data[find(data, b"]")? + 1..],
    };
    let text = text.strip_prefix(b" ").unwrap_or(text);
    let inner = PrefixedLine::of_log(text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text));
    let mut line =
        PrefixedLine { stamp: None, is_kernel: priority >> 3 == 0 && program == b"kernel", ..inner };
    let since_boot = line.usec.filter(|_| line.day.is_none());
    line.set_stamp(stamp);
    if since_boot.is_some() {
        (line.usec, line.day) = (since_boot, None);
    }
    Some(line)
}

/// Strips `10.0.0.1: kern: warning: [2026-11-22T08:49:56.123456Z]: `, of `talosctl dmesg` and of its console.
fn talos(line: &[u8]) -> Option<PrefixedLine<'_>> {
    let close = find(&line[..line.len().min(MAX_PREFIX_BYTES)], b"]: ")?;
    let open = line[..close].iter().rposition(|&byte| byte == b'[')?;
    let mut words = line[..open].split(|&byte| byte == b':').map(<[u8]>::trim_ascii).rev();
    let (end, _level, facility) = (words.next()?, words.next()?, words.next()?);
    let stamp = &line[open + 1..close];
    let is_stamp = end.is_empty() && has_time_of_day(stamp) && facility.iter().all(u8::is_ascii_lowercase);
    let mut this = PrefixedLine::of_text(&line[close + 3..]);
    this.is_kernel = facility == b"kern";
    this.set_stamp(stamp);
    is_stamp.then_some(this)
}

/// Strips what a program or a person put before the line of a log: `17:`, `kern.log-`, `train-1  | `, `Guest: `, `[pod/a/b] `.
fn behind_mark(line: &[u8]) -> Option<PrefixedLine<'_>> {
    let head = &line[..line.len().min(MAX_PREFIX_BYTES)];
    // of a program that is not the kernel: `app[12]: `
    let is_program = |before: &[u8]| before.ends_with(b"]:") || find(before, b"]: ").is_some();
    let marks = (1..head.len()).filter(|at| match head[at - 1] {
        b':' | b'-' => true,
        b' ' => [&b": "[..], b"| ", b"] ", b"} "].iter().any(|mark| head[..*at].ends_with(mark)),
        _ => false,
    });
    marks.filter(|at| !is_program(&head[..*at])).find_map(|at| {
        let text = line[at..].trim_ascii_start();
        let found = PrefixedLine::of_log(text);
        // a time in the middle of a line is no mark before a log
        let is_log = match found.stamp {
            Some(_) => {
                !head[..at].iter().any(u8::is_ascii_whitespace)
                    || !has_time_of_day(&head[..at])
                    || found.day.is_none()
            }
            None => {
                (!has_time_of_day(&head[..at]) || head[..at].trim_ascii_end().ends_with(b"kernel:"))
                    && (Line::of(found.text).is_some()
                        || is_part_of_block(found.text)
                        || is_counters(found.text))
            }
        };
        is_log.then_some(found)
    })
}

/// Strips the names between the stamp of a program that stores logs and that of the kernel: `2026-11-22T08:49:56Z stream [ 3124.417658] `,
/// `2026-11-22T08:49:56Z {host="a"} [ 3124.417658] `.
fn behind_names(line: PrefixedLine<'_>) -> Option<PrefixedLine<'_>> {
    let head = &line.text[..line.text.len().min(MAX_PREFIX_BYTES)];
    let is_begin = |at: &usize| head[at - 1] == b' ' && head[*at] == b'[';
    let at = (1..head.len()).find(is_begin)?;
    // one name, or a set of labels: words are what a program says
    let names = head[..at].trim_ascii();
    let is_name = !names.contains(&b' ') || names.starts_with(b"{") && names.ends_with(b"}");
    let has_stamp = bracketed(&line.text[at..]).is_some_and(|(inner, _)| is_seconds(inner));
    if !is_name || !has_stamp {
        return None;
    }
    let inner = PrefixedLine::of_log(&line.text[at..]);
    (is_kernel_text(inner.text) || line.day.is_some()).then_some(PrefixedLine { stamp: line.stamp, ..inner })
}

/// Returns whether a text is a line of counters: `anon 4096`, or `active_file:0 inactive_file:77`.
pub(super) fn is_counters(text: &[u8]) -> bool {
    let words: Vec<&[u8]> = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).collect();
    let is_number = |word: &[u8]| word.iter().all(u8::is_ascii_digit);
    let is_name =
        |word: &[u8]| word.iter().all(|byte| byte.is_ascii_lowercase() || b"_0123456789".contains(byte));
    match words[..] {
        [name, value] if is_name(name) && is_number(value) => true,
        _ => words.iter().all(|word| {
            find(word, b":").is_some_and(|at| is_name(&word[..at]) && is_number(&word[at + 1..]))
        }),
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
pub(super) fn has_time_of_day(text: &[u8]) -> bool {
    time_of_day(text).is_some()
}

/// Returns the position of `08:49`.
fn position_of_time(text: &[u8]) -> Option<usize> {
    text.windows(5).position(|window| {
        let [a, b, colon, c, d] = window else { return false };
        *colon == b':' && [a, b, c, d].into_iter().all(u8::is_ascii_digit)
    })
}

/// Returns the microseconds of a stamp, and its date if they are since midnight.
pub(super) fn stamp_time(stamp: &[u8]) -> Option<(u64, Option<&[u8]>)> {
    Some((time_in(stamp)?, day_in(stamp)))
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
