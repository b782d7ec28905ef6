//! Many requests at once, for the metrics of a host of 10,000 series.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use super::Memledger;
use super::recorded::Host;

/// Number of connections of [`send_requests`].
pub const CONNECTIONS: usize = 40;

/// Starts a memledger that samples every second and serves this many requests of one client at once, on a host of 10,000 series. A
/// response may take 30 s.
pub fn crowded(requests: usize) -> (Host, Memledger) {
    let host = Host::crowded(400);
    let flags = ["--no-collector.gpu", "--sample.interval=1s"].map(str::to_owned);
    let other = own_address().map(|address| format!("--web.listen-address={address}:0"));
    let requests = format!("--web.max-requests={}", 4 * requests); // one client gets a quarter
    let memledger = host.start(
        &[flags.to_vec(), vec![requests, "--web.idle-timeout=30s".to_owned()], other.into_iter().collect()]
            .concat(),
    );
    memledger.eventually("all containers", |metrics| match metrics.series.len() {
        10_000.. => Ok(()),
        series => Err(format!("{series} series")),
    });
    (host, memledger)
}

/// Sends this many requests on 40 connections, of which each `plain`th requests plain text, and the others gzip.
pub fn send_requests(memledger: &Memledger, requests: usize, plain: usize) {
    std::thread::scope(|scope| {
        for number in 0..CONNECTIONS {
            scope.spawn(move || {
                let coding = if number % plain == 0 { "" } else { "Accept-Encoding: gzip\r\n" };
                let request = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\n{coding}\r\n");
                let mut stream = connect(memledger);
                let mut buffer = vec![0; 4 << 20];
                for _ in 0..requests / CONNECTIONS {
                    stream.write_all(request.as_bytes()).unwrap();
                    assert_response(&mut stream, &mut buffer);
                }
            });
        }
    });
}

/// Connects, with a read time-out.
pub fn connect(memledger: &Memledger) -> TcpStream {
    let stream = TcpStream::connect(&memledger.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Reads one response, by its length; fails on any status but 200.
pub fn assert_response(stream: &mut impl Read, bytes: &mut [u8]) {
    let mut length = 0;
    loop {
        length += match stream.read(&mut bytes[length..]).unwrap() {
            0 => panic!("closed after {length} bytes"),
            more => more,
        };
        let Some(head) = bytes[..length].windows(4).position(|window| window == b"\r\n\r\n") else {
            continue;
        };
        let text = std::str::from_utf8(&bytes[..head]).unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        let body: usize =
            text.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
        if length >= head + 4 + body {
            return;
        }
    }
}

/// Returns the address by which other hosts reach this one.
pub fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.254:9").ok()?; // sends nothing
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then_some(address)
}

/// Returns the address besides loopback that a memledger listens on.
pub fn other_address(memledger: &Memledger) -> SocketAddr {
    let log = memledger.log();
    let mut addresses = log.lines().filter_map(|line| line.split_once("message=listening address="));
    addresses.nth(1).expect("the second address").1.parse().unwrap()
}
