//! A process that is read later on another thread, when its pid may have been reused, and whose read that is.

use std::path::Path;
use std::sync::Arc;

use crate::discover::{Container, ContainerId};
use crate::host::read_pool::ReadOwner;
use crate::host::{Dir, ReadError};
use crate::parse::container_id;
use crate::parse::process::Stat;

/// A process, identified by pid and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
}

/// The container whose processes are read. Its group is its pod, or the container that it is inside of, or itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TargetOwner {
    /// The container.
    pub id: ContainerId,
    group: Arc<str>,
}

impl TargetOwner {
    /// Returns the owner of reads of a container's processes.
    pub fn of(container: &Container) -> Self {
        let id = container.id.clone();
        let path = container.cgroup.as_ref().filter(|_| container.nested);
        let outermost = path.and_then(|cgroup| container_id::in_path(cgroup.path.to_str()?).next());
        let group = match (&container.pod, outermost) {
            (Some(pod), _) => Arc::clone(&pod.uid),
            (None, Some(outermost)) => outermost.id.into(),
            (None, None) => Arc::clone(id.shared()),
        };
        Self { id, group }
    }
}

impl ReadOwner for TargetOwner {
    fn group(&self) -> &str {
        &self.group
    }
}

impl Target {
    /// Opens the procfs directory of this process.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it ended, also if its pid was reused.
    pub fn open(self, proc: &Path, buffer: &mut Vec<u8>) -> Result<Dir, ReadError> {
        let dir = Dir::open(&proc.join(self.pid.to_string()))?;
        self.check(&dir, buffer)?;
        Ok(dir)
    }

    /// Checks that a procfs directory is that of this process.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn check(self, dir: &Dir, buffer: &mut Vec<u8>) -> Result<(), ReadError> {
        let stat = dir.file("stat")?.read_once(buffer).map(Stat::parse)?;
        let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
        if stat.start_ticks == self.start_ticks {
            Ok(())
        } else {
            Err(ReadError::Gone(format!("process {}", self.pid)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Pod;

    #[test]
    fn group_is_the_pod_or_the_outermost_container() {
        let [outer, inner] = ["a", "b"].map(|digit| digit.repeat(64));
        let plain = Container::in_cgroup(&inner, &format!("docker/{outer}/docker/{inner}"));
        assert_eq!(TargetOwner::of(&plain).group(), inner, "the outer one is not shown");
        let nested = Container { nested: true, ..Container::clone(&plain) };
        assert_eq!(TargetOwner::of(&nested).group(), outer);
        let pod = Pod {
            namespace: "n".into(),
            name: "p".into(),
            uid: "u".into(),
            attempt: 0,
            job: "".into(),
            source: "".into(),
            labels: vec![],
            memory_min_bytes: None,
        };
        let in_pod = Container { pod: Some(Arc::new(pod)), ..nested };
        assert_eq!(TargetOwner::of(&in_pod).group(), "u");
    }
}
