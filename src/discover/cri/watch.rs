//! One connection: lists, one after the other, and what has changed between them.
//!
//! A container is asked about once when it is found running, and once when it has ended. What is told is told once, also
//! over connections ([`Memory`]). The list comes before the answers, so an answer may say that a container has ended
//! since; the next list will say so too, and then it is told.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use futures_util::StreamExt;

use super::client::{Client, CriError};
use super::inspect::{Sandbox, complete, record};
use super::messages::{Container, ContainerState, ContainerStatusResponse};
use super::{EVENTS_TOGETHER, LIST_EVERY, Memory, RUNTIME, unix_seconds};
use crate::clock::Moment;
use crate::config::{CriSettings, Filter};
use crate::discover::{ContainerId, Fact, Link, Named, Record, Source, What};

/// Questions about single containers under way at once.
const QUESTIONS: usize = 8;
/// Sandboxes are listed at least every so many lists of containers.
const SANDBOXES_EVERY: u32 = 2;

/// How much was told of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// That it exists.
    Exists,
    /// That it runs.
    Runs,
    /// That it has ended; or it had before anybody asked.
    Over,
}

/// An answer about one container; `None` if it is gone.
type Answer = Result<Option<ContainerStatusResponse>, CriError>;

/// The state of one connection.
pub struct Watch<'a> {
    settings: &'a CriSettings,
    filter: &'a Filter,
    source: &'a Source,
    memory: &'a mut Memory,
    pods: HashMap<String, Sandbox>,
    lists: u32,
}

impl<'a> Watch<'a> {
    pub fn new(
        settings: &'a CriSettings,
        filter: &'a Filter,
        source: &'a Source,
        memory: &'a mut Memory,
    ) -> Self {
        Self { settings, filter, source, memory, pods: HashMap::new(), lists: 0 }
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
        let mut has_no_events = false;
        loop {
            if let Err(error) = self.look(client).await {
                return error;
            }
            if self.lists == 1 {
                let (name, version) = (version.runtime_name.as_str(), version.runtime_version.as_str());
                tracing::info!(runtime = RUNTIME, socket = %socket.display(), name, version, "connected");
            }
            let pause = if events.is_some() { LIST_EVERY.1 } else { LIST_EVERY.0 };
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
                    () = &mut pause => break,
                }
            }
        }
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
        let questions: Vec<(String, bool)> = containers
            .iter()
            .filter_map(|container| Some((container.id.clone(), self.question(container)?)))
            .collect();
        let answers: HashMap<String, Answer> = futures_util::stream::iter(questions)
            .map(|(id, verbose)| async move {
                let answer = match client.status(&id, verbose).await {
                    Ok(answer) => Ok(Some(answer)),
                    Err(error) if error.is_gone() => Ok(None),
                    Err(error) => Err(error),
                };
                (id, answer)
            })
            .buffer_unordered(QUESTIONS)
            .collect()
            .await;
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
        let mut there = HashSet::new();
        for container in containers {
            let id = ContainerId::new(&container.id);
            there.insert(id.clone());
            let sandbox = self.pods.get(&container.pod_sandbox_id);
            let Some(record) = record(container, sandbox, self.filter) else { continue };
            if !self.memory.told.contains_key(&id) {
                let at = unix_seconds(container.created_at).unwrap_or(now.unix_seconds());
                facts.push(fact(&record, at, What::Exists));
                self.memory.told.insert(id.clone(), Told::Exists);
            }
            match (container.state(), answers.get(&container.id)) {
                (ContainerState::Running, Some(answer)) => self.runs(record, answer, &mut facts),
                (ContainerState::Exited, Some(Ok(Some(answer)))) => {
                    self.over(record, answer, now, &mut facts)
                }
                _ => {}
            }
        }
        self.vanished(&there, now, &mut facts);
        facts.sort_by(|one, other| one.at.total_cmp(&other.at));
        let starts = facts.iter().filter(|fact| fact.what == What::Started).map(|fact| fact.at);
        self.memory.since = starts.fold(self.memory.since, f64::max);
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

    /// A container is listed as running and was asked about.
    fn runs(&mut self, mut record: Record, answer: &Answer, facts: &mut Vec<Fact>) {
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => return, // removed since: the next list says so
            Err(error) => {
                // what the list says of it must do until it is asked about again
                tracing::debug!(runtime = RUNTIME, id = record.id.as_str(), %error, "cannot ask about a container");
                let known = self.source.lock().running.contains_key(&record.id);
                if !known {
                    self.source.enter(record);
                }
                return;
            }
        };
        let started = complete(&mut record, answer, self.filter);
        let Some(at) = record.started else { return self.source.enter(record) };
        self.began(&record, at, facts);
        facts.push(fact(&record, at, What::Running { pid: started.pid }));
        self.memory.told.insert(record.id.clone(), Told::Runs);
        self.source.enter(record);
    }

    /// A run that nobody was told of has a beginning.
    fn began(&mut self, record: &Record, at: f64, facts: &mut Vec<Fact>) {
        if at > self.memory.since && self.memory.told.get(&record.id) != Some(&Told::Runs) {
            facts.push(fact(record, at, What::Started));
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
        let before = self.memory.told.insert(record.id.clone(), Told::Over);
        let ended = unix_seconds(status.finished_at);
        let is_new = record.started.is_some_and(|started| started > self.memory.since);
        let unentered = match (before, record.started) {
            (Some(Told::Runs), _) => None,
            // it came and went between two lists, or while nobody asked
            (_, Some(started)) if is_new => {
                facts.push(fact(&record, started, What::Started));
                facts.push(fact(&record, started, What::Running { pid: None }));
                Some(record.clone())
            }
            _ => return, // it had ended before anybody asked
        };
        let at = ended.unwrap_or(now.unix_seconds());
        let oom_flag = (!status.reason.is_empty()).then(|| status.reason == "OOMKilled");
        let what = What::Ended { exit_code: Some(status.exit_code.into()), oom_flag };
        facts.push(fact(&record, at, what));
        self.source.end(&record.id, at, unentered);
    }

    /// Containers that were told of and are not listed any more.
    fn vanished(&mut self, there: &HashSet<ContainerId>, now: Moment, facts: &mut Vec<Fact>) {
        let at = now.unix_seconds();
        let source = self.source;
        self.memory.told.retain(|id, told| {
            let is_there = there.contains(id);
            if !is_there && *told == Told::Runs {
                let what = What::Ended { exit_code: None, oom_flag: None };
                facts.push(Fact { runtime: RUNTIME, id: id.clone(), at, named: None, what });
                source.end(id, at, None);
            }
            is_there
        });
    }
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
mod tests {
    use super::*;
    use crate::discover::cri::messages::{ContainerMetadata, ContainerStatus};
    use std::sync::Arc;

    const SECOND: i64 = 1_000_000_000;

    fn container(id: &str, state: ContainerState) -> Container {
        let metadata = Some(ContainerMetadata { name: id.into(), attempt: 0 });
        Container { id: id.into(), metadata, state: state.into(), created_at: SECOND, ..Container::default() }
    }

    fn answer(started: i64, finished: i64) -> Answer {
        let status = ContainerStatus {
            started_at: started * SECOND,
            finished_at: finished * SECOND,
            exit_code: 137,
            reason: if finished > 0 { "OOMKilled".into() } else { String::new() },
            ..ContainerStatus::default()
        };
        Ok(Some(ContainerStatusResponse { status: Some(status), info: HashMap::new() }))
    }

    /// What is told of these lists, one after the other, each with what would be answered.
    fn told(
        memory: &mut Memory,
        source: &Source,
        lists: &[&[(&str, ContainerState, i64, i64)]],
    ) -> Vec<(f64, What)> {
        let (settings, filter) = (CriSettings::default(), Filter::default());
        let mut watch = Watch::new(&settings, &filter, source, memory);
        for list in lists {
            let containers: Vec<_> = list.iter().map(|(id, state, ..)| container(id, *state)).collect();
            let asked = |(id, _, started, finished): &(&str, ContainerState, i64, i64)| {
                let container = containers.iter().find(|container| container.id == *id)?;
                watch.question(container)?;
                Some((id.to_string(), answer(*started, *finished)))
            };
            let answers = list.iter().filter_map(asked).collect();
            watch.enter(&containers, &answers, Moment::now());
        }
        let facts = source.take_facts().into_iter().filter(|fact| fact.what != What::Exists);
        facts.map(|fact| (fact.at, fact.what)).collect()
    }

    fn memory(open: &[&str]) -> Memory {
        Memory::new(Some(100.0), open.iter().map(|id| ContainerId::new(id)).collect())
    }

    use ContainerState::{Exited, Running};
    const RUNS: What = What::Running { pid: None };
    const ENDED: What = What::Ended { exit_code: Some(137), oom_flag: Some(true) };

    #[test]
    fn a_run_is_told_once_over_lists_and_connections() {
        let source = Source::new(RUNTIME, Arc::default());
        let mut memory = memory(&[]);
        let runs = [("a", Running, 200, 0)];
        assert_eq!(told(&mut memory, &source, &[&runs, &runs]), [(200.0, What::Started), (200.0, RUNS)]);
        assert_eq!(source.lock().running.len(), 1);
        let ended = [("a", Exited, 200, 300)];
        assert_eq!(told(&mut memory, &source, &[&runs, &ended, &ended]), [(300.0, ENDED)]);
        assert_eq!(told(&mut memory, &source, &[&ended, &[]]), []);
        let state = source.lock();
        assert_eq!((state.running.len(), state.ended.len()), (0, 1));
    }

    #[test]
    fn a_run_between_two_lists_is_told_whole_and_one_of_before_the_ledger_is_not() {
        let source = Source::new(RUNTIME, Arc::default());
        let list = [("new", Exited, 150, 160), ("old", Exited, 50, 60), ("never", Exited, 0, 0)];
        let facts = told(&mut memory(&[]), &source, &[&list, &list]);
        assert_eq!(facts, [(150.0, What::Started), (150.0, RUNS), (160.0, ENDED)]);
        assert_eq!(source.lock().ended.len(), 1, "it came and went");
    }

    #[test]
    fn what_ran_when_the_ledger_last_knew_has_ended_or_runs_on() {
        let source = Source::new(RUNTIME, Arc::default());
        let list = [("ended", Exited, 50, 60), ("runs", Running, 50, 0)];
        let facts = told(&mut memory(&["ended", "runs", "gone"]), &source, &[&list]);
        assert_eq!(facts[..2], [(50.0, RUNS), (60.0, ENDED)]);
        assert_eq!(facts[2].1, What::Ended { exit_code: None, oom_flag: None }, "removed meanwhile");
        assert_eq!(facts.len(), 3);
    }

    #[test]
    fn a_container_that_cannot_be_asked_about_has_its_name_and_is_asked_again() {
        let source = Source::new(RUNTIME, Arc::default());
        let (settings, filter, mut memory) = (CriSettings::default(), Filter::default(), memory(&[]));
        let mut watch = Watch::new(&settings, &filter, &source, &mut memory);
        let containers = [container("a", Running)];
        let answers = HashMap::from([("a".to_owned(), Err(CriError::Silent("ContainerStatus")))]);
        watch.enter(&containers, &answers, Moment::now());
        assert_eq!(source.lock().running[&ContainerId::new("a")].started, None);
        assert_eq!(watch.question(&containers[0]), Some(true));
    }
}
