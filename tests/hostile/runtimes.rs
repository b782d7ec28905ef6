//! A container runtime whose responses are endless, too large or missing. No real engine does that, so the test has a socket that
//! imitates one; memledger, its connection and its memory are real.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memledger::discover::cri::messages;
use prost::Message;

use super::{AttackTest, Attacker, MIB, has_memory};
use crate::support::docker::Socket;
use crate::support::grpc::{Response, Server};
use crate::support::{Metrics, eventually};

const UP: &str = "memledger_runtime_up";
const READ_ERRORS: &str = "memledger_collector_read_errors_total";
/// Limit of bytes that memledger accepts of all endless responses of one test.
const MAX_ACCEPTED: u64 = 256 << 20;
/// Limit of bytes that memledger accepts of one endless response.
const MAX_ACCEPTED_OF_ONE: u64 = 8 << 20;

/// The response to a request.
#[derive(Clone)]
enum HttpResponse {
    Complete(String),
    /// A beginning, and then a text that is repeated until the client closes the connection.
    Endless(String, &'static str),
    /// Like `Endless`, with chunked transfer encoding.
    EndlessChunks(String, &'static str),
    EndlessHead,
    /// No response; the connection stays open.
    Missing,
}

impl HttpResponse {
    /// Returns the head and the beginning of the body, and the text that is repeated after it.
    fn parts(self) -> (String, Option<String>) {
        const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
        let repeat = |text: &str| text.repeat((1 << 16) / text.len() + 1);
        let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
        match self {
            Self::Complete(body) => (format!("{HEAD}Content-Length: {}\r\n\r\n{body}", body.len()), None),
            Self::Endless(begin, more) => (format!("{HEAD}\r\n{begin}"), Some(repeat(more))),
            Self::EndlessChunks(begin, more) => {
                let head = format!("{HEAD}Transfer-Encoding: chunked\r\n\r\n");
                // no chunk for an empty beginning: it would end the body
                let begin = if begin.is_empty() { begin } else { chunk(&begin) };
                (head + &begin, Some(chunk(&repeat(more))))
            }
            Self::EndlessHead => (HEAD.to_owned(), Some(repeat("X-Filler: x\r\n"))),
            Self::Missing => (String::new(), None),
        }
    }
}

/// Number of requests, and bytes that memledger accepted of endless responses.
#[derive(Default)]
struct Counters {
    lists: AtomicU64,
    events: AtomicU64,
    accepted: AtomicU64,
    longest: AtomicU64,
}

/// A socket in place of Docker's.
struct Runtime {
    socket: Socket,
    counters: Arc<Counters>,
}

impl Runtime {
    /// Starts a runtime with these responses to requests for the list, and for events. `inspect` returns that of a path.
    fn new(
        list: HttpResponse,
        events: HttpResponse,
        inspect: impl Fn(&str) -> HttpResponse + Send + Sync + 'static,
    ) -> Self {
        let counters = Arc::new(Counters::default());
        let shared = Arc::clone(&counters);
        let socket = Socket::serving(move |mut stream| {
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let response = match request.split([' ', '?']).nth(1) {
                Some(path) if path.ends_with("/containers/json") => {
                    shared.lists.fetch_add(1, Ordering::Relaxed);
                    list.clone()
                }
                Some(path) if path.ends_with("/events") => {
                    shared.events.fetch_add(1, Ordering::Relaxed);
                    events.clone()
                }
                path => inspect(path.unwrap_or_default()),
            };
            let _ = send(&mut stream, response, &shared);
        });
        Self { socket, counters }
    }
}

/// Sends a response until memledger closes the connection.
fn send(stream: &mut UnixStream, response: HttpResponse, counters: &Counters) -> std::io::Result<()> {
    let (begin, more) = response.parts();
    stream.write_all(begin.as_bytes())?;
    let Some(more) = more else {
        return stream.read_to_end(&mut Vec::new()).map(drop);
    };
    let mut accepted = 0;
    loop {
        stream.write_all(more.as_bytes())?;
        accepted += more.len() as u64;
        counters.accepted.fetch_add(more.len() as u64, Ordering::Relaxed);
        counters.longest.fetch_max(accepted, Ordering::Relaxed);
    }
}

/// Returns an entry of the list of containers.
fn listed(id: &str, name: &str) -> String {
    format!(r#"{{"Id":"{id}","Names":["/{name}"],"Image":"i","State":"running","Labels":{{}}}}"#)
}

/// Returns the complete list of the container of a test.
fn list(id: &str) -> HttpResponse {
    HttpResponse::Complete(format!("[{}]", listed(id, "named")))
}

fn inspected(id: &str, name: &str, image: &str) -> HttpResponse {
    let state = r#"{"Running":true,"Pid":1,"StartedAt":"2026-01-01T00:00:00.5Z"}"#;
    HttpResponse::Complete(format!(
        r#"{{"Id":"{id}","Name":"/{name}","State":{state},"Config":{{"Image":"{image}"}}}}"#
    ))
}

/// Returns the complete response to inspect of the container of a test.
fn inspect(id: &str) -> HttpResponse {
    inspected(id, "named", "i")
}

fn no_response(_id: &str) -> HttpResponse {
    HttpResponse::Missing
}

fn running_container() -> Attacker {
    let mut container = Attacker::limited(64);
    assert_eq!(container.run("print('ready'); input()", &[]), "ready");
    container
}

/// The expected result of a test with a Docker runtime.
#[derive(Clone, Copy)]
struct Expected {
    /// The name of the container is the runtime's.
    is_named: bool,
    /// `memledger_runtime_up`; `None` if it varies.
    up: Option<f64>,
}

/// Runs memledger with a runtime that has one container; the functions return the responses for its id.
fn run_with_docker(
    list: fn(&str) -> HttpResponse,
    inspect: fn(&str) -> HttpResponse,
    events: fn(&str) -> HttpResponse,
    expected: Expected,
) -> AttackTest {
    let container = running_container();
    let id = container.cgroup.id.clone();
    let runtime = Runtime::new(list(&id), events(&id), move |_| inspect(&id));
    let mut test = AttackTest::new(&[container.name(), "named"], &[&runtime.socket.flag()]);
    let name = if expected.is_named { "named" } else { container.name() };
    test.run(|metrics: &Metrics| {
        has_memory(metrics, name)?;
        let Some(expected) = expected.up else { return Ok(()) };
        let up = metrics.try_value(UP, &[("runtime", "docker")])?;
        (up == expected).then_some(()).ok_or_else(|| format!("{UP} is {up}"))
    });
    let accepted = runtime.counters.accepted.load(Ordering::Relaxed);
    eprintln!("{:.1} MiB of its responses were accepted", accepted as f64 / MIB);
    assert!(accepted < MAX_ACCEPTED, "{accepted} bytes of its responses were accepted");
    test
}

/// Asserts that each warning about the runtime is logged once, and not for every retry.
fn assert_warnings_logged_once(test: &AttackTest) {
    let log = test.memledger.log();
    let warnings = log.lines().filter(|line| line.contains("level=warn") && line.contains("discover"));
    let mut warnings: Vec<_> =
        warnings.filter_map(|line| line.split_once(' ')).map(|(_, text)| text).collect();
    let count = warnings.len();
    warnings.sort_unstable();
    warnings.dedup();
    assert!(count == warnings.len() && (1..=3).contains(&count), "{log}");
}

/// Asserts that a response about this subject was logged as too large, once.
fn assert_rejection_logged_once(test: &AttackTest, about: &str) {
    let log = test.memledger.log();
    let count = log.lines().filter(|line| line.contains(&format!("about={about}"))).count();
    assert_eq!(count, 1, "{about}: {log}");
}

/// Checks that at least two responses were counted as too large.
fn two_are_counted(metrics: &Metrics) -> Result<(), String> {
    let count = metrics.try_value(READ_ERRORS, &[("collector", "discover"), ("reason", "too_large")])?;
    if count >= 2.0 { Ok(()) } else { Err(format!("{count} read errors")) }
}

#[test]
fn endless_list_is_aborted() {
    const ELEMENT: &str =
        r#"{"Id":"0000000000000000000000000000000000000000000000000000000000000000","Names":["/x"]},"#;
    let endless = |_: &str| HttpResponse::Endless("[".to_owned(), ELEMENT);
    let expected = Expected { is_named: false, up: Some(0.0) };
    let test = run_with_docker(endless, inspect, no_response, expected);
    assert_warnings_logged_once(&test);
}

#[test]
fn list_of_one_endless_string_is_aborted() {
    let endless = |_: &str| HttpResponse::Endless("[{\"Id\":\"".to_owned(), "0");
    let expected = Expected { is_named: false, up: Some(0.0) };
    let test = run_with_docker(endless, inspect, no_response, expected);
    assert_warnings_logged_once(&test);
}

#[test]
fn endless_list_is_aborted_at_each_retry() {
    let container = running_container();
    let chunks = |begin: &str| HttpResponse::EndlessChunks(begin.to_owned(), "a");
    let events = chunks("{\"Action\":\"start\",\"Actor\":{\"ID\":\"");
    let runtime = Runtime::new(chunks("[{\"Id\":\""), events, no_response);
    let mut test = AttackTest::new(&[container.name()], &[&runtime.socket.flag()]);
    // a list of all containers, one of the running ones, and those of a new ledger, which reads the past
    eventually("four lists", || match runtime.counters.lists.load(Ordering::Relaxed) {
        0..4 => Err(test.memledger.log()),
        _ => Ok(()),
    });
    test.run(|metrics| {
        two_are_counted(metrics)?;
        let up = metrics.try_value(UP, &[("runtime", "docker")])?;
        (up == 0.0).then_some(()).ok_or_else(|| format!("{UP} is {up}"))
    });
    assert_rejection_logged_once(&test, "\"the list of containers\"");
}

#[test]
fn container_with_endless_inspect_has_its_name_from_the_list() {
    let endless = |id: &str| HttpResponse::Endless(format!("{{\"Id\":\"{id}\",\"Name\":\""), "n");
    let expected = Expected { is_named: true, up: Some(1.0) };
    run_with_docker(list, endless, no_response, expected);
}

#[test]
fn endless_inspect_and_event_are_aborted_and_do_not_affect_another_container() {
    let [endless, other] = [running_container(), running_container()];
    let [endless_id, other_id] = [&endless, &other].map(|container| container.cgroup.id.clone());
    let list = [listed(&endless_id, "endless"), listed(&other_id, "other")].join(",");
    let chunks = |begin: &str| HttpResponse::EndlessChunks(begin.to_owned(), "a");
    let events = chunks("{\"Action\":\"start\",\"Actor\":{\"ID\":\"");
    let inspect = {
        let endless_id = endless_id.clone();
        let image = "\\u0007\\u001b[2J".repeat(10_000);
        move |path: &str| {
            if path.contains(&endless_id) {
                return chunks("{\"Id\":\"");
            }
            inspected(&other_id, "other", &image)
        }
    };
    let runtime = Runtime::new(HttpResponse::Complete(format!("[{list}]")), events, inspect);
    let mut test = AttackTest::new(&["endless", "other"], &[&runtime.socket.flag()]);
    eventually("three connections for events", || match runtime.counters.events.load(Ordering::Relaxed) {
        0..3 => Err(test.memledger.log()),
        _ => Ok(()),
    });
    let metrics = test.run(two_are_counted);
    for name in ["endless", "other"] {
        let info = metrics.all("memledger_container_info", &[("container_name", name)]);
        assert_eq!(info.len(), 1, "{name}: {}", test.memledger.log());
        let image = &info[0].1["image"];
        assert!(image.len() <= 256 && !image.chars().any(char::is_control), "{image:?}");
    }
    assert_rejection_logged_once(&test, &endless_id);
    assert_rejection_logged_once(&test, "\"an event\"");
    let longest = runtime.counters.longest.load(Ordering::Relaxed);
    assert!(longest < MAX_ACCEPTED_OF_ONE, "{longest} bytes of one response were accepted");
}

#[test]
fn endless_event_is_aborted() {
    let endless = |_: &str| HttpResponse::Endless("{\"status\":\"".to_owned(), "s");
    let expected = Expected { is_named: true, up: None };
    let test = run_with_docker(list, inspect, endless, expected);
    test.memledger.eventually("the end of the connection", |_| {
        let log = test.memledger.log();
        if log.contains("connection lost") { Ok(()) } else { Err(log) }
    });
}

#[test]
fn endless_stream_of_events_needs_bounded_memory() {
    const EVENT: &str = concat!(
        r#"{"Type":"container","Action":"oom","Actor":{"ID":"1111111111111111111111111111111111111111111111111111111111111111","#,
        r#""Attributes":{"name":"ghost","image":"i"}},"time":1}"#,
        "\n"
    );
    let endless = |_: &str| HttpResponse::Endless(String::new(), EVENT);
    let expected = Expected { is_named: true, up: None };
    run_with_docker(list, inspect, endless, expected);
}

#[test]
fn endless_response_head_is_aborted() {
    let expected = Expected { is_named: false, up: Some(0.0) };
    let test = run_with_docker(|_| HttpResponse::EndlessHead, inspect, no_response, expected);
    assert_warnings_logged_once(&test);
}

#[test]
fn container_with_hanging_inspect_has_its_name_from_the_list() {
    let expected = Expected { is_named: true, up: None };
    run_with_docker(list, no_response, no_response, expected);
}

fn cri_method(name: &str) -> String {
    format!("/runtime.v1.RuntimeService/{name}")
}

/// Starts a CRI runtime with one container, and a kubelet.
fn cri(id: &str) -> Server {
    let server = Server::new();
    let version =
        messages::VersionResponse { runtime_name: "cri-o".into(), runtime_version: "1.31.2".into() };
    server.respond_with(&cri_method("Version"), &version);
    let container = messages::Container {
        id: id.into(),
        pod_sandbox_id: "s".repeat(64),
        metadata: Some(messages::ContainerMetadata { name: "named".into(), attempt: 0 }),
        state: messages::ContainerState::Running.into(),
        ..Default::default()
    };
    server.respond_with(
        &cri_method("ListContainers"),
        &messages::ListContainersResponse { containers: vec![container] },
    );
    let metadata =
        messages::PodSandboxMetadata { name: "pod".into(), uid: "7d1c".into(), namespace: "team".into() };
    let sandbox = messages::PodSandbox { id: "s".repeat(64), metadata: Some(metadata), ..Default::default() };
    server.respond_with(
        &cri_method("ListPodSandbox"),
        &messages::ListPodSandboxResponse { items: vec![sandbox] },
    );
    server
}

/// Runs memledger with a CRI runtime that has one container, and whose response to `method` has this many MiB.
fn run_with_cri(method: &str, mib: usize, is_named: bool, up: f64) -> AttackTest {
    let container = running_container();
    let server = cri(&container.cgroup.id);
    // valid for each method: the first field of all responses is a message or a text
    let long = messages::VersionResponse { runtime_name: "n".repeat(mib << 20), runtime_version: "".into() };
    server.set_response(method, Response::Message(long.encode_to_vec()));
    let socket = server.socket.display();
    let flags = [format!("--cri.endpoint={socket}"), format!("--kubelet.pod-resources={socket}")];
    let mut test = AttackTest::new(&[container.name(), "team/pod/named"], &[&flags[0], &flags[1]]);
    let name = if is_named { "named" } else { container.name() };
    test.run(|metrics: &Metrics| {
        has_memory(metrics, name)?;
        let actual = metrics.try_value(UP, &[("runtime", "cri")])?;
        (actual == up).then_some(()).ok_or_else(|| format!("{UP} is {actual}"))
    });
    assert!(server.call_count(method) > 0, "{method} was not called");
    test
}

#[test]
fn cri_list_of_17_mib_is_rejected() {
    let test = run_with_cri(&cri_method("ListContainers"), 17, false, 0.0);
    assert_warnings_logged_once(&test);
}

#[test]
fn container_with_cri_status_of_5_mib_has_its_name_from_the_list() {
    run_with_cri(&cri_method("ContainerStatus"), 5, true, 1.0);
}

#[test]
fn cri_event_of_2_mib_is_rejected() {
    run_with_cri(&cri_method("GetContainerEvents"), 2, true, 1.0);
}

#[test]
fn kubelet_response_of_17_mib_loses_only_the_allocations() {
    run_with_cri("/v1.PodResourcesLister/List", 17, true, 1.0);
}
