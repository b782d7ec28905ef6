//! Kills of which only the counter of a pod's cgroup tells: the container's own cgroup was gone before anybody read it. Pure.
//!
//! A container that is there when the pod's counter has grown is innocent: its own counter tells of its kills, and it was
//! read later. So it was one that ran since the look before and is gone. If that is one alone, and its runtime has told of its
//! end, the kill is its; else the kill stays without an owner, and its evidence names the pod. One of which nobody has
//! told more than that it was made may have run too: then there are two, and nobody is named.

use std::time::Duration;

use super::counters::OfPod;
use super::entries::Evidence;
use super::machine::Machine;
use super::runs::{Known, Run};
use crate::clock::Moment;
use crate::discover::ContainerId;

/// The runtime has told by then of all containers that were there: a list each second, and some time to answer.
const TOLD_WITHIN: Duration = Duration::from_secs(5);
/// A container that was made so many seconds before the kill and of whose run nobody has told may have begun since.
const BEGINS_WITHIN: f64 = 10.0;
/// The clocks of looks and of starts and ends, in seconds; the wider, the more containers may have been it.
const CLOCKS_PART: f64 = 1.0;
/// A runtime may stamp an end so many seconds after the cgroup was gone.
const END_MAY_FOLLOW: f64 = 5.0;

impl Machine {
    /// The counters of pods are asked only while the log cannot be read, and only about kills that no record tells of: the log
    /// knows better, and what it tells may be ahead of a new pod's counter.
    pub(super) fn asks_pods(&self, ownerless: &[usize]) -> bool {
        !self.log_up && ownerless.iter().all(|at| self.open[*at].kill.kernel_usec.is_none())
    }

    /// Containers that alone can have had the kills that the counters of their pods tell of, and how many.
    pub(super) fn counted_by_pods(&self, now: Moment) -> Vec<(ContainerId, u64)> {
        let pods = self.counters.pods().filter(|pod| now.since(pod.grew) >= TOLD_WITHIN);
        let mut found: Vec<_> = pods.filter_map(|pod| Some((self.only_one(&pod)?, pod.kills))).collect();
        found.sort();
        found
    }

    /// The one container of a pod that is gone and ran between the two looks, or may have.
    fn only_one(&self, pod: &OfPod<'_>) -> Option<ContainerId> {
        let (from, to) = (pod.quiet?.unix_seconds() - CLOCKS_PART, pod.grew.unix_seconds() + CLOCKS_PART);
        let ran = |run: &Run| run.ended.is_none_or(|at| at >= from) && run.started.is_none_or(|at| at <= to);
        let may_have_run = |known: &Known| (from - BEGINS_WITHIN..=to).contains(&known.told);
        let mut suspects = self.runs.iter().filter(|(id, known)| {
            // the counter of one that is there is that of its present run alone
            let is_suspect = match (pod.innocent.contains(*id), known.run.is_some()) {
                (true, _) => known.earlier_runs().any(ran),
                (false, true) => known.all_runs().any(ran),
                (false, false) => may_have_run(known),
            };
            is_suspect && known.is_of_pod(pod.path)
        });
        let (id, known) = suspects.next()?;
        let ended = |at: f64| (from..=to + END_MAY_FOLLOW).contains(&at);
        let is_over = known.all_runs().any(|run| run.ended.is_some_and(ended));
        (suspects.next().is_none() && is_over).then(|| id.clone())
    }

    /// Says of a kill that stays without an owner in which pod it was, if the counter of one pod tells of all such kills and
    /// no other pod's of any.
    pub(super) fn tell_pod(&mut self, at: usize) {
        let ownerless = self.ownerless();
        let pod = {
            let mut pods = self.counters.pods();
            let (Some(pod), None) = (pods.next(), pods.next()) else { return };
            if pod.kills != ownerless.len() as u64 {
                return;
            }
            pod.path.to_owned()
        };
        if !self.asks_pods(&ownerless) {
            return;
        }
        let said = format!("the cgroup of a pod counted it, {pod}; which container's it was nothing tells");
        self.open[at].kill.evidence.push(Evidence::new("cgroup", said));
        self.counters.explain_pod(&pod, 1);
    }
}
