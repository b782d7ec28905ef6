//! Big answers, of 10,000 series: to slow readers, and to many at once.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::limits::open_sockets;
use super::site::{connect, exchange, get};
use crate::support::load::{CONNECTIONS, ask, crowded};
use crate::support::{Memledger, eventually};

/// Slow readers, who take all places that one address may have: three quarters.
const PLACES: usize = 6;
const OF_ALL: usize = 8;

/// One who asks for all of it.
fn asks(memledger: &Memledger) -> TcpStream {
    let mut stream = connect(memledger);
    stream.write_all(get("/metrics", "").as_bytes()).unwrap();
    stream
}

/// Reads a little again and again; until the end, and how much that was.
fn reads_slowly(mut stream: TcpStream, stop: &AtomicBool) -> usize {
    let (mut piece, mut sum) = ([0; 256], 0);
    while let Ok(length @ 1..) = stream.read(&mut piece) {
        sum += length;
        if !stop.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(20)); // the client's slowness is what is tested
        }
    }
    sum
}

/// For each connection of its port, also those that memledger has closed, the bytes that the kernel has to send.
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
fn ten_thousand_requests_for_ten_thousand_series_leave_memory_flat_and_cycles_kept() {
    let (_host, memledger) = crowded(2 * CONNECTIONS);
    let read = |name: &str| memledger.metrics().value(name, &[]);
    let (stamp, skipped) = ("memledger_snapshot_timestamp_seconds", "memledger_cycles_skipped_total");
    let whole = exchange(connect(&memledger), &get("/metrics", "")).unwrap().1.len();
    ask(&memledger, 1_000, 10);
    let (before, began, left_out) = (memledger.resident_bytes(), read(stamp), read(skipped));
    ask(&memledger, 10_000, 10);
    let grown = memledger.resident_bytes().saturating_sub(before);
    let (passed, left_out) = (read(stamp) - began, read(skipped) - left_out);
    eprintln!("{grown} bytes more, answers of {whole}; {left_out} cycles left out in {passed} s");
    // a snapshot and its texts come and go each second
    assert!(grown < 4 * whole as u64, "{grown} bytes more, answers of {whole}");
    assert!(passed > 0.5, "{passed} s of samples");
    assert!(left_out <= 1.0 + passed / 10.0, "{left_out} cycles of {passed} s were left out");
}

#[test]
fn slow_readers_of_ten_thousand_series_hold_their_places_for_their_time_and_no_more_memory_than_these() {
    let (_host, memledger) = crowded(OF_ALL);
    let whole = exchange(connect(&memledger), &get("/metrics", "")).unwrap().1.len();
    (0..3).for_each(|_| assert_eq!(status(&memledger, "/metrics"), Ok(200)));
    let (before, sockets) = (memledger.resident_bytes(), open_sockets(&memledger));
    let stop = AtomicBool::new(false); // lets the readers end at once if the test fails
    let read = std::thread::scope(|scope| {
        let slow = |count: usize| {
            (0..count)
                .map(|_| asks(&memledger))
                .map(|stream| scope.spawn(|| reads_slowly(stream, &stop)))
                .collect()
        };
        let mut readers: Vec<_> = slow(PLACES - 1);
        for _ in 0..3 {
            assert_eq!(status(&memledger, "/metrics"), Ok(200), "who is quick finds the last place");
        }
        readers.extend(slow(1));
        eventually("all places are taken", || match status(&memledger, "/metrics")? {
            503 => Ok(()),
            status => Err(status.to_string()),
        });
        assert_eq!(status(&memledger, "/-/healthy"), Ok(200));
        let held = memledger.resident_bytes().saturating_sub(before);
        let answers = held as f64 / whole as f64;
        eprintln!("{PLACES} slow readers hold {answers:.1} answers of {whole} bytes");
        // they share the text of a snapshot or two; what the allocator keeps comes to as much again
        assert!(answers < 4.0, "{held} bytes, which is {answers:.1} answers of {whole}");
        let unsent = unsent_bytes(&memledger);
        eprintln!("the kernel holds {unsent} bytes");
        assert!((1..=PLACES * (512 << 10)).contains(&unsent), "the kernel holds {unsent} bytes");
        eventually("all places are free again", || match status(&memledger, "/metrics")? {
            200 if open_sockets(&memledger) <= sockets && unsent_bytes(&memledger) == 0 => Ok(()),
            status => Err(format!("{status}, {} bytes unsent", unsent_bytes(&memledger))),
        });
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(read.iter().all(|bytes| *bytes < whole / 2), "they were cut off: {read:?} of {whole}");
}
