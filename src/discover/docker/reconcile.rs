//! One connection's event stream: events go to the ledger, the set of running containers to the registry.
//!
//! The stream never waits for an inspect. A few inspects run concurrently, and a response counts only if the container had no
//! event since the request: a response that arrives after the end is ignored.
//!
//! The stream begins with events from before the list. They go to the ledger and change nothing else, because the list is newer.
//! The results of the list are published after them, so that the ledger receives them in order. A container that ran before,
//! does not run now and has no end event is inspected last: only then is it certain that no event will follow.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::query_parameters::EventsOptions;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::convert::{InspectResult, running};
use super::events::{Action, DockerEvent, EVENT_TYPES};
use super::{Allowance, DockerResumeState, MAX_INSPECTS, Watcher, is_too_large, is_unparsable};
use crate::clock::Timestamp;
use crate::discover::{ContainerId, ContainerRecord, EventKind, RuntimeEvent};

/// Idle time after which the stream has delivered all events from before the list.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of attempts of an inspect, and the delay between them.
const INSPECT_RETRY: (u8, Duration) = (3, Duration::from_secs(4));

/// Results of the list.
pub struct Listed {
    /// Time of the request.
    pub at: Timestamp,
    /// Events for the containers that exist and run.
    pub state: Vec<RuntimeEvent>,
    /// Containers that ran before the connection, and do not run now.
    pub lost: HashSet<ContainerId>,
}

/// A scheduled inspect.
struct InspectJob {
    id: ContainerId,
    /// The job is outdated if the container has a newer one.
    generation: u64,
    attempts_left: u8,
    pause: Duration,
}

/// A container with a pending inspect.
struct PendingInspect {
    generation: u64,
    /// The run that began, from its event; `None` after a rename, or for a lost container.
    began: Option<ContainerRecord>,
}

/// The state of one connection.
pub struct DockerReconciler<'a> {
    watcher: &'a Watcher<'a>,
    resume: &'a mut DockerResumeState,
    listed: Listed,
    settled: bool,
    last_generation: u64,
    pending: HashMap<ContainerId, PendingInspect>,
    waiting: VecDeque<InspectJob>,
}

impl<'a> DockerReconciler<'a> {
    pub fn new(watcher: &'a Watcher<'a>, resume: &'a mut DockerResumeState, listed: Listed) -> Self {
        let (pending, waiting) = (HashMap::new(), VecDeque::new());
        Self { watcher, resume, listed, settled: false, last_generation: 0, pending, waiting }
    }

    /// Returns the whole second before the list: events from then on count as new.
    fn present_from(&self) -> u64 {
        self.listed.at.unix_whole_seconds().saturating_sub(1)
    }

    /// Applies events until the stream breaks; returns the reason.
    pub async fn run(mut self, docker: &Docker, allowance: &Allowance) -> String {
        let only = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
        let filters = HashMap::from([
            ("type".to_owned(), only(&["container"])),
            ("event".to_owned(), only(&EVENT_TYPES)),
        ]);
        let since = Some(self.resume.events_since(self.present_from()).to_string());
        let options = EventsOptions { since, until: None, filters: Some(filters) };
        let mut events = std::pin::pin!(docker.events(Some(options)));
        let mut idle = std::pin::pin!(tokio::time::sleep(SETTLE_TIMEOUT));
        let mut in_flight = FuturesUnordered::new();
        let watcher = self.watcher;
        loop {
            while in_flight.len() < MAX_INSPECTS
                && let Some(job) = self.next_job()
            {
                in_flight.push(async move {
                    tokio::time::sleep(job.pause).await;
                    let response = watcher.inspect(docker, job.id.as_str()).await;
                    (job, response)
                });
            }
            tokio::select! {
                biased; // events first, so that they invalidate older responses
                event = events.next() => match event {
                    Some(Ok(message)) => {
                        allowance.renew();
                        if let Some(event) = DockerEvent::read(message, Timestamp::now()) {
                            self.apply(event);
                        }
                        if !self.settled {
                            idle.set(tokio::time::sleep(SETTLE_TIMEOUT));
                        }
                    }
                    Some(Err(error)) => {
                        if allowance.is_exceeded() {
                            self.watcher.source.record_oversized("an event");
                        }
                        if is_unparsable(&error) || allowance.is_exceeded() {
                            self.resume.since = None; // otherwise every connection would begin with the same event
                        }
                        return error.to_string();
                    }
                    None => return "the daemon closed the event stream".to_owned(),
                },
                Some((job, response)) = in_flight.next(), if !in_flight.is_empty() => self.apply_inspect(job, response),
                () = &mut idle, if !self.settled => self.settle(),
            }
        }
    }

    fn next_job(&mut self) -> Option<InspectJob> {
        let pending = &self.pending;
        let current = |job: &InspectJob| {
            pending.get(&job.id).is_some_and(|pending| pending.generation == job.generation)
        };
        std::iter::from_fn(|| self.waiting.pop_front()).find(current)
    }

    fn publish(&mut self, runtime_event: RuntimeEvent) {
        self.resume.track(&runtime_event);
        self.watcher.source.publish([runtime_event]);
    }

    /// Schedules an inspect, which replaces an earlier one of the container.
    fn schedule_inspect(&mut self, id: &ContainerId, began: Option<ContainerRecord>) {
        self.last_generation += 1;
        self.pending.insert(id.clone(), PendingInspect { generation: self.last_generation, began });
        let job = InspectJob {
            id: id.clone(),
            generation: self.last_generation,
            attempts_left: INSPECT_RETRY.0 - 1,
            pause: Duration::ZERO,
        };
        self.waiting.push_back(job);
    }

    /// Publishes the results of the list after the events from before it, and inspects the lost containers.
    fn settle(&mut self) {
        self.settled = true;
        for runtime_event in std::mem::take(&mut self.listed.state) {
            self.publish(runtime_event);
        }
        self.listed.lost.retain(|id| self.resume.open.contains(id));
        for id in self.listed.lost.clone() {
            self.schedule_inspect(&id, None);
        }
    }

    fn apply(&mut self, event: DockerEvent) {
        if !self.resume.seen.is_new(&event) {
            return;
        }
        if !self.settled && event.at > self.listed.at.unix_seconds() {
            self.settle();
        }
        self.resume.since = Some(event.at);
        let (runtime, filter) = (self.watcher.endpoint.runtime, self.watcher.filter);
        let open = self.resume.open.contains(&event.id);
        if let Some(runtime_event) = event.runtime_event(runtime, filter, open) {
            self.publish(runtime_event);
        }
        if matches!(event.action, Action::Start | Action::Die | Action::Remove) {
            self.listed.lost.remove(&event.id);
        }
        if event.at < self.present_from() as f64 {
            return; // older than the list, which has the current state
        }
        match event.action {
            Action::Start => {
                self.listed.state.retain(|runtime_event| runtime_event.id != event.id); // published after the inspect
                self.schedule_inspect(&event.id, event.record(runtime, filter));
            }
            Action::Rename => {
                // of a starting container, the new inspect has the new name
                let began = self.pending.remove(&event.id).and_then(|pending| pending.began);
                self.schedule_inspect(&event.id, began);
            }
            Action::Die | Action::Remove => {
                self.listed
                    .state
                    .retain(|runtime_event| runtime_event.id != event.id || event.at < runtime_event.at);
                let began = self.pending.remove(&event.id).and_then(|pending| pending.began);
                self.watcher.source.end_run(&event.id, event.at, began);
            }
            Action::Create | Action::Oom | Action::Kill | Action::Stop => {}
        }
    }

    fn apply_inspect(&mut self, job: InspectJob, response: Result<InspectResult, Error>) {
        let Some(pending) = self.pending.remove(&job.id) else { return }; // it has ended since the request
        if pending.generation != job.generation {
            self.pending.insert(job.id, pending); // a newer inspect is pending
            return;
        }
        let lost = self.listed.lost.contains(&job.id);
        match response {
            Ok(InspectResult::Running(record, pid)) => {
                let runtime_event = running(&record, pid);
                self.watcher.source.add_running(record);
                if let Some(runtime_event) = runtime_event {
                    self.publish(runtime_event);
                }
            }
            Ok(found) if lost => self.publish_end(job.id, found),
            // already ended; with --rm there is nothing left to inspect, and the event has name, image and start
            Ok(InspectResult::Stopped { .. } | InspectResult::Gone) => {
                if pending.began.is_some() {
                    self.watcher.source.end_run(&job.id, Timestamp::now().unix_seconds(), pending.began);
                }
            }
            Err(error) => {
                // use the event's data until an inspect succeeds; it has no exact start time
                let known = self.watcher.source.lock().running.contains_key(&job.id);
                if let Some(record) = pending.began.clone().filter(|_| !known) {
                    self.watcher.source.add_running(ContainerRecord { started: None, ..record });
                }
                if job.attempts_left > 0 && !is_too_large(&error) {
                    self.pending.insert(job.id.clone(), pending);
                    let attempts_left = job.attempts_left - 1;
                    self.waiting.push_back(InspectJob { attempts_left, pause: INSPECT_RETRY.1, ..job });
                }
            }
        }
    }

    /// Publishes the end of a container that ended while disconnected, from its inspect.
    fn publish_end(&mut self, id: ContainerId, found: InspectResult) {
        self.listed.lost.remove(&id);
        let (named, finished, what) = match found {
            InspectResult::Stopped { named, exit_code, oom_flag, finished } => {
                (Some(named), finished, EventKind::Ended { exit_code, oom_flag })
            }
            _ => (None, None, EventKind::Ended { exit_code: None, oom_flag: None }),
        };
        let at = finished.unwrap_or_else(|| Timestamp::now().unix_seconds());
        self.publish(RuntimeEvent { runtime: self.watcher.endpoint.runtime, id, at, named, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::docker::events;
    use crate::discover::docker::tests::{counts, started_at, watcher_on};
    use crate::discover::{ContainerDetails, RuntimeState};
    use std::sync::Arc;

    /// A connection with a new list, where these containers ran before.
    fn reconciler_on(lost: &[&str], test: impl FnOnce(&mut DockerReconciler<'_>, &RuntimeState)) {
        let source = RuntimeState::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            let open: HashSet<_> = lost.iter().map(|id| ContainerId::new(id)).collect();
            let mut resume = DockerResumeState::new(None, open.clone());
            let listed = Listed { at: Timestamp::now(), state: vec![], lost: open };
            test(&mut DockerReconciler::new(&watcher, &mut resume, listed), &source);
        });
    }

    /// An event of container `a`, this many seconds after now.
    fn event(action: &str, after: i64) -> DockerEvent {
        let nanos = (Timestamp::now().unix_whole_seconds() as i64 + after) * 1_000_000_000;
        events::tests::event("a", action, nanos, &[("name", "train"), ("image", "i"), ("exitCode", "7")])
    }

    fn reported(source: &RuntimeState) -> Vec<EventKind> {
        source.drain_events().into_iter().map(|runtime_event| runtime_event.what).collect()
    }

    fn runs() -> Result<InspectResult, Error> {
        Ok(InspectResult::Running(started_at(10.0), Some(42)))
    }

    const ENDED: EventKind = EventKind::Ended { exit_code: Some(7), oom_flag: None };

    #[test]
    fn reports_start_at_once_and_pid_after_inspect() {
        reconciler_on(&[], |reconciler, source| {
            reconciler.apply(event("start", 5));
            let started = source.drain_events();
            assert_eq!(started[0].what, EventKind::Started);
            assert_eq!(&*started[0].named.as_ref().unwrap().name, "train");
            let job = reconciler.next_job().unwrap();
            reconciler.apply_inspect(job, runs());
            assert_eq!(source.drain_events()[0].at, 10.0, "the exact start time");
            assert_eq!(counts(source), (1, 0));
        });
    }

    #[test]
    fn response_after_end_is_ignored() {
        reconciler_on(&[], |reconciler, source| {
            reconciler.apply(event("start", 5));
            let late = reconciler.next_job().unwrap();
            reconciler.apply(event("die", 6));
            reconciler.apply_inspect(late, runs());
            assert_eq!(counts(source), (0, 1), "it started and ended");
            assert_eq!(reported(source), [EventKind::Started, ENDED]);
        });
    }

    #[test]
    fn response_for_earlier_run_is_ignored() {
        reconciler_on(&[], |reconciler, source| {
            reconciler.apply(event("start", 5));
            let late = reconciler.next_job().unwrap();
            reconciler.apply(event("die", 6));
            reconciler.apply(event("start", 7));
            reconciler.apply_inspect(late, runs());
            assert_eq!(counts(source), (0, 1));
            let job = reconciler.next_job().unwrap();
            reconciler.apply_inspect(job, runs());
            assert_eq!(counts(source), (1, 1));
        });
    }

    #[test]
    fn run_that_ends_before_the_response_is_recorded() {
        reconciler_on(&[], |reconciler, source| {
            reconciler.apply(event("start", 5));
            let job = reconciler.next_job().unwrap();
            reconciler.apply_inspect(job, Ok(InspectResult::Gone));
            reconciler.apply(event("die", 6));
            assert_eq!(counts(source), (0, 1));
        });
    }

    #[test]
    fn failed_inspect_is_retried_and_event_used_meanwhile() {
        reconciler_on(&[], |reconciler, source| {
            reconciler.apply(event("start", 5));
            let job = reconciler.next_job().unwrap();
            reconciler.apply_inspect(job, Err(Error::RequestTimeoutError));
            assert_eq!(source.lock().running[&ContainerId::new("a")].started, None);
            let again = reconciler.next_job().unwrap();
            assert_eq!(again.pause, INSPECT_RETRY.1);
            reconciler.apply_inspect(again, runs());
            assert_eq!(counts(source), (1, 0), "the same run");
            reconciler.apply(event("die", 6));
            assert_eq!(counts(source), (0, 1));
        });
    }

    #[test]
    fn rename_during_start_inspects_again() {
        reconciler_on(&[], |reconciler, source| {
            reconciler.apply(event("start", 5));
            reconciler.apply(event("rename", 6));
            let job = reconciler.next_job().unwrap();
            assert!(reconciler.next_job().is_none(), "the first job is outdated");
            reconciler.apply_inspect(job, Ok(InspectResult::Gone));
            assert_eq!(counts(source), (0, 1));
        });
    }

    #[test]
    fn events_before_the_list_are_reported_once() {
        reconciler_on(&["a"], |reconciler, source| {
            reconciler
                .listed
                .state
                .extend(running(&ContainerRecord { id: ContainerId::new("b"), ..started_at(3.0) }, Some(1)));
            source.lock().running.insert(ContainerId::new("a"), started_at(10.0));
            for _ in 0..2 {
                reconciler.apply(event("die", -100));
                reconciler.apply(event("start", -90));
            }
            assert_eq!(reported(source), [ENDED, EventKind::Started]);
            assert_eq!(counts(source), (1, 0));
            reconciler.apply(event("oom", 5));
            let now = [EventKind::Running { pid: Some(1) }, EventKind::Oom];
            assert_eq!(reported(source), now, "results of the list come before newer events");
        });
    }

    #[test]
    fn lost_container_ends_by_event_or_inspect() {
        let named =
            ContainerDetails { name: "train".into(), pod: None, image: "i".into(), labels_match: true };
        let stopped = || InspectResult::Stopped {
            named: named.clone(),
            exit_code: Some(137),
            oom_flag: Some(true),
            finished: Some(20.0),
        };
        reconciler_on(&["a", "b", "c"], |reconciler, source| {
            reconciler.apply(event("die", -100));
            assert_eq!(reported(source), [ENDED]);
            reconciler.settle();
            let (first, second) = (reconciler.next_job().unwrap(), reconciler.next_job().unwrap());
            assert!(reconciler.next_job().is_none(), "the event reported the end of a");
            reconciler.apply_inspect(first, Ok(stopped()));
            let runtime_event = source.drain_events().remove(0);
            let ended = |exit_code, oom_flag| EventKind::Ended { exit_code, oom_flag };
            assert_eq!(
                (runtime_event.at, runtime_event.named, runtime_event.what),
                (20.0, Some(named.clone()), ended(Some(137), Some(true)))
            );
            reconciler.apply_inspect(second, Ok(InspectResult::Gone));
            assert_eq!(reported(source), [ended(None, None)]);
            assert!(reconciler.resume.open.is_empty());
        });
        reconciler_on(&["a"], |reconciler, source| {
            reconciler.settle();
            let late = reconciler.next_job().unwrap();
            reconciler.apply(event("die", 5));
            reconciler.apply_inspect(late, Ok(stopped()));
            assert_eq!(reported(source), [ENDED], "reported once");
        });
    }
}
