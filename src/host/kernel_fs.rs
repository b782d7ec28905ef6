//! Open kernel files and directories.
//!
//! Kernel text is bytes, not UTF-8. Errors are classified by errno, not by `ErrorKind`: reading a removed cgroup
//! returns ENODEV, which Rust maps to *uncategorized*.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

use super::bounds::{self, Bound, OnOverflow};

/// Error from reading a kernel file.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// The process or cgroup ended. Never counted as an error.
    #[error("{0} is gone")]
    Gone(String),
    /// This kernel or host does not have the file.
    #[error("{what} is missing {}", if super::in_container() { "in this container" } else { "on this host" }, what = .0)]
    Absent(String),
    /// The file exists, and reading it failed.
    #[error("reading {what} failed")]
    Fault {
        /// The file.
        what: String,
        /// The error of the system call.
        source: Errno,
    },
    /// The content is not what this kernel file should hold.
    #[error("unexpected content: {0}")]
    Malformed(String),
    /// The file is longer than its [`Bound`].
    #[error("{0} is too large: it exceeds the size limit for reads")]
    TooLarge(String),
    /// The read did not return before the deadline.
    #[error("reading {0} timed out")]
    TimedOut(String),
}

/// The reasons in `memledger_collector_read_errors_total` that apply to every collector; some collectors also have
/// `balance`.
pub const READ_ERROR_REASONS: [&str; 3] = ["io", "malformed", "permission"];

impl ReadError {
    /// Creates a [`ReadError::Malformed`].
    pub fn malformed(what: impl Into<String>) -> Self {
        ReadError::Malformed(what.into())
    }

    /// Returns the label of this error in `memledger_collector_read_errors_total`, or `None` if it is not counted.
    pub fn reason_label(&self) -> Option<&'static str> {
        match self {
            ReadError::Gone(_) | ReadError::Absent(_) => None,
            ReadError::Malformed(_) => Some("malformed"),
            ReadError::TooLarge(_) => Some("too_large"),
            ReadError::TimedOut(_) => Some("timeout"),
            ReadError::Fault { source: Errno::ACCESS | Errno::PERM, .. } => Some("permission"),
            ReadError::Fault { .. } => Some("io"),
        }
    }

    /// Returns true if the process or cgroup ended.
    pub fn is_gone(&self) -> bool {
        matches!(self, ReadError::Gone(_))
    }
}

/// Converts the errno of a kernel file.
///
/// ENOENT, ESRCH and ENODEV: the cgroup or process is gone. EOPNOTSUPP and ENOSYS: the feature is off (PSI that is
/// disabled at boot returns EOPNOTSUPP). Anything else is an error.
pub fn classify(errno: Errno, what: impl Into<String>) -> ReadError {
    match errno {
        Errno::NOENT | Errno::SRCH | Errno::NODEV => ReadError::Gone(what.into()),
        Errno::OPNOTSUPP | Errno::NOSYS => ReadError::Absent(what.into()),
        _ => ReadError::Fault { what: what.into(), source: errno },
    }
}

/// An open directory, whose files are opened by relative name.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it does not exist.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, path: path.to_path_buf() }),
            Err(errno) => Err(classify(errno, path.display().to_string())),
        }
    }

    /// Opens a file in this directory.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it does not exist: the directory was removed, or this kernel has no such file.
    pub fn file(&self, name: &'static str) -> Result<KernelFile, ReadError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(KernelFile { file: fd.into(), name, bound: Bound::of(name.as_bytes()) }),
            Err(errno) => Err(classify(errno, self.path.join(name).display().to_string())),
        }
    }

    /// Opens a directory in this directory.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it does not exist: this directory was removed, or this kernel has no such directory.
    pub fn below(&self, name: &str) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let path = self.path.join(name);
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, path }),
            Err(errno) => Err(classify(errno, path.display().to_string())),
        }
    }

    /// Opens a file whose name is known only at run time, such as a number.
    ///
    /// # Errors
    /// As [`Dir::file`].
    pub fn file_of(&self, name: &OsStr) -> Result<KernelFile, ReadError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(KernelFile { file: fd.into(), name: "file", bound: Bound::of(name.as_bytes()) }),
            Err(errno) => Err(classify(errno, self.path.join(name).display().to_string())),
        }
    }

    /// Opens a file that not every kernel has. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// All except *no such file*.
    pub fn optional_file(&self, name: &'static str) -> Result<Option<KernelFile>, ReadError> {
        match self.file(name) {
            Ok(file) => Ok(Some(file)),
            Err(ReadError::Gone(_) | ReadError::Absent(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the inode number: a cgroup that is removed and created again under the same path has a different one.
    ///
    /// # Errors
    /// The directory was removed.
    pub fn inode(&self) -> Result<u64, ReadError> {
        rustix::fs::fstat(&self.fd)
            .map(|stat| stat.st_ino)
            .map_err(|errno| classify(errno, self.path.display().to_string()))
    }

    /// Returns the user id of its owner.
    ///
    /// # Errors
    /// The directory was removed.
    pub fn owner(&self) -> Result<u32, ReadError> {
        rustix::fs::fstat(&self.fd)
            .map(|stat| stat.st_uid)
            .map_err(|errno| classify(errno, self.path.display().to_string()))
    }

    /// Calls `each` for every name in the directory except `.` and `..`, for at most `max_names` names; the flag is
    /// true for a directory. Returns true if there are more names.
    ///
    /// # Errors
    /// The directory was removed, or cannot be listed.
    pub fn for_each(
        &self,
        max_names: usize,
        buffer: &mut Vec<u8>,
        mut each: impl FnMut(&OsStr, bool),
    ) -> Result<bool, ReadError> {
        buffer.clear();
        buffer.reserve(32 * 1024);
        let mut entries = RawDir::new(&self.fd, buffer.spare_capacity_mut());
        let mut names = 0;
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(|errno| classify(errno, self.path.display().to_string()))?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if names == max_names {
                return Ok(true);
            }
            names += 1;
            each(OsStr::from_bytes(name), entry.file_type() == FileType::Directory);
        }
        Ok(false)
    }

    /// Calls `each` for at most `max_entries` entries, starting at `cookie`, which is 0 at the start; `.` and `..`
    /// count towards the maximum but are omitted.
    ///
    /// For directories that may have millions of names. Returns the cookie to continue from, which stays valid if this
    /// directory is closed and opened again, or `None` at the end.
    ///
    /// # Errors
    /// As [`Dir::for_each`].
    pub fn for_some(
        &self,
        cookie: u64,
        max_entries: usize,
        buffer: &mut Vec<u8>,
        mut each: impl FnMut(&OsStr) -> Result<(), ReadError>,
    ) -> Result<Option<u64>, ReadError> {
        let error = |errno| classify(errno, self.path.display().to_string());
        rustix::fs::seek(&self.fd, SeekFrom::Start(cookie)).map_err(error)?;
        buffer.clear();
        buffer.reserve(32 * 1024);
        let mut entries = RawDir::new(&self.fd, buffer.spare_capacity_mut());
        let mut count = 0;
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(error)?;
            let (name, next) = (entry.file_name().to_bytes(), entry.next_entry_cookie());
            if name != b"." && name != b".." {
                each(OsStr::from_bytes(name))?;
            }
            count += 1;
            if count == max_entries {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    /// Returns the path by which the directory was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The least that one read asks for: with less, the kernel returns fewer records than fit a page.
const READ_BYTES: usize = 4 * 1024;

/// Drains an inotify queue, up to the kernel's default queue length, since notifications may arrive as fast as they are
/// read. Returns true if there were any.
pub fn take_notifications(queue: &OwnedFd) -> bool {
    let mut any = false;
    for_each_notification(queue, |_| any = true);
    any
}

/// Drains an inotify queue like [`take_notifications`] and calls `each` with the watch descriptor of every
/// notification, which is -1 if the queue overflowed. Skips notifications of removed watches.
pub fn for_each_notification(queue: &OwnedFd, mut each: impl FnMut(i32)) {
    const MAX_QUEUED: usize = 16_384;
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = rustix::fs::inotify::Reader::new(queue, &mut buffer);
    for _ in 0..MAX_QUEUED {
        let Ok(event) = reader.next() else { return };
        if !event.events().contains(rustix::fs::inotify::ReadFlags::IGNORED) {
            each(event.wd());
        }
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An open kernel file that is read repeatedly from its start, never beyond its [`Bound`].
#[derive(Debug)]
pub struct KernelFile {
    file: File,
    name: &'static str,
    bound: &'static Bound,
}

impl AsFd for KernelFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl KernelFile {
    /// Returns whether the kernel reports that a mount table has changed since it was opened, or since the last call.
    pub fn has_changed(&self) -> bool {
        let mut files = [PollFd::new(self, PollFlags::PRI | PollFlags::ERR)];
        poll(&mut files, Some(&Timespec::default())).is_ok_and(|changed| changed > 0)
            && files[0].revents().intersects(PollFlags::PRI | PollFlags::ERR)
    }

    /// Opens a file by path.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it does not exist.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => {
                let bound = Bound::of(path.file_name().unwrap_or_default().as_bytes());
                Ok(Self { file: fd.into(), name: "file", bound })
            }
            Err(errno) => Err(classify(errno, path.display().to_string())),
        }
    }

    /// Reads a file that the kernel returns in one piece (all small files of cgroups and procfs): one system call.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if the cgroup or process is gone, also if it ended after the file was opened;
    /// [`ReadError::TooLarge`] if the file exceeds its limit and must not be truncated.
    pub fn read_once<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        const FIRST_READ_BYTES: usize = 8 * 1024;
        clear(buffer);
        buffer.reserve(FIRST_READ_BYTES);
        let got = self.read_at(buffer, 0)?;
        if got < FIRST_READ_BYTES { Ok(buffer) } else { self.read_rest(buffer, 1) }
    }

    /// Reads a file of many short records (pid lists, vmstat) to its end: the kernel returns whole records until a page is full,
    /// so a read that leaves room for one more was the last one.
    ///
    /// # Errors
    /// As [`KernelFile::read_once`].
    pub fn read_all<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        const RECORD_BYTES: usize = 128;
        clear(buffer);
        self.read_rest(buffer, READ_BYTES - RECORD_BYTES)
    }

    /// Reads on until a read returns less than this.
    fn read_rest<'a>(&self, buffer: &'a mut Vec<u8>, full: usize) -> Result<&'a [u8], ReadError> {
        loop {
            buffer.reserve(READ_BYTES);
            if self.read_at(buffer, buffer.len() as u64)? < full {
                return Ok(buffer);
            }
            if buffer.len() > self.bound.max_bytes {
                buffer.truncate(self.bound.max_bytes);
                return match self.bound.on_overflow {
                    OnOverflow::Truncate => Ok(buffer),
                    OnOverflow::Fail => Err(self.too_large()),
                };
            }
        }
    }

    /// Reads a file in chunks until `find`, which is called with whole lines, returns a value.
    ///
    /// # Errors
    /// As [`KernelFile::read_once`]; [`ReadError::TooLarge`] if nothing is found within the file's limit.
    pub fn find_line<T>(
        &self,
        buffer: &mut Vec<u8>,
        mut find: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Option<T>, ReadError> {
        clear(buffer);
        let mut offset = 0;
        loop {
            buffer.reserve(8 * 1024);
            let got = self.read_at(buffer, offset as u64)?;
            offset += got;
            let whole = buffer.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
            if let Some(found) = find(&buffer[..whole]) {
                return Ok(Some(found));
            }
            if got == 0 {
                return Ok(None);
            }
            if offset > self.bound.max_bytes {
                return Err(self.too_large());
            }
            buffer.drain(..whole);
        }
    }

    fn too_large(&self) -> ReadError {
        ReadError::TooLarge(self.name.to_owned())
    }

    fn read_at(&self, buffer: &mut Vec<u8>, offset: u64) -> Result<usize, ReadError> {
        loop {
            match rustix::io::pread(&self.file, rustix::buffer::spare_capacity(buffer), offset) {
                Ok(got) => return Ok(got),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(classify(errno, self.name)),
            }
        }
    }
}

/// Empties a buffer and releases the memory of a long read.
fn clear(buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.shrink_to(bounds::MAX_RETAINED_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn lists_procfs_directory_in_chunks_without_gaps_or_duplicates() {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "exec 3<&0 5<&0 6<&0 9<&0; echo ready; read end"]);
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let path = format!("/proc/{}/fd", shell.id());
        let mut buffer = Vec::new();
        let mut whole = Vec::new();
        let dir = Dir::open(Path::new(&path)).unwrap();
        dir.for_each(usize::MAX, &mut buffer, |name, _| whole.push(name.to_owned())).unwrap();
        assert!(["0", "3", "5", "6", "9"].iter().all(|name| whole.contains(&(*name).into())), "{whole:?}");
        for max_entries in 1..=whole.len() + 3 {
            let (mut found, mut cookie) = (Vec::new(), Some(0));
            while let Some(from) = cookie {
                let dir = Dir::open(Path::new(&path)).unwrap();
                let each = |name: &OsStr| {
                    found.push(name.to_owned());
                    Ok(())
                };
                cookie = dir.for_some(from, max_entries, &mut buffer, each).unwrap();
            }
            assert_eq!(found, whole, "{max_entries} at a time");
        }
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }

    fn file(name: &str, text: &[u8]) -> (tempfile::TempDir, KernelFile) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), text).unwrap();
        let file = KernelFile::open(&folder.path().join(name)).unwrap();
        (folder, file)
    }

    #[test]
    fn truncates_or_rejects_file_over_limit_and_releases_its_memory() {
        let mut buffer = Vec::new();
        for bound in bounds::FILES.iter().chain([&bounds::OTHER]) {
            let name = if bound.file.is_empty() { "smaps_rollup" } else { bound.file };
            let at_bound = vec![b'x'; bound.max_bytes];
            let (_folder, short) = file(name, &at_bound);
            assert_eq!(short.read_once(&mut buffer).unwrap().len(), bound.max_bytes, "{name}");
            let (_folder, long) = file(name, &[at_bound, vec![b'x'; 10 << 20]].concat());
            match (bound.on_overflow, long.read_all(&mut buffer)) {
                (OnOverflow::Truncate, Ok(text)) => assert_eq!(text.len(), bound.max_bytes),
                (OnOverflow::Fail, Err(error)) => assert_eq!(error.reason_label(), Some("too_large")),
                (_, read) => panic!("{name}: {read:?}"),
            }
            assert!(buffer.capacity() <= 2 * bound.max_bytes + (8 << 10), "{name}");
            let (_folder, small) = file("statm", b"1 2 3");
            assert_eq!(small.read_once(&mut buffer).unwrap(), b"1 2 3");
            assert!(
                buffer.capacity() <= bounds::MAX_RETAINED_BYTES,
                "{} bytes are retained",
                buffer.capacity()
            );
        }
    }

    #[test]
    fn finds_line_within_limit_without_buffering_whole_file() {
        let bound = Bound::of(b"mountinfo").max_bytes;
        let filler = "x".repeat(99) + "\n";
        let (before, after) = (filler.repeat(1000), filler.repeat(bound / 100 + 1000));
        let mut buffer = Vec::new();
        let find = |text: &[u8]| {
            text.split(|&byte| byte == b'\n').find(|line| *line == b"this one").map(<[u8]>::to_vec)
        };
        for (text, wanted) in [
            (format!("{before}this one\n{after}"), Some(true)),
            (format!("{before}this one"), Some(false)), // the line may be incomplete
            (format!("{before}{after}this one\n"), None),
        ] {
            let (_folder, file) = file("mountinfo", text.as_bytes());
            let found = file.find_line(&mut buffer, find);
            assert_eq!(found.as_ref().ok().map(Option::is_some), wanted, "{found:?}");
            assert!(buffer.capacity() <= 64 << 10);
        }
    }
}
