//! `memledger package-files`: writes man pages and shell completions, from the command line itself. Hidden, because packages bring
//! them; `deploy/packages` calls it, and so can whoever has only the program.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgMatches, Command, ValueHint, value_parser};
use clap_complete::Shell;

use crate::config::FlagForm;

pub fn command() -> Command {
    Command::new("package-files")
        .about("Write man pages and completions of bash, zsh and fish into a directory.")
        .hide(true)
        .arg(
            Arg::new("DIRECTORY")
                .required(true)
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::DirPath)
                .help("Is created if it is missing."),
        )
}

/// Writes the files that describe this command line.
pub fn run(described: impl Fn(FlagForm) -> Command, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if let Some(directory) = matches.get_one::<PathBuf>("DIRECTORY") {
        write(described, directory).with_context(|| format!("{}", directory.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write(described: impl Fn(FlagForm) -> Command, directory: &Path) -> std::io::Result<()> {
    let man = directory.join("man");
    let completions = directory.join("completions");
    for folder in [&man, &completions] {
        std::fs::create_dir_all(folder)?;
    }
    clap_mangen::generate_to(described(FlagForm::Help), man)?;
    let mut described = described(FlagForm::Completion);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut described, "memledger", &completions)?;
    }
    Ok(())
}
