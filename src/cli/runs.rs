//! `memledger runs`, `compare`, `report` and `advise`: the records of runs, from the ledger.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use jiff::tz::TimeZone;

use super::event_source::LedgerSource;
use super::overview_source::OverviewSource;
use super::{NO, NotFound, USAGE, answers, json_flag, print};
use crate::clock::Timestamp;
use crate::config::{Config, since};
use crate::export::runs::{self, MAX_COMPARED};
use crate::export::words::missing_ledger;
use crate::http::MAX_RUNS;
use crate::ledger::store::{RunQuery, files_moved_aside};
use crate::overview::{Details, GpuOverview};
use crate::run_reports;
use crate::runs::RunRecord;
use crate::runs::advice::before_run::{GpuNow, HostNow, add_host_processes, before_first_run};
use crate::runs::advice::lines::{self as advice, Advice};
use crate::runs::names::{RECORDED_BY, check_unambiguous, nearest_names};

/// Timeout of the check of a target.
const CHECK_TIMEOUT: Duration = Duration::from_secs(15);
/// How a run is named on the command line.
const RUN_HELP: &str =
    "A run, by its id from `memledger runs`; or a container or a group, whose newest run is meant.";

/// Returns `runs` with its own flags; the flags of the settings are added elsewhere.
pub fn list_command() -> Command {
    let command = Command::new("runs")
        .about("List runs: how long they lasted, how they ended, and the most memory they held.")
        .arg(Arg::new("run").value_name("RUN").help("Only runs of this container or group, or this run."))
        .arg(
            Arg::new("since")
                .long("since")
                .value_name("TIME")
                .value_parser(since::flag)
                .help(format!(
                    "Only runs that ended since this time, or that still run: {}.",
                    since::EXPECTED_LOCAL
                )),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N")
                .value_parser(value_parser!(usize))
                .default_value("30")
                .help("Maximum number of runs, the newest ones. 0: all."),
        )
        .arg(json_flag(
            "Print one JSON object per line, with all fields but the timeline and the operations, which `memledger report` has.",
        ));
    answers(command, "also if none is recorded", "no run, container or group has this name")
}

/// Returns `compare` with its own flags.
pub fn compare_command() -> Command {
    let command = Command::new("compare")
        .about("Compare runs: settings, duration, exit, memory and speed beside one another.")
        .arg(Arg::new("run").value_name("RUN").required(true).num_args(1..).help(format!(
            "{RUN_HELP} One alone means the newest runs of that container or group, at most {MAX_COMPARED}."
        )))
        .arg(json_flag("Print one JSON document, with all fields."));
    answers(command, "they are compared", "there are no two such runs")
}

/// Returns `report` with its own flags.
pub fn report_command() -> Command {
    let formats = ["text", "json", "csv", "memory_usage"];
    let command = Command::new("report")
        .about("Show all that is known about a run.")
        .arg(Arg::new("run").value_name("RUN").required_unless_present("check").help(RUN_HELP))
        .arg(Arg::new("check").long("check").action(ArgAction::SetTrue).conflicts_with_all(["run", "format", "json"]).help(
            "Write a small file to --report.dir and --report.s3-url, and remove it.",
        ))
        .arg(
            Arg::new("format")
                .long("format")
                .value_name("FORMAT")
                .value_parser(PossibleValuesParser::new(formats))
                .default_value("text")
                .help("text; json: all fields; csv: memory over time; memory_usage: the memory_usage.json of the Python client."),
        )
        .arg(json_flag("The same as --format=json.").conflicts_with("format"));
    answers(
        command,
        "there is one; with --check, all of them were written",
        "there is none; with --check, one failed",
    )
}

/// Returns `advise` with its own flags.
pub fn advise_command() -> Command {
    let command = Command::new("advise")
        .about("Advise settings for the next run, from what runs of that container or group needed.")
        .arg(Arg::new("run").value_name("RUN").required(true).help("A container, a group, or a run of it."))
        .arg(Arg::new("check").long("check").action(ArgAction::SetTrue).help(
            "Also check who else holds the GPUs, and answer by the exit status whether something is to be changed before the next run.",
        ))
        .arg(json_flag("Print one JSON document, with all fields."));
    answers(
        command,
        "there is advice, and with --check nothing is to be changed",
        "with --check: something is to be changed",
    )
}

/// Prints the list.
pub fn list(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let query = RunQuery {
        since: matches.get_one::<f64>("since").copied(),
        name: matches.get_one::<String>("run").cloned(),
        limit: matches.get_one::<usize>("limit").copied().unwrap_or(0),
        timelines: false,
    };
    let source = Runs::open(config)?;
    // one more than wanted shows whether there are more
    let one_more = if query.limit == 0 { 0 } else { query.limit.saturating_add(1) };
    let mut listed = source.0.runs(&RunQuery { limit: one_more, ..query.clone() })?;
    if query.limit > 0 && listed.len() > query.limit {
        listed.drain(..listed.len() - query.limit);
        eprintln!("only the newest {} runs are shown; --limit=0 shows all", query.limit);
    } else if listed.len() >= MAX_RUNS && matches!(source.0, LedgerSource::ControlSocket { .. }) {
        eprintln!("only the newest {MAX_RUNS} runs are shown, the most that the control socket returns");
    }
    if let (true, Some(wanted)) = (listed.is_empty(), &query.name) {
        source.report_unknown(wanted)?;
        if query.since.is_none() {
            listed = source.0.runs(&query)?; // recorded in this moment; otherwise a known one has no run in this time
        }
    }
    if matches.get_flag("json") {
        let lines = listed.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        print(&lines.iter().map(|line| format!("{line}\n")).collect::<String>())?;
    } else if listed.is_empty() {
        match query.since {
            Some(_) => eprintln!("No run is recorded in this time."),
            None => eprintln!("No run is recorded yet. {RECORDED_BY}."),
        }
    } else {
        print(&runs::table(&listed, Timestamp::now().unix_seconds()))?;
    }
    let is_whole = query.limit == 0 || listed.len() < query.limit;
    for aside in
        config.state.path.iter().flat_map(|directory| files_moved_aside(directory)).filter(|_| is_whole)
    {
        eprintln!(
            "Earlier runs are in {}, which this memledger does not read; remove that file if they are not needed.",
            aside.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a comparison.
pub fn compare(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let wanted: Vec<&String> = matches.get_many("run").into_iter().flatten().collect();
    if wanted.len() > MAX_COMPARED && !matches.get_flag("json") {
        eprintln!("memledger: at most {MAX_COMPARED} runs fit on a screen; --json has any number");
        return Ok(ExitCode::from(USAGE));
    }
    let source = Runs::open(config)?;
    let mut selected = Vec::new();
    for name in &wanted {
        selected.extend(source.select(name, if wanted.len() == 1 { MAX_COMPARED } else { 1 })?);
    }
    let mut seen = BTreeSet::new();
    selected.retain(|run| run.subject.run_id().is_none_or(|id| seen.insert(id)));
    if selected.len() < 2 {
        let why = match wanted.len() {
            1 => format!(
                "{} has only one run; name another run, container or group to compare it with",
                wanted[0]
            ),
            _ => "these names are of one run; `memledger runs` lists the others".to_owned(),
        };
        return Err(NotFound(why).into());
    }
    if matches.get_flag("json") {
        print(&(serde_json::to_string_pretty(&serde_json::json!({ "runs": selected }))? + "\n"))?;
    } else {
        print(&runs::comparison(&selected, Timestamp::now().unix_seconds()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a report.
pub fn report(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if matches.get_flag("check") {
        return check_targets(config);
    }
    let wanted = matches.get_one::<String>("run").map_or("", String::as_str);
    let run = Runs::open(config)?.select(wanted, 1)?.remove(0);
    let format = matches.get_one::<String>("format").map_or("text", String::as_str);
    let text = match format {
        _ if matches.get_flag("json") => serde_json::to_string_pretty(&run)? + "\n",
        "json" => serde_json::to_string_pretty(&run)? + "\n",
        "csv" => runs::csv(&run),
        "memory_usage" => serde_json::to_string_pretty(&runs::memory_usage(&run))? + "\n",
        _ => runs::report(&run, Timestamp::now().unix_seconds(), &TimeZone::system()),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a small file to each target of reports, and prints the results.
fn check_targets(config: &Config) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let checks = runtime.block_on(run_reports::check(&config.report, CHECK_TIMEOUT));
    runtime.shutdown_background(); // a DNS lookup may hang
    if checks.is_empty() {
        bail!("reports are not written anywhere; set --report.dir or --report.s3-url");
    }
    let line = |check: &run_reports::TargetCheck| match &check.result {
        Ok(written) => format!("{}: {written}\n", check.place),
        Err(reason) => format!("{}: failed: {reason}\n", check.place),
    };
    print(&checks.iter().map(line).collect::<String>())?;
    Ok(if checks.iter().all(|check| check.result.is_ok()) { ExitCode::SUCCESS } else { ExitCode::from(NO) })
}

/// Prints advice.
pub fn advise(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let wanted = matches.get_one::<String>("run").map_or("", String::as_str);
    let is_check = matches.get_flag("check");
    let source = match (LedgerSource::open(config, super::control::TIMEOUT), is_check) {
        ((LedgerSource::Missing, _), true) => {
            let why = "no run is recorded on this host yet: `memledger serve` records them".to_owned();
            return print_advice(&before_first_run(wanted, why, &host_now(config)), matches);
        }
        _ => Runs::open(config)?,
    };
    let newest = match source.select(wanted, 1) {
        Ok(mut runs) => runs.remove(0),
        Err(error) if is_check && error.is::<NotFound>() => {
            return print_advice(&before_first_run(wanted, format!("{error:#}"), &host_now(config)), matches);
        }
        // without a run nothing says whether the next one fits
        Err(error) => bail!("{error:#}"),
    };
    let mut runs =
        source.0.runs(&RunQuery { name: Some(newest.group.to_string()), ..RunQuery::default() })?;
    runs.retain(|run| run.group == newest.group);
    let advice = if is_check {
        let mut running = source.0.runs(&RunQuery { since: Some(f64::MAX), ..RunQuery::default() })?;
        running.retain(|run| run.ended.is_none());
        advice::check(&runs, &running, Timestamp::now().unix_seconds()).map(|mut advice| {
            add_host_processes(&mut advice, &runs, &host_now(config));
            advice
        })
    } else {
        advice::advise(&runs)
    };
    let Some(advice) = advice else {
        if is_check {
            let why = format!("no run of {wanted:?} has ended yet");
            return print_advice(&before_first_run(wanted, why, &host_now(config)), matches);
        }
        bail!("no run of {wanted:?} has ended yet; advice comes from runs that did")
    };
    print_advice(&advice, matches)
}

/// Prints advice, and answers by the exit status of a checklist.
fn print_advice(advice: &Advice, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if matches.get_flag("json") {
        print(&(serde_json::to_string_pretty(advice)? + "\n"))?;
    } else {
        print(&runs::advice(advice))?;
    }
    let is_ok = advice.lines.iter().all(|line| line.is_ok);
    Ok(if matches.get_flag("check") && !is_ok { ExitCode::from(NO) } else { ExitCode::SUCCESS })
}

/// Returns the host as it is now: what `ps` shows of it; nothing where that is not known.
fn host_now(config: &Config) -> HostNow {
    let overview = OverviewSource::open(config).and_then(|source| source.overview(Details::None));
    let Ok(overview) = overview else { return HostNow::default() };
    let gpu = |gpu: &GpuOverview| GpuNow {
        name: gpu.gpu.clone(),
        uuid: gpu.uuid.clone(),
        total_bytes: gpu.memory_total_bytes,
        used_bytes: gpu.memory_used_bytes,
        host_processes_bytes: gpu.host_processes_bytes,
        holders: gpu.holders.clone(),
    };
    HostNow {
        memory_bytes: overview.host.memory_available_bytes.zip(overview.host.memory_total_bytes),
        gpus: overview.gpus.iter().map(gpu).collect(),
    }
}

/// The ledger, which exists.
struct Runs<'a>(LedgerSource<'a>);

impl<'a> Runs<'a> {
    fn open(config: &'a Config) -> anyhow::Result<Self> {
        match LedgerSource::open(config, super::control::TIMEOUT) {
            (LedgerSource::Missing | LedgerSource::Unreadable, why) => {
                bail!("{}", why.as_ref().map_or_else(String::new, missing_ledger))
            }
            (source, _) => Ok(Self(source)),
        }
    }

    /// Returns the newest runs that are meant by a name, at least one, oldest first; an error if it is the name of containers of several
    /// groups.
    fn select(&self, wanted: &str, limit: usize) -> anyhow::Result<Vec<RunRecord>> {
        let query = RunQuery { name: Some(wanted.to_owned()), timelines: true, ..RunQuery::default() };
        let mut found = self.0.runs(&query)?;
        check_unambiguous(&found, wanted).map_err(anyhow::Error::msg)?;
        if limit > 0 {
            found.drain(..found.len().saturating_sub(limit));
        }
        if found.is_empty() {
            self.report_unknown(wanted)?;
            // it was recorded in this moment, and removed
            return Err(NotFound(format!("no run of {wanted:?} is recorded any more")).into());
        }
        Ok(found)
    }

    /// Returns an error with the nearest known names if no run has this one.
    fn report_unknown(&self, wanted: &str) -> anyhow::Result<()> {
        let known = self.0.runs(&RunQuery::default())?;
        if known.iter().any(|run| run.name_kind(wanted).is_some()) {
            return Ok(());
        }
        Err(NotFound(format!("no run, container or group {wanted:?}{}", nearest_names(&known, wanted)))
            .into())
    }
}
