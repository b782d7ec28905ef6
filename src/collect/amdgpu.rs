//! GPUs of AMD: starts the thread that reads them once there is one, and exports its newest reading.
//!
//! On a host without such a GPU the only cost is to list `/sys/class/drm` every ten seconds: there is no thread.

use std::sync::Arc;
use std::time::Duration;

use super::gpu_readings::ReadingExport;
use super::{CollectOutcome, Collector, Context, Output};
use crate::clock::Timestamp;
use crate::config::GpuSettings;
use crate::gpu::SharedOutput;
use crate::gpu::amdgpu::{NAME, devices, reader};

/// How often to look for a GPU on a host that had none.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(10);

/// The collector of GPUs of AMD.
#[derive(Debug)]
pub struct AmdGpu {
    settings: GpuSettings,
    shared: Arc<SharedOutput>,
    export: ReadingExport,
    is_started: bool,
    /// There is a GPU, but the thread could not be started.
    has_failed_to_start: bool,
    last_discovery: Option<Timestamp>,
}

impl AmdGpu {
    /// Returns a collector. Its thread starts once there is a GPU, and publishes its readings in `shared`.
    pub fn new(settings: &GpuSettings, shared: Arc<SharedOutput>) -> Self {
        let advice = "run `memledger doctor` for what to change";
        let export = ReadingExport::new(settings, "amdgpu_attribution", advice);
        Self {
            settings: settings.clone(),
            shared,
            export,
            is_started: false,
            has_failed_to_start: false,
            last_discovery: None,
        }
    }

    /// Starts the thread if there is a GPU.
    fn start_if_gpu_present(&mut self, context: &Context<'_>, output: &mut Output<'_>) {
        if self.last_discovery.is_some_and(|last| context.now.since(last) < DISCOVERY_INTERVAL) {
            return;
        }
        self.last_discovery = Some(context.now);
        let mut read_errors = Vec::new();
        let cards = output.read_errors.value(devices::list(context.host_paths, &mut read_errors));
        read_errors.into_iter().for_each(|reason| output.read_errors.count(reason));
        if cards.is_none_or(|cards| cards.is_empty()) {
            return;
        }
        let v1 = context.hierarchy.is_some_and(|h| h.version == crate::discover::Version::V1);
        let (interval, host_paths) = (self.settings.interval, context.host_paths.clone());
        let shared = Arc::clone(&self.shared);
        shared.lock().started = context.now;
        let thread = std::thread::Builder::new().name("amdgpu".into()).stack_size(256 * 1024);
        match thread.spawn(move || reader::run(interval, &host_paths, v1, &shared)) {
            Ok(_) => self.is_started = true,
            Err(error) => {
                tracing::warn!(%error, "starting the thread that reads AMD GPUs failed; retrying");
                self.has_failed_to_start = true;
            }
        }
    }
}

impl Collector for AmdGpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        if !self.is_started {
            self.start_if_gpu_present(context, output);
        }
        let taken = self.shared.lock().take();
        let is_starting = taken.is_starting(context.now, self.settings.deadline);
        match self.export.export(taken, context, output) {
            true => CollectOutcome::Ok,
            false if self.is_started && !is_starting => CollectOutcome::Failed,
            false if !self.is_started && self.has_failed_to_start => CollectOutcome::Failed,
            false => CollectOutcome::NotPresent,
        }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.export.read_duration)
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Inventory;
    use crate::host::HostPaths;

    fn collect(amd: &mut AmdGpu, now: Timestamp) -> CollectOutcome {
        let folder = tempfile::tempdir().unwrap();
        let host_paths = HostPaths { sys: folder.path().to_path_buf(), ..HostPaths::default() };
        let inventory = Arc::new(Inventory::default());
        let context = Context { now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
        let (mut series, mut cycle_data, mut read_errors) = Default::default();
        let mut output =
            Output { series: &mut series, cycle_data: &mut cycle_data, read_errors: &mut read_errors };
        amd.collect(&context, &mut output)
    }

    #[test]
    fn only_a_gpu_that_cannot_be_read_is_a_failure() {
        let (now, shared) = (Timestamp::now(), Arc::new(SharedOutput::default()));
        let settings = GpuSettings {
            library: None,
            interval: Duration::from_secs(1),
            sample_interval: Duration::ZERO,
            deadline: Duration::from_secs(5),
            expected: None,
            release_for: Duration::from_secs(1),
        };
        let mut amd = AmdGpu::new(&settings, Arc::clone(&shared));
        assert_eq!(collect(&mut amd, now), CollectOutcome::NotPresent, "no GPU");
        amd.is_started = true; // as by a GPU
        shared.lock().started = now;
        assert_eq!(collect(&mut amd, now), CollectOutcome::NotPresent, "no reading yet");
        assert_eq!(collect(&mut amd, now.plus(Duration::from_secs(6))), CollectOutcome::Failed, "it hangs");
        shared.lock().discard_readings(true);
        assert_eq!(collect(&mut amd, now), CollectOutcome::Failed, "the reading failed");
        (amd.is_started, amd.has_failed_to_start) = (false, true);
        assert_eq!(collect(&mut amd, now), CollectOutcome::Failed, "there is no thread");
    }
}
