//! Checks of the GPU driver.

use std::time::Duration;

use super::{ANSWER_WITHIN, Check};
use crate::collect::gpu::{self, Control, Pids, Probe};
use crate::config::Config;
use crate::discover::{Hierarchy, Version};

const NAME: &str = "NVML";
const LOST: &str = "no GPU memory";
/// How often it is looked whether the thread has an answer.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The driver; and if it answers, whether its processes can be told, and whether it keeps their maxima.
///
/// Where memledger serves already, its own thread has looked: all calls of the driver stay on that thread.
pub async fn examine(config: &Config, control: Option<&Control>) -> Vec<Check> {
    let answer = match control {
        Some(control) => tokio::time::timeout(ANSWER_WITHIN, told(control)).await.ok(),
        None => probe(config).await,
    };
    let device = config.roots.has_device("nvidiactl") || config.roots.has_device("nvidia0");
    let fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=utility; Compose: a device reservation of driver nvidia; or set --gpu.nvml-library";
    match answer {
        Some(Ok(probe)) => found(config, &probe),
        Some(Err(error)) if device || config.gpu.library.is_some() => {
            vec![Check::bad(NAME, error, LOST, fix)]
        }
        Some(Err(error)) => vec![Check::none(NAME, format!("no GPU driver ({error})"), LOST, fix)],
        None => vec![Check::bad(
            NAME,
            format!("the driver does not answer within {ANSWER_WITHIN:?}"),
            LOST,
            "look at the kernel log for Xid messages; a GPU that fell off the bus needs a reboot",
        )],
    }
}

async fn told(control: &Control) -> Result<Probe, String> {
    loop {
        if let Some(told) = control.told() {
            return told;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Looks for itself, on a thread that nobody waits for longer than the driver may take.
async fn probe(config: &Config) -> Option<Result<Probe, String>> {
    let (settings, roots) = (config.gpu.clone(), config.roots.clone());
    let v1 = Hierarchy::detect(&config.roots).is_ok_and(|hierarchy| hierarchy.version == Version::V1);
    let (answer, answered) = tokio::sync::oneshot::channel();
    let asked = std::thread::Builder::new().name("nvml-probe".into()).spawn(move || {
        let _ = answer.send(gpu::probe(&settings, &roots, v1));
    });
    if let Err(error) = asked {
        return Some(Err(error.to_string()));
    }
    tokio::time::timeout(ANSWER_WITHIN, answered).await.ok()?.ok()
}

fn found(config: &Config, probe: &Probe) -> Vec<Check> {
    let driver =
        probe.driver_version.as_ref().map_or_else(String::new, |version| format!("driver {version}, "));
    let instances = match probe.instances {
        0 => String::new(),
        count => format!(", {count} MIG instances"),
    };
    let told = format!("{driver}{} GPUs{instances}", probe.counted);
    let wanted = config.gpu.expected.unwrap_or(probe.counted);
    let driver = if probe.visible < wanted {
        let found = format!("{told}; {} of {wanted} answer", probe.visible);
        let fix = "look at the kernel log for Xid messages; a GPU that fell off the bus needs a reboot";
        Check::bad(NAME, found, "all figures of the others", fix)
    } else {
        Check::good(NAME, told)
    };
    let mut checks = vec![driver, attribution(probe)];
    if probe.without_accounting > 0 {
        checks.push(
            Check::none(
                "GPU accounting",
                format!("off on {} GPUs", probe.without_accounting),
                "peaks of processes are the highest of the samples, not the driver's exact maximum",
                "nvidia-smi -am 1 (as root; until the driver is unloaded: keep it with persistence mode)",
            )
            .detail(),
        );
    }
    checks
}

fn attribution(probe: &Probe) -> Check {
    let name = "GPU processes";
    match probe.pids {
        Pids::Proven if probe.named == 0 => Check::good(name, "none now").detail(),
        Pids::Proven => Check::good(name, format!("{} named, with this host's pids", probe.named)).detail(),
        Pids::Withheld(reason) => Check::bad(
            name,
            format!("not believed: {reason}"),
            "all GPU memory is unattributed",
            "docker run --pid=host; Compose: pid: host; Kubernetes: hostPID: true",
        ),
    }
}
