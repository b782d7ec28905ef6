//! The overview as tables: their columns and cells, for the text of `ps`, the screens of `top` and the page at `/`.

use std::fmt::Write;

use super::history::EMPTY_AFTER;
use super::{ContainerUse, GpuOverview, HostUse, ListedState, Overview, PodUse, ProcessUse};
use crate::attribute::Role;
use crate::text::{age, human_bytes, sanitize_for_terminal};

/// Marks a container that has a GPU and does not run.
const NOT_RUNNING: &str = "*";
/// What is not known.
pub const UNKNOWN: &str = "-";
/// Times until a limit beyond this are no forecast, in seconds.
const FARTHEST_LIMIT: f64 = 7.0 * 86_400.0;
/// Least width of a column whose cells can be cut.
const MIN_NAME: usize = 16;
/// Characters between two columns.
const GAP: usize = 2;
/// Which columns are shown where the width is not known.
const DEFAULT_WIDTH: usize = 100;

/// What a column has, which decides where it stands and how it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name: cut in its middle, because names often differ at their ends.
    Name,
    /// A number: at the right, and never cut.
    Number,
    /// Several things, the first ones the most important.
    List,
}

/// A column of a table.
#[derive(Debug)]
pub struct OverviewColumn<T> {
    title: &'static str,
    kind: Kind,
    /// Returns the cell of a row at a time.
    cell: fn(&T, f64) -> String,
    /// Left out where no row has a value.
    is_optional: bool,
    /// Where the screen is too narrow, columns of the highest rank go first; those of rank 0 stay.
    rank: u8,
}

impl<T> OverviewColumn<T> {
    const fn name(title: &'static str, cell: fn(&T, f64) -> String) -> Self {
        Self { title, kind: Kind::Name, cell, is_optional: false, rank: 0 }
    }

    const fn number(title: &'static str, cell: fn(&T, f64) -> String) -> Self {
        Self { kind: Kind::Number, ..Self::name(title, cell) }
    }

    const fn list(title: &'static str, cell: fn(&T, f64) -> String) -> Self {
        Self { kind: Kind::List, ..Self::name(title, cell) }
    }

    const fn optional(mut self) -> Self {
        self.is_optional = true;
        self
    }

    const fn rank(mut self, rank: u8) -> Self {
        self.rank = rank;
        self
    }
}

type ContainerColumn = OverviewColumn<ContainerUse>;
type GpuColumn = OverviewColumn<GpuOverview>;
type ProcessColumn = OverviewColumn<ProcessUse>;
type PodColumn = OverviewColumn<PodUse>;

/// The columns of containers.
pub const CONTAINERS: [OverviewColumn<ContainerUse>; 14] = [
    ContainerColumn::name("CONTAINER", |of, _| of.name.clone()),
    ContainerColumn::list("STATE", |of, _| of.state.word().unwrap_or(UNKNOWN).to_owned()).optional(),
    ContainerColumn::number("MEMORY / LIMIT", |of, _| pair(of.unreclaimable_bytes, of.limit_bytes)),
    ContainerColumn::number("USED", |of, _| percent(of.limit_ratio)),
    ContainerColumn::number("HEADROOM", |of, _| size(of.headroom_bytes)).rank(6),
    ContainerColumn::number("GROWTH", |of, _| growth(of.growth_bytes_per_second)).optional().rank(7),
    ContainerColumn::number("FULL IN", |of, _| full_in(of.seconds_to_limit)).optional().rank(2),
    ContainerColumn::number("TRAINERS", |of, _| size(of.role_bytes.get(Role::Trainer.label()).copied()))
        .optional()
        .rank(9),
    ContainerColumn::number("WORKERS", |of, _| {
        size(of.role_bytes.get(Role::DataloaderWorker.label()).copied())
    })
    .optional()
    .rank(10),
    ContainerColumn::number("VRAM", |of, _| size(of.gpu_bytes)).optional().rank(1),
    ContainerColumn::number("GPU", |of, _| percent(of.gpu_utilization_ratio)).optional().rank(5),
    ContainerColumn::number("CPU", |of, _| {
        of.cpu_cores.map_or_else(|| UNKNOWN.into(), |cores| format!("{cores:.1}"))
    })
    .rank(4),
    ContainerColumn::number("KILLS", |of, _| count(of.oom_kills)).optional().rank(8),
    ContainerColumn::number("LAST KILL", |of, now| ago(of.last_oom_kill, now)).optional().rank(3),
];

/// The columns of GPUs.
pub const GPUS: [OverviewColumn<GpuOverview>; 7] = [
    GpuColumn::name("GPU", |of, _| of.gpu.clone()),
    GpuColumn::name("MODEL", |of, _| of.model.to_string()),
    GpuColumn::number("MEMORY / TOTAL", |of, _| pair(of.memory_used_bytes, of.memory_total_bytes)),
    GpuColumn::number("USED", |of, _| percent(of.used_ratio())),
    GpuColumn::number("BUSY", |of, _| percent(of.utilization_ratio)),
    GpuColumn::list("HELD BY", |of, _| held_by(of)),
    GpuColumn::list("ALLOCATED TO", |of, _| allocated_to(of)).optional(),
];

/// The columns of processes.
pub const PROCESSES: [OverviewColumn<ProcessUse>; 6] = [
    ProcessColumn::name("PROCESS", |of, _| of.name.to_string()),
    ProcessColumn::number("PID", |of, _| of.pid.to_string()),
    ProcessColumn::name("ROLE", |of, _| of.role.label().replace('_', " ")),
    ProcessColumn::number("SHARE", |of, _| size(of.pss_bytes.map(|bytes| bytes as f64))),
    ProcessColumn::number("RESIDENT", |of, _| size(Some(of.rss_bytes as f64))),
    ProcessColumn::number("VRAM", |of, _| size(of.gpu_bytes.map(|bytes| bytes as f64))),
];

/// The columns of pods.
pub const PODS: [OverviewColumn<PodUse>; 4] = [
    PodColumn::name("POD", |of, _| of.name.clone()),
    PodColumn::number("USAGE / LIMIT", |of, _| pair(of.usage_bytes, of.limit_bytes)),
    PodColumn::number("CONTAINERS", |of, _| size(of.containers_bytes)),
    PodColumn::number("REST", |of, _| size(of.rest_bytes)),
];

/// A table whose cells are made.
#[derive(Debug)]
pub struct Cells {
    /// Title and kind of each column.
    pub columns: Vec<(&'static str, Kind)>,
    /// Rows of cells.
    pub rows: Vec<Vec<String>>,
    /// Width of each column in characters.
    pub widths: Vec<usize>,
}

impl Cells {
    /// Makes the cells of these rows for a screen of this width in characters, without columns in which nothing would stand, or for which
    /// there is no room. 0: nothing is cut, with the columns of a screen of 100.
    pub fn of<T>(columns: &[OverviewColumn<T>], rows: &[T], now: f64, width: usize) -> Self {
        let all: Vec<Vec<String>> =
            rows.iter().map(|row| columns.iter().map(|column| (column.cell)(row, now)).collect()).collect();
        let has_value =
            |number: usize| all.iter().any(|row| !matches!(row[number].as_str(), UNKNOWN | "0" | "0 B"));
        let mut shown: Vec<usize> =
            (0..columns.len()).filter(|number| !columns[*number].is_optional || has_value(*number)).collect();
        let full = |number: usize| {
            let cells = all.iter().map(|row| row[number].chars().count());
            cells.chain([columns[number].title.len()]).max().unwrap_or(0)
        };
        let least = |number: usize| match columns[number].kind {
            Kind::Number => full(number),
            Kind::Name | Kind::List => full(number).min(MIN_NAME),
        };
        let limit = if width == 0 { DEFAULT_WIDTH } else { width };
        while shown.iter().map(|number| least(*number) + GAP).sum::<usize>() > limit + GAP {
            let Some(last) = (0..shown.len()).max_by_key(|at| columns[shown[*at]].rank) else { break };
            if columns[shown[last]].rank == 0 {
                break;
            }
            shown.remove(last);
        }
        let mut widths: Vec<usize> = shown.iter().map(|number| full(*number)).collect();
        for at in (0..shown.len()).rev().filter(|_| width > 0) {
            let surplus = (widths.iter().map(|width| width + GAP).sum::<usize>()).saturating_sub(width + GAP);
            widths[at] = widths[at].saturating_sub(surplus).max(least(shown[at]));
        }
        let pick = |row: &Vec<String>| shown.iter().map(|number| row[*number].clone()).collect();
        let columns = shown.iter().map(|number| (columns[*number].title, columns[*number].kind)).collect();
        Self { columns, rows: all.iter().map(pick).collect(), widths }
    }

    /// Returns a cell as it fits into its column.
    pub fn cut(&self, column: usize, cell: &str) -> String {
        let (kind, width) = (self.columns[column].1, self.widths[column]);
        match kind {
            Kind::List if cell.chars().count() > width => {
                cell.chars().take(width.saturating_sub(1)).chain(['…']).collect()
            }
            _ => shortened(cell, width),
        }
    }

    /// Writes the table as text.
    fn write(&self, text: &mut String) {
        let titles: Vec<String> = self.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
        for row in std::iter::once(&titles).chain(&self.rows) {
            let mut line = String::new();
            for (number, cell) in row.iter().enumerate() {
                let (cell, width) = (self.cut(number, cell), self.widths[number]);
                let _ = match self.columns[number].1 {
                    Kind::Number => write!(line, "{cell:>width$}  "),
                    Kind::Name | Kind::List => write!(line, "{cell:<width$}  "),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
    }
}

/// Returns the overview as text of this width in characters; 0: of any.
pub fn text(overview: &Overview, width: usize) -> String {
    let mut text = String::new();
    if overview.containers.is_empty() {
        text.push_str("No container is running.\n");
    } else {
        Cells::of(&CONTAINERS, &overview.containers, overview.at, width).write(&mut text);
    }
    describe_states(overview, &mut text);
    for container in overview.containers.iter().filter(|container| container.processes.is_some()) {
        let processes = container.processes.as_deref().unwrap_or_default();
        let _ = writeln!(text, "\n{}, {} processes:", container.name, processes.len());
        Cells::of(&PROCESSES, processes, overview.at, width).write(&mut text);
    }
    if !overview.pods.is_empty() {
        text.push('\n');
        Cells::of(&PODS, &overview.pods, overview.at, width).write(&mut text);
    }
    if !overview.gpus.is_empty() {
        text.push('\n');
        Cells::of(&GPUS, &overview.gpus, overview.at, width).write(&mut text);
    }
    if overview.gpus.iter().flat_map(|gpu| &gpu.allocated_to).any(|of| !of.running) {
        let _ = writeln!(
            text,
            "{NOT_RUNNING}: it does not run, and the kubelet keeps the GPU until its pod is done."
        );
    }
    if !overview.other_devices.is_empty() {
        let _ = writeln!(text, "\nAllocated by the kubelet under names of plugins and drivers:");
        for of in &overview.other_devices {
            let line = format!("{}: {} {}", of.container, of.source, of.device);
            let _ = writeln!(text, "{}", sanitize_for_terminal(&line));
        }
    }
    let _ = writeln!(text, "\n{}", host_line(&overview.host));
    text
}

/// Explains the states that are not those of running containers.
fn describe_states(overview: &Overview, text: &mut String) {
    for runtime in &overview.runtimes_unreachable {
        let _ = writeln!(
            text,
            "\n{runtime} does not respond (where it has several sockets, at one of them): names and settings of its containers are those of its last response."
        );
    }
    if overview.containers.iter().any(|container| container.state == ListedState::NoProcess) {
        let _ = writeln!(
            text,
            "\nno process: its cgroup has none for {EMPTY_AFTER} s or more, or is gone, and its runtime reports no end (memledger why NAME)."
        );
    }
}

/// Describes the memory of the host in a line.
pub fn host_line(host: &HostUse) -> String {
    let memory = pair(host.used_bytes(), host.memory_total_bytes);
    let swap = match host.swap_total_bytes {
        Some(0.0) => "no swap".to_owned(),
        total => format!("swap {}", pair(host.swap_used_bytes, total)),
    };
    let waiting = host
        .memory_waiting_ratio
        .map(|ratio| format!(", {} of time waiting for memory", percent(Some(ratio))));
    format!("HOST  memory {memory} ({}), {swap}{}", percent(host.used_ratio()), waiting.unwrap_or_default())
}

/// Describes who holds the memory of a GPU, the largest first.
fn held_by(gpu: &GpuOverview) -> String {
    let all: Vec<_> =
        gpu.all_holders().map(|(name, bytes)| format!("{name} {}", human_bytes(bytes))).collect();
    if all.is_empty() { UNKNOWN.to_owned() } else { all.join(", ") }
}

/// Describes who has a GPU allocated.
fn allocated_to(gpu: &GpuOverview) -> String {
    let all: Vec<_> = gpu
        .allocated_to
        .iter()
        .map(|of| format!("{}{}", if of.running { "" } else { NOT_RUNNING }, of.container))
        .collect();
    if all.is_empty() { UNKNOWN.to_owned() } else { all.join(", ") }
}

/// Formats bytes.
pub fn size(bytes: Option<f64>) -> String {
    bytes.map_or_else(|| UNKNOWN.to_owned(), human_bytes)
}

/// Formats what is used of a whole, with one unit where both have the same.
pub fn pair(used: Option<f64>, total: Option<f64>) -> String {
    let (used_text, total_text) = (size(used), size(total));
    match (used_text.split_once(' '), total_text.split_once(' ')) {
        (Some((number, unit)), Some((_, of_total))) if unit == of_total => format!("{number} / {total_text}"),
        _ => format!("{used_text} / {total_text}"),
    }
}

/// Formats a share.
pub fn percent(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| UNKNOWN.to_owned(), |ratio| format!("{:.0}%", 100.0 * ratio))
}

/// Formats a number of events.
pub fn count(number: Option<f64>) -> String {
    number.map_or_else(|| UNKNOWN.to_owned(), |number| format!("{number:.0}"))
}

/// Formats growth in bytes per second.
pub fn growth(bytes: Option<f64>) -> String {
    bytes.map_or_else(|| UNKNOWN.to_owned(), |bytes| format!("{}/h", human_bytes(bytes * 3600.0)))
}

/// Formats a Unix time as its age.
fn ago(at: Option<f64>, now: f64) -> String {
    at.map_or_else(|| UNKNOWN.to_owned(), |at| format!("{} ago", age(now - at)))
}

/// Formats the time until a limit, rounded down.
pub fn full_in(seconds: Option<f64>) -> String {
    let Some(seconds) = seconds.filter(|seconds| *seconds <= FARTHEST_LIMIT) else {
        return UNKNOWN.to_owned();
    };
    let minutes = (seconds / 60.0) as u64;
    match minutes / 60 {
        0 => format!("~{minutes}m"),
        hours @ 1..10 => format!("~{hours}h{:02}", minutes % 60),
        hours @ 10..48 => format!("~{hours}h"),
        hours => format!("~{}d", hours / 24),
    }
}

/// Cuts a text to a width, with an ellipsis in its middle: names often differ at their ends.
pub fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width || width == 0 {
        return text.to_owned();
    }
    let (begin, end) = (width / 2, (width - 1) - width / 2);
    text.chars().take(begin).chain(['…']).chain(text.chars().skip(count - end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_short_and_share_a_unit() {
        let gib = |number: f64| Some(number * (1u64 << 30) as f64);
        assert_eq!(pair(gib(38.2), gib(44.0)), "38.2 / 44.0 GiB");
        assert_eq!(pair(gib(0.5), gib(44.0)), "512.0 MiB / 44.0 GiB");
        assert_eq!((pair(gib(1.0), None), pair(None, None)), ("1.0 GiB / -".into(), "- / -".into()));
        assert_eq!(
            [Some(90.0), Some(6090.0), Some(90_000.0), Some(300_000.0), Some(1e9), None].map(full_in),
            ["~1m", "~1h41", "~25h", "~3d", "-", "-"]
        );
    }

    #[test]
    fn name_is_cut_in_its_middle() {
        assert_eq!(shortened("training-llama-7b-rank-0", 11), "train…ank-0");
        assert_eq!(shortened("ärger", 3), "ä…r");
        assert_eq!(shortened("short", 10), "short");
    }
}
