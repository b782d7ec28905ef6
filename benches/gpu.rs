//! What GPUs cost: 8 of the fake library with 100 real processes each, and one with 6 whose calls take the driver as long as a real one.
//!
//! Counts the calls of a reading and of a memory sample, and measures the CPU time of the NVML process and of the thread that
//! supervises it in the real binary, with and without memory samples; and what the messages between the two cost. The fake library returns in microseconds and checks its state file in every call; a
//! real driver takes its own time in each call, so the number of calls is what carries over. Writes its part of
//! docs/performance.md.

mod document;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fake_nvml::{FakeNvml, Process, State};
use memledger::gpu::protocol::{Channel, DriverReading, DriverSample, Request, Response, SampledDevice};
use memledger::gpu::{GpuDevice, GpuIdentity, GpuProcess};

const GPUS: u64 = 8;
const PROCESSES: usize = 100;
const ADDRESS: &str = "127.0.0.1:10897";
const SECONDS: u64 = 10;
/// CPU time in microseconds of each call to the driver on an H200 (580.159.04), measured on 2026-11-26; `tests/gpu/check.sh` measures it
/// again on any GPU. Calls that are not here took less than 12 us.
const REAL_US: [(&str, u64); 13] = [
    ("nvmlDeviceGetTotalEnergyConsumption", 3_648),
    ("nvmlDeviceGetProcessUtilization", 1_455),
    ("nvmlDeviceGetUtilizationRates", 122),
    ("nvmlDeviceGetPcieReplayCounter", 105),
    ("nvmlDeviceGetTotalEccErrors", 79),
    ("nvmlDeviceGetPowerUsage", 77),
    ("nvmlDeviceGetComputeRunningProcesses_v3", 43),
    ("nvmlDeviceGetTemperature", 28),
    ("nvmlDeviceGetClockInfo", 15),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", 13),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", 13),
    ("nvmlDeviceGetMemoryInfo_v2", 12),
    ("nvmlDeviceGetCurrentClocksThrottleReasons", 12),
];
/// What `nvidia-smi -l 1` took there, in milliseconds per second.
const NVIDIA_SMI: f64 = 3.0;
/// Processes on the GPU with these calls.
const REAL_PROCESSES: usize = 6;

/// Real processes, which are read in /proc like all others.
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
        let quiet = [
            "serve",
            "--docker.socket=",
            "--podman.socket=",
            "--state.path=",
            "--reporter.directory=",
            "--container.include=^none$",
        ];
        let mut command = Command::new(env!("CARGO_BIN_EXE_memledger"));
        command.args(quiet).arg(library).arg(address).args(flags);
        Ok(Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?))
    }

    /// CPU seconds of the NVML process, of the thread that supervises it, of the cycle, and of memledger's own process.
    fn seconds(&self) -> [f64; 4] {
        let thread = |name: &str| {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("it runs");
            let named = |task: &std::path::PathBuf| {
                std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)
            };
            tasks.flatten().map(|task| task.path()).find(named).map_or(f64::NAN, |task| cpu_seconds(&task))
        };
        let parent = format!("PPid:\t{}\n", self.0.id());
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
        let is_child = |path: &std::path::PathBuf| {
            std::fs::read_to_string(path.join("status")).is_ok_and(|status| status.contains(&parent))
        };
        let child = processes.into_iter().find(is_child).map_or(f64::NAN, |child| cpu_seconds(&child));
        let own = cpu_seconds(std::path::Path::new(&format!("/proc/{}", self.0.id())));
        [child, thread("nvml"), thread("cycle"), own]
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

/// CPU seconds of a process with all its threads, or of a thread.
fn cpu_seconds(path: &std::path::Path) -> f64 {
    let tasks = std::fs::read_dir(path.join("task")).into_iter().flatten().flatten();
    let mut tasks: Vec<_> = tasks.map(|task| task.path()).collect();
    if tasks.is_empty() {
        tasks.push(path.to_path_buf());
    }
    let seconds = |path: std::path::PathBuf| {
        let stat = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
        stat.split(' ').next().and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e9
    };
    tasks.into_iter().map(seconds).sum()
}

/// CPU seconds per second of the messages: four samples and one reading of these processes, sent and received.
fn message_share(processes: &Processes) -> f64 {
    let chunks = processes.1.chunks(PROCESSES);
    let devices = chunks.clone().enumerate().map(|(number, pids)| {
        let key = format!("GPU-00000000-0000-4000-8000-{number:012}").into();
        SampledDevice {
            key,
            used: Some(60 << 30),
            processes: pids.iter().map(|pid| (*pid, Some(512 << 20))).collect(),
        }
    });
    let sample = Response::Sample(DriverSample { devices: devices.collect(), xids: vec![] });
    let devices = chunks.enumerate().map(|(number, pids)| {
        let uuid = format!("GPU-00000000-0000-4000-8000-{number:012}").into();
        let model = "NVIDIA H100 80GB HBM3".into();
        let mut device = GpuDevice::new(Arc::new(GpuIdentity { uuid, model, ..GpuIdentity::default() }));
        device.processes = Some(pids.iter().map(|pid| GpuProcess::new(*pid, Some(512 << 20))).collect());
        device
    });
    let reading = Response::Reading(DriverReading { devices: devices.collect(), ..DriverReading::default() });
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("sockets");
    let (mut ours, mut theirs) = (Channel::new(ours), Channel::new(theirs));
    let task = std::path::PathBuf::from("/proc/thread-self");
    let before = cpu_seconds(&task);
    const ROUNDS: u32 = 200;
    for _ in 0..ROUNDS {
        for (request, response) in [(Request::Read, &reading), (Request::Sample, &sample)] {
            let times = if matches!(request, Request::Read) { 1 } else { 4 };
            for _ in 0..times {
                ours.send(&request).expect("sent");
                let _: Request = theirs.receive(None, None).expect("received");
                theirs.send(response).expect("sent");
                let _: Response = ours.receive(None, None).expect("received");
            }
        }
    }
    (cpu_seconds(&task) - before) / f64::from(ROUNDS)
}

/// CPU of the NVML process, of its thread, of the cycle and of memledger's own process in percent of one core, and milliseconds of a
/// reading.
fn share(fake: &FakeNvml, flags: &[&str], seconds: u64) -> std::io::Result<([f64; 4], f64)> {
    let memledger = Memledger::start(fake, flags)?;
    std::thread::sleep(Duration::from_secs(3));
    let before = memledger.seconds();
    let mut took = Vec::new();
    for _ in 0..seconds {
        std::thread::sleep(Duration::from_secs(1));
        took.extend(Memledger::metric("memledger_collector_duration_seconds{collector=\"gpu\"}"));
    }
    let after = memledger.seconds();
    let percent = [0, 1, 2, 3].map(|which| (after[which] - before[which]) / seconds as f64 * 100.0);
    took.sort_by(f64::total_cmp);
    Ok((percent, took.get(took.len() / 2).copied().unwrap_or(f64::NAN) * 1e3))
}

fn calls(fake: &FakeNvml, flags: &[&str]) -> std::io::Result<BTreeMap<String, u64>> {
    let memledger = Memledger::start(fake, flags)?;
    std::thread::sleep(Duration::from_secs(8));
    drop(memledger);
    fake.calls()
}

fn part(
    counts: [f64; 2],
    shares: [([f64; 4], f64); 2],
    resting: [f64; 4],
    messages: f64,
    real: [f64; 4],
) -> String {
    let ([reading, look], [(only, took), (both, _)]) = (counts, shares);
    let [driver, .., own] = real.map(|percent| percent * 10.0);
    let verdict = if driver + own <= NVIDIA_SMI { "met" } else { "**missed**" };
    format!(
        "{}\n\n{GPUS} GPUs of the fake library with {PROCESSES} real processes each, on the \
         same machine. The fake library answers in microseconds but looks at its state file in every call, which is in these \
         times; a real driver takes longer in each call. What carries over is the number of calls.\n\n\
         | | calls per GPU | CPU of the NVML process, % of one core | CPU of the thread that supervises it |\n\
         | --- | --- | --- | --- |\n\
         | a reading every second, later ones | {reading:.1} | {:.2} | {:.2} |\n\
         | the same with memory samples every 200 ms | {look:.1} more per sample | {:.2} | {:.2} |\n\
         | the same with no process on any GPU | | {:.2} | {:.2} |\n\n\
         A reading takes {took:.1} ms. Neither is the cycle's; they have no share in the budgets above. The messages of a second \
         (a reading and four samples) cost {:.0} us of CPU on both sides together, {:.1} % of the cycle's.\n\n\
         **With a real driver's times.** One GPU with {REAL_PROCESSES} processes, where each call uses the CPU time that it took on an H200 \
         (benches/gpu.rs has them; the total energy alone 3.6 ms). memledger takes {:.1} ms of CPU per second: {driver:.1} in \
         the NVML process and {own:.1} in its own. Goal: at most what `nvidia-smi -l 1` took there, {NVIDIA_SMI:.1} ms ({verdict}).\n",
        document::HEADINGS[2],
        only[0],
        only[1],
        both[0],
        both[1],
        resting[0],
        resting[1],
        messages * 1e6,
        messages / (both[2] / 100.0) * 100.0,
        driver + own,
    )
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let processes = Processes::start(GPUS as usize * PROCESSES)?;
    let dir = tempfile::tempdir()?;
    let mut state = state(&processes);
    let fake = FakeNvml::install(dir.path(), &state)?;
    eprintln!("readings alone ...");
    let alone = share(&fake, &["--gpu.sample-interval=0s"], SECONDS)?;
    eprintln!("with memory samples ...");
    let both = share(&fake, &[], SECONDS)?;
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
    let (resting, _) = share(&fake, &[], SECONDS)?;
    eprintln!("with the times of a real driver ...");
    state.gpus.truncate(1);
    let pids = processes.1.iter().take(REAL_PROCESSES);
    state.gpus[0].processes = pids.map(|pid| Process::compute(*pid, Some(512 << 20))).collect();
    state.busy_us = REAL_US.map(|(symbol, microseconds)| (symbol.to_owned(), microseconds)).into();
    fake.set(&state)?;
    let (real, _) = share(&fake, &[], 3 * SECONDS)?; // a multiple of the intervals of slow values
    document::write(&part([later, look], [alone, both], resting, message_share(&processes), real))
}
