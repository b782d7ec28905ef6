//! File systems that are full or read-only.

use super::*;

/// A tmpfs mount; unmounted when dropped. [`Tmpfs::mount`] returns `None`, and prints the reason, if it cannot be
/// mounted.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path()).output();
        let refused = match mount {
            Ok(output) if output.status.success() => return Some(Self(dir)),
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        eprintln!("SKIPPED: a tmpfs cannot be mounted here (it needs root): {}", refused.trim());
        None
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn full_disk_delays_writes_without_losing_them() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path();
    let mut store = open(directory).store;
    store.commit(&changes([exit(1, 1.0, "train", 'a')])).unwrap();
    let filler = directory.join("filler");
    let full = std::fs::write(&filler, vec![1; 2 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let mut waiting = changes((2..200).map(|id| exit(id, id as f64, "train", 'a')));
    waiting.put(StateKind::Total, "host_oom_kills", &5);
    for _ in 0..3 {
        let error = store.commit(&waiting).unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
        assert!(error.to_string().contains("disk is full"), "{error}");
        assert_eq!(ids(&store.reader().events(&Query::default()).unwrap()), [1]);
    }
    std::fs::remove_file(filler).unwrap();
    waiting.merge(changes([exit(200, 200.0, "train", 'a')]));
    store.commit(&waiting).unwrap();
    drop(store);
    let opened = open(directory);
    assert_eq!((opened.state.last_id, opened.state.totals[&Total::Host]), (200, 5));
    assert_eq!(opened.store.reader().events(&Query::default()).unwrap().len(), 200);
}

#[test]
fn full_disk_at_start_is_reported_and_leaves_no_partial_file() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path();
    let _ = std::fs::write(directory.join("filler"), vec![1; 2 << 20]);
    let error = Store::open(directory, NOW).unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
    assert!(!directory.join(FILE).exists());
    std::fs::remove_file(directory.join("filler")).unwrap();
    assert_eq!(open(directory).moved_aside, None);
}

#[test]
fn read_only_file_system_is_reported_and_readable() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path();
    let mut store = open(directory).store;
    store.commit(&changes([exit(1, 1.0, "train", 'a')])).unwrap();
    drop(store);
    let remounted = Command::new("mount").args(["-o", "remount,ro"]).arg(directory).status().unwrap();
    assert!(remounted.success());
    let error = Store::open(directory, NOW).unwrap_err();
    assert!(matches!(error, StoreError::NotWritable { .. }), "{error:?}");
    assert!(error.to_string().contains("--state.path"), "{error}");
    let error = Store::open(&directory.join("below"), NOW).unwrap_err();
    assert!(matches!(error, StoreError::Directory { .. }), "{error:?}");
    let reader = StoreReader::open(directory).unwrap();
    assert_eq!(ids(&reader.events(&Query::default()).unwrap()), [1]);
}
