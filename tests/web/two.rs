//! Clients of HTTP/2 that behave badly, frame by frame.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use memledger::clock::Moment;
use rustls::{ClientConnection, StreamOwned};

use super::site::{Site, TLS};
use crate::support::{Memledger, eventually};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

const REFUSED_STREAM: u32 = 7;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A whole request of GET.
fn get(stream: u32, path: &str) -> Vec<u8> {
    frame(HEADERS, END_STREAM | END_HEADERS, stream, &block(path))
}

/// Its header block: GET and https by their numbers, path and authority as they are.
fn block(path: &str) -> Vec<u8> {
    let literal = |name: u8, value: &str| [&[name, value.len() as u8], value.as_bytes()].concat();
    [vec![0x82, 0x87], literal(4, path), literal(1, "127.0.0.1")].concat()
}

struct Two(StreamOwned<ClientConnection, TcpStream>);

impl Two {
    /// A connection after the preface, with these settings.
    fn open(site: &Site, memledger: &Memledger, settings: &[(u16, u32)]) -> Self {
        let mut two = Self(site.client().of_two().connect(memledger));
        let settings: Vec<_> = settings
            .iter()
            .flat_map(|(name, value)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        two.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        two.send(&frame(SETTINGS, 0, 0, &settings));
        two
    }

    fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).unwrap();
    }

    fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write_all(bytes)?;
        self.0.flush()
    }

    /// The next frame: its kind, flags, stream and payload. `None` if the connection is closed.
    fn next(&mut self) -> Option<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.0.read_exact(&mut payload).ok()?;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        Some((head[3], head[4], stream, payload))
    }

    /// Reads until the other side closes; panics if it does not.
    fn until_closed(&mut self) {
        super::limits::until_closed(&mut self.0);
    }
}

fn served(flags: &[&str]) -> (Site, Memledger) {
    let site = Site::new(TLS);
    let memledger = site.start(&[&["--log.level=debug"], flags].concat());
    (site, memledger)
}

fn assert_closed_because(memledger: &Memledger, reason: &str) {
    eventually("the reason in the log", || match memledger.log().contains(reason) {
        true => Ok(()),
        false => Err(memledger.log()),
    });
}

#[test]
fn a_head_that_does_not_come_to_its_end_has_no_more_time_than_in_http_1() {
    for (what, bytes) in [
        ("nothing after the preface", vec![]),
        ("half a frame", frame(HEADERS, END_STREAM | END_HEADERS, 1, &block("/"))[..15].to_vec()),
        ("a block that goes on", frame(HEADERS, END_STREAM, 1, &block("/"))),
    ] {
        let (site, memledger) = served(&["--web.header-timeout=1s", "--web.idle-timeout=1h"]);
        let mut two = Two(site.client().of_two().connect(&memledger));
        two.send(b"PRI * HTTP/2.0\r\n");
        if !bytes.is_empty() {
            two = Two::open(&site, &memledger, &[]);
            two.send(&bytes);
        }
        two.until_closed();
        assert_closed_because(&memledger, "the head of a request took too long");
        drop((what, site));
    }
}

#[test]
fn a_head_that_comes_byte_by_byte_is_cut_off() {
    let (site, memledger) = served(&["--web.header-timeout=1s", "--web.idle-timeout=1h"]);
    let mut two = Two::open(&site, &memledger, &[]);
    let long = frame(HEADERS, END_STREAM | END_HEADERS, 1, &[b'a'; 2_000]);
    let mut bytes = long.iter();
    while two.try_send(&[*bytes.next().expect("it is cut off before its end")]).is_ok() {
        std::thread::park_timeout(Duration::from_millis(50)); // the client's slowness is what is tested
    }
    assert_closed_because(&memledger, "the head of a request took too long");
}

#[test]
fn pings_do_not_keep_a_connection_on_which_nothing_is_asked() {
    let (site, memledger) = served(&["--web.header-timeout=5m", "--web.idle-timeout=2s"]);
    let mut two = Two::open(&site, &memledger, &[]);
    two.send(&get(1, "/-/healthy"));
    let asked = Moment::now();
    while two.try_send(&frame(PING, 0, 0, &[7; 8])).is_ok() {
        assert!(Moment::now().since(asked) < Duration::from_secs(60), "it was not closed");
        std::thread::park_timeout(Duration::from_millis(50)); // the pace of the pings is what is tested
    }
    let passed = Moment::now().since(asked);
    assert!(passed >= Duration::from_secs(2), "not before its time: {passed:?}");
    assert_closed_because(&memledger, "nothing moved for too long");
}

#[test]
fn more_streams_than_allowed_are_refused_and_the_others_answered() {
    let (site, memledger) = served(&["--web.max-requests=0"]);
    let mut two = Two::open(&site, &memledger, &[(4, 0)]); // nothing may be sent to us yet
    let (_, _, _, settings) = two.next().expect("the other side's settings");
    let of = |name: u16| {
        let mut pairs = settings.chunks(6);
        let pair = pairs.find(|pair| u16::from_be_bytes([pair[0], pair[1]]) == name)?;
        Some(u32::from_be_bytes(pair[2..].try_into().unwrap()))
    };
    assert_eq!((of(3), of(6)), (Some(8), Some(16 << 10)), "streams at once, and bytes of headers");
    two.send(&frame(SETTINGS, 1, 0, &[]));
    let streams = (0..16).map(|number| 2 * number + 1);
    two.send(&streams.flat_map(|stream| get(stream, "/metrics")).collect::<Vec<_>>());
    let (mut refused, mut answered) = (vec![], vec![]);
    while refused.len() + answered.len() < 16 {
        match two.next().expect("it goes on") {
            (RESET, _, stream, code) => {
                assert_eq!(code, REFUSED_STREAM.to_be_bytes());
                refused.push(stream);
            }
            (HEADERS, flags, stream, _) => {
                assert_eq!(flags & END_STREAM, 0, "a body follows");
                answered.push(stream);
            }
            _ => {}
        }
    }
    assert_eq!((refused.len(), answered.len()), (8, 8));
    assert!(refused.iter().all(|stream| *stream > 16), "{refused:?}");
    // and once it may be sent, it comes
    two.send(&frame(SETTINGS, 0, 0, &[0, 4, 0, 4, 0, 0]));
    eventually("a body", || match two.next() {
        Some((DATA, ..)) => Ok(()),
        other => Err(format!("{:?}", other.map(|(kind, ..)| kind))),
    });
}

#[test]
fn headers_beyond_their_size_are_refused_however_they_are_cut() {
    let (site, memledger) = served(&["--web.header-timeout=5m", "--web.idle-timeout=1h"]);
    let ask = |length: usize| {
        let output = Command::new("curl")
            .args(["-sS", "-o", "/dev/null", "-w", "%{http_version} %{http_code}", "--cacert"])
            .args([&site.path("ca.pem"), "-H", &format!("X-Large: {}", "a".repeat(length))])
            .arg(format!("https://{}/metrics", memledger.address))
            .output()
            .expect("curl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!((ask(10_000).as_str(), ask(20_000).as_str()), ("2 200", "2 431"));
    // a block that never ends
    let mut two = Two::open(&site, &memledger, &[]);
    two.send(&frame(HEADERS, END_STREAM, 1, &block("/")));
    let more = frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b").repeat(100);
    let mut sent = 0;
    while two.try_send(&more).is_ok() {
        sent += 100;
        assert!(sent < 1_000_000, "it was not closed");
    }
}

#[test]
fn who_asks_and_takes_back_without_end_is_sent_away_and_harms_no_scrape() {
    let (site, memledger) = served(&[]);
    let mut two = Two::open(&site, &memledger, &[]);
    let pairs = (0..5_000_u32).flat_map(|number| {
        let stream = 2 * number + 1;
        [get(stream, "/metrics"), frame(RESET, 0, stream, &8_u32.to_be_bytes())].concat()
    });
    let pairs: Vec<_> = pairs.collect();
    std::thread::scope(|scope| {
        let scrapes = scope
            .spawn(|| (0..20).all(|_| matches!(site.client().get(&memledger, "/metrics", ""), Ok((200, _)))));
        let _ = two.try_send(&pairs); // it may be cut off in the middle
        two.until_closed();
        assert!(scrapes.join().unwrap());
    });
    assert_closed_because(&memledger, "a connection ended"); // with an error: it was sent away
}

#[test]
fn an_answer_that_is_taken_byte_by_byte_has_its_time_too() {
    let (site, memledger) = served(&["--web.max-requests=1", "--web.idle-timeout=5s"]);
    let mut two = Two::open(&site, &memledger, &[(4, 0)]);
    let asked = Moment::now();
    two.send(&get(1, "/metrics"));
    let busy = || site.client().get(&memledger, "/metrics", "").map(|(status, _)| status);
    eventually("the place is taken", || match busy()? {
        503 => Ok(()),
        status => Err(status.to_string()),
    });
    while two.try_send(&frame(WINDOW_UPDATE, 0, 1, &1_u32.to_be_bytes())).is_ok() {
        assert!(Moment::now().since(asked) < Duration::from_secs(120), "it was not cut off");
        std::thread::park_timeout(Duration::from_millis(100)); // the client's slowness is what is tested
    }
    let passed = Moment::now().since(asked);
    assert!(
        passed >= Duration::from_secs(30),
        "it had its time, which is longer than an idle one's: {passed:?}"
    );
    assert_closed_because(&memledger, "an answer was read too slowly");
    eventually("the place is free", || match busy()? {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
}
