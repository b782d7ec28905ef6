//! Parses a time in the past, from the command line and from queries of the API.

use jiff::Timestamp;

use super::parse_duration;

/// The formats that [`since`] accepts, for help texts and errors.
pub const EXPECTED: &str =
    "a duration such as 90m, 24h or 7d, a time such as 2026-01-31T12:00:00Z, or Unix seconds";

/// Parses `text` to a Unix time, relative to `now_unix`. A day has 24 hours.
///
/// # Errors
/// The expected formats.
pub fn since(text: &str, now_unix: f64) -> Result<f64, String> {
    let invalid = || format!("{text:?} is not valid; expected {EXPECTED}");
    if let Ok(seconds) = text.parse::<f64>() {
        return if seconds.is_finite() { Ok(seconds) } else { Err(invalid()) };
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time.as_duration().as_secs_f64());
    }
    parse_duration(text).map(|span| now_unix - span.as_secs_f64()).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_durations_times_and_seconds() {
        let now = 1_000_000.0;
        for (text, unix) in [
            ("24h", 913_600.0),
            ("7d", 395_200.0),
            ("1h 30m", 994_600.0),
            ("0s", 1_000_000.0),
            ("1970-01-02T00:00:00Z", 86_400.0),
            ("1970-01-02T01:00:00+01:00", 86_400.0),
            ("86400.5", 86_400.5),
        ] {
            assert_eq!(since(text, now), Ok(unix), "{text}");
        }
        for text in ["", "yesterday", "-1h", "1h ago", "nan", "inf", "2026-01-31", "1 month"] {
            let error = since(text, now).unwrap_err();
            assert!(error.contains("such as 90m, 24h"), "{text}: {error}");
        }
    }
}
