//! docs/performance.md, to which every bench writes its own part.
//!
//! A part begins with its heading and ends before the next one. Whichever bench runs, the parts of the others stay, and all
//! stand in one order.
//!
//! In a folder, because Cargo takes every file beside this one for a bench.

use std::path::Path;

/// The parts, in the order in which `make bench` runs the benches.
pub const HEADINGS: [&str; 8] = [
    "# Performance",
    "## The OOM ledger",
    "## GPUs",
    "## GPUs of DRM drivers",
    "## Who reads while the kernel kills",
    "## Pods over CRI",
    "## OTLP",
    "## Many requests at once",
];

/// True if nothing is to be measured: a test runner asks every target what is in it.
pub fn is_only_asked() -> bool {
    std::env::args().any(|argument| argument == "--test" || argument == "--list")
}

/// Shows a part, and puts it in the place of the old one in the document.
///
/// # Errors
/// The document cannot be read or written, or has no place for this part.
pub fn write(part: &str) -> std::io::Result<()> {
    print!("{part}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/performance.md");
    let new = replace(&std::fs::read_to_string(&path)?, part).map_err(std::io::Error::other)?;
    std::fs::write(path, new)
}

/// The document with `part` in the place of the one that has its heading. A part with no place in the order is kept, at the
/// end.
///
/// # Errors
/// The heading of `part` is none of [`HEADINGS`].
pub fn replace(document: &str, part: &str) -> Result<String, String> {
    let heading = heading(part);
    if !HEADINGS.contains(&heading) {
        return Err(format!("docs/performance.md has no place for {heading:?}; add it to benches/document"));
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

/// Cuts before every heading. What stands before the first one is a part too.
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
