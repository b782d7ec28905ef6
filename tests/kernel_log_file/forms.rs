//! Each recorded log in the forms in which people save, paste and send it: the verdict is the same.

use serde_json::Value;

use super::{folder, logs, piped};

/// A form: its name, and what makes it of a log or of a record's text.
type Form = (&'static str, fn(&str) -> String);

/// Returns the verdicts without what a form changes: times.
fn verdicts(name: &str, form: &str, log: &[u8]) -> Vec<Value> {
    let (code, json, error) = piped(&["--json"], log);
    assert_eq!(code, Some(0), "{name} as {form}: {error}");
    let mut verdicts: Vec<Value> =
        json.lines().map(|line| serde_json::from_str(line).expect("a verdict")).collect();
    for verdict in &mut verdicts {
        let fields = verdict.as_object_mut().expect("a verdict");
        ["requested_at", "log_time", "what"].iter().for_each(|time| drop(fields.remove(*time)));
    }
    verdicts
}

/// Returns the names of the logs that are text, with a record in each line.
fn text_logs() -> impl Iterator<Item = String> {
    let is_text =
        |name: &String| [".dmesg", ".dmesg-T", ".journal", ".syslog"].iter().any(|end| name.ends_with(end));
    logs().into_iter().filter(is_text)
}

fn each_line(log: &str, form: impl Fn(usize, &str) -> String) -> String {
    log.lines().enumerate().map(|(number, line)| form(number + 1, line) + "\n").collect()
}

/// Wraps lines at spaces, as programs for mail do.
fn wrapped(log: &str) -> String {
    let mut out = String::new();
    for line in log.lines() {
        let mut width = 0;
        for word in line.split_inclusive(' ') {
            if width > 0 && width + word.len() > 72 {
                out.truncate(out.trim_end_matches(' ').len());
                out.push('\n');
                width = 0;
            }
            out.push_str(word);
            width += word.len();
        }
        out.push('\n');
    }
    out
}

/// Turns the order of records, which begin with a stamp.
fn newest_first(log: &str) -> String {
    let mut records: Vec<String> = Vec::new();
    for line in log.lines() {
        match records.last_mut() {
            Some(record) if line.starts_with(' ') => *record = format!("{record}\n{line}"),
            _ => records.push(line.to_owned()),
        }
    }
    records.into_iter().rev().map(|record| record + "\n").collect()
}

#[test]
fn every_form_of_a_log_has_the_same_verdicts() {
    const AT: &str = "2026-11-22T08:49:56.123456789Z";
    let forms: [Form; 17] = [
        ("indented", |log| each_line(log, |_, line| format!("    {line}"))),
        ("after a tab", |log| each_line(log, |_, line| format!("\t{line}"))),
        ("a list with back quotes", |log| each_line(log, |_, line| format!("* `{line}`"))),
        ("quoted", |log| each_line(log, |_, line| format!("> > {line}"))),
        ("with blanks at the end", |log| each_line(log, |_, line| format!("{line}   "))),
        ("of Windows", |log| each_line(log, |_, line| format!("{line}\r"))),
        ("in colour", |log| each_line(log, |_, line| format!("\u{1b}[32m{line}\u{1b}[0m"))),
        ("with spaces that do not break", |log| log.replace("  ", "\u{a0} ")),
        ("of grep -n", |log| each_line(log, |number, line| format!("{number}:{line}"))),
        ("of grep -n -A", |log| each_line(log, |number, line| format!("{number}-{line}"))),
        ("of grep in files", |log| each_line(log, |_, line| format!("/var/log/kern.log:{line}"))),
        ("of docker logs --timestamps", |log| each_line(log, |_, line| format!("{AT} {line}"))),
        ("of a log file of CRI", |log| each_line(log, |_, line| format!("{AT} stdout F {line}"))),
        ("of docker compose logs", |log| each_line(log, |_, line| format!("train-1  | {line}"))),
        ("of kubectl logs --prefix", |log| each_line(log, |_, line| format!("[pod/a-b/c] {line}"))),
        ("newest first", newest_first),
        ("after a text", |log| format!("Dear all,\nthis is what the host says:\n\n{log}\n-- \nA\n")),
    ];
    for name in text_logs() {
        let log = std::fs::read_to_string(folder().join(&name)).expect("a log");
        let expected = verdicts(&name, "itself", log.as_bytes());
        for (form, change) in forms {
            assert_eq!(verdicts(&name, form, change(&log).as_bytes()), expected, "{name}: {form}");
        }
        // where a line begins with the name of a process, that may look like another line
        let kill = |mut verdicts: Vec<Value>| {
            let parts = |verdict: &mut Value| ["cause", "pid", "subject"].map(|part| verdict[part].take());
            verdicts.iter_mut().map(parts).collect::<Vec<_>>()
        };
        let of_wrapped = verdicts(&name, "wrapped", wrapped(&log).as_bytes());
        assert_eq!(kill(of_wrapped), kill(expected.clone()), "{name}: wrapped");
        let utf16 = |bytes: fn(u16) -> [u8; 2]| {
            std::iter::once(0xfeff).chain(log.encode_utf16()).flat_map(bytes).collect::<Vec<u8>>()
        };
        assert_eq!(verdicts(&name, "UTF-16LE", &utf16(u16::to_le_bytes)), expected, "{name}");
        assert_eq!(verdicts(&name, "UTF-16BE", &utf16(u16::to_be_bytes)), expected, "{name}");
    }
}

/// The text of each record behind the prefix of another program.
#[test]
fn every_prefix_of_a_log_has_the_same_verdicts() {
    let forms: [Form; 5] = [
        ("syslog by RFC 5424", |text| format!("<4>1 2026-11-22T08:49:56.1Z gpu-1 kernel - - - {text}")),
        ("talosctl dmesg", |text| format!("10.0.0.1: kern: warning: [2026-11-22T08:49:56.1Z]: {text}")),
        ("journalctl --no-hostname", |text| format!("Nov 22 08:49:56 kernel: {text}")),
        ("busybox", |text| format!("Nov 22 08:49:56 gpu-1 kern.warn kernel: [ 3124.417658] {text}")),
        ("a console of VMware", |text| {
            format!("2026-11-22T08:49:56.127Z In(05) vcpu-5 - Guest: <6>[ 3124.417658] {text}")
        }),
    ];
    let log = std::fs::read_to_string(folder().join("v1-3.10-container.dmesg")).expect("a log");
    let expected = verdicts("v1-3.10", "itself", log.as_bytes());
    for (form, change) in forms {
        let changed = each_line(&log, |_, line| change(line.split_once("] ").map_or(line, |(_, text)| text)));
        assert_eq!(verdicts("v1-3.10", form, changed.as_bytes()), expected, "{form}");
    }
}

/// A line as a string of JSON.
fn json(text: &str) -> String {
    Value::from(text).to_string()
}

fn joined(log: &str, separator: &str, form: impl Fn(&str) -> String) -> String {
    log.lines().map(form).collect::<Vec<_>>().join(separator)
}

/// What programs make of a log that store and export it.
#[test]
fn every_export_of_a_log_has_the_same_verdicts() {
    const AT: &str = "2026-11-22T08:49:56.123Z";
    let forms: [Form; 17] = [
        ("lines of JSON", |log| {
            each_line(log, |_, line| format!("{{\"log\": {}, \"host\": \"n\"}}", json(line)))
        }),
        ("a log file of Docker", |log| {
            each_line(log, |_, line| {
                format!("{{\"log\":{},\"stream\":\"stdout\",\"time\":\"{AT}\"}}", json(&format!("{line}\n")))
            })
        }),
        ("an array of objects", |log| {
            let object = |line: &str| {
                format!(
                    "  {{\n    \"payload\": {},\n    \"labels\": {{\n      \"unit\": \"kernel\"\n    }},\n    \"timestamp\": \"{AT}\"\n  }}",
                    json(line)
                )
            };
            format!("[\n{}\n]\n", joined(log, ",\n", object))
        }),
        ("an array in one line", |log| {
            format!("[{}]", joined(log, ",", |line| format!("{{\"any\":{}}}", json(line))))
        }),
        ("objects in objects", |log| {
            each_line(log, |_, line| {
                format!(
                    "{{\"_index\":\"a\",\"_source\":{{\"@timestamp\":\"{AT}\",\"message\":{}}}}}",
                    json(line)
                )
            })
        }),
        ("arrays of time and line", |log| {
            let values = joined(log, ",\n", |line| format!("[\"1773589958000000000\", {}]", json(line)));
            format!("{{\"data\": {{\"result\": [{{\"stream\": {{}}, \"values\": [{values}]}}]}}}}")
        }),
        ("one string of JSON", |log| format!("{{\"stdout\": {}}}", json(log))),
        ("a list of strings", |log| format!("[{}]", joined(log, ", ", json))),
        ("JSON that is cut", |log| {
            format!(
                "{{\"entries\": [\n{},\n",
                joined(log, ",\n", |line| format!("{{\n\"msg\": {}\n}}", json(line)))
            )
        }),
        ("escaped ends of lines in JSON", |log| {
            each_line(log, |_, line| format!("{{\"textPayload\": {}}}", json(&format!("{line}\\r\\n"))))
        }),
        ("escaped ends of lines", |log| each_line(log, |_, line| format!("{line}\\r\\n"))),
        ("line feeds with a backslash", |log| log.trim_end().replace('\n', "\\n")),
        ("CSV", |log| {
            let rows = each_line(log, |_, line| format!("\"{AT}\",\"{}\"", line.replace('"', "\"\"")));
            format!("\"@timestamp\",\"@message\"\n{rows}")
        }),
        ("CSV, newest first", |log| {
            newest_first(log)
                .lines()
                .map(|line| format!("\"{AT}\",\"{}\"\n", line.replace('"', "\"\"")))
                .collect()
        }),
        ("quoted", |log| each_line(log, |_, line| format!("\"{line}\""))),
        ("JSON behind a stamp", |log| {
            each_line(log, |_, line| format!("{AT} stdout F {{\"log\": {}}}", json(line)))
        }),
        ("JSON in JSON", |log| {
            each_line(log, |_, line| {
                format!("{{\"@message\": {}}}", json(&format!("{{\"log\": {}}}", json(line))))
            })
        }),
    ];
    for name in text_logs() {
        let log = std::fs::read_to_string(folder().join(&name)).expect("a log");
        let expected = verdicts(&name, "itself", log.as_bytes());
        for (form, change) in forms {
            assert_eq!(verdicts(&name, form, change(&log).as_bytes()), expected, "{name}: {form}");
        }
    }
}

/// The text of each record in a field of its own, with its time in another one.
#[test]
fn every_field_of_a_journal_has_the_same_verdicts() {
    let forms: [Form; 4] = [
        ("journalctl -o export", |text| {
            format!(
                "__CURSOR=s=a\n__REALTIME_TIMESTAMP=1773589958000000\n_TRANSPORT=kernel\nMESSAGE={text}\n"
            )
        }),
        ("journalctl -o verbose", |text| {
            format!(
                "Sun 2026-11-22 08:49:56.000000 UTC [s=ab;i=1]\n    _TRANSPORT=kernel\n    PRIORITY=4\n    MESSAGE={text}"
            )
        }),
        ("journalctl -o json-pretty", |text| {
            format!(
                "{{\n\t\"__REALTIME_TIMESTAMP\" : \"1773589958000000\",\n\t\"_TRANSPORT\" : \"kernel\",\n\t\"MESSAGE\" : {}\n}}",
                json(text)
            )
        }),
        ("dmesg --json", |text| {
            format!("{{\n\"pri\": \"warn\",\n\"time\":   3124.417658,\n\"msg\": {}\n}},", json(text))
        }),
    ];
    let log = std::fs::read_to_string(folder().join("v1-3.10-container.dmesg")).expect("a log");
    let expected = verdicts("v1-3.10", "itself", log.as_bytes());
    for (form, change) in forms {
        let changed = each_line(&log, |_, line| change(line.split_once("] ").map_or(line, |(_, text)| text)));
        assert_eq!(verdicts("v1-3.10", form, changed.as_bytes()), expected, "{form}");
    }
}
