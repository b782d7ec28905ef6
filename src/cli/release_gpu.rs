//! `memledger release-gpu`: makes the running memledger close the GPU driver, so that the driver can be unloaded or replaced.

use std::process::ExitCode;

use anyhow::bail;
use clap::Command;

use super::control;
use crate::config::Config;

/// Returns the verb.
pub fn command() -> Command {
    let command = Command::new("release-gpu")
        .about("Make the running memledger release the GPU driver for a while.")
        .after_help(
            "For --gpu.release-for of memledger serve, so that the driver can be unloaded or replaced.",
        );
    super::answers(command, "it is released", "that is still to come")
}

pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    match control::request(config, "POST", "/-/release-gpu", "application/json")? {
        (200, text) => {
            super::print(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        (202, text) => {
            super::print(&text)?;
            eprintln!("a call of the driver is in progress; the driver is released when that returns");
            Ok(ExitCode::from(super::NO))
        }
        (_, text) => bail!("{}", text.trim_end()),
    }
}
