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
        let error = StoreReader::open(dir.path()).unwrap_err();
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
    assert!(matches!(error, StoreError::Newer { schema: 99, newest: 7, .. }), "{error:?}");
    assert_eq!(bytes(dir.path()), before);
    assert!(matches!(StoreReader::open(dir.path()), Err(StoreError::Newer { .. })));
}

#[test]
fn file_of_older_version_is_set_aside_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(FILE);
    drop(open(dir.path()));
    let older = Connection::open(&file).unwrap();
    older.execute_batch("PRAGMA user_version = 3").unwrap();
    drop(older);
    let before = std::fs::read(&file).unwrap();
    assert!(matches!(StoreReader::open(dir.path()), Err(StoreError::NoLedger { .. })));
    let opened = open(dir.path());
    assert_eq!((opened.moved_aside, opened.state.last_id, opened.state.is_new()), (None, 0, true));
    let aside = opened.older.expect("it is set aside");
    assert!(aside.to_string_lossy().contains(".older-"), "{}", aside.display());
    assert!(std::fs::read(&aside).unwrap() == before);
    std::fs::write(format!("{}-wal", aside.display()), "").unwrap();
    assert_eq!(files_moved_aside(dir.path()), [aside]);
    drop(opened.store);
    let again = open(dir.path());
    assert!(again.older.is_none() && again.moved_aside.is_none());
}
