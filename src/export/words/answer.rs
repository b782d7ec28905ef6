//! What is said around the answers: of kills that may be meant, and of a saved log.

use super::incident::kill_line;
use super::screen::wrap;
use crate::events::Kill;
use crate::parse::kernel_log::text_log::UnreadKill;

/// Kills of unknown containers that are listed, the newest.
const MAX_UNKNOWN: usize = 10;
/// The first lines of an answer where nothing was asked for.
pub const NEWEST_OF_HOST: &str =
    "The newest OOM kill or abnormal end of a container on this host (--last):\n\n";

/// Lists the kills of which the container may have been one; empty without any.
pub fn kills_of_unknown_containers(kills: &[Kill], is_whole: bool) -> String {
    let mut text = String::new();
    if kills.is_empty() {
        return text;
    }
    text.push_str("\nOOM kills whose container is not known\n");
    wrap(
        &mut text,
        "",
        "One of them may have been in it: the kernel's record does not name the container, or that was removed (--rm), or created anew under its \
         name.",
    );
    let max = if is_whole { usize::MAX } else { MAX_UNKNOWN };
    let skipped = kills.len().saturating_sub(max);
    for kill in &kills[skipped..] {
        wrap(&mut text, "  - ", &kill_line(kill));
    }
    if skipped > 0 {
        wrap(&mut text, "  ", &format!("and {skipped} older: --all"));
    }
    text
}

/// A saved log without the wanted kill.
pub struct NoKillInLog<'a> {
    /// Its name.
    pub name: &'a str,
    /// What was asked for.
    pub wanted: Option<&'a str>,
    /// Its kills.
    pub kills: u64,
    /// Those of them that were not kept.
    pub omitted: u64,
    /// Its lines, and those with a stamp of the kernel.
    pub lines: u64,
    /// See above.
    pub kernel_lines: u64,
    /// A line that looks like a kill and could not be read.
    pub unread: Option<UnreadKill>,
    /// It ends within a report.
    pub is_cut: bool,
}

/// Says what was found in a saved log in place of a kill.
pub fn no_kill_in_log(found: &NoKillInLog<'_>) -> String {
    let NoKillInLog { name, kills, omitted, lines, kernel_lines, .. } = found;
    let cut = if found.is_cut {
        "; it ends within a report of the OOM killer, before the line `Killed process`"
    } else {
        ""
    };
    match (found.wanted, found.unread) {
        (Some(wanted), _) if *kills > 0 => {
            let newest = if *omitted > 0 { format!("newest {} of ", kills - omitted) } else { String::new() };
            format!(
                "none of the {newest}{kills} OOM kills in {name} is of {wanted:?}: a kernel log has ids of containers, names of cgroups and of \
                 processes, but no names of containers{cut}"
            )
        }
        _ if *lines == 0 => format!("{name} is empty"),
        (_, Some(unread)) => format!("no OOM kill could be read: {}{cut}", unread_kill(name, unread)),
        (_, None) if *kernel_lines == 0 => {
            format!("no OOM kill in {name}: none of its {lines} lines has the form of a kernel log{cut}")
        }
        (_, None) => format!("no OOM kill in {name} ({lines} lines, {kernel_lines} with a stamp){cut}"),
    }
}

/// Says which line looks like a kill and could not be read.
pub fn unread_kill(name: &str, unread: UnreadKill) -> String {
    let UnreadKill { line, words, is_shortened } = unread;
    let hint = if is_shortened {
        "its end is missing: a screen or a program shortened it (journalctl --no-pager, or dmesg into a file, does not)"
    } else {
        "it could not be read"
    };
    format!("line {line} of {name} has `{words}`, but {hint}")
}

/// Says that older kills of a saved log are not shown.
pub fn omitted_kills(name: &str, omitted: u64) -> String {
    format!("{omitted} older OOM kills in {name} are not shown")
}

/// Says that a saved log ends within a report.
pub fn log_is_cut(name: &str) -> String {
    format!("{name} ends within a report of the OOM killer: it is cut, or that kill was not logged")
}

/// Says that not all of a text in UTF-16 was read.
pub fn utf16_is_cut(read_bytes: u64) -> String {
    format!(
        "the log is UTF-16: only its first {} MiB were read; convert it to UTF-8 to have all of it read (iconv -f UTF-16)",
        read_bytes >> 20
    )
}

/// Says that not all of a log with its newest lines first was read.
pub fn reversed_is_cut(read: u64, all: u64) -> String {
    format!("the newest lines of the log come first: only the newest {read} of {all} were read")
}

/// Returns the first line of the answer on several kills, of which the last `detailed` have details.
pub fn first_of_several(kills: usize, hidden: usize, detailed: usize) -> String {
    let newest = if hidden > 0 { format!("The newest {} of ", kills - hidden) } else { String::new() };
    format!("{newest}{kills} OOM kills, the last {detailed} with details: --all has those of each.\n")
}
