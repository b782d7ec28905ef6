//! /dev/kmsg: one record per read, oldest first.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::{LogBatch, LogEntry, LogPosition};
use crate::host::{ReadError, classify};
use crate::parse::kernel_log::records::{KmsgRecord, RecordAssembler};

/// Read buffer, larger than the longest record of any kernel (8 KiB before 5.18, 2 KiB since).
const RECORD_BYTES: usize = 16 * 1024;

/// Major and minor number of the device.
const KMSG: (u32, u32) = (1, 11);

/// The open device.
#[derive(Debug)]
pub(super) struct KmsgDevice {
    fd: OwnedFd,
    path: String,
    buffer: Vec<u8>,
    pub(super) reader: KmsgCursor,
}

impl KmsgDevice {
    pub(super) fn open(path: &Path) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = path.display().to_string();
        let fd = rustix::fs::open(path.as_str(), flags, Mode::empty())
            .map_err(|errno| read_error(errno, &path))?;
        // in some containers /dev/kmsg is a link to /dev/null or to the console, which poll(2) always reports as
        // readable
        let stat = rustix::fs::fstat(&fd).map_err(|errno| read_error(errno, &path))?;
        let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        if device != KMSG || !FileType::from_raw_mode(stat.st_mode).is_char_device() {
            return Err(ReadError::Absent(format!("{path} (not the kernel log device)")));
        }
        let mut this = Self { fd, path, buffer: vec![0; RECORD_BYTES], reader: KmsgCursor::default() };
        this.reader.assembler.set_page_bytes(rustix::param::page_size() as u64);
        // the device cgroup and CAP_SYSLOG may be checked only at the first read
        this.read_one()?;
        match rustix::fs::seek(&this.fd, SeekFrom::Start(0)) {
            Ok(_) => Ok(this),
            Err(errno) => Err(read_error(errno, &this.path)),
        }
    }

    pub(super) fn read(&mut self) -> Result<LogBatch, ReadError> {
        let mut batch = LogBatch::default();
        loop {
            match self.read_one() {
                Ok(KmsgRead::Record(length)) => {
                    if let Some(record) = KmsgRecord::of(&self.buffer[..length]) {
                        self.reader.push(record, &mut batch);
                    }
                }
                Ok(KmsgRead::Overrun) => self.reader.overrun(&mut batch),
                Ok(KmsgRead::Empty) => break,
                // returns the entries read so far; the next read fails with the same error
                Err(_) if !batch.entries.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        self.reader.finish_read(&mut batch);
        Ok(batch)
    }

    fn read_one(&mut self) -> Result<KmsgRead, ReadError> {
        loop {
            return match rustix::io::read(&self.fd, self.buffer.as_mut_slice()) {
                Ok(0) | Err(Errno::AGAIN) => Ok(KmsgRead::Empty),
                Ok(length) => Ok(KmsgRead::Record(length)),
                Err(Errno::INTR) => continue,
                // EPIPE: records were overwritten, and reading continues at the oldest. EINVAL: the record is too long
                // and lost
                Err(Errno::PIPE | Errno::INVAL) => Ok(KmsgRead::Overrun),
                Err(errno) => Err(read_error(errno, &self.path)),
            };
        }
    }
}

impl AsFd for KmsgDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

enum KmsgRead {
    Record(usize),
    Overrun,
    Empty,
}

fn read_error(errno: Errno, path: &str) -> ReadError {
    match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => ReadError::Absent(path.to_owned()),
        Errno::PERM | Errno::ACCESS => {
            classify(errno, format!("{path} (needs the capability CAP_SYSLOG and access to the device)"))
        }
        other => classify(other, path),
    }
}

/// Detects new and missing records. No I/O.
#[derive(Debug, Default)]
pub(super) struct KmsgCursor {
    last: Option<LogPosition>,
    /// The oldest record that was read.
    oldest: Option<LogPosition>,
    /// The position before the first fragment of an incomplete line.
    before_fragments: Option<LogPosition>,
    assembler: RecordAssembler,
    /// Keeps older entries until the log is known to continue after the position of the last run.
    resume: Option<Resume>,
}

#[derive(Debug, Default)]
struct Resume {
    after: LogPosition,
    assembler: RecordAssembler,
    before: LogBatch,
    is_reached: bool,
    is_rewound: bool,
    is_handed_over: bool,
}

impl KmsgCursor {
    pub(super) fn resume_after(&mut self, after: LogPosition) {
        let mut resume = Resume { after, ..Resume::default() };
        resume.assembler.continue_report_of(&mut self.assembler); // with the page size
        self.resume = Some(resume);
    }

    pub(super) fn position(&self) -> LogPosition {
        let resume = self.resume.as_ref().map(|resume| resume.after);
        let held = self.before_fragments.filter(|_| self.assembler.held_sequence().is_some());
        held.or(self.last).or(resume).unwrap_or_default()
    }

    pub(super) fn oldest(&self) -> Option<LogPosition> {
        self.oldest
    }

    fn push(&mut self, record: KmsgRecord<'_>, batch: &mut LogBatch) {
        let here = LogPosition { sequence: Some(record.sequence), usec: record.usec };
        self.oldest.get_or_insert(here);
        let expected = self.last.and_then(|last| last.sequence).map(|last| last + 1);
        let has_gap = expected.is_some_and(|expected| record.sequence != expected);
        if has_gap {
            self.assembler.reset();
            self.resume.iter_mut().for_each(|resume| resume.assembler.reset());
        }
        let old = match &mut self.resume {
            Some(resume) => {
                let (is_old, lost) = resume.compare(here, expected.is_none());
                batch.lost |= lost || (has_gap && !is_old);
                is_old
            }
            None => {
                batch.lost |= has_gap;
                false
            }
        };
        let mut found = Vec::new();
        match &mut self.resume {
            Some(resume) if old => {
                resume.assembler.push(record, &mut found);
                resume.before.entries.extend(found.into_iter().map(Into::into));
            }
            _ => {
                if let Some(resume) = &mut self.resume {
                    resume.hand_over(&mut self.assembler, batch);
                }
                self.assembler.push(record, &mut found);
                batch.entries.extend(found.into_iter().map(Into::into));
                if self.assembler.held_sequence() == here.sequence {
                    self.before_fragments = self.last;
                }
            }
        }
        self.last = Some(here);
    }

    fn overrun(&mut self, batch: &mut LogBatch) {
        self.assembler.reset();
        // the gap in the numbers shows whether this was before the position to resume at
        batch.lost |= self.resume.is_none();
    }

    fn finish_read(&mut self, batch: &mut LogBatch) {
        let mut found = Vec::new();
        self.assembler.flush(&mut found);
        batch.entries.extend(found.into_iter().map(Into::into));
        if self.last.is_none() {
            return; // the log is empty: nothing to compare yet
        }
        let Some(mut resume) = self.resume.take() else { return };
        resume.hand_over(&mut self.assembler, batch);
        if resume.is_rewound || !resume.is_reached {
            let mut found = Vec::new();
            resume.assembler.flush(&mut found);
            let mut entries = resume.before.entries;
            entries.extend(found.into_iter().map(Into::into));
            entries.append(&mut batch.entries);
            batch.entries = entries;
            batch.rewound = true;
        }
    }
}

impl Resume {
    /// Lets the first new record continue a block that began among the old ones: the last run may have ended within it. Its
    /// begin is returned again, which changes nothing.
    fn hand_over(&mut self, assembler: &mut RecordAssembler, batch: &mut LogBatch) {
        if std::mem::replace(&mut self.is_handed_over, true) {
            return;
        }
        let mut found = Vec::new();
        self.assembler.flush(&mut found);
        self.before.entries.extend(found.into_iter().map(Into::into));
        assembler.continue_report_of(&mut self.assembler);
        batch.entries.extend_from_slice(LogEntry::open_block(&self.before.entries));
    }

    /// Returns whether a record was read by the last run, and whether records between that run and this one are
    /// missing.
    fn compare(&mut self, here: LogPosition, is_oldest: bool) -> (bool, bool) {
        let Some(sequence) = here.sequence else { return (false, false) };
        let Some(after) = self.after.sequence else {
            let is_old = here.usec <= self.after.usec;
            // equal or later: the log reaches at least as far as in the last run
            self.is_reached |= here.usec >= self.after.usec;
            return (is_old, is_oldest && !is_old && sequence > 0);
        };
        self.is_reached |= sequence >= after;
        self.is_rewound |= sequence == after && here.usec != self.after.usec;
        (sequence <= after, is_oldest && sequence > after + 1)
    }
}

#[cfg(test)]
mod tests;
