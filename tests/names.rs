//! One word, one meaning: a type's name is clear without its module, so no two modules define the same one. And nothing has the name of
//! another project: PyPI's `memledger`. README stays short.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

/// Names that may stand in several modules, with the reason.
const ALLOWED: [(&str, &str); 1] = [(
    "Container",
    "catalog: the marker type of `MetricScope::Container`, spelled like the variant for the table's macro; \
     discover: a running container",
)];

/// Rust files of the program. Not tests, whose helpers are private, and not the messages of CRI, whose names are the protocol's.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a readable folder").map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        if path.is_dir() && name != "tests" {
            sources(&path, found);
        } else if name.ends_with(".rs") && !["tests.rs", "messages.rs"].contains(&name.as_str()) {
            found.push(path);
        }
    }
}

/// Returns the name that a line defines a type by. Items that are indented belong to a test, a function or a trait.
fn defined_type(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub(super) ")).unwrap_or(line);
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let rest =
        ["struct ", "enum ", "trait ", "type ", "union "].iter().find_map(|word| line.strip_prefix(word))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// Returns the names that more than one of these files defines, with the files.
fn shared<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> BTreeMap<String, BTreeSet<String>> {
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in files {
        for name in text.lines().filter_map(defined_type) {
            places.entry(name.to_owned()).or_default().insert(path.to_owned());
        }
    }
    places.retain(|_, files| files.len() > 1);
    places
}

#[test]
fn type_names_are_unique() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    sources(&src, &mut paths);
    let text = |path: &PathBuf| {
        let name = path.strip_prefix(&src).expect("below src").display().to_string();
        (name, std::fs::read_to_string(path).expect("a readable file"))
    };
    let texts: Vec<_> = paths.iter().map(text).collect();
    let types = texts.iter().flat_map(|(_, text)| text.lines()).filter_map(defined_type).count();
    assert!(types > 300, "only {types} types were found: the check reads too few files");
    let mut shared = shared(texts.iter().map(|(path, text)| (path.as_str(), text.as_str())));
    for (name, reason) in ALLOWED {
        assert!(shared.remove(name).is_some(), "{name} is allowed, but it is unique: {reason}");
    }
    assert!(shared.is_empty(), "rename, so that each name is clear without its module: {shared:#?}");
}

#[test]
fn shared_names_are_found() {
    let files = [
        ("a.rs", "pub struct Found;\nenum Held {\n    struct Inner;\n"),
        ("b.rs", "type Found = u8;\npub(crate) trait Other<T> {\n    type Item;\n"),
        ("c.rs", "pub enum Other<T> {}\npub struct Item;\n"),
    ];
    let shared = shared(files);
    assert_eq!(shared.keys().collect::<Vec<_>>(), ["Found", "Other"]);
    assert_eq!(shared["Other"], ["b.rs", "c.rs"].map(str::to_owned).into());
}

/// PyPI's other project, and its import.
const OTHER_PROJECT: &str = "memledger";

/// Returns the lines that install or import PyPI's other project. Theirs is also the program's name, in lines that do neither.
fn uses_of_other_project(text: &str) -> Vec<&str> {
    let installs = Regex::new(&format!("pip install {OTHER_PROJECT}([^_-]|$)")).expect("a valid expression");
    let imports =
        Regex::new(&format!("^ *(import|from) {OTHER_PROJECT}([. ;,]|$)")).expect("a valid expression");
    text.lines().filter(|line| installs.is_match(line) || imports.is_match(line)).collect()
}

#[test]
fn nothing_installs_or_imports_the_other_project() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // as root in a user's checkout too
    let list =
        Command::new("git").args(["-c", "safe.directory=*", "ls-files", "-z"]).current_dir(root).output();
    let list = list.expect("git runs");
    assert!(list.status.success(), "{}", String::from_utf8_lossy(&list.stderr));
    let list = String::from_utf8(list.stdout).expect("names in UTF-8");
    let (mut files, mut warnings, mut found) = (0, Vec::new(), Vec::new());
    for name in list.split_terminator('\0') {
        let Ok(bytes) = std::fs::read(root.join(name)) else { continue }; // removed, not yet committed
        files += 1;
        let text = String::from_utf8_lossy(&bytes);
        for line in uses_of_other_project(&text) {
            match name {
                "CHANGELOG.md" => (),
                "README.md" => warnings.push(line.to_owned()),
                _ => found.push(format!("{name}: {line}")),
            }
        }
    }
    assert!(files > 500, "only {files} files were found");
    assert!(found.is_empty(), "memledger-exporter and memledger_client are the names here: {found:#?}");
    assert!(
        matches!(&warnings[..], [warning] if warning.contains("another project")),
        "README.md warns of the other project, once: {warnings:#?}"
    );
}

#[test]
fn uses_of_the_other_project_are_found() {
    for line in [
        "pip install NAME",
        "`pip install NAME` ",
        "import NAME",
        "    from NAME.compat import x",
        "import NAME, torch",
    ] {
        let line = line.replace("NAME", OTHER_PROJECT);
        assert_eq!(uses_of_other_project(&format!("text\n{line}\n")), [line]);
    }
    for line in
        ["pip install NAME_exporter-*.whl", "pip install NAME-exporter", "import NAME_client", "NAME serve"]
    {
        assert!(uses_of_other_project(&line.replace("NAME", OTHER_PROJECT)).is_empty(), "{line}");
    }
}

#[test]
fn readme_is_short_and_begins_with_the_installation() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = std::fs::read_to_string(path).expect("a readable file");
    let words = text.split_whitespace().count();
    assert!(words <= 900, "README.md has {words} words: what it does not need belongs into docs");
    let begin: Vec<_> = text.lines().take(25).collect();
    assert!(begin.iter().any(|line| line.contains("make install")), "no line to install it: {begin:#?}");
}
