//! CUDA out-of-memory errors on their way to the ledger, limited for each container: each becomes an event on disk, and a container
//! must not fill the ledger.

use std::collections::HashMap;

use super::message::OomMessage;
use super::rate_limit::RateLimit;
use super::reports::{DeviceUuid, ProcessKey, Reports};
use crate::clock::Timestamp;
use crate::discover::ContainerId;

/// Events of one container: per second, and at once. Further errors are only counted.
const EVENTS: (u32, u32) = (1, 16);

/// A CUDA out-of-memory error that a process reported, or that was read in its container's log.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedOom {
    /// When it happened.
    pub at: Timestamp,
    /// The process; `None` for one of a log.
    pub process: Option<ProcessKey>,
    /// Its container.
    pub container: ContainerId,
    /// Its local rank.
    pub rank: Option<u8>,
    /// The device, if the process knows its UUID.
    pub device: DeviceUuid,
    /// Errors of the container before this one that are not reported themselves.
    pub skipped: u64,
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
    skipped: u64,
}

impl ReportedOom {
    /// Returns an error of a connected process; `None` if it is not connected any more.
    pub fn of_process(
        now: Timestamp,
        reports: &Reports,
        process: ProcessKey,
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
            message,
        })
    }
}

impl OomQueue {
    /// Adds an error. Returns whether there is one for the ledger.
    pub fn add(&mut self, now: Timestamp, mut oom: ReportedOom) -> bool {
        let limit = self.containers.entry(oom.container.clone()).or_insert_with(|| ContainerLimit {
            events: RateLimit::new(now, EVENTS.0, EVENTS.1),
            skipped: 0,
        });
        let is_error = !oom.message.is_only_uncaught();
        if !limit.events.take(now) {
            let errors = oom.skipped.saturating_add(u64::from(is_error));
            limit.skipped = limit.skipped.saturating_add(errors);
            return false;
        }
        if is_error {
            oom.skipped = oom.skipped.saturating_add(std::mem::take(&mut limit.skipped));
        }
        self.waiting.push(oom);
        true
    }

    /// Takes the errors that were added since the last call.
    pub fn take(&mut self) -> Vec<ReportedOom> {
        std::mem::take(&mut self.waiting)
    }

    /// Forgets containers that ended.
    pub fn retain(&mut self, is_running: impl Fn(&ContainerId) -> bool) {
        self.containers.retain(|id, _| is_running(id));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::reporter::message::Hello;

    #[test]
    fn flood_of_one_container_is_counted_and_another_one_is_heard() {
        let (now, mut reports, mut queue) = (Timestamp::now(), Reports::default(), OomQueue::default());
        for (pid, id) in [(1, "a"), (2, "b")] {
            reports.hello((pid, 1), &ContainerId::new(id), Hello { local_rank: 0, devices: vec![] });
        }
        let error = |number| OomMessage { number, tried: Some(1), ..OomMessage::default() };
        let of = |pid, number| ReportedOom::of_process(now, &reports, (pid, 1), error(number));
        let added = (1..=1_000).filter(|number| queue.add(now, of(1, *number).unwrap())).count();
        assert_eq!(added, 16);
        assert!(queue.add(now, of(2, 1).unwrap()));
        assert_eq!(of(3, 1), None, "it is not connected");
        assert!(queue.add(now.plus(Duration::from_secs(2)), of(1, 1_001).unwrap()));
        let taken = queue.take();
        let of_a = taken.iter().filter(|oom| oom.process == Some((1, 1)));
        assert_eq!(of_a.map(|oom| 1 + oom.skipped).sum::<u64>(), 1_001);
        assert!(queue.take().is_empty());
    }
}
