//! GPUs of DRM drivers (amdgpu, i915, xe, nouveau and others): the memory of each device and process, and utilization.
//!
//! The kernel reports both in `/proc/PID/fdinfo`, in a format that all these drivers share; amdgpu also reports device
//! memory in sysfs. No vendor library is needed. The metric families are those of the NVML source (`collect::gpu`); a GPU
//! with NVIDIA's driver is read by NVML only.
//!
//! * [`devices`] lists the GPUs
//! * [`fd_scanner`] finds the processes that have a GPU open, and reads their GPU descriptors
//! * [`kfd`] reads the memory of processes that compute on GPUs of AMD, [`hwmon`] power, temperature and clocks of these GPUs
//! * [`client_memory`] computes the memory of each process, with nothing counted twice
//! * [`engines`] computes the utilization by each process
//! * [`reader`] makes a reading of it, on a thread
//!
//! On a host without such a GPU the only cost is to list `/sys/class/drm` every ten seconds: no process is read, and there
//! is no thread.
//!
//! Not here: attribution of processes to containers, and sums (`attribute`).
mod client_memory;
mod devices;
mod drm_process;
mod engines;
mod fd_scanner;
mod hwmon;
mod kfd;
mod reader;
mod sysfs;

pub use reader::DrmReader;

use std::sync::Arc;
use std::time::Duration;

use super::gpu::{ReadingExport, SharedOutput};
use super::{CollectOutcome, Collector, Context, Output};
use crate::clock::Timestamp;
use crate::config::GpuSettings;
use crate::host::{HostPaths, ReadError};

/// The collector's name.
pub const NAME: &str = "drm";
/// How often to look for a GPU on a host that had none.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(10);

/// The result of a probe of this host, for `doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrmProbe {
    /// Name and driver of each GPU.
    pub gpus: Vec<String>,
    /// Processes whose descriptors could be read within the first reading.
    pub readable: usize,
    /// Processes whose descriptors could not be read for lack of permission.
    pub denied: usize,
}

/// Lists the GPUs of DRM drivers, and if there are any, scans the processes once.
///
/// # Errors
/// Devices or processes cannot be listed.
pub fn probe(host_paths: &HostPaths) -> Result<DrmProbe, ReadError> {
    let cards = devices::list(host_paths, &mut Vec::new())?;
    if cards.is_empty() {
        return Ok(DrmProbe::default());
    }
    let gpus = cards.iter().map(|card| format!("{} ({})", card.identity.index, card.driver)).collect();
    let mut scanner = fd_scanner::FdScanner::new(host_paths.clone(), false);
    scanner.scan(&mut Vec::new())?;
    let (readable, denied) = scanner.access();
    Ok(DrmProbe { gpus, readable, denied })
}

/// The collector of GPUs with DRM drivers.
#[derive(Debug)]
pub struct Drm {
    settings: GpuSettings,
    shared: Arc<SharedOutput>,
    export: ReadingExport,
    is_started: bool,
    /// There is a GPU, but the thread could not be started.
    has_failed_to_start: bool,
    last_discovery: Option<Timestamp>,
}

impl Drm {
    /// Returns a collector. Its thread starts once there is a GPU, and publishes its readings in `shared`.
    pub fn new(settings: &GpuSettings, shared: Arc<SharedOutput>) -> Self {
        let advice = "run `memledger doctor` for what to change";
        let export = ReadingExport::new(settings, "drm_attribution", advice);
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
        let (settings, host_paths) = (self.settings.clone(), context.host_paths.clone());
        let shared = Arc::clone(&self.shared);
        shared.lock().started = context.now;
        let thread = std::thread::Builder::new().name("drm".into()).stack_size(256 * 1024);
        match thread.spawn(move || reader::run(&settings, &host_paths, v1, &shared)) {
            Ok(_) => self.is_started = true,
            Err(error) => {
                tracing::warn!(%error, "starting the DRM GPU thread failed; retrying");
                self.has_failed_to_start = true;
            }
        }
    }
}

impl Collector for Drm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        if !self.is_started {
            self.start_if_gpu_present(context, output);
        }
        let taken = self.shared.lock().take();
        // the first reading may take a while with many processes
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

    fn collect(drm: &mut Drm, now: Timestamp) -> CollectOutcome {
        let folder = tempfile::tempdir().unwrap();
        let host_paths = HostPaths { sys: folder.path().to_path_buf(), ..HostPaths::default() };
        let inventory = Arc::new(Inventory { containers: vec![], runtimes: vec![] });
        let context = Context { now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
        let (mut series, mut cycle_data, mut read_errors) = Default::default();
        let mut output =
            Output { series: &mut series, cycle_data: &mut cycle_data, read_errors: &mut read_errors };
        drm.collect(&context, &mut output)
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
        let mut drm = Drm::new(&settings, Arc::clone(&shared));
        assert_eq!(collect(&mut drm, now), CollectOutcome::NotPresent, "no GPU");
        drm.is_started = true; // as by a GPU
        shared.lock().started = now;
        assert_eq!(collect(&mut drm, now), CollectOutcome::NotPresent, "no reading yet");
        assert_eq!(collect(&mut drm, now.plus(Duration::from_secs(6))), CollectOutcome::Failed, "it hangs");
        shared.lock().discard_readings(true);
        assert_eq!(collect(&mut drm, now), CollectOutcome::Failed, "the reading failed");
        (drm.is_started, drm.has_failed_to_start) = (false, true);
        assert_eq!(collect(&mut drm, now), CollectOutcome::Failed, "there is no thread");
    }
}
