//! `--web.config.file`: TLS, passwords, headers and rate limit of the HTTP server, in the format that Prometheus exporters
//! share.
//!
//! Strict: an unknown key, half a key pair or an invalid hash is rejected with file and line. Where this is stricter than
//! the format's own checker (`promtool check web-config`), a setting would otherwise protect less than it claims: TLS
//! settings without a certificate, a version that is not offered, a choice of cipher suites, client certificates that cannot be verified.
//!
//! Pure: text in, settings out. `http` reads the files that it names.

mod password;
mod tls;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_saphyr::Spanned;

use super::ConfigError;
use super::declare::parse_duration;
use super::yaml::{Entries, error_at, line_of};
pub use password::PasswordHash;
pub use tls::{At, ClientAuth, Pem, TlsSettings, TlsVersion};

/// The validated file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WebConfig {
    /// TLS; `None`: plain HTTP.
    pub tls: Option<TlsSettings>,
    /// Headers of every response.
    pub headers: Vec<(&'static str, String)>,
    /// Users and their password hashes; empty: no authentication.
    pub users: BTreeMap<String, PasswordHash>,
    /// The rate limit; `None`: no limit.
    pub rate: Option<Rate>,
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Time after which one more request is allowed.
    pub interval: Duration,
    /// Requests allowed at once.
    pub burst: u32,
}

/// Allowed headers, and the allowed values of each; none: any value.
const HEADERS: &[(&str, &[&str])] = &[
    ("Content-Security-Policy", &[]),
    ("X-Frame-Options", &["deny", "sameorigin"]),
    ("X-Content-Type-Options", &["nosniff"]),
    ("X-XSS-Protection", &[]),
    ("Strict-Transport-Security", &[]),
];

/// The file as it is written. An empty section is the same as none.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WebFile {
    tls_server_config: Option<Spanned<tls::TlsFile>>,
    http_server_config: Option<HttpFile>,
    basic_auth_users: Option<Entries<String>>,
    rate_limit: Option<Spanned<RateFile>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpFile {
    /// Checked and not used: the server has HTTP/1.1 only.
    #[serde(rename = "http2")]
    _http2: Option<Switch>,
    headers: Option<Entries<Option<String>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RateFile {
    interval: Option<Spanned<String>>,
    burst: Option<Spanned<String>>,
}

/// A switch, by any of the words that the format's first implementation accepts.
#[derive(PartialEq)]
struct Switch(bool);

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Ok(Self(true)),
            "false" | "no" | "off" => Ok(Self(false)),
            _ => Err(D::Error::custom("a switch takes true or false")),
        }
    }
}

impl WebConfig {
    /// Parses the text of the file at `path`; paths in it are relative to that file.
    ///
    /// # Errors
    /// The first error, with its line and what is allowed there.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let refused = tls::REFUSED.map(|key| (key, tls::REFUSAL));
        let file: WebFile = super::yaml::parse(path, text, &refused)?.unwrap_or_default();
        let headers = file.http_server_config.and_then(|http| http.headers);
        Ok(Self {
            tls: file.tls_server_config.map(|section| tls::read(path, section)).transpose()?.flatten(),
            headers: headers.map(|headers| self::headers(path, headers)).transpose()?.unwrap_or_default(),
            users: file
                .basic_auth_users
                .map(|users| self::users(path, users))
                .transpose()?
                .unwrap_or_default(),
            rate: file.rate_limit.map(|section| rate(path, &section)).transpose()?.flatten(),
        })
    }
}

fn headers(
    path: &Path,
    entries: Entries<Option<String>>,
) -> Result<Vec<(&'static str, String)>, ConfigError> {
    let mut headers = vec![];
    for (key, value) in entries.0 {
        let Some((name, words)) = HEADERS.iter().find(|(name, _)| *name == key.value) else {
            let names: Vec<_> = HEADERS.iter().map(|(name, _)| *name).collect();
            let what = format!("{:?} is unknown in headers; allowed: {}", key.value, names.join(", "));
            return Err(error_at(path, line_of(&key), what));
        };
        let line = line_of(&value);
        let Some(value) = value.value else { continue };
        if !words.is_empty() && !words.contains(&value.as_str()) {
            let what = format!("{name}: {value:?} is unknown; allowed: {}", words.join(", "));
            return Err(error_at(path, line, what));
        }
        if !value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
            let what = format!("{name}: a header must be one line of printable ASCII characters");
            return Err(error_at(path, line, what));
        }
        if !value.is_empty() {
            headers.push((*name, value));
        }
    }
    Ok(headers)
}

fn users(path: &Path, entries: Entries<String>) -> Result<BTreeMap<String, PasswordHash>, ConfigError> {
    let mut users = BTreeMap::new();
    for (key, value) in entries.0 {
        let name = &key.value;
        if name.is_empty() || name.contains(':') || name.chars().any(char::is_control) {
            let what = "a user name must be text without a colon, and not empty";
            return Err(error_at(path, line_of(&key), what));
        }
        // the text is not repeated: it may be the password itself
        let hash = PasswordHash::parse(&value.value).map_err(|what| {
            let what = format!("the password hash of {name:?} is not valid: {what}");
            error_at(path, line_of(&value), what)
        })?;
        users.insert(key.value, hash);
    }
    Ok(users)
}

fn rate(path: &Path, section: &Spanned<RateFile>) -> Result<Option<Rate>, ConfigError> {
    let RateFile { interval, burst } = &section.value;
    let burst = burst.as_ref().map(|text| {
        let what = "burst is the number of requests allowed at once: a whole number, at least 1";
        let number = text.value.parse().ok().filter(|number| *number > 0);
        number.ok_or_else(|| error_at(path, line_of(text), what))
    });
    let interval = interval.as_ref().map(|text| {
        let what =
            "interval is the time after which one more request is allowed, such as 200ms or 1s; 0: no limit";
        let parsed = parse_duration(&text.value).or((text.value == "0").then_some(Duration::ZERO));
        parsed.ok_or_else(|| error_at(path, line_of(text), what))
    });
    match (interval.transpose()?.filter(|interval| !interval.is_zero()), burst.transpose()?) {
        (Some(interval), Some(burst)) => Ok(Some(Rate { interval, burst })),
        (Some(_), None) => Err(error_at(path, line_of(section), "rate_limit needs burst too, at least 1")),
        (None, _) => Ok(None),
    }
}

#[cfg(test)]
mod tests;
