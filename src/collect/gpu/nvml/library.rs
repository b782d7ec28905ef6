//! Opening the library, and what its errors say.

use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Loads and initialises the library: this one, or the driver's own.
///
/// # Errors
/// No such library (`LibloadingError`), or the driver is not there.
pub fn open(library: Option<&Path>) -> Result<Nvml, NvmlError> {
    match library {
        Some(path) => Nvml::builder().lib_path(path.as_os_str()).init(),
        None => match Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init() {
            Err(NvmlError::LibloadingError(_)) => Nvml::init(),
            other => other,
        },
    }
}

/// Opens the library once and tells driver version and number of devices, for `doctor`.
///
/// # Errors
/// The library cannot be loaded or initialised.
pub fn probe(library: Option<&Path>) -> Result<(Option<String>, u32), NvmlError> {
    let nvml = open(library)?;
    Ok((nvml.sys_driver_version().ok(), nvml.device_count()?))
}

/// The whole chain of an error: libloading's own text says only that loading failed.
pub fn describe(error: &NvmlError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A field's value; `None` if this device does not have it.
///
/// # Errors
/// The device as a whole is lost, or the library has to be opened anew.
pub fn field<T>(value: Result<T, NvmlError>, faults: &mut Vec<&'static str>) -> Result<Option<T>, NvmlError> {
    match value {
        Ok(value) => Ok(Some(value)),
        Err(error) if error_is_the_devices(&error) || error_is_the_librarys(&error) => Err(error),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
            Ok(None)
        }
        Err(error) => {
            faults.push(if matches!(error, NvmlError::NoPermission) { "permission" } else { "io" });
            Ok(None)
        }
    }
}

/// The device has fallen off the bus, or waits for a reset: nothing more can be asked of it.
fn error_is_the_devices(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost)
}

/// The library itself has to be opened anew: the driver was unloaded or replaced under it.
pub fn error_is_the_librarys(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
}
