//! How far the kernel log's clock has drifted, by the exits that its kills explain. Pure.

use std::cmp::Ordering;

use crate::clock::Timestamp;
use crate::discover::{ContainerId, EventKind, RuntimeEvent};
use crate::ledger::interval::{Interval, Written};
use crate::ledger::reconcile::ObservedRecord;
use crate::ledger::run::SIGKILL_STATUS;
use crate::lifecycle::timing::{DRIFT_TOLERANCE, EXIT_DELAY, MAX_DRIFT, STOP_REQUEST_WINDOW};
use crate::parse::kernel_log::kills::KillRecord;

/// Maximum number of drifts that are tried.
const MAX_CANDIDATES: usize = 1_000;

/// The kernel log's clock, by exits that its kills explain: it may be a minute off after a month.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LogDrift {
    /// Seconds that it loses in each second since the boot; `None` if nothing shows it.
    rate: Option<f64>,
}

impl LogDrift {
    /// Compares kills that name their container with its exits by SIGKILL that the log's clock allows.
    pub(super) fn measure(booted_at: f64, events: &[RuntimeEvent], records: &[ObservedRecord]) -> Self {
        let exits: Vec<(&str, f64)> = events.iter().filter_map(unrequested_sigkill(events)).collect();
        let mut pairs: Vec<DriftPair<'_>> = Vec::new();
        for line in records {
            let KillRecord::Kill { context: Some(context), .. } = &line.record else { continue };
            let uptime = line.position.usec as f64 / 1e6;
            let possible = exits.iter().filter(|(id, exited)| {
                (line.written.within.earliest..=line.written.within.latest + EXIT_DELAY).contains(exited)
                    && context.task_cgroups.iter().any(|path| path.contains(id))
            });
            pairs.extend(possible.map(|(id, exited)| DriftPair {
                id,
                uptime,
                exited: *exited,
                shift: exited - booted_at - uptime,
            }));
        }
        let explained = |rate: f64| -> Vec<&DriftPair<'_>> {
            let fits = |pair: &&DriftPair<'_>| (pair.shift - rate * pair.uptime).abs() <= EXIT_DELAY;
            let mut fitting: Vec<_> = pairs.iter().filter(fits).collect();
            fitting.sort_by(|one, other| {
                (one.id, one.exited).partial_cmp(&(other.id, other.exited)).unwrap_or(Ordering::Equal)
            });
            fitting.dedup_by(|one, other| (one.id, one.exited) == (other.id, other.exited));
            fitting
        };
        // a good clock needs no correction, and of several the newest kill counts: it is the one that ended the container
        let measured = pairs.iter().rev().map(|pair| pair.shift / pair.uptime);
        let possible = measured.filter(|rate| rate.abs() <= MAX_DRIFT).take(MAX_CANDIDATES);
        let mut best: (f64, Vec<&DriftPair<'_>>) = (0.0, vec![]);
        for rate in std::iter::once(0.0).chain(possible) {
            let fitting = explained(rate);
            if fitting.len() > best.1.len() {
                best = (rate, fitting);
            }
        }
        let (rate, fitting) = best;
        let sum = |of: fn(&DriftPair<'_>) -> f64| fitting.iter().map(|pair| of(pair)).sum::<f64>();
        let shift = sum(|pair| pair.shift);
        let is_exact = rate == 0.0 && shift >= 0.0;
        let rate = if is_exact { 0.0 } else { shift / sum(|pair| pair.uptime) };
        Self { rate: (!fitting.is_empty()).then_some(rate) }
    }

    /// Returns whether an exit showed it.
    pub(super) fn is_measured(&self) -> bool {
        self.rate.is_some()
    }

    /// Returns the seconds by which a record of this time, in seconds since the boot, is too early.
    pub(super) fn shift(&self, uptime: f64) -> f64 {
        // a kill precedes the exit by which the drift is measured
        self.rate.filter(|rate| *rate != 0.0).map_or(0.0, |rate| rate * uptime - EXIT_DELAY / 4.0)
    }

    /// Returns the line with its corrected time.
    pub(super) fn correct(&self, booted_at: f64, now: Timestamp, line: ObservedRecord) -> ObservedRecord {
        let uptime = line.position.usec as f64 / 1e6;
        let shift = self.shift(uptime);
        if shift == 0.0 {
            return line;
        }
        let at = (booted_at + uptime + shift).min(now.unix_seconds());
        let within = Interval::new(at - DRIFT_TOLERANCE, at + DRIFT_TOLERANCE);
        ObservedRecord { written: Written { at, within }, ..line }
    }
}

/// A kill and an exit that it may have caused.
#[derive(Debug)]
struct DriftPair<'a> {
    id: &'a str,
    /// The kernel's stamp, in seconds.
    uptime: f64,
    /// Unix time of the exit.
    exited: f64,
    /// Seconds from the kill to the exit, by their own clocks.
    shift: f64,
}

/// Returns the function that gives container and time of an exit by SIGKILL that nobody requested.
fn unrequested_sigkill<'a>(
    events: &[RuntimeEvent],
) -> impl FnMut(&'a RuntimeEvent) -> Option<(&'a str, f64)> {
    let requests: Vec<(ContainerId, f64)> = events
        .iter()
        .filter(|event| matches!(event.what, EventKind::SignalRequested { .. }))
        .map(|event| (event.id.clone(), event.at))
        .collect();
    move |event| {
        let EventKind::Ended { exit_code: Some(SIGKILL_STATUS), .. } = event.what else { return None };
        let is_requested = |(id, at): &(ContainerId, f64)| {
            *id == event.id && (0.0..STOP_REQUEST_WINDOW).contains(&(event.at - at))
        };
        (!requests.iter().any(is_requested)).then_some((event.id.as_str(), event.at))
    }
}
