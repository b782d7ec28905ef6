//! Measures how reading a process's files affects that process, and others when the kernel OOM-kills it.
//!
//! **What a process waits for a walk of its memory.** A process with some GiB of small pages maps, touches and unmaps memory all the
//! time, and measures the longest of these, while nothing reads, while memledger reads it, and while `smaps_rollup` is read.
//!
//! **Kills.** A cgroup at its limit with two processes: the victim, and one that allocates and frees memory all the time. While a reader
//! has a reference to the memory of the victim, its memory is not freed, and the kernel kills the second process too.
//! `make bench` counts how often, with a reader that reads one file of the victim in a loop, which is the worst case, and
//! writes its part of docs/performance.md. Needs root.

mod document;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const RUNS: usize = 20;
const LIMIT_MIB: usize = 600;
/// The memory that the second process allocates and frees.
const CHURN_MIB: usize = 250;
/// The readers, with the files that each reads in a loop.
const READERS: [(&str, &[&str]); 5] = [
    ("nothing is read", &[]),
    ("`statm`, `stat`, `comm`, `cgroup`", &["statm", "stat", "comm", "cgroup"]),
    ("`status`, `maps`", &["status", "maps"]),
    ("`cmdline`", &["cmdline"]),
    ("`smaps_rollup`", &["smaps_rollup"]),
];

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The memory cgroup of the bench; drop removes it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Outcome<Self> {
        let (v1, v2) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let (root, limit) = if v1.is_dir() { (v1, "memory.limit_in_bytes") } else { (v2, "memory.max") };
        let this = Self(root.join(format!("memledger-bench-{}", std::process::id())));
        std::fs::create_dir(&this.0)?;
        std::fs::write(this.0.join(limit), (LIMIT_MIB << 20).to_string())?;
        Ok(this)
    }

    fn pids(&self) -> Outcome<Vec<u32>> {
        let text = std::fs::read_to_string(self.0.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Returns the program of the tests that allocates memory.
fn hog() -> Outcome<PathBuf> {
    let cache = Command::new("tests/setup/setup.sh").arg("cache").output()?.stdout;
    let hog = Path::new(String::from_utf8(cache)?.trim()).join("hog/release/hog");
    if hog.is_file() { Ok(hog) } else { Err("run tests/setup/setup.sh hog first".into()) }
}

/// Starts both in the cgroup. Returns the second process, which is the parent of the victim, and the victim's pid.
fn start(hog: &Path, cgroup: &Cgroup) -> Outcome<(Child, u32)> {
    let script = "echo $$ > \"$1\"; exec \"$2\" spawn=1:score=1000,eat churn=\"$3\"";
    let mut parent = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(cgroup.0.join("cgroup.procs"))
        .arg(hog)
        .arg(CHURN_MIB.to_string())
        .stdout(Stdio::null())
        .spawn()?;
    for _ in 0..500 {
        if let Some(pid) = cgroup.pids()?.into_iter().find(|pid| *pid != parent.id()) {
            return Ok((parent, pid));
        }
        std::thread::sleep(Duration::from_millis(1)); // a bench measures time
    }
    let _ = parent.kill();
    Err("the victim did not start".into())
}

/// Returns true if the kernel killed both.
fn both_are_killed(hog: &Path, cgroup: &Cgroup, files: &[&str]) -> Outcome<bool> {
    let (mut parent, pid) = start(hog, cgroup)?;
    let status = std::thread::scope(|scope| {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        if !files.is_empty() {
            scope.spawn(move || while files.iter().all(|file| std::fs::read(folder.join(file)).is_ok()) {});
        }
        parent.wait()
    })?;
    Ok(!status.success())
}

fn kill_part() -> Outcome<String> {
    let (hog, cgroup) = (hog()?, Cgroup::new()?);
    let mut rows = String::new();
    for (name, files) in READERS {
        eprintln!("{name} ...");
        let mut both = 0;
        for _ in 0..RUNS {
            both += usize::from(both_are_killed(&hog, &cgroup, files)?);
        }
        rows.push_str(&format!("| {name} | {both} of {RUNS} |\n"));
    }
    Ok(format!(
        "### Who reads while the kernel kills\n\nA cgroup with a limit of {LIMIT_MIB} MiB, a victim, and another process that allocates and frees \
         {CHURN_MIB} MiB all the time. A reader reads files of the victim in a loop until it \
         has ended: the worst case. See [decision 0017](decisions/0017-nothing-holds-on-to-memory-that-runs-out.md) for \
         what memledger does about it.\n\n| read of the victim | the kernel killed both |\n| --- | --- |\n{rows}",
    ))
}

/// Resident memory of the process that is read, in GiB.
const RESIDENT_GIB: [usize; 4] = [1, 2, 4, 6];
/// For how long each wait is measured.
const WAIT_RUN: Duration = Duration::from_secs(12);
/// The process that is read: for each line of its input it prints the longest wait since the line before, in microseconds.
const TARGET: &str = "
import mmap, sys, threading, time
size = int(sys.argv[1]) << 30
resident = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
resident.madvise(mmap.MADV_NOHUGEPAGE)
resident[::4096] = bytes(size // 4096)
longest = 0
def churn():
    global longest
    while True:
        began = time.monotonic()
        area = mmap.mmap(-1, 65536, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area[::4096] = bytes(16)
        area.close()
        longest = max(longest, time.monotonic() - began)
threading.Thread(target=churn, daemon=True).start()
for line in sys.stdin:
    print(int(longest * 1e6), flush=True)
    longest = 0
";

/// A process that is read, in the cgroup of a container.
struct WaitTarget {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    cgroup: PathBuf,
    name: String,
}

impl WaitTarget {
    fn start(gib: usize) -> Outcome<Self> {
        let root = Path::new("/sys/fs/cgroup/memory");
        let root = if root.is_dir() { root } else { Path::new("/sys/fs/cgroup") };
        let id = format!("{:012x}{:052x}", std::process::id(), 0xbe);
        let cgroup = root.join("docker").join(&id);
        std::fs::create_dir_all(&cgroup)?;
        let script = "echo $$ > \"$1\"; exec python3 -c \"$2\" \"$3\"";
        let mut child = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(cgroup.join("cgroup.procs"))
            .args([TARGET, &gib.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { return Err("no pipes".into()) };
        let mut target =
            Self { child, input, output: BufReader::new(output), cgroup, name: id[..12].to_owned() };
        target.longest_wait()?; // its memory is there
        Ok(target)
    }

    /// Returns the longest wait since the last call.
    fn longest_wait(&mut self) -> Outcome<Duration> {
        writeln!(self.input, "now")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(Duration::from_micros(line.trim().parse()?))
    }

    fn measure(&mut self) -> Outcome<Duration> {
        self.longest_wait()?;
        std::thread::sleep(WAIT_RUN); // a bench measures time
        self.longest_wait()
    }
}

impl Drop for WaitTarget {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir(&self.cgroup);
    }
}

#[allow(clippy::disallowed_methods)] // a bench measures time
fn wait_part() -> Outcome<String> {
    let millis = |wait: Duration| format!("{:.1}", wait.as_secs_f64() * 1e3);
    let mut rows = String::new();
    for gib in RESIDENT_GIB {
        eprintln!("{gib} GiB ...");
        let mut target = WaitTarget::start(gib)?;
        let idle = target.measure()?;
        let mut memledger = Command::new(env!("CARGO_BIN_EXE_memledger"))
            .args([
                "serve",
                "--web.listen-address=127.0.0.1:0",
                "--pss.interval=1s",
                "--local.socket=",
                "--reporter.directory=",
                "--state.path=",
            ])
            .args(["--docker.socket=", "--podman.socket=", &format!("--container.include=^{}$", target.name)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let beside = target.measure();
        let has_ended = memledger.try_wait()?.is_some();
        memledger.kill()?;
        memledger.wait()?;
        if has_ended {
            return Err("memledger has ended".into());
        }
        target.longest_wait()?;
        let began = Instant::now();
        std::fs::read(format!("/proc/{}/smaps_rollup", target.child.id()))?;
        let walk = began.elapsed();
        let walked = target.longest_wait()?;
        rows.push_str(&format!(
            "| {gib} | {} | {} | {} | {} |\n",
            millis(idle),
            millis(beside?),
            millis(walked),
            millis(walk)
        ));
    }
    Ok(format!(
        "### What a process waits for a walk of its memory\n\nA process with this resident memory in pages of 4 KiB maps, touches and unmaps 64 KiB all the time. Its longest \
         wait within {} s while nothing reads; while memledger runs with `--pss.interval=1s`; and while `smaps_rollup` is read once, with the duration of \
         that read. memledger assumes 20 ms for each GiB until it has read a process of that size faster. It \
         reads at most 50 ms in an interval and 500 ms in ten minutes, and not the largest process of a container \
         if that would wait longer than 50 ms: that has what the others leave. On a busy machine a wait also has the time for which \
         either waited for a CPU.\n\n| resident, GiB | idle, ms | memledger, ms | a read, ms | it takes, ms |\n| --- | --- | --- | --- | --- |\n{rows}",
        WAIT_RUN.as_secs(),
    ))
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    Ok(document::write(&format!("{}\n\n{}\n{}", document::HEADINGS[3], wait_part()?, kill_part()?))?)
}
