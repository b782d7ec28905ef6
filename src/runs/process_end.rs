//! What a process had reported when it ended: cycles miss the last second of a program, and it counts all the same. Pure.

use std::sync::Arc;

use super::RunFigures;
use super::operation_log::OperationRecord;
use super::sample::RunSample;

/// Maximum number of ends of processes that are kept for a run whose exit was noticed before.
const MAX_ENDS: usize = 256;

/// All that a process had reported when its connection ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessEnd {
    /// Unix time of that.
    pub at: f64,
    /// PyTorch's peaks by GPU.
    pub gpus: Vec<TorchPeaks>,
    /// Unix time at which a program of its container last ended a search for a batch size.
    pub peaks_forgotten: Option<f64>,
    /// Steps, errors, operations and settings.
    pub sample: RunSample,
}

/// PyTorch's peaks on one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TorchPeaks {
    /// UUID without prefix, in lower case; `None` if the process does not know it.
    pub uuid: Option<Arc<str>>,
    /// Allocated bytes.
    pub allocated_bytes: Option<u64>,
    /// Reserved bytes.
    pub reserved_bytes: Option<u64>,
}

impl RunFigures {
    /// Adds records of memory at points of the program.
    pub fn log_operations(&mut self, records: impl Iterator<Item = OperationRecord>) {
        records.for_each(|record| self.log.add(record));
    }

    /// Records what a process had reported when it ended.
    pub fn record_process_end(&mut self, end: ProcessEnd) {
        self.apply_process_end(&end);
        self.ends.push(end);
        self.ends.drain(..self.ends.len().saturating_sub(MAX_ENDS));
    }

    /// Takes what processes reported in other figures of the same run only: its exit was noticed before. Also of a process that ended
    /// before the last cycle began: that has no peaks of it any more.
    pub(super) fn take_reports_of(&mut self, later: &Self) {
        later.ends.iter().for_each(|end| self.apply_process_end(end));
        self.log.extend(&later.log);
    }

    fn apply_process_end(&mut self, end: &ProcessEnd) {
        if end.peaks_forgotten > self.last_sampled {
            self.gpus.values_mut().for_each(|gpu| {
                (gpu.torch_allocated_peak_bytes, gpu.torch_reserved_peak_bytes) = (None, None);
            });
        }
        for peaks in &end.gpus {
            let only = self.gpus.len() == 1;
            // torch writes no prefix
            let is_it = |key: &str| match &peaks.uuid {
                Some(uuid) => key.to_ascii_lowercase().ends_with(&**uuid),
                None => only,
            };
            if let Some((_, gpu)) = self.gpus.iter_mut().find(|(key, _)| is_it(key)) {
                gpu.torch_allocated_peak_bytes = gpu.torch_allocated_peak_bytes.max(peaks.allocated_bytes);
                gpu.torch_reserved_peak_bytes = gpu.torch_reserved_peak_bytes.max(peaks.reserved_bytes);
            }
        }
        self.steps.record_progress(end.at, end.sample.steps, 0);
        self.samples_of_training.record_progress(end.at, end.sample.samples, end.sample.ranks_with_samples);
        let ooms =
            end.sample.torch_ooms.map(|count| (count as u64).saturating_sub(self.forgotten_torch_ooms));
        self.torch_ooms = self.torch_ooms.max(ooms);
        self.record_reported_settings(&end.sample);
        for ((component, operation), values) in &end.sample.operations {
            self.record_operation(end.at, component, operation, values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::GpuFigures;
    use crate::runs::sample::OperationSample;

    fn end(uuid: Option<&str>, allocated: u64) -> ProcessEnd {
        let key = ("system".into(), "experiment_end".into());
        let values = OperationSample { rss_bytes: Some(7.0), ..OperationSample::default() };
        let peaks = TorchPeaks {
            uuid: uuid.map(Into::into),
            allocated_bytes: Some(allocated),
            reserved_bytes: Some(allocated + 1),
        };
        ProcessEnd {
            at: 9.0,
            gpus: vec![peaks],
            sample: RunSample { operations: [(key, values)].into(), ..RunSample::default() },
            ..ProcessEnd::default()
        }
    }

    fn sampled() -> RunFigures {
        let gpu = GpuFigures { torch_allocated_peak_bytes: Some(5), ..GpuFigures::default() };
        RunFigures {
            gpus: [("GPU-AB-1".into(), gpu)].into(),
            last_sampled: Some(8.0),
            ..RunFigures::default()
        }
    }

    #[test]
    fn last_report_of_a_process_raises_the_peak_of_its_gpu() {
        for (uuid, peak) in [(Some("ab-1"), 6), (None, 6), (Some("cd"), 5)] {
            let mut figures = sampled();
            figures.record_process_end(end(uuid, 6));
            assert_eq!(figures.gpus["GPU-AB-1"].torch_allocated_peak_bytes, Some(peak), "{uuid:?}");
            assert_eq!(figures.operations[0].rss_bytes, Some(7));
        }
        let mut figures = sampled();
        figures.record_process_end(end(Some("ab-1"), 4));
        assert_eq!(
            figures.gpus["GPU-AB-1"].torch_allocated_peak_bytes,
            Some(5),
            "a lower one changes nothing"
        );
    }

    #[test]
    fn report_after_the_exit_was_noticed_counts_once() {
        for at in [7.9, 9.0] {
            let mut later = RunFigures::default();
            later.record_process_end(ProcessEnd { at, ..end(Some("ab-1"), 6) });
            let figures = sampled().with_reports_of(Some(&later));
            assert_eq!(
                figures.gpus["GPU-AB-1"].torch_allocated_peak_bytes,
                Some(6),
                "the last cycle was at 8"
            );
            assert_eq!(figures.operations.len(), 1);
            assert_eq!(figures.with_reports_of(Some(&later)).operations.len(), 1);
        }
    }

    #[test]
    fn peaks_of_a_search_in_the_last_second_do_not_count() {
        let mut figures = sampled();
        figures.record_process_end(ProcessEnd { peaks_forgotten: Some(8.5), ..end(Some("ab-1"), 3) });
        assert_eq!(figures.gpus["GPU-AB-1"].torch_allocated_peak_bytes, Some(3));
    }
}
