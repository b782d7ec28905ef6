use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};
use std::sync::Arc;

use super::pid_lists::pids_of;
use super::*;
use crate::collect::{CycleData, ReadErrors};
use crate::discover::{Cgroup, Hierarchy, Inventory};
use crate::host::HostPaths;
use crate::host::bounds::PROCESSES;
use crate::host::read_pool::RunDelay;
use crate::series::Series;

/// Longer than any cycle that a blocked read does not delay; half of the time-out of such a read.
const NOT_DELAYED: Duration = Duration::from_secs(1);

/// Programs of the attacks in `tests/hostile`.
const LONG_COMMAND_LINE: &str = include_str!("../../../tests/hostile/command_line.py");
const FUSE_HANG: &str = include_str!("../../../tests/hostile/fuse_hang.py");

/// A process that runs a Python program; killed when dropped.
struct PythonProcess(Child);

impl PythonProcess {
    /// Starts a program and waits for its first line. Returns `None` and prints the reason if it cannot run here.
    fn start(program: &str, argument: &str) -> Option<Self> {
        let mut command = Program::new("/usr/bin/python3");
        command.args(["-c", program, argument]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut line = String::new();
        let python = command.spawn().ok().map(Self).and_then(|mut python| {
            let _ = BufReader::new(python.0.stdout.take()?).read_line(&mut line);
            Some(python)
        });
        if line.is_empty() {
            skip("the Python program did not start");
            return None;
        }
        python
    }

    /// Starts a process whose memory map is locked until it is dropped, so that reads of its command line block.
    fn start_locked() -> Option<Self> {
        let mut python = Self::start(FUSE_HANG, "lock")?;
        python.0.stdin.as_mut()?.write_all(b"\n").ok()?;
        let began = Timestamp::now();
        while blocked_threads(python.pid()) < 2 {
            assert!(Timestamp::now().since(began) < Duration::from_secs(30), "the memory map is not locked");
            std::thread::yield_now();
        }
        Some(python)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// Counts the threads of a process that wait for FUSE or for a lock of the kernel.
fn blocked_threads(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let is_blocked = |task: &std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let is_in_disk_sleep =
            read("stat").rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('D'));
        is_in_disk_sleep || read("wchan") == "request_wait_answer"
    };
    tasks.filter(is_blocked).count()
}

impl Drop for PythonProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait(); // closes its standard input, which ends a FUSE server
    }
}

/// Containers with pid lists in a temporary directory; the processes are real.
struct Host {
    _folder: tempfile::TempDir,
    hierarchy: Hierarchy,
    inventory: Arc<Inventory>,
    table: ProcessTable,
    cycle_data: CycleData,
    read_errors: ReadErrors,
}

impl Host {
    fn new(containers: &[&[u32]]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().to_path_buf() };
        let mut inventory = Inventory::default();
        for (number, pids) in containers.iter().enumerate() {
            let name = format!("c{number}");
            std::fs::create_dir(folder.path().join(&name)).unwrap();
            inventory.containers.push(container(&name, &[]));
            write_pids(&folder.path().join(name), pids);
        }
        Self {
            _folder: folder,
            hierarchy,
            inventory: Arc::new(inventory),
            table: ProcessTable::default(),
            cycle_data: CycleData::default(),
            read_errors: ReadErrors::default(),
        }
    }

    /// Runs one cycle and returns its duration, without the time for which this thread waited for a CPU.
    fn cycle(&mut self) -> Duration {
        let run_delay = RunDelay::of_this_thread();
        let (began, delayed) = (Timestamp::now(), run_delay.so_far());
        let host_paths = HostPaths::default();
        let context = Context {
            now: began,
            host_paths: &host_paths,
            hierarchy: Some(&self.hierarchy),
            inventory: &self.inventory,
        };
        self.cycle_data.begin();
        self.read_errors.enter("process");
        let mut series = Series::with_capacity(0, 0);
        let mut output = Output {
            series: &mut series,
            cycle_data: &mut self.cycle_data,
            read_errors: &mut self.read_errors,
        };
        assert_eq!(self.table.collect(&context, &mut output), CollectOutcome::Ok);
        Timestamp::now().since(began).saturating_sub(run_delay.so_far() - delayed)
    }

    /// Runs cycles until the condition holds.
    fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let (began, mut delayed) = (Timestamp::now(), 0);
        while !condition(self) {
            // the machine may stop once; what waits for a read does so in each cycle
            delayed += usize::from(self.cycle() >= NOT_DELAYED);
            assert!(delayed <= 1, "several cycles took {NOT_DELAYED:?}");
            assert!(Timestamp::now().since(began) < Duration::from_secs(30), "{what}");
            std::thread::yield_now();
        }
    }

    fn read_errors(&self, reason: &str) -> u64 {
        self.read_errors
            .counts()
            .filter(|(_, counted, _)| *counted == reason)
            .map(|(_, _, count)| count)
            .sum()
    }

    fn is_python(&self, container: usize) -> Vec<bool> {
        let processes = self.cycle_data.processes.of(container).iter();
        processes.map(|process| process.meta.command.python).collect()
    }
}

fn container(path: &str, below: &[PathBuf]) -> Arc<Container> {
    let mut container = Arc::unwrap_or_clone(Container::in_cgroup(path, path));
    let cgroup = Cgroup { path: path.into(), inode: None, below: below.to_vec(), is_truncated: false };
    container.cgroup = Some(Arc::new(cgroup));
    Arc::new(container)
}

fn skip(reason: &str) {
    assert!(std::env::var_os("MEMLEDGER_TESTS_REQUIRED").is_none(), "{reason}");
    eprintln!("skipped: {reason}");
}

fn write_pids(folder: &Path, pids: &[u32]) {
    let text: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
    std::fs::write(folder.join("cgroup.procs"), text).unwrap();
}

#[test]
fn ignores_truncated_last_pid() {
    assert_eq!(pids_of(b"7\n12\n1").collect::<Vec<_>>(), [7, 12]);
}

/// Without a limit, memledger read and kept the whole 1 GiB.
#[test]
fn reads_bounded_part_of_1_gib_command_line() {
    let Some(python) = PythonProcess::start(LONG_COMMAND_LINE, &(1 << 30).to_string()) else { return };
    let mut host = Host::new(&[&[python.pid()]]);
    let took = host.cycle();
    assert!(took < NOT_DELAYED, "a cycle took {took:?}");
    assert!(host.table.buffer.capacity() <= 128 << 10, "{} bytes are retained", host.table.buffer.capacity());
    assert_eq!(host.cycle_data.processes.of(0).len(), 1);
    host.until("classified by its beginning", |host| host.is_python(0) == [true]);
}

#[test]
fn blocking_process_loses_only_its_own_command_line() {
    let Some(other) = PythonProcess::start("print('ready', flush=True); input()", "") else { return };
    let Some(locked) = PythonProcess::start_locked() else { return };
    let mut host = Host::new(&[&[locked.pid()], &[other.pid()]]);
    let known = |host: &Host, container| {
        let processes = host.cycle_data.processes.of(container).iter();
        processes.map(|process| process.meta.command_hash.is_some()).collect::<Vec<_>>()
    };
    host.cycle(); // would take 2 s, the time-out, if it waited
    host.until("the other's is read", |host| known(host, 1) == [true]);
    assert_eq!((known(&host, 0), host.read_errors("timeout")), (vec![false], 0));
    assert!(host.cycle_data.processes.of(0)[0].memory.rss_bytes > 0 && host.cycle_data.processes.complete(0));
    host.until("its read times out", |host| host.read_errors("timeout") == 1);
    drop(locked);
    host.until("it has ended", |host| host.cycle_data.processes.of(0).is_empty());
    assert_eq!(host.read_errors("timeout"), 1, "it is counted once");
}

#[test]
fn counts_containers_over_process_limit_and_reads_the_others() {
    let own = std::process::id();
    let many = vec![own; PROCESSES.max + 1];
    let mut host = Host::new(&[&many, &[own], &many[1..]]);
    host.cycle();
    let processes = &host.cycle_data.processes;
    assert_eq!([0, 1, 2].map(|number| processes.complete(number)), [false, true, true]);
    assert_eq!([0, 1, 2].map(|number| processes.of(number).len()), [0, 1, PROCESSES.max]);
    assert_eq!((host.read_errors("too_many"), host.cycle_data.processes.readable), (1, true));
}

/// A v2 list contains 0 for a process that was reaped while the kernel wrote it.
#[test]
fn pid_zero_is_skipped_in_initial_pid_namespace() {
    if !HostPaths::default().in_initial_pid_namespace() {
        return skip("not in the initial pid namespace");
    }
    let own = std::process::id();
    let mut host = Host::new(&[&[0, own], &[own]]);
    host.cycle();
    let processes = &host.cycle_data.processes;
    assert_eq!([0, 1].map(|number| (processes.complete(number), processes.of(number).len())), [(true, 1); 2]);
}

#[test]
fn containers_with_the_most_processes_are_beyond_the_limit_of_the_host() {
    let own = std::process::id();
    let largest = vec![own; PROCESSES.max];
    let mut lists = vec![&largest[..]; PROCESSES_OF_HOST.max / PROCESSES.max];
    lists.push(&largest[..1]);
    let mut host = Host::new(&lists);
    host.cycle();
    let processes = &host.cycle_data.processes;
    let complete: Vec<bool> = (0..lists.len()).map(|number| processes.complete(number)).collect();
    assert_eq!(complete.iter().filter(|complete| !**complete).count(), 1);
    assert!(complete.last().is_some_and(|complete| *complete), "the smallest one is read");
    assert_eq!(host.read_errors("too_many"), 1);
}

/// Sleeping children of a shell, which are killed with it.
struct Crowd(Child, Vec<u32>);

impl Crowd {
    fn of(count: usize) -> Self {
        let program =
            format!("for i in $(seq {count}); do sleep 600 & echo $!; done; echo end; read x; kill 0");
        let mut command = Program::new("setsid");
        let mut shell = command.args(["sh", "-c", &program]);
        shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let pids = lines.take_while(|line| line != "end").filter_map(|line| line.parse().ok()).collect();
        Self(child, pids)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn new_processes_are_read_over_several_cycles_and_others_at_once() {
    let crowd = Crowd::of(NEW_PROCESSES_OF_CONTAINER.max + 50);
    let own = std::process::id();
    let mut host = Host::new(&[&crowd.1, &[own]]);
    host.cycle();
    let counts = |host: &Host| [0, 1].map(|number| host.cycle_data.processes.of(number).len());
    let complete = |host: &Host| [0, 1].map(|number| host.cycle_data.processes.complete(number));
    assert_eq!((counts(&host), complete(&host)), ([NEW_PROCESSES_OF_CONTAINER.max, 1], [false, true]));
    host.cycle();
    assert_eq!((counts(&host), complete(&host)), ([crowd.1.len(), 1], [true, true]));
    assert_eq!(host.read_errors("too_many"), 0, "that is no attack");
}

#[test]
fn container_that_is_always_behind_with_new_processes_is_counted() {
    let mut table = ProcessTable::default();
    let mut read_errors = ReadErrors::default();
    let container = container("c", &[]);
    let too_many = |read_errors: &ReadErrors| read_errors.counts().map(|(_, _, count)| count).sum::<u64>();
    for _ in 0..MAX_CYCLES_BEHIND {
        table.note_behind(&container, true, &mut read_errors);
    }
    assert_eq!(too_many(&read_errors), 0);
    table.note_behind(&container, true, &mut read_errors);
    assert_eq!(too_many(&read_errors), 1);
    table.note_behind(&container, false, &mut read_errors);
    table.note_behind(&container, true, &mut read_errors);
    assert_eq!(too_many(&read_errors), 1);
}

/// Reading the list of a threaded cgroup fails with EOPNOTSUPP.
#[test]
fn threaded_cgroup_below_container_hides_no_process() {
    let root = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let Some(root) = root.into_iter().find(|root| root.join("cgroup.controllers").exists()) else {
        return skip("no cgroup v2 is mounted");
    };
    let name = format!("memledger-threaded-{}", std::process::id());
    let threaded = root.join(&name).join("threads");
    if std::fs::create_dir_all(&threaded).is_err() {
        return skip("no permission to create cgroups");
    }
    let mut sleeper = Program::new("sleep").arg("600").spawn().unwrap();
    let join = || {
        std::fs::write(root.join(&name).join("cgroup.procs"), sleeper.id().to_string())?;
        std::fs::write(threaded.join("cgroup.type"), "threaded")?;
        std::fs::write(threaded.join("cgroup.threads"), sleeper.id().to_string())
    };
    let joined = join();
    let read = std::fs::read(threaded.join("cgroup.procs"));
    let mut host = Host::new(&[]);
    host.hierarchy.root = root.to_path_buf();
    let below = [PathBuf::from(&name).join("threads")];
    host.inventory =
        Arc::new(Inventory { containers: vec![container(&name, &below)], ..Inventory::default() });
    host.cycle();
    let pids: Vec<u32> = host.cycle_data.processes.of(0).iter().map(|process| process.pid).collect();
    let pid = sleeper.id();
    sleeper.kill().and_then(|()| sleeper.wait()).unwrap();
    let removed = std::fs::remove_dir(&threaded).and_then(|()| std::fs::remove_dir(root.join(&name)));
    joined.unwrap();
    assert_eq!(read.unwrap_err().raw_os_error(), Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()));
    assert_eq!((pids, host.cycle_data.processes.complete(0)), (vec![pid], true));
    removed.unwrap();
}
