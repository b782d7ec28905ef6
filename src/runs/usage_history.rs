//! Usage of a container during the last minutes, for events and for `why`. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::usage::{ContainerUsage, ProcessUsage};
use crate::clock::{ClockStep, Timestamp};
use crate::events::{RoleUsage, UsageSample};

/// Interval between stored samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of stored samples: 5 min.
const MAX_SAMPLES: usize = 30;

/// Samples of one run.
#[derive(Clone, Debug, Default)]
pub struct History {
    kept: VecDeque<UsageSample>,
    kept_at: Option<Timestamp>,
}

impl History {
    /// Records the sample of one cycle, if it is time for one.
    pub fn record(&mut self, now: Timestamp, sample: UsageSample) {
        if self.kept_at.is_none_or(|kept| now.since(kept) >= SAMPLE_INTERVAL) {
            self.kept_at = Some(now);
            self.kept.push_back(sample);
            if self.kept.len() > MAX_SAMPLES {
                self.kept.pop_front();
            }
        }
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.kept.iter_mut().for_each(|sample| step.correct(&mut sample.at));
    }

    /// Returns the samples, oldest first.
    pub fn samples(&self) -> impl Iterator<Item = UsageSample> {
        self.kept.iter().copied()
    }
}

/// Returns sums by role, with the reason why a share is not known.
pub fn roles(usage: &ContainerUsage) -> Vec<RoleUsage> {
    let mut roles = by_role(&usage.processes);
    for role in roles.iter_mut().filter(|role| role.pss_bytes.is_none()) {
        role.pss_missing = usage.pss_missing;
    }
    roles
}

/// Returns sums by role. The PSS of a role is known only if it is known for each of its processes.
pub fn by_role(processes: &[ProcessUsage]) -> Vec<RoleUsage> {
    let mut roles: Vec<RoleUsage> = Vec::new();
    for process in processes {
        let role = process.role;
        let at = roles.iter().position(|known| known.role == role).unwrap_or_else(|| {
            roles.push(RoleUsage { role, processes: 0, rss_bytes: 0, pss_bytes: Some(0), pss_missing: None });
            roles.len() - 1
        });
        let role = &mut roles[at];
        role.processes += 1;
        role.rss_bytes += process.memory.rss_bytes;
        role.pss_bytes = role.pss_bytes.zip(process.pss_bytes).map(|(sum, pss)| sum + pss);
    }
    roles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::Role;

    #[test]
    fn keeps_a_sample_of_every_ten_seconds_for_five_minutes() {
        let (mut history, begin) = (History::default(), Timestamp::now());
        for second in 0..400 {
            let sample = UsageSample { at: f64::from(second), ..UsageSample::default() };
            history.record(begin.plus(Duration::from_secs(second as u64)), sample);
        }
        let samples: Vec<f64> = history.samples().map(|sample| sample.at).collect();
        assert_eq!((samples.len(), samples[0], samples[29]), (30, 100.0, 390.0));
    }

    #[test]
    fn pss_of_role_is_unknown_if_one_process_has_none() {
        let process = |role, pss_bytes| ProcessUsage {
            pid: 1,
            ppid: 1,
            comm: "python".into(),
            role,
            python: true,
            memory: crate::collect::process::ResidentMemory { rss_bytes: 10, anon_bytes: 10 },
            pss_bytes,
            program: None,
        };
        let (worker, other) = (Role::DataloaderWorker, Role::Other);
        let roles = by_role(&[process(worker, Some(4)), process(worker, None), process(other, Some(3))]);
        let sums: Vec<_> =
            roles.iter().map(|role| (role.processes, role.rss_bytes, role.pss_bytes)).collect();
        assert_eq!(sums, [(2, 20, None), (1, 10, Some(3))]);
    }
}
