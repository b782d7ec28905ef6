//! The list of functions by which the linker orders the program.

use std::collections::HashSet;

#[test]
fn list_of_called_functions_outlives_other_versions() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/layout/functions.txt");
    let list = std::fs::read_to_string(path).expect("the list");
    let names: Vec<&str> = list.lines().collect();
    assert!(names.len() > 3_000, "{} names: `make layout` writes them", names.len());
    let mut seen = HashSet::new();
    for name in &names {
        assert!(seen.insert(name), "twice: {name}");
        let is_pattern = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_*.$".contains(&byte));
        assert!(is_pattern, "a linker reads it as something else: {name}");
        // a crate has a hash behind Cs, which other versions do not have
        let hash = name.split("Cs").skip(1).any(|rest| {
            name.starts_with("_R") && !rest.starts_with('*') && {
                let end = rest.find('_').unwrap_or(0);
                end >= 10 && rest[..end].bytes().all(|byte| byte.is_ascii_alphanumeric())
            }
        });
        assert!(!hash, "with the hash of a crate: {name}");
    }
    let own = names.iter().filter(|name| name.contains("9memledger")).count();
    assert!(own * 5 > names.len(), "{own} of memledger");
}
