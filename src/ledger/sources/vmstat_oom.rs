//! The number of OOM kills since boot: the checksum of the ledger.
//!
//! The counter does not identify victims. It counts the whole host, also when it is read in a container.

use crate::host::{HostPaths, KernelFile, ReadError};

/// Reader of `oom_kill` in `/proc/vmstat`. Keeps the file open.
#[derive(Debug)]
pub struct OomCounter {
    file: KernelFile,
    buffer: Vec<u8>,
}

impl OomCounter {
    /// Opens the file.
    ///
    /// # Errors
    /// The file cannot be opened; [`ReadError::Absent`] if it does not exist.
    pub fn open(host_paths: &HostPaths) -> Result<Self, ReadError> {
        let path = host_paths.proc.join("vmstat");
        let file = KernelFile::open(&path).map_err(|error| match error {
            ReadError::Gone(what) => ReadError::Absent(what),
            other => other,
        })?;
        Ok(Self { file, buffer: Vec::new() })
    }

    /// Returns the number of kills since boot. It increases before the kernel log has the record of the kill.
    ///
    /// # Errors
    /// The file is unreadable; [`ReadError::Absent`] on kernels before 4.13, which do not have the counter.
    pub fn read(&mut self) -> Result<u64, ReadError> {
        // a read returns at most a page, and the file is longer
        let text = self.file.read_all(&mut self.buffer)?;
        let mut lines = crate::parse::keyed(text);
        let found = lines.find(|(key, _)| *key == b"oom_kill").map(|(_, value)| value);
        found.ok_or_else(|| ReadError::Absent("oom_kill of vmstat (Linux 4.13 and later)".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_counter_is_absent_not_zero() {
        let dir = tempfile::tempdir().expect("a folder");
        let host_paths = HostPaths { proc: dir.path().into(), ..HostPaths::default() };
        assert!(matches!(OomCounter::open(&host_paths), Err(ReadError::Absent(_))));
        std::fs::write(dir.path().join("vmstat"), "nr_free_pages 1\npgfault 7\n").expect("written");
        let mut counter = OomCounter::open(&host_paths).expect("opened");
        assert!(matches!(counter.read(), Err(ReadError::Absent(_))));
        std::fs::write(dir.path().join("vmstat"), format!("{}oom_kill 12\nlast 0\n", "pad 0\n".repeat(3000)))
            .expect("written");
        assert_eq!(counter.read().expect("a value"), 12);
    }
}
