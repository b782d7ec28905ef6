//! The check of GPUs of AMD.

use super::Check;
use crate::config::Config;
use crate::gpu::amdgpu;

pub(super) const NAME: &str = "AMD GPUs";
const LOST: &str = "no memory and no utilisation of GPUs of AMD";
const LOST_PROCESSES: &str = "all memory of these GPUs stays unattributed";

/// Checks which GPUs there are, and whether their processes can be found.
pub fn run_checks(config: &Config) -> Check {
    let name = NAME;
    let place = config.host_paths.sys.join("class/drm");
    if !config.collectors.contains(amdgpu::NAME) {
        return Check::none(name, "switched off", LOST, "--collector.amdgpu");
    }
    let gpus = match amdgpu::probe(&config.host_paths) {
        Ok(gpus) => gpus,
        Err(error) => {
            let fix =
                "mount the host's /sys and /proc read-only and set --path.sysfs and --path.procfs to them";
            return Check::bad(name, error.to_string(), LOST, fix);
        }
    };
    if gpus.is_empty() {
        let found = format!("no GPU of amdgpu at {}", place.display());
        return Check::none(name, found, LOST, "load the driver, or set --path.sysfs to the host's /sys");
    }
    let gpus = gpus.join(", ");
    if !config.host_paths.in_initial_pid_namespace() {
        return Check::bad(
            name,
            format!("{gpus}; not in the host's pid namespace"),
            LOST_PROCESSES,
            "docker run --pid=host; Compose: pid: host; Kubernetes: hostPID: true",
        );
    }
    Check::good(name, gpus)
}
