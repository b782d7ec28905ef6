//! The data of `why --json`: docs/why-json.md lists its kinds as their types have them, and documents have no other fields.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use memledger::diagnose::{Cause, explain};
use memledger::export::words::WhyDocument;
use serde_json::Value;

use super::{NOW, cases};
use crate::support::golden;

const DOCUMENT: &str = "docs/why-json.md";
/// The tables: title, column of the kind, and the enum, or the tag of several enums.
const TABLES: [(&str, &str, Option<&str>); 5] = [
    ("Causes", "cause", Some("Cause")),
    ("Incidents", "type", Some("Incident")),
    ("Ends", "why", Some("ExitWhy")),
    ("Facts", "finding", None),
    ("Remedies", "remedy", None),
];

/// A field of a type, or a variant of an enum.
#[derive(Clone)]
struct Part {
    name: String,
    kind: String,
    meaning: String,
    is_flattened: bool,
    fields: Vec<Part>,
}

/// A struct or an enum.
#[derive(Clone, Default)]
struct Type {
    is_enum: bool,
    /// Its variants are written as documented here.
    is_snake: bool,
    /// The field that has the variant.
    tag: Option<String>,
    parts: Vec<Part>,
}

impl Type {
    /// Returns the names of the variants of an enum; `None` for a struct.
    fn variants(&self) -> Option<String> {
        let names: Vec<String> = self.parts.iter().map(|it| format!("`{}`", snake(&it.name))).collect();
        (self.is_enum && self.is_snake).then(|| names.join(", "))
    }
}

fn snake(name: &str) -> String {
    let mut out = String::new();
    for (at, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && at > 0 {
            out.push('_');
        }
        out.extend(letter.to_lowercase());
    }
    out
}

/// Returns the types of a file, by rustfmt's layout.
fn types(text: &str) -> BTreeMap<String, Type> {
    let mut found = BTreeMap::new();
    let mut open: Option<(String, Type)> = None;
    let (mut tag, mut meaning, mut attributes) = (None, String::new(), String::new());
    for line in text.split("#[cfg(test)]\nmod tests").next().unwrap().lines() {
        let (indent, line) = (line.len() - line.trim_start().len(), line.trim());
        if let Some(comment) = line.strip_prefix("/// ") {
            meaning = [meaning.as_str(), comment].join(" ").trim().to_owned();
            continue;
        }
        if line.starts_with("#[") {
            attributes.push_str(line);
            let given = line.split_once("tag = \"").and_then(|(_, rest)| rest.split('"').next());
            tag = given.map(str::to_owned).or(tag);
            continue;
        }
        let declared = ["pub enum ", "pub struct "].iter().find_map(|kind| line.strip_prefix(kind));
        match (&mut open, declared) {
            (None, Some(declared)) if indent == 0 => {
                let name = declared.split([' ', '<', '(', ';']).next().unwrap().to_owned();
                let is_enum = line.starts_with("pub enum");
                let is_snake = attributes.contains(r#"rename_all = "snake_case""#);
                let declared = Type { is_enum, is_snake, tag: tag.take(), parts: vec![] };
                open = line.ends_with('{').then_some((name, declared));
            }
            (Some(_), _) if indent == 0 && line == "}" => found.extend(open.take()),
            (Some((_, current)), _) if line != "}," && !line.is_empty() => {
                let (head, rest) = line.split_once(": ").unwrap_or((line, ""));
                let head = head.trim_start_matches("pub ").trim_end_matches([',', '{', ' ']);
                let (name, inner) = head.split_once('(').unwrap_or((head, ""));
                let kind = if inner.is_empty() { rest } else { inner.trim_end_matches(')') };
                let part = Part {
                    name: name.to_owned(),
                    kind: bare(kind),
                    meaning: meaning.clone(),
                    is_flattened: attributes.contains("flatten"),
                    fields: vec![],
                };
                match current.parts.last_mut() {
                    _ if attributes.contains("serde(skip)") => {}
                    Some(variant) if indent > 4 => variant.fields.push(part),
                    _ => current.parts.push(part),
                }
            }
            _ => {}
        }
        (meaning, attributes) = (String::new(), String::new());
        tag = if line.is_empty() { None } else { tag };
    }
    found
}

/// Returns the type within `Option`, `Vec` and `Box`.
fn bare(kind: &str) -> String {
    let name = kind.trim_end_matches(',').trim_end_matches('>');
    name.rsplit('<').next().unwrap().rsplit("::").next().unwrap().to_owned()
}

/// Returns the fields of a variant, or of the type in it.
fn fields_of(variant: &Part, all: &BTreeMap<String, Type>) -> Vec<(String, String)> {
    let inner = all.get(&variant.kind).filter(|_| !variant.kind.is_empty());
    fields(inner.map_or(&variant.fields, |inner| &inner.parts), all)
}

/// Returns the names of fields with those of flattened types, and the values of those that have some.
fn fields(parts: &[Part], all: &BTreeMap<String, Type>) -> Vec<(String, String)> {
    let mut out: Vec<(String, String)> = vec![];
    for part in parts {
        let known = all.get(&part.kind);
        let values = known.and_then(Type::variants).map_or_else(String::new, |values| format!(" ({values})"));
        match known {
            Some(known) if part.is_flattened && known.is_enum => {
                let tag = known.tag.as_ref().expect("a flattened enum has a tag");
                out.push((
                    tag.clone(),
                    if tag == "why" { " (see [ends](#ends))".to_owned() } else { values },
                ));
                out.extend(known.parts.iter().flat_map(|variant| fields_of(variant, all)));
            }
            Some(known) if part.is_flattened => out.extend(fields(&known.parts, all)),
            Some(Type { is_enum: true, tag: Some(tag), .. }) => {
                out.push((part.name.clone(), format!(" with `{tag}`{values}")));
            }
            _ => out.push((part.name.clone(), values)),
        }
    }
    out
}

/// Panics if a field and a flattened one, or two flattened ones, have the same name: JSON would have it twice.
fn check_names(kind: &str, parts: &[Part], all: &BTreeMap<String, Type>) {
    let mut seen = BTreeSet::new();
    for part in parts {
        let names: BTreeSet<String> =
            fields(std::slice::from_ref(part), all).into_iter().map(|(name, _)| name).collect();
        for name in names {
            assert!(seen.insert(name.clone()), "{kind} has two fields {name}");
        }
    }
}

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        match entry.path() {
            path if path.is_dir() => sources(&path, out),
            path if path.extension().is_some_and(|extension| extension == "rs") => out.push(path),
            _ => {}
        }
    }
}

fn all_types() -> BTreeMap<String, Type> {
    let mut files = vec![];
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    files.iter().flat_map(|file| types(&std::fs::read_to_string(file).unwrap())).collect()
}

/// Returns the variants of a table.
fn kinds(all: &BTreeMap<String, Type>, column: &str, of: Option<&str>) -> Vec<Part> {
    match of {
        Some(name) => all[name].parts.clone(),
        None => {
            let is_its = |it: &&Type| it.tag.as_deref() == Some(column);
            let mut kinds: Vec<Part> = all.values().filter(is_its).flat_map(|it| it.parts.clone()).collect();
            kinds.sort_by_key(|kind| snake(&kind.name));
            kinds
        }
    }
}

#[test]
fn documented_kinds_are_those_of_the_program() {
    let all = all_types();
    let mut tables = String::new();
    for (title, column, of) in TABLES {
        let kinds = kinds(&all, column, of);
        let names: BTreeSet<String> = kinds.iter().map(|kind| snake(&kind.name)).collect();
        assert_eq!(names.len(), kinds.len(), "two kinds of {column} have one name");
        assert!(kinds.len() > 10, "only {} kinds of {column}: the check does not work", kinds.len());
        let has_fields = column != "cause";
        let columns =
            if has_fields { " meaning | fields |\n| --- | --- | --- |" } else { " meaning |\n| --- | --- |" };
        tables.push_str(&format!("\n## {title}\n\n| `{column}` |{columns}\n"));
        for kind in &kinds {
            check_names(&kind.name, &kind.fields, &all);
            all.get(&kind.kind).into_iter().for_each(|inner| check_names(&kind.name, &inner.parts, &all));
            let mut seen = BTreeSet::new();
            let mut fields = fields_of(kind, &all);
            fields.retain(|(name, _)| seen.insert(name.clone())); // of several variants
            let fields = fields.into_iter().map(|(name, values)| format!("`{name}`{values}"));
            let fields = fields.collect::<Vec<_>>().join(", ");
            let fields = if has_fields { format!(" {fields} |") } else { String::new() };
            tables.push_str(&format!("| `{}` | {} |{fields}\n", snake(&kind.name), kind.meaning));
        }
    }
    assert_eq!(kinds(&all, "cause", Some("Cause")).len(), Cause::ALL.len());
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCUMENT)).unwrap();
    let (begin, _) = text.split_once("\n## Causes\n").unwrap_or((&text, ""));
    golden(DOCUMENT, &format!("{}\n{tables}", begin.trim_end()));
}

#[test]
fn documents_have_the_documented_fields() {
    let all = all_types();
    let rows: BTreeMap<&str, BTreeMap<String, BTreeSet<String>>> = TABLES
        .iter()
        .map(|(_, column, of)| {
            let row = |kind: &Part| {
                let names = fields_of(kind, &all).into_iter().map(|(name, _)| name);
                (snake(&kind.name), names.collect::<BTreeSet<String>>())
            };
            (*column, kinds(&all, column, *of).iter().map(row).collect())
        })
        .collect();
    let check = |case: &str, column: &str, value: &Value| {
        let kind = value[column].as_str().unwrap_or_else(|| panic!("{case}: no {column} in {value}"));
        let row =
            rows[column].get(kind).unwrap_or_else(|| panic!("{case}: {column} {kind} is not documented"));
        for (key, value) in value.as_object().unwrap() {
            let is_known = row.contains(key) || [column, "text"].contains(&key.as_str());
            assert!(is_known && !value.is_null(), "{case}: {column} {kind} has {key}: {value}");
        }
        kind.to_owned()
    };
    let mut seen = BTreeSet::new();
    for case in cases::all() {
        let diagnosis = explain(&case.events, NOW).expect("a diagnosis");
        let document: Value = serde_json::from_str(&WhyDocument::of(&diagnosis).to_json().unwrap()).unwrap();
        let incident = &document["incident"];
        seen.insert(check(case.name, "type", incident));
        if let Some(why) = incident["why"].as_str() {
            let of_exit = ["type", "at", "exit_code", "duration_seconds"];
            let mut own = incident.as_object().unwrap().clone();
            own.retain(|key, _| !of_exit.contains(&key.as_str()));
            seen.insert(check(&format!("{}: {why}", case.name), "why", &own.into()));
        }
        for (list, column) in [("findings", "finding"), ("remedies", "remedy")] {
            for item in document[list].as_array().expect("a list") {
                assert!(item["text"].as_str().is_some_and(|text| text.contains(' ')), "{item}");
                seen.insert(check(case.name, column, item));
            }
        }
    }
    assert!(seen.len() > 40, "only {} kinds were seen: {seen:?}", seen.len());
}
