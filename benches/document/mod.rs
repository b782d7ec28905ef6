//! docs/performance.md: every bench writes its own part.
//!
//! A part begins with its heading and ends before the next one. A bench replaces only its own part; the order is fixed.
//!
//! In a directory, because Cargo treats every file beside it as a bench.

use std::path::Path;

/// The parts, in the order in which `make bench` runs the benches.
pub const HEADINGS: [&str; 13] = [
    "# Performance",
    "## The OOM ledger",
    "## GPUs",
    "## What a read does to its process",
    "## Pods over CRI",
    "## Containers that come and go",
    "## OTLP",
    "## Many requests at once",
    "## Reports from inside",
    "## Records of runs",
    "## The past of a host",
    "## Errors in logs",
    "## Beside docker stats",
];

/// Returns true if a test runner lists the tests of this target: then nothing is measured.
pub fn is_test_listing() -> bool {
    std::env::args().any(|argument| argument == "--test" || argument == "--list")
}

/// Prints a part, and replaces the old one in the document.
///
/// # Errors
/// The document is unreadable or not writable, or the heading of this part is unknown.
pub fn write(part: &str) -> std::io::Result<()> {
    print!("{part}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/performance.md");
    let new = replace(&std::fs::read_to_string(&path)?, part).map_err(std::io::Error::other)?;
    std::fs::write(path, new)
}

/// Returns the document with `part` instead of the part with the same heading. Parts with other headings are kept at the
/// end.
///
/// # Errors
/// The heading of `part` is not in [`HEADINGS`].
pub fn replace(document: &str, part: &str) -> Result<String, String> {
    let heading = heading(part);
    if !HEADINGS.contains(&heading) {
        return Err(format!("unknown heading {heading:?}; add it to HEADINGS in benches/document"));
    }
    let mut parts = parts(document);
    parts.retain(|old| self::heading(old) != heading);
    parts.push(part);
    parts.sort_by_key(|part| {
        HEADINGS.iter().position(|heading| *heading == self::heading(part)).unwrap_or(HEADINGS.len())
    });
    let parts: Vec<_> = parts.into_iter().map(str::trim_end).collect();
    Ok(parts.join("\n\n") + "\n")
}

fn heading(part: &str) -> &str {
    part.lines().next().unwrap_or_default()
}

/// Splits before every heading. Text before the first heading is a part too.
fn parts(document: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = document;
    while !rest.trim().is_empty() {
        let next = ["\n# ", "\n## "].iter().filter_map(|start| rest.find(start)).min();
        let (part, after) = rest.split_at(next.map_or(rest.len(), |at| at + 1));
        parts.push(part);
        rest = after;
    }
    parts
}
