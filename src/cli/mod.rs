//! The command line: one file per verb. Here: their list, the log, and the exit status of errors.

mod checks;
mod config;
mod control;
mod doctor;
mod events;
mod healthcheck;
mod nvml_process;
mod release_gpu;
mod serve;
mod why;

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{ArgMatches, Command};
use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::collect::gpu::driver_process;
use crate::config::{Config, ConfigError, arguments};
use crate::ledger::store::{StoreConnection, StoreError};

/// Exit status of an invalid command line or setting, the same as clap's.
const USAGE: u8 = 2;

fn command() -> Command {
    let serve = Command::new("serve").about("Sample this host and serve its metrics over HTTP.");
    let doctor = Command::new("doctor")
        .about("Show what memledger can read here, what is missing without the rest, and how to fix it.")
        .long_about(
            "Show what memledger can read here, what is missing without the rest, and how to fix it.\n\
             Exit status 0 if the memory of containers is readable, else 1.",
        );
    let healthcheck = Command::new("healthcheck").about(
        "Check whether the memledger with these settings responds and has a sample. Exit status 0 if so.",
    );
    Command::new("memledger")
        .about("Shows which container uses the RAM and VRAM of a GPU host, and why one was killed.")
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
        .subcommand(arguments(serve))
        .subcommand(arguments(doctor))
        .subcommand(config::command())
        .subcommand(arguments(events::command()))
        .subcommand(arguments(healthcheck))
        .subcommand(arguments(release_gpu::command()))
        .subcommand(arguments(why::command()))
}

/// Opens the ledger of `memledger serve` and returns it with its directory; `None` if it is in memory or unreadable, and the
/// control socket has to be queried.
fn open_ledger(config: &Config) -> anyhow::Result<Option<(StoreConnection, &Path)>> {
    let Some(directory) = config.state.path.as_deref() else { return Ok(None) };
    match StoreConnection::open(directory) {
        Err(StoreError::NoLedger { .. } | StoreError::NotReadable { .. })
            if control::is_available(config) =>
        {
            Ok(None)
        }
        opened => Ok(Some((opened?, directory))),
    }
}

/// Runs the verb of this process's command line and returns its exit status.
pub fn run() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|verb| verb == driver_process::VERB) {
        return nvml_process::run(); // before the command line is built, which takes memory
    }
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = match matches.subcommand() {
        Some(("serve", matches)) => with_config(matches, serve::run),
        Some(("config", matches)) => config::run(matches),
        Some(("doctor", matches)) => with_config(matches, doctor::run),
        Some(("events", matches)) => with_config(matches, |config| events::run(config, matches)),
        Some(("healthcheck", matches)) => with_config(matches, |config| healthcheck::run(&config)),
        Some(("release-gpu", matches)) => with_config(matches, |config| release_gpu::run(&config)),
        Some(("why", matches)) => with_config(matches, |config| why::run(config, matches)),
        _ => Ok(ExitCode::from(USAGE)),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("memledger: {error:#}");
        if error.is::<ConfigError>() { ExitCode::from(USAGE) } else { ExitCode::FAILURE }
    })
}

fn with_config(
    matches: &ArgMatches,
    verb: impl FnOnce(Config) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    match Config::load(matches) {
        Ok(config) => {
            init_log(&config);
            verb(config)
        }
        Err(error) => Err(error.into()),
    }
}

/// Prints a text. A closed pipe, as in `memledger doctor | head`, is not an error.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Starts the log: memledger's own lines at the configured level, warnings of libraries.
fn init_log(config: &Config) {
    let filter = Targets::new().with_target("memledger", config.log_level).with_default(Level::WARN);
    let registry = tracing_subscriber::registry().with(filter);
    let started = if config.log_json {
        registry.with(tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr)).try_init()
    } else {
        registry.with(tracing_logfmt::builder().layer().with_writer(std::io::stderr)).try_init()
    };
    if let Err(error) = started {
        eprintln!("memledger: the log failed to start: {error}");
    }
}
