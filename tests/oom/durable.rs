//! The store in folders that are not as they should be: memledger serves on, and says what is wrong.

use std::path::{Path, PathBuf};
use std::process::Command;

use memledger::ledger::store::FILE;

use crate::support::oom::{Ledger, Scene};
use crate::support::{Memledger, binary, run};

const STORE_UP: &str = "memledger_store_up";

/// A tmpfs in a folder of the scene, unmounted when dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn new(path: PathBuf, options: &str) -> Self {
        std::fs::create_dir_all(&path).expect("a folder");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&path).status();
        assert!(mounted.expect("mount runs").success());
        Self(path)
    }

    fn flag(&self) -> String {
        format!("--state.path={}", self.0.display())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A line of the log that is a warning or an error and speaks of the folder.
fn says_so(memledger: &Memledger, folder: &Path) {
    crate::support::eventually("it says so", || {
        let log = memledger.log();
        let path = folder.display().to_string();
        let said = log.lines().any(|line| {
            (line.contains("level=warn") || line.contains("level=error")) && line.contains(&path)
        });
        said.then_some(()).ok_or(log)
    });
}

#[test]
fn a_state_folder_that_cannot_be_written_is_said_and_the_ledger_works_in_memory() {
    let Some(scene) = Scene::new("read-only") else { return };
    let tmpfs = Tmpfs::new(scene.path("ro"), "ro,size=1m");
    let ledger = scene.watch(&[&tmpfs.flag()]);
    says_so(&ledger.memledger, &tmpfs.0);
    let container = scene.run("it", &[], &["eat"]);
    scene.really_killed(1);
    ledger.settles(&container.name, 1, 0);
}

#[test]
fn a_file_that_is_not_ours_is_said_and_left_alone() {
    let Some(scene) = Scene::new("foreign") else { return };
    let state = scene.state();
    drop(scene.watch(&[&state]));
    // whatever its files are called, all are somebody's letter now
    let letter = "Dear reader, this is no ledger.\n".repeat(400);
    let files: Vec<PathBuf> = std::fs::read_dir(scene.state_folder())
        .expect("it")
        .map(|entry| entry.expect("one").path())
        .collect();
    assert!(!files.is_empty(), "it keeps something there");
    for file in &files {
        std::fs::write(file, &letter).expect("written");
    }
    let ledger = scene.watch(&[&state]);
    says_so(&ledger.memledger, &scene.state_folder());
    let container = scene.run("it", &[], &["eat"]);
    scene.really_killed(1);
    ledger.settles(&container.name, 1, 0);
    // nothing that was there is lost: it may be put aside under another name
    let kept = std::fs::read_dir(scene.state_folder())
        .expect("it")
        .any(|entry| std::fs::read_to_string(entry.expect("one").path()).is_ok_and(|text| text == letter));
    assert!(kept, "the letter is gone");
}

/// Waits until facts reach the disk, or do not.
fn store_is(ledger: &Ledger, up: bool) {
    ledger.eventually(if up { "it writes" } else { "it cannot write" }, |metrics| {
        let value = metrics.ask(STORE_UP, &[])?;
        if value == f64::from(u8::from(up)) { Ok(()) } else { Err(format!("{value}")) }
    });
}

/// Kills of the scene that stand on the disk, read by a command while no memledger runs that could find them elsewhere.
fn kills_on_disk(scene: &Scene, state: &str) -> usize {
    let (code, text, error) = run(&["events", "--json", state]);
    assert_eq!(code, Some(0), "{error}");
    let mine = format!("\"process\":\"{}\"", scene.tag);
    text.lines().filter(|line| line.replace("\": \"", "\":\"").contains(&mine)).count()
}

#[test]
fn a_full_disk_loses_no_kill_and_what_it_could_not_hold_is_written_when_there_is_room_again() {
    let Some(scene) = Scene::new("full") else { return };
    let tmpfs = Tmpfs::new(scene.path("small"), "size=2m");
    let state = tmpfs.flag();
    let ledger = scene.watch(&[&state]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=3:eat", "wait=/control/two", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    store_is(&ledger, true);
    let filler = tmpfs.0.join("filler");
    let filled = std::fs::write(&filler, vec![1; 4 << 20]);
    assert!(filled.is_err(), "the disk is full");
    scene.release("one");
    scene.really_killed(4);
    ledger.settles(&container.name, 0, 4);
    store_is(&ledger, false);
    says_so(&ledger.memledger, &tmpfs.0);
    std::fs::remove_file(&filler).expect("room again");
    // without any further kill
    store_is(&ledger, true);
    scene.release("two");
    scene.really_killed(5);
    ledger.settles(&container.name, 0, 5);
    // SIGKILL: what counts is what was written
    drop(ledger);
    assert_eq!(kills_on_disk(&scene, &state), 5);
    let ledger = scene.watch(&[&state]);
    ledger.settles(&container.name, 0, 5);
    assert_eq!(ledger.tally(&scene).sum(), 5);
}

#[test]
fn a_disk_that_is_full_from_the_start_is_said_and_the_ledger_works_in_memory() {
    let Some(scene) = Scene::new("no-room") else { return };
    let tmpfs = Tmpfs::new(scene.path("tiny"), "size=1m");
    let filled = std::fs::write(tmpfs.0.join("filler"), vec![1; 4 << 20]);
    assert!(filled.is_err(), "the disk is full");
    let ledger = scene.watch(&[&tmpfs.flag()]);
    says_so(&ledger.memledger, &tmpfs.0);
    store_is(&ledger, false);
    let container = scene.run("it", &[], &["eat"]);
    scene.really_killed(1);
    ledger.settles(&container.name, 1, 0);
}

#[test]
fn a_ledger_of_a_newer_memledger_is_said_and_left_as_it_is() {
    let Some(scene) = Scene::new("newer") else { return };
    let state = scene.state();
    let file = scene.state_folder().join(FILE);
    drop(scene.watch(&[&state]));
    let newer = rusqlite::Connection::open(&file).expect("the ledger");
    newer.pragma_update(None, "user_version", 99).expect("a schema that nobody knows");
    newer.close().expect("closed"); // the last one to close it moves its write-ahead log into the file
    let before = std::fs::read(&file).expect("the ledger");
    let ledger = scene.watch(&[&state]);
    says_so(&ledger.memledger, &file);
    assert!(ledger.memledger.log().contains("newer memledger"), "{}", ledger.memledger.log());
    store_is(&ledger, false);
    let container = scene.run("it", &[], &["eat"]);
    scene.really_killed(1);
    ledger.settles(&container.name, 1, 0);
    assert!(std::fs::read(&file).expect("the ledger") == before, "it was written");
    let (code, _, error) = run(&["events", &state]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("newer memledger"), "{error}");
}

#[test]
fn a_damaged_ledger_is_moved_aside_and_kills_are_counted_anew() {
    let Some(scene) = Scene::new("damaged") else { return };
    let state = scene.state();
    let file = scene.state_folder().join(FILE);
    let ledger = scene.watch(&[&state]);
    let container = scene.run("it", &[], &["seq=1:eat", "wait=/control/on", "seq=1:eat", "hold"]);
    ledger.settles(&container.name, 0, 1);
    drop(ledger);
    rusqlite::Connection::open(&file)
        .and_then(|it| it.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())))
        .expect("all of it is in the one file");
    let mut bytes = std::fs::read(&file).expect("the ledger");
    bytes[4096..].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31 % 251) as u8);
    std::fs::write(&file, &bytes).expect("damaged");
    for round in 0..2 {
        let ledger = scene.watch(&[&state]);
        if round == 0 {
            says_so(&ledger.memledger, &file);
            scene.release("on");
            scene.really_killed(2);
        }
        store_is(&ledger, true);
        // the first kill went with the file, and is not read from the kernel log again
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
fn a_second_memledger_on_the_same_ledger_ends_with_an_error_that_names_the_first() {
    let Some(scene) = Scene::new("second") else { return };
    let state = scene.state();
    let ledger = scene.watch(&[&state]);
    let container = scene.run("it", &[], &["wait=/control/go", "seq=1:eat", "hold"]);
    ledger.settles(&container.name, 0, 0);
    // a minute is far more than its patience with a predecessor that is about to end
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
    // and the first one is none the worse for it
    scene.release("go");
    scene.really_killed(1);
    ledger.settles(&container.name, 0, 1);
    store_is(&ledger, true);
    drop(ledger);
    assert_eq!(kills_on_disk(&scene, &state), 1);
}
