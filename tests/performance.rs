//! docs/performance.md: each bench writes its own part and keeps those of the others.

use document::{HEADINGS, replace};

#[allow(dead_code)] // the benches use the rest
#[path = "../benches/document/mod.rs"]
mod document;

fn read(path: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn orders_parts_independently_of_bench_order() {
    let part = |at: usize| format!("{}\n\nfigures of {at}\n", HEADINGS[at]);
    let (odd, even): (Vec<_>, Vec<_>) = (0..HEADINGS.len()).partition(|at| at % 2 == 1);
    let mut document = String::new();
    for at in even.into_iter().rev().chain(odd) {
        document = replace(&document, &part(at)).unwrap();
    }
    let whole = (0..HEADINGS.len()).map(part).collect::<Vec<_>>().join("\n");
    assert_eq!(document, whole);
    let changed = replace(&document, "## GPUs\n\nother figures\n").unwrap();
    assert_eq!(changed, whole.replace("figures of 2", "other figures"));
}

#[test]
fn keeps_manual_parts_and_rejects_unknown_headings() {
    let document = "# Performance\n\n1\n\n## By hand\n\n2\n\n### Below it\n\n3\n";
    let document = replace(document, "## GPUs\n\n4\n").unwrap();
    assert_eq!(document, "# Performance\n\n1\n\n## GPUs\n\n4\n\n## By hand\n\n2\n\n### Below it\n\n3\n");
    assert!(replace(&document, "## Else\n\n5\n").unwrap_err().contains("## Else"));
}

#[test]
fn document_has_all_parts_in_order() {
    let document = read("docs/performance.md");
    let headings: Vec<_> =
        document.lines().filter(|line| line.starts_with("# ") || line.starts_with("## ")).collect();
    let mut expected = HEADINGS.to_vec();
    // `make bench-against` writes it, last
    expected.extend(headings.last().filter(|heading| **heading == "## Against another commit"));
    assert_eq!(headings, expected);
    let (part, _) = document.split_once("\n## ").expect("several parts");
    assert_eq!(replace(&document, part).unwrap(), document);
}

#[test]
fn make_bench_runs_every_bench() {
    let (manifest, makefile) = (read("Cargo.toml"), read("Makefile"));
    let benches: Vec<_> =
        manifest.split("[[bench]]\nname = \"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(benches.len(), HEADINGS.len());
    for bench in &benches {
        assert!(
            makefile.contains(&format!("$(CARGO) bench --locked --bench {bench}\n")),
            "make bench omits {bench}"
        );
    }
}

#[test]
fn each_bench_writes_only_its_own_part() {
    let makefile = read("Makefile");
    let benches = makefile.split("bench --locked --bench ").skip(1).filter_map(|rest| rest.lines().next());
    for (at, (bench, heading)) in benches.zip(HEADINGS).enumerate() {
        let writes = read(&format!("benches/{bench}.rs"));
        assert!(writes.contains("document::write("), "benches/{bench}.rs writes no part");
        let own = [format!("HEADINGS[{at}]"), format!("\"{heading}\\n")];
        assert!(
            own.iter().any(|own| writes.contains(own)),
            "benches/{bench}.rs does not begin with {heading:?}"
        );
        let others = writes.split("HEADINGS[").skip(1).filter(|rest| !rest.starts_with(&format!("{at}]")));
        assert_eq!(others.count(), 0, "benches/{bench}.rs writes the part of another");
    }
}
