//! `--events.file`: each settled event as one line of JSON, for log shippers.
//!
//! At least once: the caller remembers the number of the last event that was written and gives the later ones again after
//! a failure or a restart. Each line has its `id`, by which a repeated one is known.
//!
//! The file may be renamed, removed or replaced at any time, as logrotate does: that is seen before the next line. A line
//! that a full disk or a crash cut off is ended before the next one, so that it spoils no other.
//!
//! Not here: which events are new ([`Store::settled_after`](super::store::Store::settled_after)).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::entries::Event;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum EventsFileError {
    /// The file cannot be opened or made.
    #[error(
        "cannot open {path} to append events; make its directory, and let memledger write there (--events.file)"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line cannot be written.
    #[error("cannot append an event to {path}; it is tried again with the next ones")]
    Write {
        /// The file.
        path: PathBuf,
        /// How many events of this call were written before.
        written: usize,
        /// Why.
        source: io::Error,
    },
}

impl EventsFileError {
    /// How many events stand in the file all the same, and must not be given again.
    pub fn written(&self) -> usize {
        match self {
            EventsFileError::Open { .. } => 0,
            EventsFileError::Write { written, .. } => *written,
        }
    }
}

/// The file, opened at its first line.
#[derive(Debug)]
pub struct EventsFile {
    path: PathBuf,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    /// Device and inode, by which it is known whether the path still leads to it.
    place: (u64, u64),
    regular: bool,
    /// The last line has no end.
    torn: bool,
}

impl EventsFile {
    /// A file at this path; nothing is opened yet.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), open: None }
    }

    /// Appends one line per event, one write each, and has them on disk when it returns.
    ///
    /// # Errors
    /// The file cannot be opened or written. Events may have been written; all may be given again.
    pub fn append(&mut self, events: &[Event]) -> Result<(), EventsFileError> {
        if events.is_empty() {
            return Ok(());
        }
        let path = &self.path;
        let place = fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
        let kept = self.open.take().filter(|open| Some(open.place) == place);
        let open = match kept {
            Some(open) => open,
            None => Open::at(path).map_err(|source| EventsFileError::Open { path: path.clone(), source })?,
        };
        let open = self.open.insert(open);
        for (written, event) in events.iter().enumerate() {
            open.write(event).map_err(|source| EventsFileError::Write {
                path: path.clone(),
                written,
                source,
            })?;
        }
        let written = events.len(); // not written again, though nobody knows whether they outlive a crash of the machine
        open.sync().map_err(|source| EventsFileError::Write { path: path.clone(), written, source })
    }
}

impl Open {
    fn at(path: &Path) -> io::Result<Self> {
        // a pipe that nobody reads must not stop the ledger: it is refused, or full, but never waited for
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let metadata = file.metadata()?;
        let regular = metadata.is_file();
        let torn = regular && metadata.len() > 0 && last_byte(path, metadata.len()) != Some(b'\n');
        Ok(Self { file, place: (metadata.dev(), metadata.ino()), regular, torn })
    }

    fn write(&mut self, event: &Event) -> io::Result<()> {
        let mut line = if self.torn { b"\n".to_vec() } else { vec![] };
        serde_json::to_writer(&mut line, event)?;
        line.push(b'\n');
        let mut rest = &line[..];
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(some) => {
                    rest = &rest[some..];
                    self.torn = !rest.is_empty();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if self.regular { self.file.sync_data() } else { Ok(()) }
    }
}

/// The last byte of a file; `None` if it may be written but not read.
fn last_byte(path: &Path, length: u64) -> Option<u8> {
    let mut byte = [0];
    File::open(path).and_then(|file| file.read_exact_at(&mut byte, length - 1)).ok()?;
    Some(byte[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::entries::{Kill, Reason, Scope, Subject, Whose};

    fn event(id: u64) -> Event {
        let (at, process) = (id as f64, "two\nlines".into());
        Event::OomKill(Kill { id, at, process, whose: Whose::Host, scope: Scope::Host, ..Kill::unknown() })
    }

    fn ids(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.ends_with('\n'));
        let parse = |line: &str| serde_json::from_str::<Event>(line).ok().map(|event| event.id());
        text.lines().map(|line| parse(line).unwrap_or(0)).collect()
    }

    #[test]
    fn each_event_is_one_line_and_a_later_batch_follows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let mut file = EventsFile::new(&path);
        file.append(&[]).unwrap();
        assert!(!path.exists(), "nothing is made without an event");
        file.append(&[event(1), event(2)]).unwrap();
        EventsFile::new(&path).append(&[event(3)]).unwrap();
        file.append(&[event(4)]).unwrap();
        assert_eq!(ids(&path), [1, 2, 3, 4]);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_file_that_was_moved_or_removed_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (path, old) = (dir.path().join("events.jsonl"), dir.path().join("events.jsonl.1"));
        let mut file = EventsFile::new(&path);
        file.append(&[event(1)]).unwrap();
        fs::rename(&path, &old).unwrap();
        file.append(&[event(2)]).unwrap();
        assert_eq!((ids(&old), ids(&path)), (vec![1], vec![2]));
        fs::remove_file(&path).unwrap();
        file.append(&[event(3)]).unwrap();
        assert_eq!(ids(&path), [3]);
    }

    #[test]
    fn a_line_that_was_cut_off_spoils_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        fs::write(&path, "{\"type\":\"oom_k").unwrap();
        EventsFile::new(&path).append(&[event(2)]).unwrap();
        assert_eq!(ids(&path), [0, 2]);
    }

    #[test]
    fn what_cannot_be_written_is_told_and_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/events.jsonl");
        let mut file = EventsFile::new(&path);
        let error = file.append(&[event(1)]).unwrap_err();
        assert!(error.to_string().contains("make its directory"), "{error}");
        fs::create_dir(dir.path().join("below")).unwrap();
        file.append(&[event(1)]).unwrap();
        assert_eq!(ids(&path), [1]);
        // a device that is always full
        let error = EventsFile::new(Path::new("/dev/full")).append(&[event(1)]).unwrap_err();
        assert!(matches!(error, EventsFileError::Write { written: 0, .. }), "{error:?}");
    }

    #[test]
    fn a_pipe_that_nobody_reads_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = EventsFile::new(&path).append(&[event(1)]).unwrap_err();
        assert!(matches!(error, EventsFileError::Open { .. }), "{error:?}");
    }

    #[test]
    fn an_exit_is_a_line_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let exit = Event::Exit(crate::ledger::entries::Exit {
            id: 9,
            at: 1.0,
            subject: Subject::default(),
            reason: Some(Reason::Stopped),
            exit_code: Some(0),
            runtime_oom_flag: None,
            asked_signals: vec![Some(15)],
            kernel_log_read: true,
            duration_seconds: None,
            oom_kills: 0,
            peak_usage_bytes: None,
            peak_unreclaimable_bytes: None,
            evidence: vec![],
            before: None,
        });
        EventsFile::new(&path).append(&[exit]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("{\"type\":\"exit\",\"id\":9,"), "{text}");
    }
}
