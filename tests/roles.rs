//! Roles of real Python process trees, as `multiprocessing`, torchrun and shells make them.
//!
//! Every program prints the pids of its processes with their expected roles. The tests compare these with the complete
//! list of the API and with the counts in the metrics. Trees that need a GPU are not covered here.

mod trees;

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::cgroups::TestCgroup;
use crate::support::python::Python;
use crate::support::{Memledger, skip};

/// Library of the Python programs. Children run until their container is removed.
const LIBRARY: &str = r#"
import ctypes, json, multiprocessing, os, subprocess, sys, time

def set_name(name):
    "prctl(PR_SET_NAME), as PyTorch's workers do"
    ctypes.CDLL(None).prctl(15, ctypes.c_char_p(name), 0, 0, 0)

def work(ready, name=None):
    if name:
        set_name(name)
    ready.put(os.getpid())
    while True:
        time.sleep(1000)

def work_late(ready, turn):
    "names itself when it is its turn, and not in the first 2 s of its life"
    began = time.time()
    ready.put(None)
    turn.get()
    while time.time() < began + 2:
        time.sleep(0.01)
    set_name(b'pt_data_worker')
    ready.put([began, time.time()])
    while True:
        time.sleep(1000)

def done(roles):
    print(json.dumps({str(pid): role for pid, role in roles.items()}), flush=True)
    sys.stdin.readline()

def start_workers(context, count, name=None):
    "starts workers, waits until they work, and returns their pids"
    ready = context.SimpleQueue()
    workers = [context.Process(target=work, args=(ready, name), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.get()
    return [worker.pid for worker in workers]
"#;

/// Directory of the program files, which `spawn` and `forkserver` need, and the container in which they run.
struct ProgramContainer {
    folder: tempfile::TempDir,
    cgroup: TestCgroup,
}

impl ProgramContainer {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("library.py"), LIBRARY).expect("a file");
        Self { folder, cgroup: TestCgroup::container() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("text").to_owned()
    }

    /// Writes a program that can be run, and started again by `spawn`. Returns its path.
    fn program(&self, name: &str, main: &str) -> String {
        let main = main.trim().replace('\n', "\n    ");
        let text = format!("from library import *\n\nif __name__ == '__main__':\n    {main}\n");
        std::fs::write(self.path(name), text).expect("a file");
        self.path(name)
    }

    fn run(&self, command: &[&str]) -> Tree {
        let python = Python::command(&self.cgroup, command);
        let flags = [&self.cgroup.include(), "--docker.socket=", "--podman.socket="];
        Tree { memledger: Memledger::start(&flags), python }
    }

    /// Runs a program with Python.
    fn python(&self, main: &str) -> Tree {
        let path = self.program("train.py", main);
        self.run(&["/usr/bin/python3", &path])
    }
}

type Roles = BTreeMap<u32, String>;

/// A process tree, and a memledger that observes it.
struct Tree {
    memledger: Memledger,
    python: Python,
}

impl Tree {
    /// Waits until the API and the metrics show exactly these roles.
    fn expect_roles(&self, container: &ProgramContainer, expected: &Roles) {
        crate::support::eventually("the roles", || {
            let found = self.processes(container);
            let roles: Roles = found.iter().map(|(pid, (_, role))| (*pid, role.clone())).collect();
            (roles == *expected).then_some(()).ok_or_else(|| format!("{found:?} instead of {expected:?}"))
        });
        // a cycle that could not read a process in time has no figures of roles
        crate::support::eventually("the figures of the roles", || {
            let metrics = self.memledger.metrics();
            for role in ["trainer", "dataloader_worker", "worker", "other"] {
                let labels = [("container_name", container.cgroup.name()), ("role", role)];
                let count = metrics.try_value("memledger_container_processes", &labels)?;
                let count_expected = expected.values().filter(|of| *of == role).count();
                let rss = metrics.try_value("memledger_container_process_rss_bytes", &labels)?;
                if count != count_expected as f64 || (rss > 0.0) != (count_expected > 0) {
                    return Err(format!("{role}: {count} processes with {rss} bytes"));
                }
            }
            Ok(())
        });
    }

    /// Returns name and role of each process from the API.
    fn processes(&self, container: &ProgramContainer) -> BTreeMap<u32, (String, String)> {
        let api = self.memledger.api();
        let containers = api["containers"].as_array().expect("a list");
        let found = containers.iter().find(|c| c["name"] == container.cgroup.name());
        let processes = found.and_then(|c| c["processes"].as_array()).cloned().unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().expect("text").to_owned();
        let entry = |p: &serde_json::Value| {
            (p["pid"].as_u64().expect("a pid") as u32, (text(&p["name"]), text(&p["role"])))
        };
        processes.iter().map(entry).collect()
    }
}

/// Parses the roles that a program printed.
fn roles(line: &str) -> Roles {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// Runs a program that prints its roles once, and compares them.
fn check(main: &str) {
    let container = ProgramContainer::new();
    let mut tree = container.python(main);
    let expected = roles(&tree.python.line());
    tree.expect_roles(&container, &expected);
}

#[test]
fn unnamed_forks_are_no_dataloader_workers() {
    check(
        "
workers = start_workers(multiprocessing.get_context('fork'), 2)
done({os.getpid(): 'trainer'} | dict.fromkeys(workers, 'worker'))
",
    );
}

#[test]
fn named_forks_are_workers() {
    let container = ProgramContainer::new();
    let mut tree = container.python(
        "
workers = start_workers(multiprocessing.get_context('fork'), 2, b'pt_data_worker')
done({os.getpid(): 'trainer'} | dict.fromkeys(workers, 'dataloader_worker'))
",
    );
    let expected = roles(&tree.python.line());
    tree.expect_roles(&container, &expected);
    // the name is read a little later than the process is seen
    crate::support::eventually("two names", || {
        let found = tree.processes(&container);
        let named = found.values().filter(|(name, _)| name == "pt_data_worker").count();
        if named == 2 { Ok(()) } else { Err(format!("{found:?}")) }
    });
}

#[test]
fn single_process_is_other() {
    check("done({os.getpid(): 'other'})");
}

#[test]
fn spawned_process_becomes_worker_after_late_name_change() {
    // PyTorch's spawned workers import torch first, which takes them seconds
    let container = ProgramContainer::new();
    let mut tree = container.python(
        "
context = multiprocessing.get_context('spawn')
ready, turn = context.SimpleQueue(), context.SimpleQueue()
worker = context.Process(target=work_late, args=(ready, turn), daemon=True)
worker.start()
ready.get()
tracker = multiprocessing.resource_tracker._resource_tracker._pid
done({os.getpid(): 'other', worker.pid: 'other', tracker: 'other'})
turn.put(None)
print(json.dumps(ready.get()), flush=True)
done({os.getpid(): 'trainer', worker.pid: 'dataloader_worker', tracker: 'other'})
",
    );
    let before = roles(&tree.python.line());
    tree.expect_roles(&container, &before);
    let [began, named]: [f64; 2] = serde_json::from_str(&tree.python.step()).expect("two times");
    let after = roles(&tree.python.line());
    tree.expect_roles(&container, &after);
    let seen = tree.memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
    // names are read again at twice the age of the previous read, which depends on how late this test let it go on; the rest
    // is for a slow host
    let age = named - began;
    assert!(seen - named < age + 15.0, "seen {} s after, at an age of {age} s", seen - named);
}

#[test]
fn named_spawned_children_are_workers_and_tracker_is_other() {
    check(
        "
workers = start_workers(multiprocessing.get_context('spawn'), 2, b'pt_data_worker')
tracker = multiprocessing.resource_tracker._resource_tracker._pid
done({os.getpid(): 'trainer', tracker: 'other'} | dict.fromkeys(workers, 'dataloader_worker'))
",
    );
}

#[test]
fn unnamed_spawned_children_without_gpu_are_other() {
    check(
        "
children = start_workers(multiprocessing.get_context('spawn'), 2)
tracker = multiprocessing.resource_tracker._resource_tracker._pid
done({os.getpid(): 'other', tracker: 'other'} | dict.fromkeys(children, 'other'))
",
    );
}

#[test]
fn named_fork_server_children_are_workers_of_its_parent() {
    check(
        "
workers = start_workers(multiprocessing.get_context('forkserver'), 2, b'pt_data_worker')
tracker = multiprocessing.resource_tracker._resource_tracker._pid
server = multiprocessing.forkserver._forkserver._forkserver_pid
helpers = {tracker: 'other', server: 'other'}
done({os.getpid(): 'trainer'} | helpers | dict.fromkeys(workers, 'dataloader_worker'))
",
    );
}

#[test]
fn launcher_is_other_and_its_ranks_are_trainers() {
    let container = ProgramContainer::new();
    let rank = container.program(
        "rank.py",
        "
workers = start_workers(multiprocessing.get_context('fork'), 2)
done({os.getpid(): 'trainer'} | dict.fromkeys(workers, 'worker'))
",
    );
    let mut tree = container.python(&format!(
        "
ranks = [
    subprocess.Popen([sys.executable, '-u', {rank:?}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for _ in range(4)
]
roles = {{os.getpid(): 'other'}}
for rank in ranks:
    roles.update(json.loads(rank.stdout.readline()))
done(roles)
"
    ));
    let expected = roles(&tree.python.line());
    assert_eq!(expected.len(), 1 + 4 + 8);
    tree.expect_roles(&container, &expected);
}

/// A trainer with two forked workers, which other programs wrap.
const TRAINER: &str = "
workers = start_workers(multiprocessing.get_context('fork'), 2)
done({os.getpid(): 'trainer'} | dict.fromkeys(workers, 'worker'))
";

#[test]
fn shell_around_training_is_other() {
    let container = ProgramContainer::new();
    let program = container.program("train.py", TRAINER);
    // `true` keeps the shell from becoming the program
    let mut tree = container.run(&["/bin/sh", "-c", &format!("/usr/bin/python3 {program}; true")]);
    let mut expected = roles(&tree.python.line());
    expected.insert(tree.python.pid(), "other".into());
    tree.expect_roles(&container, &expected);
}

#[test]
fn init_process_around_training_is_other() {
    let inits = ["/usr/bin/docker-init", "/usr/bin/tini", "/usr/bin/tini-static", "/sbin/docker-init"];
    let Some(init) = inits.iter().find(|init| Path::new(init).exists()) else {
        return skip(&format!("none of {inits:?} is installed"));
    };
    let container = ProgramContainer::new();
    let program = container.program("train.py", TRAINER);
    let mut tree = container.run(&[init, "-s", "--", "/usr/bin/python3", &program]);
    let mut expected = roles(&tree.python.line());
    expected.insert(tree.python.pid(), "other".into());
    tree.expect_roles(&container, &expected);
}

#[test]
fn forking_shell_has_no_trainer_or_workers() {
    let container = ProgramContainer::new();
    // a subshell is a fork with the command line of its parent, just as a worker is
    let mut tree =
        container.run(&["/bin/sh", "-c", "(sleep 10000; true) & (sleep 10000; true) & echo started; wait"]);
    assert_eq!(tree.python.line(), "started");
    let pids = crate::support::eventually("five processes", || {
        let pids = container.cgroup.pids();
        if pids.len() == 5 { Ok(pids) } else { Err(format!("{pids:?}")) }
    });
    tree.expect_roles(&container, &pids.into_iter().map(|pid| (pid, "other".to_owned())).collect());
}
