//! Events of the ledger: as JSON for `/api/v1/events`, and as a table for people.
//!
//! Names in events come from processes and images that may be hostile: [`harmless`] takes from them what a terminal would
//! obey.

use std::fmt::Write;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::ledger::entries::{Event, Exit, GpuError, Kill, Reason, Scope, Subject, Victim, Whose};
use crate::series::human_bytes;

/// Longest name in the table; the rest is cut off. JSON has all of it.
const LONGEST: usize = 48;

/// The answer of the API from events as the store has them: one per line.
pub fn json(bodies: &[String]) -> String {
    format!("{{\"events\":[{}{}{}]}}\n", end(bodies), bodies.join(",\n"), end(bodies))
}

fn end(bodies: &[String]) -> &'static str {
    if bodies.is_empty() { "" } else { "\n" }
}

/// A table with one line per event, in the order given.
pub fn table(events: &[Event], zone: &TimeZone) -> String {
    let mut rows = vec![["TIME", "WHAT", "CONTAINER", "DETAILS"].map(str::to_owned)];
    rows.extend(events.iter().map(|event| {
        let (what, details) = told(event);
        [time(event.at(), zone), what.to_owned(), container(event), details]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (first, second, third) = (width(0), width(1), width(2));
    let mut text = String::new();
    for [time, what, container, details] in &rows {
        let _ = writeln!(text, "{time:<first$}  {what:<second$}  {container:<third$}  {details}");
    }
    text
}

/// One line that tells an event: what, of whom, and the details.
pub fn sentence(event: &Event) -> String {
    let (what, details) = told(event);
    format!("{what}: {}: {details}", container(event))
}

fn told(event: &Event) -> (&'static str, String) {
    match event {
        Event::OomKill(kill) => ("oom kill", of_kill(kill)),
        Event::Exit(exit) => ("exit", of_exit(exit)),
        Event::GpuError(error) => ("gpu error", of_gpu_error(error)),
    }
}

/// Local time with its offset, which tells the two hours apart that an end of summer time makes alike.
fn time(unix: f64, zone: &TimeZone) -> String {
    match Timestamp::from_millisecond((unix * 1e3) as i64) {
        Ok(time) => time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S%:z").to_string(),
        Err(_) => format!("{unix}"),
    }
}

fn container(event: &Event) -> String {
    match event {
        Event::OomKill(Kill { whose, .. }) => match whose {
            Whose::Container(subject) => named(subject),
            Whose::Open => "(not known yet)".to_owned(),
            Whose::Host => "(outside containers)".to_owned(),
            Whose::Unattributed => "(not known)".to_owned(),
        },
        Event::Exit(exit) => named(&exit.subject),
        Event::GpuError(error) => error.subject.as_ref().map_or_else(|| "(not known)".to_owned(), named),
    }
}

fn named(subject: &Subject) -> String {
    let own = &subject.name;
    let parts = [&own.k8s_namespace_name, &own.k8s_pod_name, &own.container_name];
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).map(|part| name(part)).collect();
    if parts.is_empty() { name(subject.container_id.get(..12).unwrap_or("")) } else { parts.join("/") }
}

fn of_kill(kill: &Kill) -> String {
    let mut who = if kill.process.is_empty() { "a process".to_owned() } else { name(&kill.process) };
    let pid = kill.pid.map(|pid| format!("pid {pid}"));
    let role = (!kill.role.is_empty()).then(|| name(&kill.role).replace('_', " "));
    let about: Vec<_> = pid.into_iter().chain(role).collect();
    if !about.is_empty() {
        let _ = write!(who, " ({})", about.join(", "));
    }
    let mut parts = vec![who];
    match kill.victim {
        Some(Victim::Main) => parts.push("main: it ended the container".to_owned()),
        Some(Victim::Child) => parts.push("child: the container lived on".to_owned()),
        None => {}
    }
    let held = [(kill.anon_bytes, "anonymous"), (kill.file_bytes, "file"), (kill.shmem_bytes, "shared")];
    let held: Vec<_> = held
        .into_iter()
        .filter_map(|(bytes, kind)| Some(format!("{} {kind}", human_bytes(bytes? as f64))))
        .collect();
    if !held.is_empty() {
        parts.push(format!("held {}", held.join(", ")));
    }
    parts.push(match kill.scope {
        Scope::Host => "the machine ran out of memory".to_owned(),
        Scope::Container => {
            let limit =
                kill.limit_bytes.map_or_else(String::new, |bytes| format!(" {}", human_bytes(bytes as f64)));
            let of = if kill.limit_cgroup.is_empty() {
                String::new()
            } else {
                format!(" of {}", name(&kill.limit_cgroup))
            };
            format!("hit the limit{limit}{of}")
        }
    });
    if kill.kernel_usec.is_none() {
        parts.push("known from a counter only: the kernel's record was lost".to_owned());
    }
    parts.join("; ")
}

fn of_gpu_error(error: &GpuError) -> String {
    let at_work = error.pid.map(|pid| format!("; pid {pid} was at work")).unwrap_or_default();
    format!("Xid {} of GPU {} ({}){at_work}", error.xid, name(&error.gpu), name(&error.gpu_uuid))
}

fn of_exit(exit: &Exit) -> String {
    let mut parts = vec![
        match exit.reason {
            Some(Reason::Completed) => "completed",
            Some(Reason::OomContainer) => "OOM: a memory limit was hit",
            Some(Reason::OomHost) => "OOM: the machine ran out of memory",
            Some(Reason::Stopped) => "stopped on request",
            Some(Reason::Killed) => "killed from outside, no OOM",
            Some(Reason::Signal) => "ended by a signal",
            Some(Reason::Error) => "ended with an error",
            Some(Reason::Unknown) => "reason not known",
            None => "reason not known yet",
        }
        .to_owned(),
    ];
    if let Some(code) = exit.exit_code {
        parts.push(format!("exit code {code}"));
    }
    if let Some(signal) = exit.asked_signal() {
        parts.push(format!("asked for signal {signal}"));
    }
    if let Some(seconds) = exit.duration_seconds {
        parts.push(format!("ran {}", duration(seconds)));
    }
    match exit.oom_kills {
        0 => {}
        1 => parts.push("1 OOM kill".to_owned()),
        kills => parts.push(format!("{kills} OOM kills")),
    }
    if let Some(peak) = exit.peak_unreclaimable_bytes {
        parts.push(format!("held at most {} that cannot be reclaimed", human_bytes(peak as f64)));
    } else if let Some(peak) = exit.peak_usage_bytes {
        parts.push(format!("held at most {}, page cache included", human_bytes(peak as f64)));
    }
    parts.join("; ")
}

/// Seconds for people, in the two largest units.
fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match whole {
        0..=9 => format!("{seconds:.1}s"),
        10..=59 => format!("{whole}s"),
        60..=3599 => format!("{minutes}m {:02}s", whole % 60),
        3600..=86_399 => format!("{hours}h {minutes:02}m"),
        _ => format!("{days}d {hours}h"),
    }
}

/// A name for a terminal: [`harmless`], and of bounded length.
fn name(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", harmless(&text[..end])),
        None => harmless(text),
    }
}

/// Text from outside for a terminal: one line, and nothing in it that a terminal obeys or that turns the direction of
/// writing.
pub fn harmless(text: &str) -> String {
    let mut safe = String::new();
    for character in text.chars() {
        let invisible = matches!(character,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
        if character.is_control() || invisible {
            let _ = match character {
                '\n' => write!(safe, "\\n"),
                '\t' => write!(safe, "\\t"),
                '\r' => write!(safe, "\\r"),
                other => write!(safe, "{}", other.escape_unicode()),
            };
        } else {
            safe.push(character);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn event(value: Value) -> Event {
        serde_json::from_value(value).unwrap()
    }

    fn examples() -> Vec<Event> {
        const GIB: u64 = 1 << 30;
        let id = "c0ffee".repeat(11);
        [
            json!({
                "type": "oom_kill", "id": 1, "at": 1_700_000_000.25, "boot_id": "b", "kernel_usec": 5, "pid": 4711,
                "process": "pt_data_worker", "role": "dataloader_worker", "whose": "container",
                "container_name": "train", "container_id": id, "victim": "child", "scope": "container",
                "anon_bytes": 3 * GIB, "file_bytes": 0, "shmem_bytes": GIB / 2, "limit_cgroup": "/docker/c0ffee",
                "limit_bytes": 4 * GIB, "evidence": [],
            }),
            json!({
                "type": "exit", "id": 2, "at": 1_700_000_060.0, "container_name": "train", "container_id": id,
                "reason": "oom_container", "exit_code": 137, "duration_seconds": 7384.2, "oom_kills": 2,
                "peak_unreclaimable_bytes": 4 * GIB, "evidence": [],
            }),
            json!({
                "type": "oom_kill", "id": 3, "at": 1_700_000_061.0, "boot_id": "b", "kernel_usec": 6, "pid": 1,
                "process": "a\u{1b}[2J\nb", "whose": "host", "scope": "host", "evidence": [],
            }),
            json!({
                "type": "oom_kill", "id": 4, "at": 1_700_000_062.0, "boot_id": "b", "whose": "unattributed",
                "scope": "container", "evidence": [],
            }),
            json!({
                "type": "exit", "id": 5, "at": 1_700_000_063.0, "k8s_namespace_name": "ml", "k8s_pod_name": "piper-0",
                "container_name": "main", "container_id": id, "reason": "stopped", "exit_code": 0,
                "asked_signals": [15], "kernel_log_read": true, "duration_seconds": 4.0, "oom_kills": 0, "peak_usage_bytes": GIB, "evidence": [],
            }),
            json!({
                "type": "oom_kill", "id": 6, "at": 1_700_000_064.0, "boot_id": "b", "kernel_usec": 7, "pid": 9,
                "process": "python3", "role": "trainer", "whose": "open", "victim": "main", "scope": "host",
                "evidence": [],
            }),
        ]
        .map(event)
        .to_vec()
    }

    #[test]
    fn the_table_tells_in_words_what_happened() {
        let zone = TimeZone::fixed(jiff::tz::offset(1));
        let expected = "\
TIME                       WHAT      CONTAINER             DETAILS
2023-11-14 23:13:20+01:00  oom kill  train                 pt_data_worker (pid 4711, dataloader worker); child: the container lived on; held 3.0 GiB anonymous, 0 B file, 512.0 MiB shared; hit the limit 4.0 GiB of /docker/c0ffee
2023-11-14 23:14:20+01:00  exit      train                 OOM: a memory limit was hit; exit code 137; ran 2h 03m; 2 OOM kills; held at most 4.0 GiB that cannot be reclaimed
2023-11-14 23:14:21+01:00  oom kill  (outside containers)  a\\u{1b}[2J\\nb (pid 1); the machine ran out of memory
2023-11-14 23:14:22+01:00  oom kill  (not known)           a process; hit the limit; known from a counter only: the kernel's record was lost
2023-11-14 23:14:23+01:00  exit      ml/piper-0/main       stopped on request; exit code 0; asked for signal 15; ran 4.0s; held at most 1.0 GiB, page cache included
2023-11-14 23:14:24+01:00  oom kill  (not known yet)       python3 (pid 9, trainer); main: it ended the container; the machine ran out of memory
";
        assert_eq!(table(&examples(), &zone), expected);
    }

    #[test]
    fn nothing_in_a_name_moves_a_terminal() {
        for (text, printed) in [
            ("python3", "python3"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("a\r\tb\u{7f}", "a\\r\\tb\\u{7f}"),
            ("\u{202e}live\u{200b}", "\\u{202e}live\\u{200b}"),
            ("训练\u{fffd}", "训练\u{fffd}"),
        ] {
            assert_eq!(harmless(text), printed);
        }
        assert_eq!(name(&"ä".repeat(500)).chars().count(), LONGEST + 1);
    }

    #[test]
    fn durations_have_two_units_at_most() {
        let texts = [0.24, 59.0, 61.0, 3600.0, 90_061.0].map(duration);
        assert_eq!(texts, ["0.2s", "59s", "1m 01s", "1h 00m", "1d 1h"]);
    }

    #[test]
    fn the_answer_of_the_api_holds_the_events_as_they_are() {
        let bodies: Vec<_> = examples().iter().map(|event| serde_json::to_string(event).unwrap()).collect();
        let answer: Value = serde_json::from_str(&json(&bodies)).unwrap();
        assert_eq!(answer["events"].as_array().unwrap().len(), 6);
        assert_eq!(answer["events"][0]["process"], "pt_data_worker");
        assert_eq!(answer["events"][3].get("pid"), None, "absent is not zero");
        assert_eq!(json(&[]), "{\"events\":[]}\n");
    }
}
