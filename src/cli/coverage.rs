//! How far an answer reaches that comes from this host: for `memledger why` and `events`.

use std::fmt::Write;

use crate::config::Config;
use crate::diagnose::live::{Coverage, MissingLedger};
use crate::export::words::screen::wrap;
use crate::export::words::{CoverageHint, coverage_hints, missing_ledger};
use crate::parse::container_id;
use crate::text::shell_quoted;

/// The image of deploy/services.yml, and the privileges that reading the host needs in it; docs/why.md has the same.
const IN_IMAGE: &str = concat!(
    "docker run --rm --pid host --cgroupns host --cap-drop ALL --cap-add SYSLOG --device /dev/kmsg:/dev/kmsg:r ",
    "-v /sys/fs/cgroup:/host/cgroup:ro -v /var/run/docker.sock:/var/run/docker.sock:ro ",
    "ghcr.io/memledger/memledger:",
    env!("CARGO_PKG_VERSION")
);

/// Returns the command for the same question with the rights to read everything. `question`: the verb and its own arguments, for
/// an image that has other settings.
pub fn command_with_all_rights(config: &Config, question: &[&str]) -> String {
    if is_in_container(config) {
        return question
            .iter()
            .fold(IN_IMAGE.to_owned(), |command, word| format!("{command} {}", shell_quoted(word)));
    }
    let program =
        std::env::current_exe().map_or_else(|_| "memledger".to_owned(), |path| path.display().to_string());
    // sudo may have another search path; it keeps options, and drops what the environment sets
    let arguments = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let words = std::iter::once(program).chain(arguments);
    words.fold("sudo".to_owned(), |command, word| format!("{command} {}", shell_quoted(&word)))
}

/// Returns the section that describes how far an answer reaches, and what gives the rest; empty if nothing is missing. `missing`: why there is no ledger. `shown`:
/// sentences that the answer begins with.
pub fn section(
    coverage: &Coverage,
    missing: Option<&MissingLedger>,
    command: &str,
    shown: &[String],
) -> String {
    let mut text = String::new();
    let missing = missing.map(|it| CoverageHint { text: missing_ledger(it) + ".", command: None });
    let hints = coverage_hints(coverage, command).into_iter().filter(|hint| !shown.contains(&hint.text));
    for CoverageHint { text: sentence, command } in hints.chain(missing) {
        wrap(&mut text, "  - ", &sentence);
        if let Some(command) = command {
            let _ = writeln!(text, "      {command}"); // in one line, so that it can be copied
        }
    }
    if text.is_empty() { text } else { format!("\nHow far this reaches\n{text}") }
}

/// Returns whether this process is in a container, where there is no sudo.
fn is_in_container(config: &Config) -> bool {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let has_id = own.lines().any(|line| container_id::in_path(line).next().is_some());
    has_id || std::process::id() == 1 || !config.host_paths.in_initial_pid_namespace()
}
