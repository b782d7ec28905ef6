//! The verbs. Here: their list, the log, and how an error ends the process.

mod doctor;
mod events;
mod healthcheck;
mod report;
mod serve;
mod why;

use std::process::ExitCode;

use clap::{ArgMatches, Command};
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{self, Config, ConfigError};

/// Exit status of a command line or setting that cannot be used, as clap has it.
const USAGE: u8 = 2;

fn command() -> Command {
    let serve = Command::new("serve").about("Sample this host and serve its metrics over HTTP.");
    let doctor = Command::new("doctor")
        .about("Show what memledger can read here, what is lost without the rest, and what to change.")
        .long_about(
            "Show what memledger can read here, what is lost without the rest, and what to change.\n\
             Exit status 0 if memory of containers can be read, else 1.",
        );
    let healthcheck = Command::new("healthcheck").about(
        "Ask the memledger that runs with these settings whether it answers and has a sample. Exit status 0 if so.",
    );
    Command::new("memledger")
        .about("Who holds the memory of this GPU host: host memory and VRAM per container, as metrics.")
        .version(concat!(
            env!("CARGO_PKG_VERSION"),
            " (",
            env!("MEMLEDGER_REVISION"),
            ", rustc ",
            env!("MEMLEDGER_RUSTC"),
            ")"
        ))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(config::arguments(serve))
        .subcommand(config::arguments(doctor))
        .subcommand(config::arguments(events::command()))
        .subcommand(config::arguments(healthcheck))
        .subcommand(config::arguments(why::command()))
}

/// Runs the verb of this process's command line.
pub fn run() -> ExitCode {
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = match matches.subcommand() {
        Some(("serve", matches)) => with_config(matches, serve::run),
        Some(("doctor", matches)) => with_config(matches, doctor::run),
        Some(("events", matches)) => with_config(matches, |config| events::run(config, matches)),
        Some(("healthcheck", matches)) => with_config(matches, |config| healthcheck::run(&config)),
        Some(("why", matches)) => with_config(matches, |config| why::run(config, matches)),
        _ => Ok(ExitCode::from(USAGE)),
    };
    let code = outcome.unwrap_or_else(|error| {
        eprintln!("memledger: {error:#}");
        if error.is::<ConfigError>() { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
    });
    if crate::collect::gpu::was_opened() {
        let codes = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
        crate::host::exit::at_once(codes.unwrap_or(1));
    }
    code
}

fn with_config(
    matches: &ArgMatches,
    verb: impl FnOnce(Config) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    match Config::load(matches) {
        Ok(config) => {
            start_log(&config);
            verb(config)
        }
        Err(error) => Err(error.into()),
    }
}

/// Our own lines at the chosen level; of the libraries only warnings.
fn start_log(config: &Config) {
    let filter = Targets::new().with_target("memledger", config.log_level).with_default(Level::WARN);
    let registry = tracing_subscriber::registry().with(filter);
    let started = if config.log_json {
        registry.with(tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr)).try_init()
    } else {
        registry.with(tracing_logfmt::builder().layer().with_writer(std::io::stderr)).try_init()
    };
    if let Err(error) = started {
        eprintln!("memledger: no log: {error}");
    }
}
