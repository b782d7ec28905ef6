//! Tests of the store with real files, a real second process that is killed, and file systems that are really full or
//! read-only.

mod commit_size;
mod damage;
mod disk;
mod schema_versions;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::*;
use crate::clock::EARLIEST_TIME;
use crate::discover::{ContainerId, RuntimeKind};
use crate::events::*;
use crate::ledger::container_state::ContainerState;
use crate::ledger::reconcile::{AccountingCheckpoint, PersistedKill};
use crate::ledger::totals::{ContainerCounters, Total};

const NOW: Duration = Duration::ZERO;
/// Another test may be starting a program, which holds the lock of a closed store until it has begun.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);
/// Environment variable with the directory in which this test binary acts as the writer that is killed.
const WRITER: &str = "MEMLEDGER_TEST_STORE_WRITER";
/// Environment variable with the number of its commits; without it, it never stops.
const COMMITS: &str = "MEMLEDGER_TEST_STORE_COMMITS";

fn subject(name: &str, id: char) -> ContainerRef {
    ContainerRef {
        identity: Identity { name: name.into(), ..Identity::default() },
        container_id: id.to_string().repeat(64).into(),
        image: "piper:1".into(),
        runtime: RuntimeKind::Docker,
        started: Some(1000.5),
        ..ContainerRef::default()
    }
}

fn before(samples: usize) -> Arc<PriorUsage> {
    let sample = |number| UsageSample {
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
    Arc::new(PriorUsage {
        samples: (0..samples).map(sample).collect(),
        roles: vec![RoleUsage {
            role: Role::Trainer,
            processes: 1,
            rss_bytes: 1 << 30,
            pss_bytes: Some(1 << 29),
            pss_missing: None,
        }],
        settings: vec![("num_workers".into(), "8".into())],
        holders: vec![MemoryHolder { name: "other".into(), unreclaimable_bytes: 1 << 30 }],
        host_total_bytes: Some(64 << 30),
        host_available_bytes: None,
    })
}

fn kill(id: u64, at: f64, owner: KillOwner) -> LedgerEvent {
    let settled = matches!(owner, KillOwner::Container(_));
    LedgerEvent::OomKill(Kill {
        before_counting: false,
        parent_pid: None,
        program: "".into(),
        cgroup: "".into(),
        group: "".into(),
        id,
        at,
        earliest: None,
        boot_id: "b".into(),
        kernel_usec: Some(123_456_789_012),
        pid: Some(4711),
        process: "python3 \u{fffd}\n".into(),
        role: Some(Role::Trainer),
        owner,
        victim: settled.then_some(Victim::Child),
        number: settled.then_some(1),
        scope: OomScope::Container,
        anon_bytes: Some(u64::from(u32::MAX) * 16),
        file_bytes: None,
        shmem_bytes: Some(0),
        oom_score_adj: Some(-5),
        limit_cgroup: "/docker/abc".into(),
        limit_bytes: Some(4 << 30),
        alone_in_pod: false,
        method: Some(Method::Kmsg),
        report: Some(Arc::new(OomReport {
            requested_by: "python3".into(),
            limit_bytes: Some(4 << 30),
            processes: vec![ReportProcess { pid: 4711, rss_bytes: 1 << 30, ..ReportProcess::default() }],
            ..OomReport::default()
        })),
        evidence: vec![Evidence::new("kmsg", "Killed process 4711")],
        before: Some(before(2)),
    })
}

fn exit(id: u64, at: f64, name: &str, letter: char) -> LedgerEvent {
    LedgerEvent::Exit(Exit {
        before_counting: false,
        id,
        at,
        subject: subject(name, letter),
        reason: Some(ExitReason::OomContainer),
        exit_code: Some(137),
        runtime_oom_flag: Some(true),
        stop_signals: vec![],
        kernel_log_read: true,
        duration_seconds: Some(12.25),
        oom_kills: 1,
        ended_by: None,
        may_be: vec![],
        log_error: None,
        requests_known: true,
        peak_usage_bytes: Some(4 << 30),
        peak_unreclaimable_bytes: None,
        evidence: vec![],
        before: None,
    })
}

fn changes(events: impl IntoIterator<Item = LedgerEvent>) -> WriteBatch {
    events.into_iter().collect()
}

fn ids(events: &[LedgerEvent]) -> Vec<u64> {
    events.iter().map(LedgerEvent::id).collect()
}

fn text(state: &LedgerState) -> String {
    format!("{state:?}")
}

fn open(directory: &Path) -> OpenedStore {
    Store::open(directory, CLOSED_WITHIN).unwrap()
}

/// Returns the bytes of all files of a directory except the lock.
fn bytes(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| !path.ends_with("ledger.lock"));
    files.map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect()
}

#[test]
fn time_round_trips_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let exits = (1..=2000).map(|n| exit(n, 1_790_000_000.0 + n as f64 * 0.001_234_567, "train", 'a'));
    let exits = changes(exits);
    open(dir.path()).store.commit(&exits).unwrap();
    let stored = open(dir.path()).store.reader().settled_after(0, 2000).unwrap().events;
    assert_eq!(stored, exits.events.into_values().flatten().collect::<Vec<_>>());
}

#[test]
fn committed_events_and_state_are_loaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("var/lib");
    let OpenedStore { mut store, state: loaded, moved_aside, .. } = open(&state);
    assert_eq!((text(&loaded), moved_aside), (text(&LedgerState::default()), None));
    let events = [
        kill(1, 100.5, KillOwner::Container(subject("train", 'a'))),
        kill(2, 101.0, KillOwner::Pending),
        kill(3, 102.0, KillOwner::Host),
        kill(4, 103.0, KillOwner::Unattributed),
        exit(5, 104.0, "train", 'a'),
    ];
    let mut all = changes(events.clone());
    all.put(StateKind::Total, "host_oom_kills", &7);
    all.put(StateKind::Total, "oom_kills_without_record", &1);
    all.put(StateKind::CgroupKills, u64::MAX, &5);
    all.put(StateKind::CgroupKills, 9, &1);
    all.put(StateKind::RuntimeCursor, "docker", &0.1);
    all.put(StateKind::FollowerCursor, "log", &4);
    all.put(StateKind::StartedAt, "", &99.5);
    let named =
        |name: &str| Identity { k8s_namespace: "ml".into(), name: name.into(), ..Identity::default() };
    let counters = ContainerCounters::default();
    all.put(StateKind::Counters, named("a/b"), &counters);
    all.put(StateKind::Counters, named("old"), &counters);
    let container = ContainerState { identity: named("c"), ..ContainerState::default() };
    all.put(StateKind::Container, "c0ffee", &container);
    all.put(StateKind::PendingKill, 2, &PersistedKill::default());
    let accounting = AccountingCheckpoint { boot_id: "b".into(), ..AccountingCheckpoint::default() };
    all.put(StateKind::Accounting, "", &accounting);
    store.commit(&all).unwrap();
    let mut later = WriteBatch::default();
    later.put(StateKind::Total, "host_oom_kills", &8);
    later.remove(StateKind::CgroupKills, 9);
    later.remove(StateKind::Counters, named("old"));
    store.commit(&later).unwrap();
    assert_eq!(store.reader().events(&Query::default()).unwrap(), events);
    drop(store);

    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&state), mode(&state.join(FILE))), (0o750, 0o640));
    let OpenedStore { store, state: loaded, moved_aside, .. } = open(&state);
    assert_eq!(moved_aside, None);
    assert_eq!((loaded.last_id, loaded.unreadable_rows, loaded.started_at), (5, 0, Some(99.5)));
    assert_eq!(loaded.unsettled, [events[1].clone()]);
    assert_eq!(loaded.totals, BTreeMap::from([(Total::Host, 8), (Total::WithoutRecord, 1)]));
    assert_eq!(loaded.cgroup_kills, BTreeMap::from([(u64::MAX, 5)]));
    assert_eq!(loaded.runtime_cursors, BTreeMap::from([("docker".into(), 0.1)]));
    assert_eq!(loaded.follower_cursors, BTreeMap::from([("log".into(), 4)]));
    assert_eq!(loaded.container_counters.into_keys().collect::<Vec<_>>(), [named("a/b")]);
    assert_eq!(loaded.containers[&ContainerId::new("c0ffee")].identity, named("c"));
    assert_eq!(loaded.pending_kills, BTreeMap::from([(2, PersistedKill::default())]));
    assert_eq!(loaded.accounting, Some(accounting));
    assert_eq!(store.reader().events(&Query::default()).unwrap(), events);
}

#[test]
fn repeated_commit_changes_nothing_and_newer_event_wins() {
    let mut store = Store::in_memory().unwrap();
    let mut first = changes([kill(1, 100.0, KillOwner::Pending)]);
    first.put(StateKind::Total, "host_oom_kills", &1);
    first.put(StateKind::CgroupKills, 7, &5);
    store.commit(&first).unwrap();
    let changed = |store: &Store| store.reader().connection().total_changes();
    let before = changed(&store);
    store.commit(&first).unwrap();
    store.commit(&WriteBatch::default()).unwrap();
    assert_eq!(changed(&store), before);
    let settled = kill(1, 100.0, KillOwner::Container(subject("train", 'a')));
    store.commit(&changes([settled.clone()])).unwrap();
    assert_eq!(store.reader().events(&Query::default()).unwrap(), [settled]);
}

#[test]
fn finds_events_by_time_name_and_id_prefix() {
    let mut store = Store::in_memory().unwrap();
    let all = [
        exit(1, 300.0, "late", 'a'),
        exit(2, 100.0, "train", 'b'),
        exit(3, 200.0, "bbb", 'c'),
        kill(4, 400.0, KillOwner::Host),
    ];
    store.commit(&changes(all)).unwrap();
    let found = |since: Option<f64>, container: Option<&str>, limit| {
        let query = Query { since, container: container.map(str::to_owned), limit, ..Query::default() };
        ids(&store.reader().events(&query).unwrap())
    };
    assert_eq!(found(None, None, 0), [2, 3, 1, 4], "by time");
    assert_eq!(found(None, None, 2), [1, 4], "the newest");
    assert_eq!(found(Some(200.0), None, 10), [3, 1, 4]);
    assert_eq!(found(None, Some("train"), 10), [2]);
    assert_eq!(found(None, Some("bb"), 10), [2], "an id prefix");
    assert_eq!(found(None, Some("bbb"), 10), [3], "a name has precedence over an id prefix");
    assert_eq!(found(None, Some(&"a".repeat(64)), 10), [1]);
    assert_eq!(found(Some(301.0), Some("late"), 10), [0; 0]);
    assert_eq!(found(None, Some("' OR 1"), 10), [0; 0]);
}

#[test]
fn renamed_container_keeps_its_events_and_runs() {
    let mut store = Store::in_memory().unwrap();
    let subject = ContainerRef { run_number: Some(1), ..subject("old", 'a') };
    let run = RunRecord { subject, group: "old".into(), ..RunRecord::default() };
    let mut batch = changes((1..=250).map(|id| exit(id, id as f64, "old", 'a')));
    batch.put_event(exit(251, 251.0, "other", 'b'));
    batch.runs.insert(1, run);
    store.commit(&batch).unwrap();
    let mut later = WriteBatch::default();
    later.rename(ContainerId::new(&"a".repeat(64)), Identity::named("new"));
    later.merge(changes([exit(252, 252.0, "new", 'a')]));
    store.commit(&later).unwrap();
    let found = |name: &str| {
        let query = Query { container: Some(name.to_owned()), ..Query::default() };
        store.reader().events(&query).unwrap()
    };
    let all: Vec<u64> = (1..=250).chain([252]).collect();
    assert_eq!((ids(&found("new")), ids(&found("old"))), (all.clone(), all), "also by the name before");
    assert_eq!(ids(&found("other")), [251]);
    assert_eq!(found("new")[0].subject().unwrap().former_names, ["old".into()]);
    let runs = store.reader().runs(&RunQuery::default()).unwrap();
    assert_eq!((&*runs[0].subject.identity.name, &*runs[0].group), ("new", "old"));
    // one that takes the name is meant by it
    store.commit(&changes([exit(253, 253.0, "old", 'c')])).unwrap();
    let query = Query { container: Some("old".to_owned()), ..Query::default() };
    assert_eq!(ids(&store.reader().events(&query).unwrap()), [253]);
}

#[test]
fn withdrawn_exit_takes_its_record_with_it() {
    let record = |number: u64| {
        let subject = ContainerRef { run_number: Some(number), ..subject("train", 'a') };
        RunRecord { subject, ended: Some(1.0), ..RunRecord::default() }
    };
    let with_exit = || {
        let mut batch = changes([exit(1, 1.0, "train", 'a')]);
        batch.runs.insert(1, record(7));
        batch
    };
    let withdrawn = || WriteBatch { events: [(1, None)].into(), ..WriteBatch::default() };
    let left = |batches: Vec<WriteBatch>| {
        let mut store = Store::in_memory().unwrap();
        batches.iter().for_each(|batch| store.commit(batch).unwrap());
        let reader = store.reader();
        let events = reader.events(&Query::default()).unwrap().len();
        (events, reader.runs(&RunQuery::default()).unwrap().len())
    };
    assert_eq!(left(vec![with_exit()]), (1, 1));
    assert_eq!(left(vec![with_exit(), withdrawn()]), (0, 0));
    // both waited for the disk
    let mut waiting = with_exit();
    waiting.merge(withdrawn());
    assert_eq!(left(vec![waiting]), (0, 0));
    // an event that there is no room for loses its row, and not its record
    let mut dropped = with_exit();
    dropped.drop_oldest(0, 1);
    assert_eq!(left(vec![with_exit(), dropped]), (0, 1));
}

#[test]
fn finds_container_by_its_pod() {
    let mut store = Store::in_memory().unwrap();
    let in_pod = |id: u64, namespace: &str, pod: &str| {
        let name = Identity { k8s_namespace: namespace.into(), k8s_pod: pod.into(), name: "main".into() };
        kill(id, id as f64, KillOwner::Container(ContainerRef { identity: name, ..subject("", 'a') }))
    };
    let all = [in_pod(1, "ml", "train-0"), in_pod(2, "ml", "train-1"), in_pod(3, "web", "train-1")];
    store.commit(&changes(all)).unwrap();
    for (wanted, numbers) in [
        ("main", &[1, 2, 3][..]),
        ("train-1/main", &[2, 3]),
        ("ml/train-1/main", &[2]),
        ("ml/train-2/main", &[]),
        ("train-1", &[2, 3]),
        ("web/train-1", &[3]),
        ("train", &[]),
    ] {
        let query = Query { container: Some(wanted.to_owned()), ..Query::default() };
        assert_eq!(ids(&store.reader().events(&query).unwrap()), numbers, "{wanted}");
    }
}

#[test]
fn consumer_gets_settled_events_in_order_up_to_first_pending() {
    let mut store = Store::in_memory().unwrap();
    let all = [
        exit(1, 3.0, "a", 'a'),
        exit(2, 2.0, "a", 'a'),
        kill(3, 1.0, KillOwner::Pending),
        exit(4, 1.0, "a", 'a'),
    ];
    store.commit(&changes(all)).unwrap();
    assert_eq!(ids(&store.reader().settled_after(0, 10).unwrap().events), [1, 2]);
    assert_eq!(ids(&store.reader().settled_after(0, 1).unwrap().events), [1]);
    assert_eq!(ids(&store.reader().settled_after(2, 10).unwrap().events), [0; 0]);
    store.commit(&changes([kill(3, 1.0, KillOwner::Host)])).unwrap();
    assert_eq!(ids(&store.reader().settled_after(2, 10).unwrap().events), [3, 4]);
    assert_eq!(store.reader().oldest().unwrap(), Some(1.0));
    store.reader().connection().execute("UPDATE events SET body = '{}' WHERE id IN (1, 4)", []).unwrap();
    let settled = store.reader().settled_after(0, 10).unwrap();
    assert_eq!((ids(&settled.events), settled.unreadable), (vec![2, 3], vec![1, 4]));
}

/// Not a test: the writer process of the tests below. It commits again and again, or some times and then waits.
#[test]
fn writer_that_is_killed() {
    let Some(directory) = std::env::var_os(WRITER) else { return };
    let commits = std::env::var(COMMITS).map_or(u64::MAX, |text| text.parse().unwrap());
    let mut store = open(Path::new(&directory)).store;
    for number in 1..=commits {
        let mut all = changes([kill(number, number as f64, KillOwner::Pending)]);
        all.put(StateKind::Total, "host_oom_kills", &number);
        store.commit(&all).unwrap();
        eprintln!("committed {number}");
    }
    loop {
        std::thread::park();
    }
}

fn writer(directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--nocapture", "ledger::store::tests::writer_that_is_killed"])
        .env(WRITER, directory)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// Returns the writer after so many commits.
fn start(writer: &mut Command, commits: u64) -> std::process::Child {
    let mut child = writer.spawn().unwrap();
    let enough = format!("committed {commits}");
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == enough), "the writer exited early");
    child
}

#[test]
fn killed_writer_loses_no_committed_event() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 1..=5 {
        let mut child = start(&mut writer(dir.path()), round * 7);
        child.kill().unwrap();
        child.wait().unwrap();
        let read = StoreReader::open(dir.path()).unwrap().load().unwrap();
        let opened = open(dir.path());
        assert_eq!(opened.moved_aside, None);
        assert_eq!(text(&opened.state), text(&read), "a reader without a writer sees the same");
        assert!(opened.state.last_id >= round * 7);
        assert!(opened.state.last_id >= last, "no event of an earlier round is lost");
        let rows = opened.store.reader().events(&Query::default()).unwrap().len() as u64;
        assert_eq!(rows, opened.state.last_id, "each id once");
        last = opened.state.last_id;
    }
}

#[test]
fn readers_run_beside_writer_and_second_writer_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    // it writes no more then: on a busy disk, commit after commit leaves a reader no second without its lock
    let mut child = start(writer(dir.path()).env(COMMITS, "3"), 3);
    let error = Store::open(dir.path(), Duration::from_millis(120)).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error:?}");
    let told = error.to_string();
    assert!(told.contains(&format!("pid {} on ", child.id())), "{told}");
    assert!(told.contains("--state.path"), "{told}");
    let reader = StoreReader::open(dir.path()).unwrap();
    assert!(reader.events(&Query::default()).unwrap().len() >= 3);
    child.kill().unwrap();
    child.wait().unwrap();
    drop(open(dir.path()));
}

#[test]
fn successor_waits_for_predecessor() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    let path = dir.path().to_owned();
    let second = std::thread::spawn(move || Store::open(&path, Duration::from_secs(60)).unwrap());
    drop(first);
    second.join().unwrap();
}

#[test]
fn reader_without_ledger_gets_advice() {
    let dir = tempfile::tempdir().unwrap();
    let error = StoreReader::open(&dir.path().join("nothing")).unwrap_err().to_string();
    assert!(error.contains("--state.path") && error.contains("--local.socket"), "{error}");
    assert_eq!(bytes(dir.path()), BTreeMap::new());
}

#[test]
fn removes_old_events_and_never_reuses_ids() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    let begin = EARLIEST_TIME;
    let mut all = changes((1..=1200).map(|id| exit(id, begin + id as f64, "train", 'a')));
    all.put_event(kill(5, begin + 5.0, KillOwner::Pending));
    all.put_event(exit(6, 6.0, "train", 'a'));
    all.put(StateKind::Total, "host_oom_kills", &9);
    all.put(StateKind::FollowerCursor, "log", &7);
    store.commit(&all).unwrap();
    assert_eq!(store.retain(begin + 1300.0, 2000.0, 1 << 30).unwrap(), 0);
    assert_eq!(store.retain(begin + 1300.0, 200.0, 1 << 30).unwrap(), 1097);
    let left = ids(&store.reader().events(&Query::default()).unwrap());
    assert_eq!(left[..3], [6, 5, 1100], "a pending event is kept, and one of a clock that was wrong");
    assert_eq!(store.retain(begin + 9999.0, 1.0, 1 << 30).unwrap(), 101);
    drop(store);
    let contents = open(dir.path()).state;
    assert_eq!(contents.last_id, 1200);
    assert_eq!((contents.totals[&Total::Host], contents.follower_cursors["log"]), (9, 7));
}

#[test]
fn removes_oldest_events_above_maximum_size() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(FILE);
    let size = || std::fs::metadata(&file).unwrap().len();
    let mut store = open(dir.path()).store;
    let event = |id: u64| match exit(id, id as f64, "train", 'a') {
        LedgerEvent::Exit(exit) => LedgerEvent::Exit(Exit { before: Some(before(30)), ..exit }),
        other => other,
    };
    store.commit(&changes((1..=1000).map(event))).unwrap();
    drop(store);
    assert!(size() > 3 << 20, "{}", size());
    let mut store = open(dir.path()).store;
    let removed = store.retain(1000.0, 1e9, 2 << 20).unwrap();
    let left = ids(&store.reader().settled_after(0, 2000).unwrap().events);
    assert_eq!(left.len() + removed, 1000);
    assert_eq!(left, (removed as u64 + 1..=1000).collect::<Vec<_>>(), "the newest are kept");
    assert!(left.len() > 100, "not more than necessary: {}", left.len());
    drop(store);
    assert!((1 << 20..=2 << 20).contains(&size()), "{}", size());
    let mut store = open(dir.path()).store;
    assert_eq!(store.retain(1000.0, 1e9, 2 << 20).unwrap(), 0);
}
