//! Formats times, durations, counts and untrusted names for display.

use nix::sys::signal::Signal;

use crate::series::human_bytes;

/// Longest name that is shown in a sentence.
const MAX_NAME: usize = 64;

/// Returns untrusted text with escapes for everything that could control a terminal or hide part of the line: control
/// characters, marks that change the writing direction, and invisible characters.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        let hidden = matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
        if c.is_control() || hidden {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Returns a name for use in a sentence: printable and of limited length.
pub(super) fn name(text: &str) -> String {
    let shown = printable(text);
    match shown.char_indices().nth(MAX_NAME) {
        Some((end, _)) => format!("{}...", &shown[..end]),
        None => shown,
    }
}

/// Shortens container ids in a text to the usual twelve digits.
pub fn short_ids(text: &str) -> String {
    const WHOLE: usize = 64;
    const SHORT: usize = 12;
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_hexdigit()) {
        let (before, from) = rest.split_at(start);
        let (digits, after) =
            from.split_at(from.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(from.len()));
        shown.push_str(before);
        match digits.len() {
            WHOLE => shown.extend([&digits[..SHORT], "..."]),
            _ => shown.push_str(digits),
        }
        rest = after;
    }
    shown + rest
}

/// Returns a path for use in a sentence: with short ids, shortened in the middle because its end is the distinctive
/// part.
pub(super) fn path(text: &str) -> String {
    let shown: Vec<char> = printable(&short_ids(text)).chars().collect();
    if shown.len() <= MAX_NAME {
        return shown.into_iter().collect();
    }
    let half = (MAX_NAME - 3) / 2;
    let (head, tail) = (&shown[..half], &shown[shown.len() - half..]);
    format!("{}...{}", head.iter().collect::<String>(), tail.iter().collect::<String>())
}

/// Formats a Unix time as date and time of day, in UTC.
pub fn time(at: f64) -> String {
    // the cast saturates, and jiff rejects what is not a date
    match jiff::Timestamp::from_second(at.floor() as i64) {
        Ok(timestamp) => format!("{} UTC", timestamp.strftime("%Y-%m-%d %H:%M:%S")),
        Err(_) => "an unknown time".to_owned(),
    }
}

/// Returns a size as PyTorch's messages have it: with two decimals, so that both can be compared.
pub fn torch_size(bytes: u64) -> String {
    let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    // a whole unit is a thousand of the smaller one there
    let unit = units.into_iter().find(|(size, _)| bytes > *size);
    unit.map_or_else(
        || format!("{bytes} bytes"),
        |(size, name)| format!("{:.2} {name}", bytes as f64 / size as f64),
    )
}

/// Formats seconds with at most two units.
pub fn lasted(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let parts =
        [("d", whole / 86_400), ("h", whole / 3600 % 24), ("min", whole / 60 % 60), ("s", whole % 60)];
    let first = parts.iter().position(|(_, count)| *count > 0).unwrap_or(parts.len() - 1);
    let two = parts.iter().skip(first).take(2).enumerate().filter(|(at, (_, count))| *at == 0 || *count > 0);
    two.map(|(_, (unit, count))| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

/// Formats bytes with a unit.
pub(super) fn bytes(count: u64) -> String {
    human_bytes(count as f64)
}

/// Returns the name of a Linux signal, if it has one.
pub(super) fn signal(number: i64) -> String {
    let known = i32::try_from(number).ok().and_then(|number| Signal::try_from(number).ok());
    known.map_or_else(|| format!("signal {number}"), |signal| signal.as_str().to_owned())
}

/// Returns the signal that an exit code means: 128 plus its number.
pub(super) fn signal_of(exit_code: Option<i64>) -> Option<i64> {
    exit_code.and_then(|code| code.checked_sub(128)).filter(|signal| (1..=64).contains(signal))
}

/// Returns a noun for one process of a role.
pub(super) fn role_one(role: &str) -> &'static str {
    match role {
        "trainer" => "trainer process",
        "dataloader_worker" => "DataLoader worker",
        "worker" => "worker process",
        _ => "child process",
    }
}

/// Returns a number of processes with the noun of their role.
pub fn roles(role: &str, count: u32) -> String {
    let noun = match (role, count) {
        ("trainer", 1) => "trainer",
        ("trainer", _) => "trainers",
        ("dataloader_worker", 1) => "DataLoader worker",
        ("dataloader_worker", _) => "DataLoader workers",
        ("worker", 1) => "worker process",
        ("worker", _) => "worker processes",
        (_, 1) => "other",
        _ => "others",
    };
    format!("{count} {noun}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_outside_signal_range_is_not_a_signal() {
        assert_eq!(signal_of(Some(137)), Some(9));
        assert_eq!([Some(i64::MIN), Some(i64::MAX), Some(128), None].map(signal_of), [None; 4]);
    }

    #[test]
    fn shortens_container_ids_but_no_other_digits() {
        let id = "0123456789abcdef".repeat(4);
        assert_eq!(short_ids(&format!("/docker/{id}/in was hit")), "/docker/0123456789ab.../in was hit");
        assert_eq!(short_ids("pid 9455, 0xff, déjà, cafe"), "pid 9455, 0xff, déjà, cafe");
        assert_eq!(short_ids(&format!("{id}0")), format!("{id}0"));
    }

    #[test]
    fn hostile_name_cannot_control_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert_eq!(printable("abc\u{202e}def"), "abc\\u{202e}def");
        assert_eq!(printable("trän-1"), "trän-1");
        assert!(name(&"x".repeat(500)).chars().count() < 70);
        assert!(path(&format!("/a/{}/end", "x".repeat(500))).ends_with("/end"));
    }

    #[test]
    fn durations_have_at_most_two_units() {
        for (seconds, expected) in
            [(0.2, "0 s"), (59.0, "59 s"), (290.0, "4 min 50 s"), (3600.0, "1 h"), (100_000.0, "1 d 3 h")]
        {
            assert_eq!(lasted(seconds), expected);
        }
    }

    #[test]
    fn invalid_time_is_unknown() {
        assert_eq!(time(1_795_000_000.9), "2026-11-18 11:06:40 UTC");
        assert_eq!(time(f64::INFINITY), "an unknown time");
    }
}
