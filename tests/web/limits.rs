//! Misbehaving clients, with and without TLS: slow, many, with large or ambiguous requests.

use std::io::{ErrorKind, Read, Write};
use std::time::Duration;

use super::site::{ALONE, Client, Site, TLS, connect, exchange, get};
use crate::support::load::assert_response;
use crate::support::{Memledger, eventually, run_delay_nanos};

const SHORT_TIMEOUTS: &[&str] = &["--web.header-timeout=1s", "--web.idle-timeout=1s"];
/// Closes idle connections soon, and none of a client that a busy host delays in its handshake.
const SHORT_IDLE_TIMEOUT: &[&str] = &["--web.header-timeout=1m", "--web.idle-timeout=1s"];

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A memledger with plain HTTP or TLS, and a client for it.
struct Served {
    memledger: Memledger,
    client: Option<Client>,
    _site: Site,
}

impl Served {
    fn both(flags: &[&str]) -> [Self; 2] {
        let plain = Memledger::start(&[ALONE, flags].concat());
        let site = Site::new(TLS);
        let tls = site.start(flags);
        let client = Some(site.client());
        [
            Self { memledger: plain, client: None, _site: Site::new("") },
            Self { memledger: tls, client, _site: site },
        ]
    }

    fn connect(&self) -> Box<dyn Stream> {
        match &self.client {
            None => Box::new(connect(&self.memledger)),
            Some(client) => Box::new(client.connect(&self.memledger)),
        }
    }

    fn get(&self, path: &str, headers: &str) -> Result<(u16, String), String> {
        exchange(self.connect(), &get(path, headers))
    }

    fn scheme(&self) -> &'static str {
        if self.client.is_some() { "https" } else { "http" }
    }
}

/// Waits until the other side closes the connection. Returns what was received before that.
pub(super) fn until_closed(mut stream: impl Read) -> String {
    let mut text = Vec::new();
    if let Err(error) = stream.read_to_end(&mut text) {
        assert!(
            !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            "it was not closed: {error}"
        );
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn silent_and_incomplete_requests_time_out() {
    for served in Served::both(SHORT_TIMEOUTS) {
        let silent = connect(&served.memledger); // with TLS, no handshake either
        assert_eq!(until_closed(silent), "", "{}", served.scheme());
        for half in ["", "GET /metrics HTT", "GET /metrics HTTP/1.1\r\nHost: localhost\r\n"] {
            let mut stream = served.connect();
            let _ = stream.write_all(half.as_bytes()).and_then(|()| stream.flush()); // on a busy host it is late
            assert_eq!(until_closed(stream), "", "{} {half:?}", served.scheme());
        }
        eventually("a response to a client that is not late", || match served.get("/metrics", "")?.0 {
            200 => Ok(()),
            status => Err(status.to_string()),
        });
    }
}

#[test]
fn head_timeout_is_not_reset_by_each_byte() {
    // an idle timeout alone would be reset by each byte
    for served in Served::both(&["--web.header-timeout=1s", "--web.idle-timeout=1h"]) {
        let mut stream = served.connect();
        let endless = std::iter::repeat_n(b'a', 1_000);
        for byte in b"GET / HTTP/1.1\r\nX-Slow: ".iter().copied().chain(endless) {
            if stream.write_all(&[byte]).and_then(|()| stream.flush()).is_err() {
                break; // closed
            }
            std::thread::park_timeout(Duration::from_millis(50)); // the test needs a slow client
        }
        assert_eq!(until_closed(stream), "", "{}", served.scheme());
    }
}

#[test]
fn pause_between_requests_may_exceed_head_timeout() {
    // the first request, with its handshake, has 4 s
    for served in Served::both(&["--web.header-timeout=4s", "--web.idle-timeout=1h"]) {
        let mut stream = served.connect();
        for pause in [Duration::from_secs(5), Duration::ZERO] {
            stream.write_all(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            let mut response = [0; 512];
            let length = stream.read(&mut response).unwrap();
            assert!(response[..length].starts_with(b"HTTP/1.1 200"), "{}", served.scheme());
            std::thread::park_timeout(pause); // the test needs it
        }
    }
}

#[test]
fn idle_connection_is_closed_after_its_response() {
    for served in Served::both(SHORT_IDLE_TIMEOUT) {
        let mut stream = served.connect();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let response = until_closed(stream);
        assert!(response.starts_with("HTTP/1.1 200") && response.ends_with('\n'), "{}", served.scheme());
    }
}

#[test]
fn client_that_never_reads_is_disconnected() {
    let memledger = Memledger::start(&[ALONE, SHORT_TIMEOUTS].concat());
    let before = open_sockets(&memledger);
    let mut stream = connect(&memledger);
    // requests until the responses fill the socket buffers, without reading
    stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
    while stream.write_all(request.as_bytes()).is_ok() {}
    eventually("the socket is closed", || match open_sockets(&memledger) {
        now if now <= before => Ok(()),
        now => Err(format!("{now} of {before}")),
    });
}

pub(super) fn open_sockets(memledger: &Memledger) -> usize {
    let links = std::fs::read_dir(format!("/proc/{}/fd", memledger.pid())).unwrap();
    let targets = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn limits_size_of_heads_and_urls_and_ignores_bodies() {
    for served in Served::both(&[]) {
        let status_of = |text: String| exchange(served.connect(), &text).map(|(status, _)| status);
        let large = "a".repeat(20_000);
        assert_eq!(status_of(get("/metrics", &format!("X-Large: {large}\r\n"))), Ok(431));
        assert_eq!(status_of(get(&format!("/{large}"), "")), Ok(431));
        for _ in 0..20 {
            let huge = "a".repeat(300_000);
            assert_eq!(status_of(get("/metrics", &format!("X-Huge: {huge}\r\n"))), Ok(431), "no reset");
        }
        let many: String = (0..100).map(|number| format!("X-{number}: a\r\n")).collect();
        assert_eq!(status_of(get("/metrics", &many)), Ok(431));
        for body in ["Content-Length: 20000\r\n", "Content-Length: 3\r\n"] {
            assert_eq!(status_of(get("/metrics", body) + "abc"), Ok(200), "no route reads a body");
        }
        assert_eq!(status_of(get(&format!("/{}", "a".repeat(1_000)), "")), Ok(404));
    }
}

#[test]
fn connection_above_the_limit_gets_503() {
    // one for this host
    for served in
        Served::both(&["--web.max-connections=4", "--web.idle-timeout=1h", "--web.header-timeout=5m"])
    {
        let mut held = Vec::new();
        eventually("the limit", || match served.get("/-/healthy", "")? {
            (503, text) if text.contains("too many connections; see --web.max-connections") => Ok(()),
            other => {
                held.push(connect(&served.memledger)); // one of before was still open
                Err(format!("{other:?}"))
            }
        });
        for _ in 0..50 {
            let (status, text) = served.get("/metrics", "").expect("a response, and no reset");
            assert!(status == 503 && text.contains("--web.max-connections\n"), "{text}");
        }
        drop(held);
        eventually("a free permit", || match served.get("/metrics", "")? {
            (200, _) => Ok(()),
            (status, _) => Err(status.to_string()),
        });
    }
}

#[test]
fn ambiguous_requests_do_not_smuggle_a_second_one() {
    let hidden = "GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let head = "GET / HTTP/1.1\r\nHost: localhost\r\n";
    for served in Served::both(SHORT_IDLE_TIMEOUT) {
        for (what, text) in [
            (
                "both lengths",
                format!("{head}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"),
            ),
            (
                "both, in the other order",
                format!("{head}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n{hidden}"),
            ),
            ("two lengths", format!("{head}Content-Length: 0\r\nContent-Length: 44\r\n\r\n{hidden}")),
            ("a length with a sign", format!("{head}Content-Length: +0\r\n\r\n{hidden}")),
            ("not chunked in the end", format!("{head}Transfer-Encoding: chunked, identity\r\n\r\n{hidden}")),
            ("an encoding that is none", format!("{head}Transfer-Encoding: xchunked\r\n\r\n{hidden}")),
            ("a folded header", format!("{head}X-A: b\r\n Transfer-Encoding: chunked\r\n\r\n{hidden}")),
            ("a space before the colon", format!("{head}Content-Length : 0\r\n\r\n{hidden}")),
            (
                "chunked in HTTP/1.0",
                format!("{}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}", head.replace("1.1", "1.0")),
            ),
            ("a carriage return in a value", format!("{head}X-A: b\rc\r\n\r\n{hidden}")),
            ("a zero byte", format!("{head}X-A: b\0c\r\n\r\n{hidden}")),
        ] {
            let (_, responses) = exchange(served.connect(), &text).unwrap();
            assert!(!responses.contains("memledger is healthy"), "{} {what}: {responses}", served.scheme());
        }
        // the check can fail: two valid requests get two responses
        let separate = format!("{head}\r\n{}", hidden.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n"));
        assert!(exchange(served.connect(), &separate).unwrap().1.contains("memledger is healthy"));
    }
}

#[test]
fn path_traversal_reaches_no_file_and_no_route() {
    for served in Served::both(&[]) {
        for path in [
            "/../etc/passwd",
            "/metrics/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2fetc%2fpasswd",
            "/..\\..\\etc\\passwd",
            "//etc/passwd",
            "/metrics/",
            "/METRICS",
            "/-/release-gpu",
            "/api/v1/../../metrics",
        ] {
            let status = served.get(path, "").map(|(status, _)| status);
            assert!(matches!(status, Ok(400 | 404)), "{} {path}: {status:?}", served.scheme());
        }
        let why = served.get("/api/v1/containers/..%2f..%2fmetrics/why", "").unwrap();
        assert!(why.0 == 404 && !why.1.contains("# HELP"), "an encoded path is a container name: {why:?}");
    }
}

#[test]
fn ten_thousand_requests_do_not_grow_memory_or_delay_cycles() {
    for served in Served::both(&["--sample.interval=1s"]) {
        let memledger = &served.memledger;
        let send_requests = |count: usize| {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let mut stream = served.connect();
                        let mut buffer = vec![0; 256 << 10];
                        for _ in 0..count / 4 {
                            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
                            assert_response(&mut stream, &mut buffer);
                        }
                    });
                }
            });
        };
        send_requests(1_000);
        let read = |name: &str| {
            let (_, text) = served.get("/metrics", "").unwrap();
            crate::support::Metrics::parse(text.split_once("\r\n\r\n").unwrap().1).value(name, &[])
        };
        let stamp = "memledger_snapshot_timestamp_seconds";
        let skipped = || read("memledger_cycles_skipped_total");
        // of which other tests may have most, and the requests some
        let run_delay = || run_delay_nanos(memledger.pid(), "cycle") / 1e9;
        let (before, began, skipped_before, run_delay_before) =
            (memledger.anonymous_bytes(), read(stamp), skipped(), run_delay());
        send_requests(10_000);
        let grown = memledger.anonymous_bytes().saturating_sub(before);
        assert!(grown < 8 << 20, "{}: {grown} bytes more", served.scheme());
        eventually("a newer snapshot", || match read(stamp) - began {
            passed if passed > 0.5 => Ok(()),
            passed => Err(passed.to_string()),
        });
        let late = skipped() - skipped_before;
        let passed = read(stamp) - began;
        assert!(
            late <= 1.0 + passed / 10.0 + (run_delay() - run_delay_before) && late <= 2.0 + passed / 2.0,
            "{}: {late} cycles of {passed} s were left out",
            served.scheme()
        );
    }
}
