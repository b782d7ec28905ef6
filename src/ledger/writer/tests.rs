use std::path::Path;

use super::*;
use crate::events::{ContainerRef, Exit, ExitReason, KillOwner};
use crate::ledger::store::{FILE, Query};
use crate::runs::RunRecord;

fn kill(id: u64) -> LedgerEvent {
    LedgerEvent::OomKill(Kill { id, at: id as f64, owner: KillOwner::Unattributed, ..Kill::unknown() })
}

fn settings(directory: &Path) -> StateSettings {
    StateSettings {
        path: Some(directory.to_path_buf()),
        is_flag: false,
        retention: Duration::MAX,
        max_size_bytes: 64 << 20,
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
    let set = now.plus(Duration::from_secs(1));
    writer.apply_clock(set, &mut reconciler);
    writer.write(set, &mut reconciler, &shared_state);
    assert!((at() - (recorded - day)).abs() < 1.0, "{} is not {}", at(), recorded - day);
    let older = StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap();
    assert_eq!(older[..3].iter().map(LedgerEvent::at).collect::<Vec<_>>(), [1.0, 2.0, 3.0]);
}

#[test]
fn step_forward_moves_nothing_that_a_paused_machine_recorded() {
    let folder = ledger_with_backlog();
    let (now, shared_state) = (Timestamp::hours_after_boot(30), SharedState::default());
    let (mut writer, state) = LedgerWriter::open(&settings(folder.path()), now).unwrap();
    let mut reconciler = reconciler(&state, now);
    let exit = Exit { id: 4, at: now.unix_seconds(), reason: Some(ExitReason::Error), ..Exit::default() };
    writer.pending.put_event(LedgerEvent::Exit(exit));
    writer.write(now, &mut reconciler, &shared_state);
    writer.apply_clock(now.with_wall_moved(7_200_000), &mut reconciler);
    writer.write(now.with_wall_moved(7_200_000), &mut reconciler, &shared_state);
    let events = StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap();
    assert_eq!(events[3].at(), now.unix_seconds());
}

/// A ledger with an event of a clock that was a year ahead, and a later one.
fn ledger_with_future(now: Timestamp) -> tempfile::TempDir {
    let folder = ledger_with_backlog();
    let mut store = Store::open(folder.path(), Duration::ZERO).unwrap().store;
    let mut batch = WriteBatch::default();
    batch.put_event(LedgerEvent::Exit(Exit { id: 4, at: now.unix_seconds() + 3e7, ..Exit::default() }));
    batch.put_event(LedgerEvent::Exit(Exit { id: 5, at: now.unix_seconds() - 60.0, ..Exit::default() }));
    store.commit(&batch).unwrap();
    folder
}

/// Returns the time of the event from the future after a start and half an hour.
fn future_after_half_an_hour(folder: &Path, start: Timestamp) -> f64 {
    let (mut writer, state) = LedgerWriter::open(&settings(folder), start).unwrap();
    let mut reconciler = reconciler(&state, start);
    for minutes in 0..30 {
        let now = start.plus(Duration::from_secs(60 * minutes));
        writer.write(now, &mut reconciler, &SharedState::default());
    }
    let events = StoreReader::open(folder).unwrap().events(&Query::default()).unwrap();
    events.iter().find(|event| event.id() == 4).unwrap().at()
}

#[test]
fn event_from_the_future_is_moved_to_now_a_day_after_the_boot() {
    let now = Timestamp::hours_after_boot(30);
    let folder = ledger_with_future(now);
    let moved = future_after_half_an_hour(folder.path(), now);
    assert!((0.0..1_800.0).contains(&(moved - now.unix_seconds())), "{moved}");
}

/// Without a network a host keeps the time of its hardware clock, which may be hours behind.
#[test]
fn clock_of_a_host_that_was_just_booted_moves_and_removes_nothing() {
    let now = Timestamp::hours_after_boot(1);
    let folder = ledger_with_future(now);
    assert_eq!(future_after_half_an_hour(folder.path(), now), now.unix_seconds() + 3e7);
    let years_ahead = now.with_wall_moved(5 * 365 * 86_400_000);
    future_after_half_an_hour(folder.path(), years_ahead);
    assert_eq!(StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap().len(), 5);
}

#[test]
fn start_with_a_clock_that_is_behind_changes_no_time() {
    let now = Timestamp::hours_after_boot(30);
    let folder = ledger_with_future(now);
    let behind = now.with_wall_moved(-26 * 365 * 86_400_000);
    let at = future_after_half_an_hour(folder.path(), behind);
    assert_eq!(at, now.unix_seconds() + 3e7);
    assert_eq!(StoreReader::open(folder.path()).unwrap().events(&Query::default()).unwrap().len(), 5);
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

#[test]
fn runs_that_are_removed_before_their_reports_are_counted() {
    let now = Timestamp::hours_after_boot(30);
    let folder = ledger_with_backlog();
    let mut store = Store::open(folder.path(), Duration::ZERO).unwrap().store;
    let run = |number: u64, ended: f64| {
        let subject = ContainerRef { run_number: Some(number), ..ContainerRef::default() };
        RunRecord { subject, ended: Some(ended), ..RunRecord::default() }
    };
    let (recent, old) = (now.unix_seconds(), now.unix_seconds() - 86_400.0);
    let runs = (1..=4).zip([old, old, old, recent]).map(|(id, ended)| (id, run(id, ended)));
    let mut batch = WriteBatch { runs: runs.collect(), ..WriteBatch::default() };
    batch.put(StateKind::FollowerCursor, "report x", &1);
    store.commit(&batch).unwrap();
    drop(store);
    let settings = StateSettings { retention: Duration::from_secs(3600), ..settings(folder.path()) };
    let (mut writer, state) = LedgerWriter::open(&settings, now).unwrap();
    let mut reconciler = reconciler(&state, now);
    let shared_state = SharedState::default();
    shared_state.followers.report_stats.enable(ReportTarget::S3, "report x");
    shared_state.followers.report_stats.enable(ReportTarget::Directory, "report new");
    for minutes in 0..30 {
        writer.write(now.plus(Duration::from_secs(60 * minutes)), &mut reconciler, &shared_state);
    }
    let lost = |target| {
        let mut series = crate::series::Series::default();
        shared_state.followers.report_stats.write(&mut series);
        let family = crate::catalog::REPORTS_LOST.id;
        let rows: Vec<_> =
            series.rows().iter().filter(|row| row.family == family).map(|row| row.value).collect();
        rows[target as usize]
    };
    assert_eq!((lost(ReportTarget::S3), lost(ReportTarget::Directory)), (2.0, 3.0));
}
