//! Starts that failed, by what a runtime says of them.

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

/// Returns what to do about a start that failed.
pub(super) fn advice(error: &str) -> Vec<String> {
    const KNOWN: [(&[&str], &str); 7] = [
        (
            &["could not select device driver", "unknown or invalid runtime name: nvidia"],
            "The engine has no NVIDIA runtime: install the NVIDIA Container Toolkit, then nvidia-ctk runtime configure --runtime=docker and \
             restart the engine.",
        ),
        (
            &["driver/library version mismatch"],
            "The driver was updated and its kernel module was not: reboot, or unload and load the nvidia modules.",
        ),
        (
            &["nvidia-container-cli", "nvidia-container-runtime", "libnvidia-ml"],
            "NVIDIA's container runtime could not use the driver: does nvidia-smi work on the host? `memledger doctor` checks it too.",
        ),
        (
            &["executable file not found", "no such file or directory"],
            "The command, its interpreter (the first line of a script), or a mounted file does not exist: check entrypoint, command and volumes.",
        ),
        (
            &["permission denied"],
            "The command is not executable, or may not be read: chmod +x, or another user.",
        ),
        (
            &["port is already allocated", "address already in use"],
            "Another program has that port: ss -ltnp shows it.",
        ),
        (&["no space left on device"], "A disk of the engine is full: df -h, docker system df."),
    ];
    let lower = error.to_lowercase();
    let known = KNOWN.iter().find(|(texts, _)| texts.iter().any(|text| lower.contains(&text.to_lowercase())));
    known.map(|(_, advice)| (*advice).to_owned()).into_iter().collect()
}
