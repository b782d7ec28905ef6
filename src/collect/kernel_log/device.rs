//! /dev/kmsg: one record per read, from the oldest on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::{Position, Seen};
use crate::host::{ReadError, classify};
use crate::parse::kernel_log::records::{Joiner, Record};

/// More than any kernel needs for one record (8 KiB before 5.18, 2 KiB since).
const RECORD_BYTES: usize = 16 * 1024;

/// Major and minor number of the device.
const KMSG: (u32, u32) = (1, 11);

/// The open device.
#[derive(Debug)]
pub(super) struct Device {
    fd: OwnedFd,
    path: String,
    buffer: Vec<u8>,
    pub(super) reader: Reader,
}

impl Device {
    pub(super) fn open(path: &Path) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = path.display().to_string();
        let fd =
            rustix::fs::open(path.as_str(), flags, Mode::empty()).map_err(|errno| explain(errno, &path))?;
        // in some containers /dev/kmsg is a link to /dev/null or to the console, which poll(2) says is always readable
        let stat = rustix::fs::fstat(&fd).map_err(|errno| explain(errno, &path))?;
        let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        if device != KMSG || !FileType::from_raw_mode(stat.st_mode).is_char_device() {
            return Err(ReadError::Absent(format!("{path} (what stands there is not the kernel log)")));
        }
        let mut this = Self { fd, path, buffer: vec![0; RECORD_BYTES], reader: Reader::default() };
        // a container's device cgroup and CAP_SYSLOG may be asked for only now
        this.read_one()?;
        match rustix::fs::seek(&this.fd, SeekFrom::Start(0)) {
            Ok(_) => Ok(this),
            Err(errno) => Err(explain(errno, &this.path)),
        }
    }

    pub(super) fn read(&mut self) -> Result<Seen, ReadError> {
        let mut seen = Seen::default();
        loop {
            match self.read_one() {
                Ok(Got::Record(length)) => {
                    if let Some(record) = Record::of(&self.buffer[..length]) {
                        self.reader.take(record, &mut seen);
                    }
                }
                Ok(Got::Overrun) => self.reader.overrun(&mut seen),
                Ok(Got::Nothing) => break,
                // what was read is given first; the error comes again
                Err(_) if !seen.entries.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        self.reader.drained(&mut seen);
        Ok(seen)
    }

    fn read_one(&mut self) -> Result<Got, ReadError> {
        loop {
            return match rustix::io::read(&self.fd, self.buffer.as_mut_slice()) {
                Ok(0) | Err(Errno::AGAIN) => Ok(Got::Nothing),
                Ok(length) => Ok(Got::Record(length)),
                Err(Errno::INTR) => continue,
                // EPIPE: records were overwritten, reading goes on at the oldest. EINVAL: this one is too long, and gone
                Err(Errno::PIPE | Errno::INVAL) => Ok(Got::Overrun),
                Err(errno) => Err(explain(errno, &self.path)),
            };
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

enum Got {
    Record(usize),
    Overrun,
    Nothing,
}

fn explain(errno: Errno, path: &str) -> ReadError {
    match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => ReadError::Absent(path.to_owned()),
        Errno::PERM | Errno::ACCESS => {
            classify(errno, format!("{path}; memledger needs the capability CAP_SYSLOG and the device"))
        }
        other => classify(other, path),
    }
}

/// Which records are new, and whether some are missing. No I/O.
#[derive(Debug, Default)]
pub(super) struct Reader {
    last: Option<Position>,
    /// The position before the first fragment of a line that is not whole.
    before_held: Option<Position>,
    joiner: Joiner,
    /// Until the log is known to go on after the place of the last run, what stands before it is kept.
    resume: Option<Resume>,
}

#[derive(Debug)]
struct Resume {
    after: Position,
    joiner: Joiner,
    before: Seen,
    is_met: bool,
    is_rewound: bool,
}

impl Reader {
    pub(super) fn resume_after(&mut self, after: Position) {
        let (joiner, before) = (Joiner::default(), Seen::default());
        self.resume = Some(Resume { after, joiner, before, is_met: false, is_rewound: false });
    }

    pub(super) fn position(&self) -> Position {
        let resume = self.resume.as_ref().map(|resume| resume.after);
        let held = self.before_held.filter(|_| self.joiner.held_sequence().is_some());
        held.or(self.last).or(resume).unwrap_or_default()
    }

    fn take(&mut self, record: Record<'_>, seen: &mut Seen) {
        let here = Position { sequence: Some(record.sequence), usec: record.usec };
        let expected = self.last.and_then(|last| last.sequence).map(|last| last + 1);
        let has_hole = expected.is_some_and(|expected| record.sequence != expected);
        if has_hole {
            self.joiner.reset();
        }
        let old = match &mut self.resume {
            Some(resume) => {
                let (is_old, lost) = resume.look_at(here, expected.is_none());
                seen.lost |= lost || (has_hole && !is_old);
                is_old
            }
            None => {
                seen.lost |= has_hole;
                false
            }
        };
        let mut found = Vec::new();
        match &mut self.resume {
            Some(resume) if old => {
                resume.joiner.push(record, &mut found);
                resume.before.entries.extend(found.into_iter().map(Into::into));
            }
            _ => {
                self.joiner.push(record, &mut found);
                seen.entries.extend(found.into_iter().map(Into::into));
                if self.joiner.held_sequence() == here.sequence {
                    self.before_held = self.last;
                }
            }
        }
        self.last = Some(here);
    }

    fn overrun(&mut self, seen: &mut Seen) {
        self.joiner.reset();
        // the jump of the numbers says whether it was before the place to resume at
        seen.lost |= self.resume.is_none();
    }

    fn drained(&mut self, seen: &mut Seen) {
        let mut found = Vec::new();
        self.joiner.drained(&mut found);
        seen.entries.extend(found.into_iter().map(Into::into));
        if self.last.is_none() {
            return; // an empty log: nothing to compare with yet
        }
        let Some(mut resume) = self.resume.take() else { return };
        if resume.is_rewound || !resume.is_met {
            let mut found = Vec::new();
            resume.joiner.drained(&mut found);
            let mut entries = resume.before.entries;
            entries.extend(found.into_iter().map(Into::into));
            entries.append(&mut seen.entries);
            seen.entries = entries;
            seen.rewound = true;
        }
    }
}

impl Resume {
    /// Whether a record was read by the last run, and whether records between that run and this one are missing.
    fn look_at(&mut self, here: Position, is_oldest: bool) -> (bool, bool) {
        let Some(sequence) = here.sequence else { return (false, false) };
        let Some(after) = self.after.sequence else {
            let is_old = here.usec <= self.after.usec;
            // equal or later: the log goes at least as far as the last run saw
            self.is_met |= here.usec >= self.after.usec;
            return (is_old, is_oldest && !is_old && sequence > 0);
        };
        self.is_met |= sequence >= after;
        self.is_rewound |= sequence == after && here.usec != self.after.usec;
        (sequence <= after, is_oldest && sequence > after + 1)
    }
}

#[cfg(test)]
mod tests;
