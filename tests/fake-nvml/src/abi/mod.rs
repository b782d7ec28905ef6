//! The C functions: the common part of every entry point.
//!
//! An entry point is written as a function of a [`Call`] and the C arguments, inside `entry_points!`, which
//! exports it and records its name. Pointers from C come as [`Out`] and [`Text`], so that only this file
//! touches raw memory.
//!
//! The order of checks in a call: it is counted, hangs, waits, is missing in the driver, fails by injection; then
//! *uninitialised*, an invalid handle, a lost GPU, a failure injected into that GPU; then its result.

mod device;
mod events;
mod fields;
mod health;
mod memory;
mod mig;
mod numbers;
mod processes;
mod sensors;
mod system;

use std::ffi::{CStr, c_char, c_uint};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH as VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND as FUNCTION_NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST as GPU_IS_LOST,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as INSUFFICIENT_SIZE,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED, nvmlReturn_enum_NVML_ERROR_TIMEOUT as TIMEOUT,
    nvmlReturn_enum_NVML_ERROR_UNINITIALIZED as UNINITIALIZED, nvmlReturn_enum_NVML_SUCCESS as SUCCESS,
    nvmlReturn_t,
};

pub(crate) use device::bus_address;

use crate::gpu::{Gpu, Memory, MigDevice};
use crate::library::{Loaded, library};
use crate::state::Fault;

/// A result, or the code that the C caller gets instead.
type NvmlResult<T = ()> = Result<T, nvmlReturn_t>;

/// `NVML_VALUE_NOT_AVAILABLE` of 64 bits.
const NOT_AVAILABLE: u64 = u64::MAX;
/// An instance id on a GPU that is not in MIG mode, and `NVML_VALUE_NOT_AVAILABLE` of 32 bits.
const NO_INSTANCE: u32 = u32::MAX;

/// Exports C functions. Each is written with its [`Call`] as first parameter, before the arguments that C
/// has.
macro_rules! entry_points {
    ($($(#[$doc:meta])* fn $name:ident($call:ident $(, $argument:ident: $kind:ty)* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
                $crate::abi::respond(stringify!($name), |$call| $body)
            }
        )*
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
use entry_points;

/// The names of all entry points.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    let by_file = [
        device::NAMES,
        events::NAMES,
        fields::NAMES,
        health::NAMES,
        memory::NAMES,
        mig::NAMES,
        numbers::NAMES,
        processes::NAMES,
        sensors::NAMES,
        system::NAMES,
    ];
    by_file.into_iter().flatten().copied()
}

/// Those of them that `numbers` of a GPU may override.
pub(crate) fn number_names() -> &'static [&'static str] {
    numbers::NAMES
}

fn respond(symbol: &'static str, body: impl FnOnce(&Call) -> NvmlResult) -> nvmlReturn_t {
    match Call::enter(symbol).and_then(|call| body(&call)) {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

/// One call of one symbol, and the state that it sees.
struct Call {
    symbol: &'static str,
    loaded: Arc<Loaded>,
}

impl Call {
    #[allow(clippy::disallowed_methods)] // for the time that a real driver takes
    fn enter(symbol: &'static str) -> NvmlResult<Self> {
        let loaded = library().enter(symbol);
        let state = &loaded.state;
        while state.hang.contains(symbol) {
            thread::park();
        }
        if let Some(milliseconds) = state.slow_ms.get(symbol) {
            thread::sleep(Duration::from_millis(*milliseconds));
        }
        if let Some(microseconds) = state.busy_us.get(symbol) {
            let began = Instant::now();
            while began.elapsed() < Duration::from_micros(*microseconds) {
                std::hint::spin_loop();
            }
        }
        if let Some(fault) = state.faults.get(symbol) {
            commit(*fault);
        }
        if state.function_not_found.contains(symbol) {
            return Err(FUNCTION_NOT_FOUND);
        }
        injected(state.errors.get(symbol))?;
        Ok(Self { symbol, loaded })
    }

    /// Returns the state; fails if the library is not initialised.
    fn loaded(&self) -> NvmlResult<&Loaded> {
        if library().initialised == 0 { Err(UNINITIALIZED) } else { Ok(&self.loaded) }
    }

    /// Returns the target of a handle.
    fn target(&self, device: nvmlDevice_t) -> NvmlResult<Target> {
        let loaded = self.loaded()?;
        let (index, mig) = handle_parts(device).ok_or(INVALID_ARGUMENT)?;
        let gpu = library().take_step(loaded, self.symbol, index).ok_or(INVALID_ARGUMENT)?;
        if gpu.lost {
            return Err(GPU_IS_LOST);
        }
        injected(gpu.errors.get(self.symbol))?;
        let mig = match mig {
            None => None,
            Some(number) => {
                Some(gpu.mig.as_deref().and_then(|all| all.get(number)).cloned().ok_or(INVALID_ARGUMENT)?)
            }
        };
        Ok(Target { index, gpu, mig })
    }

    /// Returns the GPU of a handle, for values that a MIG device does not have.
    fn gpu(&self, device: nvmlDevice_t) -> NvmlResult<Arc<Gpu>> {
        let target = self.target(device)?;
        if target.mig.is_some() { Err(NOT_SUPPORTED) } else { Ok(target.gpu) }
    }

    /// Returns a list as NVML does: `count` is the capacity of the buffer before, and the length of the list after.
    fn put_list<T: Copy>(
        &self,
        device: nvmlDevice_t,
        count: Out<c_uint>,
        buffer: Out<T>,
        list: &[T],
    ) -> NvmlResult {
        let room = count.get()? as usize;
        count.put(list.len() as c_uint)?;
        if list.is_empty() {
            return Ok(());
        }
        if room < list.len() || buffer.is_null() {
            return Err(self.too_small(device));
        }
        buffer.slice(list.len())?.copy_from_slice(list);
        Ok(())
    }

    /// Reverts the script step of a call that only read the length of a list.
    fn too_small(&self, device: nvmlDevice_t) -> nvmlReturn_t {
        if let Some((index, _)) = handle_parts(device) {
            library().give_step_back(self.symbol, index);
        }
        INSUFFICIENT_SIZE
    }
}

fn commit(fault: Fault) {
    const MIB: usize = 1 << 20;
    match fault {
        // SAFETY: none: an address of the first page is never mapped, and the process is meant to end here.
        Fault::Segfault => unsafe { std::ptr::without_provenance_mut::<u32>(16).write_volatile(1) },
        Fault::Abort => std::process::abort(),
        Fault::Grow => {
            let mut blocks: Vec<Vec<u8>> = Vec::new();
            while blocks.len() < 512 {
                blocks.push(vec![1; MIB]);
            }
            loop {
                thread::park();
            }
        }
        Fault::Garbage => {
            let noise: Vec<u8> = (0..64 * 1024_u32).map(|number| (number * 7 + number / 251) as u8).collect();
            // SAFETY: the buffer is valid for its length.
            unsafe { libc::write(0, noise.as_ptr().cast(), noise.len()) };
        }
    }
}

fn injected(code: Option<&u32>) -> NvmlResult {
    match code {
        None | Some(0) => Ok(()),
        Some(code) => Err(*code),
    }
}

/// A GPU, or one MIG device of it.
struct Target {
    index: usize,
    gpu: Arc<Gpu>,
    mig: Option<MigDevice>,
}

impl Target {
    fn memory(&self) -> NvmlResult<&Memory> {
        let memory = self.mig.as_ref().map_or(&self.gpu.memory, |mig| &mig.memory);
        if memory.supported { Ok(memory) } else { Err(NOT_SUPPORTED) }
    }
}

/// A handle is no address: GPU index + 1 in its low 16 bits, MIG device number + 1 above. So it stays the same while the
/// state changes, and a handle of something gone is an invalid argument.
fn handle(gpu: usize, mig: Option<usize>) -> nvmlDevice_t {
    std::ptr::without_provenance_mut((gpu + 1) | (mig.map_or(0, |number| number + 1) << 16))
}

fn handle_parts(device: nvmlDevice_t) -> Option<(usize, Option<usize>)> {
    let bits = device.addr();
    Some(((bits & 0xffff).checked_sub(1)?, (bits >> 16).checked_sub(1)))
}

/// A pointer from C for a result, or an array of results.
///
/// Only a C caller can create one, and NVML's contract applies: the pointer is null or points to a value of the type in
/// the function's prototype, for the duration of the call.
#[repr(transparent)]
struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    fn is_null(&self) -> bool {
        self.0.is_null()
    }

    fn put(&self, value: T) -> NvmlResult {
        if self.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the contract of `Out` space for one T.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Reads what the caller wrote there before the call, such as a version or a size.
    fn get(&self) -> NvmlResult<T> {
        if self.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the contract of `Out` an initialised T.
        Ok(unsafe { self.0.read() })
    }

    /// The caller's array of `length` elements.
    #[allow(clippy::mut_from_ref)] // the memory is the caller's, not that of `self`
    fn slice(&self, length: usize) -> NvmlResult<&mut [T]> {
        if self.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the contract of `Out` an array of at least the length that the caller
        // gave.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0, length) })
    }

    fn cast<U: Copy>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Writes a C string into a buffer of `length` bytes.
    fn put_text(&self, length: c_uint, text: &str) -> NvmlResult {
        if text.len() >= length as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        put_chars(self.slice(text.len() + 1)?, text);
        Ok(())
    }
}

/// Copies as much of `text` as fits with a final zero.
fn put_chars(buffer: &mut [c_char], text: &str) {
    buffer.fill(0);
    let room = buffer.len().saturating_sub(1);
    for (place, byte) in buffer.iter_mut().take(room).zip(text.bytes()) {
        *place = byte.cast_signed();
    }
}

/// A string from C, with the contract of [`Out`].
#[repr(transparent)]
struct Text(*const c_char);

impl Text {
    fn get(&self) -> NvmlResult<String> {
        if self.0.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the contract of `Text` a C string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// `NVML_STRUCT_VERSION`: the size of the struct, and its version in the high byte.
fn check_version<T>(given: c_uint, version: c_uint) -> NvmlResult {
    if given == size_of::<T>() as c_uint | version << 24 { Ok(()) } else { Err(VERSION_MISMATCH) }
}

/// Microseconds since 1970, as NVML stamps its samples.
#[allow(clippy::disallowed_methods)] // a driver has a clock of its own
fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}
