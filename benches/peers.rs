//! What memledger costs beside `docker stats`, and beside cAdvisor where it is installed, for the same containers.
//!
//! `make bench` starts 50 and then 200 idle containers in the Docker engine of this machine, and lets each program measure them for a
//! minute, one after the other: CPU time of the program, and of the engine's daemons beyond what they take while idle.
//! memledger runs with its default settings and a ledger on disk, and is scraped every 5 s, as is cAdvisor. It writes its part of
//! docs/performance.md. Needs root and a Docker engine with the tests' image; writes nothing without them.

mod cpu_time;
mod document;
#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cpu_time::{daemons_seconds, process_seconds};
use support::docker::{Container, Engine, unique};
use support::{Memledger, OwnedChild, free_port};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const SIZES: [usize; 2] = [50, 200];
const DURATION: Duration = Duration::from_secs(60);
const SCRAPE_INTERVAL: Duration = Duration::from_secs(5);
/// Time in which a program that has just started, and the engine after its containers have started, become steady.
const WARM_UP: Duration = Duration::from_secs(15);
/// Goals: how many times less than `docker stats`, and less than cAdvisor.
const GOALS: [(&str, f64); 2] = [("docker stats", 30.0), ("cAdvisor", 20.0)];
/// Goal, with as many containers as [`SIZES`] begins with.
const MAX_ANONYMOUS_MIB: f64 = 5.0;

#[allow(clippy::disallowed_methods)] // a bench measures time
fn rest(duration: Duration) {
    let began = Instant::now();
    while let Some(left) = duration.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
        std::thread::park_timeout(left);
    }
}

/// What one program took in [`DURATION`].
struct Cost {
    name: &'static str,
    own_seconds: f64,
    /// Beyond what the daemons take while idle; negative if they took less.
    daemons_seconds: f64,
}

impl Cost {
    fn total(&self) -> f64 {
        self.own_seconds + self.daemons_seconds.max(0.0)
    }
}

/// Watches for a minute with a program that runs as `pid`, or with none.
fn measure_program(name: &'static str, pid: Option<u32>, idle_seconds: f64, scraped: Option<&str>) -> Cost {
    rest(WARM_UP);
    let own = || pid.map_or(0.0, process_seconds);
    let before = (own(), daemons_seconds());
    for _ in 0..DURATION.as_secs() / SCRAPE_INTERVAL.as_secs() {
        if let Some(address) = scraped {
            scrape(address);
        }
        rest(SCRAPE_INTERVAL);
    }
    Cost { name, own_seconds: own() - before.0, daemons_seconds: daemons_seconds() - before.1 - idle_seconds }
}

fn scrape(address: &str) {
    let Ok(mut stream) = TcpStream::connect(address) else { return };
    let _ = stream.write_all(b"GET /metrics HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n");
    let _ = stream.read_to_end(&mut Vec::new());
}

fn start(program: &str, arguments: &[&str]) -> Option<OwnedChild> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().ok().map(OwnedChild)
}

/// What memledger took by thread in milliseconds per second, and its memory in MiB: resident, and of that anonymous.
struct Memledgers {
    threads: BTreeMap<String, f64>,
    resident_mib: f64,
    anonymous_mib: f64,
}

#[allow(clippy::disallowed_methods)] // a bench measures time
fn measure_memledger(idle_seconds: f64) -> Outcome<(Cost, Memledgers)> {
    let state = tempfile::tempdir()?;
    let state = format!("--state.path={}", state.path().display());
    let memledger = Memledger::start(&["--sample.interval=1s", &state]);
    let before = (cpu_time::by_thread_ms(memledger.pid()), Instant::now());
    let cost = measure_program("memledger", Some(memledger.pid()), idle_seconds, Some(&memledger.address));
    let seconds = before.1.elapsed().as_secs_f64();
    let mut threads = cpu_time::by_thread_ms(memledger.pid());
    for (thread, time) in &mut threads {
        *time = (*time - before.0.get(thread).unwrap_or(&0.0)) / seconds;
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let resident_mib = mib(memledger.resident_bytes());
    Ok((cost, Memledgers { threads, resident_mib, anonymous_mib: mib(memledger.anonymous_bytes()) }))
}

fn measure_cadvisor(idle_seconds: f64) -> Option<Cost> {
    let port = free_port();
    let cadvisor =
        start("cadvisor", &["-listen_ip=127.0.0.1", &format!("-port={port}"), "-housekeeping_interval=1s"])?;
    Some(measure_program("cAdvisor", Some(cadvisor.0.id()), idle_seconds, Some(&format!("127.0.0.1:{port}"))))
}

fn measure(engine: &Engine, containers: usize, text: &mut String) -> Outcome<()> {
    eprintln!("{containers} containers ...");
    let running: Vec<Container> =
        (0..containers).map(|_| engine.run(&unique("peers"), &[], &["/busybox/sleep", "100000"])).collect();
    let idle = measure_program("nothing", None, 0.0, None).daemons_seconds;
    let mut costs = Vec::new();
    {
        let client = start("docker", &["stats", "--format", "json"]).ok_or("no docker client")?;
        costs.push(measure_program("docker stats", Some(client.0.id()), idle, None));
    }
    costs.extend(measure_cadvisor(idle));
    let (cost, memledgers) = measure_memledger(idle)?;
    drop(running);
    for peer in costs.iter().chain([&cost]) {
        writeln!(
            text,
            "| {containers} | {} | {:.2} | {:.2} | {:.2} | {:.1} |",
            match peer.name {
                "docker stats" => "`docker stats`",
                name => name,
            },
            peer.own_seconds,
            peer.daemons_seconds,
            peer.total(),
            peer.total() / cost.total()
        )?;
    }
    let mut threads: Vec<_> = memledgers.threads.iter().filter(|(_, time)| **time >= 0.01).collect();
    threads.sort_by(|one, other| other.1.total_cmp(one.1));
    let threads: Vec<_> = threads.iter().map(|(name, time)| format!("{name} {time:.2}")).collect();
    let verdicts = GOALS.iter().map(|(name, goal)| match costs.iter().find(|cost| cost.name == *name) {
        _ if cfg!(debug_assertions) => format!("{goal:.0} times less than {name} (not judged in this build)"),
        None => format!("{goal:.0} times less than {name} (not installed here)"),
        Some(peer) => {
            let times = peer.total() / cost.total();
            let verdict = if times >= *goal { "met" } else { "**missed**" };
            format!("{goal:.0} times less than {name} ({times:.1}, {verdict})")
        }
    });
    let verdicts: Vec<_> = verdicts.collect();
    writeln!(
        text,
        "\nWith {containers}, memledger by thread in milliseconds per second: {}. Resident {:.1} MiB, of which {:.1} \
         anonymous. Goals: {}{}.\n",
        threads.join(", "),
        memledgers.resident_mib,
        memledgers.anonymous_mib,
        verdicts.join("; "),
        match memledgers.anonymous_mib < MAX_ANONYMOUS_MIB {
            _ if cfg!(debug_assertions) || containers != SIZES[0] => String::new(),
            true => format!("; less than {MAX_ANONYMOUS_MIB} MiB of anonymous memory (met)"),
            false => format!("; less than {MAX_ANONYMOUS_MIB} MiB of anonymous memory (**missed**)"),
        }
    )?;
    Ok(())
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let Some(engine) = Engine::shared() else { return Ok(()) };
    let mut text = String::new();
    for containers in SIZES {
        text.push_str(
            "| containers | what watches them | its CPU s | daemons, beyond idle | together | times memledger |\n\
             | --- | --- | ---: | ---: | ---: | ---: |\n",
        );
        measure(&engine, containers, &mut text)?;
    }
    document::write(&format!(
        "{}\n\nIdle containers of a real Docker engine, watched for {} s by one program after the other; CPU time of the program, and of \
         dockerd, containerd and its shims beyond what they take while nothing watches; where they take less, *together* is the program alone. memledger at its default settings with a \
         ledger on disk, scraped every {} s.\n\n{text}",
        document::HEADINGS[12],
        DURATION.as_secs(),
        SCRAPE_INTERVAL.as_secs(),
    ))?;
    Ok(())
}
