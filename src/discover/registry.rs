//! Merges what the runtimes and the cgroup tree say into one inventory, with names that stay.
//!
//! * Same id, one entry. The cgroup tree says what runs, a runtime says who it is.
//! * A container whose id no runtime knows (yet) waits [`NAME_GRACE`] before it is shown under its short id, if a
//!   runtime is there that may still name it: otherwise every start would leave a series with a meaningless name.
//! * The sandbox of a pod (its pause process) is no container: what it holds is the host's.
//! * A container in a container counts as its own only if a runtime knows it; else it is part of the outer one, so that
//!   nothing is counted twice.
//! * While a runtime is away, its names are kept; a container then ends when its cgroup does.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::cgroups::{Candidate, Hierarchy, Tree};
use super::{Cgroup, Container, ContainerId, Identity, Inventory, Link, Record, Source};
use crate::clock::Moment;
use crate::config::Filter;
use crate::host::ReadError;

/// How long a container may stay without a name while a runtime could still tell it.
const NAME_GRACE: Duration = Duration::from_secs(3);

/// The merged view over all sources.
#[derive(Debug)]
pub struct Registry {
    filter: Filter,
    /// In order of precedence.
    sources: Vec<Arc<Source>>,
    tree: Option<Tree>,
    generations: Vec<u64>,
    nameless: HashMap<ContainerId, Moment>,
    waiting: bool,
    inventory: Arc<Inventory>,
}

/// What changed since the cycle before.
#[derive(Debug)]
pub struct Refresh {
    /// All running containers.
    pub inventory: Arc<Inventory>,
    /// Containers that ended, also those that came and went between two cycles.
    pub ended: Vec<Arc<Container>>,
}

impl Registry {
    /// A registry over these sources, the first ones taking precedence.
    pub fn new(filter: Filter, sources: Vec<Arc<Source>>, hierarchy: Option<&Hierarchy>) -> Self {
        Self {
            filter,
            generations: vec![u64::MAX; sources.len()],
            sources,
            tree: hierarchy.map(Tree::new),
            nameless: HashMap::new(),
            waiting: true,
            inventory: Arc::default(),
        }
    }

    /// Looks at all sources and merges them if anything changed.
    ///
    /// # Errors
    /// A part of the cgroup tree cannot be listed, for counting; the inventory has what is known all the same.
    pub fn refresh(&mut self, now: Moment) -> (Refresh, Result<(), ReadError>) {
        let (mut changed, walked) = match &mut self.tree {
            Some(tree) => tree.refresh(now),
            None => (false, Ok(())),
        };
        let (mut records, mut sandboxes) = (HashMap::new(), HashSet::new());
        let mut short_lived = Vec::new();
        let mut links = Vec::new();
        for (rank, source) in self.sources.iter().enumerate() {
            let mut state = source.lock();
            changed |= self.generations[rank] != state.generation;
            self.generations[rank] = state.generation;
            short_lived.append(&mut state.ended);
            links.push((source.runtime, state.link));
        }
        if !changed && !self.waiting {
            return (Refresh { inventory: Arc::clone(&self.inventory), ended: vec![] }, walked);
        }
        for (rank, source) in self.sources.iter().enumerate().rev() {
            let state = source.lock();
            let with_gpus = |record: &Record| {
                let identity = Identity::lasting(&record.name, record.pod.as_deref());
                let gpus = state.given.get(&identity).unwrap_or(&record.gpus);
                Record { gpus: Arc::clone(gpus), ..record.clone() }
            };
            records
                .extend(state.running.values().map(|record| (record.id.clone(), (rank, with_gpus(record)))));
            sandboxes.extend(state.sandboxes.iter().cloned());
        }
        // Docker, asked beside the kubelet's own shim for it, takes them for containers
        records.retain(|id, _| !sandboxes.contains(id));
        short_lived.retain(|record| !sandboxes.contains(&record.id));
        let before = Arc::clone(&self.inventory);
        let inventory = Arc::new(self.merge(now, &records, &sandboxes, &links));
        let ended = ended_since(&before, &inventory, &short_lived, &self.filter);
        self.inventory = Arc::clone(&inventory);
        (Refresh { inventory, ended }, walked)
    }

    fn merge(
        &mut self,
        now: Moment,
        records: &HashMap<ContainerId, (usize, Record)>,
        sandboxes: &HashSet<ContainerId>,
        links: &[(&'static str, Link)],
    ) -> Inventory {
        let candidates = self.tree.as_ref().map_or(&[][..], Tree::candidates);
        let counted = counted(candidates, |id| records.contains_key(id));
        let inner: Vec<&Path> = std::iter::zip(candidates, &counted)
            .filter(|(candidate, counted)| **counted && candidate.inside.is_some())
            .map(|(candidate, _)| candidate.path.as_path())
            .collect();
        let mut found: Vec<(usize, Container)> = Vec::new();
        let mut placed = HashSet::new();
        let mut nameless = HashMap::new();
        self.waiting = links.iter().any(|(_, link)| *link == Link::Starting);
        for (candidate, _) in std::iter::zip(candidates, &counted).filter(|(_, counted)| **counted) {
            placed.insert(candidate.id.clone());
            let cgroup = Some(Arc::new(place(candidate, &inner)));
            match records.get(&candidate.id) {
                Some((rank, record)) => found.push((*rank, named(record, cgroup))),
                None if sandboxes.contains(&candidate.id) => {}
                None => {
                    let seen = *self.nameless.get(&candidate.id).unwrap_or(&now);
                    nameless.insert(candidate.id.clone(), seen);
                    if links.iter().any(|(_, link)| may_still_name(*link, now.since(seen))) {
                        self.waiting = true;
                    } else {
                        found.push((usize::MAX, unnamed(candidate, cgroup)));
                    }
                }
            }
        }
        self.nameless = nameless;
        for (id, (rank, record)) in records {
            // known to a runtime that is connected, and its cgroup is not there: just starting, or made elsewhere
            if !placed.contains(id) && links.get(*rank).is_some_and(|(_, link)| *link == Link::Up) {
                found.push((*rank, named(record, None)));
            }
        }
        let labels_match = |container: &Container| match records.get(&container.id) {
            Some((_, record)) => record.labels_match,
            None => self.filter.labels.is_empty(),
        };
        found.retain(|(_, container)| labels_match(container));
        let mut containers = with_unique_names(found);
        containers.retain(|container| container.identity.is_shown(&self.filter));
        mark_nested(&mut containers);
        let runtimes = links
            .iter()
            .filter(|(_, link)| matches!(link, Link::Up | Link::Down))
            .map(|(runtime, link)| (*runtime, *link == Link::Up))
            .collect();
        Inventory { containers: containers.into_iter().map(Arc::new).collect(), runtimes }
    }
}

/// Which candidates are containers of their own, each id once.
///
/// Of two with the same id the one that lies in no other is the container, else the first: a container that may make
/// cgroups can give one of them a neighbour's id.
fn counted(candidates: &[Candidate], known: impl Fn(&ContainerId) -> bool) -> Vec<bool> {
    let mut counted = vec![false; candidates.len()];
    let mut ids = HashSet::new();
    for outermost in [true, false] {
        for (candidate, counted) in std::iter::zip(candidates, &mut counted) {
            if candidate.inside.is_none() == outermost && (outermost || known(&candidate.id)) {
                *counted = ids.insert(&candidate.id);
            }
        }
    }
    counted
}

fn may_still_name(link: Link, age: Duration) -> bool {
    match link {
        Link::Starting | Link::Idle | Link::Up => age < NAME_GRACE,
        Link::NoSocket | Link::Down => false,
    }
}

/// A container's cgroup, less the parts that belong to containers inside it.
fn place(candidate: &Candidate, inner: &[&Path]) -> Cgroup {
    let own =
        |path: &&PathBuf| !inner.iter().any(|inner| *inner != candidate.path && path.starts_with(inner));
    Cgroup {
        path: candidate.path.clone(),
        inode: candidate.inode,
        below: candidate.below.iter().filter(own).cloned().collect(),
    }
}

/// Marks the containers that lie in another one that is shown, whose memory is part of that one's.
fn mark_nested(containers: &mut [Container]) {
    let paths: HashSet<PathBuf> =
        containers.iter().filter_map(|c| Some(c.cgroup.as_ref()?.path.clone())).collect();
    for container in containers {
        let Some(cgroup) = &container.cgroup else { continue };
        container.nested = cgroup.path.ancestors().skip(1).any(|above| paths.contains(above));
    }
}

fn named(record: &Record, cgroup: Option<Arc<Cgroup>>) -> Container {
    Container {
        id: record.id.clone(),
        identity: match &record.pod {
            Some(pod) => Identity::lasting(&record.name, Some(pod)),
            None => Identity::named(&record.name),
        },
        runtime: record.runtime,
        pod: record.pod.clone(),
        image: Arc::clone(&record.image),
        compose_project: Arc::clone(&record.compose_project),
        compose_service: Arc::clone(&record.compose_service),
        settings: record.settings.clone(),
        gpus: Arc::clone(&record.gpus),
        started: record.started,
        cgroup,
        nested: false,
    }
}

fn unnamed(candidate: &Candidate, cgroup: Option<Arc<Cgroup>>) -> Container {
    Container {
        id: candidate.id.clone(),
        identity: Identity::named(candidate.id.short()),
        runtime: candidate.runtime,
        pod: None,
        image: "".into(),
        compose_project: "".into(),
        compose_service: "".into(),
        settings: vec![],
        gpus: Arc::default(),
        started: None,
        cgroup,
        nested: false,
    }
}

/// The name that stays: Compose calls a container `<12 hex>_NAME` for a moment while it re-creates NAME.
pub fn lasting_name(name: &str) -> &str {
    match name.split_once('_') {
        Some((prefix, rest))
            if prefix.len() == 12 && !rest.is_empty() && prefix.bytes().all(|b| b.is_ascii_hexdigit()) =>
        {
            rest
        }
        _ => name,
    }
}

/// Gives every container an identity of its own, always the same one whatever the order of arrival.
///
/// The container that bears the name itself comes before the one that Compose renamed for a moment; then the runtime
/// of higher precedence; in a pod then the one that started last, since a pod may be made anew before the old one is
/// gone. The others become `name@runtime`.
fn with_unique_names(mut found: Vec<(usize, Container)>) -> Vec<Container> {
    let lasting =
        |container: &Container| Identity::lasting(&container.identity.name, container.pod.as_deref());
    found.sort_by(|(rank, a), (other, b)| {
        let passing = |container: &Container| lasting(container) != container.identity;
        let start = |container: &Container| {
            let started = container.started.filter(|_| container.pod.is_some());
            Reverse(started.map(|started| (started * 1e9) as i64))
        };
        (passing(a), rank, start(a), &a.id).cmp(&(passing(b), other, start(b), &b.id))
    });
    let mut taken = HashSet::new();
    let mut containers = Vec::with_capacity(found.len());
    for (_, mut container) in found {
        let lasting = lasting(&container);
        let choices = [
            lasting.clone(),
            lasting.renamed(&format!("{}@{}", lasting.name, container.runtime)),
            container.identity.clone(),
            lasting.renamed(container.id.as_str()),
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

/// Whether `later` is the same run of the same container: the same id started again is another run. A container that
/// is known by its cgroup alone has no start time until a runtime names it; a run of its is as long as its cgroup lives.
fn same_run(earlier: &Container, later: &Container) -> bool {
    let inode = |container: &Container| container.cgroup.as_ref().and_then(|cgroup| cgroup.inode);
    let remade = match (earlier.started, later.started, inode(earlier), inode(later)) {
        (None, None, Some(earlier), Some(later)) => earlier != later,
        _ => false,
    };
    earlier.id == later.id && (earlier.started.is_none() || earlier.started == later.started) && !remade
}

/// Runs that were shown and are over, and those that came and went between two cycles.
fn ended_since(
    before: &Inventory,
    after: &Inventory,
    short_lived: &[Record],
    filter: &Filter,
) -> Vec<Arc<Container>> {
    let running: HashMap<_, _> =
        after.containers.iter().map(|container| (&container.id, container)).collect();
    let runs = |container: &Container| running.get(&container.id).is_some_and(|now| same_run(container, now));
    let mut ended: Vec<_> = before.containers.iter().filter(|container| !runs(container)).cloned().collect();
    for record in short_lived {
        let mut container = named(record, None);
        container.identity = Identity::lasting(&record.name, record.pod.as_deref());
        let shown = record.labels_match && container.identity.is_shown(filter);
        if shown && !runs(&container) && !ended.iter().any(|known| same_run(known, &container)) {
            ended.push(Arc::new(container));
        }
    }
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: char, runtime: &'static str, name: &str) -> Record {
        Record {
            id: ContainerId::new(&id.to_string().repeat(64)),
            runtime,
            name: name.to_owned(),
            pod: None,
            image: "image".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: vec![],
            gpus: Arc::default(),
            started: Some(1.0),
            labels_match: true,
        }
    }

    fn names(found: Vec<(usize, Container)>) -> Vec<String> {
        with_unique_names(found)
            .iter()
            .map(|c| format!("{}={}", c.identity.name, &c.id.as_str()[..1]))
            .collect()
    }

    #[test]
    fn compose_re_creating_a_container_leaves_one_name() {
        let old = || (0, named(&record('a', "docker", "web-1"), None));
        let new = || (0, named(&record('b', "docker", "aaaaaaaaaaaa_web-1"), None));
        assert_eq!(names(vec![new()]), ["web-1=b"]);
        assert_eq!(names(vec![new(), old()]), ["web-1=a", "web-1@docker=b"]);
    }

    #[test]
    fn the_same_name_in_two_runtimes_does_not_depend_on_the_order_of_arrival() {
        let docker = || (0, named(&record('b', "docker", "train"), None));
        let podman = || (1, named(&record('a', "podman", "train"), None));
        for found in [vec![docker(), podman()], vec![podman(), docker()]] {
            assert_eq!(names(found), ["train=b", "train@podman=a"]);
        }
    }

    fn pod(uid: &str) -> Option<Arc<crate::discover::Pod>> {
        Some(Arc::new(crate::discover::Pod {
            namespace: "ml".into(),
            name: "train-0".into(),
            uid: uid.into(),
            attempt: 0,
            source: "".into(),
            labels: vec![],
            memory_min_bytes: None,
        }))
    }

    #[test]
    fn a_pod_that_is_made_anew_before_the_old_one_is_gone_has_the_name_and_a_name_in_a_pod_is_its_own() {
        let in_pod = |id, started, uid| {
            let record = Record { pod: pod(uid), started: Some(started), ..record(id, "cri", "main") };
            (0, named(&record, None))
        };
        let (old, new) = (|| in_pod('a', 1.0, "u1"), || in_pod('b', 2.0, "u2"));
        let docker = || (1, named(&record('c', "docker", "main"), None));
        for found in [vec![old(), new(), docker()], vec![docker(), new(), old()]] {
            assert_eq!(names(found), ["main=c", "main=b", "main@cri=a"]);
        }
        let compose = Record { pod: pod("u"), ..record('d', "cri", "0123456789ab_web") };
        assert_eq!(names(vec![(0, named(&compose, None))]), ["0123456789ab_web=d"], "only Compose does that");
    }

    #[test]
    fn a_sandbox_is_no_container_whoever_takes_it_for_one() {
        let folder = tempfile::tempdir().unwrap();
        let (pause, main) = ("a".repeat(64), "b".repeat(64));
        for id in [&pause, &main] {
            std::fs::create_dir_all(folder.path().join("kubepods/podu").join(id)).unwrap();
        }
        let hierarchy =
            Hierarchy { version: crate::discover::Version::V2, root: folder.path().to_path_buf() };
        let (cri, docker) = (Source::new("cri", Arc::default()), Source::new("docker", Arc::default()));
        cri.set_link(Link::Up);
        docker.set_link(Link::Up);
        cri.enter(Record { pod: pod("u"), ..record('b', "cri", "main") });
        cri.lock().sandboxes.insert(ContainerId::new(&pause));
        docker.enter(record('b', "docker", "k8s_main_train-0_ml_u_0"));
        docker.enter(record('a', "docker", "k8s_POD_train-0_ml_u_0"));
        let mut registry = Registry::new(Filter::default(), vec![cri, docker], Some(&hierarchy));
        let inventory = registry.refresh(Moment::now()).0.inventory;
        let all: Vec<_> = inventory.containers.iter().map(|c| (c.runtime, &*c.identity.name)).collect();
        assert_eq!(all, [("cri", "main")]);
    }

    #[test]
    fn only_a_real_compose_prefix_is_taken_off() {
        assert_eq!(lasting_name("0123456789ab_web-1"), "web-1");
        for name in ["web_1", "0123456789ab", "0123456789ab_", "0123456789az_web", "x0123456789ab_web"] {
            assert_eq!(lasting_name(name), name);
        }
    }

    #[test]
    fn a_cgroup_with_a_neighbours_id_is_not_the_neighbour() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        std::fs::create_dir_all(folder.path().join(format!("docker/{a}/docker/{b}/below"))).unwrap();
        std::fs::create_dir_all(folder.path().join("docker").join(&b)).unwrap();
        let hierarchy =
            Hierarchy { version: crate::discover::Version::V2, root: folder.path().to_path_buf() };
        let source = Source::new("docker", Arc::default());
        let mut state = source.lock();
        state.link = Link::Up;
        for record in [record('a', "docker", "evil"), record('b', "docker", "neighbour")] {
            state.running.insert(record.id.clone(), record);
        }
        drop(state);
        let mut registry = Registry::new(Filter::default(), vec![source], Some(&hierarchy));
        let inventory = registry.refresh(Moment::now()).0.inventory;
        let cgroup = |number: usize| inventory.containers[number].cgroup.as_ref().unwrap();
        assert_eq!(inventory.containers.len(), 2);
        assert_eq!(cgroup(0).below.len(), 3, "it keeps what it made: {:?}", cgroup(0));
        assert_eq!(cgroup(1).path, PathBuf::from(format!("docker/{b}")));
    }

    #[test]
    fn a_container_that_came_and_went_between_two_cycles_has_ended() {
        let source = Source::new("docker", Arc::default());
        source.lock().link = Link::Up;
        let mut registry = Registry::new(Filter::default(), vec![Arc::clone(&source)], None);
        let now = Moment::now();
        assert!(registry.refresh(now).0.ended.is_empty());
        source.lock().ended.push(record('a', "docker", "blink"));
        source.lock().generation += 1;
        let ended = registry.refresh(now).0.ended;
        assert_eq!(ended.len(), 1);
        assert_eq!(&*ended[0].identity.name, "blink");
        assert!(registry.refresh(now).0.ended.is_empty(), "told once");
    }

    #[test]
    fn a_restart_ends_the_run_and_keeps_the_name() {
        let source = Source::new("docker", Arc::default());
        source.lock().link = Link::Up;
        let first = record('a', "docker", "train");
        let second = Record { started: Some(2.0), ..first.clone() };
        let mut registry = Registry::new(Filter::default(), vec![Arc::clone(&source)], None);
        let now = Moment::now();
        for (record, ends) in [(first, 0), (second, 1)] {
            let mut state = source.lock();
            state.running.insert(record.id.clone(), record);
            state.generation += 1;
            drop(state);
            let refresh = registry.refresh(now).0;
            assert_eq!(refresh.ended.len(), ends);
            assert_eq!(&*refresh.inventory.containers[0].identity.name, "train");
        }
    }
}
