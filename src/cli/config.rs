//! `memledger config`: checks a settings file, and shows the effective settings and where each comes from.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, ValueHint};

use crate::config::{
    Config, ConfigError, DEFAULT_FILE, EffectiveValue, UnknownVariable, file_argument, unknown_variables,
};

/// The flag of the settings file.
const FILE_FLAG: &str = "config.file";

/// Returns the verb. `flags` adds the settings to a command that takes them as flags.
pub fn command(flags: impl Fn(Command) -> Command) -> Command {
    let file = Arg::new("FILE")
        .value_hint(ValueHint::FilePath)
        .conflicts_with(FILE_FLAG)
        .help("A settings file, the same as --config.file.");
    let check = Command::new("check")
        .about("Check the settings file, or another one, and the web configuration that it names, and print every error.")
        .after_help("Environment variables that are like one of a setting and are none are errors too.")
        .args([file, file_argument()]);
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
            let file = matches.get_one::<String>("FILE").map(PathBuf::from);
            match file.or_else(|| Config::file_to_read(matches)) {
                Some(file) => check(&file),
                None => anyhow::bail!(
                    "--config.file or MEMLEDGER_CONFIG_FILE is empty: no settings file is read; name one to check"
                ),
            }
        }
        Some(("show", matches)) => show(matches),
        _ => Ok(ExitCode::from(super::USAGE)),
    }
}

fn check(path: &Path) -> anyhow::Result<ExitCode> {
    let (mistakes, others): (Vec<_>, Vec<_>) =
        unknown_variables(std::env::vars_os()).into_iter().partition(UnknownVariable::is_mistake);
    for variable in others.iter().chain(&mistakes) {
        eprintln!("{variable}");
    }
    let errors = match Config::check_file(path) {
        Err(mut errors) if matches!(*errors, [ConfigError::Unreadable { .. }]) => {
            let cause = crate::text::error_chain(&errors.remove(0));
            let is_default = path == Path::new(DEFAULT_FILE) && !path.exists();
            let hint = if is_default { "; without it the defaults hold; or name a FILE" } else { "" };
            anyhow::bail!("{cause}{hint}");
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
    let number = errors.len() + mistakes.len();
    if number == 0 {
        super::print(&format!("{}: no errors\n", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{}: {number} error{}", path.display(), if number == 1 { "" } else { "s" });
    Ok(ExitCode::from(super::NO))
}

fn show(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let (all, ignored) = Config::effective_values(matches)?;
    for variable in unknown_variables(std::env::vars_os()) {
        eprintln!("{variable}");
    }
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
