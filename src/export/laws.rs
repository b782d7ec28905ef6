//! What holds of whatever stands in the store: names, labels and evidence in it were chosen by others, and a disk may
//! give back something else than it was given. The property tests below and the fuzzer (`fuzz/`) call the same function.

use jiff::tz::TimeZone;

use super::{events, otlp, why};
use crate::clock::Moment;
use crate::ledger::entries::Event;
use crate::ledger::why::{explain, explain_last};

/// Rows of the store, a line each: what they say is told in every form without a panic, and in lines of its own alone.
pub fn stored(rows: &str) {
    let events: Vec<Event> = rows.lines().filter_map(|row| serde_json::from_str(row).ok()).collect();
    for event in &events {
        let row = serde_json::to_string(event).unwrap_or_default();
        assert_eq!(serde_json::from_str::<Event>(&row).ok().as_ref(), Some(event), "{row}");
        is_one_line(&events::sentence(event));
    }
    let table = events::table(&events, &TimeZone::UTC);
    assert_eq!(table.lines().count(), events.len() + 1, "{table}");
    table.lines().for_each(is_one_line);
    for verdict in [explain(&events, 1e9), explain_last(&events, 1e9)].into_iter().flatten() {
        let screen = why::render(&verdict);
        screen.lines().for_each(is_one_line);
        assert!(screen.lines().count() <= 200, "{screen}");
    }
    let logs = otlp::Logs::new(&events, usize::MAX, &Default::default(), Moment::now());
    assert_eq!((logs.events, logs.records), (events.len(), events.len()));
}

/// Nothing in it ends the line or steers a terminal.
fn is_one_line(text: &str) {
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    assert!(!text.chars().any(steers), "{text:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn rows() -> Vec<Value> {
        let sample = json!({"at": 90.0, "usage_bytes": 9, "unreclaimable_bytes": 8, "limit_bytes": 10, "shm_used_bytes": 1, "shm_size_bytes": 2});
        let role = json!({"role": "dataloader_worker", "processes": 4, "rss_bytes": 8, "pss_bytes": 7});
        let before = json!({"samples": [sample], "roles": [role], "settings": [["num_workers", "4"]],
            "holders": [{"name": "b", "unreclaimable_bytes": 5}], "host_total_bytes": 100, "host_available_bytes": 3});
        let kill = json!({"type": "oom_kill", "id": 1, "at": 100.0, "boot_id": "b", "kernel_usec": 5, "pid": 7, "process": "python",
            "role": "dataloader_worker", "whose": "container", "container_name": "train", "container_id": "c", "started": 10.0,
            "victim": "child", "scope": "container", "anon_bytes": 5, "file_bytes": 1, "shmem_bytes": 1, "oom_score_adj": 0,
            "limit_cgroup": "/docker/c", "limit_bytes": 10, "method": "kmsg", "evidence": [{"source": "kmsg", "text": "Killed process 7"}],
            "before": before});
        let exit = json!({"type": "exit", "id": 2, "at": 101.0, "container_name": "train", "container_id": "c", "started": 10.0,
            "reason": "error", "exit_code": 137, "runtime_oom_flag": true, "asked_signals": [15, null], "kernel_log_read": true,
            "duration_seconds": 91.0, "oom_kills": 1, "peak_usage_bytes": 10, "peak_unreclaimable_bytes": 9, "evidence": [], "before": before});
        let error = json!({"type": "gpu_error", "id": 3, "at": 99.0, "gpu": "0", "gpu_uuid": "GPU-a", "xid": 79, "pid": 7,
            "container_name": "train", "container_id": "c", "source": "kmsg"});
        vec![kill, exit, error]
    }

    fn value() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-200_i64..400).prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,20}".prop_map(Value::from),
            Just(json!("a\n\u{1b}[2J\u{202e}b")),
            proptest::sample::select(vec![
                "host",
                "main",
                "container",
                "oom_host",
                "signal",
                "killed",
                "unknown",
                "stopped",
                "completed",
                "trainer"
            ])
            .prop_map(Value::from),
        ]
    }

    /// Puts `with` in the place of some value, or takes the entry away.
    fn replaced(place: &mut Value, way: &[usize], with: &Value) {
        let (step, rest) = way.split_first().unwrap_or((&0, &[]));
        match place {
            Value::Object(map) if !map.is_empty() => {
                let key = map.keys().nth(step % map.len()).expect("one of them").clone();
                if rest.is_empty() && with.is_null() {
                    map.remove(&key);
                } else {
                    replaced(&mut map[&key], rest, with);
                }
            }
            Value::Array(list) if !list.is_empty() => {
                let at = step % list.len();
                replaced(&mut list[at], rest, with);
            }
            other => *other = with.clone(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn the_laws_hold_for_rows_with_anything_in_them(
            changes in proptest::collection::vec((0..3_usize, proptest::collection::vec(any::<usize>(), 1..5), value()), 0..6), order in 0..3_usize,
        ) {
            let mut rows = rows();
            for (row, way, with) in &changes {
                replaced(&mut rows[*row], way, with);
            }
            rows.rotate_left(order);
            stored(&rows.iter().map(|row| format!("{row}\n")).collect::<String>());
        }

        #[test]
        fn the_laws_hold_for_any_text(text: String) {
            stored(&text);
        }
    }

    #[test]
    fn the_rows_that_are_changed_above_are_rows() {
        for row in rows() {
            assert!(serde_json::from_value::<Event>(row.clone()).is_ok(), "{row}");
        }
    }
}
