//! What the past of a host costs: 2,000 dead containers, whose ends `memledger why` reads and the first start of `serve` records.
//!
//! `make bench` lets a stand-in engine list them, because no real one keeps so many in the time of a bench; the kernel log is that of this
//! host, whatever it has. It times `memledger why` without a ledger and without `serve`, and of `serve` the time until it is ready and until
//! the ends are recorded, each in turn with an engine without containers. It writes its part of docs/performance.md.

mod document;
#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use support::docker::Socket;
use support::{Memledger, eventually};

const DEAD: usize = 2_000;
const ROUNDS: usize = 5;
/// Goals: of an answer without `serve`, and of a start.
const MAX_WHY_TIME: Duration = Duration::from_secs(2);
const MAX_START_TIME: Duration = Duration::from_secs(1);

/// Returns the end of a container as an engine describes it: one each minute, the last a minute ago.
fn state(number: usize, now: jiff::Timestamp) -> String {
    let at = |minutes: usize| now - jiff::SignedDuration::from_mins(minutes as i64);
    let (started, finished) = (at(2 * (DEAD - number) + 1), at(2 * (DEAD - number)));
    format!(
        r#"{{"Status":"exited","Running":false,"OOMKilled":false,"Pid":0,"ExitCode":137,"Error":"","StartedAt":"{started}","FinishedAt":"{finished}"}}"#
    )
}

fn id(number: usize) -> String {
    format!("{number:064x}")
}

/// Answers one request of a connection.
fn answer(mut stream: UnixStream, dead: usize, now: jiff::Timestamp) {
    let mut request = [0; 8_192];
    let read = stream.read(&mut request).unwrap_or(0);
    let request = String::from_utf8_lossy(&request[..read]).into_owned();
    let path = request.split(' ').nth(1).unwrap_or("");
    let listed = |number: usize| {
        let id = id(number);
        format!(
            r#"{{"Id":"{id}","Names":["/job-{number}"],"Image":"i","State":"exited","Created":{number},"Labels":{{}}}}"#
        )
    };
    let body = match path {
        _ if path.contains("/containers/json") => {
            let all = if path.contains("all=true") || path.contains("all=1") { dead } else { 0 };
            format!("[{}]", (0..all).map(listed).collect::<Vec<_>>().join(","))
        }
        _ if path.contains("/containers/") => {
            let id = path.split("/containers/").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or("");
            let number = usize::from_str_radix(id, 16).unwrap_or(0);
            let state = state(number, now);
            format!(
                r#"{{"Id":"{id}","Name":"/job-{number}","State":{state},"Config":{{"Image":"i","Labels":{{}}}},"HostConfig":{{}}}}"#
            )
        }
        _ if path.contains("/events") && !path.contains("until=") => {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n";
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.read_to_end(&mut Vec::new()); // until the client disconnects
            return;
        }
        _ => String::new(),
    };
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
}

#[allow(clippy::disallowed_methods)] // a bench measures time
fn milliseconds<T>(measured: impl FnOnce() -> T) -> (f64, T) {
    let began = Instant::now();
    let result = measured();
    (began.elapsed().as_secs_f64() * 1e3, result)
}

/// Returns the milliseconds of `why`, of the start of `serve`, and until that has recorded the ends.
fn measure(socket: &Socket, dead: usize) -> [f64; 3] {
    let folder = tempfile::tempdir().expect("a folder");
    let flags = [&*socket.flag(), "--podman.socket=", "--cri.endpoint="];
    let missing = format!("--state.path={}/missing", folder.path().display());
    let mut why = Command::new(env!("CARGO_BIN_EXE_memledger"));
    why.args(["why", if dead > 0 { "job-7" } else { "nobody" }, &missing]).args(flags);
    let (answered, output) = milliseconds(|| why.output().expect("memledger runs"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.success(), dead > 0, "{text}");
    let state = format!("--state.path={}/state", folder.path().display());
    let flags = [&flags[..], &[&state, "--no-collector.gpu"]].concat();
    let (started, memledger) = milliseconds(|| Memledger::start(&flags));
    let (recorded, ()) = milliseconds(|| {
        eventually("the ends", || {
            let (_, text) = memledger.get("/api/v1/events?limit=10000");
            let ends = text.lines().filter(|line| line.contains(r#""type":"exit""#)).count();
            if ends >= dead { Ok(()) } else { Err(format!("{ends} of {dead}")) }
        });
    });
    [answered, started, started + recorded]
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let engines = [0, DEAD].map(|dead| (dead, Socket::serving(move |stream| answer(stream, dead, now))));
    let mut rounds: Vec<[[f64; 3]; 2]> = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push([0, 1].map(|at| measure(&engines[at].1, engines[at].0)));
    }
    let median = |engine: usize, what: usize| {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[engine][what]).collect();
        values.sort_by(f64::total_cmp);
        values[ROUNDS / 2]
    };
    let row =
        |name: &str, what: usize| format!("| {name} | {:.0} | {:.0} |\n", median(0, what), median(1, what));
    let verdict = |met: bool| match met {
        _ if cfg!(debug_assertions) => "not judged in this build",
        true => "met",
        false => "**missed**",
    };
    document::write(&format!(
        "{}\n\nAn engine that lists {DEAD} dead containers, a stand-in, and one without containers; the kernel log of the host. Medians of {ROUNDS}, \
         in turn, in ms:\n\n\
         | | no container | {DEAD} |\n| --- | ---: | ---: |\n{}{}{}\n\
         Goals: `why` in less than {} s ({}), a start in less than {} s ({}). The ends are recorded after the start.\n",
        document::HEADINGS[10],
        row("`memledger why`, without a ledger and `serve`", 0),
        row("the first start of `serve`, until it is ready", 1),
        row("the same, until the ends are recorded", 2),
        MAX_WHY_TIME.as_secs(),
        verdict(median(1, 0) <= MAX_WHY_TIME.as_secs_f64() * 1e3),
        MAX_START_TIME.as_secs(),
        verdict(median(1, 1) <= MAX_START_TIME.as_secs_f64() * 1e3),
    ))
}
