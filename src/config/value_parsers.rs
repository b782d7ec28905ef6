//! Parses values of settings. An error is a description of what is expected.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use regex::Regex;

/// What a size is.
pub const SIZE_TAKES: &str = "a size such as 512KiB, 64M or 1.5G";

/// Parses bytes with a binary unit, as Docker does: K, M, G or T, with or without B or iB.
///
/// # Errors
/// It is no size, or less than `min`.
pub fn size(text: &str, min: u64) -> Result<u64, String> {
    let digits = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start().to_ascii_lowercase();
    let prefix = unit.strip_suffix("ib").or(unit.strip_suffix('b')).unwrap_or(&unit);
    let power = ["", "k", "m", "g", "t"].iter().position(|known| *known == prefix);
    let bytes = power.and_then(|power| Some(number.parse::<f64>().ok()? * 1024_f64.powi(power as i32)));
    let fits = bytes.filter(|bytes| (min as f64..i64::MAX as f64).contains(bytes));
    let wrong =
        || format!("{SIZE_TAKES}, in powers of 1024, at least {}", crate::text::human_bytes(min as f64));
    fits.map(|bytes| bytes as u64).ok_or_else(wrong)
}

/// What a percentage is.
pub const PERCENT: &str = "a percentage such as 85%";

/// Parses a percentage, over 0 and at most 100.
pub fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim_end().parse().ok());
    number.filter(|number| *number > 0.0 && *number <= 100.0).ok_or_else(|| PERCENT.to_owned())
}

/// Parses a path, also in the kubelet's form `unix:///run/...`.
pub fn unix_socket(text: &str) -> PathBuf {
    text.strip_prefix("unix://").unwrap_or(text).into()
}

/// Parses the key of a label or annotation of a container or pod to the key and the name of its metric label.
pub fn label_key(prefix: &str, key: &str) -> Result<(String, Arc<str>), String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if !key.chars().all(allowed) {
        return Err(format!("the key of a {prefix}, such as app.kubernetes.io/name"));
    }
    Ok((key.to_owned(), format!("{prefix}_{}", key.chars().map(plain).collect::<String>()).into()))
}

pub fn regex(text: &str) -> Result<Regex, String> {
    Regex::new(text).map_err(|error| format!("a regular expression: {error}"))
}

/// Parses `HOST:PORT`, `[V6]:PORT`, or `:PORT` for all addresses of both families.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let full =
        if text.starts_with(':') { format!("[::]{text}") } else { text.replace("localhost:", "127.0.0.1:") };
    full.parse()
        .map_err(|_| "HOST:PORT with a numeric host, [V6]:PORT, or :PORT for all addresses".to_owned())
}

pub fn url_path(text: &str) -> Result<String, String> {
    let reserved = text == "/" || text.starts_with("/-/") || text.starts_with("/api/");
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"/-_.".contains(&b));
    if text.starts_with('/') && plain && !reserved {
        Ok(text.to_owned())
    } else {
        Err("a path such as /metrics, not /, and not below /-/ or /api/".to_owned())
    }
}

/// Parses a label: its key, and its value if there is one.
///
/// # Errors
/// There is no key.
pub fn label(text: &str) -> Result<(String, Option<String>), String> {
    let (key, value) = match text.split_once('=') {
        Some((key, value)) => (key, Some(value.to_owned())),
        None => (text, None),
    };
    if key.is_empty() { Err("KEY or KEY=VALUE".to_owned()) } else { Ok((key.to_owned(), value)) }
}

/// Parses the name of an environment variable whose lower case is a valid label name.
pub fn variable_name(text: &str) -> Result<String, String> {
    let first = text.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    let reserved = crate::catalog::MetricScope::Container.labels().iter().chain(&["run", "settings"]);
    let is_reserved = reserved.into_iter().any(|label| text.eq_ignore_ascii_case(label));
    if first
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && !text.starts_with("__")
        && !is_reserved
    {
        Ok(text.to_owned())
    } else {
        Err("the name of an environment variable that can be a label: letters, digits and _; not run or settings, not the container's own labels".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_read_as_docker_reads_it() {
        for (text, bytes) in [
            ("32G", Some(32 << 30)),
            ("32g", Some(32 << 30)),
            ("1.5GiB", Some(3 << 29)),
            ("512M", Some(512 << 20)),
            ("512 MB", Some(512 << 20)),
            ("1T", Some(1 << 40)),
            ("8388608", Some(8 << 20)),
            ("32", None),
            ("-1G", None),
            ("G", None),
            ("1P", None),
            ("99999999T", None),
            ("", None),
        ] {
            assert_eq!(size(text, 4 << 20).ok(), bytes, "{text}");
        }
    }
}
