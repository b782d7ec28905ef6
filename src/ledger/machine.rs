//! The state machine that reconciles all sources into kills and exits. Pure: no I/O, no clock.
//!
//! One step: what the cycle, the runtimes, the kernel log, the kernel's counter and the cgroups' counters said is entered
//! in this order, and [`Machine::settle`] draws the conclusions. A kill is open until it is known whose it was and whether
//! it ended the container; the host's total counts it at once.
//!
//! * Records and the counter create kills ([`super::kernel`]); everything else only attributes ([`super::attribution`]).
//! * Nothing that was published is taken back. So the container's count waits until its labels are known.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::attribution::{Clues, Open, SETTLES_AFTER};
use super::counters::Counters;
use super::desk::{ContainerFigures, Figures, Handed};
use super::entries::{Event, Evidence, GpuError, Kill, Name, Scope, Whose};
use super::exits::OpenExit;
use super::kernel::{Account, Found, Kernel};
use super::runs::{Known, Runs, Turn};
use super::store::{Changes, Contents};
use super::totals::{Total, Totals};
use super::whose::Place;
use crate::clock::Moment;
use crate::collect::kernel_log::{Entry, Position};
use crate::collect::oom_cgroups::Reading;
use crate::config::Filter;
use crate::discover::{ContainerId, Fact, What};
use crate::parse::kernel_log::Killed;

/// A gap may be filled by a record that comes so much later.
const RECORD_MAY_COME: Duration = Duration::from_secs(600);
/// Ended containers are forgotten so often.
const FORGET_EVERY: Duration = Duration::from_secs(60);
const ACCOUNT: &str = "account";
const RUN_KEY: &str = "run:";
const COUNTER_KEY: &str = "counter:";
const SINCE_KEY: &str = "since:";
const OPEN_KEY: &str = "open:";
/// Gaps whose record may still come that are remembered; those of longest ago give way.
const MOST_GAPS: usize = 4_096;
/// A runtime's events come out of order by no more than so many seconds.
const DISORDER: f64 = 1.0;

/// A cgroup's count explains no kill that is noticed so much later.
const COUNTED_LASTS: Duration = Duration::from_secs(13);
/// Ended containers whose figures are shown, at most; the newest.
const MOST_ENDED_SHOWN: usize = 500;

/// What does not change while memledger runs.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// This boot.
    pub boot_id: Arc<str>,
    /// How long figures of an ended container are shown.
    pub keep_ended: Duration,
    /// Which containers are shown.
    pub filter: Filter,
    /// The kernel's pids are the pids that the cycle sees.
    pub host_pids: bool,
    /// What the runtimes tell of ends is not used.
    pub without_runtimes: bool,
}

/// What /proc said of a victim at the moment its record was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// Its cgroup path.
    pub cgroup: Option<String>,
    /// The limit of the cgroup that ran out, which is there for some milliseconds too.
    pub limit_bytes: Option<u64>,
}

/// What is said in the log.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// A process was killed.
    Killed(Event),
    /// All is known of an event now.
    Settled(Event),
}

/// The machine.
#[derive(Debug)]
pub struct Machine {
    pub(super) setup: Setup,
    pub(super) kernel: Kernel,
    pub(super) runs: Runs,
    pub(super) counters: Counters,
    pub(super) totals: Totals,
    pub(super) open: Vec<Open>,
    pub(super) exits: Vec<OpenExit>,
    pub(super) changes: Changes,
    pub(super) said: Vec<Said>,
    /// Gaps that are settled, whose record may still come.
    gaps: VecDeque<(Moment, Kill)>,
    /// Victims that are settled: pid and container, newest last.
    settled: VecDeque<(u32, Option<ContainerId>)>,
    since: BTreeMap<&'static str, f64>,
    stored_account: Option<Account>,
    next_id: u64,
    pub(super) log_up: bool,
    /// Unix time of the last read of the log.
    log_read: Option<f64>,
    forgot: Option<Moment>,
}

impl Machine {
    /// Goes on from what was stored. `now_usec`: the kernel's clock.
    pub fn new(setup: Setup, contents: &Contents, now: Moment, now_usec: u64) -> Self {
        let note = |key: &str| contents.notes.get(key).map(String::as_str);
        let account: Option<Account> = note(ACCOUNT).and_then(|text| serde_json::from_str(text).ok());
        let same_boot = account.as_ref().is_some_and(|account| account.boot_id == *setup.boot_id);
        let with = |prefix: &'static str| {
            contents.notes.iter().filter_map(move |(key, text)| Some((key.strip_prefix(prefix)?, text)))
        };
        let stored = with(RUN_KEY)
            .filter_map(|(id, text)| Some((ContainerId::new(id), serde_json::from_str::<Known>(text).ok()?)));
        let counters: HashMap<u64, u64> = with(COUNTER_KEY)
            .filter(|_| same_boot)
            .filter_map(|(inode, text)| Some((inode.parse().ok()?, text.parse().ok()?)))
            .collect();
        let mut changes = Changes::default();
        if !same_boot {
            let old = contents.notes.keys().filter(|key| key.starts_with(COUNTER_KEY));
            changes.notes.extend(old.map(|key| (key.clone(), None)));
        }
        let mut machine = Self {
            runs: Runs::new(setup.filter.clone(), setup.without_runtimes, stored),
            counters: Counters::new(counters, account.is_none()),
            kernel: Kernel::new(account, &setup.boot_id, now_usec),
            totals: Totals::new(contents),
            open: vec![],
            exits: vec![],
            changes,
            said: vec![],
            gaps: VecDeque::new(),
            settled: VecDeque::new(),
            since: BTreeMap::new(),
            stored_account: None,
            next_id: contents.last_id + 1,
            log_up: false,
            log_read: None,
            forgot: None,
            setup,
        };
        for runtime in crate::discover::RUNTIMES {
            // a runtime that is new to the ledger counts from now on, also if memledger ends before it has told anything
            let stored = note(&format!("{SINCE_KEY}{runtime}")).and_then(|text| text.parse().ok());
            // the clock may have been set back since; a runtime tells nothing from the future
            let since = f64::min(stored.unwrap_or(f64::MAX), now.unix_seconds());
            machine.since.insert(runtime, since);
        }
        machine.reopen(contents, now);
        machine
    }

    /// Takes up what was open when memledger stopped.
    fn reopen(&mut self, contents: &Contents, now: Moment) {
        for event in &contents.unsettled {
            match event {
                Event::OomKill(kill) => {
                    let noted = contents.notes.get(&format!("{OPEN_KEY}{}", kill.id));
                    let noted = noted.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
                    self.open.push(Open::stored(kill.clone(), noted, now));
                }
                Event::Exit(exit) => self.exits.push(OpenExit::stored(exit.clone(), now)),
                Event::GpuError(_) => {} // never open
            }
        }
    }

    /// Containers of a runtime that ran when the ledger last knew.
    pub fn running(&self, runtime: &str) -> impl Iterator<Item = &ContainerId> {
        self.runs
            .iter()
            .filter(move |(_, known)| known.runs() && *known.runtime == *runtime)
            .map(|(id, _)| id)
    }

    /// Unix time of the last fact of each runtime.
    pub fn since(&self) -> &BTreeMap<&'static str, f64> {
        &self.since
    }

    /// Where the log of this boot was read to; `None` if it never was.
    pub fn position(&self) -> Option<Position> {
        let account = self.kernel.account();
        (account.position != Position::default()).then_some(account.position)
    }

    /// Enters what a cycle saw.
    pub fn see(&mut self, now: Moment, handed: &Handed) {
        for turn in self.runs.see(now, handed) {
            self.turn(now, turn);
        }
    }

    /// Enters what the runtimes told. What an earlier run of memledger has entered is told again after a restart.
    pub fn tell(&mut self, now: Moment, facts: &[Fact]) {
        for fact in facts {
            let is_event = matches!(fact.what, What::Started | What::Oom | What::Asked { .. });
            let since = self.since.entry(fact.runtime).or_insert_with(|| now.unix_seconds());
            if is_event {
                // where the clock was set back, what follows is not old
                *since = since.min(now.unix_seconds());
                if fact.at < *since - DISORDER {
                    continue;
                }
                *since = since.max(fact.at);
            }
            for turn in self.runs.tell(fact) {
                self.turn(now, turn);
            }
        }
    }

    fn turn(&mut self, now: Moment, turn: Turn) {
        match turn {
            Turn::Began(id) => {
                let name = self.runs.get(&id).map(|known| known.name.clone()).unwrap_or_default();
                self.totals.started(&name, now.unix_seconds());
            }
            Turn::Ended(end) => {
                let id = self.new_id();
                self.exits.push(OpenExit::new(id, *end, now));
            }
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Enters lines of the kernel log, in order. `None`: the log cannot be read now.
    pub fn log(&mut self, now: Moment, entries: Option<&[(Entry, Hint)]>, position: Position) {
        self.log_up = entries.is_some();
        for (entry, hint) in entries.unwrap_or_default() {
            match self.kernel.read(entry) {
                Some(Found::Kill { killed, context, group }) => {
                    let clues = Clues::new(context, group, hint.clone());
                    self.enter(now, entry, &killed, clues);
                }
                Some(Found::Duplicate { pid }) => self.duplicate(now, pid),
                None => {}
            }
        }
        if self.log_up {
            self.kernel.read_to(position);
        }
        self.log_read = self.log_up.then(|| now.unix_seconds());
    }

    /// Enters errors of GPUs. There is nothing to settle about them.
    pub fn gpu_errors(&mut self, errors: Vec<GpuError>) {
        for mut error in errors {
            error.id = self.new_id();
            self.changes.events.insert(error.id, Event::GpuError(error.clone()));
            self.said.push(Said::Settled(Event::GpuError(error)));
        }
    }

    /// The machine was set back to an earlier state without a reboot.
    pub fn rewound(&mut self, now_usec: u64) {
        self.kernel.rewound(now_usec);
    }

    fn enter(&mut self, now: Moment, entry: &Entry, killed: &Killed, clues: Clues) {
        let global = killed.global.or(clues.context.as_ref().map(|context| context.global)).unwrap_or(false);
        let mut evidence = vec![Evidence::new("kmsg", entry.text.to_string())];
        if let Some(context) = &clues.context {
            evidence.insert(0, Evidence::new("kmsg", context_text(context)));
        }
        let limit_cgroup = clues.context.as_ref().and_then(|context| context.oom_cgroup.as_deref());
        let kill = Kill {
            id: self.new_id(),
            at: now.unix_seconds_of_record(entry.position.usec, self.log_read),
            boot_id: Arc::clone(&self.setup.boot_id),
            kernel_usec: Some(entry.position.usec),
            pid: Some(killed.pid),
            process: killed.process.as_str().into(),
            scope: if global { Scope::Host } else { Scope::Container },
            anon_bytes: killed.anon_bytes,
            file_bytes: killed.file_bytes,
            shmem_bytes: killed.shmem_bytes,
            oom_score_adj: killed.oom_score_adj,
            limit_cgroup: limit_cgroup.unwrap_or_default().into(),
            evidence,
            ..Kill::unknown()
        };
        self.totals.add(Total::Host, 1);
        self.open.push(Open::new(kill, clues, now));
    }

    fn duplicate(&mut self, now: Moment, pid: u32) {
        self.totals.add(Total::Duplicates, 1);
        if let Some(open) = self.open.iter_mut().rev().find(|open| open.kill.pid == Some(pid)) {
            open.duplicates += 1;
            if let Some(id) = open.container.clone() {
                self.counters.explain(&id, 1, now.unix_seconds(), &self.runs, &open.clues.cgroups());
            }
        } else if let Some((_, Some(id))) = self.settled.iter().rev().find(|(settled, _)| *settled == pid) {
            self.counters.explain(&id.clone(), 1, now.unix_seconds(), &self.runs, &[]);
        }
    }

    /// Enters the kernel's counter, read after the log was drained. `None`: it cannot be read.
    pub fn counted(&mut self, now: Moment, counter: Option<u64>) {
        let Some(counter) = counter else {
            return if self.log_up { self.fill_by_time() } else { self.count_by_cgroups(now) };
        };
        let balance = self.kernel.compare(now, counter, self.log_up);
        for _ in 0..balance.lost {
            self.enter_gap(now, Evidence::new("vmstat", "the kernel counted a kill whose record is lost"));
        }
        for _ in 0..balance.late {
            // the newest kill of this step is that one, and no other
            if let Some(at) = self.open.iter().rposition(Open::is_new_record) {
                self.fill_gap(at);
            }
        }
    }

    /// The log came back and the kernel's counter did not: a record that is older than a kill of which only a cgroup's
    /// counter told is that kill's.
    fn fill_by_time(&mut self) {
        for record in
            (0..self.open.len()).rev().filter(|at| self.open[*at].is_new_record()).collect::<Vec<_>>()
        {
            let at = self.open[record].kill.at;
            let told = |kill: &Kill| kill.kernel_usec.is_none() && at <= kill.at;
            let mut gaps =
                self.open.iter().map(|open| &open.kill).chain(self.gaps.iter().map(|(_, kill)| kill));
            if gaps.any(told) {
                self.kernel.came_late();
                self.fill_gap(record);
            }
        }
    }

    fn enter_gap(&mut self, now: Moment, evidence: Evidence) {
        let kill = Kill {
            id: self.new_id(),
            at: now.unix_seconds(),
            boot_id: Arc::clone(&self.setup.boot_id),
            evidence: vec![evidence],
            ..Kill::unknown()
        };
        self.totals.add(Total::Host, 1);
        self.open.push(Open::new(kill, Clues::default(), now));
    }

    /// A record that was entered as a kill came after its gap.
    fn fill_gap(&mut self, at: usize) {
        let record = self.open.remove(at);
        self.totals.add(Total::Host, -1);
        let owner = match self.place(&record) {
            Some((Place::Container(id), _)) => Some(id),
            _ => None,
        };
        let Open { kill, clues, .. } = record;
        // the gap that was given to the same container, else one that is nobody's yet
        let fits = |open: &Open| (owner.is_some() && open.container == owner, open.container.is_none());
        let gaps = (0..self.open.len()).filter(|at| self.open[*at].kill.kernel_usec.is_none());
        if let Some(gap) = gaps.max_by_key(|at| fits(&self.open[*at])) {
            let open = &mut self.open[gap];
            open.kill.filled_by(kill);
            open.clues = clues;
            self.changes.events.insert(open.kill.id, Event::OomKill(open.kill.clone()));
        } else if let Some((_, mut gap)) = self.gaps.pop_back() {
            gap.filled_by(kill);
            self.changes.events.insert(gap.id, Event::OomKill(gap));
        }
    }

    /// Enters a sweep over the cgroups' counters. It comes before [`Machine::counted`].
    pub fn sweep(&mut self, now: Moment, readings: &[Reading], hierarchical: bool) {
        self.counters.enter(now, readings, hierarchical);
    }

    /// Nothing else counts: the containers' own counters must.
    fn count_by_cgroups(&mut self, now: Moment) {
        if !self.ownerless().is_empty() {
            return; // of before the others failed; these may be the same
        }
        for (id, kills) in self.counters.candidates() {
            for _ in 0..kills {
                self.kernel.told_by_cgroup();
                self.enter_gap(now, Evidence::new("cgroup", "only the container's own counter tells"));
                self.give(self.open.len() - 1, Place::Container(id.clone()), "cgroup");
            }
        }
    }

    /// A kill is open that the cgroups' counters may tell the owner of.
    pub fn wants_sweep(&self) -> bool {
        self.open.iter().any(|open| open.container.is_none())
    }

    /// Something is open: a step is due soon although nothing happens.
    pub fn waits(&self) -> bool {
        !self.open.is_empty() || !self.exits.is_empty() || self.kernel.waits()
    }

    /// Draws the conclusions, and returns what must be stored and what is to be said.
    pub fn settle(&mut self, now: Moment) -> (Changes, Vec<Said>) {
        self.attribute(now);
        for open in self.open.iter_mut().filter(|open| !open.said) {
            open.said = true;
            self.said.push(Said::Killed(Event::OomKill(open.kill.clone())));
            self.changes.events.insert(open.kill.id, Event::OomKill(open.kill.clone()));
        }
        self.close(now);
        self.decide_exits(now);
        self.gaps.retain(|(at, _)| now.since(*at) < RECORD_MAY_COME);
        self.gaps.drain(..self.gaps.len().saturating_sub(MOST_GAPS));
        if !self.kernel.waits() && self.ownerless().is_empty() {
            self.counters.give_up(now, SETTLES_AFTER);
        }
        // the kill that it counted is settled by now, also while others are open
        self.counters.give_up(now, COUNTED_LASTS);
        self.write(now);
        (std::mem::take(&mut self.changes), std::mem::take(&mut self.said))
    }

    /// A kill of which all is known: its number will not change any more.
    pub(super) fn close_kill(&mut self, now: Moment, open: Open) {
        let kill = open.kill;
        if kill.kernel_usec.is_none() {
            self.totals.add(Total::Gaps, 1);
            self.gaps.push_back((now, kill.clone()));
        }
        if let Some(pid) = kill.pid {
            self.settled.push_back((pid, open.container));
            if self.settled.len() > 64 {
                self.settled.pop_front();
            }
        }
        self.changes.notes.insert(format!("{OPEN_KEY}{}", kill.id), None);
        self.changes.events.insert(kill.id, Event::OomKill(kill.clone()));
        self.said.push(Said::Settled(Event::OomKill(kill)));
    }

    fn write(&mut self, now: Moment) {
        for open in &self.open {
            if self.changes.events.contains_key(&open.kill.id) {
                let noted = serde_json::to_string(&open.noted()).ok();
                self.changes.notes.insert(format!("{OPEN_KEY}{}", open.kill.id), noted);
            }
        }
        let runs = &self.runs;
        self.totals.write(&mut self.changes, |name| runs.iter().any(|(_, known)| known.name == *name));
        for id in self.runs.take_changed() {
            let known = self.runs.get(&id).filter(|known| known.run.is_some());
            let text = known.and_then(|known| serde_json::to_string(known).ok());
            self.changes.notes.insert(format!("{RUN_KEY}{}", id.as_str()), text);
        }
        for (inode, explained) in self.counters.take_changed() {
            self.changes.notes.insert(format!("{COUNTER_KEY}{inode}"), explained.map(|n| n.to_string()));
        }
        if self.forgot.is_none_or(|forgot| now.since(forgot) >= FORGET_EVERY) {
            self.forgot = Some(now);
            let before = now.unix_seconds() - self.setup.keep_ended.as_secs_f64().max(3600.0);
            let kills = self.open.iter().filter_map(|open| open.container.as_ref());
            let needed: HashSet<_> = kills.chain(self.exits.iter().map(|exit| &exit.id)).collect();
            for id in self.runs.forget(before, |id| needed.contains(id)) {
                self.changes.notes.insert(format!("{RUN_KEY}{}", id.as_str()), None);
            }
        }
        self.write_places();
    }

    /// How far the sources were read: stored when a fact is, and else only now and then, because reading old lines again
    /// that tell of no kill changes nothing.
    fn write_places(&mut self) {
        let account = self.kernel.account();
        let counts =
            |account: &Account| (account.records, account.duplicates, account.gaps, account.opened_at);
        let moved = self
            .stored_account
            .as_ref()
            .is_none_or(|stored| counts(stored) != counts(account) || stored.boot_id != account.boot_id);
        if moved || !self.changes.is_empty() {
            self.changes.notes.insert(ACCOUNT.to_owned(), serde_json::to_string(account).ok());
            self.stored_account = Some(account.clone());
            for (runtime, since) in &self.since {
                self.changes.notes.insert(format!("{SINCE_KEY}{runtime}"), Some(since.to_string()));
            }
        }
    }

    /// The figures now. The caller adds what it knows of the sources and the store.
    pub fn figures(&self, now: Moment) -> Figures {
        let shown_since = now.unix_seconds() - self.setup.keep_ended.as_secs_f64();
        let mut shown: Vec<(f64, &Name)> = Vec::new();
        for (_, known) in self.runs.iter().filter(|(_, known)| !known.hidden) {
            let until = match &known.run {
                Some(run) => run.ended.unwrap_or(f64::INFINITY),
                // it was killed in before anybody saw it run
                None => self.totals.figures(&known.name).last_kill.unwrap_or(0.0),
            };
            if until > shown_since {
                shown.push((until, &known.name));
            }
        }
        shown.sort_by(|one, other| other.0.total_cmp(&one.0));
        let running = shown.iter().take_while(|(until, _)| until.is_infinite()).count();
        shown.truncate(running + MOST_ENDED_SHOWN);
        let containers: BTreeMap<&Name, ContainerFigures> =
            shown.into_iter().map(|(_, name)| (name, self.totals.figures(name))).collect();
        Figures {
            host_kills: self.totals.get(Total::Host),
            host_process_kills: self.totals.get(Total::HostProcess),
            unattributed: self.totals.get(Total::Unattributed),
            gaps: self.totals.get(Total::Gaps),
            duplicate_lines: self.totals.get(Total::Duplicates),
            containers: containers.into_values().collect(),
            ..Figures::default()
        }
    }
}

fn context_text(context: &crate::parse::kernel_log::Context) -> String {
    let victim = context.task_cgroups.join(" or ");
    match (&context.oom_cgroup, context.global) {
        (Some(limit), _) => format!("the limit of {limit} was hit; the victim was in {victim}"),
        (None, true) => format!("the machine ran out of memory; the victim was in {victim}"),
        (None, false) => format!("a limit was hit; the victim was in {victim}"),
    }
}

impl Kill {
    /// A kill of which nothing is known.
    pub(super) fn unknown() -> Self {
        Self {
            id: 0,
            at: 0.0,
            boot_id: "".into(),
            kernel_usec: None,
            pid: None,
            process: "".into(),
            role: "".into(),
            whose: Whose::Open,
            victim: None,
            scope: Scope::Container,
            anon_bytes: None,
            file_bytes: None,
            shmem_bytes: None,
            oom_score_adj: None,
            limit_cgroup: "".into(),
            limit_bytes: None,
            method: "".into(),
            exchangeable: false,
            evidence: vec![],
            before: None,
        }
    }

    /// The record of a gap was found: what it says is known now.
    fn filled_by(&mut self, record: Kill) {
        let mut evidence = record.evidence;
        evidence.append(&mut self.evidence);
        let (id, whose, victim) = (self.id, self.whose.clone(), self.victim);
        let (role, method, before) = (Arc::clone(&self.role), Arc::clone(&self.method), self.before.take());
        let scope = if victim.is_some() { self.scope } else { record.scope };
        let exchangeable = self.exchangeable;
        *self = Self { id, whose, victim, scope, role, method, exchangeable, before, evidence, ..record };
    }
}

#[cfg(test)]
mod tests;
