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
mod overview_source;
mod package_files;
mod ps;
mod release_gpu;
mod run;
mod runs;
mod serve;
mod top;
mod usage;
mod why;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};
use tracing::{Level, Metadata};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterExt, LevelFilter, Targets, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{
    CommandSettings, Config, ConfigError, FlagForm, OtlpSettings, arguments_of, unknown_variables,
};
use crate::gpu::driver_process;
use crate::otlp::traces::{self, SpanQueue};

/// Exit statuses of commands that answer a question; 0 is yes. docs/commands.md has the table. `serve` and `healthcheck` have those of
/// any program and of probes: 1 for each failure.
const NO: u8 = 1;
/// An invalid command line or setting, the same as clap's.
const USAGE: u8 = 2;
const UNANSWERED: u8 = 3;

/// What was asked for does not exist.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NotFound(String);

/// Adds the exit statuses to the help of a command that answers a question.
fn answers(command: Command, yes: &str, no: &str) -> Command {
    let statuses = format!("Exit status: 0 {yes}, 1 {no}, 2 wrong use, 3 could not be answered.");
    let before = command.get_after_help().map(|before| format!("{before}\n")).unwrap_or_default();
    command.after_help(before + &statuses)
}

fn json_flag(help: &'static str) -> Arg {
    Arg::new("json").long("json").action(ArgAction::SetTrue).help(help)
}

/// The verbs by what they are for, in the order of the help.
const GROUPS: [(&str, &[&str]); 3] = [
    ("What is, and what was", &["ps", "top", "why", "events"]),
    ("Runs", &["run", "runs", "report", "compare", "advise"]),
    ("The service", &["serve", "doctor", "config", "cleanup", "release-gpu", "healthcheck"]),
];

/// An example of each verb.
const EXAMPLES: [(&str, &str); 15] = [
    ("ps", "memledger ps --processes"),
    ("top", "sudo memledger top"),
    ("why", "sudo memledger why my-train --logs"),
    ("events", "memledger events --since 24h"),
    ("run", "memledger run --memory 32G --name my-train -- python train.py"),
    ("runs", "memledger runs my-train"),
    ("report", "memledger report my-train --format json"),
    ("compare", "memledger compare my-train"),
    ("advise", "memledger advise my-train"),
    ("serve", "sudo memledger serve --web.listen-address=127.0.0.1:10853"),
    ("doctor", "sudo memledger doctor"),
    ("config", "memledger config show"),
    ("cleanup", "sudo memledger cleanup my-train"),
    ("release-gpu", "sudo memledger release-gpu"),
    ("healthcheck", "memledger healthcheck"),
];

/// Adds examples to the verbs, and lists them in groups.
fn with_groups(mut command: Command) -> Command {
    for (verb, example) in EXAMPLES {
        command = command.mut_subcommand(verb, |command| {
            let after = command.get_after_help().map(|after| format!("\n{after}")).unwrap_or_default();
            command.after_help(format!("Example: {example}{after}"))
        });
    }
    let mut list = String::new();
    for (title, verbs) in GROUPS {
        list += &format!("{title}:\n");
        for verb in verbs {
            let about = command.find_subcommand(verb).and_then(Command::get_about);
            list += &format!("  {verb:<12} {}\n", about.map(ToString::to_string).unwrap_or_default());
        }
        list.push('\n');
    }
    let text =
        format!("{{about}}\n\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}");
    let example =
        "Begin with: sudo memledger why (the newest kill), memledger ps. Documentation: docs/README.md";
    command.help_template(text).after_help(example)
}

fn command(form: FlagForm) -> Command {
    with_groups(plain_command(form))
}

fn plain_command(form: FlagForm) -> Command {
    let flags = |command, taken| arguments_of(command, taken, form);
    // completions of all settings once are enough
    let all = if form == FlagForm::Help { CommandSettings::SERVE } else { CommandSettings::LEDGER };
    let serve = Command::new("serve").about("Sample this host and serve its metrics over HTTP.");
    Command::new("memledger")
        .about("Shows which container uses the RAM and VRAM of a GPU host, and why one was killed.")
        .version(concat!(
            env!("CARGO_PKG_VERSION"),
            " (memledger-exporter, ", // the name on PyPI, where `memledger` is another project with a program of that name
            env!("MEMLEDGER_REVISION"),
            ", rustc ",
            env!("MEMLEDGER_RUSTC"),
            ")"
        ))
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(form == FlagForm::Completion)
        .subcommand(flags(ps::command(), CommandSettings::SAMPLER))
        .subcommand(flags(top::command(), CommandSettings::SAMPLER))
        .subcommand(flags(why::command(), CommandSettings::HOST))
        .subcommand(flags(run::command(), CommandSettings::RUN))
        .subcommand(flags(events::command(), CommandSettings::HOST))
        .subcommand(flags(runs::list_command(), CommandSettings::LEDGER))
        .subcommand(flags(runs::report_command(), CommandSettings::REPORT))
        .subcommand(flags(runs::compare_command(), CommandSettings::LEDGER))
        .subcommand(flags(runs::advise_command(), CommandSettings::LEDGER))
        .subcommand(flags(serve, CommandSettings::SERVE))
        .subcommand(flags(doctor::command(), all))
        .subcommand(config::command(|show| flags(show, all)))
        .subcommand(flags(cleanup::command(), CommandSettings::CONTROL))
        .subcommand(flags(release_gpu::command(), CommandSettings::CONTROL))
        .subcommand(flags(healthcheck::command(), CommandSettings::HEALTH))
        .subcommand(package_files::command())
}

/// Runs the verb of this process's command line and returns its exit status.
pub fn run() -> ExitCode {
    crate::host::heap::limit_heaps();
    if std::env::args_os().nth(1).is_some_and(|verb| verb == driver_process::VERB) {
        return nvml_process::run(); // before the command line is built, which takes memory
    }
    let mut arguments = std::env::args_os().skip(1);
    let verb = arguments.next().unwrap_or_default();
    if verb == run::START_VERB {
        return run::start(arguments);
    }
    if verb == run::HOLD_VERB {
        return run::hold();
    }
    let usage = if verb == "run" { run::LAUNCH_ERROR } else { USAGE };
    let matches = match command(FlagForm::Help).try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            let arguments: Vec<_> =
                std::env::args_os().skip(1).map(|it| it.to_string_lossy().into_owned()).collect();
            let error = usage::with_suggestions(error, command(FlagForm::Help), &arguments);
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(usage) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = match matches.subcommand() {
        Some(("serve", matches)) => serve(matches),
        Some(("cleanup", matches)) => with_config(matches, |config| cleanup::run(&config, matches)),
        Some(("config", matches)) => config::run(matches),
        Some(("doctor", matches)) => with_config(matches, |config| doctor::run(config, matches)),
        Some(("events", matches)) => with_config(matches, |config| events::run(config, matches)),
        Some(("healthcheck", matches)) => with_config(matches, |config| healthcheck::run(&config)),
        Some(("ps", matches)) => with_quiet_config(matches, Level::ERROR, |config| ps::run(&config, matches)),
        Some(("package-files", matches)) => package_files::run(command, matches),
        Some(("advise", matches)) => with_config(matches, |config| runs::advise(&config, matches)),
        Some(("runs", matches)) => with_config(matches, |config| runs::list(&config, matches)),
        Some(("compare", matches)) => with_config(matches, |config| runs::compare(&config, matches)),
        Some(("report", matches)) => with_config(matches, |config| runs::report(&config, matches)),
        Some(("run", matches)) => with_config(matches, |config| run::run(&config, matches)),
        Some(("release-gpu", matches)) => with_config(matches, |config| release_gpu::run(&config)),
        Some(("top", matches)) => {
            with_quiet_config(matches, Level::ERROR, |config| top::run(&config, matches))
        }
        Some(("why", matches)) => with_config(matches, |config| why::run(config, matches)),
        _ => Ok(ExitCode::from(USAGE)),
    };
    let answers_nothing = matches!(matches.subcommand_name(), Some("serve" | "healthcheck"));
    outcome.unwrap_or_else(|error| {
        eprintln!("memledger: {error:#}");
        ExitCode::from(match () {
            () if verb == "run" => run::LAUNCH_ERROR,
            () if error.is::<ConfigError>() => USAGE,
            () if error.is::<NotFound>() => NO,
            () if answers_nothing => 1,
            () => UNANSWERED,
        })
    })
}

fn with_config(
    matches: &ArgMatches,
    verb: impl FnOnce(Config) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    let config = load_for_query(matches)?;
    init_log(&config, config.log_level, None);
    verb(config)
}

/// Reads the settings of a command that serves nothing, and names variables that were meant to set one.
fn load_for_query(matches: &ArgMatches) -> anyhow::Result<Config> {
    for variable in unknown_variables(std::env::vars_os()) {
        if variable.is_mistake() {
            eprintln!("memledger: {variable}");
        }
    }
    Ok(Config::load_for_query(matches)?)
}

/// Like [`with_config`], for a command that shows a screen: at most lines of this level, of what only a service tells.
fn with_quiet_config(
    matches: &ArgMatches,
    max: Level,
    verb: impl FnOnce(Config) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    let config = load_for_query(matches)?;
    init_log(&config, config.log_level.min(max), None);
    verb(config)
}

fn serve(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let config = Config::load(matches)?;
    let spans =
        init_log(&config, config.log_level, config.otlp.as_ref().filter(|otlp| otlp.traces.is_some()));
    for variable in unknown_variables(std::env::vars_os()) {
        tracing::warn!("{variable}");
    }
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

/// Starts the log: memledger's own lines at this level, warnings of libraries. And the recording of spans, if traces are
/// exported.
fn init_log(config: &Config, level: Level, traced: Option<&OtlpSettings>) -> Option<SpanQueue> {
    let lines = Targets::new().with_target("memledger", level).with_default(level.min(Level::WARN));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_verb_is_in_one_group_and_has_an_example_that_works() {
        let command = command(FlagForm::Help);
        let visible = command.get_subcommands().filter(|verb| !verb.is_hide_set()).map(Command::get_name);
        let mut visible: Vec<_> = visible.filter(|verb| *verb != "help").collect();
        let mut grouped: Vec<_> = GROUPS.iter().flat_map(|(_, verbs)| verbs.iter().copied()).collect();
        let mut shown: Vec<_> = EXAMPLES.iter().map(|(verb, _)| *verb).collect();
        for list in [&mut visible, &mut grouped, &mut shown] {
            list.sort_unstable();
        }
        assert_eq!((&visible, &visible), (&grouped, &shown));
        for (verb, example) in EXAMPLES {
            let words = example.split(' ').skip_while(|word| *word == "sudo");
            let matches =
                command.clone().try_get_matches_from(words).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(matches.subcommand_name(), Some(verb));
        }
    }
}
