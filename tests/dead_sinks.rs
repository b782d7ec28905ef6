//! Sinks that are dead for long: an endpoint of OTLP and a bucket that refuse, hang, fail or are gone, and a full disk, all at once. They
//! delay nothing, cost a constant memory and one line of the log each, and get everything once they are back, each item once.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memledger::ledger::store::{Store, WriteBatch};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use prost::Message;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde_json::json;

use crate::run_reports::{Host, KEYS, value};
use crate::support::tmpfs::Tmpfs;
use crate::support::{Memledger, eventually, eventually_true, reaches};

/// Events in the ledger, and records of runs among them.
const EVENTS: u64 = 10_000;
const RUNS: u64 = 40;
/// What each event has besides.
const TEXT_BYTES: usize = 2_000;
/// The events together are more than twice as large, so not even half of them may be in memory.
const MAX_GROWTH_BYTES: u64 = 8 << 20;
/// So that a sink that does not answer fails often within the test.
const SHORT_TIMEOUT: &str = "--otlp.timeout=1s";
/// What fails at shutdown is not waited for.
const MAX_STOP: Duration = Duration::from_secs(10);

const WORKS: Behaviour = Behaviour::Answers(200, "");

/// What the server does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    /// It does not listen.
    Refuses,
    /// It does not answer.
    Hangs,
    Answers(u16, &'static str),
}

/// Path and body of each request.
type AcceptedRequests = Vec<(String, Vec<u8>)>;

/// A server for OTLP and S3, with what it accepted.
struct SinkServer {
    /// Its port is reserved while it does not listen.
    socket: Arc<rustix::fd::OwnedFd>,
    port: u16,
    behaviour: Arc<Mutex<Behaviour>>,
    accepted: Arc<Mutex<AcceptedRequests>>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl SinkServer {
    fn new(behaviour: Behaviour) -> Self {
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        rustix::net::bind(&socket, &any).expect("a port");
        let bound = rustix::net::getsockname(&socket).expect("an address");
        let port = std::net::SocketAddr::try_from(bound).expect("an IPv4 address").port();
        let server = Self {
            socket: Arc::new(socket),
            port,
            behaviour: Arc::new(Mutex::new(behaviour)),
            accepted: Arc::default(),
            open: Arc::default(),
        };
        if behaviour != Behaviour::Refuses {
            server.listen();
        }
        server
    }

    fn listen(&self) {
        rustix::net::listen(&*self.socket, 64).expect("it listens");
        let listener = TcpListener::from(self.socket.try_clone().expect("a descriptor"));
        let (behaviour, accepted) = (Arc::clone(&self.behaviour), Arc::clone(&self.accepted));
        let open = Arc::clone(&self.open);
        std::thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                open.lock().expect("no holder panics").push(connection.try_clone().expect("a descriptor"));
                let (behaviour, accepted) = (Arc::clone(&behaviour), Arc::clone(&accepted));
                std::thread::spawn(move || serve(connection, &behaviour, &accepted));
            }
        });
    }

    /// Works from now on.
    fn mend(&self) {
        let before = std::mem::replace(&mut *self.behaviour.lock().expect("no holder panics"), WORKS);
        for connection in self.open.lock().expect("no holder panics").drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
        if before == Behaviour::Refuses {
            self.listen();
        }
    }

    /// Returns the flags that export to it, and not metrics, which are not followed.
    fn flags(&self) -> [String; 6] {
        let url = format!("http://127.0.0.1:{}", self.port);
        [
            format!("--otlp.endpoint={url}"),
            "--otlp.metrics=false".to_owned(),
            SHORT_TIMEOUT.to_owned(),
            "--otlp.shutdown-timeout=1s".to_owned(),
            "--report.s3-url=s3://runs".to_owned(),
            format!("--report.s3-endpoint={url}"),
        ]
    }

    /// Returns the ids of the events of the prepared ledger that it accepted, in their order.
    fn events(&self) -> Vec<u64> {
        let accepted = self.accepted.lock().expect("no holder panics");
        let logs = accepted.iter().filter(|(path, _)| path == "/v1/logs");
        let requests = logs.map(|(_, body)| ExportLogsServiceRequest::decode(&**body).expect("a request"));
        let records = requests
            .flat_map(|request| request.resource_logs)
            .flat_map(|logs| logs.scope_logs)
            .flat_map(|logs| logs.log_records);
        let id = |attributes: Vec<opentelemetry_proto::tonic::common::v1::KeyValue>| {
            let id = attributes.into_iter().find(|pair| pair.key == "memledger.id").expect("an id");
            match id.value.and_then(|any| any.value) {
                Some(Value::IntValue(id)) => u64::try_from(id).expect("a positive id"),
                other => panic!("{other:?} is no id"),
            }
        };
        records.map(|record| id(record.attributes)).filter(|id| *id <= EVENTS).collect()
    }

    /// Returns the objects of reports that it accepted.
    fn reports(&self) -> Vec<String> {
        let accepted = self.accepted.lock().expect("no holder panics");
        let path = |path: &str| path.strip_suffix("/report.json")?.strip_prefix("/runs/").map(str::to_owned);
        accepted.iter().filter_map(|(accepted, _)| path(accepted)).collect()
    }
}

/// Answers the requests of one connection.
fn serve(connection: TcpStream, behaviour: &Mutex<Behaviour>, accepted: &Mutex<AcceptedRequests>) {
    let mut writer = connection.try_clone().expect("a descriptor");
    let mut reader = BufReader::new(connection);
    while let Some(request) = read_request(&mut reader) {
        let now = *behaviour.lock().expect("no holder panics");
        let Behaviour::Answers(status, text) = now else { continue };
        if now == WORKS {
            accepted.lock().expect("no holder panics").push(request);
        }
        let response = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        if writer.write_all(response.as_bytes()).is_err() {
            return;
        }
    }
}

/// Returns path and body of the next request.
fn read_request(reader: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    let (mut path, mut length) = (None, 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        match (&path, line.strip_prefix("content-length: ")) {
            (None, _) => {
                let target = line.split(' ').nth(1)?.to_owned();
                path = Some(target.split('?').next().unwrap_or_default().to_owned());
            }
            (Some(_), Some(number)) => length = number.parse().ok()?,
            (Some(_), None) if line.is_empty() => break,
            (Some(_), None) => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path?, body))
}

/// Writes a ledger with events and runs.
fn write_ledger(host: &Host) {
    let mut batch = WriteBatch::default();
    for id in 1..=EVENTS {
        let (name, container) = (format!("train-{id}"), format!("{id:064x}"));
        let (at, text) = (1.7e9 + id as f64, "x".repeat(TEXT_BYTES));
        let event = json!({
            "type": "exit", "id": id, "at": at, "container_name": name, "container_id": container, "reason": "completed",
            "exit_code": 0, "oom_kills": 0, "evidence": [{"source": "docker", "text": text}],
        });
        batch.put_event(serde_json::from_value(event).expect("an event"));
        if id % (EVENTS / RUNS) == 0 {
            let run = json!({
                "run": format!("{id:012x}-20231114T221320Z"), "container_name": name, "container_id": container, "run_number": id, "ended": at,
                "exit_reason": "completed", "exit_code": 0,
            });
            batch.runs.insert(id, serde_json::from_value(run).expect("a record"));
        }
    }
    let mut store = Store::open(&host.path("state"), Duration::from_secs(10)).expect("a store").store;
    store.commit(&batch).expect("committed");
}

/// How often each sink has to fail before the log is compared: OTLP, the bucket, the directory.
struct Attempts(usize, usize, usize);

/// Returns how often each sink failed, by the lines that are logged for each attempt.
fn failures(memledger: &Memledger) -> (usize, usize, usize) {
    let log = memledger.log();
    let count =
        |texts: &[&str]| log.lines().filter(|line| texts.iter().all(|text| line.contains(text))).count();
    (
        count(&["OTLP attempt failed"]) + count(&["OTLP export failing"]),
        count(&["attempt to write a report failed", "s3://runs"]),
        count(&["attempt to write a report failed", "/reports"]),
    )
}

/// Makes all sinks dead, then mends them.
fn dead_sinks_lose_nothing(behaviour: Behaviour, attempts: &Attempts) {
    let mut host = Host::new(&["--log.level=debug", "--oom.kernel-log=off"], &KEYS);
    write_ledger(&host);
    let disk = Tmpfs::new(host.path("reports"), "size=16m");
    disk.fill();
    let server = SinkServer::new(behaviour);
    let memledger = host.serve(&[]);
    memledger.fresh_metrics();
    let bytes_without_sinks = memledger.anonymous_bytes();
    memledger.signal("TERM");
    assert_eq!(memledger.wait().0, Some(0));

    host.flags.extend(server.flags());
    host.flags.push(format!("--report.dir={}", disk.path().display()));
    let memledger = host.serve(&[]);
    fail_alone(&host, &memledger, attempts, bytes_without_sinks);
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert!(code == Some(0) && took < MAX_STOP, "{code:?} after {took:?}");

    server.mend();
    disk.make_space();
    // a busy machine answers later than a short timeout, and what was accepted then is sent again
    host.flags.retain(|flag| flag != SHORT_TIMEOUT);
    let memledger = host.serve(&[]);
    have_all(&memledger, &server, &disk);
}

/// Checks that sinks that fail say so once, delay nothing and cost little memory.
fn fail_alone(host: &Host, memledger: &Memledger, attempts: &Attempts, bytes_without_sinks: u64) {
    eventually("all sinks fail", || {
        let failed = failures(memledger);
        let are_enough = failed.0 >= attempts.0 && failed.1 >= attempts.1 && failed.2 >= attempts.2;
        if are_enough { Ok(()) } else { Err(format!("{failed:?}: {}", memledger.log())) }
    });
    eventually("their metrics", || {
        let ups = [
            memledger.metrics().get("memledger_otlp_up", &[("signal", "logs")]),
            value(memledger, "memledger_report_up", "s3"),
            value(memledger, "memledger_report_up", "directory"),
        ];
        if ups == [Some(0.0); 3] { Ok(()) } else { Err(format!("{ups:?}")) }
    });
    // runs end and are counted meanwhile
    let exits = || memledger.metrics().sum("memledger_container_exits_total", &[]);
    let before = exits();
    host.run(&[], &["true"]);
    eventually_true("an exit", || exits() > before);
    eventually_true("its report waits", || {
        value(memledger, "memledger_reports_waiting", "s3") > Some(RUNS as f64)
    });
    let grown = memledger.anonymous_bytes().saturating_sub(bytes_without_sinks);
    assert!(grown < MAX_GROWTH_BYTES, "{grown} bytes more than without sinks");
    let log = memledger.log();
    for texts in [
        ["OTLP export failing", "signal=logs"],
        ["writing the report of a run failed", "s3://runs"],
        ["writing the report of a run failed", "/reports"],
    ] {
        let lines = log.lines().filter(|line| texts.iter().all(|text| line.contains(text)));
        assert_eq!(lines.count(), 1, "{texts:?}: {log}");
    }
}

/// Checks that sinks that work again get all that waited, once.
fn have_all(memledger: &Memledger, server: &SinkServer, disk: &Tmpfs) {
    reaches("events at the endpoint", EVENTS as usize, || server.events().len());
    assert_eq!(server.events(), (1..=EVENTS).collect::<Vec<_>>(), "in order, each once");
    let run = 1; // that of this test
    reaches("reports in the bucket", RUNS as usize + run, || server.reports().len());
    let objects: BTreeSet<_> = server.reports().into_iter().collect();
    assert_eq!(objects.len(), RUNS as usize + run, "each once");
    eventually("reports in the directory", || {
        let entries = std::fs::read_dir(disk.path()).expect("it is there").map(Result::unwrap);
        let folders: BTreeSet<_> =
            entries.map(|entry| entry.file_name().into_string().expect("text")).collect();
        if folders == objects { Ok(()) } else { Err(format!("{folders:?}: {}", memledger.log())) }
    });
    for (family, labels) in [
        ("memledger_reports_lost_total", ("target", "s3")),
        ("memledger_reports_lost_total", ("target", "directory")),
        ("memledger_otlp_lost_total", ("signal", "logs")),
    ] {
        assert_eq!(memledger.metrics().sum(family, &[labels]), 0.0, "{family}");
    }
}

#[test]
fn sinks_that_refuse_connections_lose_nothing() {
    dead_sinks_lose_nothing(Behaviour::Refuses, &Attempts(4, 3, 3));
}

#[test]
fn sinks_that_hang_lose_nothing() {
    // a request to S3 fails after 30 s
    dead_sinks_lose_nothing(Behaviour::Hangs, &Attempts(4, 1, 3));
}

#[test]
fn sinks_that_answer_500_lose_nothing() {
    // OTLP is not to be retried soon then
    dead_sinks_lose_nothing(Behaviour::Answers(500, "broken"), &Attempts(1, 3, 3));
}

#[test]
fn sinks_that_are_gone_lose_nothing() {
    let gone = "<Error><Code>NoSuchBucket</Code><Message>It is gone</Message></Error>";
    dead_sinks_lose_nothing(Behaviour::Answers(404, gone), &Attempts(1, 3, 3));
}
