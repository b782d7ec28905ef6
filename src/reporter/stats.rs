//! Counters of the reporter: what it rejected, and what clients could not send.

use std::sync::atomic::{AtomicU64, Ordering};

use super::reports::SampleGrowth;
use crate::catalog::{REPORTER_LOST, REPORTER_OVERLAPPING_OPERATIONS, REPORTER_REJECTED};
use crate::series::Series;

/// Why a connection or a message was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportRejection {
    /// The connecting process ended, or is not visible in memledger's pid namespace.
    Peer,
    /// The connecting process is in no container.
    NoContainer,
    /// Too many connections of one container, or of all.
    Connections,
    /// More messages than the rate limit; further ones wait in the socket.
    Rate,
    /// Longer than a packet may be.
    TooLarge,
    /// Not a message of the protocol, or a number out of its range.
    Malformed,
    /// Another version of the protocol.
    Version,
    /// Sent by another process than the one that connected, such as a forked child.
    Sender,
    /// A component or an operation with characters that are not allowed, or too long.
    Name,
    /// A local rank over the maximum.
    Rank,
    /// Too many pairs of component and operation in one container.
    Operations,
}

/// Each reason with its label value.
const REJECT_REASONS: [(ReportRejection, &str); 11] = [
    (ReportRejection::Peer, "peer"),
    (ReportRejection::NoContainer, "no_container"),
    (ReportRejection::Connections, "connections"),
    (ReportRejection::Rate, "rate"),
    (ReportRejection::TooLarge, "too_large"),
    (ReportRejection::Malformed, "malformed"),
    (ReportRejection::Version, "version"),
    (ReportRejection::Sender, "sender"),
    (ReportRejection::Name, "name"),
    (ReportRejection::Rank, "rank"),
    (ReportRejection::Operations, "operations"),
];

/// Counters of the reporter since memledger's start.
#[derive(Debug, Default)]
pub struct ReporterStats {
    rejected: [AtomicU64; REJECT_REASONS.len()],
    lost: AtomicU64,
    overlapping: AtomicU64,
}

impl ReporterStats {
    /// Counts a rejection.
    pub fn count_rejected(&self, reason: ReportRejection) {
        self.rejected[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often a message or a connection was rejected for a reason.
    #[cfg(test)]
    pub fn rejected(&self, reason: ReportRejection) -> u64 {
        self.rejected[reason as usize].load(Ordering::Relaxed)
    }

    /// Adds what a sample of a client counts.
    pub fn add(&self, growth: SampleGrowth) {
        self.lost.fetch_add(growth.lost, Ordering::Relaxed);
        self.overlapping.fetch_add(growth.overlapping, Ordering::Relaxed);
    }

    /// Writes the metrics.
    pub fn write(&self, series: &mut Series) {
        for (reason, label) in REJECT_REASONS {
            let count = self.rejected[reason as usize].load(Ordering::Relaxed);
            series.global(REPORTER_REJECTED, [label.into()], count as f64);
        }
        series.global(REPORTER_LOST, [], self.lost.load(Ordering::Relaxed) as f64);
        series.global(REPORTER_OVERLAPPING_OPERATIONS, [], self.overlapping.load(Ordering::Relaxed) as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_in_the_order_of_their_numbers() {
        for (index, (reason, _)) in REJECT_REASONS.iter().enumerate() {
            assert_eq!(*reason as usize, index);
        }
    }
}
