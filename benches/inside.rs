//! What 64 reporting processes cost memledger, and what reporting costs a process.
//!
//! `make bench` starts 64 real processes in a cgroup that looks like a container, each with a connection and a sample of twelve
//! values a second, as the client sends them, and compares the reporter's thread and the resident memory with none. It writes
//! its part of docs/performance.md. Needs root, for the cgroup.

mod document;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use memledger::host::HostPaths;
use memledger::reporter;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const PROCESSES: usize = 64;
const SECONDS: u64 = 20;

/// Children that report once a second, and end when their parent does. Starts are spread over a second, as in reality.
const PROGRAM: &str = r#"
import json, os, socket, sys, time
path, processes = sys.argv[1], int(sys.argv[2])
ends, alive = os.pipe()
sample = {"t": "sample", "seq": 0, "lost": 0, "dev": [{"i": 0, "alloc": 14 << 30, "alloc_peak": 15 << 30, "res": 20 << 30,
    "res_peak": 21 << 30, "split": 1 << 30, "req": 13 << 30, "ooms": 0, "retries": 3}]}
def report(number):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    connection.send(json.dumps({"v": 1, "t": "hello", "local_rank": number % 64, "devices": [{"i": 0, "uuid": "a"}]}).encode())
    os.write(alive, b"r")
    time.sleep(number / processes)
    while True:
        connection.send(json.dumps(sample).encode())
        time.sleep(1)
children = []
for number in range(processes):
    child = os.fork()
    if child == 0:
        report(number)
    children.append(child)
for _ in children:
    os.read(ends, 1)
print("ready", flush=True)
sys.stdin.read()
for child in children:
    os.kill(child, 9)
    os.waitpid(child, 0)
"#;

fn is_v2() -> bool {
    std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").is_ok_and(|text| text.contains("memory"))
}

/// A cgroup that looks like a container; drop removes it.
struct ContainerCgroup(PathBuf);

impl ContainerCgroup {
    fn new() -> Outcome<Self> {
        let root = Path::new(if is_v2() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" });
        let path = root.join("memledger-bench-inside").join(format!("{:064x}", 0xbe9c));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for ContainerCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// Runs the processes; drop ends them.
struct Reporters(Child, Option<ChildStdin>);

impl Reporters {
    fn start(cgroup: &ContainerCgroup, socket: &Path) -> Outcome<Self> {
        let script = r#"echo $$ > "$0/cgroup.procs" && exec python3 -c "$@""#;
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .arg(&cgroup.0)
            .arg(PROGRAM)
            .arg(socket)
            .arg(PROCESSES.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut String::new())?;
        Ok(Self(child, stdin))
    }
}

impl Drop for Reporters {
    fn drop(&mut self) {
        drop(self.1.take());
        let _ = self.0.wait();
    }
}

/// Returns the CPU time of the reporter's thread in nanoseconds.
fn thread_nanos() -> Outcome<f64> {
    for task in std::fs::read_dir("/proc/self/task")?.flatten() {
        if std::fs::read_to_string(task.path().join("comm"))?.trim() == "reporter" {
            let text = std::fs::read_to_string(task.path().join("schedstat"))?;
            return Ok(text.split(' ').next().ok_or("schedstat")?.parse()?);
        }
    }
    Err("no thread of the reporter".into())
}

fn resident_kib() -> Outcome<f64> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = text.split(' ').nth(1).ok_or("statm")?.parse()?;
    Ok(pages * rustix::param::page_size() as f64 / 1024.0)
}

fn part() -> Outcome<String> {
    let directory = tempfile::tempdir()?;
    let state = reporter::start(directory.path(), &HostPaths::default(), !is_v2())?;
    let before = resident_kib()?;
    let cgroup = ContainerCgroup::new()?;
    let reporters = Reporters::start(&cgroup, &directory.path().join("reporter.sock"))?;
    let began = thread_nanos()?;
    let (mut copies, inventory) = (0, Arc::default());
    for _ in 0..SECONDS {
        std::thread::sleep(Duration::from_secs(1));
        copies = state.take(&inventory).processes.len(); // as the cycle does
    }
    let share = (thread_nanos()? - began) / 1e9 / SECONDS as f64;
    let grown = resident_kib()? - before;
    if copies != PROCESSES {
        return Err(format!("{copies} of {PROCESSES} processes report").into());
    }
    drop(reporters);
    let is_met = |is_met| if is_met { "met" } else { "NOT met" };
    Ok(format!(
        "{}\n\n\
         {PROCESSES} processes in one container, each with a connection and a sample of twelve values a second, for {SECONDS} s.\n\n\
         | CPU % of one core | us of CPU per sample | resident memory more, KiB |\n\
         | --- | --- | --- |\n\
         | {:.2} | {:.1} | {grown:.0} |\n\n\
         Goals: less than 1 % of a core ({}), less than 1 MiB ({}). The client sends two samples a second, as memledger asks \
         it to, which costs about twice as much. What a live GPU's allocator costs the program that reports was \
         not measured: there was none. `python/tests/test_cost.py` bounds what the client costs beside it.\n",
        document::HEADINGS[8],
        share * 100.0,
        share * 1e6 / PROCESSES as f64,
        is_met(share < 0.01),
        is_met(grown < 1024.0),
    ))
}

fn main() -> Outcome<()> {
    if document::is_only_asked() {
        return Ok(());
    }
    Ok(document::write(&part()?)?)
}
