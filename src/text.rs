//! Text for people: errors with their causes, names from outside, sizes, times, and what an unknown name may stand for.
//!
//! Sizes and time spans of screens and sentences are formatted here, and text from outside is made safe to show.

use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;

/// Maximum characters of a label value from outside; the rest is cut off.
const MAX_LABEL_CHARS: usize = 256;

/// Formats an error with its causes on one line, each once: some errors repeat the text of their cause.
pub fn error_chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

/// Returns the beginning of a text, at most `max` characters.
pub fn first_chars(text: &str, max: usize) -> &str {
    text.char_indices().nth(max).map_or(text, |(end, _)| &text[..end])
}

/// Returns true for what is not shown, or changes the writing direction: it could hide or reorder a part of a line.
fn is_hidden(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes text from outside for a terminal: line breaks, control characters, and what is hidden, as Rust writes them.
pub fn sanitize_for_terminal(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() || is_hidden(character) {
            safe.extend(character.escape_default());
        } else {
            safe.push(character);
        }
    }
    safe
}

/// Escapes bytes from outside (the name of a process, a path) for labels and events: valid UTF-8 is kept; invalid bytes, control
/// characters and what is hidden become `\xNN`, as in the kernel log.
pub fn printable(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    let escape = |out: &mut String, bytes: &[u8]| {
        for byte in bytes {
            let _ = write!(out, "\\x{byte:02x}"); // writing to a String never fails
        }
    };
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character.is_control() || is_hidden(character) {
                escape(&mut out, character.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                out.push(character);
            }
        }
        escape(&mut out, chunk.invalid());
    }
    out
}

/// Returns text from outside as a label value: printable, and of bounded length.
pub fn bounded(text: &str) -> Arc<str> {
    let printable = printable(first_chars(text, MAX_LABEL_CHARS).as_bytes());
    first_chars(&printable, MAX_LABEL_CHARS).into()
}

/// Quotes a word for a shell where it needs that: one with control characters in the form of Bash, which shows them escaped.
pub fn shell_quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    if word.contains(char::is_control) {
        let escaped = word.chars().map(|c| match c {
            '\'' | '\\' => format!("\\{c}"),
            '\n' => "\\n".to_owned(),
            _ if c.is_control() => format!("\\u{:04x}", u32::from(c)),
            _ => c.to_string(),
        });
        return format!("$'{}'", escaped.collect::<String>());
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Formats bytes in powers of 1024, as `docker stats` does.
pub fn human_bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value.abs() >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats a number of bytes, as [`human_bytes`] does.
pub fn bytes(number: u64) -> String {
    human_bytes(number as f64)
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

/// Formats a time span for a sentence, in at most two units: `4 min 50 s`.
pub fn lasted(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let parts =
        [("d", whole / 86_400), ("h", whole / 3600 % 24), ("min", whole / 60 % 60), ("s", whole % 60)];
    let first = parts.iter().position(|(_, count)| *count > 0).unwrap_or(parts.len() - 1);
    let two = parts.iter().skip(first).take(2).enumerate().filter(|(at, (_, count))| *at == 0 || *count > 0);
    two.map(|(_, (unit, count))| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

/// Formats a time span for a table, in its two largest units: `4m 50s`.
pub fn duration(seconds: f64) -> String {
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

/// Formats a time span for a narrow column, in its largest unit: `5m`.
pub fn age(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    match seconds {
        _ if seconds < 100.0 => format!("{seconds:.0}s"),
        _ if seconds < 100.0 * 60.0 => format!("{:.0}m", seconds / 60.0),
        _ if seconds < 48.0 * 3600.0 => format!("{:.0}h", seconds / 3600.0),
        _ => format!("{:.0}d", seconds / 86_400.0),
    }
}

/// Escapes text for HTML: names of containers are untrusted.
pub fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Longest name that is compared, in bytes.
const MAX_COMPARED: usize = 256;

/// Returns the names that an unknown one may stand for, at most three, all equally likely: a misspelled name, one without the part before
/// a dot, or the beginning of a name. Case and the separators `.`, `-` and `_` do not count.
pub fn similar<'n>(names: impl IntoIterator<Item = &'n str>, unknown: &str) -> Vec<&'n str> {
    let plain = |text: &str| {
        text.chars().filter(|c| !".-_".contains(*c)).map(|c| c.to_ascii_lowercase()).collect::<String>()
    };
    let wanted = plain(unknown);
    if wanted.len() < 2 || wanted.len() > MAX_COMPARED {
        return vec![];
    }
    // one mistake in a short name, three in a long one
    let allowed = ((wanted.len() + 1) / 3).clamp(1, 3);
    let mistakes = |name: &str| {
        if name.len().abs_diff(wanted.len()) > 4 * allowed {
            return None; // more mistakes than that, whatever the letters are
        }
        let found = strsim::damerau_levenshtein(name, &wanted);
        (found <= allowed && found < name.len()).then_some(found)
    };
    let rank = |name: &str| {
        let whole = plain(name);
        let tails = name.match_indices('.').map(|(dot, _)| plain(&name[dot + 1..]));
        let in_tails = tails.filter_map(|tail| mistakes(&tail)).min();
        let is_beginning = wanted.len() > 2 && whole.starts_with(&wanted);
        // the whole name first; a part of it rather than one more mistake
        let ranks = [mistakes(&whole).map(|n| 2 * n), is_beginning.then_some(1), in_tails.map(|n| 2 * n + 1)];
        ranks.into_iter().flatten().min()
    };
    let ranked: Vec<_> = names.into_iter().filter_map(|name| Some((rank(name)?, name))).collect();
    let best = ranked.iter().map(|(rank, _)| *rank).min();
    let likely = ranked.into_iter().filter(|(rank, _)| Some(*rank) == best).map(|(_, name)| name);
    likely.take(3).collect()
}

/// Returns the names nearest to an unknown one, as the end of a sentence about it; empty without names.
pub fn nearest<N: AsRef<str>>(names: impl IntoIterator<Item = N>, wanted: &str) -> String {
    // comparing takes time and memory by the product of both lengths
    let is_short = |text: &str| text.len() <= MAX_COMPARED;
    let names = names
        .into_iter()
        .filter(|name| !name.as_ref().is_empty() && is_short(name.as_ref()) && is_short(wanted));
    let mut names: Vec<_> = names
        .map(|name| (strsim::damerau_levenshtein(name.as_ref(), wanted), name.as_ref().to_owned()))
        .collect();
    names.sort();
    names.dedup();
    let nearest: Vec<_> = names.iter().take(3).map(|(_, name)| format!("{name:?}")).collect();
    match nearest.as_slice() {
        [] => String::new(),
        nearest => format!("; the nearest known names are {}", nearest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_has_one_line_and_one_direction() {
        for (text, on_terminal, in_label) in [
            ("pt_main_thread é 名", "pt_main_thread é 名", "pt_main_thread é 名"),
            ("a\u{1b}[2J\nb\t", "a\\u{1b}[2J\\nb\\t", "a\\x1b[2J\\x0ab\\x09"),
            ("a\u{202e}b", "a\\u{202e}b", "a\\xe2\\x80\\xaeb"),
            ("a\u{ad}b", "a\\u{ad}b", "a\\xc2\\xadb"),
        ] {
            assert_eq!(sanitize_for_terminal(text), on_terminal);
            assert_eq!(printable(text.as_bytes()), in_label);
            assert_eq!(&*bounded(text), in_label);
        }
        assert_eq!(printable(b"a\nb),x=1\xff"), "a\\x0ab),x=1\\xff");
    }

    #[test]
    fn label_value_is_cut_between_characters() {
        assert_eq!(bounded(&"ä".repeat(300)).chars().count(), MAX_LABEL_CHARS);
        let long = bounded(&"\u{1}".repeat(65_536));
        assert_eq!((long.chars().count(), long.chars().any(char::is_control)), (MAX_LABEL_CHARS, false));
    }

    #[test]
    fn sizes_have_the_unit_of_their_magnitude() {
        let sizes = [0, 1023, 1024, 3 << 29, 1 << 41, 1 << 52].map(bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "2.0 TiB", "4096.0 TiB"]);
        assert_eq!([1024, 1025, 3 << 29].map(torch_size), ["1024 bytes", "1.00 KiB", "1.50 GiB"]);
    }

    #[test]
    fn time_spans_have_one_or_two_units() {
        for (seconds, in_sentence, in_table, in_column) in [
            (0.24, "0 s", "0.2s", "0s"),
            (59.0, "59 s", "59s", "59s"),
            (290.0, "4 min 50 s", "4m 50s", "5m"),
            (3600.0, "1 h", "1h 00m", "60m"),
            (90_061.0, "1 d 1 h", "1d 1h", "25h"),
            (200_000.0, "2 d 7 h", "2d 7h", "2d"),
        ] {
            assert_eq!(
                (&*lasted(seconds), &*duration(seconds), &*age(seconds)),
                (in_sentence, in_table, in_column)
            );
        }
    }

    #[test]
    fn word_is_quoted_where_a_shell_needs_it() {
        let quoted = ["train.py", "a b", "it's", "", "it's\nb\t"].map(shell_quoted);
        assert_eq!(quoted, ["train.py", "'a b'", r"'it'\''s'", "''", r"$'it\'s\nb\u0009'"]);
    }

    #[test]
    fn name_of_any_length_is_not_compared() {
        assert_eq!(nearest(["train"], &"x".repeat(300)), "");
        assert_eq!(nearest([&*"x".repeat(300), "train"], "tran"), "; the nearest known names are \"train\"");
    }

    #[test]
    fn similar_name_is_a_misspelling_a_part_or_nothing() {
        let names =
            ["web.listen-address", "web.config.file", "sample.interval", "gpu.interval", "report.dir"];
        for (unknown, likely) in [
            ("web.lisen-address", &["web.listen-address"][..]),
            ("WEB_LISTEN_ADRESS", &["web.listen-address"]),
            ("listen-adress", &["web.listen-address"]),
            ("web.listen", &["web.listen-address"]),
            ("file", &["web.config.file"]),
            ("interval", &["sample.interval", "gpu.interval"]),
            ("sample.intervall", &["sample.interval"]),
            ("report", &["report.dir"]),
            ("port", &[]),
            ("dir", &["report.dir"]),
            ("x", &[]),
            ("", &[]),
            ("version", &[]),
        ] {
            assert_eq!(similar(names, unknown), likely, "{unknown}");
        }
        assert_eq!(similar(["ps", "why"], "sp"), ["ps"]);
        assert_eq!(similar(["ps", "why"], "my"), [""; 0]);
        assert_eq!(similar(names, &"x".repeat(300)), [""; 0]);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Link(&'static str, #[source] Option<Box<Link>>);

    #[test]
    fn each_cause_is_shown_once() {
        let link = |text, cause| Some(Box::new(Link(text, cause)));
        let error = Link("cannot send", link("no route: EIO", link("EIO", link("a cable", None))));
        assert_eq!(error_chain(&error), "cannot send: no route: EIO: a cable");
    }

    #[test]
    fn cuts_between_characters() {
        assert_eq!((first_chars("äöü", 2), first_chars("äöü", 3), first_chars("", 3)), ("äö", "äöü", ""));
    }
}
