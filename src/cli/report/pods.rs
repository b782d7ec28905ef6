//! The look at what tells of pods; and, in a pod, which value of the Helm chart brings what is missing.
//!
//! A value brings what is not there. A socket that is there and does not answer needs something else: the advice that its
//! error has, or what that error mostly means in a pod.

use std::path::Path;

use super::{ANSWER_WITHIN, Check, Look, State};
use crate::config::Config;
use crate::discover::Link;
use crate::discover::cri::{Found, find, pod_resources};

const NAME: &str = "cri";
const RESOURCES: &str = "pod resources";
const LOST: &str = "containers of pods are known by their short id alone: no namespace, pod and name, and of their ends neither exit \
                    code nor reason";
/// Where Kubernetes puts the identity of a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// What to change in a pod, by the name of a check: a value of the chart `helm/memledger`, and what else.
const VALUES: [(&str, &str); 13] = [
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
        "podResources.enabled: true, and podResources.path: the folder of the kubelet's socket on the node",
    ),
    ("cgroup namespace", "host.cgroup: true and hostPID: true"),
    ("pid namespace", "hostPID: true"),
    ("GPU processes", "hostPID: true"),
    ("CAP_SYS_PTRACE", "capabilities.sysPtrace: true"),
    ("kernel log", "capabilities.syslog: true; kmsg.enabled: true would make the container privileged"),
    ("state path", "state.hostPath: a folder of the node, such as /var/lib/memledger"),
    ("NVML", "nvidia.runtimeClassName: nvidia, where the cluster has a RuntimeClass of that name"),
];
/// The same of what can be used, and is weaker than it could be.
const WEAKER: [(&str, &str); 1] =
    [("kernel log", "kmsg.enabled: true, which makes the container privileged: it is hardly worth that")];
/// How a socket that is not there is told of.
const ABSENT: &str = "no socket";
/// What an error of a socket that is there mostly means in a pod: check, part of the error, what to do.
const FAILURES: [(&str, &str, &str); 3] = [
    (NAME, DENIED, SELINUX),
    (RESOURCES, DENIED, SELINUX),
    (
        NAME,
        "Connection refused",
        "delete memledger's pod on this node: the runtime was started again, and its former socket is mounted; if nobody listens \
         at runtime.socket on the node either, start the runtime",
    ),
];
const DENIED: &str = "Permission denied";
const SELINUX: &str =
    "in the values of the Helm chart: seLinuxOptions: {type: spc_t}, where the node enforces SELinux";

/// Runs in a pod, as far as its environment and its files tell.
pub fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() || std::path::Path::new(ACCOUNT).exists()
}

/// Says in the words of the chart what to change. What a chart cannot change is left as it is.
pub fn advise(check: &mut Check) {
    if [NAME, RESOURCES].contains(&check.source)
        && check.state != State::None
        && !check.found.starts_with(ABSENT)
    {
        let meant = |(name, part, _): &&(_, &str, _)| *name == check.source && check.found.contains(part);
        if let Some((_, _, fix)) = FAILURES.iter().find(meant).filter(|_| check.state == State::Bad) {
            check.fix = (*fix).to_owned();
        }
        return;
    }
    let weaker = WEAKER.iter().filter(|_| check.state == State::Good);
    let value = weaker.chain(&VALUES).find(|(name, _)| *name == check.source);
    if let Some((_, value)) = value.filter(|_| !check.lost.is_empty()) {
        check.fix = format!("in the values of the Helm chart: {value}");
    }
}

/// Looks at the kubelet's runtime and at the kubelet's socket. On a host that has neither that is one line.
pub async fn examine(config: &Config, look: Look) -> Vec<Check> {
    let mut checks = vec![runtime(config).await];
    let socket = &config.cri.pod_resources;
    if socket.as_os_str().is_empty() || !(is_there(socket) || (look == Look::Full && in_pod())) {
        return checks;
    }
    checks.push(resources(socket).await);
    checks
}

/// Also true where it cannot be looked at: that is a fault, and no absence.
fn is_there(socket: &Path) -> bool {
    socket.try_exists().unwrap_or(true)
}

async fn resources(socket: &Path) -> Check {
    const LOST: &str = "no memledger_container_gpu_allocated of pods: GPUs that are given and idle are not told from free ones";
    let place = socket.display();
    if !is_there(socket) {
        let fix = "mount the kubelet's folder there, or set --kubelet.pod-resources";
        return Check::none(RESOURCES, format!("{ABSENT} at {place}"), LOST, fix);
    }
    match tokio::time::timeout(ANSWER_WITHIN, pod_resources::look(socket)).await {
        Ok(Ok(given)) => {
            let check = Check::good(RESOURCES, format!("{place}, {} containers have GPUs", given.len()));
            match pod_resources::unknown(&given) {
                Some(id) => check.weaker(
                    LOST,
                    format!(
                        "a device plugin that names GPUs by uuid or index, as NVIDIA's does, or by device file, as GKE's does: this one has {id}"
                    ),
                ),
                None => check,
            }
        }
        Ok(Err(error)) => Check::bad(
            RESOURCES,
            format!("{place}: {error}"),
            LOST,
            "let memledger read that socket: run as root",
        ),
        Err(_) => Check::bad(
            RESOURCES,
            format!("{place} does not answer within {ANSWER_WITHIN:?}"),
            LOST,
            "restart the kubelet",
        ),
    }
}

/// What is wrong where no socket is to be seen: one that somebody named, or one that may not be looked at.
fn nowhere(config: &Config, fix: &str) -> Option<Check> {
    let sockets = &config.cri.sockets;
    if sockets.iter().any(|socket| socket.exists()) {
        return None;
    }
    if let Some((socket, error)) =
        sockets.iter().find_map(|socket| Some((socket, socket.try_exists().err()?)))
    {
        let fix = "let memledger look at that folder: run as root";
        return Some(Check::bad(NAME, format!("{}: {error}", socket.display()), LOST, fix));
    }
    let places: Vec<_> = sockets.iter().map(|socket| socket.display().to_string()).collect();
    config.cri.is_asked_for.then(|| Check::bad(NAME, format!("{ABSENT} at {}", places.join(", ")), LOST, fix))
}

async fn runtime(config: &Config) -> Check {
    if config.cri.sockets.is_empty() {
        return Check::none(
            NAME,
            "not asked (--cri.endpoint is empty)",
            LOST,
            "--cri.endpoint=/run/containerd/containerd.sock",
        );
    }
    let fix = "mount the socket of the kubelet's container runtime, and set --cri.endpoint to it";
    if let Some(check) = nowhere(config, fix) {
        return check;
    }
    match tokio::time::timeout(ANSWER_WITHIN, find(&config.cri)).await {
        Ok(Found::Runtime(socket, client)) => {
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
                    check.weaker("what it tells of ends is not used (--no-oom.runtime)", "--oom.runtime")
                }
                (Err(error), _) | (_, Err(error)) => {
                    Check::bad(NAME, format!("{place}: {error}"), LOST, error.advice(&socket))
                }
            }
        }
        Ok(Found::Nothing { link: Link::NoSocket, why }) if why.is_empty() => {
            Check::none(NAME, "no socket of a container runtime for pods", LOST, fix)
        }
        Ok(Found::Nothing { link, why }) => {
            let state = if link == Link::Down || in_pod() { State::Bad } else { State::None };
            Check::new(NAME, state, format!("no pods: {why}"), LOST, fix.into())
        }
        Err(_) => Check::bad(
            NAME,
            format!("no answer within {ANSWER_WITHIN:?}"),
            LOST,
            "restart the container runtime",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_in_a_pod_is_said_in_the_words_of_the_chart() {
        let mut missing = Check::bad("pid namespace", "not the host's", "much", "docker run --pid=host");
        advise(&mut missing);
        assert_eq!(missing.fix, "in the values of the Helm chart: hostPID: true");
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

    async fn advised(config: &Config) -> Vec<Check> {
        let mut checks = examine(config, Look::Full).await;
        checks.iter_mut().for_each(advise);
        checks
    }

    #[tokio::test]
    async fn a_socket_that_is_there_and_fails_has_the_advice_of_its_failure_and_not_that_of_an_absent_one() {
        let folder = tempfile::tempdir().unwrap();
        let (dead, absent) = (folder.path().join("dead.sock"), folder.path().join("absent.sock"));
        drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
        let config = |path: &Path| {
            let flags = ["--cri.endpoint", "--kubelet.pod-resources"];
            let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
            let flags = flags.map(|flag| format!("{flag}={}", path.display()));
            Config::load(&command.try_get_matches_from(flags).unwrap()).unwrap()
        };
        let checks = advised(&config(&dead)).await;
        assert!(checks[0].fix.contains("delete memledger's pod on this node"), "{checks:?}");
        assert_eq!(
            (checks[1].state, checks[1].fix.contains("podResources")),
            (State::Bad, false),
            "{checks:?}"
        );
        let checks = advised(&config(&absent)).await;
        assert!(checks[0].fix.contains("runtime.socket: the socket"), "{checks:?}");
        assert_eq!(checks[0].state, State::Bad, "somebody named it");
    }

    #[test]
    fn who_may_not_use_a_socket_is_told_of_selinux_and_who_wants_no_ends_keeps_his_flag() {
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
