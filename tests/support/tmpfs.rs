//! A small file system that can be full or read-only.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs in a directory of a test, unmounted when dropped.
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    pub fn new(path: PathBuf, options: &str) -> Self {
        std::fs::create_dir_all(&path).expect("a folder");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&path).status();
        assert!(mounted.expect("mount runs").success());
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn remount(&self, mode: &str) {
        let mounted = Command::new("mount").args(["-o", &format!("remount,{mode}")]).arg(&self.0).status();
        assert!(mounted.expect("mount runs").success());
    }

    /// Fills the file system with one file.
    pub fn fill(&self) {
        let mut file = File::options().append(true).create(true).open(self.filler()).expect("a file");
        let is_full = (0..1 << 20).any(|_| file.write_all(&[1; 1024]).is_err());
        assert!(is_full, "the disk is not full");
    }

    /// Removes that file.
    pub fn make_space(&self) {
        std::fs::remove_file(self.filler()).expect("it was filled");
    }

    /// Returns the path of that file.
    pub fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
