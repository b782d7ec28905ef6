//! The settings file: YAML with the keys of the settings, with dots or as nested mappings.

use std::path::Path;

use serde_saphyr::Spanned;

use super::declare::Setting;
use super::suggest::{keys_and_groups, meant, question};
use super::yaml::{Entries, MISSING_COLON, Node, error_at, line_of, parse, plain_text};
use super::{ConfigError, SETTINGS, setting};

/// A value from the file, with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileValue {
    /// The key of the setting.
    pub key: &'static str,
    /// The value as text.
    pub value: String,
    /// The line, counted from 1.
    pub line: usize,
}

/// Reads a settings file: its values, and all errors in it, each with its line.
pub fn read(path: &Path) -> (Vec<FileValue>, Vec<ConfigError>) {
    match std::fs::read_to_string(path) {
        Ok(text) => read_text(path, &text),
        Err(source) => (
            vec![],
            vec![ConfigError::Unreadable { what: "the settings file", path: path.to_path_buf(), source }],
        ),
    }
}

pub(super) fn read_text(path: &Path, text: &str) -> (Vec<FileValue>, Vec<ConfigError>) {
    let mut reader = FileReader { path, text, found: vec![], errors: vec![] };
    match parse::<Spanned<Node>>(path, text, &[]) {
        Ok(Some(document)) => match &document.value {
            Node::Map(entries) => reader.mapping("", entries),
            Node::Null => {}
            other => reader.not_a_mapping("", "the file", &document, other),
        },
        Ok(None) => {}
        Err(error) => reader.errors.push(error),
    }
    (reader.found, reader.errors)
}

struct FileReader<'a> {
    path: &'a Path,
    text: &'a str,
    found: Vec<FileValue>,
    errors: Vec<ConfigError>,
}

impl FileReader<'_> {
    fn reject<T>(&mut self, at: &Spanned<T>, what: String) {
        self.errors.push(error_at(self.path, line_of(at), what));
    }

    fn mapping(&mut self, prefix: &str, entries: &Entries<Node>) {
        for (key, value) in &entries.0 {
            let full = if prefix.is_empty() { key.value.clone() } else { format!("{prefix}.{}", key.value) };
            if let Some(setting) = setting(&full) {
                self.value(setting, key, value);
            } else if !SETTINGS.iter().any(|setting| setting.key.starts_with(&format!("{full}."))) {
                self.reject(
                    key,
                    format!("{full:?} is not a known setting{}", instead(prefix, &full, &key.value)),
                );
            } else if let Node::Map(entries) = &value.value {
                self.mapping(&full, entries);
            } else {
                self.not_a_mapping(&full, &format!("{full:?}"), value, &value.value);
            }
        }
    }

    /// Rejects a value in the place of settings; in most cases a colon is missing.
    fn not_a_mapping<T>(&mut self, prefix: &str, what: &str, at: &Spanned<T>, value: &Node) {
        let text = if let Node::Text(text) = value { text.as_str() } else { "" };
        let (word, _) = text.split_once([' ', '=', ':']).unwrap_or((text, ""));
        let word = word.trim();
        let full = if prefix.is_empty() { word.to_owned() } else { format!("{prefix}.{word}") };
        if setting(&full).is_some() {
            return self.reject(at, MISSING_COLON.to_owned());
        }
        let instead = if prefix.is_empty() {
            ALL_SETTINGS.to_owned()
        } else {
            format!("; allowed: {}", allowed(prefix))
        };
        self.reject(at, format!("{what} must consist of settings, KEY: VALUE{instead}"));
    }

    fn value(&mut self, setting: &'static Setting, key: &Spanned<String>, value: &Spanned<Node>) {
        if self.found.iter().any(|found| found.key == setting.key) {
            return self.reject(key, format!("{:?} is set twice", setting.key));
        }
        let (values, is_list) = match &value.value {
            Node::List(list) if setting.repeats => (list.as_slice(), true),
            _ => (std::slice::from_ref(value), false),
        };
        if values.is_empty() {
            // an empty list is a value, and the same as the empty text: not the default
            self.found.push(FileValue { key: setting.key, value: String::new(), line: line_of(value) });
        }
        for value in values {
            match plain_text(self.text, value) {
                Some(text) => {
                    // a single text means the same as in a flag; in a list a comma is part of the value
                    let texts = if is_list { vec![text.as_str()] } else { setting.split(&text) };
                    let (key, line) = (setting.key, line_of(value));
                    let found = texts.into_iter().map(|text| FileValue { key, value: text.to_owned(), line });
                    self.found.extend(found);
                }
                None if matches!(value.value, Node::Null) => {
                    let what = format!(
                        "{:?} has no value; write \"\" for empty, or remove it for the default",
                        setting.key
                    );
                    self.reject(value, what);
                }
                None => self.reject(value, format!("{:?} takes {}", setting.key, setting.takes)),
            }
        }
    }
}

/// Where all settings are listed.
const ALL_SETTINGS: &str = "; `memledger config show` lists all settings";

/// Returns what may be meant by an unknown key, as the end of its error: settings, else all settings of its group.
fn instead(prefix: &str, full: &str, key: &str) -> String {
    let known = keys_and_groups();
    let likely = [full, key].into_iter().map(|name| meant(&known, name)).find(|likely| !likely.is_empty());
    match likely {
        Some(likely) => question(&likely),
        None if prefix.is_empty() => ALL_SETTINGS.to_owned(),
        None => format!("; allowed: {}", allowed(prefix)),
    }
}

/// Lists the settings below a prefix.
fn allowed(prefix: &str) -> String {
    let keys = SETTINGS.iter().filter_map(|setting| setting.key.strip_prefix(prefix)?.strip_prefix('.'));
    keys.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(&'static str, String)>, String> {
        let (found, errors) = read_text(Path::new("memledger.yaml"), text);
        if errors.is_empty() {
            return Ok(found.into_iter().map(|found| (found.key, found.value)).collect());
        }
        Err(errors.iter().map(|error| format!("{error}\n")).collect())
    }

    #[test]
    fn dots_and_nesting_are_equivalent() {
        let flat = "web.max-requests: 5\ncontainer.label: [a, b=c]\nweb.enable-api: true\n";
        let nested =
            "web:\n  max-requests: 5\n  enable-api: true\ncontainer:\n  label:\n    - a\n    - b=c\n";
        let mut flat = read(flat).unwrap();
        let mut nested = read(nested).unwrap();
        flat.sort();
        nested.sort();
        assert_eq!(flat, nested);
        assert_eq!(read("").unwrap(), []);
        assert_eq!(read("# nothing\n").unwrap(), []);
    }

    #[test]
    fn commas_separate_values_of_a_single_text_only() {
        for (text, values) in [
            ("otlp.headers: \"a=b,c=d\"\n", &["a=b", "c=d"][..]),
            ("otlp.headers: [\"a=b,c=d\", e=f]\n", &["a=b,c=d", "e=f"]),
            ("otlp: {headers: a=b}\n", &["a=b"]),
            ("container.label: team=ml,gpu\n", &["team=ml", "gpu"]),
            ("docker.socket: /run/a.sock,/run/b.sock\n", &["/run/a.sock", "/run/b.sock"]),
            ("docker.socket: [/run/a.sock, /run/b.sock]\n", &["/run/a.sock", "/run/b.sock"]),
            ("docker.socket: \"\"\n", &[""]),
            ("container.include: a{1,2}\n", &["a{1,2}"]),
        ] {
            let found: Vec<_> = read(text).unwrap().into_iter().map(|(_, value)| value).collect();
            assert_eq!(found, values, "{text}");
        }
    }

    #[test]
    fn texts_stay_as_they_are_written() {
        let text =
            "cri.pod-labels: [007, 1.50, 0x1F, no, 1_000, '08', &a true, *a]\ncontainer.exclude: 007\n";
        let values: Vec<_> = read(text).unwrap().into_iter().map(|(_, value)| value).collect();
        assert_eq!(values, ["007", "1.50", "0x1F", "no", "1_000", "08", "true", "true", "007"]);
    }

    #[test]
    fn all_errors_have_line_and_allowed_keys() {
        let error = read("web:\n  max-requests: 5\n  lisen-address: x\n  idle-timeout: {a: b}\nlog: 1\n")
            .unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        assert_eq!(lines.len(), 3, "{error}");
        assert_eq!(
            lines[0],
            "memledger.yaml:3: \"web.lisen-address\" is not a known setting; did you mean web.listen-address?"
        );
        assert!(lines[1].starts_with("memledger.yaml:4: \"web.idle-timeout\" takes a duration"), "{error}");
        assert!(lines[2].starts_with("memledger.yaml:5: \"log\" must consist of settings"), "{error}");
        for (text, line, says) in [
            ("web.max-requests: [1, 2]\n", 1, "takes a whole number"),
            ("web.max-requests: 1\nweb:\n  max-requests: 2\n", 3, "is set twice"),
            ("log.level: info\nlog.level: info\n", 2, "duplicate"),
            ("log.level: {a: b}\n", 1, "takes one of debug, info"),
            ("log.level:\n", 1, "write \"\" for empty"),
            ("log.level: [\n", 2, ""),
            ("log.level: info\n---\nlog.level: info\n", 3, "one document only"),
            ("- a\n", 1, "must consist of settings"),
        ] {
            let error = read(text).unwrap_err();
            let at: usize = error.split(':').nth(1).unwrap().parse().unwrap();
            assert!(at >= line.min(2) - 1 && at <= line + 1, "{text:?}: {error}");
            assert!(error.contains(says) && error.lines().count() == 1, "{text:?}: {error}");
        }
    }

    #[test]
    fn unknown_key_names_the_nearest_setting() {
        for (text, says) in [
            ("web.lisen-address: x\n", "did you mean web.listen-address?"),
            ("web_listen_address: x\n", "did you mean web.listen-address?"),
            ("listen-address: x\n", "did you mean web.listen-address?"),
            ("port: 9000\n", "did you mean web.listen-address?"),
            ("sample:\n  intervall: 1s\n", "did you mean sample.interval?"),
            ("sample:\n  listen-address: x\n", "did you mean web.listen-address?"),
            ("wbe:\n  listen-address: x\n", "did you mean web?"),
            ("log:\n  quux: x\n", "allowed: level, format"),
            ("quux: x\n", "`memledger config show` lists all settings"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.trim_end().ends_with(says) && error.len() < 200, "{text:?}: {error}");
        }
    }

    #[test]
    fn missing_colon_is_named_with_its_line() {
        for (text, line) in [
            ("web.max-requests 5\n", 1),
            ("web.max-requests:5\n", 1),
            ("web.max-requests = 5\n", 1),
            ("web.max-requests\n", 1),
            ("# a comment\nweb.max-requests 5\nlog.level: info\n", 2),
            ("log.level: info\nweb.max-requests 5\n", 2),
            ("log.level: info\nweb.max-requests 5\npss.interval: 15s\n", 2),
            ("log.level: info\nweb.max-requests:5\npss.interval: 15s\n", 2),
            ("log.level: info\nweb.max-requests=5\npss.interval: 15s\n", 2),
            ("web\n  max-requests: 5\n", 1),
            ("log.level: info\nweb\n  max-requests: 5\n", 2),
            ("web:\n  max-requests 5\n", 2),
            ("web:\n  max-requests:5\n", 2),
            ("web:\n  max-requests: 5\n  listen-address :9000\n", 3),
            ("web:\n  max-requests 5\n  listen-address: :9000\n", 2),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error, format!("memledger.yaml:{line}: {MISSING_COLON}\n"), "{text:?}");
        }
        // another error, and a secret on a line of its own
        for text in [
            "container.settings: [\n  A,\n  B\nlog.level: info\n",
            "otlp.headers:\n  hunter2\nlog.level: {\n",
        ] {
            let error = read(text).unwrap_err();
            assert!(!error.contains(MISSING_COLON) && !error.contains("hunter2"), "{text:?}: {error}");
        }
        let error = read("otlp.headers:\n  hunter2\nlog.level info\n").unwrap_err();
        assert!(error.contains(MISSING_COLON) && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn aliases_and_nesting_cannot_exhaust_memory_or_stack() {
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for level in 1..20 {
            let below = format!("*a{},", level - 1).repeat(9);
            bomb.push_str(&format!("a{level}: &a{level} [{below}]\n"));
        }
        assert!(read(&bomb).unwrap_err().contains("too complex"), "{}", read(&bomb).unwrap_err());
        for open in ["[", "{a: ", "- ", "? ", "a:\n- "] {
            read(&open.repeat(100_000)).unwrap_err();
        }
    }
}
