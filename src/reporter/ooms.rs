//! CUDA out-of-memory errors on their way to the ledger, limited for each container: each becomes an event on disk, and a container
//! must not fill the ledger.

use std::collections::HashMap;
use std::time::Duration;

use super::message::OomMessage;
use super::reports::{DeviceUuid, Reports};
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::host::RateLimit;
use crate::host::process::ProcessId;

/// Events of one container: per minute, and at once. Further errors are only counted: 64 MiB of events hold those of weeks.
const MAX_EVENTS: (u32, u32) = (1, 16);
const MINUTE: Duration = Duration::from_secs(60);
/// Messages of one container that a process ended by an error, per second and at once: at most one for each process.
const MAX_ENDS: (u32, u32) = (1, 128);
/// Errors of one container that become events although there are too many, because a process ended by them: per minute and at once.
const MAX_LATE_EVENTS: (u32, u32) = (1, 128);
/// Maximum number of processes of a container of which an error without an event is kept.
const MAX_DROPPED: usize = 128;

/// A CUDA out-of-memory error that a process reported, or that was read in its container's log.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedOom {
    /// When it happened.
    pub at: Timestamp,
    /// The process; `None` for one of a log.
    pub process: Option<ProcessId>,
    /// Its container.
    pub container: ContainerId,
    /// Its local rank.
    pub rank: Option<u8>,
    /// The device, if the process knows its UUID.
    pub device: DeviceUuid,
    /// Errors of the container before this one that are not events.
    pub skipped: u64,
    /// Errors to count: this one, and those before it that were not counted yet.
    pub errors: u64,
    /// Whether it becomes an event.
    pub is_event: bool,
    /// The message.
    pub message: OomMessage,
}

/// Errors that the ledger has not taken yet.
#[derive(Debug, Default)]
pub struct OomQueue {
    waiting: Vec<ReportedOom>,
    containers: HashMap<ContainerId, ContainerLimit>,
}

#[derive(Debug)]
struct ContainerLimit {
    events: RateLimit,
    ends: RateLimit,
    late_events: RateLimit,
    /// Errors since the last event.
    skipped: u64,
    /// Errors that are not counted yet, and the newest of them.
    uncounted: Option<ReportedOom>,
    /// Number of events.
    made: u64,
    /// The newest error without an event of each process, and the number of events before it: it becomes one if the process ends by it.
    dropped: HashMap<ProcessId, (u64, ReportedOom)>,
}

impl ReportedOom {
    /// Returns an error of a connected process; `None` if it is not connected any more.
    pub fn of_process(
        now: Timestamp,
        reports: &Reports,
        process: ProcessId,
        message: OomMessage,
    ) -> Option<Self> {
        let reporting = reports.processes.get(&process)?;
        Some(Self {
            at: now.minus(message.ago),
            process: Some(process),
            container: reporting.container.clone(),
            rank: Some(reporting.rank),
            device: message.uuid.clone().or_else(|| reporting.uuid(message.device?)),
            skipped: message.skipped,
            errors: message.skipped.saturating_add(1),
            is_event: true,
            message,
        })
    }
}

impl OomQueue {
    /// Adds an error. Returns whether there is one for the ledger.
    pub fn add(&mut self, now: Timestamp, mut oom: ReportedOom) -> bool {
        let limit = self.containers.entry(oom.container.clone()).or_insert_with(|| ContainerLimit {
            events: RateLimit::every(MINUTE, now, MAX_EVENTS.0, MAX_EVENTS.1),
            ends: RateLimit::new(now, MAX_ENDS.0, MAX_ENDS.1),
            late_events: RateLimit::every(MINUTE, now, MAX_LATE_EVENTS.0, MAX_LATE_EVENTS.1),
            skipped: 0,
            uncounted: None,
            made: 0,
            dropped: HashMap::new(),
        });
        if oom.message.is_update() && !oom.message.is_uncaught {
            let is_allowed = limit.ends.take(now);
            self.waiting.extend(is_allowed.then_some(ReportedOom { errors: 0, ..oom }));
            return is_allowed;
        }
        if oom.message.is_only_uncaught() {
            let is_allowed = limit.ends.take(now);
            let dropped = oom.process.and_then(|process| limit.dropped.remove(&process));
            let dropped = dropped.filter(|(_, dropped)| dropped.message.number == oom.message.number);
            // its error was counted when it happened
            let end = match dropped.filter(|_| is_allowed && limit.late_events.take(now)) {
                Some((made, mut error)) => {
                    // an event after it counts it among those before
                    let skipped = if made == limit.made { error.errors } else { 0 };
                    limit.skipped = limit.skipped.saturating_sub(skipped);
                    (error.errors, error.is_event, error.message.is_uncaught) = (0, true, true);
                    error
                }
                None => ReportedOom { errors: 0, ..oom },
            };
            self.waiting.extend(is_allowed.then_some(end));
            return is_allowed;
        }
        if limit.events.take(now) {
            limit.made += 1;
            oom.skipped = oom.skipped.saturating_add(std::mem::take(&mut limit.skipped));
            self.waiting.push(oom);
            return true;
        }
        limit.skipped = limit.skipped.saturating_add(oom.errors);
        if let Some(process) = oom.process {
            limit.dropped.insert(process, (limit.made, oom.clone()));
            // the oldest other one is most likely of a process that has ended
            let others = limit.dropped.iter().filter(|(other, _)| **other != process);
            let oldest = others.min_by_key(|(_, (made, _))| *made).map(|(oldest, _)| *oldest);
            if let Some(oldest) = oldest.filter(|_| limit.dropped.len() > MAX_DROPPED) {
                limit.dropped.remove(&oldest);
            }
        }
        let before = limit.uncounted.take().map_or(0, |before| before.errors);
        (oom.errors, oom.is_event) = (oom.errors.saturating_add(before), false);
        limit.uncounted = Some(oom);
        false
    }

    /// Takes the errors that were added since the last call; those that are no events as one for each container.
    pub fn take(&mut self) -> Vec<ReportedOom> {
        let mut taken = std::mem::take(&mut self.waiting);
        taken.extend(self.containers.values_mut().filter_map(|limit| limit.uncounted.take()));
        taken
    }

    /// Forgets containers that ended.
    pub fn retain(&mut self, is_running: impl Fn(&ContainerId) -> bool) {
        self.containers.retain(|id, limit| {
            let is_kept = is_running(id);
            self.waiting.extend(limit.uncounted.take().filter(|_| !is_kept));
            is_kept
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reporter::message::Hello;

    #[test]
    fn flood_of_one_container_is_counted_and_that_of_another_is_recorded() {
        let (now, mut reports, mut queue) = (Timestamp::now(), Reports::default(), OomQueue::default());
        for (pid, id) in [(1, "a"), (2, "b")] {
            reports.hello(
                ProcessId::new(pid, 1),
                &ContainerId::new(id),
                Hello { local_rank: 0, devices: vec![] },
            );
        }
        let error = |number| OomMessage { number, tried: Some(1), ..OomMessage::default() };
        let of = |pid, number| ReportedOom::of_process(now, &reports, ProcessId::new(pid, 1), error(number));
        let added = (1..=1_000).filter(|number| queue.add(now, of(1, *number).unwrap())).count();
        assert_eq!(added, 16);
        assert!(queue.add(now, of(2, 1).unwrap()));
        assert_eq!(of(3, 1), None, "it is not connected");
        let counted = |taken: &[ReportedOom]| {
            let of_a = taken.iter().filter(|oom| oom.process == Some(ProcessId::new(1, 1)));
            of_a.map(|oom| oom.errors).sum::<u64>()
        };
        let taken = queue.take();
        assert_eq!((taken.iter().filter(|oom| oom.is_event).count(), counted(&taken)), (17, 1_000));
        assert_eq!(
            taken.last().map(|oom| oom.message.number),
            Some(1_000),
            "the newest is the one that is known"
        );
        assert!(queue.take().is_empty());
        let later = now.plus(MINUTE);
        assert!(queue.add(later, of(1, 1_001).unwrap()) && !queue.add(later, of(1, 1_002).unwrap()));
        let taken = queue.take();
        assert_eq!((taken[0].skipped, counted(&taken)), (984, 2), "those that are no events");
        assert!(!queue.add(later, of(1, 1_003).unwrap()));
        queue.retain(|_| false);
        assert_eq!(counted(&queue.take()), 1, "also of a container that ended");
    }

    #[test]
    fn message_that_a_process_ended_is_not_lost_among_errors() {
        let (now, mut reports, mut queue) = (Timestamp::now(), Reports::default(), OomQueue::default());
        for pid in 1..=64 {
            reports.hello(
                ProcessId::new(pid, 1),
                &ContainerId::new("a"),
                Hello { local_rank: 0, devices: vec![] },
            );
        }
        let error = OomMessage { number: 1, tried: Some(1), ..OomMessage::default() };
        let end = OomMessage { number: 1, is_uncaught: true, ..OomMessage::default() };
        assert!(end.is_only_uncaught());
        let mut add = |pid, message: &OomMessage| {
            queue.add(
                now,
                ReportedOom::of_process(now, &reports, ProcessId::new(pid, 1), message.clone()).unwrap(),
            )
        };
        assert_eq!((1..=64).filter(|pid| add(*pid, &error)).count(), 16);
        assert_eq!((1..=64).filter(|pid| add(*pid, &end)).count(), 64);
        let taken = queue.take();
        assert_eq!(taken.iter().map(|oom| oom.errors).sum::<u64>(), 64, "each is one error");
        let ends =
            taken.iter().filter(|oom| oom.is_event && oom.message.is_uncaught && oom.message.tried.is_some());
        assert_eq!(ends.count(), 48, "errors that were no events are events once they ended a process");
        let next = |number| OomMessage { number, tried: Some(1), ..OomMessage::default() };
        let of =
            |pid, message| ReportedOom::of_process(now, &reports, ProcessId::new(pid, 1), message).unwrap();
        assert!(queue.add(now.plus(MINUTE), of(1, next(2))));
        assert_eq!(queue.take()[0].skipped, 0, "all of them have an event");
    }

    #[test]
    fn survived_errors_of_many_processes_do_not_hide_the_one_that_ended_the_last() {
        let (now, mut reports, mut queue) = (Timestamp::now(), Reports::default(), OomQueue::default());
        let error = OomMessage { number: 1, tried: Some(1), ..OomMessage::default() };
        let last = 2 * MAX_DROPPED as u32;
        for pid in 1..=last {
            reports.hello(
                ProcessId::new(pid, 1),
                &ContainerId::new("a"),
                Hello { local_rank: 0, devices: vec![] },
            );
            queue.add(
                now,
                ReportedOom::of_process(now, &reports, ProcessId::new(pid, 1), error.clone()).unwrap(),
            );
            reports.disconnect(ProcessId::new(pid, 1));
        }
        queue.take();
        reports.hello(
            ProcessId::new(last, 1),
            &ContainerId::new("a"),
            Hello { local_rank: 0, devices: vec![] },
        );
        let end = OomMessage { number: 1, is_uncaught: true, ..OomMessage::default() };
        queue.add(now, ReportedOom::of_process(now, &reports, ProcessId::new(last, 1), end).unwrap());
        let ended = queue.take();
        assert!(ended[0].is_event && ended[0].message.tried.is_some(), "{ended:?}");
    }

    #[test]
    fn forged_ends_of_processes_fill_no_ledger() {
        let (now, mut reports, mut queue) = (Timestamp::now(), Reports::default(), OomQueue::default());
        reports.hello(ProcessId::new(1, 1), &ContainerId::new("a"), Hello { local_rank: 0, devices: vec![] });
        let of = |message| ReportedOom::of_process(now, &reports, ProcessId::new(1, 1), message).unwrap();
        let mut events = 0;
        for second in 0..3_600 {
            let (number, later) = (second + 1, now.plus(Duration::from_secs(second)));
            queue.add(later, of(OomMessage { number, tried: Some(1), ..OomMessage::default() }));
            queue.add(later, of(OomMessage { number, is_uncaught: true, ..OomMessage::default() }));
            events += queue.take().iter().filter(|oom| oom.is_event && oom.message.tried.is_some()).count();
        }
        assert!(events < 2 * 60 + 16 + 128 + 2, "{events} in an hour");
    }
}
