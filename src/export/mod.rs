//! Renders snapshots, events, verdicts and tables: pure functions, no I/O.

pub mod events;
pub mod json;
pub mod runs;
pub mod otlp_naming;
pub mod prometheus;
pub mod verdict_text;

use std::io::Write;

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
