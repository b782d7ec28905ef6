//! The command line: one file per verb. Here: their list, the log, and the exit status of errors.

mod checks;
mod cleanup;
mod config;
mod control;
mod coverage;
mod doctor;
mod event_source;
mod events;
mod healthcheck;
mod journal;
mod kernel_log_file;
mod nvml_process;
mod package_files;
mod release_gpu;
mod runs;
mod serve;
mod why;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::{ArgMatches, Command};
use tracing::{Level, Metadata};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterExt, LevelFilter, Targets, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Config, ConfigError, OtlpSettings, arguments};
use crate::gpu::driver_process;
use crate::otlp::traces::{self, SpanQueue};

/// Exit status of an invalid command line or setting, the same as clap's.
const USAGE: u8 = 2;

fn command() -> Command {
    let serve = Command::new("serve").about("Sample this host and serve its metrics over HTTP.");
    let doctor = Command::new("doctor")
        .about("Show what memledger can read here, what is missing without the rest, and how to fix it.")
        .long_about(
            "Show what memledger can read here, what is missing without the rest, and how to fix it.\n\
             Exit status 0 if memledger can run here, else 1.",
        );
    let healthcheck = Command::new("healthcheck").about(
        "Check whether the memledger with these settings responds and has a sample. Exit status 0 if so, also if there is no HTTP \
         listener, or if it requires a client certificate and so does not say whether it has one.",
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
        .subcommand(arguments(cleanup::command()))
        .subcommand(config::command())
        .subcommand(arguments(events::command()))
        .subcommand(arguments(healthcheck))
        .subcommand(package_files::command())
        .subcommand(arguments(release_gpu::command()))
        .subcommand(arguments(runs::advise_command()))
        .subcommand(arguments(runs::list_command()))
        .subcommand(arguments(runs::compare_command()))
        .subcommand(arguments(runs::report_command()))
        .subcommand(arguments(why::command()))
}

/// Runs the verb of this process's command line and returns its exit status.
pub fn run() -> ExitCode {
    crate::host::heap::limit_heaps();
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
        Some(("serve", matches)) => serve(matches),
        Some(("cleanup", matches)) => with_config(matches, |config| cleanup::run(&config, matches)),
        Some(("config", matches)) => config::run(matches),
        Some(("doctor", matches)) => with_config(matches, doctor::run),
        Some(("events", matches)) => with_config(matches, |config| events::run(config, matches)),
        Some(("healthcheck", matches)) => with_config(matches, |config| healthcheck::run(&config)),
        Some(("package-files", matches)) => package_files::run(command(), matches),
        Some(("advise", matches)) => with_config(matches, |config| runs::advise(&config, matches)),
        Some(("runs", matches)) => with_config(matches, |config| runs::list(&config, matches)),
        Some(("compare", matches)) => with_config(matches, |config| runs::compare(&config, matches)),
        Some(("report", matches)) => with_config(matches, |config| runs::report(&config, matches)),
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
            init_log(&config, None);
            verb(config)
        }
        Err(error) => Err(error.into()),
    }
}

fn serve(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let config = Config::load(matches)?;
    let spans = init_log(&config, config.otlp.as_ref().filter(|otlp| otlp.traces.is_some()));
    serve::run(config, spans)
}

/// Prints a text. A closed pipe, as in `memledger doctor | head`, is not an error.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Starts the log: memledger's own lines at the configured level, warnings of libraries. And the recording of spans, if traces are
/// exported.
fn init_log(config: &Config, traced: Option<&OtlpSettings>) -> Option<SpanQueue> {
    let lines = Targets::new().with_target("memledger", config.log_level).with_default(Level::WARN);
    // spans are not for the log
    let is_line = |metadata: &Metadata<'_>| metadata.is_event();
    let lines = lines.and(filter_fn(is_line).with_max_level_hint(LevelFilter::TRACE));
    let (layer, spans) = traced.map(|settings| traces::layer(settings.traces_ratio)).unzip();
    let registry = tracing_subscriber::registry().with(layer);
    let started = if config.log_json {
        let json = tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr);
        registry.with(json.with_filter(lines)).try_init()
    } else {
        let logfmt = tracing_logfmt::builder().layer().with_writer(std::io::stderr);
        registry.with(logfmt.with_filter(lines)).try_init()
    };
    if let Err(error) = started {
        eprintln!("memledger: the log failed to start: {error}");
    }
    spans
}
