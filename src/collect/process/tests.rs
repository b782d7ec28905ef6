use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};
use std::sync::Arc;

use super::pid_lists::pids_of;
use super::*;
use crate::collect::{CycleData, ReadErrors};
use crate::discover::{Cgroup, Hierarchy, Inventory};
use crate::host::HostPaths;
use crate::host::read_pool::run_delay;
use crate::series::Series;

/// Longer than any cycle that a blocked read does not delay; half of the time-out of such a read.
const NOT_DELAYED: Duration = Duration::from_secs(1);

/// Prelude of the Python programs: prctl(2), which moves a process's command line to any mapping.
const PRELUDE: &str = r#"
import ctypes, mmap, os, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def address(area):
    return ctypes.addressof(ctypes.c_char.from_buffer(area))
def move_command_line(start, end):
    stat = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
    field = lambda number: int(stat[number - 3])
    libc.sbrk.restype = ctypes.c_void_p
    code = (field(26), field(27), field(45), field(46), field(47), libc.sbrk(0), field(28))
    of_map = struct.pack('<11QQIi', *code, start, end, start, start, 0, 0, -1)
    buffer = ctypes.create_string_buffer(of_map)
    check(libc.prctl(35, 14, buffer, ctypes.c_ulong(len(of_map)), ctypes.c_ulong(0)))
"#;

/// A process that runs a Python program; killed when dropped.
struct PythonProcess(Child);

impl PythonProcess {
    /// Starts a program and waits for its first line: the pids of the processes to observe. Returns `None` and logs the
    /// reason if it cannot run here.
    fn start(program: &str) -> Option<(Self, Vec<u32>)> {
        let mut command = Program::new("/usr/bin/python3");
        command.arg("-c").arg(format!("{PRELUDE}{program}"));
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut line = String::new();
        let python = started.ok().map(Self).and_then(|mut python| {
            let _ = BufReader::new(python.0.stdout.take()?).read_line(&mut line);
            Some(python)
        });
        let pids: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if python.is_none() || pids.is_empty() {
            skip("the Python program did not start");
            return None;
        }
        python.map(|python| (python, pids))
    }
}

impl Drop for PythonProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
        let (began, delayed) = (Timestamp::now(), run_delay());
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
        Timestamp::now().since(began).saturating_sub(run_delay() - delayed)
    }

    /// Runs cycles until the condition holds.
    fn until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let began = Timestamp::now();
        while !condition(self) {
            let took = self.cycle();
            assert!(took < NOT_DELAYED, "a cycle took {took:?}");
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
    let cgroup = Cgroup { path: path.into(), inode: None, below: below.to_vec(), is_cut: false };
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

/// S1: without a limit, memledger read and kept the whole 1 GiB.
#[test]
fn reads_bounded_part_of_1_gib_command_line() {
    let program = r#"
libc.mmap.restype = ctypes.c_void_p
base = libc.mmap(None, ctypes.c_size_t(1 << 30), 3, 0x4022, -1, 0) # private, of pages of zeros that take no memory
ctypes.memmove(base, b'python\0', 7)
move_command_line(base, base + (1 << 30))
print(os.getpid(), flush=True)
sys.stdin.readline()
"#;
    let Some((_player, pids)) = PythonProcess::start(program) else { return };
    let mut host = Host::new(&[&pids]);
    let took = host.cycle();
    assert!(took < NOT_DELAYED, "a cycle took {took:?}");
    assert!(host.table.buffer.capacity() <= 128 << 10, "{} bytes are retained", host.table.buffer.capacity());
    assert_eq!(host.cycle_data.processes.of(0).len(), 1);
    host.until("classified by its beginning", |host| host.is_python(0) == [true]);
}

/// S2: a process with a thread that holds its mmap lock while a file system does not respond.
const HANGING: &str = r#"
CLONE_NEWNS, MS_PRIVATE = 0x20000, 1 << 18 | 1 << 14
check(libc.unshare(CLONE_NEWNS))
check(libc.mount(b'none', b'/', None, MS_PRIVATE, None))
device = os.open('/dev/fuse', os.O_RDWR)
folder = '/mnt' # of this mount namespace alone
check(libc.mount(b'x', folder.encode(), b'fuse', 0, b'fd=%d,rootmode=40000,user_id=0,group_id=0' % device))
attr = lambda node, mode: struct.pack('<QQQQQQIIIIIIIIII', node, 1 << 20, 2048, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
def serve():
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return
        size, opcode, unique, node = struct.unpack_from('<IIQQ', request)
        if opcode == 26: # INIT
            body = struct.pack('<IIIIHHIIHHI28x', 7, 31, 65536, 0, 16, 12, 4096, 1, 16, 0, 0)
        elif opcode == 1: # LOOKUP
            body = struct.pack('<QQQQII', 2, 0, 3600, 3600, 0, 0) + attr(2, 0o100644)
        elif opcode == 3: # GETATTR
            body = struct.pack('<QII', 3600, 0, 0) + (attr(1, 0o40755) if node == 1 else attr(2, 0o100644))
        elif opcode == 14: # OPEN
            body = struct.pack('<QII', 1, 2, 0)
        elif opcode in (15, 2, 36, 42): # READ is never answered; the others want no answer
            continue
        elif opcode in (18, 25): # RELEASE, FLUSH
            body = b''
        else:
            os.write(device, struct.pack('<IiQ', 16, -38, unique))
            continue
        os.write(device, struct.pack('<IiQ', 16 + len(body), 0, unique) + body)
threading.Thread(target=serve, daemon=True).start()
def hang():
    file = os.open(folder + '/text', os.O_RDONLY)
    libc.mmap.restype = ctypes.c_void_p
    base = libc.mmap(None, 4096, 1, 2, file, 0)
    memory = os.open('/proc/self/mem', os.O_RDONLY)
    threading.Thread(target=os.pread, args=(memory, 1, base), daemon=True).start() # reads under the lock, for ever
    wait_for(os.getpid(), 1)
    threading.Thread(target=libc.mmap, args=(None, 4096, 1, 0x22, -1, 0), daemon=True).start() # wants to write: all wait
def is_stuck(task):
    state = open(task + '/stat').read().rsplit(')', 1)[1].split()[0]
    return state == 'D' or open(task + '/wchan').read() == 'request_wait_answer'
def wait_for(process, count):
    while sum(is_stuck(f'/proc/{process}/task/{task}') for task in os.listdir(f'/proc/{process}/task')) < count:
        time.sleep(0.001)
"#;

/// Starts processes that block readers of their command lines, until the Python process ends.
fn start_hanging(count: usize) -> Option<(PythonProcess, Vec<u32>)> {
    let program = format!(
        r#"{HANGING}
children = []
for number in range({count}):
    child = os.fork()
    if child == 0:
        libc.prctl(1, 9) # killed with the python
        os.close(device) # which ends the file system, and with it the hanging, when the python ends
        hang()
        while True:
            signal.pause()
    wait_for(child, 2)
    children.append(child)
print(*children, flush=True)
sys.stdin.readline()
"#
    );
    PythonProcess::start(&program)
}

#[test]
fn blocking_process_loses_only_its_own_command_line() {
    let Some((_other, responsive)) =
        PythonProcess::start("print(os.getpid(), flush=True)\nsys.stdin.readline()\n")
    else {
        return;
    };
    let Some((python, hanging)) = start_hanging(1) else { return };
    let mut host = Host::new(&[&hanging, &responsive]);
    let known = |host: &Host, container| {
        let processes = host.cycle_data.processes.of(container).iter();
        processes.map(|process| process.meta.command_hash.is_some()).collect::<Vec<_>>()
    };
    host.cycle(); // would take 2 s, the time-out, if it waited
    host.until("the other's is read", |host| known(host, 1) == [true]);
    assert_eq!((known(&host, 0), host.read_errors("timeout")), (vec![false], 0));
    assert!(host.cycle_data.processes.of(0)[0].rss_bytes > 0 && host.cycle_data.processes.complete(0));
    host.until("its read times out", |host| host.read_errors("timeout") == 1);
    drop(python);
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

/// S4: reading the list of a threaded cgroup fails with EOPNOTSUPP.
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
    host.inventory = Arc::new(Inventory { containers: vec![container(&name, &below)], runtimes: vec![] });
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
