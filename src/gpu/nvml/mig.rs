//! MIG instances: parts of a GPU that are devices of their own.
//!
//! Instances change while the driver runs, and a handle may then refer to another one. So each reading lists them again and
//! identifies them by their UUID.

use std::sync::Arc;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::ffi;
use super::library::{field, is_transient};
use super::processes::{EVERY, Lists};
use crate::clock::{Cadence, Timestamp};
use crate::gpu::types::{GpuIdentity, MigInstance};
use crate::text::bounded;

/// `NVML_DEVICE_MIG_ENABLE`.
const ENABLED: u32 = 1;

/// The mode, which takes the driver 0.08 ms, is read in one of this many readings, and at least once in as many seconds: it changes only while
/// nothing uses the GPU.
const MODE_EVERY: u32 = 5;

/// The instances of one GPU.
#[derive(Debug, Default)]
pub struct Mig<'nvml> {
    mode: Cadence<MODE_EVERY>,
    /// True if the GPU does not support MIG.
    is_unsupported: bool,
    /// The MIG mode that was read last.
    is_on: bool,
    /// Maximum number of instances; `None` if it was not read yet.
    max_instances: Option<u32>,
    /// The instances of the newest reading.
    pub instances: Vec<MigDevice<'nvml>>,
}

/// One MIG instance.
#[derive(Debug)]
pub struct MigDevice<'nvml> {
    /// Its handle, valid until the next reading.
    pub handle: NvmlDevice<'nvml>,
    /// Its identity.
    pub identity: Arc<GpuIdentity>,
    /// The lists of processes that had an entry.
    pub lists: Lists,
    /// Its total memory, from the last reading that had it.
    pub total: Option<u64>,
}

impl<'nvml> Mig<'nvml> {
    /// Lists the instances again. Returns whether the GPU is in MIG mode, by the newest mode that could be read.
    ///
    /// # Errors
    /// As [`field`].
    pub fn refresh(
        &mut self,
        gpu: &NvmlDevice<'nvml>,
        identity: &GpuIdentity,
        now: Timestamp,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<bool, NvmlError> {
        if self.is_unsupported {
            return Ok(false);
        }
        if self.mode.is_due(now) {
            let mode = gpu.mig_mode();
            self.is_unsupported = mode.as_ref().is_err_and(|error| !is_transient(error));
            if let Some(mode) = field(mode, read_errors)? {
                self.is_on = mode.current == ENABLED;
            }
        }
        if !self.is_on || self.is_unsupported {
            self.instances.clear();
            return Ok(false);
        }
        if self.max_instances.is_none() {
            self.max_instances = field(gpu.mig_device_count(), read_errors)?;
        }
        let Some(max_instances) = self.max_instances else { return Ok(true) };
        let previous = std::mem::take(&mut self.instances);
        for index in 0..max_instances {
            match gpu.mig_device_by_index(index) {
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => {} // no instance with this index
                found => {
                    if let Some(handle) = field(found, read_errors)?
                        && let Some(instance) = open_instance(handle, identity, &previous, read_errors)?
                    {
                        self.instances.push(instance);
                    }
                }
            }
        }
        Ok(true)
    }
}

/// Returns an instance with the identity of the previous reading, found by UUID, or else reads its identity.
fn open_instance<'nvml>(
    handle: NvmlDevice<'nvml>,
    gpu: &GpuIdentity,
    previous: &[MigDevice<'nvml>],
    read_errors: &mut Vec<&'static str>,
) -> Result<Option<MigDevice<'nvml>>, NvmlError> {
    let Some(uuid) = field(handle.uuid(), read_errors)? else { return Ok(None) };
    let uuid = bounded(&uuid);
    if let Some(known) = previous.iter().find(|instance| *instance.identity.key() == uuid) {
        return Ok(Some(MigDevice {
            handle,
            identity: Arc::clone(&known.identity),
            lists: known.lists,
            total: known.total,
        }));
    }
    let Some((gpu_instance, compute_instance)) = field(ffi::instance_ids(&handle), read_errors)? else {
        return Ok(None);
    };
    let model =
        field(handle.name(), read_errors)?.map_or_else(|| Arc::clone(&gpu.model), |name| bounded(&name));
    let instance = MigInstance {
        gpu_instance_id: gpu_instance.to_string().into(),
        compute_instance_id: compute_instance.to_string().into(),
        uuid,
    };
    // it has some of the GPU's cores; NVML does not report how many
    let identity = GpuIdentity { model, instance: Some(instance), cuda_cores: "".into(), ..gpu.clone() };
    Ok(Some(MigDevice { handle, identity: Arc::new(identity), lists: EVERY, total: None }))
}
