//! What both YAML files share: one document, values with their lines, and errors that say where.

use std::path::Path;

use saphyr::{LoadableYamlNode, MarkedYaml, Scalar, YamlData};
use saphyr_parser::{Event, Parser};

use super::ConfigError;

/// Deeper than any settings. Loading and dropping a document take the stack, which a deep one would overflow.
const DEEPEST: usize = 32;

/// A YAML file, by the path that its errors name.
#[derive(Clone, Copy, Debug)]
pub struct Yaml<'a> {
    /// The path.
    pub path: &'a Path,
}

/// A key that is allowed where it stands, with its value.
#[derive(Debug)]
pub struct Entry<'n> {
    /// The key.
    pub key: &'static str,
    /// Where it stands, counted from 1.
    pub line: usize,
    /// The value.
    pub value: &'n MarkedYaml<'n>,
}

impl Yaml<'_> {
    /// An error at a line.
    pub fn at(&self, line: usize, what: impl Into<String>) -> ConfigError {
        ConfigError::InFile { path: self.path.to_path_buf(), line, what: what.into() }
    }

    /// An error at a node.
    pub fn wrong(&self, node: &MarkedYaml<'_>, what: impl Into<String>) -> ConfigError {
        self.at(node.span.start.line(), what)
    }

    /// The one document of a text; `None` if it is empty.
    pub fn document<'t>(&self, text: &'t str) -> Result<Option<MarkedYaml<'t>>, ConfigError> {
        if let Some(line) = too_deep(text) {
            return Err(self.at(line, format!("settings are nested at most {DEEPEST} levels deep")));
        }
        let mut documents = MarkedYaml::load_from_str(text)
            .map_err(|error| self.at(error.marker().line(), format!("this is not YAML: {}", error.info())))?;
        if let Some(second) = documents.get(1) {
            return Err(self.wrong(second, "a settings file holds one document only"));
        }
        Ok(documents.pop().filter(|document| !is_null(document)))
    }

    /// The entries of a mapping, all of whose keys must be among `allowed`. Entries without a value are left out.
    pub fn entries<'n>(
        &self,
        place: &str,
        node: &'n MarkedYaml<'n>,
        allowed: &'static [&'static str],
    ) -> Result<Vec<Entry<'n>>, ConfigError> {
        let words = || allowed.join(", ");
        let YamlData::Mapping(pairs) = &node.data else {
            return Err(self.wrong(node, format!("{place} holds KEY: VALUE; allowed: {}", words())));
        };
        let mut entries = Vec::new();
        for (name, value) in pairs {
            let text = scalar(name).unwrap_or_default();
            let Some(key) = allowed.iter().find(|key| **key == text) else {
                let what = format!("{text:?} is not known in {place}; allowed: {}", words());
                return Err(self.wrong(name, what));
            };
            if !is_null(value) {
                entries.push(Entry { key, line: name.span.start.line(), value });
            }
        }
        Ok(entries)
    }

    /// The text of an entry.
    pub fn text(&self, entry: &Entry<'_>) -> Result<String, ConfigError> {
        scalar(entry.value)
            .ok_or_else(|| self.wrong(entry.value, format!("{:?} takes one value of text", entry.key)))
    }

    /// The list of an entry: each text with its line.
    pub fn list(&self, entry: &Entry<'_>) -> Result<Vec<(String, usize)>, ConfigError> {
        let wrong = |node| self.wrong(node, format!("{:?} takes a list of words: [A, B]", entry.key));
        let YamlData::Sequence(nodes) = &entry.value.data else { return Err(wrong(entry.value)) };
        let text = |node| Ok((scalar(node).ok_or_else(|| wrong(node))?, node.span.start.line()));
        nodes.iter().map(text).collect()
    }

    /// The switch of an entry, by any of the words that the format's first reader takes.
    pub fn switch(&self, entry: &Entry<'_>) -> Result<bool, ConfigError> {
        let text = match &entry.value.data {
            YamlData::Value(Scalar::Integer(_)) => String::new(), // 1 is no switch
            _ => self.text(entry)?.to_ascii_lowercase(),
        };
        match text.as_str() {
            "true" | "yes" | "on" => Ok(true),
            "false" | "no" | "off" => Ok(false),
            _ => Err(self.wrong(entry.value, format!("{:?} takes true or false", entry.key))),
        }
    }

    /// The meaning of a word.
    pub fn word<T: Copy>(
        &self,
        (text, line): (&str, usize),
        key: &str,
        words: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        let found = words.iter().find(|(word, _)| *word == text);
        found.map(|(_, meaning)| *meaning).ok_or_else(|| {
            let allowed: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            self.at(
                line,
                format!("{key}: {text:?} is not known or not offered; allowed: {}", allowed.join(", ")),
            )
        })
    }
}

/// The line on which a text gets nested too deep.
fn too_deep(text: &str) -> Option<usize> {
    let mut depth: usize = 0;
    // what is no YAML is told when it is loaded
    for (event, span) in Parser::new_from_str(text).map_while(Result::ok) {
        match event {
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            return Some(span.start.line());
        }
    }
    None
}

/// A scalar as it would stand on the command line.
pub fn scalar(node: &MarkedYaml<'_>) -> Option<String> {
    match &node.data {
        YamlData::Value(Scalar::String(text)) => Some(text.to_string()),
        YamlData::Value(Scalar::Integer(number)) => Some(number.to_string()),
        YamlData::Value(Scalar::Boolean(value)) => Some(value.to_string()),
        YamlData::Representation(text, ..) => Some(text.to_string()),
        _ => None,
    }
}

fn is_null(node: &MarkedYaml<'_>) -> bool {
    matches!(node.data, YamlData::Value(Scalar::Null))
}
