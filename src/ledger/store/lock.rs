//! Ensures a single writer: a lock file beside the ledger, locked for the lifetime of the store.
//!
//! It uses `flock`, which the kernel releases whenever the process ends. The file contains the holder's pid.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use super::error::StoreError;
use crate::clock::Timestamp;

const FILE: &str = "ledger.lock";
/// Interval between attempts to take the lock.
const PAUSE: Duration = Duration::from_millis(50);

/// A lock; released when dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a directory, waiting up to `timeout`.
    ///
    /// # Errors
    /// Another process holds the lock, or the file cannot be created.
    pub fn take(directory: &Path, timeout: Duration) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        let refused = |error| StoreError::writing(&path, error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o640);
        let mut file = options.open(&path).map_err(refused)?;
        let began = Timestamp::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(error)) => return Err(refused(error)),
                Err(TryLockError::WouldBlock) if Timestamp::now().since(began) >= timeout => {
                    let mut holder = String::new();
                    let is_known = file.read_to_string(&mut holder).is_ok() && !holder.trim().is_empty();
                    let holder = if is_known { holder.trim().to_owned() } else { "pid unknown".to_owned() };
                    return Err(StoreError::InUse { directory: directory.to_path_buf(), holder });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        }
        // the host name identifies the pid's container; a full disk must not prevent the lock
        let host = rustix::system::uname();
        let holder = format!("pid {} on {}\n", std::process::id(), host.nodename().to_string_lossy());
        let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
        Ok(Self { _file: file })
    }
}
