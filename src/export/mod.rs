//! Renders snapshots, events, verdicts and tables: pure functions, no I/O.

pub mod events;
pub mod json;
pub mod runs;
pub mod otlp_naming;
pub mod prometheus;
pub mod words;

use std::io::Write;

/// The style of pages.
pub const PAGE_STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #d8dee4}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}small{color:#57606a}\
pre{overflow-x:auto;font-size:.85rem}td,th{vertical-align:top}svg{max-width:100%;height:auto;background:#fff}@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}a{color:#58a6ff}th,td{border-color:#30363d}small{color:#8b949e}}";

/// Compresses a text, for speed rather than size.
///
/// # Errors
/// The encoder failed.
pub fn gzip(text: &[u8]) -> std::io::Result<Vec<u8>> {
    let buffer = Vec::with_capacity(text.len() / 10);
    let mut encoder = flate2::write::GzEncoder::new(buffer, flate2::Compression::fast());
    encoder.write_all(text)?;
    encoder.finish()
}
