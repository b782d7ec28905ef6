//! How a cycle exports the readings of a source of GPUs.

use std::sync::Arc;
use std::time::Duration;

use super::{Context, Output};
use crate::catalog::COLLECTOR_SUCCESS;
use crate::config::GpuSettings;
use crate::gpu::{GpuReading, PidTrust, ReaderOutput};

/// The export of one source's readings.
#[derive(Debug)]
pub struct ReadingExport {
    /// Older readings are not exported.
    max_age: Duration,
    /// The label of [`COLLECTOR_SUCCESS`] for whether the pids are trusted.
    attribution: &'static str,
    /// What to do where they are not.
    advice: &'static str,
    /// Whether a reading was exported before.
    pub has_succeeded: bool,
    /// The duration of the reading that was exported last.
    pub read_duration: Duration,
    /// The trust that was logged last.
    reported_trust: Option<PidTrust>,
}

impl ReadingExport {
    /// Returns the export of a source without a reading yet.
    pub fn new(settings: &GpuSettings, attribution: &'static str, advice: &'static str) -> Self {
        Self {
            max_age: settings.interval + settings.deadline,
            attribution,
            advice,
            has_succeeded: false,
            read_duration: Duration::ZERO,
            reported_trust: None,
        }
    }

    /// Exports the output of a thread. Returns false if there is no recent reading.
    pub fn export(&mut self, taken: ReaderOutput, context: &Context<'_>, output: &mut Output<'_>) -> bool {
        for reason in taken.read_errors {
            output.read_errors.count(reason);
        }
        output.cycle_data.gpu_samples.extend(taken.samples);
        let is_recent = |reading: &Arc<GpuReading>| context.now.since(reading.at) <= self.max_age;
        let Some(reading) = taken.latest.filter(is_recent) else { return false };
        self.has_succeeded = true;
        self.read_duration = reading.took;
        self.warn_if_untrusted(reading.pids);
        let is_trusted = f64::from(u8::from(reading.pids == PidTrust::Trusted));
        output.series.global(COLLECTOR_SUCCESS, [self.attribution.into()], is_trusted);
        let first = output.cycle_data.add_gpus(Arc::clone(&reading));
        crate::gpu::write(&reading, first, output.series);
        true
    }

    /// Warns once for each reason for which processes cannot be attributed.
    fn warn_if_untrusted(&mut self, pids: PidTrust) {
        if let (PidTrust::Untrusted(reason), true) = (pids, self.reported_trust != Some(pids)) {
            tracing::warn!(reason, "GPU memory cannot be attributed to containers; {}", self.advice);
        }
        self.reported_trust = Some(pids);
    }
}
