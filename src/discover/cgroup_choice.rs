//! Chooses which of the cgroups with a container's id in their names is the container's.
//!
//! Anyone who may create cgroups can name one of them after a container, and has its id from the list of processes. A place counts
//! where root or the container's user alone can have made it. Elsewhere what the runtime says decides: its first process is in the
//! container's cgroup. A container inside a container, whose processes may have other pids here, has the only cgroup there with its id.

use std::collections::HashMap;
use std::path::Path;

use super::cgroup_tree::{ContainerCgroup, outermost};
use super::{ContainerId, ContainerRecord, Inventory, contains_path};

/// What the choice is made by.
pub struct CgroupChoice<'a> {
    /// The cgroups with the id of a container in their names.
    pub candidates: &'a [ContainerCgroup],
    /// The containers that the runtimes know.
    pub records: &'a HashMap<ContainerId, (usize, ContainerRecord)>,
    /// The containers of the cycle before.
    pub before: &'a Inventory,
    /// Returns the path in `/proc/PID/cgroup` of a container's first process.
    pub first_process: &'a dyn Fn(&ContainerRecord) -> Option<String>,
}

impl CgroupChoice<'_> {
    /// Returns for each candidate whether it has its own entry: at most one for each id.
    pub fn select(&self) -> Vec<bool> {
        let mut by_id: HashMap<&ContainerId, Vec<usize>> = HashMap::new();
        for (at, candidate) in self.candidates.iter().enumerate() {
            by_id.entry(&candidate.id).or_default().push(at);
        }
        let mut selected = vec![false; self.candidates.len()];
        for (id, same) in by_id {
            if let Some(at) = self.choose(id, &same) {
                selected[at] = true;
            }
        }
        selected
    }

    /// Chooses among the candidates with this id.
    fn choose(&self, id: &ContainerId, same: &[usize]) -> Option<usize> {
        let proven = self.all(same, |candidate| candidate.inside.is_none() && self.is_proven(candidate));
        if let [only] = proven[..] {
            return Some(only);
        }
        let record = self.records.get(id).map(|(_, record)| record);
        if let Some(own) = record.and_then(|record| self.of_first_process(record, same)) {
            return Some(own);
        }
        let is_nested = |candidate: &ContainerCgroup| record.is_some() && candidate.inside.is_some();
        let nested = self.all(same, is_nested);
        let nested: Vec<usize> =
            nested.into_iter().filter(|at| self.is_proven(outermost(self.candidates, *at))).collect();
        match (&proven[..], &nested[..]) {
            ([first, ..], _) => self.kept(id, &proven).or(Some(*first)),
            ([], [only]) => Some(*only),
            // a guess could be the attacker's
            ([], several) => self.kept(id, several),
        }
    }

    fn all(&self, same: &[usize], is_wanted: impl Fn(&ContainerCgroup) -> bool) -> Vec<usize> {
        same.iter().copied().filter(|at| is_wanted(&self.candidates[*at])).collect()
    }

    fn is_proven(&self, candidate: &ContainerCgroup) -> bool {
        candidate.is_proven(self.records.get(&candidate.id).and_then(|(_, record)| record.spec.user))
    }

    /// Returns the candidate that has the container's first process.
    fn of_first_process(&self, record: &ContainerRecord, same: &[usize]) -> Option<usize> {
        let path = (self.first_process)(record)?;
        let absolute = Path::new(path.trim_start_matches('/'));
        let place = |at: &usize| self.candidates[*at].path.as_path();
        let own = same.iter().find(|at| absolute.starts_with(place(at)));
        // in a cgroup namespace of memledger's own, the end of a path
        own.or_else(|| same.iter().find(|at| contains_path(place(at), &path))).copied()
    }

    /// Returns the one of these that the container had in the cycle before.
    fn kept(&self, id: &ContainerId, of: &[usize]) -> Option<usize> {
        let known = self.before.containers.iter().find(|known| known.id == *id)?;
        let before = &known.cgroup.as_ref()?.path;
        of.iter().copied().find(|at| self.candidates[*at].path == *before)
    }
}

#[cfg(test)]
mod tests {
    use crate::discover::RuntimeKind;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::clock::Timestamp;
    use crate::config::Filter;
    use crate::discover::ContainerSpec;
    use crate::discover::cgroup_tree::CgroupTree;
    use crate::discover::{ConnectionState, Container, Hierarchy, Registry, RuntimeState, Version};
    use crate::host::HostPaths;

    /// After so long a container without a name is shown by its id.
    const UNNAMED_AFTER: Duration = Duration::from_secs(10);

    fn record(id: char, runtime: RuntimeKind, name: &str) -> ContainerRecord {
        let (id, labels) = (id.to_string().repeat(64), HashMap::new());
        ContainerRecord::new(
            &id,
            runtime,
            ContainerSpec::labelled([name, "image"], &labels, &Filter::default()),
        )
    }

    fn tree_at(root: &Path) -> CgroupTree {
        CgroupTree::new(&Hierarchy { version: Version::V2, root: root.to_path_buf() })
    }

    /// Returns the cgroups of the containers a, b, ... in a tree, with a runtime that lists these and one that does not answer.
    fn cgroups_in(root: &Path, known: &[(char, u32)]) -> Vec<(String, Option<PathBuf>)> {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        source.set_connection(ConnectionState::Up);
        for (letter, user) in known {
            let mut record = record(*letter, RuntimeKind::Docker, &letter.to_string());
            Arc::make_mut(&mut record.spec).user = Some(*user);
            source.add_running(record);
        }
        let podman = RuntimeState::new(RuntimeKind::Podman, Arc::default());
        podman.set_connection(ConnectionState::NoSocket);
        let mut registry = Registry::new(Filter::default(), vec![source, podman], Some(tree_at(root)));
        let now = Timestamp::now();
        assert!(registry.refresh(now).1.is_ok());
        let inventory = registry.refresh(now.plus(UNNAMED_AFTER)).0.inventory;
        let place = |container: &Arc<Container>| {
            let cgroup = container.cgroup.as_ref().map(|cgroup| cgroup.path.clone());
            (container.identity.name.to_string(), cgroup)
        };
        inventory.containers.iter().map(place).collect()
    }

    #[test]
    fn cgroup_that_any_user_can_make_is_no_container() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, c, d] = ['a', 'b', 'c', 'd'].map(|letter| letter.to_string().repeat(64));
        let user = "user.slice/user-7.slice/user@7.service";
        for path in [
            // it sorts before the container's own
            format!("a_job/slurm_vm/uid_7/job_1/step_0/task_0/{a}"),
            format!("system.slice/docker-{a}.scope"),
            format!("slurm/uid_7/job_1/step_0/task_0/docker/{b}"),
            format!("{user}/app.slice/docker-{b}.scope"),
            format!("{user}/app.slice/docker-{c}.scope/below"),
            format!("{user}/app.slice/docker-{d}.scope"),
        ] {
            std::fs::create_dir_all(folder.path().join(path)).unwrap();
        }
        let own = Some(format!("system.slice/docker-{a}.scope").into());
        let of_user = Some(format!("{user}/app.slice/docker-{c}.scope").into());
        assert_eq!(
            cgroups_in(folder.path(), &[('a', 0), ('b', 0), ('c', 7)]),
            [("a".to_owned(), own.clone()), ("b".to_owned(), None), ("c".to_owned(), of_user)]
        );
        assert_eq!(cgroups_in(folder.path(), &[]), [(a[..12].to_owned(), own)]);
    }

    #[test]
    fn cgroup_of_the_first_process_is_the_containers() {
        let folder = tempfile::tempdir().unwrap();
        let (root, proc) = (folder.path().join("cgroup"), folder.path().join("proc"));
        let id = "a".repeat(64);
        let own = format!("slurm/uid_0/job_1/step_0/{id}");
        let forged = format!("slurm/uid_7/job_2/step_0/{id}");
        for path in [&*own, &*forged, &*format!("docker/{}/x/{id}", "b".repeat(64))] {
            std::fs::create_dir_all(root.join(path)).unwrap();
        }
        std::fs::create_dir_all(proc.join("7")).unwrap();
        std::fs::create_dir_all(proc.join("self/ns")).unwrap();
        std::os::unix::fs::symlink("pid:[4026531836]", proc.join("self/ns/pid")).unwrap();
        std::fs::write(proc.join("7/cgroup"), format!("0::/{own}/init\n")).unwrap();
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        source.set_connection(ConnectionState::Up);
        source.add_running(ContainerRecord { pid: Some(7), ..record('a', RuntimeKind::Docker, "train") });
        let registry = Registry::new(Filter::default(), vec![source], Some(tree_at(&root)));
        let processes = HostPaths { proc, ..HostPaths::default() };
        let mut registry = registry.with_processes(&processes);
        let inventory = registry.refresh(Timestamp::now()).0.inventory;
        let train = inventory.containers.iter().find(|it| &*it.identity.name == "train").unwrap();
        assert_eq!(train.cgroup.as_ref().unwrap().path, PathBuf::from(own));
    }

    #[test]
    fn second_cgroup_inside_another_container_takes_no_id_over() {
        let folder = tempfile::tempdir().unwrap();
        let [node, pod, other] = ['b', 'c', 'a'].map(|letter| letter.to_string().repeat(64));
        let own = format!("docker/{node}/kubepods/podu/{pod}");
        std::fs::create_dir_all(folder.path().join(&own)).unwrap();
        let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
        source.set_connection(ConnectionState::Up);
        source.add_running(record('c', RuntimeKind::Cri, "train"));
        let mut registry = Registry::new(Filter::default(), vec![source], Some(tree_at(folder.path())));
        let mut place = || {
            let inventory = registry.refresh(Timestamp::now()).0.inventory;
            let train = inventory.containers.iter().find(|it| &*it.identity.name == "train").cloned();
            train.unwrap().cgroup.as_ref().map(|cgroup| cgroup.path.clone())
        };
        assert_eq!(place(), Some(own.clone().into()));
        // it sorts before the node
        let forged = folder.path().join(format!("docker/{other}/kubepods/podu/{pod}"));
        std::fs::create_dir_all(forged).unwrap();
        assert_eq!(place(), Some(own.into()));
    }
}
