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
    /// Its run is news.
    is_new: bool,
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
            let is_told = events.is_some() && !self.questions.are_open();
            let pause = if is_told { LIST_EVERY.1 } else { LIST_EVERY.0 };
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
                    // for the next list
                    () = self.questions.next(), if self.questions.are_under_way() => {}
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
        let mut wanted = HashSet::new();
        for container in &containers {
            let Some(verbose) = self.question(container) else { continue };
            let (client, id) = (client.clone(), container.id.clone());
            let question = async move { client.status(&id, verbose).await };
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
                (ContainerState::Running | ContainerState::Exited, _) => {
                    self.seen(record, created, container.state() == ContainerState::Running)
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

    /// A container is listed as running, or as ended, and the list is all that there is.
    fn seen(&mut self, record: Record, created: f64, runs: bool) {
        if runs && !self.source.lock().running.contains_key(&record.id) {
            self.source.enter(record.clone()); // until it is answered for
        }
        let since = self.memory.since;
        match self.memory.told.get_mut(&record.id) {
            Some(Told::Runs | Told::Over) => {}
            Some(Told::Seen(seen)) => seen.ran |= runs,
            told => {
                let is_new = !matches!(told, Some(Told::Before)) || created > since;
                let id = record.id.clone();
                let seen = Seen { record, created, ran: runs, is_new };
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
            return self.seen(record, created, true);
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
        match &told {
            Some(Told::Runs) => {}
            // it came and went between two lists, or while nobody asked
            told if self.is_news(told.as_ref(), started) => facts.push(fact(&record, started, What::Started)),
            _ if ran => {}
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
        let was_entered = ran || told == Some(Told::Runs);
        self.source.end(&record.id.clone(), f64::INFINITY, (!was_entered).then_some(record));
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
                Told::Seen(seen) if seen.ran || seen.is_new => {
                    let began = seen.is_new.then_some(What::Started);
                    let ran = began.into_iter().chain([What::Running { pid: None }]);
                    facts.extend(ran.map(|what| fact(&seen.record, seen.created, what)));
                    facts.push(fact(&seen.record, at.max(seen.created), ended.clone()));
                    source.end(id, f64::INFINITY, (!seen.ran).then(|| seen.record.clone()));
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
        let state = if finished > 0 || started == 0 { Exited } else { Running };
        let status = ContainerStatus {
            state: state.into(),
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
                let silent = Err(CriError::Silent("ContainerStatus", SILENT_FOR));
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
    const SILENT_FOR: std::time::Duration = std::time::Duration::from_secs(2);
    const RUNS: What = What::Running { pid: None };
    const ENDED: What = What::Ended { exit_code: Some(137), oom_flag: Some(true) };
    const UNKNOWN: What = What::Ended { exit_code: None, oom_flag: None };

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
        assert_eq!(facts[2].1, UNKNOWN, "removed meanwhile");
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
        let source = Source::new(RUNTIME, Arc::default());
        let facts = told(&mut memory(&[]), &source, &[&silent, &silent, &[]]);
        assert_eq!(facts[0], (1.0, RUNS), "since it was made, at most");
        assert_eq!((&facts[1].1, facts.len()), (&UNKNOWN, 2), "removed");
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
    fn an_end_that_nobody_answers_for_is_told_once_when_the_container_is_removed() {
        let source = Source::new(RUNTIME, Arc::default());
        let lists: [&[_]; 5] = [&[], &[("a", Created, 0, 0)], &[("a", Exited, SILENT, 0)], &[], &[]];
        let facts = told(&mut memory(&[]), &source, &lists);
        assert_eq!(facts[..2], [(1.0, What::Started), (1.0, RUNS)]);
        assert_eq!((&facts[2].1, facts.len()), (&UNKNOWN, 3));
        let state = source.lock();
        assert_eq!((state.running.len(), state.ended.len()), (0, 1), "it came and went");
        drop(state);
        let before = [("old", Exited, SILENT, 0), ("never", Created, 0, 0)];
        assert_eq!(told(&mut memory(&[]), &source, &[&before, &[]]), [], "nobody knows that it ran lately");
    }

    #[test]
    fn an_answer_from_before_the_end_does_not_tell_of_it() {
        let source = Source::new(RUNTIME, Arc::default());
        let lists: [&[_]; 3] = [&[], &[("a", Exited, 200, 0)], &[("a", Exited, 200, 300)]];
        let facts = told(&mut memory(&[]), &source, &lists);
        assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (300.0, ENDED)]);
    }

    #[test]
    fn who_does_not_answer_and_is_listed_as_running_runs_on_and_is_complete_when_it_answers() {
        let source = Source::new(RUNTIME, Arc::default());
        let (silent, runs) = (("a", Running, SILENT, 0), ("b", Running, 200, 0));
        let lists: [&[_]; 4] = [&[], &[silent, runs], &[silent, runs], &[("a", Running, 200, 0), runs]];
        let facts = told(&mut memory(&[]), &source, &lists);
        assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (200.0, What::Started), (200.0, RUNS)]);
        let state = source.lock();
        assert_eq!((state.running.len(), state.ended.len()), (2, 0));
        assert_eq!(state.running[&ContainerId::new("a")].started, Some(200.0));
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
        let answers = HashMap::from([("a".to_owned(), Err(CriError::Silent("ContainerStatus", SILENT_FOR)))]);
        watch.enter(&containers, &answers, Moment::now());
        assert_eq!(source.lock().running[&ContainerId::new("a")].started, None);
        assert_eq!(watch.question(&containers[0]), Some(true));
    }
}
