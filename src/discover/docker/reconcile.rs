//! One connection: events go to the ledger, the set of running containers to the registry.
//!
//! The stream never waits for an inspect, and a response counts only if the container had no event since the request: a response
//! that arrives after the end is ignored.
//!
//! The containers are listed when the connection begins, and again every [`DockerResumeState::list_interval`], which heals what a
//! lost event leaves behind. Events from before a list go to the ledger and change nothing else, because the list is newer. The
//! results of the list are published after them, so that the ledger receives them in order. The end of a container that ran
//! before, does not run now and has no end event is published last: only then is it certain that no event will follow.

use std::collections::{HashMap, HashSet};

use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary};

use super::connection::DockerConnection;
use super::convert::{InspectResult, exists, is_recent, may_run, running};
use super::events::{Action, DockerEvent};
use super::{DockerResumeState, Watcher, is_too_large};
use crate::clock::Timestamp;
use crate::discover::reconcile::{FollowRequest, Responses};
use crate::discover::status_queries::StatusResult;
use crate::discover::{ConnectionState, ContainerId, ContainerRecord, EventKind, RuntimeEvent};

/// An event may be later than what it reports.
const EVENT_DELAY_SECONDS: f64 = 5.0;

/// Results of the newest list.
pub struct ListResult {
    /// Time of the request.
    pub at: Timestamp,
    /// Events for the containers that exist and run.
    pub state: Vec<RuntimeEvent>,
    /// Containers that ran before the list, and do not run now.
    pub lost: HashSet<ContainerId>,
    /// Of these, the ones that were inspected.
    pub ends: Vec<(ContainerId, InspectResult)>,
}

/// The state of one connection.
pub struct DockerReconciler<'a> {
    pub(super) watcher: &'a Watcher<'a>,
    pub(super) resume: &'a mut DockerResumeState,
    pub(super) listed: ListResult,
    pub(super) settled: bool,
    /// Runs that began, by their events, and were not inspected yet.
    began: HashMap<ContainerId, ContainerRecord>,
    /// Containers that were reported to exist.
    known: HashSet<ContainerId>,
    /// Containers whose inspect is too large to be repeated.
    oversized: HashSet<ContainerId>,
    pub(super) requests: Vec<FollowRequest>,
}

impl<'a> DockerReconciler<'a> {
    pub fn new(watcher: &'a Watcher<'a>, resume: &'a mut DockerResumeState) -> Self {
        Self {
            watcher,
            resume,
            listed: ListResult { at: Timestamp::now(), state: vec![], lost: HashSet::new(), ends: vec![] },
            settled: true,
            began: HashMap::new(),
            known: HashSet::new(),
            oversized: HashSet::new(),
            requests: vec![],
        }
    }

    /// Returns the whole second before the list: events from then on count as new.
    pub fn present_from(&self) -> u64 {
        (self.listed_at() as u64).saturating_sub(1)
    }

    /// Returns the Unix time of the list, by the clock as it is now: it may have been set back since, and events have its time.
    fn listed_at(&self) -> f64 {
        let moved = Timestamp::now().wall_moved_since(self.listed.at);
        (self.listed.at.unix_seconds() + moved.min(0.0)).max(0.0)
    }

    fn publish(&mut self, runtime_event: RuntimeEvent) {
        let socket = self.watcher.endpoint.socket.to_string_lossy().into();
        let runtime_event = RuntimeEvent { socket, ..runtime_event };
        self.resume.track(&runtime_event);
        self.watcher.source.publish([runtime_event]);
    }

    /// Schedules an inspect, which replaces an earlier one of the container.
    fn schedule_inspect(&mut self, id: &ContainerId) {
        let id = || id.as_str().to_owned();
        self.requests.extend([FollowRequest::Cancel(id()), FollowRequest::Query(id())]);
    }

    /// Returns the containers to inspect with a list.
    pub fn wanted(&self, list: &[ContainerSummary]) -> Vec<(String, bool)> {
        let running: HashSet<_> =
            list.iter().filter(|listed| may_run(listed)).filter_map(|listed| listed.id.as_deref()).collect();
        let started =
            list.iter().filter(|listed| self.needs_inspect(listed)).filter_map(|listed| listed.id.clone());
        let ended = self.resume.open.iter().filter(|id| !running.contains(id.as_str()));
        let ended = ended.filter(|id| !self.oversized.contains(id)).map(|id| id.as_str().to_owned());
        started.chain(ended).map(|id| (id, true)).collect()
    }

    /// Returns whether a listed container is to be inspected: it runs, and its start is not known or may be another one.
    fn needs_inspect(&self, listed: &ContainerSummary) -> bool {
        let Some(id) = listed.id.as_deref().map(ContainerId::new).filter(|_| may_run(listed)) else {
            return false;
        };
        let name = self.watcher.record_from_list(listed).map(|record| record.name);
        let state = self.watcher.source.lock();
        // another name: the event that renamed it was lost
        let is_known = state.running.get(&id).is_some_and(|record| {
            record.started.is_some() && name.as_ref().is_none_or(|name| record.name == *name)
        });
        let is_current = is_known && self.known.contains(&id) && !is_recent(listed);
        !is_current && !self.oversized.contains(&id)
    }

    /// Applies a list, and the responses of the containers that were inspected with it.
    pub fn apply_list(&mut self, list: &[ContainerSummary], mut responses: Responses<DockerConnection<'_>>) {
        if !self.settled {
            self.settle(); // an earlier list
        }
        self.settled = false;
        let at = self.listed.at.unix_seconds();
        let (mut present, mut there, mut ended) = (HashSet::new(), HashSet::new(), Vec::new());
        for listed in list {
            let Some(id) = listed.id.as_deref().map(ContainerId::new) else { continue };
            let record = self.watcher.record_from_list(listed);
            if !self.known.contains(&id)
                && let Some(record) = &record
            {
                self.listed.state.push(exists(record, at));
            }
            there.insert(id.clone());
            if !may_run(listed) {
                continue;
            }
            match responses.remove(id.as_str()).map(|response| self.read_inspect(&id, response)) {
                Some(Ok(found @ (InspectResult::Stopped { .. } | InspectResult::Gone))) => {
                    ended.push((id, found));
                    continue;
                }
                Some(Ok(InspectResult::Running(record, pid))) => {
                    self.listed.state.extend(running(&record, pid));
                    self.began.remove(&id);
                    self.watcher.source.add_running(record);
                }
                // it runs, by the list: keep a known record, otherwise use the list's data
                Some(Err(_)) | None => self.add_unless_known(record),
            }
            self.resume.open.insert(id.clone());
            present.insert(id);
        }
        self.resume.healed.retain(|id, _| there.contains(id));
        self.known = there;
        self.listed.lost = self.resume.open.difference(&present).cloned().collect();
        for (id, found) in ended {
            self.apply_result(&id, Ok(found));
        }
        for (id, response) in responses {
            self.apply_inspect(&ContainerId::new(&id), response);
        }
        self.end_oversized(list);
        // ended meanwhile: the registry finds them by comparing its inventories
        self.watcher.source.remove_running(self.resume.own.difference(&present));
        self.resume.own.extend(present);
        self.watcher.set_connection(ConnectionState::Up);
    }

    /// Ends the lost containers whose inspect is too large: their end is only known from the list.
    fn end_oversized(&mut self, list: &[ContainerSummary]) {
        for id in self.listed.lost.intersection(&self.oversized) {
            let listed = list.iter().find(|listed| listed.id.as_deref() == Some(id.as_str()));
            let record = listed.and_then(|listed| self.watcher.record_from_list(listed));
            let found = record.map_or(InspectResult::Gone, |record| InspectResult::Stopped {
                named: record.details(),
                exit_code: None,
                oom_flag: None,
                finished: None,
            });
            self.listed.ends.push((id.clone(), found));
        }
    }

    fn add_unless_known(&self, record: Option<ContainerRecord>) {
        let known = |record: &ContainerRecord| self.watcher.source.lock().running.contains_key(&record.id);
        if let Some(record) = record.filter(|record| !known(record)) {
            self.watcher.source.add_running(ContainerRecord { started: None, ..record });
        }
    }

    /// Converts the response of an inspect. A container whose response is too large is not inspected again.
    fn read_inspect(
        &mut self,
        id: &ContainerId,
        response: StatusResult<ContainerInspectResponse, Error>,
    ) -> Result<InspectResult, Error> {
        match response {
            Ok(Some(response)) => Ok(self.watcher.parse_inspect(response)),
            Ok(None) => Ok(InspectResult::Gone),
            Err(error) => {
                if is_too_large(&error) {
                    self.watcher.source.record_oversized(id.as_str());
                    self.oversized.insert(id.clone());
                }
                Err(error)
            }
        }
    }

    /// Publishes the results of the list after the events from before it, and inspects the lost containers.
    pub fn settle(&mut self) {
        self.settled = true;
        for runtime_event in std::mem::take(&mut self.listed.state) {
            self.publish(runtime_event);
        }
        for (id, found) in std::mem::take(&mut self.listed.ends) {
            self.publish_end(id, found);
        }
    }

    pub fn apply(&mut self, event: DockerEvent) {
        if !self.resume.seen.is_new(&event) {
            return;
        }
        if !self.settled && event.at > self.listed_at() {
            self.settle();
        }
        self.resume.since = Some(event.at);
        let (runtime, filter) = (self.watcher.endpoint.runtime, self.watcher.filter);
        let open = self.resume.open.contains(&event.id);
        let healed = self.resume.healed.get(&event.id).filter(|_| event.action == Action::Die && !open);
        let is_known = healed.is_some_and(|at| event.at <= at + EVENT_DELAY_SECONDS);
        if !is_known && let Some(runtime_event) = event.runtime_event(runtime, filter, open) {
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
                self.known.insert(event.id.clone());
                self.resume.own.insert(event.id.clone());
                if let Some(record) = event.record(runtime, filter) {
                    self.began.insert(event.id.clone(), record);
                }
                self.schedule_inspect(&event.id);
            }
            Action::Rename => self.schedule_inspect(&event.id), // of a starting container, it has the new name
            Action::Die | Action::Remove => {
                self.listed
                    .state
                    .retain(|runtime_event| runtime_event.id != event.id || event.at < runtime_event.at);
                self.requests.push(FollowRequest::Cancel(event.id.as_str().to_owned()));
                let began = self.began.remove(&event.id);
                self.watcher.source.end_run(&event.id, event.at, began);
            }
            Action::Create | Action::Oom | Action::Kill | Action::Stop => {}
        }
    }

    /// Applies the response of an inspect.
    pub fn apply_inspect(
        &mut self,
        id: &ContainerId,
        response: StatusResult<ContainerInspectResponse, Error>,
    ) {
        let response = self.read_inspect(id, response);
        self.apply_result(id, response);
    }

    fn apply_result(&mut self, id: &ContainerId, response: Result<InspectResult, Error>) {
        let began = self.began.remove(id);
        match response {
            Ok(InspectResult::Running(record, pid)) => {
                let runtime_event = running(&record, pid);
                self.listed.lost.remove(id);
                self.resume.own.insert(id.clone());
                self.watcher.source.add_running(record);
                match runtime_event {
                    Some(runtime_event) if self.settled => self.publish(runtime_event),
                    later => self.listed.state.extend(later),
                }
            }
            Ok(found) if self.listed.lost.contains(id) => match self.settled {
                true => self.publish_end(id.clone(), found),
                false => self.listed.ends.push((id.clone(), found)),
            },
            // already ended; with --rm there is nothing left to inspect, and the event has name, image and start
            Ok(InspectResult::Stopped { .. } | InspectResult::Gone) => {
                if began.is_some() {
                    self.watcher.source.end_run(id, Timestamp::now().unix_seconds(), began);
                }
            }
            Err(_) => {
                // use the event's data until an inspect succeeds; it has no exact start time
                self.add_unless_known(began.clone());
                self.began.extend(began.map(|record| (id.clone(), record)));
            }
        }
    }

    /// Publishes the end of a container that ended unnoticed, from its inspect.
    fn publish_end(&mut self, id: ContainerId, found: InspectResult) {
        if !self.listed.lost.remove(&id) {
            return; // an event reported it
        }
        if found == InspectResult::Gone && self.resume.has_siblings && !self.resume.own.contains(&id) {
            self.resume.open.remove(&id); // of another engine
            return;
        }
        let (named, finished, what) = match found {
            InspectResult::Stopped { named, exit_code, oom_flag, finished } => {
                (Some(named), finished, EventKind::Ended { exit_code, oom_flag })
            }
            _ => (None, None, EventKind::Ended { exit_code: None, oom_flag: None }),
        };
        let at = finished.unwrap_or_else(|| Timestamp::now().unix_seconds());
        self.resume.healed.insert(id.clone(), at);
        self.publish(RuntimeEvent {
            runtime: self.watcher.endpoint.runtime,
            socket: std::sync::Arc::default(),
            id,
            at,
            named,
            what,
        });
    }
}

#[cfg(test)]
mod tests;
