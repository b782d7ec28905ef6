//! The followers of the ledger over crashes: `--events.file` has each event once, in order and with a stable id.

use std::path::Path;

use memledger::ledger::store::FILE;
use serde_json::Value;

use crate::support::oom::{Ledger, Scene};
use crate::support::{eventually, eventually_true};

/// Returns the events in the file; each line must be whole, but for the last one if it is in the making.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let written = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    written.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn ids(events: &[Value]) -> Vec<u64> {
    events.iter().map(|event| event["id"].as_u64().expect("an id")).collect()
}

/// Waits until the file has these kills of the scene, and checks that it agrees with the ledger.
fn file_has(scene: &Scene, ledger: &Ledger, path: &Path, kills: usize) {
    let is_ours = |event: &&Value| event["type"] == "oom_kill" && event["process"] == scene.tag.as_str();
    eventually("the kills in the file", || {
        let found = lines(path).iter().filter(is_ours).count();
        assert!(found <= kills, "{found} kills, of {kills}");
        if found == kills { Ok(()) } else { Err(format!("{found} kills")) }
    });
    let written = lines(path);
    let numbers = ids(&written);
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "each once and in order: {numbers:?}");
    let stored = ledger.events();
    // the ledger has each container under its newest name, the file under the one of that time
    let nameless = |event: &Value| {
        let mut event = event.clone();
        let object = event.as_object_mut().expect("an object");
        object.retain(|key, _| key != "container_name" && key != "former_names");
        event
    };
    let stored: Vec<_> = stored.iter().map(nameless).collect();
    for event in &written {
        assert!(stored.contains(&nameless(event)), "an id with two events: {event}");
    }
}

/// Kills the ledger with SIGKILL, and puts the cursors of its followers back to `cursor`, as if it had been killed before they
/// were stored.
fn crash_before_cursors(scene: &Scene, ledger: Ledger, cursor: u64) {
    drop(ledger);
    let store = rusqlite::Connection::open(scene.state_folder().join(FILE)).expect("the ledger");
    let rows = store
        .execute(
            "UPDATE state SET value = CAST(?1 AS TEXT) WHERE kind = 'follower_cursor'",
            [cursor.cast_signed()],
        )
        .expect("rows");
    assert!(rows >= 2, "the log and the file");
}

#[test]
fn events_file_has_each_event_once_over_crashes() {
    let Some(scene) = Scene::new("follow") else { return };
    let file = scene.path("below/events.jsonl");
    let (state, flag) = (scene.state(), format!("--events.file={}", file.display()));
    let ledger = scene.start_memledger(&[&state, &flag]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=1:eat", "wait=/control/two", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    assert!(!file.exists(), "its folder does not exist: the events are committed and not in the file");
    drop(ledger); // SIGKILL
    std::fs::create_dir(file.parent().expect("a folder")).expect("created");
    let ledger = scene.start_memledger(&[&state, &flag]);
    file_has(&scene, &ledger, &file, 1);

    // the file has the line, the store not yet the cursor
    let cursor = ids(&lines(&file))[0] - 1;
    crash_before_cursors(&scene, ledger, cursor);
    let ledger = scene.start_memledger(&[&state, &flag]);
    let first = lines(&file)[0]["id"].to_string();
    eventually_true("the log has it again", || {
        let is_it = |line: &str| line.contains(&format!("event={first} ")); // it may be an exit of another test
        ledger.memledger.log().lines().any(is_it)
    });
    scene.release("one");
    scene.wait_for_kills(2);
    ledger.settles(&container.name, 0, 2);
    file_has(&scene, &ledger, &file, 2);

    // the last line was cut off
    let text = std::fs::read(&file).expect("the file");
    let last = lines(&file).len() - 1;
    crash_before_cursors(&scene, ledger, cursor);
    std::fs::write(&file, &text[..text.len() - 5]).expect("cut off");
    let ledger = scene.start_memledger(&[&state, &flag]);
    scene.release("two");
    scene.wait_for_kills(3);
    ledger.settles(&container.name, 0, 3);
    eventually_true("three whole kills", || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let whole: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let numbers = ids(&whole);
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
        assert!(text.lines().count() <= whole.len() + 1, "one line was cut off");
        whole.iter().filter(|event| event["process"] == scene.tag.as_str()).count() == 3 && whole.len() > last
    });
}

#[test]
fn ids_are_not_reused_when_the_state_is_lost() {
    let Some(scene) = Scene::new("lost") else { return };
    let file = scene.path("events.jsonl");
    let (state, flag) = (scene.state(), format!("--events.file={}", file.display()));
    let ledger = scene.start_memledger(&[&state, &flag]);
    let container = scene.run("it", &[], &["seq=1:eat", "wait=/control/one", "seq=1:eat", "hold"]);
    ledger.settles(&container.name, 0, 1);
    file_has(&scene, &ledger, &file, 1);
    drop(ledger);
    std::fs::remove_dir_all(scene.state_folder()).expect("removed");
    let ledger = scene.start_memledger(&[&state, &flag]);
    scene.release("one");
    scene.wait_for_kills(2);
    ledger.settles(&container.name, 0, 1);
    eventually("both kills in the file, each with an id of its own", || {
        let written = lines(&file);
        let numbers = ids(&written);
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
        let kills = written.iter().filter(|event| event["process"] == scene.tag.as_str()).count();
        if kills == 2 { Ok(()) } else { Err(format!("{kills} kills")) }
    });
}
