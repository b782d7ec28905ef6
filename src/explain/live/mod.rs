//! What the host itself still knows of OOM kills and exits: for `memledger why` and `events` where the ledger does not reach.
//!
//! Reads the kernel log from its oldest record, and what the runtimes know of the past ([`crate::discover::history`]); then the
//! ledger's own state machine decides, as if memledger had run all the time ([`replay`]). So an answer is the same with and
//! without a ledger, except for what only samples show: roles of processes, and the growth before a kill. Nothing is written.
//!
//! The kernel's buffer keeps the last kills only, some 15 to 50. [`Coverage`] says which.

mod coverage;
mod replay;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use procfs::{FromBufRead, MemoryPressure};

use crate::clock::{Timestamp, is_same_report};
use crate::config::Config;
use crate::discover::cgroup_tree::{CgroupTree, ContainerCgroup};
use crate::discover::history::{self, ExistingContainer, RuntimeHistory};
use crate::discover::{
    ContainerId, ContainerSpec, EventKind, Hierarchy, PathClaim, RUNTIMES, RuntimeEvent, Version,
};
use crate::events::{
    ContainerRef, Evidence, Exit, ExitReason, FIRST_UNRECORDED_ID, Kill, KillOwner, LedgerEvent, Method,
    Victim,
};
use crate::host::Dir;
use crate::ledger::interval::LogClock;
use crate::ledger::reconcile::ObservedRecord;
use crate::ledger::service::log_backends;
use crate::ledger::sources::cgroup_oom_events::CgroupCounters;
use crate::ledger::sources::kernel_log::KernelLog;
use crate::ledger::sources::vmstat_oom::OomCounter;
use crate::ledger::store::Query;
use crate::ledger::victim_probe::VictimProbe;
use crate::lifecycle::timing::{
    DECIDED_AFTER, GAP_TOLERANCE, MAX_DISAGREEMENT, MAX_START_EVENT_DELAY, SAME_EXIT, START_TOLERANCE,
};
use crate::parse::kernel_log::kills::KillAssembler;
use crate::parse::keyed;
use crate::text::error_chain;
pub use coverage::{Coverage, CoverageHint, LogCoverage};
use replay::Replay;

/// A container is full from this distance to its limit on: a part in so many of it.
const FULL_DIVISOR: u64 = 50;
/// A container whose tasks wait for less of the time runs.
const MIN_STALLED_PERCENT: f32 = 30.0;

/// What the host still knows.
#[derive(Debug, Default)]
pub struct HostHistory {
    /// OOM kills and exits, oldest first. Their ids are the same in each read.
    pub events: Vec<LedgerEvent>,
    /// The containers that exist.
    pub containers: Vec<ExistingContainer>,
    /// How far the sources reach.
    pub coverage: Coverage,
    /// Unix time at which it was read.
    pub read_at: f64,
}

/// What a ledger knows of the past.
#[derive(Debug, Default)]
pub struct KnownPast {
    /// The containers of its events, each once.
    pub containers: Vec<ContainerRef>,
    /// Its OOM kills of this boot, the newest.
    pub kills: Vec<LedgerEvent>,
    /// There may be older ones.
    pub has_older_kills: bool,
}

/// Memory of a running container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurrentUsage {
    /// All charged memory, page cache included.
    pub usage_bytes: u64,
    /// A process is in its cgroup, or in one below; `None` if that cannot be read.
    pub has_processes: Option<bool>,
    /// Limit of its cgroup; `None` if it has none.
    pub limit_bytes: Option<u64>,
    /// Share of the last 10 s in which all its tasks waited for memory, in percent (cgroup v2).
    pub stalled_percent: Option<f32>,
    /// Its OOM killer is switched off, and its tasks wait (`under_oom`, cgroup v1).
    pub is_under_oom: bool,
}

impl CurrentUsage {
    /// Returns whether it is at its limit, and its processes wait.
    pub fn is_stalled(&self) -> bool {
        let is_full = self.limit_bytes.is_some_and(|limit| self.usage_bytes >= limit - limit / FULL_DIVISOR);
        self.is_under_oom
            || is_full && self.stalled_percent.is_some_and(|percent| percent >= MIN_STALLED_PERCENT)
    }
}

/// Reads what the host knows, within two seconds.
///
/// `container`: the container whose details are read first. `known`: reads the ledger, for the names of containers that are gone, while
/// the host is read.
pub fn read(
    config: &Config,
    now: Timestamp,
    container: Option<&str>,
    known: impl FnOnce() -> KnownPast,
) -> HostHistory {
    let booted_at = now.booted_at();
    let (runtimes, log, counted, known) = std::thread::scope(|scope| {
        let runtimes = scope.spawn(|| match config.oom.runtime {
            true => history::read(config, now, booted_at, container).unwrap_or_default(),
            false => vec![],
        });
        let log = scope.spawn(|| {
            let log = read_log(config, now);
            // after the log: a kill is counted before it is logged
            let counted = OomCounter::open(&config.host_paths).and_then(|mut counter| counter.read()).ok();
            (log, counted)
        });
        let known = known();
        let (log, counted) = log.join().unwrap_or_default();
        (runtimes.join().unwrap_or_default(), log, counted, known)
    });
    let ReadLog { records, coverage: log } = log;
    let coverage = Coverage::new(log, &records, counted, booted_at, &runtimes);
    let mut events: Vec<RuntimeEvent> =
        known.containers.iter().filter_map(|container| name_of(container, booted_at)).collect();
    let mut containers = Vec::new();
    for RuntimeHistory { events: its, containers: existing, .. } in runtimes {
        events.extend(its);
        containers.extend(existing);
    }
    // where processes of others are hidden, none of them exists
    if config.host_paths.in_initial_pid_namespace() && config.host_paths.process(1).exists() {
        let is_gone = |pid: u32| !config.host_paths.process(pid).exists();
        for container in &mut containers {
            container.has_lost_process = container.first_process.is_some_and(is_gone);
        }
    }
    let ends = containers.iter().filter_map(|it| Some((it.id.as_str().to_owned(), it.ended?))).collect();
    let limits = containers.iter().filter_map(|it| Some((it.id.as_str().to_owned(), it.limit_bytes?)));
    let replay = Replay {
        boot_id: config.host_paths.boot_id().unwrap_or_default().into(),
        host_pids: config.host_paths.in_initial_pid_namespace(),
        limits: limits.collect(),
        cgroups: running_cgroups(config, &events),
        log_since: coverage.log_since(),
        ends,
    };
    let events = replay.run(now, events, records);
    let mut host = HostHistory { events, containers, coverage, read_at: now.unix_seconds() };
    if host.coverage.has_lost_records() {
        // those that were not read would be counted again
        let counted =
            if known.has_older_kills { vec![] } else { counted_kills(config, now, &host, &known.kills) };
        host.events.extend(counted.into_iter().map(LedgerEvent::OomKill));
    }
    host.events.sort_by(|one, other| one.at().total_cmp(&other.at()));
    host
}

/// Returns the cgroups of the containers that run, by their first processes.
fn running_cgroups(config: &Config, events: &[RuntimeEvent]) -> HashMap<ContainerId, PathBuf> {
    let first_process = |event: &RuntimeEvent| match event.what {
        EventKind::Running { pid: Some(pid) } => Some((event.id.clone(), pid)),
        _ => None,
    };
    let processes: Vec<_> = events.iter().filter_map(first_process).collect();
    if processes.is_empty() {
        return HashMap::new();
    }
    let hierarchy = Hierarchy::detect(&config.host_paths).ok();
    let probe = VictimProbe::new(&config.host_paths, hierarchy.as_ref());
    let cgroup = |(id, pid): (ContainerId, u32)| Some((id.clone(), probe.container_cgroup(&id, pid)?));
    processes.into_iter().filter_map(cgroup).collect()
}

/// Returns the name of a container of the ledger, as a runtime event.
fn name_of(subject: &ContainerRef, at: f64) -> Option<RuntimeEvent> {
    let name = &subject.identity.name;
    // pods keep their names in the runtime; a short id is no name
    if !subject.identity.k8s_pod.is_empty() || subject.container_id.starts_with(&**name) {
        return None;
    }
    let named = ContainerSpec {
        name: Arc::clone(name),
        pod: None,
        image: Arc::clone(&subject.image),
        labels_match: true,
        ..ContainerSpec::default()
    };
    let runtime = RUNTIMES.into_iter().find(|runtime| *runtime == subject.runtime)?;
    let id = ContainerId::new(&subject.container_id);
    Some(RuntimeEvent {
        runtime,
        socket: Arc::default(),
        id,
        at,
        named: Some(Arc::new(named)),
        what: EventKind::Exists,
    })
}

/// What the kernel log has.
#[derive(Debug, Default)]
struct ReadLog {
    records: Vec<ObservedRecord>,
    coverage: LogCoverage,
}

/// Reads the kernel log from its oldest record.
fn read_log(config: &Config, now: Timestamp) -> ReadLog {
    let mut refused: Vec<String> = Vec::new();
    for backend in log_backends(config.oom.kernel_log) {
        let read = KernelLog::open(&config.host_paths, *backend)
            .and_then(|mut log| Ok((log.read()?.entries, log.oldest())));
        match read {
            Ok((entries, oldest)) => {
                let mut clock = LogClock::default();
                let mut block = KillAssembler::default();
                // the first record of a boot has number 0, and stamp 0; else there may be begins of blocks before it
                if let Some(oldest) = oldest.filter(|oldest| oldest.sequence.unwrap_or(oldest.usec) != 0) {
                    block.records_lost(oldest.usec);
                }
                let hierarchy = Hierarchy::detect(&config.host_paths).ok();
                let probe = VictimProbe::new(&config.host_paths, hierarchy.as_ref());
                let mut records = Vec::new();
                for (entry, written) in clock.place(entries, now) {
                    let record = block.push(entry.position.usec, &entry.line, entry.report.as_ref());
                    let Some(record) = record else { continue };
                    let proc_info = probe.probe(&record, &written.within);
                    let (position, text) = (entry.position, entry.text);
                    records.push(ObservedRecord { position, text, record, written, proc_info });
                }
                let since = oldest.map(|oldest| now.unix_seconds_of_kernel(oldest.usec));
                return ReadLog { records, coverage: LogCoverage::Read { since } };
            }
            Err(error) => refused.push(error_chain(&error)),
        }
    }
    let coverage = match refused.is_empty() {
        true => LogCoverage::Off,
        false => LogCoverage::Unreadable { reason: refused.join("; ") },
    };
    ReadLog { coverage, ..ReadLog::default() }
}

/// Returns kills that only the counters of running containers show: their records are overwritten.
fn counted_kills(config: &Config, now: Timestamp, host: &HostHistory, known: &[LedgerEvent]) -> Vec<Kill> {
    let Ok(hierarchy) = Hierarchy::detect(&config.host_paths) else { return vec![] };
    let claim = |id: &ContainerId, _: &Path| {
        let known = host.containers.iter().find(|container| container.id == *id);
        PathClaim::Possible { user: known.and_then(|container| container.named.user) }
    };
    let (readings, _) = CgroupCounters::new(CgroupTree::new(&hierarchy)).sweep(now, claim);
    let boot_id: Arc<str> = config.host_paths.boot_id().unwrap_or_default().into();
    let mut kills = Vec::new();
    let log_since = host.coverage.log_since().unwrap_or(now.unix_seconds());
    // a younger container has lost no record
    let may_have_lost = |container: &&ExistingContainer| {
        container.is_running && container.started.is_none_or(|started| started < log_since)
    };
    for container in host.containers.iter().filter(may_have_lost) {
        let RunKills { listed, unattributed } = RunKills::of(container, &host.events, known);
        let counted: u64 = readings.iter().filter(|it| it.id == container.id).map(|it| it.kills).sum();
        for number in listed + unattributed..counted {
            let text = format!("its cgroup has counted {counted} OOM kills; {listed} of them have a record");
            kills.push(Kill {
                id: event_id(&[&boot_id, container.id.as_str(), &number.to_string()]),
                at: log_since,
                earliest: container.started,
                boot_id: Arc::clone(&boot_id),
                owner: KillOwner::Container(subject_of(container)),
                victim: Some(Victim::Child),
                method: Some(Method::Cgroup),
                evidence: vec![Evidence::new("cgroup", text)],
                ..Kill::unknown()
            });
        }
    }
    kills
}

/// OOM kills of the current run of a container, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RunKills {
    /// Those of the container, by the host or the ledger.
    listed: u64,
    /// Those of its time that may be its own.
    unattributed: u64,
}

impl RunKills {
    fn of(container: &ExistingContainer, of_host: &[LedgerEvent], known: &[LedgerEvent]) -> Self {
        let since = container.started.unwrap_or(f64::NEG_INFINITY) - START_TOLERANCE;
        let of_it = |event: &LedgerEvent| {
            let LedgerEvent::OomKill(kill) = event else { return false };
            let KillOwner::Container(subject) = &kill.owner else { return false };
            *subject.container_id == *container.id.as_str() && subject.started.is_none_or(|it| it > since)
        };
        let is_ownerless = |event: &LedgerEvent| {
            let LedgerEvent::OomKill(kill) = event else { return false };
            matches!(kill.owner, KillOwner::Pending | KillOwner::Unattributed) && kill.at > since
        };
        let number = |selects: &dyn Fn(&LedgerEvent) -> bool| {
            let is_new = |event: &&LedgerEvent| {
                selects(event) && !of_host.iter().any(|other| selects(other) && is_same(event, other))
            };
            let of_host = of_host.iter().filter(|event| selects(event)).count();
            (of_host + known.iter().filter(is_new).count()) as u64
        };
        Self { listed: number(&of_it), unattributed: number(&is_ownerless) }
    }
}

/// Returns a container as the subject of an event.
pub fn subject_of(container: &ExistingContainer) -> ContainerRef {
    let identity = container.named.identity();
    ContainerRef {
        identity,
        container_id: Arc::clone(container.id.shared()),
        image: Arc::clone(&container.named.image),
        runtime: container.runtime,
        started: container.started,
        ..ContainerRef::default()
    }
}

/// Returns what a running container uses of which limit; `None` if its cgroup cannot be read. `user`: the user whose engine or run it
/// is.
pub fn current_usage(
    config: &Config,
    now: Timestamp,
    id: &ContainerId,
    user: Option<u32>,
) -> Option<CurrentUsage> {
    let hierarchy = Hierarchy::detect(&config.host_paths).ok()?;
    let mut tree = CgroupTree::new(&hierarchy);
    let _ = tree.refresh(now); // a part that cannot be walked leaves the others
    let is_its = |candidate: &&ContainerCgroup| candidate.id == *id && candidate.is_proven(user);
    let found = tree.candidates().iter().find(is_its)?;
    let dir = Dir::open(&hierarchy.root.join(&found.path)).ok()?;
    let (usage, limit) = match hierarchy.version {
        Version::V1 => ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        Version::V2 => ("memory.current", "memory.max"),
    };
    let read = |name: &'static str| dir.file(name).ok()?.read_once(&mut Vec::new()).ok().map(<[u8]>::to_vec);
    let has_process = |path: &PathBuf| {
        let list = std::fs::read(hierarchy.root.join(path).join("cgroup.procs")).ok()?;
        Some(!list.trim_ascii().is_empty())
    };
    let has_processes = || {
        let lists = std::iter::once(&found.path).chain(&found.below).map(has_process);
        let lists: Option<Vec<bool>> = lists.collect();
        // of another pid namespace, cgroup v1 lists no process
        let is_readable = config.host_paths.in_initial_pid_namespace() && !found.is_truncated;
        lists.filter(|_| is_readable).map(|lists| lists.contains(&true))
    };
    Some(CurrentUsage {
        has_processes: has_processes(),
        usage_bytes: crate::parse::number(read(usage)?.trim_ascii())?,
        limit_bytes: crate::parse::cgroup::limit(&read(limit)?).flatten(),
        stalled_percent: read("memory.pressure")
            .and_then(|text| MemoryPressure::from_buf_read(&*text).ok())
            .map(|pressure| pressure.full.avg10),
        is_under_oom: read("memory.oom_control")
            .is_some_and(|text| keyed(&text).any(|pair| pair == (&b"under_oom"[..], 1))),
    })
}

/// Returns the id of an event that is not in the ledger: the same in each read.
fn event_id(parts: &[&str]) -> u64 {
    // FNV-1a: the hash of the standard library may change with its version
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    FIRST_UNRECORDED_ID | hash & (FIRST_UNRECORDED_ID - 1)
}

/// What the host adds to the events of a ledger.
#[derive(Debug)]
pub struct Addition {
    /// Events that the ledger does not have. The kills that they name have the ids of the ledger.
    pub events: Vec<LedgerEvent>,
    /// By the id of a kill without a record in the ledger, the id of the kill among `events` that has its record.
    pub replaced: HashMap<u64, u64>,
}

impl HostHistory {
    /// Adds to the events of a ledger, which are those of `query`, the ones of the host that it does not have.
    pub fn merge(&self, ledger: Vec<LedgerEvent>, query: &Query) -> Vec<LedgerEvent> {
        let Addition { events: mut merged, replaced } = self.addition(&ledger, query);
        let ids = self.ids_in(&ledger);
        for mut known in ledger.iter().filter(|event| !replaced.contains_key(&event.id())).cloned() {
            rename_kills(&mut known, &replaced);
            // memledger ended before it had decided
            if !known.settled() && self.read_at - known.at() > DECIDED_AFTER {
                let is_decided = |event: &&LedgerEvent| event.settled() && is_same(&known, event);
                if let Some(mut host) = self.events.iter().find(is_decided).cloned() {
                    rename_kills(&mut host, &ids);
                    known.decide_as(&host);
                }
            }
            merged.push(known);
        }
        merged.sort_by(|one, other| one.at().total_cmp(&other.at()));
        let excess = if query.limit == 0 { 0 } else { merged.len().saturating_sub(query.limit) };
        merged.drain(..excess);
        merged
    }

    /// Returns what the host adds to the events of a ledger: those of a query that it does not have.
    pub fn addition(&self, ledger: &[LedgerEvent], query: &Query) -> Addition {
        let mut events: Vec<LedgerEvent> = self.missing_in(ledger, query).cloned().collect();
        let replaced = replaced_gaps(ledger, events.iter());
        let ids = self.ids_in(ledger);
        for event in &mut events {
            rename_kills(event, &ids);
            event.forget_run_number();
        }
        Addition { events, replaced }
    }

    /// Returns the ids of its kills that a ledger has too, with their ids there.
    fn ids_in(&self, ledger: &[LedgerEvent]) -> HashMap<u64, u64> {
        let kills = self.events.iter().filter(|event| matches!(event, LedgerEvent::OomKill(_)));
        let known = |event: &LedgerEvent| ledger.iter().find(|known| is_same(known, event));
        kills.filter_map(|event| Some((event.id(), known(event)?.id()))).collect()
    }

    fn missing_in<'a>(
        &'a self,
        ledger: &'a [LedgerEvent],
        query: &'a Query,
    ) -> impl Iterator<Item = &'a LedgerEvent> {
        let wanted = query.container.as_deref().filter(|wanted| !wanted.is_empty());
        let has_name = |event: &LedgerEvent, wanted: &str| {
            event.subject().is_some_and(|subject| subject.identity.matches_name(wanted))
        };
        let is_name = wanted.is_some_and(|wanted| {
            self.containers.iter().any(|container| container.has_name(wanted))
                || self.events.iter().chain(ledger).any(|event| has_name(event, wanted))
        });
        let is_selected = move |event: &&LedgerEvent| {
            query.since.is_none_or(|since| event.at() >= since)
                && query.until.is_none_or(|until| event.at() <= until)
                && (!query.only_notable || event.is_notable())
                && (query.ids.is_empty() || query.ids.contains(&event.id()))
                && wanted.is_none_or(|wanted| match (is_name, event.subject()) {
                    (true, _) => has_name(event, wanted),
                    (false, Some(it)) => it.identity.is_of_pod(wanted) || it.container_id.starts_with(wanted),
                    (false, None) => false,
                })
        };
        self.events
            .iter()
            .filter(is_selected)
            .filter(|event| !ledger.iter().any(|known| is_same(known, event)))
    }

    /// Returns the kills of which neither a runtime nor the ledger knows the container, and those without any. `ledger`: its events
    /// that the host may have.
    pub fn kills_of_unknown_containers<'s>(
        &'s self,
        ledger: &'s [LedgerEvent],
    ) -> impl Iterator<Item = &'s Kill> {
        let has_name = |subject: &ContainerRef| !subject.container_id.starts_with(&*subject.identity.name);
        let is_unnamed = move |event: &&LedgerEvent| {
            let mut same = ledger.iter().filter(|known| is_same(known, event));
            !same.any(|known| known.subject().is_some_and(has_name))
        };
        self.events.iter().filter(is_unnamed).filter_map(|event| match event {
            LedgerEvent::OomKill(kill) => match &kill.owner {
                KillOwner::Container(subject) => {
                    subject.container_id.starts_with(&*subject.identity.name).then_some(kill)
                }
                KillOwner::Pending | KillOwner::Unattributed => Some(kill),
                KillOwner::Host => None,
            },
            LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => None,
        })
    }
}

/// Replaces the ids of the kills that ended an exit, or may have.
pub fn rename_kills(event: &mut LedgerEvent, ids: &HashMap<u64, u64>) {
    if let LedgerEvent::Exit(exit) = event {
        exit.ended_by
            .iter_mut()
            .chain(&mut exit.may_be)
            .for_each(|id| *id = ids.get(id).copied().unwrap_or(*id));
    }
}

/// Returns, by the id of a kill without a record in a ledger, the id of the kill of the host that has its record: memledger could not
/// read the kernel log, and this process can.
fn replaced_gaps<'a>(
    ledger: &[LedgerEvent],
    found: impl Iterator<Item = &'a LedgerEvent>,
) -> HashMap<u64, u64> {
    let mut replaced = HashMap::new();
    for event in found {
        let LedgerEvent::OomKill(kill) = event else { continue };
        let is_its_gap = |known: &&LedgerEvent| {
            let LedgerEvent::OomKill(gap) = known else { return false };
            let happened = gap.earliest.unwrap_or(gap.at) - GAP_TOLERANCE..=gap.at + GAP_TOLERANCE;
            let (one, other) = (known.subject(), event.subject());
            gap.kernel_usec.is_none()
                && kill.kernel_usec.is_some()
                && happened.contains(&kill.at)
                && one.zip(other).is_none_or(|(one, other)| one.container_id == other.container_id)
                && !replaced.contains_key(&gap.id)
        };
        replaced.extend(ledger.iter().find(is_its_gap).map(|gap| (gap.id(), kill.id)));
    }
    replaced
}

impl HostHistory {
    /// Returns the Unix time since which a ledger can have the same events; `None` if there are none.
    pub fn since(&self) -> Option<f64> {
        let earliest = self.events.iter().map(LedgerEvent::at).reduce(f64::min);
        earliest.map(|earliest| earliest - MAX_DISAGREEMENT)
    }

    /// Returns whether an event of a ledger may be one of these, or a gap whose record is one of these.
    pub fn may_have(&self, known: &LedgerEvent) -> bool {
        let is_gap = matches!(known, LedgerEvent::OomKill(kill) if kill.kernel_usec.is_none());
        is_gap || self.events.iter().any(|event| is_same(known, event))
    }
}

/// Returns whether an event of the ledger and one of the host are the same.
fn is_same(known: &LedgerEvent, event: &LedgerEvent) -> bool {
    match (known, event) {
        (LedgerEvent::OomKill(known), LedgerEvent::OomKill(kill)) => match known.kernel_usec {
            Some(usec) => {
                (Some(usec), known.pid, &known.boot_id) == (kill.kernel_usec, kill.pid, &kill.boot_id)
            }
            None => known.id == kill.id,
        },
        (LedgerEvent::Exit(known), LedgerEvent::Exit(exit)) => {
            let (ours, others) = (reported_starts(known), reported_starts(exit));
            // A run ends once, but the time of an end by a power loss is an estimate. The runtime may list a start with the time
            // before the hooks of the container, and the ledger may have the time after them.
            let is_power_loss = [known, exit].iter().all(|exit| exit.reason == Some(ExitReason::HostRestart));
            let hooks = if is_power_loss { MAX_START_EVENT_DELAY } else { 0.0 };
            let is_same_start =
                |one: f64, other: f64| (-START_TOLERANCE..hooks + START_TOLERANCE).contains(&(one - other));
            let is_same_run = ours.iter().any(|one| others.iter().any(|other| is_same_start(*one, *other)));
            let has_no_start = ours.is_empty() || others.is_empty();
            let is_same_end = is_same_report(known.at, exit.at) // a busy engine may report a start by seconds differently
                || has_no_start && (known.at - exit.at).abs() < SAME_EXIT;
            known.subject.container_id == exit.subject.container_id && (is_same_run || is_same_end)
        }
        _ => false,
    }
}

/// Returns the Unix times that were reported of the start of a run: the first report, and the earliest time. A busy engine sends the event
/// of a start seconds after the time that it lists.
fn reported_starts(exit: &Exit) -> Vec<f64> {
    let earliest = exit.duration_seconds.map(|duration| exit.at - duration);
    exit.subject.started.into_iter().chain(earliest).collect()
}

#[cfg(test)]
mod tests;
