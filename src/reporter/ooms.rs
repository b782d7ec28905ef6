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

/// A CUDA out-of-memory error that a process reported.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedOom {
    /// When it happened.
    pub at: Timestamp,
    /// The process.
    pub process: ProcessKey,
    /// Its container.
    pub container: ContainerId,
    /// Its local rank.
    pub rank: u8,
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

impl OomQueue {
    /// Adds an error of a connected process. Returns whether there is one for the ledger.
    pub fn add(
        &mut self,
        now: Timestamp,
        reports: &Reports,
        process: ProcessKey,
        message: OomMessage,
    ) -> bool {
        let Some(reporting) = reports.processes.get(&process) else { return false };
        let limit = self.containers.entry(reporting.container.clone()).or_insert_with(|| ContainerLimit {
            events: RateLimit::new(now, EVENTS.0, EVENTS.1),
            skipped: 0,
        });
        let errors = message.skipped + u64::from(!message.is_only_uncaught());
        if !limit.events.take(now) {
            limit.skipped = limit.skipped.saturating_add(errors);
            return false;
        }
        let skipped = if message.is_only_uncaught() { 0 } else { std::mem::take(&mut limit.skipped) };
        self.waiting.push(ReportedOom {
            at: now.minus(message.ago),
            process,
            container: reporting.container.clone(),
            rank: reporting.rank,
            device: message.uuid.clone().or_else(|| reporting.uuid(message.device?)),
            skipped: skipped.saturating_add(message.skipped),
            message,
        });
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
        let added = (1..=1_000).filter(|number| queue.add(now, &reports, (1, 1), error(*number))).count();
        assert_eq!(added, 16);
        assert!(queue.add(now, &reports, (2, 1), error(1)));
        assert!(!queue.add(now, &reports, (3, 1), error(1)), "it is not connected");
        assert!(queue.add(now.plus(Duration::from_secs(2)), &reports, (1, 1), error(1_001)));
        let taken = queue.take();
        let of_a = taken.iter().filter(|oom| oom.process.0 == 1);
        assert_eq!(of_a.map(|oom| 1 + oom.skipped).sum::<u64>(), 1_001);
        assert!(queue.take().is_empty());
    }
}
