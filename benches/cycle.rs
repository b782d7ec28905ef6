//! Measures the cost of memledger against the unavoidable system calls.
//!
//! `make bench` creates 10, 100 and 1,000 real cgroups that look like containers, with real processes in each, and
//! measures in one run: a cycle against the *floor* (the same kernel files, read by a minimal loop that
//! parses nothing), allocations per cycle, rendering, and the memory of the real binary, with that of the kernel for it. It writes the first
//! part of docs/performance.md. Needs root, for the cgroups. Each cycle simulates one second, so that the work of every 5,
//! 10 or 64 seconds is part of the mean.

mod cpu_time;
mod document;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memledger::clock::Timestamp;
use memledger::config::{self, Config};
use memledger::discover::cgroup_tree::CgroupTree;
use memledger::export::prometheus;
use memledger::sampler::Sampler;
use memledger::sampler::stalled::IndependentSources;

/// An allocator that counts allocations.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Containers, and processes per container.
const SIZES: [(usize, usize); 3] = [(10, 10), (100, 10), (1000, 3)];
/// Goals of the resident memory, and of that with the kernel's, in MiB, by number of containers.
const MAX_MIB: [(usize, f64, f64); 2] = [(100, 24.0, 40.0), (1000, 60.0, 110.0)];
/// Goal of the mean of a cycle as a multiple of its floor.
const MAX_RATIO: f64 = 1.35;
/// Slow files are read in one of this many cycles.
const SLOW_EVERY: usize = 5;
const CYCLES: usize = 120;
/// Cycles before the measurement, so that files are open and processes are no longer young.
const WARM_UP: usize = 150;
/// Seconds over which the real binary is measured: twice the interval of `--pss.interval`, in which each process is read once.
const SECONDS: u32 = 30;
/// The prefix of all ids of the bench.
const ID_PREFIX: &str = "be9cbe9c";

fn is_v2() -> bool {
    std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").is_ok_and(|text| text.contains("memory"))
}

fn parent() -> PathBuf {
    Path::new(if is_v2() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" }).join("memledger-bench")
}

/// Returns the folders of a container's cgroups: on v1 the CPU's beside the memory's, one if both controllers share a
/// hierarchy.
fn cgroups_of(path: &Path) -> Vec<PathBuf> {
    let mut all = vec![path.to_path_buf()];
    if !is_v2() {
        let below = path.strip_prefix("/sys/fs/cgroup/memory").unwrap_or(path);
        for controller in ["cpuacct", "cpu"] {
            let hierarchy = std::fs::canonicalize(Path::new("/sys/fs/cgroup").join(controller));
            all.extend(hierarchy.ok().map(|hierarchy| hierarchy.join(below)));
        }
        all.dedup();
    }
    all
}

/// Real cgroups with real processes; drop removes them.
struct Containers {
    paths: Vec<PathBuf>,
    shells: Vec<Child>,
}

impl Containers {
    fn make(count: usize, processes: usize) -> std::io::Result<Self> {
        let parent = parent();
        std::fs::create_dir_all(&parent)?;
        if is_v2() {
            std::fs::write(parent.join("cgroup.subtree_control"), "+memory")?;
        }
        let mut this = Self { paths: vec![], shells: vec![] };
        for number in 0..count {
            let path = parent.join(format!("{ID_PREFIX}{number:056x}"));
            let mut joins = String::new();
            for cgroup in cgroups_of(&path) {
                std::fs::create_dir_all(&cgroup)?;
                joins += &format!("echo $$ > '{}/cgroup.procs'; ", cgroup.display());
            }
            let others = processes - 1;
            let script = format!("{joins}for i in $(seq {others}); do sleep 100000 & done; echo ready; wait");
            let mut shell = Command::new("/bin/sh").args(["-c", &script]).stdout(Stdio::piped()).spawn()?;
            let mut line = String::new();
            BufReader::new(shell.stdout.take().expect("piped")).read_line(&mut line)?;
            this.paths.push(path);
            this.shells.push(shell);
        }
        Ok(this)
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        for path in &self.paths {
            for pid in std::fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default().lines() {
                let _ = Command::new("kill").args(["-KILL", pid]).status();
            }
        }
        for shell in &mut self.shells {
            let _ = shell.kill();
            let _ = shell.wait();
        }
        for cgroup in self.paths.iter().flat_map(|path| cgroups_of(path)) {
            for _ in 0..1000 {
                if std::fs::remove_dir(&cgroup).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        for cgroup in cgroups_of(&parent()) {
            let _ = std::fs::remove_dir(cgroup);
        }
    }
}

/// The files that every cycle needs, open. On v1 an open `cgroup.procs` returns an old list of pids, so that it must be
/// opened again for each read. Those that every fifth cycle needs are closed in between.
struct Floor {
    files: Vec<File>,
    directories: Vec<File>,
    slow: Vec<PathBuf>,
    reads: usize,
    buffer: Vec<u8>,
}

impl Floor {
    fn open(paths: &[PathBuf]) -> std::io::Result<Self> {
        let names: &[&str] = if is_v2() {
            &["memory.current", "memory.stat", "memory.peak", "cgroup.procs"]
        } else {
            &[
                "memory.usage_in_bytes",
                "memory.stat",
                "memory.max_usage_in_bytes",
                "memory.kmem.usage_in_bytes",
            ]
        };
        let slow_names: &[&str] = if is_v2() {
            &["memory.events", "memory.swap.current", "memory.pressure", "cpu.stat"]
        } else {
            &["cpuacct.stat", "cpu.stat"]
        };
        let mut slow = vec![];
        let mut files = vec![File::open("/proc/meminfo")?];
        let mut directories = vec![];
        for path in paths {
            if !is_v2() {
                directories.push(File::open(path)?);
            }
            let of_memory = names.iter().map(|name| path.join(name));
            let of_all = cgroups_of(path);
            let files_of_all =
                of_all.iter().flat_map(|cgroup| slow_names.iter().map(|name| cgroup.join(name)));
            let mut existing: Vec<_> = files_of_all.filter(|file| file.exists()).collect();
            existing.dedup_by(|one, other| one.file_name() == other.file_name());
            slow.extend(existing);
            for file in of_memory {
                match File::open(file) {
                    Ok(file) => files.push(file),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {} // this kernel has no such file
                    Err(error) => return Err(error),
                }
            }
            for pid in std::fs::read_to_string(path.join("cgroup.procs"))?.lines() {
                files.push(File::open(format!("/proc/{pid}/statm"))?);
            }
        }
        Ok(Self { files, directories, slow, reads: 0, buffer: vec![0; 16 * 1024] })
    }

    fn read(&mut self) {
        for file in &self.files {
            std::hint::black_box(file.read_at(&mut self.buffer, 0).unwrap_or(0));
        }
        for directory in &self.directories {
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            if let Ok(file) = rustix::fs::openat(directory, "cgroup.procs", flags, rustix::fs::Mode::empty())
            {
                std::hint::black_box(rustix::io::read(&file, &mut self.buffer[..]).unwrap_or(0));
            }
        }
        self.reads += 1;
        for path in self.slow.iter().skip(self.reads % SLOW_EVERY).step_by(SLOW_EVERY) {
            if let Ok(file) = File::open(path) {
                std::hint::black_box(rustix::io::read(&file, &mut self.buffer[..]).unwrap_or(0));
            }
        }
    }
}

fn config() -> Config {
    let include = format!("--container.include=^{ID_PREFIX}");
    let flags =
        ["--docker.socket=", "--podman.socket=", "--no-collector.gpu", "--no-collector.pss", &include];
    let command = config::arguments(clap::Command::new("bench").no_binary_name(true));
    Config::load(&command.get_matches_from(flags)).expect("settings")
}

#[allow(clippy::disallowed_methods)] // a bench measures time
fn timed(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64() * 1e3
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

struct Row {
    containers: usize,
    processes: usize,
    floor_ms: f64,
    cycle_ms: f64,
    cycle_mean_ms: f64,
    allocations: u64,
    series: usize,
    render_ms: f64,
    bytes: usize,
    resident_mib: f64,
    total_mib: f64,
    cpu_percent: f64,
    /// Milliseconds of CPU per second, by thread.
    threads: BTreeMap<String, f64>,
}

/// The floor in a process of its own: with the files of the cycle, all would be more than one process may have open.
struct FloorProcess {
    child: Child,
    requests: ChildStdin,
    times: BufReader<ChildStdout>,
}

impl FloorProcess {
    const VERB: &str = "floor";

    fn start(containers: &Containers) -> std::io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(Self::VERB).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut requests = child.stdin.take().expect("piped");
        let times = BufReader::new(child.stdout.take().expect("piped"));
        for path in &containers.paths {
            writeln!(requests, "{}", path.display())?;
        }
        writeln!(requests)?;
        Ok(Self { child, requests, times })
    }

    /// Body of the process: a line for each container and an empty one, then a time in milliseconds for each further line.
    fn serve() -> std::io::Result<()> {
        let mut lines = std::io::stdin().lines().map_while(Result::ok);
        let paths: Vec<_> = lines.by_ref().take_while(|line| !line.is_empty()).map(PathBuf::from).collect();
        let mut floor = Floor::open(&paths)?;
        lines.for_each(|_| println!("{}", timed(|| floor.read())));
        Ok(())
    }

    fn read_ms(&mut self) -> std::io::Result<f64> {
        writeln!(self.requests)?;
        let mut line = String::new();
        self.times.read_line(&mut line)?;
        line.trim().parse().map_err(std::io::Error::other)
    }
}

impl Drop for FloorProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn measure(count: usize, processes: usize) -> std::io::Result<Row> {
    let containers = Containers::make(count, processes)?;
    let mut floor = FloorProcess::start(&containers)?;
    let config = config();
    let sources = IndependentSources::new(&config, Default::default(), Default::default());
    let mut sampler =
        Sampler::new(&config, vec![], CgroupTree::detect(&config.host_paths), Default::default(), &sources);
    let start = Timestamp::now();
    let at = |cycle: usize| start.plus(Duration::from_secs(cycle as u64));
    for cycle in 0..WARM_UP {
        sampler.cycle(at(cycle));
    }
    let (mut floors, mut cycles, mut allocations) = (vec![], vec![], vec![]);
    let mut last = None;
    floor.read_ms()?;
    for cycle in WARM_UP..WARM_UP + CYCLES {
        floors.push(floor.read_ms()?);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        cycles.push(timed(|| last = Some(sampler.cycle(at(cycle)))));
        allocations.push((ALLOCATIONS.load(Ordering::Relaxed) - before) as f64);
    }
    let snapshot = last.expect("a cycle ran");
    let series = snapshot.series.rows().len();
    let mut bytes = 0;
    let renders: Vec<f64> =
        (0..20).map(|_| timed(|| bytes = prometheus::render(&snapshot).expect("text").len())).collect();
    drop((floor, sampler, snapshot));
    let (resident_mib, total_mib, threads) = memory_and_cpu()?;
    Ok(Row {
        containers: count,
        processes,
        floor_ms: mean(&floors),
        cycle_ms: median(&cycles),
        cycle_mean_ms: mean(&cycles),
        allocations: median(&allocations) as u64,
        series,
        render_ms: median(&renders),
        bytes,
        resident_mib,
        total_mib,
        cpu_percent: threads.values().sum::<f64>() / 10.0,
        threads,
    })
}

/// A cgroup for the real binary, which is charged for the kernel's memory for it. Removed when dropped.
struct OwnCgroup(PathBuf);

impl OwnCgroup {
    fn make() -> std::io::Result<Self> {
        let root = Path::new(if is_v2() { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" });
        let this = Self(root.join(format!("memledger-bench-own-{}", std::process::id())));
        std::fs::create_dir(&this.0)?;
        Ok(this)
    }

    /// Returns the MiB that the cgroup is charged for (v2), or those of the kernel alone (v1).
    fn mib(&self) -> std::io::Result<f64> {
        let name = if is_v2() { "memory.current" } else { "memory.kmem.usage_in_bytes" };
        let text = std::fs::read_to_string(self.0.join(name))?;
        Ok(text.trim().parse::<f64>().map_err(std::io::Error::other)? / f64::from(1 << 20))
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        for _ in 0..1000 {
            if std::fs::remove_dir(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Measures the memory and the CPU time by thread of the real binary, all collectors on, scraped once a second for [`SECONDS`]. The memory
/// in MiB: resident at its peak, and with that of the kernel.
fn memory_and_cpu() -> std::io::Result<(f64, f64, BTreeMap<String, f64>)> {
    let include = format!("--container.include=^{ID_PREFIX}");
    let cgroup = OwnCgroup::make()?;
    let mut child = Command::new("sh")
        .args(["-c", "echo $$ > \"$1/cgroup.procs\"; shift; exec \"$@\"", "sh"])
        .arg(&cgroup.0)
        .arg(env!("CARGO_BIN_EXE_memledger"))
        .args([
            "serve",
            "--web.listen-address=127.0.0.1:10899",
            "--docker.socket=",
            "--podman.socket=",
            "--state.path=",
            "--reporter.directory=",
            &include,
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    std::thread::sleep(Duration::from_secs(5));
    let before = cpu_time::by_thread_ms(child.id());
    for _ in 0..SECONDS {
        if let Ok(mut stream) = std::net::TcpStream::connect("127.0.0.1:10899") {
            let _ = stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n");
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    let mut cpu = cpu_time::by_thread_ms(child.id());
    for (thread, time) in &mut cpu {
        *time = (*time - before.get(thread).unwrap_or(&0.0)) / f64::from(SECONDS);
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0");
    let kib: f64 = line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0);
    let charged = cgroup.mib()?;
    child.kill()?;
    child.wait()?;
    let resident = kib / 1024.0;
    Ok((resident, if is_v2() { charged } else { resident + charged }, cpu))
}

/// Measures `docker stats --no-stream` for ten containers in milliseconds; `None` without an engine and the tests' image.
fn docker_stats() -> Option<f64> {
    let docker = |arguments: &[&str]| {
        let output = Command::new("docker").args(arguments).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let names: Vec<String> = (0..10).map(|n| format!("memledger-bench-{n}")).collect();
    for name in &names {
        docker(&[
            "run",
            "-d",
            "--name",
            name,
            "--network",
            "none",
            "memledger-test:1",
            "/busybox/sleep",
            "1000",
        ])?;
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let times: Vec<f64> =
        (0..3).map(|_| timed(|| drop(docker(&[&["stats", "--no-stream"], &names[..]].concat())))).collect();
    docker(&[&["rm", "-f"], &names[..]].concat());
    Some(median(&times))
}

fn part(rows: &[Row], docker: Option<f64>) -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let version = if is_v2() { 2 } else { 1 };
    let mut text = format!(
        "{}\n\nWritten by `make bench` (as root); do not edit. Measured on {cores} cores, kernel {}, cgroup \
         v{version}. Absolute times are this machine's; the ratio is what to \
         compare.\n\n\
         *Floor*: the same kernel files, read by a minimal loop that parses nothing, in a process of its own; kept open, but for v1's lists of \
         pids, which an open file shows as they were, and those of every fifth cycle. *Cycle*: the whole \
         cycle without the GPU driver and the proportional set sizes, which have threads of their own; its mean over {CYCLES} \
         simulated seconds includes what happens only every 5, 10 or 64 seconds. *Resident*: the peak of the real \
         binary, all collectors on, scraped once a second for {SECONDS} s. *In all*: with the kernel's memory for it, of open files above all: {} *CPU*: its \
         share of one core. On cgroup v2 each read of `memory.stat` and `cpu.stat` may make the kernel sum counters of all CPUs, under a lock of \
         the whole host: with many CPUs a cycle costs more than here, and nobody has measured how much.\n\n\
         | containers | processes in each | floor ms | cycle ms (median) | cycle ms (mean) | mean / floor | allocations per cycle | series | render ms | per 1,000 series | text KiB | resident MiB | in all MiB | CPU % |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        document::HEADINGS[0],
        kernel.trim(),
        if is_v2() {
            "memory.current of its cgroup."
        } else {
            "the resident memory and memory.kmem.usage_in_bytes of its cgroup."
        }
    );
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {} | {} | {:.2} | {:.2} | {} | {:.1} | {:.1} | {:.1} |",
            row.containers,
            row.processes,
            row.floor_ms,
            row.cycle_ms,
            row.cycle_mean_ms,
            row.cycle_mean_ms / row.floor_ms,
            row.allocations,
            row.series,
            row.render_ms,
            row.render_ms / row.series as f64 * 1e3,
            row.bytes / 1024,
            row.resident_mib,
            row.total_mib,
            row.cpu_percent,
        );
    }
    let _ = writeln!(
        text,
        "\nCPU by thread, in milliseconds per second:\n\n| containers | threads |\n| --- | --- |"
    );
    for row in rows {
        let mut threads: Vec<_> = row.threads.iter().filter(|(_, time)| **time >= 0.05).collect();
        threads.sort_by(|one, other| other.1.total_cmp(one.1));
        let threads: Vec<_> = threads.iter().map(|(name, time)| format!("{name} {time:.1}")).collect();
        let _ = writeln!(text, "| {} | {} |", row.containers, threads.join(", "));
    }
    if let Some(ms) = docker {
        let _ =
            write!(text, "\n`docker stats --no-stream` for 10 containers on the same machine: {ms:.0} ms.\n");
    }
    let verdict = |met: bool| if met { "met" } else { "**missed**" };
    text.push('\n');
    for (containers, max_resident_mib, max_total_mib) in MAX_MIB {
        let Some(row) = rows.iter().find(|row| row.containers == containers) else { continue };
        let ratio = row.cycle_mean_ms / row.floor_ms;
        let render = row.render_ms / row.series as f64 * 3e3;
        let _ = writeln!(
            text,
            "Goals, with {containers} containers: a cycle at most {MAX_RATIO} times the floor ({ratio:.2}, {}); at most \
             {max_resident_mib:.0} MiB resident ({:.1}, {}), {max_total_mib:.0} MiB in all ({:.1}, {}); 3,000 series rendered in at most 5 ms, once per snapshot however \
             many scrape ({render:.1}, {}).\n",
            verdict(ratio <= MAX_RATIO),
            row.resident_mib,
            verdict(row.resident_mib <= max_resident_mib),
            row.total_mib,
            verdict(row.total_mib <= max_total_mib),
            verdict(render <= 5.0)
        );
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    memledger::host::raise_open_file_limit();
    if std::env::args().nth(1).as_deref() == Some(FloorProcess::VERB) {
        return FloorProcess::serve();
    }
    let mut rows = Vec::new();
    for (count, processes) in SIZES {
        eprintln!("{count} containers ...");
        rows.push(measure(count, processes)?);
    }
    document::write(&part(&rows, docker_stats()))
}
