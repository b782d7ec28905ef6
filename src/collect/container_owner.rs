//! Whose read it is, where a process is read on another thread.

use std::sync::Arc;

use crate::discover::{Container, ContainerId};
use crate::host::read_pool::ReadOwner;
use crate::parse::container_id;

/// The container whose processes are read. Its group is its pod, or the container that it is inside of, or itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerOwner {
    /// The container.
    pub id: ContainerId,
    group: Arc<str>,
}

impl ContainerOwner {
    /// Returns the owner of reads of a container's processes.
    pub fn of(container: &Container) -> Self {
        let id = container.id.clone();
        let path = container.cgroup.as_ref().filter(|_| container.nested);
        let outermost = path.and_then(|cgroup| container_id::in_path(cgroup.path.to_str()?).next());
        let group = match (&container.spec.pod, outermost) {
            (Some(pod), _) => Arc::clone(&pod.uid),
            (None, Some(outermost)) => outermost.id.into(),
            (None, None) => Arc::clone(id.shared()),
        };
        Self { id, group }
    }
}

impl ReadOwner for ContainerOwner {
    fn group(&self) -> &str {
        &self.group
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{ContainerSpec, Pod};

    #[test]
    fn group_is_the_pod_or_the_outermost_container() {
        let [outer, inner] = ["a", "b"].map(|digit| digit.repeat(64));
        let plain = Container::in_cgroup(&inner, &format!("docker/{outer}/docker/{inner}"));
        assert_eq!(ContainerOwner::of(&plain).group(), inner, "the outer one is not shown");
        let nested = Container { nested: true, ..Container::clone(&plain) };
        assert_eq!(ContainerOwner::of(&nested).group(), outer);
        let pod = Pod { namespace: "n".into(), name: "p".into(), uid: "u".into(), ..Pod::default() };
        let spec = ContainerSpec { pod: Some(Arc::new(pod)), ..ContainerSpec::default() };
        let in_pod = Container { spec: Arc::new(spec), ..nested };
        assert_eq!(ContainerOwner::of(&in_pod).group(), "u");
    }
}
