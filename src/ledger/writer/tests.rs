use std::path::Path;

use super::*;
use crate::events::{Exit, ExitReason, KillOwner};
use crate::ledger::store::{FILE, Query};

fn kill(id: u64) -> LedgerEvent {
    LedgerEvent::OomKill(Kill { id, at: id as f64, owner: KillOwner::Unattributed, ..Kill::unknown() })
}

fn settings(directory: &Path) -> StateSettings {
    StateSettings {
        path: Some(directory.to_path_buf()),
        retention: Duration::MAX,
        max_size_bytes: 64 << 20,
        events_file: None,
    }
}

/// Writes a ledger with three events, of which a follower has processed the first.
fn ledger_with_backlog() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), Duration::from_secs(5)).unwrap().store;
    let mut batch = WriteBatch::default();
    (1..4).for_each(|id| batch.put_event(kill(id)));
    batch.put(StateKind::FollowerCursor, "otlp x", &1);
    batch.put(StateKind::FollowerCursor, LOG, &3);
    batch.put(StateKind::Total, "host_oom_kills", &3);
    batch.put(StateKind::StartedAt, "", &1.0);
    store.commit(&batch).unwrap();
    folder
}

fn reconciler(state: &LedgerState, now: Timestamp) -> Reconciler {
    Reconciler::new(Default::default(), state, now, now.kernel_usec())
}

#[test]
fn counts_continue_while_the_file_can_only_be_read_and_are_written_later() {
    let folder = ledger_with_backlog();
    // nobody but the test holds the lock file: a folder in its place cannot be opened for writing
    let lock = folder.path().join("ledger.lock");
    std::fs::remove_file(&lock).unwrap();
    std::fs::create_dir(&lock).unwrap();
    let (now, shared_state) = (Timestamp::now(), SharedState::default());
    let (mut writer, state) = LedgerWriter::open(&settings(folder.path()), now).unwrap();
    assert_eq!((state.last_id, state.totals[&Total::Host], writer.cursors()["otlp x"]), (3, 3, 1));
    let mut reconciler = reconciler(&state, now);
    writer.pending.put_event(kill(4));
    writer.write(now, &mut reconciler, &shared_state);
    assert_eq!(writer.is_up(), Some(false));
    std::fs::remove_dir(&lock).unwrap();
    writer.write(now.plus(Duration::from_secs(3)), &mut reconciler, &shared_state);
    assert_eq!(writer.is_up(), Some(true));
    let stored = StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap();
    assert_eq!(stored.iter().map(LedgerEvent::id).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn ledger_that_cannot_be_read_is_an_error_and_is_not_changed() {
    let folder = ledger_with_backlog();
    let file = folder.path().join(FILE);
    let connection = rusqlite::Connection::open(&file).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    drop(connection);
    let before = std::fs::read(&file).unwrap();
    let error = LedgerWriter::open(&settings(folder.path()), Timestamp::now()).unwrap_err();
    assert!(matches!(error, StoreError::Newer { .. }), "{error}");
    assert!(std::fs::read(&file).unwrap() == before, "unchanged");
}

#[test]
fn times_move_with_a_clock_that_is_corrected() {
    let folder = ledger_with_backlog();
    let (now, shared_state) = (Timestamp::now(), SharedState::default());
    let (mut writer, state) = LedgerWriter::open(&settings(folder.path()), now).unwrap();
    let mut reconciler = reconciler(&state, now);
    let day = 86_400.0;
    let recorded = now.unix_seconds() + day;
    let exit = Exit { id: 4, at: recorded, reason: Some(ExitReason::Error), ..Exit::default() };
    writer.pending.put_event(LedgerEvent::Exit(exit));
    let is_ahead = now.with_wall_moved(86_400_000);
    writer.last_step = is_ahead;
    writer.write(is_ahead, &mut reconciler, &shared_state);
    let at = || StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap()[3].at();
    assert_eq!(at(), recorded);
    writer.write(now.plus(Duration::from_secs(1)), &mut reconciler, &shared_state);
    assert!((at() - (recorded - day)).abs() < 1.0, "{} is not {}", at(), recorded - day);
    let older = StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap();
    assert_eq!(older[..3].iter().map(LedgerEvent::at).collect::<Vec<_>>(), [1.0, 2.0, 3.0]);
}

#[test]
fn event_from_the_future_is_moved_to_now_and_hides_no_later_one() {
    let folder = ledger_with_backlog();
    let now = Timestamp::now();
    let mut store = Store::open(folder.path(), Duration::ZERO).unwrap().store;
    let mut batch = WriteBatch::default();
    batch.put_event(LedgerEvent::Exit(Exit { id: 4, at: now.unix_seconds() + 3e7, ..Exit::default() }));
    batch.put_event(LedgerEvent::Exit(Exit { id: 5, at: now.unix_seconds() - 60.0, ..Exit::default() }));
    store.commit(&batch).unwrap();
    drop(store);
    let (_writer, _) = LedgerWriter::open(&settings(folder.path()), now).unwrap();
    let events = StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap();
    let moved = events.iter().find(|event| event.id() == 4).unwrap();
    assert_eq!(moved.at(), now.unix_seconds());
}

#[test]
fn waiting_events_have_a_maximum_size_and_the_oldest_are_dropped() {
    let mut batch = WriteBatch::default();
    let text = "x".repeat(1_000);
    for id in 1..=100 {
        let evidence = vec![crate::events::Evidence::new("kmsg", text.clone())];
        let LedgerEvent::OomKill(kill) = kill(id) else { panic!() };
        batch.put_event(LedgerEvent::OomKill(Kill { evidence, ..kill }));
    }
    batch.drop_oldest(50_000, 10);
    let (kept, removed): (Vec<_>, Vec<_>) = batch.events.iter().partition(|(_, event)| event.is_some());
    assert!((20..50).contains(&kept.len()) && *kept[kept.len() - 1].0 == 100, "{}", kept.len());
    assert_eq!(removed.len(), 10, "those in the store are removed there");
}
