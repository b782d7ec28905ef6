//! Attributes kills by evidence that has numbers but no pids: the cgroups' counters, and the runtimes' OOM events. Pure.
//!
//! Kills and numbers that can be of the same time are looked at together ([`assign`]). There are two rules: if one
//! container alone is a candidate, and its number is large enough, all these kills are its; if there are several, and
//! the sum of their numbers is the number of kills, each gets its number, in order of time. The numbers are right then,
//! but which process was whose is not known, and the event says so (method `set`). Everything else stays unattributed.

use std::collections::VecDeque;
use std::time::Duration;

use super::Reconciler;
use super::cgroup_counters::Count;
use super::owner::PendingKill;
use crate::clock::Timestamp;
use crate::discover::{ContainerId, PathOwner};
use crate::events::{Evidence, Method};
use crate::ledger::container_state::ContainerState;
use crate::ledger::interval::Interval;
use crate::ledger::run::LedgerRun;
use crate::lifecycle::timing::{
    CLOCK_TOLERANCE, COUNTER_TIMEOUT, EXIT_WINDOW, FORCED_MATCH_AFTER, LOG_DELAY, MAX_EXIT_DELAY,
    MAX_OOM_EVENT_DELAY, RUNTIME_EVENT_DELAY,
};

/// A kill without an owner.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnerlessKill {
    /// Index among the pending kills.
    pub at: usize,
    /// When it happened.
    pub happened: Interval,
    /// How often its cgroup counted it: once, and once for each second record.
    pub counted: u64,
    /// It has no record.
    pub is_gap: bool,
}

/// A container that lost processes.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The container.
    pub id: ContainerId,
    /// Number of kills.
    pub kills: u64,
    /// When they happened.
    pub happened: Interval,
    /// [`Method::Cgroup`] or [`Method::Runtime`].
    pub source: Method,
}

/// The owner of one kill.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// Index among the pending kills.
    pub at: usize,
    /// The container.
    pub id: ContainerId,
    /// How it was attributed.
    pub method: Method,
}

/// Assigns kills to candidates. `is_final`: no more evidence will arrive for the kills with these indexes. Kills that can be of one time
/// are decided together, once all of them are among `kills` that `is_ready`.
pub fn assign(
    kills: &[OwnerlessKill],
    candidates: &[Candidate],
    is_ready: impl Fn(&OwnerlessKill) -> bool,
    is_final: impl Fn(&OwnerlessKill) -> bool,
) -> Vec<Assignment> {
    let mut assigned = Vec::new();
    let mut is_taken = vec![false; kills.len()];
    for first in 0..kills.len() {
        if is_taken[first] {
            continue;
        }
        let (together, numbers) = connected(first, kills, candidates, &mut is_taken);
        let mut kills: Vec<_> = together.iter().map(|kill| &kills[*kill]).collect();
        if !kills.iter().all(|kill| is_ready(kill)) {
            continue;
        }
        let is_final = kills.iter().all(|kill| is_final(kill));
        let mut numbers: Vec<_> = numbers.iter().map(|number| &candidates[*number]).collect();
        kills.sort_by(|one, other| one.happened.latest.total_cmp(&other.happened.latest));
        numbers.sort_by(|one, other| one.happened.latest.total_cmp(&other.happened.latest));
        assigned.extend(assign_connected(&kills, &numbers, is_final));
    }
    assigned
}

/// Returns the kills and candidates that can be of the same time, directly or through others, and marks the kills.
fn connected(
    first: usize,
    kills: &[OwnerlessKill],
    candidates: &[Candidate],
    is_taken: &mut [bool],
) -> (Vec<usize>, Vec<usize>) {
    is_taken[first] = true;
    let (mut together, mut numbers, mut next) = (vec![first], Vec::new(), 0);
    let mut is_found = vec![false; candidates.len()];
    while let Some(kill) = together.get(next).copied() {
        next += 1;
        for (number, candidate) in candidates.iter().enumerate() {
            if is_found[number] || !candidate.happened.overlaps(&kills[kill].happened) {
                continue;
            }
            is_found[number] = true;
            numbers.push(number);
            for other in 0..kills.len() {
                if !is_taken[other] && candidate.happened.overlaps(&kills[other].happened) {
                    is_taken[other] = true;
                    together.push(other);
                }
            }
        }
    }
    (together, numbers)
}

fn assign_connected(kills: &[&OwnerlessKill], candidates: &[&Candidate], is_final: bool) -> Vec<Assignment> {
    let counted: u64 = kills.iter().map(|kill| kill.counted).sum();
    let sum: u64 = candidates.iter().map(|candidate| candidate.kills).sum();
    let to = |kill: &&OwnerlessKill, candidate: &Candidate, method| Assignment {
        at: kill.at,
        id: candidate.id.clone(),
        method,
    };
    let is_counted = candidates.iter().all(|candidate| candidate.source == Method::Cgroup);
    let Some(only) = candidates.first() else { return vec![] };
    if candidates.iter().all(|candidate| candidate.id == only.id)
        && (sum == counted || sum > counted && is_counted)
    {
        return kills.iter().map(|kill| to(kill, only, only.source)).collect();
    }
    let is_gap = |kill: &&OwnerlessKill| kill.is_gap;
    if kills.iter().all(is_gap) && (sum == counted || is_final && sum < counted) {
        // a kill without a record is only a number: any of that time will do
        let is_certain = |candidate: &&&Candidate| sum == counted || candidate.source == Method::Cgroup;
        let mut left = VecDeque::from(kills.to_vec());
        let assignment = |owner: &Candidate| {
            // one that only touches it is more likely another one's
            let common = |at: &usize| owner.happened.overlap(&left[*at].happened);
            let possible = (0..left.len()).filter(|at| owner.happened.overlaps(&left[*at].happened));
            let at =
                possible.max_by(|one, other| common(one).total_cmp(&common(other)).then(other.cmp(one)))?;
            Some(to(&left.remove(at)?, owner, owner.source))
        };
        return repeated(candidates.iter().filter(is_certain)).filter_map(assignment).collect();
    }
    let pairs: Vec<_> = std::iter::zip(kills, repeated(candidates.iter())).collect();
    let is_possible = pairs.iter().all(|(kill, owner)| owner.happened.overlaps(&kill.happened));
    if sum == counted
        && pairs.len() == kills.len()
        && is_possible
        && kills.iter().all(|kill| kill.counted == 1)
    {
        return pairs.into_iter().map(|(kill, owner)| to(kill, owner, Method::Set)).collect();
    }
    vec![]
}

/// Returns each candidate as often as it lost a process.
fn repeated<'a>(candidates: impl Iterator<Item = &'a &'a Candidate>) -> impl Iterator<Item = &'a Candidate> {
    candidates.flat_map(|candidate| std::iter::repeat_n(*candidate, candidate.kills as usize))
}

impl Reconciler {
    /// Attributes kills without an owner by the cgroups' counters, and if these do not suffice, by the runtimes' OOM
    /// events too.
    pub(super) fn match_counters(&mut self, now: Timestamp) {
        let (ownerless, counted) = (self.ownerless(), self.counted());
        if ownerless.is_empty() || self.accounting.has_missing_records() {
            return; // a record or a gap is still missing: the numbers cannot match yet
        }
        self.assign_all(now, &ownerless, &counted, Duration::ZERO);
        let ownerless = self.ownerless();
        if ownerless.iter().any(|at| now.since(self.pending[*at].noticed) >= RUNTIME_EVENT_DELAY) {
            let mut candidates = self.counted();
            candidates.extend(self.reported_by_runtimes(now, &candidates));
            self.assign_all(now, &ownerless, &candidates, RUNTIME_EVENT_DELAY);
        }
    }

    /// Assigns kills that were noticed so long ago.
    fn assign_all(&mut self, now: Timestamp, ownerless: &[usize], candidates: &[Candidate], after: Duration) {
        let kill = |at: &usize| {
            let pending = &self.pending[*at];
            OwnerlessKill {
                at: *at,
                happened: pending.happened,
                counted: 1 + pending.duplicates,
                is_gap: pending.kill.kernel_usec.is_none(),
            }
        };
        let kills: Vec<_> = ownerless.iter().map(kill).collect();
        let is_older =
            |kill: &OwnerlessKill, than: Duration| now.since(self.pending[kill.at].noticed) >= than;
        let is_final = |kill: &OwnerlessKill| after > Duration::ZERO && is_older(kill, FORCED_MATCH_AFTER);
        let assigned = assign(&kills, candidates, |kill| is_older(kill, after), is_final);
        for Assignment { at, id, method } in assigned {
            let text = match method {
                Method::Cgroup => "its cgroup counted a kill that has no other explanation",
                Method::Runtime => {
                    "its runtime reported an OOM and an exit by SIGKILL without a stop request"
                }
                _ => {
                    "several containers lost processes at that time, this one as many as its cgroup counted; it may have been another one's process"
                }
            };
            let source = if method == Method::Runtime { method } else { Method::Cgroup };
            self.pending[at].kill.evidence.push(Evidence::new(&source.to_string(), text));
            self.assign_owner(at, PathOwner::Container(id), method);
        }
    }

    /// Returns the containers whose cgroups counted kills that nothing else explains.
    fn counted(&self) -> Vec<Candidate> {
        let candidate =
            |Count { id, kills, counted }| Candidate { id, kills, happened: counted, source: Method::Cgroup };
        let counts = self.counters.counts().into_iter();
        counts.filter(|count| !self.may_be_of_inner(count)).map(candidate).collect()
    }

    /// Returns true if this growth may be that of a container inside this one, whose own counter is gone.
    fn may_be_of_inner(&self, count: &Count) -> bool {
        let outer = self.containers.get(&count.id).and_then(|state| state.cgroup.as_ref());
        let Some(outer) = outer.filter(|_| self.counters.is_hierarchical()) else { return false };
        let is_inner = |state: &ContainerState| {
            state.cgroup.as_ref().is_some_and(|cgroup| cgroup != outer && cgroup.starts_with(outer))
        };
        let mut inner = self.containers.iter().filter(|(id, state)| **id != count.id && is_inner(state));
        // a run inside that ended near the growth took its own counter with it: its kills may be in this growth
        let since = count.counted.earliest - COUNTER_TIMEOUT.as_secs_f64();
        let is_near = |ended: f64| (since..=count.counted.latest + CLOCK_TOLERANCE).contains(&ended);
        let has_just_ended = |run: &LedgerRun| run.ended().is_some_and(is_near);
        inner.any(|(id, state)| {
            // its next run may have begun and ended, and not be reported yet
            !self.counters.is_read_since(id, count.counted.earliest) || state.runs.all().any(has_just_ended)
        })
    }

    /// Returns containers that ended by SIGKILL without a stop request, for which the runtime reported an OOM and no
    /// kill is known. SIGKILL alone is no evidence: anyone can send it.
    fn reported_by_runtimes(&self, now: Timestamp, counted: &[Candidate]) -> Vec<Candidate> {
        let begun = now.unix_seconds_of_kernel(self.accounting.checkpoint().since_usec) + MAX_EXIT_DELAY;
        let mut found = Vec::new();
        for (id, state) in self.containers.iter() {
            if counted.iter().any(|candidate| candidate.id == *id) {
                continue;
            }
            let is_attributed = |run: &LedgerRun| {
                // which of its runs a kill ended may be a guess
                let window = Interval::new(run.begin().unwrap_or(f64::MIN), run.ended().unwrap_or(f64::MAX));
                let of_pending = |kill: &PendingKill| {
                    kill.container.as_ref() == Some(id)
                        && (kill.run.is_none_or(|number| number == run.number)
                            || kill.happened.overlaps(&window))
                };
                let mut settled = self.settled_victims.iter();
                self.pending.iter().any(of_pending)
                    || settled.any(|(_, container, happened)| {
                        container.as_ref() == Some(id) && happened.overlaps(&window)
                    })
            };
            let runs = state.runs.all().filter(|run| run.evidence.kills == 0 && !is_attributed(run));
            for run in runs.filter(|run| run.is_sigkill_unexplained()) {
                let Some(happened) = reported_oom(state, run).filter(|oom| oom.latest >= begun) else {
                    continue;
                };
                found.push(Candidate { id: id.clone(), kills: 1, happened, source: Method::Runtime });
            }
        }
        found
    }

    /// Names the containers that a kill of that time may have belonged to; `None` without any.
    pub(super) fn other_candidates(&self, happened: &Interval) -> Option<String> {
        let candidates = self.counted();
        let others = candidates.iter().filter(|candidate| candidate.happened.overlaps(happened));
        let name = |id: &ContainerId| match self.containers.get(id) {
            Some(state) => state.identity.name.to_string(),
            None => id.short().to_owned(),
        };
        let names: Vec<_> = others.map(|candidate| name(&candidate.id)).take(5).collect();
        let text =
            format!("cgroups counted kills at that time, not for this one alone: {}", names.join(", "));
        (!names.is_empty()).then_some(text)
    }
}

/// Returns when the OOM happened that the runtime reported at the end of this run; `None` if it reported none. Docker sends its event
/// without a kill too, and its flag stays set until the exit: an event long before the exit is no evidence, and explains the flag. The
/// event may be applied before the run's start.
fn reported_oom(state: &ContainerState, run: &LedgerRun) -> Option<Interval> {
    let ended = run.ended()?;
    let is_near = |at: &f64| (at - ended).abs() < EXIT_WINDOW;
    let event = run.evidence.oom_event_at.or(state.oom_event_at.filter(is_near));
    let start = run.start.first.map_or(f64::MIN, |started| started - CLOCK_TOLERANCE);
    let (earliest, latest) = match event {
        // where the kernel writes its report slowly, it notifies before it kills
        Some(at) if is_near(&at) => (at - MAX_OOM_EVENT_DELAY, (at + LOG_DELAY).min(ended)),
        None if run.oom_flag() == Some(true) => (ended - EXIT_WINDOW, ended),
        _ => return None,
    };
    (latest >= start).then(|| Interval::new(earliest.max(start), latest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kill(at: usize, seconds: f64, is_gap: bool) -> OwnerlessKill {
        OwnerlessKill { at, happened: Interval::new(seconds - 0.01, seconds), counted: 1, is_gap }
    }

    fn candidate(id: &str, kills: u64, from: f64, to: f64) -> Candidate {
        Candidate {
            id: ContainerId::new(id),
            kills,
            happened: Interval::new(from, to),
            source: Method::Cgroup,
        }
    }

    fn owners(kills: &[OwnerlessKill], candidates: &[Candidate], is_final: bool) -> Vec<(usize, String)> {
        let assigned = assign(kills, candidates, |_| true, |_| is_final);
        let mut owners: Vec<_> =
            assigned.into_iter().map(|it| (it.at, format!("{} {}", it.id.as_str(), it.method))).collect();
        owners.sort();
        owners
    }

    #[test]
    fn single_candidate_of_that_time_gets_all_kills() {
        let kills = [kill(0, 1.0, false), kill(1, 1.5, false), kill(2, 9.0, false)];
        let candidates = [candidate("a", 2, 0.5, 2.0), candidate("b", 1, 8.0, 9.0)];
        let owner = |at, text: &str| (at, text.to_owned());
        let expected = [owner(0, "a cgroup"), owner(1, "a cgroup"), owner(2, "b cgroup")];
        assert_eq!(owners(&kills, &candidates, false), expected);
        let fewer = [candidate("a", 1, 0.5, 2.0)];
        assert_eq!(owners(&kills, &fewer, true), [], "which of the two is not known");
    }

    #[test]
    fn several_candidates_get_their_numbers_or_nothing() {
        let kills = [kill(0, 1.0, false), kill(1, 1.2, false)];
        let two = [candidate("b", 1, 0.5, 2.1), candidate("a", 1, 0.5, 2.0)];
        let owner = |at, text: &str| (at, text.to_owned());
        assert_eq!(owners(&kills, &two, false), [owner(0, "a set"), owner(1, "b set")]);
        let three = [kill(0, 1.0, false), kill(1, 1.2, false), kill(2, 1.3, false)];
        let uneven = [candidate("a", 2, 0.5, 2.0), candidate("b", 1, 0.5, 2.0)];
        assert_eq!(owners(&three, &uneven, false), [owner(0, "a set"), owner(1, "a set"), owner(2, "b set")]);
        assert_eq!(owners(&kills, &uneven, true), [], "one record is missing");
    }

    #[test]
    fn kills_without_record_are_only_numbers() {
        let kills = [kill(0, 1.0, true), kill(1, 1.2, true), kill(2, 1.3, true)];
        let uneven = [candidate("a", 2, 0.5, 2.0), candidate("b", 1, 0.5, 2.0)];
        assert_eq!(owners(&kills, &uneven, false).len(), 3);
        let fewer = [candidate("a", 1, 0.5, 2.0), candidate("b", 1, 0.5, 2.0)];
        assert_eq!(owners(&kills, &fewer, false), []);
        assert_eq!(owners(&kills, &fewer, true).len(), 2, "and one stays unattributed");
    }

    #[test]
    fn kill_without_record_is_of_the_time_of_its_number() {
        let kills = [kill(0, 1.0, true), kill(1, 1.0, true), kill(2, 3.0, true)];
        let candidates = [candidate("a", 1, 0.5, 2.995), candidate("b", 1, 2.5, 3.5)];
        let expected = [(0, "a cgroup".to_owned()), (2, "b cgroup".to_owned())];
        assert_eq!(owners(&kills, &candidates, true), expected);
        // the first one was noticed when the numbers of the others began to grow: it may be of any, but is not of the first that comes
        let noticed =
            |at, from, to| OwnerlessKill { at, happened: Interval::new(from, to), counted: 1, is_gap: true };
        let kills = [noticed(0, 0.1, 0.6), noticed(1, 0.6, 1.4), noticed(2, 0.6, 1.4)];
        let candidates = ["a", "b", "c"].map(|id| candidate(id, 1, 0.6, 1.4));
        let owned = |at, id: &str| (at, format!("{id} cgroup"));
        assert_eq!(owners(&kills, &candidates, true), [owned(0, "c"), owned(1, "a"), owned(2, "b")]);
    }
}
