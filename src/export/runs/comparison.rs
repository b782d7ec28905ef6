//! A table of runs beside one another.

use std::fmt::Write;
use std::sync::Arc;

use super::{MAX_NAME_CHARS, MORE, exit, peak_text, safe, safe_end, state};
use crate::config::GROUP_SETTING;
use crate::runs::RunRecord;
use crate::runs::advice::{has_failed, was_killed, worker_share};
use crate::text::{duration, human_bytes};

/// Maximum number of runs beside one another: more do not fit into a hundred columns.
pub const MAX_COMPARED: usize = 4;
/// Maximum characters of the name of a setting.
const MAX_SETTING_CHARS: usize = 14;

/// Returns a table with one column per run, at the Unix time `now`, and what changed from the first in percent. At most
/// [`MAX_COMPARED`] runs.
pub fn comparison(runs: &[RunRecord], now: f64) -> String {
    let mut lines = vec![line("", runs, |run| safe(&run.subject.identity.name, MAX_NAME_CHARS))];
    if runs.iter().any(|run| !run.subject.identity.k8s_pod.is_empty()) {
        lines.push(line("pod", runs, |run| safe_end(&run.subject.identity.k8s_pod, MAX_NAME_CHARS)));
    }
    lines.push(line("run", runs, |run| safe(run_time(run), MAX_NAME_CHARS)));
    lines.push(line("group", runs, |run| safe_end(&run.group, MAX_NAME_CHARS)));
    let settings = runs.iter().flat_map(|run| run.settings.keys());
    let mut names: Vec<&Arc<str>> = settings.filter(|name| ***name != *GROUP_SETTING).collect();
    names.sort();
    names.dedup();
    for name in names {
        let value = |run: &RunRecord| {
            run.settings.get(name).map_or("-".to_owned(), |value| safe(value, MAX_NAME_CHARS))
        };
        lines.push(line(&safe(name, MAX_SETTING_CHARS), runs, value));
    }
    lines.push(line("lasted", runs, |run| run.duration_seconds.map_or_else(|| state(run, now), duration)));
    lines.push(line("exit", runs, exit));
    let number = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
    let share = |run: &RunRecord| {
        let shares: Vec<_> = run.gpus.values().filter_map(|gpu| gpu.utilization_mean).collect();
        (!shares.is_empty()).then(|| 100.0 * shares.iter().sum::<f64>() / shares.len() as f64)
    };
    let of_bytes = |value: f64, _: &RunRecord| human_bytes(value);
    let ram = |value: f64, run: &RunRecord| peak_text(value, was_killed(run));
    let vram = |value: f64, run: &RunRecord| peak_text(value, has_failed(run));
    lines.extend(measured("RAM peak", runs, |run| number(run.unreclaimable_peak_bytes), ram));
    lines.extend(measured("RAM mean", runs, |run| number(run.unreclaimable_mean_bytes), of_bytes));
    lines.extend(measured("RAM limit", runs, |run| number(run.limit_bytes), of_bytes));
    lines.extend(measured("worker PSS", runs, |run| number(worker_share(run)), of_bytes));
    lines.extend(measured("VRAM peak", runs, |run| number(run.gpu_peak_bytes()), vram));
    lines.extend(measured("tensors peak", runs, |run| number(run.torch_allocated_peak_bytes()), vram));
    lines.extend(measured("GPU busy", runs, share, |share, _| format!("{share:.0} %")));
    lines.extend(measured("CPU cores", runs, |run| run.cpu_mean_cores, |cores, _| format!("{cores:.2}")));
    lines.extend(measured("steps/s", runs, |run| run.steps_per_second, |rate, _| format!("{rate:.2}")));
    lines.extend(measured("samples/s", runs, |run| run.samples_per_second, |rate, _| format!("{rate:.1}")));
    lines.concat()
}

/// Returns the part of a run's id after that of its container.
fn run_time(run: &RunRecord) -> &str {
    run.run.split_once('-').map_or(&*run.run, |(_, time)| time)
}

fn line(what: &str, runs: &[RunRecord], value: impl Fn(&RunRecord) -> String) -> String {
    let cells = runs.iter().fold(format!("{what:<MAX_SETTING_CHARS$}"), |mut line, run| {
        let _ = write!(line, "  {:<19}", value(run));
        line
    });
    format!("{}\n", cells.trim_end())
}

/// Returns the line of a value, if any run has it.
fn measured(
    what: &str,
    runs: &[RunRecord],
    value: impl Fn(&RunRecord) -> Option<f64>,
    render: impl Fn(f64, &RunRecord) -> String,
) -> Option<String> {
    let is_marked = |run: &RunRecord| value(run).is_some_and(|value| render(value, run).starts_with(MORE));
    let first = runs.first().filter(|run| !is_marked(run)).and_then(&value).filter(|first| *first > 0.0);
    runs.iter().any(|run| value(run).is_some()).then(|| {
        line(what, runs, |run| {
            let Some(value) = value(run) else { return "-".to_owned() };
            let text = render(value, run);
            match first {
                // of and to what is more than this the change is not known
                Some(first) if (value / first - 1.0).abs() >= 0.005 && !text.starts_with(MORE) => {
                    format!("{text} ({})", change(value / first))
                }
                _ => text,
            }
        })
    })
}

/// Returns a ratio as a change in percent, or as a factor where percents would not fit into a column.
fn change(ratio: f64) -> String {
    match ratio {
        ratio if ratio < 10.0 => format!("{:+.0} %", 100.0 * (ratio - 1.0)),
        ratio if ratio < 1e5 => format!("x{ratio:.0}"),
        ratio => format!("x{ratio:.0e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::runs::tests::run;

    #[test]
    fn comparison_has_what_changed() {
        let text = comparison(&[run("train", "32", 4 << 30), run("train", "64", 6 << 30)], 0.0);
        assert!(text.contains("batch_size      32                   64\n"), "{text}");
        assert!(text.contains("VRAM peak       4.0 GiB              6.0 GiB (+50 %)\n"), "{text}");
        assert!(!text.contains("steps/s"), "no run has them: {text}");
    }
}
