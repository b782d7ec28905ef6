//! Text of errors with their causes, and text of bounded length.

use std::error::Error;

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
