//! Utilization, power, temperature and errors of a GPU.
//!
//! Values that change often are read in every reading, others in every tenth. A field that the device does not support is
//! tried again only once a minute.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::sys_exports::field_id::*;
use std::time::Duration;

use super::ffi::{self, ALL_LINKS, FieldNumber, FieldQuery};
use super::library::field;
use crate::clock::Timestamp;
use crate::collect::gpu::device_metrics::DeviceHealth;

/// Values that rarely change are read in one of this number of readings.
const SLOW_FIELDS_EVERY: u32 = 10;
/// When to try unsupported fields again: MIG mode or the driver's settings may have changed.
const UNSUPPORTED_RETRY: Duration = Duration::from_secs(60);
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

/// Totals over all links, in the order of [`NVLINK_ERRORS`](crate::collect::gpu::device_metrics::NVLINK_ERRORS). The newer
/// fields for replay and recovery (161, 162) are of one link only, so they are no substitute.
const NVLINK_FIELDS: [u32; 5] = [
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL,
];

/// Bytes over the PCIe link, in the order of [`DIRECTIONS`](crate::collect::gpu::device_metrics::DIRECTIONS).
const PCIE_FIELDS: [u32; 2] = [NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES];

/// KiB of data over all NVLinks, in the order of [`DIRECTIONS`](crate::collect::gpu::device_metrics::DIRECTIONS), without the
/// protocol's overhead.
const NVLINK_DATA_FIELDS: [u32; 2] =
    [NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX];

/// The fields, each a bit of [`HealthState::unsupported`].
#[derive(Clone, Copy, Debug)]
enum Field {
    Utilization,
    Power,
    Energy,
    Temperature,
    Throttle,
    EccCorrected,
    EccUncorrected,
    RemappedRows,
    PagesSingle,
    PagesDouble,
    PagesPending,
    PcieReplays,
    OtherValues,
    ClockSm,
    ClockMemory,
    PowerLimit,
    EccVolatileCorrected,
    EccVolatileUncorrected,
}

/// The unsupported fields of a GPU, and its newest metrics.
#[derive(Debug, Default)]
pub struct HealthState {
    unsupported: u32,
    retry_at: Option<Timestamp>,
    readings: u32,
    health: DeviceHealth,
}

/// The queries of one reading.
struct FieldQueries<'a> {
    unsupported: &'a mut u32,
    read_errors: &'a mut Vec<&'static str>,
}

impl FieldQueries<'_> {
    /// Reads a field, unless it is known to be unsupported.
    fn query<T>(
        &mut self,
        which: Field,
        read: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Result<Option<T>, NvmlError> {
        let bit = 1 << which as u32;
        if *self.unsupported & bit != 0 {
            return Ok(None);
        }
        let known = self.read_errors.len();
        let value = field(read(), self.read_errors)?;
        let has_failed = self.read_errors[known..].contains(&"io"); // a transient error
        if value.is_none() && !has_failed {
            *self.unsupported |= bit;
        }
        Ok(value)
    }

    /// Like [`FieldQueries::query`], for a number below `limit` that is not the 32-bit sentinel.
    fn number<T: Into<u64>>(
        &mut self,
        which: Field,
        limit: u64,
        read: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Result<Option<u64>, NvmlError> {
        let value = self.query(which, read)?.map(Into::into);
        if value.is_some_and(|value| value >= limit || value == MAX_OF_32) {
            self.read_errors.push("malformed");
            return Ok(None);
        }
        Ok(value)
    }
}

impl HealthState {
    /// Reads the metrics of a GPU; those that rarely change may be of an earlier reading.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Timestamp,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<DeviceHealth, NvmlError> {
        if self.retry_at.is_none_or(|at| now >= at) {
            (self.unsupported, self.retry_at) = (0, Some(now.plus(UNSUPPORTED_RETRY)));
        }
        let reads_slow_fields = self.readings.is_multiple_of(SLOW_FIELDS_EVERY);
        self.readings = self.readings.wrapping_add(1);
        let mut queries = FieldQueries { unsupported: &mut self.unsupported, read_errors };
        read_fast_fields(device, &mut queries, &mut self.health)?;
        let reasons = queries.query(Field::Throttle, || device.current_throttle_reasons())?;
        if reads_slow_fields {
            read_error_counters(device, &mut queries, &mut self.health)?;
            read_field_values(device, &mut queries, &mut self.health)?;
        }
        Ok(DeviceHealth { throttle_mask: reasons.map(|reasons| reasons.bits()), ..self.health.clone() })
    }
}

fn read_fast_fields(
    device: &NvmlDevice<'_>,
    fields: &mut FieldQueries<'_>,
    health: &mut DeviceHealth,
) -> Result<(), NvmlError> {
    let rates = fields.query(Field::Utilization, || device.utilization_rates())?;
    let ratio = |percent: u32| (percent <= 100).then(|| f64::from(percent) / 100.0);
    health.utilization = rates.as_ref().and_then(|rates| ratio(rates.gpu));
    health.memory_utilization = rates.and_then(|rates| ratio(rates.memory));
    let power = fields.number(Field::Power, MAX_MILLIWATTS.into(), || device.power_usage())?;
    health.power_watts = power.map(|milliwatts| milliwatts as f64 / 1e3);
    let energy = fields.number(Field::Energy, MAX_MILLIJOULES, || device.total_energy_consumption())?;
    health.energy_joules = energy.map(|millijoules| millijoules as f64 / 1e3);
    let temperature = fields
        .number(Field::Temperature, MAX_CELSIUS.into(), || device.temperature(TemperatureSensor::Gpu))?;
    health.temperature_celsius = temperature.map(|celsius| celsius as f64);
    let mut clock = |field, domain| fields.number(field, MAX_MEGAHERTZ, || device.clock_info(domain));
    let clocks = [clock(Field::ClockSm, Clock::SM)?, clock(Field::ClockMemory, Clock::Memory)?];
    health.clocks_hertz = clocks.map(|clock| clock.map(|megahertz| megahertz as f64 * 1e6));
    Ok(())
}

fn read_error_counters(
    device: &NvmlDevice<'_>,
    fields: &mut FieldQueries<'_>,
    health: &mut DeviceHealth,
) -> Result<(), NvmlError> {
    let limit = fields.number(Field::PowerLimit, MAX_MILLIWATTS.into(), || device.enforced_power_limit())?;
    health.power_limit_watts = limit.map(|milliwatts| milliwatts as f64 / 1e3);
    let volatile = |error| move || device.total_ecc_errors(error, EccCounter::Volatile);
    health.ecc_volatile = [
        fields.number(Field::EccVolatileCorrected, MAX_OF_64, volatile(MemoryError::Corrected))?,
        fields.number(Field::EccVolatileUncorrected, MAX_OF_64, volatile(MemoryError::Uncorrected))?,
    ];
    let ecc = |error| move || device.total_ecc_errors(error, EccCounter::Aggregate);
    health.ecc_corrected = fields.number(Field::EccCorrected, MAX_OF_64, ecc(MemoryError::Corrected))?;
    health.ecc_uncorrected =
        fields.number(Field::EccUncorrected, MAX_OF_64, ecc(MemoryError::Uncorrected))?;
    let rows = fields.query(Field::RemappedRows, || ffi::remapped_rows(device))?;
    health.remapped_rows = rows.filter(|rows| rows.iter().all(|count| u64::from(*count) < MAX_OF_32));
    health.retired_pages = [
        fields.number(Field::PagesSingle, MAX_OF_32, || ffi::retired_pages(device, 0))?,
        fields.number(Field::PagesDouble, MAX_OF_32, || ffi::retired_pages(device, 1))?,
        fields.query(Field::PagesPending, || device.are_pages_pending_retired())?.map(u64::from),
    ];
    health.pcie_replays = fields.number(Field::PcieReplays, MAX_OF_32, || device.pcie_replay_counter())?;
    Ok(())
}

/// Reads all values that only fields have, with one call.
fn read_field_values(
    device: &NvmlDevice<'_>,
    fields: &mut FieldQueries<'_>,
    health: &mut DeviceHealth,
) -> Result<(), NvmlError> {
    let values = fields.query(Field::OtherValues, || {
        let of_device = [&NVLINK_FIELDS[..], &PCIE_FIELDS, &[NVML_FI_DEV_MEMORY_TEMP]].concat();
        let of_device = of_device.into_iter().map(|id| FieldQuery { id, scope: 0 });
        let of_links = NVLINK_DATA_FIELDS.map(|id| FieldQuery { id, scope: ALL_LINKS });
        let values = ffi::field_values(device, &of_device.chain(of_links).collect::<Vec<_>>())?;
        if values.iter().all(Option::is_none) { Err(NvmlError::NotSupported) } else { Ok(values) }
    })?;
    let mut values = values.into_iter().flatten();
    health.nvlink_errors = NVLINK_FIELDS.map(|_| values.next().flatten().and_then(plausible));
    // a 32-bit counter of bytes overflows many times between two readings
    let mut wide = || values.next().flatten().filter(|number| number.is_wide).and_then(plausible);
    health.pcie_bytes = PCIE_FIELDS.map(|_| wide());
    let celsius = values.next().flatten().and_then(plausible);
    health.memory_temperature_celsius =
        celsius.filter(|celsius| *celsius < MAX_CELSIUS.into()).map(|celsius| celsius as f64);
    let mut wide = || values.next().flatten().filter(|number| number.is_wide).and_then(plausible);
    health.nvlink_bytes = NVLINK_DATA_FIELDS.map(|_| wide().and_then(|kib| kib.checked_mul(1024)));
    Ok(())
}

/// Returns the value, unless it is a sentinel.
fn plausible(number: FieldNumber) -> Option<u64> {
    (number.value < MAX_OF_64 && number.value != MAX_OF_32).then_some(number.value)
}
