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
    /// That it exists. It was there before memledger was: [`Memory::since`] says whether its run is news.
    Before,
    /// That it exists. Its run is news.
    Exists,
    /// That it exists; and it was listed as running, and nobody has said more of it.
    Seen,
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
        let mut has_no_events = !events_reach_all(&version.runtime_name, &version.runtime_version);
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
            if !self.memory.told.contains_key(&id) {
                let at = unix_seconds(container.created_at).unwrap_or(now.unix_seconds());
                facts.push(fact(&record, at, What::Exists));
                let is_news = self.memory.has_list || container.state() == ContainerState::Created;
                self.memory.told.insert(id.clone(), if is_news { Told::Exists } else { Told::Before });
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

    /// A container is listed as running and was asked about.
    fn runs(&mut self, mut record: Record, answer: &Answer, facts: &mut Vec<Fact>) {
        let told = self.memory.told.get(&record.id).copied();
        if !matches!(told, Some(Told::Runs | Told::Over)) {
            self.memory.told.insert(record.id.clone(), Told::Seen);
        }
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
        if self.is_news(told, at) {
            facts.push(fact(&record, at, What::Started));
        }
        facts.push(fact(&record, at, What::Running { pid: started.pid }));
        self.memory.told.insert(record.id.clone(), Told::Runs);
        self.source.enter(record);
    }

    /// Whether nobody was told of a run that began then.
    fn is_news(&self, told: Option<Told>, started: f64) -> bool {
        match told {
            Some(Told::Runs | Told::Over) => false,
            Some(Told::Before | Told::Seen) => started > self.memory.since,
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
        let is_news = self.is_news(told, started);
        match told {
            Some(Told::Runs) => {}
            // it came and went between two lists, or while nobody asked
            _ if is_news => facts.push(fact(&record, started, What::Started)),
            Some(Told::Seen) => {}
            _ => return, // it had ended before anybody asked
        }
        if told != Some(Told::Runs) {
            facts.push(fact(&record, started, What::Running { pid: None }));
        }
        // containerd stamps a start when it has heard of it, and the shim an end when it comes: a short run on a busy node
        // ends before it starts. Told in that order, it would never end.
        let at = unix_seconds(status.finished_at).unwrap_or(now.unix_seconds()).max(started);
        let oom_flag = (!status.reason.is_empty()).then(|| status.reason == "OOMKilled");
        let what = What::Ended { exit_code: Some(status.exit_code.into()), oom_flag };
        facts.push(fact(&record, at, what));
        let was_entered = matches!(told, Some(Told::Runs | Told::Seen));
        self.source.end(&record.id.clone(), f64::INFINITY, (!was_entered).then_some(record));
    }

    /// Containers that were told of and are not listed any more.
    fn vanished(&mut self, there: &HashSet<ContainerId>, now: Moment, facts: &mut Vec<Fact>) {
        let at = now.unix_seconds();
        self.memory.told.retain(|id, told| {
            let is_there = there.contains(id);
            if !is_there && matches!(told, Told::Seen | Told::Runs) {
                let what = What::Ended { exit_code: None, oom_flag: None };
                facts.push(Fact { runtime: RUNTIME, id: id.clone(), at, named: None, what });
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
                let silent = Err(CriError::Silent("ContainerStatus"));
                Some((id.to_string(), if *started < 0 { silent } else { answer(*started, *finished) }))
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

    use ContainerState::{Created, Exited, Running};
    /// Where no answer comes.
    const SILENT: i64 = -1;
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

    /// The end is stamped by the shim and the start by containerd, once it has heard of it: on a busy node in this order.
    #[test]
    fn an_end_that_is_stamped_before_its_start_is_told_after_it() {
        let source = Source::new(RUNTIME, Arc::default());
        let facts = told(&mut memory(&[]), &source, &[&[], &[("a", Exited, 200, 199)]]);
        assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (200.0, ENDED)]);
        let lists: [&[_]; 2] = [&[("b", Running, 200, 0)], &[("b", Exited, 200, 150)]];
        let facts = told(&mut memory(&[]), &source, &lists);
        assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (200.0, ENDED)]);
        let state = source.lock();
        assert_eq!((state.running.len(), state.ended.len()), (0, 2));
    }

    #[test]
    fn what_is_not_listed_as_running_runs_no_more_whatever_was_answered() {
        let silent = [("a", Running, SILENT, 0)];
        let unknown = What::Ended { exit_code: None, oom_flag: None };
        let source = Source::new(RUNTIME, Arc::default());
        let facts = told(&mut memory(&[]), &source, &[&silent, &[]]);
        assert_eq!(facts.into_iter().map(|(_, what)| what).collect::<Vec<_>>(), [unknown], "removed");
        assert!(source.lock().running.is_empty());
        let facts = told(&mut memory(&[]), &source, &[&silent, &[("a", Exited, 50, 60)]]);
        assert_eq!(facts, [(50.0, RUNS), (60.0, ENDED)]);
        assert!(source.lock().running.is_empty());
        let lists: [&[_]; 3] = [&silent, &[("a", Exited, SILENT, 0)], &[("a", Exited, 50, 60)]];
        assert_eq!(told(&mut memory(&[]), &source, &lists), [(50.0, RUNS), (60.0, ENDED)]);
        let state = source.lock();
        assert_eq!((state.running.len(), state.ended.len()), (0, 3));
    }

    #[test]
    fn a_short_run_is_told_although_another_one_began_later() {
        let source = Source::new(RUNTIME, Arc::default());
        let runs = ("a", Running, 200, 0);
        let lists: [&[_]; 3] = [
            &[runs, ("b", Created, 0, 0)],
            &[runs, ("b", Exited, 199, 199), ("c", Exited, 198, 199)],
            &[runs],
        ];
        let facts = told(&mut memory(&[]), &source, &lists);
        assert_eq!(facts[..2], [(200.0, What::Started), (200.0, RUNS)]);
        let [b, c] = [199.0, 198.0].map(|at| [(at, What::Started), (at, RUNS), (199.0, ENDED)]);
        for run in [b, c] {
            assert!(run.iter().all(|fact| facts.contains(fact)), "{run:?} in {facts:?}");
        }
        assert_eq!(facts.len(), 8);
    }

    #[test]
    fn no_events_are_taken_from_the_kubelet_where_each_goes_to_one_listener() {
        for (name, version, all) in [
            ("containerd", "1.6.20~ds1", false),
            ("containerd", "v1.7.27", false),
            ("containerd", "v2.0.4", true),
            ("containerd", "", false),
            ("cri-o", "1.31.2", true),
        ] {
            assert_eq!(events_reach_all(name, version), all, "{name} {version}");
        }
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
