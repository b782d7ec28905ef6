//! inotify watches of files in kernel file systems.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::inotify;
use rustix::io::Errno;

use super::take_notifications;

/// An inotify queue for changes of files. The kernel keeps the watch of a file when its cgroup is removed, and the number of
/// watches is limited for each user: so a watch is removed when its [`FileWatch`] is dropped.
#[derive(Clone, Debug)]
pub struct WatchQueue(Arc<WatchState>);

#[derive(Debug)]
struct WatchState {
    fd: OwnedFd,
    /// The number of users of each watch: watching a file twice gives the same watch.
    users: Mutex<HashMap<i32, usize>>,
}

/// A watched file.
#[derive(Debug)]
pub struct FileWatch {
    queue: Arc<WatchState>,
    descriptor: i32,
}

impl WatchQueue {
    /// Creates a queue.
    ///
    /// # Errors
    /// The user has too many.
    pub fn new() -> Result<Self, Errno> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        Ok(Self(Arc::new(WatchState { fd, users: Mutex::default() })))
    }

    /// Watches a file for changes.
    ///
    /// # Errors
    /// The file does not exist, or the user has too many watches.
    pub fn add(&self, path: &Path) -> Result<FileWatch, Errno> {
        let mut users = self.0.users.lock().unwrap_or_else(PoisonError::into_inner);
        let descriptor = inotify::add_watch(&self.0.fd, path, inotify::WatchFlags::MODIFY)?;
        *users.entry(descriptor).or_default() += 1;
        Ok(FileWatch { queue: Arc::clone(&self.0), descriptor })
    }

    /// Drains the notifications. Returns true if there were any.
    pub fn take_notifications(&self) -> bool {
        take_notifications(&self.0.fd)
    }

    /// Returns the number of watches in the kernel.
    #[cfg(test)]
    pub fn watches(&self) -> usize {
        use std::os::fd::AsRawFd;
        let info = format!("/proc/self/fdinfo/{}", self.0.fd.as_raw_fd());
        std::fs::read_to_string(info).unwrap().lines().filter(|line| line.starts_with("inotify wd")).count()
    }
}

impl AsFd for WatchQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        let mut users = self.queue.users.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = users.remove(&self.descriptor).unwrap_or_default().saturating_sub(1);
        if rest > 0 {
            users.insert(self.descriptor, rest);
        } else {
            // EINVAL: the kernel has removed it with its file
            let _ = inotify::remove_watch(&self.queue.fd, self.descriptor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_ends_with_its_last_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory.max");
        std::fs::write(&path, "1").unwrap();
        let queue = WatchQueue::new().unwrap();
        let (one, other) = (queue.add(&path).unwrap(), queue.add(&path).unwrap());
        drop(one);
        assert_eq!(queue.watches(), 1);
        std::fs::write(&path, "2").unwrap();
        assert!(queue.take_notifications());
        drop(other);
        assert_eq!((queue.watches(), queue.take_notifications()), (0, false));
        let last = queue.add(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        drop(last);
        assert_eq!(queue.watches(), 0);
    }
}
