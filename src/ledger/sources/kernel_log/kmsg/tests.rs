use proptest::prelude::*;

use super::*;
use crate::ledger::sources::kernel_log::LogEntry;
use crate::parse::kernel_log::Line;

/// Returns the record of a kill of pid `sequence`, with the timestamp `sequence` * 1000.
fn kill(sequence: u64) -> Vec<u8> {
    let stamp = sequence * 1000;
    format!("3,{sequence},{stamp},-;Out of memory: Killed process {sequence} (x) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n")
        .into_bytes()
}

fn position(sequence: u64) -> LogPosition {
    LogPosition { sequence: Some(sequence), usec: sequence * 1000 }
}

/// Reads a log with these records once.
fn read(reader: &mut KmsgCursor, records: impl IntoIterator<Item = Vec<u8>>) -> LogBatch {
    let mut batch = LogBatch::default();
    for record in records {
        reader.push(KmsgRecord::of(&record).expect("a record"), &mut batch);
    }
    reader.finish_read(&mut batch);
    batch
}

fn pids(batch: &LogBatch) -> Vec<u32> {
    let pid = |entry: &LogEntry| match &entry.line {
        Line::Killed(killed) => killed.pid,
        other => panic!("{other:?}"),
    };
    batch.entries.iter().map(pid).collect()
}

fn resumed(after: LogPosition) -> KmsgCursor {
    let mut reader = KmsgCursor::default();
    reader.resume_after(after);
    reader
}

#[test]
fn buffer_fits_longest_record() {
    const { assert!(RECORD_BYTES >= 16 * 1024) };
}

#[test]
fn gap_in_sequence_numbers_is_a_loss() {
    let mut reader = KmsgCursor::default();
    let batch = read(&mut reader, (7..10).map(kill));
    assert_eq!((pids(&batch), batch.lost), (vec![7, 8, 9], false));
    let batch = read(&mut reader, (10..12).map(kill));
    assert_eq!((pids(&batch), batch.lost, reader.position()), (vec![10, 11], false, position(11)));
    let batch = read(&mut reader, (13..14).map(kill));
    assert_eq!((pids(&batch), batch.lost), (vec![13], true));
}

#[test]
fn resumes_after_last_run() {
    let mut reader = resumed(position(8));
    assert_eq!(reader.position(), position(8), "before the first read");
    let batch = read(&mut reader, (5..11).map(kill));
    assert_eq!(batch, LogBatch { entries: batch.entries.clone(), ..LogBatch::default() });
    assert_eq!(pids(&batch), [9, 10]);
    let nothing_new = read(&mut resumed(position(10)), (5..11).map(kill));
    assert_eq!(nothing_new, LogBatch::default());
}

#[test]
fn gap_after_last_run_is_a_loss() {
    let batch = read(&mut resumed(position(3)), (5..7).map(kill));
    assert_eq!((pids(&batch), batch.lost, batch.rewound), (vec![5, 6], true, false));
    assert!(!read(&mut resumed(position(4)), (5..7).map(kill)).lost, "the next record exists");
    let overwritten_before = read(&mut resumed(position(9)), [kill(4), kill(8), kill(9), kill(10)]);
    assert_eq!(
        (pids(&overwritten_before), overwritten_before.lost),
        (vec![10], false),
        "read by the last run"
    );
}

#[test]
fn overrun_is_a_loss_unless_before_resume_position() {
    let mut batch = LogBatch::default();
    KmsgCursor::default().overrun(&mut batch);
    assert!(batch.lost);
    let mut batch = LogBatch::default();
    resumed(position(5)).overrun(&mut batch);
    assert!(!batch.lost);
}

#[test]
fn restored_machine_state_rereads_all_records() {
    let mut reader = resumed(position(90));
    let batch = read(&mut reader, (5..8).map(kill));
    assert_eq!((pids(&batch), batch.rewound, reader.position()), (vec![5, 6, 7], true, position(7)));
    assert!(!read(&mut reader, [kill(8)]).rewound);
    let other_timestamp = LogPosition { usec: 1, ..position(6) };
    let batch = read(&mut resumed(other_timestamp), (5..8).map(kill));
    assert_eq!((pids(&batch), batch.rewound), (vec![5, 6, 7], true));
}

#[test]
fn resumes_syslog_position_by_timestamp() {
    let at = |usec| LogPosition { sequence: None, usec };
    let batch = read(&mut resumed(at(6_000)), (5..8).map(kill));
    assert_eq!((pids(&batch), batch.lost, batch.rewound), (vec![7], false, false));
    let batch = read(&mut resumed(at(2_000)), (5..8).map(kill));
    assert_eq!((pids(&batch), batch.lost, batch.rewound), (vec![5, 6, 7], true, false));
    let batch = read(&mut resumed(at(9_000)), (5..8).map(kill));
    assert_eq!((pids(&batch), batch.rewound), (vec![5, 6, 7], true));
    assert!(!read(&mut resumed(at(500)), (0..3).map(kill)).lost, "the log begins at its first record");
}

#[test]
fn empty_log_keeps_resume_position() {
    let mut reader = resumed(position(6));
    assert_eq!(read(&mut reader, []), LogBatch::default());
    let batch = read(&mut reader, (5..8).map(kill));
    assert_eq!((pids(&batch), batch.rewound), (vec![7], false));
}

#[test]
fn rereads_incomplete_fragments_after_restart() {
    let first = b"6,8,8000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a".to_vec();
    let rest = b"4,9,9000,c;,task_memcg=/a,task=x,pid=7,uid=0".to_vec();
    let mut reader = KmsgCursor::default();
    assert_eq!(read(&mut reader, [kill(7), first.clone()]).entries.len(), 1);
    assert_eq!(reader.position(), position(7));
    let batch = read(&mut reader, [rest.clone()]);
    assert_eq!((batch.entries.len(), batch.lost, batch.entries[0].position), (1, false, position(8)));
    assert_eq!(reader.position(), position(9));
    let batch = read(&mut resumed(position(7)), [kill(7), first, rest]);
    assert!(matches!(batch.entries[0].line, Line::Context(_)), "{batch:?}");
}

#[test]
fn distinguishes_missing_from_denied() {
    let dir = tempfile::tempdir().expect("a folder");
    let error = KmsgDevice::open(&dir.path().join("kmsg")).expect_err("nothing there");
    assert!(matches!(error, ReadError::Absent(_)), "{error}");
    std::os::unix::fs::symlink("/dev/null", dir.path().join("kmsg")).expect("a link");
    let error = KmsgDevice::open(&dir.path().join("kmsg")).expect_err("something else there");
    assert!(matches!(error, ReadError::Absent(_)), "{error}");
    assert_eq!(read_error(Errno::PERM, "kmsg").reason_label(), Some("permission"));
    assert_eq!(read_error(Errno::IO, "kmsg").reason_label(), Some("io"));
}

proptest! {
    #[test]
    fn returns_each_kill_once_across_restarts(count in 1u64..40, restarts in proptest::collection::vec(0u64..40, 0..6)) {
        let mut stops: Vec<_> = restarts.into_iter().filter(|stop| *stop < count).collect();
        stops.sort_unstable();
        let (mut reader, mut all) = (KmsgCursor::default(), vec![]);
        for stop in stops.into_iter().chain([count]) {
            let batch = read(&mut reader, (0..stop).map(kill));
            prop_assert!(!batch.lost && !batch.rewound);
            all.extend(pids(&batch));
            let at = reader.position();
            reader = KmsgCursor::default();
            if stop > 0 {
                reader.resume_after(at);
            }
        }
        prop_assert_eq!(all, (0..count as u32).collect::<Vec<_>>());
    }
}

#[test]
fn restart_within_a_block_loses_nothing_of_its_report() {
    let log: &[u8] = include_bytes!("../../../../../tests/kernel-logs/v1-6.18-container.kmsg");
    let records: Vec<Vec<u8>> = log.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    let kills = |batch: &LogBatch| -> Vec<LogEntry> {
        let is_kill = |entry: &&LogEntry| matches!(entry.line, Line::Killed(_));
        batch.entries.iter().filter(is_kill).cloned().collect()
    };
    let whole = kills(&read(&mut KmsgCursor::default(), records.clone()));
    assert!(whole[0].report.as_ref().is_some_and(|report| !report.incomplete));
    for end in 1..records.len() {
        let mut first = KmsgCursor::default();
        let before = read(&mut first, records[..end].to_vec());
        assert_eq!(kills(&before), []);
        let mut second = resumed(first.position());
        let after = read(&mut second, records.clone());
        assert_eq!((kills(&after), after.lost, after.rewound), (whole.clone(), false, false), "after {end}");
        let has_context = |entry: &LogEntry| matches!(entry.line, Line::Context(_));
        assert!(after.entries.iter().any(has_context), "the context line is read again, after {end}");
        // without a restart
        assert_eq!(kills(&read(&mut first, records[end..].to_vec())), whole);
        // the log is read to its end at once, and the rest is written later
        let mut third = resumed(first.position());
        read(&mut third, records.clone());
        assert_eq!(third.position(), first.position());
    }
}

#[test]
fn records_lost_within_a_block_are_not_hidden() {
    let log: &[u8] = include_bytes!("../../../../../tests/kernel-logs/v1-6.18-container.kmsg");
    let records: Vec<Vec<u8>> = log.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    for lost in 2..records.len() - 1 {
        let mut reader = KmsgCursor::default();
        read(&mut reader, records[..lost].to_vec());
        let batch = read(&mut reader, records[lost + 1..].to_vec());
        let report = batch.entries.last().and_then(|entry| entry.report.as_ref());
        assert!(
            batch.lost && report.is_none_or(|report| report.incomplete),
            "without record {lost}: {report:?}"
        );
    }
}
