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
