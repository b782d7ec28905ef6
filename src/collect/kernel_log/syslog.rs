//! syslog(2): the whole text each time.

use super::{Position, Seen};
use crate::host::{ReadError, syslog};
use crate::parse::kernel_log::records::SyslogText;

/// The log as syslog(2) gives it.
#[derive(Debug)]
pub(super) struct Syslog {
    room: usize,
    buffer: Vec<u8>,
    pub(super) reader: Reader,
}

impl Syslog {
    pub(super) fn open() -> Result<Self, ReadError> {
        let mut this = Self { room: syslog::room()?, buffer: vec![], reader: Reader::default() };
        this.refill()?;
        Ok(this)
    }

    pub(super) fn read(&mut self) -> Result<Seen, ReadError> {
        self.refill()?;
        Ok(self.reader.take(&self.buffer))
    }

    fn refill(&mut self) -> Result<(), ReadError> {
        syslog::read_all(&mut self.buffer, self.room)?;
        if self.buffer.is_empty() || has_stamps(&self.buffer) {
            return Ok(());
        }
        Err(ReadError::malformed(
            "the lines of syslog(2) have no stamps; write Y to /sys/module/printk/parameters/time, boot with \
             printk.time=1, or give memledger /dev/kmsg",
        ))
    }
}

/// Whether the kernel writes stamps before its lines: a setting, which can change at any time, for all lines at once.
fn has_stamps(text: &[u8]) -> bool {
    const LINES: usize = 10;
    let end = line_ends(text).nth(LINES).unwrap_or(text.len());
    SyslogText::of(&text[..end]).stamps.is_some()
}

/// What is new in a text. No I/O.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// Length and fingerprint of the text before: the same text is not read again.
    whole: Option<(usize, u64)>,
    /// The end of what was read of it, from the beginning of a line.
    tail: Vec<u8>,
    position: Position,
    resume: Option<Position>,
}

impl Reader {
    /// Longer than any repetition of lines with one stamp.
    const TAIL_BYTES: usize = 2048;

    pub(super) fn resume_after(&mut self, position: Position) {
        self.resume = Some(position);
        self.position = Position { sequence: None, ..position };
    }

    pub(super) fn position(&self) -> Position {
        self.position
    }

    fn take(&mut self, text: &[u8]) -> Seen {
        let whole = (text.len(), fingerprint(text));
        if self.whole.replace(whole) == Some(whole) {
            return Seen::default();
        }
        let (start, lost) = self.new_from(text);
        let new = SyslogText::of(&text[start..]);
        let mut seen = Seen { lost, ..Seen::default() };
        let mut found = new.found;
        if let (Some((oldest, newest)), Some(resume)) = (new.stamps, self.resume) {
            self.resume = None;
            seen.rewound = newest < resume.usec;
            seen.lost = oldest > resume.usec;
            if !seen.rewound {
                found.retain(|found| found.usec > resume.usec);
            }
        }
        seen.entries = found.into_iter().map(Into::into).collect();
        if let Some((_, newest)) = new.stamps {
            self.position = Position { sequence: None, usec: newest };
        }
        self.remember(&text[..start + new.settled]);
        seen
    }

    /// Where the lines begin that were not read, and whether lines before them are missing.
    fn new_from(&self, text: &[u8]) -> (usize, bool) {
        if self.tail.is_empty() {
            return (0, false);
        }
        let mut starts = std::iter::once(0).chain(line_ends(text));
        // the first of several: a kill that is given twice is told by its stamp and pid, one that is lost by nothing
        if let Some(start) = starts.find(|start| text[*start..].starts_with(&self.tail)) {
            return (start + self.tail.len(), false);
        }
        // the log has run over so far that it now begins in the middle of that end
        let mut rests =
            line_ends(&self.tail).map(|start| &self.tail[start..]).filter(|rest| !rest.is_empty());
        match rests.find(|rest| text.starts_with(rest)) {
            Some(rest) => (rest.len(), false),
            None => (0, true),
        }
    }

    fn remember(&mut self, read: &[u8]) {
        let from = read.len().saturating_sub(Self::TAIL_BYTES);
        let from = if from == 0 { 0 } else { line_ends(read).find(|end| *end >= from).unwrap_or(from) };
        self.tail.clear();
        self.tail.extend_from_slice(&read[from..]);
    }
}

/// Where lines end and the next ones begin.
fn line_ends(text: &[u8]) -> impl Iterator<Item = usize> {
    text.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1)
}

fn fingerprint(text: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    hasher.write(text);
    hasher.finish()
}

#[cfg(test)]
mod tests;
