//! Tests that have this kernel to themselves: they overwrite its log, or speak of all kills of the host.
//!
//! `.config/nextest.toml` runs them with no other test beside them; the v2 guest runs one test after the other anyway.

use crate::support::oom::{DUPLICATES, GAPS, HOST_KILLS, Scene, UNATTRIBUTED, flood_kernel_log, oom_kills};

/// Kills in one container that lives on; more than the log holds where it is overwritten afterwards.
const KILLS: usize = 60;

#[test]
fn the_books_balance_to_the_last_kill_and_nothing_is_left_over() {
    let Some(scene) = Scene::new("books") else { return };
    let before = oom_kills();
    let ledger = scene.watch(&[]);
    let start = ledger.memledger.metrics();
    let unattributed = start.value(UNATTRIBUTED, &[]);
    let container = scene.run("it", &[], &["seq=10:eat", "par=10:score=900,eat", "threads=4"]);
    scene.really_killed(21);
    ledger.settles(&container.name, 1, 20);
    assert_eq!(oom_kills() - before, 21, "another's kill: this test was not alone");
    let metrics = ledger.memledger.fresh_metrics();
    assert_eq!(metrics.value(HOST_KILLS, &[]) - start.value(HOST_KILLS, &[]), 21.0);
    assert_eq!(metrics.value(DUPLICATES, &[]), start.value(DUPLICATES, &[]));
    assert_eq!(metrics.value(GAPS, &[]), start.value(GAPS, &[]));
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), unattributed);
}

#[test]
fn case_16_a_log_that_was_overwritten_while_memledger_was_down_leaves_a_gap_of_known_size() {
    let Some(scene) = Scene::new("overrun") else { return };
    let state = scene.state();
    let ledger = scene.watch(&[&state]);
    let container = scene.run("it", &[], &["wait=/control/go", &format!("seq={KILLS}:eat"), "hold"]);
    ledger.settles(&container.name, 0, 0);
    let gaps = ledger.memledger.metrics().value(GAPS, &[]);
    drop(ledger);
    scene.release("go");
    scene.really_killed(KILLS);
    flood_kernel_log();
    for _ in 0..2 {
        let ledger = scene.watch(&[&state]);
        ledger.balances();
        ledger.eventually("the gap", |metrics| match metrics.value(GAPS, &[]) - gaps {
            gap if gap == KILLS as f64 => Ok(()),
            gap => Err(format!("{gap} of {KILLS}")),
        });
        // the container lives, and its counter tells whose they were
        ledger.settles(&container.name, 0, KILLS);
    }
}

#[test]
fn case_24_a_log_that_was_overwritten_while_memledger_stood_still_leaves_a_gap_of_known_size() {
    let Some(scene) = Scene::new("still") else { return };
    let ledger = scene.watch(&[]);
    let container = scene.run("it", &[], &["wait=/control/go", &format!("seq={KILLS}:eat"), "hold"]);
    ledger.settles(&container.name, 0, 0);
    ledger.memledger.signal("STOP");
    scene.release("go");
    scene.really_killed(KILLS);
    flood_kernel_log();
    let truth = scene.run_to_its_end("after", &["eat"]);
    assert_eq!(truth, 137);
    ledger.memledger.signal("CONT");
    ledger.balances();
    ledger.settles(&container.name, 0, KILLS);
    ledger.settles(&scene.called("after"), 1, 0);
    let gap = ledger.memledger.metrics().value(GAPS, &[]);
    // what memledger had read before the flood reached it is no gap
    assert!((1.0..=KILLS as f64).contains(&gap), "{gap}");
}
