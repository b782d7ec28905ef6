//! The direction of dependencies: a module uses only modules above it in `lib.rs`.

use std::path::{Path, PathBuf};

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

/// Returns the top-level modules after `crate::` in a line, also those in a group.
fn used(line: &str) -> Vec<String> {
    line.match_indices("crate::")
        .flat_map(|(at, prefix)| {
            let rest = &line[at + prefix.len()..];
            let group = rest.strip_prefix('{').map(|inner| inner.split('}').next().unwrap_or(""));
            let names: Vec<&str> = group.map_or_else(|| vec![rest], |inner| inner.split(',').collect());
            let word = |name: &str| {
                name.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_owned()
            };
            names.into_iter().map(word).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn modules_use_only_modules_above_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let lib = std::fs::read_to_string(src.join("lib.rs")).unwrap();
    let order: Vec<_> =
        lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    assert!(order.len() > 10, "lib.rs has the list of modules");
    let position = |name: &str| order.iter().position(|module| *module == name);
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut checked = 0;
    for file in files {
        let relative = file.strip_prefix(&src).unwrap();
        let first = relative
            .components()
            .next()
            .unwrap()
            .as_os_str()
            .to_str()
            .unwrap()
            .trim_end_matches(".rs")
            .to_owned();
        let Some(own) = position(&first) else { continue }; // main.rs and lib.rs
        for (number, line) in std::fs::read_to_string(&file).unwrap().lines().enumerate() {
            for name in used(line).into_iter().filter(|_| !line.trim_start().starts_with("//")) {
                let other = position(&name)
                    .unwrap_or_else(|| panic!("{}:{}: no module {name}", file.display(), number + 1));
                assert!(
                    other <= own,
                    "{}:{}: {first} uses {name}, which comes after it",
                    file.display(),
                    number + 1
                );
                checked += usize::from(other != own);
            }
        }
    }
    assert!(checked > 50, "only {checked} uses were found: the check does not work");
}

/// The modules that read rows of metrics: all others read what a cycle found, which has types.
const READERS_OF_ROWS: [&str; 5] = ["catalog", "series", "snapshot", "export", "otlp"];

#[test]
fn only_exporters_read_rows_of_metrics() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let (mut readers, mut others) = (0, vec![]);
    for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
        let text = std::fs::read_to_string(file).unwrap();
        let program = text.split("mod tests {").next().unwrap();
        let reads =
            ["FamilyId", ".rows()", ".split_mut()", ".family("].iter().any(|word| program.contains(word));
        let relative = file.strip_prefix(&src).unwrap();
        let module = relative.components().next().unwrap().as_os_str().to_str().unwrap();
        if READERS_OF_ROWS.contains(&module.trim_end_matches(".rs")) {
            readers += usize::from(reads);
        } else if reads {
            others.push(relative.to_owned());
        }
    }
    assert_eq!(others, Vec::<PathBuf>::new());
    assert!(readers > 5, "only {readers} exporters were found: the check does not work");
}

/// Returns the string literals of a line of program code.
fn literals(line: &str) -> Vec<&str> {
    line.trim_start().split(" // ").next().unwrap_or("").split('"').skip(1).step_by(2).collect()
}

#[test]
fn diagnosis_is_data_without_a_sentence() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src.join("diagnose"), &mut files);
    assert!(files.len() > 15, "only {} files: the check does not work", files.len());
    for file in files.iter().filter(|file| !file.ends_with("worlds.rs")) {
        let text = std::fs::read_to_string(file).unwrap();
        let program = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for (number, line) in
            program.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
        {
            let found = literals(line).into_iter().find(|literal| literal.contains(' '));
            assert_eq!(found, None, "{}:{}: words belong into export/words", file.display(), number + 1);
        }
    }
    assert_eq!(literals(r#"    f("a b", "c") // "d e""#), ["a b", "c"]);
}

#[test]
fn finds_every_form_of_use() {
    assert_eq!(used("use crate::clock::Timestamp;"), ["clock"]);
    assert_eq!(used("use crate::{cli, http::SnapshotCache};"), ["cli", "http"]);
    assert_eq!(used("    let x = crate::parse::number(crate::host::y);"), ["parse", "host"]);
}
