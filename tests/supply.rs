//! Dependencies: `deny.toml`, checked with the real cargo-deny, without a network. Known vulnerabilities need the database of
//! advisories and are checked by `make audit` only.

use std::path::Path;
use std::process::Command;

use crate::prometheus::provided;

/// Runs cargo-deny on the lock file with these rules; returns success and output.
///
/// `None`, with the reason printed, where cargo-deny is not installed, or where crates of other targets are missing because
/// `setup.sh` could not reach the registry: not a defect of this repository, so it is skipped even where tests are required.
/// `make test-all` repeats the reason at its end.
fn run_deny(rules: &str) -> Option<(bool, String)> {
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
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    Some((output.status.success(), text))
}

fn rules() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml")).expect("deny.toml")
}

#[test]
fn crates_have_allowed_licences_and_sources_and_appear_once() {
    if let Some((passed, text)) = run_deny(&rules()) {
        assert!(passed, "{text}");
    }
}

#[test]
fn each_rule_detects_its_violation() {
    for (rule, instead, expected) in [
        ("\"ISC\", ", "", "licenses FAILED"),
        ("\"ISC\", ", "\"ISC\", \"MPL-2.0\", ", "licenses FAILED"),
        ("crate = \"openssl\"", "crate = \"ring\"", "bans FAILED"),
        ("crate = \"syn@2\"", "crate = \"syn@1\"", "bans FAILED"),
        ("rust-lang/crates.io-index", "rust-lang/another-index", "sources FAILED"),
    ] {
        let before = rules();
        let changed = before.replacen(rule, instead, 1);
        assert_ne!(changed, before, "deny.toml has {rule}");
        if let Some((passed, text)) = run_deny(&changed) {
            assert!(!passed && text.contains(expected), "{rule:?} replaced by {instead:?}: {text}");
        }
    }
}
