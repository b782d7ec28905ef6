//! Errors of starts that failed, by what runtimes say of them.

use serde::Serialize;

/// Why a start failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StartError {
    /// The engine has no NVIDIA runtime.
    NoNvidiaRuntime,
    /// The driver was updated, and its kernel module was not.
    DriverMismatch,
    /// NVIDIA's runtime could not use the driver.
    NvidiaRuntimeFailed,
    /// A command, its interpreter or a mounted file does not exist.
    NoSuchFile,
    /// The command is not executable, or may not be read.
    NotPermitted,
    /// Another program has the port.
    PortInUse,
    /// A disk of the engine is full.
    DiskFull,
}

/// Parts of errors in lower case: the first that is found counts.
const TEXTS: [(&[&str], StartError); 7] = [
    (
        &["could not select device driver", "unknown or invalid runtime name: nvidia"],
        StartError::NoNvidiaRuntime,
    ),
    (&["driver/library version mismatch"], StartError::DriverMismatch),
    (&["nvidia-container-cli", "nvidia-container-runtime", "libnvidia-ml"], StartError::NvidiaRuntimeFailed),
    (&["executable file not found", "no such file or directory"], StartError::NoSuchFile),
    (&["permission denied"], StartError::NotPermitted),
    (&["port is already allocated", "address already in use"], StartError::PortInUse),
    (&["no space left on device"], StartError::DiskFull),
];

/// Returns what a runtime's error is of, if that is known.
pub fn start_error(text: &str) -> Option<StartError> {
    let lower = text.to_lowercase();
    let known = TEXTS.iter().find(|(texts, _)| texts.iter().any(|text| lower.contains(text)));
    known.map(|(_, error)| *error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_driver_is_not_one_of_its_file() {
        let nvml = "nvidia-container-cli: initialization error: nvml error: Driver/library version mismatch";
        assert_eq!(start_error(nvml), Some(StartError::DriverMismatch));
        let library = "libnvidia-ml.so.1: cannot open shared object file: no such file or directory";
        assert_eq!(start_error(library), Some(StartError::NvidiaRuntimeFailed));
        assert_eq!(start_error("exec: \"train\": executable file not found"), Some(StartError::NoSuchFile));
        assert_eq!(start_error("context deadline exceeded"), None);
    }
}
