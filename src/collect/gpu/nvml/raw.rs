//! The symbols of NVML that nvml-wrapper does not have, or calls with too little room. The only unsafe code on GPUs.
//!
//! Process lists are asked with one call each into a buffer of our own, which has room for records of 32 bytes: some
//! R535 drivers write those where the header says 24. How far the buffer was overwritten tells which they were.

#![allow(unsafe_code)]

use std::ffi::c_uint;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try, nvml_try_count};

/// What is in a byte of the buffer that the driver did not write.
const UNTOUCHED: u8 = 0xa5;
/// A record with room for every layout.
const RECORD: usize = 32;
/// Records that the buffer has room for at least.
const LEAST_ROOM: usize = 64;
/// Records that are believed to be in a list at most: whatever the driver asks for, there is no more room than this.
const MOST_ROOM: usize = 65_536;
/// A list that does not fit is asked again, with twice the room, so often.
const TRIES: usize = 5;
/// `NVML_VALUE_NOT_AVAILABLE`: the memory of a process is N/A.
const NOT_AVAILABLE: u64 = u64::MAX;

/// A list of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// With a compute context.
    Compute,
    /// With a graphics context.
    Graphics,
    /// With a compute context through the MPS server.
    Mps,
}

impl List {
    /// All lists; their place here is `list as usize`.
    pub const ALL: [List; 3] = [List::Compute, List::Graphics, List::Mps];
}

/// One process of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its pid.
    pub pid: u32,
    /// Bytes; `None` is *not available*.
    pub used: Option<u64>,
}

/// How busy one process kept the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// Its pid.
    pub pid: u32,
    /// When, in microseconds of the driver's clock.
    pub time_us: u64,
    /// Percent of the time in which one of its kernels ran.
    pub sm_percent: u32,
}

/// A buffer for lists, used again and again.
#[derive(Debug, Default)]
pub struct Buffer {
    words: Vec<u64>, // so that every record is aligned
}

impl Buffer {
    fn room(&self) -> usize {
        self.words.len() * size_of::<u64>() / RECORD
    }

    /// Makes room for so many records, and marks all of it as untouched.
    fn prepare(&mut self, records: usize) {
        let words = records.max(LEAST_ROOM) * RECORD / size_of::<u64>();
        let words = words.max(self.words.len());
        self.words.clear();
        self.words.resize(words, u64::from_ne_bytes([UNTOUCHED; 8]));
    }

    fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

/// Asks until the buffer is large enough. `ask` gets the room in records and returns NVML's code.
fn fill(
    buffer: &mut Buffer,
    mut ask: impl FnMut(&mut c_uint, *mut u64) -> c_uint,
) -> Result<usize, NvmlError> {
    let mut wanted = 0;
    for _ in 0..TRIES {
        buffer.prepare(wanted);
        let room = buffer.room();
        let mut count = room as c_uint;
        match nvml_try(ask(&mut count, buffer.words.as_mut_ptr())) {
            Ok(()) => return Ok((count as usize).min(room)),
            Err(NvmlError::InsufficientSize(_)) if room < MOST_ROOM => {
                wanted = (count as usize).max(room).saturating_mul(2).min(MOST_ROOM);
            }
            Err(error) => return Err(error),
        }
    }
    Err(NvmlError::InsufficientSize(None))
}

/// What a handle points at: two handles of one GPU are the same.
pub fn address(device: &NvmlDevice<'_>) -> usize {
    // SAFETY: nothing is done through the handle, nor is it kept.
    unsafe { device.handle() }.addr()
}

/// One list of processes, by the symbol of this version: 3, 2, or 1.
///
/// # Errors
/// `FailedToLoadSymbol` or `FunctionNotFound` where the driver does not have this version.
pub fn processes(
    device: &NvmlDevice<'_>,
    list: List,
    version: u8,
    buffer: &mut Buffer,
) -> Result<Vec<Record>, NvmlError> {
    let lib = device.nvml().lib();
    macro_rules! ask {
        ($symbol:ident) => {{
            let symbol = nvml_sym(lib.$symbol.as_ref())?;
            // SAFETY: the handle is of this library, which is initialised as long as `device` borrows it. `fill` passes a
            // count and a buffer with room for as many records of the largest layout, and both live through the call.
            fill(buffer, |count, room| unsafe { symbol(device.handle(), count, room.cast()) })?
        }};
    }
    let count = match (list, version) {
        (List::Compute, 3) => ask!(nvmlDeviceGetComputeRunningProcesses_v3),
        (List::Compute, 2) => ask!(nvmlDeviceGetComputeRunningProcesses_v2),
        (List::Compute, _) => ask!(nvmlDeviceGetComputeRunningProcesses),
        (List::Graphics, 3) => ask!(nvmlDeviceGetGraphicsRunningProcesses_v3),
        (List::Graphics, 2) => ask!(nvmlDeviceGetGraphicsRunningProcesses_v2),
        (List::Graphics, _) => ask!(nvmlDeviceGetGraphicsRunningProcesses),
        (List::Mps, 3) => ask!(nvmlDeviceGetMPSComputeRunningProcesses_v3),
        (List::Mps, 2) => ask!(nvmlDeviceGetMPSComputeRunningProcesses_v2),
        (List::Mps, _) => ask!(nvmlDeviceGetMPSComputeRunningProcesses),
    };
    Ok(records(&buffer.bytes(), count, version))
}

/// The records of a buffer. The first version has 16 bytes, the others 24, or 32 under some R535 drivers.
fn records(bytes: &[u8], count: usize, version: u8) -> Vec<Record> {
    let written = bytes.iter().rposition(|byte| *byte != UNTOUCHED).map_or(0, |last| last + 1);
    let size = match version {
        1 => 16,
        _ if written > count * 24 && written <= count * RECORD => RECORD,
        _ => 24,
    };
    let record = |bytes: &[u8]| {
        let used = number(bytes, 8);
        Record { pid: number(bytes, 0) as u32, used: (used != NOT_AVAILABLE).then_some(used) }
    };
    bytes.chunks_exact(size).take(count).map(record).collect()
}

/// The 8 bytes from `at`; the lower half of them is a number of 32 bits that stands there.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// What processes did since `last_seen_us`. A process that did nothing is not listed.
///
/// # Errors
/// `NotFound` where no process did anything; `NotSupported` under MIG.
pub fn utilization(
    device: &NvmlDevice<'_>,
    last_seen_us: u64,
    buffer: &mut Buffer,
) -> Result<Vec<Busy>, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetProcessUtilization.as_ref())?;
    // SAFETY: as in `processes`; a sample has 32 bytes.
    let ask = |count: &mut c_uint, room: *mut u64| unsafe {
        symbol(device.handle(), room.cast(), count, last_seen_us)
    };
    let count = fill(buffer, ask)?;
    let sample = |bytes: &[u8]| Busy {
        pid: number(bytes, 0) as u32,
        time_us: number(bytes, 8),
        sm_percent: number(bytes, 16) as u32,
    };
    Ok(buffer.bytes().chunks_exact(RECORD).take(count).map(sample).collect())
}

/// Total, free and used bytes by the first version of the symbol, which counts what is reserved as used.
///
/// # Errors
/// What NVML answers.
pub fn memory_v1(device: &NvmlDevice<'_>) -> Result<[u64; 3], NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    let mut info = [0_u64; 3];
    // SAFETY: the handle is of this initialised library; `nvmlMemory_t` is three numbers of 64 bits.
    nvml_try(unsafe { symbol(device.handle(), info.as_mut_ptr().cast()) })?;
    Ok(info)
}

/// GPU instance and compute instance of a MIG device.
///
/// # Errors
/// What NVML answers; `NotSupported` for a whole GPU.
pub fn instance_ids(device: &NvmlDevice<'_>) -> Result<(u32, u32), NvmlError> {
    let lib = device.nvml().lib();
    let (gpu, compute) = (
        nvml_sym(lib.nvmlDeviceGetGpuInstanceId.as_ref())?,
        nvml_sym(lib.nvmlDeviceGetComputeInstanceId.as_ref())?,
    );
    let (mut ids, handle) = ((0, 0), || unsafe { device.handle() });
    // SAFETY: the handle is of this initialised library, and each call writes one number, which lives through it.
    nvml_try(unsafe { gpu(handle(), &mut ids.0) })?;
    // SAFETY: as above.
    nvml_try(unsafe { compute(handle(), &mut ids.1) })?;
    Ok(ids)
}

/// Remapped rows: correctable, uncorrectable, and whether one is pending, or failed.
///
/// # Errors
/// What NVML answers; `NotSupported` before Ampere.
pub fn remapped_rows(device: &NvmlDevice<'_>) -> Result<[u32; 4], NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let [mut correctable, mut uncorrectable, mut pending, mut failure] = [0; 4];
    // SAFETY: the handle is of this initialised library, and the four numbers live through the call.
    let code =
        unsafe { symbol(device.handle(), &mut correctable, &mut uncorrectable, &mut pending, &mut failure) };
    nvml_try(code).map(|()| [correctable, uncorrectable, pending, failure])
}

/// How many pages were retired for this cause (0: single bit errors, 1: a double bit error).
///
/// # Errors
/// What NVML answers; `NotSupported` where rows are remapped instead.
pub fn retired_pages(device: &NvmlDevice<'_>, cause: c_uint) -> Result<u32, NvmlError> {
    let symbol = nvml_sym(device.nvml().lib().nvmlDeviceGetRetiredPages.as_ref())?;
    let (mut count, mut nothing) = (0, 0_u64);
    // SAFETY: the handle is of this initialised library; with a count of 0 no address is written.
    let code = unsafe { symbol(device.handle(), cause, &mut count, &mut nothing) };
    nvml_try_count(code).map(|()| count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A buffer as a driver leaves it that writes records of this size.
    fn written(size: usize, processes: &[(u32, u64)]) -> Vec<u8> {
        let mut bytes = vec![UNTOUCHED; LEAST_ROOM * RECORD];
        for (place, (pid, used)) in processes.iter().enumerate() {
            let record = &mut bytes[place * size..][..size];
            record[..4].copy_from_slice(&pid.to_ne_bytes());
            record[8..16].copy_from_slice(&used.to_ne_bytes());
            record[16..].fill(0);
        }
        bytes
    }

    #[test]
    fn a_driver_that_asks_for_ever_more_room_gets_so_much_and_no_more() {
        let (mut buffer, mut rooms) = (Buffer::default(), vec![]);
        let answer = fill(&mut buffer, |count, _| {
            rooms.push(*count as usize);
            *count = c_uint::MAX;
            7 // insufficient size
        });
        assert!(matches!(answer, Err(NvmlError::InsufficientSize(_))), "{answer:?}");
        assert_eq!(rooms, [LEAST_ROOM, MOST_ROOM]);
    }

    #[test]
    fn records_are_found_whatever_size_the_driver_writes() {
        let processes = [(11, 100), (12, u64::MAX), (13, 300)];
        let wanted = processes.map(|(pid, used)| Record { pid, used: (used != u64::MAX).then_some(used) });
        for (size, version) in [(16, 1), (24, 2), (24, 3), (32, 3)] {
            assert_eq!(records(&written(size, &processes), 3, version), wanted, "{size} bytes, v{version}");
        }
        assert_eq!(records(&written(24, &[]), 0, 3), []);
    }
}
