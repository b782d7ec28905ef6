//! One connection: lists, one after the other, and what has changed between them.
//!
//! A container is asked about once when it is found running, and once when it has ended. What is told is told once, also
//! over connections ([`Memory`]). The list comes before the answers, so an answer may say that a container has ended
//! since; the next list will say so too, and then it is told.
//!
//! Who runs and who is there the list says, and nobody need answer for that: of a container that does not answer for itself
//! ([`super::asking`]) only its start, its settings and how it ended are missing.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt;

use super::asking::{Answer, Questions};
use super::client::{Client, CriError};
use super::inspect::{Sandbox, complete, record};
use super::messages::{Container, ContainerState, ContainerStatusResponse};
use super::{EVENTS_TOGETHER, LIST_EVERY, Memory, RUNTIME, unix_seconds};
use crate::clock::Moment;
use crate::config::{CriSettings, Filter};
use crate::discover::{ContainerId, Fact, Link, Named, Record, Source, What};

/// Sandboxes are listed at least every so many lists of containers.
const SANDBOXES_EVERY: u32 = 2;

/// An end that nobody answers for is told after this. The runtime has been asked some times by then.
const UNANSWERED_AFTER: Duration = Duration::from_secs(30);

/// How much was told of a container.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    /// That it exists. It was there before memledger was: [`Memory::since`] says whether its run is news.
    Before,
    /// That it exists. Its run is news.
    Exists,
    /// That it exists; and it was listed as running or as ended, and nobody has said more of it.
    Seen(Box<Seen>),
    /// That it runs.
    Runs,
    /// That it has ended; or it had before anybody asked.
    Over,
}

/// What the list alone says of a container's run.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    record: Record,
    /// Unix time. It started later.
    created: f64,
    /// It was listed as running: nobody need doubt that it ran.
    ran: bool,
    /// When it was first listed as ended.
    ended: Option<Moment>,
    /// Its run was told, with an end of which only the time is known. What is answered later completes it.
    is_told: bool,
    /// Its run is news.
    is_new: bool,
}

impl Seen {
    /// Tells of its run, as far as the lists have shown it. `now`: it has ended by then.
    fn tell(&self, id: &ContainerId, now: Moment, source: &Source, facts: &mut Vec<Fact>) {
        let began = self.is_new.then_some(What::Started);
        let ran = began.into_iter().chain([What::Running { pid: None }]);
        facts.extend(ran.map(|what| fact(&self.record, self.created, what)));
        let at = self.ended.unwrap_or(now).unix_seconds().max(self.created);
        facts.push(fact(&self.record, at, What::Ended { exit_code: None, oom_flag: None }));
        source.end(id, f64::INFINITY, (!self.ran).then(|| self.record.clone()));
    }
}

/// The state of one connection.
pub struct Watch<'a> {
    settings: &'a CriSettings,
    filter: &'a Filter,
    source: &'a Source,
    memory: &'a mut Memory,
    pods: HashMap<String, Sandbox>,
    questions: Questions,
    lists: u32,
}

impl<'a> Watch<'a> {
    pub fn new(
        settings: &'a CriSettings,
        filter: &'a Filter,
        source: &'a Source,
        memory: &'a mut Memory,
    ) -> Self {
        Self {
            settings,
            filter,
            source,
            memory,
            pods: HashMap::new(),
            questions: Questions::default(),
            lists: 0,
        }
    }

    /// Takes lists until one is not answered; returns why.
    pub async fn run(mut self, client: &Client, socket: &Path) -> CriError {
        let version = match client.version().await {
            Ok(version) => version,
            Err(error) => return error,
        };
        // asked for before the first list: what happens after the list rings
        let mut asked = std::pin::pin!(client.events());
        let mut events = None;
        let mut has_no_events = !events_reach_all(&version.runtime_name, &version.runtime_version);
        loop {
            if let Err(error) = self.look(client).await {
                return error;
            }
            if self.lists == 1 {
                let (name, version) = (version.runtime_name.as_str(), version.runtime_version.as_str());
                tracing::info!(runtime = RUNTIME, socket = %socket.display(), name, version, "connected");
            }
            let mut is_soon = events.is_none();
            let pause = if is_soon { LIST_EVERY.0 } else { self.longest_pause(Moment::now()) };
            let mut pause = std::pin::pin!(tokio::time::sleep(pause));
            loop {
                tokio::select! {
                    answer = &mut asked, if events.is_none() && !has_no_events => match answer {
                        Ok(stream) => events = Some(stream),
                        Err(error) => {
                            tracing::debug!(runtime = RUNTIME, %error, "no events: the list is taken every second");
                            has_no_events = true;
                        }
                    },
                    event = next(&mut events), if events.is_some() => {
                        if event {
                            tokio::time::sleep(EVENTS_TOGETHER).await;
                            while drained(&mut events) {}
                        } else {
                            (events, has_no_events) = (None, true); // the list tells whether all of it is gone
                        }
                        break;
                    }
                    // for the next list, which enters it
                    () = self.questions.next(), if self.questions.are_under_way() => {
                        if !std::mem::replace(&mut is_soon, true) {
                            pause.set(tokio::time::sleep(LIST_EVERY.0));
                        }
                    }
                    () = &mut pause => break,
                }
            }
        }
    }

    /// Pause before the next list where events ring: at the latest when somebody who was silent is to be asked again.
    fn longest_pause(&self, now: Moment) -> Duration {
        let rest = self.questions.rest(now).unwrap_or(LIST_EVERY.1);
        rest.clamp(LIST_EVERY.0, LIST_EVERY.1)
    }

    /// Takes one list and tells what has changed.
    async fn look(&mut self, client: &Client) -> Result<(), CriError> {
        let containers = client.containers().await?;
        let unknown = containers.iter().any(|container| !self.pods.contains_key(&container.pod_sandbox_id));
        if unknown || self.lists.is_multiple_of(SANDBOXES_EVERY) {
            let sandboxes = client.sandboxes().await?;
            let read = |sandbox: super::messages::PodSandbox| {
                Some((sandbox.id.clone(), Sandbox::read(sandbox, self.settings)?))
            };
            self.pods = sandboxes.into_iter().filter_map(read).collect();
        }
        let mut wanted = HashSet::new();
        for container in &containers {
            let Some(verbose) = self.question(container) else { continue };
            let (client, id) = (client.clone(), container.id.clone());
            let question = |within| async move { client.status(&id, verbose, within).await };
            self.questions.ask(&container.id, verbose, Moment::now(), question);
            wanted.insert(container.id.clone());
        }
        self.questions.wait().await;
        let answers = self.questions.take(&wanted);
        self.lists = self.lists.saturating_add(1);
        self.enter(&containers, &answers, Moment::now());
        Ok(())
    }

    /// Whether a container is to be asked about, and whether with what it was started with.
    fn question(&self, container: &Container) -> Option<bool> {
        let id = ContainerId::new(&container.id);
        match container.state() {
            ContainerState::Running => {
                let known =
                    self.source.lock().running.get(&id).is_some_and(|record| record.started.is_some());
                (!known || self.memory.told.get(&id) != Some(&Told::Runs)).then_some(true)
            }
            ContainerState::Exited => (self.memory.told.get(&id) != Some(&Told::Over)).then_some(false),
            ContainerState::Created | ContainerState::Unknown => None,
        }
    }

    /// Enters a list with the answers that belong to it.
    fn enter(&mut self, containers: &[Container], answers: &HashMap<String, Answer>, now: Moment) {
        self.enter_sandboxes(now);
        let mut facts = Vec::new();
        let (mut there, mut running) = (HashSet::new(), HashSet::new());
        for container in containers {
            let id = ContainerId::new(&container.id);
            there.insert(id.clone());
            // of one whose state is unknown containerd has lost the shim; its processes may run on
            if matches!(container.state(), ContainerState::Running | ContainerState::Unknown) {
                running.insert(id.clone());
            }
            let sandbox = self.pods.get(&container.pod_sandbox_id);
            let Some(record) = record(container, sandbox, self.filter) else { continue };
            let created = unix_seconds(container.created_at).unwrap_or(now.unix_seconds());
            if !self.memory.told.contains_key(&id) {
                facts.push(fact(&record, created, What::Exists));
                let is_news = self.memory.has_list || container.state() == ContainerState::Created;
                self.memory.told.insert(id.clone(), if is_news { Told::Exists } else { Told::Before });
            }
            let answer = answers.get(&container.id).and_then(|answer| answer.as_ref().ok()?.as_ref());
            match (container.state(), answer) {
                (ContainerState::Running, Some(answer)) => self.runs(record, created, answer, &mut facts),
                (ContainerState::Exited, Some(answer)) if has_ended(answer) => {
                    self.over(record, answer, now, &mut facts)
                }
                (ContainerState::Running, _) => self.seen(record, created, None),
                (ContainerState::Exited, _) => {
                    self.seen(record, created, Some(now));
                    self.over_unanswered(&id, now, &mut facts);
                }
                _ => {}
            }
        }
        self.vanished(&there, now, &mut facts);
        self.clear(&running);
        self.memory.has_list = true;
        facts.sort_by(|one, other| one.at.total_cmp(&other.at));
        self.source.tell(facts);
        self.source.set_link(Link::Up);
    }

    /// The ledger learns who they are, too: a pause process may be killed like any other.
    fn enter_sandboxes(&mut self, now: Moment) {
        let ids: HashSet<_> = self.pods.keys().map(|id| ContainerId::new(id)).collect();
        let mut state = self.source.lock();
        if state.sandboxes == ids {
            return;
        }
        let new = self.pods.iter().filter(|(id, _)| !state.sandboxes.contains(&ContainerId::new(id)));
        let exists = |(id, sandbox): (&String, &Sandbox)| Fact {
            runtime: RUNTIME,
            id: ContainerId::new(id),
            at: now.unix_seconds(),
            named: Some(sandbox.named(self.filter)),
            what: What::Exists,
        };
        let facts: Vec<_> = new.map(exists).collect();
        state.sandboxes = ids;
        state.generation += 1;
        drop(state);
        self.source.tell(facts);
    }

    /// A container is listed as running, or now as ended, and the list is all that there is.
    fn seen(&mut self, record: Record, created: f64, ended: Option<Moment>) {
        let runs = ended.is_none();
        if runs && !self.source.lock().running.contains_key(&record.id) {
            self.source.enter(record.clone()); // until it is answered for
        }
        let since = self.memory.since;
        match self.memory.told.get_mut(&record.id) {
            Some(Told::Runs | Told::Over) => {}
            Some(Told::Seen(seen)) => {
                seen.ran |= runs;
                seen.ended = seen.ended.or(ended);
            }
            told => {
                let is_new = !matches!(told, Some(Told::Before)) || created > since;
                let id = record.id.clone();
                let seen = Seen { record, created, ran: runs, ended, is_told: false, is_new };
                self.memory.told.insert(id, Told::Seen(Box::new(seen)));
            }
        }
    }

    /// A container is listed as running and was asked about.
    fn runs(
        &mut self,
        mut record: Record,
        created: f64,
        answer: &ContainerStatusResponse,
        facts: &mut Vec<Fact>,
    ) {
        let started = complete(&mut record, answer, self.filter);
        let Some(at) = record.started else {
            self.source.enter(record.clone());
            return self.seen(record, created, None);
        };
        let told = self.memory.told.insert(record.id.clone(), Told::Runs);
        if self.is_news(told.as_ref(), at) {
            facts.push(fact(&record, at, What::Started));
        }
        facts.push(fact(&record, at, What::Running { pid: started.pid }));
        self.source.enter(record);
    }

    /// Whether nobody was told of a run that began then.
    fn is_news(&self, told: Option<&Told>, started: f64) -> bool {
        match told {
            Some(Told::Runs | Told::Over) => false,
            Some(Told::Before) => started > self.memory.since,
            Some(Told::Seen(seen)) => seen.is_new || started > self.memory.since,
            Some(Told::Exists) | None => true,
        }
    }

    /// A container is listed as ended and was asked about.
    fn over(
        &mut self,
        mut record: Record,
        answer: &ContainerStatusResponse,
        now: Moment,
        facts: &mut Vec<Fact>,
    ) {
        let Some(status) = &answer.status else { return };
        complete(&mut record, answer, self.filter);
        let told = self.memory.told.insert(record.id.clone(), Told::Over);
        let Some(started) = record.started else { return }; // it never ran
        let ran = matches!(&told, Some(Told::Seen(seen)) if seen.ran);
        let is_told = matches!(&told, Some(Told::Seen(seen)) if seen.is_told);
        match &told {
            Some(Told::Runs) => {}
            _ if is_told => {}
            // it came and went between two lists, or while nobody asked
            told if self.is_news(told.as_ref(), started) => facts.push(fact(&record, started, What::Started)),
            _ if ran => {}
            _ => return, // it had ended before anybody asked
        }
        if told != Some(Told::Runs) && !is_told {
            facts.push(fact(&record, started, What::Running { pid: None }));
        }
        // containerd stamps a start when it has heard of it, and the shim an end when it comes: a short run on a busy node
        // ends before it starts. Told in that order, it would never end.
        let at = unix_seconds(status.finished_at).unwrap_or(now.unix_seconds()).max(started);
        let oom_flag = (!status.reason.is_empty()).then(|| status.reason == "OOMKilled");
        let what = What::Ended { exit_code: Some(status.exit_code.into()), oom_flag };
        facts.push(fact(&record, at, what));
        let was_entered = ran || is_told || told == Some(Told::Runs);
        self.source.end(&record.id.clone(), f64::INFINITY, (!was_entered).then_some(record));
    }

    /// A container has been listed as ended for long, and nobody has said how: its run is told with the end that the list
    /// saw, not when the kubelet removes it, which may be days later. It is asked about on.
    fn over_unanswered(&mut self, id: &ContainerId, now: Moment, facts: &mut Vec<Fact>) {
        let Some(Told::Seen(seen)) = self.memory.told.get_mut(id) else { return };
        let is_old = seen.ended.is_some_and(|ended| now.since(ended) >= UNANSWERED_AFTER);
        if is_old && !seen.is_told && (seen.ran || seen.is_new) {
            seen.tell(id, now, self.source, facts);
            seen.is_told = true;
        }
    }

    /// Containers that were told of and are not listed any more. What came of them nobody will say.
    fn vanished(&mut self, there: &HashSet<ContainerId>, now: Moment, facts: &mut Vec<Fact>) {
        let at = now.unix_seconds();
        let ended = What::Ended { exit_code: None, oom_flag: None };
        let source = self.source;
        self.memory.told.retain(|id, told| {
            let is_there = there.contains(id);
            match told {
                _ if is_there => {}
                Told::Runs => facts.push(Fact {
                    runtime: RUNTIME,
                    id: id.clone(),
                    at,
                    named: None,
                    what: ended.clone(),
                }),
                Told::Seen(seen) if !seen.is_told && (seen.ran || seen.is_new) => {
                    seen.tell(id, now, source, facts);
                }
                Told::Seen(_) | Told::Before | Told::Exists | Told::Over => {}
            }
            is_there
        });
    }

    /// Whatever was told of it, what is not listed as running does not run. It never runs again either, so no end is one
    /// of an earlier run.
    fn clear(&self, running: &HashSet<ContainerId>) {
        let state = self.source.lock();
        let over: Vec<_> = state.running.keys().filter(|id| !running.contains(*id)).cloned().collect();
        drop(state);
        for id in over {
            self.source.end(&id, f64::INFINITY, None);
        }
    }
}

/// Whether this runtime gives each event to everybody who listens. containerd before 2 gives it to one of them: to ask for
/// events there would take them from the kubelet.
fn events_reach_all(name: &str, version: &str) -> bool {
    let major = version.trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
    name != "containerd" || major.is_some_and(|major| major >= 2)
}

/// An answer was asked for before the list that it is held against, and may still say that the container runs.
fn has_ended(answer: &ContainerStatusResponse) -> bool {
    answer.status.as_ref().is_some_and(|status| status.state() == ContainerState::Exited)
}

/// Waits for an event; false when there are no more.
async fn next<T>(events: &mut Option<tonic::Streaming<T>>) -> bool {
    match events {
        Some(events) => matches!(events.next().await, Some(Ok(_))),
        None => false,
    }
}

/// Takes an event that is there already; false if there is none.
fn drained<T>(events: &mut Option<tonic::Streaming<T>>) -> bool {
    let Some(events) = events else { return false };
    matches!(futures_util::FutureExt::now_or_never(events.next()), Some(Some(Ok(_))))
}

fn fact(record: &Record, at: f64, what: What) -> Fact {
    let named = Named {
        name: record.name.as_str().into(),
        pod: record.pod.clone(),
        image: record.image.clone(),
        labels_match: record.labels_match,
    };
    Fact { runtime: RUNTIME, id: record.id.clone(), at, named: Some(named), what }
}

#[cfg(test)]
mod tests;
