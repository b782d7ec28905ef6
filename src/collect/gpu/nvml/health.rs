//! Load, power, heat and errors of a GPU.
//!
//! What changes all the time is asked in every reading, what hardly ever changes in every tenth. A field that the device
//! does not have is asked again once a minute only.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::*;
use std::time::Duration;

use super::library::field;
use super::raw;
use crate::clock::Moment;
use crate::collect::gpu::health::{Counted, Health};

/// One of so many readings asks for what hardly ever changes.
const SELDOM: u32 = 10;
/// How long a field that is not supported is not asked again: MIG mode or the driver's settings may have changed.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// A counter of 32 bits is below its sentinel.
const MOST_OF_32: u64 = u32::MAX as u64;
/// A counter of 64 bits is below this: its sentinels, and those around 9.2e18, are above.
const MOST_OF_64: u64 = 1 << 62;
/// A board draws less: 2^32 - 1 mW and other sentinels are above.
const MOST_MILLIWATTS: u32 = 100_000_000;
/// A die is cooler.
const MOST_CELSIUS: u32 = 200;
/// A thousand watts for three hundred years: sentinels are above.
const MOST_MILLIJOULES: u64 = 10_u64.pow(16);

/// Totals over all links, by the order of [`NVLINK_ERRORS`](crate::collect::gpu::health::NVLINK_ERRORS). The newer fields
/// for replay and recovery (161, 162) are those of one link, and no substitute.
const NVLINK_FIELDS: [u32; 5] = [
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL,
];

/// The fields, each a bit of [`Asked::unsupported`].
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
    NvLink,
}

/// What was asked of a GPU, and its newest health.
#[derive(Debug, Default)]
pub struct Asked {
    unsupported: u32,
    forget_at: Option<Moment>,
    readings: u32,
    throttled: Option<Moment>,
    /// A reason that holds in two readings is taken to have held in between, if that was no longer than this.
    most_between: Duration,
    health: Health,
}

/// One reading's questions.
struct Questions<'a> {
    unsupported: &'a mut u32,
    faults: &'a mut Vec<&'static str>,
}

impl Questions<'_> {
    /// A field, unless the device is known not to have it.
    fn ask<T>(
        &mut self,
        which: Field,
        question: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Result<Option<T>, NvmlError> {
        let bit = 1 << which as u32;
        if *self.unsupported & bit != 0 {
            return Ok(None);
        }
        let known = self.faults.len();
        let answer = field(question(), self.faults)?;
        let failed = self.faults[known..].contains(&"io"); // that may pass
        if answer.is_none() && !failed {
            *self.unsupported |= bit;
        }
        Ok(answer)
    }

    /// As [`Questions::ask`], for a number that is garbage from `most` on, or if it is the sentinel of 32 bits.
    fn number<T: Into<u64>>(
        &mut self,
        which: Field,
        most: u64,
        question: impl FnOnce() -> Result<T, NvmlError>,
    ) -> Result<Option<u64>, NvmlError> {
        let answer = self.ask(which, question)?.map(Into::into);
        if answer.is_some_and(|answer| answer >= most || answer == MOST_OF_32) {
            self.faults.push("malformed");
            return Ok(None);
        }
        Ok(answer)
    }
}

impl Asked {
    /// Nothing was asked yet. Two readings are no further apart than this, unless a call hung.
    pub fn new(most_between: Duration) -> Self {
        Self { most_between, ..Self::default() }
    }

    /// Reads the health of a GPU; what is asked seldom is of an earlier reading. `counted` is what memledger counts of
    /// this GPU itself.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Moment,
        counted: &mut Counted,
        faults: &mut Vec<&'static str>,
    ) -> Result<Health, NvmlError> {
        if self.forget_at.is_none_or(|at| now >= at) {
            (self.unsupported, self.forget_at) = (0, Some(now.plus(FORGET_AFTER)));
        }
        let seldom = self.readings.is_multiple_of(SELDOM);
        self.readings = self.readings.wrapping_add(1);
        let mut questions = Questions { unsupported: &mut self.unsupported, faults };
        often(device, &mut questions, &mut self.health)?;
        let reasons = questions.ask(Field::Throttle, || device.current_throttle_reasons())?;
        if seldom {
            errors(device, &mut questions, &mut self.health)?;
            nvlinks(device, &mut questions, &mut self.health)?;
        }
        let since = std::mem::replace(&mut self.throttled, reasons.is_some().then_some(now));
        let throttle_seconds = reasons.map(|reasons| {
            if let Some(since) = since {
                counted.throttle(reasons.bits(), now.since(since).min(self.most_between));
            }
            counted.throttle_seconds
        });
        Ok(Health { throttle_seconds, ..self.health.clone() })
    }
}

fn often(device: &NvmlDevice<'_>, ask: &mut Questions<'_>, health: &mut Health) -> Result<(), NvmlError> {
    let load = ask.ask(Field::Utilization, || device.utilization_rates())?;
    let ratio = |percent: u32| (percent <= 100).then(|| f64::from(percent) / 100.0);
    health.utilization = load.as_ref().and_then(|load| ratio(load.gpu));
    health.memory_utilization = load.and_then(|load| ratio(load.memory));
    let power = ask.number(Field::Power, MOST_MILLIWATTS.into(), || device.power_usage())?;
    health.power_watts = power.map(|milliwatts| milliwatts as f64 / 1e3);
    let energy = ask.number(Field::Energy, MOST_MILLIJOULES, || device.total_energy_consumption())?;
    health.energy_joules = energy.map(|millijoules| millijoules as f64 / 1e3);
    let temperature =
        ask.number(Field::Temperature, MOST_CELSIUS.into(), || device.temperature(TemperatureSensor::Gpu))?;
    health.temperature_celsius = temperature.map(|celsius| celsius as f64);
    Ok(())
}

fn errors(device: &NvmlDevice<'_>, ask: &mut Questions<'_>, health: &mut Health) -> Result<(), NvmlError> {
    let ecc = |error| move || device.total_ecc_errors(error, EccCounter::Aggregate);
    health.ecc_corrected = ask.number(Field::EccCorrected, MOST_OF_64, ecc(MemoryError::Corrected))?;
    health.ecc_uncorrected = ask.number(Field::EccUncorrected, MOST_OF_64, ecc(MemoryError::Uncorrected))?;
    let rows = ask.ask(Field::RemappedRows, || raw::remapped_rows(device))?;
    health.remapped_rows = rows.filter(|rows| rows.iter().all(|count| u64::from(*count) < MOST_OF_32));
    health.retired_pages = [
        ask.number(Field::PagesSingle, MOST_OF_32, || raw::retired_pages(device, 0))?,
        ask.number(Field::PagesDouble, MOST_OF_32, || raw::retired_pages(device, 1))?,
        ask.ask(Field::PagesPending, || device.are_pages_pending_retired())?.map(u64::from),
    ];
    health.pcie_replays = ask.number(Field::PcieReplays, MOST_OF_32, || device.pcie_replay_counter())?;
    Ok(())
}

/// One call for all fields. A device without links answers none of them.
fn nvlinks(device: &NvmlDevice<'_>, ask: &mut Questions<'_>, health: &mut Health) -> Result<(), NvmlError> {
    let answers = ask.ask(Field::NvLink, || {
        let samples = device.field_values_for(&NVLINK_FIELDS.map(FieldId))?;
        let values: Vec<_> = samples.into_iter().map(|sample| whole(sample.ok()?.value.ok()?)).collect();
        if values.iter().all(Option::is_none) { Err(NvmlError::NotSupported) } else { Ok(values) }
    })?;
    let mut answers = answers.into_iter().flatten();
    health.nvlink_errors = NVLINK_FIELDS.map(|_| answers.next().flatten());
    Ok(())
}

fn whole(value: SampleValue) -> Option<u64> {
    let value = match value {
        SampleValue::U32(value) => u64::from(value),
        SampleValue::U64(value) => value,
        SampleValue::I64(value) => u64::try_from(value).ok()?,
        SampleValue::F64(_) => return None,
    };
    (value < MOST_OF_64 && value != MOST_OF_32).then_some(value)
}
