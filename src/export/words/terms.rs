//! Names, paths, times, signals and roles in sentences.

use nix::sys::signal::Signal;

use crate::events::Role;
use crate::text::sanitize_for_terminal;

/// Longest name that is shown in a sentence.
const MAX_NAME: usize = 64;

/// Returns a name for use in a sentence: printable and of limited length.
pub(in crate::export) fn name(text: &str) -> String {
    let shown = sanitize_for_terminal(text);
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
pub(in crate::export) fn path(text: &str) -> String {
    let shown: Vec<char> = sanitize_for_terminal(&short_ids(text)).chars().collect();
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

/// Returns the name of a Linux signal, if it has one.
pub(in crate::export) fn signal(number: i64) -> String {
    let known = i32::try_from(number).ok().and_then(|number| Signal::try_from(number).ok());
    known.map_or_else(|| format!("signal {number}"), |signal| signal.as_str().to_owned())
}

/// Returns a noun for one process of a role.
pub(in crate::export) fn role_one(role: Role) -> &'static str {
    match role {
        Role::Trainer => "trainer process",
        Role::DataloaderWorker => "DataLoader worker",
        Role::Worker => "worker process",
        Role::Other => "child process",
    }
}

/// Returns a number of processes with the noun of their role.
pub fn roles(role: Role, count: u32) -> String {
    format!("{count} {}", role_noun(role, count.into()))
}

/// Returns the noun for so many processes of a role.
pub(in crate::export) fn role_noun(role: Role, count: u64) -> &'static str {
    match (role, count) {
        (Role::Trainer, 1) => "trainer",
        (Role::Trainer, _) => "trainers",
        (Role::DataloaderWorker, 1) => "DataLoader worker",
        (Role::DataloaderWorker, _) => "DataLoader workers",
        (Role::Worker, 1) => "worker process",
        (Role::Worker, _) => "worker processes",
        (Role::Other, 1) => "other",
        (Role::Other, _) => "others",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortens_container_ids_but_no_other_digits() {
        let id = "0123456789abcdef".repeat(4);
        assert_eq!(short_ids(&format!("/docker/{id}/in was hit")), "/docker/0123456789ab.../in was hit");
        assert_eq!(short_ids("pid 9455, 0xff, déjà, cafe"), "pid 9455, 0xff, déjà, cafe");
        assert_eq!(short_ids(&format!("{id}0")), format!("{id}0"));
    }

    #[test]
    fn hostile_name_cannot_control_the_terminal() {
        assert_eq!(name("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert!(name(&"x".repeat(500)).chars().count() < 70);
        assert!(path(&format!("/a/{}/end", "x".repeat(500))).ends_with("/end"));
    }

    #[test]
    fn invalid_time_is_unknown() {
        assert_eq!(time(1_795_000_000.9), "2026-11-18 11:06:40 UTC");
        assert_eq!(time(f64::INFINITY), "an unknown time");
    }
}
