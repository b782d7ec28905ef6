//! One writer: a lock on a file beside the ledger, held for the life of the store.
//!
//! A lock of the kernel (`flock`), so that it ends with its holder, however that ends. The file tells who holds it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use super::error::StoreError;
use crate::clock::Moment;

const FILE: &str = "ledger.lock";
/// How often a held lock is asked for again.
const PAUSE: Duration = Duration::from_millis(50);

/// The lock; it is given back when dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a directory, waiting as long as `patience`.
    ///
    /// # Errors
    /// Another process held it all the time, or the file cannot be made.
    pub fn take(directory: &Path, patience: Duration) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        let refused = |error| StoreError::writing(&path, error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o640);
        let mut file = options.open(&path).map_err(refused)?;
        let began = Moment::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(error)) => return Err(refused(error)),
                Err(TryLockError::WouldBlock) if Moment::now().since(began) >= patience => {
                    let mut holder = String::new();
                    let told = file.read_to_string(&mut holder).is_ok() && !holder.trim().is_empty();
                    let holder =
                        if told { holder.trim().to_owned() } else { "it has not told its pid".to_owned() };
                    return Err(StoreError::Held { directory: directory.to_path_buf(), holder });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        }
        // the host's name says in which container a pid counts; a full disk must not stop the lock
        let host = rustix::system::uname();
        let holder = format!("pid {} on {}\n", std::process::id(), host.nodename().to_string_lossy());
        let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
        Ok(Self { _file: file })
    }
}
