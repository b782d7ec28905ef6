use super::replay::Replay;
use super::*;
use crate::discover::RuntimeKind;
use crate::events::Role;
use crate::ledger::interval::{Interval, Written};
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::sources::kernel_log::LogEntry;
use crate::ledger::sources::kernel_log::LogPosition;
use crate::parse::kernel_log::Line;

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
    /// Last ends of containers, as their runtime records them.
    ends: std::collections::HashMap<String, f64>,
}

impl Past {
    fn new() -> Self {
        // so that the kernel's clock has some time behind it
        let now = Timestamp::now().plus(std::time::Duration::from_secs(100_000));
        Self {
            now,
            events: vec![],
            lines: vec![],
            drift: 0.0,
            uncertainty: 0.0,
            lost_before: None,
            ends: Default::default(),
        }
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
        let replay = Replay {
            boot_id: "boot".into(),
            host_pids: true,
            limits: [(ID.to_owned(), 64 << 20)].into(),
            cgroups: HashMap::new(),
            log_since: log_since.map(|ago| self.now.unix_seconds() - ago),
            ends: self.ends.clone(),
        };
        let mut block = KillAssembler::default();
        if let Some(before) = self.lost_before {
            block.records_lost(before.usec);
        }
        let records = self.lines.iter().cloned().filter_map(|(entry, written)| {
            let LogEntry { position, line, text, report } = entry;
            let record = block.push(position.usec, &line, report.as_ref())?;
            Some(ObservedRecord { position, text, record, written, proc_info: ProcInfo::default() })
        });
        replay.run(self.now, self.events.clone(), records.collect())
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
fn exit_has_the_same_id_after_the_engine_has_forgotten_its_event() {
    let mut past = Past::new();
    past.ran(90.0, 60.004, 3);
    past.ends = [(ID.to_owned(), past.now.unix_seconds() - 60.0)].into();
    let [with_event, without] = [60.004, 60.0].map(|ago| {
        past.events.last_mut().unwrap().at = past.now.unix_seconds() - ago;
        past.found(1_000.0)[0].id()
    });
    assert_eq!(with_event, without);
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
    assert!(found.iter().all(|event| (FIRST_UNRECORDED_ID..2 * FIRST_UNRECORDED_ID).contains(&event.id())));
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
fn kill_of_a_removed_container_has_no_name() {
    for ago in [60.0, 0.5] {
        let mut past = Past::new();
        past.killed(ago, 7, &format!("/docker/{ID}"));
        let host = HostHistory { events: past.found(1_000.0), ..HostHistory::default() };
        let ids = host.kills_of_unknown_containers(&[]).map(|kill| match &kill.owner {
            KillOwner::Container(subject) => (kill.pid, subject.container_id.to_string()),
            other => panic!("{other:?}, {ago} s ago"),
        });
        assert_eq!(ids.collect::<Vec<_>>(), [(Some(7), ID.to_owned())]);
        let victim = kills(&host.events)[0].victim;
        let settled = (ago > 30.0).then_some(Victim::Unknown);
        assert_eq!(victim, settled, "nothing shows whether the container went on");
        past.event(90.0, EventKind::Exists);
        let host = HostHistory { events: past.found(1_000.0), ..HostHistory::default() };
        assert_eq!(host.kills_of_unknown_containers(&[]).count(), 0, "an event still has its name");
    }
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

#[test]
fn event_of_the_ledger_is_not_shown_twice() {
    let mut past = Past::new();
    past.ran(90.0, 60.0, 137);
    past.killed(60.05, 7, &format!("/docker/{ID}"));
    let host = HostHistory { events: past.found(1_000.0), ..HostHistory::default() };
    let renumbered = |event: &LedgerEvent, id: u64| match event.clone() {
        LedgerEvent::OomKill(kill) => LedgerEvent::OomKill(Kill { id, ..kill }),
        LedgerEvent::Exit(exit) => LedgerEvent::Exit(crate::events::Exit { id, at: exit.at + 0.1, ..exit }),
        other => other,
    };
    let stored: Vec<_> = host.events.iter().zip(1..).map(|(event, id)| renumbered(event, id)).collect();
    let query = Query { container: Some("train".into()), ..Query::default() };
    assert_eq!(host.merge(stored.clone(), &query), stored);
    assert_eq!(host.merge(vec![], &query).len(), 2);
    assert_eq!(host.merge(vec![], &Query { limit: 1, ..query.clone() }).len(), 1);
    let other = Query { container: Some("other".into()), ..Query::default() };
    assert_eq!(host.merge(vec![], &other), []);
    let by_id = Query { container: Some("aaaa".into()), ..Query::default() };
    assert_eq!(host.merge(vec![], &by_id).len(), 2);
}

#[test]
fn record_replaces_the_gap_of_a_ledger_that_could_not_read_the_log() {
    let mut past = Past::new();
    past.ran(90.0, 60.0, 137);
    past.killed(60.05, 7, &format!("/docker/{ID}"));
    let host = HostHistory { events: past.found(1_000.0), ..HostHistory::default() };
    let kill = kills(&host.events)[0].clone();
    let gap = Kill {
        id: 1,
        at: kill.at + 1.0,
        earliest: Some(kill.at - 1.0),
        kernel_usec: None,
        pid: None,
        ..kill
    };
    let merged = host.merge(vec![LedgerEvent::OomKill(gap)], &Query::default());
    assert_eq!(kills(&merged).iter().map(|kill| kill.pid).collect::<Vec<_>>(), [Some(7)]);
}

/// memledger ended between a kill and the exit: the ledger has the one, and the host both.
#[test]
fn exit_of_the_host_names_the_kill_of_the_ledger() {
    let mut past = Past::new();
    past.ran(90.0, 60.0, 137);
    past.killed(60.05, 7, &format!("/docker/{ID}"));
    let found = past.found(1_000.0);
    let now = past.now.unix_seconds();
    let exit = |events: &[LedgerEvent]| {
        let mut exits = events.iter().filter_map(|event| match event {
            LedgerEvent::Exit(exit) => Some(exit.clone()),
            _ => None,
        });
        exits.next_back().expect("an exit")
    };
    // one that has not decided yet may still do so
    for (read_at, is_decided) in [(now - 10.0, false), (now + 100.0, true)] {
        let host = HostHistory { events: found.clone(), read_at, ..HostHistory::default() };
        let undecided = Kill { id: 3, victim: None, role: Some(Role::Trainer), ..kills(&found)[0].clone() };
        let undecided = LedgerEvent::OomKill(undecided);
        let merged = host.merge(vec![undecided.clone()], &Query::default());
        let of_ledger = kills(&merged);
        assert_eq!((exit(&merged).ended_by, of_ledger.len(), of_ledger[0].id), (Some(3), 1, 3));
        assert_eq!(of_ledger[0].victim.is_some(), is_decided, "the host knows what it did");
        assert_eq!(of_ledger[0].role, Some(Role::Trainer), "what only the ledger knows is kept");
        let open = crate::events::Exit { id: 4, reason: None, ended_by: None, ..exit(&found) };
        let merged = host.merge(vec![undecided, LedgerEvent::Exit(open)], &Query::default());
        let end = exit(&merged);
        assert_eq!((end.id, end.ended_by), (4, is_decided.then_some(3)));
    }
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
    let LedgerEvent::Exit(exit) = &found[0] else { panic!("{found:?}") };
    let host = HostHistory { events: found.clone(), ..HostHistory::default() };
    for hooks in [0.0, 1.5] {
        let mut stored = crate::events::Exit { id: 1, at: exit.at + 30.0, ..exit.clone() };
        stored.subject.started = stored.subject.started.map(|started| started + hooks);
        let stored = vec![LedgerEvent::Exit(stored)];
        assert_eq!(host.merge(stored.clone(), &Query::default()), stored, "a run ends once");
    }
}

#[test]
fn exit_of_a_run_whose_start_a_busy_engine_reported_late_is_one() {
    let mut past = Past::new();
    past.ran(63.0, 60.0, 6);
    let found = past.found(1_000.0);
    let LedgerEvent::Exit(exit) = &found[0] else { panic!("{found:?}") };
    // the ledger had the event first, and then the start that the engine lists
    let mut stored = crate::events::Exit { id: 1, ..exit.clone() };
    stored.subject.started = exit.subject.started.map(|started| started + 1.9);
    let stored = vec![LedgerEvent::Exit(stored)];
    let host = HostHistory { events: found.clone(), ..HostHistory::default() };
    assert_eq!(host.merge(stored.clone(), &Query::default()), stored, "known by both times");
    // the first list of a busy engine had an earlier start than the one after it
    let mut earlier = crate::events::Exit { id: 1, ..exit.clone() };
    earlier.subject.started = exit.subject.started.map(|started| started - 1.4);
    earlier.duration_seconds = exit.duration_seconds.map(|duration| duration + 1.4);
    let earlier = vec![LedgerEvent::Exit(earlier)];
    assert_eq!(host.merge(earlier.clone(), &Query::default()), earlier, "known by its end");
    past.ran(58.0, 57.0, 6);
    let host = HostHistory { events: past.found(1_000.0), ..HostHistory::default() };
    assert_eq!(host.merge(stored.clone(), &Query::default()).len(), 2, "the next run is another one");
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
fn counted_kills_are_the_union_of_ledger_and_host() {
    let mut past = Past::new();
    past.event(5_000.0, EventKind::Running { pid: None });
    past.killed(900.0, 7, &format!("/docker/{ID}"));
    past.killed(600.0, 8, &format!("/docker/{ID}"));
    let its = past.found(10_000.0);
    let container = ExistingContainer {
        id: ContainerId::new(ID),
        runtime: RuntimeKind::Docker,
        named: Arc::new(ContainerSpec {
            name: "train".into(),
            image: "i".into(),
            labels_match: true,
            ..ContainerSpec::default()
        }),
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
    let [kill, _] = kills(&its)[..] else { panic!("{its:#?}") };
    let other = Kill { owner: KillOwner::Unattributed, kernel_usec: Some(1), pid: Some(1), ..kill.clone() };
    let all = [&its[..], &[LedgerEvent::OomKill(other)]].concat();
    let expected = RunKills { listed: 2, unattributed: 1 };
    assert_eq!(RunKills::of(&container, &all[1..], &its), expected, "one is in both");
    assert_eq!(RunKills::of(&container, &all[1..], &all[..1]), expected, "each has one of its own");
    assert_eq!(RunKills::of(&container, &all, &all), expected);
}
