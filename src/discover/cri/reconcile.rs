//! One connection: lists containers repeatedly and reports the changes between lists.
//!
//! The status of a container is queried once when it is first listed as running, and once when it has ended. Each change is
//! reported once, also across connections ([`CriResumeState`]). The list is older than the status responses, so a response may
//! already show an end; the end is reported when the next list shows it too.
//!
//! The list decides which containers exist and run, and needs no status responses. For a container whose status query gets no
//! response ([`crate::discover::status_queries`]), only its start, its settings and its exit code are missing.
//!
//! The kubelet removes a container 0.2 s after its end if its pod is deleted or evicted. So an end that an event had is kept until a
//! list shows it ([`ObservedEnd`]): with an exit code, although the container's status cannot be queried any more.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, Stream, StreamExt, TryStreamExt};
use prost::Message;
use tonic::Status;

use super::client::{CriClient, CriError};
use super::convert::{Sandbox, complete, record, reduce};
use super::messages::{
    Container, ContainerEventResponse, ContainerState, ContainerStatusResponse, ContainerdEvent, TaskExit,
};
use super::{CriResumeState, EVENT_DEBOUNCE, LIST_INTERVAL, unix_seconds};
use crate::clock::Timestamp;
use crate::config::{CriSettings, Filter};
use crate::discover::reconcile::{Responses, Runtime};
use crate::discover::status_queries;
use crate::discover::{
    ConnectionState, ContainerId, ContainerRecord, ContainerSpec, EventKind, RuntimeEvent, RuntimeKind,
    RuntimeState,
};

/// Sandboxes are listed at least once per this many lists of containers.
const LISTS_PER_SANDBOX_LIST: u32 = 2;

/// An end without a status response is reported after this time, in which the query was retried several times.
const UNANSWERED_TIMEOUT: Duration = Duration::from_secs(30);

/// The status of one container; `None` if it is gone.
type CriStatus = status_queries::StatusResult<ContainerStatusResponse, CriError>;

/// What was reported of a container.
#[derive(Clone, Debug, PartialEq)]
pub enum ReportedState {
    /// It exists. It was on the first list: [`CriResumeState::since`] decides whether its run is new.
    Before,
    /// It exists. Its run is new.
    Exists,
    /// It exists, and was listed as running or ended, without a status response so far.
    Listed(Box<ListedRun>),
    /// It runs.
    Running,
    /// It has ended, or had ended before memledger started.
    Ended,
}

/// A run that is only known from lists.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedRun {
    record: ContainerRecord,
    /// Unix time of its creation, which is before its start.
    created: f64,
    /// It was listed as running, so it certainly ran.
    ran: bool,
    /// When it was first listed as ended.
    ended: Option<Timestamp>,
    /// Its run was reported, with an end of which only the time is known. A later response completes it.
    is_reported: bool,
    /// Its run is new.
    is_new: bool,
}

impl ListedRun {
    /// Reports its run as far as the lists show it. `now`: the latest time of its end.
    fn report(
        &self,
        id: &ContainerId,
        now: Timestamp,
        observed: Option<ObservedEnd>,
        source: &RuntimeState,
        runtime_events: &mut Vec<RuntimeEvent>,
    ) {
        let began = self.is_new.then_some(EventKind::Started);
        let ran = began.into_iter().chain([EventKind::Running { pid: None }]);
        runtime_events.extend(ran.map(|what| self.record.event(self.created, what)));
        let (at, what) = ended(observed, self.ended.unwrap_or(now).unix_seconds());
        runtime_events.push(self.record.event(at.max(self.created), what));
        source.end_run(id, f64::INFINITY, (!self.ran).then(|| self.record.clone()));
    }
}

/// An end that an event had.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObservedEnd {
    exit_code: i64,
    oom_flag: Option<bool>,
    /// Unix time; `None` if the event has none.
    at: Option<f64>,
    /// The number of the list before it.
    after_list: u32,
}

/// Returns an end and its time, of which an event may have had more than the lists.
fn ended(observed: Option<ObservedEnd>, listed_at: f64) -> (f64, EventKind) {
    let at = observed.and_then(|end| end.at).unwrap_or(listed_at);
    let (exit_code, oom_flag) = (observed.map(|end| end.exit_code), observed.and_then(|end| end.oom_flag));
    (at, EventKind::Ended { exit_code, oom_flag })
}

/// The state of one connection.
pub struct CriReconciler<'a> {
    settings: &'a CriSettings,
    filter: &'a Filter,
    source: &'a RuntimeState,
    resume: &'a mut CriResumeState,
    pods: HashMap<String, Sandbox>,
    lists: u32,
    /// Ends since the list before the last one, and those of containers that still exist.
    observed: HashMap<ContainerId, ObservedEnd>,
}

impl<'a> CriReconciler<'a> {
    pub fn new(
        settings: &'a CriSettings,
        filter: &'a Filter,
        source: &'a RuntimeState,
        resume: &'a mut CriResumeState,
    ) -> Self {
        Self { settings, filter, source, resume, pods: HashMap::new(), lists: 0, observed: HashMap::new() }
    }

    /// Keeps the ends that an event has.
    fn observe(&mut self, event: CriEvent) {
        for (id, end) in event.ends {
            self.observed.insert(ContainerId::new(&id), ObservedEnd { after_list: self.lists, ..end });
        }
    }

    /// Returns whether a container needs a status query, and whether a verbose one.
    fn needs_status(&self, container: &Container) -> Option<bool> {
        let id = ContainerId::new(&container.id);
        match container.state() {
            ContainerState::Running => {
                let known =
                    self.source.lock().running.get(&id).is_some_and(|record| record.started.is_some());
                (!known || self.resume.reported.get(&id) != Some(&ReportedState::Running)).then_some(true)
            }
            ContainerState::Exited => {
                (self.resume.reported.get(&id) != Some(&ReportedState::Ended)).then_some(false)
            }
            ContainerState::Created | ContainerState::Unknown => None,
        }
    }

    /// Applies a list and the status responses for it.
    fn apply(&mut self, containers: &[Container], responses: &HashMap<String, CriStatus>, now: Timestamp) {
        self.apply_sandboxes(now);
        let mut runtime_events = Vec::new();
        let (mut there, mut running, mut uncertain) = (HashSet::new(), HashSet::new(), HashSet::new());
        for container in containers {
            let id = ContainerId::new(&container.id);
            there.insert(id.clone());
            // containerd lost the shim of a container in state Unknown; its processes may still run
            if matches!(container.state(), ContainerState::Running | ContainerState::Unknown) {
                running.insert(id.clone());
            }
            if container.state() == ContainerState::Unknown {
                uncertain.insert(id.clone());
            }
            let sandbox = self.pods.get(&container.pod_sandbox_id);
            let Some(record) = record(container, sandbox, self.filter) else { continue };
            let created = unix_seconds(container.created_at).unwrap_or(now.unix_seconds());
            if !self.resume.reported.contains_key(&id) {
                runtime_events.push(record.event(created, EventKind::Exists));
                let is_new_run = self.resume.has_list || container.state() == ContainerState::Created;
                self.resume.reported.insert(
                    id.clone(),
                    if is_new_run { ReportedState::Exists } else { ReportedState::Before },
                );
            }
            let response = responses.get(&container.id).and_then(|response| response.as_ref().ok()?.as_ref());
            match (container.state(), response) {
                (ContainerState::Running, Some(response)) => {
                    self.apply_running(record, created, response, &mut runtime_events)
                }
                (ContainerState::Exited, Some(response)) if has_ended(response) => {
                    self.apply_ended(record, response, now, &mut runtime_events)
                }
                (ContainerState::Running, _) => self.apply_listed(record, created, None),
                (ContainerState::Exited, _) => {
                    self.apply_listed(record, created, Some(now));
                    self.report_unanswered(&id, now, &mut runtime_events);
                }
                _ => {}
            }
        }
        self.report_removed(&there, now, &mut runtime_events);
        self.remove_not_running(&running);
        self.source.set_uncertain(uncertain);
        self.resume.has_list = true;
        runtime_events.sort_by(|one, other| one.at.total_cmp(&other.at));
        self.source.publish(runtime_events);
        self.source.set_connection(ConnectionState::Up);
    }

    /// Reports new sandboxes to the ledger, and those that are gone: a pause process may be killed like any other.
    fn apply_sandboxes(&mut self, now: Timestamp) {
        let ids: HashSet<_> = self.pods.keys().map(|id| ContainerId::new(id)).collect();
        let mut state = self.source.lock();
        if state.sandboxes.len() == ids.len() && ids.iter().all(|id| state.sandboxes.contains_key(id)) {
            return;
        }
        let event = |id: ContainerId, named: Option<Arc<ContainerSpec>>, what: EventKind| {
            let socket = std::sync::Arc::default();
            RuntimeEvent { runtime: RuntimeKind::Cri, socket, id, at: now.unix_seconds(), named, what }
        };
        let all = self.pods.iter().map(|(id, sandbox)| (ContainerId::new(id), sandbox));
        let new = all.filter(|(id, _)| !state.sandboxes.contains_key(id));
        let new =
            new.map(|(id, sandbox)| event(id, Some(Arc::new(sandbox.spec(self.filter))), EventKind::Sandbox));
        let removed = state.sandboxes.keys().filter(|id| !ids.contains(*id));
        let removed = removed.map(|id| event(id.clone(), None, EventKind::SandboxRemoved));
        let runtime_events: Vec<_> = new.chain(removed).collect();
        let pods = self.pods.iter();
        state.sandboxes =
            pods.map(|(id, sandbox)| (ContainerId::new(id), sandbox.sandboxed_pod(self.filter))).collect();
        state.generation += 1;
        drop(state);
        self.source.publish(runtime_events);
    }

    /// Applies a container that is listed as running or ended, without a status response.
    fn apply_listed(&mut self, record: ContainerRecord, created: f64, ended: Option<Timestamp>) {
        let runs = ended.is_none();
        if runs && !self.source.lock().running.contains_key(&record.id) {
            self.source.add_running(record.clone()); // replaced by the status response
        }
        let since = self.resume.since;
        match self.resume.reported.get_mut(&record.id) {
            Some(ReportedState::Running | ReportedState::Ended) => {}
            Some(ReportedState::Listed(listed)) => {
                listed.ran |= runs;
                listed.ended = listed.ended.or(ended);
            }
            reported => {
                let is_new = !matches!(reported, Some(ReportedState::Before)) || created > since;
                let id = record.id.clone();
                let listed = ListedRun { record, created, ran: runs, ended, is_reported: false, is_new };
                self.resume.reported.insert(id, ReportedState::Listed(Box::new(listed)));
            }
        }
    }

    /// Applies the status response of a container that is listed as running.
    fn apply_running(
        &mut self,
        mut record: ContainerRecord,
        created: f64,
        response: &ContainerStatusResponse,
        runtime_events: &mut Vec<RuntimeEvent>,
    ) {
        let started = complete(&mut record, response, self.filter);
        let Some(at) = record.started else {
            self.source.add_running(record.clone());
            return self.apply_listed(record, created, None);
        };
        let reported = self.resume.reported.insert(record.id.clone(), ReportedState::Running);
        if self.is_new_run(reported.as_ref(), at) {
            runtime_events.push(record.event(at, EventKind::Started));
        }
        runtime_events.push(record.event(at, EventKind::Running { pid: started.pid }));
        self.source.add_running(record);
    }

    /// Returns whether a run with this start was not reported yet.
    fn is_new_run(&self, reported: Option<&ReportedState>, started: f64) -> bool {
        match reported {
            Some(ReportedState::Running | ReportedState::Ended) => false,
            Some(ReportedState::Before) => started > self.resume.since,
            Some(ReportedState::Listed(listed)) => listed.is_new || started > self.resume.since,
            Some(ReportedState::Exists) | None => true,
        }
    }

    /// Applies the status response of a container that is listed as ended.
    fn apply_ended(
        &mut self,
        mut record: ContainerRecord,
        response: &ContainerStatusResponse,
        now: Timestamp,
        runtime_events: &mut Vec<RuntimeEvent>,
    ) {
        let Some(status) = &response.status else { return };
        complete(&mut record, response, self.filter);
        let reported = self.resume.reported.insert(record.id.clone(), ReportedState::Ended);
        let Some(started) = record.started else { return }; // it never ran
        let ran = matches!(&reported, Some(ReportedState::Listed(listed)) if listed.ran);
        let is_reported = matches!(&reported, Some(ReportedState::Listed(listed)) if listed.is_reported);
        match &reported {
            Some(ReportedState::Running) => {}
            _ if is_reported => {}
            // it started and ended between two lists, or between two connections
            reported if self.is_new_run(reported.as_ref(), started) => {
                runtime_events.push(record.event(started, EventKind::Started))
            }
            _ if ran => {}
            _ => return, // it had ended before memledger started
        }
        if reported != Some(ReportedState::Running) && !is_reported {
            runtime_events.push(record.event(started, EventKind::Running { pid: None }));
        }
        // containerd sets the start time when it processes the start, and the shim the end time at once: on a busy node a
        // short run ends before it starts. Reported in that order, it would never end.
        let at = unix_seconds(status.finished_at).unwrap_or(now.unix_seconds()).max(started);
        let what = EventKind::Ended { exit_code: Some(status.exit_code.into()), oom_flag: status.oom_flag() };
        runtime_events.push(record.event(at, what));
        let was_running = ran || is_reported || reported == Some(ReportedState::Running);
        self.source.end_run(&record.id.clone(), f64::INFINITY, (!was_running).then_some(record));
    }

    /// Reports the run of a container that has been listed as ended for [`UNANSWERED_TIMEOUT`] without a status response. The
    /// end is the time at which it was listed, because the kubelet may remove it only days later. Queries continue.
    fn report_unanswered(
        &mut self,
        id: &ContainerId,
        now: Timestamp,
        runtime_events: &mut Vec<RuntimeEvent>,
    ) {
        let Some(ReportedState::Listed(listed)) = self.resume.reported.get_mut(id) else { return };
        let is_old = listed.ended.is_some_and(|ended| now.since(ended) >= UNANSWERED_TIMEOUT);
        if is_old && !listed.is_reported && (listed.ran || listed.is_new) {
            listed.report(id, now, self.observed.get(id).copied(), self.source, runtime_events);
            listed.is_reported = true;
        }
    }

    /// Reports the end of containers that are no longer listed. Their exit codes are lost, unless an event had them.
    fn report_removed(
        &mut self,
        there: &HashSet<ContainerId>,
        now: Timestamp,
        runtime_events: &mut Vec<RuntimeEvent>,
    ) {
        let (source, ends) = (self.source, &self.observed);
        self.resume.reported.retain(|id, reported| {
            let is_there = there.contains(id);
            let observed = ends.get(id).copied();
            match reported {
                _ if is_there => {}
                ReportedState::Running => {
                    let (at, what) = ended(observed, now.unix_seconds());
                    // as in `apply_ended`
                    let started = source.lock().running.get(id).and_then(|record| record.started);
                    let at = at.max(started.unwrap_or(at));
                    let (socket, id) = (std::sync::Arc::default(), id.clone());
                    runtime_events.push(RuntimeEvent {
                        runtime: RuntimeKind::Cri,
                        socket,
                        id,
                        at,
                        named: None,
                        what,
                    });
                }
                ReportedState::Listed(listed) if !listed.is_reported && (listed.ran || listed.is_new) => {
                    listed.report(id, now, observed, source, runtime_events);
                }
                ReportedState::Listed(_)
                | ReportedState::Before
                | ReportedState::Exists
                | ReportedState::Ended => {}
            }
            is_there
        });
        // a list may be older than an event, and not have its container yet: the next one has
        let lists = self.lists;
        self.observed.retain(|id, end| there.contains(id) || end.after_list + 1 >= lists);
    }

    /// Removes containers that are not listed as running. A container never runs again, so this cannot end a later run.
    fn remove_not_running(&self, running: &HashSet<ContainerId>) {
        let state = self.source.lock();
        let over: Vec<_> = state.running.keys().filter(|id| !running.contains(*id)).cloned().collect();
        drop(state);
        for id in over {
            self.source.end_run(&id, f64::INFINITY, None);
        }
    }
}

/// Returns whether this runtime sends each event of CRI to every client. containerd before 2 sends it to only one of them: a
/// subscription there would take events away from the kubelet. Its own events go to every client in each version.
fn events_reach_all(name: &str, version: &str) -> bool {
    let major = version.trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
    name != "containerd" || major.is_some_and(|major| major >= 2)
}

/// Returns whether the container has ended by the response, which may be older than the list.
fn has_ended(response: &ContainerStatusResponse) -> bool {
    response.status.as_ref().is_some_and(|status| status.state() == ContainerState::Exited)
}

/// What memledger reads of an event.
#[derive(Debug, Default, PartialEq)]
pub struct CriEvent {
    /// Containers that have ended, by id.
    ends: Vec<(String, ObservedEnd)>,
    /// Containers may have changed.
    needs_list: bool,
}

impl CriEvent {
    /// Reads an event of CRI, which shows all containers of a pod.
    fn of_pod(event: &ContainerEventResponse) -> Self {
        let ended = event.containers_statuses.iter().filter(|it| it.state() == ContainerState::Exited);
        let ends = ended.map(|it| {
            let end = ObservedEnd {
                exit_code: it.exit_code.into(),
                oom_flag: it.oom_flag(),
                at: unix_seconds(it.finished_at),
                after_list: 0,
            };
            (it.id.clone(), end)
        });
        Self { ends: ends.collect(), needs_list: true }
    }

    /// Reads an event of containerd: the end of a container or of a sandbox. That of an exec in one is none.
    fn of_containerd(event: &ContainerdEvent) -> Self {
        let exit = event.event.as_ref().and_then(|packed| TaskExit::decode(&*packed.value).ok());
        let Some(exit) = exit.filter(|exit| exit.id == exit.container_id) else { return Self::default() };
        let at =
            exit.exited_at.map(|at| at.seconds as f64 + f64::from(at.nanos) / 1e9).filter(|at| *at > 0.0);
        let end = ObservedEnd { exit_code: exit.exit_status.into(), oom_flag: None, at, after_list: 0 };
        Self { ends: vec![(exit.container_id, end)], needs_list: true }
    }
}

type CriEvents = Pin<Box<dyn Stream<Item = Result<CriEvent, Status>> + Send>>;

/// Subscribes to the events of ends of containers.
async fn subscribe(client: CriClient, is_containerd_1: bool) -> Result<CriEvents, CriError> {
    Ok(match is_containerd_1 {
        true => Box::pin(client.task_exits().await?.map_ok(|event| CriEvent::of_containerd(&event))),
        false => Box::pin(client.events().await?.map_ok(|event| CriEvent::of_pod(&event))),
    })
}

/// The runtime's events, of those that reach every client.
enum CriEventStream {
    /// Subscribed, without a response so far.
    Subscribing(Pin<Box<dyn Future<Output = Result<CriEvents, CriError>> + Send>>),
    /// Events arrive.
    Stream(CriEvents),
    /// There are none.
    Unavailable,
}

/// A connection to the kubelet's runtime.
pub struct CriConnection<'a> {
    reconciler: CriReconciler<'a>,
    client: CriClient,
    events: CriEventStream,
    /// Events include starts.
    has_start_events: bool,
    /// There was an event since the last list.
    needs_list: bool,
}

impl<'a> CriConnection<'a> {
    /// Subscribes to events before the first list, so that none after it is missed.
    ///
    /// # Errors
    /// The runtime does not report its version.
    pub async fn new(reconciler: CriReconciler<'a>, client: &CriClient) -> Result<Self, CriError> {
        let version = client.version().await?;
        let (name, version) = (version.runtime_name.as_str(), version.runtime_version.as_str());
        tracing::debug!(runtime = %RuntimeKind::Cri, name, version, "version");
        let has_start_events = events_reach_all(name, version);
        let events = CriEventStream::Subscribing(Box::pin(subscribe(client.clone(), !has_start_events)));
        Ok(Self { reconciler, client: client.clone(), events, has_start_events, needs_list: false })
    }
}

impl Runtime for CriConnection<'_> {
    type Item = Container;
    type Status = ContainerStatusResponse;
    type Error = CriError;

    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Cri
    }

    async fn list(&mut self) -> Result<Vec<Container>, CriError> {
        self.needs_list = false;
        let containers = self.client.containers().await?;
        // the end of a container that is not listed any more came before the response
        if let CriEventStream::Stream(stream) = &mut self.events {
            while let Some(Some(Ok(event))) = stream.next().now_or_never() {
                self.needs_list |= event.needs_list;
                self.reconciler.observe(event);
            }
        }
        let pods = &mut self.reconciler.pods;
        let unknown = containers.iter().any(|container| !pods.contains_key(&container.pod_sandbox_id));
        if unknown || self.reconciler.lists.is_multiple_of(LISTS_PER_SANDBOX_LIST) {
            let settings = self.reconciler.settings;
            let read = |sandbox: super::messages::PodSandbox| {
                Some((sandbox.id.clone(), Sandbox::read(sandbox, settings)?))
            };
            *pods = self.client.sandboxes().await?.into_iter().filter_map(read).collect();
        }
        Ok(containers)
    }

    fn wanted(&self, list: &[Container]) -> Vec<(String, bool)> {
        let wanted =
            |container: &Container| Some((container.id.clone(), self.reconciler.needs_status(container)?));
        list.iter().filter_map(wanted).collect()
    }

    fn query(
        &self,
        id: &str,
        verbose: bool,
        timeout: Duration,
    ) -> impl Future<Output = CriStatus> + Send + 'static {
        let (client, filter, id) = (self.client.clone(), self.reconciler.filter.clone(), id.to_owned());
        async move {
            match client.status(&id, verbose, timeout).await {
                Ok(mut response) => {
                    reduce(&mut response, &filter);
                    Ok(Some(response))
                }
                Err(error) if error.is_gone() => Ok(None),
                Err(error) => Err(error),
            }
        }
    }

    fn apply_list(&mut self, list: Vec<Container>, responses: Responses<Self>, now: Timestamp) {
        self.reconciler.lists = self.reconciler.lists.saturating_add(1);
        self.reconciler.apply(&list, &responses, now);
    }

    async fn next_event(&mut self) -> Result<(), CriError> {
        let event = match &mut self.events {
            CriEventStream::Subscribing(response) => match response.await {
                Ok(stream) => {
                    self.events = CriEventStream::Stream(stream);
                    return Ok(());
                }
                Err(error) => {
                    tracing::debug!(runtime = %RuntimeKind::Cri, %error, "events unavailable: listing containers every second");
                    None
                }
            },
            CriEventStream::Stream(stream) => stream.next().await.and_then(Result::ok),
            CriEventStream::Unavailable => std::future::pending().await,
        };
        match event {
            Some(event) => {
                self.needs_list |= event.needs_list;
                self.reconciler.observe(event);
            }
            None => {
                self.events = CriEventStream::Unavailable; // the next list shows whether the runtime is gone
                self.needs_list = true;
            }
        }
        Ok(())
    }

    fn needs_list(&self) -> Option<Duration> {
        self.needs_list.then_some(EVENT_DEBOUNCE)
    }

    fn list_interval(&self) -> Duration {
        let has_all_events = matches!(self.events, CriEventStream::Stream(_)) && self.has_start_events;
        if has_all_events { LIST_INTERVAL.1 } else { LIST_INTERVAL.0 }
    }
}

#[cfg(test)]
mod tests;
