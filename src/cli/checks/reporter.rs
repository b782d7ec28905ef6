//! The check of the reports from inside.

use super::{Check, NO_PID_NAMESPACE_FIX};
use crate::config::Config;
use crate::reporter;

const NAME: &str = "reports";
const LOST: &str =
    "GPU memory of containers is not divided into tensors, torch's cache and the rest; no training steps";

/// Checks whether programs of containers can report.
pub fn run_check(config: &Config) -> Check {
    let Some(directory) = &config.reporter_directory else {
        let fix = "--reporter.directory=/run/memledger-reporter: see docs/inside-view.md";
        return Check::none(NAME, "off (--reporter.directory is empty)", LOST, fix).detail();
    };
    let place = directory.display();
    if !config.host_paths.in_initial_pid_namespace() {
        let found = "not received: pids of clients are unknown outside the host's pid namespace";
        return Check::none(NAME, found, LOST, NO_PID_NAMESPACE_FIX).detail();
    }
    if reporter::is_served(directory) {
        return Check::good(
            NAME,
            format!("received in {place}; containers that do not mount it show no view from inside"),
        )
        .detail();
    }
    let fix = "start `memledger serve`; if it runs, its log has the reason";
    Check::none(NAME, format!("no memledger receives them in {place}"), LOST, fix).detail()
}
