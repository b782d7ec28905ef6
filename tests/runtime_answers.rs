//! A runtime whose responses have no end. No real engine does that, so the test imitates one on a socket; memledger, its connection
//! and its memory are real.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::cgroups::TestCgroup;
use crate::support::{Memledger, eventually};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// The endless responses, and the number of calls.
#[derive(Default)]
struct Runtime {
    /// Id of the container with an endless inspect.
    endless: String,
    /// Id of the container with a valid inspect.
    plain: String,
    is_list_endless: bool,
    lists: AtomicU64,
    inspects: AtomicU64,
    events: AtomicU64,
    /// Longest response that the client accepted.
    longest: AtomicU64,
}

impl Runtime {
    fn listen(self: &Arc<Self>, socket: &Path) {
        let listener = UnixListener::bind(socket).expect("a socket");
        let this = Arc::clone(self);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let this = Arc::clone(&this);
                std::thread::spawn(move || this.serve(stream));
            }
        });
    }

    fn serve(&self, mut stream: UnixStream) {
        let mut head = BufReader::new(stream.try_clone().expect("a socket"));
        let mut line = String::new();
        if head.read_line(&mut line).is_err() {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        while head.read_line(&mut line).is_ok_and(|read| read > 2) {}
        let listed = |id: &str, name: &str| {
            format!(
                "{{\"Id\":\"{id}\",\"Names\":[\"/{name}\"],\"Image\":\"i\",\"State\":\"running\",\"Labels\":{{}}}}"
            )
        };
        if path.contains("/events") {
            self.events.fetch_add(1, Ordering::Relaxed);
            self.send_endless(&mut stream, "{\"Action\":\"start\",\"Actor\":{\"ID\":\"");
        } else if path.contains("/containers/json") {
            self.lists.fetch_add(1, Ordering::Relaxed);
            if self.is_list_endless {
                self.send_endless(&mut stream, "[{\"Id\":\"");
            } else {
                let list = [listed(&self.endless, "endless"), listed(&self.plain, "plain")].join(",");
                send(&mut stream, &format!("[{list}]"));
            }
        } else if path.contains(&self.endless) {
            self.inspects.fetch_add(1, Ordering::Relaxed);
            self.send_endless(&mut stream, "{\"Id\":\"");
        } else {
            let id = &self.plain;
            let state = "{\"Running\":true,\"Pid\":1,\"StartedAt\":\"2026-11-21T03:25:01.5Z\"}";
            let config = format!("{{\"Image\":\"{}\"}}", "\\u0007\\u001b[2J".repeat(10_000));
            send(
                &mut stream,
                &format!("{{\"Id\":\"{id}\",\"Name\":\"/plain\",\"State\":{state},\"Config\":{config}}}"),
            );
        }
    }

    /// Sends 1 GiB of text without an end.
    fn send_endless(&self, stream: &mut UnixStream, beginning: &str) {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
        let chunk = |text: &[u8]| [format!("{:x}\r\n", text.len()).as_bytes(), text, b"\r\n"].concat();
        let (first, more) = (chunk(beginning.as_bytes()), chunk(&[b'a'; 16_384]));
        let mut sent = 0;
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&first)).is_ok() {
            while sent < GIB && stream.write_all(&more).is_ok() {
                sent += more.len() as u64;
            }
        }
        self.longest.fetch_max(sent, Ordering::Relaxed);
    }
}

fn send(stream: &mut UnixStream, body: &str) {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
}

/// Returns the peak of resident memory of a process.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

fn start(runtime: &Arc<Runtime>, socket: &Path) -> Memledger {
    runtime.listen(socket);
    Memledger::start(&[
        &format!("--docker.socket={}", socket.display()),
        "--podman.socket=",
        "--no-collector.gpu",
    ])
}

#[test]
fn endless_inspect_and_event_take_bounded_memory() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let folder = tempfile::tempdir().unwrap();
    let (endless, plain) = (a.id.to_owned(), b.id.to_owned());
    let runtime = Arc::new(Runtime { endless, plain, ..Runtime::default() });
    let memledger = start(&runtime, &folder.path().join("docker.sock"));
    eventually("several connections", || match runtime.events.load(Ordering::Relaxed) {
        0..3 => Err(memledger.log()),
        _ => Ok(()),
    });
    let metrics = memledger.fresh_metrics();
    for name in ["endless", "plain"] {
        let info = metrics.all("memledger_container_info", &[("container_name", name)]);
        assert_eq!(info.len(), 1, "{name}: {}", memledger.log());
        let image = &info[0].1["image"];
        assert!(image.len() <= 256 && !image.chars().any(char::is_control), "{image:?}");
    }
    let labels = [("collector", "discover"), ("reason", "too_large")];
    memledger.eventually("both are counted", |metrics| {
        match metrics.value("memledger_collector_read_errors_total", &labels) {
            counted if counted >= 2.0 => Ok(()),
            counted => Err(format!("{counted}")),
        }
    });
    let log = memledger.log();
    for about in [format!("about={}", a.id), "about=\"an event\"".to_owned()] {
        assert_eq!(log.lines().filter(|line| line.contains(&about)).count(), 1, "{about}: {log}");
    }
    let longest = runtime.longest.load(Ordering::Relaxed);
    assert!(longest < 8 * MIB, "{longest} bytes were read");
    let peak = peak_bytes(memledger.pid());
    assert!(peak < 60 * MIB, "{} MiB", peak / MIB);
}

#[test]
fn endless_list_takes_bounded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = Arc::new(Runtime { is_list_endless: true, ..Runtime::default() });
    let memledger = start(&runtime, &folder.path().join("docker.sock"));
    // a list of all containers, one of the running ones, and those of a new ledger, which reads the past
    eventually("several lists", || match runtime.lists.load(Ordering::Relaxed) {
        0..4 => Err(memledger.log()),
        _ => Ok(()),
    });
    memledger.eventually("a runtime that is down, and two counted errors", |metrics| {
        let up = metrics.ask("memledger_runtime_up", &[("runtime", "docker")])?;
        let labels = [("collector", "discover"), ("reason", "too_large")];
        let errors = metrics.ask("memledger_collector_read_errors_total", &labels)?;
        if up == 0.0 && errors >= 2.0 { Ok(()) } else { Err(format!("up {up}, {errors} errors")) }
    });
    let log = memledger.log();
    let about = "about=\"the list of containers\"";
    assert_eq!(log.lines().filter(|line| line.contains(about)).count(), 1, "{log}");
    let peak = peak_bytes(memledger.pid());
    assert!(peak < 60 * MIB, "{} MiB", peak / MIB);
}
