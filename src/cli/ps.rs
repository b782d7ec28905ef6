//! `memledger ps`: who uses RAM and VRAM now, once.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command};
use jiff::tz::TimeZone;
use serde_json::{Value, json};

use super::overview_source::{NewestKills, OverviewSource};
use crate::config::Config;
use crate::export::events::EventTable;
use crate::overview::{Details, Overview, Sort, table};

/// The newest kills that are shown.
const SHOWN_KILLS: usize = 3;

/// Returns the verb with its own flags; the flags of the settings are added elsewhere.
pub fn command() -> Command {
    let command = Command::new("ps")
        .about("Show which containers use RAM and VRAM now, the one nearest to its limit first.")
        .after_help("Queries memledger serve; without one it takes two samples itself, which takes a second.")
        .arg(sort_flag())
        .arg(
            Arg::new("processes")
                .short('p')
                .long("processes")
                .action(ArgAction::SetTrue)
                .help("Show the processes of each container, and what each pod holds beyond its containers."),
        )
        .arg(super::json_flag(
            "Print one JSON object per line: the host, each GPU, each container; with -p each pod.",
        ));
    super::answers(command, "also if no container runs", "never")
}

/// The option for the order of containers.
pub fn sort_flag() -> Arg {
    let words = PossibleValuesParser::new(Sort::ALL.map(|(word, _)| word));
    let flag = Arg::new("sort").long("sort").value_name("COLUMN").value_parser(words);
    flag.default_value("limit").help("What containers are sorted by.")
}

/// Returns the order of containers that was asked for.
pub fn sort_of(matches: &ArgMatches) -> Sort {
    let wanted = matches.get_one::<String>("sort").map_or("limit", String::as_str);
    Sort::ALL.into_iter().find(|(word, _)| *word == wanted).map_or(Sort::Limit, |(_, sort)| sort)
}

pub fn run(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let source = OverviewSource::open(config)?;
    let details = if matches.get_flag("processes") { Details::Processes } else { Details::None };
    let mut overview = source.overview(details)?;
    let sort = sort_of(matches);
    overview.containers.sort_by(|one, other| sort.compare(one, other));
    if matches.get_flag("json") {
        super::print(&lines(&overview)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = table::text(&overview, width());
    text.push_str(&describe(&NewestKills::read(config), width()));
    super::print(&text)?;
    if !source.is_served() {
        eprintln!(
            "no memledger serve answers here: sampled by this command, without what a service counts over time"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns one JSON object a line; `type` says what it is of.
fn lines(overview: &Overview) -> anyhow::Result<String> {
    let line = |kind: &str, of: Value| {
        let mut line = json!({"type": kind, "at": overview.at});
        if let (Some(line), Value::Object(of)) = (line.as_object_mut(), of) {
            line.extend(of);
        }
        line.to_string() + "\n"
    };
    let mut text = line("host", serde_json::to_value(&overview.host)?);
    for gpu in &overview.gpus {
        text.push_str(&line("gpu", serde_json::to_value(gpu)?));
    }
    for container in &overview.containers {
        text.push_str(&line("container", serde_json::to_value(container)?));
    }
    for pod in &overview.pods {
        text.push_str(&line("pod", serde_json::to_value(pod)?));
    }
    for device in &overview.other_devices {
        text.push_str(&line("other_device", serde_json::to_value(device)?));
    }
    Ok(text)
}

/// Returns the width of the terminal; 0 where the output is none, and everything is shown whole.
fn width() -> usize {
    let out = std::io::stdout();
    if !out.is_terminal() {
        return 0;
    }
    rustix::termios::tcgetwinsize(&out).map_or(0, |size| size.ws_col.into())
}

/// Describes the newest kills.
fn describe(kills: &NewestKills, width: usize) -> String {
    let shown = &kills.events[..kills.events.len().min(SHOWN_KILLS)];
    let mut table = EventTable::new(TimeZone::system());
    shown.iter().for_each(|event| table.fit(event));
    let lines: String = shown.iter().map(|event| cut(table.render(event).trim_end(), width)).collect();
    format!("\n{}\n{lines}", kills.title())
}

/// Cuts a line to a width, if there is one.
fn cut(line: &str, width: usize) -> String {
    match line.char_indices().nth(width).filter(|_| width > 0) {
        Some(_) => line.chars().take(width - 1).chain(['…', '\n']).collect(),
        None => format!("{line}\n"),
    }
}
