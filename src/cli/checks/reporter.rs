//! The check of the reports from inside.

use std::os::unix::fs::MetadataExt;

use super::directory::{owner_and_mode, writable};
use super::{Check, NO_PID_NAMESPACE_FIX};
use crate::config::Config;
use crate::reporter;

pub(super) const NAME: &str = "reports";
const LOST: &str =
    "GPU memory of containers is not divided into tensors, torch's cache and the rest; no training steps";

/// Mode bits that let every user look up files in a directory.
const OPEN: u32 = 0o005;

/// Checks whether programs of containers can report.
pub fn run_check(config: &Config) -> Check {
    let Some(directory) = &config.reporter.directory else {
        let fix = "--reporter.directory=/run/memledger-reporter: see docs/inside-view.md";
        return Check::none(NAME, "off (--reporter.directory is empty)", LOST, fix).detail();
    };
    let place = directory.display();
    if !config.host_paths.in_initial_pid_namespace() {
        let found = "not received: pids of clients are unknown outside the host's pid namespace";
        return Check::none(NAME, found, LOST, NO_PID_NAMESPACE_FIX).detail();
    }
    let access = owner_and_mode(directory);
    if reporter::is_served(directory) {
        let found = format!(
            "received in {place} ({access}); containers that do not mount it show no view from inside"
        );
        let is_open = std::fs::metadata(directory).is_ok_and(|directory| directory.mode() & OPEN == OPEN);
        return match is_open {
            true => Check::good(NAME, found),
            false => Check::good(NAME, found).weaker("programs of other users cannot report", "chmod 0755"),
        }
        .detail();
    }
    if let Err(why) = writable(directory, &["python"]) {
        let fix = "make it writable for memledger's user: systemd: RuntimeDirectory=memledger-reporter; Docker: mount a \
                   directory of the host there; or set another --reporter.directory";
        return Check::bad(NAME, why, LOST, fix).detail();
    }
    let found = match directory.exists() {
        true => format!("no memledger receives them in {place} ({access})"),
        false => format!("{place} does not exist; memledger serve creates it"),
    };
    Check::none(NAME, found, LOST, "start `memledger serve`; if it runs, its log has the reason").detail()
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;
    use crate::cli::checks::CheckState;
    use crate::config::arguments;

    fn check(directory: &std::path::Path) -> Check {
        let flag = format!("--reporter.directory={}", directory.display());
        let command = arguments(Command::new("memledger").no_binary_name(true));
        run_check(&Config::load(&command.get_matches_from([flag])).unwrap())
    }

    #[test]
    fn names_what_is_wrong_with_the_directory() {
        let folder = tempfile::tempdir().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let missing = check(&folder.path().join("reporter"));
        if missing.fix == NO_PID_NAMESPACE_FIX {
            return eprintln!("SKIPPED: not in the host's pid namespace");
        }
        assert!(missing.state == CheckState::None && missing.found.ends_with("creates it"), "{missing:?}");
        let idle = check(folder.path());
        assert!(idle.state == CheckState::None && idle.found.contains("(owner "), "{idle:?}");
        let taken = check(file.path());
        assert!(taken.state == CheckState::Bad && taken.found.ends_with("is not a directory"), "{taken:?}");
    }
}
