//! GPUs of AMD: the memory of each device and of the processes that compute on it, utilization, power and temperatures.
//!
//! The drivers report all of it in sysfs: amdgpu in the files of each device ([`devices`]) and its hardware monitor ([`hwmon`]),
//! the compute driver (KFD) for each process ([`kfd`]). No library and no permission is needed. The metric families are those
//! of NVML. Processes that only draw are in no file of these: their memory is unattributed.
//!
//! Not here: attribution of processes to containers, and sums (`attribute`).
pub mod devices;
mod hwmon;
mod kfd;
pub mod reader;
mod sysfs;

use std::sync::Arc;

use crate::host::{HostPaths, ReadError};

/// The collector's name.
pub const NAME: &str = "amdgpu";

/// Returns the name of each GPU, such as `card0`, for `doctor`.
///
/// # Errors
/// The devices cannot be listed.
pub fn probe(host_paths: &HostPaths) -> Result<Vec<Arc<str>>, ReadError> {
    let cards = devices::list(host_paths, &mut Vec::new())?;
    Ok(cards.iter().map(|card| Arc::clone(&card.identity.index)).collect())
}
