//! NVML symbols that nvml-wrapper lacks, or calls with too small a buffer. The only unsafe code for GPUs.
//!
//! Process lists are read with one call each into a buffer with 32 bytes per record: some R535 drivers write records of
//! that size where the header says 24. The number of bytes that were overwritten shows which size the driver used.

#![allow(unsafe_code)]

use std::ffi::c_uint;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try, nvml_try_count};

/// The fill byte of the buffer, to detect what the driver wrote.
const UNTOUCHED: u8 = 0xa5;
/// The size in bytes of a record, large enough for every layout.
const RECORD_BYTES: usize = 32;
/// Minimum capacity of the buffer in records.
const MIN_RECORDS: usize = 64;
/// Maximum capacity of the buffer in records, whatever the driver requests.
const MAX_RECORDS: usize = crate::host::bounds::NVML_RECORDS.max;
/// Maximum attempts for a list that does not fit; each doubles the capacity.
const MAX_ATTEMPTS: usize = 5;
/// `NVML_VALUE_NOT_AVAILABLE`: the memory of a process is N/A.
const NOT_AVAILABLE: u64 = u64::MAX;

/// A list of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessListKind {
    /// With a compute context.
    Compute,
    /// With a graphics context.
    Graphics,
    /// With a compute context through the MPS server.
    Mps,
}

impl ProcessListKind {
    /// All lists; the index of a list is `list as usize`.
    pub const ALL: [ProcessListKind; 3] =
        [ProcessListKind::Compute, ProcessListKind::Graphics, ProcessListKind::Mps];
}

/// One process of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmlProcess {
    /// Its pid.
    pub pid: u32,
    /// Memory in bytes; `None` if not available.
    pub used: Option<u64>,
}

/// A list of processes as the driver wrote it.
#[derive(Debug, Default)]
pub struct Records {
    /// All of them.
    pub records: Vec<NvmlProcess>,
    /// Whether the driver overwrote exactly as many bytes as this number of records has. If not, it may use an unknown
    /// layout.
    pub is_layout_known: bool,
}

/// A utilization sample of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtilizationSample {
    /// Its pid.
    pub pid: u32,
    /// Time of the sample in microseconds of the driver's clock.
    pub time_us: u64,
    /// Percentage of the time in which one of its kernels ran.
    pub sm_percent: u32,
}

/// A reusable buffer for lists.
#[derive(Debug, Default)]
pub struct Buffer {
    words: Vec<u64>, // so that every record is aligned
}

impl Buffer {
    fn capacity(&self) -> usize {
        self.words.len() * size_of::<u64>() / RECORD_BYTES
    }

    /// Sets the capacity to at least this number of records, and fills the buffer with [`UNTOUCHED`].
    fn prepare(&mut self, records: usize) {
        let words = records.max(MIN_RECORDS) * RECORD_BYTES / size_of::<u64>();
        let words = words.max(self.words.len());
        self.words.clear();
        self.words.resize(words, u64::from_ne_bytes([UNTOUCHED; 8]));
    }

    fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// Calls `call` until the buffer is large enough. `call` gets the capacity in records and returns NVML's code.
fn fill(
    buffer: &mut Buffer,
    mut call: impl FnMut(&mut c_uint, *mut u64) -> c_uint,
) -> Result<usize, NvmlError> {
    let mut wanted = 0;
    for _ in 0..MAX_ATTEMPTS {
        buffer.prepare(wanted);
        let capacity = buffer.capacity();
        let mut count = capacity as c_uint;
        match nvml_try(call(&mut count, buffer.words.as_mut_ptr())) {
            Ok(()) => return Ok((count as usize).min(capacity)),
            Err(NvmlError::InsufficientSize(_)) if capacity < MAX_RECORDS => {
                wanted = (count as usize).max(capacity).saturating_mul(2).min(MAX_RECORDS);
            }
            Err(error) => return Err(error),
        }
    }
    Err(NvmlError::InsufficientSize(None))
}

/// Returns the address of a handle: two handles of one GPU have the same.
pub fn address(device: &NvmlDevice<'_>) -> usize {
    // SAFETY: the handle is not used for a call, nor kept.
    unsafe { device.handle() }.addr()
}

/// Reads one list of processes, by the symbol of this version: 3 or 2. The first one, of drivers before R450, has shorter
/// records and is not read.
///
/// # Errors
/// `FailedToLoadSymbol` or `FunctionNotFound` where the driver does not have this version.
pub fn processes(
    device: &NvmlDevice<'_>,
    list: ProcessListKind,
    version: u8,
    buffer: &mut Buffer,
) -> Result<Records, NvmlError> {
    let lib = device.nvml().lib();
    macro_rules! read_list {
        ($symbol:ident) => {{
            let symbol = nvml_sym(lib.$symbol.as_ref())?;
            // SAFETY: the handle is of this library, which is initialised as long as `device` borrows it. `fill` passes a
            // count and a buffer with space for as many records of the largest layout, and both outlive the call.
            fill(buffer, |count, records| unsafe { symbol(device.handle(), count, records.cast()) })?
        }};
    }
    let count = match (list, version) {
        (ProcessListKind::Compute, 3) => read_list!(nvmlDeviceGetComputeRunningProcesses_v3),
        (ProcessListKind::Compute, _) => read_list!(nvmlDeviceGetComputeRunningProcesses_v2),
        (ProcessListKind::Graphics, 3) => read_list!(nvmlDeviceGetGraphicsRunningProcesses_v3),
        (ProcessListKind::Graphics, _) => read_list!(nvmlDeviceGetGraphicsRunningProcesses_v2),
        (ProcessListKind::Mps, 3) => read_list!(nvmlDeviceGetMPSComputeRunningProcesses_v3),
        (ProcessListKind::Mps, _) => read_list!(nvmlDeviceGetMPSComputeRunningProcesses_v2),
    };
    Ok(records(&buffer.bytes(), count))
}

/// Parses the records of a buffer. A record has 24 bytes, or 32 with some R535 drivers.
fn records(bytes: &[u8], count: usize) -> Records {
    let written = bytes.iter().rposition(|byte| *byte != UNTOUCHED).map_or(0, |last| last + 1);
    let is_long = written > count * 24 && written <= count * RECORD_BYTES;
    let size = if is_long { RECORD_BYTES } else { 24 };
    let record = |bytes: &[u8]| {
        let used = number(bytes, 8);
        NvmlProcess { pid: number(bytes, 0) as u32, used: (used != NOT_AVAILABLE).then_some(used) }
    };
    let records = bytes.chunks_exact(size).take(count).map(record).collect();
    Records { records, is_layout_known: written == count * size }
}

/// Reads the 8 bytes from `at`; the lower half of them is the 32-bit number at that offset.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// Reads the utilization samples since `last_seen_us`. Idle processes are not listed.
///
/// # Errors
/// `NotFound` if all processes were idle; `NotSupported` under MIG.
pub fn utilization(
    device: &NvmlDevice<'_>,
    last_seen_us: u64,
    buffer: &mut Buffer,
) -> Result<Vec<UtilizationSample>, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetProcessUtilization.as_ref())?;
    // SAFETY: as in `processes`; a sample has 32 bytes.
    let call = |count: &mut c_uint, records: *mut u64| unsafe {
        symbol(device.handle(), records.cast(), count, last_seen_us)
    };
    let count = fill(buffer, call)?;
    let sample = |bytes: &[u8]| UtilizationSample {
        pid: number(bytes, 0) as u32,
        time_us: number(bytes, 8),
        sm_percent: number(bytes, 16) as u32,
    };
    Ok(buffer.bytes().chunks_exact(RECORD_BYTES).take(count).map(sample).collect())
}

/// Reads total, free and used bytes by the first version of the symbol, which counts reserved memory as used.
///
/// # Errors
/// Any error of NVML.
pub fn memory_v1(device: &NvmlDevice<'_>) -> Result<[u64; 3], NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    let mut info = [0_u64; 3];
    // SAFETY: the handle is of this initialised library; `nvmlMemory_t` is three numbers of 64 bits.
    nvml_try(unsafe { symbol(device.handle(), info.as_mut_ptr().cast()) })?;
    Ok(info)
}

/// Reads the ids of the GPU instance and the compute instance of a MIG device.
///
/// # Errors
/// Any error of NVML; `NotSupported` for a whole GPU.
pub fn instance_ids(device: &NvmlDevice<'_>) -> Result<(u32, u32), NvmlError> {
    let lib = device.nvml().lib();
    let (gpu, compute) = (
        nvml_sym(lib.nvmlDeviceGetGpuInstanceId.as_ref())?,
        nvml_sym(lib.nvmlDeviceGetComputeInstanceId.as_ref())?,
    );
    let (mut ids, handle) = ((0, 0), || unsafe { device.handle() });
    // SAFETY: the handle is of this initialised library, and each call writes one number that outlives it.
    nvml_try(unsafe { gpu(handle(), &mut ids.0) })?;
    // SAFETY: as above.
    nvml_try(unsafe { compute(handle(), &mut ids.1) })?;
    Ok(ids)
}

/// Reads the remapped rows: correctable, uncorrectable, and whether one is pending, or failed.
///
/// # Errors
/// Any error of NVML; `NotSupported` before Ampere.
pub fn remapped_rows(device: &NvmlDevice<'_>) -> Result<[u32; 4], NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let [mut correctable, mut uncorrectable, mut pending, mut failure] = [0; 4];
    // SAFETY: the handle is of this initialised library, and the four numbers outlive the call.
    let code =
        unsafe { symbol(device.handle(), &mut correctable, &mut uncorrectable, &mut pending, &mut failure) };
    nvml_try(code).map(|()| [correctable, uncorrectable, pending, failure])
}

/// Reads the number of pages that were retired for this cause (0: single-bit errors, 1: a double-bit error).
///
/// # Errors
/// Any error of NVML; `NotSupported` where rows are remapped instead.
pub fn retired_pages(device: &NvmlDevice<'_>, cause: c_uint) -> Result<u32, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetRetiredPages.as_ref())?;
    let (mut count, mut nothing) = (0, 0_u64);
    // SAFETY: the handle is of this initialised library; with a count of 0 no address is written.
    let code = unsafe { symbol(device.handle(), cause, &mut count, &mut nothing) };
    nvml_try_count(code).map(|()| count)
}

/// A field that [`field_values`] reads.
#[derive(Clone, Copy, Debug)]
pub struct FieldQuery {
    /// The field.
    pub id: u32,
    /// What it is read of: for fields of a link its number, or [`ALL_LINKS`]; 0 for others.
    pub scope: u32,
}

/// The scope for the sum over all NVLinks.
pub const ALL_LINKS: u32 = u32::MAX;

/// The value of a field that is an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldNumber {
    /// The value.
    pub value: u64,
    /// It has 64 bits.
    pub is_wide: bool,
}

/// `nvmlFieldValue_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FieldValue {
    id: u32,
    scope: u32,
    timestamp: i64,
    latency_us: i64,
    kind: u32,
    code: u32,
    bits: u64,
}

impl FieldValue {
    /// Returns the value; `None` if the device does not report it, or it is no integer or negative.
    fn number(&self) -> Option<FieldNumber> {
        const UNSIGNED_INT: u32 = 1;
        const UNSIGNED_LONG: u32 = 2;
        const UNSIGNED_LONG_LONG: u32 = 3;
        const SIGNED_LONG_LONG: u32 = 4;
        nvml_try(self.code).ok()?;
        match self.kind {
            // the first member of a union: with the lowest address
            UNSIGNED_INT => {
                let [a, b, c, d, ..] = self.bits.to_ne_bytes();
                let value = u32::from_ne_bytes([a, b, c, d]).into();
                Some(FieldNumber { value, is_wide: false })
            }
            UNSIGNED_LONG | UNSIGNED_LONG_LONG => Some(FieldNumber { value: self.bits, is_wide: true }),
            SIGNED_LONG_LONG => {
                let value = u64::try_from(self.bits.cast_signed()).ok()?;
                Some(FieldNumber { value, is_wide: true })
            }
            _ => None,
        }
    }
}

/// Reads fields with one call. The wrapper cannot pass a scope.
///
/// # Errors
/// Any error of NVML. A field that fails alone is `None`.
pub fn field_values(
    device: &NvmlDevice<'_>,
    queries: &[FieldQuery],
) -> Result<Vec<Option<FieldNumber>>, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetFieldValues.as_ref())?;
    let empty = FieldValue { id: 0, scope: 0, timestamp: 0, latency_us: 0, kind: 0, code: 0, bits: 0 };
    let mut values: Vec<_> =
        queries.iter().map(|query| FieldValue { id: query.id, scope: query.scope, ..empty }).collect();
    let count = values.len() as std::ffi::c_int;
    // SAFETY: the handle is of this initialised library; the values have the layout of `nvmlFieldValue_t`, are as many as
    // `count`, and outlive the call.
    nvml_try(unsafe { symbol(device.handle(), count, values.as_mut_ptr().cast()) })?;
    Ok(values.iter().map(FieldValue::number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_of_a_field_is_its_integer_or_absent() {
        let of = |kind, code, bits| {
            let value = FieldValue { id: 1, scope: 0, timestamp: 0, latency_us: 0, kind, code, bits };
            value.number().map(|number| (number.value, number.is_wide))
        };
        assert_eq!(size_of::<FieldValue>(), 40);
        assert_eq!(
            (of(1, 0, 7), of(2, 0, 8), of(3, 0, 9)),
            (Some((7, false)), Some((8, true)), Some((9, true)))
        );
        assert_eq!((of(4, 0, 10), of(4, 0, u64::MAX)), (Some((10, true)), None));
        assert_eq!(
            (of(0, 0, 1), of(3, 3, 1), of(9, 0, 1)),
            (None, None, None),
            "a double, unsupported, unknown"
        );
    }

    /// Returns a buffer after a driver has written records of this size into it.
    fn written(size: usize, processes: &[(u32, u64)]) -> Vec<u8> {
        let mut bytes = vec![UNTOUCHED; MIN_RECORDS * RECORD_BYTES];
        for (index, (pid, used)) in processes.iter().enumerate() {
            let record = &mut bytes[index * size..][..size];
            record[..4].copy_from_slice(&pid.to_ne_bytes());
            record[8..16].copy_from_slice(&used.to_ne_bytes());
            record[16..].fill(0);
        }
        bytes
    }

    #[test]
    fn buffer_grows_only_to_the_maximum() {
        let (mut buffer, mut capacities) = (Buffer::default(), vec![]);
        let result = fill(&mut buffer, |count, _| {
            capacities.push(*count as usize);
            *count = c_uint::MAX;
            7 // insufficient size
        });
        assert!(matches!(result, Err(NvmlError::InsufficientSize(_))), "{result:?}");
        assert_eq!(capacities, [MIN_RECORDS, MAX_RECORDS]);
    }

    #[test]
    fn parses_records_of_every_size() {
        let processes = [(11, 100), (12, u64::MAX), (13, 300)];
        let wanted =
            processes.map(|(pid, used)| NvmlProcess { pid, used: (used != u64::MAX).then_some(used) });
        for size in [24, 32] {
            let found = records(&written(size, &processes), 3);
            assert_eq!(found.records, wanted, "{size} bytes");
            assert!(found.is_layout_known, "{size} bytes");
        }
        assert_eq!(records(&written(24, &[]), 0).records, []);
        assert!(!records(&written(40, &processes), 3).is_layout_known, "a layout of a later driver");
    }
}
