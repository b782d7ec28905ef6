//! The fields of records around the kernel's text: their time, their program, and those of the journal.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::entries::TextEntry;
use super::text_line::{has_time_of_day, stamp_time};
use crate::text::printable;

/// Less is a time since boot, in seconds.
const MIN_EPOCH: f64 = 1e9;

/// A time beside a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryStamp {
    /// As it is shown.
    pub text: String,
    /// Microseconds: since boot, since midnight or since 1970.
    pub usec: u64,
    /// The date, if the microseconds are since midnight.
    pub day: Option<Vec<u8>>,
}

/// Returns key and value of `KEY=value`, of the journal's export format.
pub(super) fn journal_field(line: &[u8]) -> Option<(&str, &[u8])> {
    let line = line.trim_ascii_start();
    let at = line.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
    let is_key =
        line[..at].iter().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || *byte == b'_');
    let key = std::str::from_utf8(&line[..at]).ok().filter(|_| is_key)?;
    Some((key, line[at + 1..].strip_suffix(b"\r").unwrap_or(&line[at + 1..])))
}

/// Returns an entry of the journal.
pub(super) fn journal_entry(fields: &Map<String, Value>, number: u64) -> Option<TextEntry> {
    let text = |key: &str| fields.get(key).and_then(Value::as_str);
    let program = text("SYSLOG_IDENTIFIER").or_else(|| text("_COMM"));
    let is_kernel = match text("_TRANSPORT") {
        Some(transport) => transport == "kernel",
        None => {
            program.is_none_or(|program| program == "kernel")
                && text("_PID").is_none()
                && text("_EXE").is_none()
        }
    };
    let message = match fields.get("MESSAGE")? {
        Value::String(message) => message.clone().into_bytes(),
        // bytes that are no valid text
        Value::Array(bytes) => {
            let bytes = bytes.iter().map(|byte| u8::try_from(byte.as_u64()?).ok());
            bytes.collect::<Option<Vec<u8>>>()?
        }
        _ => return None,
    };
    let time = |key: &str| text(key).and_then(|time| time.parse::<u64>().ok());
    let realtime = time("__REALTIME_TIMESTAMP").map(|usec| epoch(usec as f64 / 1e6));
    let since_boot = time("_SOURCE_MONOTONIC_TIMESTAMP");
    let stamp = match (realtime, since_boot) {
        (Some(realtime), usec) => Some(EntryStamp { usec: usec.unwrap_or(realtime.usec), ..realtime }),
        (None, Some(usec)) => Some(EntryStamp { text: since_boot_text(usec), usec, day: None }),
        (None, None) => None,
    };
    let message = match is_kernel {
        true => message,
        false => {
            let (program, pid) = (program.unwrap_or("unknown"), text("_PID").or_else(|| text("SYSLOG_PID")));
            [format!("{program}[{}]: ", pid.unwrap_or("0")).into_bytes(), message].concat()
        }
    };
    Some(TextEntry { number, text: message, stamp, is_record: true, is_other: !is_kernel })
}

/// Returns the time in the fields of a record: of several the one with the shortest name.
pub(super) fn stamp_of_fields(fields: &[(Cow<'_, str>, &Value)]) -> Option<EntryStamp> {
    let is_column = |key: &str| key.bytes().all(|byte| byte.is_ascii_digit());
    let is_time = |key: &str| {
        let key = key.to_ascii_lowercase();
        is_column(&key) || key.contains("time") || key.contains("date") || matches!(&*key, "ts" | "@t" | "t")
    };
    let mut times: Vec<&(Cow<'_, str>, &Value)> = fields.iter().filter(|(key, _)| is_time(key)).collect();
    times.sort_by_key(|(key, _)| key.len());
    times.into_iter().find_map(|(key, value)| match value {
        Value::String(text) => stamp_of_text(text),
        Value::Number(time) if !is_column(key) => {
            // a number of seconds can be a duration
            let is_since_boot = matches!(&*key.to_ascii_lowercase(), "time" | "ts" | "t" | "timestamp");
            time.as_f64().filter(|time| is_since_boot || *time >= MIN_EPOCH).map(stamp_of_number)
        }
        _ => None,
    })
}

/// Returns the time that a text is: a date with a time of day, or a number.
pub(super) fn stamp_of_text(text: &str) -> Option<EntryStamp> {
    const MAX_STAMP: usize = 48;
    let text = text.trim();
    if text.len() > MAX_STAMP {
        return None;
    }
    if text.len() >= 10 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().map(stamp_of_number);
    }
    let is_stamp = has_time_of_day(text.as_bytes()) && text.bytes().next()?.is_ascii_alphanumeric();
    let (usec, day) = stamp_time(text.as_bytes()).filter(|_| is_stamp)?;
    Some(EntryStamp { text: printable(text.as_bytes()), usec, day: day.map(<[u8]>::to_vec) })
}

/// Returns the time of a number: of seconds since boot or 1970, or of milli-, micro- or nanoseconds since 1970.
fn stamp_of_number(number: f64) -> EntryStamp {
    if number < MIN_EPOCH {
        let usec = (number.max(0.0) * 1e6).round() as u64;
        return EntryStamp { text: since_boot_text(usec), usec, day: None };
    }
    let unit = [1.0, 1e3, 1e6, 1e9].into_iter().find(|unit| number / unit < 100.0 * MIN_EPOCH);
    epoch(number / unit.unwrap_or(1e9))
}

fn epoch(seconds: f64) -> EntryStamp {
    let usec = (seconds * 1e6).round() as u64;
    let utc = i64::try_from(usec).ok().and_then(|usec| jiff::Timestamp::from_microsecond(usec).ok());
    let text =
        utc.map_or_else(|| since_boot_text(usec), |time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string());
    EntryStamp { text, usec, day: None }
}

/// Formats a time since boot as `dmesg` does.
pub(super) fn since_boot_text(usec: u64) -> String {
    format!("{}.{:06}", usec / 1_000_000, usec % 1_000_000)
}

/// Returns whether an object is an entry of the journal.
pub(super) fn is_of_journal(map: &Map<String, Value>) -> bool {
    map.contains_key("MESSAGE") && map.keys().any(|key| key.starts_with('_') || key == "SYSLOG_IDENTIFIER")
}

/// Returns whether a field says that another program than the kernel wrote the record.
pub(super) fn is_of_program(key: &str, value: &Value) -> bool {
    const KEYS: [&str; 6] =
        ["_transport", "transport", "syslog_identifier", "appname", "program", "programname"];
    KEYS.contains(&&*key.to_ascii_lowercase())
        && value.as_str().is_some_and(|program| !program.is_empty() && program != "kernel")
}
