//! The settings file: YAML whose keys are those of the table, with dots or as nested mappings.

use std::path::Path;

use saphyr::{MarkedYaml, YamlData};

use super::ConfigError;
use super::table::{Kind, SETTINGS, Setting, setting};
use super::yaml::{Yaml, scalar};

/// A value from the file, with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which setting.
    pub key: &'static str,
    /// The value as text.
    pub value: String,
    /// Where it stands, counted from 1.
    pub line: usize,
}

/// Reads a settings file.
///
/// # Errors
/// No such file, no YAML, a key that is no setting, a value that is no scalar or list of scalars: each with its line.
pub fn read(path: &Path) -> Result<Vec<Found>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.to_path_buf(), source })?;
    parse(path, &text)
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Vec<Found>, ConfigError> {
    let yaml = Yaml { path };
    let mut reader = Reader { yaml, found: vec![] };
    if let Some(document) = yaml.document(text)? {
        reader.mapping("", &document)?;
    }
    Ok(reader.found)
}

struct Reader<'a> {
    yaml: Yaml<'a>,
    found: Vec<Found>,
}

impl Reader<'_> {
    fn mapping(&mut self, prefix: &str, node: &MarkedYaml<'_>) -> Result<(), ConfigError> {
        let YamlData::Mapping(entries) = &node.data else {
            let place = if prefix.is_empty() { "the file".to_owned() } else { format!("{prefix:?}") };
            return Err(self
                .yaml
                .wrong(node, format!("{place} holds settings, KEY: VALUE; allowed: {}", allowed(prefix))));
        };
        for (key, value) in entries {
            let Some(name) = scalar(key) else {
                return Err(self.yaml.wrong(key, "a key is plain text"));
            };
            let full = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
            match setting(&full) {
                Some(setting) => self.value(setting, key, value)?,
                None if SETTINGS.iter().any(|s| s.key.starts_with(&format!("{full}."))) => {
                    self.mapping(&full, value)?
                }
                None => {
                    return Err(self
                        .yaml
                        .wrong(key, format!("{full:?} is no setting; allowed: {}", allowed(prefix))));
                }
            }
        }
        Ok(())
    }

    fn value(
        &mut self,
        setting: &'static Setting,
        key: &MarkedYaml<'_>,
        value: &MarkedYaml<'_>,
    ) -> Result<(), ConfigError> {
        if self.found.iter().any(|found| found.key == setting.key) {
            return Err(self.yaml.wrong(key, format!("{:?} is set twice", setting.key)));
        }
        let single = std::slice::from_ref(value);
        let values = match &value.data {
            YamlData::Sequence(list) if setting.repeats => list.as_slice(),
            _ => single,
        };
        for value in values {
            let Some(text) = scalar(value) else {
                let wanted = setting.kind.describe();
                return Err(self.yaml.wrong(value, format!("{:?} takes {wanted}", setting.key)));
            };
            self.found.push(Found { key: setting.key, value: text, line: value.span.start.line() });
        }
        Ok(())
    }
}

/// What may stand below a prefix.
fn allowed(prefix: &str) -> String {
    let below = |setting: &&Setting| prefix.is_empty() || setting.key.starts_with(&format!("{prefix}."));
    let keys: Vec<_> = SETTINGS
        .iter()
        .filter(below)
        .map(|s| s.key.trim_start_matches(prefix).trim_start_matches('.'))
        .collect();
    keys.join(", ")
}

/// For the generated documentation: how a setting looks in the file.
pub fn example(setting: &Setting) -> String {
    let quote = |value: &str| match setting.kind {
        Kind::Count | Kind::Switch => value.to_owned(),
        _ => format!("{value:?}"),
    };
    let values: Vec<_> = setting.default.iter().map(|value| quote(value)).collect();
    if setting.repeats { format!("[{}]", values.join(", ")) } else { values.join("") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(&'static str, String)>, String> {
        let found = parse(Path::new("memledger.yaml"), text).map_err(|error| error.to_string())?;
        Ok(found.into_iter().map(|found| (found.key, found.value)).collect())
    }

    #[test]
    fn dots_and_nesting_are_the_same() {
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
    fn what_is_wrong_is_named_with_its_line_and_what_is_allowed() {
        let error = read("web:\n  max-requests: 5\n  lisen-address: x\n").unwrap_err();
        assert!(error.starts_with("memledger.yaml:3: \"web.lisen-address\" is no setting"), "{error}");
        assert!(error.contains("listen-address, telemetry-path"), "{error}");
        for (text, line) in [
            ("web:\n  max-requests: [1, 2]\n", 2),
            ("log: debug\n", 1),
            ("web.max-requests: 1\nweb:\n  max-requests: 2\n", 3),
            ("log.level: {a: b}\n", 1),
            ("a: [\n", 1),
            ("log.level: info\n---\nlog.level: info\n", 3),
        ] {
            let error = read(text).unwrap_err();
            let at: usize = error.split(':').nth(1).unwrap().parse().unwrap();
            assert!(at >= line && at <= line + 1, "{text:?}: {error}");
        }
    }
}
