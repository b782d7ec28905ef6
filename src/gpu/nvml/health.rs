//! Utilization, power, temperature and errors of a GPU.
//!
//! Values that change often and cost the driver little are read in every reading. Slow ones are read less often: on an H200 the total
//! energy takes 3.6 ms, a replay counter 0.1 ms, an ECC counter 0.08 ms, all others that are not slow less than 0.3 ms together.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::sys_exports::field_id::*;

use super::ffi::{self, ALL_LINKS, FieldNumber, FieldQuery};
use super::library::field;
use crate::clock::{Cadence, Timestamp};
use crate::gpu::device_metrics::DeviceHealth;

/// Slow values are read in one of this many readings, and at least once in as many seconds.
const SLOW_FIELDS_EVERY: u32 = 15;
/// A 32-bit counter is below this, which is its sentinel.
const MAX_OF_32: u64 = u32::MAX as u64;
/// A 64-bit counter is below this: its sentinels, and those around 9.2e18, are above.
const MAX_OF_64: u64 = 1 << 62;
/// The power of a board is below this; 2^32 - 1 mW and other sentinels are above.
const MAX_MILLIWATTS: u32 = 100_000_000;
/// The temperature of a die is below this.
const MAX_CELSIUS: u32 = 200;
/// Clocks are below this; sentinels are above.
const MAX_MEGAHERTZ: u64 = 100_000;
/// 1,000 W for 300 years; sentinels are above.
const MAX_MILLIJOULES: u64 = 10_u64.pow(16);

/// Totals over all links, in the order of [`NVLINK_ERRORS`](crate::gpu::device_metrics::NVLINK_ERRORS). The newer
/// fields for replay and recovery (161, 162) are of one link only, so they are no substitute.
const NVLINK_FIELDS: [u32; 5] = [
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL,
];

/// KiB of data over all NVLinks, in the order of [`DIRECTIONS`](crate::gpu::device_metrics::DIRECTIONS), without the
/// protocol's overhead.
const NVLINK_DATA_FIELDS: [u32; 2] =
    [NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX];

/// The newest metrics of a GPU.
#[derive(Debug, Default)]
pub struct HealthState {
    slow_fields: Cadence<SLOW_FIELDS_EVERY>,
    health: DeviceHealth,
}

/// Returns a number below `limit` that is not the 32-bit sentinel, and `None` where the device does not support the field.
///
/// # Errors
/// As [`field`].
fn number<T: Into<u64>>(
    limit: u64,
    reading: Result<T, NvmlError>,
    read_errors: &mut Vec<&'static str>,
) -> Result<Option<u64>, NvmlError> {
    let value = field(reading, read_errors)?.map(Into::into);
    if value.is_some_and(|value| value >= limit || value == MAX_OF_32) {
        read_errors.push("malformed");
        return Ok(None);
    }
    Ok(value)
}

impl HealthState {
    /// Reads the metrics of a GPU; slow ones may be of an earlier reading.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Timestamp,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<DeviceHealth, NvmlError> {
        read_fast_fields(device, &mut self.health, read_errors)?;
        if self.slow_fields.is_due(now) {
            read_slow_fields(device, &mut self.health, read_errors)?;
            read_field_values(device, &mut self.health, read_errors)?;
        }
        Ok(self.health.clone())
    }
}

fn read_fast_fields(
    device: &NvmlDevice<'_>,
    health: &mut DeviceHealth,
    read_errors: &mut Vec<&'static str>,
) -> Result<(), NvmlError> {
    let rates = field(device.utilization_rates(), read_errors)?;
    let ratio = |percent: u32| (percent <= 100).then(|| f64::from(percent) / 100.0);
    health.utilization = rates.as_ref().and_then(|rates| ratio(rates.gpu));
    health.memory_utilization = rates.and_then(|rates| ratio(rates.memory));
    let power = number(MAX_MILLIWATTS.into(), device.power_usage(), read_errors)?;
    health.power_watts = power.map(|milliwatts| milliwatts as f64 / 1e3);
    let temperature = device.temperature(TemperatureSensor::Gpu);
    let temperature = number(MAX_CELSIUS.into(), temperature, read_errors)?;
    health.temperature_celsius = temperature.map(|celsius| celsius as f64);
    let mut clock = |domain| number(MAX_MEGAHERTZ, device.clock_info(domain), read_errors);
    let clocks = [clock(Clock::SM)?, clock(Clock::Memory)?];
    health.clocks_hertz = clocks.map(|clock| clock.map(|megahertz| megahertz as f64 * 1e6));
    let reasons = field(device.current_throttle_reasons(), read_errors)?;
    health.throttle_mask = reasons.map(|reasons| reasons.bits());
    Ok(())
}

/// Reads counters and limits.
fn read_slow_fields(
    device: &NvmlDevice<'_>,
    health: &mut DeviceHealth,
    read_errors: &mut Vec<&'static str>,
) -> Result<(), NvmlError> {
    let energy = number(MAX_MILLIJOULES, device.total_energy_consumption(), read_errors)?;
    health.energy_joules = energy.map(|millijoules| millijoules as f64 / 1e3);
    let limit = number(MAX_MILLIWATTS.into(), device.enforced_power_limit(), read_errors)?;
    health.power_limit_watts = limit.map(|milliwatts| milliwatts as f64 / 1e3);
    let mut ecc = |error, counter| number(MAX_OF_64, device.total_ecc_errors(error, counter), read_errors);
    health.ecc_volatile = [
        ecc(MemoryError::Corrected, EccCounter::Volatile)?,
        ecc(MemoryError::Uncorrected, EccCounter::Volatile)?,
    ];
    health.ecc_corrected = ecc(MemoryError::Corrected, EccCounter::Aggregate)?;
    health.ecc_uncorrected = ecc(MemoryError::Uncorrected, EccCounter::Aggregate)?;
    let rows = field(ffi::remapped_rows(device), read_errors)?;
    health.remapped_rows = rows.filter(|rows| rows.iter().all(|count| u64::from(*count) < MAX_OF_32));
    health.retired_pages = [
        number(MAX_OF_32, ffi::retired_pages(device, 0), read_errors)?,
        number(MAX_OF_32, ffi::retired_pages(device, 1), read_errors)?,
        field(device.are_pages_pending_retired(), read_errors)?.map(u64::from),
    ];
    health.pcie_replays = number(MAX_OF_32, device.pcie_replay_counter(), read_errors)?;
    Ok(())
}

/// Reads all values that only fields have, with one call.
fn read_field_values(
    device: &NvmlDevice<'_>,
    health: &mut DeviceHealth,
    read_errors: &mut Vec<&'static str>,
) -> Result<(), NvmlError> {
    let of_device = [&NVLINK_FIELDS[..], &[NVML_FI_DEV_MEMORY_TEMP]].concat();
    let of_device = of_device.into_iter().map(|id| FieldQuery { id, scope: 0 });
    let of_links = NVLINK_DATA_FIELDS.map(|id| FieldQuery { id, scope: ALL_LINKS });
    let queries: Vec<_> = of_device.chain(of_links).collect();
    let values = field(ffi::field_values(device, &queries), read_errors)?;
    let mut values = values.into_iter().flatten();
    health.nvlink_errors = NVLINK_FIELDS.map(|_| values.next().flatten().and_then(plausible));
    let celsius = values.next().flatten().and_then(plausible);
    health.memory_temperature_celsius =
        celsius.filter(|celsius| *celsius < MAX_CELSIUS.into()).map(|celsius| celsius as f64);
    // a 32-bit counter overflows between two readings
    let mut wide = || values.next().flatten().filter(|number| number.is_wide).and_then(plausible);
    health.nvlink_bytes = NVLINK_DATA_FIELDS.map(|_| wide().and_then(|kib| kib.checked_mul(1024)));
    Ok(())
}

/// Returns the value, unless it is a sentinel.
fn plausible(number: FieldNumber) -> Option<u64> {
    (number.value < MAX_OF_64 && number.value != MAX_OF_32).then_some(number.value)
}
