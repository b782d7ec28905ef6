//! Cleanups: requests to the processes of a container to collect garbage and to give torch's cache back to the GPU.
//!
//! A process does so at its next safe point, the end of a training step or of a tracked operation, so it may answer late or
//! never. All processes of a container get the request at once, because the ranks of a training wait for one another.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::message::Cleaned;
use super::reports::Reports;
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::host::process::ProcessId;

/// Default time within which the processes should reach a safe point, and its limits: a response over HTTP has 30 s.
pub const DEADLINE: Duration = Duration::from_secs(10);
/// Shortest deadline.
pub const MIN_DEADLINE: Duration = Duration::from_secs(1);
/// Longest deadline.
pub const MAX_DEADLINE: Duration = Duration::from_secs(20);
/// How long after the deadline an answer may come: a process reads its messages once a second, and the cleanup itself takes time.
pub const ANSWER_GRACE: Duration = Duration::from_secs(4);
/// Minimum time between the end of a cleanup and the next one of the container.
const COOLDOWN: Duration = Duration::from_secs(5);
/// The same for those that memledger wants itself; doubled each time that nothing was given back.
const AUTO_COOLDOWN: Duration = Duration::from_secs(60);
const MAX_AUTO_COOLDOWN: Duration = Duration::from_secs(3600);

/// Who wants a cleanup.
#[derive(Debug)]
pub enum CleanupTrigger {
    /// A user, who waits for the result.
    Request(oneshot::Sender<CleanupResult>),
    /// memledger, by `--reporter.auto-cleanup`.
    Auto,
}

/// What became of a request.
pub type CleanupResult = Result<CleanupReport, CleanupRefusal>;

/// A cleanup of one container.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CleanupReport {
    /// Time that the processes had, in seconds.
    pub deadline_seconds: f64,
    /// Sum of what the processes gave back.
    pub freed_bytes: u64,
    /// Each process that got the request, by rank.
    pub processes: Vec<ProcessCleanup>,
}

/// A cleanup of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessCleanup {
    /// Its local rank.
    pub rank: u8,
    /// Its pid on the host.
    pub pid: u32,
    /// What it did.
    #[serde(flatten)]
    pub outcome: CleanupOutcome,
}

/// What a process did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum CleanupOutcome {
    /// It cleaned up. The sums over its GPUs are what torch's allocator held.
    Cleaned {
        /// Bytes before.
        reserved_before_bytes: u64,
        /// Bytes after.
        reserved_after_bytes: u64,
        /// Its duration.
        milliseconds: u64,
    },
    /// It tried and got an error.
    Failed,
    /// It did not answer: it reached no safe point before the deadline, or hangs.
    NoAnswer,
    /// It ended, or closed its connection.
    Ended,
    /// Its connection takes no more messages.
    Unreachable,
}

/// Why no process got a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CleanupRefusal {
    /// No process of the container reports.
    #[error("none of its processes reports to memledger; see docs/inside-view.md")]
    NotReporting,
    /// The last cleanup has just ended.
    #[error("its last cleanup ended {} s ago; wait until {} s have passed", .0.as_secs(), COOLDOWN.as_secs())]
    TooSoon(Duration),
}

/// All cleanups.
#[derive(Debug, Default)]
pub struct Cleanups {
    requests: Vec<CleanupRequest>,
    running: Vec<Cleanup>,
    /// The last one of each container.
    last: HashMap<ContainerId, LastCleanup>,
    last_id: u64,
}

#[derive(Clone, Copy, Debug)]
struct LastCleanup {
    ended: Timestamp,
    auto_cooldown: Duration,
}

/// A request that was not looked at yet.
#[derive(Debug)]
struct CleanupRequest {
    container: ContainerId,
    deadline: Duration,
    trigger: CleanupTrigger,
}

/// A cleanup in progress.
#[derive(Debug)]
struct Cleanup {
    id: u64,
    container: ContainerId,
    deadline: Duration,
    /// When it ends, whoever is missing.
    until: Timestamp,
    /// Rank of each process and what it did; `None`: not known yet.
    processes: BTreeMap<ProcessId, (u8, Option<CleanupOutcome>)>,
    waiting: Vec<oneshot::Sender<CleanupResult>>,
    is_auto: bool,
}

/// The end of a cleanup.
#[derive(Debug, PartialEq)]
pub struct EndedCleanup {
    /// Its container.
    pub container: ContainerId,
    /// What became of it.
    pub report: CleanupReport,
    /// memledger itself wanted it.
    pub is_auto: bool,
}

impl Cleanups {
    /// Adds a request, for the reporter's thread.
    pub fn request(&mut self, container: ContainerId, deadline: Duration, trigger: CleanupTrigger) {
        self.requests.push(CleanupRequest { container, deadline, trigger });
    }

    /// Starts what was requested. Returns the messages to send. Whoever requests a cleanup that is in progress waits for that.
    pub fn start_requested(&mut self, now: Timestamp, reports: &Reports) -> Vec<(ProcessId, String)> {
        let mut messages = Vec::new();
        for CleanupRequest { container, deadline, trigger } in std::mem::take(&mut self.requests) {
            let refused = match self.refusal(now, &container, &trigger, reports) {
                Some(refusal) => Err(refusal),
                None => Ok(self.running.iter().position(|cleanup| cleanup.container == container)),
            };
            let at = match refused {
                Err(refusal) => {
                    if let CleanupTrigger::Request(waiting) = trigger {
                        let _ = waiting.send(Err(refusal)); // the client has gone
                    }
                    continue;
                }
                Ok(Some(at)) => at,
                Ok(None) => {
                    let cleanup = self.new_cleanup(now, container, deadline, reports);
                    let message = format!(
                        r#"{{"t":"cleanup","id":{},"deadline_ms":{}}}"#,
                        cleanup.id,
                        deadline.as_millis()
                    );
                    messages.extend(cleanup.processes.keys().map(|key| (*key, message.clone())));
                    self.running.push(cleanup);
                    self.running.len() - 1
                }
            };
            match trigger {
                CleanupTrigger::Request(waiting) => self.running[at].waiting.push(waiting),
                CleanupTrigger::Auto => self.running[at].is_auto |= self.running[at].waiting.is_empty(),
            }
        }
        messages
    }

    fn refusal(
        &self,
        now: Timestamp,
        container: &ContainerId,
        trigger: &CleanupTrigger,
        reports: &Reports,
    ) -> Option<CleanupRefusal> {
        if self.running.iter().any(|cleanup| cleanup.container == *container) {
            return None;
        }
        let cooldown = |last: &LastCleanup| match trigger {
            CleanupTrigger::Request(_) => COOLDOWN,
            CleanupTrigger::Auto => last.auto_cooldown,
        };
        match self.last.get(container).map(|last| (now.since(last.ended), cooldown(last))) {
            Some((since, cooldown)) if since < cooldown => Some(CleanupRefusal::TooSoon(since)),
            _ if !reports.processes.values().any(|process| process.container == *container) => {
                Some(CleanupRefusal::NotReporting)
            }
            _ => None,
        }
    }

    fn new_cleanup(
        &mut self,
        now: Timestamp,
        container: ContainerId,
        deadline: Duration,
        reports: &Reports,
    ) -> Cleanup {
        self.last_id += 1;
        let members = reports.processes.iter().filter(|(_, process)| process.container == container);
        Cleanup {
            id: self.last_id,
            deadline,
            until: now.plus(deadline + ANSWER_GRACE),
            processes: members.map(|(key, process)| (*key, (process.rank, None))).collect(),
            container,
            waiting: vec![],
            is_auto: false,
        }
    }

    /// Records the answer of a process. Answers to other cleanups than the one in progress are ignored.
    pub fn answer(&mut self, process: ProcessId, answer: &Cleaned) {
        let outcome = match answer.outcome {
            None => CleanupOutcome::Failed,
            Some((before, after, milliseconds)) => CleanupOutcome::Cleaned {
                reserved_before_bytes: before,
                reserved_after_bytes: after,
                milliseconds,
            },
        };
        for cleanup in self.running.iter_mut().filter(|cleanup| cleanup.id == answer.id) {
            cleanup.record_outcome(process, outcome.clone());
        }
    }

    /// Records that a process will not answer, because its connection ended or does not take the request.
    pub fn record_loss(&mut self, process: ProcessId, outcome: &CleanupOutcome) {
        self.running.iter_mut().for_each(|cleanup| cleanup.record_outcome(process, outcome.clone()));
    }

    /// Returns how long the next cleanup may still wait for answers.
    pub fn next_timeout(&self, now: Timestamp) -> Option<Duration> {
        self.running.iter().map(|cleanup| cleanup.until.since(now)).min()
    }

    /// Ends the cleanups of which all is known, and those that are over their deadline, and sends the results to the waiting clients.
    pub fn end(&mut self, now: Timestamp) -> Vec<EndedCleanup> {
        let running = std::mem::take(&mut self.running);
        let is_over = |cleanup: &Cleanup| cleanup.until <= now || cleanup.is_complete();
        let (over, running) = running.into_iter().partition::<Vec<_>, _>(is_over);
        self.running = running;
        self.last.retain(|_, last| now.since(last.ended) < 2 * MAX_AUTO_COOLDOWN);
        let ended = over.into_iter().map(|cleanup| {
            let report = cleanup.report();
            let before = self.last.get(&cleanup.container).map(|last| last.auto_cooldown);
            let auto_cooldown = match before {
                Some(before) if !cleanup.is_auto => before,
                Some(before) if report.freed_bytes == 0 => (2 * before).min(MAX_AUTO_COOLDOWN),
                _ => AUTO_COOLDOWN,
            };
            self.last.insert(cleanup.container.clone(), LastCleanup { ended: now, auto_cooldown });
            for waiting in cleanup.waiting {
                let _ = waiting.send(Ok(report.clone())); // its client may have left
            }
            EndedCleanup { container: cleanup.container, report, is_auto: cleanup.is_auto }
        });
        ended.collect()
    }
}

impl Cleanup {
    /// Records what a process did. The first outcome stays, but a process that only connected again may still answer.
    fn record_outcome(&mut self, process: ProcessId, outcome: CleanupOutcome) {
        if let Some((_, known @ (None | Some(CleanupOutcome::Ended)))) = self.processes.get_mut(&process) {
            *known = Some(outcome);
        }
    }

    fn is_complete(&self) -> bool {
        self.processes.values().all(|(_, outcome)| outcome.is_some())
    }

    fn report(&self) -> CleanupReport {
        let processes = self.processes.iter().map(|(process, (rank, outcome))| ProcessCleanup {
            rank: *rank,
            pid: process.pid,
            outcome: outcome.clone().unwrap_or(CleanupOutcome::NoAnswer),
        });
        let mut processes: Vec<_> = processes.collect();
        processes.sort_by_key(|process| (process.rank, process.pid));
        let freed = processes.iter().map(|process| process.outcome.freed_bytes());
        let freed_bytes = freed.fold(0, u64::saturating_add);
        CleanupReport { deadline_seconds: self.deadline.as_secs_f64(), freed_bytes, processes }
    }
}

impl CleanupOutcome {
    /// Returns what the process gave back, in bytes.
    pub fn freed_bytes(&self) -> u64 {
        match self {
            Self::Cleaned { reserved_before_bytes, reserved_after_bytes, .. } => {
                reserved_before_bytes.saturating_sub(*reserved_after_bytes)
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
impl Cleanups {
    /// Forgets the last cleanups, so that the next one need not wait.
    pub fn forget_last(&mut self) {
        self.last.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reporter::message::Hello;

    const MIB: u64 = 1 << 20;

    /// Returns reports of a container `a` with two ranks, and `b` with one.
    fn reports() -> Reports {
        let mut reports = Reports::default();
        for (pid, id, local_rank) in [(1, "a", 1), (2, "a", 0), (3, "b", 0)] {
            reports.hello(
                ProcessId::new(pid, 1),
                &ContainerId::new(id),
                Hello { local_rank, devices: vec![] },
            );
        }
        reports
    }

    fn request(cleanups: &mut Cleanups, id: &str) -> oneshot::Receiver<CleanupResult> {
        let (waiting, result) = oneshot::channel();
        cleanups.request(ContainerId::new(id), DEADLINE, CleanupTrigger::Request(waiting));
        result
    }

    fn answer(id: u64) -> Cleaned {
        Cleaned { id, outcome: Some((10 * MIB, 4 * MIB, 41)) }
    }

    #[test]
    fn all_ranks_are_asked_and_the_answers_are_summed() {
        let (now, reports, mut cleanups) = (Timestamp::now(), reports(), Cleanups::default());
        let mut result = request(&mut cleanups, "a");
        let messages = cleanups.start_requested(now, &reports);
        let text = r#"{"t":"cleanup","id":1,"deadline_ms":10000}"#;
        assert_eq!(
            messages,
            [(ProcessId::new(1, 1), text.to_owned()), (ProcessId::new(2, 1), text.to_owned())]
        );
        cleanups.answer(ProcessId::new(2, 1), &answer(1));
        cleanups.answer(ProcessId::new(3, 1), &answer(1)); // of another container
        cleanups.answer(ProcessId::new(1, 1), &answer(7)); // of another cleanup
        assert_eq!((cleanups.end(now), result.try_recv().is_err()), (vec![], true));
        cleanups.answer(ProcessId::new(1, 1), &answer(1));
        cleanups.record_loss(ProcessId::new(1, 1), &CleanupOutcome::Ended); // after its answer
        assert_eq!(cleanups.end(now).len(), 1);
        let report = result.try_recv().unwrap().unwrap();
        assert_eq!(report.freed_bytes, 12 * MIB);
        assert_eq!(
            report.processes.iter().map(|each| (each.rank, each.pid)).collect::<Vec<_>>(),
            [(0, 2), (1, 1)]
        );
        let json = serde_json::to_value(&report.processes[0]).unwrap();
        assert_eq!((&json["outcome"], &json["reserved_after_bytes"]), (&"cleaned".into(), &(4 * MIB).into()));
        assert_eq!(cleanups.next_timeout(now), None);
    }

    #[test]
    fn process_that_ends_or_does_not_answer_is_named() {
        let (now, reports, mut cleanups) = (Timestamp::now(), reports(), Cleanups::default());
        let mut result = request(&mut cleanups, "a");
        cleanups.start_requested(now, &reports);
        cleanups.record_loss(ProcessId::new(1, 1), &CleanupOutcome::Ended);
        assert_eq!(cleanups.end(now), []);
        let late = now.plus(cleanups.next_timeout(now).unwrap());
        assert_eq!(late.since(now), DEADLINE + ANSWER_GRACE);
        assert_eq!(cleanups.end(late).len(), 1);
        let outcomes = result.try_recv().unwrap().unwrap().processes.into_iter().map(|each| each.outcome);
        assert_eq!(outcomes.collect::<Vec<_>>(), [CleanupOutcome::NoAnswer, CleanupOutcome::Ended]);
    }

    #[test]
    fn further_requests_wait_for_the_one_in_progress_and_later_ones_are_too_soon() {
        let (now, reports, mut cleanups) = (Timestamp::now(), reports(), Cleanups::default());
        let mut results: Vec<_> = (0..100).map(|_| request(&mut cleanups, "b")).collect();
        assert_eq!(cleanups.start_requested(now, &reports).len(), 1);
        cleanups.answer(ProcessId::new(3, 1), &answer(1));
        assert_eq!(cleanups.end(now).len(), 1);
        assert!(results.iter_mut().all(|result| result.try_recv().unwrap().unwrap().freed_bytes == 6 * MIB));
        let refused = |cleanups: &mut Cleanups, after| {
            let mut result = request(cleanups, "b");
            let sent = cleanups.start_requested(now.plus(after), &reports).len();
            (sent, result.try_recv().ok())
        };
        let second = Duration::from_secs(1);
        assert_eq!(refused(&mut cleanups, second), (0, Some(Err(CleanupRefusal::TooSoon(second)))));
        assert_eq!(refused(&mut cleanups, COOLDOWN), (1, None));
        let mut rejected = request(&mut cleanups, "c");
        cleanups.start_requested(now, &reports);
        assert_eq!(rejected.try_recv().unwrap(), Err(CleanupRefusal::NotReporting));
    }

    #[test]
    fn own_cleanups_are_a_minute_apart_and_ever_rarer_while_they_free_nothing() {
        let (now, reports, mut cleanups) = (Timestamp::now(), reports(), Cleanups::default());
        let auto = |cleanups: &mut Cleanups, at: Timestamp| {
            cleanups.request(ContainerId::new("b"), DEADLINE, CleanupTrigger::Auto);
            cleanups.start_requested(at, &reports).len() == 1
        };
        let second = Duration::from_secs(1);
        assert!(auto(&mut cleanups, now));
        cleanups.answer(ProcessId::new(3, 1), &answer(1));
        let ended = cleanups.end(now);
        assert_eq!((ended.len(), ended[0].is_auto), (1, true));
        let mut at = now;
        for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
            let cooldown = Duration::from_secs(60 * minutes);
            assert!(!auto(&mut cleanups, at.plus(cooldown).minus(second)), "{minutes}");
            at = at.plus(cooldown);
            assert!(auto(&mut cleanups, at), "{minutes}");
            at = at.plus(DEADLINE + ANSWER_GRACE);
            assert_eq!(cleanups.end(at)[0].report.freed_bytes, 0);
        }
        at = at.plus(MAX_AUTO_COOLDOWN);
        assert!(auto(&mut cleanups, at));
        cleanups.answer(ProcessId::new(3, 1), &answer(cleanups.last_id));
        cleanups.end(at);
        assert!(auto(&mut cleanups, at.plus(AUTO_COOLDOWN)), "the last one gave memory back");
    }

    #[test]
    fn process_that_connects_again_may_answer_and_a_failure_is_told() {
        let (now, reports, mut cleanups) = (Timestamp::now(), reports(), Cleanups::default());
        let mut result = request(&mut cleanups, "a");
        cleanups.start_requested(now, &reports);
        cleanups.record_loss(ProcessId::new(1, 1), &CleanupOutcome::Ended);
        cleanups.answer(ProcessId::new(1, 1), &answer(1));
        cleanups.answer(ProcessId::new(2, 1), &Cleaned { id: 1, outcome: None });
        cleanups.end(now);
        let report = result.try_recv().unwrap().unwrap();
        let outcomes: Vec<_> = report.processes.into_iter().map(|each| each.outcome).collect();
        assert_eq!((outcomes[0].clone(), outcomes[1].freed_bytes()), (CleanupOutcome::Failed, 6 * MIB));
    }
}
