//! Merges the containers of all runtimes and of the cgroup tree into one inventory with stable names.
//!
//! * One entry for each id. The cgroup tree shows that a container runs, a runtime names it.
//! * A container whose id no runtime knows (yet) is held back for [`NAME_GRACE`] if a runtime (of a run: its record) may still name it, and is then
//!   shown under its short id. Otherwise every start would create a series with a meaningless name.
//! * The sandbox of a pod (its pause process) is not a container: its memory belongs to the host.
//! * A container inside a container has its own entry only if a runtime knows it. Otherwise it is part of the outer one, so that
//!   no memory is counted twice.
//! * While a runtime is unavailable, its names are kept; a container then ends when its cgroup is removed.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::cgroup_choice::CgroupChoice;
use super::cgroup_tree::{CgroupTree, ContainerCgroup};
use super::device_allocations::{AllocatedContainer, DeviceAllocation, newest_pods, pod_of};
use super::path_owner::is_of_kubelet;
use super::{
    Cgroup, CgroupOwners, ConnectionState, Container, ContainerId, ContainerRecord, Identity, Inventory,
    RuntimeData, RuntimeKind, RuntimeState, Version,
};
use crate::clock::{Timestamp, is_same_start};
use crate::config::Filter;
use crate::host::process::ProcessId;
use crate::host::{Dir, HostPaths, ReadError, in_pod};
use crate::parse::process::cgroup_path;

/// Longest time that a container is held back while a runtime may still name it.
const NAME_GRACE: Duration = Duration::from_secs(3);

/// How long the run of a container that is not listed any more keeps its number: its runtime may only be away.
const NUMBER_KEPT: Duration = Duration::from_secs(600);

/// The merged view of all sources.
#[derive(Debug)]
pub struct Registry {
    filter: Filter,
    /// In order of precedence.
    sources: Vec<Arc<RuntimeState>>,
    tree: Option<CgroupTree>,
    /// Where processes can be read by the pids of the runtimes.
    processes: Option<HostPaths>,
    generations: Vec<u64>,
    nameless: HashMap<ContainerId, Timestamp>,
    waiting: bool,
    inventory: Arc<Inventory>,
    /// Number of the run that was listed last.
    listed_run: u64,
    /// The last listed runs of containers that are not listed any more.
    gone: HashMap<ContainerId, GoneRun>,
}

/// A run that is not listed any more.
#[derive(Clone, Copy, Debug)]
struct GoneRun {
    start: ListedStart,
    listed_run: u64,
    since: Timestamp,
}

/// What tells two listed runs of a container apart.
#[derive(Clone, Copy, Debug)]
struct ListedStart {
    /// Unix time of the start, if a runtime reports it.
    at: Option<f64>,
    cgroup_inode: Option<u64>,
}

impl ListedStart {
    fn of(container: &Container) -> Self {
        Self { at: container.started, cgroup_inode: container.cgroup_inode() }
    }

    /// Returns whether a later listing is of the same run. Another start time is another run. A container that only its cgroup shows has no
    /// start time until a runtime names it; its run lasts as long as the cgroup.
    fn is_of(self, later: Self) -> bool {
        match (self.at, self.cgroup_inode.zip(later.cgroup_inode)) {
            (Some(_), _) => is_same_start(self.at, later.at),
            (None, inodes) => inodes.is_none_or(|(earlier, later)| earlier == later),
        }
    }
}

/// Changes since the previous cycle.
#[derive(Debug)]
pub struct InventoryUpdate {
    /// All running containers.
    pub inventory: Arc<Inventory>,
    /// Containers that ended, including those that started and ended between two cycles.
    pub ended: Vec<Arc<Container>>,
}

impl Registry {
    /// Creates a registry of these sources, in order of precedence.
    pub fn new(filter: Filter, sources: Vec<Arc<RuntimeState>>, tree: Option<CgroupTree>) -> Self {
        Self {
            filter,
            generations: vec![u64::MAX; sources.len()],
            sources,
            tree,
            processes: None,
            nameless: HashMap::new(),
            waiting: true,
            inventory: Arc::default(),
            listed_run: 0,
            gone: HashMap::new(),
        }
    }

    /// Reads the cgroup of a container's first process where several cgroups have its id, or anyone can have made the only one.
    pub fn with_processes(self, host_paths: &HostPaths) -> Self {
        let processes = host_paths.in_initial_pid_namespace().then(|| host_paths.clone());
        Self { processes, ..self }
    }

    /// Merges all sources if one of them changed.
    ///
    /// # Errors
    /// A part of the cgroup tree cannot be listed. The inventory is returned as well, with everything else.
    pub fn refresh(&mut self, now: Timestamp) -> (InventoryUpdate, Result<(), ReadError>) {
        let (mut changed, walked) = match &mut self.tree {
            Some(tree) => tree.refresh(now),
            None => (false, Ok(())),
        };
        let (mut records, mut sandboxes, mut uncertain) = (HashMap::new(), HashSet::new(), HashSet::new());
        let (mut ended_runs, mut commands) = (HashSet::new(), Vec::new());
        let (mut short_lived, mut device_allocations) = (Vec::new(), Vec::new());
        let mut connections = Vec::new();
        for (rank, source) in self.sources.iter().enumerate() {
            let mut state = source.lock();
            changed |= self.generations[rank] != state.generation;
            self.generations[rank] = state.generation;
            short_lived.append(&mut state.ended);
            connections.push((source.runtime, state.connection, state.is_up()));
        }
        self.record_unnamed_start();
        if !changed && !self.waiting {
            return (InventoryUpdate { inventory: Arc::clone(&self.inventory), ended: vec![] }, walked);
        }
        for (rank, source) in self.sources.iter().enumerate().rev() {
            let state = source.lock();
            records.extend(state.running.values().map(|record| (record.id.clone(), (rank, record.clone()))));
            sandboxes.extend(state.sandboxes.keys().cloned());
            device_allocations.extend(included_allocations(&state, &self.filter));
            ended_runs.extend(state.ended_runs.iter().cloned());
            commands.extend(state.commands.iter().map(|(id, command)| (*command, id.clone())));
            uncertain.extend(state.uncertain.iter().cloned());
        }
        let candidates = self.tree.as_ref().map_or(&[][..], CgroupTree::candidates);
        uncertain.retain(|id| !candidates.iter().any(|candidate| candidate.id == *id));
        records.retain(|id, _| !uncertain.contains(id));
        // with cri-dockerd, Docker lists sandboxes as containers
        records.retain(|id, _| !sandboxes.contains(id));
        short_lived.retain(|record| !sandboxes.contains(&record.id));
        sandboxes.extend(ended_runs);
        let before = Arc::clone(&self.inventory);
        self.gone.retain(|_, gone| now.since(gone.since) < NUMBER_KEPT);
        let mut inventory = self.merge(now, &records, &sandboxes, &connections);
        let has_no_cgroup = |id: &ContainerId| {
            inventory.containers.iter().any(|container| container.id == *id && container.cgroup.is_none())
        };
        commands.retain(|(_, id)| has_no_cgroup(id));
        (inventory.commands, inventory.device_allocations) = (commands, device_allocations);
        let inventory = Arc::new(inventory);
        let ended = ended_since(&before, &inventory, &short_lived, &self.filter);
        let listed = ended.iter().filter(|container| container.listed_run > 0);
        self.gone.extend(listed.map(|container| {
            let (start, listed_run) = (ListedStart::of(container), container.listed_run);
            (container.id.clone(), GoneRun { start, listed_run, since: now })
        }));
        self.inventory = Arc::clone(&inventory);
        (InventoryUpdate { inventory, ended }, walked)
    }

    /// Records when the newest container of a pod was started that the kubelet's runtime has not named, while that is away: by its oldest
    /// process, because a container that has run for longer may have started others since.
    fn record_unnamed_start(&self) {
        let is_away = |source: &&Arc<RuntimeState>| {
            source.runtime == RuntimeKind::Cri && source.lock().connection == ConnectionState::Down
        };
        let Some(source) = self.sources.iter().find(is_away).filter(|_| in_pod()) else { return };
        let Some((tree, host_paths)) = self.tree.as_ref().zip(self.processes.as_ref()) else { return };
        let oldest_start = |candidate: &ContainerCgroup| {
            let dir = Dir::open(&tree.hierarchy().root.join(&candidate.path)).ok()?;
            let mut buffer = Vec::new();
            let list = dir.file("cgroup.procs").ok()?.read_once(&mut buffer).ok()?;
            let pids = list.split(|byte| *byte == b'\n');
            let pids = pids.filter_map(|line| std::str::from_utf8(line).ok()?.parse().ok());
            pids.filter_map(|pid| Some(ProcessId::read(&host_paths.proc, pid).ok()?.start_ticks)).min()
        };
        let mut state = source.lock();
        let is_unnamed_in_pod = |candidate: &&ContainerCgroup| {
            candidate.path.iter().any(|name| name.to_str().is_some_and(is_of_kubelet))
                && !state.running.contains_key(&candidate.id)
                && !state.sandboxes.contains_key(&candidate.id)
        };
        let newest = tree.candidates().iter().filter(is_unnamed_in_pod).filter_map(oldest_start).max();
        let ticks_per_second = rustix::param::clock_ticks_per_second().max(1) as f64;
        let newest = newest.map(|ticks| ticks as f64 / ticks_per_second);
        state.newest_unnamed_start = state.newest_unnamed_start.into_iter().chain(newest).reduce(f64::max);
    }

    fn merge(
        &mut self,
        now: Timestamp,
        records: &HashMap<ContainerId, (usize, ContainerRecord)>,
        sandboxes: &HashSet<ContainerId>,
        connections: &[(RuntimeKind, ConnectionState, Option<bool>)],
    ) -> Inventory {
        let candidates = self.tree.as_ref().map_or(&[][..], CgroupTree::candidates);
        let choice = CgroupChoice {
            candidates,
            records,
            before: &self.inventory,
            first_process: &|record| self.first_process_path(record),
        };
        let selected = choice.select();
        let inner: Vec<&Path> = std::iter::zip(candidates, &selected)
            .filter(|(candidate, selected)| **selected && candidate.inside.is_some())
            .map(|(candidate, _)| candidate.path.as_path())
            .collect();
        let mut found: Vec<(usize, Container)> = Vec::new();
        let mut with_cgroup = HashSet::new();
        let mut nameless = HashMap::new();
        self.waiting = connections.iter().any(|(_, connection, _)| *connection == ConnectionState::Starting);
        for (candidate, _) in std::iter::zip(candidates, &selected).filter(|(_, selected)| **selected) {
            with_cgroup.insert(candidate.id.clone());
            let cgroup = Some(Arc::new(own_cgroup(candidate, &inner)));
            match records.get(&candidate.id) {
                Some((rank, record)) => found.push((*rank, container_of_record(record, cgroup))),
                None if sandboxes.contains(&candidate.id) => {}
                None => {
                    let seen = *self.nameless.get(&candidate.id).unwrap_or(&now);
                    nameless.insert(candidate.id.clone(), seen);
                    if may_get_name(candidate, now.since(seen), connections) {
                        self.waiting = true;
                    } else {
                        found.push((usize::MAX, container_of_cgroup(candidate, cgroup)));
                    }
                }
            }
        }
        self.nameless = nameless;
        for (id, (rank, record)) in records {
            // known to a connected runtime, without a cgroup: it is starting, or its cgroup is elsewhere
            if !with_cgroup.contains(id)
                && connections.get(*rank).is_some_and(|(_, connection, _)| *connection == ConnectionState::Up)
            {
                found.push((*rank, container_of_record(record, None)));
            }
        }
        let containers = self.included(found, records);
        let runtimes =
            connections.iter().filter_map(|(runtime, _, is_up)| Some((*runtime, (*is_up)?))).collect();
        let owners = self.tree.as_ref().map(|tree| CgroupOwners::new(&tree.hierarchy().root));
        Inventory { containers, runtimes, owners, ..Inventory::default() }
    }

    /// Returns those that the filters include, with unique names.
    fn included(
        &mut self,
        mut found: Vec<(usize, Container)>,
        records: &HashMap<ContainerId, (usize, ContainerRecord)>,
    ) -> Vec<Arc<Container>> {
        let labels_match = |container: &Container| match records.get(&container.id) {
            Some((_, record)) => record.spec.labels_match,
            None => self.filter.labels.is_empty(),
        };
        found.retain(|(_, container)| labels_match(container));
        let mut containers = with_unique_names(found);
        containers.retain(|container| container.identity.is_included(&self.filter));
        mark_nested(&mut containers);
        self.number_runs(&mut containers);
        containers.into_iter().map(Arc::new).collect()
    }

    /// Numbers the runs that the inventory before did not list.
    fn number_runs(&mut self, containers: &mut [Container]) {
        let before: HashMap<_, _> =
            self.inventory.containers.iter().map(|container| (&container.id, container)).collect();
        for container in containers {
            let gone = || self.gone.get(&container.id).map(|gone| (gone.start, gone.listed_run));
            let before = before.get(&container.id).map(|before| (ListedStart::of(before), before.listed_run));
            let before = before.or_else(gone).filter(|(start, _)| start.is_of(ListedStart::of(container)));
            container.listed_run = match before {
                Some((_, listed_run)) => listed_run,
                None => {
                    self.listed_run += 1;
                    self.listed_run
                }
            };
        }
    }

    /// Returns the cgroup of a container's first process.
    fn first_process_path(&self, record: &ContainerRecord) -> Option<String> {
        let (tree, host_paths) = (self.tree.as_ref()?, self.processes.as_ref()?);
        let dir = Dir::open(&host_paths.process(record.pid?)).ok()?;
        let mut buffer = Vec::new();
        let text = dir.file("cgroup").ok()?.read_once(&mut buffer).ok()?;
        let path = cgroup_path(text, tree.hierarchy().version == Version::V1)?;
        String::from_utf8(path.to_vec()).ok()
    }
}

/// Returns whether a runtime (of a run: its record) may still name what has had a cgroup for so long.
fn may_get_name(
    candidate: &ContainerCgroup,
    age: Duration,
    connections: &[(RuntimeKind, ConnectionState, Option<bool>)],
) -> bool {
    let mut namers =
        connections.iter().filter(|(runtime, ..)| runtime.is_run() == candidate.runtime.is_run());
    namers.any(|(_, connection, _)| match connection {
        ConnectionState::Starting | ConnectionState::Idle | ConnectionState::Up => age < NAME_GRACE,
        ConnectionState::NoSocket | ConnectionState::Down => false,
    })
}

/// Returns a container's cgroup without the parts that belong to containers inside it.
fn own_cgroup(candidate: &ContainerCgroup, inner: &[&Path]) -> Cgroup {
    let own =
        |path: &&PathBuf| !inner.iter().any(|inner| *inner != candidate.path && path.starts_with(inner));
    Cgroup {
        path: candidate.path.clone(),
        inode: candidate.inode,
        below: candidate.below.iter().filter(own).cloned().collect(),
        is_truncated: candidate.is_truncated,
    }
}

/// Returns what the kubelet has allocated to the containers that the filter includes.
fn included_allocations(state: &RuntimeData, filter: &Filter) -> Vec<AllocatedContainer> {
    if state.device_allocations.is_empty() {
        return vec![];
    }
    let newest = newest_pods(state.sandboxes.values());
    let running: HashMap<Identity, bool> =
        state.running.values().map(|record| (record.spec.identity(), record.spec.labels_match)).collect();
    let included = |(identity, allocation): (&Identity, &Arc<DeviceAllocation>)| {
        let sandbox = newest.get(&pod_of(identity));
        let labels_match = running.get(identity).copied().or(sandbox.map(|sandbox| sandbox.labels_match));
        // without a sandbox, its labels are not known
        let labels_match = labels_match.unwrap_or_else(|| filter.labels_match(&HashMap::new()));
        (labels_match && identity.is_included(filter)).then(|| AllocatedContainer {
            identity: identity.clone(),
            allocation: Arc::clone(allocation),
            owners: sandbox.map(|sandbox| sandbox.owners.clone()).unwrap_or_default(),
        })
    };
    state.device_allocations.current(&newest).filter_map(included).collect()
}

/// Marks the containers inside another shown container: their memory is part of that one's.
fn mark_nested(containers: &mut [Container]) {
    let paths: HashSet<PathBuf> =
        containers.iter().filter_map(|c| Some(c.cgroup.as_ref()?.path.clone())).collect();
    for container in containers {
        let Some(cgroup) = &container.cgroup else { continue };
        container.nested = cgroup.path.ancestors().skip(1).any(|above| paths.contains(above));
    }
}

fn container_of_record(record: &ContainerRecord, cgroup: Option<Arc<Cgroup>>) -> Container {
    Container {
        id: record.id.clone(),
        identity: match &record.spec.pod {
            Some(pod) => Identity::canonical(&record.spec.name, Some(pod)),
            None => Identity::named(&record.spec.name),
        },
        runtime: record.runtime,
        spec: Arc::clone(&record.spec),
        gpus: Arc::clone(&record.gpus),
        started: record.started,
        cgroup,
        nested: false,
        listed_run: 0,
    }
}

fn container_of_cgroup(candidate: &ContainerCgroup, cgroup: Option<Arc<Cgroup>>) -> Container {
    Container {
        id: candidate.id.clone(),
        runtime: candidate.runtime,
        cgroup,
        ..Container::known_by_name(Identity::named(candidate.id.short()))
    }
}

/// Returns the name without the prefix of Compose, which names a container `<12 hex>_NAME` while it re-creates NAME.
pub fn strip_compose_prefix(name: &str) -> &str {
    match name.split_once('_') {
        Some((prefix, rest))
            if prefix.len() == 12 && !rest.is_empty() && prefix.bytes().all(|b| b.is_ascii_hexdigit()) =>
        {
            rest
        }
        _ => name,
    }
}

/// Gives every container a unique identity that does not depend on the order of arrival.
///
/// The container with the name itself comes before the one that Compose renamed temporarily; then the runtime of higher
/// precedence; in a pod then the one that started last, because a pod may be re-created before the old one is removed; of runs the
/// one that started first. The others become `name@runtime`.
fn with_unique_names(mut found: Vec<(usize, Container)>) -> Vec<Container> {
    let canonical =
        |container: &Container| Identity::canonical(&container.identity.name, container.spec.pod.as_deref());
    found.sort_by(|(rank, a), (other, b)| {
        let is_renamed = |container: &Container| canonical(container) != container.identity;
        let start = |container: &Container| {
            let nanos = container.started.map_or(0, |started| (started * 1e9) as i64);
            match (&container.spec.pod, container.runtime) {
                (Some(_), _) => -nanos,
                (None, RuntimeKind::Run) => nanos, // a later one does not take the name
                (None, _) => 0,
            }
        };
        (is_renamed(a), rank, start(a), &a.id).cmp(&(is_renamed(b), other, start(b), &b.id))
    });
    let mut taken = HashSet::new();
    let mut containers = Vec::with_capacity(found.len());
    for (_, mut container) in found {
        let canonical = canonical(&container);
        let choices = [
            canonical.clone(),
            canonical.renamed(&format!("{}@{}", canonical.name, container.runtime)),
            container.identity.clone(),
            canonical.renamed(container.id.as_str()),
        ];
        if let Some(identity) = choices.into_iter().find(|choice| !taken.contains(choice)) {
            container.identity = identity.clone();
            taken.insert(identity);
            containers.push(container);
        }
    }
    containers.sort_by(|a, b| a.identity.cmp(&b.identity));
    containers
}

/// Returns whether `later` is the same run of the same container.
fn same_run(earlier: &Container, later: &Container) -> bool {
    earlier.id == later.id && ListedStart::of(earlier).is_of(ListedStart::of(later))
}

/// Returns the shown runs that ended, and those that started and ended between two cycles.
fn ended_since(
    before: &Inventory,
    after: &Inventory,
    short_lived: &[ContainerRecord],
    filter: &Filter,
) -> Vec<Arc<Container>> {
    let running: HashMap<_, _> =
        after.containers.iter().map(|container| (&container.id, container)).collect();
    let goes_on = |container: &Container| {
        running.get(&container.id).is_some_and(|now| now.listed_run == container.listed_run)
    };
    let runs = |container: &Container| running.get(&container.id).is_some_and(|now| same_run(container, now));
    let mut ended: Vec<_> =
        before.containers.iter().filter(|container| !goes_on(container)).cloned().collect();
    for record in short_lived {
        let mut container = container_of_record(record, None);
        container.identity = record.spec.identity();
        let is_included = record.spec.labels_match && container.identity.is_included(filter);
        if is_included && !runs(&container) && !ended.iter().any(|known| same_run(known, &container)) {
            ended.push(Arc::new(container));
        }
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::device_allocations::{ListedDevices, RequestState, SandboxedPod};
    use crate::discover::{ContainerSpec, Hierarchy, Pod, Version};

    fn record(id: char, runtime: RuntimeKind, name: &str) -> ContainerRecord {
        let (id, labels) = (id.to_string().repeat(64), HashMap::new());
        let spec = ContainerSpec::labelled([name, "image"], &labels, &Filter::default());
        ContainerRecord { started: Some(1.0), ..ContainerRecord::new(&id, runtime, spec) }
    }

    fn in_pod(uid: &str, mut record: ContainerRecord) -> ContainerRecord {
        let pod = Pod { namespace: "ml".into(), name: "train-0".into(), uid: uid.into(), ..Pod::default() };
        Arc::make_mut(&mut record.spec).pod = Some(Arc::new(pod));
        record
    }

    fn tree_at(root: &Path) -> CgroupTree {
        CgroupTree::new(&Hierarchy { version: Version::V2, root: root.to_path_buf() })
    }

    fn names(found: Vec<(usize, Container)>) -> Vec<String> {
        with_unique_names(found)
            .iter()
            .map(|c| format!("{}={}", c.identity.name, &c.id.as_str()[..1]))
            .collect()
    }

    #[test]
    fn container_re_created_by_compose_keeps_its_name() {
        let old = || (0, container_of_record(&record('a', RuntimeKind::Docker, "web-1"), None));
        let new = || (0, container_of_record(&record('b', RuntimeKind::Docker, "aaaaaaaaaaaa_web-1"), None));
        assert_eq!(names(vec![new()]), ["web-1=b"]);
        assert_eq!(names(vec![new(), old()]), ["web-1=a", "web-1@docker=b"]);
    }

    #[test]
    fn same_name_in_two_runtimes_is_independent_of_order() {
        let docker = || (0, container_of_record(&record('b', RuntimeKind::Docker, "train"), None));
        let podman = || (1, container_of_record(&record('a', RuntimeKind::Podman, "train"), None));
        for found in [vec![docker(), podman()], vec![podman(), docker()]] {
            assert_eq!(names(found), ["train=b", "train@podman=a"]);
        }
    }

    #[test]
    fn newest_container_of_a_re_created_pod_gets_the_name() {
        let main = |id, started, uid| {
            let record = ContainerRecord { started: Some(started), ..record(id, RuntimeKind::Cri, "main") };
            (0, container_of_record(&in_pod(uid, record), None))
        };
        let (old, new) = (|| main('a', 1.0, "u1"), || main('b', 2.0, "u2"));
        let docker = || (1, container_of_record(&record('c', RuntimeKind::Docker, "main"), None));
        for found in [vec![old(), new(), docker()], vec![docker(), new(), old()]] {
            assert_eq!(names(found), ["main=c", "main=b", "main@cri=a"]);
        }
        let compose = in_pod("u", record('d', RuntimeKind::Cri, "0123456789ab_web"));
        assert_eq!(
            names(vec![(0, container_of_record(&compose, None))]),
            ["0123456789ab_web=d"],
            "only Compose does that"
        );
    }

    #[test]
    fn allocation_of_a_container_that_does_not_run_has_labels_and_owners_of_its_pod() {
        let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
        let pods = ["blue", "red", "new"];
        let names = pods.map(|pod| ("ml".into(), pod.into()));
        let identity =
            |pod: &str| Identity { k8s_namespace: "ml".into(), k8s_pod: pod.into(), name: "main".into() };
        let listed = ListedDevices {
            pods: names.into(),
            containers: pods.map(|pod| (identity(pod), Arc::default())).into(),
        };
        let sandbox = |pod: &str| SandboxedPod {
            pod: Arc::new(Pod { namespace: "ml".into(), name: pod.into(), ..Pod::default() }),
            labels_match: pod == "blue",
            owners: vec![("team".into(), pod.into())],
            created_at: 1,
        };
        let mut state = source.lock();
        state.sandboxes = ["blue", "red"].map(|pod| (ContainerId::new(pod), sandbox(pod))).into();
        let before = RequestState::new(state.sandboxes.values(), std::iter::empty());
        assert!(state.device_allocations.apply(listed, &before, |_| false));
        let included = |filter: &Filter| {
            let found = included_allocations(&state, filter).into_iter();
            found.map(|of| (of.identity.k8s_pod.to_string(), of.owners.len())).collect::<Vec<_>>()
        };
        let pair = |pod: &str, owners| (pod.to_owned(), owners);
        assert_eq!(included(&Filter::default()), [pair("blue", 1), pair("new", 0)]);
        let labelled = Filter { labels: vec![("team".into(), None)], ..Filter::default() };
        assert_eq!(included(&labelled), [pair("blue", 1)], "those of the newest pod are not known yet");
        let exclude = Some(regex::Regex::new("^ml/blue/").unwrap());
        assert_eq!(included(&Filter { exclude, ..Filter::default() }), [pair("new", 0)]);
    }

    #[test]
    fn sandbox_listed_by_docker_is_not_a_container() {
        let folder = tempfile::tempdir().unwrap();
        let (pause, main) = ("a".repeat(64), "b".repeat(64));
        for id in [&pause, &main] {
            std::fs::create_dir_all(folder.path().join("kubepods/podu").join(id)).unwrap();
        }
        let (cri, docker) = (
            RuntimeState::new(RuntimeKind::Cri, Arc::default()),
            RuntimeState::new(RuntimeKind::Docker, Arc::default()),
        );
        cri.set_connection(ConnectionState::Up);
        docker.set_connection(ConnectionState::Up);
        cri.add_running(in_pod("u", record('b', RuntimeKind::Cri, "main")));
        let pod = SandboxedPod { pod: Arc::default(), labels_match: true, owners: vec![], created_at: 0 };
        cri.lock().sandboxes.insert(ContainerId::new(&pause), pod);
        docker.add_running(record('b', RuntimeKind::Docker, "k8s_main_train-0_ml_u_0"));
        docker.add_running(record('a', RuntimeKind::Docker, "k8s_POD_train-0_ml_u_0"));
        let mut registry = Registry::new(Filter::default(), vec![cri, docker], Some(tree_at(folder.path())));
        let inventory = registry.refresh(Timestamp::now()).0.inventory;
        let all: Vec<_> =
            inventory.containers.iter().map(|c| (c.runtime.as_str(), &*c.identity.name)).collect();
        assert_eq!(all, [("cri", "main")]);
    }

    /// Kubernetes lists a container in state Unknown for as long as its pod is there.
    #[test]
    fn container_whose_runtime_lost_it_runs_only_with_a_cgroup() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("kubepods/podu").join("a".repeat(64))).unwrap();
        let cri = RuntimeState::new(RuntimeKind::Cri, Arc::default());
        cri.set_connection(ConnectionState::Up);
        for id in ['a', 'b', 'c'] {
            cri.add_running(record(id, RuntimeKind::Cri, &id.to_string()));
        }
        cri.set_uncertain(['a', 'b'].map(|id| record(id, RuntimeKind::Cri, "").id).into());
        let mut registry = Registry::new(Filter::default(), vec![cri], Some(tree_at(folder.path())));
        let inventory = registry.refresh(Timestamp::now()).0.inventory;
        let names: Vec<_> = inventory.containers.iter().map(|c| &*c.identity.name).collect();
        assert_eq!(names, ["a", "c"]);
    }

    #[test]
    fn strips_only_valid_compose_prefixes() {
        assert_eq!(strip_compose_prefix("0123456789ab_web-1"), "web-1");
        for name in ["web_1", "0123456789ab", "0123456789ab_", "0123456789az_web", "x0123456789ab_web"] {
            assert_eq!(strip_compose_prefix(name), name);
        }
    }

    #[test]
    fn nested_cgroup_named_after_neighbour_is_not_the_neighbour() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        std::fs::create_dir_all(folder.path().join(format!("docker/{a}/docker/{b}/below"))).unwrap();
        std::fs::create_dir_all(folder.path().join("docker").join(&b)).unwrap();
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        let mut state = source.lock();
        state.connection = ConnectionState::Up;
        for record in
            [record('a', RuntimeKind::Docker, "evil"), record('b', RuntimeKind::Docker, "neighbour")]
        {
            state.running.insert(record.id.clone(), record);
        }
        drop(state);
        let mut registry = Registry::new(Filter::default(), vec![source], Some(tree_at(folder.path())));
        let inventory = registry.refresh(Timestamp::now()).0.inventory;
        let cgroup = |number: usize| inventory.containers[number].cgroup.as_ref().unwrap();
        assert_eq!(inventory.containers.len(), 2);
        assert_eq!(cgroup(0).below.len(), 3, "it keeps its own cgroups: {:?}", cgroup(0));
        assert_eq!(cgroup(1).path, PathBuf::from(format!("docker/{b}")));
    }

    #[test]
    fn container_between_two_cycles_has_ended() {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        source.lock().connection = ConnectionState::Up;
        let mut registry = Registry::new(Filter::default(), vec![Arc::clone(&source)], None);
        let now = Timestamp::now();
        assert!(registry.refresh(now).0.ended.is_empty());
        source.lock().ended.push(record('a', RuntimeKind::Docker, "blink"));
        source.lock().generation += 1;
        let ended = registry.refresh(now).0.ended;
        assert_eq!(ended.len(), 1);
        assert_eq!(&*ended[0].identity.name, "blink");
        assert!(registry.refresh(now).0.ended.is_empty(), "reported once");
    }

    #[test]
    fn run_keeps_its_number_while_its_runtime_is_away() {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        source.add_running(record('a', RuntimeKind::Docker, "rootless"));
        let mut registry = Registry::new(Filter::default(), vec![Arc::clone(&source)], None);
        let begin = Timestamp::now();
        for (seconds, connection, runs) in [
            (0, ConnectionState::Up, &[1][..]),
            (1, ConnectionState::Down, &[]),
            (590, ConnectionState::Up, &[1]),
            (600, ConnectionState::Down, &[]),
            (1_201, ConnectionState::Up, &[2]),
        ] {
            source.set_connection(connection);
            source.lock().generation += 1;
            let inventory = registry.refresh(begin.plus(Duration::from_secs(seconds))).0.inventory;
            let listed: Vec<_> = inventory.containers.iter().map(|container| container.listed_run).collect();
            assert_eq!(listed, runs, "after {seconds} s");
        }
    }

    #[test]
    fn restart_ends_the_run_and_keeps_the_name() {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        source.lock().connection = ConnectionState::Up;
        let first = record('a', RuntimeKind::Docker, "train");
        let second = ContainerRecord { started: Some(2.0), ..first.clone() };
        let beside = record('b', RuntimeKind::Docker, "beside");
        let mut registry = Registry::new(Filter::default(), vec![Arc::clone(&source)], None);
        let now = Timestamp::now();
        for (record, ends, run) in [(first, 0, 1), (beside, 0, 1), (second, 1, 3)] {
            let mut state = source.lock();
            state.running.insert(record.id.clone(), record);
            state.generation += 1;
            drop(state);
            let refresh = registry.refresh(now).0;
            assert_eq!(refresh.ended.len(), ends);
            let train = refresh.inventory.containers.last().unwrap();
            assert_eq!((&*train.identity.name, train.listed_run), ("train", run));
        }
    }
}
