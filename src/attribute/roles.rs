//! Roles of the processes of a training container.
//!
//! * `trainer`: each rank. It holds GPU memory, or it is the Python process that forks the workers.
//! * `dataloader_worker`: a process named `pt_data_worker` (PyTorch 2.6 and later); or a process without GPU memory that a process
//!   with GPU memory forked, or spawned by `multiprocessing`, where no other one has that name.
//! * `worker`: another fork of a Python process that kept its parent's command line; or a worker by its own command line, such as of
//!   joblib or Ray.
//! * `other`: shells, init, launchers such as torchrun, helpers of multiprocessing, and everything uncertain.
//!
//! GPU memory outweighs structure: where a driver reports which processes hold GPU memory, a rank is never classified
//! as a worker. The last report stays valid while the driver is unavailable or released.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::collect::process::Process;
use crate::host::process::ProcessId;
use crate::parse::process::Launch;
pub use crate::parse::process::Role;

/// Processes that GPUs report in one cycle.
#[derive(Debug, Default)]
pub struct GpuEvidence {
    /// Keys of the GPUs that report their processes.
    pub reporting: HashSet<Arc<str>>,
    /// Processes with a GPU context, by pid and start time, with the keys of those GPUs.
    pub holders: HashMap<ProcessId, Vec<Arc<str>>>,
}

/// Processes that hold GPU memory by the last report of each GPU: pid and start time to the keys of the GPUs.
#[derive(Debug, Default)]
pub struct GpuHolders(HashMap<ProcessId, Vec<Arc<str>>>);

impl GpuHolders {
    /// Applies the reports of this cycle and forgets processes that ended. `running` is `None` if the list of running
    /// processes is incomplete.
    pub fn update(&mut self, running: Option<&HashSet<ProcessId>>, evidence: GpuEvidence) {
        let GpuEvidence { reporting, holders } = evidence;
        let is_running = |process: &ProcessId| running.is_none_or(|running| running.contains(process));
        self.0.retain(|process, gpus| {
            gpus.retain(|gpu| !reporting.contains(gpu));
            is_running(process) && !gpus.is_empty()
        });
        for (process, gpus) in holders.into_iter().filter(|(process, _)| is_running(process)) {
            self.0.entry(process).or_default().extend(gpus);
        }
    }

    /// Returns true if the process holds GPU memory, as far as is known.
    pub fn contains(&self, process: &ProcessId) -> bool {
        self.0.contains_key(process)
    }
}

/// The process name that PyTorch sets for its workers.
const WORKER_NAME: &str = "pt_data_worker";

/// Returns the role that the name of a process alone shows; the name of a trainer shows nothing.
pub fn role_by_name(comm: &str) -> Option<Role> {
    (comm == WORKER_NAME).then_some(Role::DataloaderWorker)
}

/// Returns the role of each process of one container. `holds_gpu` returns true for a process that holds GPU memory.
pub fn classify(processes: &[Process], holds_gpu: impl Fn(&Process) -> bool) -> Vec<Role> {
    let tree = ProcessTree::of(processes, holds_gpu);
    (0..processes.len()).map(|index| tree.role(index)).collect()
}

struct ProcessTree<'a> {
    processes: &'a [Process],
    parent: Vec<Option<usize>>,
    holds_gpu: Vec<bool>,
    /// A fork of its parent without GPU memory, which may be a worker.
    is_candidate: Vec<bool>,
    /// A parent of such forks, or of processes named as workers.
    has_workers: Vec<bool>,
    /// A parent of processes named as workers: PyTorch names all of its own.
    has_named_workers: Vec<bool>,
}

impl<'a> ProcessTree<'a> {
    fn of(processes: &'a [Process], holds_gpu: impl Fn(&Process) -> bool) -> Self {
        let index: HashMap<u32, usize> = processes.iter().enumerate().map(|(i, p)| (p.pid, i)).collect();
        let parent: Vec<_> = processes.iter().map(|p| index.get(&p.meta.ppid).copied()).collect();
        let holds_gpu: Vec<_> = processes.iter().map(holds_gpu).collect();
        let mut tree = Self {
            processes,
            parent,
            holds_gpu,
            is_candidate: vec![],
            has_workers: vec![false; processes.len()],
            has_named_workers: vec![false; processes.len()],
        };
        tree.is_candidate = (0..processes.len()).map(|i| tree.is_candidate_fork(i)).collect();
        tree.find_parents_of_workers();
        tree
    }

    fn launch(&self, index: usize) -> Launch {
        self.processes[index].meta.command.launch
    }

    /// Returns true if the process has its parent's command line, and so is a fork without exec.
    fn is_fork(&self, index: usize) -> bool {
        let meta = &self.processes[index].meta;
        meta.command.python // implies that the command line is known
            && self.parent[index].is_some_and(|p| self.processes[p].meta.command_hash == meta.command_hash)
    }

    fn is_candidate_fork(&self, index: usize) -> bool {
        let launch = self.launch(index);
        self.is_fork(index)
            && !self.holds_gpu[index]
            && !matches!(launch, Launch::ForkServer | Launch::ResourceTracker)
    }

    fn is_named(&self, index: usize) -> bool {
        &*self.processes[index].meta.comm == WORKER_NAME
    }

    /// Returns the process that requested this one: its parent, or the fork server's parent.
    fn origin(&self, index: usize) -> Option<usize> {
        let parent = self.parent[index]?;
        let from_server = self.launch(index) == Launch::ForkServer && self.is_fork(index);
        if from_server { self.parent[parent] } else { Some(parent) }
    }

    /// In a chain of unnamed forks without GPU memory, the last but one is the trainer: ranks are forked first, and
    /// then each forks its workers.
    fn find_parents_of_workers(&mut self) {
        let mut has_forks = vec![false; self.processes.len()];
        for (parent, fork) in std::iter::zip(&self.parent, &self.is_candidate) {
            if let (Some(parent), true) = (parent, fork) {
                has_forks[*parent] = true;
            }
        }
        for (index, has_forks) in has_forks.into_iter().enumerate() {
            let worker = self.is_named(index) || (self.is_candidate[index] && !has_forks);
            if let Some(origin) = self.origin(index).filter(|_| worker) {
                self.has_workers[origin] = true;
                self.has_named_workers[origin] |= self.is_named(index);
            }
        }
    }

    /// Returns true for a process without GPU memory that was forked or spawned by a process with GPU memory.
    fn is_child_of_gpu_holder(&self, index: usize) -> bool {
        let child = self.is_candidate[index]
            || match self.launch(index) {
                Launch::Spawn => !self.is_fork(index),
                Launch::ForkServer => self.is_fork(index),
                Launch::Plain | Launch::ResourceTracker => false,
            };
        child && self.origin(index).is_some_and(|origin| self.holds_gpu[origin])
    }

    /// Returns the role of a child of a process with GPU memory. PyTorch names all of its workers or none, by its version.
    fn role_of_gpu_child(&self, index: usize) -> Role {
        let has_named = self.origin(index).is_some_and(|origin| self.has_named_workers[origin]);
        let is_of_program = self.processes[index].meta.command.program.is_some();
        if has_named || is_of_program { Role::Worker } else { Role::DataloaderWorker }
    }

    fn role(&self, index: usize) -> Role {
        let command = &self.processes[index].meta.command;
        if self.holds_gpu[index] {
            return Role::Trainer;
        }
        if self.is_named(index) {
            return Role::DataloaderWorker;
        }
        if self.is_child_of_gpu_holder(index) {
            return self.role_of_gpu_child(index);
        }
        if command.is_worker {
            return Role::Worker;
        }
        if !command.python || matches!(self.launch(index), Launch::ForkServer | Launch::ResourceTracker) {
            return Role::Other;
        }
        if self.has_workers[index] {
            // a server that forks workers trains nothing
            return if command.program.is_some() { Role::Other } else { Role::Trainer };
        }
        let parent_is_worker =
            self.parent[index].is_some_and(|p| self.is_named(p) || self.is_child_of_gpu_holder(p));
        let is_of_program = self.launch(index) == Launch::Spawn
            && self.origin(index).is_some_and(|p| self.processes[p].meta.command.program.is_some());
        let is_worker = self.is_candidate[index] && !parent_is_worker || is_of_program;
        if is_worker { Role::Worker } else { Role::Other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::process::ProcessMeta;
    use crate::parse::process::Command;
    use std::hash::{DefaultHasher, Hash, Hasher};

    fn process(pid: u32, ppid: u32, comm: &str, line: &str) -> Process {
        let line = line.replace(' ', "\0");
        let mut hasher = DefaultHasher::new();
        line.hash(&mut hasher);
        let meta = ProcessMeta {
            comm: comm.into(),
            ppid,
            start_ticks: u64::from(pid),
            command: Command::of(line.as_bytes()),
            settings: None,
            command_hash: Some(hasher.finish()),
            zombie: false,
        };
        Process { pid, memory: crate::collect::process::ResidentMemory::default(), meta: Arc::new(meta) }
    }

    fn roles(processes: &[Process], gpu: &[u32]) -> String {
        let letter = |role| match role {
            Role::Trainer => 'T',
            Role::DataloaderWorker => 'd',
            Role::Worker => 'w',
            Role::Other => '-',
        };
        classify(processes, |process| gpu.contains(&process.pid)).into_iter().map(letter).collect()
    }

    #[test]
    fn rank_stays_while_its_gpu_is_silent_but_not_for_reused_pid() {
        let mut holders = GpuHolders::default();
        let mut update =
            |running: Option<&[ProcessId]>, reported: &[(ProcessId, &str)], reporting: &[&str]| {
                let reporting = reporting.iter().map(|gpu| (*gpu).into()).collect();
                let mut evidence = GpuEvidence { reporting, ..GpuEvidence::default() };
                for (process, gpu) in reported {
                    evidence.holders.entry(*process).or_default().push((*gpu).into());
                }
                let running = running.map(|running| running.iter().copied().collect());
                holders.update(running.as_ref(), evidence);
                let mut processes: Vec<_> = holders.0.keys().copied().collect();
                processes.sort_unstable();
                processes
            };
        let (a, b) = (ProcessId::new(7, 1), ProcessId::new(8, 1));
        assert_eq!(update(Some(&[a, b]), &[(a, "0")], &["0", "1"]), [a]);
        assert_eq!(update(Some(&[a, b]), &[], &["1"]), [a], "its GPU is unavailable");
        assert_eq!(update(None, &[], &[]), [a], "and its container could not be read");
        assert_eq!(update(Some(&[ProcessId::new(7, 2), b]), &[], &[]), [], "another process of that pid");
        assert_eq!(update(Some(&[a, b]), &[(a, "0"), (a, "1"), (b, "0")], &["0", "1"]), [a, b]);
        assert_eq!(update(Some(&[a, b]), &[], &["0"]), [a], "it may still hold memory on the other GPU");
        assert_eq!(update(Some(&[a, b]), &[], &["0", "1"]), [], "both hold none now");
    }

    // Trees of real Python processes are in tests/roles.rs; these are the trees that need a GPU.

    #[test]
    fn ranks_forked_by_one_launcher_are_trainers_by_gpu_memory() {
        let p = |pid, ppid| process(pid, ppid, "python", "python train.py");
        let tree = [p(1, 0), p(2, 1), p(3, 1), p(4, 2), p(5, 2), p(6, 3)];
        assert_eq!(roles(&tree, &[2, 3]), "-TTddd");
        assert_eq!(roles(&tree, &[]), "-TTwww", "without a GPU they may be any program's");
    }

    #[test]
    fn helper_forked_by_worker_is_other() {
        let p = |pid, ppid| process(pid, ppid, "python", "python train.py");
        assert_eq!(roles(&[p(1, 0), p(2, 1), p(3, 2)], &[1]), "Td-");
    }

    #[test]
    fn forks_without_torchs_name_beside_ones_with_it_are_other_workers() {
        let p = |pid, ppid, comm| process(pid, ppid, comm, "python train.py");
        let tree = [p(1, 0, "python"), p(2, 1, "pt_data_worker"), p(3, 1, "python")];
        assert_eq!(roles(&tree, &[1]), "Tdw");
        assert_eq!(roles(&tree, &[]), "Tdw");
    }

    #[test]
    fn workers_of_other_programs_are_no_dataloader_workers_and_their_parent_trains_nothing() {
        let gunicorn = |pid, ppid| process(pid, ppid, "gunicorn", "python /usr/bin/gunicorn -w 2 app:app");
        assert_eq!(roles(&[gunicorn(1, 0), gunicorn(2, 1), gunicorn(3, 1)], &[]), "-ww");
        assert_eq!(roles(&[gunicorn(1, 0), gunicorn(2, 1)], &[1]), "Tw", "it loaded a model before");
        let pool = |pid, ppid| process(pid, ppid, "python3", "python3 pool.py");
        assert_eq!(roles(&[pool(1, 0), pool(2, 1), pool(3, 1)], &[]), "Tww");
        let loky = |pid| {
            process(pid, 1, "python3", "python3 -m joblib.externals.loky.backend.popen_loky_posix --pipe 5")
        };
        assert_eq!(roles(&[pool(1, 0), loky(2), loky(3)], &[]), "-ww");
        let ray = process(2, 1, "ray::f", "ray::f");
        assert_eq!(roles(&[process(1, 0, "raylet", "raylet"), ray], &[]), "-w");
        const SPAWN: &str = "python -c frommultiprocessing --multiprocessing-fork";
        let uvicorn = process(1, 0, "uvicorn", "python -m uvicorn app:app");
        assert_eq!(roles(&[uvicorn, process(2, 1, "python", SPAWN)], &[]), "-w");
    }

    #[test]
    fn spawned_children_are_workers_of_gpu_holder_or_ranks_with_gpu_memory() {
        const SPAWN: &str = "python -c frommultiprocessing --multiprocessing-fork";
        let tree = [
            process(1, 0, "python", "python train.py"),
            process(2, 1, "python", SPAWN),
            process(3, 1, "python", SPAWN),
        ];
        assert_eq!(roles(&tree, &[1]), "Tdd");
        assert_eq!(roles(&tree, &[2, 3]), "-TT");
        assert_eq!(roles(&tree, &[]), "---");
    }

    #[test]
    fn fork_server_children_belong_to_its_parent() {
        let server = |pid, ppid| {
            process(pid, ppid, "python", "python\u{0}-c\u{0}from multiprocessing.forkserver import main")
        };
        let server = |pid, ppid| {
            let mut process = server(pid, ppid);
            let meta = Arc::make_mut(&mut process.meta);
            meta.command.launch = Launch::ForkServer;
            process
        };
        let tree = [process(1, 0, "python", "python train.py"), server(2, 1), server(3, 2), server(4, 2)];
        assert_eq!(roles(&tree, &[1]), "T-dd");
        assert_eq!(roles(&tree, &[]), "----");
    }

    #[test]
    fn forking_shell_is_no_trainer() {
        let sh = |pid, ppid| process(pid, ppid, "sh", "sh -c a&b");
        assert_eq!(roles(&[sh(1, 0), sh(2, 1)], &[]), "--");
    }
}
