//! Parses a time in the past, from the command line, where times are local, and from queries of the API.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Span, SpanRelativeTo, Timestamp, Zoned};

use super::parse_duration;

/// The formats that [`local`] accepts, for help texts and errors.
pub const EXPECTED_LOCAL: &str = "a duration such as 90m, 24h or 7d, or a local time such as 16:00, yesterday, 2026-01-31, \
                                  \"2026-01-31 16:00\" or 2026-01-31T12:00:00Z";

/// Parses a time of the command line as journalctl does: relative to now, or a time in this time zone. Without a date it is today's, without
/// a time midnight. A time of an hour that a change of the clock skips is an hour later; of one that is twice, it is the first.
///
/// # Errors
/// The expected formats.
pub fn local(text: &str, now: &Zoned) -> Result<f64, String> {
    let text = text.trim();
    let invalid = || format!("{text:?} is not valid; expected {EXPECTED_LOCAL}");
    if let Ok(number) = text.parse::<f64>() {
        let hint = if number >= 0.0 && number.is_finite() && number < 1e6 {
            format!("; a number needs a unit: {text}m, {text}h or {text}d")
        } else {
            "; Unix seconds are written with an @ before them".to_owned()
        };
        return Err(invalid() + &hint);
    }
    let unix = |time: Timestamp| time.as_duration().as_secs_f64();
    if let Some(seconds) = text.strip_prefix('@') {
        return seconds.parse().ok().filter(|seconds: &f64| seconds.is_finite()).ok_or_else(invalid);
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(unix(time));
    }
    if let Ok(time) = text.parse::<Zoned>() {
        return Ok(unix(time.timestamp()));
    }
    if let Some(time) = civil(text, now) {
        let time = time.to_zoned(now.time_zone().clone()).map_err(|_| invalid())?;
        if time > *now {
            let before = now.date().yesterday().map_err(|_| invalid())?;
            return Err(format!("{text:?} is later than now; of yesterday: \"{before} {}\"", time.time()));
        }
        return Ok(unix(time.timestamp()));
    }
    // `2h ago` and `-2h` are what `2h` is
    let ago =
        text.parse::<Span>().ok().and_then(|span| span.to_duration(SpanRelativeTo::days_are_24_hours()).ok());
    ago.map(|span| unix(now.timestamp()) - span.unsigned_abs().as_secs_f64()).ok_or_else(invalid)
}

/// Parses a date, a time, both, or a word for one.
fn civil(text: &str, now: &Zoned) -> Option<DateTime> {
    let midnight = |date: Date| Some(date.to_datetime(Time::midnight()));
    match text.to_ascii_lowercase().as_str() {
        "now" => return Some(now.datetime()),
        "today" => return midnight(now.date()),
        "yesterday" => return midnight(now.date().yesterday().ok()?),
        _ => {}
    }
    if text.contains('-') {
        return text.parse::<DateTime>().ok(); // a date alone is its midnight
    }
    if text.contains(':') {
        return text.parse::<Time>().ok().map(|time| now.date().to_datetime(time));
    }
    None
}

/// Parses the value of `--since`.
///
/// # Errors
/// The expected formats.
pub fn flag(text: &str) -> Result<f64, String> {
    let now = crate::clock::Timestamp::now().unix_nanos();
    let now = Timestamp::from_nanosecond(now.into()).map_err(|error| error.to_string())?;
    local(text, &now.to_zoned(TimeZone::system()))
}

/// The formats that [`since`] accepts, for errors.
pub const EXPECTED: &str =
    "a duration such as 90m, 24h or 7d, a time such as 2026-01-31T12:00:00Z, or Unix seconds";

/// Parses `text`, of a query of the API, to a Unix time, relative to `now_unix`. A day has 24 hours.
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

    fn new_york(now: &str) -> Zoned {
        now.parse::<Timestamp>().unwrap().to_zoned(TimeZone::get("America/New_York").unwrap())
    }

    #[test]
    fn times_of_the_command_line_are_local() {
        let now = new_york("2026-11-28T20:30:00.5Z"); // 15:30 there
        for (text, means) in [
            ("2026-11-28", "2026-11-28T05:00:00Z"),
            ("2026-11-28 14:00", "2026-11-28T19:00:00Z"),
            ("2026-11-28T14:00", "2026-11-28T19:00:00Z"),
            ("2026-11-28 14:00:05", "2026-11-28T19:00:05Z"),
            (" 2026-11-28 14:00:05 ", "2026-11-28T19:00:05Z"),
            ("2026-07-01 16:00", "2026-07-01T20:00:00Z"),
            ("14:00", "2026-11-28T19:00:00Z"),
            ("09:05", "2026-11-28T14:05:00Z"),
            ("14:00:05", "2026-11-28T19:00:05Z"),
            ("yesterday", "2026-11-27T05:00:00Z"),
            ("Yesterday", "2026-11-27T05:00:00Z"),
            ("today", "2026-11-28T05:00:00Z"),
            ("now", "2026-11-28T20:30:00.5Z"),
            ("2026-11-28T16:00:00Z", "2026-11-28T16:00:00Z"),
            ("2026-11-28 16:00:00+01:00", "2026-11-28T15:00:00Z"),
            ("2026-11-28T16:00[Europe/Berlin]", "2026-11-28T15:00:00Z"),
            ("24h", "2026-11-27T20:30:00.5Z"),
            ("2 hours ago", "2026-11-28T18:30:00.5Z"),
            ("-2h", "2026-11-28T18:30:00.5Z"),
            ("@86400.5", "1970-01-02T00:00:00.5Z"),
            // the clock skips this hour, and has that one twice
            ("2026-03-08 02:30", "2026-03-08T07:30:00Z"),
            ("2026-11-01 01:30", "2026-11-01T05:30:00Z"),
        ] {
            let means = means.parse::<Timestamp>().unwrap().as_duration().as_secs_f64();
            assert_eq!(local(text, &now), Ok(means), "{text}");
        }
        for text in ["16:00", "2026-11-28 16:00", "2026-12-01"] {
            let error = local(text, &now).unwrap_err();
            assert!(error.contains("is later than now") && error.contains("2026-11-27"), "{text}: {error}");
        }
        assert!(local("16:00", &now).unwrap_err().contains("\"2026-11-27 16:00:00\""));
        // the day of the place, not of Greenwich
        let late = new_york("2026-11-29T03:00:00Z");
        assert_eq!(local("today", &late), local("2026-11-28", &late));
    }

    #[test]
    fn number_without_a_unit_is_no_time() {
        let now = new_york("2026-11-28T20:30:00Z");
        for text in ["24", "0", "1.5", "20261128", "1764000000", "-5", "nan", "inf"] {
            let error = local(text, &now).unwrap_err();
            assert!(error.contains("such as 90m, 24h") && error.contains("; "), "{text}: {error}");
        }
        assert!(local("24", &now).unwrap_err().ends_with("a number needs a unit: 24m, 24h or 24d"));
        assert!(local("1764000000", &now).unwrap_err().ends_with("with an @ before them"));
        for text in
            ["", "@", "@x", "tomorrow", "1 month", "25:00", "2026-13-01", "28.11.2026", "16h30", "last week"]
        {
            let error = local(text, &now).unwrap_err();
            assert!(error.contains("such as 90m, 24h"), "{text}: {error}");
        }
    }

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
