//! What 64 reporting processes cost memledger, and how soon a new container shows its partition.
//!
//! `make bench` starts 64 real processes in a cgroup that looks like a container, each with a connection and samples of
//! eleven values at the interval that memledger requests, as the client sends them, and compares the reporter's thread and the resident memory with none. It writes
//! its part of docs/performance.md. Needs root, for the cgroup.
//!
//! And what the client costs the program: its calls, beside a call of an empty function in the same process, and its import.
//!
//! The partition is that of unmodified programs, with the client that the real binary wrote and its default settings. The driver is
//! `tests/fake-nvml`, and `python/tests/standin` has the place of torch.

mod document;

use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake_nvml::{FakeNvml, Process, State};
use memledger::host::HostPaths;
use memledger::reporter;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const PROCESSES: usize = 64;
const SECONDS: u64 = 20;
const ADDRESS: &str = "127.0.0.1:10898";
/// Containers that start one after the other.
const STARTS: u64 = 10;
/// Longest wait for a partition.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Does not use memledger.
const UNMODIFIED: &str = "
import signal, torch
torch.cuda.init()
torch.cuda.standin_allocate(301 << 20)
signal.pause()
";

/// Prints the nanoseconds of processor time of reading the counters of torch's allocator, of a step, of an operation, and of a call of an
/// empty function.
const CALLS: &str = "
import time, torch
torch.cuda.init()
torch.cuda.standin_allocate(1 << 20)
import memledger_client
from memledger_client import _torch
def tracked():
    with memledger_client.track('model', 'forward'):
        pass
def empty():
    pass
def best(call, count):
    def used():
        before = time.thread_time_ns()
        for _ in range(count):
            call()
        return (time.thread_time_ns() - before) / count
    return min(used() for _ in range(7))
tracked()
print(best(_torch.devices, 5000), best(memledger_client.step, 20000), best(tracked, 2000), best(empty, 100000))
";

/// Prints the milliseconds of processor time of the client's import, where torch has imported what it needs itself.
const IMPORT: &str = "
import contextlib, functools, json, socket, sys, threading, typing, time
before = time.process_time_ns()
import memledger_client
print((time.process_time_ns() - before) / 1e6)
";

/// Children that report at the requested interval, and end when their parent does. Starts are spread over one, as in
/// reality. The first line is the interval in milliseconds.
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
    interval = json.loads(connection.recv(16384))["interval_ms"]
    os.write(alive, b"%5d" % interval)
    time.sleep(interval / 1000 * number / processes)
    while True:
        connection.send(json.dumps(sample).encode())
        time.sleep(interval / 1000)
children = []
for number in range(processes):
    child = os.fork()
    if child == 0:
        report(number)
    children.append(child)
for _ in children:
    interval = int(os.read(ends, 5))
print(interval, flush=True)
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
    fn new(number: u64) -> Outcome<Self> {
        let root = Path::new(if is_v2() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" });
        let path = root.join("memledger-bench-inside").join(format!("{number:012x}{:052x}", 0xbe9c));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// Returns a command whose process enters the cgroup before it runs Python with these arguments.
    fn python(&self, arguments: &[&str]) -> Command {
        let script = r#"echo $$ > "$0/cgroup.procs" && exec python3 -c "$@""#;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).arg(&self.0).args(arguments);
        command.env("PYTHONDONTWRITEBYTECODE", "1"); // as a read-only mount
        command
    }
}

impl Drop for ContainerCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
        let _ = self.0.parent().map(std::fs::remove_dir);
    }
}

/// Runs the processes; drop ends them.
struct Reporters {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Seconds between two samples of one of them.
    interval: f64,
}

impl Reporters {
    fn start(cgroup: &ContainerCgroup, socket: &Path) -> Outcome<Self> {
        let socket = socket.to_str().ok_or("no text")?;
        let mut child = cgroup
            .python(&[PROGRAM, socket, &PROCESSES.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        Ok(Self { child, stdin, interval: line.trim().parse::<f64>()? / 1000.0 })
    }
}

impl Drop for Reporters {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.wait();
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

/// A program that is killed when dropped.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn metrics() -> Option<String> {
    let mut stream = std::net::TcpStream::connect(ADDRESS).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.lines().next().is_some_and(|line| line.contains(" 200 ")).then_some(text)
}

/// Waits until the metrics have a line of which this is true.
#[allow(clippy::disallowed_methods)] // a bench measures time
fn wait_for(is_wanted: impl Fn(&str) -> bool) -> Outcome<()> {
    let began = Instant::now();
    while !metrics().is_some_and(|text| text.lines().any(&is_wanted)) {
        if began.elapsed() > TIMEOUT {
            return Err("it is not in the metrics".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// What the client costs a program.
struct ClientCost {
    /// Nanoseconds of reading the counters, of a step, of an operation, and of a call of an empty function.
    calls: [f64; 4],
    /// Milliseconds, without bytecode.
    import: f64,
}

impl ClientCost {
    /// Measures it beside the memledger that wrote this directory.
    fn measure(reporter: &Path) -> Outcome<Self> {
        let cgroup = ContainerCgroup::new(STARTS + 1)?;
        let numbers = |program: &str| -> Outcome<Vec<f64>> {
            let mut command = cgroup.python(&[program]);
            command.env("PYTHONPATH", client_path(reporter)).env("MEMLEDGER_REPORTER_DIRECTORY", reporter);
            let output = command.stderr(Stdio::inherit()).output()?;
            if !output.status.success() {
                return Err(format!("a program of the client: {}", output.status).into());
            }
            let text = String::from_utf8(output.stdout)?;
            Ok(text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
        };
        let calls = numbers(CALLS)?.try_into().map_err(|_| "the client's calls were not measured")?;
        let mut imports = (0..5).map(|_| numbers(IMPORT)).collect::<Outcome<Vec<_>>>()?.concat();
        imports.sort_by(f64::total_cmp);
        Ok(Self { calls, import: *imports.first().ok_or("the import was not measured")? })
    }
}

/// `PYTHONPATH` of a program with the client that memledger wrote and the stand-in for torch.
fn client_path(reporter: &Path) -> String {
    let standin = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tests/standin");
    format!("{}:{}", reporter.join("python").display(), standin.display())
}

/// Measures beside the real binary: the seconds from the start of a container's process until its partition is in the metrics, for each
/// start, and the client's cost.
#[allow(clippy::disallowed_methods)]
fn beside_memledger() -> Outcome<(Vec<f64>, ClientCost)> {
    let folder = tempfile::tempdir()?;
    let (reporter, mut state) = (folder.path().join("reporter"), State::with_gpus(1));
    let fake = FakeNvml::install(folder.path(), &state)?;
    let memledger = Command::new(env!("CARGO_BIN_EXE_memledger"))
        .args(["serve", "--docker.socket=", "--podman.socket=", "--state.path=", "--local.socket="])
        .arg(format!("--web.listen-address={ADDRESS}"))
        .arg(format!("--gpu.nvml-library={}", fake.path().display()))
        .arg(format!("--reporter.directory={}", reporter.display()))
        .stderr(Stdio::null())
        .spawn()?;
    let _memledger = Program(memledger);
    wait_for(|line| line.starts_with("memledger_gpu_memory_used_bytes"))?;
    let mut seconds = Vec::new();
    for number in 1..=STARTS {
        let cgroup = ContainerCgroup::new(number)?;
        let began = Instant::now();
        let child = cgroup
            .python(&[UNMODIFIED])
            .env("PYTHONPATH", client_path(&reporter))
            .env("STANDIN_GPUS", state.gpus[0].uuid.trim_start_matches("GPU-"))
            .spawn()?;
        state.gpus[0].memory.used = 500 << 20;
        state.gpus[0].processes = vec![Process::compute(child.id(), Some(450 << 20))];
        fake.set(&state)?;
        let _program = Program(child);
        let (name, bytes) = (format!(r#"container_name="{number:012x}""#), format!(" {}", 301 << 20));
        wait_for(|line| {
            line.contains(r#"holder="tensors""#) && line.contains(&name) && line.ends_with(&bytes)
        })?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok((seconds, ClientCost::measure(&reporter)?))
}

fn part() -> Outcome<String> {
    let directory = tempfile::tempdir()?;
    let state = reporter::start(directory.path(), &HostPaths::default(), !is_v2(), Arc::default())?;
    let (mut copies, inventory) = (0, Arc::default());
    state.take(&inventory); // nobody is accepted before the first cycle
    let before = resident_kib()?;
    let cgroup = ContainerCgroup::new(0)?;
    let reporters = Reporters::start(&cgroup, &directory.path().join("reporter.sock"))?;
    let began = thread_nanos()?;
    for _ in 0..SECONDS {
        std::thread::sleep(Duration::from_secs(1));
        copies = state.take(&inventory).processes.len(); // as the cycle does
    }
    let share = (thread_nanos()? - began) / 1e9 / SECONDS as f64;
    let grown = resident_kib()? - before;
    if copies != PROCESSES {
        return Err(format!("{copies} of {PROCESSES} processes report").into());
    }
    let samples_per_second = PROCESSES as f64 / reporters.interval;
    drop(reporters);
    let (seconds, cost) = beside_memledger()?;
    let [counters, step, operation, empty] = cost.calls;
    let (median, longest) = (seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
    let is_met = |is_met| if is_met { "met" } else { "NOT met" };
    Ok(format!(
        "{}\n\n\
         {PROCESSES} processes in one container, each with a connection and samples of eleven values as often as memledger asks \
         for them by default, for {SECONDS} s.\n\n\
         | samples per second | CPU % of one core | us of CPU per sample | resident memory more, KiB |\n\
         | --- | --- | --- | --- |\n\
         | {samples_per_second:.0} | {:.2} | {:.1} | {grown:.0} |\n\n\
         Goals: less than 1 % of a core ({}), less than 1 MiB ({}). What a live GPU's allocator costs the program that reports was \
         not measured: there was none.\n\n\
         What the client costs the program, in processor time, with a stand-in for torch:\n\n\
         | | us | calls of an empty function |\n\
         | --- | ---: | ---: |\n\
         | reading the counters of torch's allocator, once a second | {:.1} | {:.0} |\n\
         | `memledger_client.step()` | {:.2} | {:.0} |\n\
         | `with memledger_client.track(...)` | {:.1} | {:.0} |\n\n\
         `import memledger_client` takes {:.0} ms without bytecode, as from a read-only mount, in a program that has imported what torch \
         imports. Best of several. Goals: 20 us ({}), 5 us ({}), 100 us ({}), 40 ms ({}).\n\n\
         From the start of an unmodified program in a new container until `/metrics` shows its partition, over {STARTS} starts, with \
         the default settings and stand-ins for torch and the driver: {median:.1} s in the median, {longest:.1} s at most. Goal: 3 s \
         ({}).\n",
        document::HEADINGS[8],
        share * 100.0,
        share * 1e6 / samples_per_second,
        is_met(share < 0.01),
        is_met(grown < 1024.0),
        counters / 1e3,
        counters / empty,
        step / 1e3,
        step / empty,
        operation / 1e3,
        operation / empty,
        cost.import,
        is_met(counters < 20e3),
        is_met(step < 5e3),
        is_met(operation < 100e3),
        is_met(cost.import < 40.0),
        is_met(longest < 3.0),
    ))
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    Ok(document::write(&part()?)?)
}
