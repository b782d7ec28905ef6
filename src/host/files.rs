//! Opened kernel files and directories.
//!
//! Kernel text is bytes, not UTF-8, and an errno says what happened, not `ErrorKind`: a cgroup that was removed answers
//! ENODEV, which Rust files under *uncategorized*.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

/// Why a reading gave no value.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The process or cgroup ended. Never a fault.
    #[error("{0} is gone")]
    Gone(String),
    /// This kernel or host does not have it.
    #[error("{0} is not there on this host")]
    Absent(String),
    /// It is there, and reading it failed.
    #[error("cannot read {what}")]
    Fault {
        /// The file.
        what: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// It was read, and the text is not what this kernel file should hold.
    #[error("unexpected content: {0}")]
    Malformed(String),
}

/// The reasons that every collector may have in `memledger_read_faults_total`; some have `balance` too.
pub const FAULT_REASONS: [&str; 3] = ["io", "malformed", "permission"];

impl ReadError {
    /// A [`ReadError::Malformed`].
    pub fn malformed(what: impl Into<String>) -> Self {
        ReadError::Malformed(what.into())
    }

    /// The label of this error in `memledger_read_faults_total`; `None` for what is no fault.
    pub fn fault_reason(&self) -> Option<&'static str> {
        match self {
            ReadError::Gone(_) | ReadError::Absent(_) => None,
            ReadError::Malformed(_) => Some("malformed"),
            ReadError::Fault { source, .. } => match Errno::from_io_error(source) {
                Some(Errno::ACCESS | Errno::PERM) => Some("permission"),
                _ => Some("io"),
            },
        }
    }

    /// True if the thing read is gone.
    pub fn is_gone(&self) -> bool {
        matches!(self, ReadError::Gone(_))
    }
}

/// What an errno of a kernel file means.
///
/// ENOENT, ESRCH and ENODEV: the cgroup or process is gone. EOPNOTSUPP and ENOSYS: the feature is off (PSI disabled at
/// boot answers a read so). The rest is a fault.
pub fn classify(errno: Errno, what: impl Into<String>) -> ReadError {
    match errno {
        Errno::NOENT | Errno::SRCH | Errno::NODEV => ReadError::Gone(what.into()),
        Errno::OPNOTSUPP | Errno::NOSYS => ReadError::Absent(what.into()),
        _ => ReadError::Fault { what: what.into(), source: errno.into() },
    }
}

/// A held directory, read by relative name.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if there is none.
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
    /// [`ReadError::Gone`] if there is none: the directory was removed, or this kernel has no such file.
    pub fn file(&self, name: &'static str) -> Result<KernelFile, ReadError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(KernelFile { file: fd.into(), name }),
            Err(errno) => Err(classify(errno, self.path.join(name).display().to_string())),
        }
    }

    /// Opens a directory in this directory.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if there is none: this directory was removed, or this kernel has no such thing.
    pub fn below(&self, name: &str) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let path = self.path.join(name);
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, path }),
            Err(errno) => Err(classify(errno, path.display().to_string())),
        }
    }

    /// Opens a file in this directory whose name is not known before, such as a number.
    ///
    /// # Errors
    /// As [`Dir::file`].
    pub fn file_of(&self, name: &OsStr) -> Result<KernelFile, ReadError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(KernelFile { file: fd.into(), name: "file" }),
            Err(errno) => Err(classify(errno, self.path.join(name).display().to_string())),
        }
    }

    /// Opens a file that not every kernel has: `None` if there is none.
    ///
    /// # Errors
    /// All but *no such file*.
    pub fn optional_file(&self, name: &'static str) -> Result<Option<KernelFile>, ReadError> {
        match self.file(name) {
            Ok(file) => Ok(Some(file)),
            Err(ReadError::Gone(_) | ReadError::Absent(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Inode number: a cgroup removed and made again under the same path has another one.
    ///
    /// # Errors
    /// The directory was removed.
    pub fn inode(&self) -> Result<u64, ReadError> {
        rustix::fs::fstat(&self.fd)
            .map(|stat| stat.st_ino)
            .map_err(|errno| classify(errno, self.path.display().to_string()))
    }

    /// Calls `each` for every name in the directory but `.` and `..`; the flag is true for a directory.
    ///
    /// # Errors
    /// The directory was removed, or cannot be listed.
    pub fn for_each(
        &self,
        buffer: &mut Vec<u8>,
        mut each: impl FnMut(&OsStr, bool),
    ) -> Result<(), ReadError> {
        buffer.clear();
        buffer.reserve(32 * 1024);
        let mut entries = RawDir::new(&self.fd, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(|errno| classify(errno, self.path.display().to_string()))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                each(OsStr::from_bytes(name), entry.file_type() == FileType::Directory);
            }
        }
        Ok(())
    }

    /// Calls `each` for at most so many names, from a place in the directory on: `.` and `..` count, and are left out.
    ///
    /// For directories that may have millions of names. Answers the place to go on from, also if this directory is closed
    /// and opened again; `None` at the end. The first place is 0.
    ///
    /// # Errors
    /// As [`Dir::for_each`].
    pub fn for_some(
        &self,
        place: u64,
        most: usize,
        buffer: &mut Vec<u8>,
        mut each: impl FnMut(&OsStr) -> Result<(), ReadError>,
    ) -> Result<Option<u64>, ReadError> {
        let fault = |errno| classify(errno, self.path.display().to_string());
        rustix::fs::seek(&self.fd, SeekFrom::Start(place)).map_err(fault)?;
        buffer.clear();
        buffer.reserve(32 * 1024);
        let mut entries = RawDir::new(&self.fd, buffer.spare_capacity_mut());
        let mut looked = 0;
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(fault)?;
            let (name, next) = (entry.file_name().to_bytes(), entry.next_entry_cookie());
            if name != b"." && name != b".." {
                each(OsStr::from_bytes(name))?;
            }
            looked += 1;
            if looked == most {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    /// Where the directory was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Takes all notifications that wait in an inotify queue. True if there were any.
pub fn take_notifications(queue: &OwnedFd) -> bool {
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = rustix::fs::inotify::Reader::new(queue, &mut buffer);
    let mut any = false;
    while reader.next().is_ok() {
        any = true;
    }
    any
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An open kernel file that is read again and again from its start.
#[derive(Debug)]
pub struct KernelFile {
    file: File,
    name: &'static str,
}

impl KernelFile {
    /// Opens a file by path.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if there is none.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Ok(Self { file: fd.into(), name: "file" }),
            Err(errno) => Err(classify(errno, path.display().to_string())),
        }
    }

    /// Reads a file that the kernel writes in one piece (all of cgroup's and procfs' small files): one system call.
    ///
    /// # Errors
    /// [`ReadError::Gone`] once the cgroup or process is gone, also between open and read.
    pub fn read_once<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        const ROOM: usize = 8 * 1024;
        buffer.clear();
        buffer.reserve(ROOM);
        let got = self.read_at(buffer, 0)?;
        if got < ROOM { Ok(buffer) } else { self.read_rest(buffer) }
    }

    /// Reads a file of many records (lists of pids, mountinfo) to its end.
    ///
    /// # Errors
    /// As [`KernelFile::read_once`].
    pub fn read_all<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        buffer.clear();
        self.read_rest(buffer)
    }

    fn read_rest<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        loop {
            buffer.reserve(4 * 1024);
            if self.read_at(buffer, buffer.len() as u64)? == 0 {
                return Ok(buffer);
            }
        }
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
