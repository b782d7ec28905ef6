//! What the checklist before a run has from the host as it is now: who holds its GPUs, also outside of containers, and what is free. Pure.

use std::sync::Arc;

use super::lines::{Advice, AdviceLine};
use super::measurement::human;
use crate::runs::RunRecord;

/// Processes outside containers that hold less of a GPU, in bytes, are left out: a desktop, a monitor.
const MIN_HELD: f64 = 64.0 * 1_048_576.0;

/// A GPU as it is now, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuNow {
    /// Index and model.
    pub name: String,
    /// UUID.
    pub uuid: String,
    /// All of its memory.
    pub total_bytes: Option<f64>,
    /// Used memory.
    pub used_bytes: Option<f64>,
    /// Of processes outside containers.
    pub host_processes_bytes: Option<f64>,
    /// Containers and what they hold.
    pub holders: Vec<(String, f64)>,
}

/// The host as it is now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostNow {
    /// Memory that is available, and all of it.
    pub memory_bytes: Option<(f64, f64)>,
    /// Its GPUs.
    pub gpus: Vec<GpuNow>,
}

/// Adds to a checklist what processes outside containers hold of the GPUs of the run that it is after.
pub fn add_host_processes(advice: &mut Advice, runs: &[RunRecord], host: &HostNow) {
    let newest = runs.iter().find(|run| run.run == advice.run);
    let is_used = |gpu: &&GpuNow| newest.is_some_and(|run| run.gpus.contains_key(&*gpu.uuid));
    let lines: Vec<_> = host.gpus.iter().filter(is_used).filter_map(host_processes_line).collect();
    advice.lines.extend(lines);
}

/// Returns the checklist of a program of which no run has ended: what is free, and what to set so that its first run can be measured.
/// `why` says that nothing is recorded.
pub fn before_first_run(name: &str, why: String, host: &HostNow) -> Advice {
    let line = |topic, text| AdviceLine { topic, is_ok: true, text, runs: vec![] };
    let mut lines = vec![line("run", why)];
    if let Some((available, total)) = host.memory_bytes {
        let text = format!("{} of the host's {} are available", human(available), human(total));
        lines.push(line("ram", text));
    }
    let settings = [
        (
            "batch",
            "set BATCH_SIZE and ACCUM, labels memledger.run.batch_size, or settings of memledger_client.start: advice compares runs by them",
        ),
        ("workers", "set NUM_WORKERS: begin with 1 or 2 for each rank, each takes RAM"),
        (
            "allocator",
            "PYTORCH_ALLOC_CONF=expandable_segments:True (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF) avoids fragmentation; set it before CUDA is initialised",
        ),
    ];
    lines.extend(settings.map(|(topic, text)| line(topic, text.to_owned())));
    for gpu in &host.gpus {
        let free = gpu.total_bytes.zip(gpu.used_bytes).map(|(total, used)| {
            format!("GPU {}: {} of {} are free", gpu.name, human((total - used).max(0.0)), human(total))
        });
        lines.extend(free.map(|text| line("gpu", text)));
        let held = gpu.holders.iter().filter(|(_, bytes)| *bytes >= MIN_HELD);
        let held: Vec<_> = held.map(|(holder, bytes)| format!("{holder} with {}", human(*bytes))).collect();
        if !held.is_empty() {
            lines.push(AdviceLine {
                topic: "gpu",
                is_ok: false,
                text: format!(
                    "GPU {} is held by {}: end that first, or take another GPU",
                    gpu.name,
                    held.join("; ")
                ),
                runs: vec![],
            });
        }
        lines.extend(host_processes_line(gpu));
    }
    Advice {
        group: name.into(),
        run: Arc::default(),
        batch_size: None,
        maximum_batch_size: None,
        recommended_batch_size: None,
        safe_batch_size: None,
        ram_budget: None,
        lines,
    }
}

fn host_processes_line(gpu: &GpuNow) -> Option<AdviceLine> {
    let held = gpu.host_processes_bytes.filter(|bytes| *bytes >= MIN_HELD)?;
    let of = gpu.total_bytes.map_or_else(String::new, |total| format!(" of {}", human(total)));
    Some(AdviceLine {
        topic: "gpu",
        is_ok: false,
        text: format!(
            "GPU {}: processes outside containers hold {}{of}: end them first (`nvidia-smi` lists them), or take another GPU",
            gpu.name,
            human(held)
        ),
        runs: vec![],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::GpuPeak;

    const GIB: f64 = 1_073_741_824.0;

    fn host(held: Option<f64>) -> HostNow {
        let gpu = GpuNow {
            name: "0".to_owned(),
            uuid: "GPU-a".to_owned(),
            total_bytes: Some(12.0 * GIB),
            used_bytes: Some(6.0 * GIB),
            host_processes_bytes: held,
            ..GpuNow::default()
        };
        let other = GpuNow { uuid: "GPU-b".to_owned(), name: "1".to_owned(), ..gpu.clone() };
        HostNow { memory_bytes: Some((8.0 * GIB, 32.0 * GIB)), gpus: vec![gpu, other] }
    }

    #[test]
    fn processes_outside_containers_hold_a_gpu_of_the_run() {
        let gpus = [("GPU-a".into(), GpuPeak::default())].into();
        let run = RunRecord { run: "a-1".into(), gpus, ..RunRecord::default() };
        for (held, wanted) in [
            (
                Some(5.1 * GIB),
                vec![
                    "GPU 0: processes outside containers hold 5.1 GiB of 12.0 GiB: end them first (`nvidia-smi` lists them), or take another GPU",
                ],
            ),
            (Some(1e6), vec![]),
            (None, vec![]),
        ] {
            let empty = Advice {
                run: "a-1".into(),
                lines: vec![],
                ..before_first_run("a", String::new(), &host(None))
            };
            let mut advice = empty;
            add_host_processes(&mut advice, std::slice::from_ref(&run), &host(held));
            assert_eq!(advice.lines.iter().map(|line| &*line.text).collect::<Vec<_>>(), wanted, "{held:?}");
            assert!(advice.lines.iter().all(|line| !line.is_ok));
        }
    }

    #[test]
    fn program_that_never_ran_has_a_checklist() {
        let advice = before_first_run("new", "no run is recorded".to_owned(), &host(Some(5.0 * GIB)));
        let topics: Vec<_> = advice.lines.iter().map(|line| (line.topic, line.is_ok)).collect();
        let wanted = [("run", true), ("ram", true), ("batch", true), ("workers", true), ("allocator", true)];
        assert_eq!(topics[..5], wanted);
        assert_eq!(topics[5..], [("gpu", true), ("gpu", false), ("gpu", true), ("gpu", false)]);
        assert_eq!(advice.lines[1].text, "8.0 GiB of the host's 32.0 GiB are available");
        let free = before_first_run("new", String::new(), &HostNow::default());
        assert!(free.lines.iter().all(|line| line.is_ok));
    }
}
