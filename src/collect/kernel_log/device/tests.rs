use proptest::prelude::*;

use super::*;
use crate::collect::kernel_log::Entry;
use crate::parse::kernel_log::Line;

/// The record of a kill of pid `sequence`, stamped with a thousand times that.
fn kill(sequence: u64) -> Vec<u8> {
    let stamp = sequence * 1000;
    format!("3,{sequence},{stamp},-;Out of memory: Killed process {sequence} (x) total-vm:1kB, anon-rss:1kB, file-rss:0kB\n")
        .into_bytes()
}

fn position(sequence: u64) -> Position {
    Position { sequence: Some(sequence), usec: sequence * 1000 }
}

/// One read of a log that holds these records.
fn read(reader: &mut Reader, records: impl IntoIterator<Item = Vec<u8>>) -> Seen {
    let mut seen = Seen::default();
    for record in records {
        reader.take(Record::of(&record).expect("a record"), &mut seen);
    }
    reader.drained(&mut seen);
    seen
}

fn pids(seen: &Seen) -> Vec<u32> {
    let pid = |entry: &Entry| match &entry.line {
        Line::Killed(killed) => killed.pid,
        other => panic!("{other:?}"),
    };
    seen.entries.iter().map(pid).collect()
}

fn resumed(after: Position) -> Reader {
    let mut reader = Reader::default();
    reader.resume_after(after);
    reader
}

#[test]
fn the_buffer_has_room_for_the_longest_record() {
    const { assert!(RECORD_BYTES >= 16 * 1024) };
}

#[test]
fn a_jump_of_the_numbers_is_a_loss_and_no_jump_is_none() {
    let mut reader = Reader::default();
    let seen = read(&mut reader, (7..10).map(kill));
    assert_eq!((pids(&seen), seen.lost), (vec![7, 8, 9], false));
    let seen = read(&mut reader, (10..12).map(kill));
    assert_eq!((pids(&seen), seen.lost, reader.position()), (vec![10, 11], false, position(11)));
    let seen = read(&mut reader, (13..14).map(kill));
    assert_eq!((pids(&seen), seen.lost), (vec![13], true));
}

#[test]
fn what_the_last_run_read_is_not_given_again() {
    let mut reader = resumed(position(8));
    assert_eq!(reader.position(), position(8), "before the first read");
    let seen = read(&mut reader, (5..11).map(kill));
    assert_eq!(seen, Seen { entries: seen.entries.clone(), ..Seen::default() });
    assert_eq!(pids(&seen), [9, 10]);
    let nothing_new = read(&mut resumed(position(10)), (5..11).map(kill));
    assert_eq!(nothing_new, Seen::default());
}

#[test]
fn a_log_that_begins_later_than_the_last_run_ended_has_lost_some() {
    let seen = read(&mut resumed(position(3)), (5..7).map(kill));
    assert_eq!((pids(&seen), seen.lost, seen.rewound), (vec![5, 6], true, false));
    assert!(!read(&mut resumed(position(4)), (5..7).map(kill)).lost, "the very next one is there");
    let overwritten_before = read(&mut resumed(position(9)), [kill(4), kill(8), kill(9), kill(10)]);
    assert_eq!(
        (pids(&overwritten_before), overwritten_before.lost),
        (vec![10], false),
        "read by the last run"
    );
}

#[test]
fn an_overrun_is_a_loss_unless_it_lies_before_the_place_to_resume_at() {
    let mut seen = Seen::default();
    Reader::default().overrun(&mut seen);
    assert!(seen.lost);
    let mut seen = Seen::default();
    resumed(position(5)).overrun(&mut seen);
    assert!(!seen.lost);
}

#[test]
fn a_machine_put_back_to_an_earlier_state_is_noticed_and_all_is_given() {
    let mut reader = resumed(position(90));
    let seen = read(&mut reader, (5..8).map(kill));
    assert_eq!((pids(&seen), seen.rewound, reader.position()), (vec![5, 6, 7], true, position(7)));
    assert!(!read(&mut reader, [kill(8)]).rewound);
    let other_stamp = Position { usec: 1, ..position(6) };
    let seen = read(&mut resumed(other_stamp), (5..8).map(kill));
    assert_eq!((pids(&seen), seen.rewound), (vec![5, 6, 7], true));
}

#[test]
fn a_position_of_syslog_is_resumed_at_its_stamp() {
    let at = |usec| Position { sequence: None, usec };
    let seen = read(&mut resumed(at(6_000)), (5..8).map(kill));
    assert_eq!((pids(&seen), seen.lost, seen.rewound), (vec![7], false, false));
    let seen = read(&mut resumed(at(2_000)), (5..8).map(kill));
    assert_eq!((pids(&seen), seen.lost, seen.rewound), (vec![5, 6, 7], true, false));
    let seen = read(&mut resumed(at(9_000)), (5..8).map(kill));
    assert_eq!((pids(&seen), seen.rewound), (vec![5, 6, 7], true));
    assert!(!read(&mut resumed(at(500)), (0..3).map(kill)).lost, "the log begins at its first record");
}

#[test]
fn an_empty_log_decides_nothing() {
    let mut reader = resumed(position(6));
    assert_eq!(read(&mut reader, []), Seen::default());
    let seen = read(&mut reader, (5..8).map(kill));
    assert_eq!((pids(&seen), seen.rewound), (vec![7], false));
}

#[test]
fn a_line_in_fragments_is_read_again_by_the_next_run_if_its_rest_was_missing() {
    let first = b"6,8,8000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/a".to_vec();
    let rest = b"4,9,9000,c;,task_memcg=/a,task=x,pid=7,uid=0".to_vec();
    let mut reader = Reader::default();
    assert_eq!(read(&mut reader, [kill(7), first.clone()]).entries.len(), 1);
    assert_eq!(reader.position(), position(7));
    let seen = read(&mut reader, [rest.clone()]);
    assert_eq!((seen.entries.len(), seen.lost, seen.entries[0].position), (1, false, position(8)));
    assert_eq!(reader.position(), position(9));
    let seen = read(&mut resumed(position(7)), [kill(7), first, rest]);
    assert!(matches!(seen.entries[0].line, Line::Context(_)), "{seen:?}");
}

#[test]
fn what_is_not_there_and_what_is_forbidden_are_told_apart() {
    let dir = tempfile::tempdir().expect("a folder");
    let error = Device::open(&dir.path().join("kmsg")).expect_err("nothing there");
    assert!(matches!(error, ReadError::Absent(_)), "{error}");
    std::os::unix::fs::symlink("/dev/null", dir.path().join("kmsg")).expect("a link");
    let error = Device::open(&dir.path().join("kmsg")).expect_err("something else there");
    assert!(matches!(error, ReadError::Absent(_)), "{error}");
    assert_eq!(explain(Errno::PERM, "kmsg").fault_reason(), Some("permission"));
    assert_eq!(explain(Errno::IO, "kmsg").fault_reason(), Some("io"));
}

proptest! {
    #[test]
    fn restarts_at_any_record_give_each_kill_once(count in 1u64..40, restarts in proptest::collection::vec(0u64..40, 0..6)) {
        let mut stops: Vec<_> = restarts.into_iter().filter(|stop| *stop < count).collect();
        stops.sort_unstable();
        let (mut reader, mut all) = (Reader::default(), vec![]);
        for stop in stops.into_iter().chain([count]) {
            let seen = read(&mut reader, (0..stop).map(kill));
            prop_assert!(!seen.lost && !seen.rewound);
            all.extend(pids(&seen));
            let at = reader.position();
            reader = Reader::default();
            if stop > 0 {
                reader.resume_after(at);
            }
        }
        prop_assert_eq!(all, (0..count as u32).collect::<Vec<_>>());
    }
}
