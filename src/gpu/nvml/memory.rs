//! The memory of a device.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::api_versions::{ApiVersions, DeviceMemoryInfo};
use super::library::field;
use crate::gpu::types::DeviceMemory;
use crate::parse::MAX_GPU_MEMORY;

/// Reads the memory of a device. All values are absent if the device does not report them (unified memory), or reports
/// garbage.
///
/// # Errors
/// As [`field`].
pub fn read(
    device: &NvmlDevice<'_>,
    api_versions: &mut ApiVersions,
    read_errors: &mut Vec<&'static str>,
) -> Result<DeviceMemory, NvmlError> {
    let Some(info) = field(api_versions.memory(device), read_errors)? else {
        return Ok(DeviceMemory::default());
    };
    Ok(plausible(info).unwrap_or_else(|| {
        read_errors.push("malformed");
        DeviceMemory::default()
    }))
}

/// Returns the memory if its parts fit into the total; sentinels and garbage do not.
fn plausible(info: DeviceMemoryInfo) -> Option<DeviceMemory> {
    let parts = info.used.checked_add(info.free)?.checked_add(info.reserved.unwrap_or(0))?; // v1: a part of used
    (info.total > 0 && info.total <= MAX_GPU_MEMORY && parts <= info.total).then_some(DeviceMemory {
        total: Some(info.total),
        used: Some(info.used),
        free: Some(info.free),
        reserved: info.reserved,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Numbers that drivers report: small, large, and each kind of sentinel.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            0..1_u64 << 40,
            any::<u64>(),
            prop::sample::select(vec![
                u64::MAX,
                u64::from(u32::MAX),
                9_200_000_000_000_000_000,
                i64::MAX as u64
            ]),
        ]
    }

    proptest! {
        #[test]
        fn parts_fit_into_the_total_or_memory_is_absent(
            total in number(), used in number(), free in number(), reserved in proptest::option::of(number())
        ) {
            let memory = plausible(DeviceMemoryInfo { total, used, free, reserved });
            if let Some(DeviceMemory { total: Some(total), used: Some(used), free: Some(free), reserved }) = memory {
                prop_assert!(total <= MAX_GPU_MEMORY && used + free + reserved.unwrap_or(0) <= total);
            } else {
                prop_assert_eq!(memory, None);
            }
        }
    }
}
