use proptest::prelude::*;

use super::*;
use crate::parse::kernel_log::Line;

/// The line of a kill.
fn kill(pid: u64, usec: u64) -> Vec<u8> {
    let (seconds, micros) = (usec / 1_000_000, usec % 1_000_000);
    format!("<3>[{seconds:5}.{micros:06}] Out of memory: Killed process {pid} (x) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n")
        .into_bytes()
}

fn pids(seen: &Seen) -> Vec<u32> {
    let pid = |line: &Line| match line {
        Line::Killed(killed) => killed.pid,
        other => panic!("{other:?}"),
    };
    seen.entries.iter().map(|entry| pid(&entry.line)).collect()
}

fn text(stamps: &[u64]) -> Vec<u8> {
    stamps.iter().enumerate().flat_map(|(pid, usec)| kill(pid as u64, *usec)).collect()
}

#[test]
fn each_read_gives_what_was_added_also_with_the_same_stamp_or_an_older_one() {
    let mut reader = Reader::default();
    let stamps = [5, 7, 7, 7, 6, 7, 8];
    let mut all = vec![];
    for count in 0..=stamps.len() {
        let seen = reader.take(&text(&stamps[..count]));
        assert!(!seen.lost && seen.entries.len() <= 1, "{seen:?}");
        all.extend(pids(&seen));
        assert_eq!(reader.take(&text(&stamps[..count])), Seen::default(), "nothing new");
    }
    assert_eq!(all, [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_buffer_that_ran_over_is_a_loss_and_so_is_one_that_was_cleared() {
    let mut reader = Reader::default();
    let whole = text(&[1, 2, 3, 4, 5]);
    reader.take(&whole[..2 * kill(0, 0).len()]);
    let seen = reader.take(&whole[3 * kill(0, 0).len()..]);
    assert_eq!((pids(&seen), seen.lost), (vec![3, 4], true));
    assert_eq!((reader.take(b"").lost, reader.take(b"").lost), (true, false));
    let seen = reader.take(&kill(9, 9));
    assert_eq!((pids(&seen), seen.lost), (vec![9], false));
}

#[test]
fn a_run_goes_on_where_the_last_one_stood() {
    let resumed = |usec| {
        let mut reader = Reader::default();
        reader.resume_after(Position { sequence: Some(4), usec });
        reader
    };
    let log = text(&[10, 20, 30]);
    let seen = resumed(20).take(&log);
    assert_eq!((pids(&seen), seen.lost, seen.rewound), (vec![2], false, false));
    let seen = resumed(5).take(&log);
    assert_eq!((pids(&seen), seen.lost, seen.rewound), (vec![0, 1, 2], true, false));
    let seen = resumed(40).take(&log);
    assert_eq!((pids(&seen), seen.rewound), (vec![0, 1, 2], true));
    let mut reader = resumed(30);
    assert_eq!(reader.take(&log), Seen::default());
    assert_eq!(reader.position(), Position { sequence: None, usec: 30 });
    assert_eq!(pids(&reader.take(&text(&[10, 20, 30, 30]))), [3]);
}

#[test]
fn a_line_whose_rest_is_missing_is_looked_at_again() {
    let first =
        b"<6>[    0.000002] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a\n".to_vec();
    let rest = b"<4>[    0.000003] ,task_memcg=/a,task=x,pid=7,uid=0\n".to_vec();
    let mut reader = Reader::default();
    let begin = [kill(1, 1), first].concat();
    assert_eq!(pids(&reader.take(&begin)), [1]);
    assert_eq!(reader.position().usec, 1);
    let seen = reader.take(&[begin, rest, kill(7, 4)].concat());
    assert_eq!((seen.entries.len(), seen.entries[0].position.usec, seen.lost), (2, 2, false));
    assert!(matches!(seen.entries[0].line, Line::Context(_)));
}

#[test]
fn lines_without_stamps_are_noticed() {
    let with = text(&[1, 2]);
    let without = [&b"<3>Out of memory: Killed process 1 (x) total-vm:1kB\n"[..]; 20].concat();
    assert!(has_stamps(&with) && !has_stamps(&without));
}

proptest! {
    #[test]
    fn a_buffer_of_any_size_gives_each_kill_once_or_says_that_some_are_lost(
        stamps in proptest::collection::vec(0u64..5, 1..60), holds in 1usize..60, steps in proptest::collection::vec(1usize..20, 1..20),
    ) {
        let (mut reader, mut all, mut lost, mut end) = (Reader::default(), vec![], false, 0);
        for step in steps {
            end = (end + step).min(stamps.len());
            let from = end.saturating_sub(holds);
            let lines: Vec<_> = (from..end).flat_map(|pid| kill(pid as u64, stamps[pid])).collect();
            let seen = reader.take(&lines);
            lost |= seen.lost;
            all.extend(pids(&seen));
        }
        let mut once = all.clone();
        once.dedup();
        prop_assert_eq!(&all, &once, "each once");
        if !lost {
            let first = all.first().copied().unwrap_or(0);
            prop_assert_eq!(all, (first..end as u32).collect::<Vec<_>>());
        }
    }
}
