//! Kills of which nothing tells the owner, against evidence that counts and does not name: the cgroups' counters, and the
//! runtimes' word of an OOM. Pure.
//!
//! They are matched all together and only if the numbers agree. The count of each container is then right; which of the
//! kills was whose is decided by names and may not be known: that is entered in the kill (`exchangeable`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::attribution::BY_SIGKILL;
use super::entries::Evidence;
use super::fit::{Fit, Judge};
use super::machine::Machine;
use super::whose::Place;
use crate::clock::Moment;
use crate::discover::ContainerId;

/// Shortly before a kill is given up, what the cgroups counted is dealt even if the numbers do not agree.
const LAST_MOMENT: Duration = Duration::from_secs(9);
/// The runtimes' word is not taken before their events can be complete.
const RUNTIMES_MAY_TAKE: Duration = Duration::from_secs(2);
/// What the runtimes tell belongs to a kill that is at most so many seconds older; or, because a kill without a record
/// has the time at which it was noticed, so many younger.
const WORD_WITHIN: f64 = 5.0;
const WORD_BEFORE: f64 = 3.0;

/// A container may end, and that be told, so many seconds after the kill that ended it: what is told sooner after the
/// ledger was begun may belong to a kill from before.
const END_MAY_FOLLOW: f64 = 1.0;

/// A container and the time of its end.
type Told = (ContainerId, f64);

/// Who may be the owner of a set of kills.
struct Set {
    judge: Judge,
    places: Vec<ContainerId>,
    /// All kills of the set are one container's, or the only one.
    is_clear: bool,
}

impl Set {
    fn new(machine: &Machine, kills: &[usize], counted: &[(ContainerId, u64)], told: &[Told]) -> Self {
        let counts = counted.iter().map(|(_, kills)| *kills).sum::<u64>() + told.len() as u64;
        let places: Vec<_> =
            counted.iter().map(|(id, _)| id).chain(told.iter().map(|(id, _)| id)).cloned().collect();
        Self {
            judge: Judge::new(
                &machine.runs,
                kills.iter().map(|at| Arc::clone(&machine.open[*at].kill.process)),
            ),
            is_clear: places.len() == 1 && kills.len() as u64 <= counts,
            places,
        }
    }

    fn fit(&self, machine: &Machine, id: &ContainerId, at: usize) -> Fit {
        self.judge.fit(&machine.runs, id, &machine.open[at].kill.process)
    }

    /// The kill may be another one's of the set.
    fn is_exchangeable(&self, machine: &Machine, id: &ContainerId, at: usize) -> bool {
        let has_one = |place: &&ContainerId| self.fit(machine, place, at) == Fit::Name;
        let by_name =
            self.fit(machine, id, at) == Fit::Name && self.places.iter().filter(has_one).count() == 1;
        !self.is_clear && !by_name
    }
}

impl Machine {
    /// So many kills without an owner as the cgroups counted and nothing explains, or one cgroup alone counted at least as
    /// many; else so many as the cgroups counted and the runtimes tell of together.
    pub(super) fn by_sets(&mut self, now: Moment) {
        let ownerless = self.ownerless();
        if ownerless.is_empty() || self.kernel.waits() {
            return; // a record or a gap is still to come: the numbers cannot match
        }
        let counted = self.unexplained(now, &ownerless);
        let sum: u64 = counted.iter().map(|(_, kills)| kills).sum();
        let kills = ownerless.len() as u64;
        if sum == kills || (counted.len() == 1 && sum > kills) {
            let set = Set::new(self, &ownerless, &counted, &[]);
            return self.by_counters(&set, ownerless, &counted, &Fit::ALL);
        }
        let noticed = |at: usize| now.since(self.open[at].noticed);
        let ready = ownerless.iter().all(|at| noticed(*at) >= RUNTIMES_MAY_TAKE);
        if !ready || sum > kills {
            return;
        }
        let told = self.told_by_runtimes(now, &ownerless, &counted);
        if sum + told.len() as u64 == kills {
            let set = Set::new(self, &ownerless, &counted, &told);
            let rest = self.by_runtimes(&set, ownerless, &told);
            return self.by_counters(&set, rest, &counted, &Fit::ALL);
        }
        // nothing more will be known: what a cgroup counted is among these
        let set = Set::new(self, &ownerless, &counted, &told);
        let last = ownerless.iter().copied().filter(|at| noticed(*at) >= LAST_MOMENT);
        let (records, gaps): (Vec<_>, Vec<_>) =
            last.partition(|at| self.open[*at].kill.kernel_usec.is_some());
        if sum <= (records.len() + gaps.len()) as u64 {
            // a process only to a container that had one of its name; a kill without a record is like another
            self.by_counters(&set, records, &counted, &[Fit::Name]);
            self.by_counters(&set, gaps, &self.unexplained(now, &ownerless), &[Fit::Unknown]);
        }
    }

    /// What the cgroups counted and nothing explains, by container: its own, and that of its pod.
    fn unexplained(&self, now: Moment, ownerless: &[usize]) -> Vec<(ContainerId, u64)> {
        let mut counted: BTreeMap<_, _> = self.counters.candidates().into_iter().collect();
        if self.asks_pods(ownerless) {
            for (id, kills) in self.counted_by_pods(now) {
                *counted.entry(id).or_insert(0) += kills;
            }
        }
        counted.into_iter().collect()
    }

    /// Deals kills to the containers whose cgroups counted so many, those that fit best first.
    fn by_counters(&mut self, set: &Set, kills: Vec<usize>, counted: &[(ContainerId, u64)], fits: &[Fit]) {
        let mut counted = counted.to_vec();
        let mut rest = kills;
        for fit in fits {
            rest.retain(|at| {
                let fits = |id: &ContainerId| *fit == Fit::Any || set.fit(self, id, *at) == *fit;
                let Some((id, left)) = counted.iter_mut().find(|(id, left)| *left > 0 && fits(id)) else {
                    return true;
                };
                *left -= 1;
                let id = id.clone();
                let is_own = self.counters.candidates().iter().any(|(counted, _)| *counted == id);
                let why = if is_own {
                    "its cgroup counted a kill that nothing else explains"
                } else {
                    "the cgroup of its pod counted a kill that no other container of the pod can have had"
                };
                self.give_by_number(set, *at, &id, "cgroup", why);
                false
            });
        }
    }

    fn give_by_number(&mut self, set: &Set, at: usize, id: &ContainerId, method: &'static str, why: &str) {
        let is_exchangeable = set.is_exchangeable(self, id, at);
        let kill = &mut self.open[at].kill;
        kill.exchangeable = is_exchangeable;
        kill.evidence.push(Evidence::new(method, why));
        self.give(at, Place::Container(id.clone()), method);
    }

    /// Containers that ended by SIGKILL near these kills though nobody asked, of which the runtime told an OOM and no kill
    /// is known. With the time of the end, the earliest first. SIGKILL alone is no evidence: anybody may send it.
    fn told_by_runtimes(&self, now: Moment, kills: &[usize], counted: &[(ContainerId, u64)]) -> Vec<Told> {
        let begun = now.unix_seconds_of_kernel(self.kernel.account().since_usec) + END_MAY_FOLLOW;
        let near = |told: f64| {
            kills.iter().any(|at| (-WORD_BEFORE..WORD_WITHIN).contains(&(told - self.open[*at].kill.at)))
        };
        let mut told: Vec<Told> = Vec::new();
        let runs = self.runs.iter().flat_map(|(id, known)| known.all_runs().map(move |run| (id, known, run)));
        for (id, known, run) in runs.filter(|(_, _, run)| run.kills == 0) {
            let Some(at) =
                run.ended.filter(|at| *at >= begun && run.exit_code == Some(BY_SIGKILL) && near(*at))
            else {
                continue;
            };
            let explained = counted.iter().any(|(other, _)| other == id)
                || self.open.iter().any(|open| open.container.as_ref() == Some(id))
                || run.asked_before(at).next().is_some();
            if !explained && (known.oom_told.is_some_and(near) || run.oom_flag == Some(true)) {
                told.push((id.clone(), at));
            }
        }
        told.sort_by(|one, other| one.1.total_cmp(&other.1));
        told
    }

    /// Gives each container a kill before its end, one with a record first, then the one that fits best by its name, then
    /// the last. Returns the kills left.
    fn by_runtimes(&mut self, set: &Set, mut kills: Vec<usize>, told: &[Told]) -> Vec<usize> {
        for (id, ended) in told {
            let worth = |at: &usize| {
                let kill = &self.open[*at].kill;
                let is_before = kill.kernel_usec.is_some() && kill.at <= ended + 0.02;
                (is_before, std::cmp::Reverse(set.fit(self, id, *at)), kill.at)
            };
            let best = (0..kills.len()).max_by(|one, other| {
                let (one, other) = (worth(&kills[*one]), worth(&kills[*other]));
                (one.0, one.1).cmp(&(other.0, other.1)).then(one.2.total_cmp(&other.2))
            });
            if let Some(best) = best {
                let why = "its runtime told of an OOM, and of its end by SIGKILL, which nobody had asked for";
                self.give_by_number(set, kills.remove(best), id, "runtime", why);
            }
        }
        kills
    }
}
