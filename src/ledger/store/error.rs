//! What can go wrong with the store, and what to do about it.

use std::error::Error;
use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// Why an operating system or SQLite refused.
pub type Cause = Box<dyn Error + Send + Sync>;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory is not there and cannot be made.
    #[error(
        "cannot make the directory {directory} for the ledger; make it, or name another with --state.path (empty: keep \
         the ledger in memory)"
    )]
    Directory {
        /// Which.
        directory: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is there, but nothing can be written in it.
    #[error(
        "cannot write the ledger in {directory}; let the user that memledger runs as write there, or name another \
         directory with --state.path (empty: keep the ledger in memory)"
    )]
    NotWritable {
        /// Which.
        directory: PathBuf,
        /// Why.
        source: Cause,
    },
    /// Another memledger writes there.
    #[error(
        "another memledger writes the ledger in {directory}: {holder}; end it, or give this one a directory of its own \
         with --state.path"
    )]
    Held {
        /// Which.
        directory: PathBuf,
        /// The process, as it wrote itself down.
        holder: String,
    },
    /// The file is not memledger's.
    #[error(
        "{path} is not a ledger of memledger ({why}) and is left as it is; move it away, or name another directory with \
         --state.path"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// How it is known.
        why: String,
    },
    /// A newer memledger wrote the file.
    #[error(
        "{path} was written by a newer memledger (schema {schema}; this one knows {newest}) and is left as it is; run \
         that version or a newer one, or name another directory with --state.path"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema.
        schema: i64,
        /// The newest schema that is known here.
        newest: i64,
    },
    /// The file is memledger's, and damaged.
    #[error(
        "the ledger {path} is damaged; memledger serve moves it aside at its next start and begins a new one"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What was found.
        source: Cause,
    },
    /// The disk is full. Nothing was written; the same changes can be written once there is room.
    #[error("no room to write the ledger {path}: make room on its file system")]
    Full {
        /// The file.
        path: PathBuf,
        /// What was refused.
        source: Cause,
    },
    /// There is no ledger to read.
    #[error(
        "there is no ledger in {directory}; give the --state.path that memledger serve runs with, or ask a running \
         memledger at /api/v1/events"
    )]
    NoLedger {
        /// Where it was looked for.
        directory: PathBuf,
    },
    /// There is one, but it cannot be read.
    #[error("cannot read the ledger {path}; run this as the user that memledger serve runs as, or as root")]
    NotReadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Cause,
    },
    /// Another program holds the file.
    #[error("the ledger {path} is locked by another program; end what works on it, such as an sqlite3 shell")]
    Busy {
        /// The file.
        path: PathBuf,
        /// What was refused.
        source: Cause,
    },
    /// Anything else.
    #[error("the ledger {path} cannot be used; if it stays so, name another directory with --state.path")]
    Failed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Cause,
    },
}

impl StoreError {
    /// What an error of SQLite means for the file.
    pub(super) fn of(path: &Path, error: rusqlite::Error) -> Self {
        let code = error.sqlite_error_code();
        let source: Cause = error.into();
        let path = path.to_path_buf();
        match code {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Corrupt { path, source },
            Some(ErrorCode::DiskFull) => Self::Full { path, source },
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy { path, source },
            Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
                Self::NotWritable { directory: directory_of(&path), source }
            }
            _ => Self::Failed { path, source },
        }
    }

    /// What an error of the operating system means when something was to be written beside the file.
    pub(super) fn writing(path: &Path, error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                Self::Full { path: path.to_path_buf(), source: error.into() }
            }
            _ => Self::NotWritable { directory: directory_of(path), source: error.into() },
        }
    }
}

pub(super) fn directory_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new(".")).to_path_buf()
}
