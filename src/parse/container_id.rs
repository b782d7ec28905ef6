//! cgroup path -> container ids.
//!
//! | created by | path component |
//! | --- | --- |
//! | Docker, cgroupfs driver; Kubernetes, cgroupfs driver; containerd (nerdctl) | `<64 hex>` |
//! | Docker, systemd driver | `docker-<64 hex>.scope` |
//! | containerd for Kubernetes, systemd driver | `cri-containerd-<64 hex>.scope` |
//! | CRI-O | `crio-<64 hex>.scope` |
//! | containerd, where the kubelet uses the systemd driver and containerd does not (`SystemdCgroup = false`) | `kubepods-<pod>.slice:cri-containerd:<64 hex>` |
//! | Podman | `libpod-<64 hex>.scope`, or without `.scope` below `libpod_parent` |
//! | `memledger run` | `memledger-<64 hex>.scope`, without systemd `memledger/<64 hex>` |
//!
//! The monitor processes of CRI-O and Podman run in `crio-conmon-<id>.scope` and `libpod-conmon-<id>.scope`, which are not
//! the container. Not here: which of several nested ids counts; that needs the runtimes (`discover`).

use std::fmt;

use serde::{Deserialize, Serialize};

/// What runs a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuntimeKind {
    /// The kubelet's container runtime, by its API.
    Cri,
    /// Docker.
    Docker,
    /// Podman.
    Podman,
    /// `memledger run`.
    Run,
    /// containerd, by the name of a cgroup alone.
    Containerd,
    /// CRI-O, by the name of a cgroup alone.
    CriO,
    /// None has been found yet.
    #[default]
    #[serde(rename = "")]
    Missing,
    /// The name of the cgroup does not show it, or the name is that of another version.
    #[serde(other)]
    Unknown,
}

impl RuntimeKind {
    /// Returns the label value.
    pub const fn as_str(self) -> &'static str {
        match self {
            RuntimeKind::Cri => "cri",
            RuntimeKind::Docker => "docker",
            RuntimeKind::Podman => "podman",
            RuntimeKind::Run => "run",
            RuntimeKind::Containerd => "containerd",
            RuntimeKind::CriO => "cri-o",
            RuntimeKind::Missing => "",
            RuntimeKind::Unknown => "unknown",
        }
    }

    /// Returns whether it is `memledger run`.
    pub fn is_run(self) -> bool {
        self == RuntimeKind::Run
    }

    /// Returns whether none has been found yet.
    pub fn is_missing(&self) -> bool {
        *self == RuntimeKind::Missing
    }
}

impl fmt::Display for RuntimeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A container id in the name of a cgroup, with the runtime that created it according to the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerIdMatch<'a> {
    /// The 64 hexadecimal digits.
    pub id: &'a str,
    /// The runtime, never [`RuntimeKind::Cri`] or [`RuntimeKind::Missing`].
    pub runtime: RuntimeKind,
}

/// The last digits of the id of each run of `memledger run`, `-run` in ASCII: it cannot be that of a container of another runtime.
pub const RUN_ID_SUFFIX: &str = "2d72756e";

/// Returns the container id in one component of a cgroup path, given the component above it.
pub fn in_component<'a>(component: &'a str, parent: &str) -> Option<ContainerIdMatch<'a>> {
    let name = component.strip_suffix(".scope").unwrap_or(component);
    let (prefix, id) = match name.rsplit_once(['-', ':']) {
        // in `<slice>:<prefix>:<id>`, which a runtime without systemd uses as a path, the middle is the prefix
        Some((before, id)) => (Some(before.rsplit_once(':').map_or(before, |(_, prefix)| prefix)), id),
        None => (None, name),
    };
    if id.len() != 64 || !id.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()) {
        return None;
    }
    let runtime = match prefix {
        Some("docker") => RuntimeKind::Docker,
        Some("cri-containerd") => RuntimeKind::Containerd,
        Some("crio") => RuntimeKind::CriO,
        Some("libpod") => RuntimeKind::Podman,
        Some("memledger") if id.ends_with(RUN_ID_SUFFIX) => RuntimeKind::Run,
        Some(other) if other.ends_with("conmon") => return None,
        Some(_) => RuntimeKind::Unknown,
        None if parent == "docker" => RuntimeKind::Docker,
        None if parent == "libpod_parent" => RuntimeKind::Podman,
        None if parent == "memledger" && id.ends_with(RUN_ID_SUFFIX) => RuntimeKind::Run,
        None => RuntimeKind::Unknown,
    };
    Some(ContainerIdMatch { id, runtime })
}

/// Returns the user whose run has this id; `None` if it is not that of a run.
pub fn user_of_run(id: &str) -> Option<u32> {
    let digits = id.strip_suffix(RUN_ID_SUFFIX)?;
    u32::from_str_radix(digits.get(digits.len().checked_sub(8)?..)?, 16).ok()
}

/// Returns the outermost container id in a path, with the names of the cgroups above it.
pub fn outermost(path: &str) -> Option<(Vec<&str>, ContainerIdMatch<'_>)> {
    let mut above = Vec::new();
    for component in path.split('/').filter(|component| !component.is_empty()) {
        match in_component(component, above.last().copied().unwrap_or_default()) {
            Some(found) => return Some((above, found)),
            None => above.push(component),
        }
    }
    None
}

/// Returns all container ids in a path, outermost first.
pub fn in_path(path: &str) -> impl Iterator<Item = ContainerIdMatch<'_>> {
    let parents = std::iter::once("").chain(path.split('/'));
    path.split('/').zip(parents).filter_map(|(component, parent)| in_component(component, parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "13739abf0f2dd3d3a7e4d1c1dbf5a9a7c1d1e2f3a4b5c6d7e8f901234567bc48";
    const B: &str = "ffffabf0f2dd3d3a7e4d1c1dbf5a9a7c1d1e2f3a4b5c6d7e8f901234567bc4800";

    fn ids(path: &str) -> Vec<(String, &'static str)> {
        in_path(path).map(|found| (found.id.to_owned(), found.runtime.as_str())).collect()
    }

    #[test]
    fn recognizes_every_known_layout() {
        let layouts = [
            (format!("/docker/{A}"), "docker"),
            (format!("/system.slice/docker-{A}.scope"), "docker"),
            (format!("/kubepods/burstable/pod1b2c-3d/{A}"), "unknown"),
            (
                format!(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1b.slice/cri-containerd-{A}.scope"
                ),
                "containerd",
            ),
            (format!("/kubepods.slice/kubepods-pod1b.slice/crio-{A}.scope"), "cri-o"),
            (
                format!(
                    "/system.slice/containerd.service/kubepods-burstable-pod1b_2c.slice:cri-containerd:{A}"
                ),
                "containerd",
            ),
            (format!("/kubepods-pod1b.slice:cri-containerd:{A}"), "containerd"),
            (format!("/kubepods-pod1b.slice:crio:{A}"), "cri-o"),
            (format!("/system.slice:docker:{A}"), "docker"),
            (format!("/a:b:{A}"), "unknown"),
            (format!("/machine.slice/libpod-{A}.scope/container"), "podman"),
            (format!("/libpod_parent/libpod-{A}"), "podman"),
            (format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope"), "podman"),
            (format!("/default/{A}"), "unknown"),
            (format!("/my-parent/{A}/init.scope"), "unknown"),
        ];
        for (path, runtime) in layouts {
            assert_eq!(ids(&path), [(A.to_owned(), runtime)], "{path}");
        }
    }

    proptest::proptest! {
        #[test]
        fn finds_any_id_at_any_depth(id in "[0-9a-f]{64}", above in "(/[a-z.]{1,12}){0,4}", below in "(/[a-z.]{1,12}){0,2}",
            (before, after, runtime) in proptest::sample::select(vec![("docker-", ".scope", "docker"), ("cri-containerd-", ".scope", "containerd"),
                ("kubepods-pod1.slice:cri-containerd:", "", "containerd"),
                ("crio-", ".scope", "cri-o"), ("libpod-", ".scope", "podman"), ("libpod-", "", "podman")])) {
            let path = format!("{above}/{before}{id}{after}{below}");
            proptest::prop_assert_eq!(ids(&path), [(id.clone(), runtime)]);
            proptest::prop_assert_eq!(ids(&path.replace(&id, &id[1..])), []);
        }
    }

    #[test]
    fn ignores_similar_names() {
        for path in [
            format!("/machine.slice/libpod-conmon-{A}.scope"),
            format!("/system.slice/crio-conmon-{A}.scope"),
            format!("/kubepods-pod1b.slice:crio-conmon:{A}"),
            format!("/kubepods-pod1b.slice:cri-containerd:{A}0"),
            format!("/{A}:cri-containerd:pod"),
            "/system.slice/docker.service".to_owned(),
            format!("/docker/{}", &A[..63]),
            format!("/docker/{A}0"),
            format!("/docker/{}", A.to_uppercase()),
            "/process_api/459807b6249f128c412fab48ce89ff75".to_owned(),
            "/".to_owned(),
            String::new(),
        ] {
            assert_eq!(ids(&path), [], "{path}");
        }
    }

    #[test]
    fn returns_nested_ids_outermost_first() {
        let inner = &B[..64];
        let path = format!("/docker/{A}/docker/{inner}");
        assert_eq!(ids(&path), [(A.to_owned(), "docker"), (inner.to_owned(), "docker")]);
    }

    #[test]
    fn runtimes_have_their_label_in_json_and_unknown_ones_are_read() {
        use RuntimeKind::*;
        for kind in [Cri, Docker, Podman, Run, Containerd, CriO, Missing, Unknown] {
            let name = serde_json::to_value(kind).unwrap();
            assert_eq!(name, kind.as_str());
            assert_eq!(serde_json::from_value::<RuntimeKind>(name).unwrap(), kind);
        }
        assert_eq!(serde_json::from_value::<RuntimeKind>("lxc".into()).unwrap(), Unknown);
    }
}
