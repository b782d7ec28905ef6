//! Finds and opens the library, and classifies its errors.

use std::path::{Path, PathBuf};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// The driver's name for its library.
const NAME: &str = "libnvidia-ml.so.1";
/// Where distributions and the container toolkit install it. Elsewhere the loader's own search finds it.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
];

/// Loads and initialises the configured library, or the driver's own.
///
/// # Errors
/// No such library (`LibloadingError`), or no driver.
pub fn open(configured: Option<&Path>) -> Result<Nvml, NvmlError> {
    let search_path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = std::env::split_paths(&search_path).chain(FOLDERS.iter().map(PathBuf::from));
    let mut candidates = folders.map(|folder| folder.join(NAME));
    let path = match configured {
        Some(path) => path.to_path_buf(),
        None => candidates.find(|path| path.is_absolute() && path.exists()).unwrap_or_else(|| NAME.into()),
    };
    Nvml::builder().lib_path(path.as_os_str()).init()
}

/// Returns the value of a field; `None` if this device does not have it.
///
/// # Errors
/// The whole device is lost, or the library must be reopened.
pub fn field<T>(
    value: Result<T, NvmlError>,
    read_errors: &mut Vec<&'static str>,
) -> Result<Option<T>, NvmlError> {
    match value {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_device_error(&error) || is_library_error(&error) => Err(error),
        Err(error) if !is_transient(&error) => Ok(None),
        Err(error) => {
            read_errors.push(error_label(&error));
            Ok(None)
        }
    }
}

/// Returns the label by which an error is counted.
pub fn error_label(error: &NvmlError) -> &'static str {
    if matches!(error, NvmlError::NoPermission) { "permission" } else { "io" }
}

/// Returns true if a retry may succeed: the error is neither *not supported* nor a missing symbol.
pub fn is_transient(error: &NvmlError) -> bool {
    use NvmlError::{FailedToLoadSymbol, FunctionNotFound, NotSupported};
    !matches!(error, NotSupported | FailedToLoadSymbol(_) | FunctionNotFound) && !is_dropped(error)
}

/// Returns true if the driver has the function no more, or in another version: *argument version mismatch* and *deprecated* of newer
/// drivers, which the wrapper does not name.
pub fn is_dropped(error: &NvmlError) -> bool {
    matches!(error, NvmlError::UnexpectedVariant(25 | 26))
}

/// Returns true if the device has fallen off the bus, is gone, or waits for a reset: no further call to it can succeed.
fn is_device_error(error: &NvmlError) -> bool {
    const GPU_NOT_FOUND: u32 = 28; // not named by the wrapper
    matches!(
        error,
        NvmlError::GpuLost | NvmlError::ResetRequired | NvmlError::UnexpectedVariant(GPU_NOT_FOUND)
    )
}

/// Returns true if the library must be reopened: the driver was unloaded or replaced.
pub fn is_library_error(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
}
