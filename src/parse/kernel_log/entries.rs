//! The entries of a saved log: its lines, out of what a program that stored or exported them put around them.
//!
//! Such programs have each line in a field: of JSON, of CSV, of the journal's export format, its special bytes escaped. Which field
//! that is, the kernel's own text shows, and not the name of a program or of a field.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::Line;
use super::json_text::{JsonEnd, JsonText, json_begin};
use super::quoted::{quoted, without_escaped_end};
pub use super::record_fields::EntryStamp;
use super::record_fields::{
    is_of_journal, is_of_program, journal_entry, journal_field, stamp_of_fields, stamp_of_text,
};
use super::records::KmsgRecord;
use super::report::is_part_of_block;
use super::text_line::{PrefixedLine, is_counters, undecorated};
use crate::parse::find;

/// Objects, arrays and strings with JSON in each other.
const MAX_NESTING: usize = 32;
/// A record of the kernel has at most some kilobytes.
const MAX_ENTRY_BYTES: usize = 8 * 1024;
/// A stamp, with the name of a host, is shorter.
const MAX_PREFIX_BYTES: usize = 200;
/// One of these is in each line of the kernel's OOM killer that a field is searched for.
const KERNEL_WORDS: [&[u8]; 5] = [b"oom", b"emory", b"Killed", b"total_vm", b"[ "];
/// Fields of CSV that are tried.
const MAX_FIELDS: usize = 32;
/// A field of CSV with the kernel's text begins before this.
const MAX_FIELD_BEGIN: usize = 512;
/// Parts in quotes that are tried as a time.
const MAX_STAMPS: usize = 8;
/// A shorter text may be there twice.
const MIN_TEXT: usize = 16;
/// A line of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextEntry {
    /// Number of the line in the text, from 1 on: of JSON over several lines the first.
    pub number: u64,
    /// The line.
    pub text: Vec<u8>,
    /// The time that stands beside it, in another field.
    pub stamp: Option<EntryStamp>,
    /// It is the whole of a record, and no rest of the line before it.
    pub is_record: bool,
    /// A field beside it says that another program than the kernel wrote it: `PROGRAM[PID]: ` is before it.
    pub is_other: bool,
}

/// Words of the kernel that stand anywhere in a text, whether their line could be read or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextWords {
    /// The line that names the victim's cgroup.
    pub has_context: bool,
    /// The usage of a cgroup or of the host.
    pub has_memory: bool,
    /// The table of processes.
    pub has_table: bool,
}

/// Reads a text line by line, and finds the entries in it.
#[derive(Debug, Default)]
pub struct EntryReader {
    lines: u64,
    words: TextWords,
    json: Option<JsonText>,
    /// An entry of the journal's export format, and the number of its first line.
    fields: Option<(u64, Map<String, Value>)>,
    /// The key of the field that had the kernel's text.
    message_key: Option<String>,
    /// Which of the quoted fields of a line had it.
    message_column: Option<usize>,
    /// The newest text of this value of JSON, which some exports have twice.
    last_text: String,
    /// Ends of lines are written as `\\r\\n`.
    has_escaped_ends: bool,
}

impl EntryReader {
    /// Returns the number of lines so far.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// Returns the words that were found so far.
    pub fn words(&self) -> TextWords {
        self.words
    }

    /// Reads a line without its line feed. Appends the entries that are complete to `out`.
    pub fn push(&mut self, line: &[u8], out: &mut Vec<TextEntry>) {
        self.lines += 1;
        self.words.read(line);
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        if let Some(mut json) = self.json.take() {
            // a brace that began no JSON
            if line.starts_with(b"[") && has_kernel_stamp(line) {
                self.read_cut(json, out);
            } else {
                json.push(line);
                self.json = Some(json);
                return self.read_json(out);
            }
        }
        if self.push_field(line, out) {
            return;
        }
        let text = undecorated(line);
        match json_begin(&text).filter(|_| !is_plain_kernel_line(&text)) {
            Some(begin) => {
                self.json = Some(JsonText::new(self.lines, &text[begin..]));
                self.read_json(out);
            }
            None => self.push_line(self.lines, line, out),
        }
    }

    /// Reads what is left at the end of the text.
    pub fn finish(&mut self, out: &mut Vec<TextEntry>) {
        if let Some(json) = self.json.take() {
            self.read_cut(json, out);
        }
        self.end_of_fields(out);
    }

    /// Reads the JSON so far if it is complete, and what follows it in the line.
    fn read_json(&mut self, out: &mut Vec<TextEntry>) {
        while let Some(mut json) = self.json.take() {
            match json.end {
                JsonEnd::Open => return self.json = Some(json),
                JsonEnd::Invalid => return self.read_cut(json, out),
                JsonEnd::At(end) => {
                    let Ok(value) = serde_json::from_slice::<Value>(&json.bytes[json.begin..end]) else {
                        return self.push_all(json.lines(0), out);
                    };
                    self.last_text.clear();
                    self.read_value(&value, json.number, None, MAX_NESTING, out);
                    match json_begin(&json.bytes[end..]) {
                        Some(begin) => {
                            json.restart(self.lines, end + begin);
                            self.json = Some(json);
                        }
                        None => {
                            let rest = json.bytes[end..].trim_ascii();
                            if rest.iter().any(u8::is_ascii_alphanumeric) {
                                self.push_line(self.lines, rest, out);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Reads JSON whose end is missing: what is complete of it, and the other lines as lines.
    fn read_cut(&mut self, json: JsonText, out: &mut Vec<TextEntry>) {
        match json.repaired() {
            Some((value, lines)) => {
                self.read_value(&value, json.number, None, MAX_NESTING, out);
                self.push_all(json.lines(lines), out);
            }
            None => self.push_all(json.lines(0), out),
        }
    }

    fn push_all<'a>(&mut self, lines: impl Iterator<Item = (u64, &'a [u8])>, out: &mut Vec<TextEntry>) {
        lines.for_each(|(number, line)| self.push_line(number, line, out));
    }

    /// Reads the entries in a value. `stamp`: the time of what surrounds it.
    fn read_value(
        &mut self,
        value: &Value,
        number: u64,
        stamp: Option<&EntryStamp>,
        nesting: usize,
        out: &mut Vec<TextEntry>,
    ) {
        if nesting == 0 {
            return;
        }
        let is_line = |item: &Value| item.as_str().is_some_and(|text| stamp_of_text(text).is_none());
        let fields: Vec<(Cow<'_, str>, &Value)> = match value {
            Value::Object(map) if is_of_journal(map) => {
                return out.extend(journal_entry(map, number));
            }
            Value::Object(map) => map.iter().map(|(key, value)| (Cow::Borrowed(&**key), value)).collect(),
            // a list of lines
            Value::Array(items) if items.iter().all(is_line) => {
                let lines = items.iter().filter_map(Value::as_str);
                return lines.for_each(|line| self.push_lines(number, line, stamp, out));
            }
            // a row, such as of a time and a line
            Value::Array(items) => {
                items.iter().enumerate().map(|(at, item)| (Cow::Owned(at.to_string()), item)).collect()
            }
            _ => return,
        };
        // a shipper's name beside the whole line of a log says nothing
        let has_prefix = |value: &Value| value.as_str().is_some_and(|text| has_kernel_stamp(text.as_bytes()));
        let is_shipped = fields.iter().any(|(_, value)| has_prefix(value));
        if !is_shipped && fields.iter().any(|(key, value)| is_of_program(key, value)) {
            return;
        }
        let own = stamp_of_fields(&fields);
        let stamp = own.as_ref().or(stamp);
        // the log of a container is a string of JSON in the log of a host
        let inner = |value: &Value| {
            serde_json::from_str::<Value>(value.as_str().filter(|it| it.starts_with('{'))?).ok()
        };
        let has_text = |value: &Value| {
            value.as_str().is_some_and(|text| !text.starts_with('{') && has_kernel_text(text))
        };
        let by_text = fields.iter().position(|(_, value)| has_text(value));
        let is_message =
            |key: &str, value: &Value| self.message_key.as_deref() == Some(key) && value.is_string();
        let message = by_text.or_else(|| fields.iter().position(|(key, value)| is_message(key, value)));
        for (at, (key, value)) in fields.iter().enumerate() {
            match (value.as_str(), inner(value)) {
                (Some(text), None) if Some(at) == message => {
                    self.message_key = Some(key.to_string());
                    let (text, last) = (text.trim_end(), &self.last_text);
                    let is_again = text.len() >= MIN_TEXT
                        && (last.ends_with(text) || !last.is_empty() && text.ends_with(last.as_str()));
                    if !is_again {
                        text.clone_into(&mut self.last_text);
                        self.push_lines(number, text, stamp, out);
                    }
                }
                (_, inner) => {
                    self.read_value(inner.as_ref().unwrap_or(value), number, stamp, nesting - 1, out);
                }
            }
        }
    }

    /// Reads a line that is no JSON: the fields in quotes of it, or a field between commas, or all of it.
    fn push_line(&mut self, number: u64, line: &[u8], out: &mut Vec<TextEntry>) {
        let text = undecorated(line);
        // what another program quotes is not the kernel's
        let is_whole = KmsgRecord::of(&text).is_some()
            || !PrefixedLine::of(&text).is_kernel
            || is_plain_kernel_line(&text);
        if is_whole {
            return self.push_unescaped(number, line, None, false, out);
        }
        let json = find(&text, b"{\"").map(|at| &text[at..]);
        if let Some(value) = json.and_then(|json| serde_json::from_slice::<Value>(json).ok()) {
            self.last_text.clear();
            return self.read_value(&value, number, None, MAX_NESTING, out);
        }
        let begin = text.strip_prefix(b"[").unwrap_or(&text).trim_ascii_start();
        let quote = if begin.starts_with(b"'") { b'\'' } else { b'"' };
        let is_quoted = begin.starts_with(&[quote]);
        let quoted = if text.contains(&quote) { quoted(&text, quote) } else { vec![] };
        let kernels: Vec<bool> = quoted.iter().map(|part| has_kernel_text(&part.text)).collect();
        let is_of_line =
            quoted.first().is_some_and(|first| is_kernel(&text[..first.begin.min(MAX_PREFIX_BYTES)]));
        let column = kernels.iter().position(|is| *is).filter(|_| !is_of_line);
        self.message_column = column.or(self.message_column);
        if column.is_some() || is_quoted && self.message_column.is_some_and(|column| column < quoted.len()) {
            let stamp = quoted.iter().take(MAX_STAMPS).find_map(|part| stamp_of_text(&part.text));
            // a list of lines
            let is_list = is_quoted && begin.len() < text.len();
            for (at, part) in quoted.iter().enumerate() {
                if is_list || kernels[at] || column.is_none() && Some(at) == self.message_column {
                    self.push_lines(number, &part.text, stamp.as_ref(), out);
                }
            }
            return;
        }
        match field(&text) {
            Some(field) => self.push_unescaped(number, field, None, true, out),
            None => self.push_unescaped(number, line, None, false, out),
        }
    }

    /// Adds the lines of a field.
    fn push_lines(&mut self, number: u64, text: &str, stamp: Option<&EntryStamp>, out: &mut Vec<TextEntry>) {
        let lines = text.trim_end_matches(['\r', '\n']).split('\n');
        for line in lines.filter(|line| !line.trim().is_empty()) {
            self.push_unescaped(number, line.as_bytes(), stamp, true, out);
        }
    }

    /// Adds a line: several, if line feeds in it are written as `\n`.
    fn push_unescaped(
        &mut self,
        number: u64,
        line: &[u8],
        stamp: Option<&EntryStamp>,
        is_record: bool,
        out: &mut Vec<TextEntry>,
    ) {
        // the name of a process can end so, and stands at no end of these lines
        let stripped = without_escaped_end(line);
        let is_name = || !stripped.last().is_some_and(u8::is_ascii_digit) && !stripped.ends_with(b"kB");
        if stripped.len() < line.len() && !is_name() {
            let text = undecorated(stripped);
            self.has_escaped_ends |= Line::of(PrefixedLine::of(&text).text).is_some();
        }
        let line = if self.has_escaped_ends { stripped } else { line };
        let parts = escaped_lines(line);
        let is_several = parts.len() > 1 && parts[1..].iter().any(|part| is_kernel(part));
        let mut add = |text: &[u8], is_record| {
            let text = text[..text.len().min(MAX_ENTRY_BYTES)].to_vec();
            out.push(TextEntry { number, text, stamp: stamp.cloned(), is_record, is_other: false });
        };
        match is_several {
            true => parts.into_iter().for_each(|part| add(part, true)),
            false => add(line, is_record),
        }
    }

    /// Reads `KEY=value` of the journal's export format. Returns false if the line is none.
    fn push_field(&mut self, line: &[u8], out: &mut Vec<TextEntry>) -> bool {
        let Some((key, value)) = journal_field(line) else {
            // of a field with several lines, or of bytes, the other lines are no fields
            let is_end = line.trim_ascii().is_empty()
                || find(line, b" [s=").is_some()
                || PrefixedLine::of(line).stamp.is_some()
                || is_kernel_line(line);
            if self.fields.is_some() && !is_end {
                return true;
            }
            self.end_of_fields(out);
            return false;
        };
        let is_begin =
            matches!(key, "__CURSOR" | "__REALTIME_TIMESTAMP" | "_TRANSPORT" | "_BOOT_ID" | "MESSAGE");
        if self.fields.is_none() && !is_begin {
            return false;
        }
        let number = self.lines;
        // without an empty line between two entries
        if self
            .fields
            .as_ref()
            .is_some_and(|(_, fields)| fields.contains_key(key) && (key == "__CURSOR" || key == "MESSAGE"))
        {
            self.end_of_fields(out);
        }
        let (_, fields) = self.fields.get_or_insert_with(|| (number, Map::new()));
        fields.insert(key.to_owned(), String::from_utf8_lossy(value).into());
        true
    }

    fn end_of_fields(&mut self, out: &mut Vec<TextEntry>) {
        if let Some((number, fields)) = self.fields.take() {
            out.extend(journal_entry(&fields, number));
        }
    }
}

impl TextWords {
    fn read(&mut self, line: &[u8]) {
        let has = |words: &[&[u8]]| words.iter().any(|word| find(line, word).is_some());
        self.has_context = self.has_context || has(&[b"oom-kill:", b"killed as a result of limit of"]);
        self.has_memory = self.has_memory || has(&[b"memory: usage ", b"Mem-Info:"]);
        self.has_table = self.has_table || has(&[b"total_vm"]);
    }
}

/// Returns the last part of a line of CSV without quotes that is the kernel's text, whose own commas are followed by a space.
fn field(text: &[u8]) -> Option<&[u8]> {
    let text = &text[..text.len().min(MAX_ENTRY_BYTES)];
    if !KERNEL_WORDS.iter().any(|word| find(text, word).is_some()) {
        return None;
    }
    let marks = (1..text.len().min(MAX_FIELD_BEGIN))
        .filter(|at| b",;\t".contains(&text[at - 1]) && text[*at] != b' ');
    marks.take(MAX_FIELDS).map(|at| &text[at..]).collect::<Vec<_>>().into_iter().rfind(|rest| is_kernel(rest))
}

/// Splits a line where line feeds are written as `\n`. The name of a process can have the same.
fn escaped_lines(line: &[u8]) -> Vec<&[u8]> {
    let mut parts: Vec<std::ops::Range<usize>> = vec![];
    let mut begin = 0;
    while begin <= line.len() {
        let end = find(&line[begin..], b"\\n").map_or(line.len(), |at| begin + at);
        // the kernel's text begins before the line feed, and is none without what is behind it
        let is_name = |last: &std::ops::Range<usize>| {
            let joined = &line[last.start..end];
            let text = PrefixedLine::of(joined).text;
            let is_before = joined.len() - text.len() < last.len();
            is_before && Line::of(text).is_some() && !is_kernel_line(&line[last.clone()])
        };
        match parts.pop() {
            Some(last) if is_name(&last) => parts.push(last.start..end),
            last => parts.extend(last.into_iter().chain(std::iter::once(begin..end))),
        }
        begin = end + 2;
    }
    parts.into_iter().map(|part| without_escaped_end(&line[part])).collect()
}

/// Returns whether a text has a line of the kernel's.
fn has_kernel_text(text: &str) -> bool {
    text.split('\n')
        .map(str::as_bytes)
        .any(|line| is_kernel(line) || escaped_lines(line).into_iter().any(is_kernel))
}

/// Returns whether a line begins with a stamp of the kernel in brackets.
fn has_kernel_stamp(line: &[u8]) -> bool {
    let PrefixedLine { stamp, usec, day, .. } = PrefixedLine::of(line);
    stamp.is_some() && usec.is_some() && day.is_none()
}

/// Returns whether a line is one of the kernel's OOM killer, with nothing but a stamp before it.
fn is_plain_kernel_line(line: &[u8]) -> bool {
    let text = PrefixedLine::of(line).text;
    let prefix = &line[..line.len().saturating_sub(text.len())];
    let is_mark = |at: usize| match prefix[at] {
        b'"' | b'\'' | b'{' | b';' | b'\t' => true,
        b',' => !prefix.get(at + 1).is_some_and(u8::is_ascii_digit), // of a time
        _ => false,
    };
    (Line::of(text).is_some() || is_part_of_block(text)) && !(0..prefix.len()).any(is_mark)
}

/// Returns whether a line is one of the kernel's OOM killer.
fn is_kernel_line(line: &[u8]) -> bool {
    let line = undecorated(line);
    let text = PrefixedLine::of(&line).text;
    Line::of(text).is_some() || is_part_of_block(text)
}

/// Returns whether a line is one of the kernel's OOM killer, or has a stamp of the kernel.
fn is_kernel(line: &[u8]) -> bool {
    let line: Cow<'_, [u8]> = undecorated(line);
    let PrefixedLine { stamp, usec, day, is_kernel, text } = PrefixedLine::of(&line);
    let has_kernel_stamp = stamp.is_some() && usec.is_some() && day.is_none() && line.starts_with(b"[");
    let is_text = || Line::of(text).is_some() || is_part_of_block(text);
    let has_host = || find(&line, b" kernel: ").is_some() && stamp.is_some();
    is_kernel
        && !text.is_empty()
        && (has_kernel_stamp || is_text() || has_host() || is_counters(text) && stamp.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: &str =
        "Memory cgroup out of memory: Killed process 7 (a \"b\\n) total-vm:8kB, anon-rss:4kB, file-rss:0kB";
    const INVOKED: &str = "x invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0";

    fn entries(text: &str) -> Vec<TextEntry> {
        let (mut reader, mut out) = (EntryReader::default(), vec![]);
        text.lines().for_each(|line| reader.push(line.as_bytes(), &mut out));
        reader.finish(&mut out);
        out
    }

    fn texts(text: &str) -> Vec<String> {
        let kernels = entries(text).into_iter().filter(|entry| !entry.is_other);
        let texts = kernels.map(|entry| String::from_utf8(entry.text).expect("text"));
        texts.filter(|text| text.contains(char::is_alphanumeric)).collect()
    }

    #[test]
    fn finds_the_kernels_text_in_whatever_field_it_stands() {
        let line = format!("[    1.500000] {KILLED}");
        let json = serde_json::Value::from(line.clone()).to_string();
        let csv = line.replace('"', "\"\"");
        for wrapped in [
            line.clone(),
            json.clone(),
            format!("{{\"any\": {json}, \"host\": \"n\"}}"),
            format!("[{{\"any\": {json}}}]"),
            format!("[\n  {{\n    \"labels\": {{\"unit\": \"kernel\"}},\n    \"any\": {json}\n  }}\n]"),
            format!("{{\"values\": [[\"1773589958000000000\", {json}]]}}"),
            format!("{{\"any\": {json}, \"host\": "),
            format!("  \"any\": {json},"),
            format!("\"2026-03-15 15:52:38.000\",\"{csv}\""),
            format!("2026-03-15T15:52:38Z,node7,{line}"),
            format!("{line}\\r\\n"),
            format!("{{\"@message\": {}}}", serde_json::Value::from(format!("{{\"log\":{json}}}"))),
        ] {
            assert_eq!(texts(&wrapped).join("|").trim(), line, "{wrapped}");
        }
    }

    #[test]
    fn one_string_can_have_the_whole_log() {
        let log = format!("[    1.400000] {INVOKED}\n[    1.400001] Call Trace:\n[    1.500000] {KILLED}");
        let lines: Vec<&str> = log.lines().collect();
        let json = serde_json::Value::from(log.clone()).to_string();
        assert_eq!(texts(&format!("{{\"stdout\": {json}}}")), lines);
        assert_eq!(texts(&json), lines, "a string alone");
        let escaped = log.replace('\n', "\\n");
        assert_eq!(texts(&escaped), lines, "line feeds written with a backslash");
        assert_eq!(texts(&format!("[    1.500000] {KILLED}")).len(), 1, "of a name they are no line feeds");
    }

    #[test]
    fn time_beside_the_text_is_kept() {
        let stamp = |fields: &str| {
            let text = serde_json::Value::from(KILLED).to_string();
            let mut found = entries(&format!("{{\"msg\": {text}, {fields}}}"));
            assert_eq!(found.len(), 1, "{fields}: {found:?}");
            found.remove(0).stamp.map(|stamp| stamp.text)
        };
        let utc = Some("2026-03-15 15:52:38 UTC".to_owned());
        assert_eq!(stamp("\"ts\": 1773589958"), utc);
        assert_eq!(stamp("\"timestamp\": 1773589958000, \"receiveTimestamp\": 1"), utc);
        assert_eq!(stamp("\"time\": \"1773589958000000000\""), utc);
        assert_eq!(stamp("\"time\": 196120.737205"), Some("196120.737205".to_owned()));
        assert_eq!(
            stamp("\"@timestamp\": \"2026-03-15T15:52:38Z\""),
            Some("2026-03-15T15:52:38Z".to_owned())
        );
        assert_eq!(stamp("\"timeout\": 30, \"ts\": 1773589958"), utc);
        assert_eq!(stamp("\"runtime\": 12.5"), None);
        assert_eq!(stamp("\"uptime\": \"-\""), None);
    }

    #[test]
    fn reads_the_export_format_of_the_journal() {
        let text = format!(
            "__CURSOR=a\n__REALTIME_TIMESTAMP=1773589958000000\nMESSAGE={INVOKED}\n_TRANSPORT=kernel\n\n\
             __CURSOR=b\nMESSAGE=Killed process 8 (z) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n_TRANSPORT=journal\n\n\
             __CURSOR=c\nMESSAGE={KILLED}\n_TRANSPORT=kernel"
        );
        assert_eq!(texts(&text), [INVOKED, KILLED]);
        assert_eq!(entries(&text)[0].stamp.as_ref().map(|stamp| stamp.usec), Some(1_773_589_958_000_000));
    }

    #[test]
    fn what_a_program_quotes_is_not_the_kernels() {
        use super::super::text_log::TextLog;
        let json = serde_json::Value::from(KILLED).to_string();
        for text in [
            format!("Nov 22 08:49:55 host app[12]: got {json}"),
            format!("Nov 22 08:49:55 host app[12]: {{\"msg\":{json}}}"),
            format!("Nov 22 08:49:55 host app[12]: a,{KILLED}"),
            format!("{{\"message\":{json},\"_TRANSPORT\":\"syslog\",\"_COMM\":\"python3\"}}"),
            format!("{{\"program\":\"pytest\",\"msg\":{json}}}"),
            format!("__CURSOR=a\nMESSAGE={KILLED}\nTRACEBACK=x\nmore of it\n_TRANSPORT=journal\n"),
            format!("__CURSOR=a\nMESSAGE={KILLED}\n_COMM=python3\n"),
            format!("{{\"PROGRAM\":\"pytest\",\"DATE\":\"Nov 22 08:49:56\",\"MESSAGE\":{json}}}"),
            format!("2026-11-22 08:49:56,123 ERROR pytest: expected {json}"),
            format!("2026-11-22T08:49:56Z stderr F got [  123.456789] {KILLED}"),
        ] {
            let (mut log, mut found) = (TextLog::default(), vec![]);
            entries(&text).iter().for_each(|entry| log.push(entry, &mut found));
            log.finish(&mut found);
            assert!(found.is_empty(), "{text}: {found:?}");
        }
    }

    #[test]
    fn long_lines_take_linear_time_and_lose_nothing() {
        let line = format!("[    1.500000] {KILLED}");
        let json = serde_json::Value::from(line.clone()).to_string();
        let objects = format!("[{}{{\"a\":{json}}}]", "{},".repeat(50_000));
        let rows = format!("{{\"values\":[{}[\"0\",{json}]]}}", "[\"0\",\"x\"],".repeat(20_000));
        for text in [
            objects,
            rows,
            format!("{}\n{line}", "a,".repeat(50_000)),
            format!("{{\n{line}"),
            format!("{{\"cluster\":\"a\"}} {line}"),
        ] {
            let found = texts(&text);
            assert_eq!(found.last(), Some(&line), "{}", &text[..text.len().min(60)]);
        }
    }

    #[test]
    fn variable_of_an_environment_hides_no_line() {
        for before in ["_=/usr/bin/env", "PRIORITY=high ./train.sh", "MESSAGE=hello"] {
            let found = texts(&format!("{before}\nNov 22 08:49:56 host kernel: {KILLED}\n{KILLED}"));
            assert_eq!(found.len(), 3, "{found:?}");
            assert!(found[2] == KILLED && found[1].ends_with(KILLED), "{found:?}");
        }
    }

    #[test]
    fn brace_that_begins_no_json_hides_no_line() {
        let line = format!("[    1.500000] {KILLED}");
        assert_eq!(
            texts(&format!("{{\n{line}\n{{ \"a\n{line}")).iter().filter(|text| **text == line).count(),
            2
        );
    }
}
