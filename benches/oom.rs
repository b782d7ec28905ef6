//! Latency of OOM kills and cost of the ledger.
//!
//! `make bench` measures with the release binary, its default settings and real kills in a real container: from the
//! kernel's record of a kill to memledger's log line, and to `/metrics`; the processor time of one cycle with an empty
//! ledger and with 1,000 kills in it; and the time of an idle memledger. It writes the second part of
//! docs/performance.md. It needs root, for `/dev/kmsg`, and the Docker engine and image of the tests.
//!
//! Other kills on the same host would count in the host's total: a sample during which the kernel counted another kill
//! is repeated.

mod document;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use memledger::clock::Timestamp;
use memledger::events::{
    ContainerRef, Identity, Kill, KillOwner, LedgerEvent, Method, OomScope, Role, Victim,
};
use memledger::ledger::store::{StateKind, Store, WriteBatch};

const KILLS: usize = 20;
/// Number of kills in the filled store, and of their containers.
const STORED: u64 = 1000;
const CONTAINERS: u64 = 50;
/// Number of cycles per measurement of their cost, and of alternating repetitions.
const CYCLES: u32 = 60;
const ROUNDS: usize = 5;
const IDLE_SECONDS: u32 = 30;
const PORT: u16 = 10898;
const CONTAINER: &str = "memledger-bench-oom";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Milliseconds of the clock that the kernel log also uses.
fn now_ms() -> f64 {
    Timestamp::now().kernel_usec() as f64 / 1e3
}

fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms)); // a benchmark measures time
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn worst(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn oom_kills() -> Outcome<u64> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    Ok(text.lines().find_map(|line| line.strip_prefix("oom_kill ")).ok_or("no oom_kill")?.trim().parse()?)
}

/// `memledger serve` in release. Stopped when dropped.
struct Memledger {
    child: Child,
    /// Lines of its log, with their arrival times.
    lines: Receiver<(f64, String)>,
}

impl Memledger {
    fn start(flags: &[&str]) -> Outcome<Self> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_memledger"))
            .args([
                "serve",
                &format!("--web.listen-address=127.0.0.1:{PORT}"),
                "--podman.socket=",
                "--reporter.directory=",
            ])
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let (sender, lines) = channel();
        let log = BufReader::new(child.stderr.take().ok_or("piped")?);
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                if sender.send((now_ms(), line)).is_err() {
                    return;
                }
            }
        });
        let mut this = Self { child, lines };
        for _ in 0..500 {
            if this.child.try_wait()?.is_some() {
                return Err(format!("memledger has exited: is port {PORT} in use?").into());
            }
            if get("/-/ready").is_ok_and(|response| response.contains(" 200 ")) {
                return Ok(this);
            }
            pause(20);
        }
        Err("memledger is not ready".into())
    }

    /// Returns the processor time of all its threads in nanoseconds.
    fn cpu_ns(&self) -> Outcome<f64> {
        let mut sum = 0.0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
            sum += text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0);
        }
        Ok(sum)
    }
}

impl Drop for Memledger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(path: &str) -> Outcome<String> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", PORT))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response)
}

fn host_total() -> Outcome<u64> {
    let text = get("/metrics")?;
    let line = text.lines().find_map(|line| line.strip_prefix("memledger_host_oom_kills_total "));
    Ok(line.ok_or("no total")?.trim().parse::<f64>()? as u64)
}

/// A container in which every input line starts a process that is OOM-killed. Removed when dropped.
struct Victims {
    docker: Child,
    orders: ChildStdin,
}

impl Victims {
    fn start() -> Outcome<Self> {
        remove_container();
        let script = "echo ready; while read -r line; do tail /dev/zero; done";
        let mut docker = Command::new("docker")
            .args(["run", "-i", "--rm", "--name", CONTAINER, "--network", "none", "--memory", "16m"])
            .args(["memledger-test:1", "/bin/sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let orders = docker.stdin.take().ok_or("piped")?;
        let mut line = String::new();
        BufReader::new(docker.stdout.take().ok_or("piped")?).read_line(&mut line)?;
        if line.trim() != "ready" {
            return Err(
                "the container is not running: tests/setup/setup.sh sets up the engine and the image".into(),
            );
        }
        Ok(Self { docker, orders })
    }

    fn kill_one(&mut self) -> Outcome<()> {
        self.orders.write_all(b"now\n")?;
        Ok(self.orders.flush()?)
    }
}

impl Drop for Victims {
    fn drop(&mut self) {
        remove_container();
        let _ = self.docker.kill();
        let _ = self.docker.wait();
    }
}

fn remove_container() {
    let _ = Command::new("docker")
        .args(["rm", "-f", CONTAINER])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// The kernel log from now on.
struct KernelLog(File);

impl KernelLog {
    fn open() -> Outcome<Self> {
        let mut file = File::options().read(true).open("/dev/kmsg")?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self(file))
    }

    /// Waits for a record that contains this text, and returns its stamp in milliseconds.
    fn stamp_of(&mut self, text: &str) -> Outcome<f64> {
        let mut record = vec![0; 16 << 10];
        loop {
            let Ok(read) = self.0.read(&mut record) else { continue }; // overrun
            let record = String::from_utf8_lossy(&record[..read]);
            if record.contains(text) {
                let stamp = record.split(',').nth(2).ok_or("a stamp")?;
                return Ok(stamp.parse::<f64>()? / 1e3);
            }
        }
    }

    /// Returns how far the log's clock is behind the one of [`now_ms`]: they drift apart by some milliseconds a day.
    fn behind_ms(&mut self) -> Outcome<f64> {
        let mark = format!("memledger bench {}", Timestamp::now().kernel_usec());
        let before = now_ms();
        std::fs::write("/dev/kmsg", format!("{mark}\n"))?; // the kernel buffers an unterminated line
        let after = now_ms();
        Ok((before + after) / 2.0 - self.stamp_of(&mark)?)
    }
}

/// Measures milliseconds from the kernel's record to the log line, and to `/metrics`.
fn latency() -> Outcome<(Vec<f64>, Vec<f64>)> {
    let state = std::env::temp_dir().join(format!("memledger-bench-{}", std::process::id()));
    let include = format!("--container.include=^{CONTAINER}$");
    let memledger = Memledger::start(&[&format!("--state.path={}", state.display()), &include])?;
    let mut victims = Victims::start()?;
    let mut log = KernelLog::open()?;
    pause(2000); // until the container is known
    let (mut to_log, mut to_metrics) = (vec![], vec![]);
    for attempt in 0..10 * KILLS as u64 {
        if to_log.len() == KILLS {
            break;
        }
        pause(1100 + attempt * 137 % 1000); // a different phase of the cycle each time
        let behind = log.behind_ms()?;
        let (counted, total) = (oom_kills()?, host_total()?);
        while memledger.lines.try_recv().is_ok() {}
        victims.kill_one()?;
        let stamp = log.stamp_of("Killed process ")? + behind;
        while host_total()? == total {
            pause(2);
        }
        let shown = now_ms();
        let said = loop {
            let (at, line) = memledger.lines.recv_timeout(Duration::from_secs(10))?;
            if line.contains("killed by the OOM killer") {
                break at;
            }
        };
        if oom_kills()? == counted + 1 {
            to_log.push(said - stamp);
            to_metrics.push(shown - stamp);
        }
    }
    drop((victims, memledger));
    let _ = std::fs::remove_dir_all(state);
    if to_log.len() < KILLS { Err("disturbed by other OOM kills".into()) } else { Ok((to_log, to_metrics)) }
}

/// Creates a ledger with so many kills.
fn ledger_with(directory: &Path, kills: u64) -> Outcome<()> {
    let mut store = Store::open(directory, Duration::ZERO)?.store;
    let now = Timestamp::now().unix_seconds();
    let event = |id: u64| {
        let number = id % CONTAINERS;
        let name = Identity { name: format!("trainer-{number}").into(), ..Identity::default() };
        let container_id = format!("{number:064x}").into();
        let subject = ContainerRef {
            identity: name,
            container_id,
            started: Some(now - 1e5),
            ..ContainerRef::default()
        };
        let kill = Kill {
            before_counting: false,
            parent_pid: None,
            program: "".into(),
            cgroup: "".into(),
            group: "".into(),
            id,
            at: now - (kills - id) as f64,
            earliest: None,
            boot_id: "another".into(),
            kernel_usec: Some(id),
            pid: Some(id as u32),
            process: "pt_data_worker".into(),
            role: Some(Role::DataloaderWorker),
            owner: KillOwner::Container(subject),
            victim: Some(Victim::Child),
            number: Some(id),
            scope: OomScope::Container,
            anon_bytes: Some(1 << 30),
            file_bytes: None,
            shmem_bytes: None,
            oom_score_adj: None,
            limit_cgroup: "".into(),
            limit_bytes: None,
            alone_in_pod: false,
            method: Some(Method::Kmsg),
            report: None,
            evidence: vec![],
            before: None,
        };
        LedgerEvent::OomKill(kill)
    };
    let mut batch: WriteBatch = (1..=kills).map(event).collect();
    batch.put(StateKind::Total, "host_oom_kills", &kills);
    store.commit(&batch)?;
    Ok(())
}

/// Returns microseconds of processor time per cycle, with a ledger in this directory.
fn cost_of_a_cycle(directory: &Path) -> Outcome<f64> {
    let flag = format!("--state.path={}", directory.display());
    let nobody = "--container.include=^memledger-bench-nobody$";
    let memledger = Memledger::start(&["--docker.socket=", "--sample.interval=100ms", nobody, &flag])?;
    pause(2000); // until the start-up work is done
    let before = memledger.cpu_ns()?;
    pause(u64::from(CYCLES) * 100);
    Ok((memledger.cpu_ns()? - before) / f64::from(CYCLES) / 1e3)
}

/// Returns the costs of cycles with an empty ledger and with a full one, measured alternately.
fn costs() -> Outcome<(Vec<f64>, Vec<f64>)> {
    let folder = std::env::temp_dir().join(format!("memledger-bench-cost-{}", std::process::id()));
    let [empty, full] = ["empty", "full"].map(|name| folder.join(name));
    std::fs::create_dir_all(&folder)?;
    ledger_with(&empty, 0)?;
    ledger_with(&full, STORED)?;
    let mut found = (vec![], vec![]);
    for _ in 0..ROUNDS {
        found.0.push(cost_of_a_cycle(&empty)?);
        found.1.push(cost_of_a_cycle(&full)?);
    }
    let _ = std::fs::remove_dir_all(folder);
    Ok(found)
}

/// Returns the CPU time, in percent of one core, of a memledger without containers and without scrapes.
fn idle() -> Outcome<f64> {
    let nobody = "--container.include=^memledger-bench-nobody$";
    let memledger = Memledger::start(&["--state.path=", nobody])?;
    pause(3000);
    let ns = memledger.cpu_ns()?;
    pause(u64::from(IDLE_SECONDS) * 1000);
    Ok((memledger.cpu_ns()? - ns) / f64::from(IDLE_SECONDS) / 1e7)
}

fn part() -> Outcome<String> {
    eprintln!("{KILLS} kills ...");
    let (to_log, to_metrics) = latency()?;
    eprintln!("cycles with {STORED} kills in the ledger ...");
    let (empty, full) = costs()?;
    eprintln!("idle ...");
    let percent = idle()?;
    let ratio = median(&full) / median(&empty);
    let verdict = |met: bool| if met { "met" } else { "**missed**" };
    Ok(format!(
        "{}\n\nThe release binary at its default settings, {KILLS} real kills in a real container, each at another \
         time between two cycles. Times start with the kernel's own stamp in its record of the kill.\n\n\
         | from the kernel's record to | median ms | worst ms |\n| --- | --- | --- |\n\
         | the line in memledger's log | {:.1} | {:.1} |\n| `/metrics` (sampled every second) | {:.0} | {:.0} |\n\n\
         *A cycle and the ledger's step after it*, processor time of all threads, no containers, {ROUNDS} times {CYCLES} \
         cycles in turn, medians: {:.0} µs with an empty ledger, {:.0} µs with {STORED} kills in it, ratio {ratio:.2} \
         (between two rounds of the same ledger it varies from {:.0} to {:.0} µs).\n\n\
         *Idle*: no containers, no scrapes, over {IDLE_SECONDS} s: {percent:.2} % of one core.\n\n\
         Goals: a kill in the log within 100 ms ({}), in `/metrics` within a cycle of 1 s and what it takes to make it \
         ({}); kills in the ledger cost a cycle nothing that can be measured ({}).\n",
        document::HEADINGS[1],
        median(&to_log),
        worst(&to_log),
        median(&to_metrics),
        worst(&to_metrics),
        median(&empty),
        median(&full),
        empty.iter().copied().fold(f64::INFINITY, f64::min),
        worst(&empty),
        verdict(worst(&to_log) <= 100.0),
        verdict(worst(&to_metrics) <= 1100.0),
        verdict(median(&full) <= worst(&empty)),
    ))
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    Ok(document::write(&part()?)?)
}
