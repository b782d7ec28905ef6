//! The list of functions by which the linker orders the program.

use std::collections::HashSet;

/// Returns whether a pattern has the hash of a crate, `Cs`, 5 to 11 letters and digits, `_`, which other versions do not have.
fn has_crate_hash(pattern: &str) -> bool {
    pattern.starts_with("_R")
        && pattern.split("Cs").skip(1).any(|rest| {
            let hash = rest.split('_').next().unwrap_or_default();
            hash.len() >= 5
                && rest.len() > hash.len()
                && hash.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
}

#[test]
fn function_list_has_patterns_without_crate_hashes() {
    assert!(has_crate_hash("_RNvNtCsgEmfK2I1SDS_4core3fmt5write"));
    assert!(!has_crate_hash("_RNvNtCs*_4core3fmt5write"));
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/layout/functions.txt");
    let list = std::fs::read_to_string(path).expect("the list");
    let patterns: Vec<&str> = list.lines().collect();
    assert!(patterns.len() > 3_000, "{} patterns: `make layout` writes them", patterns.len());
    let mut seen = HashSet::new();
    for pattern in &patterns {
        assert!(seen.insert(pattern), "twice: {pattern}");
        let symbol = pattern.strip_suffix(".*").unwrap_or(pattern);
        let is_symbol = symbol.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_*".contains(&byte));
        assert!(is_symbol, "a linker reads it as something else: {pattern}");
        assert!(!has_crate_hash(pattern), "{pattern}");
    }
    let own = patterns.iter().filter(|pattern| pattern.contains("9memledger")).count();
    assert!(own * 5 > patterns.len(), "{own} of memledger");
}
