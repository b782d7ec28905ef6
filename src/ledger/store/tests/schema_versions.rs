//! Files of other versions and of other programs.

use super::*;

#[test]
fn foreign_file_is_never_changed() {
    let other = |path: &Path| {
        let connection = Connection::open(path).unwrap();
        connection
            .execute_batch("PRAGMA application_id = 7; CREATE TABLE a (b); INSERT INTO a VALUES (1)")
            .unwrap();
    };
    let text = |path: &Path| std::fs::write(path, "a text file\n".repeat(20)).unwrap();
    let short = |path: &Path| std::fs::write(path, "x").unwrap();
    let makers: [&dyn Fn(&Path); 3] = [&other, &text, &short];
    for make in makers {
        let dir = tempfile::tempdir().unwrap();
        make(&dir.path().join(FILE));
        let before = bytes(dir.path());
        let error = Store::open(dir.path(), NOW).unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
        let error = StoreConnection::open(dir.path()).unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
        assert_eq!(bytes(dir.path()), before);
    }
}

#[test]
fn file_of_newer_version_is_never_changed() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let newer = Connection::open(dir.path().join(FILE)).unwrap();
    newer.execute_batch("PRAGMA user_version = 99").unwrap();
    drop(newer);
    let before = bytes(dir.path());
    let error = Store::open(dir.path(), NOW).unwrap_err();
    assert!(matches!(error, StoreError::Newer { schema: 99, newest: 3, .. }), "{error:?}");
    assert_eq!(bytes(dir.path()), before);
    assert!(matches!(StoreConnection::open(dir.path()), Err(StoreError::Newer { .. })));
}

#[test]
fn newer_schema_in_write_ahead_log_of_earlier_version_is_not_applied() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let file = dir.path().join(FILE);
    let newer = Connection::open(&file).unwrap();
    newer.execute_batch("PRAGMA journal_mode = WAL; PRAGMA user_version = 99").unwrap();
    let copy = tempfile::tempdir().unwrap(); // as after a crash
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
fn write_ahead_log_of_earlier_version_becomes_a_journal() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).store.commit(&changes([exit(1, 1.0, "train", 'a')])).unwrap();
    let earlier = Connection::open(dir.path().join(FILE)).unwrap();
    let sql = "PRAGMA journal_mode = WAL; INSERT INTO totals VALUES ('host_oom_kills', 9)";
    earlier.execute_batch(sql).unwrap();
    let copy = tempfile::tempdir().unwrap(); // as after a crash
    for name in [FILE.to_owned(), format!("{FILE}-wal")] {
        std::fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
    }
    let OpenedStore { mut store, state, moved_aside } = open(copy.path());
    assert_eq!((moved_aside, state.last_id, state.totals[&Total::Host]), (None, 1, 9));
    store.commit(&changes([exit(2, 2.0, "train", 'a')])).unwrap();
    let names: Vec<_> =
        bytes(copy.path()).into_keys().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, [FILE.to_owned(), format!("{FILE}-journal")].map(std::ffi::OsString::from));
}

/// Creates a store as the first version of the schema had it.
fn first_version(directory: &Path) {
    let connection = Connection::open(directory.join(FILE)).unwrap();
    schema::initialize(&connection).unwrap();
    schema::configure(&connection).unwrap();
    connection.execute_batch(schema::MIGRATIONS[0]).unwrap();
    let rows = r#"
        PRAGMA user_version = 1;
        INSERT INTO events VALUES (3, 100.25, 1, 'train', 'abc', '{"type":"oom_kill","id":3,"at":100.25,"boot_id":"b","whose":"container","container_name":"train","container_id":"abc","victim":"main","scope":"container","exchangeable":true,"evidence":[]}');
        INSERT INTO events VALUES (4, 101.5, 0, NULL, NULL, '{"type":"oom_kill","id":4,"at":101.5,"boot_id":"b","whose":"open","scope":"host","evidence":[]}');
        INSERT INTO events VALUES (5, 1790000000.0012345, 1, 'train', 'abc', '{"type":"exit","id":5,"at":1790000000.0012345,"container_name":"train","container_id":"abc","reason":"stopped","asked_signals":[15,null],"kernel_log_read":true,"oom_kills":0,"evidence":[]}');
        INSERT INTO events VALUES (6, 103.0, 1, NULL, NULL, 'nonsense');
        INSERT INTO totals VALUES ('host_oom_kills', 9);
        INSERT INTO notes VALUES ('account', '{"boot_id":"b","position":{"sequence":1,"usec":2},"since_usec":0,"opened_at":null,"records":9,"duplicates":0,"gaps":0}'),
            ('run:abc', '{"name":{"container_name":"train"},"image":"i","runtime":"docker","run":null}'),
            ('name:ml/pod/train', '{"kills":[[1,0],[0,0]],"exits":{},"starts":2,"touched":5.0}'),
            ('counter:17', '3'), ('since:docker', '99.5'), ('open:4', '{"container":null,"limit_bytes":7,"duplicates":0}'),
            ('acknowledged:http://x:4317 00', '5'), ('begun', '12.5'), ('unfiled:5', '')"#;
    connection.execute_batch(rows).unwrap();
}

#[test]
fn store_of_the_version_before_keeps_everything() {
    for newest in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        first_version(dir.path());
        if newest == 2 {
            // as its program left it: migrated, and written
            let connection = Connection::open(dir.path().join(FILE)).unwrap();
            connection.execute_batch(schema::MIGRATIONS[1]).unwrap();
            connection.pragma_update(None, "user_version", 2).unwrap();
        }
        keeps_everything(&dir);
    }
}

fn keeps_everything(dir: &tempfile::TempDir) {
    let OpenedStore { store, state, moved_aside } = open(dir.path());
    assert_eq!((moved_aside, state.last_id, state.unreadable_rows), (None, 6, 0));
    assert_eq!(state.totals, BTreeMap::from([(Total::Host, 9)]));
    assert_eq!(state.accounting.unwrap().records, 9);
    assert_eq!(&*state.containers[&ContainerId::new("abc")].image, "i");
    let labels = state.container_counters.keys().next().unwrap();
    assert_eq!(
        (&*labels.k8s_namespace_name, &*labels.k8s_pod_name, &*labels.container_name),
        ("ml", "pod", "train")
    );
    assert_eq!(state.cgroup_kills, BTreeMap::from([(17, 3)]));
    assert_eq!(state.runtime_cursors, BTreeMap::from([("docker".to_owned(), 99.5)]));
    assert_ne!(state.pending_kills[&4], PersistedKill::default());
    assert_eq!(state.follower_cursors, BTreeMap::from([("otlp http://x:4317 00".to_owned(), 5)]));
    assert_eq!(state.started_at, Some(12.5));
    assert_eq!(ids(&state.unsettled), [4]);
    let events = store.events(&Query::default()).unwrap();
    assert_eq!(ids(&events), [3, 4, 5], "the unreadable one stays, unread");
    let LedgerEvent::OomKill(kill) = &events[0] else { panic!("{events:?}") };
    assert_eq!((kill.at, events[0].subject().unwrap().name.container_name.as_ref()), (100.25, "train"));
    let LedgerEvent::Exit(exit) = &events[2] else { panic!("{events:?}") };
    assert_eq!((exit.at, &exit.stop_signals), (1_790_000_000.001_234_5, &vec![Some(15), None]));
    let raw = store.page(&Query::default(), None).unwrap().raw_json.concat();
    assert!(
        !raw.contains("whose") && !raw.contains("asked") && raw.contains(r#""owner":"pending""#),
        "{raw}"
    );
    drop(store);
    assert_eq!(open(dir.path()).state.totals, BTreeMap::from([(Total::Host, 9)]), "migrated once");
}
