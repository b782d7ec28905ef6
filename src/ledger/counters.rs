//! The cgroups' own counters of OOM kills: whose kills they were. They attribute; they never count. Pure.
//!
//! A counter belongs to a path and an inode: a container that is started again gets the same path with a new inode, and
//! its counter begins at 0. On v2 the counter of a pod's cgroup is kept beside those of its containers.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::runs::Runs;
use crate::clock::Moment;
use crate::collect::oom_cgroups::Reading;
use crate::discover::ContainerId;

#[derive(Debug)]
struct Counter {
    /// `None`: a pod's.
    id: Option<ContainerId>,
    path: String,
    seen: u64,
    /// Kills that were attributed to it by whatever evidence.
    explained: u64,
    grew: Moment,
    read: Moment,
    /// A pod's: the last look at which all that it had counted was explained; `None` if there was none.
    quiet: Option<Moment>,
    /// A pod's: containers that were there when it grew, and whose own counters therefore tell of their kills.
    innocent: HashSet<ContainerId>,
}

/// What the counter of a pod has and nothing explains.
#[derive(Debug)]
pub struct OfPod<'a> {
    /// The pod's cgroup.
    pub path: &'a str,
    /// Kills in cgroups that are gone.
    pub kills: u64,
    /// They came after this.
    pub quiet: Option<Moment>,
    /// They were seen then.
    pub grew: Moment,
    /// Containers that did not have them.
    pub innocent: &'a HashSet<ContainerId>,
}

/// All counters.
#[derive(Debug, Default)]
pub struct Counters {
    by_inode: HashMap<u64, Counter>,
    /// Explained kills as stored by an earlier run of memledger in this boot.
    stored: HashMap<u64, u64>,
    /// The store was empty: what counters say at first is no news.
    first_start: bool,
    /// v2: a counter includes the cgroups below.
    hierarchical: bool,
    /// The last sweep.
    swept: Option<Moment>,
    changed: Vec<u64>,
}

impl Counters {
    /// Goes on with what was stored by inode; `first_start` if nothing ever was.
    pub fn new(stored: HashMap<u64, u64>, first_start: bool) -> Self {
        Self { stored, first_start, ..Self::default() }
    }

    /// Enters one sweep over all counters. Those that are gone are forgotten.
    pub fn enter(&mut self, now: Moment, readings: &[Reading], hierarchical: bool) {
        self.hierarchical = hierarchical;
        let last_sweep = self.swept.replace(now);
        for reading in readings {
            let counter = self.by_inode.entry(reading.inode).or_insert_with(|| {
                let before = match self.stored.remove(&reading.inode) {
                    Some(explained) => explained.min(reading.kills),
                    None if self.first_start && !reading.fresh => reading.kills,
                    None => 0,
                };
                if before > 0 {
                    self.changed.push(reading.inode);
                }
                let (id, path) = (reading.id.clone(), reading.path.clone());
                let (quiet, innocent) = (last_sweep.filter(|_| reading.fresh), HashSet::new());
                Counter { id, path, seen: 0, explained: before, grew: now, read: now, quiet, innocent }
            });
            if reading.kills > counter.seen {
                let is_inside = |other: &&Reading| is_below(&other.path, &counter.path);
                let inside = readings.iter().filter(|_| counter.id.is_none()).filter(is_inside);
                let inside: HashSet<_> = inside.filter_map(|other| other.id.clone()).collect();
                if counter.seen > counter.explained {
                    // of those from before, who was there only later is not innocent
                    counter.innocent.retain(|id| inside.contains(id));
                } else {
                    counter.innocent = inside;
                }
                counter.seen = reading.kills;
                counter.grew = now;
            } else if counter.explained >= counter.seen {
                counter.quiet = Some(now);
            }
            counter.read = now;
        }
        self.first_start = false;
        // cgroups that went while memledger was away; their inodes will be others'
        self.changed.extend(self.stored.drain().map(|(inode, _)| inode));
        let changed = &mut self.changed;
        self.by_inode.retain(|inode, counter| {
            // one that is gone may still have to be explained
            let kept = counter.read == now
                || (counter.seen > counter.explained && now.since(counter.read).as_secs() < 15);
            if !kept {
                changed.push(*inode);
            }
            kept
        });
    }

    /// All containers with kills that nothing explained yet, and how many. A container around another one is left out
    /// where the inner one's kills explain its own.
    pub fn candidates(&self) -> Vec<(ContainerId, u64)> {
        let mut found: HashMap<&ContainerId, u64> = HashMap::new();
        for counter in self.by_inode.values() {
            let missing = self.missing(counter);
            if let (Some(id), true) = (&counter.id, missing > 0) {
                *found.entry(id).or_insert(0) += missing;
            }
        }
        let mut found: Vec<_> = found.into_iter().map(|(id, missing)| (id.clone(), missing)).collect();
        found.sort();
        found
    }

    fn missing(&self, counter: &Counter) -> u64 {
        let missing = counter.seen.saturating_sub(counter.explained);
        if missing == 0 || !self.hierarchical {
            return missing;
        }
        let inner = self.by_inode.values().filter(|inner| is_below(&inner.path, &counter.path));
        missing.saturating_sub(inner.map(|c| c.seen.saturating_sub(c.explained)).sum())
    }

    /// All pods with kills that neither anything explains nor the counter of a container tells of.
    pub fn pods(&self) -> impl Iterator<Item = OfPod<'_>> {
        let pods = self.by_inode.values().filter(|counter| counter.id.is_none());
        pods.filter_map(|counter| {
            let kills = self.missing(counter);
            let Counter { path, quiet, grew, innocent, .. } = counter;
            (kills > 0).then_some(OfPod { path, kills, quiet: *quiet, grew: *grew, innocent })
        })
    }

    /// Kills in a pod that stay without an owner.
    pub fn explain_pod(&mut self, path: &str, kills: u64) {
        self.explain_pods(kills, |pod| pod == path);
    }

    fn explain_pods(&mut self, kills: u64, is_meant: impl Fn(&str) -> bool) {
        for (inode, counter) in &mut self.by_inode {
            if counter.id.is_none() && is_meant(&counter.path) {
                counter.explained += kills;
                self.changed.push(*inode);
            }
        }
    }

    /// Kills that were attributed to this container at this Unix time. `cgroups`: where the kernel says that they were.
    pub fn explain(&mut self, id: &ContainerId, kills: u64, at: f64, runs: &Runs, cgroups: &[&str]) {
        let in_present_run = runs
            .get(id)
            .and_then(|known| known.run.as_ref())
            .is_none_or(|run| run.started.is_none_or(|started| started <= at + 1.0));
        let chosen = self
            .by_inode
            .iter()
            .filter(|(_, counter)| counter.id.as_ref() == Some(id))
            .max_by_key(|(_, counter)| (counter.seen.saturating_sub(counter.explained), counter.read));
        // none, or of an earlier run, whose counter is gone
        let chosen = chosen.filter(|(_, counter)| counter.seen > counter.explained || in_present_run);
        let Some((&inode, counter)) = chosen else {
            let known = runs.get(id);
            // the runtime may not have told of it yet
            let is_there = |pod: &str| cgroups.iter().any(|path| is_below(path.trim_start_matches('/'), pod));
            let is_its = |pod: &str| known.is_some_and(|known| known.is_of_pod(pod)) || is_there(pod);
            return self.explain_pods(kills, is_its);
        };
        let path = counter.path.clone();
        for (other, counter) in &mut self.by_inode {
            if *other == inode || (self.hierarchical && is_below(&path, &counter.path)) {
                counter.explained += kills;
                self.changed.push(*other);
            }
        }
    }

    /// Gives up what nothing explained for so long: it shall not be taken for a kill that comes hours later.
    pub fn give_up(&mut self, now: Moment, after: Duration) {
        for (inode, counter) in &mut self.by_inode {
            if counter.seen > counter.explained && now.since(counter.grew) >= after {
                counter.explained = counter.seen;
                self.changed.push(*inode);
            }
        }
    }

    /// What must be stored of the counters that changed: inode, and the kills explained, or `None` if it is gone.
    pub fn take_changed(&mut self) -> Vec<(u64, Option<u64>)> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        changed.dedup();
        changed
            .into_iter()
            .map(|inode| (inode, self.by_inode.get(&inode).map(|counter| counter.explained)))
            .collect()
    }
}

fn is_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(id: &str, path: &str, inode: u64, kills: u64, fresh: bool) -> Reading {
        Reading { id: Some(ContainerId::new(id)), path: path.into(), inode, kills, fresh }
    }

    #[test]
    fn what_a_counter_said_before_the_first_start_is_no_news_and_a_fresh_cgroup_begins_at_0() {
        let mut counters = Counters::new(HashMap::new(), true);
        let now = Moment::now();
        counters.enter(now, &[reading("a", "a", 1, 3, false), reading("b", "b", 2, 1, true)], false);
        assert_eq!(counters.candidates(), [(ContainerId::new("b"), 1)]);
        counters.explain(&ContainerId::new("b"), 1, 0.0, &Runs::default(), &[]);
        assert!(counters.candidates().is_empty());
        assert_eq!(counters.take_changed(), [(1, Some(3)), (2, Some(1))]);
    }

    #[test]
    fn a_kill_explained_before_its_counter_was_read_stays_explained() {
        let mut counters = Counters::new(HashMap::new(), false);
        let now = Moment::now();
        counters.enter(now, &[reading("a", "a", 1, 0, true)], false);
        counters.explain(&ContainerId::new("a"), 1, 0.0, &Runs::default(), &[]);
        counters.enter(now, &[reading("a", "a", 1, 1, false)], false);
        assert!(counters.candidates().is_empty());
    }

    #[test]
    fn a_counter_that_grew_while_memledger_was_away_is_compared_with_what_was_stored() {
        let mut counters = Counters::new(HashMap::from([(1, 2)]), false);
        let readings = [reading("a", "a", 1, 5, false), reading("b", "b", 2, 1, false)];
        counters.enter(Moment::now(), &readings, false);
        assert_eq!(counters.candidates(), [(ContainerId::new("a"), 3), (ContainerId::new("b"), 1)]);
    }

    #[test]
    fn of_a_kill_that_a_pod_counted_while_memledger_was_away_nobody_knows_who_was_there() {
        let mut counters = Counters::new(HashMap::new(), false);
        let (now, later) = (Moment::now(), Moment::now().plus(Duration::from_secs(1)));
        let pod = |kills, fresh| Reading { id: None, ..reading("", "kubepods/pod1", 1, kills, fresh) };
        counters.enter(now, &[pod(2, false)], true);
        assert_eq!(counters.pods().map(|pod| (pod.kills, pod.quiet)).collect::<Vec<_>>(), [(2, None)]);
        counters.explain_pod("kubepods/pod1", 2);
        counters.enter(now, &[pod(2, false)], true);
        let own = reading("a", "kubepods/pod1/a", 2, 0, false);
        counters.enter(later, &[pod(3, false), own], true);
        let found: Vec<_> = counters.pods().collect();
        assert_eq!((found[0].kills, found[0].quiet, found[0].grew), (1, Some(now), later));
        assert!(found[0].innocent.contains(&ContainerId::new("a")));
    }

    #[test]
    fn what_is_stored_of_a_cgroup_that_went_meanwhile_is_removed_and_not_taken_for_the_next_ones() {
        let mut counters = Counters::new(HashMap::from([(1, 2), (9, 4)]), false);
        counters.enter(Moment::now(), &[reading("a", "a", 1, 2, false)], false);
        assert!(counters.take_changed().contains(&(9, None)));
        counters.enter(Moment::now(), &[reading("b", "b", 9, 1, true)], false);
        assert_eq!(counters.candidates(), [(ContainerId::new("b"), 1)]);
    }

    #[test]
    fn what_nothing_explained_is_given_up_when_it_is_old() {
        let mut counters = Counters::new(HashMap::new(), false);
        let (now, after) = (Moment::now(), Duration::from_secs(10));
        counters.enter(now, &[reading("a", "a", 1, 1, true)], false);
        counters.give_up(now.plus(Duration::from_secs(9)), after);
        assert_eq!(counters.candidates().len(), 1);
        counters.give_up(now.plus(after), after);
        assert!(counters.candidates().is_empty());
    }

    #[test]
    fn on_v2_a_container_around_another_one_is_not_blamed_for_the_inner_ones_kill() {
        let mut counters = Counters::new(HashMap::new(), false);
        let readings = [reading("a", "a", 1, 1, true), reading("b", "a/x/b", 2, 1, true)];
        counters.enter(Moment::now(), &readings, true);
        assert_eq!(counters.candidates(), [(ContainerId::new("b"), 1)]);
        counters.explain(&ContainerId::new("b"), 1, 0.0, &Runs::default(), &[]);
        assert!(counters.candidates().is_empty(), "it explains the outer one's too");
    }
}
