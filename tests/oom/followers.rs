//! The log over crashes: each event at least once, in order, and under the same id.

use memledger::ledger::store::FILE;

use crate::support::eventually;
use crate::support::oom::{Ledger, Scene};

/// Waits until the log has so many settled kills of a container, and returns the ids of the events in it.
fn logged(ledger: &Ledger, container: &str, kills: usize) -> Vec<u64> {
    eventually("the kills in the log", || {
        let log = ledger.memledger.log();
        let of_container: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("OOM kill settled") && line.contains(container))
            .collect();
        if of_container.len() < kills {
            return Err(log);
        }
        let id = |line: &&str| {
            let number = line.split_once("event=").expect("an id").1.split(' ').next().expect("a number");
            number.parse().expect("a number")
        };
        Ok(of_container.iter().map(id).collect())
    })
}

/// Kills the ledger with SIGKILL, and puts the cursor of the log back to `cursor`, as if it had been killed before that was stored.
fn crash_before_cursor(scene: &Scene, ledger: Ledger, cursor: u64) {
    drop(ledger);
    let store = rusqlite::Connection::open(scene.state_folder().join(FILE)).expect("the ledger");
    let sql = "UPDATE state SET value = CAST(?1 AS TEXT) WHERE kind = 'follower_cursor' AND key = 'log'";
    assert_eq!(store.execute(sql, [cursor.cast_signed()]).expect("rows"), 1);
}

#[test]
fn log_has_each_event_over_crashes_under_one_id() {
    let Some(scene) = Scene::new("follow") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    let first = logged(&ledger, &container.name, 1);
    crash_before_cursor(&scene, ledger, first[0] - 1);
    let ledger = scene.start_memledger(&[&state]);
    assert_eq!(logged(&ledger, &container.name, 1), first, "repeated, not lost");
    scene.release("one");
    scene.wait_for_kills(2);
    ledger.settles(&container.name, 0, 2);
    let both = logged(&ledger, &container.name, 2);
    assert!(both[0] == first[0] && both[1] > both[0], "{both:?}");
}
