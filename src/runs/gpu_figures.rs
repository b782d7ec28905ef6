//! The GPU memory of a run.

use std::sync::Arc;

use super::RunFigures;
use super::usage::ContainerUsage;
use crate::clock::Timestamp;

impl RunFigures {
    /// Records GPU memory. What was recorded before the end of a search for a batch size is not that of the settings, and is dropped
    /// with its errors. The GPU memory of this cycle is dropped too: the driver may have been read before that end.
    pub(super) fn record_gpus(&mut self, last_cycle: Option<Timestamp>, usage: &ContainerUsage) {
        let run = &usage.run;
        let torch_ooms = run.torch_ooms.map(|count| count as u64);
        if run.peaks_forgotten.is_some_and(|at| last_cycle.is_none_or(|last| at >= last)) {
            self.gpus.clear();
            self.forgotten_torch_ooms = torch_ooms.unwrap_or(0);
            (self.torch_ooms, self.cuda_ooms, self.cuda_ooms_in_log) = (None, 0, 0);
            for (uuid, bytes) in &usage.gpu_peaks {
                self.gpus.entry(Arc::clone(uuid)).or_default().forgotten_peak_bytes = Some(*bytes);
            }
            return;
        }
        let of_run = torch_ooms.map(|count| count.saturating_sub(self.forgotten_torch_ooms));
        self.torch_ooms = self.torch_ooms.max(of_run);
        self.gpus.values_mut().for_each(|gpu| gpu.last_used = None);
        for (uuid, gpu) in &run.gpus {
            self.gpus.entry(Arc::clone(uuid)).or_default().record(gpu);
        }
        for (uuid, bytes) in &usage.gpu_peaks {
            let gpu = self.gpus.entry(Arc::clone(uuid)).or_default();
            // this peak is that of the whole run
            if gpu.forgotten_peak_bytes.is_none_or(|forgotten| *bytes > forgotten) {
                gpu.peak_bytes = gpu.peak_bytes.max(Some(*bytes));
            }
        }
    }
}
