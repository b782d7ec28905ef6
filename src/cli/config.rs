//! `memledger config`: checks a settings file, and shows the effective settings and where each comes from.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, ValueHint};

use crate::config::{Config, ConfigError, EffectiveValue};

/// Returns the verb. `flags` adds the settings to a command that takes them as flags.
pub fn command(flags: impl Fn(Command) -> Command) -> Command {
    let file = Arg::new("FILE")
        .required(true)
        .value_hint(ValueHint::FilePath)
        .help("A settings file, as for --config.file.");
    let check = Command::new("check")
        .about("Check a settings file and the web configuration that it names, and print every error.")
        .arg(file);
    let check = super::answers(check, "there is no error", "there is one");
    let show = Command::new("show")
        .about("Show the effective settings and where each comes from. Values that may contain a secret are hidden.")
        .arg(super::json_flag("Print JSON."));
    Command::new("config")
        .about("Check a settings file, or show the settings in force and where each comes from.")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(check)
        .subcommand(flags(show))
}

pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    match matches.subcommand() {
        Some(("check", matches)) => {
            check(Path::new(matches.get_one::<String>("FILE").map_or("", String::as_str)))
        }
        Some(("show", matches)) => show(matches),
        _ => Ok(ExitCode::from(super::USAGE)),
    }
}

fn check(path: &Path) -> anyhow::Result<ExitCode> {
    let errors = match Config::check_file(path) {
        Err(mut errors) if matches!(*errors, [ConfigError::Unreadable { .. }]) => {
            return Err(anyhow::Error::msg(crate::text::error_chain(&errors.remove(0))));
        }
        Ok(config) => match config.web_config.as_deref().map(crate::http::describe) {
            Some(Err(error)) => vec![error.into()],
            _ => vec![],
        },
        Err(errors) => errors.into_iter().map(anyhow::Error::from).collect(),
    };
    for error in &errors {
        eprintln!("{error:#}");
    }
    if errors.is_empty() {
        super::print(&format!("{}: no errors\n", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{}: {} error{}", path.display(), errors.len(), if errors.len() == 1 { "" } else { "s" });
    Ok(ExitCode::from(super::NO))
}

fn show(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let (all, ignored) = Config::effective_values(matches)?;
    for ignored in &ignored {
        eprintln!("{ignored}");
    }
    if matches.get_flag("json") {
        super::print(&format!("{}\n", serde_json::to_string_pretty(&all)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = Vec::new();
    for value in &all {
        let EffectiveValue { key, values, origin, signal } = value;
        let values = values.as_ref().map_or_else(|| "(hidden)".to_owned(), |values| values.join(","));
        let signal = signal.map_or_else(String::new, |signal| format!(" ({signal} only)"));
        writeln!(text, "{key:<24} {values:<32} {origin}{signal}")?;
    }
    super::print(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}
