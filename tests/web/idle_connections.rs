//! More connections than allowed.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::site::{ALONE, exchange, get};
use crate::support::load::{other_address, own_address};
use crate::support::{Memledger, eventually, skip};

const LONG_TIMEOUTS: &[&str] = &["--web.idle-timeout=1h", "--web.header-timeout=5m"];

/// Returns whether the connection is open and nothing was received on it.
fn is_open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let outcome = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    matches!(outcome, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

fn connect_to(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

#[test]
fn ten_thousand_idle_connections_block_no_other_client() {
    let Some(address) = own_address() else { return skip("this host has no address but loopback") };
    let listen = format!("--web.listen-address={address}:0");
    let memledger = Memledger::start(&[ALONE, LONG_TIMEOUTS, &[&listen]].concat());
    let other = other_address(&memledger);
    let before = memledger.anonymous_bytes();
    // from this host, then from another address: each has its own share of the 256 connections
    for (crowd, rest) in
        [(memledger.address.parse().unwrap(), other), (other, memledger.address.parse().unwrap())]
    {
        let mut open = Vec::new();
        for number in 0..5_000 {
            open.push(connect_to(crowd));
            if number % 500 == 0 {
                assert_eq!(
                    exchange(connect_to(rest), &get("/-/ready", "")).unwrap().0,
                    200,
                    "another client"
                );
            }
        }
        let left = eventually("connections above the share are closed", || {
            match open.iter().filter(|stream| is_open(stream)).count() {
                left if left <= 64 => Ok(left),
                left => Err(left.to_string()),
            }
        });
        // a quarter of 256; a connection that was closed just before may still have a permit
        assert!((62..=64).contains(&left), "{left}");
        assert_eq!(exchange(connect_to(rest), &get("/metrics", "")).unwrap().0, 200);
        drop(open);
        eventually("the connections are released", || {
            match exchange(connect_to(crowd), &get("/-/ready", ""))? {
                (200, _) => Ok(()),
                (status, _) => Err(status.to_string()),
            }
        });
    }
    let grown = memledger.anonymous_bytes().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes more");
    memledger.eventually("rejections are counted", |metrics| {
        match metrics.value("memledger_web_refused_total", &[("reason", "connections")]) {
            count if count >= 9_000.0 => Ok(()),
            count => Err(count.to_string()),
        }
    });
}
