//! What is said of how far the sources of an answer reach.

use super::terms::time;
use crate::diagnose::live::{Coverage, MissingLedger, RuntimeCoverage};
use crate::ledger::catch_up::LogCoverage;

/// Says why there is no recorded ledger, without a full stop.
pub fn missing_ledger(missing: &MissingLedger) -> String {
    match missing {
        MissingLedger::NoFile(directory) => format!(
            "There is no ledger in {}: memledger serve has not run on this host, or has another --state.path",
            directory.display()
        ),
        MissingLedger::NoServer { socket: Some(socket) } => format!(
            "--state.path is empty, and no memledger serve answers on the control socket {}",
            socket.display()
        ),
        MissingLedger::NoServer { socket: None } => "--state.path and --local.socket are empty".to_owned(),
        MissingLedger::Unreadable { error } => format!("The ledger cannot be read: {error}"),
    }
}

/// Shows the kills that the kernel's buffer has lost, where there is a journal.
const JOURNAL: &str = "journalctl -k -b | memledger why --kernel-log -";

/// A sentence about what may be missing, and the command that gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct CoverageHint {
    /// The sentence.
    pub text: String,
    /// A command for a shell.
    pub command: Option<String>,
}

/// Returns the sentence about what failed.
fn error_text(coverage: &RuntimeCoverage) -> Option<String> {
    let (runtime, error) = (coverage.runtime, coverage.error.as_ref()?);
    Some(format!("The containers of {runtime} are unknown: {error}."))
}

/// Returns a sentence for each runtime that could not be read: without it no container of it has a name.
pub fn missing_runtimes(coverage: &Coverage) -> Vec<String> {
    coverage.runtimes.iter().filter_map(error_text).collect()
}

/// Describes how far the sources reach, and what gives the rest. `command`: the same question with all rights.
pub fn coverage_hints(coverage: &Coverage, command: &str) -> Vec<CoverageHint> {
    let mut hints: Vec<CoverageHint> = log_hint(coverage).into_iter().collect();
    if coverage.kernel_log == LogCoverage::Followed {
        return hints;
    }
    for of_runtime @ RuntimeCoverage { runtime, unread, has_lost_events, .. } in &coverage.runtimes {
        if *has_lost_events {
            let text = format!(
                "Events of {runtime} are missing, because one is too large or there are too many, and with them names of removed \
                 containers and requests to stop."
            );
            hints.push(CoverageHint { text, command: None });
        }
        if let Some(text) = error_text(of_runtime) {
            hints.push(CoverageHint { text, command: None });
        }
        if *unread > 0 {
            let text = format!(
                "{runtime} did not describe all of its containers in time: up to {unread} have no exit here."
            );
            hints.push(CoverageHint { text, command: None });
        }
    }
    let is_unreadable =
        matches!(coverage.kernel_log, LogCoverage::Unreadable { .. }) && coverage.kills_of_boot != Some(0);
    if is_unreadable || coverage.runtimes.iter().any(RuntimeCoverage::is_unreadable) {
        hints.push(CoverageHint { text: "With all rights:".to_owned(), command: Some(command.to_owned()) });
    }
    hints
}

fn log_hint(coverage: &Coverage) -> Option<CoverageHint> {
    let boot = format!("this boot ({})", time(coverage.booted_at));
    let plain = |text: String| CoverageHint { text, command: None };
    let journal = |text: String| CoverageHint {
        text: format!("{text} The journal may have the others:"),
        command: Some(JOURNAL.to_owned()),
    };
    Some(match (&coverage.kernel_log, coverage.kills_of_boot) {
        (LogCoverage::Followed, _) => {
            plain("By memledger serve; memledger doctor shows which sources it cannot read.".to_owned())
        }
        (LogCoverage::Read { .. }, _) if coverage.is_recorded => return None,
        (_, Some(0)) => plain(format!("The kernel has ended no process for lack of memory in {boot}.")),
        (LogCoverage::Read { .. }, Some(kills)) if coverage.is_whole_boot() => {
            plain(format!("The kernel log holds {} of {boot}.", all_kills(kills)))
        }
        (LogCoverage::Read { since: Some(since) }, Some(kills)) => journal(format!(
            "The kernel log reaches back to {} and {} of {boot}.",
            time(*since),
            match (coverage.kills_in_log, kills) {
                (0, 1) => "does not hold the only OOM kill".to_owned(),
                (0, kills) => format!("holds none of the {kills} OOM kills"),
                (held, kills) => format!("holds {held} of the {kills} OOM kills"),
            },
        )),
        (LogCoverage::Read { since: Some(since) }, None) => journal(format!(
            "The kernel log reaches back to {} and holds {}; /proc/vmstat, which has the number of all, cannot be \
             read.",
            time(*since),
            count(coverage.kills_in_log)
        )),
        (LogCoverage::Read { since: None }, _) => journal("The kernel log is empty.".to_owned()),
        (LogCoverage::Unreadable { reason }, _) if coverage.is_recorded => plain(format!(
            "The kernel log cannot be read ({reason}), so OOM kills since the ledger was last written are missing here."
        )),
        (LogCoverage::Unreadable { reason }, kills) => plain(format!(
            "The kernel log cannot be read ({reason}), so the records of {} of {boot} are missing here.",
            kills.map_or("all OOM kills".to_owned(), all_kills)
        )),
        (LogCoverage::Off, _) => plain("The kernel log was not read (--oom.kernel-log=off).".to_owned()),
    })
}

fn count(kills: u64) -> String {
    if kills == 1 { "1 OOM kill".to_owned() } else { format!("{kills} OOM kills") }
}

fn all_kills(kills: u64) -> String {
    match kills {
        1 => "the only OOM kill".to_owned(),
        kills => format!("all {kills} OOM kills"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::RuntimeKind;

    fn hint(
        kernel_log: LogCoverage,
        kills_in_log: u64,
        kills_of_boot: Option<u64>,
    ) -> (String, Option<String>) {
        let coverage = Coverage { kernel_log, kills_in_log, kills_of_boot, ..Coverage::default() };
        let hints = coverage_hints(&coverage, "sudo memledger why train");
        let commands: Vec<_> = hints.iter().filter_map(|hint| hint.command.clone()).collect();
        assert!(commands.len() <= 1, "{hints:?}");
        (hints[0].text.clone(), commands.first().cloned())
    }

    #[test]
    fn hint_says_how_many_kills_are_known_and_what_gives_the_rest() {
        let read = || LogCoverage::Read { since: Some(3_600.0) };
        let unreadable = || LogCoverage::Unreadable { reason: "refused".into() };
        let (journal, sudo) = (Some(JOURNAL.to_owned()), Some("sudo memledger why train".to_owned()));
        for (log, in_log, of_boot, says, command) in [
            (
                read(),
                2,
                Some(7),
                "reaches back to 1970-01-01 01:00:00 UTC and holds 2 of the 7 OOM kills",
                &journal,
            ),
            (read(), 0, Some(1), "does not hold the only OOM kill of this boot", &journal),
            (read(), 2, Some(2), "holds all 2 OOM kills of this boot", &None),
            (read(), 1, Some(1), "holds the only OOM kill of this boot", &None),
            (read(), 3, None, "holds 3 OOM kills; /proc/vmstat", &journal),
            (LogCoverage::Read { since: None }, 0, Some(4), "The kernel log is empty", &journal),
            (unreadable(), 0, Some(3), "(refused), so the records of all 3 OOM kills", &sudo),
            (unreadable(), 0, None, "so the records of all OOM kills", &sudo),
            (LogCoverage::Off, 0, Some(3), "was not read (--oom.kernel-log=off)", &None),
            (LogCoverage::Off, 0, Some(0), "has ended no process for lack of memory", &None),
        ] {
            let (text, given) = hint(log, in_log, of_boot);
            assert!(text.contains(says), "no {says:?} in {text:?}");
            assert_eq!(given, *command, "{text}");
        }
    }

    #[test]
    fn one_command_gives_all_that_is_unreadable() {
        let runtime = |runtime| RuntimeCoverage {
            runtime,
            unread: 0,
            has_lost_events: false,
            error: Some("no permission".into()),
            is_missing: false,
        };
        let coverage = Coverage {
            kernel_log: LogCoverage::Unreadable { reason: "refused".into() },
            runtimes: vec![runtime(RuntimeKind::Docker), runtime(RuntimeKind::Podman)],
            ..Coverage::default()
        };
        let hints = coverage_hints(&coverage, "sudo memledger events");
        let commands: Vec<_> = hints.iter().filter_map(|hint| hint.command.as_deref()).collect();
        assert_eq!((hints.len(), &commands[..]), (4, &["sudo memledger events"][..]), "{hints:?}");
    }

    #[test]
    fn missing_socket_needs_no_rights_and_makes_no_answer_partial() {
        let missing = RuntimeCoverage {
            runtime: RuntimeKind::Docker,
            unread: 0,
            has_lost_events: false,
            error: Some("there is no socket at /d".into()),
            is_missing: true,
        };
        let coverage = Coverage { kills_of_boot: Some(0), runtimes: vec![missing], ..Coverage::default() };
        let text = "The containers of docker are unknown: there is no socket at /d.";
        assert_eq!(missing_runtimes(&coverage), [text]);
        assert!(!coverage.is_incomplete());
        let hints = coverage_hints(&coverage, "sudo memledger events");
        assert!(hints.iter().all(|hint| hint.command.is_none()) && hints[1].text == text, "{hints:?}");
    }
}
