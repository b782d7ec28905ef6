//! Whose an open kill was, and whether it ended the container. Pure.
//!
//! The first evidence that holds wins: the kernel's own line with the cgroup; /proc/PID/cgroup, read when the record was;
//! the processes that the last cycle saw; the group that was killed as a whole; the cgroups' counters; the runtimes' word.
//! The last two only as a set (`sets`). A wrong attribution is worse than none: what is left after [`SETTLES_AFTER`] stays
//! unattributed.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::entries::{Event, Kill, Scope, Victim, Whose};
use super::machine::{Hint, Machine};
use super::runs::Known;
use super::totals::Total;
use super::whose::{Place, of_paths};
use crate::clock::Moment;
use crate::discover::ContainerId;
use crate::parse::kernel_log::Context;

/// A kill that nothing ties to anybody stays unattributed after this.
pub const SETTLES_AFTER: Duration = Duration::from_secs(10);
/// A container whose first process ends with SIGKILL's status so soon after a child's kill was ended by it.
const ENDS_WITHIN: f64 = 5.0;
/// As long is waited for such an end.
const END_MAY_TAKE: Duration = Duration::from_secs(5);
/// A runtime may take so long to tell of a container, and of the run that a kill ended; then a container without a name
/// is called by its short id.
const RUNTIME_MAY_TAKE: Duration = Duration::from_secs(3);
/// So long is waited for the runtime's word of an end of which the kill is known.
const MAIN_TOLD_WITHIN: Duration = Duration::from_millis(500);
/// The exit status of a process that SIGKILL ended.
pub const BY_SIGKILL: i64 = 137;
/// The newest cycle's view of a container is stored with one kill of a burst.
const BEFORE_EVERY: f64 = 60.0;

/// What may tell whose a kill was.
#[derive(Clone, Debug, Default)]
pub struct Clues {
    /// The kernel's line with the cgroup.
    pub context: Option<Context>,
    /// The cgroup that was killed as a group.
    pub group: Option<String>,
    /// What /proc said.
    pub hint: Hint,
}

impl Clues {
    /// From the lines and from /proc.
    pub fn new(context: Option<Context>, group: Option<String>, hint: Hint) -> Self {
        Self { context, group, hint }
    }

    /// Where the kernel says that the victim was.
    pub fn cgroups(&self) -> Vec<&str> {
        let told = self.context.iter().flat_map(|context| &context.task_cgroups);
        told.chain(&self.hint.cgroup).map(String::as_str).collect()
    }
}

/// A kill of which not all is known.
#[derive(Clone, Debug)]
pub struct Open {
    /// What is known.
    pub kill: Kill,
    /// What may tell the rest.
    pub clues: Clues,
    /// Its container, also while that has no name yet.
    pub container: Option<ContainerId>,
    /// Second lines of this kill, which the cgroup counted too.
    pub duplicates: u64,
    /// It was logged.
    pub said: bool,
    pub noticed: Moment,
}

/// What is stored beside an open kill: an owner that has no name yet, and what /proc said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Noted {
    container: Option<String>,
    limit_bytes: Option<u64>,
    duplicates: u64,
}

impl Open {
    /// A new one.
    pub fn new(kill: Kill, clues: Clues, now: Moment) -> Self {
        Self { kill, clues, container: None, duplicates: 0, said: false, noticed: now }
    }

    /// One that was stored before a restart, with what was noted beside it.
    pub fn stored(kill: Kill, noted: Noted, now: Moment) -> Self {
        let container = match &kill.whose {
            Whose::Container(subject) => Some(ContainerId::new(&subject.container_id)),
            _ => noted.container.as_deref().map(ContainerId::new),
        };
        let Noted { limit_bytes, duplicates, .. } = noted;
        let clues = Clues { hint: Hint { cgroup: None, limit_bytes }, ..Clues::default() };
        Self { container, duplicates, said: true, ..Self::new(kill, clues, now) }
    }

    /// It has a record, and was entered in this step.
    pub fn is_new_record(&self) -> bool {
        self.kill.kernel_usec.is_some() && !self.said
    }

    /// What must be known of it after a restart.
    pub fn noted(&self) -> Noted {
        let limit_bytes = self.clues.hint.limit_bytes;
        let container = self.container.as_ref().map(|id| id.as_str().to_owned());
        Noted { container, limit_bytes, duplicates: self.duplicates }
    }

    fn is_ownerless(&self) -> bool {
        self.container.is_none() && self.kill.whose == Whose::Open
    }
}

impl Machine {
    /// Ties open kills to their owners.
    pub(super) fn attribute(&mut self, now: Moment) {
        for at in 0..self.open.len() {
            if self.open[at].is_ownerless()
                && let Some((place, method)) = self.place(&self.open[at])
            {
                self.give(at, place, method);
            }
        }
        self.by_sets(now);
        for at in 0..self.open.len() {
            self.name(at, now);
        }
    }

    pub(super) fn place(&self, open: &Open) -> Option<(Place, &'static str)> {
        let placed =
            |id: &ContainerId, path: &str| self.runs.get(id).is_some_and(|known| known.lies_on(path));
        let of = |paths: &[&str]| of_paths(paths.iter().copied(), placed);
        let clues = &open.clues;
        if let Some(context) = &clues.context {
            let paths: Vec<&str> = context.task_cgroups.iter().map(String::as_str).collect();
            let place = of(&paths);
            // a limit was hit and the victim was in no cgroup: it was on its way out already
            if place != Place::Unknown && (context.global || paths != ["/"]) {
                return Some((place, "kmsg"));
            }
        }
        if let Some(path) = &clues.hint.cgroup {
            let place = of(&[path]);
            if place != Place::Unknown {
                return Some((place, "proc"));
            }
        }
        if let Some(pid) = open.kill.pid.filter(|_| self.setup.host_pids)
            && let Some(id) = self.runs.of_pid(pid, &open.kill.process, open.kill.at)
        {
            return Some((Place::Container(id), "processes"));
        }
        match of(&[clues.group.as_deref()?]) {
            place @ Place::Container(_) => Some((place, "kmsg")),
            // a slice that is killed as a group may hold containers
            Place::Host | Place::Unknown => None,
        }
    }

    /// Enters the owner of an open kill.
    pub(super) fn give(&mut self, at: usize, place: Place, method: &'static str) {
        let open = &mut self.open[at];
        open.kill.method = method.into();
        match place {
            Place::Container(id) => {
                let (when, kills) = (open.kill.at, 1 + open.duplicates);
                open.container = Some(id.clone());
                self.counters.explain(&id, kills, when, &self.runs, &open.clues.cgroups());
            }
            Place::Host => open.kill.whose = Whose::Host,
            Place::Unknown => {}
        }
    }

    /// Open kills of which nobody knows whose they were.
    pub(super) fn ownerless(&self) -> Vec<usize> {
        (0..self.open.len()).filter(|at| self.open[*at].is_ownerless()).collect()
    }

    /// Enters the name of an owner when it is known, and what it held.
    fn name(&mut self, at: usize, now: Moment) {
        let open = &self.open[at];
        let Some(id) = open.container.clone().filter(|_| open.kill.whose == Whose::Open) else { return };
        let known = self.runs.get(&id);
        // a kill without a record has the time at which it was noticed, which may be after the end
        let placed = |known: &&Known| open.kill.kernel_usec.is_none() || known.ran_at(open.kill.at);
        let told = known.filter(placed).is_some_and(|known| known.named);
        if !told && now.since(open.noticed) < RUNTIME_MAY_TAKE {
            return;
        }
        let known = self.runs.change(&id);
        let subject = known.subject(&id);
        let mut before = known.before();
        let held = known.held().and_then(|held| held.processes.iter().find(|p| Some(p.pid) == open.kill.pid));
        let role = held.map(|process| process.role.label());
        let open = &mut self.open[at];
        let limits = before.as_ref().and_then(|before| before.samples.last());
        if open.kill.scope == Scope::Container {
            let own = open.kill.limit_cgroup.contains(&*subject.container_id);
            let sampled = || limits.filter(|_| own)?.limit_bytes;
            open.kill.limit_bytes = open.clues.hint.limit_bytes.or_else(sampled);
        } else if let Some(before) = &mut before {
            let (holders, host) = self.runs.holders();
            before.holders = holders;
            (before.host_total_bytes, before.host_available_bytes) = host.unzip();
        }
        open.kill.role = role.unwrap_or_default().into();
        self.totals.last_kill(&subject.name, open.kill.at);
        let lately = open.kill.at - BEFORE_EVERY;
        let known = self.runs.change(&id);
        if known.before_stored.is_none_or(|stored| stored < lately) {
            known.before_stored = Some(open.kill.at);
            open.kill.before = before.map(Arc::new);
        }
        open.kill.whose = Whose::Container(subject);
        if matches!(&*open.kill.method, "kmsg" | "proc") {
            known.note_killed(&open.kill.process);
        }
        self.changes.events.insert(open.kill.id, Event::OomKill(open.kill.clone()));
    }

    /// Decides what can be decided of victims, and gives up what nothing tells.
    pub(super) fn close(&mut self, now: Moment) {
        let mut at = 0;
        while at < self.open.len() {
            let open = &self.open[at];
            let age = now.since(open.noticed);
            let closed = match &open.kill.whose {
                Whose::Host => {
                    self.totals.add(Total::HostProcess, 1);
                    true
                }
                Whose::Container(subject) => match self.victim(open, age) {
                    Some(victim) => {
                        let (scope, when) = (open.kill.scope, open.kill.at);
                        self.totals.killed(&subject.name, victim, scope, when);
                        if let Some(id) = open.container.clone()
                            && let Some(run) = self.runs.change(&id).run_at_mut(when)
                        {
                            run.note(victim, scope);
                        }
                        self.open[at].kill.victim = Some(victim);
                        true
                    }
                    None => false,
                },
                _ if age >= SETTLES_AFTER && open.container.is_none() => {
                    self.totals.add(Total::Unattributed, 1);
                    self.tell_pod(at);
                    self.open[at].kill.whose = Whose::Unattributed;
                    true
                }
                _ => false,
            };
            if closed {
                let open = self.open.remove(at);
                self.close_kill(now, open);
            } else {
                at += 1;
            }
        }
    }

    /// Whether the kill ended its container; `None` if that is not known yet.
    fn victim(&self, open: &Open, age: Duration) -> Option<Victim> {
        // one that was never seen running is not known any more after a restart
        let known = open.container.as_ref().and_then(|id| self.runs.get(id));
        let run = known.and_then(|known| known.run_at(open.kill.at));
        // the runtime has not told of its run yet: the last one that is known had ended when it was killed
        let is_told = run.is_some_and(|run| open.kill.kernel_usec.is_none() || run.was_there(open.kill.at));
        if !is_told && age < END_MAY_TAKE {
            return None;
        }
        let by_runtime = || Some(run?.pid? == open.kill.pid?).filter(|_| self.setup.host_pids);
        let first = by_runtime();
        if first == Some(true) {
            // its end is told at once: till then the run may be the one before
            let is_clear = run.is_none_or(|run| run.ended.is_some()) || age >= MAIN_TOLD_WITHIN;
            return is_clear.then_some(Victim::Main);
        }
        if let Some(ended) = run.and_then(|run| run.ended) {
            let later = self.open.iter().any(|other| {
                other.container == open.container
                    && (other.kill.at, other.kill.id) > (open.kill.at, open.kill.id)
                    && other.kill.at <= ended
            });
            let other = run.is_some_and(|run| run.ended_by.is_some());
            let may_be_its = |kill: &Open| kill.is_ownerless() && kill.kill.at <= ended + 1.0;
            let is_counted = self.kernel.waits() && age < SETTLES_AFTER;
            if !other && (is_counted || self.open.iter().any(may_be_its)) {
                return None; // one of them may be the main process's
            }
            // Docker kills after a stop that took too long, and does not tell so of a container that is dead
            let by_request = run.is_some_and(|run| {
                let kills = |(at, signal): &(f64, Option<i32>)| *signal == Some(9) && *at >= open.kill.at;
                run.asked.iter().any(kills)
            });
            let by_it = ended - open.kill.at < ENDS_WITHIN && !later && !other && !by_request;
            return Some(match run.and_then(|run| run.exit_code) {
                Some(BY_SIGKILL) if by_it => Victim::Main,
                // nobody tells the status: a child that is known to be one did not end it
                None if by_it && first.is_none() => Victim::Main,
                _ => Victim::Child,
            });
        }
        let decided = age >= END_MAY_TAKE || known.is_some_and(|known| is_no_wrappers_child(known, open));
        decided.then_some(Victim::Child)
    }
}

/// The container's first process will not end with this kill's status: the victim's parent is another process, or the
/// first process is a Python program, which does not hand on a child's status as a shell does.
fn is_no_wrappers_child(known: &Known, open: &Open) -> bool {
    let Some(first) = known.run.as_ref().and_then(|run| run.pid) else { return false };
    let Some(held) = known.held() else { return false };
    let seen = |pid: u32| held.processes.iter().find(|process| process.pid == pid);
    let Some(first) = seen(first) else { return false };
    if open.kill.pid == Some(first.pid) {
        return false;
    }
    let parent = || seen(seen(open.kill.pid?)?.ppid);
    first.python || parent().is_some_and(|parent| parent.pid != first.pid && parent.python)
}
