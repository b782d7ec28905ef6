//! The check of GPUs with the kernel's DRM statistics.

use super::Check;
use crate::collect::drm;
use crate::config::Config;

const LOST: &str = "no memory and no utilisation of GPUs of AMD, Intel and others";
const LOST_PROCESSES: &str = "all memory of these GPUs stays unattributed";
const LOST_SOME: &str = "the memory of those processes on these GPUs stays unattributed";
const CAPABILITIES: &str = "docker run --cap-add SYS_PTRACE --cap-add DAC_READ_SEARCH; Compose: cap_add: [SYS_PTRACE, DAC_READ_SEARCH]; \
                            systemd: AmbientCapabilities=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH";

/// Checks which GPUs there are, and whether the processes that use them are readable.
pub fn run_checks(config: &Config) -> Check {
    let name = "DRM";
    let place = config.host_paths.sys.join("class/drm");
    if !config.collectors.contains(drm::NAME) {
        return Check::none(name, "switched off", LOST, "--collector.drm");
    }
    let probe = match drm::probe(&config.host_paths) {
        Ok(probe) => probe,
        Err(error) => {
            let fix =
                "mount the host's /sys and /proc read-only and set --path.sysfs and --path.procfs to them";
            return Check::bad(name, error.to_string(), LOST, fix);
        }
    };
    if probe.gpus.is_empty() {
        let found = format!("no GPU of a driver other than NVIDIA's at {}", place.display());
        return Check::none(name, found, LOST, "load the driver, or set --path.sysfs to the host's /sys");
    }
    let gpus = probe.gpus.join(", ");
    match () {
        () if !config.host_paths.in_initial_pid_namespace() => Check::bad(
            name,
            format!("{gpus}; not in the host's pid namespace"),
            LOST_PROCESSES,
            "docker run --pid=host; Compose: pid: host; Kubernetes: hostPID: true",
        ),
        () if probe.denied > probe.readable => {
            let found = format!("{gpus}; the open files of most processes are unreadable");
            Check::bad(name, found, LOST_PROCESSES, CAPABILITIES)
        }
        () if probe.denied > 0 => {
            let found = format!("{gpus}; the open files of {} processes are unreadable", probe.denied);
            Check::bad(name, found, LOST_SOME, CAPABILITIES)
        }
        () => Check::good(name, gpus),
    }
}
