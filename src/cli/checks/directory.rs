//! Directories that memledger writes to, and their files.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::io::Errno;

/// Describes owner and mode of a file or directory.
pub fn owner_and_mode(path: &Path) -> String {
    match std::fs::metadata(path) {
        Ok(file) => format!("owner {}:{}, mode {:04o}", file.uid(), file.gid(), file.mode() & 0o7777),
        Err(error) => error.to_string(),
    }
}

/// Returns the directory, or its closest existing ancestor.
pub fn existing(directory: &Path) -> PathBuf {
    let found = directory.ancestors().find(|path| path.as_os_str().is_empty() || path.exists());
    found.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

/// Checks that this process can write to the directory, or create it, and can write to these files in it if they exist.
pub fn writable(directory: &Path, files: &[&str]) -> Result<(), String> {
    let place = existing(directory);
    if !place.is_dir() {
        return Err(format!("{} is not a directory", place.display()));
    }
    let refused = |what: &Path, errno| {
        Err(format!("{} is not writable: {errno} ({})", what.display(), owner_and_mode(what)))
    };
    if let Err(errno) = rustix::fs::access(&place, Access::WRITE_OK | Access::EXEC_OK) {
        return refused(&place, errno);
    }
    for file in files.iter().map(|file| directory.join(file)) {
        match rustix::fs::access(&file, Access::WRITE_OK) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return refused(&file, errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_the_closest_existing_ancestor() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(existing(&dir.path().join("a/b")), dir.path());
        assert_eq!(existing(Path::new("no-such-folder/b")), Path::new("."));
        assert!(writable(&dir.path().join("a/b"), &[]).is_ok());
        std::fs::write(dir.path().join("file"), "").expect("written");
        assert!(
            writable(&dir.path().join("file/b"), &[])
                .is_err_and(|why| why.ends_with("file is not a directory"))
        );
    }
}
