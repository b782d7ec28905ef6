//! What the HTTP side tells of itself: whether its file is in use, and whom it turned away.
//!
//! Data flows from the cycle to the routes, never back; this account is how they are told of in the metrics all the same,
//! as [`super::gpu::Control`] is for the GPU driver.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::catalog::{WEB_CONFIG_SUCCESS, WEB_REFUSED};
use crate::series::Series;

/// Why a request or a connection was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// More connections than `--web.max-connections`.
    Connections,
    /// More requests than `--web.max-requests`.
    Requests,
    /// No TLS: another protocol, no common version, no certificate that is wanted, or too slow.
    Handshake,
    /// No name and password, or a wrong one.
    Password,
    /// Too many passwords waiting to be checked.
    PasswordQueue,
    /// More often than `rate_limit` allows.
    Rate,
}

/// Each with its label.
const REFUSALS: [(Refusal, &str); 6] = [
    (Refusal::Connections, "connections"),
    (Refusal::Requests, "requests"),
    (Refusal::Handshake, "handshake"),
    (Refusal::Password, "password"),
    (Refusal::PasswordQueue, "password_queue"),
    (Refusal::Rate, "rate"),
];

const NO_FILE: u8 = 2;

/// The account.
#[derive(Debug)]
pub struct Front {
    in_use: AtomicU8,
    refused: [AtomicU64; REFUSALS.len()],
}

impl Default for Front {
    fn default() -> Self {
        Self { in_use: AtomicU8::new(NO_FILE), refused: Default::default() }
    }
}

impl Front {
    /// Notes whether `--web.config.file`, as it stands now, is in use.
    pub fn file_is_in_use(&self, yes: bool) {
        self.in_use.store(u8::from(yes), Ordering::Relaxed);
    }

    /// Counts a refusal.
    pub fn refuse(&self, why: Refusal) {
        self.refused[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the account.
    pub fn write(&self, series: &mut Series) {
        let in_use = self.in_use.load(Ordering::Relaxed);
        if in_use != NO_FILE {
            series.global(WEB_CONFIG_SUCCESS, [], f64::from(in_use));
        }
        for (why, label) in REFUSALS {
            let count = self.refused[why as usize].load(Ordering::Relaxed);
            series.global(WEB_REFUSED, [label.into()], count as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_place() {
        for (place, (why, _)) in REFUSALS.iter().enumerate() {
            assert_eq!(*why as usize, place);
        }
    }
}
