//! When a run began, by all that was reported of it. Pure.

use serde::{Deserialize, Serialize};

use super::RunPhase;
use super::timing::{MAX_START_EVENT_DELAY, START_TOLERANCE};
use crate::clock::{ClockStep, is_same_report};

/// The reports of the start of one run, in Unix time. Each source has a time of its own: runtimes take it before they create the first
/// process, and send their event after that, later by what the hooks of the container take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// The first report.
    pub first: Option<f64>,
    /// The earliest one, if there are several.
    pub earliest: Option<f64>,
    /// The runtime's event.
    pub event: Option<f64>,
}

/// One report of a start.
#[derive(Clone, Copy, Debug)]
pub struct StartReport {
    /// Unix time; `None` if the source does not know it.
    pub at: Option<f64>,
    /// It is the runtime's event, and no list.
    pub is_event: bool,
}

/// The run of which a start was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportedRun {
    /// The one that is compared.
    This,
    /// One before it.
    Earlier,
    /// The next one.
    Next,
}

impl RunStart {
    /// Creates the start of which this is the first report.
    pub fn new(report: StartReport) -> Self {
        Self { first: report.at, earliest: None, event: report.at.filter(|_| report.is_event) }
    }

    /// Returns when the run began, as far as known.
    pub fn begin(&self) -> Option<f64> {
        self.earliest.or(self.first)
    }

    /// Returns which run began by a report. `previous_end`: when the run before this one ended.
    pub fn compare(&self, phase: &RunPhase, report: StartReport, previous_end: Option<f64>) -> ReportedRun {
        let is_after = |end: f64| self.begin().is_some_and(|begin| end <= begin);
        let is_before = |end: f64| report.at.is_some_and(|at| at < end);
        if previous_end.is_some_and(|end| is_after(end) && is_before(end)) {
            return ReportedRun::Earlier; // repeated
        }
        let is_this = match (self.first, report.at, phase.ended()) {
            (_, _, None) if phase.is_of_another_boot() => false,
            // a late report after the exit; a start after that exit is another run, however soon it came
            (first, Some(at), Some(ended)) => {
                at <= ended || first.is_some_and(|first| is_same_report(first, at))
            }
            (Some(_), Some(at), None) => {
                self.is_at(at, previous_end) || report.is_event && self.can_have_event(at)
            }
            (_, _, ended) => ended.is_none(),
        };
        let is_late = || self.begin().zip(report.at).is_some_and(|(begin, at)| at < begin);
        match is_this {
            true => ReportedRun::This,
            false if is_late() => ReportedRun::Earlier,
            false => ReportedRun::Next,
        }
    }

    /// Returns whether a reported start is this one: it is between the known reports, or it is earlier, but later than the end of the run
    /// before.
    pub fn is_at(&self, reported: f64, previous_end: Option<f64>) -> bool {
        let (Some(first), Some(earliest)) = (self.first, self.begin()) else { return true };
        let latest = self.event.map_or(first, |event| event.max(first));
        let is_before = reported < first && previous_end.is_none_or(|end| reported > end);
        reported < latest + START_TOLERANCE && (reported > earliest - START_TOLERANCE || is_before)
    }

    /// Returns whether the runtime's event at this time can be that of this start, which was only listed so far.
    fn can_have_event(&self, at: f64) -> bool {
        let is_soon = |begin: f64| (0.0..MAX_START_EVENT_DELAY).contains(&(at - begin));
        self.event.is_none() && self.begin().is_some_and(is_soon)
    }

    /// Adds a report of this start. After the end of the run only a first one counts: `phase` is that of the run.
    pub fn add(&mut self, report: StartReport, phase: &RunPhase, previous_end: Option<f64>) {
        self.first = self.first.or(report.at);
        if phase.ended().is_none() {
            let may_be = report.at.filter(|at| previous_end.is_none_or(|end| *at > end));
            self.earliest = self.begin().into_iter().chain(may_be).reduce(f64::min);
            self.event = self.event.or(report.at.filter(|_| report.is_event));
        }
    }

    /// Corrects when it began, if the clock was set back; not the reports, which the runtime goes on to repeat as they were.
    pub fn correct_times(&mut self, step: &ClockStep) {
        if step.seconds() < 0.0
            && let Some(mut begin) = self.begin()
        {
            step.correct(&mut begin);
            self.earliest = Some(begin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::ReportedEnd;

    const EVENT: bool = true;
    const LIST: bool = false;

    fn run(first: f64) -> RunStart {
        RunStart::new(StartReport { at: Some(first), is_event: LIST })
    }

    fn ended(at: f64) -> RunPhase {
        let mut phase = RunPhase::Running;
        phase.report_end(&ReportedEnd { at, ..ReportedEnd::default() });
        phase
    }

    #[test]
    fn each_report_of_a_start_is_of_one_run() {
        let mut old_boot = RunPhase::Running;
        old_boot.restart_host(150.0);
        // the run began at 100, and the one before it ended at 90
        for (phase, at, is_event, of) in [
            (RunPhase::Running, 100.0, LIST, ReportedRun::This),
            (RunPhase::Running, 99.5, LIST, ReportedRun::This),
            (RunPhase::Running, 95.0, LIST, ReportedRun::This),
            (RunPhase::Running, 100.9, LIST, ReportedRun::This),
            (RunPhase::Running, 104.0, EVENT, ReportedRun::This),
            (RunPhase::Running, 104.0, LIST, ReportedRun::Next),
            (RunPhase::Running, 106.0, EVENT, ReportedRun::Next),
            (RunPhase::Running, 89.0, LIST, ReportedRun::Earlier),
            (RunPhase::Running, 89.0, EVENT, ReportedRun::Earlier),
            (ended(120.0), 100.0, EVENT, ReportedRun::This),
            (ended(120.0), 119.0, EVENT, ReportedRun::This),
            (ended(120.0), 120.1, EVENT, ReportedRun::Next),
            (ended(100.1), 100.3, EVENT, ReportedRun::Next),
            (ended(99.9), 100.0, EVENT, ReportedRun::This),
            (ended(120.0), 80.0, LIST, ReportedRun::Earlier),
            (old_boot, 100.0, LIST, ReportedRun::Next),
            (old_boot, 160.0, EVENT, ReportedRun::Next),
            (old_boot, 95.0, EVENT, ReportedRun::Earlier),
        ] {
            let report = StartReport { at: Some(at), is_event };
            assert_eq!(run(100.0).compare(&phase, report, Some(90.0)), of, "{phase:?} {at} {is_event}");
        }
    }

    #[test]
    fn event_of_a_start_comes_once_and_moves_its_end() {
        let mut start = run(100.0);
        start.add(StartReport { at: Some(103.0), is_event: EVENT }, &RunPhase::Running, None);
        start.add(StartReport { at: Some(98.0), is_event: LIST }, &RunPhase::Running, None);
        for (at, is_event, of) in [
            (103.9, LIST, ReportedRun::This),
            (104.5, LIST, ReportedRun::Next),
            (104.5, EVENT, ReportedRun::Next),
            (97.5, LIST, ReportedRun::This),
            (96.0, LIST, ReportedRun::This),
        ] {
            let report = StartReport { at: Some(at), is_event };
            assert_eq!(start.compare(&RunPhase::Running, report, Some(90.0)), of, "{at} {is_event}");
        }
    }

    #[test]
    fn source_without_a_time_knows_only_that_something_runs() {
        let unknown = StartReport { at: None, is_event: LIST };
        assert_eq!(run(100.0).compare(&RunPhase::Running, unknown, None), ReportedRun::This);
        assert_eq!(run(100.0).compare(&ended(120.0), unknown, None), ReportedRun::Next);
        let mut start = RunStart::new(unknown);
        assert_eq!(start.begin(), None);
        start.add(StartReport { at: Some(7.0), is_event: EVENT }, &RunPhase::Running, None);
        assert_eq!((start.begin(), start.event), (Some(7.0), Some(7.0)), "the next source knows it");
    }

    #[test]
    fn earliest_report_is_the_begin_and_the_first_one_the_name() {
        let mut start = run(100.0);
        for (at, begin) in [(101.0, 100.0), (99.0, 99.0), (89.0, 99.0), (99.5, 99.0)] {
            start.add(StartReport { at: Some(at), is_event: LIST }, &RunPhase::Running, Some(90.0));
            assert_eq!((start.first, start.begin()), (Some(100.0), Some(begin)), "{at}");
        }
        start.add(StartReport { at: Some(95.0), is_event: EVENT }, &ended(120.0), Some(90.0));
        assert_eq!(
            (start.begin(), start.event),
            (Some(99.0), None),
            "a report after the end changes nothing"
        );
    }
}
