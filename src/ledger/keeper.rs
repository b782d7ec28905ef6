//! The thread that keeps the ledger: reads the sources, lets the machine draw its conclusions, writes them down, and only
//! then puts the figures out.
//!
//! It is a thread of its own, so that a kill is noticed when the kernel logs it and not at the next cycle, and so that
//! neither a slow disk nor a hanging read of a cycle holds the other up. It waits in poll(2) for the bell that the
//! runtimes' tasks and the reader of the kernel log ring; beyond that it looks at the kernel's counter once per interval.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::desk::Desk;
use super::entries::Event;
use super::events_file::EventsFile;
use super::log_watch::LogWatch;
use super::machine::{Machine, Said, Setup};
use super::say;
use super::store::{Archive, Changes, Contents, Opened, Store, StoreError};
use super::witness::Witness;
use crate::clock::Moment;
use crate::collect::kernel_log::{KernelLog, Position, Way};
use crate::collect::oom_cgroups::CgroupCounters;
use crate::collect::oom_counter::OomCounter;
use crate::config::{Config, KernelLogChoice, StateSettings};
use crate::discover::{ContainerId, Fact, Hierarchy, Link, Source, What};
use crate::host::Roots;

/// A memledger that is being replaced is waited for so long.
const PREDECESSOR: Duration = Duration::from_secs(10);
/// Pause between two steps while something is open.
const SOON: Duration = Duration::from_millis(200);
/// syslog(2) is asked so often, and the counter looked at, also where sampling is slower.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// A source that could not be read is tried again after this.
const TRY_AGAIN: Duration = Duration::from_secs(10);
/// A disk that refused is asked again after this.
const COMMIT_AGAIN: Duration = Duration::from_secs(2);
/// Old events are removed so often.
const TIDY_EVERY: Duration = Duration::from_secs(600);
const UNFILED_KEY: &str = "unfiled:";
/// Before the name of a follower: the number of the last event that it is done with.
const ACKNOWLEDGED_KEY: &str = "acknowledged:";
/// Unix time of the ledger's first start, since which its counters count.
const BEGUN_KEY: &str = "begun";
/// Events that wait for a disk that is full; more are given up, oldest first.
const MOST_WAITING: usize = 20_000;

/// Everything that the thread needs.
#[derive(Debug)]
pub struct Keeper {
    desk: Arc<Desk>,
    machine: Machine,
    store: Option<Arc<Mutex<Store>>>,
    /// Facts are written to disk; `None` where they shall not be.
    store_up: Option<bool>,
    /// The store is a file, and not the memory that takes its place where none can be had.
    on_disk: bool,
    state: StateSettings,
    waiting: Changes,
    events_file: Option<EventsFile>,
    /// Settled events that are not in the events file yet.
    unfiled: Vec<Event>,
    filing_fails: bool,
    /// By follower, the last event that it was done with when the store was opened.
    acknowledged: BTreeMap<String, u64>,
    begun: f64,
    commit_failed: Option<Moment>,
    tidied: Option<Moment>,
    roots: Roots,
    sources: Vec<Arc<Source>>,
    use_runtimes: bool,
    choice: KernelLogChoice,
    log: Option<LogWatch>,
    log_failed: Option<Moment>,
    counter: Option<OomCounter>,
    counters: Option<CgroupCounters>,
    counters_up: bool,
    hierarchy: Option<Hierarchy>,
    swept: Option<Moment>,
    published: Option<Moment>,
    interval: Duration,
}

/// Stops the thread.
#[derive(Debug)]
pub struct Keeping {
    stop: Arc<AtomicBool>,
    desk: Arc<Desk>,
    thread: std::thread::JoinHandle<()>,
}

impl Keeping {
    /// Lets it finish its step, for at most so long: a stuck disk holds nobody up.
    pub fn stop(self, patience: Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.desk.bell.ring();
        let began = Moment::now();
        while !self.thread.is_finished() && Moment::now().since(began) < patience {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

impl Keeper {
    /// Opens the ledger where the settings say. Without a place to write to it is kept in memory, and that is said.
    ///
    /// # Errors
    /// Another memledger writes the same ledger: two would count everything twice.
    pub fn open(config: &Config) -> Result<Self, StoreError> {
        let (store, contents, store_up) = open_store(&config.state)?;
        let unfiled = store.iter().flat_map(|store| unfiled(store, &contents)).collect();
        let boot_id = config.roots.boot_id().unwrap_or_default();
        let now = Moment::now();
        let setup = Setup {
            boot_id: boot_id.into(),
            keep_ended: config.keep_ended,
            filter: config.filter.clone(),
            host_pids: config.roots.in_first_pid_namespace(),
            without_runtimes: !config.oom.runtime,
        };
        let hierarchy = Hierarchy::detect(&config.roots).ok();
        let log_began = newest_stamp(config).unwrap_or(now.kernel_usec());
        let desk = Arc::new(Desk::new(log_began));
        let (begun, waiting) = begun(&contents, store.as_ref().and_then(|store| store.oldest().ok()?), now);
        Ok(Self {
            machine: Machine::new(setup, &contents, now, log_began),
            desk,
            store: store.map(|store| Arc::new(Mutex::new(store))),
            store_up,
            on_disk: store_up == Some(true),
            state: config.state.clone(),
            waiting,
            events_file: config.state.events_file.as_deref().map(EventsFile::new),
            unfiled,
            filing_fails: false,
            acknowledged: acknowledged(&contents),
            begun,
            commit_failed: None,
            tidied: None,
            roots: config.roots.clone(),
            sources: vec![],
            use_runtimes: config.oom.runtime,
            choice: config.oom.kernel_log,
            log: None,
            log_failed: None,
            counter: None,
            counters: hierarchy.as_ref().map(CgroupCounters::new),
            counters_up: false,
            hierarchy,
            swept: None,
            published: None,
            interval: config.sample_interval,
        })
    }

    /// Where the cycle hands over and finds the figures.
    pub fn desk(&self) -> Arc<Desk> {
        Arc::clone(&self.desk)
    }

    /// Where the ledger is read; `None` if not even memory could be had for one.
    pub fn archive(&self) -> Option<Archive> {
        match &self.state.path {
            Some(directory) if self.on_disk => Some(Archive::Disk(directory.clone())),
            _ => self.store.clone().map(Archive::Memory),
        }
    }

    /// Containers of a runtime that ran when the ledger last knew.
    pub fn running(&self, runtime: &str) -> HashSet<ContainerId> {
        self.machine.running(runtime).cloned().collect()
    }

    /// The number of the last event that a follower has acknowledged at the desk, also in an earlier run; 0 before that.
    pub fn acknowledged(&self, follower: &str) -> u64 {
        self.acknowledged.get(follower).copied().unwrap_or(0)
    }

    /// Unix time of the ledger's first start.
    pub fn begun(&self) -> f64 {
        self.begun
    }

    /// Unix time of the last fact that a runtime told.
    pub fn since(&self, runtime: &str) -> Option<f64> {
        self.machine.since().get(runtime).copied()
    }

    /// Starts the thread. `alive` is dropped when it ends, also by a panic.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn start<T: Send + 'static>(
        mut self,
        sources: Vec<Arc<Source>>,
        alive: T,
    ) -> std::io::Result<Keeping> {
        self.sources = sources;
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, desk) = (Arc::clone(&stop), Arc::clone(&self.desk));
        let thread = std::thread::Builder::new().name("ledger".into()).spawn(move || {
            let _alive = alive;
            while !theirs.load(Ordering::Relaxed) {
                self.step(Moment::now());
                self.wait();
            }
            self.step(Moment::now());
        })?;
        Ok(Keeping { stop, desk, thread })
    }

    /// Waits until something happens or is due.
    fn wait(&mut self) {
        let asked = self.log.as_ref().is_none_or(|log| !log.is_waited_for());
        let rest = match () {
            () if self.machine.waits() => SOON.min(self.interval),
            () if asked => ASK_EVERY.min(self.interval),
            () => self.interval,
        };
        let timeout =
            rustix::event::Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
        let files = [self.desk.bell.fd(), self.counters.as_ref().and_then(CgroupCounters::fd)];
        let mut files: Vec<_> = files
            .iter()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN | PollFlags::PRI))
            .collect();
        if poll(&mut files, Some(&timeout)).is_err() {
            std::thread::park_timeout(SOON); // interrupted; never a busy loop
        }
        self.desk.bell.hush();
        if self.counters.as_ref().is_some_and(CgroupCounters::take_notifications) {
            self.swept = None; // at once: the cgroup may be gone soon
        }
    }

    fn step(&mut self, now: Moment) {
        if let Some(handed) = self.desk.take() {
            self.machine.see(now, &handed);
        }
        for source in &self.sources {
            let facts = source.take_facts();
            let facts = if self.use_runtimes { facts } else { names_only(facts) };
            self.machine.tell(now, &facts);
        }
        self.read_log(now);
        if self.counter.is_none() {
            self.counter = OomCounter::open(&self.roots).ok();
        }
        // a cgroup may have counted a kill since the log was read: that one's record comes first, then the host's counter,
        // or another kill would be taken for it
        if self.sweep(now) {
            self.read_log(now);
        }
        let counted = self.counter.as_mut().and_then(|counter| counter.read().ok());
        self.machine.counted(now, counted);
        self.machine.gpu_errors(self.desk.take_gpu_errors());
        let (changes, said) = self.machine.settle(now);
        let news = !changes.is_empty();
        self.waiting.merge(changes);
        self.note_unfiled(&said);
        for (follower, id) in self.desk.take_acknowledged() {
            self.waiting.notes.insert(format!("{ACKNOWLEDGED_KEY}{follower}"), Some(id.to_string()));
        }
        self.commit(now);
        self.tidy(now);
        said.iter().for_each(say::say);
        self.file();
        if news || self.published.is_none_or(|published| now.since(published) >= self.interval) {
            self.published = Some(now);
            self.publish(now, counted.is_some());
        }
    }

    /// Enters what the log has.
    fn read_log(&mut self, now: Moment) {
        self.open_log(now);
        match self.log.as_ref().map(LogWatch::take) {
            Some(Ok(taken)) => {
                if taken.lost {
                    tracing::warn!(
                        "the kernel log was overwritten before it was read; kills are counted without their records"
                    );
                }
                if taken.rewound {
                    tracing::warn!(
                        "the kernel log ends before the place that was read; this machine was set back"
                    );
                    self.machine.rewound(now.kernel_usec());
                }
                self.machine.log(now, Some(&taken.entries), taken.position);
            }
            Some(Err(error)) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "the kernel log cannot be read any more");
                self.log = None;
                self.log_failed = Some(now);
                self.machine.log(now, None, Position::default());
            }
            None => self.machine.log(now, None, Position::default()),
        }
    }

    fn open_log(&mut self, now: Moment) {
        let tried = self.log_failed.is_some_and(|failed| now.since(failed) < TRY_AGAIN);
        if self.log.is_some() || tried || self.choice == KernelLogChoice::Off {
            return;
        }
        let ways = ways(self.choice);
        for way in ways {
            match KernelLog::open(&self.roots, *way) {
                Ok(mut log) => {
                    if let Some(position) = self.machine.position() {
                        log.resume_after(position);
                    }
                    let witness = Witness::new(&self.roots, self.hierarchy.as_ref());
                    self.log = Some(LogWatch::start(log, witness, &self.desk));
                    self.log_failed = None;
                    break;
                }
                Err(error) => {
                    if self.log_failed.is_none() {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(
                            ?way,
                            error,
                            "the kernel log cannot be read in this way; memledger doctor says what to do"
                        );
                    }
                }
            }
        }
        if self.log.is_none() {
            self.log_failed = Some(now);
        }
        if let Some(counters) = &mut self.counters {
            counters.watch(self.log.is_none());
        }
    }

    /// Reads the cgroups' counters if that is due. True if it was.
    fn sweep(&mut self, now: Moment) -> bool {
        let due = self.swept.is_none_or(|swept| now.since(swept) >= self.interval);
        if !due && !self.machine.wants_sweep() {
            return false;
        }
        let Some(counters) = &mut self.counters else { return false };
        self.swept = Some(now);
        let (readings, outcome) = counters.sweep(now);
        if let (Err(error), true) = (&outcome, self.counters_up) {
            tracing::warn!(error = error as &dyn std::error::Error, "counters of cgroups cannot be read");
        }
        self.counters_up = outcome.is_ok();
        let hierarchical = counters.hierarchical();
        self.machine.sweep(now, &readings, hierarchical);
        true
    }

    /// Settled events stand in the store as not in the events file yet, until they are: a line may come twice there after
    /// a crash, but none is missing.
    fn note_unfiled(&mut self, said: &[Said]) {
        if self.events_file.is_none() {
            return;
        }
        for said in said {
            if let Said::Settled(event) = said {
                self.waiting.notes.insert(format!("{UNFILED_KEY}{}", event.id()), Some(String::new()));
                self.unfiled.push(event.clone());
            }
        }
    }

    fn file(&mut self) {
        let Some(file) = self.events_file.as_mut().filter(|_| !self.unfiled.is_empty()) else { return };
        match file.append(&self.unfiled) {
            Ok(()) => {
                self.filing_fails = false;
                for event in std::mem::take(&mut self.unfiled) {
                    self.waiting.notes.insert(format!("{UNFILED_KEY}{}", event.id()), None);
                }
            }
            Err(error) => {
                let written = error.written().min(self.unfiled.len());
                for event in self.unfiled.drain(..written) {
                    self.waiting.notes.insert(format!("{UNFILED_KEY}{}", event.id()), None);
                }
                if !std::mem::replace(&mut self.filing_fails, true) {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "events cannot be appended to --events.file; trying again");
                }
                let over = self.unfiled.len().saturating_sub(MOST_WAITING);
                for event in self.unfiled.drain(..over) {
                    self.waiting.notes.insert(format!("{UNFILED_KEY}{}", event.id()), None);
                }
            }
        }
    }

    fn commit(&mut self, now: Moment) {
        let Some(store) = &self.store else { return self.waiting = Changes::default() };
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        let rests = self.commit_failed.is_some_and(|failed| now.since(failed) < COMMIT_AGAIN);
        if !self.waiting.is_empty() && !rests {
            let outcome = store.commit(&self.waiting);
            if let (Err(error), true) = (&outcome, self.store_up != Some(false)) {
                let error: &dyn std::error::Error = error;
                tracing::error!(error, "the ledger cannot be written; it goes on in memory and tries again");
            }
            match outcome {
                Ok(()) => {
                    if !std::mem::take(&mut self.waiting).events.is_empty() {
                        self.desk.note_written();
                    }
                    self.store_up = self.store_up.map(|_| self.on_disk);
                    self.commit_failed = None;
                }
                Err(_) => {
                    self.store_up = self.store_up.map(|_| false);
                    self.commit_failed = Some(now);
                    while self.waiting.events.len() > MOST_WAITING {
                        self.waiting.events.pop_first();
                    }
                }
            }
        }
    }

    /// Removes old events. By age only when both clocks agree on how long it was since the last time: a wall clock that
    /// jumped ahead must not cost anybody his events.
    fn tidy(&mut self, now: Moment) {
        let last = self.tidied;
        if last.is_some_and(|last| now.since(last) < TIDY_EVERY) {
            return;
        }
        self.tidied = Some(now);
        let steady = last.is_some_and(|last| {
            (now.unix_seconds() - last.unix_seconds() - now.since(last).as_secs_f64()).abs() < 60.0
        });
        let keep = if steady { self.state.retention.as_secs_f64() } else { f64::MAX };
        let Some(store) = &self.store else { return };
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        match store.retain(now.unix_seconds(), keep, self.state.max_size_bytes) {
            Ok(0) => {}
            Ok(removed) => tracing::info!(removed, "old events removed from the ledger"),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "old events cannot be removed")
            }
        }
    }

    fn publish(&self, now: Moment, counted: bool) {
        let mut figures = self.machine.figures(now);
        // what was switched off on purpose, and a runtime that this host never had, is no source and no alarm
        let log = (self.choice != KernelLogChoice::Off).then(|| self.log.is_some());
        let links = self.sources.iter().map(|source| source.lock().link);
        let runtime = self.use_runtimes.then(|| runtimes_up(links)).flatten();
        let sources = [
            ("kmsg", log),
            ("vmstat", Some(counted)),
            ("cgroup", Some(self.counters_up)),
            ("runtime", runtime),
        ];
        figures.sources = sources.into_iter().filter_map(|(source, up)| Some((source, up?))).collect();
        figures.store_up = self.store_up;
        self.desk.publish(figures);
    }
}

/// Whether any runtime answers; `None` if there is none that ever did.
fn runtimes_up(links: impl IntoIterator<Item = Link>) -> Option<bool> {
    let were_there = links.into_iter().filter(|link| matches!(link, Link::Up | Link::Down));
    were_there.map(|link| link == Link::Up).reduce(|one, other| one || other)
}

/// Since when the ledger counts; the note of it, if it is new. A store from before there was a note has counted since its
/// oldest event at the latest.
fn begun(contents: &Contents, oldest: Option<f64>, now: Moment) -> (f64, Changes) {
    let stored = contents.notes.get(BEGUN_KEY).and_then(|text| text.parse().ok());
    let mut changes = Changes::default();
    let begun = stored.unwrap_or_else(|| oldest.map_or(now.unix_seconds(), |at| at.min(now.unix_seconds())));
    if stored.is_none() {
        changes.notes.insert(BEGUN_KEY.to_owned(), Some(begun.to_string()));
    }
    (begun, changes)
}

fn acknowledged(contents: &Contents) -> BTreeMap<String, u64> {
    let notes = contents.notes.iter();
    let pair = |(key, id): (&String, &String)| {
        Some((key.strip_prefix(ACKNOWLEDGED_KEY)?.to_owned(), id.parse().ok()?))
    };
    notes.filter_map(pair).collect()
}

/// Events that an earlier run of memledger settled and did not append to the events file any more.
fn unfiled(store: &Store, contents: &Contents) -> Vec<Event> {
    let ids = contents.notes.keys().filter_map(|key| key.strip_prefix(UNFILED_KEY)?.parse::<u64>().ok());
    let event = |id: u64| {
        store.settled_after(id.checked_sub(1)?, 1).ok()?.events.into_iter().find(|event| event.id() == id)
    };
    ids.filter_map(event).collect()
}

fn ways(choice: KernelLogChoice) -> &'static [Way] {
    match choice {
        KernelLogChoice::Auto => &[Way::Device, Way::Syslog],
        KernelLogChoice::Device => &[Way::Device],
        KernelLogChoice::Syslog => &[Way::Syslog],
        KernelLogChoice::Off => &[],
    }
}

/// The stamp of the log's newest record: the log's own clock, which parts from the others in time.
fn newest_stamp(config: &Config) -> Option<u64> {
    ways(config.oom.kernel_log).iter().find_map(|way| {
        let mut log = KernelLog::open(&config.roots, *way).ok()?;
        log.read().ok()?;
        Some(log.position().usec).filter(|usec| *usec > 0)
    })
}

/// What names a container, without what happened to it.
fn names_only(facts: Vec<Fact>) -> Vec<Fact> {
    let named = facts.into_iter().filter(|fact| fact.named.is_some());
    named
        .map(|fact| match fact.what {
            What::Renamed => fact,
            _ => Fact { what: What::Exists, ..fact },
        })
        .collect()
}

fn open_store(settings: &StateSettings) -> Result<(Option<Store>, Contents, Option<bool>), StoreError> {
    let in_memory = |asked: bool| {
        let store = Store::in_memory().map_err(|error| tracing::error!(%error, "no store in memory")).ok();
        Ok((store, Contents::default(), (!asked).then_some(false)))
    };
    let Some(directory) = &settings.path else { return in_memory(true) };
    match Store::open(directory, PREDECESSOR) {
        Ok(Opened { store, contents, moved_aside }) => {
            if let Some(aside) = moved_aside {
                let aside: PathBuf = aside;
                tracing::error!(moved_to = %aside.display(), "the ledger's file was damaged; it was moved aside and a new one begun, with all counts at 0");
            }
            Ok((Some(store), contents, Some(true)))
        }
        Err(error @ StoreError::Held { .. }) => Err(error),
        Err(error) => {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, "the ledger is kept in memory and ends with memledger");
            in_memory(false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_was_never_there_is_neither_up_nor_down() {
        assert_eq!(runtimes_up([]), None);
        assert_eq!(runtimes_up([Link::Starting, Link::NoSocket]), None);
        assert_eq!(runtimes_up([Link::NoSocket, Link::Down]), Some(false));
        assert_eq!(runtimes_up([Link::Down, Link::Up]), Some(true));
    }

    #[test]
    fn a_store_without_a_note_of_its_begin_has_counted_since_its_oldest_event() {
        let (contents, now) = (Contents::default(), Moment::now());
        let (since, changes) = begun(&contents, Some(1e9), now);
        assert_eq!((since, &changes.notes[BEGUN_KEY]), (1e9, &Some("1000000000".to_owned())));
        assert_eq!(begun(&contents, None, now).0, now.unix_seconds(), "a new one");
        assert_eq!(begun(&contents, Some(9e9), now).0, now.unix_seconds(), "the clock was set back");
    }
}
