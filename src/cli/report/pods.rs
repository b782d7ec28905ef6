//! The look at what tells of pods; and, in a pod, which value of the Helm chart brings what is missing.

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
    (RESOURCES, "podResources.enabled: true"),
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

/// Runs in a pod, as far as its environment and its files tell.
pub fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() || std::path::Path::new(ACCOUNT).exists()
}

/// Says in the words of the chart what to change. What a chart cannot change is left as it is.
pub fn advise(check: &mut Check) {
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
    if socket.as_os_str().is_empty() || !(socket.exists() || (look == Look::Full && in_pod())) {
        return checks;
    }
    const LOST: &str = "no memledger_container_gpu_allocated of pods: GPUs that are given and idle are not told from free ones";
    let place = socket.display();
    checks.push(match tokio::time::timeout(ANSWER_WITHIN, pod_resources::look(socket)).await {
        Ok(Ok(given)) => Check::good(RESOURCES, format!("{place}, {} containers have GPUs", given.len())),
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
    });
    if !socket.exists() {
        let fix = "mount the kubelet's folder there, or set --kubelet.pod-resources";
        checks.pop();
        checks.push(Check::none(RESOURCES, format!("no socket at {place}"), LOST, fix));
    }
    checks
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
}
