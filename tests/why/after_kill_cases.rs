//! The part of the table with runs that lost a process and went on: a kill is never hidden by what came after it.

use memledger::diagnose::{Cause, Confidence};
use memledger::events::{Exit, ExitReason, LedgerEvent, Victim};

use super::cases::Case;
use super::events::*;

/// The second line of each screen, for the kill of a DataLoader worker at the limit of 44 GiB.
const LOST: &str =
    "OUT OF MEMORY at its own limit of 44.0 GiB: a child was killed; the container went on and ";

/// A kill of a child, and this end.
fn case(
    name: &'static str,
    exit: Exit,
    cause: Cause,
    confidence: Confidence,
    expected: &'static [&'static str],
) -> Case {
    Case {
        name,
        events: events(exit),
        cause,
        confidence,
        expected,
        not: &[
            "NOT an OOM",
            "by a person",
            "without an error",
            "that ended the container",
            "Look for who stopped it",
        ],
        computed: &["4.2", "7", "3", "2", "1", "12", "16", "5", "15"],
    }
}

fn events(exit: Exit) -> Vec<LedgerEvent> {
    vec![killed(kill(Victim::Child)), ended(exit)]
}

/// An end with an error that the kill may have caused.
fn may_be(exit: Exit) -> Exit {
    Exit { may_be: vec![7], oom_kills: 1, ..exit }
}

/// Returns what is decided of an end only later: the exit is known, and evidence may still arrive.
fn pending(exit: Exit) -> Exit {
    Exit { reason: None, ..may_be(exit) }
}

pub fn of_a_child() -> Vec<Case> {
    use Cause::{OomLimitWorker, OomLimitWorkerThenExit};
    use Confidence::{Certain, Likely};
    let later = exit;
    vec![
        case(
            "then completed",
            later(ExitReason::Completed, 0, 3.0),
            OomLimitWorker,
            Certain,
            &[
                "kept running and ended 3 s later with exit code 0",
                "8 DataLoader workers held 34.0 GiB",
                "7 fit",
            ],
        ),
        case(
            "then a stop",
            stop_request(later(ExitReason::Stopped, 143, 3.0), 15),
            OomLimitWorker,
            Certain,
            &[
                "kept running until it was stopped 3 s later with exit code 143",
                "on a stop request to the runtime (SIGTERM)",
                "It may have hung until then",
                "8 DataLoader workers held 34.0 GiB",
            ],
        ),
        case(
            "then docker kill",
            stop_request(later(ExitReason::Stopped, 137, 12.0), 9),
            OomLimitWorker,
            Certain,
            &["until it was stopped 12 s later with exit code 137", "on a kill request to the runtime"],
        ),
        case(
            "then the status of the child",
            may_be(later(ExitReason::Error, 137, 8.0)),
            OomLimitWorkerThenExit,
            Likely,
            &[
                "8 s later with exit code 137, most likely the status of that child",
                "8 DataLoader workers held",
            ],
        ),
        case(
            "then a status like that of a signal",
            may_be(later(ExitReason::Error, 138, 1.0)),
            OomLimitWorkerThenExit,
            Likely,
            &["kept running and ended 1 s later with exit code 138", "8 DataLoader workers held"],
        ),
        case(
            "then a status that is decided later",
            pending(later(ExitReason::Unknown, 137, 8.0)),
            OomLimitWorkerThenExit,
            Likely,
            &["8 s later with exit code 137", "8 DataLoader workers held"],
        ),
        case(
            "then an end by a signal hours later",
            later(ExitReason::Signal, 139, 7_200.0),
            OomLimitWorker,
            Certain,
            &["kept running and ended 2 h later with exit code 139", "by SIGSEGV or by abort(): it crashed"],
        ),
        case(
            "then kill -9 hours later",
            later(ExitReason::Killed, 137, 7_200.0),
            OomLimitWorker,
            Certain,
            &[
                "kept running and ended 2 h later with exit code 137",
                "No OOM kill explains it: the last of this run was 2 h before",
            ],
        ),
        case(
            "then the status of the child, in a pod",
            Exit { requests_known: false, ..may_be(later(ExitReason::Error, 137, 8.0)) },
            OomLimitWorkerThenExit,
            Likely,
            &["It may also have been ended from outside"],
        ),
        case(
            "then an error hours later",
            later(ExitReason::Error, 1, 7_200.0),
            OomLimitWorker,
            Certain,
            &["kept running and ended 2 h later with exit code 1", "its own error"],
        ),
    ]
}

#[test]
fn second_line_names_the_kill_its_limit_and_the_end() {
    let second_line = |events: Vec<LedgerEvent>| {
        let verdict = memledger::diagnose::explain(&events, NOW).expect("a verdict");
        let screen = memledger::export::words::screen::render(&verdict);
        screen.lines().skip(1).take(2).map(str::trim).collect::<Vec<_>>().join(" ")
    };
    for (exit, end) in [
        (exit(ExitReason::Completed, 0, 3.0), "ended with 0, 3 s later, 10 min ago"),
        (may_be(exit(ExitReason::Error, 138, 1.0)), "ended with 138, 1 s later (most likely), 10 min ago"),
        (may_be(exit(ExitReason::Error, 137, 8.0)), "ended with 137, 8 s later (most likely), 10 min ago"),
        (may_be(exit(ExitReason::Error, 1, 0.2)), "ended with 1, right after, 10 min ago"),
        (
            stop_request(exit(ExitReason::Stopped, 143, 3.0), 15),
            "was stopped on request, 3 s later, 10 min ago",
        ),
        (
            stop_request(exit(ExitReason::Stopped, 137, 3.0), 9),
            "was killed on request, 3 s later, 10 min ago",
        ),
    ] {
        let line = second_line(events(exit));
        assert!(line.starts_with(&format!("{LOST}{end}")), "{line}");
    }
    let line = second_line(vec![killed(kill(Victim::Child))]);
    assert!(line.starts_with("OUT OF MEMORY at its own limit: a child process was killed"), "{line}");
    let of_host = second_line(vec![killed(of_host()), ended(exit(ExitReason::Completed, 0, 3.0))]);
    assert!(
        of_host.starts_with(
            "OUT OF MEMORY of the whole machine: a child was killed; the container went on and ended with 0"
        ),
        "{of_host}"
    );
}
