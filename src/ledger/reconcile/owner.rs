//! Finds the container and the run of each victim. Pure.
//!
//! The first sufficient evidence decides: the cgroup in the kernel's own record; /proc/PID/cgroup, read together with
//! the record; the processes of the last cycles; the cgroup that was killed as a group; the cgroups' counters and the
//! runtimes' OOM events ([`super::match_counters`]). A wrong attribution is worse than none: a kill that is undecided
//! after [`ATTRIBUTION_TIMEOUT`](crate::lifecycle::timing::ATTRIBUTION_TIMEOUT) stays unattributed.
//!
//! A kill belongs to a run, not just to a container: the one whose time overlaps that of the kill, or that of the processes that were killed
//! with it. Its start, limit and samples are those of the event.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::victim_groups::{GroupNumber, RunByGroup};
use super::{ProcInfo, Reconciler};
use crate::attribute::Role;
use crate::clock::{ClockStep, Timestamp};
use crate::discover::{ContainerId, PathOwner, owner_of_paths};
use crate::events::{
    ContainerRef, Evidence, Identity, Kill, KillOwner, LedgerEvent, Method, OomScope, PriorUsage,
};
use crate::ledger::container_state::ContainerState;
use crate::ledger::interval::Interval;
use crate::ledger::run::LedgerRun;
use crate::lifecycle::RunNumber;
use crate::lifecycle::timing::{GROUP_WINDOW, MAX_MISSED_DELAY, RUNTIME_EVENT_TIMEOUT, START_TOLERANCE};
use crate::parse::kernel_log::OomContext;
use crate::parse::kubernetes::{KubeletCgroup, kubelet_cgroup};
use crate::parse::process::WorkerProgram;

/// Within this many seconds only one kill of a container is stored with its prior usage.
const PRIOR_USAGE_INTERVAL: f64 = 60.0;

/// Why a kill in a cgroup with a container's id in its name is not the container's.
const UNPROVEN: &str = "the cgroup has the id of a container in its name, which does not prove that it is the container's: no runtime says so, \
                        and not only root may make cgroups there";

/// Evidence for the attribution of a kill.
#[derive(Clone, Debug, Default)]
pub struct Hints {
    /// The kernel's line with the cgroup.
    pub context: Option<OomContext>,
    /// The cgroup that was killed as a group.
    pub group: Option<String>,
    /// The victim's data from /proc.
    pub proc_info: ProcInfo,
}

/// A kill that is not final yet.
#[derive(Clone, Debug)]
pub struct PendingKill {
    /// The event so far.
    pub kill: Kill,
    /// When it happened.
    pub happened: Interval,
    /// Evidence for its attribution.
    pub hints: Hints,
    /// Its container, possibly not named yet.
    pub container: Option<ContainerId>,
    /// The name that the container had when the kill was noticed, if it was renamed since: it is counted there.
    pub counted_as: Option<Identity>,
    /// The run of that container; `None` until it is reported, and if none was.
    pub run: Option<RunNumber>,
    /// The others that were killed at once with it.
    pub group: Option<GroupNumber>,
    /// The run whose first process is among them.
    pub run_of_group: Option<RunNumber>,
    /// Second records of this kill, which the cgroup counted too.
    pub duplicates: u64,
    /// The kill was logged.
    pub is_logged: bool,
    pub noticed: Timestamp,
    /// The last cycle that still saw the victim, and its Unix time.
    pub seen: Option<(Timestamp, f64)>,
    /// The first cycle after that.
    pub missed: Option<(Timestamp, f64)>,
    /// What the store has of it beside its event.
    pub stored: Option<PersistedKill>,
    /// A container's id is in the name of its cgroup, and no runtime has said yet that this is the container's.
    pub is_unproven: bool,
}

/// The part of a pending kill that is stored beside its event: an unnamed owner, and the limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PersistedKill {
    container: Option<String>,
    run: Option<RunNumber>,
    run_of_group: Option<RunNumber>,
    happened: Option<Interval>,
    limit_bytes: Option<u64>,
    duplicates: u64,
    /// The owner in its event is the final one.
    is_labelled: bool,
    /// Unix time of the last cycle that still saw the victim.
    seen: Option<f64>,
}

impl PendingKill {
    /// Creates a new pending kill.
    pub fn new(kill: Kill, happened: Interval, hints: Hints, now: Timestamp) -> Self {
        Self {
            kill,
            happened,
            hints,
            container: None,
            counted_as: None,
            run: None,
            group: None,
            run_of_group: None,
            duplicates: 0,
            is_logged: false,
            noticed: now,
            seen: None,
            missed: None,
            stored: None,
            is_unproven: false,
        }
    }

    /// Restores a pending kill that was stored before a restart.
    pub fn stored(kill: Kill, persisted: PersistedKill, now: Timestamp) -> Self {
        let mut kill = kill;
        if !persisted.is_labelled && matches!(kill.owner, KillOwner::Container(_)) {
            kill.owner = KillOwner::Pending;
        }
        let container = persisted.container.as_deref().map(ContainerId::new);
        let PersistedKill { run, run_of_group, happened, limit_bytes, duplicates, seen, .. } = persisted;
        let seen = seen.map(|seen| (now, seen));
        let hints = Hints { proc_info: ProcInfo { limit_bytes, ..ProcInfo::default() }, ..Hints::default() };
        let happened = happened.unwrap_or(Interval::new(kill.earliest.unwrap_or(kill.at), kill.at));
        Self {
            container,
            run,
            run_of_group,
            duplicates,
            seen,
            is_logged: true,
            ..Self::new(kill, happened, hints, now)
        }
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.kill.correct_times(step);
        self.happened.correct(step);
        self.seen.iter_mut().chain(&mut self.missed).for_each(|(_, at)| step.correct(at));
    }

    /// Returns true if it has a record and was added in this step.
    pub fn is_new_record(&self) -> bool {
        self.kill.kernel_usec.is_some() && !self.is_logged
    }

    /// Returns the state to store for a restart.
    pub fn persisted(&self) -> PersistedKill {
        let limit_bytes = self.hints.proc_info.limit_bytes;
        let container = self.container.as_ref().map(|id| id.as_str().to_owned());
        let Self { run, run_of_group, duplicates, happened, .. } = *self;
        let is_labelled = self.kill.owner != KillOwner::Pending;
        let seen = self.seen.map(|(_, seen)| seen);
        PersistedKill {
            container,
            run,
            run_of_group,
            happened: Some(happened),
            limit_bytes,
            duplicates,
            is_labelled,
            seen,
        }
    }

    /// Notes whether a cycle saw the victim.
    pub fn note_cycle(&mut self, at: Timestamp, sees: bool) {
        let cycle = (at, at.unix_seconds());
        if sees {
            (self.seen, self.missed) = (Some(cycle), None);
        } else if let Some((_, seen_at)) = self.seen {
            // with a long interval it was gone long before this cycle
            match cycle.1 - seen_at > MAX_MISSED_DELAY {
                true => self.note_end_of_cycles(),
                false => drop(self.missed.get_or_insert(cycle)),
            }
        }
    }

    /// Notes that no later cycle looks for the victim.
    pub fn note_end_of_cycles(&mut self) {
        if let Some((seen, seen_at)) = self.seen {
            let gone = (seen.plus(Duration::from_secs_f64(MAX_MISSED_DELAY)), seen_at + MAX_MISSED_DELAY);
            self.missed.get_or_insert(gone);
        }
    }

    /// Returns since when the victim is gone, as far as that is known; `None` if a cycle saw it and none has missed it since.
    pub fn gone_since(&self) -> Option<Timestamp> {
        match self.seen {
            None => Some(self.noticed),
            Some(_) => self.missed.map(|(missed, _)| missed),
        }
    }

    /// Returns the Unix time at which the victim was gone at the latest.
    pub fn gone_at(&self) -> f64 {
        self.missed.or(self.seen).map_or(self.kill.at, |(_, at)| at.max(self.kill.at))
    }

    pub(super) fn is_ownerless(&self) -> bool {
        self.container.is_none() && self.kill.owner == KillOwner::Pending
    }
}

/// Returns whether a cgroup is that of a pod.
fn is_pod_limit(cgroup: &str) -> bool {
    let last = cgroup.rsplit('/').next().unwrap_or_default();
    matches!(kubelet_cgroup(last), Some(KubeletCgroup::Pod(_)))
}

impl Reconciler {
    /// Attributes pending kills.
    pub(super) fn attribute(&mut self, now: Timestamp) {
        for at in 0..self.pending.len() {
            if self.pending[at].is_ownerless()
                && let Some((owner, method)) = self.find_owner(&self.pending[at])
            {
                // its runtime may be about to report the container
                let is_final = now.since(self.pending[at].noticed) >= RUNTIME_EVENT_TIMEOUT;
                self.pending[at].is_unproven = owner == PathOwner::Unproven && !is_final;
                if !self.pending[at].is_unproven {
                    self.assign_owner(at, owner, method);
                }
            }
        }
        self.match_counters(now);
        for at in 0..self.pending.len() {
            self.choose_run_and_label(at, now);
        }
        // the run of a later one may be certain, and is that of all that were killed with it
        for at in 0..self.pending.len() {
            if self.pending[at].group.is_some() {
                self.choose_run_and_label(at, now);
            }
        }
    }

    fn choose_run_and_label(&mut self, at: usize, now: Timestamp) {
        self.correct_run(at);
        self.label_kill(at, now, RUNTIME_EVENT_TIMEOUT);
        self.choose_run(at);
        self.record_run_of_group(at);
    }

    /// Records the run that was chosen for a kill in its group, and keeps the run of the group if a first process proves it.
    fn record_run_of_group(&mut self, at: usize) {
        let PendingKill { kill, container: Some(id), run, group: Some(group), .. } = &self.pending[at] else {
            return;
        };
        let state = self.containers.get(id);
        let chosen = state.zip(*run).and_then(|(state, number)| state.runs.get(number));
        let is_first = |run: &LedgerRun| self.config.host_pids && run.pid.is_some() && run.pid == kill.pid;
        self.groups.record(*group, id, kill.id, *run, chosen.is_some_and(is_first));
        if let RunByGroup::Certain(run) = self.groups.run_of(*group, id, kill.id) {
            self.pending[at].run_of_group = Some(run);
        }
    }

    /// Labels each pending kill whose container is known, with its short id if nothing has named it: nothing more will be
    /// reported.
    pub fn label_pending(&mut self, now: Timestamp) {
        for at in 0..self.pending.len() {
            self.label_kill(at, now, Duration::ZERO);
        }
    }

    /// Removes the labels of a kill whose run turned out to be another one: when it was labelled, not all runs of that time were
    /// reported yet.
    pub(super) fn correct_run(&mut self, at: usize) {
        let (before, now) = (self.pending[at].run, self.run_of(at));
        if before.is_some() && now.is_some_and(|(run, _)| before != Some(run.number)) {
            let before = self.host_usage(&self.pending[at].kill);
            let pending = &mut self.pending[at];
            pending.run = None;
            pending.kill.before = before;
            if pending.kill.kernel_usec.is_none() {
                pending.kill.at = pending.happened.latest; // of another run it may have happened later
            }
            pending.kill.owner = KillOwner::Pending;
        }
    }

    /// Returns the run of a kill whose container is known, and whether it is certain.
    fn run_of(&self, at: usize) -> Option<(&LedgerRun, bool)> {
        let pending = &self.pending[at];
        let state = self.containers.get(pending.container.as_ref()?)?;
        let pid = pending.kill.pid.filter(|_| self.config.host_pids);
        if let Some(run) = self.first_process_of_group(pending, state) {
            return Some((run, true));
        }
        let by_group = match (pending.run_of_group, pending.group, &pending.container) {
            (Some(run), ..) => RunByGroup::Certain(run), // also after a restart of memledger
            (None, Some(group), Some(id)) => self.groups.run_of(group, id, pending.kill.id),
            (None, ..) => RunByGroup::Unknown,
        };
        match by_group {
            RunByGroup::Unknown => {}
            RunByGroup::Awaited => return None,
            RunByGroup::Known(run) | RunByGroup::Certain(run) => return Some((state.runs.get(run)?, true)),
        }
        let is_explained = |number| {
            let mut earlier = self.pending.iter().take(at);
            earlier.any(|other| other.container == pending.container && other.run == Some(number))
        };
        state.run_of_kill(&pending.happened, pending.kill.at, pid, is_explained)
    }

    /// Returns the run whose first process is this victim of a group, which may be logged some seconds after the end of that run.
    fn first_process_of_group<'a>(
        &self,
        pending: &PendingKill,
        state: &'a ContainerState,
    ) -> Option<&'a LedgerRun> {
        let pid = pending.kill.pid.filter(|_| self.config.host_pids && pending.group.is_some())?;
        let may_be_its = |run: &LedgerRun| {
            let end = run.phase.latest_end().map_or(f64::INFINITY, |ended| ended + GROUP_WINDOW);
            let window =
                Interval::new(run.begin().map_or(f64::NEG_INFINITY, |begin| begin - START_TOLERANCE), end);
            run.pid == Some(pid) && window.overlaps(&pending.happened)
        };
        state.runs.all().rev().find(|run| may_be_its(run))
    }

    /// Chooses the run of a kill that was labelled before its run was reported.
    fn choose_run(&mut self, at: usize) {
        let run = self.run_of(at).map(|(run, _)| (run.number, run.start.first));
        let pending = &mut self.pending[at];
        if let (None, Some((number, started)), KillOwner::Container(subject)) =
            (pending.run, run, &mut pending.kill.owner)
        {
            (pending.run, subject.run_number, subject.started) = (Some(number), Some(number), started);
            self.changes.put_event(LedgerEvent::OomKill(pending.kill.clone()));
        }
    }

    pub(super) fn find_owner(&self, pending: &PendingKill) -> Option<(PathOwner, Method)> {
        let hints = &pending.hints;
        let claim = |id: &ContainerId, path: &str| self.containers.claim(id, path);
        let of =
            |paths: &[&str]| owner_of_paths(paths.iter().copied(), claim, |path| hints.proc_info.maker(path));
        if let Some(context) = &hints.context {
            let paths: Vec<&str> = context.task_cgroups.iter().map(String::as_str).collect();
            let owner = of(&paths);
            // a limit was hit and the victim was in no cgroup: it was exiting already
            if owner != PathOwner::Unknown && (context.global || paths != ["/"]) {
                return Some(self.run_on_host(pending, &owner).unwrap_or((owner, Method::Kmsg)));
            }
        }
        if let Some(path) = &hints.proc_info.cgroup {
            let owner = of(&[path]);
            if owner != PathOwner::Unknown {
                return Some(self.run_on_host(pending, &owner).unwrap_or((owner, Method::Proc)));
            }
        }
        if let Some(pid) = pending.kill.pid.filter(|_| self.config.host_pids)
            && let Some(id) = self.containers.find_by_pid(pid, &pending.kill.process, &pending.happened)
        {
            return Some((PathOwner::Container(id), Method::Processes));
        }
        match of(&[hints.group.as_deref()?]) {
            owner @ PathOwner::Container(_) => Some((owner, Method::Kmsg)),
            // a slice that is killed as a group can contain containers
            PathOwner::Host | PathOwner::Unproven | PathOwner::Unknown => None,
        }
    }

    /// Returns the run without a cgroup whose command was killed, where the cgroup is one of the host.
    fn run_on_host(&self, pending: &PendingKill, owner: &PathOwner) -> Option<(PathOwner, Method)> {
        let is_on_host = matches!(owner, PathOwner::Host | PathOwner::Unproven);
        let pid = pending.kill.pid.filter(|_| self.config.host_pids && is_on_host)?;
        let id = self.containers.find_run_by_pid(pid, &pending.happened)?;
        Some((PathOwner::Container(id), Method::Processes))
    }

    /// Returns a pending kill as it is shown until it is settled: with its container as soon as that is known, if only by its id.
    pub(super) fn shown(&self, pending: &PendingKill) -> Kill {
        let mut kill = pending.kill.clone();
        if let (KillOwner::Pending, Some(id)) = (&kill.owner, &pending.container) {
            let named = self.containers.get(id).map(|state| state.subject(id, None));
            let unnamed = || ContainerRef {
                identity: Identity::named(id.short()),
                container_id: Arc::clone(id.shared()),
                ..ContainerRef::default()
            };
            kill.owner = KillOwner::Container(named.unwrap_or_else(unnamed));
        }
        kill
    }

    /// Assigns an owner to a pending kill.
    pub(super) fn assign_owner(&mut self, at: usize, owner: PathOwner, method: Method) {
        let pending = &mut self.pending[at];
        pending.kill.method = Some(method);
        match owner {
            PathOwner::Container(id) => {
                pending.container = Some(id.clone());
                // after a pause of the ledger, cycles that saw the victim are applied before its record is read
                let state = self.containers.get(&id).filter(|_| self.config.host_pids);
                let seen = state.zip(pending.kill.pid).and_then(|(state, pid)| {
                    let last_seen = |run: &LedgerRun| run.last_seen(pid, &pending.kill.process);
                    state.runs.all().filter_map(last_seen).reduce(f64::max)
                });
                pending.seen =
                    seen.filter(|seen| *seen > pending.kill.at).map(|seen| (pending.noticed, seen));
                let (kills, happened) = (1 + pending.duplicates, pending.happened);
                self.explain_count(&id, kills, &happened);
            }
            PathOwner::Host => pending.kill.owner = KillOwner::Host,
            PathOwner::Unproven => {
                pending.kill.owner = KillOwner::Host;
                pending.kill.evidence.push(Evidence::new(&method.to_string(), UNPROVEN));
            }
            PathOwner::Unknown => {}
        }
    }

    /// Returns who held the memory of the host when it ran out; `None` for a kill at a limit.
    pub(super) fn host_usage(&self, kill: &Kill) -> Option<Arc<PriorUsage>> {
        if kill.scope == OomScope::Container {
            return None;
        }
        self.containers.host_usage(kill.at).map(Arc::new)
    }

    /// Returns the indexes of pending kills without an owner.
    pub(super) fn ownerless(&self) -> Vec<usize> {
        let is_ownerless = |pending: &PendingKill| pending.is_ownerless() && !pending.is_unproven;
        (0..self.pending.len()).filter(|at| is_ownerless(&self.pending[*at])).collect()
    }

    /// Chooses the run of a kill whose container is known, and sets its labels, limit and prior usage from that run.
    /// `timeout`: how long it waits until a runtime has reported both.
    fn label_kill(&mut self, at: usize, now: Timestamp, timeout: Duration) {
        let pending = &self.pending[at];
        let Some(id) = pending.container.clone().filter(|_| pending.kill.owner == KillOwner::Pending) else {
            return;
        };
        let pid = pending.kill.pid.filter(|_| self.config.host_pids);
        let run = self.run_of(at);
        let number = run.map(|(run, _)| run.number);
        let is_named = self.containers.get(&id).is_some_and(|state| state.named);
        let is_reported = run.is_some_and(|(_, is_certain)| is_certain) && is_named;
        if !is_reported && now.since(pending.noticed) < timeout {
            return;
        }
        let state = self.containers.modify(&id);
        if state.runs.current().is_none() {
            state.first_event_at = state.first_event_at.max(pending.kill.at);
        }
        let state: &ContainerState = state;
        let run = number.and_then(|number| state.runs.get(number));
        let subject = state.subject(&id, run);
        let before = run.and_then(|run| state.prior_usage(run, pending.kill.at));
        let victim = run.and_then(|run| run.process(pid?));
        let role = victim.map(|victim| victim.role);
        let parent = victim.filter(|victim| victim.role == Role::Worker).map(|victim| victim.ppid);
        let program = victim.and_then(|victim| {
            victim.program.or_else(|| run?.process(parent?).and_then(|parent| parent.program))
        });
        let ended = run.and_then(LedgerRun::ended);
        let of = &self.pending[at].kill;
        let alone_in_pod =
            is_pod_limit(&of.limit_cgroup) && self.containers.is_alone_in_pod(&id, &of.limit_cgroup, of.at);
        let pending = &mut self.pending[at];
        pending.kill.alone_in_pod = alone_in_pod;
        pending.run = number;
        pending.kill.role = role;
        pending.kill.parent_pid = parent;
        pending.kill.program = program.map(WorkerProgram::name).unwrap_or_default().into();
        if let (None, Some(ended)) = (pending.kill.kernel_usec, ended) {
            pending.kill.at = pending.kill.at.min(ended); // it is known to have happened before that
        }
        self.set_memory(at, &subject, before);
        let kill = &mut self.pending[at].kill;
        if !kill.before_counting {
            self.totals.set_last_kill(&subject.identity, kill.at, now.unix_seconds());
        }
        kill.owner = KillOwner::Container(subject);
        self.changes.put_event(LedgerEvent::OomKill(kill.clone()));
    }

    /// Sets the limit that was hit, and the prior usage: in a burst of kills only one has it.
    fn set_memory(&mut self, at: usize, subject: &ContainerRef, before: Option<PriorUsage>) {
        let pending = &mut self.pending[at];
        if pending.kill.scope == OomScope::Container {
            let is_own = pending.kill.limit_cgroup.contains(&*subject.container_id);
            let last_sample = before.as_ref().and_then(|before| before.samples.last());
            let sampled = || last_sample.filter(|_| is_own)?.limit_bytes;
            let kill = &mut pending.kill;
            kill.limit_bytes = kill.limit_bytes.or(pending.hints.proc_info.limit_bytes).or_else(sampled);
        }
        let (Some(id), Some(number)) = (&pending.container, pending.run) else { return };
        let at = pending.kill.at;
        if let Some(run) = self.containers.modify(id).runs.get_mut(number)
            && run.evidence.before_stored.is_none_or(|stored| stored < at - PRIOR_USAGE_INTERVAL)
            && let Some(before) = before
        {
            run.evidence.before_stored = Some(at);
            let PriorUsage { holders, host_total_bytes, host_available_bytes, .. } =
                pending.kill.before.take().map(Arc::unwrap_or_clone).unwrap_or_default();
            let before = PriorUsage { holders, host_total_bytes, host_available_bytes, ..before };
            pending.kill.before = Some(Arc::new(before));
        }
    }
}
