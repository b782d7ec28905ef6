//! Parses the arguments and calls the verb; nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    memledger::cli::run()
}
