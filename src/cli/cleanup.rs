//! `memledger cleanup`: requests that the processes of a container give torch's cache back to the GPU.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::bail;
use clap::{Arg, ArgMatches, Command};
use serde::Deserialize;

use super::{control, print};
use crate::config::{Config, parse_duration};
use crate::reporter::cleanup::{CleanupOutcome, DEADLINE, MAX_DEADLINE, MIN_DEADLINE, ProcessCleanup};
use crate::text::bytes;

/// The response of the route.
#[derive(Deserialize)]
struct CleanupResponse {
    container: String,
    deadline_seconds: f64,
    freed_bytes: u64,
    processes: Vec<ProcessCleanup>,
}

/// Returns the verb with its own flags.
pub fn command() -> Command {
    let (min, max) = (MIN_DEADLINE, MAX_DEADLINE);
    let command = Command::new("cleanup")
        .about("Ask the training in a container to give PyTorch's unused memory back to the GPU.")
        .after_help(
            "Each process that uses the Python client does so at the end of its next step or tracked operation. Others on the same GPU \
             gain by it; the training itself does not.",
        )
        .arg(Arg::new("container").value_name("NAME").required(true).help("Name or id of a running container."))
        .arg(
            Arg::new("deadline")
                .long("deadline")
                .value_name("DURATION")
                .value_parser(move |text: &str| {
                    let found = parse_duration(text).filter(|found| (min..=max).contains(found));
                    found.ok_or_else(|| format!("expected a duration from {min:?} to {max:?}"))
                })
                .help(format!("How long to wait for the end of a step. Default: {DEADLINE:?}.")),
        )
        .arg(super::json_flag("Print one JSON document, with all fields."));
    super::answers(command, "all of them did", "some did not")
}

pub fn run(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let name: &String = matches.get_one("container").expect("required");
    let deadline = matches.get_one("deadline").copied().unwrap_or(DEADLINE);
    let name = control::percent_encoded(name);
    let target = format!("/api/v1/containers/{name}/cleanup?deadline={}ms", deadline.as_millis());
    let (status, text) = control::request(config, "POST", &target, "application/json")?;
    if status != 200 {
        bail!("{}", text.trim_end());
    }
    let response: CleanupResponse = serde_json::from_str(&text)?;
    print(&if matches.get_flag("json") { text } else { table(&response) })?;
    let is_cleaned = |each: &ProcessCleanup| matches!(each.outcome, CleanupOutcome::Cleaned { .. });
    Ok(if response.processes.iter().all(is_cleaned) { ExitCode::SUCCESS } else { ExitCode::from(super::NO) })
}

fn table(response: &CleanupResponse) -> String {
    let mut text = format!("{}: {} given back\n", response.container, bytes(response.freed_bytes));
    for process in &response.processes {
        let _ = write!(text, "rank {}, pid {}: ", process.rank, process.pid);
        let _ = match &process.outcome {
            CleanupOutcome::Cleaned { reserved_before_bytes, reserved_after_bytes, milliseconds } => {
                writeln!(
                    text,
                    "{} before, {} after, in {milliseconds} ms",
                    bytes(*reserved_before_bytes),
                    bytes(*reserved_after_bytes)
                )
            }
            CleanupOutcome::Failed => writeln!(text, "its cleanup failed; it goes on"),
            CleanupOutcome::NoAnswer => writeln!(
                text,
                "no answer within {} s; only the end of a step or a tracked operation answers",
                response.deadline_seconds
            ),
            CleanupOutcome::Ended => writeln!(text, "it ended, or stopped reporting"),
            CleanupOutcome::Unreachable => writeln!(text, "its connection takes no more messages"),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_a_line_for_each_process() {
        const GIB: u64 = 1 << 30;
        let outcomes = [
            CleanupOutcome::Cleaned {
                reserved_before_bytes: 10 * GIB,
                reserved_after_bytes: 4 * GIB,
                milliseconds: 41,
            },
            CleanupOutcome::NoAnswer,
            CleanupOutcome::Failed,
            CleanupOutcome::Ended,
            CleanupOutcome::Unreachable,
        ];
        let processes = (0_u8..).zip(outcomes);
        let processes =
            processes.map(|(rank, outcome)| ProcessCleanup { rank, pid: 70 + u32::from(rank), outcome });
        let response = CleanupResponse {
            container: "train".into(),
            deadline_seconds: 10.0,
            freed_bytes: 6 * GIB,
            processes: processes.collect(),
        };
        let wanted = "train: 6.0 GiB given back\n\
                      rank 0, pid 70: 10.0 GiB before, 4.0 GiB after, in 41 ms\n\
                      rank 1, pid 71: no answer within 10 s; only the end of a step or a tracked operation answers\n\
                      rank 2, pid 72: its cleanup failed; it goes on\n\
                      rank 3, pid 73: it ended, or stopped reporting\n\
                      rank 4, pid 74: its connection takes no more messages\n";
        assert_eq!(table(&response), wanted);
        assert!(wanted.lines().all(|line| line.len() <= 100));
    }
}
