//! Reports in a directory: a folder for each run, which appears complete.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::bundle::{ReportFile, is_folder_name};
use crate::clock::Timestamp;
use crate::host::Health;

/// Beginning of the name of a folder that is not complete; listings omit it.
const INCOMPLETE: &str = ".memledger-";
/// The file that makes a folder one of memledger's.
const MARKER: &str = "report.json";

/// A directory of reports.
#[derive(Debug)]
pub struct ReportDirectory {
    path: PathBuf,
    max_runs: usize,
    max_bytes: u64,
    /// Those in it, the oldest first; `None` before the first report.
    folders: Option<VecDeque<ReportFolder>>,
    /// Removing the oldest.
    removals: Health,
}

impl ReportDirectory {
    /// Creates a target for this directory. Beyond these limits the oldest folders are removed.
    pub fn new(path: PathBuf, max_runs: usize, max_bytes: u64) -> Self {
        Self { path, max_runs, max_bytes, folders: None, removals: Health::default() }
    }

    /// Returns the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the folder of a run. It appears with all its files, in place of one of the same name.
    ///
    /// # Errors
    /// A message for people.
    pub fn write(&mut self, folder: &str, files: &[ReportFile]) -> Result<(), String> {
        self.try_write(folder, files).map_err(|error| self.message(&error))?;
        let bytes = files.iter().map(|file| file.content.len() as u64).sum();
        match self.remove_oldest(ReportFolder { path: self.path.join(folder), bytes }) {
            Ok(()) => {
                self.removals.recovered();
            }
            Err(error) if self.removals.failed(Timestamp::now()) => {
                let path = self.path.display();
                tracing::warn!(%path, %error, "removing the oldest reports beyond --report.dir-max-runs and --report.dir-max-size failed");
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Writes a folder and removes it.
    ///
    /// # Errors
    /// A message for people.
    pub fn probe(&self) -> Result<String, String> {
        let (folder, is_there) = (self.incomplete("check"), self.path.exists());
        let probe = || {
            self.create()?;
            remove(&folder)?;
            create_folder(&folder)?;
            write_file(&folder.join("check"), b"memledger\n")?;
            fs::remove_dir_all(&folder)?;
            if is_there { Ok(()) } else { fs::remove_dir(&self.path) }
        };
        probe()
            .map(|()| "a folder was written and removed".to_owned())
            .map_err(|error: io::Error| self.message(&error))
    }

    fn message(&self, error: &io::Error) -> String {
        let path = self.path.display();
        format!("{path}: {error}; give memledger write permission there, or free space (--report.dir)")
    }

    fn create(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o750).create(&self.path)
    }

    fn incomplete(&self, folder: &str) -> PathBuf {
        self.path.join(format!("{INCOMPLETE}{folder}"))
    }

    fn try_write(&mut self, folder: &str, files: &[ReportFile]) -> io::Result<()> {
        self.create()?;
        let (incomplete, complete) = (self.incomplete(folder), self.path.join(folder));
        if self.folders.is_none() {
            self.remove_incomplete()?;
            self.folders = Some(self.read_folders()?);
        }
        remove(&incomplete)?;
        create_folder(&incomplete)?;
        for file in files {
            write_file(&incomplete.join(file.name), &file.content)?;
        }
        File::open(&incomplete)?.sync_all()?;
        match renameat_with(CWD, &incomplete, CWD, &complete, RenameFlags::EXCHANGE) {
            // the older one has the other name now
            Ok(()) => remove(&incomplete)?,
            // there is none, or the file system cannot exchange
            Err(_) => {
                remove(&complete)?;
                fs::rename(&incomplete, &complete)?;
            }
        }
        File::open(&self.path)?.sync_all()
    }

    /// Removes what a crash left.
    fn remove_incomplete(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(INCOMPLETE.as_bytes()) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes the oldest folders beyond the limits, but not the newest.
    fn remove_oldest(&mut self, newest: ReportFolder) -> io::Result<()> {
        let folders = self.folders.get_or_insert_default();
        folders.retain(|folder| folder.path != newest.path);
        folders.push_back(newest);
        let mut bytes: u64 = folders.iter().map(|folder| folder.bytes).sum();
        let mut result = Ok(());
        while folders.len() > 1 && (folders.len() > self.max_runs || bytes > self.max_bytes) {
            let Some(oldest) = folders.pop_front() else { break };
            bytes -= oldest.bytes;
            let removed = remove(&oldest.path);
            result = result.and(removed); // one that cannot be removed keeps none of the others
        }
        result
    }

    /// Returns the folders of runs in the directory, the oldest first.
    fn read_folders(&self) -> io::Result<VecDeque<ReportFolder>> {
        let mut folders = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if !path.file_name().and_then(OsStr::to_str).is_some_and(is_folder_name) {
                continue;
            }
            let Ok(marker) = fs::symlink_metadata(path.join(MARKER)) else { continue };
            let files = fs::read_dir(&path).into_iter().flatten();
            let bytes = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum();
            folders.push((marker.modified()?, ReportFolder { path, bytes }));
        }
        folders.sort_by_key(|(written, _)| *written);
        Ok(folders.into_iter().map(|(_, folder)| folder).collect())
    }
}

/// The folder of a run.
#[derive(Debug)]
struct ReportFolder {
    path: PathBuf,
    bytes: u64,
}

/// Creates a folder that only owner and group can read, because reports contain names of processes.
fn create_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o750).create(path)
}

fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o640).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Removes a folder, if there is one.
fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "a.0123456789ab";

    fn file(name: &'static str, content: &str) -> ReportFile {
        ReportFile { name, content_type: "text/plain", content: content.into() }
    }

    fn names(path: &Path) -> Vec<String> {
        let names =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn folder_replaces_an_older_one_and_a_part_of_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("reports");
        let mut reports = ReportDirectory::new(path.clone(), 10, 1 << 20);
        fs::create_dir_all(path.join(".memledger-a.0123456789ab")).unwrap();
        fs::write(path.join(".memledger-a.0123456789ab/why.txt"), "half").unwrap();
        reports.write(A, &[file("why.txt", "KILLED"), file(MARKER, "{}")]).unwrap();
        assert_eq!(
            (names(&path), names(&path.join(A))),
            (vec![A.to_owned()], vec![MARKER.to_owned(), "why.txt".into()])
        );
        reports.write(A, &[file(MARKER, "{\"again\": true}")]).unwrap();
        assert_eq!((names(&path), names(&path.join(A))), (vec![A.to_owned()], vec![MARKER.to_owned()]));
        assert!(reports.probe().is_ok());
        assert_eq!(names(&path), [A], "the check leaves nothing");
    }

    #[test]
    fn oldest_folders_are_removed_beyond_the_limits_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        fs::create_dir(path.join("not-ours")).unwrap();
        fs::write(path.join("not-ours").join(MARKER), "").unwrap();
        let write = |mut reports: ReportDirectory, name: &str, age: u64| {
            reports.write(name, &[file(MARKER, &"x".repeat(1000))]).unwrap();
            let when = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000 - age);
            File::open(path.join(name).join(MARKER)).unwrap().set_modified(when).unwrap();
        };
        for (name, age) in [("c.0123456789ab", 30), ("a.0123456789ab", 20), ("b.0123456789ab", 10)] {
            write(ReportDirectory::new(path.into(), 2, 1 << 20), name, age);
        }
        assert_eq!(names(path), ["a.0123456789ab", "b.0123456789ab", "not-ours"]);
        let by_size = ReportDirectory::new(path.into(), 10, 1500);
        write(by_size, "d.0123456789ab", 0);
        assert_eq!(names(path), ["d.0123456789ab", "not-ours"]);
        let none = ReportDirectory::new(path.into(), 0, 0);
        write(none, "e.0123456789ab", 0);
        assert_eq!(names(path), ["e.0123456789ab", "not-ours"], "the newest stays");
    }

    #[test]
    fn file_in_place_of_the_directory_is_an_error_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "").unwrap();
        let error = ReportDirectory::new(path, 1, 1).write("a", &[]).unwrap_err();
        assert!(error.contains("--report.dir"), "{error}");
    }
}
