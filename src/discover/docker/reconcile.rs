//! Turns the lists and the events of one connection into containers for the registry, and into events for the ledger.
//!
//! **The list is the inventory**: what it has runs, and what it lacks does not. In a list only what is new is inspected. The first
//! one of a connection has all containers, as has one every [`DockerResumeState::list_interval`], which heals what a lost event leaves
//! behind.
//!
//! **Events go to the ledger**, and call for a list of the containers that started or have another name: a list costs the daemon
//! time for each container in it. An end also removes the container, so that another run of it is new to the next list. A
//! container that starts and ends between two lists is known to the ledger alone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary};
use tokio::sync::Semaphore;

use super::connection::DockerConnection;
use super::convert::{Inspected, is_recent, may_have_ended_within, may_run};
use super::events::{Action, DockerEvent};
use super::lenient::requested_end;
use super::{DockerResumeState, Watcher, is_too_large};
use crate::clock::Timestamp;
use crate::discover::reconcile::Responses;
use crate::discover::status_queries::StatusResult;
use crate::discover::{
    ConnectionState, ContainerId, ContainerRecord, ContainerSpec, EventKind, RuntimeEvent, RuntimeKind,
};

/// Time for a query of [`DockerReconciler::query_request`], and the maximum number at a time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_REQUEST_QUERIES: usize = 8;
/// So many seconds before an end a request to stop is placed of which only that is known.
const REQUEST_BEFORE_END: f64 = 0.001;
/// An event may be later than what it reports.
const EVENT_DELAY_SECONDS: f64 = 5.0;
const UNKNOWN_END: EventKind = EventKind::Ended { exit_code: None, oom_flag: None };

/// The kind of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListKind {
    /// The first one of a connection: a full one.
    First,
    /// With stopped containers.
    Full,
    /// Those that an event named.
    Changed,
}

/// The state of one connection.
pub struct DockerReconciler<'a> {
    pub(super) watcher: &'a Watcher<'a>,
    pub(super) resume: &'a mut DockerResumeState,
    /// The kind of the newest list, and the time of its request.
    pub(super) kind: ListKind,
    pub(super) listed_at: Timestamp,
    /// Containers whose inspect is too large to be repeated.
    oversized: HashSet<ContainerId>,
    /// Containers that started or were renamed since they were listed, or could not be inspected.
    pub(super) changed: HashSet<ContainerId>,
    /// When the runs that are in progress began, by their events: one may end before it is listed.
    began: HashMap<ContainerId, f64>,
    /// Containers that were sent a signal since they began.
    signalled: HashSet<ContainerId>,
    /// Limits the queries of [`DockerReconciler::query_request`].
    queries: Arc<Semaphore>,
    /// Unix time up to which the events of this socket are known; `None` if it is new to the ledger.
    absent_since: Option<f64>,
    /// Containers that ended by an event since then.
    reported_ends: HashSet<ContainerId>,
    /// Containers that may have ended unnoticed, and could not be inspected yet.
    uninspected: HashSet<ContainerId>,
}

impl<'a> DockerReconciler<'a> {
    pub fn new(watcher: &'a Watcher<'a>, resume: &'a mut DockerResumeState) -> Self {
        let (kind, listed_at) = (ListKind::First, Timestamp::now());
        let absent_since = resume.since;
        let (oversized, changed) = (HashSet::new(), HashSet::new());
        let (reported_ends, uninspected) = (HashSet::new(), HashSet::new());
        Self {
            watcher,
            resume,
            kind,
            listed_at,
            oversized,
            changed,
            began: HashMap::new(),
            signalled: HashSet::new(),
            queries: Arc::new(Semaphore::new(MAX_REQUEST_QUERIES)),
            absent_since,
            reported_ends,
            uninspected,
        }
    }

    /// Returns whether a container may have ended while no events were read, without an event: the engine keeps few, and a health check is
    /// three of them.
    fn may_have_ended_unnoticed(&self, listed: &ContainerSummary) -> bool {
        let id = listed.id.as_deref().map(ContainerId::new).filter(|_| !may_run(listed));
        let Some(id) = id else { return false };
        let absence = self.absent_since.map(|since| self.listed_at.unix_seconds() - since);
        let is_recent =
            || absence.is_some_and(|absence| may_have_ended_within(listed, absence + EVENT_DELAY_SECONDS));
        match self.kind {
            ListKind::First => {
                !self.reported_ends.contains(&id) && !self.resume.open.contains(&id) && is_recent()
            }
            ListKind::Full => self.uninspected.contains(&id),
            ListKind::Changed => false,
        }
    }

    fn publish(&mut self, runtime_event: RuntimeEvent) {
        let socket = self.watcher.endpoint.socket.to_string_lossy().into();
        let runtime_event = self.watcher.of_engine(RuntimeEvent { socket, ..runtime_event });
        self.resume.track(&runtime_event);
        self.watcher.source.publish([runtime_event]);
    }

    /// Returns the containers to inspect with a list: what is new, with a full one what ran before and does not run now, and with the first
    /// one what may have ended unnoticed.
    pub fn wanted(&self, list: &[ContainerSummary]) -> Vec<(String, bool)> {
        let running: HashSet<_> =
            list.iter().filter(|listed| may_run(listed)).filter_map(|listed| listed.id.as_deref()).collect();
        let new =
            list.iter().filter(|listed| self.needs_inspect(listed)).filter_map(|listed| listed.id.clone());
        let open = self.resume.open.iter().filter(|_| self.kind != ListKind::Changed);
        let ended = open.filter(|id| !running.contains(id.as_str()) && !self.oversized.contains(id));
        let ended = ended.map(|id| id.as_str().to_owned());
        let unnoticed = list.iter().filter(|listed| self.may_have_ended_unnoticed(listed));
        let unnoticed = unnoticed.filter_map(|listed| listed.id.clone());
        new.chain(ended).chain(unnoticed).map(|id| (id, true)).collect()
    }

    /// Returns whether a listed container is to be inspected: it runs, and its start is not known or may be another one.
    fn needs_inspect(&self, listed: &ContainerSummary) -> bool {
        let id = listed.id.as_deref().map(ContainerId::new);
        let Some(id) = id.filter(|id| may_run(listed) && !self.oversized.contains(id)) else { return false };
        let name = self.watcher.record_from_list(listed).map(|record| Arc::clone(&record.spec.name));
        let is_known = self.watcher.source.lock().running.get(&id).is_some_and(|record| {
            record.started.is_some() && name.as_ref().is_none_or(|name| record.spec.name == *name)
        });
        match self.kind {
            ListKind::First => true,
            ListKind::Full => !is_known || is_recent(listed), // the events of a restart may be lost
            ListKind::Changed => !is_known,
        }
    }

    /// Applies a list, and the responses of the containers that were inspected with it. `ended`: containers that have ended since.
    pub fn apply_list(
        &mut self,
        list: &[ContainerSummary],
        mut responses: Responses<DockerConnection<'_>>,
        ended: &HashSet<ContainerId>,
    ) {
        let (at, mut present, mut there) = (self.listed_at.unix_seconds(), HashSet::new(), HashSet::new());
        for listed in list {
            let Some(id) = listed.id.as_deref().map(ContainerId::new) else { continue };
            let record = self.watcher.record_from_list(listed);
            if let (ListKind::First, Some(record)) = (self.kind, &record) {
                self.publish(record.event(at, EventKind::Exists));
            }
            there.insert(id.clone());
            if self.may_have_ended_unnoticed(listed) {
                match responses.remove(id.as_str()).map(|response| self.read_inspect(&id, response)) {
                    Some(Ok(found)) => {
                        self.uninspected.remove(&id);
                        found.iter().for_each(|found| self.publish_unnoticed_run(found));
                    }
                    Some(Err(_)) | None => drop(self.uninspected.insert(id)), // by a later list
                }
                continue;
            }
            if !may_run(listed) || ended.contains(&id) {
                continue;
            }
            match responses.remove(id.as_str()).map(|response| self.read_inspect(&id, response)) {
                Some(Ok(Some(found))) if found.is_running => {
                    self.end_run_before(&found);
                    if let Some(runtime_event) = found.running() {
                        self.publish(runtime_event);
                    }
                    self.watcher.source.add_running(found.record);
                }
                Some(Ok(_)) => continue, // its event follows
                // it runs, by the list: keep a known record, otherwise use the list's data
                Some(Err(_)) | None => {
                    if self.needs_inspect(listed) {
                        self.changed.insert(id.clone()); // again
                    }
                    self.add_unless_known(record);
                }
            }
            self.resume.open.insert(id.clone());
            present.insert(id);
        }
        if self.kind == ListKind::Changed {
            // responses that came too late for the list that asked for them
            for (id, response) in responses {
                let id = ContainerId::new(&id);
                let is_lost = self.resume.open.contains(&id) && !present.contains(&id);
                if let (true, Ok(found)) = (is_lost, self.read_inspect(&id, response)) {
                    self.end_lost(id, found);
                }
            }
            self.resume.own.extend(present);
        } else {
            self.watcher.source.remove_running(self.resume.own.difference(&present));
            self.resume.healed.retain(|id, _| there.contains(id));
            let lost: Vec<_> = self.resume.open.difference(&present).cloned().collect();
            for id in lost {
                match responses.remove(id.as_str()).map(|response| self.read_inspect(&id, response)) {
                    Some(Ok(found)) => self.end_lost(id, found),
                    None if self.oversized.contains(&id) => self.end_oversized(id, list),
                    Some(Err(_)) | None => {} // by a later list
                }
            }
            self.resume.own = present;
        }
        self.watcher.set_connection(ConnectionState::Up);
    }

    /// Publishes the last run of a container that began or ended while no events were read.
    fn publish_unnoticed_run(&mut self, found: &Inspected) {
        let Some((started, ended)) = found.record.started.zip(found.finished) else { return };
        if !found.is_running && self.absent_since.is_some_and(|since| ended > since) {
            let ended = ended.max(started); // a start is recorded when the program runs, and it may have ended by then
            self.publish(found.record.event(started, EventKind::Running { pid: None }));
            self.publish(found.record.event(ended, found.ended()));
        }
    }

    /// Publishes the end of the run before the one that runs, if no event of it was read: its time is known, its exit code is not.
    fn end_run_before(&mut self, found: &Inspected) {
        let Some((started, ended)) = found.record.started.zip(found.finished) else { return };
        let id = &found.record.id;
        let was_open = self.resume.open.contains(id) && !self.reported_ends.contains(id);
        let is_unnoticed = self.absent_since.is_some_and(|since| ended > since);
        if self.kind == ListKind::First && was_open && is_unnoticed && ended < started {
            self.publish(found.record.event(ended, UNKNOWN_END));
        }
    }

    fn add_unless_known(&self, record: Option<ContainerRecord>) {
        let known = |record: &ContainerRecord| self.watcher.source.lock().running.contains_key(&record.id);
        if let Some(record) = record.filter(|record| !known(record)) {
            self.watcher.source.add_running(record);
        }
    }

    /// Converts the response of an inspect. A container whose response is too large is not inspected again.
    fn read_inspect(
        &mut self,
        id: &ContainerId,
        response: StatusResult<ContainerInspectResponse, Error>,
    ) -> Result<Option<Inspected>, Error> {
        match response {
            Ok(response) => Ok(response.and_then(|response| self.watcher.parse_inspect(response))),
            Err(error) => {
                if is_too_large(&error) {
                    self.watcher.source.record_oversized(id.as_str());
                    self.oversized.insert(id.clone());
                }
                Err(error)
            }
        }
    }

    /// Applies an event. Returns the container if it has ended.
    pub fn apply(&mut self, event: DockerEvent) -> Option<ContainerId> {
        if !self.resume.seen.is_new(&event) {
            return None;
        }
        self.resume.since = Some(event.at);
        let (runtime, filter) = (self.watcher.endpoint.runtime, self.watcher.filter);
        let open = self.resume.open.contains(&event.id);
        let healed = self.resume.healed.get(&event.id).filter(|_| event.action == Action::Die && !open);
        let is_known = healed.is_some_and(|at| event.at <= at + EVENT_DELAY_SECONDS);
        if !is_known && let Some(runtime_event) = event.runtime_event(runtime, filter, open) {
            self.publish(runtime_event);
        }
        match event.action {
            Action::Rename => drop(self.changed.insert(event.id)),
            Action::Start => {
                self.began.insert(event.id.clone(), event.at);
                self.signalled.remove(&event.id);
                self.changed.insert(event.id);
            }
            Action::Die | Action::Remove => {
                self.changed.remove(&event.id);
                let began = self.began.remove(&event.id).filter(|began| *began <= event.at);
                let unlisted = began.and_then(|began| {
                    Some(ContainerRecord { started: Some(began), ..event.record(runtime, filter)? })
                });
                self.watcher.source.end_run(&event.id, event.at, unlisted);
                if event.action == Action::Die {
                    self.query_request(&event);
                }
                self.signalled.remove(&event.id);
                self.reported_ends.insert(event.id.clone());
                return Some(event.id);
            }
            Action::Kill => drop(self.signalled.insert(event.id)),
            Action::Create | Action::Oom | Action::Stop => {}
        }
        None
    }

    /// Queries Podman whether this end was requested, and publishes the request: of most stops it has no event. A signal that was sent
    /// before counts as a request there, so that it proves nothing then.
    fn query_request(&self, end: &DockerEvent) {
        let (runtime, filter) = (self.watcher.endpoint.runtime, self.watcher.filter);
        if runtime != RuntimeKind::Podman || self.signalled.contains(&end.id) {
            return;
        }
        let Ok(permit) = Arc::clone(&self.queries).try_acquire_owned() else { return };
        let what = EventKind::SignalRequested { signal: None };
        let Some(record) = end.record(runtime, filter) else { return };
        let socket_name = self.watcher.endpoint.socket.to_string_lossy().into();
        let request = RuntimeEvent { socket: socket_name, ..record.event(end.at - REQUEST_BEFORE_END, what) };
        let (socket, source) = (self.watcher.endpoint.socket.clone(), Arc::clone(self.watcher.source));
        let at = end.at;
        tokio::spawn(async move {
            let finished = requested_end(&socket, request.id.as_str());
            let finished = tokio::time::timeout(REQUEST_TIMEOUT, finished).await.ok().flatten();
            if finished.is_some_and(|finished| (finished - at).abs() < EVENT_DELAY_SECONDS) {
                source.publish([request]);
            }
            drop(permit);
        });
    }

    /// Ends a lost container whose inspect is too large: its end is only known from the list.
    fn end_oversized(&mut self, id: ContainerId, list: &[ContainerSummary]) {
        let listed = list.iter().find(|listed| listed.id.as_deref() == Some(id.as_str()));
        match listed.and_then(|listed| self.watcher.record_from_list(listed)) {
            Some(record) => self.publish_end(id, Some(record.spec), None, UNKNOWN_END),
            None => self.end_lost(id, None),
        }
    }

    /// Publishes the end of a container that ended unnoticed, from its inspect.
    fn end_lost(&mut self, id: ContainerId, found: Option<Inspected>) {
        let is_own = !self.resume.has_siblings || self.resume.own.contains(&id);
        match found {
            Some(found) if found.is_running => {} // it runs again; the next list has it
            Some(found) => {
                let end = found.ended();
                self.publish_end(id, Some(found.record.spec), found.finished, end);
            }
            None if is_own => self.publish_end(id, None, None, UNKNOWN_END),
            None => drop(self.resume.open.remove(&id)), // of another engine
        }
    }

    fn publish_end(
        &mut self,
        id: ContainerId,
        named: Option<Arc<ContainerSpec>>,
        finished: Option<f64>,
        what: EventKind,
    ) {
        let at = finished.unwrap_or_else(|| Timestamp::now().unix_seconds());
        self.resume.healed.insert(id.clone(), at);
        let (runtime, socket) = (self.watcher.endpoint.runtime, Arc::default());
        self.publish(RuntimeEvent { runtime, socket, id, at, named, what });
    }
}

#[cfg(test)]
mod tests;
