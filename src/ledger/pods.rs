//! Kills of which only the counter of a pod's cgroup tells: the container's own cgroup was gone before anybody read it. Pure.
//!
//! A container that is there when the pod's counter has grown is innocent: its own counter tells of its kills, and it was
//! read later. So it was one that ran since the look before and is gone. If that is one alone, and its runtime has told of its
//! end, the kill is its; else the kill stays without an owner, and its evidence names the pod.

use std::time::Duration;

use super::counters::OfPod;
use super::entries::Evidence;
use super::machine::Machine;
use crate::clock::Moment;
use crate::discover::ContainerId;

/// The runtime has told by then of all containers that were there: a list each second, and some time to answer.
const TOLD_WITHIN: Duration = Duration::from_secs(3);
/// The clocks of looks and of starts and ends, in seconds; the wider, the more containers may have been it.
const CLOCKS_PART: f64 = 1.0;
/// A runtime may stamp an end so many seconds after the cgroup was gone.
const END_MAY_FOLLOW: f64 = 5.0;

impl Machine {
    /// Containers that alone can have had the kills that the counters of their pods tell of, and how many.
    pub(super) fn counted_by_pods(&self, now: Moment) -> Vec<(ContainerId, u64)> {
        let pods = self.counters.pods().filter(|pod| now.since(pod.grew) >= TOLD_WITHIN);
        let mut found: Vec<_> = pods.filter_map(|pod| Some((self.only_one(&pod)?, pod.kills))).collect();
        found.sort();
        found
    }

    /// The one container of a pod that is gone and ran between the two looks.
    fn only_one(&self, pod: &OfPod<'_>) -> Option<ContainerId> {
        let (from, to) = (pod.quiet?.unix_seconds() - CLOCKS_PART, pod.grew.unix_seconds() + CLOCKS_PART);
        let mut suspects = self.runs.iter().filter(|(id, known)| {
            let mut runs = known.all_runs();
            known.is_of_pod(pod.path)
                && !pod.innocent.contains(*id)
                && runs
                    .any(|run| run.ended.is_none_or(|at| at >= from) && run.started.is_none_or(|at| at <= to))
        });
        let (id, known) = suspects.next()?;
        let ended = |at: f64| (from..=to + END_MAY_FOLLOW).contains(&at);
        let is_over = known.all_runs().any(|run| run.ended.is_some_and(ended));
        (suspects.next().is_none() && is_over).then(|| id.clone())
    }

    /// Says of a kill that stays without an owner in which pod it was, if the counters of pods tell of all such kills.
    pub(super) fn tell_pod(&mut self, at: usize) {
        let ownerless = self.ownerless();
        let kills: u64 = self.counters.pods().map(|pod| pod.kills).sum();
        let are_gaps = ownerless.iter().all(|at| self.open[*at].kill.kernel_usec.is_none());
        if !are_gaps || kills != ownerless.len() as u64 {
            return;
        }
        let mut pods: Vec<_> = self.counters.pods().map(|pod| pod.path.to_owned()).collect();
        pods.sort();
        let Some(pod) = pods.into_iter().next() else { return };
        let said = format!("the cgroup of a pod counted it, {pod}; which container's it was nothing tells");
        self.open[at].kill.evidence.push(Evidence::new("cgroup", said));
        self.counters.explain_pod(&pod, 1);
    }
}
