//! What GPUs cost: 8 of the fake library with 100 real processes each.
//!
//! Counts the calls of a reading and of a quick look, and measures the CPU time of the driver's thread in the real binary
//! with and without quick looks. The fake library answers in microseconds and looks at its state file in every call; a
//! real driver takes its own time in each call, so the number of calls is what carries over. Writes its part of
//! docs/performance.md.

mod document;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fake_nvml::{FakeNvml, Process, State};

const GPUS: u64 = 8;
const PROCESSES: usize = 100;
const ADDRESS: &str = "127.0.0.1:10897";
const SECONDS: u64 = 10;

/// Real processes, which are looked up in /proc as any other.
struct Processes(Child, Vec<u32>);

impl Processes {
    fn start(count: usize) -> std::io::Result<Self> {
        let script = format!("for i in $(seq {count}); do sleep 100000 & echo $!; done; echo ready; wait");
        let mut shell = Command::new("/bin/sh").args(["-c", &script]).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(shell.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let pids = lines.take_while(|line| line != "ready").filter_map(|line| line.parse().ok()).collect();
        Ok(Self(shell, pids))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for pid in &self.1 {
            let _ = Command::new("kill").arg(pid.to_string()).status();
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn state(processes: &Processes) -> State {
    let mut state = State::with_gpus(GPUS as u32);
    for (gpu, pids) in state.gpus.iter_mut().zip(processes.1.chunks(PROCESSES)) {
        gpu.memory.used = 60 << 30;
        gpu.processes = pids.iter().map(|pid| Process::compute(*pid, Some(512 << 20))).collect();
    }
    state
}

/// The real binary. Ended when dropped.
struct Memledger(Child);

impl Memledger {
    fn start(fake: &FakeNvml, flags: &[&str]) -> std::io::Result<Self> {
        let library = format!("--gpu.nvml-library={}", fake.path().display());
        let address = format!("--web.listen-address={ADDRESS}");
        let quiet =
            ["serve", "--docker.socket=", "--podman.socket=", "--state.path=", "--container.include=^none$"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_memledger"));
        command.args(quiet).arg(library).arg(address).args(flags);
        Ok(Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?))
    }

    /// CPU seconds of the thread that talks to the driver.
    fn driver_seconds(&self) -> f64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("it runs");
        let of_driver = tasks
            .flatten()
            .map(|task| task.path())
            .find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == "nvml"));
        let stat = of_driver.map(|task| std::fs::read_to_string(task.join("schedstat")).unwrap_or_default());
        let nanoseconds = stat.and_then(|stat| stat.split(' ').next()?.parse::<f64>().ok());
        nanoseconds.unwrap_or(f64::NAN) / 1e9
    }

    fn metric(name: &str) -> Option<f64> {
        let mut stream = std::net::TcpStream::connect(ADDRESS).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }
}

impl Drop for Memledger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU share of the driver's thread in percent of one core, and milliseconds of a reading.
fn share(fake: &FakeNvml, flags: &[&str]) -> std::io::Result<(f64, f64)> {
    let memledger = Memledger::start(fake, flags)?;
    std::thread::sleep(Duration::from_secs(3));
    let before = memledger.driver_seconds();
    let mut took = Vec::new();
    for _ in 0..SECONDS {
        std::thread::sleep(Duration::from_secs(1));
        took.extend(Memledger::metric("memledger_collector_duration_seconds{collector=\"gpu\"}"));
    }
    let percent = (memledger.driver_seconds() - before) / SECONDS as f64 * 100.0;
    took.sort_by(f64::total_cmp);
    Ok((percent, took.get(took.len() / 2).copied().unwrap_or(f64::NAN) * 1e3))
}

fn calls(fake: &FakeNvml, flags: &[&str]) -> std::io::Result<BTreeMap<String, u64>> {
    let memledger = Memledger::start(fake, flags)?;
    std::thread::sleep(Duration::from_secs(8));
    drop(memledger);
    fake.calls()
}

fn part(counts: [f64; 2], shares: [(f64, f64); 2], resting: f64) -> String {
    let ([reading, look], [(only, took), (both, _)]) = (counts, shares);
    format!(
        "{}\n\n{GPUS} GPUs of the fake library with {PROCESSES} real processes each, on the \
         same machine. The fake library answers in microseconds but looks at its state file in every call, which is in these \
         times; a real driver takes longer in each call. What carries over is the number of calls.\n\n\
         | | calls per GPU | CPU of the driver's thread, % of one core |\n| --- | --- | --- |\n\
         | a reading every second, later ones | {reading:.1} | {only:.2} |\n\
         | the same with quick looks every 200 ms | {look:.1} more per look | {both:.2} |\n\
         | quick looks alone | | {:.2} |\n| the same with no process on any GPU | | {resting:.2} |\n\n\
         A reading takes {took:.1} ms. The thread is not the cycle's; it has no share in the budgets above.\n",
        document::HEADINGS[2],
        both - only
    )
}

fn main() -> std::io::Result<()> {
    if document::is_only_asked() {
        return Ok(());
    }
    let processes = Processes::start(GPUS as usize * PROCESSES)?;
    let dir = tempfile::tempdir()?;
    let mut state = state(&processes);
    let fake = FakeNvml::install(dir.path(), &state)?;
    eprintln!("readings alone ...");
    let alone = share(&fake, &["--gpu.sample-interval=0s"])?;
    eprintln!("with quick looks ...");
    let both = share(&fake, &[])?;
    state.count_calls = true;
    fake.set(&state)?;
    let total = |calls: &BTreeMap<String, u64>| {
        let of_devices = calls.iter().filter(|(name, _)| name.starts_with("nvmlDeviceGet"));
        of_devices.map(|(_, count)| *count as f64).sum::<f64>() / GPUS as f64
    };
    let memory = |calls: &BTreeMap<String, u64>| calls["nvmlDeviceGetMemoryInfo_v2"] as f64 / GPUS as f64;
    eprintln!("counting calls ...");
    let first = calls(&fake, &["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=0s"])?;
    let readings = calls(&fake, &["--gpu.sample-interval=0s"])?;
    let quick = calls(&fake, &["--gpu.interval=1h", "--gpu.deadline=1h"])?;
    let later = (total(&readings) - total(&first)) / (memory(&readings) - memory(&first));
    let look = (total(&quick) - total(&first)) / (memory(&quick) - memory(&first));
    state.count_calls = false;
    for gpu in &mut state.gpus {
        gpu.processes.clear();
    }
    fake.set(&state)?;
    eprintln!("idle ...");
    let (resting, _) = share(&fake, &[])?;
    document::write(&part([later, look], [alone, both], resting))
}
