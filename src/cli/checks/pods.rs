//! Checks of the sources of pods; and, in a pod, which value of the Helm chart fixes a problem.
//!
//! A value fixes what is missing. A socket that exists and fails needs something else: the fix of its error, or the usual
//! cause of that error in a pod.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use super::{Check, CheckState, RESPONSE_TIMEOUT, Verbosity};
use crate::attribute::gpu_allocation::{is_claimed, unmatched};
use crate::config::Config;
use crate::discover::ConnectionState;
use crate::discover::cri::{SocketSearch, find, pod_resources};
use crate::discover::device_allocations::{ClaimedDevice, DeviceAllocation, ListedDevices};
use crate::gpu::GpuIdentity;
use crate::host::in_pod;

pub(super) const NAME: &str = "cri";
const RESOURCES: &str = "pod resources";
const LOST: &str = "containers of pods have only their short id: no namespace, pod and name, and their exits have neither exit \
                    code nor reason";

/// Fixes in a pod by the name of a check: a value of the chart `helm/memledger`.
const CHART_FIXES: [(&str, &str); 14] = [
    ("cgroups", "host.cgroup: true"),
    ("cgroup counters", "host.cgroup: true"),
    ("/proc", "host.proc: true"),
    ("kernel counter", "host.proc: true"),
    (
        NAME,
        "runtime.enabled: true, and runtime.socket: the socket of the kubelet's container runtime on the node",
    ),
    (
        RESOURCES,
        "podResources.enabled: true, and podResources.path: the directory of the kubelet's socket on the node",
    ),
    ("cgroup namespace", "host.cgroup: true and hostPID: true"),
    ("pid namespace", "hostPID: true"),
    ("GPU processes", "hostPID: true"),
    ("CAP_SYS_PTRACE", "capabilities.sysPtrace: true"),
    ("kernel log", "capabilities.syslog: true; kmsg.enabled: true would make the container privileged"),
    ("state path", "state.hostPath: a directory of the node, such as /var/lib/memledger"),
    ("reports", "reporter.hostPath: /run/memledger-reporter, and hostPID: true"),
    ("NVML", "nvidia.runtimeClassName: nvidia, where the cluster has a RuntimeClass of that name"),
];
/// Fixes in a pod of sources that work but are degraded.
const DEGRADED_FIXES: [(&str, &str); 1] =
    [("kernel log", "kmsg.enabled: true, which makes the container privileged and is hardly worth it")];
/// How the finding of a missing socket begins.
const NO_SOCKET: &str = "no socket";
/// Usual fixes of errors of an existing socket in a pod: check, part of the error, fix.
const SOCKET_FIXES: [(&str, &str, &str); 3] = [
    (NAME, DENIED, SELINUX),
    (RESOURCES, DENIED, SELINUX),
    (
        NAME,
        "Connection refused",
        "start the runtime, if nothing listens at runtime.socket on the node; else it was restarted, and memledger ends by itself once a container \
         has started, to mount the new socket: deleting memledger's pod on this node does so at once",
    ),
];
const DENIED: &str = "Permission denied";
const SELINUX: &str =
    "in the values of the Helm chart: seLinuxOptions: {type: spc_t}, where the node enforces SELinux";

/// Replaces the fix by a value of the chart, if there is one.
pub fn advise(check: &mut Check) {
    if [NAME, RESOURCES].contains(&check.source)
        && check.state != CheckState::None
        && !check.found.starts_with(NO_SOCKET)
    {
        let matches = |(name, part, _): &&(_, &str, _)| *name == check.source && check.found.contains(part);
        if let Some((_, _, fix)) =
            SOCKET_FIXES.iter().find(matches).filter(|_| check.state == CheckState::Bad)
        {
            check.fix = (*fix).to_owned();
        }
        return;
    }
    let degraded = DEGRADED_FIXES.iter().filter(|_| check.state == CheckState::Good);
    let value = degraded.chain(&CHART_FIXES).find(|(name, _)| *name == check.source);
    if let Some((_, value)) = value.filter(|_| !check.lost.is_empty()) {
        check.fix = format!("in the values of the Helm chart: {value}");
    }
}

/// Checks the kubelet's runtime and the kubelet's socket, which is not read without a runtime. A host with neither has one line. `gpus`:
/// those of the driver.
pub async fn run_checks(config: &Config, verbosity: Verbosity, gpus: &[Arc<GpuIdentity>]) -> Vec<Check> {
    let mut checks = vec![runtime(config).await];
    if let Some(socket) = &config.cri.pod_resources
        && !config.cri.sockets.is_empty()
        && (exists(socket) || (verbosity == Verbosity::Full && in_pod()))
    {
        checks.push(resources(socket, gpus).await);
    }
    checks
}

/// Also true if it cannot be checked: that is an error, not absence.
fn exists(socket: &Path) -> bool {
    socket.try_exists().unwrap_or(true)
}

async fn resources(socket: &Path, gpus: &[Arc<GpuIdentity>]) -> Check {
    const LOST: &str =
        "no memledger_container_gpu_allocated of pods: allocated idle GPUs look like free ones";
    let place = socket.display();
    if !exists(socket) {
        let fix = "mount the kubelet's directory there, or set --kubelet.pod-resources";
        return Check::none(RESOURCES, format!("{NO_SOCKET} at {place}"), LOST, fix);
    }
    match tokio::time::timeout(RESPONSE_TIMEOUT, pod_resources::list_once(socket)).await {
        Ok(Ok(listed)) => allocations(&format!("{place}, "), &listed, gpus),
        Ok(Err(error)) => {
            let found = format!("{place}: {error}");
            let fix = match found.contains(DENIED) {
                true => "run as root to read that socket",
                false => {
                    "start the kubelet, or set --kubelet.pod-resources to the socket of the one that runs"
                }
            };
            Check::bad(RESOURCES, found, LOST, fix)
        }
        Err(_) => Check::bad(
            RESOURCES,
            format!("{place} does not respond within {RESPONSE_TIMEOUT:?}"),
            LOST,
            "restart the kubelet",
        ),
    }
}

/// Counts the containers with devices, and apart those of which it is not known which GPU they have: that may be no fault, as of a GPU that a virtual
/// machine has.
fn allocations(place: &str, listed: &ListedDevices, gpus: &[Arc<GpuIdentity>]) -> Check {
    let known = || gpus.iter().map(|gpu| &**gpu);
    let allocations: Vec<_> = listed.containers.values().collect();
    let count = |has: &dyn Fn(&DeviceAllocation) -> bool| allocations.iter().filter(|of| has(of)).count();
    let of_plugins = count(&|of| !of.plugin_devices.is_empty());
    let with_claims = count(&|of| !of.claimed_devices.is_empty());
    let mut found = format!("{place}{of_plugins} containers have GPUs");
    if let Some(device) = allocations.iter().find_map(|of| unmatched(of, known).next()) {
        let count = count(&|of| unmatched(of, known).next().is_some());
        let (resource, id) = (&device.resource, &*device.id);
        let _ =
            write!(found, ", {count} of them under names that are none of the GPUs here ({resource} {id:?})");
    }
    if with_claims > 0 {
        let is_known = |device: &ClaimedDevice| known().any(|gpu| is_claimed(device, gpu));
        let with_known = count(&|of| of.claimed_devices.iter().any(is_known));
        let _ = write!(
            found,
            ", {with_claims} have resource claims, {with_known} of them with names of GPUs here"
        );
    }
    Check::good(RESOURCES, found)
}

/// Returns the problem if there is no socket: a configured one is missing, or access is denied.
fn missing_socket(config: &Config, fix: &str) -> Option<Check> {
    let sockets = &config.cri.sockets;
    if sockets.iter().any(|socket| socket.exists()) {
        return None;
    }
    if let Some((socket, error)) =
        sockets.iter().find_map(|socket| Some((socket, socket.try_exists().err()?)))
    {
        let fix = "run as root to read that directory";
        return Some(Check::bad(NAME, format!("{}: {error}", socket.display()), LOST, fix));
    }
    let places: Vec<_> = sockets.iter().map(|socket| socket.display().to_string()).collect();
    config
        .cri
        .is_explicit
        .then(|| Check::bad(NAME, format!("{NO_SOCKET} at {}", places.join(", ")), LOST, fix))
}

async fn runtime(config: &Config) -> Check {
    if config.cri.sockets.is_empty() {
        let without = match config.cri.pod_resources {
            Some(_) => ", and with it --kubelet.pod-resources",
            None => "",
        };
        return Check::none(
            NAME,
            format!("off (--cri.endpoint is empty){without}"),
            LOST,
            "--cri.endpoint=/run/containerd/containerd.sock",
        );
    }
    let fix = "mount the socket of the kubelet's container runtime, and set --cri.endpoint to it";
    if let Some(check) = missing_socket(config, fix) {
        return check;
    }
    match tokio::time::timeout(RESPONSE_TIMEOUT, find(&config.cri)).await {
        Ok(SocketSearch::Runtime(socket, client)) => {
            let (version, containers) = tokio::join!(client.version(), client.containers());
            let place = socket.display();
            match (version, containers) {
                (Ok(version), Ok(containers)) => {
                    let (name, number) = (version.runtime_name, version.runtime_version);
                    let count = containers.len();
                    let check =
                        Check::good(NAME, format!("{name} {number} at {place}, {count} containers of pods"));
                    if config.oom.runtime {
                        return check;
                    }
                    check.weaker("its exits are not used (--no-oom.runtime)", "--oom.runtime")
                }
                (Err(error), _) | (_, Err(error)) => {
                    Check::bad(NAME, format!("{place}: {error}"), LOST, error.advice(&socket))
                }
            }
        }
        Ok(SocketSearch::Nothing { connection: ConnectionState::NoSocket, why, .. }) if why.is_empty() => {
            Check::none(NAME, "no socket of a container runtime for pods", LOST, fix)
        }
        Ok(SocketSearch::Nothing { connection, why, .. }) => {
            let state = if connection == ConnectionState::Down || in_pod() {
                CheckState::Bad
            } else {
                CheckState::None
            };
            Check::new(NAME, state, format!("no pods: {why}"), LOST, fix.into())
        }
        Err(_) => Check::bad(
            NAME,
            format!("no response within {RESPONSE_TIMEOUT:?}"),
            LOST,
            "restart the container runtime",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Identity;
    use crate::discover::device_allocations::PluginDevice;

    #[test]
    fn fixes_in_a_pod_are_values_of_the_chart() {
        let mut missing = Check::bad("pid namespace", "not the host's", "much", "docker run --pid=host");
        advise(&mut missing);
        assert_eq!(missing.fix, "in the values of the Helm chart: hostPID: true");
        let mut unmounted = Check::none(RESOURCES, format!("{NO_SOCKET} at /kubelet.sock"), LOST, "mount it");
        advise(&mut unmounted);
        assert!(unmounted.fix.contains("podResources.path: the directory"), "{}", unmounted.fix);
        let mut weaker =
            Check::good("kernel log", "syslog(2)").weaker("a second", "docker run --device /dev/kmsg");
        advise(&mut weaker);
        assert!(
            weaker.fix.contains("kmsg.enabled: true, which makes the container privileged"),
            "{}",
            weaker.fix
        );
        let mut well = Check::good("pid namespace", "the host's");
        advise(&mut well);
        assert_eq!(well.fix, "");
    }

    #[test]
    fn containers_with_unmatched_devices_are_counted_apart() {
        let device = |id: &str| PluginDevice { resource: "nvidia.com/gpu".into(), id: id.into() };
        let of_plugin =
            |id: &str| DeviceAllocation { plugin_devices: vec![device(id)], ..Default::default() };
        let claimed = |device: &str| {
            let (driver, pool, device) = ("gpu.nvidia.com".into(), "node1".into(), device.into());
            let claimed_devices = vec![ClaimedDevice { driver, pool, device, cdi_names: vec![] }];
            DeviceAllocation { claimed_devices, ..Default::default() }
        };
        let gpu = GpuIdentity { vendor: "nvidia", uuid: "GPU-a1".into(), ..GpuIdentity::default() };
        let check = |given: &[DeviceAllocation]| {
            let named = given
                .iter()
                .zip(0..)
                .map(|(of, number): (_, u32)| (Identity::named(&number.to_string()), Arc::new(of.clone())));
            let listed = ListedDevices { containers: named.collect(), ..ListedDevices::default() };
            allocations("at S, ", &listed, &[Arc::new(gpu.clone())])
        };
        let all_known = check(&[of_plugin("GPU-a1"), of_plugin("GPU-a1"), claimed("gpu-a1")]);
        let found = "at S, 2 containers have GPUs, 1 have resource claims, 1 of them with names of GPUs here";
        assert_eq!(all_known.found, found);
        let unknown = check(&[of_plugin("GPU-a1"), of_plugin("GPU-a1-0")]);
        let found = "1 of them under names that are none of the GPUs here (nvidia.com/gpu \"GPU-a1-0\")";
        assert!(unknown.found.ends_with(found), "{}", unknown.found);
        assert_eq!((unknown.lost, unknown.fix.as_str()), ("", ""));
        let claim = check(&[claimed("gpu-0")]);
        let found = "1 have resource claims, 0 of them with names of GPUs here";
        assert!(claim.found.ends_with(found), "{}", claim.found);
    }

    async fn checks_with_chart_fixes(config: &Config) -> Vec<Check> {
        let mut checks = run_checks(config, Verbosity::Full, &[]).await;
        checks.iter_mut().for_each(advise);
        checks
    }

    #[tokio::test]
    async fn failing_socket_keeps_the_fix_of_its_error() {
        let folder = tempfile::tempdir().unwrap();
        let (dead, absent) = (folder.path().join("dead.sock"), folder.path().join("absent.sock"));
        drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
        let config = |path: &Path| {
            let flags = ["--cri.endpoint", "--kubelet.pod-resources"];
            let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
            let flags = flags.map(|flag| format!("{flag}={}", path.display()));
            Config::load(&command.try_get_matches_from(flags).unwrap()).unwrap()
        };
        let checks = checks_with_chart_fixes(&config(&dead)).await;
        assert!(checks[0].fix.contains("deleting memledger's pod on this node"), "{checks:?}");
        assert_eq!(
            (checks[1].state, checks[1].fix.contains("podResources")),
            (CheckState::Bad, false),
            "{checks:?}"
        );
        let checks = checks_with_chart_fixes(&config(&absent)).await;
        assert!(checks[0].fix.contains("runtime.socket: the socket"), "{checks:?}");
        assert_eq!(checks[0].state, CheckState::Bad, "it was configured");
    }

    #[tokio::test]
    async fn kubelets_socket_is_off_without_a_runtime() {
        let socket = tempfile::NamedTempFile::new().unwrap();
        let flags = ["--cri.endpoint=", &format!("--kubelet.pod-resources={}", socket.path().display())];
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        let config = Config::load(&command.try_get_matches_from(flags).unwrap()).unwrap();
        let checks = run_checks(&config, Verbosity::Full, &[]).await;
        assert_eq!(checks.len(), 1, "{checks:?}");
        assert!(checks[0].found.contains("--kubelet.pod-resources"), "{checks:?}");
    }

    #[test]
    fn denied_socket_gets_selinux_fix_and_disabled_runtime_keeps_its_flag() {
        for source in [NAME, RESOURCES] {
            let error = std::io::Error::from_raw_os_error(13);
            let mut denied = Check::bad(source, format!("/host/cri.sock: {error}"), LOST, "run as root");
            advise(&mut denied);
            assert!(denied.fix.contains("seLinuxOptions: {type: spc_t}"), "{}", denied.fix);
        }
        let mut weaker = Check::good(NAME, "containerd").weaker("no ends", "--oom.runtime");
        advise(&mut weaker);
        assert_eq!(weaker.fix, "--oom.runtime");
    }
}
