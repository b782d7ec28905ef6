//! Finding and opening the library, and what its errors say.
//!
//! The loader knows a library by the name that it was opened by, and answers the same name with the copy that is loaded,
//! whatever file has that name by now. While a call of the old copy hangs, it cannot be unloaded, and some libraries never
//! are; so a new file is opened by another spelling of its path.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::collect::gpu::control::Control;

/// What the driver calls its library.
const NAME: &str = "libnvidia-ml.so.1";
/// Where distributions and the container toolkit put it. Elsewhere the loader's own search finds it.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
];

/// Spellings of one path, whose length is bounded.
const MOST_SPELLINGS: usize = 1_000;

static WAS_OPENED: AtomicBool = AtomicBool::new(false);

/// Whether a library was opened since the start of the process. It may not let the process end: its destructors may wait
/// for a call that hangs.
pub fn was_opened() -> bool {
    WAS_OPENED.load(Ordering::Relaxed)
}

/// A library file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    path: PathBuf,
    /// Device and inode of the file; `None` if there is none, or if only the loader knows where it is.
    file: Option<(u64, u64)>,
}

impl Library {
    /// The library that would be loaded now: this one, or the driver's own.
    pub fn find(chosen: Option<&Path>) -> Self {
        let path = match chosen {
            Some(path) => path.to_path_buf(),
            None => {
                let first = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
                let folders = std::env::split_paths(&first).chain(FOLDERS.iter().map(PathBuf::from));
                let places = folders.map(|folder| folder.join(NAME));
                places
                    .into_iter()
                    .find(|path| path.is_absolute() && path.exists())
                    .unwrap_or_else(|| NAME.into())
            }
        };
        let file = std::fs::metadata(&path).ok().map(|file| (file.dev(), file.ino()));
        Self { path, file }
    }

    /// Whether another file has taken its place since.
    pub fn was_replaced(&self, chosen: Option<&Path>) -> bool {
        let now = Self::find(chosen);
        now.file.is_some() && now.file != self.file
    }

    /// Loads and initialises it. A file that has taken the place of another one that was opened before is opened by
    /// another spelling of its path.
    ///
    /// # Errors
    /// No such library (`LibloadingError`), or the driver is not there.
    pub fn open(&self, control: &Control) -> Result<Nvml, NvmlError> {
        let spelling = self.file.map_or(0, |file| control.spelling(file)) % MOST_SPELLINGS;
        let spelled = match (self.path.parent(), self.path.file_name()) {
            (Some(folder), Some(name)) if spelling > 0 && folder.is_absolute() => {
                let mut spelled = folder.as_os_str().to_owned();
                spelled.push("/");
                spelled.push("./".repeat(spelling));
                spelled.push(name);
                spelled
            }
            _ => self.path.as_os_str().to_owned(),
        };
        WAS_OPENED.store(true, Ordering::Relaxed);
        Nvml::builder().lib_path(&spelled).init()
    }
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
        Err(error) if !error_may_pass(&error) => Ok(None),
        Err(error) => {
            faults.push(fault(&error));
            Ok(None)
        }
    }
}

/// As what an error is counted.
pub fn fault(error: &NvmlError) -> &'static str {
    if matches!(error, NvmlError::NoPermission) { "permission" } else { "io" }
}

/// The next question may be answered: the error is no *not supported*, and no symbol that is missing.
pub fn error_may_pass(error: &NvmlError) -> bool {
    !matches!(error, NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound)
}

/// The device has fallen off the bus, or waits for a reset: nothing more can be asked of it.
fn error_is_the_devices(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost)
}

/// The library itself has to be opened anew: the driver was unloaded or replaced under it.
pub fn error_is_the_librarys(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
}
