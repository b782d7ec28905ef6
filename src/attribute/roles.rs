//! What a process of a training container is for.
//!
//! * `trainer`: each rank. It holds GPU memory, or it is the Python process that forks the workers.
//! * `dataloader_worker`: it calls itself `pt_data_worker` (newer PyTorch); or it is a fork of a trainer that went on
//!   with its parent's command line; or `multiprocessing` spawned it from a process that holds GPU memory, and it holds
//!   none itself.
//! * `other`: shells, init, launchers such as torchrun, multiprocessing's helpers, and all that is unsure.
//!
//! GPU memory outweighs structure: where a driver tells who holds some, a rank is never taken for a worker. What
//! was told last holds while the driver is away or let go.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::collect::process::Process;
use crate::parse::process::Launch;

/// What a process is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A rank.
    Trainer,
    /// A DataLoader worker.
    DataloaderWorker,
    /// Everything else, and all that is unsure.
    Other,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Trainer, Role::DataloaderWorker, Role::Other];

    /// As a label value.
    pub fn label(self) -> &'static str {
        match self {
            Role::Trainer => "trainer",
            Role::DataloaderWorker => "dataloader_worker",
            Role::Other => "other",
        }
    }
}

/// What GPUs tell of their processes.
#[derive(Debug, Default)]
pub struct Told {
    /// Keys of the GPUs that tell.
    pub by: HashSet<Arc<str>>,
    /// Who holds contexts, by pid and start time, and on which of them.
    pub holds: HashMap<(u32, u64), Vec<Arc<str>>>,
}

/// Who holds GPU memory, or held some when the GPU was asked last: pid and start time to the keys of the GPUs.
#[derive(Debug, Default)]
pub struct Ranks(HashMap<(u32, u64), Vec<Arc<str>>>);

impl Ranks {
    /// Enters what GPUs tell now, and who lives. `living` is `None` while not all that live can be told.
    pub fn enter(&mut self, living: Option<&HashSet<(u32, u64)>>, told: Told) {
        let Told { by, holds } = told;
        let is_living = |who: &(u32, u64)| living.is_none_or(|living| living.contains(who));
        self.0.retain(|who, gpus| {
            gpus.retain(|gpu| !by.contains(gpu));
            is_living(who) && !gpus.is_empty()
        });
        for (who, gpus) in holds.into_iter().filter(|(who, _)| is_living(who)) {
            self.0.entry(who).or_default().extend(gpus);
        }
    }

    /// True for a process that holds GPU memory, as far as is known.
    pub fn contains(&self, who: &(u32, u64)) -> bool {
        self.0.contains_key(who)
    }
}

/// The name that PyTorch's workers give themselves.
const WORKER_NAME: &str = "pt_data_worker";

/// The role of each process of one container. `holds_gpu` tells which of them hold GPU memory.
pub fn classify(processes: &[Process], holds_gpu: impl Fn(&Process) -> bool) -> Vec<Role> {
    let tree = Tree::of(processes, holds_gpu);
    (0..processes.len()).map(|index| tree.role(index)).collect()
}

struct Tree<'a> {
    processes: &'a [Process],
    parent: Vec<Option<usize>>,
    gpu: Vec<bool>,
    /// A fork of its parent that holds no GPU memory, and so may be a worker.
    fork: Vec<bool>,
    /// Forks such processes, or the parent of such as call themselves workers.
    has_workers: Vec<bool>,
}

impl<'a> Tree<'a> {
    fn of(processes: &'a [Process], holds_gpu: impl Fn(&Process) -> bool) -> Self {
        let index: HashMap<u32, usize> = processes.iter().enumerate().map(|(i, p)| (p.pid, i)).collect();
        let parent: Vec<_> = processes.iter().map(|p| index.get(&p.facts.ppid).copied()).collect();
        let gpu: Vec<_> = processes.iter().map(holds_gpu).collect();
        let mut tree =
            Self { processes, parent, gpu, fork: vec![], has_workers: vec![false; processes.len()] };
        tree.fork = (0..processes.len()).map(|i| tree.is_silent_fork(i)).collect();
        tree.find_parents_of_workers();
        tree
    }

    fn launch(&self, index: usize) -> Launch {
        self.processes[index].facts.command.launch
    }

    /// It has its parent's command line, and so is a fork without exec.
    fn is_fork(&self, index: usize) -> bool {
        let facts = &self.processes[index].facts;
        facts.command.python
            && self.parent[index].is_some_and(|p| self.processes[p].facts.command_hash == facts.command_hash)
    }

    fn is_silent_fork(&self, index: usize) -> bool {
        let launch = self.launch(index);
        self.is_fork(index)
            && !self.gpu[index]
            && !matches!(launch, Launch::ForkServer | Launch::ResourceTracker)
    }

    fn is_named(&self, index: usize) -> bool {
        &*self.processes[index].facts.comm == WORKER_NAME
    }

    /// The process that asked for this one: its parent, or the fork server's parent.
    fn origin(&self, index: usize) -> Option<usize> {
        let parent = self.parent[index]?;
        let from_server = self.launch(index) == Launch::ForkServer && self.is_fork(index);
        if from_server { self.parent[parent] } else { Some(parent) }
    }

    /// Of a chain of forks without names or GPU memory, the last but one is the trainer: ranks are forked first, and
    /// then each forks its workers.
    fn find_parents_of_workers(&mut self) {
        let mut has_forks = vec![false; self.processes.len()];
        for (parent, fork) in std::iter::zip(&self.parent, &self.fork) {
            if let (Some(parent), true) = (parent, fork) {
                has_forks[*parent] = true;
            }
        }
        for (index, has_forks) in has_forks.into_iter().enumerate() {
            let worker = self.is_named(index) || (self.fork[index] && !has_forks);
            if let Some(origin) = self.origin(index).filter(|_| worker) {
                self.has_workers[origin] = true;
            }
        }
    }

    /// A fork of, or spawned by, a process that holds GPU memory, holding none itself.
    fn works_for_a_gpu_holder(&self, index: usize) -> bool {
        let child = self.fork[index]
            || match self.launch(index) {
                Launch::Spawn => !self.is_fork(index),
                Launch::ForkServer => self.is_fork(index),
                Launch::Plain | Launch::ResourceTracker => false,
            };
        child && self.origin(index).is_some_and(|origin| self.gpu[origin])
    }

    fn role(&self, index: usize) -> Role {
        if self.gpu[index] {
            return Role::Trainer;
        }
        if self.is_named(index) || self.works_for_a_gpu_holder(index) {
            return Role::DataloaderWorker;
        }
        if !self.processes[index].facts.command.python
            || matches!(self.launch(index), Launch::ForkServer | Launch::ResourceTracker)
        {
            return Role::Other;
        }
        if self.has_workers[index] {
            return Role::Trainer;
        }
        let parent_works =
            self.parent[index].is_some_and(|p| self.is_named(p) || self.works_for_a_gpu_holder(p));
        if self.fork[index] && !parent_works { Role::DataloaderWorker } else { Role::Other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::process::Facts;
    use crate::parse::process::Command;
    use std::hash::{DefaultHasher, Hash, Hasher};

    fn process(pid: u32, ppid: u32, comm: &str, line: &str) -> Process {
        let line = line.replace(' ', "\0");
        let mut hasher = DefaultHasher::new();
        line.hash(&mut hasher);
        let facts = Facts {
            comm: comm.into(),
            ppid,
            start_ticks: u64::from(pid),
            command: Command::of(line.as_bytes()),
            command_hash: hasher.finish(),
            zombie: false,
        };
        Process { pid, rss_bytes: 1, facts: Arc::new(facts) }
    }

    fn roles(processes: &[Process], gpu: &[u32]) -> String {
        let letter = |role| match role {
            Role::Trainer => 'T',
            Role::DataloaderWorker => 'w',
            Role::Other => '-',
        };
        classify(processes, |process| gpu.contains(&process.pid)).into_iter().map(letter).collect()
    }

    #[test]
    fn a_rank_is_one_while_its_gpu_is_silent_and_its_pid_is_not_one_for_the_next() {
        let mut ranks = Ranks::default();
        let mut now = |living: Option<&[(u32, u64)]>, holds: &[((u32, u64), &str)], telling: &[&str]| {
            let by = telling.iter().map(|gpu| (*gpu).into()).collect();
            let mut told = Told { by, ..Told::default() };
            for (who, gpu) in holds {
                told.holds.entry(*who).or_default().push((*gpu).into());
            }
            let living = living.map(|living| living.iter().copied().collect());
            ranks.enter(living.as_ref(), told);
            let mut who: Vec<_> = ranks.0.keys().copied().collect();
            who.sort_unstable();
            who
        };
        let (a, b) = ((7, 1), (8, 1));
        assert_eq!(now(Some(&[a, b]), &[(a, "0")], &["0", "1"]), [a]);
        assert_eq!(now(Some(&[a, b]), &[], &["1"]), [a], "its GPU is away");
        assert_eq!(now(None, &[], &[]), [a], "and its container could not be read");
        assert_eq!(now(Some(&[(7, 2), b]), &[], &[]), [], "another process of that pid");
        assert_eq!(now(Some(&[a, b]), &[(a, "0"), (a, "1"), (b, "0")], &["0", "1"]), [a, b]);
        assert_eq!(now(Some(&[a, b]), &[], &["0"]), [a], "on the other one it may still hold some");
        assert_eq!(now(Some(&[a, b]), &[], &["0", "1"]), [], "both have let go of theirs");
    }

    // The trees of real Python processes are in tests/roles.rs; these are the ones that need a GPU.

    #[test]
    fn ranks_forked_by_one_launcher_are_trainers_because_they_hold_gpu_memory() {
        let p = |pid, ppid| process(pid, ppid, "python", "python train.py");
        let tree = [p(1, 0), p(2, 1), p(3, 1), p(4, 2), p(5, 2), p(6, 3)];
        assert_eq!(roles(&tree, &[2, 3]), "-TTwww");
        assert_eq!(roles(&tree, &[]), "-TTwww", "and without a GPU by their place in the tree");
    }

    #[test]
    fn a_helper_that_a_worker_forks_is_unsure() {
        let p = |pid, ppid| process(pid, ppid, "python", "python train.py");
        assert_eq!(roles(&[p(1, 0), p(2, 1), p(3, 2)], &[1]), "Tw-");
    }

    #[test]
    fn spawned_children_are_workers_only_of_a_gpu_holder_and_ranks_if_they_hold_gpu_memory() {
        const SPAWN: &str = "python -c frommultiprocessing --multiprocessing-fork";
        let tree = [
            process(1, 0, "python", "python train.py"),
            process(2, 1, "python", SPAWN),
            process(3, 1, "python", SPAWN),
        ];
        assert_eq!(roles(&tree, &[1]), "Tww");
        assert_eq!(roles(&tree, &[2, 3]), "-TT");
        assert_eq!(roles(&tree, &[]), "---");
    }

    #[test]
    fn children_of_the_fork_server_work_for_the_one_who_started_it() {
        let server = |pid, ppid| {
            process(pid, ppid, "python", "python\u{0}-c\u{0}from multiprocessing.forkserver import main")
        };
        let server = |pid, ppid| {
            let mut process = server(pid, ppid);
            let facts = Arc::make_mut(&mut process.facts);
            facts.command.launch = Launch::ForkServer;
            process
        };
        let tree = [process(1, 0, "python", "python train.py"), server(2, 1), server(3, 2), server(4, 2)];
        assert_eq!(roles(&tree, &[1]), "T-ww");
        assert_eq!(roles(&tree, &[]), "----");
    }

    #[test]
    fn a_shell_that_forks_is_no_trainer() {
        let sh = |pid, ppid| process(pid, ppid, "sh", "sh -c a&b");
        assert_eq!(roles(&[sh(1, 0), sh(2, 1)], &[]), "--");
    }
}
