//! `memledger doctor`: what can be read here, what is lost without the rest, and what to change.

use std::process::ExitCode;

use super::report;
use crate::config::Config;

pub fn run(config: Config) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let checks = runtime.block_on(report::examine(&config, report::Look::Full, None));
    print!("{}", report::render(&checks, report::Look::Full));
    runtime.shutdown_background();
    let works = checks.iter().all(|check| !check.essential || check.state == report::State::Good);
    println!(
        "\n{}",
        if works {
            "The main job can run here: memory of containers can be read."
        } else {
            "The main job cannot run here: memory of containers cannot be read."
        }
    );
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
