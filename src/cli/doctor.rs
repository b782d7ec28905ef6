//! `memledger doctor`: shows what is readable here, what is missing without the rest, and how to fix it.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::checks;
use crate::config::Config;

/// Returns the verb.
pub fn command() -> Command {
    let command = Command::new("doctor")
        .about("Show what memledger can read here, what is missing without the rest, and how to fix it.")
        .arg(
            Arg::new("all")
                .long("all")
                .action(ArgAction::SetTrue)
                .help("Show also what this kind of host does not have and does not need."),
        )
        .arg(super::json_flag("Print one JSON document, with all checks."));
    super::answers(command, "memledger can run here", "it cannot")
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut checks = runtime.block_on(checks::run_checks(&config, checks::Verbosity::Full, None));
    runtime.shutdown_background();
    let is_missing = |check: &&checks::Check| check.required && check.state != checks::CheckState::Good;
    let missing: Vec<_> = checks.iter().filter(is_missing).map(|check| check.source).collect();
    let works = missing.is_empty();
    if matches.get_flag("json") {
        let json = serde_json::json!({ "works": works, "missing": missing, "checks": checks });
        super::print(&(serde_json::to_string_pretty(&json)? + "\n"))?;
        return Ok(if works { ExitCode::SUCCESS } else { ExitCode::from(super::NO) });
    }
    let verdict = match works {
        true => "memledger can run here: the memory of containers is readable.".to_owned(),
        false => format!("memledger cannot run here without: {}.", missing.join(", ")),
    };
    let folded = if matches.get_flag("all") { String::new() } else { checks::fold(&mut checks) };
    let table = checks::render(&checks, checks::Verbosity::Full);
    super::print(&format!("{table}{folded}\n{verdict}\n"))?;
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::from(super::NO) })
}
