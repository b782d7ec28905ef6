//! `--events.file`: appends each settled event as one line of JSON, for log shippers.
//!
//! Each event is written once: after a crash the last line shows which events were written
//! ([`EventsFile::last_id`]). Ids increase from line to line.
//!
//! The file may be renamed, removed or replaced at any time, as logrotate does: this is detected before the next line.
//! A line that was cut off by a full disk or a crash is terminated before the next one, so that the next one stays
//! valid.
//!
//! New events are selected by [`super::followers`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::events::LedgerEvent;

/// Maximum size of the end of the file in which the last event is searched.
const MAX_TAIL_BYTES: u64 = 16 << 20;

/// An error of the events file.
#[derive(Debug, thiserror::Error)]
pub enum EventsFileError {
    /// The file cannot be opened or created.
    #[error(
        "cannot open {path} to append events; create its directory and give memledger write permission (--events.file)"
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A line cannot be written.
    #[error("cannot append an event to {path}; it is retried together with the next ones")]
    Write {
        /// The file.
        path: PathBuf,
        /// Number of events of this call that were written before.
        written: usize,
        /// Cause.
        source: io::Error,
    },
}

impl EventsFileError {
    /// Returns the number of events that were written nevertheless and must not be passed again.
    pub fn written(&self) -> usize {
        match self {
            EventsFileError::Open { .. } => 0,
            EventsFileError::Write { written, .. } => *written,
        }
    }
}

/// The events file; opened with its first line.
#[derive(Debug)]
pub struct EventsFile {
    path: PathBuf,
    open: Option<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    /// Device and inode, to detect that the path leads to another file.
    file_id: (u64, u64),
    is_regular: bool,
    /// The last line is incomplete.
    is_partial: bool,
}

impl EventsFile {
    /// Creates a sink for this path; the file is opened later.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), open: None }
    }

    /// Returns the id of the last event in the file; `None` if there is none, or if it cannot be read.
    pub fn last_id(&self) -> Option<u64> {
        // O_NONBLOCK: opening a pipe must not block
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&self.path).ok()?;
        let length = file.metadata().ok().filter(fs::Metadata::is_file)?.len();
        let mut tail_bytes = 64 << 10;
        loop {
            let start = length.saturating_sub(tail_bytes);
            let mut tail = vec![0; (length - start) as usize];
            file.read_exact_at(&mut tail, start).ok()?;
            let mut lines = tail.rsplit(|byte| *byte == b'\n');
            let last = lines.find_map(|line| serde_json::from_slice::<LedgerEvent>(line).ok());
            if last.is_some() || start == 0 || tail_bytes >= MAX_TAIL_BYTES {
                return last.map(|event| event.id());
            }
            tail_bytes *= 4;
        }
    }

    /// Appends one line per event with one write each, and syncs the file.
    ///
    /// # Errors
    /// The file cannot be opened or written. See [`EventsFileError::written`].
    pub fn append(&mut self, events: &[LedgerEvent]) -> Result<(), EventsFileError> {
        if events.is_empty() {
            return Ok(());
        }
        let path = &self.path;
        let file_id = fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
        let reusable = self.open.take().filter(|open| Some(open.file_id) == file_id);
        let open = match reusable {
            Some(open) => open,
            None => {
                OpenFile::at(path).map_err(|source| EventsFileError::Open { path: path.clone(), source })?
            }
        };
        let open = self.open.insert(open);
        for (written, event) in events.iter().enumerate() {
            open.write(event).map_err(|source| EventsFileError::Write {
                path: path.clone(),
                written,
                source,
            })?;
        }
        let written = events.len(); // do not write them again, although they may not survive a crash of the machine
        open.sync().map_err(|source| EventsFileError::Write { path: path.clone(), written, source })
    }
}

impl OpenFile {
    fn at(path: &Path) -> io::Result<Self> {
        // O_NONBLOCK: a pipe without a reader must fail rather than block the ledger
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let metadata = file.metadata()?;
        let is_regular = metadata.is_file();
        let is_partial = is_regular && metadata.len() > 0 && last_byte(path, metadata.len()) != Some(b'\n');
        Ok(Self { file, file_id: (metadata.dev(), metadata.ino()), is_regular, is_partial })
    }

    fn write(&mut self, event: &LedgerEvent) -> io::Result<()> {
        let mut line = if self.is_partial { b"\n".to_vec() } else { vec![] };
        serde_json::to_writer(&mut line, event)?;
        line.push(b'\n');
        let mut rest = &line[..];
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(some) => {
                    rest = &rest[some..];
                    self.is_partial = !rest.is_empty();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if self.is_regular { self.file.sync_data() } else { Ok(()) }
    }
}

/// Returns the last byte of a file; `None` if the file can be written but not read.
fn last_byte(path: &Path, length: u64) -> Option<u8> {
    let mut byte = [0];
    File::open(path).and_then(|file| file.read_exact_at(&mut byte, length - 1)).ok()?;
    Some(byte[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{ContainerRef, ExitReason, Kill, KillOwner, OomScope};

    fn event(id: u64) -> LedgerEvent {
        let (at, process) = (id as f64, "two\nlines".into());
        LedgerEvent::OomKill(Kill {
            id,
            at,
            process,
            owner: KillOwner::Host,
            scope: OomScope::Host,
            ..Kill::unknown()
        })
    }

    fn ids(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        assert!(text.ends_with('\n'));
        let parse = |line: &str| serde_json::from_str::<LedgerEvent>(line).ok().map(|event| event.id());
        text.lines().map(|line| parse(line).unwrap_or(0)).collect()
    }

    #[test]
    fn writes_one_line_per_event_and_appends_later_batches() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let mut file = EventsFile::new(&path);
        file.append(&[]).unwrap();
        assert!(!path.exists(), "no file without an event");
        file.append(&[event(1), event(2)]).unwrap();
        EventsFile::new(&path).append(&[event(3)]).unwrap();
        file.append(&[event(4)]).unwrap();
        assert_eq!(ids(&path), [1, 2, 3, 4]);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    }

    #[test]
    fn last_id_is_that_of_the_last_whole_event() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let last = || EventsFile::new(&path).last_id();
        assert_eq!(last(), None, "no file");
        EventsFile::new(&path).append(&[event(7), event(8)]).unwrap();
        assert_eq!(last(), Some(8));
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(last(), Some(8), "only its line feed is missing");
        fs::write(&path, &whole[..whole.len() - 2]).unwrap();
        assert_eq!(last(), Some(7), "cut off");
        fs::write(&path, [&whole[..], &vec![b'x'; 300_000], b"\n{\"id\":99}\n"].concat()).unwrap();
        assert_eq!(last(), Some(8), "other lines are ignored");
        fs::write(&path, "not ours\n").unwrap();
        assert_eq!(last(), None);
        assert_eq!(EventsFile::new(Path::new("/dev/full")).last_id(), None);
    }

    #[test]
    fn recreates_file_that_was_moved_or_removed() {
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
    fn terminates_line_that_was_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        fs::write(&path, "{\"type\":\"oom_k").unwrap();
        EventsFile::new(&path).append(&[event(2)]).unwrap();
        assert_eq!(ids(&path), [0, 2]);
    }

    #[test]
    fn reports_failed_write_and_retries() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/events.jsonl");
        let mut file = EventsFile::new(&path);
        let error = file.append(&[event(1)]).unwrap_err();
        assert!(error.to_string().contains("create its directory"), "{error}");
        fs::create_dir(dir.path().join("below")).unwrap();
        file.append(&[event(1)]).unwrap();
        assert_eq!(ids(&path), [1]);
        // a device that is always full
        let error = EventsFile::new(Path::new("/dev/full")).append(&[event(1)]).unwrap_err();
        assert!(matches!(error, EventsFileError::Write { written: 0, .. }), "{error:?}");
    }

    #[test]
    fn pipe_without_reader_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = EventsFile::new(&path).append(&[event(1)]).unwrap_err();
        assert!(matches!(error, EventsFileError::Open { .. }), "{error:?}");
    }

    #[test]
    fn writes_exit_as_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let exit = LedgerEvent::Exit(crate::events::Exit {
            id: 9,
            at: 1.0,
            subject: ContainerRef::default(),
            reason: Some(ExitReason::Stopped),
            exit_code: Some(0),
            runtime_oom_flag: None,
            stop_signals: vec![Some(15)],
            kernel_log_read: true,
            duration_seconds: None,
            oom_kills: 0,
            ended_by: None,
            may_be: vec![],
            requests_known: true,
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
