//! Damaged files and rows.

use super::*;

#[test]
fn damaged_file_is_moved_aside_and_replaced() {
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
        assert_eq!(text(&opened.state), text(&LedgerState::default()));
        drop(opened.store);
        assert_eq!(open(dir.path()).moved_aside, None, "the new one is intact");
    }
}

#[test]
fn damaged_file_is_replaced_by_new_one_while_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(FILE);
    let mut store = open(dir.path()).store;
    store.commit(&changes((1..2000).map(|id| exit(id, id as f64, "train", 'a')))).unwrap();
    drop(store);
    let mut store = open(dir.path()).store;
    store.reader().connection().execute_batch("PRAGMA shrink_memory").unwrap(); // drop the page cache
    let length = std::fs::metadata(&file).unwrap().len() as usize;
    let handle = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&handle, &vec![0x5a; length - 8192], 8192).unwrap();
    assert!(!store.is_damaged());
    let mut content = changes([exit(5, 0.0, "other", 'b')]);
    let error = store.commit(&content).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    assert!(store.is_damaged());
    content.put(StateKind::Total, "host_oom_kills", &7);
    let aside = store.replace(&content, 1999).unwrap();
    assert!(std::fs::read(aside).unwrap()[8192..].iter().all(|byte| *byte == 0x5a), "it is kept");
    assert!(!store.is_damaged());
    store.commit(&changes([exit(2000, 1.0, "other", 'b')])).unwrap();
    drop(store);
    let opened = open(dir.path());
    assert_eq!(
        (opened.moved_aside, opened.state.totals[&Total::Host], opened.state.last_id),
        (None, 7, 2000)
    );
    assert_eq!(ids(&opened.store.reader().events(&Query::default()).unwrap()), [5, 2000]);
}

#[test]
fn ids_are_not_reused_after_replacement() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    store.commit(&changes([exit(70, 1.0, "train", 'a')])).unwrap();
    store.replace(&WriteBatch::default(), 70).unwrap();
    drop(store);
    assert_eq!(open(dir.path()).state.last_id, 70);
}

#[test]
fn unreadable_rows_cost_only_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    let mut all = changes([
        kill(1, 1.0, KillOwner::Host),
        kill(2, 2.0, KillOwner::Pending),
        kill(3, 3.0, KillOwner::Pending),
        exit(4, 4.0, "train", 'a'),
    ]);
    all.put(StateKind::Total, "host_oom_kills", &3);
    for name in ["good", "bad"] {
        let labels = Identity { name: name.into(), ..Identity::default() };
        all.put(StateKind::Counters, labels, &ContainerCounters::default());
        all.put(StateKind::Container, name, &ContainerState::default());
    }
    all.put(StateKind::PendingKill, 2, &PersistedKill::default());
    all.put(StateKind::PendingKill, 3, &PersistedKill::default());
    all.put(StateKind::Accounting, "", &AccountingCheckpoint::default());
    store.commit(&all).unwrap();
    let damage = "UPDATE events SET body = '{\"type\":\"of_a_newer_version\"}' WHERE id IN (1, 2);
        UPDATE state SET value = 'x' WHERE kind = 'counters' AND key LIKE '%bad';
        UPDATE state SET value = '{}' WHERE kind = 'container' AND key = 'bad';
        UPDATE state SET value = '[' WHERE kind = 'pending_kill' AND key = '2';
        UPDATE state SET value = 'null' WHERE kind = 'accounting';
        INSERT INTO state VALUES ('total', 'of_a_newer_version', '1')";
    store.reader().connection().execute_batch(damage).unwrap();
    assert_eq!(ids(&store.reader().events(&Query::default()).unwrap()), [3, 4]);
    drop(store);

    let OpenedStore { mut store, state, moved_aside, .. } = open(dir.path());
    assert_eq!(moved_aside, None);
    assert_eq!(state.unreadable_rows, 6, "event 1 is settled and not loaded");
    assert_eq!(ids(&state.unsettled), [3]);
    assert_eq!(state.totals, BTreeMap::from([(Total::Host, 3)]));
    assert_eq!(
        (state.container_counters.len(), state.containers.len(), state.pending_kills.len()),
        (1, 1, 1)
    );
    assert!(state.accounting.is_none());
    // the followers do not wait for an event that never settles
    let settled = store.reader().settled_after(0, 10).unwrap();
    assert_eq!(
        (ids(&settled.events), &settled.unreadable, settled.last_id()),
        (vec![], &vec![1, 2], Some(2))
    );
    store.commit(&changes([kill(3, 3.0, KillOwner::Host)])).unwrap();
    assert_eq!(ids(&store.reader().settled_after(2, 10).unwrap().events), [3, 4]);
}

#[test]
fn dropped_event_is_not_pending_after_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    store.commit(&changes([kill(1, 1.0, KillOwner::Pending), kill(2, 2.0, KillOwner::Pending)])).unwrap();
    // the disk is full: they settle, and the oldest is dropped
    let mut waiting = changes([kill(1, 1.0, KillOwner::Host), kill(2, 2.0, KillOwner::Host)]);
    waiting.merge(changes([
        kill(3, 3.0, KillOwner::Pending),
        exit(4, 4.0, "train", 'a'),
        exit(5, 5.0, "train", 'a'),
    ]));
    let size = |id: u64| waiting.events[&id].as_ref().map_or(0, LedgerEvent::size_estimate);
    let max_bytes = size(3) + size(5);
    waiting.drop_oldest(max_bytes, 2);
    let of = |is_kept: bool| {
        let events = waiting.events.iter().filter(|(_, event)| event.is_some() == is_kept);
        events.map(|(id, _)| *id).collect::<Vec<_>>()
    };
    assert_eq!((of(true), of(false)), (vec![3, 5], vec![1, 2]), "pending events are kept");
    store.commit(&waiting).unwrap();
    drop(store);
    let opened = open(dir.path());
    assert_eq!(ids(&opened.state.unsettled), [3], "1 and 2 would be counted again");
    assert_eq!(ids(&opened.store.reader().events(&Query::default()).unwrap()), [3, 5]);
}

/// Returns a copy of a store with one event, as it is after a crash within a transaction.
fn interrupted() -> tempfile::TempDir {
    let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut store = open(dir.path()).store;
    store.commit(&changes([exit(1, 1.0, "train", 'a')])).unwrap();
    // more than the page cache holds, so that some of it is in the file already
    let sql = "PRAGMA cache_size = 1; BEGIN; DELETE FROM events; \
               WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 500) \
               INSERT INTO notes_of_test SELECT hex(randomblob(400)) FROM numbers";
    store.reader().connection().execute_batch("CREATE TABLE notes_of_test (note TEXT)").unwrap();
    store.reader().connection().execute_batch(sql).unwrap();
    for name in [FILE.to_owned(), format!("{FILE}-journal")] {
        std::fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
    }
    assert!(std::fs::metadata(copy.path().join(format!("{FILE}-journal"))).unwrap().len() > 1024);
    copy
}

#[test]
fn reader_and_writer_roll_an_interrupted_transaction_back() {
    let dir = interrupted();
    let reader = StoreReader::open(dir.path()).unwrap();
    assert_eq!(ids(&reader.events(&Query::default()).unwrap()), [1]);
    let dir = interrupted();
    let opened = open(dir.path());
    assert_eq!((opened.moved_aside, opened.state.last_id), (None, 1));
    assert_eq!(ids(&opened.store.reader().events(&Query::default()).unwrap()), [1]);
}

#[test]
fn journal_without_database_is_not_applied_to_the_new_one() {
    let dir = interrupted();
    std::fs::remove_file(dir.path().join(FILE)).unwrap();
    let opened = open(dir.path());
    assert!(opened.moved_aside.is_some());
    assert_eq!(text(&opened.state), text(&LedgerState::default()));
}
