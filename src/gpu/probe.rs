//! A single probe of the driver, for `doctor`.

use std::sync::Arc;
use std::time::Duration;

use super::assembler::{Assembler, RequestStart};
use super::driver_process::{DriverProcess, QueryError};
use super::protocol::{ChannelError, Request, Response};
use super::types::{GpuIdentity, GpuReading, PidTrust};
use crate::clock::Timestamp;
use crate::config::GpuSettings;
use crate::host::HostPaths;

/// The result of a probe.
#[derive(Clone, Debug)]
pub struct NvmlProbe {
    /// The version of the driver.
    pub driver_version: Option<Arc<str>>,
    /// The number of GPUs that the driver reports.
    pub counted: usize,
    /// The number of GPUs that answer.
    pub visible: usize,
    /// The number of MIG instances.
    pub instances: usize,
    /// The number of processes that the driver lists.
    pub named: usize,
    /// Whether their pids are pids of this host.
    pub pids: PidTrust,
    /// The GPUs and MIG instances that answer.
    pub devices: Vec<Arc<GpuIdentity>>,
}

/// Reads all devices once, in an NVML process that is ended afterwards. Takes at most `timeout`.
///
/// # Errors
/// The library cannot be loaded or initialised, or the driver does not respond. The error is a text for people.
pub fn probe(
    settings: &GpuSettings,
    host_paths: &HostPaths,
    cgroup_v1: bool,
    timeout: Duration,
) -> Result<NvmlProbe, String> {
    let deadline = Timestamp::now().plus(timeout);
    let mut process = DriverProcess::start().map_err(|error| error.to_string())?;
    let mut assembler = Assembler::new(host_paths.clone(), cgroup_v1, settings.interval + settings.deadline);
    let result = query(&mut process, settings, host_paths, &mut assembler, deadline);
    let _ = process.kill(); // one that cannot be killed is left to the end of this process
    result.map_err(|error| match error {
        QueryError::OpenFailed(text) | QueryError::DriverFailed(text) => text,
        QueryError::Channel(ChannelError::TimedOut) => {
            format!("the driver does not respond within {timeout:?}")
        }
        QueryError::Channel(error) => format!("the NVML process failed: {error}"),
    })
}

fn query(
    process: &mut DriverProcess,
    settings: &GpuSettings,
    host_paths: &HostPaths,
    assembler: &mut Assembler,
    deadline: Timestamp,
) -> Result<NvmlProbe, QueryError> {
    assembler.begin_session(process.open(settings.library.as_deref(), deadline, None)?);
    let began = RequestStart::now(host_paths);
    process.send(&Request::Read)?;
    match process.receive(deadline, None)? {
        Response::Reading(raw) => {
            let completed = assembler.reading(began, raw);
            let (reading, _) = completed.ok_or(ChannelError::Invalid("a reading that contradicts itself"))?;
            Ok(NvmlProbe::of(&reading))
        }
        Response::Failed { error, .. } => Err(QueryError::DriverFailed(error)),
        _ => Err(ChannelError::Invalid("another response").into()),
    }
}

impl NvmlProbe {
    /// Summarizes one reading.
    pub(super) fn of(reading: &GpuReading) -> Self {
        let instances = reading.devices.iter().filter(|device| device.instance_of.is_some()).count();
        Self {
            driver_version: reading.driver_version.clone(),
            counted: reading.counted,
            visible: reading.devices.len() - instances,
            instances,
            named: reading.devices.iter().flat_map(|device| &device.processes).flatten().count(),
            pids: reading.pids,
            devices: reading.devices.iter().map(|device| Arc::clone(&device.identity)).collect(),
        }
    }
}
