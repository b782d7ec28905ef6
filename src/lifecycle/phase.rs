//! How far a run is, and how it ended. Pure.

use serde::{Deserialize, Serialize};

use super::timing::REOPEN_AFTER;
use crate::clock::{ClockStep, Timestamp};

/// How far a run is. A container that was only created has no run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunPhase {
    /// It has begun, and nothing shows that it has ended.
    #[default]
    Running,
    /// Its end is to be expected: it is not listed any more, or it began in another boot of the host. The end may still be reported.
    Missing {
        /// The first cycle that did not list it, if it is not listed.
        #[serde(skip)]
        since: Option<Timestamp>,
        /// Unix time of the restart of the host before which it must have ended.
        restarted: Option<f64>,
    },
    /// It has ended.
    Ended(RunEnd),
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunEnd {
    /// Unix time.
    pub at: f64,
    /// How it became known.
    pub source: EndSource,
    /// Exit code.
    pub exit_code: Option<i64>,
    /// The runtime's OOMKilled flag.
    pub oom_flag: Option<bool>,
    /// It is an event already.
    pub is_recorded: bool,
}

/// How the end of a run became known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndSource {
    /// Its runtime reported it.
    Reported,
    /// Its runtime reported it so long after its last process was gone that an exit code of 0 is not believed: an engine reports that for
    /// an end that it missed.
    ReportedLate,
    /// No source reported it: it was not listed any more, or the next run began.
    Assumed,
    /// The host was restarted, whatever its runtime makes up for the end.
    HostRestart,
}

/// What a runtime reports of an end.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReportedEnd {
    /// Unix time at which it ended.
    pub at: f64,
    /// Unix time that was reported, if that is much later.
    pub reported_at: Option<f64>,
    /// Exit code.
    pub exit_code: Option<i64>,
    /// The runtime's OOMKilled flag.
    pub oom_flag: Option<bool>,
}

impl RunPhase {
    /// Returns the end.
    pub fn end(&self) -> Option<&RunEnd> {
        match self {
            Self::Ended(end) => Some(end),
            Self::Running | Self::Missing { .. } => None,
        }
    }

    /// Returns the Unix time of the end.
    pub fn ended(&self) -> Option<f64> {
        self.end().map(|end| end.at)
    }

    /// Returns when it ended, or the restart of the host before which it must have.
    pub fn latest_end(&self) -> Option<f64> {
        self.ended().or(self.restarted())
    }

    /// Returns whether the end is known, and no source reported it.
    pub fn is_end_assumed(&self) -> bool {
        self.end().is_some_and(|end| end.source == EndSource::Assumed)
    }

    /// Returns whether no source reported the end.
    pub fn is_end_unreported(&self) -> bool {
        self.end().is_some_and(|end| match end.source {
            EndSource::Assumed => true,
            EndSource::HostRestart => end.exit_code.is_none(),
            EndSource::Reported | EndSource::ReportedLate => false,
        })
    }

    /// Returns whether its end was reported so late that an exit code of 0 is not believed.
    pub fn is_end_reported_late(&self) -> bool {
        self.end().is_some_and(|end| end.source == EndSource::ReportedLate)
    }

    /// Returns whether it began in another boot of the host, whose restart ended it.
    pub fn is_of_another_boot(&self) -> bool {
        self.restarted().is_some()
    }

    fn restarted(&self) -> Option<f64> {
        match self {
            Self::Missing { restarted, .. } => *restarted,
            Self::Ended(end) if end.source == EndSource::HostRestart => Some(end.at),
            Self::Running | Self::Ended(_) => None,
        }
    }

    /// A cycle lists it. One that was missing goes on, unless it began in another boot.
    pub fn list(&mut self) {
        if let Self::Missing { restarted, .. } = *self {
            *self = match restarted {
                Some(_) => Self::Missing { since: None, restarted },
                None => Self::Running,
            };
        }
    }

    /// The cycle at this time does not list it. Returns the first such cycle.
    pub fn miss(&mut self, at: Timestamp) -> Timestamp {
        match self {
            Self::Running => *self = Self::Missing { since: Some(at), restarted: None },
            Self::Missing { since, .. } => return *since.get_or_insert(at),
            Self::Ended(_) => {}
        }
        at
    }

    /// The host was restarted at this Unix time.
    pub fn restart_host(&mut self, at: f64) {
        match self {
            Self::Running => *self = Self::Missing { since: None, restarted: Some(at) },
            Self::Missing { restarted, .. } => *restarted = Some(at),
            Self::Ended(_) => {}
        }
    }

    /// Ends it, by this Unix time at the latest, without a report.
    pub fn assume_end(&mut self, at: f64) {
        if self.end().is_none() {
            let (at, source) = match self.restarted() {
                Some(restarted) => (restarted, EndSource::HostRestart),
                None => (at, EndSource::Assumed),
            };
            *self = Self::Ended(RunEnd { at, source, exit_code: None, oom_flag: None, is_recorded: false });
        }
    }

    /// Its runtime reports its end. Returns false if the end was an event already, which gets what was missing.
    pub fn report_end(&mut self, report: &ReportedEnd) -> bool {
        let reported_at = report.reported_at.unwrap_or(report.at);
        // one before the restart has a reason of its own
        let restarted = self.restarted().filter(|restarted| reported_at >= *restarted);
        if let Self::Ended(end) = self
            && end.is_recorded
        {
            end.complete(report);
            if end.source == EndSource::Assumed {
                end.source = EndSource::Reported;
            }
            return false;
        }
        let (at, source) = match (restarted, report.reported_at) {
            (Some(restarted), _) => (restarted, EndSource::HostRestart),
            (None, Some(_)) => (report.at, EndSource::ReportedLate),
            (None, None) => (report.at, EndSource::Reported),
        };
        let exit_code = report.exit_code.filter(|code| *code != 0 || report.reported_at.is_none());
        *self = Self::Ended(RunEnd { at, source, exit_code, oom_flag: report.oom_flag, is_recorded: false });
        true
    }

    /// Adds to an end what a later report of it has besides.
    pub fn complete_end(&mut self, report: &ReportedEnd) {
        if let Self::Ended(end) = self {
            end.complete(report);
        }
    }

    /// Continues it, if its end was only assumed and it is listed so long after that. Returns whether it goes on.
    pub fn reopen(&mut self, now: f64) -> bool {
        let goes_on = self.is_end_assumed() && self.ended().is_some_and(|ended| now - ended > REOPEN_AFTER);
        if goes_on {
            *self = Self::Running;
        }
        goes_on
    }

    /// Makes an end an event. Returns whether it was none before.
    pub fn record(&mut self) -> bool {
        match self {
            Self::Ended(end) => !std::mem::replace(&mut end.is_recorded, true),
            Self::Running | Self::Missing { .. } => false,
        }
    }

    /// Corrects its time, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        if let Self::Ended(end) = self {
            step.correct(&mut end.at);
        }
    }
}

impl RunEnd {
    fn complete(&mut self, report: &ReportedEnd) {
        let is_believed = |code: &i64| *code != 0 || self.source != EndSource::ReportedLate;
        self.exit_code = self.exit_code.or(report.exit_code.filter(is_believed));
        self.oom_flag = self.oom_flag.or(report.oom_flag);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn missing(since: Option<Timestamp>, restarted: Option<f64>) -> RunPhase {
        RunPhase::Missing { since, restarted }
    }

    fn ended(at: f64, source: EndSource, exit_code: Option<i64>, is_recorded: bool) -> RunPhase {
        RunPhase::Ended(RunEnd { at, source, exit_code, oom_flag: None, is_recorded })
    }

    fn report(at: f64, exit_code: i64) -> ReportedEnd {
        ReportedEnd { at, exit_code: Some(exit_code), ..ReportedEnd::default() }
    }

    /// Every phase in which a run can be, by name.
    fn phases(first: Timestamp) -> Vec<(&'static str, RunPhase)> {
        use EndSource::{Assumed, HostRestart, Reported, ReportedLate};
        let mut phases = vec![
            ("running", RunPhase::Running),
            ("not listed", missing(Some(first), None)),
            ("old boot", missing(None, Some(50.0))),
            ("old boot, not listed", missing(Some(first), Some(50.0))),
        ];
        let ends = [
            ("assumed", Assumed, None),
            ("reported", Reported, Some(1)),
            ("reported late", ReportedLate, None),
            ("host restart", HostRestart, Some(255)),
        ];
        for (name, source, code) in ends {
            phases.push((name, ended(50.0, source, code, false)));
            phases.push((name, ended(50.0, source, code, true)));
        }
        phases
    }

    #[test]
    fn cycle_that_lists_a_run_lets_it_go_on_unless_it_is_of_another_boot() {
        for (name, before) in phases(Timestamp::now()) {
            let mut phase = before;
            phase.list();
            let wanted = match name {
                "not listed" => RunPhase::Running,
                "old boot, not listed" => missing(None, Some(50.0)),
                _ => before,
            };
            assert_eq!(phase, wanted, "{name}");
        }
    }

    #[test]
    fn cycle_that_does_not_list_a_run_keeps_since_when() {
        let first = Timestamp::now();
        let now = first.plus(Duration::from_secs(9));
        for (name, before) in phases(first) {
            let mut phase = before;
            let since = phase.miss(now);
            let (wanted, wanted_since) = match name {
                "running" => (missing(Some(now), None), now),
                "old boot" => (missing(Some(now), Some(50.0)), now),
                "not listed" | "old boot, not listed" => (before, first),
                _ => (before, now),
            };
            assert_eq!((phase, since), (wanted, wanted_since), "{name}");
        }
    }

    #[test]
    fn restart_of_the_host_ends_no_run_that_ended_before() {
        let first = Timestamp::now();
        for (name, before) in phases(first) {
            let mut phase = before;
            phase.restart_host(70.0);
            let wanted = match before {
                RunPhase::Running => missing(None, Some(70.0)),
                RunPhase::Missing { since, .. } => missing(since, Some(70.0)),
                RunPhase::Ended(_) => before,
            };
            assert_eq!(phase, wanted, "{name}");
            let is_its_end = before.end().is_none() || name == "host restart";
            assert_eq!(phase.is_of_another_boot(), is_its_end, "{name}");
        }
    }

    #[test]
    fn end_is_assumed_once() {
        for (name, before) in phases(Timestamp::now()) {
            let mut phase = before;
            phase.assume_end(60.0);
            let wanted = match name {
                "running" | "not listed" => ended(60.0, EndSource::Assumed, None, false),
                "old boot" | "old boot, not listed" => ended(50.0, EndSource::HostRestart, None, false),
                _ => before,
            };
            assert_eq!(phase, wanted, "{name}");
        }
    }

    #[test]
    fn reported_end_is_an_event_once_and_corrects_an_assumed_one() {
        use EndSource::{Assumed, HostRestart, Reported, ReportedLate};
        for (name, before) in phases(Timestamp::now()) {
            let mut phase = before;
            let is_new = phase.report_end(&report(60.0, 3));
            let is_recorded = before.end().is_some_and(|end| end.is_recorded);
            let source = before.end().map(|end| end.source);
            let wanted = match (name, source) {
                (_, Some(Assumed)) if is_recorded => ended(50.0, Reported, Some(3), true),
                (_, Some(ReportedLate)) if is_recorded => ended(50.0, ReportedLate, Some(3), true),
                (_, Some(_)) if is_recorded => before,
                ("old boot" | "old boot, not listed", _) | (_, Some(HostRestart)) => {
                    ended(50.0, HostRestart, Some(3), false)
                }
                _ => ended(60.0, Reported, Some(3), false),
            };
            assert_eq!((phase, is_new), (wanted, !is_recorded), "{name}");
        }
        let mut phase = missing(None, Some(50.0));
        phase.report_end(&report(40.0, 3));
        assert_eq!(phase, ended(40.0, Reported, Some(3), false), "it ended before the restart");
    }

    #[test]
    fn later_report_adds_to_an_end_and_changes_no_source() {
        for (name, before) in phases(Timestamp::now()) {
            let mut phase = before;
            phase.complete_end(&report(60.0, 3));
            let mut wanted = before;
            if let RunPhase::Ended(end) = &mut wanted {
                end.exit_code = end.exit_code.or(Some(3));
            }
            assert_eq!(phase, wanted, "{name}");
        }
    }

    #[test]
    fn success_is_not_believed_of_an_end_that_is_reported_long_after_it() {
        let late = |exit_code| ReportedEnd { reported_at: Some(90.0), ..report(60.0, exit_code) };
        for (exit_code, believed) in [(0, None), (137, Some(137))] {
            let mut phase = RunPhase::Running;
            assert!(phase.report_end(&late(exit_code)));
            assert_eq!(phase, ended(60.0, EndSource::ReportedLate, believed, false));
            phase.record();
            phase.report_end(&report(90.0, 0));
            assert_eq!(
                phase,
                ended(60.0, EndSource::ReportedLate, believed, true),
                "nor when it is repeated"
            );
        }
        let mut phase = missing(None, Some(50.0));
        phase.report_end(&late(0));
        assert_eq!(
            phase,
            ended(50.0, EndSource::HostRestart, None, false),
            "nor after a restart of the host"
        );
    }

    #[test]
    fn only_an_assumed_end_is_taken_back() {
        for (name, before) in phases(Timestamp::now()) {
            let mut phase = before;
            assert!(!phase.reopen(50.0 + REOPEN_AFTER), "{name}: the list may be older than the end");
            assert_eq!(phase.reopen(51.0 + REOPEN_AFTER), name == "assumed", "{name}");
            assert_eq!(phase, if name == "assumed" { RunPhase::Running } else { before }, "{name}");
        }
    }

    #[test]
    fn end_is_recorded_once() {
        for (name, before) in phases(Timestamp::now()) {
            let mut phase = before;
            assert_eq!(phase.record(), before.end().is_some_and(|end| !end.is_recorded), "{name}");
            assert!(!phase.record(), "{name}");
        }
    }

    #[test]
    fn stored_phase_forgets_only_which_cycle_missed_it() {
        for (name, phase) in phases(Timestamp::now()) {
            let text = serde_json::to_string(&phase).unwrap();
            let read: RunPhase = serde_json::from_str(&text).unwrap();
            let wanted = match phase {
                RunPhase::Missing { restarted, .. } => missing(None, restarted),
                other => other,
            };
            assert_eq!(read, wanted, "{name}: {text}");
        }
    }
}
