//! JSON in a text, of which the next lines may have the rest.

use serde_json::Value;

/// A text that seems to be JSON and has no end within this is read as lines.
const MAX_JSON_BYTES: usize = 32 << 20;
/// Lines at the end of JSON that is cut, which are read as lines.
const MAX_CUT_LINES: usize = 8;

/// JSON that may go on in the next lines.
#[derive(Debug)]
pub(super) struct JsonText {
    pub(super) number: u64,
    pub(super) bytes: Vec<u8>,
    /// Where it begins: other values may be before it in the line.
    pub(super) begin: usize,
    /// Ends of the lines.
    ends: Vec<usize>,
    scanned: usize,
    open: OpenBrackets,
    pub(super) end: JsonEnd,
}

/// The objects and arrays that are open in JSON, outermost first.
#[derive(Debug, Default)]
struct OpenBrackets {
    brackets: Vec<u8>,
    is_in_string: bool,
    is_escaped: bool,
}

impl OpenBrackets {
    fn push(&mut self, byte: u8) {
        match byte {
            _ if std::mem::take(&mut self.is_escaped) => {}
            b'\\' if self.is_in_string => self.is_escaped = true,
            b'"' => self.is_in_string = !self.is_in_string,
            _ if self.is_in_string => {}
            b'{' | b'[' => self.brackets.push(byte),
            b'}' | b']' => drop(self.brackets.pop()),
            _ => {}
        }
    }
}

/// Whether JSON has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonEnd {
    Open,
    At(usize),
    Invalid,
}

impl JsonText {
    pub(super) fn new(number: u64, line: &[u8]) -> Self {
        let mut this = Self {
            number,
            bytes: vec![],
            begin: 0,
            ends: vec![],
            scanned: 0,
            open: OpenBrackets::default(),
            end: JsonEnd::Open,
        };
        this.push(line);
        this
    }

    pub(super) fn push(&mut self, line: &[u8]) {
        self.bytes.extend_from_slice(line);
        self.ends.push(self.bytes.len());
        self.bytes.push(b'\n');
        self.scan();
    }

    /// Looks for the end of the object. A string does not go on in the next line.
    fn scan(&mut self) {
        for at in self.scanned..self.bytes.len() {
            self.open.push(self.bytes[at]);
            if self.open.brackets.is_empty() {
                self.end = JsonEnd::At(at + 1);
                return;
            }
        }
        self.scanned = self.bytes.len();
        if self.open.is_in_string || self.bytes.len() - self.begin > MAX_JSON_BYTES {
            self.end = JsonEnd::Invalid;
        }
    }

    /// Begins with the next value of the same line.
    pub(super) fn restart(&mut self, number: u64, begin: usize) {
        self.ends.retain(|end| *end > begin);
        (self.number, self.begin) = (number, begin);
        if self.begin > self.bytes.len() / 2 {
            self.bytes.drain(..self.begin).for_each(drop);
            self.ends.iter_mut().for_each(|end| *end -= begin);
            self.begin = 0;
        }
        self.scanned = self.begin;
        (self.open, self.end) = (OpenBrackets::default(), JsonEnd::Open);
        self.scan();
    }

    /// Returns the value that its first lines are with the missing ends of objects and arrays, and how many lines these are.
    pub(super) fn repaired(&self) -> Option<(Value, usize)> {
        (0..=MAX_CUT_LINES.min(self.ends.len())).find_map(|dropped| {
            let lines = self.ends.len() - dropped;
            let text = self.bytes[self.begin..*self.ends[..lines].last()?].trim_ascii_end();
            let text = text.strip_suffix(b",").unwrap_or(text);
            let mut open = OpenBrackets::default();
            text.iter().for_each(|byte| open.push(*byte));
            let ends = open.brackets.iter().rev().map(|open| if *open == b'{' { b'}' } else { b']' });
            let whole: Vec<u8> = text.iter().copied().chain(ends).collect();
            Some((serde_json::from_slice(&whole).ok()?, lines))
        })
    }

    /// Returns the lines behind the first ones with their numbers, as they are.
    pub(super) fn lines(&self, first: usize) -> impl Iterator<Item = (u64, &[u8])> {
        let begins = std::iter::once(self.begin).chain(self.ends.iter().map(|end| end + 1));
        let lines = (self.number..).zip(begins).zip(&self.ends).skip(first);
        lines.map(|((number, begin), end)| (number, &self.bytes[begin..*end]))
    }
}

/// Returns where an object begins in a line that has nothing but marks of JSON before it.
pub(super) fn json_begin(line: &[u8]) -> Option<usize> {
    line.iter().position(|byte| !b"[, \t\n\x1e".contains(byte)).filter(|at| line[*at] == b'{')
}
