//! Memory of a device.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::dialect::{Dialect, Told};
use super::library::field;
use crate::collect::gpu::reading::Memory;

/// No GPU has a PiB of memory: what is above is a sentinel or garbage.
pub const MOST_MEMORY: u64 = 1 << 50;

/// Reads the memory of a device. One that does not tell (unified memory), or answers garbage, has none.
///
/// # Errors
/// As [`field`].
pub fn read(
    device: &NvmlDevice<'_>,
    dialect: &mut Dialect,
    faults: &mut Vec<&'static str>,
) -> Result<Memory, NvmlError> {
    let Some(told) = field(dialect.memory(device), faults)? else { return Ok(Memory::default()) };
    Ok(plausible(told).unwrap_or_else(|| {
        faults.push("malformed");
        Memory::default()
    }))
}

/// Memory whose parts fit into the whole; a sentinel or garbage does not.
fn plausible(told: Told) -> Option<Memory> {
    let parts = told.used.checked_add(told.free)?.checked_add(told.reserved.unwrap_or(0))?; // v1: a part of used
    (told.total > 0 && told.total <= MOST_MEMORY && parts <= told.total).then_some(Memory {
        total: Some(told.total),
        used: Some(told.used),
        free: Some(told.free),
        reserved: told.reserved,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Numbers as drivers answer them: small, large, and each kind of sentinel.
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
        fn whatever_is_told_the_parts_fit_into_the_whole_or_nothing_is_told(
            total in number(), used in number(), free in number(), reserved in proptest::option::of(number())
        ) {
            let memory = plausible(Told { total, used, free, reserved });
            if let Some(Memory { total: Some(total), used: Some(used), free: Some(free), reserved }) = memory {
                prop_assert!(total <= MOST_MEMORY && used + free + reserved.unwrap_or(0) <= total);
            } else {
                prop_assert_eq!(memory, None);
            }
        }
    }
}
