//! The hidden verbs of `memledger run`: two processes that it puts into the cgroup of the command.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};

use super::cgroup::PLACED_WITHIN;
use super::{LAUNCH_ERROR, note};
use crate::clock::Timestamp;

/// Becomes the command, once the run is recorded.
pub const START_VERB: &str = "run-start-command";
/// Keeps the cgroup until its counters are read.
pub const HOLD_VERB: &str = "run-hold-cgroup";

/// Exit statuses of shells.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Interval of looking for the record.
const POLL: Duration = Duration::from_millis(1);

/// Waits for the record of the run, whose path is the first argument, and executes the others as a command. Until then it ends with
/// `memledger run`, which puts it into its cgroup before.
pub fn start(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let record = arguments.next().map(PathBuf::from).unwrap_or_default();
    let began = Timestamp::now();
    while !record.exists() {
        if Timestamp::now().since(began) > 2 * PLACED_WITHIN {
            return ExitCode::from(LAUNCH_ERROR);
        }
        std::thread::sleep(POLL);
    }
    let _ = set_parent_process_death_signal(None);
    let Some(program) = arguments.next() else { return ExitCode::from(LAUNCH_ERROR) };
    let error = Command::new(&program).args(arguments).exec();
    note(&format!("cannot execute {}: {error}", program.display()));
    ExitCode::from(status_of(&error))
}

/// Returns the exit status of shells for a command that cannot be executed.
fn status_of(error: &std::io::Error) -> u8 {
    if error.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE }
}

/// Waits until standard input is closed: by `memledger run`, or because it was killed.
pub fn hold() -> ExitCode {
    let _ = rustix::thread::set_name(c"memledger-run"); // for people who list processes
    let _ = std::io::stdin().read(&mut [0]);
    ExitCode::SUCCESS
}
