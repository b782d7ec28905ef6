//! `--web.config.file`: TLS, passwords, headers and rate of the HTTP side, in the format that the exporters of the
//! Prometheus world share.
//!
//! Strict: an unknown key, half a key pair, a hash that is none is refused with file and line. Where this is stricter than
//! the format's own checker (`promtool check web-config`), a setting would otherwise protect less than it says: TLS settings
//! without a certificate, a version or cipher that is not offered, clients' certificates that nobody can verify.
//!
//! Pure: text in, settings out. The files that it names are read by `serve`.

mod password;
mod tls;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use saphyr::YamlData;

use super::ConfigError;
use super::yaml::{Entry, Yaml, scalar};
pub use password::PasswordHash;
pub use tls::{At, CipherSuite, ClientAuth, Group, Pem, TlsSettings, TlsVersion};

/// The file, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebConfig {
    /// TLS; `None`: plain HTTP.
    pub tls: Option<TlsSettings>,
    /// HTTP/2 is offered, if there is TLS.
    pub http2: bool,
    /// Headers of every answer.
    pub headers: Vec<(&'static str, String)>,
    /// Who may ask; empty: everybody.
    pub users: BTreeMap<String, PasswordHash>,
    /// How often may be asked.
    pub rate: Option<Rate>,
}

impl Default for WebConfig {
    fn default() -> Self {
        Self { tls: None, http2: true, headers: vec![], users: BTreeMap::new(), rate: None }
    }
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Time after which one more request may come.
    pub interval: Duration,
    /// Requests that may come at once.
    pub burst: u32,
}

/// Headers that may be set, and what each may hold; nothing: anything.
const HEADERS: &[(&str, &[&str])] = &[
    ("Content-Security-Policy", &[]),
    ("X-Frame-Options", &["deny", "sameorigin"]),
    ("X-Content-Type-Options", &["nosniff"]),
    ("X-XSS-Protection", &[]),
    ("Strict-Transport-Security", &[]),
];

/// Their names.
const HEADER_NAMES: &[&str] = &[HEADERS[0].0, HEADERS[1].0, HEADERS[2].0, HEADERS[3].0, HEADERS[4].0];

impl WebConfig {
    /// Reads the text of the file at `path`; other files that it names are relative to that.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line and what is allowed there.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let yaml = Yaml { path };
        let mut config = Self::default();
        let Some(document) = yaml.document(text)? else { return Ok(config) };
        const SECTIONS: &[&str] =
            &["tls_server_config", "http_server_config", "basic_auth_users", "rate_limit"];
        for entry in yaml.entries("the file", &document, SECTIONS)? {
            match entry.key {
                "tls_server_config" => config.tls = tls::read(yaml, &entry)?,
                "http_server_config" => http(yaml, &entry, &mut config)?,
                "basic_auth_users" => config.users = users(yaml, &entry)?,
                _ => config.rate = rate(yaml, &entry)?,
            }
        }
        Ok(config)
    }
}

fn http(yaml: Yaml<'_>, section: &Entry<'_>, config: &mut WebConfig) -> Result<(), ConfigError> {
    for entry in yaml.entries(section.key, section.value, &["http2", "headers"])? {
        match entry.key {
            "http2" => config.http2 = yaml.switch(&entry)?,
            _ => {
                for header in yaml.entries(entry.key, entry.value, HEADER_NAMES)? {
                    config.headers.extend(self::header(yaml, &header)?);
                }
            }
        }
    }
    Ok(())
}

fn header(yaml: Yaml<'_>, entry: &Entry<'_>) -> Result<Option<(&'static str, String)>, ConfigError> {
    let value = yaml.text(entry)?;
    let words = HEADERS.iter().find(|(name, _)| *name == entry.key).map_or(&[][..], |(_, words)| words);
    if !words.is_empty() && !words.contains(&value.as_str()) {
        let what = format!("{}: {value:?} is not known; allowed: {}", entry.key, words.join(", "));
        return Err(yaml.wrong(entry.value, what));
    }
    if !value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        let what = format!("{}: a header is one line of printable ASCII characters", entry.key);
        return Err(yaml.wrong(entry.value, what));
    }
    Ok((!value.is_empty()).then_some((entry.key, value)))
}

fn users(yaml: Yaml<'_>, section: &Entry<'_>) -> Result<BTreeMap<String, PasswordHash>, ConfigError> {
    let YamlData::Mapping(pairs) = &section.value.data else {
        return Err(yaml.wrong(section.value, "basic_auth_users holds NAME: HASH, a line for each user"));
    };
    let mut users = BTreeMap::new();
    for (key, value) in pairs {
        let name = scalar(key).unwrap_or_default();
        if name.is_empty() || name.contains(':') || name.chars().any(char::is_control) {
            return Err(yaml.wrong(key, "a user's name is text without a colon, and not empty"));
        }
        let hash = PasswordHash::parse(&scalar(value).unwrap_or_default());
        // the text is not repeated: it may be the password itself
        let hash =
            hash.map_err(|what| yaml.wrong(value, format!("the password of {name:?} is no hash: {what}")))?;
        users.insert(name, hash);
    }
    Ok(users)
}

fn rate(yaml: Yaml<'_>, section: &Entry<'_>) -> Result<Option<Rate>, ConfigError> {
    let (mut interval, mut burst) = (None, None);
    for entry in yaml.entries(section.key, section.value, &["interval", "burst"])? {
        let text = yaml.text(&entry)?;
        if entry.key == "burst" {
            let number = text.parse().ok().filter(|number| *number > 0);
            let what = "burst is how many requests may come at once: a whole number, at least 1";
            burst = Some(number.ok_or_else(|| yaml.wrong(entry.value, what))?);
        } else {
            let parsed = text.parse::<jiff::SignedDuration>().ok().and_then(|span| span.try_into().ok());
            let parsed = parsed.or((text == "0").then_some(Duration::ZERO));
            let what = "interval is the time after which one more request may come, such as 200ms or 1s; 0: no limit";
            interval = Some(parsed.ok_or_else(|| yaml.wrong(entry.value, what))?);
        }
    }
    match (interval.filter(|interval| !interval.is_zero()), burst) {
        (Some(interval), Some(burst)) => Ok(Some(Rate { interval, burst })),
        (Some(_), None) => Err(yaml.at(section.line, "rate_limit needs burst too, at least 1")),
        (None, _) => Ok(None),
    }
}

#[cfg(test)]
mod tests;
