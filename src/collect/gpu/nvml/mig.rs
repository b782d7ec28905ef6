//! MIG: parts of a GPU that are devices of their own.
//!
//! The parts change while the driver runs, and a handle may then stand for another one: each reading lists them anew and
//! knows them by their UUID.

use std::sync::Arc;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::library::field;
use super::processes::{EVERY, Lists};
use super::raw;
use crate::collect::gpu::reading::{Identity, Instance};
use crate::series::bounded;

/// `NVML_DEVICE_MIG_ENABLE`.
const ENABLED: u32 = 1;

/// The instances of one GPU.
#[derive(Debug, Default)]
pub struct Mig<'nvml> {
    /// `None`: not asked yet.
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
    /// Lists the instances anew. Returns whether the GPU is in MIG mode.
    ///
    /// # Errors
    /// As [`field`].
    pub fn refresh(
        &mut self,
        gpu: &NvmlDevice<'nvml>,
        identity: &Identity,
        faults: &mut Vec<&'static str>,
    ) -> Result<bool, NvmlError> {
        if self.most == Some(0) {
            return Ok(false); // this model has no MIG
        }
        let Some(mode) = field(gpu.mig_mode(), faults)? else {
            self.most = Some(0);
            return Ok(false);
        };
        if mode.current != ENABLED {
            self.instances.clear();
            return Ok(false);
        }
        let most = match self.most {
            Some(most) => most,
            None => *self.most.insert(field(gpu.mig_device_count(), faults)?.unwrap_or(0)),
        };
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
