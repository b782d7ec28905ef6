//! Metrics of the HTTP server: whether its configuration is in use, and what it rejected.
//!
//! Data flows from the sampler to the routes, not back. These counters are the exception, like
//! [`super::gpu::DriverState`] for the GPU driver.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::catalog::{WEB_CONFIG_SUCCESS, WEB_REFUSED};
use crate::series::Series;

/// Why a request or a connection was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// `--web.max-connections` was reached.
    Connections,
    /// `--web.max-requests` was reached.
    Requests,
    /// The TLS handshake failed: another protocol, no common version, a missing certificate, or a timeout.
    Handshake,
    /// Missing or wrong user name or password.
    Password,
    /// Too many password checks were waiting.
    PasswordQueue,
    /// `rate_limit` was exceeded.
    Rate,
    /// A process that may not use the control socket.
    ControlSocket,
}

/// Each reason with its label value.
const REJECT_REASONS: [(RejectReason, &str); 7] = [
    (RejectReason::Connections, "connections"),
    (RejectReason::Requests, "requests"),
    (RejectReason::Handshake, "handshake"),
    (RejectReason::Password, "password"),
    (RejectReason::PasswordQueue, "password_queue"),
    (RejectReason::Rate, "rate"),
    (RejectReason::ControlSocket, "control_socket"),
];

const NO_FILE: u8 = 2;

/// Counters of the HTTP server.
#[derive(Debug)]
pub struct HttpStats {
    config_in_use: AtomicU8,
    rejected: [AtomicU64; REJECT_REASONS.len()],
}

impl Default for HttpStats {
    fn default() -> Self {
        Self { config_in_use: AtomicU8::new(NO_FILE), rejected: Default::default() }
    }
}

impl HttpStats {
    /// Sets whether `--web.config.file`, as it is now, is in use.
    pub fn set_config_in_use(&self, is_in_use: bool) {
        self.config_in_use.store(u8::from(is_in_use), Ordering::Relaxed);
    }

    /// Counts a rejection.
    pub fn count_rejected(&self, reason: RejectReason) {
        self.rejected[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the metrics.
    pub fn write(&self, series: &mut Series) {
        let in_use = self.config_in_use.load(Ordering::Relaxed);
        if in_use != NO_FILE {
            series.global(WEB_CONFIG_SUCCESS, [], f64::from(in_use));
        }
        for (reason, label) in REJECT_REASONS {
            let count = self.rejected[reason as usize].load(Ordering::Relaxed);
            series.global(WEB_REFUSED, [label.into()], count as f64);
        }
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
