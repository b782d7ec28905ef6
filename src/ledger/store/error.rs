//! Errors of the store, with what to do about them.

use std::error::Error;
use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// The underlying error of the operating system or of SQLite.
pub type StoreErrorSource = Box<dyn Error + Send + Sync>;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory does not exist and cannot be created.
    #[error(
        "cannot create the directory {directory} for the ledger; create it, or set another one with --state.path (empty: keep \
         the ledger in memory)"
    )]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The directory is not writable.
    #[error(
        "cannot write the ledger in {directory}; give the user of memledger write permission, or set another directory with \
         --state.path (empty: keep the ledger in memory)"
    )]
    NotWritable {
        /// The directory.
        directory: PathBuf,
        /// Cause.
        source: StoreErrorSource,
    },
    /// Another memledger writes to the directory.
    #[error(
        "another memledger writes the ledger in {directory}: {holder}; stop it, or set another directory for this one with \
         --state.path"
    )]
    InUse {
        /// The directory.
        directory: PathBuf,
        /// The other process, as recorded in the lock file.
        holder: String,
    },
    /// The file is not memledger's.
    #[error(
        "{path} is not a ledger of memledger ({why}) and is not changed; move it away, or set another directory with \
         --state.path"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was found instead.
        why: String,
    },
    /// The directory has another ledger than when memledger was started.
    #[error(
        "another memledger wrote the ledger in {directory} meanwhile; restart memledger to continue the counts of that one"
    )]
    Replaced {
        /// The directory.
        directory: PathBuf,
    },
    /// A newer memledger wrote the file.
    #[error(
        "{path} was written by a newer memledger (schema {schema}; this one supports {newest}) and is not changed; run that \
         version or a newer one, or set another directory with --state.path"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its schema version.
        schema: i64,
        /// The newest supported schema version.
        newest: i64,
    },
    /// The file is a damaged ledger.
    #[error("the ledger {path} is damaged; memledger serve moves it aside and writes a new one")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The damage.
        source: StoreErrorSource,
    },
    /// The disk is full. Nothing was written; the same changes can be written once there is space.
    #[error("cannot write the ledger {path}: the disk is full; free space on its file system")]
    Full {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: StoreErrorSource,
    },
    /// The directory has no ledger.
    #[error(
        "there is no ledger in {directory}; use the --state.path of memledger serve, or the --local.socket of one that runs"
    )]
    NoLedger {
        /// The directory.
        directory: PathBuf,
    },
    /// The ledger cannot be read.
    #[error("cannot read the ledger {path}; run this as the user of memledger serve, or as root")]
    NotReadable {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: StoreErrorSource,
    },
    /// Another program has locked the file for longer than its lock is waited for.
    #[error(
        "the ledger {path} is locked: its disk is very busy, or another program has it open, for example an sqlite3 shell; \
         try again, or stop that program"
    )]
    Busy {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: StoreErrorSource,
    },
    /// Any other error.
    #[error(
        "the ledger {path} cannot be used; if this error persists, set another directory with --state.path"
    )]
    Failed {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: StoreErrorSource,
    },
}

impl StoreError {
    /// Converts an error of SQLite.
    pub(super) fn from_sqlite(path: &Path, error: rusqlite::Error) -> Self {
        let code = error.sqlite_error_code();
        let source: StoreErrorSource = error.into();
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
