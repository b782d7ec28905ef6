//! GPUs and other devices that the kubelet has allocated to containers of pods, and which of them still are.
//!
//! The kubelet lists pods that hold devices, not containers that run: a container that waits, ended or crashes again and again holds
//! its GPU until the pod is done. Its responses are incomplete, for two reasons:
//!
//! * It names a pod and not its uid. So each response is kept with the uid that the runtime had for that name before the request: once
//!   the runtime has no sandbox of that pod, or one of another pod with the name, the allocation is not shown until the next response.
//! * After its own start it responds without the pods that it has not got from the API server yet, which takes as long as that is away. So
//!   nothing is taken from pods that are missing while all pods are of which a container goes on running, and for [`MAX_PARTIAL`] responses while some
//!   of those are.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::{ContainerId, ContainerRecord, Identity, Pod};
use crate::config::OwnerLabels;

/// Number of responses in a row in which a running pod may be missing beside others that are listed: the kubelet may still be adding its pods. After
/// that, it is one that the kubelet has given up.
const MAX_PARTIAL: u32 = 12;

/// Namespace and name of a pod.
pub type PodName = (Arc<str>, Arc<str>);

/// What the kubelet has allocated to one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAllocation {
    /// GPUs of device plugins, sorted.
    pub plugin_devices: Vec<PluginDevice>,
    /// Devices of its resource claims (DRA), sorted.
    pub claimed_devices: Vec<ClaimedDevice>,
}

/// A device of a device plugin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PluginDevice {
    /// Such as `nvidia.com/gpu`.
    pub resource: Arc<str>,
    /// The plugin's name for it, without the suffix of a shared one.
    pub id: Arc<str>,
}

impl PluginDevice {
    /// Returns whether a resource is of GPUs, whatever the names of its devices: `nvidia.com/gpu`, `nvidia.com/gpu.shared`, all of AMD.
    pub fn is_of_gpus(resource: &str) -> bool {
        let is_part = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_alphanumeric());
        resource.strip_prefix("nvidia.com/gpu").is_some_and(is_part)
            || resource.starts_with("nvidia.com/mig-")
            || resource.starts_with("amd.com/")
    }
}

/// A device of a resource claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimedDevice {
    /// Such as `gpu.nvidia.com`.
    pub driver: Arc<str>,
    /// The pool, often the node.
    pub pool: Arc<str>,
    /// Its name in the pool.
    pub device: Arc<str>,
    /// Its names in the Container Device Interface.
    pub cdi_names: Vec<Arc<str>>,
}

/// What the kubelet has allocated to a container that the filter includes.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatedContainer {
    /// It may not run.
    pub identity: Identity,
    /// Its devices.
    pub allocation: Arc<DeviceAllocation>,
    /// The owners of its pod.
    pub owners: OwnerLabels,
}

/// A response of the kubelet.
#[derive(Debug, Default)]
pub struct ListedDevices {
    /// All pods that it lists, also those without a device.
    pub pods: HashSet<PodName>,
    /// The containers with a device.
    pub containers: BTreeMap<Identity, Arc<DeviceAllocation>>,
}

/// A pod of the runtime, from its sandbox.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxedPod {
    /// The pod.
    pub pod: Arc<Pod>,
    /// It has all labels that `--container.label` requires.
    pub labels_match: bool,
    /// Its owners.
    pub owners: OwnerLabels,
    /// Of the sandbox, in nanoseconds since 1970.
    pub created_at: i64,
}

/// Returns for each name the pod with the newest sandbox.
pub fn newest_pods<'a>(
    sandboxes: impl Iterator<Item = &'a SandboxedPod>,
) -> HashMap<PodName, &'a SandboxedPod> {
    let mut newest: HashMap<PodName, &SandboxedPod> = HashMap::new();
    for sandbox in sandboxes {
        let name = (Arc::clone(&sandbox.pod.namespace), Arc::clone(&sandbox.pod.name));
        let known = newest.entry(name).or_insert(sandbox);
        let rank = |of: &SandboxedPod| (of.created_at, Arc::clone(&of.pod.uid));
        if rank(sandbox) > rank(known) {
            *known = sandbox;
        }
    }
    newest
}

/// What the runtime had before a request to the kubelet.
#[derive(Debug, Default)]
pub struct RequestState {
    uids: HashMap<PodName, Arc<str>>,
    /// Containers that ran.
    running: HashMap<PodName, Vec<ContainerId>>,
    /// Pods of files and URLs, which the kubelet knows without the API server.
    static_pods: HashSet<PodName>,
}

impl RequestState {
    /// Records the pods of the runtime.
    pub fn new<'a>(
        sandboxes: impl Iterator<Item = &'a SandboxedPod>,
        running: impl Iterator<Item = &'a ContainerRecord>,
    ) -> Self {
        let mut state = Self::default();
        for (name, sandbox) in newest_pods(sandboxes) {
            if ["file", "http"].contains(&&*sandbox.pod.source) {
                state.static_pods.insert(name.clone());
            }
            state.uids.insert(name, Arc::clone(&sandbox.pod.uid));
        }
        for record in running {
            let Some(pod) = &record.spec.pod else { continue };
            let name = (Arc::clone(&pod.namespace), Arc::clone(&pod.name));
            state.running.entry(name).or_default().push(record.id.clone());
        }
        state
    }
}

/// What the kubelet has allocated, by its responses so far.
#[derive(Debug, Default)]
pub struct DeviceAllocations {
    /// The pods that it listed, with their uid at that time if the runtime had them.
    pods: HashMap<PodName, Option<Arc<str>>>,
    containers: BTreeMap<Identity, Arc<DeviceAllocation>>,
    /// Responses in a row without a running pod, beside others.
    partial: u32,
}

impl DeviceAllocations {
    /// Applies a response. `is_running`: whether a container runs now. Returns whether any container has other devices than before.
    pub fn apply(
        &mut self,
        response: ListedDevices,
        before: &RequestState,
        is_running: impl Fn(&ContainerId) -> bool,
    ) -> bool {
        let runs_on = |name: &PodName| {
            before.running.get(name).is_some_and(|containers| containers.iter().any(&is_running))
        };
        let of_api = self.pods.keys().filter(|name| !before.static_pods.contains(*name) && runs_on(name));
        let (listed, missing): (Vec<_>, Vec<_>) = of_api.partition(|name| response.pods.contains(*name));
        self.partial = if listed.is_empty() || missing.is_empty() { 0 } else { self.partial + 1 };
        let is_complete = missing.is_empty() || self.partial > MAX_PARTIAL;
        let keeps = |name: &PodName| !is_complete && !response.pods.contains(name);
        let mut containers = response.containers;
        for (identity, allocation) in &self.containers {
            if keeps(&pod_of(identity)) {
                containers.insert(identity.clone(), Arc::clone(allocation));
            }
        }
        let kept = self.pods.iter().filter(|(name, _)| keeps(name));
        let mut pods: HashMap<_, _> = kept.map(|(name, uid)| (name.clone(), uid.clone())).collect();
        pods.extend(response.pods.into_iter().map(|name| {
            let uid = before.uids.get(&name).cloned();
            (name, uid)
        }));
        let is_other = |identity: &Identity| {
            let name = pod_of(identity);
            pods.get(&name) != self.pods.get(&name)
        };
        let has_changed = containers != self.containers || containers.keys().any(is_other);
        (self.pods, self.containers) = (pods, containers);
        has_changed
    }

    /// Records that the kubelet did not respond: a pod that the runtime did not have at the last response, and does not have now, may be gone. Returns
    /// whether one was removed.
    pub fn apply_failure(&mut self, now: &RequestState) -> bool {
        let count = self.containers.len();
        self.containers.retain(|identity, _| {
            let name = pod_of(identity);
            self.pods.get(&name).is_some_and(Option::is_some) || now.uids.contains_key(&name)
        });
        self.containers.len() < count
    }

    /// Returns true if no container has a device.
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    /// Returns the containers with a device. `newest`: the pods of the runtime now.
    pub fn current<'a>(
        &'a self,
        newest: &'a HashMap<PodName, &SandboxedPod>,
    ) -> impl Iterator<Item = (&'a Identity, &'a Arc<DeviceAllocation>)> {
        self.containers.iter().filter(move |(identity, _)| {
            let name = pod_of(identity);
            match self.pods.get(&name).and_then(Option::as_ref) {
                Some(uid) => newest.get(&name).is_some_and(|sandbox| sandbox.pod.uid == *uid),
                // the runtime had no pod of that name: there is no predecessor
                None => true,
            }
        })
    }
}

/// Returns the pod of a container.
pub fn pod_of(identity: &Identity) -> PodName {
    (Arc::clone(&identity.k8s_namespace), Arc::clone(&identity.k8s_pod))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{ContainerSpec, RuntimeKind};

    /// The kubelet and the runtime, with pods of one container `main` in the namespace `ml`.
    #[derive(Default)]
    struct Host {
        allocations: DeviceAllocations,
        sandboxes: Vec<SandboxedPod>,
        running: Vec<ContainerRecord>,
    }

    fn name(pod: &str) -> PodName {
        ("ml".into(), pod.into())
    }

    fn response(pods: &[(&str, &str)]) -> ListedDevices {
        let mut response = ListedDevices::default();
        for (pod, gpu) in pods {
            response.pods.insert(name(pod));
            if gpu.is_empty() {
                continue;
            }
            let identity =
                Identity { k8s_namespace: "ml".into(), k8s_pod: (*pod).into(), name: "main".into() };
            let device = PluginDevice { resource: "nvidia.com/gpu".into(), id: (*gpu).into() };
            let allocation = DeviceAllocation { plugin_devices: vec![device], ..DeviceAllocation::default() };
            response.containers.insert(identity, Arc::new(allocation));
        }
        response
    }

    impl Host {
        fn pod(&self, pod: &str, uid: &str, source: &str) -> Arc<Pod> {
            let (name, uid, source) = (pod.into(), uid.into(), source.into());
            Arc::new(Pod { namespace: "ml".into(), name, uid, source, ..Pod::default() })
        }

        /// A sandbox, which is newer than all others.
        fn has_sandbox(&mut self, pod: &str, uid: &str) {
            let (pod, created_at) = (self.pod(pod, uid, "api"), self.sandboxes.len() as i64);
            self.sandboxes.push(SandboxedPod { pod, labels_match: true, owners: vec![], created_at });
        }

        fn starts(&mut self, pod: &str, uid: &str, id: &str) {
            self.has_sandbox(pod, uid);
            let spec = ContainerSpec { pod: Some(self.pod(pod, uid, "api")), ..ContainerSpec::default() };
            self.running.push(ContainerRecord::new(id, RuntimeKind::Cri, spec));
        }

        fn request(&self) -> RequestState {
            RequestState::new(self.sandboxes.iter(), self.running.iter())
        }

        fn lists(&mut self, pods: &[(&str, &str)]) {
            let before = self.request();
            let running: HashSet<_> = self.running.iter().map(|record| record.id.clone()).collect();
            self.allocations.apply(response(pods), &before, |id| running.contains(id));
        }

        fn shown(&self) -> Vec<(String, String)> {
            let newest = newest_pods(self.sandboxes.iter());
            let current = self.allocations.current(&newest);
            current
                .map(|(identity, allocation)| {
                    (identity.k8s_pod.to_string(), allocation.plugin_devices[0].id.to_string())
                })
                .collect()
        }
    }

    fn shown(pods: &[(&str, &str)]) -> Vec<(String, String)> {
        pods.iter().map(|(pod, gpu)| ((*pod).to_owned(), (*gpu).to_owned())).collect()
    }

    #[test]
    fn allocation_needs_no_container() {
        let mut host = Host::default();
        host.lists(&[("pull", "GPU-a")]);
        assert_eq!(host.shown(), shown(&[("pull", "GPU-a")]), "the runtime has no sandbox of it yet");
        host.has_sandbox("pull", "u");
        assert_eq!(host.shown(), shown(&[("pull", "GPU-a")]), "no other pod had that name");
        host.lists(&[("pull", "GPU-a")]);
        assert_eq!(host.shown(), shown(&[("pull", "GPU-a")]));
        host.lists(&[]);
        assert_eq!(host.shown(), [], "the pod is done");
    }

    #[test]
    fn pod_created_again_shows_no_gpu_of_its_predecessor() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        host.lists(&[("train-0", "GPU-a")]);
        host.running.clear();
        host.starts("train-0", "v", "b");
        assert_eq!(host.shown(), [], "the response was about its predecessor");
        host.lists(&[("train-0", "GPU-b")]);
        assert_eq!(host.shown(), shown(&[("train-0", "GPU-b")]));
    }

    #[test]
    fn response_that_was_requested_before_the_pod_is_its_predecessors() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        let before = host.request();
        host.running.clear();
        host.starts("train-0", "v", "b");
        host.allocations.apply(response(&[("train-0", "GPU-a")]), &before, |_| true);
        assert_eq!(host.shown(), []);
    }

    #[test]
    fn restart_in_a_pod_keeps_its_gpu() {
        let mut host = Host::default();
        host.starts("crash", "u", "a");
        host.lists(&[("crash", "GPU-a")]);
        host.running.clear();
        assert_eq!(host.shown(), shown(&[("crash", "GPU-a")]), "it waits for its next attempt");
        host.lists(&[("crash", "GPU-a")]);
        host.starts("crash", "u", "b");
        assert_eq!(host.shown(), shown(&[("crash", "GPU-a")]));
    }

    #[test]
    fn pod_whose_sandbox_is_gone_has_no_gpu() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        host.lists(&[("train-0", "GPU-a"), ("pull", "GPU-b")]);
        host.running.clear();
        host.sandboxes.clear();
        assert_eq!(host.shown(), shown(&[("pull", "GPU-b")]), "the last response is older");
        host.has_sandbox("pull", "v");
        assert!(!host.allocations.apply_failure(&host.request()), "it has a sandbox by now");
        host.sandboxes.clear();
        assert!(host.allocations.apply_failure(&host.request()));
        assert_eq!(host.shown(), [], "the kubelet is gone, and nothing else shows that pod");
    }

    #[test]
    fn restarted_kubelet_that_knows_no_pod_yet_loses_nothing() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        host.has_sandbox("crash", "w"); // between two attempts
        host.starts("of-a-file", "f", "f");
        host.sandboxes.last_mut().expect("its sandbox").pod = host.pod("of-a-file", "f", "file");
        host.lists(&[("train-0", "GPU-a"), ("crash", "GPU-b"), ("of-a-file", "")]);
        let all = shown(&[("crash", "GPU-b"), ("train-0", "GPU-a")]);
        for _ in 0..3 * MAX_PARTIAL {
            host.lists(&[]);
            assert_eq!(host.shown(), all);
            host.lists(&[("of-a-file", "")]);
            assert_eq!(host.shown(), all, "it knows that one without the API server");
        }
        host.lists(&[("train-0", "GPU-a")]);
        assert_eq!(host.shown(), shown(&[("train-0", "GPU-a")]), "it knows its pods again");
    }

    #[test]
    fn pods_that_are_missing_beside_others_keep_their_gpus_for_a_minute() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        host.starts("train-1", "v", "b");
        host.has_sandbox("crash", "w");
        host.lists(&[("train-0", "GPU-a"), ("train-1", "GPU-b"), ("crash", "GPU-c")]);
        let all = shown(&[("crash", "GPU-c"), ("train-0", "GPU-a"), ("train-1", "GPU-b")]);
        for _ in 0..MAX_PARTIAL {
            host.lists(&[("train-1", "GPU-b")]);
            assert_eq!(host.shown(), all, "the kubelet may be adding its pods");
        }
        host.lists(&[("train-1", "GPU-b")]);
        assert_eq!(
            host.shown(),
            shown(&[("train-1", "GPU-b")]),
            "it has given train-0 up, which cannot be killed"
        );
    }

    #[test]
    fn pod_that_is_done_has_no_gpu() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        host.starts("train-1", "v", "b");
        host.lists(&[("train-0", "GPU-a"), ("train-1", "GPU-b")]);
        host.running.remove(0);
        host.lists(&[("train-1", "GPU-b")]);
        assert_eq!(host.shown(), shown(&[("train-1", "GPU-b")]));
    }

    #[test]
    fn container_without_a_device_in_a_listed_pod_has_none() {
        let mut host = Host::default();
        host.starts("train-0", "u", "a");
        host.lists(&[("train-0", "GPU-a")]);
        host.lists(&[("train-0", "")]);
        assert_eq!(host.shown(), [], "the kubelet lists it without one");
    }
}
