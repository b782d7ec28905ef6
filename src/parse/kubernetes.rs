//! cgroup path -> QoS class of the pod, and the pod.
//!
//! | driver of the kubelet | path of a pod's cgroup |
//! | --- | --- |
//! | cgroupfs | `kubepods/pod<uid>`, `kubepods/burstable/pod<uid>`, `kubepods/besteffort/pod<uid>` |
//! | systemd | `kubepods.slice/kubepods-pod<uid>.slice`, `kubepods.slice/kubepods-burstable.slice/...` |
//! | systemd, where containerd does not use systemd | one directory, `kubepods-burstable-pod<uid>.slice:cri-containerd:<id>`, outside the pod's own cgroup |
//! | either, with `--cgroup-root`, as in kind | below `kubelet/`, or `kubelet.slice/kubelet-kubepods.slice/...` |
//!
//! Not here: whether a kubelet exists at all. The path is only meaningful for a container that CRI reports.

/// The QoS class of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qos {
    /// Requests equal limits, for every container.
    Guaranteed,
    /// There are requests.
    Burstable,
    /// There are no requests.
    BestEffort,
}

impl Qos {
    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            Qos::Guaranteed => "guaranteed",
            Qos::Burstable => "burstable",
            Qos::BestEffort => "besteffort",
        }
    }
}

/// A cgroup that the kubelet makes above containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KubeletCgroup<'a> {
    /// Of all pods of a node (*node allocatable*), or of those of a class.
    AllPods(Option<Qos>),
    /// Of one pod: its UID, with `_` for `-` in a slice.
    Pod(&'a str),
}

/// Returns what a cgroup of the kubelet is, by the last part of its path.
pub fn kubelet_cgroup(part: &str) -> Option<KubeletCgroup<'_>> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    if is_of_all_pods(part) {
        return Some(KubeletCgroup::AllPods(None));
    }
    let own = part.rsplit_once("kubepods-").map_or(part, |(_, own)| own);
    match own {
        "burstable" => Some(KubeletCgroup::AllPods(Some(Qos::Burstable))),
        "besteffort" => Some(KubeletCgroup::AllPods(Some(Qos::BestEffort))),
        own => {
            let uid = own.rsplit_once("pod").map(|(_, uid)| uid)?;
            let is_uid =
                !uid.is_empty() && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || b"-_".contains(&byte));
            is_uid.then_some(KubeletCgroup::Pod(uid))
        }
    }
}

/// Returns the QoS class of the pod that contains a cgroup; of the innermost pod if Kubernetes runs in a container.
pub fn qos(path: &str) -> Option<Qos> {
    let mut components =
        path.split('/').map(|component| component.strip_suffix(".slice").unwrap_or(component));
    let mut found = None;
    while let Some(component) = components.next() {
        if is_of_all_pods(component) {
            found = components.next().and_then(class).or(found);
        } else if let Some((slice, _)) = component.split_once(".slice:") {
            found = class_of_slice(slice).or(found);
        }
    }
    found
}

/// Returns the class in the name of a pod's slice, without its suffix.
fn class_of_slice(slice: &str) -> Option<Qos> {
    let (before, own) = slice.rsplit_once("kubepods-")?;
    let is_of_kubelet = before.is_empty() || before.ends_with('-');
    let (class, pod) = own.split_once("pod").filter(|_| is_of_kubelet)?;
    let class = match class {
        "" => Qos::Guaranteed,
        "burstable-" => Qos::Burstable,
        "besteffort-" => Qos::BestEffort,
        _ => return None,
    };
    (!pod.is_empty()).then_some(class)
}

/// Returns whether this is the kubelet's cgroup of all pods, without the suffix of a slice.
fn is_of_all_pods(component: &str) -> bool {
    component == "kubepods" || component.ends_with("-kubepods")
}

fn class(below: &str) -> Option<Qos> {
    let own = below.rsplit_once("kubepods-").map_or(below, |(_, own)| own);
    match own {
        "burstable" => Some(Qos::Burstable),
        "besteffort" => Some(Qos::BestEffort),
        _ => own.starts_with("pod").then_some(Qos::Guaranteed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn reads_class_of_any_pod(uid in "[0-9a-f]{8}-[0-9a-f]{4}", above in "(/[a-z]{1,9}){0,3}",
            class in proptest::sample::select(vec![Qos::Guaranteed, Qos::Burstable, Qos::BestEffort])) {
            let (folder, part) = match class {
                Qos::Guaranteed => (String::new(), String::new()),
                class => (format!("{}/", class.label()), format!("-{}", class.label())),
            };
            let uid_of_slice = uid.replace('-', "_");
            let slice = |root: &str| {
                let inner = if part.is_empty() { String::new() } else { format!("{root}{part}.slice/") };
                format!("{above}/{root}.slice/{inner}{root}{part}-pod{uid_of_slice}.slice/crio-a.scope")
            };
            for path in [format!("{above}/kubepods/{folder}pod{uid}/a"), slice("kubepods"), slice("kubelet-kubepods")] {
                proptest::prop_assert_eq!(qos(&path), Some(class), "{}", path);
            }
        }
    }

    #[test]
    fn reads_class_for_both_drivers_and_kind() {
        for (path, class) in [
            ("kubepods/pod1b2c-3d/a", Some(Qos::Guaranteed)),
            ("kubepods/burstable/pod1b2c-3d/a", Some(Qos::Burstable)),
            ("kubepods/besteffort/pod1b2c-3d/a", Some(Qos::BestEffort)),
            ("kubepods.slice/kubepods-pod1b.slice/crio-a.scope", Some(Qos::Guaranteed)),
            (
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1b.slice/x",
                Some(Qos::Burstable),
            ),
            (
                "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1b.slice/x",
                Some(Qos::BestEffort),
            ),
            (
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod1b.slice/x",
                Some(Qos::Burstable),
            ),
            ("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1b.slice/x", Some(Qos::Guaranteed)),
            ("docker/c0ffee/kubelet/kubepods/besteffort/pod1b/a", Some(Qos::BestEffort)),
            ("kubepods/burstable/pod1/a/kubelet/kubepods/pod2/b", Some(Qos::Guaranteed)),
            ("kubepods-pod1b.slice:cri-containerd:a", Some(Qos::Guaranteed)),
            ("kubepods-burstable-pod1b.slice:cri-containerd:a", Some(Qos::Burstable)),
            (
                "system.slice/containerd.service/kubelet-kubepods-besteffort-pod1b.slice:cri-containerd:a/init",
                Some(Qos::BestEffort),
            ),
            ("kubepods-burstable.slice:cri-containerd:a", None),
            ("mykubepods-pod1.slice:x:a", None),
            ("kubepods", None),
            ("kubepods.slice/other.service", None),
            ("docker/a", None),
        ] {
            assert_eq!(qos(path), class, "{path}");
        }
    }
}
