//! MIG: parts of a GPU that are devices of their own.
//!
//! The parts change while the driver runs, and a handle may then stand for another one: each reading lists them anew and
//! knows them by their UUID.

use std::sync::Arc;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::library::{error_may_pass, field};
use super::processes::{EVERY, Lists};
use super::raw;
use crate::collect::gpu::reading::{Identity, Instance};
use crate::series::bounded;

/// `NVML_DEVICE_MIG_ENABLE`.
const ENABLED: u32 = 1;

/// The instances of one GPU.
#[derive(Debug, Default)]
pub struct Mig<'nvml> {
    /// This model has no MIG.
    is_never_on: bool,
    /// As of the last time that the GPU told it.
    is_on: bool,
    /// Most instances that there can be; `None`: not told yet.
    most: Option<u32>,
    /// As of the newest reading.
    pub instances: Vec<Part<'nvml>>,
}

/// One MIG instance.
#[derive(Debug)]
pub struct Part<'nvml> {
    /// Its handle, good until the next reading.
    pub handle: NvmlDevice<'nvml>,
    /// Who it is.
    pub identity: Arc<Identity>,
    /// Lists of processes that had an entry.
    pub lists: Lists,
    /// Its memory, from the last reading that told it.
    pub total: Option<u64>,
}

impl<'nvml> Mig<'nvml> {
    /// Lists the instances anew. Returns whether the GPU is in MIG mode. Where it does not tell now, all is as it was.
    ///
    /// # Errors
    /// As [`field`].
    pub fn refresh(
        &mut self,
        gpu: &NvmlDevice<'nvml>,
        identity: &Identity,
        faults: &mut Vec<&'static str>,
    ) -> Result<bool, NvmlError> {
        if self.is_never_on {
            return Ok(false);
        }
        let mode = gpu.mig_mode();
        self.is_never_on = mode.as_ref().is_err_and(|error| !error_may_pass(error));
        if let Some(mode) = field(mode, faults)? {
            self.is_on = mode.current == ENABLED;
        }
        if !self.is_on || self.is_never_on {
            self.instances.clear();
            return Ok(false);
        }
        if self.most.is_none() {
            self.most = field(gpu.mig_device_count(), faults)?;
        }
        let Some(most) = self.most else { return Ok(true) };
        let before = std::mem::take(&mut self.instances);
        for place in 0..most {
            match gpu.mig_device_by_index(place) {
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => {} // nothing at this place
                found => {
                    if let Some(handle) = field(found, faults)?
                        && let Some(part) = part(handle, identity, &before, faults)?
                    {
                        self.instances.push(part);
                    }
                }
            }
        }
        Ok(true)
    }
}

/// An instance, by its UUID known from the reading before, else asked who it is.
fn part<'nvml>(
    handle: NvmlDevice<'nvml>,
    gpu: &Identity,
    before: &[Part<'nvml>],
    faults: &mut Vec<&'static str>,
) -> Result<Option<Part<'nvml>>, NvmlError> {
    let Some(uuid) = field(handle.uuid(), faults)? else { return Ok(None) };
    let uuid = bounded(&uuid);
    if let Some(known) = before.iter().find(|part| *part.identity.key() == uuid) {
        return Ok(Some(Part {
            handle,
            identity: Arc::clone(&known.identity),
            lists: known.lists,
            total: known.total,
        }));
    }
    let Some((gpu_instance, compute_instance)) = field(raw::instance_ids(&handle), faults)? else {
        return Ok(None);
    };
    let model = field(handle.name(), faults)?.map_or_else(|| Arc::clone(&gpu.model), |name| bounded(&name));
    let instance = Instance {
        gpu_instance_id: gpu_instance.to_string().into(),
        compute_instance_id: compute_instance.to_string().into(),
        uuid,
    };
    // it has some of the GPU's cores, and NVML does not tell how many
    let identity = Identity { model, instance: Some(instance), cuda_cores: "".into(), ..gpu.clone() };
    Ok(Some(Part { handle, identity: Arc::new(identity), lists: EVERY, total: None }))
}
