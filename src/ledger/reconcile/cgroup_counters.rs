//! The cgroups' own OOM kill counters. They attribute kills, but never add any. Pure.
//!
//! A counter is identified by path and inode: a restarted container has the same path with a new inode, and its counter
//! starts at 0. So each counter belongs to one run.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{ClockStep, Timestamp};
use crate::discover::ContainerId;
use crate::ledger::interval::Interval;
use crate::ledger::sources::cgroup_oom_events::CounterReading;
use crate::lifecycle::timing::CLOCK_TOLERANCE;

#[derive(Debug)]
struct Counter {
    id: ContainerId,
    path: Arc<str>,
    kills_read: u64,
    /// Growth that no kill explains yet, by the interval between two reads, oldest first.
    growth: Vec<(Interval, u64)>,
    /// Kills that were attributed to it before it was read.
    expected: u64,
    read: Timestamp,
    /// Unix time of the first read.
    first_read: f64,
}

impl Counter {
    /// Returns the kills that were attributed to it by any evidence, or given up.
    fn attributed(&self) -> u64 {
        self.kills_read + self.expected - self.growth.iter().map(|(_, kills)| kills).sum::<u64>()
    }

    /// Applies a read that began after `now` and ended at `read_at`; the one before began at `since`, a Unix time.
    fn grow(&mut self, kills: u64, since: f64, now: Timestamp, read_at: Timestamp) {
        let grown = kills.saturating_sub(self.kills_read);
        let explained = grown.min(self.expected);
        self.expected = 0; // the kernel counts before it logs: this read includes them
        if grown > explained {
            self.growth.push((Interval::new(since, read_at.unix_seconds()), grown - explained));
        }
        self.kills_read = self.kills_read.max(kills);
        self.read = now;
    }

    /// Notes kills of that time.
    fn attribute(&mut self, kills: u64, happened: &Interval) {
        for _ in 0..kills {
            let is_read = happened.latest + CLOCK_TOLERANCE < self.read.unix_seconds();
            match self.growth_of(happened, is_read) {
                Some(at) => self.growth[at].1 -= 1,
                None if !is_read => self.expected += 1,
                None => {} // it was given up, or is of another run
            }
            self.growth.retain(|(_, growth)| *growth > 0);
        }
    }

    /// Returns the growth that includes a kill of that time: the first that overlaps it. A kill with a less certain time may have used
    /// up that growth; then the nearest one that is left, which would otherwise be matched to a kill in another container.
    ///
    /// `is_read`: the kill happened before the last read.
    fn growth_of(&self, happened: &Interval, is_read: bool) -> Option<usize> {
        let first = self.growth.iter().position(|(counted, _)| counted.overlaps(happened));
        let distance = |at: &usize| -self.growth[*at].0.overlap(happened);
        let nearest =
            || (0..self.growth.len()).min_by(|one, other| distance(one).total_cmp(&distance(other)));
        first.or_else(|| nearest().filter(|_| is_read))
    }
}

/// Kills that a container's cgroup counted and that are not attributed yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Count {
    /// The container.
    pub id: ContainerId,
    /// Number of kills.
    pub kills: u64,
    /// When they happened.
    pub counted: Interval,
}

/// All counters.
#[derive(Debug, Default)]
pub struct Counters {
    by_inode: HashMap<u64, Counter>,
    /// Attributed kills by inode, as stored by an earlier process during this boot.
    stored: HashMap<u64, u64>,
    /// The store was empty: the first values of the counters are the baseline.
    first_start: bool,
    /// cgroup v2: a counter includes the cgroups below it.
    hierarchical: bool,
    /// Unix time of the last read.
    last_sweep: Option<f64>,
    changed: Vec<u64>,
}

impl Counters {
    /// Continues with the stored values by inode, which explain all that was counted before `explained_at`. `first_start`:
    /// nothing was ever stored.
    pub fn new(stored: HashMap<u64, u64>, explained_at: Option<f64>, first_start: bool) -> Self {
        Self { stored, first_start, last_sweep: explained_at, ..Self::default() }
    }

    /// Returns the Unix time before which every kill that was counted is attributed or given up.
    pub fn explained_at(&self) -> Option<f64> {
        let growth = self.by_inode.values().flat_map(|counter| &counter.growth);
        let begun = growth.map(|(counted, _)| counted.earliest);
        self.last_sweep.map(|last| begun.fold(last, f64::min))
    }

    /// Applies a read of all counters. Counters that are gone are removed.
    pub fn update(
        &mut self,
        now: Timestamp,
        read_at: Timestamp,
        readings: &[CounterReading],
        hierarchical: bool,
    ) {
        self.hierarchical = hierarchical;
        let last_sweep = self.last_sweep.replace(now.unix_seconds()).unwrap_or(0.0); // finite, because it is stored as JSON
        for reading in readings {
            let counter = self.by_inode.entry(reading.inode).or_insert_with(|| {
                let before = match self.stored.remove(&reading.inode) {
                    Some(attributed) => attributed.min(reading.kills),
                    None if self.first_start && !reading.fresh => reading.kills,
                    None => 0,
                };
                if before > 0 {
                    self.changed.push(reading.inode);
                }
                let (id, path) = (reading.id.clone(), Arc::clone(&reading.path));
                let first_read = now.unix_seconds();
                Counter { id, path, kills_read: before, growth: vec![], expected: 0, read: now, first_read }
            });
            // until a runtime reports a nested container, its cgroup is a part of the outer one's
            counter.id.clone_from(&reading.id);
            counter.grow(reading.kills, last_sweep, now, read_at);
        }
        self.first_start = false;
        // cgroups that were removed while memledger was stopped; their inodes will be reused
        self.changed.extend(self.stored.drain().map(|(inode, _)| inode));
        let changed = &mut self.changed;
        self.by_inode.retain(|inode, counter| {
            // keep it for a while: its kills may still have to be attributed
            let kept =
                counter.read == now || (!counter.growth.is_empty() && now.since(counter.read).as_secs() < 15);
            if !kept {
                changed.push(*inode);
            }
            kept
        });
    }

    /// Returns the growth that no kill explains yet. An outer container is omitted if a nested one explains its growth.
    pub fn counts(&self) -> Vec<Count> {
        let mut found: Vec<Count> = Vec::new();
        for counter in self.by_inode.values() {
            for (counted, kills) in &counter.growth {
                let kills = kills.saturating_sub(self.inner_growth(counter, counted));
                if kills > 0 {
                    found.push(Count { id: counter.id.clone(), kills, counted: *counted });
                }
            }
        }
        let place = |count: &Count| (count.id.clone(), count.counted.latest.to_bits());
        found.sort_by_key(place);
        found
    }

    /// Returns the growth of the cgroups below this one in the same read.
    fn inner_growth(&self, counter: &Counter, counted: &Interval) -> u64 {
        let inner = self.by_inode.values().filter(|inner| is_below(&inner.path, &counter.path));
        let inner = inner.filter(|_| self.hierarchical).flat_map(|inner| &inner.growth);
        inner.filter(|(other, _)| other.latest == counted.latest).map(|(_, kills)| kills).sum()
    }

    /// Notes kills that were attributed to this container, whose own cgroup has this path if that is known. A kill of a run whose
    /// counter is gone changes only the counters of the containers around it.
    pub fn attribute(&mut self, id: &ContainerId, cgroup: Option<&str>, kills: u64, happened: &Interval) {
        let own = self.by_inode.iter().filter(|(_, counter)| counter.id == *id);
        // that of the run before may have grown in the moment in which that of the next one was read first
        let common = |counter: &Counter| {
            let possible = counter.growth.iter().filter(|(counted, _)| counted.overlaps(happened));
            possible.map(|(counted, _)| counted.overlap(happened)).fold(f64::NEG_INFINITY, f64::max)
        };
        let chosen = own.max_by(|(_, one), (_, other)| {
            common(one).total_cmp(&common(other)).then(one.read.cmp(&other.read))
        });
        let inode = chosen.map(|(inode, _)| *inode);
        let path = chosen.map(|(_, counter)| Arc::clone(&counter.path)).or_else(|| cgroup.map(Into::into));
        let Some(path) = path else { return };
        for (other, counter) in &mut self.by_inode {
            if Some(*other) == inode || (self.hierarchical && is_below(&path, &counter.path)) {
                counter.attribute(kills, happened);
                self.changed.push(*other);
            }
        }
    }

    /// Returns true if a counter includes the cgroups below its own.
    pub fn is_hierarchical(&self) -> bool {
        self.hierarchical
    }

    /// Returns true if one counter of this container was read from this Unix time on until the last read.
    pub fn is_read_since(&self, id: &ContainerId, since: f64) -> bool {
        let newest = self.by_inode.values().map(|counter| counter.read).max();
        let mut own = self.by_inode.values().filter(|counter| counter.id == *id);
        own.any(|counter| Some(counter.read) == newest && counter.first_read <= since + CLOCK_TOLERANCE)
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.last_sweep.iter_mut().for_each(|last| step.correct(last));
        for counter in self.by_inode.values_mut() {
            step.correct(&mut counter.first_read);
            counter.growth.iter_mut().for_each(|(counted, _)| counted.correct(step));
        }
    }

    /// Writes off growth that no kill explained in time, so that it is not matched to a kill hours later.
    pub fn write_off(&mut self, now: Timestamp, after: Duration) {
        let oldest = now.unix_seconds() - after.as_secs_f64();
        for (inode, counter) in &mut self.by_inode {
            let before = counter.growth.len();
            counter.growth.retain(|(counted, _)| counted.latest > oldest);
            if counter.growth.len() < before {
                self.changed.push(*inode);
            }
        }
    }

    /// Makes all counters count as changed.
    pub fn mark_all_changed(&mut self) {
        self.changed.extend(self.by_inode.keys());
    }

    /// Takes the changes to store: inode, and the attributed kills or `None` if the counter is gone.
    pub fn take_changed(&mut self) -> Vec<(u64, Option<u64>)> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        changed.dedup();
        changed.into_iter().map(|inode| (inode, self.by_inode.get(&inode).map(Counter::attributed))).collect()
    }
}

fn is_below(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(id: &str, path: &str, inode: u64, kills: u64, fresh: bool) -> CounterReading {
        CounterReading { id: ContainerId::new(id), path: path.into(), inode, kills, fresh }
    }

    fn counts(counters: &Counters) -> Vec<(ContainerId, u64)> {
        counters.counts().into_iter().map(|count| (count.id, count.kills)).collect()
    }

    #[test]
    fn ignores_values_from_before_first_start_but_not_of_new_cgroups() {
        let mut counters = Counters::new(HashMap::new(), None, true);
        let now = Timestamp::now();
        counters.update(now, now, &[reading("a", "a", 1, 3, false), reading("b", "b", 2, 1, true)], false);
        assert_eq!(counts(&counters), [(ContainerId::new("b"), 1)]);
        counters.attribute(&ContainerId::new("b"), None, 1, &Interval::at(now.unix_seconds()));
        assert!(counts(&counters).is_empty());
        assert_eq!(counters.take_changed(), [(1, Some(3)), (2, Some(1))]);
    }

    #[test]
    fn kill_of_uncertain_time_leaves_no_growth_for_another_container() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let start = Timestamp::now();
        let after = |seconds| start.plus(Duration::from_secs(seconds));
        for (seconds, kills) in [(0, 0), (1, 1), (2, 2)] {
            let now = after(seconds);
            counters.update(now, now, &[reading("a", "a", 1, kills, false)], false);
        }
        let within = |from: u64, to: u64| Interval::new(after(from).unix_seconds(), after(to).unix_seconds());
        // it was the second, and takes the growth of the first, which is known better
        counters.attribute(&ContainerId::new("a"), None, 1, &within(0, 2));
        let first = Interval::at(start.unix_seconds() + 0.5);
        counters.attribute(&ContainerId::new("a"), None, 1, &first);
        assert!(counts(&counters).is_empty());
    }

    #[test]
    fn kill_at_the_end_of_a_run_leaves_no_growth_of_it_for_another_container() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let start = Timestamp::now();
        let after = |millis| start.plus(Duration::from_millis(millis));
        let read = |counters: &mut Counters, millis, readings: &[CounterReading]| {
            counters.update(after(millis), after(millis), readings, false);
        };
        read(&mut counters, 0, &[reading("a", "a", 1, 0, true)]);
        read(&mut counters, 1_000, &[reading("a", "a", 1, 1, false)]);
        read(&mut counters, 1_300, &[reading("a", "a", 2, 1, true)]);
        let logged = Interval::new(after(790).unix_seconds(), after(990).unix_seconds());
        counters.attribute(&ContainerId::new("a"), None, 1, &logged);
        let [left] = &counters.counts()[..] else { panic!("{:?}", counters.counts()) };
        assert_eq!(left.counted.earliest, after(1_000).unix_seconds(), "that of the next run");
    }

    #[test]
    fn kill_attributed_before_its_counter_is_read_stays_attributed() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let now = Timestamp::now();
        counters.update(now, now, &[reading("a", "a", 1, 0, true)], false);
        counters.attribute(&ContainerId::new("a"), None, 1, &Interval::at(now.unix_seconds()));
        counters.update(now, now, &[reading("a", "a", 1, 1, false)], false);
        assert!(counts(&counters).is_empty());
    }

    #[test]
    fn growth_while_memledger_was_stopped_is_compared_with_stored_value() {
        let mut counters = Counters::new(HashMap::from([(1, 2)]), None, false);
        let readings = [reading("a", "a", 1, 5, false), reading("b", "b", 2, 1, false)];
        counters.update(Timestamp::now(), Timestamp::now(), &readings, false);
        assert_eq!(counts(&counters), [(ContainerId::new("a"), 3), (ContainerId::new("b"), 1)]);
    }

    #[test]
    fn growth_over_a_restart_is_no_older_than_what_was_explained_before() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let start = Timestamp::now();
        let after = |seconds| start.plus(Duration::from_secs(seconds));
        counters.update(start, start, &[reading("a", "a", 1, 0, true)], false);
        counters.update(after(10), after(10), &[reading("a", "a", 1, 1, false)], false);
        assert_eq!(counters.explained_at(), Some(start.unix_seconds()), "one is not attributed yet");
        counters.attribute(&ContainerId::new("a"), None, 1, &Interval::at(after(5).unix_seconds()));
        let explained_at = counters.explained_at();
        assert_eq!(explained_at, Some(after(10).unix_seconds()));

        let mut continued = Counters::new(HashMap::from([(1, 1)]), explained_at, false);
        continued.update(after(20), after(20), &[reading("a", "a", 1, 2, false)], false);
        let found = continued.counts();
        let counted = Interval::new(after(10).unix_seconds(), after(20).unix_seconds());
        assert_eq!(found, [Count { id: ContainerId::new("a"), kills: 1, counted }]);
    }

    #[test]
    fn stored_value_of_removed_cgroup_is_deleted_and_not_reused() {
        let mut counters = Counters::new(HashMap::from([(1, 2), (9, 4)]), None, false);
        counters.update(Timestamp::now(), Timestamp::now(), &[reading("a", "a", 1, 2, false)], false);
        assert!(counters.take_changed().contains(&(9, None)));
        counters.update(Timestamp::now(), Timestamp::now(), &[reading("b", "b", 9, 1, true)], false);
        assert_eq!(counts(&counters), [(ContainerId::new("b"), 1)]);
    }

    #[test]
    fn writes_off_unattributed_kills_after_timeout() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let (now, after) = (Timestamp::now(), Duration::from_secs(10));
        counters.update(now, now, &[reading("a", "a", 1, 1, true)], false);
        counters.write_off(now.plus(Duration::from_secs(9)), after);
        assert_eq!(counts(&counters).len(), 1);
        counters.write_off(now.plus(after), after);
        assert!(counts(&counters).is_empty());
    }

    #[test]
    fn counter_of_nested_container_is_its_own_once_it_is_known() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let now = Timestamp::now();
        counters.update(now, now, &[reading("outer", "a/b", 1, 0, true)], false);
        counters.update(now, now, &[reading("inner", "a/b", 1, 1, false)], false);
        assert_eq!(counts(&counters), [(ContainerId::new("inner"), 1)]);
    }

    #[test]
    fn nested_container_explains_the_outer_ones_count_on_v2() {
        let mut counters = Counters::new(HashMap::new(), None, false);
        let readings = [reading("a", "a", 1, 1, true), reading("b", "a/x/b", 2, 1, true)];
        let now = Timestamp::now();
        counters.update(now, now, &readings, true);
        assert_eq!(counts(&counters), [(ContainerId::new("b"), 1)]);
        counters.attribute(&ContainerId::new("b"), None, 1, &Interval::at(now.unix_seconds()));
        assert!(counts(&counters).is_empty(), "it also explains the outer one's count");
        // its cgroup was created and removed between two reads
        counters.update(now, now, &[reading("a", "a", 1, 2, true)], true);
        counters.attribute(&ContainerId::new("c"), Some("a/x/c"), 1, &Interval::at(now.unix_seconds()));
        assert!(counts(&counters).is_empty());
    }
}
