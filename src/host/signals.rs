//! Ignores the signals that are meant for memledger and not for its NVML process.

#![allow(unsafe_code)]

/// Ignores the signals that end memledger or make it release the driver: systemd, a terminal and `pidof` send them to both
/// processes. Memledger ends its NVML process itself.
pub fn ignore_signals_of_parent() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
        // SAFETY: SIG_IGN installs no code that could run in a handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
