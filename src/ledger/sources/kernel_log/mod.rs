//! Reads the kernel log for the ledger: from /dev/kmsg, or through syslog(2) if the device is not available.
//!
//! The device numbers its records, so that a reader detects lost records, and poll(2) reports new ones. It must be read
//! with a buffer for the longest record: with a smaller one the kernel returns EINVAL, and the record is lost.
//!
//! syslog(2) returns the whole buffer each time. Reading a full buffer of 128 KiB takes 0.9 ms, so reading it once a
//! second uses a thousandth of a CPU; an unchanged buffer is not parsed again. New lines are those behind the end of
//! the previous text, found by comparing that end and not by timestamps: two CPUs may write them slightly out of order.
//!
//! The meaning of the lines is handled in the ledger.

mod kmsg;
mod syslog;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::host::{HostPaths, ReadError};
use crate::parse::kernel_log::records::OomLine;
use crate::parse::kernel_log::{Line, OomReport};
use crate::text::printable;

/// Maximum length of the text of a [`LogEntry`].
const MAX_TEXT_BYTES: usize = 500;

/// The interface through which the kernel log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogBackend {
    /// /dev/kmsg: numbered records, and poll(2) reports new ones.
    Device,
    /// syslog(2) SYSLOG_ACTION_READ_ALL: the whole buffer each time, without numbers.
    Syslog,
}

/// A position in the kernel log of one boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LogPosition {
    /// Number of the last record that was read; `None` if the log was read through syslog(2).
    pub sequence: Option<u64>,
    /// Its timestamp: microseconds of the kernel's clock.
    pub usec: u64,
}

/// A relevant line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Its position.
    pub position: LogPosition,
    /// The parsed line.
    pub line: Line,
    /// Its text, made printable, as evidence: at most some 500 bytes.
    pub text: Arc<str>,
    /// Of a kill: the report that the kernel printed before it, which can be of another kill.
    pub report: Option<Arc<OomReport>>,
}

impl LogEntry {
    /// Returns the begin of a block at the end of these entries, whose kill has not been read yet.
    fn open_block(entries: &[LogEntry]) -> &[LogEntry] {
        let is_end = |entry: &LogEntry| matches!(entry.line, Line::Killed(_) | Line::NoKill(_));
        let kills = entries.iter().rposition(is_end).map_or(0, |at| at + 1);
        let begins = |entry: &LogEntry| matches!(entry.line, Line::Invoked);
        let begin = entries[kills..].iter().rposition(begins).unwrap_or(entries.len() - kills);
        &entries[kills + begin..]
    }
}

impl From<OomLine> for LogEntry {
    fn from(found: OomLine) -> Self {
        let mut text = printable(&found.text[..found.text.len().min(MAX_TEXT_BYTES)]);
        if text.len() > MAX_TEXT_BYTES || found.text.len() > MAX_TEXT_BYTES {
            let end = (0..=MAX_TEXT_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
            text.truncate(end.unwrap_or(0));
            text.push_str("...");
        }
        let position = LogPosition { sequence: found.sequence, usec: found.usec };
        Self { position, line: found.line, text: text.into(), report: found.report }
    }
}

/// Result of one read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogBatch {
    /// The relevant lines, in order.
    pub entries: Vec<LogEntry>,
    /// Records were overwritten before they could be read.
    pub lost: bool,
    /// The log ends before the position to resume at, or has another record there: the machine was restored to an
    /// earlier state. All lines are returned again; duplicates can be recognised by timestamp and pid.
    pub rewound: bool,
}

/// The open kernel log.
#[derive(Debug)]
pub struct KernelLog {
    source: OpenLog,
}

#[derive(Debug)]
enum OpenLog {
    Device(Box<kmsg::KmsgDevice>),
    Syslog(Box<syslog::Syslog>),
}

impl KernelLog {
    /// Opens the log at its oldest record.
    ///
    /// # Errors
    /// The log is unreadable through this interface: the device is missing, or access is denied.
    pub fn open(host_paths: &HostPaths, backend: LogBackend) -> Result<Self, ReadError> {
        let source = match backend {
            LogBackend::Device => {
                OpenLog::Device(kmsg::KmsgDevice::open(&host_paths.dev.join("kmsg"))?.into())
            }
            LogBackend::Syslog => OpenLog::Syslog(syslog::Syslog::open()?.into()),
        };
        Ok(Self { source })
    }

    /// Returns the interface through which it is read.
    pub fn backend(&self) -> LogBackend {
        match self.source {
            OpenLog::Device(_) => LogBackend::Device,
            OpenLog::Syslog(_) => LogBackend::Syslog,
        }
    }

    /// Skips records up to this position, which were read before, perhaps by another run of memledger. Must be called
    /// before the first read, with a position of this boot.
    pub fn resume_after(&mut self, position: LogPosition) {
        match &mut self.source {
            OpenLog::Device(device) => device.reader.resume_after(position),
            OpenLog::Syslog(syslog) => syslog.reader.resume_after(position),
        }
    }

    /// Returns the position of the last record that was read; while a record in fragments is incomplete, that of the
    /// record before it.
    pub fn position(&self) -> LogPosition {
        match &self.source {
            OpenLog::Device(device) => device.reader.position(),
            OpenLog::Syslog(syslog) => syslog.reader.position(),
        }
    }

    /// Returns the position of the oldest record that was read since the log was opened; `None` before the first.
    pub fn oldest(&self) -> Option<LogPosition> {
        match &self.source {
            OpenLog::Device(device) => device.reader.oldest(),
            OpenLog::Syslog(syslog) => syslog.reader.oldest(),
        }
    }

    /// Reads all available records.
    ///
    /// # Errors
    /// The log has become unreadable.
    pub fn read(&mut self) -> Result<LogBatch, ReadError> {
        match &mut self.source {
            OpenLog::Device(device) => device.read(),
            OpenLog::Syslog(syslog) => syslog.read(),
        }
    }

    /// Returns the descriptor for poll(2), or `None` if the log must be polled by reading it.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            OpenLog::Device(device) => Some(device.as_fd()),
            OpenLog::Syslog(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_is_short_and_printable() {
        let found = |text: &[u8]| OomLine {
            sequence: None,
            usec: 1,
            line: Line::Invoked,
            text: text.to_vec(),
            report: None,
        };
        assert_eq!(&*LogEntry::from(found(b"a\nb")).text, "a\\x0ab");
        for long in [vec![b'a'; 600], vec![0xff; 200], "é".repeat(400).into_bytes(), vec![b'a'; 500]] {
            let text = LogEntry::from(found(&long)).text;
            assert!(text.len() <= MAX_TEXT_BYTES + 3, "{}", text.len());
            assert_eq!(text.ends_with("..."), long != vec![b'a'; 500]);
        }
    }
}
