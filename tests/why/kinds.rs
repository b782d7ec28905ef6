//! The facts and remedies of `why --json`: docs/why-json.md lists them as their types in `src/diagnose` have them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::support::golden;

/// A field of a kind, or a variant of an enum.
struct Part {
    name: String,
    kind: String,
    meaning: String,
    is_flattened: bool,
    fields: Vec<Part>,
}

/// A struct or an enum of `src/diagnose`.
#[derive(Default)]
struct Type {
    /// `finding` or `remedy`, if its variants are kinds of these.
    tag: Option<&'static str>,
    parts: Vec<Part>,
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
    let (mut name, mut current, mut tag) = (None, Type::default(), None);
    let (mut meaning, mut is_skipped, mut is_flattened) = (String::new(), false, false);
    for line in text.split("#[cfg(test)]").next().unwrap().lines() {
        let (indent, line) = (line.len() - line.trim_start().len(), line.trim());
        if let Some(comment) = line.strip_prefix("/// ") {
            meaning = [meaning.as_str(), comment].join(" ").trim().to_owned();
            continue;
        }
        if line.starts_with("#[") {
            is_skipped |= line.contains("serde(skip)");
            is_flattened |= line.contains("flatten");
            tag = ["finding", "remedy"]
                .into_iter()
                .find(|tag| line.contains(&format!("tag = \"{tag}\"")))
                .or(tag);
            continue;
        }
        let declared = ["pub enum ", "pub struct "].iter().find_map(|kind| line.strip_prefix(kind));
        if let (0, Some(declared)) = (indent, declared) {
            name = Some(declared.split([' ', '<', '(']).next().unwrap().to_owned());
            current.tag = tag.take();
        } else if let (0, "}", Some(done)) = (indent, line, name.take_if(|_| indent == 0 && line == "}")) {
            found.insert(done, std::mem::take(&mut current));
        } else if name.is_some() && indent >= 4 && line != "}," {
            let (head, rest) = line.split_once(": ").unwrap_or((line, ""));
            let part = Part {
                name: head.trim_start_matches("pub ").trim_end_matches([',', '{', ' ']).to_owned(),
                kind: rest.trim_end_matches(',').to_owned(),
                meaning: meaning.clone(),
                is_flattened,
                fields: vec![],
            };
            match current.parts.last_mut() {
                _ if is_skipped => {}
                Some(variant) if indent > 4 => variant.fields.push(part),
                _ => current.parts.push(part),
            }
        }
        (meaning, is_skipped, is_flattened) = (String::new(), false, false);
        tag = if line.is_empty() { None } else { tag };
    }
    found
}

/// Returns the names of the fields of a kind, with those of flattened types, and the values of those with a few.
fn fields(parts: &[Part], all: &BTreeMap<String, Type>) -> Vec<String> {
    let mut out = vec![];
    for part in parts {
        let kind = part.kind.trim_start_matches("Option<").trim_end_matches('>');
        let known = all.get(kind);
        let has_values = known.is_some_and(|known| {
            known.tag.is_none() && known.parts.iter().all(|it| it.kind.is_empty() && it.fields.is_empty())
        });
        match known {
            Some(known) if part.is_flattened && known.parts.iter().any(|it| !it.fields.is_empty()) => {
                let names: BTreeSet<String> =
                    known.parts.iter().flat_map(|variant| fields(&variant.fields, all)).collect();
                out.extend(names);
            }
            Some(known) if part.is_flattened => out.extend(fields(&known.parts, all)),
            Some(known) if has_values => {
                let values: Vec<String> =
                    known.parts.iter().map(|it| format!("`{}`", snake(&it.name))).collect();
                out.push(format!("`{}` ({})", part.name, values.join(", ")));
            }
            _ => out.push(format!("`{}`", part.name)),
        }
    }
    out
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files
}

#[test]
fn documented_facts_and_remedies_are_those_of_the_program() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = BTreeMap::new();
    for file in sources(&src.join("diagnose")) {
        all.extend(types(&std::fs::read_to_string(file).unwrap()));
    }
    let causes = all["Cause"].parts.iter().map(|it| format!("| `{}` | {} |", snake(&it.name), it.meaning));
    let causes: Vec<String> = causes.collect();
    assert_eq!(causes.len(), memledger::diagnose::Cause::ALL.len());
    let mut tables = format!("\n## Causes\n\n| `cause` | meaning |\n| --- | --- |\n{}\n", causes.join("\n"));
    for (tag, title) in [("finding", "Facts"), ("remedy", "Remedies")] {
        let mut kinds = BTreeMap::new();
        for variant in all.values().filter(|it| it.tag == Some(tag)).flat_map(|it| &it.parts) {
            let kind = snake(&variant.name);
            let row =
                format!("| `{kind}` | {} | {} |", variant.meaning, fields(&variant.fields, &all).join(", "));
            assert_eq!(kinds.insert(kind.clone(), row), None, "two kinds are called {kind}");
        }
        assert!(kinds.len() > 30, "only {} kinds of {tag}: the check does not work", kinds.len());
        let rows: Vec<String> = kinds.into_values().collect();
        let _ = writeln!(
            tables,
            "\n## {title}\n\n| `{tag}` | meaning | fields |\n| --- | --- | --- |\n{}",
            rows.join("\n")
        );
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/why-json.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (begin, _) = text.split_once("\n## Causes\n").unwrap_or((&text, ""));
    golden("docs/why-json.md", &format!("{}\n{tables}", begin.trim_end()));
}
