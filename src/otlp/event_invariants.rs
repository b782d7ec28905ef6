//! Invariants of everything that reads stored events: others choose names, labels and evidence, and a disk may return other
//! data than was written. The property tests below and the fuzzer (`fuzz/`) call the same function.

use jiff::tz::TimeZone;

use super::event_records::EventRecords;
use crate::clock::Timestamp;
use crate::diagnose::{explain, explain_last};
use crate::events::LedgerEvent;
use crate::export::{events, words};

/// Parses rows of the store, one per line. Renders the events in every form, without a panic and without broken lines.
pub fn stored(rows: &str) {
    let events: Vec<LedgerEvent> = rows.lines().filter_map(|row| serde_json::from_str(row).ok()).collect();
    for event in &events {
        let row = serde_json::to_string(event).unwrap_or_default();
        assert_eq!(serde_json::from_str::<LedgerEvent>(&row).ok().as_ref(), Some(event), "{row}");
        is_one_line(&events::sentence(event));
    }
    let mut table = events::EventTable::new(TimeZone::UTC);
    events.iter().for_each(|event| table.fit(event));
    let table: String = events.iter().map(|event| table.render(event)).collect();
    assert_eq!(table.lines().count(), events.len(), "{table}");
    table.lines().for_each(is_one_line);
    for verdict in [explain(&events, 1e9), explain_last(&events, 1e9)].into_iter().flatten() {
        let screen = words::screen::render(&verdict);
        screen.lines().for_each(is_one_line);
        assert!(screen.lines().count() <= 200, "{screen}");
    }
    let logs = EventRecords::new(&events, usize::MAX, &Default::default(), Timestamp::now());
    assert_eq!((logs.events, logs.records), (events.len(), events.len()));
}

/// Checks that nothing in the text ends the line or controls a terminal.
fn is_one_line(text: &str) {
    let is_control = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    assert!(!text.chars().any(is_control), "{text:?}");
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
            "role": "dataloader_worker", "owner": "container", "container_name": "train", "container_id": "c", "started": 10.0,
            "victim": "child", "scope": "container", "anon_bytes": 5, "file_bytes": 1, "shmem_bytes": 1, "oom_score_adj": 0,
            "limit_cgroup": "/docker/c", "limit_bytes": 10, "method": "kmsg", "evidence": [{"source": "kmsg", "text": "Killed process 7"}],
            "before": before});
        let exit = json!({"type": "exit", "id": 2, "at": 101.0, "container_name": "train", "container_id": "c", "started": 10.0,
            "reason": "error", "exit_code": 137, "runtime_oom_flag": true, "stop_signals": [15, null], "kernel_log_read": true,
            "duration_seconds": 91.0, "oom_kills": 1, "peak_usage_bytes": 10, "peak_unreclaimable_bytes": 9, "evidence": [], "before": before});
        let error = json!({"type": "gpu_error", "id": 3, "at": 99.0, "gpu": "0", "gpu_uuid": "GPU-a", "xid": 79, "pid": 7,
            "container_name": "train", "container_id": "c", "source": "kmsg"});
        let oom = json!({"type": "cuda_oom", "id": 4, "at": 100.5, "gpu": "0", "gpu_uuid": "GPU-a", "pid": 7, "rank": 0, "source": "reporter",
            "container_name": "train", "container_id": "c", "started": 10.0, "tried_bytes": 9, "total_bytes": 20, "free_bytes": 2,
            "allocated_bytes": 4, "reserved_bytes": 10, "inactive_split_bytes": 6, "component": "model", "operation": "forward",
            "uncaught": true, "skipped": 3, "holders": [{"name": "b", "bytes": 5}, {"name": "train", "own": true, "bytes": 10}]});
        vec![kill, exit, error, oom]
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
                "host_restart",
                "cuda_oom",
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

    /// Replaces a value, or removes an entry.
    fn replace(target: &mut Value, path: &[usize], with: &Value) {
        let (step, rest) = path.split_first().unwrap_or((&0, &[]));
        match target {
            Value::Object(map) if !map.is_empty() => {
                let key = map.keys().nth(step % map.len()).expect("one of them").clone();
                if rest.is_empty() && with.is_null() {
                    map.remove(&key);
                } else {
                    replace(&mut map[&key], rest, with);
                }
            }
            Value::Array(list) if !list.is_empty() => {
                let at = step % list.len();
                replace(&mut list[at], rest, with);
            }
            other => *other = with.clone(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn any_values_keep_the_invariants(
            changes in proptest::collection::vec((0..3_usize, proptest::collection::vec(any::<usize>(), 1..5), value()), 0..6), order in 0..3_usize,
        ) {
            let mut rows = rows();
            for (row, path, with) in &changes {
                replace(&mut rows[*row], path, with);
            }
            rows.rotate_left(order);
            stored(&rows.iter().map(|row| format!("{row}\n")).collect::<String>());
        }

        #[test]
        fn any_text_keeps_the_invariants(text: String) {
            stored(&text);
        }
    }

    #[test]
    fn sample_rows_are_valid_events() {
        for row in rows() {
            assert!(serde_json::from_value::<LedgerEvent>(row.clone()).is_ok(), "{row}");
        }
    }
}
