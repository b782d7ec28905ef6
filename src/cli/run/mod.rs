//! `memledger run`: starts a command in a cgroup of its own and records how it ends, so that a plain process has all that containers
//! have. To the shell it is the command: terminal, standard input, process group and exit status are the command's.

mod cgroup;
mod command_name;
mod start;
mod supervisor;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};
use rustix::process::geteuid;

use crate::clock::Timestamp;
use crate::config::{Config, label, size};
use crate::discover::run::record::{SpooledRun, new_id};
use crate::discover::run::spool::{self, UserSpool};
use crate::host::process::ProcessId;
use cgroup::{NoCgroup, RunCgroup};
use supervisor::Supervisor;

pub use start::{HOLD_VERB, START_VERB, hold, start};

/// Exit status of errors of memledger's own, as those of `env`, `timeout` and `docker run`.
pub const LAUNCH_ERROR: u8 = 125;
/// The smallest limit: a Python program does not start with less.
const MIN_LIMIT: u64 = 4 << 20;
/// Maximum number of labels.
const MAX_LABELS: usize = 32;

/// Returns the verb with its own flags.
pub fn command() -> Command {
    Command::new("run")
        .about("Run a command in a cgroup of its own, which has what containers have: memory, limit, kills, end.")
        .after_help(
            "The command gets a cgroup of its own: from systemd where that runs (users without root: on cgroup v2), else as root. \
             memledger serve shows it as a container of the runtime `run`; `memledger why NAME` explains its end, also without serve.\n\
             Exit status: that of the command, 128 + n after signal n; 125 for an error of memledger run, 126 if the command cannot be \
             executed, 127 if it is not found.",
        )
        .arg(
            Arg::new("name")
                .long("name")
                .value_name("NAME")
                .value_parser(command_name::checked)
                .help("Its name. Default: that of the script or program."),
        )
        .arg(
            Arg::new("memory")
                .long("memory")
                .value_name("SIZE")
                .value_parser(|text: &str| size(text, MIN_LIMIT))
                .help("Memory limit, such as 32G or 512M, in powers of 1024; without swap. Default: none."),
        )
        .arg(
            Arg::new("label")
                .long("label")
                .value_name("KEY=VALUE")
                .action(ArgAction::Append)
                .value_parser(ValueParser::new(|text: &str| label(text)))
                .help("A label, as of a container: memledger.run.KEY=VALUE is a setting of the run, memledger.run.group its group."),
        )
        .arg(
            Arg::new("no-cgroup")
                .long("no-cgroup")
                .action(ArgAction::SetTrue)
                .conflicts_with("memory")
                .help("Record exit and wall time alone, where the command cannot have a cgroup."),
        )
        .arg(
            Arg::new("no-client")
                .long("no-client")
                .action(ArgAction::SetTrue)
                .help("Leave PYTHONPATH as it is: without the view from inside."),
        )
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .value_parser(ValueParser::os_string())
                .value_hint(ValueHint::CommandWithArguments)
                .trailing_var_arg(true)
                .num_args(1..)
                .required(true)
                .help("The command and its arguments, best after --."),
        )
}

/// Runs the command, and returns its exit status.
pub fn run(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let arguments: Vec<OsString> = matches.get_many("command").expect("required").cloned().collect();
    let limit_bytes: Option<u64> = matches.get_one("memory").copied();
    let boot_id = config.host_paths.boot_id()?;
    let cgroup = match matches.get_flag("no-cgroup") {
        true => None,
        false => cgroup_for(config, limit_bytes)?,
    };
    let spool = UserSpool::open(config.run.spool.as_deref()).context("cannot record the run")?;
    if spool.is_private {
        note(
            "the record is in your home directory, where memledger serve does not see it: `memledger doctor` says why",
        );
    }
    spool.prune(&config.host_paths, &boot_id);
    // until the run is recorded
    let lock = spool.lock().context("cannot record the run")?;
    let spools = spool::all(config.run.spool.as_deref());
    let known: Vec<SpooledRun> =
        spools.iter().flat_map(|spool| spool::read(spool, &config.host_paths)).collect();
    let is_taken = |name: &str| known.iter().any(|run| run.name == name && run.is_running(&boot_id));
    let wanted = matches.get_one::<String>("name");
    let name =
        command_name::unused(&wanted.cloned().unwrap_or_else(|| command_name::of(&arguments)), is_taken);
    if wanted.is_some_and(|wanted| *wanted != name) {
        note(&format!("another run has this name: this one is {name}"));
    }
    let environment: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| Some(format!("{}={}", name.to_str()?, value.to_str()?)))
        .collect();
    let own = ProcessId::read(&config.host_paths.proc, std::process::id());
    let run = SpooledRun {
        id: new_id(geteuid().as_raw())?,
        name,
        started: Timestamp::now().unix_seconds(),
        boot_id,
        labels: labels(matches)?,
        settings: config.filter.settings_of(environment.iter().map(String::as_str)),
        limit_bytes,
        supervisor: own.context("this process is not in the procfs of --path.procfs")?,
        command: None,
        signals: vec![],
        end: None,
        is_alive: true,
        uid: 0,
    };
    if limit_bytes.is_some() && is_unkillable() {
        note(
            "oom_score_adj is -1000 here, so the command would hang at its limit instead of being killed: echo 0 > /proc/self/oom_score_adj",
        );
    }
    let variables = if matches.get_flag("no-client") { vec![] } else { client_variables(config) };
    Supervisor { config, spool, run, cgroup, lock: Some(lock) }.supervise(&arguments, &variables)
}

/// Returns whether the kernel may kill neither this process nor what it starts.
fn is_unkillable() -> bool {
    std::fs::read_to_string("/proc/self/oom_score_adj").is_ok_and(|text| text.trim() == "-1000")
}

/// Writes a line to standard error. Where that is closed or full, the command goes on.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "memledger: {text}");
}

/// Returns the cgroup that the command can have; `None` in a job of Slurm or in a run, which limits and accounts it.
fn cgroup_for(config: &Config, limit_bytes: Option<u64>) -> anyhow::Result<Option<RunCgroup>> {
    match RunCgroup::choose(&config.host_paths, geteuid().is_root()) {
        Ok(cgroup) => Ok(Some(cgroup)),
        Err(reason @ (NoCgroup::InJob | NoCgroup::InRun)) if limit_bytes.is_none() => {
            note(&format!("{reason}: no cgroup of its own for the command"));
            Ok(None)
        }
        Err(reason) => bail!("{reason}"),
    }
}

fn labels(matches: &ArgMatches) -> anyhow::Result<BTreeMap<String, String>> {
    let given = matches.get_many::<(String, Option<String>)>("label").unwrap_or_default();
    let labels: BTreeMap<_, _> =
        given.map(|(key, value)| (key.clone(), value.clone().unwrap_or_default())).collect();
    if labels.len() > MAX_LABELS {
        bail!("--label: at most {MAX_LABELS} labels");
    }
    Ok(labels)
}

/// Returns the variables with which Python programs report from inside, if a memledger has put the client there.
fn client_variables(config: &Config) -> Vec<(&'static str, OsString)> {
    let Some(directory) = config.reporter.directory.as_deref() else { return vec![] };
    let client = directory.join("python");
    if !client.is_dir() {
        return vec![];
    }
    let present = std::env::var_os("PYTHONPATH").filter(|present| !present.is_empty());
    let paths = std::iter::once(client).chain(present.iter().flat_map(std::env::split_paths));
    let mut paths: Vec<PathBuf> = paths.collect();
    paths.dedup();
    let Ok(joined) = std::env::join_paths(paths) else { return vec![] };
    vec![("PYTHONPATH", joined), ("MEMLEDGER_REPORTER_DIRECTORY", directory.into())]
}
