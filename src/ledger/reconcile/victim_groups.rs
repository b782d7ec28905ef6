//! Processes that the kernel killed at once because they were in one cgroup (`memory.oom.group`). Pure.
//!
//! They are of one run of each container, which the first process of a container among them shows, else the first victim. The kernel may log the
//! last ones after the next run began.

use std::collections::{HashMap, VecDeque};

use crate::clock::ClockStep;
use crate::discover::ContainerId;
use crate::ledger::interval::Interval;
use crate::lifecycle::RunNumber;
use crate::lifecycle::timing::GROUP_WINDOW;

/// Maximum number of groups that are kept.
const MAX_GROUPS: usize = 64;

/// Names one group while memledger runs.
pub type GroupNumber = u64;

/// The groups that were killed last.
#[derive(Debug, Default)]
pub struct VictimGroups {
    /// Oldest first.
    groups: VecDeque<VictimGroup>,
    last: GroupNumber,
}

#[derive(Debug)]
struct VictimGroup {
    number: GroupNumber,
    /// The cgroup.
    path: String,
    /// Unix time of its last victim.
    last_victim: f64,
    runs: HashMap<ContainerId, GroupRun>,
}

/// What is known of the victims in one container.
#[derive(Clone, Copy, Debug)]
struct GroupRun {
    /// The kill of the first one.
    first_victim: u64,
    /// The run of that.
    run: Option<RunNumber>,
    /// The run whose first process is a victim.
    of_first_process: Option<RunNumber>,
}

/// Which run a victim is of, by the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunByGroup {
    /// They do not say.
    Unknown,
    /// That of the first victim, which is not known yet.
    Awaited,
    /// This one.
    Known(RunNumber),
    /// This one, whose first process is a victim.
    Certain(RunNumber),
}

impl VictimGroups {
    /// Begins a group with its first victim. Returns its number.
    pub fn begin(&mut self, path: &str, happened: &Interval) -> GroupNumber {
        self.last += 1;
        self.groups.push_back(VictimGroup {
            number: self.last,
            path: path.to_owned(),
            last_victim: happened.latest,
            runs: HashMap::new(),
        });
        if self.groups.len() > MAX_GROUPS {
            self.groups.pop_front();
        }
        self.last
    }

    /// Returns the group of a victim whose record follows those of others in this cgroup.
    pub fn join(&mut self, path: &str, happened: &Interval) -> Option<GroupNumber> {
        let newest = self.groups.back_mut()?;
        let is_its = newest.path == path && happened.latest - newest.last_victim < GROUP_WINDOW;
        is_its.then(|| {
            newest.last_victim = happened.latest;
            newest.number
        })
    }

    /// Records the run that was chosen for a victim. `is_first_process`: it is the first process of that run.
    pub fn record(
        &mut self,
        group: GroupNumber,
        container: &ContainerId,
        kill: u64,
        run: Option<RunNumber>,
        is_first_process: bool,
    ) {
        let Some(group) = self.groups.iter_mut().find(|it| it.number == group) else { return };
        let new = GroupRun { first_victim: kill, run: None, of_first_process: None };
        let known = group.runs.entry(container.clone()).or_insert(new);
        if kill <= known.first_victim {
            (known.first_victim, known.run) = (kill, run);
        }
        if is_first_process {
            known.of_first_process = run;
        }
    }

    /// Returns the run of a victim, by the others of its group in its container.
    pub fn run_of(&self, group: GroupNumber, container: &ContainerId, kill: u64) -> RunByGroup {
        let group = self.groups.iter().find(|it| it.number == group);
        let Some(known) = group.and_then(|group| group.runs.get(container)) else {
            return RunByGroup::Unknown;
        };
        match (known.of_first_process, known.run) {
            (Some(run), _) => RunByGroup::Certain(run),
            (None, _) if known.first_victim == kill => RunByGroup::Unknown,
            (None, Some(run)) => RunByGroup::Known(run),
            (None, None) => RunByGroup::Awaited,
        }
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.groups.iter_mut().for_each(|group| step.correct(&mut group.last_victim));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(unix: f64) -> Interval {
        Interval::new(unix - 0.2, unix)
    }

    #[test]
    fn victims_follow_each_other_in_one_cgroup_within_seconds() {
        let mut groups = VictimGroups::default();
        assert_eq!(groups.join("/a", &at(1.0)), None, "the first record of the group was lost");
        let first = groups.begin("/a", &at(1.0));
        assert_eq!(groups.join("/a", &at(3.5)), Some(first));
        assert_eq!(groups.join("/a", &at(6.0)), Some(first), "since the one before it");
        assert_eq!(groups.join("/b", &at(6.0)), None);
        assert_eq!(
            groups.join("/a", &at(9.1)),
            None,
            "of another group whose first victim was exiting already"
        );
        let next = groups.begin("/a", &at(9.2));
        assert_eq!(groups.join("/a", &at(9.3)), Some(next));
    }

    #[test]
    fn run_is_that_of_the_first_process_then_of_the_first_victim() {
        let mut groups = VictimGroups::default();
        let (own, other) = (ContainerId::new("a"), ContainerId::new("b"));
        let group = groups.begin("/pod", &at(1.0));
        assert_eq!(groups.run_of(group, &own, 7), RunByGroup::Unknown);
        groups.record(group, &own, 7, None, false);
        let all = |groups: &VictimGroups| [7, 8].map(|kill| groups.run_of(group, &own, kill));
        assert_eq!(all(&groups), [RunByGroup::Unknown, RunByGroup::Awaited]);
        groups.record(group, &own, 7, Some(1), false);
        groups.record(group, &own, 8, Some(2), false);
        assert_eq!(all(&groups), [RunByGroup::Unknown, RunByGroup::Known(1)]);
        groups.record(group, &own, 9, Some(3), true);
        assert_eq!(all(&groups), [RunByGroup::Certain(3); 2]);
        assert_eq!(groups.run_of(group, &other, 8), RunByGroup::Unknown, "another container of the pod");
    }
}
