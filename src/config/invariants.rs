//! Invariants of the parsers of settings, for any text. The property tests below and the fuzz targets (`fuzz/`) call the
//! same functions; a violated invariant panics.

use std::path::Path;

use super::file;
use super::since::{self, EXPECTED, EXPECTED_LOCAL, since};
use super::value_parsers;
use super::web::WebConfig;
use super::{ConfigError, Filter, SETTINGS, declare, otlp};

/// Counts line ends; in YAML a carriage return alone is one too.
fn breaks(text: &str) -> usize {
    text.matches(['\n', '\r']).count()
}

/// An error in a file names the file and an existing line.
fn assert_names_line(error: &ConfigError, text: &str) {
    let ConfigError::InFile { line, .. } = error else { panic!("{error:?} has no line") };
    assert!((0..=breaks(text) + 2).contains(line), "{error} of {text:?}");
    assert!(error.to_string().starts_with(&format!("/etc/m.yml:{line}: ")), "{error}");
}

/// `--web.config.file`.
pub fn web_config(text: &str) {
    match WebConfig::parse(Path::new("/etc/m.yml"), text) {
        Err(error) => assert_names_line(&error, text),
        Ok(config) => {
            assert!(config.users.keys().all(|name| !name.is_empty() && !name.contains(':')));
            assert!(
                config
                    .users
                    .values()
                    .all(|hash| (4..=16).contains(&hash.cost()) && text.contains(hash.as_str()))
            );
            let printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
            assert!(
                config.headers.iter().all(|(_, value)| !value.is_empty() && value.bytes().all(printable))
            );
            assert!(config.rate.is_none_or(|rate| rate.burst > 0 && !rate.interval.is_zero()));
        }
    }
}

/// `--config.file`.
pub fn settings_file(text: &str) {
    let (found, errors) = file::read_text(Path::new("/etc/m.yml"), text);
    errors.iter().for_each(|error| assert_names_line(error, text));
    for found in found {
        assert!((1..=breaks(text) + 1).contains(&found.line), "{found:?}");
        assert!(SETTINGS.iter().any(|setting| setting.key == found.key), "{found:?}");
    }
}

/// A value of a flag, a variable, or a query of the API.
pub fn value(text: &str) {
    match since(text, 1e9) {
        Ok(unix) => assert!(unix.is_finite(), "{unix}"),
        Err(error) => assert!(error.contains(EXPECTED)),
    }
    let now = jiff::Timestamp::UNIX_EPOCH.to_zoned(jiff::tz::TimeZone::fixed(jiff::tz::offset(-5)));
    match since::local(text, &now) {
        Ok(unix) => assert!(unix.is_finite(), "{unix}"),
        Err(error) => assert!(error.contains(EXPECTED_LOCAL)),
    }
    if let Ok(bytes) = value_parsers::size(text, 4096) {
        assert!((4096..=i64::MAX as u64).contains(&bytes));
    }
    if let Ok(path) = value_parsers::url_path(text) {
        assert!(path.starts_with('/') && !path.contains(char::is_whitespace));
    }
    if let Ok((key, value)) = value_parsers::label(text) {
        assert_eq!(value.map_or(key.clone(), |value| format!("{key}={value}")), text);
    }
    if let Ok((_, label)) = value_parsers::label_key("label", text) {
        assert!(label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'), "{label}");
    }
    let _ = (declare::parse_duration(text), value_parsers::variable_name(text), value_parsers::regex(text));
    otlp::invariants(text);
}

/// The environment of a container, one variable per line.
pub fn environment(text: &str) {
    let filter = Filter { settings: vec!["BATCH_SIZE".into(), "accum".into()], ..Filter::default() };
    let found = filter.settings_of(text.lines());
    assert!(
        found.iter().all(|(name, value)| ["batch_size", "accum"].contains(&&**name) && !value.is_empty())
    );
    assert!(found.iter().all(|(name, value)| text.to_ascii_lowercase().contains(&format!("{name}="))
        && value.chars().count() <= 256));
    assert!(found.len() <= 2, "{found:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(text: &str) {
        for invariant in [web_config, settings_file, value, environment] {
            invariant(text);
        }
    }

    /// Pieces of files and values.
    fn pieces() -> impl Strategy<Value = String> {
        let known = vec![
            "tls_server_config:\n",
            "  cert_file: c\n",
            "  key_file: k\n",
            "  min_version: TLS13\n",
            "basic_auth_users:\n",
            "  ann: $2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG\n",
            "rate_limit: {interval: 1s, burst: 2}\n",
            "http_server_config:\n",
            "  http2: false\n",
            "  headers: {X-Frame-Options: deny}\n",
            "container:\n",
            "  label: [a, b=c]\n",
            "BATCH_SIZE=32\n",
            "ACCUM=4\n",
            "accum=4\n",
            "%41",
            "%f",
            "%ff",
            "90m",
            "-1h",
            "2026-01-31T12:00:00Z",
            "1e300",
            "nan",
            "4 GiB",
            "k=v,",
            "http://h:4318/x",
            "[::1]:4317",
            "- ",
            "? ",
            "&a ",
            "*a ",
            "!!int ",
            "| \n",
            "'",
            "\"",
            "#",
            "---\n",
            "\t",
            "é",
        ];
        let piece = prop_oneof![4 => proptest::sample::select(known).prop_map(str::to_owned), 1 => ".{0,4}"];
        proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn invariants_hold_for_any_text(text: String) {
            all(&text);
        }

        #[test]
        fn invariants_hold_for_pieces_of_files_and_values(text in pieces()) {
            all(&text);
        }

        #[test]
        fn parses_back_a_written_web_configuration(
            cert in "[a-z/.]{1,20}", name in "[^:\\p{C}]{1,12}", milliseconds in 1_u64..100_000, burst in 1_u32.., http2: bool, policy in "[!-~]([ -~]{0,30}[!-~])?",
        ) {
            let hash = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG";
            let quoted = |text: &str| format!("'{}'", text.replace('\'', "''"));
            let text = format!(
                "tls_server_config: {{cert_file: '/{cert}', key_file: /k}}\nbasic_auth_users:\n  {}: {hash}\n\
                 rate_limit: {{interval: {milliseconds}ms, burst: {burst}}}\n\
                 http_server_config:\n  http2: {http2}\n  headers:\n    Content-Security-Policy: {}\n",
                quoted(&name), quoted(&policy),
            );
            let config = WebConfig::parse(Path::new("/etc/m.yml"), &text).map_err(|error| TestCaseError::fail(error.to_string()))?;
            prop_assert_eq!(config.users.keys().collect::<Vec<_>>(), [&name]);
            prop_assert_eq!(config.rate.map(|rate| (rate.interval.as_millis(), rate.burst)), Some((milliseconds.into(), burst)));
            prop_assert_eq!(config.headers, vec![("Content-Security-Policy", policy)]);
            prop_assert!(config.tls.is_some());
        }

        #[test]
        fn subtracts_any_span_from_now(hours in 0_u32..100_000, minutes in 0_u32..60) {
            let ago = f64::from(hours) * 3600.0 + f64::from(minutes) * 60.0;
            prop_assert_eq!(since(&format!("{hours}h {minutes}m"), 1e9), Ok(1e9 - ago));
            prop_assert_eq!(since(&format!("{hours}h%20{minutes}m"), 1e9).ok(), None);
        }

        #[test]
        fn extracts_allowed_variables_only(secret in "[A-Z_]{3,12}", value in "[a-z0-9=]{1,9}") {
            let lines = [format!("{secret}={value}"), format!("BATCH_SIZE={value}")];
            let filter = Filter { settings: vec!["BATCH_SIZE".into()], ..Filter::default() };
            let found = filter.settings_of(lines.iter().map(String::as_str));
            prop_assert_eq!(found, [("batch_size".into(), value.into())]);
        }
    }

    #[test]
    fn rejects_deep_nesting_without_stack_overflow() {
        for open in ["[", "{a: ", "- ", "? ", "a:\n- "] {
            let text = open.repeat(100_000);
            web_config(&text);
            settings_file(&text);
        }
    }
}
