//! Reads the kernel log for the ledger: from /dev/kmsg, or from syslog(2) where the device cannot be had.
//!
//! The device numbers its records, so a reader knows what it missed, and poll(2) tells of new ones. It has to be read
//! with room for the longest record: with less the kernel answers EINVAL, and the record is lost.
//!
//! syslog(2) gives the whole buffer each time. Reading a full buffer of 128 KiB takes 0.9 ms, so once a second costs a
//! thousandth of a CPU; a buffer that did not change is not looked at again. What is new is what stands behind the end
//! of the text before, found by that end itself and not by stamps: two CPUs may write them a little out of order.
//!
//! Not here: what the lines mean for the ledger.

mod device;
mod syslog;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::host::{ReadError, Roots};
use crate::parse::kernel_log::Line;
use crate::parse::kernel_log::records::Found;
use crate::parse::printable;

/// Longest text of an [`Entry`].
const TEXT_BYTES: usize = 500;

/// How the kernel log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// /dev/kmsg: numbered records, and poll(2) tells of new ones.
    Device,
    /// syslog(2) SYSLOG_ACTION_READ_ALL: the whole buffer each time, without numbers.
    Syslog,
}

/// A place in the kernel log of one boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// Number of the last record that was read; `None` if the log was read by syslog(2).
    pub sequence: Option<u64>,
    /// Its stamp: microseconds of the kernel's clock.
    pub usec: u64,
}

/// One line of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it stands.
    pub position: Position,
    /// What it says.
    pub line: Line,
    /// Its text, made printable, for evidence: at most some 500 bytes.
    pub text: Arc<str>,
}

impl From<Found> for Entry {
    fn from(found: Found) -> Self {
        let mut text = printable(&found.text[..found.text.len().min(TEXT_BYTES)]);
        if text.len() > TEXT_BYTES || found.text.len() > TEXT_BYTES {
            let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
            text.truncate(end.unwrap_or(0));
            text.push_str("...");
        }
        let position = Position { sequence: found.sequence, usec: found.usec };
        Self { position, line: found.line, text: text.into() }
    }
}

/// What one read gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The lines of interest, in order.
    pub entries: Vec<Entry>,
    /// Records were overwritten before they could be read.
    pub lost: bool,
    /// The log ends before the place where it was to be resumed, or has another record there: the machine was put back
    /// to an earlier state. All of it is given once more; what was read before can be told by stamp and pid.
    pub rewound: bool,
}

/// The open kernel log.
#[derive(Debug)]
pub struct KernelLog {
    source: Source,
}

#[derive(Debug)]
enum Source {
    Device(device::Device),
    Syslog(syslog::Syslog),
}

impl KernelLog {
    /// Opens it, at its oldest record.
    ///
    /// # Errors
    /// It cannot be read in this way here: there is no such device, or it is forbidden.
    pub fn open(roots: &Roots, way: Way) -> Result<Self, ReadError> {
        let source = match way {
            Way::Device => Source::Device(device::Device::open(&roots.dev.join("kmsg"))?),
            Way::Syslog => Source::Syslog(syslog::Syslog::open()?),
        };
        Ok(Self { source })
    }

    /// How it is read.
    pub fn way(&self) -> Way {
        match self.source {
            Source::Device(_) => Way::Device,
            Source::Syslog(_) => Way::Syslog,
        }
    }

    /// Records up to here were read before, perhaps by another run of memledger; they will not be given again. To be
    /// called before the first read, with a position of this boot.
    pub fn resume_after(&mut self, position: Position) {
        match &mut self.source {
            Source::Device(device) => device.reader.resume_after(position),
            Source::Syslog(syslog) => syslog.reader.resume_after(position),
        }
    }

    /// The last record that was read; while a record in fragments is not whole, the one before it.
    pub fn position(&self) -> Position {
        match &self.source {
            Source::Device(device) => device.reader.position(),
            Source::Syslog(syslog) => syslog.reader.position(),
        }
    }

    /// Reads all that is there.
    ///
    /// # Errors
    /// The log cannot be read any more.
    pub fn read(&mut self) -> Result<Seen, ReadError> {
        match &mut self.source {
            Source::Device(device) => device.read(),
            Source::Syslog(syslog) => syslog.read(),
        }
    }

    /// What poll(2) waits for; `None` where the log has to be asked.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            Source::Device(device) => Some(device.as_fd()),
            Source::Syslog(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_is_short_and_printable() {
        let found = |text: &[u8]| Found { sequence: None, usec: 1, line: Line::Invoked, text: text.to_vec() };
        assert_eq!(&*Entry::from(found(b"a\nb")).text, "a\\x0ab");
        for long in [vec![b'a'; 600], vec![0xff; 200], "é".repeat(400).into_bytes(), vec![b'a'; 500]] {
            let text = Entry::from(found(&long)).text;
            assert!(text.len() <= TEXT_BYTES + 3, "{}", text.len());
            assert_eq!(text.ends_with("..."), long != vec![b'a'; 500]);
        }
    }
}
