//! The spool: a directory with a directory for each user, `UID/ID.json`, in which `memledger run` keeps its runs.
//!
//! Every user may make a directory in it, as in `/tmp`, and only its owner writes there. A directory or file of another owner than its
//! name says is ignored, so nobody speaks for the runs of others.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::record::{SpooledRun, is_id};
use crate::host::bounds::{SPOOL_USERS, SPOOLED_RUN, SPOOLED_RUNS_OF_USER};

/// Every user may make a directory, and remove only their own.
const SHARED_MODE: u32 = 0o1777;

/// Where the records of one user are written.
#[derive(Clone, Debug)]
pub struct UserSpool {
    directory: PathBuf,
}

/// Creates the shared spool, in which every user may write.
///
/// # Errors
/// It cannot be created, or has another owner and mode.
pub fn create_shared(spool: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(spool) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if std::fs::symlink_metadata(spool)?.mode() & 0o7777 == SHARED_MODE {
        return Ok(());
    }
    std::fs::set_permissions(spool, Permissions::from_mode(SHARED_MODE)) // the umask
}

/// Returns the spool of this user alone: below `$XDG_STATE_HOME`, else `~/.local/state`. `None` without a home.
pub fn own_spool() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("memledger/runs"))
}

/// Returns the spools that a command of this user reads.
pub fn all(shared: Option<&Path>) -> Vec<PathBuf> {
    shared.map(Path::to_path_buf).into_iter().chain(own_spool()).collect()
}

impl UserSpool {
    /// Opens the directory of this user in the first of these spools in which that is possible, and creates it.
    ///
    /// # Errors
    /// The error of the last one.
    pub fn open(shared: Option<&Path>, own: Option<&Path>) -> io::Result<Self> {
        let uid = rustix::process::geteuid().as_raw();
        let mut refused = io::Error::new(io::ErrorKind::NotFound, "no --run.spool and no home directory");
        for (spool, is_shared) in [(shared, true), (own, false)] {
            let Some(spool) = spool else { continue };
            let created = match (is_shared, uid) {
                (true, 0) => create_shared(spool),
                (true, _) => Ok(()), // made by root, or not there
                (false, _) => DirBuilder::new().recursive(true).mode(0o700).create(spool),
            };
            let directory = spool.join(uid.to_string());
            let made = created.and_then(|()| match DirBuilder::new().mode(0o755).create(&directory) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                made => made,
            });
            match made.and_then(|()| std::fs::symlink_metadata(&directory)) {
                Ok(found) if found.is_dir() && found.uid() == uid => {
                    if is_shared {
                        // memledger serve has no right to read all files, and the umask may be narrow
                        std::fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
                    }
                    return Ok(Self { directory });
                }
                Ok(_) => {
                    refused = io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user");
                }
                Err(error) => {
                    refused = io::Error::new(error.kind(), format!("{}: {error}", directory.display()));
                }
            }
        }
        Err(refused)
    }

    /// Returns the file of the record of a run.
    pub fn path(&self, run: &SpooledRun) -> PathBuf {
        self.directory.join(format!("{}.json", run.id))
    }

    /// Writes the record of a run, in place of an earlier one.
    ///
    /// # Errors
    /// It cannot be written; the earlier one is unchanged.
    pub fn write(&self, run: &SpooledRun) -> io::Result<()> {
        let path = self.path(run);
        let new = path.with_extension("new");
        let mut file = File::options().write(true).create(true).truncate(true).open(&new)?;
        file.set_permissions(Permissions::from_mode(0o644))?; // as the directory
        file.write_all(&serde_json::to_vec(run)?)?;
        std::fs::rename(&new, &path)
    }

    fn remove(&self, run: &SpooledRun) {
        let _ = std::fs::remove_file(self.path(run));
    }

    /// Removes the oldest records of runs that have ended, so that at most half of the limit is left. Returns those left.
    pub fn prune(&self, is_running: impl Fn(&SpooledRun) -> bool) -> Vec<SpooledRun> {
        let mut runs = Vec::new();
        read_user(&self.directory, rustix::process::geteuid().as_raw(), usize::MAX, &mut runs);
        runs.sort_by(|one, other| one.started.total_cmp(&other.started));
        let mut excess = runs.len().saturating_sub(SPOOLED_RUNS_OF_USER.max / 2);
        runs.retain(|run| {
            let is_dropped = excess > 0 && !is_running(run);
            if is_dropped {
                excess -= 1;
                self.remove(run);
            }
            !is_dropped
        });
        runs
    }
}

/// Reads the records of all users in a spool, the oldest first. What is unreadable or invalid is skipped.
pub fn read(spool: &Path) -> Vec<SpooledRun> {
    let mut runs = Vec::new();
    let Ok(users) = std::fs::read_dir(spool) else { return runs };
    for entry in users.flatten().take(SPOOL_USERS.max) {
        let Some(uid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        read_user(&entry.path(), uid, SPOOLED_RUNS_OF_USER.max, &mut runs);
    }
    runs.sort_by(|one, other| one.started.total_cmp(&other.started));
    runs
}

/// Reads the records of one user, the newest first up to the limit.
fn read_user(directory: &Path, uid: u32, max: usize, runs: &mut Vec<SpooledRun>) {
    let is_own = |found: &std::fs::Metadata| found.is_dir() && found.uid() == uid;
    if !std::fs::symlink_metadata(directory).is_ok_and(|found| is_own(&found)) {
        return;
    }
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let ids = names.filter_map(|name| name.strip_suffix(".json").filter(|id| is_id(id)).map(str::to_owned));
    let read = ids.filter_map(|id| {
        let run = read_record(&directory.join(format!("{id}.json")), uid)?;
        (run.id == id && run.started.is_finite()).then_some(run)
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
    use super::super::record::{RunEnd, new_id};
    use super::*;

    fn user_spool(folder: &Path) -> UserSpool {
        UserSpool::open(None, Some(folder)).unwrap()
    }

    #[test]
    fn record_is_read_as_it_was_written_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let spool = user_spool(folder.path());
        let mut run = spooled(&new_id().unwrap(), "train", 5.0);
        spool.write(&run).unwrap();
        assert_eq!(read(folder.path()), [run.clone()]);
        run.end = Some(RunEnd { at: 9.0, exit_code: 137, oom_kills: Some(1) });
        spool.write(&run).unwrap();
        assert_eq!(read(folder.path()), [run]);
    }

    #[test]
    fn files_of_other_users_links_and_invalid_ones_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let spool = user_spool(folder.path());
        let run = spooled(&new_id().unwrap(), "train", 5.0);
        spool.write(&run).unwrap();
        let path = |id: &str| spool.directory.join(format!("{id}.json"));
        let [link, other_id, long, invalid] = std::array::from_fn(|_| new_id().unwrap());
        std::os::unix::fs::symlink(path(&run.id), path(&link)).unwrap();
        std::fs::copy(path(&run.id), path(&other_id)).unwrap();
        std::fs::write(path(&long), " ".repeat(SPOOLED_RUN.max_bytes + 1)).unwrap();
        std::fs::write(path(&invalid), "{").unwrap();
        std::fs::create_dir(folder.path().join("x")).unwrap();
        assert_eq!(read(folder.path()), [run]);
        // a directory that another user made first
        let uid = rustix::process::geteuid().as_raw();
        std::fs::rename(&spool.directory, folder.path().join((uid + 1).to_string())).unwrap();
        assert_eq!(read(folder.path()), []);
    }

    #[test]
    fn oldest_ended_records_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let spool = user_spool(folder.path());
        let end = Some(RunEnd { at: 9.0, exit_code: 0, oom_kills: None });
        let runs = SPOOLED_RUNS_OF_USER.max / 2 + 3;
        for number in 0..runs {
            let run = spooled(&new_id().unwrap(), "train", number as f64);
            spool.write(&SpooledRun { end: end.clone(), ..run }).unwrap();
        }
        let left = spool.prune(|run| run.started == 0.0);
        assert_eq!(left.len(), SPOOLED_RUNS_OF_USER.max / 2);
        assert_eq!((left[0].started, left[1].started), (0.0, 4.0));
        assert_eq!(read(folder.path()), left);
    }
}
