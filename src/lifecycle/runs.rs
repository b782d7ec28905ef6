//! The runs of one container: each begins, is listed, is missed and ends by what is reported of it. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::timing::{CLOCK_TOLERANCE, LISTING_DELAY, MAX_END_EVENT_DELAY, START_TOLERANCE};
use super::{ReportedEnd, ReportedRun, RunNumber, RunNumbers, RunPhase, RunStart, StartReport};
use crate::clock::{ClockStep, Timestamp};

/// Maximum number of ended runs that are kept per container once nothing of them is undecided, for late kills.
const MAX_ENDED_RUNS: usize = 4;
/// Maximum number of ended runs before that: after a pause, the runtime's events of many runs are applied before the kernel
/// log of that time is read.
const MAX_UNDECIDED_RUNS: usize = 1_024;

/// One run of a container, from its start to its end. `E`: what the owner of the run knows of it besides.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run<E> {
    /// Its number: with the container it identifies the run.
    pub number: RunNumber,
    /// When it began.
    pub start: RunStart,
    /// How far it is.
    pub phase: RunPhase,
    /// Host pid of the first process.
    pub pid: Option<u32>,
    /// Inode of its cgroup, once a cycle has listed it.
    cgroup_inode: Option<u64>,
    /// Unix time of the last cycle that listed it.
    last_listed: Option<f64>,
    /// An end of it is an event that was decided, and it was listed again: without a report it has no second one.
    has_exit: bool,
    /// When the next run was noticed.
    #[serde(skip)]
    replaced_at: Option<Timestamp>,
    /// Unix time of the first cycle that saw no process of it, if none has seen one since.
    #[serde(skip)]
    empty_since: Option<f64>,
    /// A cycle saw a process of it.
    #[serde(skip)]
    had_processes: bool,
    /// What is known of it besides.
    pub evidence: E,
}

/// A container in the inventory of a cycle.
#[derive(Clone, Copy, Debug)]
pub struct ListedContainer {
    /// When the cycle began.
    pub at: Timestamp,
    /// Unix time of its start, if a runtime reports it.
    pub started: Option<f64>,
    /// Inode of its cgroup.
    pub cgroup_inode: Option<u64>,
}

/// What the listing of a container changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListingOutcome {
    /// Nothing that must be stored.
    Same,
    /// Something was added to the start of the current run.
    Updated,
    /// The current run was taken for ended, and goes on.
    Reopened,
    /// A run began.
    Began,
}

/// The runs of one container that are known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerRuns<E> {
    /// The one in progress, or the last one.
    current: Option<Run<E>>,
    /// Those before it, oldest first.
    #[serde(default = "VecDeque::new", skip_serializing_if = "VecDeque::is_empty")]
    earlier: VecDeque<Run<E>>,
    /// Unix time of the end of the last run that was dropped: what happened before it belongs to none of the known runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dropped_until: Option<f64>,
}

impl<E> Run<E> {
    /// Returns when it began, as far as known.
    pub fn begin(&self) -> Option<f64> {
        self.start.begin()
    }

    /// Returns the Unix time of its end.
    pub fn ended(&self) -> Option<f64> {
        self.phase.ended()
    }

    /// Returns the exit code.
    pub fn exit_code(&self) -> Option<i64> {
        self.phase.end()?.exit_code
    }

    /// Returns the runtime's OOMKilled flag.
    pub fn oom_flag(&self) -> Option<bool> {
        self.phase.end()?.oom_flag
    }

    /// Returns true if this Unix time is between its reported start and end.
    pub fn is_reported_at(&self, at: f64) -> bool {
        self.start.first.is_none_or(|started| started <= at)
            && self.phase.latest_end().is_none_or(|ended| at <= ended + CLOCK_TOLERANCE)
    }

    /// Returns whether it may have begun when something happened at this Unix time.
    pub fn may_have_begun(&self, at: f64) -> bool {
        self.begin().is_none_or(|started| started <= at + CLOCK_TOLERANCE)
    }

    /// Returns since when there is no process of it after a kill at this time, as far as cycles saw that: one that began just before the
    /// kill may have looked after it.
    pub fn emptied_after(&self, kill: f64) -> Option<f64> {
        self.empty_since.map(|since| since.max(kill))
    }

    /// Records whether a cycle saw processes of it.
    pub fn record_processes(&mut self, at: Timestamp, has_any: bool) {
        self.had_processes |= has_any;
        self.empty_since = (!has_any).then(|| self.empty_since.unwrap_or(at.unix_seconds()));
    }

    /// Records that a cycle found neither processes nor a cgroup of it.
    pub fn record_nothing(&mut self, at: Timestamp) {
        if self.had_processes {
            self.record_processes(at, false);
        }
    }

    /// An event of its end was withdrawn.
    pub fn withdraw_exit(&mut self) {
        self.has_exit = false;
    }

    /// Returns when it ended, if its end is reported late: an engine that did not respond for a while reports one when it resumes, long
    /// after the last cycle that saw a process of it.
    fn late_end(&self, reported: f64) -> Option<f64> {
        let is_late = |since: &f64| self.had_processes && reported - since > MAX_END_EVENT_DELAY;
        self.empty_since.filter(is_late)
    }

    /// Returns after which Unix time the next run can have begun.
    fn latest_known(&self) -> Option<f64> {
        if !self.phase.is_end_assumed() {
            return self.ended();
        }
        // a cycle just before an assumed end may have seen the next run
        self.start.first.map(|started| started + START_TOLERANCE).or(self.last_listed)
    }

    /// Returns whether the inventory lists the container in another cgroup than this run had, and no runtime says when that one began.
    fn is_of_another_cgroup(&self, listing: &ListedContainer) -> bool {
        let inodes = self.cgroup_inode.zip(listing.cgroup_inode);
        listing.started.is_none() && inodes.is_some_and(|(own, listed)| own != listed)
    }

    /// Returns whether a cycle lists another run of the container.
    fn is_replaced_by(&self, listing: &ListedContainer) -> bool {
        let is_later = |(first, listed): (f64, f64)| listed >= first + START_TOLERANCE;
        self.start.first.zip(listing.started).is_some_and(is_later)
            || self.phase.is_of_another_boot()
            || self.is_of_another_cgroup(listing)
    }

    /// Lets one that began in the future have begun before now: the wall clock was set back since.
    fn begin_before(&mut self, now: f64) -> bool {
        let is_future = self.begin().is_some_and(|begin| begin > now + START_TOLERANCE);
        if is_future {
            self.start.earliest = Some(now);
        }
        is_future
    }

    /// Continues it, if it was taken for ended. Returns whether it goes on.
    fn reopen(&mut self, now: f64) -> bool {
        // the inventory may be slightly older than the exit
        let is_recorded = self.phase.end().is_some_and(|end| end.is_recorded);
        let goes_on = self.phase.reopen(now);
        self.has_exit |= goes_on && is_recorded;
        goes_on
    }

    fn record_listing(&mut self, listing: &ListedContainer) {
        if self.ended().is_none() {
            self.cgroup_inode = listing.cgroup_inode.or(self.cgroup_inode);
            self.last_listed = Some(listing.at.unix_seconds());
        }
    }
}

impl<E: Default> ContainerRuns<E> {
    /// Returns the run in progress, or the last one.
    pub fn current(&self) -> Option<&Run<E>> {
        self.current.as_ref()
    }

    /// Returns the same for a change.
    pub fn current_mut(&mut self) -> Option<&mut Run<E>> {
        self.current.as_mut()
    }

    /// Returns the run in progress.
    pub fn running(&self) -> Option<&Run<E>> {
        self.current().filter(|run| run.ended().is_none())
    }

    /// Returns the known runs, oldest first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Run<E>> {
        self.earlier.iter().chain(&self.current)
    }

    /// Returns the same for a change.
    pub fn all_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Run<E>> {
        self.earlier.iter_mut().chain(&mut self.current)
    }

    /// Returns the run with this number.
    pub fn get(&self, number: RunNumber) -> Option<&Run<E>> {
        self.all().find(|run| run.number == number)
    }

    /// Returns the same for a change.
    pub fn get_mut(&mut self, number: RunNumber) -> Option<&mut Run<E>> {
        self.all_mut().find(|run| run.number == number)
    }

    /// Returns the run at this Unix time for a change.
    pub fn at_mut(&mut self, at: f64) -> Option<&mut Run<E>> {
        let had_not_ended = |run: &Run<E>| run.ended().is_none_or(|ended| ended + CLOCK_TOLERANCE >= at);
        self.all_mut().find(|run| run.may_have_begun(at) && had_not_ended(run))
    }

    /// Returns the end of the last run that is not known any more.
    pub fn dropped_until(&self) -> Option<f64> {
        self.dropped_until
    }

    /// Returns whether a cycle at this Unix time, which lists this start, saw the current run: one that began before it saw the run before.
    pub fn has_seen_current(&self, at: f64, started: Option<f64>) -> bool {
        let Some(run) = &self.current else { return false };
        let is_its = |listed: f64| run.start.is_at(listed, self.previous_end());
        run.begin().is_none_or(|begin| begin <= at && started.is_none_or(is_its))
    }

    /// Begins a run by a report of its start, unless it is known already. Returns whether it did.
    pub fn begin(&mut self, numbers: &mut RunNumbers, report: StartReport, pid: Option<u32>) -> bool {
        let previous_end = self.previous_end();
        if let Some(mut run) = self.current.take() {
            match run.start.compare(&run.phase, report, previous_end) {
                // its end was not reported, unless it is known; one of another boot has its time
                ReportedRun::Next => run.phase.assume_end(report.at.unwrap_or_default()),
                known => {
                    if known == ReportedRun::This {
                        run.pid = run.pid.or(pid);
                        run.start.add(report, &run.phase, previous_end);
                    }
                    self.current = Some(run);
                    return false;
                }
            }
            self.earlier.push_back(run);
            if self.earlier.len() > MAX_UNDECIDED_RUNS {
                self.drop_oldest();
            }
        }
        let (number, start) = (numbers.next(), RunStart::new(report));
        self.current = Some(Run { number, start, pid, ..Run::default() });
        true
    }

    /// Applies that a cycle lists the container, and what follows from it by this Unix time.
    pub fn list(&mut self, numbers: &mut RunNumbers, now: f64, listing: &ListedContainer) -> ListingOutcome {
        let mut outcome = ListingOutcome::Same;
        let mut is_other = true;
        if let Some(run) = &mut self.current {
            if run.begin_before(now) {
                outcome = ListingOutcome::Updated;
            }
            run.phase.list();
            let is_elsewhere = run.is_of_another_cgroup(listing);
            if !is_elsewhere && run.reopen(now) {
                outcome = ListingOutcome::Reopened;
            }
            is_other = outcome != ListingOutcome::Reopened && run.is_replaced_by(listing);
            if is_other && is_elsewhere {
                run.phase.assume_end(listing.at.unix_seconds());
            }
        }
        if is_other {
            let report = StartReport { at: listing.started, is_event: false };
            outcome = match self.begin(numbers, report, None) {
                true => ListingOutcome::Began,
                false => ListingOutcome::Updated,
            };
        }
        self.current.iter_mut().for_each(|run| run.record_listing(listing));
        outcome
    }

    /// Applies that a cycle does not list the container, whose run is in progress. `was_seen`: a cycle before did. Its end is assumed if
    /// none was reported for so long. Returns whether it was.
    pub fn miss(&mut self, at: Timestamp, now: Timestamp, was_seen: bool, timeout: Duration) -> bool {
        let Some(run) = &mut self.current else { return false };
        let since = run.phase.miss(at);
        let may_be_listed_yet =
            !was_seen && run.begin().is_none_or(|begin| at.unix_seconds() < begin + LISTING_DELAY);
        if !may_be_listed_yet {
            run.record_processes(at, false);
        }
        // by the cycles: the newest of those that waited may list it again
        let is_over = at.since(since) >= timeout;
        if is_over {
            run.phase.assume_end(now.unix_seconds() - now.since(since).as_secs_f64());
        }
        is_over
    }

    /// Applies the report of an end. `may_be_late`: its source reports one also long after it. Returns whether it is an end of the
    /// current run that is no event yet.
    pub fn end(&mut self, numbers: &mut RunNumbers, report: ReportedEnd, may_be_late: bool) -> bool {
        let run = self.current.get_or_insert_with(|| Run { number: numbers.next(), ..Run::default() });
        let before_begin = run.begin().map_or(f64::NEG_INFINITY, |begin| begin - report.at);
        if before_begin > 0.0 {
            let is_same = |run: &&mut Run<E>| {
                run.ended().is_some_and(|ended| (ended - report.at).abs() < START_TOLERANCE)
            };
            if let Some(earlier) = self.earlier.iter_mut().rev().find(is_same) {
                earlier.phase.complete_end(&report);
                return false;
            }
        }
        if before_begin > START_TOLERANCE {
            return false; // of an earlier run
        }
        let late = run.late_end(report.at).filter(|_| may_be_late);
        let report = match late {
            Some(likely) => ReportedEnd { at: likely, reported_at: Some(report.at), ..report },
            None => report,
        };
        run.phase.report_end(&report)
    }

    /// Makes the next end an event that is none yet. `is_container`: the run is known to be a container's.
    pub fn take_ended(&mut self, is_container: impl Fn(&Run<E>) -> bool) -> Option<&Run<E>> {
        let is_new = |run: &mut Run<E>| {
            is_container(run) && run.phase.record() && !(run.has_exit && run.phase.is_end_assumed())
        };
        self.all_mut().find_map(|run| is_new(run).then_some(&*run))
    }

    /// Returns true if more ended runs are kept than late kills need.
    pub fn has_surplus(&self) -> bool {
        self.earlier.len() > MAX_ENDED_RUNS
    }

    /// Drops the oldest ended runs beyond those that late kills need, that were replaced so long ago that the records of their kills must
    /// have been read, and of which nothing is undecided. Returns whether it dropped any.
    pub fn drop_decided(
        &mut self,
        now: Timestamp,
        after: Duration,
        is_undecided: impl Fn(&Run<E>) -> bool,
    ) -> bool {
        let before = self.earlier.len();
        for run in &mut self.earlier {
            run.replaced_at.get_or_insert(now);
        }
        while self.has_surplus() {
            let is_old = |run: &Run<E>| run.replaced_at.is_some_and(|at| now.since(at) >= after);
            if !self.earlier.front().is_some_and(|run| is_old(run) && !is_undecided(run)) {
                break;
            }
            self.drop_oldest();
        }
        self.earlier.len() < before
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.dropped_until.iter_mut().for_each(|at| step.correct(at));
        for run in self.all_mut() {
            run.start.correct_times(step);
            run.phase.correct_times(step);
            run.empty_since.iter_mut().chain(&mut run.last_listed).for_each(|at| step.correct(at));
        }
    }

    /// Returns when the run before the current one ended, or the last time at which it is known not to have ended.
    fn previous_end(&self) -> Option<f64> {
        self.earlier.back()?.latest_known()
    }

    fn drop_oldest(&mut self) {
        if let Some(run) = self.earlier.pop_front() {
            self.dropped_until = run.ended().or(self.dropped_until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::timing::{EXIT_EVENT_TIMEOUT, REOPEN_AFTER, RUN_DECIDED_AFTER};

    /// What is reported of a container; times are in seconds since the begin.
    #[derive(Clone, Copy, Debug)]
    enum Report {
        /// The event of a start.
        Start(f64),
        /// A cycle lists it with this start.
        List(f64, f64),
        /// A cycle lists it in the cgroup with this inode, and nothing knows its start.
        ListCgroup(f64, u64),
        Miss(f64),
        /// Its end with this exit code.
        End(f64, i64),
    }
    use Report::{End, List, ListCgroup, Miss, Start};

    /// A container, and what became an event of it: ends by the number of the run and the exit code.
    struct Reported {
        runs: ContainerRuns<()>,
        numbers: RunNumbers,
        begin: Timestamp,
        ends: Vec<(RunNumber, Option<i64>)>,
    }

    impl Reported {
        fn new() -> Self {
            let (runs, numbers, ends) = (ContainerRuns::default(), RunNumbers::default(), vec![]);
            Self { runs, numbers, begin: Timestamp::now(), ends }
        }

        fn at(&self, seconds: f64) -> Timestamp {
            self.begin.plus(Duration::from_secs_f64(seconds))
        }

        fn unix(&self, seconds: f64) -> f64 {
            self.at(seconds).unix_seconds()
        }

        fn list(&mut self, at: f64, started: Option<f64>, cgroup_inode: Option<u64>) -> ListingOutcome {
            let started = started.map(|started| self.unix(started));
            let listing = ListedContainer { at: self.at(at), started, cgroup_inode };
            self.runs.list(&mut self.numbers, listing.at.unix_seconds(), &listing)
        }

        fn apply(&mut self, report: Report) {
            match report {
                Start(at) => {
                    let report = StartReport { at: Some(self.unix(at)), is_event: true };
                    self.runs.begin(&mut self.numbers, report, None);
                }
                List(at, started) => _ = self.list(at, Some(started), Some(1)),
                ListCgroup(at, inode) => _ = self.list(at, None, Some(inode)),
                Miss(at) => _ = self.runs.miss(self.at(at), self.at(at), true, EXIT_EVENT_TIMEOUT),
                End(at, code) => {
                    let report =
                        ReportedEnd { at: self.unix(at), exit_code: Some(code), ..ReportedEnd::default() };
                    self.runs.end(&mut self.numbers, report, true);
                }
            }
            while let Some(run) = self.runs.take_ended(|_| true) {
                self.ends.push((run.number, run.exit_code()));
            }
        }

        /// Returns the numbers of the known runs, and of the one in progress.
        fn known(&self) -> (Vec<RunNumber>, Option<RunNumber>) {
            let running = self.runs.running().map(|run| run.number);
            (self.runs.all().map(|run| run.number).collect(), running)
        }
    }

    #[test]
    fn each_report_is_of_one_run_and_each_end_is_one_event() {
        let timeout = EXIT_EVENT_TIMEOUT.as_secs_f64();
        let (gone, again) = (3.0 + timeout, 3.0 + timeout + REOPEN_AFTER + 6.0);
        let ends = |ends: &[(RunNumber, Option<i64>)]| ends.to_vec();
        for (name, reports, all, running, ended) in [
            ("event, list", vec![Start(1.0), List(2.0, 1.0)], vec![1], Some(1), ends(&[])),
            ("list, event", vec![List(2.0, 1.0), Start(1.5)], vec![1], Some(1), ends(&[])),
            ("end", vec![Start(1.0), End(2.0, 3)], vec![1], None, ends(&[(1, Some(3))])),
            ("end twice", vec![Start(1.0), End(2.0, 3), End(2.0, 3)], vec![1], None, ends(&[(1, Some(3))])),
            ("end of an unknown start", vec![End(2.0, 3)], vec![1], None, ends(&[(1, Some(3))])),
            (
                "repeated after a restart of memledger",
                vec![Start(1.0), End(2.0, 3), Start(3.0), Start(1.0), End(2.0, 3)],
                vec![1, 2],
                Some(2),
                ends(&[(1, Some(3))]),
            ),
            ("next start", vec![Start(1.0), Start(9.0)], vec![1, 2], Some(2), ends(&[(1, None)])),
            (
                "listed with a later start",
                vec![List(2.0, 1.0), List(9.0, 8.0)],
                vec![1, 2],
                Some(2),
                ends(&[(1, None)]),
            ),
            (
                "reported after the next start",
                vec![Start(1.0), Start(9.0), End(8.5, 3)],
                vec![1, 2],
                Some(2),
                ends(&[(1, None)]),
            ),
            (
                "another cgroup",
                vec![ListCgroup(1.0, 7), ListCgroup(2.0, 7), ListCgroup(3.0, 8)],
                vec![1, 2],
                Some(2),
                ends(&[(1, None)]),
            ),
            ("not listed", vec![List(2.0, 1.0), Miss(3.0), Miss(gone - 1.0)], vec![1], Some(1), ends(&[])),
            ("gone", vec![List(2.0, 1.0), Miss(3.0), Miss(gone)], vec![1], None, ends(&[(1, None)])),
            (
                "gone, and listed just after",
                vec![List(2.0, 1.0), Miss(3.0), Miss(gone), List(3.0 + REOPEN_AFTER, 1.0)],
                vec![1],
                None,
                ends(&[(1, None)]),
            ),
            (
                "gone, listed again, gone again: one event",
                vec![
                    List(2.0, 1.0),
                    Miss(3.0),
                    Miss(gone),
                    List(again, 1.0),
                    Miss(again + 1.0),
                    Miss(again + 1.0 + timeout),
                ],
                vec![1],
                None,
                ends(&[(1, None)]),
            ),
            (
                "gone, listed again, and ended: corrected",
                vec![List(2.0, 1.0), Miss(3.0), Miss(gone), List(again, 1.0), End(again + 1.0, 3)],
                vec![1],
                None,
                ends(&[(1, None), (1, Some(3))]),
            ),
        ] {
            let mut container = Reported::new();
            reports.iter().for_each(|report| container.apply(*report));
            assert_eq!(container.known(), (all, running), "{name}");
            assert_eq!(container.ends, ended, "{name}");
        }
    }

    #[test]
    fn end_reported_after_the_next_start_completes_the_run_before() {
        let mut container = Reported::new();
        [Start(1.0), Start(9.0), End(8.5, 3)].into_iter().for_each(|report| container.apply(report));
        let codes: Vec<_> = container.runs.all().map(Run::exit_code).collect();
        assert_eq!(codes, [Some(3), None]);
    }

    #[test]
    fn listing_says_what_it_changed() {
        let mut container = Reported::new();
        let outcomes = [
            (container.list(1.0, None, Some(7)), ListingOutcome::Began),
            (container.list(2.0, None, Some(7)), ListingOutcome::Same),
            (container.list(3.0, Some(1.5), Some(8)), ListingOutcome::Same),
            (container.list(4.0, None, Some(9)), ListingOutcome::Began),
        ];
        for (number, (outcome, wanted)) in outcomes.into_iter().enumerate() {
            assert_eq!(outcome, wanted, "cycle {number}");
        }
        let mut container = Reported::new();
        container.apply(Start(100.0));
        assert_eq!(container.list(2.0, Some(100.0), None), ListingOutcome::Updated, "the clock was set back");
        assert_eq!(container.runs.running().and_then(Run::begin), Some(container.unix(2.0)));
    }

    #[test]
    fn late_report_of_an_end_is_of_when_its_last_process_was_gone() {
        for (has_any, may_be_late, ended) in [(true, true, 5.0), (true, false, 60.0), (false, true, 60.0)] {
            let mut container = Reported::new();
            container.apply(Start(1.0));
            let (seen, empty, unix) = (container.at(4.0), container.at(5.0), container.unix(60.0));
            let run = container.runs.current_mut().unwrap();
            if has_any {
                run.record_processes(seen, true);
            }
            run.record_nothing(empty);
            let report = ReportedEnd { at: unix, exit_code: Some(0), ..ReportedEnd::default() };
            container.runs.end(&mut container.numbers, report, may_be_late);
            let run = container.runs.current().unwrap();
            assert_eq!(run.ended(), Some(container.unix(ended)), "{has_any} {may_be_late}");
            assert_eq!(run.exit_code().is_none(), ended == 5.0, "{has_any} {may_be_late}");
        }
    }

    #[test]
    fn start_that_no_cycle_may_have_listed_yet_leaves_the_run_its_processes() {
        for (at, was_seen, is_empty) in [(1.2, false, false), (1.2, true, true), (3.0, false, true)] {
            let mut container = Reported::new();
            container.apply(Start(1.0));
            let (cycle, kill) = (container.at(at), container.unix(1.0));
            container.runs.miss(cycle, cycle, was_seen, EXIT_EVENT_TIMEOUT);
            let emptied = container.runs.current().unwrap().emptied_after(kill);
            assert_eq!(emptied, is_empty.then(|| container.unix(at)), "{at} {was_seen}");
        }
    }

    #[test]
    fn decided_runs_are_dropped_oldest_first_and_their_numbers_are_not_given_again() {
        let mut container = Reported::new();
        for number in 0..8 {
            container.apply(Start(f64::from(number) * 10.0));
        }
        let (now, later) = (container.at(80.0), container.at(80.0).plus(RUN_DECIDED_AFTER));
        assert!(!container.runs.drop_decided(now, RUN_DECIDED_AFTER, |_| false), "replaced just now");
        assert!(container.runs.drop_decided(later, RUN_DECIDED_AFTER, |run| run.number == 3));
        assert_eq!(container.known().0, [3, 4, 5, 6, 7, 8], "a kill of the third one is not decided");
        assert_eq!(container.runs.dropped_until(), Some(container.unix(20.0)));
        assert!(container.runs.drop_decided(later, RUN_DECIDED_AFTER, |_| false));
        assert_eq!((container.known().0, container.runs.has_surplus()), (vec![4, 5, 6, 7, 8], false));
        container.apply(Start(90.0));
        assert_eq!(container.known().1, Some(9));
    }
}
