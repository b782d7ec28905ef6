//! A runtime whose answers have no end, or are not given: a socket that only pretends, in place of one that was taken over.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Attacker, Siege, has_memory};
use crate::support::Metrics;
use crate::support::docker::Socket;

const UP: &str = "memledger_runtime_up";
/// The most that is taken of all answers of one test together.
const MAX_TAKEN: u64 = 256 << 20;

/// What the runtime answers to a path.
#[derive(Clone, Copy)]
enum Answer {
    Whole(&'static str),
    /// A beginning, and then this without an end.
    Endless(&'static str, &'static str),
    /// Headers without an end.
    EndlessHead,
    /// Nothing, and the connection stays open.
    Silence,
}

/// A runtime that knows one container, whose id stands for `ID` in the answers; and the bytes that were taken of it.
struct Runtime {
    socket: Socket,
    taken: Arc<AtomicU64>,
}

impl Runtime {
    fn of(id: &str, list: Answer, inspect: Answer, events: Answer) -> Self {
        let taken = Arc::new(AtomicU64::new(0));
        let (counter, id) = (Arc::clone(&taken), id.to_owned());
        let socket = Socket::serving(move |mut stream| {
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let answer = match request.split([' ', '?']).nth(1) {
                Some(path) if path.ends_with("/containers/json") => list,
                Some(path) if path.ends_with("/events") => events,
                _ => inspect,
            };
            let _ = write(&mut stream, answer, &id, &counter);
        });
        Self { socket, taken }
    }
}

fn write(stream: &mut UnixStream, answer: Answer, id: &str, taken: &AtomicU64) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
    let (begin, more) = match answer {
        Answer::Whole(text) => {
            (format!("{head}Content-Length: {}\r\n\r\n{}", id_in(text, id).len(), id_in(text, id)), None)
        }
        Answer::Endless(begin, more) => (format!("{head}\r\n{}", id_in(begin, id)), Some(more.to_owned())),
        Answer::EndlessHead => (head.to_owned(), Some("X-Filler: x\r\n".to_owned())),
        Answer::Silence => (String::new(), None),
    };
    stream.write_all(begin.as_bytes())?;
    let Some(more) = more else {
        return stream.read_to_end(&mut Vec::new()).map(drop); // until the other side closes
    };
    let block = more.repeat((1 << 16) / more.len() + 1);
    loop {
        stream.write_all(block.as_bytes())?;
        taken.fetch_add(block.len() as u64, Ordering::Relaxed);
    }
}

fn id_in(text: &str, id: &str) -> String {
    text.replace("ID", id)
}

const LIST: Answer = Answer::Whole(r#"[{"Id":"ID","Names":["/named"],"Image":"i","State":"running"}]"#);
const INSPECT: Answer = Answer::Whole(
    r#"{"Id":"ID","Name":"/named","State":{"Running":true,"StartedAt":"2026-01-01T00:00:00Z"},"Config":{"Image":"i"}}"#,
);

/// Watches the harmless container, and one that the runtime knows, under the name that it has then.
fn endure(list: Answer, inspect: Answer, events: Answer, name: Option<&str>, up: Option<f64>) -> Siege {
    let mut known = Attacker::limited(64);
    assert_eq!(known.run("print('ready'); input()", &[]), "ready");
    let runtime = Runtime::of(&known.cgroup.id, list, inspect, events);
    let mut siege = Siege::of(&[known.name(), "named"], &[&runtime.socket.flag()]);
    let name = name.unwrap_or(known.name()).to_owned();
    siege.endure(|metrics: &Metrics| {
        has_memory(metrics, &name)?;
        let Some(wanted) = up else { return Ok(()) };
        let is = metrics.ask(UP, &[("runtime", "docker")])?;
        (is == wanted).then_some(()).ok_or_else(|| format!("the runtime's state: {is}"))
    });
    let taken = runtime.taken.load(Ordering::Relaxed);
    eprintln!("{:.1} MiB of its answers were taken", taken as f64 / super::MIB);
    assert!(taken < MAX_TAKEN, "{taken} bytes of its answers were taken");
    siege
}

/// Each warning is logged once, not for every try.
fn warns_once(siege: &Siege) {
    let log = siege.memledger.log();
    let warnings = log.lines().filter(|line| line.contains("level=warn") && line.contains("discover"));
    let mut warnings: Vec<_> =
        warnings.filter_map(|line| line.split_once(' ')).map(|(_, text)| text).collect();
    let count = warnings.len();
    warnings.sort_unstable();
    warnings.dedup();
    assert!(count == warnings.len() && (1..=3).contains(&count), "{log}");
}

#[test]
fn list_without_end_is_given_up() {
    let element =
        r#"{"Id":"0000000000000000000000000000000000000000000000000000000000000000","Names":["/x"]},"#;
    let siege = endure(Answer::Endless("[", element), INSPECT, Answer::Silence, None, Some(0.0));
    warns_once(&siege);
}

#[test]
fn list_of_one_endless_string_is_given_up() {
    let siege = endure(Answer::Endless("[{\"Id\":\"", "0"), INSPECT, Answer::Silence, None, Some(0.0));
    warns_once(&siege);
}

#[test]
fn inspect_without_end_costs_only_what_inspect_knows() {
    endure(
        LIST,
        Answer::Endless("{\"Id\":\"ID\",\"Name\":\"", "n"),
        Answer::Silence,
        Some("named"),
        Some(1.0),
    );
}

#[test]
fn event_without_end_is_given_up() {
    let siege = endure(LIST, INSPECT, Answer::Endless("{\"status\":\"", "s"), Some("named"), None);
    siege.memledger.eventually("the end of the connection", |_| {
        let log = siege.memledger.log();
        if log.contains("connection lost") { Ok(()) } else { Err(log) }
    });
}

#[test]
fn events_without_number_are_read_and_forgotten() {
    let event = concat!(
        r#"{"Type":"container","Action":"oom","Actor":{"ID":"1111111111111111111111111111111111111111111111111111111111111111","#,
        r#""Attributes":{"name":"ghost","image":"i"}},"time":1}"#,
        "\n"
    );
    endure(LIST, INSPECT, Answer::Endless("", event), Some("named"), None);
}

#[test]
fn answer_whose_head_has_no_end_is_given_up() {
    let siege = endure(Answer::EndlessHead, INSPECT, Answer::Silence, None, Some(0.0));
    warns_once(&siege);
}

#[test]
fn inspect_that_hangs_costs_only_what_inspect_knows() {
    endure(LIST, Answer::Silence, Answer::Silence, Some("named"), None);
}
