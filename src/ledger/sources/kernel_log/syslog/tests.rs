use proptest::prelude::*;

use super::*;
use crate::parse::kernel_log::Line;

/// Returns the line of a kill.
fn kill(pid: u64, usec: u64) -> Vec<u8> {
    let (seconds, micros) = (usec / 1_000_000, usec % 1_000_000);
    format!("<3>[{seconds:5}.{micros:06}] Out of memory: Killed process {pid} (x) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n")
        .into_bytes()
}

fn pids(batch: &LogBatch) -> Vec<u32> {
    let pid = |line: &Line| match line {
        Line::Killed(killed) => killed.pid,
        other => panic!("{other:?}"),
    };
    batch.entries.iter().map(|entry| pid(&entry.line)).collect()
}

fn text(stamps: &[u64]) -> Vec<u8> {
    stamps.iter().enumerate().flat_map(|(pid, usec)| kill(pid as u64, *usec)).collect()
}

#[test]
fn returns_new_lines_with_equal_or_older_timestamps() {
    let mut reader = SyslogCursor::default();
    let stamps = [5, 7, 7, 7, 6, 7, 8];
    let mut all = vec![];
    for count in 0..=stamps.len() {
        let batch = reader.read_new(&text(&stamps[..count]));
        assert!(!batch.lost && batch.entries.len() <= 1, "{batch:?}");
        all.extend(pids(&batch));
        assert_eq!(reader.read_new(&text(&stamps[..count])), LogBatch::default(), "nothing new");
    }
    assert_eq!(all, [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn overwritten_or_cleared_buffer_is_a_loss() {
    let mut reader = SyslogCursor::default();
    let whole = text(&[1, 2, 3, 4, 5]);
    reader.read_new(&whole[..2 * kill(0, 0).len()]);
    let batch = reader.read_new(&whole[3 * kill(0, 0).len()..]);
    assert_eq!((pids(&batch), batch.lost), (vec![3, 4], true));
    assert_eq!((reader.read_new(b"").lost, reader.read_new(b"").lost), (true, false));
    let batch = reader.read_new(&kill(9, 9));
    assert_eq!((pids(&batch), batch.lost), (vec![9], false));
}

#[test]
fn resumes_after_last_run() {
    let resumed = |usec| {
        let mut reader = SyslogCursor::default();
        reader.resume_after(LogPosition { sequence: Some(4), usec });
        reader
    };
    let log = text(&[10, 20, 30]);
    let batch = resumed(20).read_new(&log);
    assert_eq!((pids(&batch), batch.lost, batch.rewound), (vec![2], false, false));
    let batch = resumed(5).read_new(&log);
    assert_eq!((pids(&batch), batch.lost, batch.rewound), (vec![0, 1, 2], true, false));
    let batch = resumed(40).read_new(&log);
    assert_eq!((pids(&batch), batch.rewound), (vec![0, 1, 2], true));
    let mut reader = resumed(30);
    assert_eq!(reader.read_new(&log), LogBatch::default());
    assert_eq!(reader.position(), LogPosition { sequence: None, usec: 30 });
    assert_eq!(pids(&reader.read_new(&text(&[10, 20, 30, 30]))), [3]);
}

#[test]
fn rereads_incomplete_line() {
    let first =
        b"<6>[    0.000002] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a\n".to_vec();
    let rest = b"<4>[    0.000003] ,task_memcg=/a,task=x,pid=7,uid=0\n".to_vec();
    let mut reader = SyslogCursor::default();
    let begin = [kill(1, 1), first].concat();
    assert_eq!(pids(&reader.read_new(&begin)), [1]);
    assert_eq!(reader.position().usec, 1);
    let batch = reader.read_new(&[begin, rest, kill(7, 4)].concat());
    assert_eq!((batch.entries.len(), batch.entries[0].position.usec, batch.lost), (2, 2, false));
    assert!(matches!(batch.entries[0].line, Line::Context(_)));
}

#[test]
fn detects_lines_without_timestamps() {
    let with = text(&[1, 2]);
    let without = [&b"<3>Out of memory: Killed process 1 (x) total-vm:1kB\n"[..]; 20].concat();
    assert!(has_timestamps(&with) && !has_timestamps(&without));
}

proptest! {
    #[test]
    fn returns_each_kill_once_or_reports_loss(
        stamps in proptest::collection::vec(0u64..5, 1..60), holds in 1usize..60, steps in proptest::collection::vec(1usize..20, 1..20),
    ) {
        let (mut reader, mut all, mut lost, mut end) = (SyslogCursor::default(), vec![], false, 0);
        for step in steps {
            end = (end + step).min(stamps.len());
            let from = end.saturating_sub(holds);
            let lines: Vec<_> = (from..end).flat_map(|pid| kill(pid as u64, stamps[pid])).collect();
            let batch = reader.read_new(&lines);
            lost |= batch.lost;
            all.extend(pids(&batch));
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

#[test]
fn block_that_is_read_in_parts_or_over_a_restart_has_one_report() {
    use crate::parse::kernel_log::records::KmsgRecord;
    let log: &[u8] = include_bytes!("../../../../../tests/kernel-logs/v1-6.18-container.kmsg");
    let lines: Vec<String> = log
        .split(|&byte| byte == b'\n')
        .filter_map(KmsgRecord::of)
        .map(|record| {
            let (seconds, micros) = (record.usec / 1_000_000, record.usec % 1_000_000);
            let text = String::from_utf8(record.text).unwrap();
            format!("<{}>[{seconds:5}.{micros:06}] {text}\n", record.priority)
        })
        .collect();
    let text = lines.concat();
    let report = |batch: &LogBatch| batch.entries.last().and_then(|entry| entry.report.clone());
    let whole = report(&SyslogCursor::default().read_new(text.as_bytes())).expect("a report");
    assert!(!whole.incomplete);
    for end in 1..lines.len() {
        let mut reader = SyslogCursor::default();
        assert_eq!(report(&reader.read_new(lines[..end].concat().as_bytes())), None);
        let mut resumed = SyslogCursor::default();
        resumed.resume_after(reader.position());
        assert_eq!(report(&reader.read_new(text.as_bytes())).as_ref(), Some(&whole), "in parts, at {end}");
        assert_eq!(report(&resumed.read_new(text.as_bytes())).as_ref(), Some(&whole), "restarted at {end}");
    }
}
