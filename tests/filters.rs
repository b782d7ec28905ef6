//! Filters of tests in configuration and scripts: each selects a test, so that a renamed test does not lose its settings.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use regex::Regex;

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tests of this executable.
fn integration_tests() -> BTreeSet<String> {
    let own = std::env::current_exe().expect("this executable");
    let output = Command::new(own).args(["--list", "--format=terse"]).output().expect("it starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let names: BTreeSet<_> =
        text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect();
    assert!(names.len() > 500, "{} tests", names.len());
    names
}

/// Names that tests of the library may have, by its sources: each function, directly in the module of its file and in a module
/// `tests` there.
fn unit_tests() -> BTreeSet<String> {
    fn add(folder: &Path, module: &str, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path())
        {
            let stem = entry.file_stem().and_then(|stem| stem.to_str()).expect("a name");
            let module = if stem == "mod" { module.to_owned() } else { format!("{module}{stem}::") };
            if entry.is_dir() {
                add(&entry, &module, names);
            } else if entry.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&entry).expect("a source");
                for name in text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")) {
                    let name = name.split(['(', '<']).next().unwrap_or_default();
                    names.extend([format!("{module}{name}"), format!("{module}tests::{name}")]);
                }
            }
        }
    }
    let mut names = BTreeSet::new();
    add(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut names);
    names
}

/// Returns a pattern for each combination of its alternatives.
fn alternatives(pattern: &str) -> Vec<String> {
    let mut depth = 0;
    let (mut open, mut bars) = (None, vec![]);
    for (at, character) in pattern.char_indices() {
        match character {
            '(' if depth == 0 => (open, depth) = (Some(at), 1),
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 1 => bars.push(at),
            _ => {}
        }
        if let (')', 0, Some(open)) = (character, depth, open) {
            let edges = [vec![open], bars, vec![at]].concat();
            let parts = edges.windows(2).map(|edge| &pattern[edge[0] + 1..edge[1]]);
            let whole = |part| format!("{}{part}{}", &pattern[..open], &pattern[at + 1..]);
            return parts.flat_map(|part| alternatives(&whole(part))).collect();
        }
    }
    vec![pattern.to_owned()]
}

/// Returns the patterns of the expressions `test(/PATTERN/)` and `test(=NAME)` in a text.
fn patterns(text: &str) -> Vec<String> {
    let expression = Regex::new(r"test\((?:/(.*?)/|=([a-z0-9_:]+))\)").expect("a pattern");
    let found = expression.captures_iter(text).flat_map(|found| match (found.get(1), found.get(2)) {
        (Some(pattern), _) => alternatives(pattern.as_str()),
        (_, Some(name)) => vec![format!("^{}$", name.as_str())],
        _ => vec![],
    });
    found.collect()
}

#[test]
fn alternatives_are_tried_one_by_one() {
    assert_eq!(alternatives("^a::(b|c_(1|2[45])_)$"), ["^a::b$", "^a::c_1_$", "^a::c_2[45]_$"]);
}

#[test]
fn each_filter_of_tiers_nextest_scripts_and_makefile_selects_a_test() {
    let (integration, unit) = (integration_tests(), unit_tests());
    let (configuration, script, makefile) =
        (file(".config/nextest.toml"), file("tests/run.sh"), file("Makefile"));
    let all = [&*configuration, &*script, &*makefile].map(patterns).concat();
    assert!(all.len() > 20, "{all:?}");
    let selects = |pattern: &String| {
        let pattern = Regex::new(pattern).expect("a pattern");
        integration.iter().chain(&unit).any(|name| pattern.is_match(name))
    };
    let gate = file("tests/gate.txt");
    let gate = gate.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let gate = gate.flat_map(|line| alternatives(&format!("^{line}")));
    let of_gate = |pattern: &String| {
        let pattern = Regex::new(pattern).expect("a pattern");
        integration.iter().any(|name| pattern.is_match(name))
    };
    let mut useless: Vec<String> = gate.filter(|pattern| !of_gate(pattern)).collect();
    useless.extend(all.into_iter().filter(|pattern| !selects(pattern)));
    let of_guest =
        script.split("V2_TESTS=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a list");
    let after_dashes = makefile.lines().filter_map(|line| line.split(" test ").nth(1)?.split(" -- ").nth(1));
    let words = of_guest.split_whitespace().chain(after_dashes.flat_map(str::split_whitespace));
    let words: Vec<_> = words.filter(|word| word.contains("::")).collect();
    assert!(words.len() > 20, "{words:?}");
    let is_useless = |word: &&&str| !integration.iter().chain(&unit).any(|name| name.contains(**word));
    useless.extend(words.iter().filter(is_useless).map(|word| (*word).to_owned()));
    assert!(useless.is_empty(), "these select no test: {useless:#?}");
}
