//! Dependencies: `deny.toml`, checked with the real cargo-deny, without a network. Known vulnerabilities need the database of
//! advisories and are checked by `make audit` only.

use std::path::Path;
use std::process::Command;

use crate::prometheus::provided;

/// Runs cargo-deny on the lock file with these rules; returns success and output.
///
/// `None`, with the reason printed, where cargo-deny is not installed, or where crates of other targets are missing because
/// `setup.sh` could not reach the registry: not a defect of this repository, so it is skipped even where tests are required.
/// `make test` repeats the reason at its end.
fn judged(rules: &str) -> Option<(bool, String)> {
    if let Some(reason) = std::env::var("MEMLEDGER_TEST_NO_CRATES").ok().filter(|reason| !reason.is_empty()) {
        eprintln!("SKIPPED: {reason}");
        return None;
    }
    let deny = provided("MEMLEDGER_TEST_CARGO_DENY")?;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("deny.toml");
    std::fs::write(&file, rules).expect("the rules are written");
    let mut command = Command::new(deny);
    command.args(["--offline", "--locked", "--workspace", "--config"]).arg(file);
    command.args(["check", "licenses", "bans", "sources"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = command.output().expect("cargo-deny starts");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Some((output.status.success(), said))
}

fn rules() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml")).expect("deny.toml")
}

#[test]
fn every_crate_has_a_licence_and_a_source_that_are_allowed_and_stands_there_once() {
    if let Some((content, said)) = judged(&rules()) {
        assert!(content, "{said}");
    }
}

#[test]
fn the_rules_see_what_they_are_there_for() {
    for (rule, instead, says) in [
        ("\"ISC\", ", "", "licenses FAILED"),
        ("\"ISC\", ", "\"ISC\", \"MPL-2.0\", ", "licenses FAILED"),
        ("crate = \"openssl\"", "crate = \"ring\"", "bans FAILED"),
        ("crate = \"syn@2\"", "crate = \"syn@1\"", "bans FAILED"),
        ("rust-lang/crates.io-index", "rust-lang/another-index", "sources FAILED"),
    ] {
        let before = rules();
        let changed = before.replacen(rule, instead, 1);
        assert_ne!(changed, before, "{rule} stands in deny.toml");
        if let Some((content, said)) = judged(&changed) {
            assert!(!content && said.contains(says), "{rule:?} became {instead:?}: {said}");
        }
    }
}
