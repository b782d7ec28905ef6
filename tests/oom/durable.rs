//! The store in unusable directories: memledger keeps running and logs what is wrong.

use std::path::{Path, PathBuf};
use std::process::Command;

use memledger::ledger::store::FILE;

use crate::support::oom::{
    DUPLICATES, EXITS, GAPS, HOST_KILLS, KILLS, Ledger, RESTARTS, Scene, UNATTRIBUTED,
};
use crate::support::tmpfs::Tmpfs;
use crate::support::{Memledger, binary, run};

const STORE_UP: &str = "memledger_store_up";

fn state_flag(tmpfs: &Tmpfs) -> String {
    format!("--state.path={}", tmpfs.path().display())
}

/// Waits for a warning or an error in the log that names the directory.
fn logs_problem(memledger: &Memledger, folder: &Path) {
    crate::support::eventually("the warning in the log", || {
        let log = memledger.log();
        let path = folder.display().to_string();
        let said = log.lines().any(|line| {
            (line.contains("level=warn") || line.contains("level=error")) && line.contains(&path)
        });
        said.then_some(()).ok_or(log)
    });
}

#[test]
fn unwritable_state_directory_is_logged_and_ledger_stays_in_memory() {
    let Some(scene) = Scene::new("read-only") else { return };
    let tmpfs = Tmpfs::new(scene.path("ro"), "ro,size=1m");
    let ledger = scene.start_memledger(&[&state_flag(&tmpfs)]);
    logs_problem(&ledger.memledger, tmpfs.path());
    let container = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 1, 0);
}

#[test]
fn foreign_file_is_logged_and_not_changed() {
    let Some(scene) = Scene::new("foreign") else { return };
    let state = scene.state();
    drop(scene.start_memledger(&[&state]));
    // replace the content of all its files
    let letter = "Dear reader, this is no ledger.\n".repeat(400);
    let files: Vec<PathBuf> = std::fs::read_dir(scene.state_folder())
        .expect("it")
        .map(|entry| entry.expect("one").path())
        .collect();
    assert!(!files.is_empty(), "it creates a file there");
    for file in &files {
        std::fs::write(file, &letter).expect("written");
    }
    let ledger = scene.start_memledger(&[&state]);
    logs_problem(&ledger.memledger, &scene.state_folder());
    let container = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 1, 0);
    // nothing may be lost: the file may be renamed
    let kept = std::fs::read_dir(scene.state_folder())
        .expect("it")
        .any(|entry| std::fs::read_to_string(entry.expect("one").path()).is_ok_and(|text| text == letter));
    assert!(kept, "the content is gone");
}

/// Waits until events are written to disk, or fail to be.
fn store_is(ledger: &Ledger, up: bool) {
    ledger.eventually(if up { "it writes" } else { "it cannot write" }, |metrics| {
        let value = metrics.try_value(STORE_UP, &[])?;
        if value == f64::from(u8::from(up)) { Ok(()) } else { Err(format!("{value}")) }
    });
}

/// Returns the kills of the scene on disk, read by a command while no memledger is running.
fn kills_on_disk(scene: &Scene, state: &str) -> usize {
    let (code, text, error) = run(&["events", "--json", "--limit=0", state]);
    assert_eq!(code, Some(0), "{error}");
    let mine = format!("\"process\":\"{}\"", scene.tag);
    text.lines().filter(|line| line.replace("\": \"", "\":\"").contains(&mine)).count()
}

#[test]
fn full_disk_loses_no_kill_and_is_written_when_there_is_space() {
    let Some(scene) = Scene::new("full") else { return };
    let tmpfs = Tmpfs::new(scene.path("small"), "size=16m");
    let state = state_flag(&tmpfs);
    let ledger = scene.start_memledger(&[&state]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=3:eat", "wait=/control/two", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    store_is(&ledger, true);
    tmpfs.fill();
    scene.release("one");
    scene.wait_for_kills(4);
    ledger.settles(&container.name, 0, 4);
    store_is(&ledger, false);
    logs_problem(&ledger.memledger, tmpfs.path());
    tmpfs.make_space();
    // without another kill
    store_is(&ledger, true);
    scene.release("two");
    scene.wait_for_kills(5);
    ledger.settles(&container.name, 0, 5);
    // SIGKILL: only what was written counts
    drop(ledger);
    assert_eq!(kills_on_disk(&scene, &state), 5);
    let ledger = scene.start_memledger(&[&state]);
    ledger.settles(&container.name, 0, 5);
    assert_eq!(ledger.tally(&scene).sum(), 5);
}

#[test]
fn full_disk_at_start_is_logged_and_ledger_stays_in_memory() {
    let Some(scene) = Scene::new("no-room") else { return };
    let tmpfs = Tmpfs::new(scene.path("tiny"), "size=1m");
    let filled = std::fs::write(tmpfs.filler(), vec![1; 4 << 20]);
    assert!(filled.is_err(), "the disk is full");
    let ledger = scene.start_memledger(&[&state_flag(&tmpfs)]);
    logs_problem(&ledger.memledger, tmpfs.path());
    store_is(&ledger, false);
    let container = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 1, 0);
}

/// Returns the host's total.
fn host_kills(ledger: &Ledger) -> f64 {
    ledger.memledger.fresh_metrics().value(HOST_KILLS, &[])
}

#[test]
fn read_only_directory_keeps_counts_over_restarts() {
    let Some(scene) = Scene::new("ro-history") else { return };
    let tmpfs = Tmpfs::new(scene.path("ro-history"), "size=16m");
    let state = state_flag(&tmpfs);
    let ledger = scene.start_memledger(&[&state]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=1:eat", "wait=/control/two", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    let before = host_kills(&ledger);
    drop(ledger); // SIGKILL
    tmpfs.remount("ro");
    let ledger = scene.start_memledger(&[&state]);
    store_is(&ledger, false);
    logs_problem(&ledger.memledger, tmpfs.path());
    ledger.settles(&container.name, 0, 1);
    scene.release("one");
    scene.wait_for_kills(2);
    ledger.settles(&container.name, 0, 2);
    let while_read_only = host_kills(&ledger);
    assert!(while_read_only > before, "{while_read_only} after {before}");
    drop(ledger);
    tmpfs.remount("rw");
    let ledger = scene.start_memledger(&[&state]);
    store_is(&ledger, true);
    ledger.settles(&container.name, 0, 2);
    assert!(host_kills(&ledger) >= while_read_only);
    scene.release("two");
    scene.wait_for_kills(3);
    ledger.settles(&container.name, 0, 3);
    drop(ledger);
    assert_eq!(kills_on_disk(&scene, &state), 3);
}

#[test]
fn full_disk_at_start_keeps_counts_and_is_written_when_there_is_space() {
    let Some(scene) = Scene::new("full-history") else { return };
    let tmpfs = Tmpfs::new(scene.path("full-history"), "size=16m");
    let state = state_flag(&tmpfs);
    let ledger = scene.start_memledger(&[&state]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=1:eat", "wait=/control/two", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    let before = host_kills(&ledger);
    ledger.memledger.signal("TERM");
    ledger.memledger.wait();
    let filled = std::fs::write(tmpfs.filler(), vec![1; 32 << 20]);
    assert!(filled.is_err(), "the disk is full");
    let ledger = scene.start_memledger(&[&state]);
    store_is(&ledger, false);
    ledger.settles(&container.name, 0, 1);
    assert!(host_kills(&ledger) >= before);
    scene.release("one");
    scene.wait_for_kills(2);
    ledger.settles(&container.name, 0, 2);
    tmpfs.make_space();
    store_is(&ledger, true);
    scene.release("two");
    scene.wait_for_kills(3);
    ledger.settles(&container.name, 0, 3);
    assert_eq!(ledger.kills_of(&scene).len(), 3, "from disk and from memory");
    drop(ledger);
    assert_eq!(kills_on_disk(&scene, &state), 3);
    let ledger = scene.start_memledger(&[&state]);
    ledger.settles(&container.name, 0, 3);
    assert_eq!(ledger.tally(&scene).sum(), 3);
}

#[test]
fn ledger_of_newer_version_is_logged_and_not_changed() {
    let Some(scene) = Scene::new("newer") else { return };
    let state = scene.state();
    let file = scene.state_folder().join(FILE);
    drop(scene.start_memledger(&[&state]));
    let newer = rusqlite::Connection::open(&file).expect("the ledger");
    newer.pragma_update(None, "user_version", 99).expect("an unknown schema");
    newer.close().expect("closed");
    let before = std::fs::read(&file).expect("the ledger");
    let ledger = scene.start_memledger(&[&state]);
    logs_problem(&ledger.memledger, &file);
    assert!(ledger.memledger.log().contains("newer memledger"), "{}", ledger.memledger.log());
    store_is(&ledger, false);
    let _container = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(1);
    // counts from 0 would jump when the newer version is back
    let metrics = ledger.memledger.fresh_metrics();
    for family in [HOST_KILLS, DUPLICATES, GAPS, UNATTRIBUTED, KILLS, EXITS, RESTARTS] {
        assert!(metrics.all(family, &[]).is_empty(), "{family} is shown");
    }
    drop(ledger);
    assert!(std::fs::read(&file).expect("the ledger") == before, "it was changed");
    let (code, _, error) = run(&["events", &state]);
    assert_eq!(code, Some(3), "the host is read instead: {error}");
    let words: Vec<_> = error.split_whitespace().collect();
    assert!(words.join(" ").contains("newer memledger"), "{error}");
}

#[test]
fn damaged_ledger_is_moved_aside_and_counts_start_at_0() {
    let Some(scene) = Scene::new("damaged") else { return };
    let state = scene.state();
    let file = scene.state_folder().join(FILE);
    let ledger = scene.start_memledger(&[&state]);
    let container = scene.run("it", &[], &["seq=1:eat", "wait=/control/on", "seq=1:eat", "hold"]);
    ledger.settles(&container.name, 0, 1);
    drop(ledger);
    rusqlite::Connection::open(&file)
        .and_then(|it| it.query_row("SELECT count(*) FROM events", [], |_| Ok(())))
        .expect("a transaction that the kill interrupted is rolled back");
    let mut bytes = std::fs::read(&file).expect("the ledger");
    bytes[4096..].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31 % 251) as u8);
    std::fs::write(&file, &bytes).expect("damaged");
    for round in 0..2 {
        let ledger = scene.start_memledger(&[&state]);
        if round == 0 {
            logs_problem(&ledger.memledger, &file);
            scene.release("on");
            scene.wait_for_kills(2);
        }
        store_is(&ledger, true);
        // the first kill was in the damaged file, and is not read from the kernel log again
        ledger.settles(&container.name, 0, 1);
        assert_eq!(ledger.tally(&scene).sum(), 1);
    }
    let aside: Vec<PathBuf> = std::fs::read_dir(scene.state_folder())
        .expect("it")
        .map(|entry| entry.expect("one").path())
        .filter(|path| path.display().to_string().contains(".corrupt-"))
        .collect();
    assert!(aside.iter().any(|path| std::fs::read(path).is_ok_and(|kept| kept == bytes)), "{aside:?}");
}

#[test]
fn second_memledger_on_same_ledger_fails_and_names_the_first() {
    let Some(scene) = Scene::new("second") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let container = scene.run("it", &[], &["wait=/control/go", "seq=1:eat", "hold"]);
    ledger.settles(&container.name, 0, 0);
    // a minute is much longer than it waits for a predecessor
    let second = Command::new("timeout")
        .arg("60")
        .arg(binary())
        .args(["serve", "--web.listen-address=127.0.0.1:0", "--docker.socket=", "--podman.socket=", &state])
        .output()
        .expect("it runs");
    let error = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{error}");
    assert!(error.contains(&format!("pid {} ", ledger.memledger.pid())), "{error}");
    assert!(error.contains("--state.path"), "what to do: {error}");
    // the first one is not affected
    scene.release("go");
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 0, 1);
    store_is(&ledger, true);
    drop(ledger);
    assert_eq!(kills_on_disk(&scene, &state), 1);
}
