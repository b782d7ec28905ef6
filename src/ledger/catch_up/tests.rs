use super::replay::Replay;
use super::*;
use crate::discover::{ContainerSpec, RuntimeKind};
use crate::events::ExitReason;
use crate::ledger::interval::{Interval, Written};
use crate::ledger::reconcile::{ObservedRecord, ProcInfo};
use crate::ledger::sources::cgroup_oom_events::CounterReading;
use crate::ledger::sources::kernel_log::{LogEntry, LogPosition};
use crate::ledger::store::{Query, StateKind, Store, StoreReader};
use crate::ledger::totals::{Total, Totals};
use crate::parse::kernel_log::Line;
use crate::parse::kernel_log::kills::KillAssembler;

const ID: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

/// A past that ends now; times are seconds before that.
struct Past {
    now: Timestamp,
    events: Vec<RuntimeEvent>,
    lines: Vec<(LogEntry, Written)>,
    /// The kernel log's clock is so many seconds behind, and the reader knows that it may be off by `uncertainty`.
    drift: f64,
    uncertainty: f64,
    /// Position of the oldest record, if there were earlier ones.
    lost_before: Option<LogPosition>,
}

impl Past {
    fn new() -> Self {
        // so that the kernel's clock has some time behind it
        let now = Timestamp::now().plus(std::time::Duration::from_secs(100_000));
        Self { now, events: vec![], lines: vec![], drift: 0.0, uncertainty: 0.0, lost_before: None }
    }

    /// The same after a month without a restart.
    fn of_a_month(drift: f64) -> Self {
        let past = Self::new();
        let now = past.now.plus(std::time::Duration::from_secs(30 * 86_400));
        Self { now, drift, uncertainty: 260.0, ..past }
    }

    fn event(&mut self, ago: f64, what: EventKind) {
        let named = ContainerSpec {
            name: "train".into(),
            pod: None,
            image: "i".into(),
            labels_match: true,
            ..ContainerSpec::default()
        };
        let (id, at) = (ContainerId::new(ID), self.now.unix_seconds() - ago);
        self.events.push(RuntimeEvent {
            runtime: RuntimeKind::Docker,
            socket: Arc::default(),
            id,
            at,
            named: Some(Arc::new(named)),
            what,
        });
    }

    fn ran(&mut self, from: f64, to: f64, exit_code: i64) {
        self.event(from, EventKind::Running { pid: None });
        self.event(to, EventKind::Ended { exit_code: Some(exit_code), oom_flag: Some(exit_code == 137) });
    }

    fn killed(&mut self, ago: f64, pid: u32, cgroup: &str) {
        let context = format!(
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg={cgroup},\
             task_memcg={cgroup},task=python,pid={pid},uid=0"
        );
        let killed = format!(
            "Memory cgroup out of memory: Killed process {pid} (python) total-vm:9kB, anon-rss:8kB, file-rss:0kB, \
             shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0"
        );
        let at = self.now.unix_seconds() - ago - self.drift;
        let usec = self.now.moved_to(at).kernel_usec();
        for text in [context, killed] {
            let sequence = Some(self.lines.len() as u64);
            let position = LogPosition { sequence, usec };
            let line = Line::of(text.as_bytes()).expect("a line of the kernel");
            let entry = LogEntry { position, line, text: text.into(), report: None };
            let latest = (at + self.uncertainty).min(self.now.unix_seconds());
            let within = Interval::new(at - self.uncertainty, latest);
            self.lines.push((entry, Written { at, within }));
        }
    }

    fn found(&self, log_since: f64) -> Vec<LedgerEvent> {
        self.found_with_log(Some(log_since))
    }

    fn found_with_log(&self, log_since: Option<f64>) -> Vec<LedgerEvent> {
        let caught_up = self.replay(0.0, log_since, f64::INFINITY).run(&LedgerState::default(), self.now);
        caught_up.changes.events.into_values().flatten().collect()
    }

    /// Returns what was known so many seconds ago. `counting`: seconds since the first start of the ledger.
    fn replay(&self, ago: f64, log_since: Option<f64>, counting: f64) -> Replay {
        let until = self.now.unix_seconds() - ago;
        let mut block = KillAssembler::default();
        if let Some(before) = self.lost_before {
            block.records_lost(before.usec);
        }
        let known = self.lines.iter().filter(|(_, written)| written.at <= until).cloned();
        let mut lines = Vec::new();
        let mut end = LogPosition::default();
        for (LogEntry { position, line, text, report }, written) in known {
            end = position;
            let Some(record) = block.push(position.usec, &line, report.as_ref()) else { continue };
            lines.push(ObservedRecord { position, text, record, written, proc_info: ProcInfo::default() });
        }
        let start = self.now.unix_seconds() - counting;
        let log_usec = self.now.moved_to(start.max(self.now.booted_at())).kernel_usec();
        Replay {
            config: ReconcilerConfig {
                boot_id: "boot".into(),
                booted_at: self.now.booted_at(),
                keep_ended: std::time::Duration::from_secs(3600),
                host_pids: true,
                counting_since: Some(match counting.is_infinite() {
                    true => CountingStart { log_usec: u64::MAX, at: f64::INFINITY },
                    false => CountingStart { log_usec, at: start },
                }),
                ..ReconcilerConfig::default()
            },
            limits: [(ID.to_owned(), 64 << 20)].into(),
            log_since: log_since.map(|ago| self.now.unix_seconds() - ago),
            events: self.events.iter().filter(|event| event.at <= until).cloned().collect(),
            counted: Some(lines.len() as u64),
            log_end: Some((end, LogClock::default(), block)),
            lines,
            is_last: true,
            ..Replay::default()
        }
    }

    /// Returns the ledger of a memledger that began `first` seconds ago, ended at once, and was started again `second` seconds ago, and now.
    fn in_parts(&self, first: f64, second: f64) -> Store {
        let mut store = Store::in_memory().expect("a store");
        for (ago, is_last) in [(first, false), (second, true), (0.0, true)] {
            let state = store.reader().load().expect("the state");
            let mut replay = self.replay(ago, Some(10_000.0), first);
            replay.is_last = is_last;
            if !state.is_new() {
                replay.config.counting_since = None;
                let read = state.accounting.as_ref().map_or(0, |accounting| accounting.position.usec);
                replay.lines.retain(|line| line.position.usec > read);
            }
            let CaughtUp { changes, .. } =
                replay.run(&state, self.now.moved_to(self.now.unix_seconds() - ago));
            store.commit(&changes).expect("written");
        }
        store
    }
}

fn kills(events: &[LedgerEvent]) -> Vec<&Kill> {
    events
        .iter()
        .filter_map(|event| match event {
            LedgerEvent::OomKill(kill) => Some(kill),
            _ => None,
        })
        .collect()
}

fn exits(events: &[LedgerEvent]) -> Vec<(Option<ExitReason>, Option<i64>)> {
    let exit = |event: &LedgerEvent| match event {
        LedgerEvent::Exit(exit) => Some((exit.reason, exit.exit_code)),
        _ => None,
    };
    events.iter().filter_map(exit).collect()
}

#[test]
fn context_near_the_begin_of_the_log_names_its_own_victim_only() {
    let mut past = Past::new();
    past.killed(10.0, 7, &format!("/docker/{ID}"));
    let Line::Killed(killed) = &mut past.lines[1].0.line else { panic!("{:?}", past.lines) };
    killed.pid = 8;
    let has_owner = |past: &Past| {
        let found = past.found(1_000.0);
        matches!(&kills(&found)[..], [Kill { owner: KillOwner::Container(_), .. }])
    };
    assert!(has_owner(&past), "a thread: the log has every begin of a block");
    past.lost_before = Some(past.lines[0].0.position);
    assert!(!has_owner(&past), "its own block may not have been logged");
}

#[test]
fn past_kill_has_its_container_limit_and_exit() {
    let mut past = Past::new();
    past.ran(90.0, 60.0, 137);
    past.killed(60.05, 7, &format!("/docker/{ID}"));
    let found = past.found(1_000.0);
    let [kill] = kills(&found)[..] else { panic!("{found:?}") };
    assert_eq!((kill.victim, kill.limit_bytes), (Some(Victim::Main), Some(64 << 20)));
    assert!(matches!(&kill.owner, KillOwner::Container(it) if *it.identity.name == *"train"));
    assert_eq!(exits(&found), [(Some(ExitReason::OomContainer), Some(137))]);
    assert!(found.iter().all(LedgerEvent::is_before_counting), "no counter has it");
    let ids = |events: &[LedgerEvent]| events.iter().map(LedgerEvent::id).collect::<Vec<_>>();
    assert_eq!(ids(&past.found(1_000.0)), ids(&found), "the same in each read");
}

#[test]
fn each_run_of_a_container_that_restarts_has_its_own_kill() {
    let mut past = Past::new();
    for run in 0..20_u32 {
        let ago = 2_000.0 - 90.0 * f64::from(run);
        past.ran(ago, ago - 60.0, 137);
        past.killed(ago - 59.9, run + 1, &format!("/docker/{ID}"));
    }
    let found = past.found(10_000.0);
    let mains = kills(&found).iter().filter(|kill| kill.victim == Some(Victim::Main)).count();
    assert_eq!((mains, exits(&found).len()), (20, 20), "{found:#?}");
    assert!(exits(&found).iter().all(|(reason, _)| *reason == Some(ExitReason::OomContainer)));
}

#[test]
fn exit_by_sigkill_before_the_oldest_record_has_an_unknown_reason() {
    let mut past = Past::new();
    past.ran(9_000.0, 8_000.0, 137);
    assert_eq!(exits(&past.found(100.0)), [(Some(ExitReason::Unknown), Some(137))]);
    assert_eq!(exits(&past.found(8_100.0)), [(Some(ExitReason::Killed), Some(137))]);
}

#[test]
fn kill_ended_a_container_whose_start_is_forgotten() {
    let mut past = Past::new();
    past.killed(60.5, 7, &format!("/docker/{ID}"));
    past.event(60.0, EventKind::Ended { exit_code: Some(137), oom_flag: None });
    let found = past.found(1_000.0);
    assert_eq!(kills(&found)[0].victim, Some(Victim::Main), "{found:?}");
    assert_eq!(exits(&found), [(Some(ExitReason::OomContainer), Some(137))]);
}

#[test]
fn kill_just_before_a_restart_ended_the_run_before() {
    let mut past = Past::new();
    past.killed(60.5, 7, &format!("/docker/{ID}"));
    // of a container that runs, the engine keeps only the time of the end before
    past.event(60.4, EventKind::Ended { exit_code: None, oom_flag: None });
    past.event(60.0, EventKind::Running { pid: Some(9) });
    let found = past.found(1_000.0);
    assert_eq!(kills(&found)[0].victim, Some(Victim::Main), "{found:?}");
    past.lines.clear();
    assert_eq!(exits(&past.found(1_000.0)), [], "an end of which nothing else is known is no answer");
}

/// A year before the boot, in seconds before now.
const YEAR: f64 = 365.0 * 86_400.0;

#[test]
fn exit_a_year_before_the_boot_is_settled_in_few_steps() {
    let mut past = Past::new();
    past.ran(YEAR + 60.0, YEAR, 137);
    assert_eq!(exits(&past.found(1_000.0)), [(Some(ExitReason::Unknown), Some(137))]);
    past.killed(60.0, 7, "/docker/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb");
    let found = past.found(1_000.0);
    assert_eq!(exits(&found), [(Some(ExitReason::Unknown), Some(137))]);
    assert_eq!(kills(&found).len(), 1, "{found:?}");
}

#[test]
fn run_that_a_power_loss_ended_has_no_error_of_its_own() {
    let mut past = Past::new();
    let uptime = past.now.unix_seconds() - past.now.unix_seconds_of_kernel(0);
    // the runtime finds it dead at its own start
    past.ran(uptime + 5_000.0, uptime - 20.0, 255);
    let found = past.found(1_000.0);
    assert_eq!(exits(&found), [(Some(ExitReason::HostRestart), Some(255))]);
}

#[test]
fn kill_that_is_younger_than_its_evidence_stays_open() {
    let mut past = Past::new();
    past.event(90.0, EventKind::Running { pid: None });
    past.killed(0.5, 7, &format!("/docker/{ID}"));
    let found = past.found(1_000.0);
    let [kill] = kills(&found)[..] else { panic!("{found:?}") };
    assert_eq!(kill.victim, None, "its container may end in the next second");
    assert!(matches!(kill.owner, KillOwner::Container(_)), "{kill:?}");
    past.lines.clear();
    past.killed(20.0, 7, &format!("/docker/{ID}"));
    assert_eq!(kills(&past.found(1_000.0))[0].victim, Some(Victim::Child));
}

#[test]
fn exit_by_sigkill_just_now_has_no_reason_yet() {
    let mut past = Past::new();
    past.ran(90.0, 0.5, 137);
    assert_eq!(exits(&past.found(1_000.0)), [(None, Some(137))]);
}

#[test]
fn run_that_counted_a_kill_waits_for_no_log_that_cannot_be_read() {
    let mut past = Past::new();
    past.ran(90.0, 0.5, 137);
    past.events.iter_mut().for_each(|event| event.runtime = RuntimeKind::Run);
    assert_eq!(exits(&past.found_with_log(None)), [(Some(ExitReason::Unknown), Some(137))]);
    assert_eq!(exits(&past.found_with_log(Some(1_000.0))), [(None, Some(137))], "its record may be late");
}

#[test]
fn drift_of_the_log_is_corrected_by_the_exits() {
    for drift in [-30.0, 0.0, 30.0] {
        let mut past = Past::of_a_month(drift);
        for run in 0..5_u32 {
            let ago = 2_000.0 - 60.0 * f64::from(run);
            past.ran(ago, ago - 59.0, 137);
            past.killed(ago - 58.9, run + 1, &format!("/docker/{ID}"));
        }
        past.ran(900.0, 800.0, 137);
        past.killed(800.1, 9, &format!("/docker/{ID}"));
        past.event(799.0, EventKind::Running { pid: None });
        let found = past.found(10_000.0);
        let mains = kills(&found).iter().filter(|kill| kill.victim == Some(Victim::Main)).count();
        assert_eq!(mains, 6, "{drift}: {found:#?}");
        let is_oom = |(reason, _): &(Option<ExitReason>, _)| *reason == Some(ExitReason::OomContainer);
        assert!(exits(&found).iter().all(is_oom), "{drift}: {:?}", exits(&found));
        let last = kills(&found).iter().map(|kill| kill.at).fold(0.0, f64::max);
        assert!((past.now.unix_seconds() - last - 800.0).abs() < 2.5, "{drift}");
    }
}

#[test]
fn drift_of_the_log_of_a_single_kill_is_corrected() {
    for drift in [-30.0, 0.0, 30.0] {
        let mut past = Past::of_a_month(drift);
        past.ran(900.0, 800.0, 137);
        past.killed(800.1, 9, &format!("/docker/{ID}"));
        past.event(790.0, EventKind::Running { pid: None });
        let found = past.found(10_000.0);
        assert_eq!(kills(&found)[0].victim, Some(Victim::Main), "{drift}");
        assert_eq!(exits(&found), [(Some(ExitReason::OomContainer), Some(137))], "{drift}");
    }
}

#[test]
fn log_whose_drift_is_unknown_may_begin_later() {
    let mut past = Past::of_a_month(0.0);
    past.ran(9_000.0, 8_000.0, 137);
    assert_eq!(exits(&past.found(8_100.0)), [(Some(ExitReason::Unknown), Some(137))]);
    assert_eq!(exits(&past.found(8_400.0)), [(Some(ExitReason::Killed), Some(137))]);
}

#[test]
fn kill_of_a_removed_container_has_no_name() {
    for ago in [60.0, 0.5] {
        let mut past = Past::new();
        past.killed(ago, 7, &format!("/docker/{ID}"));
        let name = |found: &[LedgerEvent]| match &kills(found)[0].owner {
            KillOwner::Container(subject) => subject.identity.name.to_string(),
            other => panic!("{other:?}, {ago} s ago"),
        };
        let found = past.found(1_000.0);
        assert_eq!(name(&found), ID[..12]);
        let settled = (ago > 30.0).then_some(Victim::Unknown);
        assert_eq!(kills(&found)[0].victim, settled, "nothing shows whether the container went on");
        past.event(90.0, EventKind::Exists);
        assert_eq!(name(&past.found(1_000.0)), "train", "an event still has its name");
    }
}

/// The engine lists the last end of each container that exists again and again, and repeats its events.
#[test]
fn what_the_host_repeats_is_recorded_once_whenever_memledger_was_started() {
    let mut past = Past::new();
    past.ran(2_000.0, 1_900.0, 137);
    past.killed(1_900.1, 7, &format!("/docker/{ID}"));
    past.ran(1_500.0, 1_200.0, 3);
    past.ran(1_100.0, 900.0, 137);
    past.killed(900.1, 8, &format!("/docker/{ID}"));
    past.event(800.0, EventKind::Running { pid: Some(9) });
    past.killed(100.0, 10, &format!("/docker/{ID}"));
    let reasons = |events: &[LedgerEvent]| -> Vec<_> {
        let mut found: Vec<_> = events.to_vec();
        found.sort_by(|one, other| one.at().total_cmp(&other.at()));
        found
            .iter()
            .map(|event| match event {
                LedgerEvent::OomKill(kill) => (kill.pid, kill.victim, None),
                LedgerEvent::Exit(exit) => (None, None, exit.reason),
                other => panic!("{other:?}"),
            })
            .collect()
    };
    let wanted = reasons(&past.found(10_000.0));
    assert_eq!(wanted.len(), 6);
    let times = [1_950.0, 1_899.0, 1_000.0, 895.0, 600.0, 90.0];
    for (number, first) in times.iter().enumerate() {
        for second in &times[number..] {
            let store = past.in_parts(*first, *second);
            let events = store.reader().events(&Query::default()).expect("events");
            assert_eq!(reasons(&events), wanted, "{first} {second}");
            let state = store.reader().load().expect("the state");
            let counted = events.iter().filter(|event| !event.is_before_counting());
            let counted = counted.filter(|event| matches!(event, LedgerEvent::OomKill(_))).count() as u64;
            assert_eq!(Totals::new(&state).get(Total::Host), counted, "{first} {second}");
            let later = events.iter().filter(|event| event.at() > past.now.unix_seconds() - first).count();
            assert_eq!(events.iter().filter(|event| !event.is_before_counting()).count(), later);
        }
    }
}

/// The kernel's counter shows a kill whose record was overwritten while memledger was away.
#[test]
fn kill_without_a_record_while_no_ledger_was_written_ended_a_run() {
    let mut past = Past::new();
    past.event(2_000.0, EventKind::Running { pid: None });
    let mut store = Store::in_memory().expect("a store");
    let before = past.now.moved_to(past.now.unix_seconds() - 1_000.0);
    let first = past.replay(1_000.0, Some(10_000.0), 1_000.0).run(&LedgerState::default(), before);
    store.commit(&first.changes).expect("written");
    // serve compares the kernel's counter with its records
    let mut reconciler = first.reconciler;
    reconciler.apply_vmstat(before, 5);
    store.commit(&reconciler.settle(before).0).expect("written");
    past.event(500.0, EventKind::Ended { exit_code: Some(137), oom_flag: Some(true) });
    for (counted, reason) in [(5, ExitReason::Killed), (6, ExitReason::OomContainer)] {
        let mut replay = past.replay(0.0, Some(10_000.0), 0.0);
        (replay.config.counting_since, replay.counted) = (None, Some(counted));
        let found = replay.run(&store.reader().load().expect("the state"), past.now).changes;
        let events: Vec<LedgerEvent> = found.events.into_values().flatten().collect();
        assert_eq!(exits(&events), [(Some(reason), Some(137))], "{counted}: {events:#?}");
        assert_eq!(kills(&events).len(), counted as usize - 5, "{events:#?}");
    }
}

#[test]
fn counters_show_kills_of_a_running_container_whose_records_are_lost() {
    let mut past = Past::new();
    past.event(5_000.0, EventKind::Running { pid: None });
    past.killed(900.0, 7, &format!("/docker/{ID}"));
    past.killed(600.0, 8, "/docker/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb");
    let found: WriteBatch = past.found(10_000.0).into_iter().collect();
    let container = ExistingContainer {
        id: ContainerId::new(ID),
        runtime: RuntimeKind::Docker,
        named: Arc::new(ContainerSpec { name: "train".into(), ..ContainerSpec::default() }),
        is_running: true,
        first_process: None,
        has_lost_process: false,
        started: Some(past.now.unix_seconds() - 5_000.0),
        ended: None,
        limit_bytes: None,
        start_error: None,
        log_path: None,
        restarts: None,
    };
    assert_eq!(kills_of_run(&container, &found), (1, 0));
    let reading =
        |kills| CounterReading { id: ContainerId::new(ID), path: "/a".into(), inode: 1, kills, fresh: false };
    let history = RuntimeHistory { containers: vec![container], ..RuntimeHistory::default() };
    for (counted, missing) in [(1, 0), (4, 3)] {
        let counters = CounterReadings { readings: vec![reading(counted)], are_hierarchical: true };
        let kills = counted_kills(&counters, std::slice::from_ref(&history), &found, past.now.unix_seconds());
        assert_eq!(kills.len(), missing);
    }
}

/// A ledger that is only read is shown with what happened since.
#[test]
fn changes_are_shown_over_a_ledger_that_is_not_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut past = Past::new();
    past.ran(2_000.0, 1_900.0, 3);
    past.event(1_000.0, EventKind::Running { pid: None });
    let before = past.now.moved_to(past.now.unix_seconds() - 950.0);
    let first = past.replay(950.0, Some(10_000.0), 1_950.0).run(&LedgerState::default(), before);
    let mut store = Store::open(folder.path(), std::time::Duration::ZERO).expect("a store").store;
    store.commit(&first.changes).expect("written");
    drop(store);
    let bytes = || std::fs::read(folder.path().join("ledger.sqlite3")).expect("the file");
    let stored = bytes();
    past.killed(500.1, 7, &format!("/docker/{ID}"));
    past.event(500.0, EventKind::Ended { exit_code: Some(137), oom_flag: Some(true) });
    let renamed = past.events.last().cloned().map(|event| {
        let named = ContainerSpec { name: "later".into(), labels_match: true, ..ContainerSpec::default() };
        RuntimeEvent { at: event.at + 1.0, named: Some(Arc::new(named)), what: EventKind::Renamed, ..event }
    });
    past.events.extend(renamed);
    let reader = StoreReader::open(folder.path()).expect("the ledger");
    let state = reader.load().expect("the state");
    let mut replay = past.replay(0.0, Some(10_000.0), 0.0);
    replay.config.counting_since = None;
    let found = replay.run(&state, past.now).changes;
    let timeout = std::time::Duration::from_secs(1);
    let shown = reader.with_changes(&found, timeout).expect("both");
    let events = |query: &Query| shown.events(query).expect("events");
    let all = events(&Query::default());
    let of_later = Query { container: Some("later".into()), ..Query::default() };
    assert_eq!(
        exits(&all),
        [(Some(ExitReason::Error), Some(3)), (Some(ExitReason::OomContainer), Some(137))]
    );
    assert_eq!(
        (kills(&all).len(), events(&of_later).len()),
        (1, 3),
        "the old end has the new name: {all:#?}"
    );
    let pages: Vec<_> =
        shown.pages(&Query { limit: 2, ..of_later }).map(|page| page.expect("a page")).collect();
    assert_eq!(pages.iter().map(|page| page.raw_json.len()).sum::<usize>(), 2);
    let newest = events(&Query { only_notable: true, limit: 1, ..Query::default() });
    assert_eq!(exits(&newest), [(Some(ExitReason::OomContainer), Some(137))]);
    let id = kills(&all)[0].id;
    assert_eq!(events(&Query { ids: vec![id], ..Query::default() }).len(), 1);
    assert_eq!(bytes(), stored, "nothing is written");
}

/// The row that says how far the log was read is lost: the newest record among the events says it.
#[test]
fn kills_are_not_counted_again_without_the_row_of_the_accounting() {
    let mut past = Past::new();
    past.ran(2_000.0, 1_900.0, 137);
    past.killed(1_900.1, 7, &format!("/docker/{ID}"));
    let mut store = past.in_parts(1_950.0, 1_000.0);
    let before = store.reader().events(&Query::default()).expect("events");
    let mut lost = WriteBatch::default();
    lost.put(StateKind::StartedAt, "", &(past.now.unix_seconds() - 1_950.0));
    lost.remove(StateKind::Accounting, "");
    store.commit(&lost).expect("written");
    let state = store.reader().load().expect("the state");
    let mut replay = past.replay(0.0, Some(10_000.0), 0.0);
    replay.config.counting_since = None;
    store.commit(&replay.run(&state, past.now).changes).expect("written");
    let ids = |events: Vec<LedgerEvent>| events.iter().map(LedgerEvent::id).collect::<Vec<_>>();
    assert_eq!(ids(store.reader().events(&Query::default()).expect("events")), ids(before));
}

/// memledger ends between its first start and the end of its catch-up: the next one begins where that began.
#[test]
fn first_start_is_kept_until_the_past_is_recorded() {
    let mut past = Past::new();
    past.ran(2_000.0, 1_900.0, 3);
    past.ran(900.0, 800.0, 4);
    let mut store = Store::in_memory().expect("a store");
    let start = CountingStart { log_usec: 0, at: past.now.unix_seconds() - 1_000.0 };
    let mut begun = WriteBatch::default();
    begun.put(StateKind::StartedAt, "", &start.at);
    begun.put(StateKind::FirstStart, "", &start);
    store.commit(&begun).expect("written");
    let state = store.reader().load().expect("the state");
    assert!(state.is_new());
    let mut replay = past.replay(0.0, Some(10_000.0), 0.0);
    (replay.config.counting_since, replay.is_last) = (state.first_start, false);
    store.commit(&replay.run(&state, past.now).changes).expect("written");
    let events = store.reader().events(&Query::default()).expect("events");
    let counted: Vec<bool> = events.iter().map(|event| !event.is_before_counting()).collect();
    assert_eq!(counted, [false, true]);
    assert!(!store.reader().load().expect("the state").is_new());
}

/// The engine lists the end of a container as long as that exists, and a ledger forgets it after an hour.
#[test]
fn end_that_a_ledger_has_forgotten_is_not_recorded_again() {
    let mut past = Past::new();
    past.ran(20_500.0, 20_000.0, 3);
    let at = |ago: f64| past.now.moved_to(past.now.unix_seconds() - ago);
    let mut store = Store::in_memory().expect("a store");
    let mut first = past.replay(21_000.0, Some(90_000.0), 21_000.0);
    first.is_last = false;
    let CaughtUp { mut reconciler, changes, .. } = first.run(&LedgerState::default(), at(21_000.0));
    store.commit(&changes).expect("written");
    let socket = [Path::new("")];
    reconciler.set_connection(RuntimeKind::Docker, Some(0.0), socket.into_iter());
    reconciler.apply_runtime_events(at(19_999.0), &past.events);
    for ago in [19_999.0, 19_900.0, 10_000.0] {
        store.commit(&reconciler.settle(at(ago)).0).expect("written");
    }
    let state = store.reader().load().expect("the state");
    assert!(state.containers.is_empty(), "forgotten");
    let mut replay = past.replay(0.0, Some(90_000.0), 0.0);
    replay.config.counting_since = None;
    store.commit(&replay.run(&state, past.now).changes).expect("written");
    assert_eq!(exits(&store.reader().events(&Query::default()).expect("events")).len(), 1);
}

#[test]
fn clock_that_is_set_after_the_first_start_leaves_later_ends_counted() {
    let past = Past::new();
    let first = past.replay(0.0, Some(90_000.0), 0.0);
    let CaughtUp { mut reconciler, .. } = first.run(&LedgerState::default(), past.now);
    let set_back = past.now.plus(std::time::Duration::from_secs(10)).with_wall_moved(-3_600_000);
    let step = crate::clock::ClockStep::between(past.now, set_back).expect("a step");
    reconciler.correct_times(&step);
    let mut later = Past { now: set_back, ..Past::new() };
    later.ran(9.0, 5.0, 3);
    reconciler.apply_runtime_events(set_back, &later.events);
    let after = set_back.plus(std::time::Duration::from_secs(30));
    let mut found = reconciler.settle(set_back).0;
    found.merge(reconciler.settle(after).0);
    let ends: Vec<bool> = found.events.values().flatten().map(LedgerEvent::is_before_counting).collect();
    assert_eq!(ends, [false], "{found:?}");
}

/// The log was not read at the start, and there had been kills: that says nothing of ends that are seen later.
#[test]
fn log_that_is_read_only_later_explains_later_ends() {
    let past = Past::new();
    let mut first = past.replay(0.0, None, 0.0);
    (first.is_last, first.log_end) = (false, None);
    let CaughtUp { mut reconciler, .. } = first.run(&LedgerState::default(), past.now);
    let mut later = Past { now: past.now.plus(std::time::Duration::from_secs(100)), ..Past::new() };
    later.ran(60.0, 50.0, 137);
    let at = |ago: u64| later.now.minus(std::time::Duration::from_secs(ago));
    reconciler.apply_log(at(49), Some(&[]), LogPosition { sequence: None, usec: at(49).kernel_usec() });
    reconciler.apply_runtime_events(at(49), &later.events);
    let mut found = reconciler.settle(at(49)).0;
    found.merge(reconciler.settle(at(0)).0);
    let events: Vec<LedgerEvent> = found.events.into_values().flatten().collect();
    assert_eq!(exits(&events), [(Some(ExitReason::Killed), Some(137))]);
}

/// An engine that was restarted lists the time of that as the end of what ran before.
#[test]
fn end_of_a_forgotten_container_with_another_time_is_not_recorded_again() {
    let mut past = Past::new();
    past.ran(20_500.0, 20_000.0, 3);
    let at = |ago: f64| past.now.moved_to(past.now.unix_seconds() - ago);
    let mut first = past.replay(10_000.0, Some(90_000.0), 10_000.0);
    first.is_last = false;
    let mut store = Store::in_memory().expect("a store");
    store.commit(&first.run(&LedgerState::default(), at(10_000.0)).changes).expect("written");
    let mut forgotten = WriteBatch::default();
    forgotten.remove(StateKind::Container, ID);
    store.commit(&forgotten).expect("written");
    past.events[1].at = past.now.unix_seconds() - 100.0;
    let mut replay = past.replay(0.0, Some(90_000.0), 0.0);
    replay.config.counting_since = None;
    let state = store.reader().load().expect("the state");
    store.commit(&replay.run(&state, past.now).changes).expect("written");
    assert_eq!(exits(&store.reader().events(&Query::default()).expect("events")).len(), 1);
}
