//! Initialisation, shutdown, versions, and names of errors and processes.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs;

use nvml_wrapper_sys::bindings::nvmlReturn_t;

use super::{Call, NOT_FOUND, NvmlResult, Out, UNINITIALIZED, entry_points, put_chars};
use crate::library::library;

entry_points! {
    fn nvmlInit(call) {
        initialise(call)
    }

    fn nvmlInit_v2(call) {
        initialise(call)
    }

    fn nvmlInitWithFlags(call, _flags: c_uint) {
        initialise(call)
    }

    fn nvmlShutdown(_call) {
        let mut library = library();
        library.initialised = library.initialised.checked_sub(1).ok_or(UNINITIALIZED)?;
        if library.initialised == 0 {
            library.event_sets.clear();
        }
        Ok(())
    }

    fn nvmlSystemGetDriverVersion(call, version: Out<c_char>, length: c_uint) {
        version.put_text(length, &call.loaded()?.state.driver_version)
    }

    fn nvmlSystemGetNVMLVersion(call, version: Out<c_char>, length: c_uint) {
        version.put_text(length, &call.loaded()?.state.nvml_version)
    }

    fn nvmlSystemGetCudaDriverVersion(call, version: Out<c_int>) {
        version.put(call.loaded()?.state.cuda_version)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(call, version: Out<c_int>) {
        version.put(call.loaded()?.state.cuda_version)
    }

    /// The command path of a process, if it runs on this host.
    fn nvmlSystemGetProcessName(call, pid: c_uint, name: Out<c_char>, length: c_uint) {
        call.loaded()?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NOT_FOUND)?;
        let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
        // a name longer than the buffer is truncated, not rejected
        put_chars(name.slice(length as usize)?, &String::from_utf8_lossy(first));
        Ok(())
    }
}

fn initialise(call: &Call) -> NvmlResult {
    match call.loaded.state.init_error {
        None | Some(0) => {
            library().initialised += 1;
            Ok(())
        }
        Some(code) => Err(code),
    }
}

/// Similar to the texts of the driver's own library; the bindings have their own.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    error_words(result).as_ptr()
}

fn error_words(code: nvmlReturn_t) -> &'static CStr {
    match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        25 => c"Argument version mismatch",
        27 => c"Not Ready",
        28 => c"GPU not found",
        _ => c"Unknown Error",
    }
}

/// Not part of NVML: writes the counts of calls as JSON into a buffer of `length` bytes, with a final zero, truncated if
/// necessary. Returns the length of the whole text, without the zero.
#[unsafe(no_mangle)]
extern "C" fn fake_nvml_calls(buffer: Out<c_char>, length: usize) -> usize {
    let json = library().calls_json();
    if let Ok(buffer) = buffer.slice(length) {
        put_chars(buffer, &json);
    }
    json.len()
}
