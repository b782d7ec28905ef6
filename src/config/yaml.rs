//! Shared by both YAML files: one document, values with their lines, errors with a line.
//!
//! Texts stay as they are written: a user `007` is not `7`. A key that is set twice, nesting beyond [`MAX_DEPTH`] and aliases
//! that multiply are errors.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Error, Localizer, Location, MessageFormatter, Spanned, UserMessageFormatter};

use super::ConfigError;

/// Maximum nesting, more than any settings need.
const MAX_DEPTH: usize = 32;
/// Maximum number of values, aliases replaced by what they stand for.
const MAX_NODES: usize = 10_000;

/// Returns an error at a line of a file.
pub fn error_at(path: &Path, line: usize, what: impl Into<String>) -> ConfigError {
    ConfigError::InFile { path: path.to_path_buf(), line, what: what.into() }
}

/// Returns the line of a value, counted from 1.
pub fn line_of<T>(value: &Spanned<T>) -> usize {
    usize::try_from(value.referenced.line()).unwrap_or(usize::MAX)
}

/// Parses the only document of a text; `None` if it is empty. An unknown key that is in `refused` has the sentence there as its error.
///
/// # Errors
/// The first error, with its line.
pub fn parse<'t, T: Deserialize<'t>>(
    path: &Path,
    text: &'t str,
    refused: &[(&str, &str)],
) -> Result<Option<T>, ConfigError> {
    let budget = serde_saphyr::budget! { max_depth: MAX_DEPTH, max_nodes: MAX_NODES };
    let options = serde_saphyr::options! { budget: budget };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let line = error.location().map_or(1, |at| usize::try_from(at.line()).unwrap_or(usize::MAX));
        if let Some(line) = line_without_colon(text, line) {
            return error_at(path, line, MISSING_COLON);
        }
        error_at(path, line, error.without_snippet().render_with_formatter(&Messages { refused }))
    })
}

/// The error of a line without a colon. It does not repeat the line, which may have a secret.
pub const MISSING_COLON: &str = "expected KEY: VALUE; a colon with a space after it is missing in this line";

/// Returns the line, counted from 1, where an error comes from a missing colon or space: `KEY VALUE`, `KEY=VALUE`, `KEY:VALUE` or `KEY` at
/// the line of the error, or the one before it, where the parser noticed it only later. Not in a list or mapping in brackets.
fn line_without_colon(text: &str, error_line: usize) -> Option<usize> {
    let is_line = |(_, line): &(usize, &str)| !line.is_empty() && !line.starts_with('#');
    let lines = text.lines().map(str::trim).enumerate().filter(is_line);
    let until: Vec<_> = lines.take_while(|(index, _)| *index < error_line).collect();
    let count = |brackets: &str| {
        let in_line = |(_, line): &(usize, &str)| line.matches(|c| brackets.contains(c)).count();
        until.iter().map(in_line).sum::<usize>()
    };
    if count("[{") != count("]}") {
        return None;
    }
    let mut near = until.iter().rev().take(2).rev();
    near.find(|(_, line)| lacks_colon(line)).map(|(index, _)| index + 1)
}

/// Returns true if a line begins with a key that has no colon with a space after it.
fn lacks_colon(line: &str) -> bool {
    let is_of_key = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let key = &line[..line.find(|c| !is_of_key(c)).unwrap_or(line.len())];
    let rest = line[key.len()..].trim_start();
    let has_colon =
        rest.strip_prefix(':').is_some_and(|value| value.is_empty() || value.starts_with([' ', '\t']));
    let is_key = key.starts_with(|c: char| c.is_ascii_alphabetic());
    is_key && !has_colon && !rest.starts_with([',', ']', '}'])
}

/// The parser's messages in the words of the settings, without the place.
struct Messages<'r> {
    refused: &'r [(&'r str, &'r str)],
}

impl MessageFormatter for Messages<'_> {
    fn localizer(&self) -> &dyn Localizer {
        self
    }

    fn format_message<'a>(&self, error: &'a Error) -> Cow<'a, str> {
        match error {
            Error::SerdeUnknownField { field, expected, .. } => {
                match self.refused.iter().find(|(key, _)| key == field) {
                    Some((_, why)) => format!("`{field}` {why}").into(),
                    None => format!("unknown key `{field}`; allowed: {}", expected.join(", ")).into(),
                }
            }
            Error::SerdeUnknownVariant { variant, expected, .. } => {
                format!("unknown or not offered: `{variant}`; allowed: {}", expected.join(", ")).into()
            }
            Error::MultipleDocuments { .. } => "a settings file must have one document only".into(),
            Error::Unexpected { expected: "mapping start", .. } => {
                "expected KEY: VALUE, one line per key".into()
            }
            Error::Unexpected { expected: "sequence start", .. } => "expected a list: [A, B]".into(),
            other => UserMessageFormatter.format_message(other),
        }
    }
}

impl Localizer for Messages<'_> {
    fn attach_location<'a>(&self, message: Cow<'a, str>, _: Location) -> Cow<'a, str> {
        message
    }
}

/// The entries of a mapping in their order.
#[derive(Clone, Debug)]
pub struct Entries<V>(pub Vec<(Spanned<String>, Spanned<V>)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<V>(std::marker::PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
            type Value = Entries<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("KEY: VALUE, one line per key")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = vec![];
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor(std::marker::PhantomData))
    }
}

/// Any value.
#[derive(Clone, Debug)]
pub enum Node {
    /// A quoted text, or one that is neither a number nor a boolean.
    Text(String),
    /// A number or boolean; [`plain_text`] has its text.
    Plain,
    /// No value.
    Null,
    /// A list.
    List(Vec<Spanned<Node>>),
    /// A mapping.
    Map(Entries<Node>),
}

/// Returns the text of a scalar as it is written in the file.
pub fn plain_text(file: &str, node: &Spanned<Node>) -> Option<String> {
    match &node.value {
        Node::Text(text) => Some(text.clone()),
        Node::Plain => {
            let span = node.defined.span();
            let start = usize::try_from(span.byte_offset()?).ok()?;
            let end = start + usize::try_from(span.byte_len()?).ok()?;
            Some(file.get(start..end)?.trim().to_owned())
        }
        Node::Null | Node::List(_) | Node::Map(_) => None,
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(text.to_owned()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_i128<E>(self, _: i128) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_u128<E>(self, _: u128) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Plain)
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut nodes = vec![];
        while let Some(node) = list.next_element()? {
            nodes.push(node);
        }
        Ok(Node::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Node, A::Error> {
        Entries::deserialize(serde::de::value::MapAccessDeserializer::new(map)).map(Node::Map)
    }
}
