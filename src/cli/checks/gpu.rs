//! Checks of the GPU driver.

use std::sync::Arc;
use std::time::Duration;

use super::{Check, RESPONSE_TIMEOUT};
use crate::config::Config;
use crate::discover::{Hierarchy, Version};
use crate::gpu::{self, DriverState, GpuIdentity, NvmlProbe, PidTrust};

pub(super) const NAME: &str = "NVML";
const LOST: &str = "no GPU memory";
/// How often the result of the GPU thread is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Checks the driver; and if it responds, whether its processes can be attributed, and whether accounting mode is on.
///
/// In a running `serve` the result comes from the GPU thread: all calls of the driver stay on that thread. Also returns the GPUs that answer.
pub async fn run_checks(
    config: &Config,
    driver_state: Option<&DriverState>,
) -> (Vec<Check>, Vec<Arc<GpuIdentity>>) {
    let result = match driver_state {
        Some(driver_state) => {
            tokio::time::timeout(RESPONSE_TIMEOUT, probe_of_worker(driver_state)).await.ok()
        }
        None => probe(config).await,
    };
    let device = config.host_paths.has_device("nvidiactl") || config.host_paths.has_device("nvidia0");
    let fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=utility; Compose: a device reservation of driver nvidia; or set --gpu.nvml-library";
    let checks = match result {
        Some(Ok(probe)) => return (checks_of(config, &probe), probe.devices),
        Some(Err(error)) if device || config.gpu.library.is_some() => {
            vec![Check::bad(NAME, error, LOST, fix)]
        }
        Some(Err(error)) => vec![Check::none(NAME, format!("no GPU driver ({error})"), LOST, fix)],
        None => vec![Check::bad(
            NAME,
            format!("the driver does not respond within {RESPONSE_TIMEOUT:?}"),
            LOST,
            "check the kernel log for Xid messages; a GPU that fell off the bus needs a reboot",
        )],
    };
    (checks, vec![])
}

/// Waits for the probe of the GPU thread.
async fn probe_of_worker(driver_state: &DriverState) -> Result<NvmlProbe, String> {
    loop {
        if let Some(probe) = driver_state.probe_result() {
            return probe;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Probes the driver.
async fn probe(config: &Config) -> Option<Result<NvmlProbe, String>> {
    let (settings, host_paths) = (config.gpu.clone(), config.host_paths.clone());
    let v1 = Hierarchy::detect(&config.host_paths).is_ok_and(|hierarchy| hierarchy.version == Version::V1);
    let probe = move || gpu::probe(&settings, &host_paths, v1, RESPONSE_TIMEOUT);
    // the NVML process would end with an idle thread of the pool, so the probe ends it first
    tokio::task::spawn_blocking(probe).await.ok()
}

fn checks_of(config: &Config, probe: &NvmlProbe) -> Vec<Check> {
    let driver =
        probe.driver_version.as_ref().map_or_else(String::new, |version| format!("driver {version}, "));
    let instances = match probe.instances {
        0 => String::new(),
        count => format!(", {count} MIG instances"),
    };
    let found = format!("{driver}{} GPUs{instances}", probe.counted);
    let expected = config.gpu.expected.unwrap_or(probe.counted);
    let driver = if probe.visible < expected {
        let found = format!("{found}; {} of {expected} respond", probe.visible);
        let fix = "check the kernel log for Xid messages; a GPU that fell off the bus needs a reboot";
        Check::bad(NAME, found, "all metrics of the others", fix)
    } else {
        Check::good(NAME, found)
    };
    vec![driver, attribution(probe)]
}

fn attribution(probe: &NvmlProbe) -> Check {
    let name = "GPU processes";
    match probe.pids {
        PidTrust::Trusted if probe.named == 0 => Check::good(name, "none now").detail(),
        PidTrust::Trusted => Check::good(name, format!("{} with pids of this host", probe.named)).detail(),
        PidTrust::Untrusted(reason) => Check::bad(
            name,
            format!("untrusted pids: {reason}"),
            "all GPU memory is unattributed",
            "docker run --pid=host; Compose: pid: host; Kubernetes: hostPID: true",
        ),
    }
}
