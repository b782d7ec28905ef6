//! The store against real files, a real second process that is killed, and file systems that are really full or
//! read-only.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::*;
use crate::ledger::entries::*;

const NOW: Duration = Duration::ZERO;
/// Names the directory in which this binary, started again, plays the writer that is killed.
const WRITER: &str = "MEMLEDGER_TEST_STORE_WRITER";

fn subject(name: &str, id: char) -> Subject {
    Subject {
        name: Name { container_name: name.into(), ..Name::default() },
        container_id: id.to_string().repeat(64).into(),
        image: "piper:1".into(),
        runtime: "docker".into(),
        started: Some(1000.5),
    }
}

fn before(samples: usize) -> Arc<Before> {
    let sample = |number| Sample {
        at: 1000.0 + 10.0 * number as f64,
        usage_bytes: 4 << 30,
        unreclaimable_bytes: Some(3 << 30),
        anon_bytes: Some(2 << 30),
        shmem_bytes: Some(1 << 30),
        file_bytes: Some(1 << 20),
        limit_bytes: Some(4 << 30),
        effective_limit_bytes: Some(4 << 30),
        shm_used_bytes: Some(60 << 20),
        shm_size_bytes: None,
    };
    Arc::new(Before {
        samples: (0..samples).map(sample).collect(),
        roles: vec![RoleHeld {
            role: "trainer".into(),
            processes: 1,
            rss_bytes: 1 << 30,
            pss_bytes: Some(1 << 29),
        }],
        settings: vec![("num_workers".into(), "8".into())],
        holders: vec![Holder { name: "other".into(), unreclaimable_bytes: 1 << 30 }],
        host_total_bytes: Some(64 << 30),
        host_available_bytes: None,
    })
}

fn kill(id: u64, at: f64, whose: Whose) -> Event {
    let settled = matches!(whose, Whose::Container(_));
    Event::OomKill(Kill {
        id,
        at,
        boot_id: "b".into(),
        kernel_usec: Some(123_456_789_012),
        pid: Some(4711),
        process: "python3 \u{fffd}\n".into(),
        role: "trainer".into(),
        whose,
        victim: settled.then_some(Victim::Child),
        scope: Scope::Container,
        anon_bytes: Some(u64::from(u32::MAX) * 16),
        file_bytes: None,
        shmem_bytes: Some(0),
        oom_score_adj: Some(-5),
        limit_cgroup: "/docker/abc".into(),
        limit_bytes: Some(4 << 30),
        method: "kmsg".into(),
        exchangeable: false,
        evidence: vec![Evidence::new("kmsg", "Killed process 4711")],
        before: Some(before(2)),
    })
}

fn exit(id: u64, at: f64, name: &str, letter: char) -> Event {
    Event::Exit(Exit {
        id,
        at,
        subject: subject(name, letter),
        reason: Some(Reason::OomContainer),
        exit_code: Some(137),
        runtime_oom_flag: Some(true),
        asked_signals: vec![],
        kernel_log_read: true,
        duration_seconds: Some(12.25),
        oom_kills: 1,
        peak_usage_bytes: Some(4 << 30),
        peak_unreclaimable_bytes: None,
        evidence: vec![],
        before: None,
    })
}

fn changes(events: impl IntoIterator<Item = Event>) -> Changes {
    Changes { events: events.into_iter().map(|event| (event.id(), event)).collect(), ..Changes::default() }
}

fn ids(events: &[Event]) -> Vec<u64> {
    events.iter().map(Event::id).collect()
}

fn open(directory: &Path) -> Opened {
    Store::open(directory, NOW).unwrap()
}

#[test]
fn a_time_comes_back_as_it_was_stored_to_the_last_bit() {
    let dir = tempfile::tempdir().unwrap();
    let exits = (1..=2000).map(|n| exit(n, 1_790_000_000.0 + n as f64 * 0.001_234_567, "train", 'a'));
    let exits = changes(exits);
    open(dir.path()).store.commit(&exits).unwrap();
    let stored = open(dir.path()).store.settled_after(0, 2000).unwrap().events;
    assert_eq!(stored, exits.events.into_values().collect::<Vec<_>>());
}

#[test]
fn what_was_committed_is_there_again_and_totals_and_notes_too() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("var/lib");
    let Opened { mut store, contents, moved_aside } = open(&state);
    assert_eq!((contents, moved_aside), (Contents::default(), None));
    let events = [
        kill(1, 100.5, Whose::Container(subject("train", 'a'))),
        kill(2, 101.0, Whose::Open),
        kill(3, 102.0, Whose::Host),
        kill(4, 103.0, Whose::Unattributed),
        exit(5, 104.0, "train", 'a'),
    ];
    let mut all = changes(events.clone());
    all.totals = BTreeMap::from([("kills|train".into(), 7), ("kills|old".into(), 1)]);
    all.notes = BTreeMap::from([("cursor".into(), Some("b:5".into())), ("gone".into(), Some("x".into()))]);
    store.commit(&all).unwrap();
    let mut later = Changes::default();
    later.totals.insert("kills|train".into(), 8);
    later.notes.insert("gone".into(), None);
    store.commit(&later).unwrap();
    assert_eq!(store.events(&Query::default()).unwrap(), events);
    drop(store);

    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&state), mode(&state.join(FILE))), (0o750, 0o640));
    let Opened { store, contents, moved_aside } = open(&state);
    assert_eq!(moved_aside, None);
    assert_eq!(contents.last_id, 5);
    assert_eq!(contents.unsettled, [events[1].clone()]);
    assert_eq!(contents.totals, BTreeMap::from([("kills|train".into(), 8), ("kills|old".into(), 1)]));
    assert_eq!(contents.notes, BTreeMap::from([("cursor".into(), "b:5".into())]));
    assert_eq!(store.events(&Query::default()).unwrap(), events);
}

#[test]
fn the_same_commit_twice_changes_nothing_and_the_newer_event_of_a_number_wins() {
    let mut store = Store::in_memory().unwrap();
    let mut first = changes([kill(1, 100.0, Whose::Open)]);
    first.totals.insert("kills".into(), 1);
    first.notes.insert("cursor".into(), Some("5".into()));
    store.commit(&first).unwrap();
    let changed = |store: &Store| store.connection.total_changes();
    let before = changed(&store);
    store.commit(&first).unwrap();
    store.commit(&Changes::default()).unwrap();
    assert_eq!(changed(&store), before);
    let settled = kill(1, 100.0, Whose::Container(subject("train", 'a')));
    store.commit(&changes([settled.clone()])).unwrap();
    assert_eq!(store.events(&Query::default()).unwrap(), [settled]);
}

#[test]
fn events_are_found_by_time_name_and_the_beginning_of_an_id() {
    let mut store = Store::in_memory().unwrap();
    let all = [
        exit(1, 300.0, "late", 'a'),
        exit(2, 100.0, "train", 'b'),
        exit(3, 200.0, "bbb", 'c'),
        kill(4, 400.0, Whose::Host),
    ];
    store.commit(&changes(all)).unwrap();
    let found = |since: Option<f64>, container: Option<&str>, most| {
        let query = Query { since, container: container.map(str::to_owned), most };
        ids(&store.events(&query).unwrap())
    };
    assert_eq!(found(None, None, 0), [2, 3, 1, 4], "by time");
    assert_eq!(found(None, None, 2), [1, 4], "the newest");
    assert_eq!(found(Some(200.0), None, 10), [3, 1, 4]);
    assert_eq!(found(None, Some("train"), 10), [2]);
    assert_eq!(found(None, Some("bb"), 10), [2], "the beginning of an id");
    assert_eq!(found(None, Some("bbb"), 10), [3], "a name goes before the beginning of an id");
    assert_eq!(found(None, Some(&"a".repeat(64)), 10), [1]);
    assert_eq!(found(Some(301.0), Some("late"), 10), [0; 0]);
    assert_eq!(found(None, Some("' OR 1"), 10), [0; 0]);
}

#[test]
fn a_container_of_a_pod_is_found_by_its_pod_too() {
    let mut store = Store::in_memory().unwrap();
    let in_pod = |id: u64, namespace: &str, pod: &str| {
        let name = Name {
            k8s_namespace_name: namespace.into(),
            k8s_pod_name: pod.into(),
            container_name: "main".into(),
        };
        kill(id, id as f64, Whose::Container(Subject { name, ..subject("", 'a') }))
    };
    let all = [in_pod(1, "ml", "train-0"), in_pod(2, "ml", "train-1"), in_pod(3, "web", "train-1")];
    store.commit(&changes(all)).unwrap();
    for (wanted, numbers) in [
        ("main", &[1, 2, 3][..]),
        ("train-1/main", &[2, 3]),
        ("ml/train-1/main", &[2]),
        ("ml/train-2/main", &[]),
    ] {
        let query = Query { container: Some(wanted.to_owned()), ..Query::default() };
        assert_eq!(ids(&store.events(&query).unwrap()), numbers, "{wanted}");
    }
}

#[test]
fn a_follower_gets_settled_events_in_order_and_none_behind_an_open_one() {
    let mut store = Store::in_memory().unwrap();
    let all =
        [exit(1, 3.0, "a", 'a'), exit(2, 2.0, "a", 'a'), kill(3, 1.0, Whose::Open), exit(4, 1.0, "a", 'a')];
    store.commit(&changes(all)).unwrap();
    assert_eq!(ids(&store.settled_after(0, 10).unwrap().events), [1, 2]);
    assert_eq!(ids(&store.settled_after(0, 1).unwrap().events), [1]);
    assert_eq!(ids(&store.settled_after(2, 10).unwrap().events), [0; 0]);
    store.commit(&changes([kill(3, 1.0, Whose::Host)])).unwrap();
    assert_eq!(ids(&store.settled_after(2, 10).unwrap().events), [3, 4]);
    assert_eq!(store.oldest().unwrap(), Some(1.0));
    store.connection.execute("UPDATE events SET body = '{}' WHERE id IN (1, 4)", []).unwrap();
    let settled = store.settled_after(0, 10).unwrap();
    assert_eq!((ids(&settled.events), settled.unreadable), (vec![2, 3], vec![1, 4]));
}

/// Not a test by itself: the writer of the next one, in a process of its own.
#[test]
fn writer_that_is_killed() {
    let Some(directory) = std::env::var_os(WRITER) else { return };
    let mut store = open(Path::new(&directory)).store;
    for number in 1.. {
        let mut all = changes([kill(number, number as f64, Whose::Open)]);
        all.totals.insert("kills".into(), number);
        store.commit(&all).unwrap();
        eprintln!("committed {number}");
    }
}

fn start_writer(directory: &Path, commits: u64) -> std::process::Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "ledger::store::tests::writer_that_is_killed"])
        .env(WRITER, directory)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let enough = format!("committed {commits}");
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == enough), "the writer ended early");
    child
}

#[test]
fn a_writer_killed_at_any_moment_loses_nothing_that_it_committed() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 1..=5 {
        let mut child = start_writer(dir.path(), round * 7);
        child.kill().unwrap();
        child.wait().unwrap();
        let read = Reader::open(dir.path()).unwrap().contents().unwrap();
        let opened = open(dir.path());
        assert_eq!(opened.moved_aside, None);
        assert_eq!(opened.contents, read, "a reader saw the same without a writer");
        assert!(opened.contents.last_id >= round * 7);
        assert!(opened.contents.last_id >= last, "nothing of an earlier round is lost");
        let rows = opened.store.events(&Query::default()).unwrap().len() as u64;
        assert_eq!(rows, opened.contents.last_id, "each number once");
        last = opened.contents.last_id;
    }
}

#[test]
fn readers_read_while_another_process_writes_and_a_second_writer_is_refused_by_pid() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start_writer(dir.path(), 3);
    let error = Store::open(dir.path(), Duration::from_millis(120)).unwrap_err();
    assert!(matches!(error, StoreError::Held { .. }), "{error:?}");
    let told = error.to_string();
    assert!(told.contains(&format!("pid {} on ", child.id())), "{told}");
    assert!(told.contains("--state.path"), "{told}");
    let reader = Reader::open(dir.path()).unwrap();
    assert!(reader.events(&Query::default()).unwrap().len() >= 3);
    assert!(reader.connection.execute("DELETE FROM events", []).is_err(), "a reader cannot write");
    child.kill().unwrap();
    child.wait().unwrap();
    drop(open(dir.path()));
}

#[test]
fn a_successor_waits_for_its_predecessor() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    let path = dir.path().to_owned();
    let second = std::thread::spawn(move || Store::open(&path, Duration::from_secs(60)).unwrap());
    drop(first);
    second.join().unwrap();
}

/// The bytes of all files of a directory but the lock.
fn bytes(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| !path.ends_with("ledger.lock"));
    files.map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect()
}

#[test]
fn a_file_that_is_not_ours_is_never_touched() {
    let other = |path: &Path| {
        let connection = Connection::open(path).unwrap();
        connection
            .execute_batch("PRAGMA application_id = 7; CREATE TABLE a (b); INSERT INTO a VALUES (1)")
            .unwrap();
    };
    let text = |path: &Path| std::fs::write(path, "a file of somebody else\n".repeat(10)).unwrap();
    let short = |path: &Path| std::fs::write(path, "x").unwrap();
    let makers: [&dyn Fn(&Path); 3] = [&other, &text, &short];
    for make in makers {
        let dir = tempfile::tempdir().unwrap();
        make(&dir.path().join(FILE));
        let before = bytes(dir.path());
        let error = Store::open(dir.path(), NOW).unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
        let error = Reader::open(dir.path()).unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
        assert_eq!(bytes(dir.path()), before);
    }
}

#[test]
fn a_file_of_a_newer_memledger_is_never_touched() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let newer = Connection::open(dir.path().join(FILE)).unwrap();
    newer.execute_batch("PRAGMA user_version = 99").unwrap();
    drop(newer);
    let before = bytes(dir.path());
    let error = Store::open(dir.path(), NOW).unwrap_err();
    assert!(matches!(error, StoreError::Newer { schema: 99, newest: 1, .. }), "{error:?}");
    assert_eq!(bytes(dir.path()), before);
    assert!(matches!(Reader::open(dir.path()), Err(StoreError::Newer { .. })));
}

#[test]
fn a_newer_schema_that_stands_only_in_the_log_is_not_written_into_the_file() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let file = dir.path().join(FILE);
    let newer = Connection::open(&file).unwrap();
    newer.execute_batch("PRAGMA user_version = 99").unwrap();
    let copy = tempfile::tempdir().unwrap(); // as a crash leaves it
    for name in [FILE.to_owned(), format!("{FILE}-wal")] {
        std::fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
    }
    let before = bytes(copy.path());
    let error = Store::open(copy.path(), NOW).unwrap_err();
    assert!(matches!(error, StoreError::Newer { schema: 99, .. }), "{error:?}");
    let after = bytes(copy.path());
    assert!(before.iter().all(|(path, bytes)| after[path] == *bytes), "only an index was added");
}

#[test]
fn a_damaged_file_is_moved_aside_and_a_new_one_begun() {
    let page = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[4096..].fill(0x5a);
        std::fs::write(path, bytes).unwrap();
    };
    let half = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..5000]).unwrap();
    };
    let empty = |path: &Path| std::fs::write(path, "").unwrap();
    let zeros = |path: &Path| std::fs::write(path, [0; 8192]).unwrap();
    let damages: [&dyn Fn(&Path); 4] = [&page, &half, &empty, &zeros];
    for damage in damages {
        let dir = tempfile::tempdir().unwrap();
        let mut store = open(dir.path()).store;
        store.commit(&changes((1..100).map(|id| exit(id, id as f64, "train", 'a')))).unwrap();
        drop(store);
        let file = dir.path().join(FILE);
        damage(&file);
        let damaged = std::fs::read(&file).unwrap();
        let opened = open(dir.path());
        let aside = opened.moved_aside.expect("moved aside");
        assert!(aside.to_str().unwrap().contains("ledger.sqlite3.corrupt-1"), "{aside:?}");
        assert_eq!(std::fs::read(aside).unwrap(), damaged);
        assert_eq!(opened.contents, Contents::default());
        drop(opened.store);
        assert_eq!(open(dir.path()).moved_aside, None, "the new one is whole");
    }
}

#[test]
fn damage_that_is_met_later_is_told_and_moved_aside_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(FILE);
    let mut store = open(dir.path()).store;
    store.commit(&changes((1..2000).map(|id| exit(id, id as f64, "train", 'a')))).unwrap();
    drop(store);
    let mut store = open(dir.path()).store;
    store.connection.execute_batch("PRAGMA shrink_memory").unwrap(); // what it still knows is not read again
    let length = std::fs::metadata(&file).unwrap().len() as usize;
    let handle = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&handle, &vec![0x5a; length - 8192], 8192).unwrap();
    let error = store.events(&Query::default()).map(|events| events.len()).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    let error = store.commit(&changes([exit(5, 0.0, "other", 'b')])).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    drop(store);
    assert!(open(dir.path()).moved_aside.is_some());
}

#[test]
fn an_event_that_cannot_be_read_is_damage_too_and_only_it_is_moved_aside_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    store.commit(&changes([exit(1, 1.0, "train", 'a')])).unwrap();
    store.connection.execute("UPDATE events SET body = 'nonsense'", []).unwrap();
    let error = store.events(&Query::default()).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    drop(store);
    assert!(open(dir.path()).moved_aside.is_some(), "no look at the pages would have found it");
    assert_eq!(open(dir.path()).moved_aside, None);
}

#[test]
fn a_log_without_its_database_does_not_get_into_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start_writer(dir.path(), 5);
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::remove_file(dir.path().join(FILE)).unwrap();
    let opened = open(dir.path());
    assert!(opened.moved_aside.is_some());
    assert_eq!(opened.contents, Contents::default());
}

/// A tmpfs of its own; unmounted when dropped. `None`, with the reason printed, where none can be mounted.
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
fn on_a_full_disk_nothing_is_written_and_later_everything() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path();
    let mut store = open(directory).store;
    store.commit(&changes([exit(1, 1.0, "train", 'a')])).unwrap();
    let filler = directory.join("filler");
    let full = std::fs::write(&filler, vec![1; 2 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let mut waiting = changes((2..200).map(|id| exit(id, id as f64, "train", 'a')));
    waiting.totals.insert("kills".into(), 5);
    for _ in 0..3 {
        let error = store.commit(&waiting).unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
        assert!(error.to_string().contains("make room"), "{error}");
        assert_eq!(ids(&store.events(&Query::default()).unwrap()), [1]);
    }
    std::fs::remove_file(filler).unwrap();
    waiting.merge(changes([exit(200, 200.0, "train", 'a')]));
    store.commit(&waiting).unwrap();
    drop(store);
    let opened = open(directory);
    assert_eq!((opened.contents.last_id, opened.contents.totals["kills"]), (200, 5));
    assert_eq!(opened.store.events(&Query::default()).unwrap().len(), 200);
}

#[test]
fn a_disk_that_is_full_at_the_start_is_told_and_leaves_no_half_made_file() {
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
fn a_read_only_file_system_is_told_and_can_still_be_read() {
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
    let reader = Reader::open(directory).unwrap();
    assert_eq!(ids(&reader.events(&Query::default()).unwrap()), [1]);
}

#[test]
fn without_a_ledger_a_reader_says_where_to_look() {
    let dir = tempfile::tempdir().unwrap();
    let error = Reader::open(&dir.path().join("nothing")).unwrap_err().to_string();
    assert!(error.contains("--state.path") && error.contains("/api/v1/events"), "{error}");
    assert_eq!(bytes(dir.path()), BTreeMap::new());
}

#[test]
fn what_is_too_old_goes_and_its_number_is_not_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    let mut all = changes((1..=1200).map(|id| exit(id, id as f64, "train", 'a')));
    all.events.insert(5, kill(5, 5.0, Whose::Open));
    all.totals.insert("kills".into(), 9);
    all.notes.insert("cursor".into(), Some("x".into()));
    store.commit(&all).unwrap();
    assert_eq!(store.retain(1300.0, 2000.0, 1 << 30).unwrap(), 0);
    assert_eq!(store.retain(1300.0, 200.0, 1 << 30).unwrap(), 1098);
    let left = ids(&store.events(&Query::default()).unwrap());
    assert_eq!((left[0], left[1], left.len()), (5, 1100, 102), "what is not settled stays");
    assert_eq!(store.retain(9999.0, 1.0, 1 << 30).unwrap(), 101);
    drop(store);
    let contents = open(dir.path()).contents;
    assert_eq!(contents.last_id, 1200);
    assert_eq!((contents.totals["kills"], &*contents.notes["cursor"]), (9, "x"));
}

#[test]
fn the_oldest_go_when_it_is_too_much_and_the_file_becomes_smaller() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(FILE);
    let size = || std::fs::metadata(&file).unwrap().len();
    let mut store = open(dir.path()).store;
    let event = |id: u64| match exit(id, id as f64, "train", 'a') {
        Event::Exit(exit) => Event::Exit(Exit { before: Some(before(30)), ..exit }),
        other => other,
    };
    store.commit(&changes((1..=1000).map(event))).unwrap();
    drop(store);
    assert!(size() > 3 << 20, "{}", size());
    let mut store = open(dir.path()).store;
    let removed = store.retain(1000.0, 1e9, 2 << 20).unwrap();
    let left = ids(&store.events(&Query::default()).unwrap());
    assert_eq!(left.len() + removed, 1000);
    assert_eq!(left, (removed as u64 + 1..=1000).collect::<Vec<_>>(), "the newest stay");
    assert!(left.len() > 100, "not more than needed: {}", left.len());
    drop(store);
    assert!((1 << 20..=2 << 20).contains(&size()), "{}", size());
    let mut store = open(dir.path()).store;
    assert_eq!(store.retain(1000.0, 1e9, 2 << 20).unwrap(), 0);
}

#[test]
fn several_threads_may_share_it() {
    let store = std::sync::Mutex::new(Store::in_memory().unwrap());
    std::thread::scope(|scope| {
        for id in 1..=4 {
            let store = &store;
            scope.spawn(move || {
                store.lock().unwrap().commit(&changes([exit(id, 1.0, "train", 'a')])).unwrap()
            });
        }
    });
    assert_eq!(store.lock().unwrap().events(&Query::default()).unwrap().len(), 4);
}
