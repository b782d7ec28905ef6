//! The directory that containers mount: the socket, and the Python client.
//!
//! The directory stays while memledger restarts, because a container's mount of a removed directory stays empty for ever.
//! Only the socket in it is replaced.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen as start_listening,
    socket_with, sockopt,
};

/// Name of the socket.
const SOCKET: &str = "reporter.sock";
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

// The files of the Python client, by path below `python/`: `PYTHON_FILES: &[(&str, &str)]`.
include!(concat!(env!("OUT_DIR"), "/python_files.rs"));

/// Why there is no view from inside.
#[derive(Debug, thiserror::Error)]
pub enum ReporterError {
    /// Pids of clients would be unknown.
    #[error("memledger does not run in the host's pid namespace; use pid: host, or hostPID: true")]
    PidNamespace,
    /// Another memledger serves the socket.
    #[error(
        "{path} is in use by another program, perhaps another memledger; stop it or set another --reporter.directory"
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The directory or a file in it cannot be written.
    #[error(
        "cannot write {path}; create and mount a directory there, set another --reporter.directory, or an empty one"
    )]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The socket cannot be created.
    #[error("cannot create the socket {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: Errno,
    },
    /// The thread cannot be started.
    #[error("cannot start the reporter's thread")]
    Thread {
        /// The cause.
        source: io::Error,
    },
}

/// Creates the directory, writes the Python client, and returns the listening socket.
///
/// # Errors
/// The directory is in use or cannot be written.
pub fn listen(directory: &Path) -> Result<OwnedFd, ReporterError> {
    let path = directory.join(SOCKET);
    if is_served(directory) {
        return Err(ReporterError::InUse { path });
    }
    create_directory(directory)?;
    write_client(&directory.join("python"))?;
    // replaced at once: a client never finds a socket that only its owner may use
    let new = directory.join(format!("{SOCKET}.new"));
    let _ = std::fs::remove_file(&new); // of a memledger that was killed
    let listener = bound(&new).map_err(|source| ReporterError::Socket { path: new.clone(), source })?;
    std::fs::set_permissions(&new, Permissions::from_mode(0o666))
        .and_then(|()| std::fs::rename(&new, &path))
        .map_err(|source| ReporterError::Write { path, source })?;
    Ok(listener)
}

fn bound(path: &Path) -> Result<OwnedFd, Errno> {
    let listener = new_socket()?;
    sockopt::set_socket_passcred(&listener, true)?; // inherited by connections that send before they are accepted
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    start_listening(&listener, BACKLOG)?;
    Ok(listener)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Returns true if a program accepts connections on the socket of the directory. A container that has the directory read-only
/// cannot make it look so.
pub fn is_served(directory: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(directory.join(SOCKET)) else { return false };
    // EAGAIN: so many connections wait already
    new_socket().is_ok_and(|socket| matches!(connect(&socket, &address), Ok(()) | Err(Errno::AGAIN)))
}

fn create_directory(path: &Path) -> Result<(), ReporterError> {
    let failed = |source| ReporterError::Write { path: path.to_owned(), source };
    if path.is_dir() {
        return Ok(()); // its owner chose the mode
    }
    std::fs::create_dir_all(path).map_err(failed)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o755)).map_err(failed)
}

/// Writes the files of the client that differ, each at once, because containers may be importing them.
fn write_client(root: &Path) -> Result<(), ReporterError> {
    reject_link(root)?;
    for (name, text) in PYTHON_FILES {
        let path = root.join(name);
        if let Some(parent) = path.parent() {
            reject_link(parent)?;
            create_directory(parent)?;
        }
        if std::fs::read(&path).is_ok_and(|present| present == text.as_bytes()) {
            continue;
        }
        let new = path.with_extension("new");
        let _ = std::fs::remove_file(&new); // of a memledger that was killed
        // O_EXCL: a container with write access cannot have its file or link opened
        let file = File::options().write(true).create_new(true).open(&new);
        file.and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.set_permissions(Permissions::from_mode(0o644))
        })
        .and_then(|()| std::fs::rename(&new, &path))
        .map_err(|source| ReporterError::Write { path, source })?;
    }
    Ok(())
}

/// Fails for a link: a container with write access could lead memledger to another directory of the host with it.
fn reject_link(path: &Path) -> Result<(), ReporterError> {
    if path.is_symlink() {
        let source = io::Error::from(Errno::LOOP);
        return Err(ReporterError::Write { path: path.to_owned(), source });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_replaced_and_a_served_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("reporter");
        let listener = listen(&directory).unwrap();
        let mode = std::fs::metadata(directory.join(SOCKET)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
        assert!(directory.join("python/memledger_client/__init__.py").is_file());
        assert!(matches!(listen(&directory), Err(ReporterError::InUse { .. })));
        drop(listener);
        std::fs::write(directory.join("python/memledger_client/__init__.py"), "damaged").unwrap();
        listen(&directory).unwrap();
        let text = std::fs::read_to_string(directory.join("python/memledger_client/__init__.py")).unwrap();
        assert_ne!(text, "damaged");
    }

    #[test]
    fn links_that_a_container_made_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (directory, host_file) = (folder.path().join("reporter"), folder.path().join("host"));
        std::fs::create_dir_all(directory.join("python/memledger_client")).unwrap();
        std::fs::write(&host_file, "of the host").unwrap();
        std::os::unix::fs::symlink(&host_file, directory.join("python/memledger_client/__init__.new"))
            .unwrap();
        drop(listen(&directory).unwrap());
        assert_eq!(std::fs::read_to_string(&host_file).unwrap(), "of the host");
        let host_directory = folder.path().join("elsewhere");
        std::fs::rename(directory.join("python"), &host_directory).unwrap();
        std::fs::remove_file(host_directory.join("memledger_client/__init__.py")).unwrap();
        std::os::unix::fs::symlink(&host_directory, directory.join("python")).unwrap();
        assert!(matches!(listen(&directory), Err(ReporterError::Write { .. })));
        assert!(!host_directory.join("memledger_client/__init__.py").exists());
    }

    #[test]
    fn path_that_is_a_file_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(listen(&file.path().join("below")), Err(ReporterError::Write { .. })));
    }
}
