//! The GPU memory of a run.

use std::sync::Arc;

use super::RunFigures;
use super::usage::ContainerUsage;
use crate::clock::Timestamp;

impl RunFigures {
    /// Records GPU memory, without that of a search for a batch size since the last cycle: it is not that of the settings.
    pub(super) fn record_gpus(&mut self, last_cycle: Option<Timestamp>, usage: &ContainerUsage) {
        let run = &usage.run;
        let is_search = run.searched.is_some_and(|searched| last_cycle.is_none_or(|last| searched >= last));
        self.gpus.values_mut().for_each(|gpu| gpu.last_used = None);
        for (uuid, gpu) in run.gpus.iter().filter(|_| !is_search) {
            self.gpus.entry(Arc::clone(uuid)).or_default().record(gpu);
        }
        for (uuid, bytes) in &usage.gpu_peaks {
            let gpu = self.gpus.entry(Arc::clone(uuid)).or_default();
            // this peak is that of the whole run
            if is_search {
                gpu.search_peak_bytes = Some(*bytes);
            } else if gpu.search_peak_bytes.is_none_or(|of_search| *bytes > of_search) {
                gpu.peak_bytes = gpu.peak_bytes.max(Some(*bytes));
            }
        }
    }
}
