use super::*;

const GIB: u64 = 1 << 30;
const ONCE: ShareSource = ShareSource::Walk(MAX_WAIT);
const RARELY: ShareSource = ShareSource::Walk(MAX_RARE_WAIT);

fn walk(millis: u64, rss: u64, surroundings: Surroundings) -> SmapsWalk {
    let took = Duration::from_millis(millis);
    SmapsWalk { at: Timestamp::now(), took, rss, surroundings, bytes: rss / 4 }
}

#[test]
fn growth_since_a_walk_is_assumed_to_be_slow() {
    assert_eq!(expected_wait(3 * GIB, None), Duration::from_millis(60));
    let fast = walk(2, 10 * GIB, Surroundings::default());
    assert_eq!(expected_wait(10 * GIB, Some(&fast)), Duration::from_millis(2));
    assert_eq!(expected_wait(110 * GIB, Some(&fast)), Duration::from_millis(2002), "never a trial walk");
    assert_eq!(expected_wait(5 * GIB, Some(&fast)), Duration::from_millis(1));
}

#[test]
fn walks_a_process_as_often_as_it_may_wait() {
    let around = Surroundings { anon: Some(25 * GIB), processes: 1 };
    let now = Timestamp::now();
    let at = |now, is_due, rss, last: Option<&SmapsWalk>| {
        share_sources(now, around, &[(rss, last)], is_due, || false)[0]
    };
    let sources = |is_due, rss, last: Option<&SmapsWalk>| at(now, is_due, rss, last);
    assert_eq!(sources(false, 2 * GIB, None), ONCE);
    assert_eq!(sources(true, 25 * GIB, None), RARELY);
    assert_eq!(sources(false, 25 * GIB, None), ShareSource::Unknown, "also of a new process");
    let rare = walk(400, 25 * GIB, around);
    assert_eq!(sources(false, 25 * GIB, Some(&rare)), ShareSource::LastWalk(rare.bytes));
    assert_eq!(sources(false, 21 * GIB, Some(&rare)), ShareSource::Unknown, "it has changed");
    assert_eq!(sources(true, 25 * GIB, Some(&rare)), ShareSource::LastWalk(rare.bytes), "it has waited");
    let later = now.plus(RARE_INTERVAL + RARE_WINDOW);
    assert_eq!(at(later, true, 25 * GIB, Some(&rare)), RARELY);
    assert_eq!(sources(true, 26 * GIB, None), ShareSource::Unknown);
    assert_eq!(sources(true, 31 * GIB, Some(&rare)), ShareSource::Unknown);
    let huge_pages = walk(40, 200 * GIB, around);
    assert_eq!(sources(false, 200 * GIB, Some(&huge_pages)), ONCE);
}

/// Forks have their parent's memory resident, and their shares change while that does not: each page that one writes is no longer shared.
#[test]
fn workers_of_a_large_parent_keep_their_shares_while_they_hold() {
    let (now, around) = (Timestamp::now(), Surroundings { anon: Some(8 * GIB), processes: 3 });
    let rss = [8 * GIB + 1, 8 * GIB, 8 * GIB];
    let first = share_sources(now, around, &rss.map(|rss| (rss, None)), true, || true);
    assert_eq!(first, [ShareSource::Remainder, RARELY, RARELY]);
    let walked = walk(100, 8 * GIB, around);
    let later = [(rss[0], None), (rss[1], Some(&walked)), (rss[2], Some(&walked))];
    let held = ShareSource::LastWalk(walked.bytes);
    assert_eq!(share_sources(now, around, &later, false, || true), [ShareSource::Remainder, held, held]);
    let (grown, unknown) =
        (Surroundings { anon: Some(10 * GIB), ..around }, Surroundings { anon: None, ..around });
    for changed in [grown, unknown, Surroundings { processes: 2, ..around }] {
        assert_eq!(share_sources(now, changed, &later, false, || true), [ShareSource::Unknown; 3]);
    }
}

#[test]
fn largest_process_is_unknown_where_others_are() {
    let sources = |rss: &[u64], has_figure| {
        let processes: Vec<_> = rss.iter().map(|rss| (*rss, None)).collect();
        share_sources(Timestamp::now(), Surroundings::default(), &processes, true, || has_figure)
    };
    assert_eq!(sources(&[200 * GIB], true), [ShareSource::Remainder]);
    assert_eq!(sources(&[200 * GIB], false), [ShareSource::Unknown]);
    assert_eq!(sources(&[GIB, 2 * GIB], true), [ONCE; 2]);
    let unknown = ShareSource::Unknown;
    assert_eq!(sources(&[100 * GIB, 101 * GIB, GIB], true), [unknown, unknown, ONCE]);
}

/// A read is queued, and made later: the process may have grown since.
#[test]
fn process_that_has_grown_since_the_read_was_queued_is_not_read() {
    let proc = tempfile::tempdir().unwrap();
    let dir = proc.path().join("7");
    std::fs::create_dir(&dir).unwrap();
    let fields = vec!["0"; 50].join(" ");
    std::fs::write(dir.join("stat"), format!("7 (python) S {fields}")).unwrap();
    std::fs::write(
        dir.join("smaps_rollup"),
        "00400000-7ffd00000000 ---p 00000000 00:00 0 [rollup]\nRss: 8 kB\nPss: 4 kB\n",
    )
    .unwrap();
    let (target, id) = (ProcessId { pid: 7, start_ticks: 0 }, ContainerId::new("a"));
    let share = Share { round: 1, id, target, last: None, max_wait: MAX_WAIT };
    let pages = |gib: u64| gib * GIB / rustix::param::page_size() as u64;
    let read_with = |gib| {
        std::fs::write(dir.join("statm"), format!("0 {} 0 0 0 0 0\n", pages(gib))).unwrap();
        read(proc.path(), &share, &mut Vec::new()).unwrap()
    };
    assert!(matches!(read_with(2), PssRead::Measured { bytes: 4096, rss, .. } if rss == 2 * GIB));
    assert!(matches!(read_with(60), PssRead::Grown));
}
