//! What is said of starts that failed.

use crate::parse::start_error::StartError;
use crate::text::sanitize_for_terminal;

/// Characters of an error that are shown.
const MAX_CHARS: usize = 300;

/// Returns the first line of a runtime's error, of limited length.
pub(super) fn summary(error: &str) -> String {
    let line = error.split('\n').find(|line| !line.trim().is_empty()).unwrap_or_default();
    let shown = sanitize_for_terminal(line);
    match shown.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &shown[..end]),
        None => shown,
    }
}

/// Returns what to do about such an error.
pub(super) fn fix_start_error(error: StartError) -> &'static str {
    match error {
        StartError::NoNvidiaRuntime => {
            "The engine has no NVIDIA runtime: install the NVIDIA Container Toolkit, then nvidia-ctk runtime configure --runtime=docker and \
             restart the engine."
        }
        StartError::DriverMismatch => {
            "The driver was updated and its kernel module was not: reboot, or unload and load the nvidia modules."
        }
        StartError::NvidiaRuntimeFailed => {
            "NVIDIA's container runtime could not use the driver: does nvidia-smi work on the host? `memledger doctor` checks it too."
        }
        StartError::NoSuchFile => {
            "The command, its interpreter (the first line of a script), or a mounted file does not exist: check entrypoint, command and volumes."
        }
        StartError::NotPermitted => {
            "The command is not executable, or may not be read: chmod +x, or another user."
        }
        StartError::PortInUse => "Another program has that port: ss -ltnp shows it.",
        StartError::DiskFull => "A disk of the engine is full: df -h, docker system df.",
    }
}
