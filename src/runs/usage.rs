//! What one cycle saw of a container.

use std::sync::Arc;

use super::sample::RunSample;
use crate::attribute::Role;
use crate::events::{PssMissing, UsageSample};
use crate::parse::process::WorkerProgram;

/// The memory and processes of one container.
#[derive(Clone, Debug, Default)]
pub struct ContainerUsage {
    /// Memory sample.
    pub sample: Option<UsageSample>,
    /// Processes.
    pub processes: Vec<ProcessUsage>,
    /// Why the proportional share of a process of it is not known, where it is not.
    pub pss_missing: Option<PssMissing>,
    /// They are all: an empty list means that there is none.
    pub has_all_processes: bool,
    /// Highest usage during the run.
    pub peak_usage_bytes: Option<u64>,
    /// Highest sample of unreclaimable memory.
    pub peak_unreclaimable_bytes: Option<u64>,
    /// Highest GPU memory during the run by UUID, from all samples of the driver.
    pub gpu_peaks: Vec<(Arc<str>, u64)>,
    /// Id of the run, as in the metrics.
    pub run_id: Arc<str>,
    /// What else the record of the run needs.
    pub run: RunSample,
}

/// One process of a container.
#[derive(Clone, Debug)]
pub struct ProcessUsage {
    /// Host pid.
    pub pid: u32,
    /// Parent pid.
    pub ppid: u32,
    /// Name, sanitized for display.
    pub comm: Arc<str>,
    /// Role in the training job.
    pub role: Role,
    /// The executable is a Python interpreter.
    pub python: bool,
    /// Resident memory.
    pub memory: crate::collect::process::ResidentMemory,
    /// Proportional share (PSS), if measured.
    pub pss_bytes: Option<u64>,
    /// The known program that it belongs to, with a setting of its own for the number of its workers.
    pub program: Option<WorkerProgram>,
}
