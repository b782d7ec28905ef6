//! Large responses, of 10,000 series: to slow readers, and to many clients at once.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::limits::open_sockets;
use super::site::{connect, exchange, get};
use crate::support::load::{CONNECTIONS, crowded, other_address, own_address, send_requests};
use crate::support::{Memledger, eventually, run_delay_nanos};

/// Slow readers, as many as one client may have permits.
const SLOW_READERS: usize = 6;

/// Sends a request for all metrics.
fn request_metrics(memledger: &Memledger) -> TcpStream {
    let mut stream = connect(memledger);
    stream.write_all(get("/metrics", "").as_bytes()).unwrap();
    stream
}

/// Reads slowly to the end. Returns how many bytes were read.
fn read_slowly(mut stream: TcpStream, stop: &AtomicBool) -> usize {
    let (mut piece, mut sum) = ([0; 256], 0);
    while let Ok(length @ 1..) = stream.read(&mut piece) {
        sum += length;
        if !stop.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(20)); // the test needs a slow client
        }
    }
    sum
}

/// Returns the unsent bytes in the kernel of each connection of its port, also of those that memledger has closed.
pub(super) fn unsent(memledger: &Memledger) -> Vec<usize> {
    let port: u16 = memledger.address.rsplit_once(':').unwrap().1.parse().unwrap();
    let from = format!(":{port:04X}");
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let queues =
        rows.filter(|row| row[1].ends_with(&from)).map(|row| row[4].split(':').next().unwrap().to_owned());
    queues.map(|queue| usize::from_str_radix(&queue, 16).unwrap()).collect()
}

fn unsent_bytes(memledger: &Memledger) -> usize {
    unsent(memledger).iter().sum()
}

fn status(memledger: &Memledger, path: &str) -> Result<u16, String> {
    exchange(connect(memledger), &get(path, "")).map(|(status, _)| status)
}

#[test]
fn ten_thousand_large_responses_do_not_grow_memory_or_skip_cycles() {
    let (_host, memledger) = crowded(CONNECTIONS + 2);
    let read = |name: &str| memledger.metrics().value(name, &[]);
    let stamp = "memledger_snapshot_timestamp_seconds";
    let skipped = || read("memledger_cycles_skipped_total");
    // of which other tests may have most, and the requests some
    let run_delay = || run_delay_nanos(memledger.pid(), "cycle") / 1e9;
    let whole = exchange(connect(&memledger), &get("/metrics", "")).unwrap().1.len();
    send_requests(&memledger, 1_000, 10);
    let (before, began, left_out, run_delay_before) =
        (memledger.anonymous_bytes(), read(stamp), skipped(), run_delay());
    send_requests(&memledger, 10_000, 10);
    let grown = memledger.anonymous_bytes().saturating_sub(before);
    let (passed, left_out) = (read(stamp) - began, skipped() - left_out);
    eprintln!("{grown} bytes more, responses of {whole}; {left_out} cycles left out in {passed} s");
    // a snapshot and its rendered texts are replaced each second, and responses keep the one before in memory: how many
    // there are depends on the moment. A leak of one response in a hundred would be a hundred of them
    assert!(grown < 16 * whole as u64, "{grown} bytes more, responses of {whole}");
    assert!(passed > 0.5, "{passed} s of samples");
    let waited = run_delay() - run_delay_before;
    assert!(left_out <= 2.0 + passed / 2.0, "{left_out} cycles of {passed} s were left out");
    assert!(left_out <= 1.0 + passed / 10.0 + waited, "{left_out} cycles of {passed} s were left out");
}

#[test]
fn slow_readers_are_limited_in_time_and_memory() {
    let (_host, memledger) = crowded(SLOW_READERS);
    let whole = exchange(connect(&memledger), &get("/metrics", "")).unwrap().1.len();
    (0..3).for_each(|_| assert_eq!(status(&memledger, "/metrics"), Ok(200)));
    let (before, sockets) = (memledger.anonymous_bytes(), open_sockets(&memledger));
    let stop = AtomicBool::new(false); // ends the readers at once if the test fails
    let read = std::thread::scope(|scope| {
        let slow = |count: usize| {
            (0..count)
                .map(|_| request_metrics(&memledger))
                .map(|stream| scope.spawn(|| read_slowly(stream, &stop)))
                .collect()
        };
        let mut readers: Vec<_> = slow(SLOW_READERS - 1);
        assert_eq!(status(&memledger, "/metrics"), Ok(200), "a fast client gets the last permit");
        eventually("all permits are taken", || match status(&memledger, "/metrics")? {
            503 => Ok(()),
            status => {
                readers.extend(slow(1)); // gets none while the fast client's is not released yet
                Err(status.to_string())
            }
        });
        assert_eq!(status(&memledger, "/-/healthy"), Ok(200), "health needs no permit");
        let api = exchange(connect(&memledger), &get("/api/v1/events", "")).unwrap();
        assert!(!api.1.contains("too many requests"), "the API has permits of its own: {api:?}");
        if own_address().is_some() {
            let other = TcpStream::connect(other_address(&memledger)).unwrap();
            assert_eq!(exchange(other, &get("/metrics", "")).unwrap().0, 200, "another client has its own");
        }
        let used = memledger.anonymous_bytes().saturating_sub(before);
        let responses = used as f64 / whole as f64;
        eprintln!("{SLOW_READERS} slow readers use {responses:.1} responses of {whole} bytes");
        // they share the text of a snapshot or two; the allocator retains as much again
        assert!(responses < 4.0, "{used} bytes, which is {responses:.1} responses of {whole}");
        let unsent = unsent_bytes(&memledger);
        eprintln!("{unsent} bytes are in the kernel");
        assert!((1..=SLOW_READERS * (512 << 10)).contains(&unsent), "{unsent} bytes are in the kernel");
        eventually("all permits are released", || match status(&memledger, "/metrics")? {
            200 if open_sockets(&memledger) <= sockets && unsent_bytes(&memledger) == 0 => Ok(()),
            status => Err(format!("{status}, {} bytes unsent", unsent_bytes(&memledger))),
        });
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(
        read.iter().all(|bytes| *bytes < whole / 2),
        "slow responses were not aborted: {read:?} of {whole}"
    );
}
