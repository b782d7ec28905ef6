//! Runs the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    memledger::cli::run()
}
