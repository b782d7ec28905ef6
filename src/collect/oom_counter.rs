//! How often the kernel's OOM killer killed since the boot: the checksum of the ledger.
//!
//! Not here: who was killed. The number is the whole machine's, also when it is read inside a container.

use crate::host::{KernelFile, ReadError, Roots};

/// `oom_kill` of `/proc/vmstat`, which stays open.
#[derive(Debug)]
pub struct OomCounter {
    file: KernelFile,
    buffer: Vec<u8>,
}

impl OomCounter {
    /// Opens the file.
    ///
    /// # Errors
    /// It cannot be opened; [`ReadError::Absent`] if there is none.
    pub fn open(roots: &Roots) -> Result<Self, ReadError> {
        let path = roots.proc.join("vmstat");
        let file = KernelFile::open(&path).map_err(|error| match error {
            ReadError::Gone(what) => ReadError::Absent(what),
            other => other,
        })?;
        Ok(Self { file, buffer: Vec::new() })
    }

    /// Kills since the boot. Grows before the kernel log has the kill's record.
    ///
    /// # Errors
    /// The file cannot be read; [`ReadError::Absent`] on kernels before 4.13, which do not count.
    pub fn read(&mut self) -> Result<u64, ReadError> {
        // the kernel gives a page at a time, and the file is longer
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
    fn a_kernel_that_does_not_count_is_absent_and_not_zero() {
        let dir = tempfile::tempdir().expect("a folder");
        let roots = Roots { proc: dir.path().into(), ..Roots::default() };
        assert!(matches!(OomCounter::open(&roots), Err(ReadError::Absent(_))));
        std::fs::write(dir.path().join("vmstat"), "nr_free_pages 1\npgfault 7\n").expect("written");
        let mut counter = OomCounter::open(&roots).expect("opened");
        assert!(matches!(counter.read(), Err(ReadError::Absent(_))));
        std::fs::write(dir.path().join("vmstat"), format!("{}oom_kill 12\nlast 0\n", "pad 0\n".repeat(3000)))
            .expect("written");
        assert_eq!(counter.read().expect("a value"), 12);
    }
}
