//! One connection's stream of events: what happened goes to the ledger, what runs to the registry.
//!
//! The stream never waits for an inspect. Inspects run beside it, a few at a time, and an answer counts only if nothing
//! has happened to the container since it was asked for: an answer that comes after the end enters nothing.
//!
//! The stream begins with what happened before the list. That is told to the ledger and changes nothing else, as the
//! list knows better. What the list found is told after that: whoever has heard of it has heard of all that happened
//! before. A container that ran and of whose end no event tells is inspected last: only then is it sure that none will come.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::query_parameters::EventsOptions;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::events::{ASKED_FOR, Action, Event};
use super::inspect::{Found, running};
use super::{INSPECTS, Memory, Watcher, not_understood};
use crate::clock::Moment;
use crate::discover::{ContainerId, Fact, Record, What};

/// The stream has told what happened before the list when it was silent for so long.
const SILENT: Duration = Duration::from_secs(1);
/// An inspect that failed is tried again after a pause, so many times in all.
const TRIES: (u8, Duration) = (3, Duration::from_secs(4));

/// What the list found.
pub struct Listed {
    /// Just before it was asked for.
    pub at: Moment,
    /// What there is, and what of it runs.
    pub state: Vec<Fact>,
    /// Containers that ran when we last heard of them, and do not run now.
    pub lost: HashSet<ContainerId>,
}

/// An inspect to be made.
struct Job {
    id: ContainerId,
    /// The question is outdated when it is no longer this container's turn.
    turn: u64,
    tries_left: u8,
    pause: Duration,
}

/// A container whose inspect is not answered.
struct Pending {
    turn: u64,
    /// The run that began, as its event tells it; `None` if only the name changed, or a lost container is asked about.
    began: Option<Record>,
}

/// The state of one connection.
pub struct Watch<'a> {
    watcher: &'a Watcher<'a>,
    memory: &'a mut Memory,
    listed: Listed,
    settled: bool,
    turns: u64,
    pending: HashMap<ContainerId, Pending>,
    waiting: VecDeque<Job>,
}

impl<'a> Watch<'a> {
    pub fn new(watcher: &'a Watcher<'a>, memory: &'a mut Memory, listed: Listed) -> Self {
        let (pending, waiting) = (HashMap::new(), VecDeque::new());
        Self { watcher, memory, listed, settled: false, turns: 0, pending, waiting }
    }

    /// The whole second before the list: events from then on count as present.
    fn present_from(&self) -> u64 {
        self.listed.at.unix_whole_seconds().saturating_sub(1)
    }

    /// Applies events until the stream breaks; returns why it did.
    pub async fn run(mut self, docker: &Docker) -> String {
        let only = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
        let filters = HashMap::from([
            ("type".to_owned(), only(&["container"])),
            ("event".to_owned(), only(&ASKED_FOR)),
        ]);
        let since = Some(self.memory.ask_from(self.present_from()).to_string());
        let options = EventsOptions { since, until: None, filters: Some(filters) };
        let mut events = std::pin::pin!(docker.events(Some(options)));
        let mut silence = std::pin::pin!(tokio::time::sleep(SILENT));
        let mut asked = FuturesUnordered::new();
        let watcher = self.watcher;
        loop {
            while asked.len() < INSPECTS
                && let Some(job) = self.next_job()
            {
                asked.push(async move {
                    tokio::time::sleep(job.pause).await;
                    let answer = watcher.inspect(docker, job.id.as_str()).await;
                    (job, answer)
                });
            }
            tokio::select! {
                biased; // what is known to have happened comes before an answer
                event = events.next() => match event {
                    Some(Ok(message)) => {
                        if let Some(event) = Event::read(message, Moment::now()) {
                            self.apply(event);
                        }
                        if !self.settled {
                            silence.set(tokio::time::sleep(SILENT));
                        }
                    }
                    Some(Err(error)) => {
                        if not_understood(&error) {
                            self.memory.since = None; // else it would be the first event again, and again
                        }
                        return error.to_string();
                    }
                    None => return "the daemon closed the event stream".to_owned(),
                },
                Some((job, answer)) = asked.next(), if !asked.is_empty() => self.answered(job, answer),
                () = &mut silence, if !self.settled => self.settle(),
            }
        }
    }

    fn next_job(&mut self) -> Option<Job> {
        let pending = &self.pending;
        let current = |job: &Job| pending.get(&job.id).is_some_and(|pending| pending.turn == job.turn);
        std::iter::from_fn(|| self.waiting.pop_front()).find(current)
    }

    fn tell(&mut self, fact: Fact) {
        self.memory.note(&fact);
        self.watcher.source.tell([fact]);
    }

    /// Asks about a container, and no longer for what was asked before.
    fn ask(&mut self, id: &ContainerId, began: Option<Record>) {
        self.turns += 1;
        self.pending.insert(id.clone(), Pending { turn: self.turns, began });
        let job = Job { id: id.clone(), turn: self.turns, tries_left: TRIES.0 - 1, pause: Duration::ZERO };
        self.waiting.push_back(job);
    }

    /// What happened before the list is told: now what the list found, and the search for the lost ones.
    fn settle(&mut self) {
        self.settled = true;
        for fact in std::mem::take(&mut self.listed.state) {
            self.tell(fact);
        }
        self.listed.lost.retain(|id| self.memory.open.contains(id));
        for id in self.listed.lost.clone() {
            self.ask(&id, None);
        }
    }

    fn apply(&mut self, event: Event) {
        if !self.memory.seen.is_new(&event) {
            return;
        }
        if !self.settled && event.at > self.listed.at.unix_seconds() {
            self.settle();
        }
        self.memory.since = Some(event.at);
        let (runtime, filter) = (self.watcher.endpoint.runtime, self.watcher.filter);
        let open = self.memory.open.contains(&event.id);
        if let Some(fact) = event.fact(runtime, filter, open) {
            self.tell(fact);
        }
        if matches!(event.action, Action::Start | Action::Die | Action::Remove) {
            self.listed.lost.remove(&event.id);
        }
        if event.at < self.present_from() as f64 {
            return; // older than the list, which knows better what runs
        }
        match event.action {
            Action::Start => {
                self.listed.state.retain(|fact| fact.id != event.id); // told when it is inspected again
                self.ask(&event.id, event.record(runtime, filter));
            }
            Action::Rename => {
                // of a container that is just starting, the answer to come has the new name
                let began = self.pending.remove(&event.id).and_then(|pending| pending.began);
                self.ask(&event.id, began);
            }
            Action::Die | Action::Remove => {
                self.listed.state.retain(|fact| fact.id != event.id || event.at < fact.at);
                let began = self.pending.remove(&event.id).and_then(|pending| pending.began);
                self.watcher.source.end(&event.id, event.at, began);
            }
            Action::Create | Action::Oom | Action::Kill | Action::Stop => {}
        }
    }

    fn answered(&mut self, job: Job, answer: Result<Found, Error>) {
        let Some(pending) = self.pending.remove(&job.id) else { return }; // it ended since
        if pending.turn != job.turn {
            self.pending.insert(job.id, pending); // something else has happened since, and is asked about
            return;
        }
        let lost = self.listed.lost.contains(&job.id);
        match answer {
            Ok(Found::Runs(record, pid)) => {
                let fact = running(&record, pid);
                self.watcher.source.enter(record);
                if let Some(fact) = fact {
                    self.tell(fact);
                }
            }
            Ok(found) if lost => self.tell_end(job.id, found),
            // already over, and with --rm nothing is left to inspect: the event itself has the essentials
            Ok(Found::Rests { .. } | Found::Gone) => {
                if pending.began.is_some() {
                    self.watcher.source.end(&job.id, Moment::now().unix_seconds(), pending.began);
                }
            }
            Err(_) => {
                // what the event says must do until the daemon answers; it has no exact time of the start
                let known = self.watcher.source.lock().running.contains_key(&job.id);
                if let Some(record) = pending.began.clone().filter(|_| !known) {
                    self.watcher.source.enter(Record { started: None, ..record });
                }
                if job.tries_left > 0 {
                    self.pending.insert(job.id.clone(), pending);
                    let tries_left = job.tries_left - 1;
                    self.waiting.push_back(Job { tries_left, pause: TRIES.1, ..job });
                }
            }
        }
    }

    /// The end of a container that ended while nobody listened, by what the runtime still knows of it.
    fn tell_end(&mut self, id: ContainerId, found: Found) {
        self.listed.lost.remove(&id);
        let (named, finished, what) = match found {
            Found::Rests { named, exit_code, oom_flag, finished } => {
                (Some(named), finished, What::Ended { exit_code, oom_flag })
            }
            _ => (None, None, What::Ended { exit_code: None, oom_flag: None }),
        };
        let at = finished.unwrap_or_else(|| Moment::now().unix_seconds());
        self.tell(Fact { runtime: self.watcher.endpoint.runtime, id, at, named, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::docker::events;
    use crate::discover::docker::tests::{counts, started_at, watcher_on};
    use crate::discover::{Named, Source};
    use std::sync::Arc;

    /// A connection whose list was taken just now, and ran these containers before.
    fn watch_on(lost: &[&str], test: impl FnOnce(&mut Watch<'_>, &Source)) {
        let source = Source::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            let open: HashSet<_> = lost.iter().map(|id| ContainerId::new(id)).collect();
            let mut memory = Memory::new(None, open.clone());
            let listed = Listed { at: Moment::now(), state: vec![], lost: open };
            test(&mut Watch::new(&watcher, &mut memory, listed), &source);
        });
    }

    /// An event of container `a`, so many seconds after now.
    fn event(action: &str, after: i64) -> Event {
        let nanos = (Moment::now().unix_whole_seconds() as i64 + after) * 1_000_000_000;
        events::tests::event("a", action, nanos, &[("name", "train"), ("image", "i"), ("exitCode", "7")])
    }

    fn told(source: &Source) -> Vec<What> {
        source.take_facts().into_iter().map(|fact| fact.what).collect()
    }

    fn runs() -> Result<Found, Error> {
        Ok(Found::Runs(started_at(10.0), Some(42)))
    }

    const ENDED: What = What::Ended { exit_code: Some(7), oom_flag: None };

    #[test]
    fn a_start_is_told_before_anything_is_asked_and_the_pid_when_it_is_known() {
        watch_on(&[], |watch, source| {
            watch.apply(event("start", 5));
            let started = source.take_facts();
            assert_eq!(started[0].what, What::Started);
            assert_eq!(&*started[0].named.as_ref().unwrap().name, "train");
            let job = watch.next_job().unwrap();
            watch.answered(job, runs());
            assert_eq!(source.take_facts()[0].at, 10.0, "the exact time of its start");
            assert_eq!(counts(source), (1, 0));
        });
    }

    #[test]
    fn an_answer_that_comes_after_the_end_enters_nothing() {
        watch_on(&[], |watch, source| {
            watch.apply(event("start", 5));
            let late = watch.next_job().unwrap();
            watch.apply(event("die", 6));
            watch.answered(late, runs());
            assert_eq!(counts(source), (0, 1), "it came and went");
            assert_eq!(told(source), [What::Started, ENDED]);
        });
    }

    #[test]
    fn an_answer_about_the_run_before_is_not_taken_for_the_new_one() {
        watch_on(&[], |watch, source| {
            watch.apply(event("start", 5));
            let late = watch.next_job().unwrap();
            watch.apply(event("die", 6));
            watch.apply(event("start", 7));
            watch.answered(late, runs());
            assert_eq!(counts(source), (0, 1));
            let job = watch.next_job().unwrap();
            watch.answered(job, runs());
            assert_eq!(counts(source), (1, 1));
        });
    }

    #[test]
    fn a_run_that_is_over_before_the_answer_has_come_and_gone() {
        watch_on(&[], |watch, source| {
            watch.apply(event("start", 5));
            let job = watch.next_job().unwrap();
            watch.answered(job, Ok(Found::Gone));
            watch.apply(event("die", 6));
            assert_eq!(counts(source), (0, 1));
        });
    }

    #[test]
    fn a_daemon_that_cannot_tell_is_asked_again_and_the_event_must_do_so_long() {
        watch_on(&[], |watch, source| {
            watch.apply(event("start", 5));
            let job = watch.next_job().unwrap();
            watch.answered(job, Err(Error::RequestTimeoutError));
            assert_eq!(source.lock().running[&ContainerId::new("a")].started, None);
            let again = watch.next_job().unwrap();
            assert_eq!(again.pause, TRIES.1);
            watch.answered(again, runs());
            assert_eq!(counts(source), (1, 0), "the same run");
            watch.apply(event("die", 6));
            assert_eq!(counts(source), (0, 1));
        });
    }

    #[test]
    fn a_new_name_while_it_starts_is_asked_about_and_the_run_is_not_lost() {
        watch_on(&[], |watch, source| {
            watch.apply(event("start", 5));
            watch.apply(event("rename", 6));
            let job = watch.next_job().unwrap();
            assert!(watch.next_job().is_none(), "the first question is outdated");
            watch.answered(job, Ok(Found::Gone));
            assert_eq!(counts(source), (0, 1));
        });
    }

    #[test]
    fn what_happened_before_the_list_is_told_once_and_changes_nothing_that_runs() {
        watch_on(&["a"], |watch, source| {
            watch
                .listed
                .state
                .extend(running(&Record { id: ContainerId::new("b"), ..started_at(3.0) }, Some(1)));
            source.lock().running.insert(ContainerId::new("a"), started_at(10.0));
            for _ in 0..2 {
                watch.apply(event("die", -100));
                watch.apply(event("start", -90));
            }
            assert_eq!(told(source), [ENDED, What::Started]);
            assert_eq!(counts(source), (1, 0));
            watch.apply(event("oom", 5));
            let now = [What::Running { pid: Some(1) }, What::Oom];
            assert_eq!(told(source), now, "what the list found comes after it, before what comes then");
        });
    }

    #[test]
    fn a_lost_container_ends_by_its_event_or_else_by_what_inspect_tells() {
        let named = Named { name: "train".into(), pod: None, image: "i".into(), labels_match: true };
        let rests = || Found::Rests {
            named: named.clone(),
            exit_code: Some(137),
            oom_flag: Some(true),
            finished: Some(20.0),
        };
        watch_on(&["a", "b", "c"], |watch, source| {
            watch.apply(event("die", -100));
            assert_eq!(told(source), [ENDED]);
            watch.settle();
            let (first, second) = (watch.next_job().unwrap(), watch.next_job().unwrap());
            assert!(watch.next_job().is_none(), "the event has told of the end of a");
            watch.answered(first, Ok(rests()));
            let fact = source.take_facts().remove(0);
            let ended = |exit_code, oom_flag| What::Ended { exit_code, oom_flag };
            assert_eq!(
                (fact.at, fact.named, fact.what),
                (20.0, Some(named.clone()), ended(Some(137), Some(true)))
            );
            watch.answered(second, Ok(Found::Gone));
            assert_eq!(told(source), [ended(None, None)]);
            assert!(watch.memory.open.is_empty());
        });
        watch_on(&["a"], |watch, source| {
            watch.settle();
            let late = watch.next_job().unwrap();
            watch.apply(event("die", 5));
            watch.answered(late, Ok(rests()));
            assert_eq!(told(source), [ENDED], "told once");
        });
    }
}
