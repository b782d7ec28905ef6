//! What a container held in the last minutes: the ledger's own short history, for events and for `why`. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::desk::Process;
use super::entries::{RoleHeld, Sample};
use crate::clock::Moment;

/// Samples are kept so far apart, and so many: five minutes.
const KEPT: (Duration, usize) = (Duration::from_secs(10), 30);

/// Samples of one run.
#[derive(Clone, Debug, Default)]
pub struct History {
    kept: VecDeque<Sample>,
    kept_at: Option<Moment>,
    newest: Option<Sample>,
}

impl History {
    /// Enters the sample of one cycle.
    pub fn enter(&mut self, now: Moment, sample: Sample) {
        self.newest = Some(sample);
        if self.kept_at.is_none_or(|kept| now.since(kept) >= KEPT.0) {
            self.kept_at = Some(now);
            self.kept.push_back(sample);
            if self.kept.len() > KEPT.1 {
                self.kept.pop_front();
            }
        }
    }

    /// The sample of the newest cycle.
    pub fn newest(&self) -> Option<Sample> {
        self.newest
    }

    /// All of them, oldest first, the newest last. None if no cycle ever saw the container.
    pub fn samples(&self) -> Option<Vec<Sample>> {
        let newest = self.newest?;
        let mut samples: Vec<_> = self.kept.iter().copied().collect();
        if samples.last() != Some(&newest) {
            samples.push(newest);
        }
        Some(samples)
    }
}

/// Sums by role. The proportional share of a role is known only if that of each of its processes is.
pub fn by_role(processes: &[Process]) -> Vec<RoleHeld> {
    let mut roles: Vec<RoleHeld> = Vec::new();
    for process in processes {
        let label = process.role.label();
        let at = roles.iter().position(|role| &*role.role == label).unwrap_or_else(|| {
            roles.push(RoleHeld { role: label.into(), processes: 0, rss_bytes: 0, pss_bytes: Some(0) });
            roles.len() - 1
        });
        let role = &mut roles[at];
        role.processes += 1;
        role.rss_bytes += process.rss_bytes;
        role.pss_bytes = role.pss_bytes.zip(process.pss_bytes).map(|(sum, pss)| sum + pss);
    }
    roles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::Role;

    #[test]
    fn the_newest_sample_is_the_last_and_five_minutes_are_kept() {
        let (mut history, begin) = (History::default(), Moment::now());
        assert_eq!(history.samples(), None);
        for second in 0..400 {
            let sample = Sample { at: f64::from(second), ..Sample::default() };
            history.enter(begin.plus(Duration::from_secs(second as u64)), sample);
        }
        let samples = history.samples().unwrap();
        let ends = (samples[0].at, samples[29].at, samples[30].at);
        assert_eq!((samples.len(), ends), (31, (100.0, 390.0, 399.0)));
    }

    #[test]
    fn a_roles_share_is_unknown_if_that_of_one_of_its_processes_is() {
        let process = |role, pss_bytes| Process {
            pid: 1,
            ppid: 1,
            comm: "python".into(),
            role,
            python: true,
            rss_bytes: 10,
            pss_bytes,
        };
        let (worker, other) = (Role::DataloaderWorker, Role::Other);
        let roles = by_role(&[process(worker, Some(4)), process(worker, None), process(other, Some(3))]);
        let sums: Vec<_> =
            roles.iter().map(|role| (role.processes, role.rss_bytes, role.pss_bytes)).collect();
        assert_eq!(sums, [(2, 20, None), (1, 10, Some(3))]);
    }
}
