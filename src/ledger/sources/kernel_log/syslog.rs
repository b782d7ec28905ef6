//! syslog(2): returns the whole buffer each time.

use super::{LogBatch, LogEntry, LogPosition};
use crate::host::{ReadError, syslog};
use crate::parse::kernel_log::records::SyslogText;
use crate::parse::kernel_log::report::ReportAssembler;

/// The kernel log through syslog(2).
#[derive(Debug)]
pub(super) struct Syslog {
    capacity: usize,
    buffer: Vec<u8>,
    pub(super) reader: SyslogCursor,
}

impl Syslog {
    pub(super) fn open() -> Result<Self, ReadError> {
        let mut this =
            Self { capacity: syslog::buffer_size()?, buffer: vec![], reader: SyslogCursor::default() };
        this.reader.reports.page_bytes = Some(rustix::param::page_size() as u64);
        this.refill()?;
        Ok(this)
    }

    pub(super) fn read(&mut self) -> Result<LogBatch, ReadError> {
        self.refill()?;
        Ok(self.reader.read_new(&self.buffer))
    }

    fn refill(&mut self) -> Result<(), ReadError> {
        syslog::read_all(&mut self.buffer, self.capacity)?;
        if self.buffer.is_empty() || has_timestamps(&self.buffer) {
            return Ok(());
        }
        Err(ReadError::malformed(
            "lines of syslog(2) have no timestamps; write Y to /sys/module/printk/parameters/time, boot with \
             printk.time=1, or give memledger access to /dev/kmsg",
        ))
    }
}

/// Returns whether lines begin with timestamps: a kernel setting that can change at any time, for all lines at once.
fn has_timestamps(text: &[u8]) -> bool {
    const LINES: usize = 10;
    let end = line_ends(text).nth(LINES).unwrap_or(text.len());
    SyslogText::of(&text[..end]).stamps.is_some()
}

/// Finds the new lines in a text. No I/O.
#[derive(Debug, Default)]
pub(super) struct SyslogCursor {
    /// Length and hash of the previous text: the same text is not parsed again.
    whole: Option<(usize, u64)>,
    /// The end of the text that was read, from the start of a line.
    tail: Vec<u8>,
    position: LogPosition,
    oldest: Option<LogPosition>,
    resume: Option<LogPosition>,
    /// Blocks can begin in one text and end in the next.
    reports: ReportAssembler,
}

impl SyslogCursor {
    /// Longer than any sequence of lines with the same timestamp.
    const TAIL_BYTES: usize = 2048;

    pub(super) fn resume_after(&mut self, position: LogPosition) {
        self.resume = Some(position);
        self.position = LogPosition { sequence: None, ..position };
    }

    pub(super) fn position(&self) -> LogPosition {
        self.position
    }

    pub(super) fn oldest(&self) -> Option<LogPosition> {
        self.oldest
    }

    fn read_new(&mut self, text: &[u8]) -> LogBatch {
        let whole = (text.len(), hash(text));
        if self.whole.replace(whole) == Some(whole) {
            return LogBatch::default();
        }
        let (start, lost) = self.new_from(text);
        if lost {
            self.reports.records_lost();
        }
        let new = SyslogText::read(&text[start..], &mut self.reports);
        let mut batch = LogBatch { lost, ..LogBatch::default() };
        let mut found: Vec<LogEntry> = new.found.into_iter().map(Into::into).collect();
        if let (Some((oldest, newest)), Some(resume)) = (new.stamps, self.resume) {
            self.resume = None;
            batch.rewound = newest < resume.usec;
            batch.lost = oldest > resume.usec;
            if !batch.rewound {
                let is_old = |found: &LogEntry| found.position.usec <= resume.usec;
                let (old, new): (Vec<_>, Vec<_>) = found.into_iter().partition(is_old);
                // the last run may have ended within a block: its begin is returned again, which changes nothing
                found = [LogEntry::open_block(&old), &new].concat();
            }
        }
        batch.entries = found;
        if let Some((oldest, newest)) = new.stamps {
            self.oldest.get_or_insert(LogPosition { sequence: None, usec: oldest });
            self.position = LogPosition { sequence: None, usec: newest };
        }
        self.remember(&text[..start + new.settled]);
        batch
    }

    /// Returns the start of the unread lines, and whether lines before them are missing.
    fn new_from(&self, text: &[u8]) -> (usize, bool) {
        if self.tail.is_empty() {
            return (0, false);
        }
        let mut starts = std::iter::once(0).chain(line_ends(text));
        // the first of several matches: a kill that is returned twice is recognised by its timestamp and pid, a lost
        // one by nothing
        if let Some(start) = starts.find(|start| text[*start..].starts_with(&self.tail)) {
            return (start + self.tail.len(), false);
        }
        // the log was overwritten so far that it now begins in the middle of that end
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

/// Returns the positions after each line.
fn line_ends(text: &[u8]) -> impl Iterator<Item = usize> {
    text.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1)
}

fn hash(text: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    hasher.write(text);
    hasher.finish()
}

#[cfg(test)]
mod tests;
