//! The query string of a request.

use percent_encoding::percent_decode_str;

use crate::config::since;

/// Returns the parameters of a query string; an error for a value that is not percent-encoded text.
pub fn parameters(text: &str) -> impl Iterator<Item = Result<(&str, String), String>> {
    text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decoded = percent_decode_str(value).decode_utf8();
        let decoded = decoded.map_err(|_| format!("{key:?}: {value:?} is not percent-encoded text"))?;
        Ok((key, decoded.into_owned()))
    })
}

/// Which rows of the ledger a request selects.
#[derive(Debug)]
pub struct Selection {
    /// Since this Unix time.
    pub since: Option<f64>,
    /// The value of the parameter that names what is selected.
    pub name: Option<String>,
    /// Maximum number, the newest.
    pub limit: usize,
}

/// Limit of a [`Selection`] that has none.
const DEFAULT_LIMIT: usize = 100;

/// Parses `since`, `limit` up to `max`, and the parameter `name`, whose value must be `expected`. `others`: parameters that the caller
/// parses.
pub fn selection(
    text: &str,
    now_unix: f64,
    max: usize,
    (name, expected): (&str, &str),
    others: &[&str],
) -> Result<Selection, String> {
    let mut selection = Selection { since: None, name: None, limit: DEFAULT_LIMIT };
    for parameter in parameters(text) {
        let (key, value) = parameter?;
        match key {
            "since" => {
                let since = since::since(&value, now_unix).map_err(|wanted| format!("since: {wanted}"))?;
                selection.since = Some(since);
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=max).contains(limit));
                selection.limit =
                    limit.ok_or_else(|| format!("limit: {value:?} is not valid; expected 1 to {max}"))?;
            }
            key if key == name && value.is_empty() => return Err(format!("{name}: expected {expected}")),
            key if key == name => selection.name = Some(value),
            key if others.contains(&key) => {}
            _ => {
                let more: String = others.iter().map(|other| format!(", {other}")).collect();
                return Err(format!("unknown parameter {key:?}; allowed: since, {name}, limit{more}"));
            }
        }
    }
    Ok(selection)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, now_unix: f64) -> Result<Selection, String> {
        selection(text, now_unix, 500, ("container", "a name, an id, or the beginning of an id"), &[])
    }

    #[test]
    fn parses_parameters() {
        let found = parse("since=1h&container=tr%61in&limit=7", 10_000.0).unwrap();
        assert_eq!((found.since, found.name.as_deref(), found.limit), (Some(6400.0), Some("train"), 7));
        let found = parse("since=1970-01-01T01:00:10+01:00", 0.0).unwrap();
        assert_eq!((found.since, found.name, found.limit), (Some(10.0), None, DEFAULT_LIMIT));
        assert_eq!(parse("", 0.0).unwrap().limit, DEFAULT_LIMIT);
    }

    #[test]
    fn rejects_invalid_parameters_with_the_allowed_values() {
        for (text, says) in [
            ("since=yesterday", "since: \"yesterday\" is not valid; expected a duration such as"),
            ("since", "since: \"\" is not valid"),
            ("limit=0", "expected 1 to 500"),
            ("limit=501", "expected 1 to 500"),
            ("limit=-1", "expected 1 to 500"),
            ("container=", "the beginning of an id"),
            ("container=%ff", "percent-encoded"),
            ("sice=1h", "allowed: since, container, limit"),
        ] {
            let error = parse(text, 0.0).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
