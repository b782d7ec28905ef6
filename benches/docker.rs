//! What following Docker costs the daemon while containers start and end.
//!
//! `make bench` keeps 200 containers running in the tests' engine, starts ten short ones a second, and measures the processor time of the
//! daemons in turns, without memledger and with the release binary (or `$MEMLEDGER_BIN`), whose ledger is in memory. It writes its part of
//! docs/performance.md. Needs root, and the Docker engine and image of the tests; writes nothing without them.

mod cpu_time;
mod document;
#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cpu_time::{daemons_seconds, process_seconds};
use support::docker::{Container, Engine, unique};
use support::{Memledger, eventually};

const RUNNING: usize = 200;
const STARTS_PER_SECOND: usize = 10;
const SECONDS: usize = 15;
const ROUNDS: usize = 5;

/// Starts a container by the API: the client program would cost more than the start.
fn start(socket: &Path, id: &str) {
    let mut stream = UnixStream::connect(socket).expect("the daemon listens");
    let request = format!(
        "POST /containers/{id}/start HTTP/1.1\r\nHost: docker\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("a response");
    let status = response.split(' ').nth(1).unwrap_or("");
    assert_eq!(status, "204", "{response}");
}

/// Starts the short containers at their rate. Returns the daemons' processor time in milliseconds per second.
#[allow(clippy::disallowed_methods)] // a bench measures time
fn churn(engine: &Engine, short: &[Container]) -> f64 {
    let (began, before) = (Instant::now(), daemons_seconds());
    let starts = SECONDS * STARTS_PER_SECOND;
    std::thread::scope(|scope| {
        for (number, container) in (0..starts).zip(short.iter().cycle()) {
            let due = Duration::from_secs(1) * number as u32 / STARTS_PER_SECOND as u32;
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            scope.spawn(|| start(&engine.socket, &container.id));
        }
    });
    let took = began.elapsed();
    assert!(
        took < Duration::from_secs(SECONDS as u64) * 6 / 5,
        "this host is too slow for the rate: {took:?}"
    );
    (daemons_seconds() - before) * 1e3 / took.as_secs_f64()
}

/// The values of all turns, in order.
struct Turns(Vec<f64>);

impl Turns {
    fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    fn median(&self) -> f64 {
        self.0[ROUNDS / 2]
    }

    fn cell(&self) -> String {
        format!("{:.0} ({:.0} to {:.0})", self.median(), self.0[0], self.0[ROUNDS - 1])
    }
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let Some(engine) = Engine::shared() else {
        return Ok(());
    };
    let names = |what: &'static str, count| (0..count).map(move |number| unique(&format!("{what}{number}")));
    let running: Vec<_> =
        names("long", RUNNING).map(|name| engine.run(&name, &[], &["sleep", "100000"])).collect();
    let short: Vec<_> =
        names("short", 2 * STARTS_PER_SECOND).map(|name| engine.create(&name, &[], &["true"])).collect();
    churn(&engine, &short); // the first starts of containers cost more
    let (mut without, mut with, mut own) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        without.push(churn(&engine, &short));
        let memledger = Memledger::start(&[&engine.flag(), "--podman.socket=", "--sample.interval=1s"]);
        eventually("all of them", || {
            let shown = memledger.metrics().all("memledger_container_start_time_seconds", &[]).len();
            if shown >= RUNNING { Ok(()) } else { Err(format!("{shown}")) }
        });
        let before = process_seconds(memledger.pid());
        with.push(churn(&engine, &short));
        own.push((process_seconds(memledger.pid()) - before) * 1e3 / SECONDS as f64);
    }
    drop((running, short));
    let [without, with, own] = [without, with, own].map(Turns::new);
    let build = if cfg!(debug_assertions) { "a build WITHOUT optimisation" } else { "the release binary" };
    let more = with.median() - without.median();
    let verdict = if more < without.0[ROUNDS - 1] - without.0[0] {
        "The requests of memledger take less of the daemons' time than the turns differ by.".to_owned()
    } else {
        format!("The requests for each start take {:.1} ms of the daemons.", more / STARTS_PER_SECOND as f64)
    };
    document::write(&format!(
        "## Containers that come and go\n\n\
         {RUNNING} running containers in a real Docker engine, and {STARTS_PER_SECOND} that start and end each second; {build} with a \
         ledger in memory. Processor time in milliseconds per second, medians and ranges of {ROUNDS} turns of {SECONDS} s; the daemons are dockerd, \
         containerd and the shims of the containers that go on:\n\n\
         | of | ms/s |\n| --- | ---: |\n\
         | the daemons, without memledger | {} |\n\
         | the daemons, followed by memledger | {} |\n\
         | memledger | {} |\n\n\
         {verdict}\n",
        without.cell(),
        with.cell(),
        own.cell()
    ))
}
