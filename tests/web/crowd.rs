//! More connections than there are places: idle, asking now and then, under way.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{self, AddressFamily, SocketType, sockopt};

use super::passwords::own_address;
use super::site::{ALONE, connect, exchange, get};
use super::slow::unsent;
use crate::support::{Memledger, eventually, skip};

const PATIENT: &[&str] = &["--web.idle-timeout=1h", "--web.header-timeout=5m"];
const HEALTHY: &str = "GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Where a memledger listens besides loopback.
fn other_address(memledger: &Memledger) -> SocketAddr {
    let log = memledger.log();
    let mut places = log.lines().filter_map(|line| line.split_once("message=listening address="));
    places.nth(1).expect("the second address").1.parse().unwrap()
}

/// Asks once and reads the answer. False if the connection is closed.
fn asks(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 1_024];
    stream.write_all(HEALTHY.as_bytes()).is_ok()
        && stream.read(&mut answer).is_ok_and(|length| answer[..length].starts_with(b"HTTP/1.1 200"))
}

/// Whether nothing was said on it, and it is open.
fn is_open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let outcome = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    matches!(outcome, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn come(place: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(place).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

#[test]
fn who_holds_all_connections_and_asks_now_and_then_keeps_nobody_out() {
    let Some(address) = own_address() else { return skip("this host has no address but loopback") };
    let listen = format!("--web.listen-address={address}:0");
    let flags = ["--web.max-connections=32", listen.as_str()];
    let memledger = Memledger::start(&[ALONE, PATIENT, &flags].concat());
    let place = other_address(&memledger);
    // who scrapes from this host has its connection before the others come
    let mut scraper = connect(&memledger);
    assert!(asks(&mut scraper));
    let mut crowd: Vec<_> = (0..28).map(|_| come(place)).collect();
    for _ in 0..20 {
        let _ = crowd.iter_mut().filter_map(|stream| asks(stream).then_some(())).count();
        let mut newcomer = come(place);
        assert!(asks(&mut newcomer), "one more finds a place: {}", memledger.log());
        crowd.push(newcomer);
    }
    assert!(asks(&mut scraper), "a connection of this host gives way to no other host");
    // the places of this host are not taken either
    assert!(asks(&mut connect(&memledger)));
    eventually("no more are open than there are places", || {
        match crowd.iter().filter(|stream| is_open(stream)).count() {
            open if open <= 28 => Ok(()),
            open => Err(open.to_string()),
        }
    });
    memledger.eventually("those that were closed are counted", |metrics| {
        match metrics.value("memledger_web_refused_total", &[("reason", "connections")]) {
            count if count >= 20.0 => Ok(()),
            count => Err(count.to_string()),
        }
    });
}

#[test]
fn connections_that_say_nothing_give_way_the_oldest_first() {
    let memledger = Memledger::start(&[ALONE, PATIENT, &["--web.max-connections=16"]].concat());
    let mut silent: Vec<_> = (0..16).map(|_| connect(&memledger)).collect();
    // one half of a head is no request under way
    silent[0].write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let mut newcomers: Vec<_> = (0..4).map(|_| connect(&memledger)).collect();
    assert!(newcomers.iter_mut().all(asks));
    for (number, mut stream) in silent.drain(..4).enumerate() {
        let ended = stream.read(&mut [0]);
        let is_closed = match &ended {
            Ok(length) => *length == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        };
        assert!(is_closed, "{number}: {ended:?}");
    }
    assert!(newcomers.iter_mut().all(asks), "and those that ask stay");
}

/// Asks without reading until the sockets' buffers are full: an answer is under way from then on.
fn fills(stream: &mut TcpStream) {
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(2_000).into_bytes();
    stream.set_nonblocking(true).unwrap();
    let mut rest = &request[..];
    eventually("it takes no more", || {
        loop {
            match stream.write(rest) {
                Ok(length) => rest = &rest[length..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
            if rest.is_empty() {
                rest = &request;
            }
        }
    });
    stream.set_nonblocking(false).unwrap();
}

#[test]
fn one_address_leaves_a_quarter_of_the_requests_to_others() {
    let Some(address) = own_address() else { return skip("this host has no address but loopback") };
    let listen = format!("--web.listen-address={address}:0");
    let memledger = Memledger::start(&[ALONE, PATIENT, &["--web.max-requests=4", &listen]].concat());
    let place = other_address(&memledger);
    let mut slow: Vec<_> = (0..3).map(|_| come(place)).collect();
    slow.iter_mut().for_each(fills);
    eventually("it holds its share", || match exchange(come(place), &get("/", ""))? {
        (503, _) => Ok(()),
        (status, _) => Err(status.to_string()),
    });
    assert_eq!(exchange(connect(&memledger), &get("/metrics", "")).unwrap().0, 200, "another finds a place");
}

#[test]
fn one_whose_answer_is_being_sent_is_never_closed_for_another() {
    let memledger =
        Memledger::start(&[ALONE, PATIENT, &["--web.max-connections=8", "--web.max-requests=4"]].concat());
    // as many as one address may have
    let mut busy: Vec<_> = (0..3).map(|_| connect(&memledger)).collect();
    busy.iter_mut().for_each(fills);
    // until then answers still fit, and there is a moment between one and the next
    eventually("all three wait for their reader", || {
        let is_refused =
            |_| exchange(connect(&memledger), &get("/metrics", "")).map(|(status, _)| status) == Ok(503);
        if (0..20).all(is_refused) { Ok(()) } else { Err("a place was free".to_owned()) }
    });
    let held = eventually("newcomers find places", || {
        // each of these closes one that is idle, or finds a free place; never one of the three
        let streams: Vec<_> = (0..8).map(|_| connect(&memledger)).collect();
        let (status, _) = exchange(connect(&memledger), &get("/-/healthy", ""))?;
        if status == 200 { Ok(streams) } else { Err(status.to_string()) }
    });
    drop(held);
    for stream in &mut busy {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut answers = vec![0; 1 << 20];
        let mut length = 0;
        while length < answers.len() {
            match stream.read(&mut answers[length..]) {
                Ok(0) => panic!("closed after {length} bytes"),
                Ok(more) => length += more,
                Err(error) => panic!("{error} after {length} bytes"),
            }
        }
        // some may be 503, from when the places were being taken
        assert!(answers.starts_with(b"HTTP/1.1 "));
    }
    drop(busy);
    eventually("their places are free", || match exchange(connect(&memledger), &get("/metrics", ""))? {
        (200, _) => Ok(()),
        (status, _) => Err(status.to_string()),
    });
    memledger.eventually("some that were idle were closed", |metrics| {
        match metrics.value("memledger_web_refused_total", &[("reason", "connections")]) {
            count if count >= 1.0 => Ok(()),
            count => Err(count.to_string()),
        }
    });
}

/// A client whose kernel takes next to nothing, so that its answer stays with memledger's.
fn takes_nothing(memledger: &Memledger) -> TcpStream {
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&socket, 2_048).unwrap();
    net::connect(&socket, &memledger.address.parse::<SocketAddr>().unwrap()).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.write_all(get("/metrics", "").as_bytes()).unwrap();
    stream
}

#[test]
fn answers_that_nobody_reads_take_no_more_of_the_kernel_than_there_are_connections_and_not_for_ever() {
    let memledger = Memledger::start(&[ALONE, PATIENT, &["--web.max-connections=16"]].concat());
    // each answer goes whole into the kernel, and its connection ends: no request is under way
    let clients: Vec<_> = (0..64).map(|_| takes_nothing(&memledger)).collect();
    // who says that nothing more comes from it has taken no more of what comes to it
    clients.iter().step_by(2).for_each(|client| client.shutdown(Shutdown::Write).unwrap());
    let held = || unsent(&memledger).into_iter().filter(|bytes| *bytes > 4_096).count();
    memledger.eventually("all came in", |metrics| {
        match metrics.value("memledger_web_refused_total", &[("reason", "connections")]) {
            count if count >= 48.0 => Ok(()),
            count => Err(format!("{count}, {} are held", held())),
        }
    });
    assert!((1..=16).contains(&held()), "{:?}", unsent(&memledger));
    eventually("nothing is held any more", || match held() {
        0 => Ok(()),
        held => Err(held.to_string()),
    });
    drop(clients);
}
