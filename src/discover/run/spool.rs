//! The spool: a directory in which every user may make one of their own, as in `/tmp`, for the records of their runs: `UID/ID.json`.
//!
//! Everything in it may be forged. Whose a directory is, its owner says and not its name; a record counts for the runs of that user alone,
//! whose ids contain the user's ([`SpooledRun::checked`]).

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;

use super::record::{SpooledRun, is_id_of};
use crate::clock::Timestamp;
use crate::host::HostPaths;
use crate::host::bounds::{SPOOL_ENTRIES, SPOOLED_RUN, SPOOLED_RUNS_OF_USER};

/// Every user may make a directory, and remove only their own.
const SHARED_MODE: u32 = 0o1777;
/// Names that a user tries for a directory: another user may have made the first ones.
const MAX_DIRECTORIES: u32 = 16;

/// Where the records of one user are written.
#[derive(Debug)]
pub struct UserSpool {
    directory: PathBuf,
    /// Other users' directories had the names that were tried, or the shared spool could not be used.
    pub is_private: bool,
}

/// Creates the shared spool, in which every user may write.
///
/// # Errors
/// It cannot be created, is no directory of this user, or has entries and another mode.
pub fn create_shared(spool: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(spool) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = std::fs::symlink_metadata(spool)?;
    if !found.is_dir() || found.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it is no directory of this user"));
    }
    if found.mode() & 0o7777 == SHARED_MODE {
        return Ok(());
    }
    // made a moment ago, or by an engine that mounts it
    if std::fs::read_dir(spool)?.next().is_some() {
        return Err(io::Error::other("it is not empty, and not open to all users: chmod 1777"));
    }
    std::fs::set_permissions(spool, Permissions::from_mode(SHARED_MODE))
}

/// Returns the spool of one user alone: below `$XDG_STATE_HOME`, else `~/.local/state`. `None` without a home. Of root the same path
/// whatever the environment says, which `sudo` may have from a user.
fn own_spool() -> Option<PathBuf> {
    if geteuid().is_root() {
        return Some("/root/.local/state/memledger/runs".into());
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("memledger/runs"))
}

/// Returns the spool of the user who called `sudo`.
fn spool_of_caller() -> Option<PathBuf> {
    let uid = std::env::var("SUDO_UID").ok().filter(|_| geteuid().is_root())?;
    let users = std::fs::read_to_string("/etc/passwd").ok()?;
    let line = users.lines().find(|line| line.split(':').nth(2) == Some(&uid))?;
    Some(Path::new(line.split(':').nth(5)?).join(".local/state/memledger/runs"))
}

/// Returns the spools that a command of this user reads.
pub fn all(shared: Option<&Path>) -> Vec<PathBuf> {
    shared.map(Path::to_path_buf).into_iter().chain(own_spool()).chain(spool_of_caller()).collect()
}

impl UserSpool {
    /// Opens the directory of this user in the shared spool, or else in the user's own, and creates it.
    ///
    /// # Errors
    /// Neither is possible; the error of both.
    pub fn open(shared: Option<&Path>) -> io::Result<Self> {
        Self::open_in(shared, own_spool().as_deref())
    }

    fn open_in(shared: Option<&Path>, own: Option<&Path>) -> io::Result<Self> {
        let mut refused = String::new();
        for (spool, is_private) in [(shared, false), (own, true)] {
            let Some(spool) = spool else { continue };
            match user_directory(spool, is_private) {
                Ok(directory) => return Ok(Self { directory, is_private: is_private && shared.is_some() }),
                Err(error) => refused.push_str(&format!("{}: {error}; ", spool.display())),
            }
        }
        Err(io::Error::other(format!("{refused}set --run.spool to a directory that you can write")))
    }

    /// Locks the records of this user against a `memledger run` that starts at the same time, until the lock is dropped.
    ///
    /// # Errors
    /// The lock cannot be created.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(self.directory.join("lock"))?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file.into())
    }

    /// Returns the file of the record of a run.
    pub fn path(&self, run: &SpooledRun) -> PathBuf {
        self.directory.join(format!("{}.json", run.id))
    }

    /// Writes the record of a run, in place of an earlier one.
    ///
    /// # Errors
    /// It is too large, or cannot be written; the earlier one is unchanged.
    pub fn write(&self, run: &SpooledRun) -> io::Result<()> {
        let (path, text) = (self.path(run), serde_json::to_vec(run)?);
        if text.len() > SPOOLED_RUN.max_bytes {
            return Err(io::Error::other("its labels and settings are too long"));
        }
        let new = path.with_extension("new");
        let _ = std::fs::remove_file(&new);
        let mut file = File::options().write(true).create_new(true).open(&new)?;
        file.set_permissions(Permissions::from_mode(0o644))?; // memledger serve has no right to read all files
        file.write_all(&text)?;
        std::fs::rename(&new, &path)
    }

    /// Removes the oldest records of runs that have ended, so that at most half of the limit is left.
    pub fn prune(&self, host_paths: &HostPaths, boot_id: &str) {
        let mut runs = Vec::new();
        read_user(&self.directory, geteuid().as_raw(), usize::MAX, host_paths, &mut runs);
        runs.sort_by(|one, other| one.started.total_cmp(&other.started));
        let excess = runs.len().saturating_sub(SPOOLED_RUNS_OF_USER.max / 2);
        for run in runs.iter().filter(|run| !run.is_running(boot_id)).take(excess) {
            let _ = std::fs::remove_file(self.path(run));
        }
    }
}

/// Returns the directory of this user in a spool, which is created.
fn user_directory(spool: &Path, is_private: bool) -> io::Result<PathBuf> {
    let uid = geteuid().as_raw();
    if is_private || uid != 0 {
        // the shared one of root is there, or is not; one that a user has set may be made
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(spool);
    } else {
        create_shared(spool)?;
    }
    for number in 0..MAX_DIRECTORIES {
        let name = if number == 0 { uid.to_string() } else { format!("{uid}.{number}") };
        let directory = spool.join(name);
        match DirBuilder::new().mode(0o755).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if is_directory_of(&std::fs::symlink_metadata(&directory)?, uid) {
            if !is_private {
                // memledger serve has no right to read all files, and the umask may be narrow
                std::fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
            }
            return Ok(directory);
        }
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "other users have taken this user's names in it"))
}

fn is_directory_of(found: &Metadata, uid: u32) -> bool {
    found.is_dir() && found.uid() == uid
}

/// Returns the directories in a spool by their owners, and when each changed last: the first names of each owner.
pub fn directories(spool: &Path) -> BTreeMap<u32, Vec<(PathBuf, Option<std::time::SystemTime>)>> {
    let mut users: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for entry in std::fs::read_dir(spool).into_iter().flatten().flatten().take(SPOOL_ENTRIES.max) {
        let Ok(found) = std::fs::symlink_metadata(entry.path()) else { continue };
        let own = users.entry(found.uid()).or_default();
        if found.is_dir() && own.len() < MAX_DIRECTORIES as usize {
            own.push((entry.path(), found.modified().ok()));
        }
    }
    users
}

/// Reads the records of all users in a spool, the oldest first. What is unreadable or invalid is skipped.
pub fn read(spool: &Path, host_paths: &HostPaths) -> Vec<SpooledRun> {
    let mut runs = Vec::new();
    for (uid, directories) in directories(spool) {
        let limit = runs.len() + SPOOLED_RUNS_OF_USER.max;
        for (directory, _) in directories {
            read_user(&directory, uid, limit - runs.len(), host_paths, &mut runs);
        }
    }
    runs.sort_by(|one, other| one.started.total_cmp(&other.started));
    runs
}

/// Reads the records in one directory of a user, at most so many.
fn read_user(directory: &Path, uid: u32, max: usize, host_paths: &HostPaths, runs: &mut Vec<SpooledRun>) {
    let now = Timestamp::now().unix_seconds();
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    let entries = entries.flatten().take(SPOOL_ENTRIES.max);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let ids =
        names.filter_map(|name| name.strip_suffix(".json").filter(|id| is_id_of(uid, id)).map(str::to_owned));
    let read = ids.filter_map(|id| {
        let run = read_record(&directory.join(format!("{id}.json")), uid)?;
        run.checked(uid, host_paths, now).filter(|run| run.id == id)
    });
    runs.extend(read.take(max));
}

fn read_record(path: &Path, uid: u32) -> Option<SpooledRun> {
    // O_NONBLOCK: a FIFO would block
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = File::options().read(true).custom_flags(flags.cast_signed()).open(path).ok()?;
    let found = file.metadata().ok()?;
    if !found.is_file() || found.uid() != uid || found.len() > SPOOLED_RUN.max_bytes as u64 {
        return None;
    }
    let mut text = Vec::new();
    file.take(SPOOLED_RUN.max_bytes as u64).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::spooled;
    use super::super::record::{RecordedEnd, new_id};
    use super::*;

    fn user_spool(folder: &Path) -> UserSpool {
        UserSpool::open_in(None, Some(folder)).unwrap()
    }

    fn own_id() -> String {
        new_id(geteuid().as_raw()).unwrap()
    }

    fn read_all(folder: &Path) -> Vec<SpooledRun> {
        read(folder, &HostPaths::default())
    }

    #[test]
    fn record_is_read_as_it_was_written_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let spool = user_spool(folder.path());
        let mut run = spooled(&own_id(), "train", 5.0);
        spool.write(&run).unwrap();
        let names = || read_all(folder.path()).into_iter().map(|run| (run.name, run.end)).collect::<Vec<_>>();
        assert_eq!(names(), [("train".to_owned(), None)]);
        run.end = Some(RecordedEnd { at: 9.0, exit_code: 137, oom_kills: Some(1) });
        spool.write(&run).unwrap();
        assert_eq!(names(), [("train".to_owned(), run.end.clone())]);
        run.labels = [("a".to_owned(), "x".repeat(SPOOLED_RUN.max_bytes))].into();
        assert!(spool.write(&run).is_err());
    }

    #[test]
    fn files_of_other_users_links_and_invalid_ones_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let spool = user_spool(folder.path());
        let run = spooled(&own_id(), "train", 5.0);
        spool.write(&run).unwrap();
        let path = |id: &str| spool.directory.join(format!("{id}.json"));
        let [link, copy, long, invalid] = std::array::from_fn(|_| own_id());
        std::os::unix::fs::symlink(path(&run.id), path(&link)).unwrap();
        std::fs::copy(path(&run.id), path(&copy)).unwrap();
        std::fs::write(path(&long), " ".repeat(SPOOLED_RUN.max_bytes + 1)).unwrap();
        std::fs::write(path(&invalid), "{").unwrap();
        let other_users = new_id(geteuid().as_raw() + 1).unwrap();
        std::fs::write(path(&other_users), serde_json::to_vec(&spooled(&other_users, "train", 5.0)).unwrap())
            .unwrap();
        std::fs::write(folder.path().join("x"), "").unwrap();
        let ids: Vec<_> = read_all(folder.path()).into_iter().map(|run| run.id).collect();
        assert_eq!(ids, [run.id]);
    }

    #[test]
    fn directory_that_another_user_made_first_is_left_to_them() {
        let folder = tempfile::tempdir().unwrap();
        let uid = geteuid().as_raw();
        std::fs::write(folder.path().join(uid.to_string()), "no directory").unwrap();
        let spool = user_spool(folder.path());
        assert_eq!(spool.directory, folder.path().join(format!("{uid}.1")));
        spool.write(&spooled(&own_id(), "train", 5.0)).unwrap();
        assert_eq!(read_all(folder.path()).len(), 1);
    }

    #[test]
    fn only_an_empty_directory_is_opened_to_all_users() {
        let folder = tempfile::tempdir().unwrap();
        let [new, full, link] = ["new", "full", "link"].map(|name| folder.path().join(name));
        create_shared(&new).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(&new), SHARED_MODE);
        std::fs::write(new.join("x"), "").unwrap();
        create_shared(&new).unwrap();
        DirBuilder::new().mode(0o700).create(&full).unwrap();
        std::fs::write(full.join("x"), "").unwrap();
        std::os::unix::fs::symlink(&full, &link).unwrap();
        assert!(create_shared(&full).is_err() && create_shared(&link).is_err());
        assert_eq!(mode(&full), 0o700);
    }

    #[test]
    fn oldest_ended_records_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let spool = user_spool(folder.path());
        let end = Some(RecordedEnd { at: 9.0, exit_code: 0, oom_kills: None });
        let runs = SPOOLED_RUNS_OF_USER.max / 2 + 3;
        for number in 0..runs {
            let run = spooled(&own_id(), "train", number as f64);
            spool.write(&SpooledRun { end: end.clone(), ..run }).unwrap();
        }
        spool.prune(&HostPaths::default(), "boot");
        let left = read_all(folder.path());
        assert_eq!((left.len(), left[0].started), (SPOOLED_RUNS_OF_USER.max / 2, 3.0));
    }
}
