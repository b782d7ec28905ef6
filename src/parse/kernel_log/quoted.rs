//! The parts of a line in quotes.

/// Parts in quotes of one line.
const MAX_QUOTED: usize = 1 << 16;

/// A part of a line in quotes.
#[derive(Debug)]
pub(super) struct Quoted {
    /// Where it begins in the line.
    pub(super) begin: usize,
    /// Without the quotes, as JSON and CSV escape it.
    pub(super) text: String,
}

/// Returns what a line has in quotes, without them: as JSON and CSV escape it.
pub(super) fn quoted(line: &[u8], quote: u8) -> Vec<Quoted> {
    let (mut found, mut at) = (vec![], 0);
    while found.len() < MAX_QUOTED
        && let Some(open) = line[at..].iter().position(|byte| *byte == quote).map(|open| at + open)
    {
        let mut end = open + 1;
        while end < line.len() {
            match line[end] {
                b'\\' => end += 1,
                // of CSV
                byte if byte == quote && end > open + 1 && line.get(end + 1) == Some(&quote) => end += 1,
                byte if byte == quote => break,
                _ => {}
            }
            end += 1;
        }
        let inner = &line[open + 1..end.min(line.len())];
        found.push(Quoted { begin: open, text: unquoted(inner) });
        at = (end + 1).min(line.len());
    }
    found
}

fn unquoted(inner: &[u8]) -> String {
    let json = [b"\"", inner, b"\""].concat();
    serde_json::from_slice(&json)
        .unwrap_or_else(|_| String::from_utf8_lossy(inner).replace("\"\"", "\"").replace("\\\"", "\""))
}

/// Strips `\r\n` that is written with backslashes, however often it was escaped.
pub(super) fn without_escaped_end(line: &[u8]) -> &[u8] {
    let mut text = line;
    loop {
        let inner = text.strip_suffix(b"n").or_else(|| text.strip_suffix(b"r"));
        match inner.filter(|inner| inner.ends_with(b"\\")) {
            Some(inner) => {
                let end = inner.iter().rposition(|byte| *byte != b'\\').map_or(0, |at| at + 1);
                text = &inner[..end];
            }
            None => return text,
        }
    }
}
