//! cgroup path -> QoS class of the pod, and which pod.
//!
//! | driver of the kubelet | path of a pod's cgroup |
//! | --- | --- |
//! | cgroupfs | `kubepods/pod<uid>`, `kubepods/burstable/pod<uid>`, `kubepods/besteffort/pod<uid>` |
//! | systemd | `kubepods.slice/kubepods-pod<uid>.slice`, `kubepods.slice/kubepods-burstable.slice/...` |
//! | either, with `--cgroup-root`, as kind has it | below `kubelet/`, or `kubelet.slice/kubelet-kubepods.slice/...` |
//!
//! Not here: whether there is a kubelet at all. Only of a container that CRI knows the path is worth anything.

/// How a pod's memory is guaranteed, as the kubelet names it, in lower case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qos {
    /// Requests are the limits, for every container.
    Guaranteed,
    /// Something is requested.
    Burstable,
    /// Nothing is.
    BestEffort,
}

impl Qos {
    /// As a label value.
    pub fn label(self) -> &'static str {
        match self {
            Qos::Guaranteed => "guaranteed",
            Qos::Burstable => "burstable",
            Qos::BestEffort => "besteffort",
        }
    }
}

/// The QoS class of the pod that a cgroup lies in; the innermost one where Kubernetes runs in a container.
pub fn qos(path: &str) -> Option<Qos> {
    let mut components =
        path.split('/').map(|component| component.strip_suffix(".slice").unwrap_or(component));
    let mut found = None;
    while let Some(component) = components.next() {
        if is_of_all_pods(component) {
            found = components.next().and_then(class).or(found);
        }
    }
    found
}

/// The cgroup that the kubelet makes around all pods, without the ending of a slice.
fn is_of_all_pods(component: &str) -> bool {
    component == "kubepods" || component.ends_with("-kubepods")
}

/// The cgroup of the pod that a container's cgroup lies in, and the pod's uid as the path has it; of the outermost pod where
/// Kubernetes runs in a container.
pub fn pod(path: &str) -> Option<(&str, &str)> {
    qos(path)?;
    let (mut end, mut is_inside) = (0, false);
    path.split('/').find_map(|component| {
        end += component.len() + 1;
        let own = component.strip_suffix(".slice").unwrap_or(component);
        if is_of_all_pods(own) || !is_inside {
            is_inside |= is_of_all_pods(own);
            return None;
        }
        let own = own.rsplit_once("kubepods-").map_or(own, |(_, own)| own);
        let own = own.strip_prefix("burstable-").or(own.strip_prefix("besteffort-")).unwrap_or(own);
        let uid = own.strip_prefix("pod").filter(|uid| !uid.is_empty())?;
        Some((path.get(..end - 1)?, uid))
    })
}

/// Whether a uid in a path is this pod's: a slice's name has other dashes.
pub fn is_uid(in_path: &str, uid: &str) -> bool {
    let plain = |uid: &str| uid.replace('_', "-");
    !uid.is_empty() && plain(in_path) == plain(uid)
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
        fn any_pod_has_its_class_with_either_driver_and_root(uid in "[0-9a-f]{8}-[0-9a-f]{4}", above in "(/[a-z]{1,9}){0,3}",
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
    fn the_class_is_told_by_the_paths_of_both_drivers_and_of_kind() {
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
            ("kubepods", None),
            ("kubepods.slice/other.service", None),
            ("docker/a", None),
        ] {
            assert_eq!(qos(path), class, "{path}");
        }
    }

    #[test]
    fn a_pod_s_own_cgroup_and_uid_are_told_by_the_path_of_a_container() {
        let slice = "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1b_2c.slice";
        let kind = "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1b.slice";
        for (path, wanted) in [
            ("kubepods/pod1b-2c/a", Some(("kubepods/pod1b-2c", "1b-2c"))),
            ("/kubepods/burstable/pod1b-2c/a/b", Some(("/kubepods/burstable/pod1b-2c", "1b-2c"))),
            (&format!("{slice}/cri-containerd-a.scope"), Some((slice, "1b_2c"))),
            (&format!("{kind}/x"), Some((kind, "1b"))),
            ("/pods/kubepods/pod1b/a", Some(("/pods/kubepods/pod1b", "1b"))),
            (
                "podruntime.slice/kubepods.slice/kubepods-pod1b.slice/x",
                Some(("podruntime.slice/kubepods.slice/kubepods-pod1b.slice", "1b")),
            ),
            (
                "pods.slice/pods-kubepods.slice/pods-kubepods-pod1b.slice/x",
                Some(("pods.slice/pods-kubepods.slice/pods-kubepods-pod1b.slice", "1b")),
            ),
            ("kubepods/burstable/pod1/a/kubelet/kubepods/pod2/b", Some(("kubepods/burstable/pod1", "1"))),
            ("pods/kubepods", None),
            ("kubepods/burstable", None),
            ("podman/pod1b/a", None),
            ("docker/a", None),
        ] {
            assert_eq!(pod(path), wanted, "{path}");
        }
        assert!(is_uid("1b_2c", "1b-2c") && is_uid("1b-2c", "1b-2c"));
        assert!(!is_uid("1b_2c", "1b-2d") && !is_uid("", ""));
    }
}
