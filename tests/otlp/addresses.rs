//! Names with several addresses, and proxies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, listen, socket_with};

use super::faults::{await_up, certificates};
use super::{EMPTY, Receiver};
use crate::support::Memledger;

/// Connections that fill the queue of a listener that accepts none: what comes later gets no answer, as from a host that is down.
fn unanswering(address: std::net::SocketAddr) -> Vec<std::os::fd::OwnedFd> {
    let socket = |flags| socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    let listener = socket(SocketFlags::CLOEXEC);
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let clients = (0..8).map(|_| {
        let client = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let _ = connect(&client, &address); // in progress
        client
    });
    std::iter::once(listener).chain(clients.collect::<Vec<_>>()).collect()
}

#[test]
fn other_address_is_used_where_the_first_does_not_answer() {
    let Some(receiver) = Receiver::start() else { return };
    for grpc in [true, false] {
        let port = if grpc { receiver.grpc } else { receiver.http };
        // the resolver sorts 127.0.0.1 first
        let listener = TcpListener::bind("127.0.0.9:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _unanswering = unanswering(([127, 0, 0, 1], address.port()).into());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(format!("127.0.0.1:{port}")).expect("the receiver");
                std::thread::spawn(move || join(&client, &server));
            }
        });
        let folder = tempfile::tempdir().unwrap();
        let hosts = folder.path().join("hosts");
        std::fs::write(&hosts, "127.0.0.1 collector.test\n127.0.0.9 collector.test\n").unwrap();
        let script = format!("mount --bind {} /etc/hosts && exec \"$@\"", hosts.display());
        let wrapper = ["unshare", "--mount", "sh", "-c", &script, "sh"];
        let here = format!("localhost:{port}");
        let there = format!("collector.test:{}", address.port());
        let flags: Vec<_> = receiver.flags(grpc).iter().map(|flag| flag.replace(&here, &there)).collect();
        let flags: Vec<_> = flags
            .iter()
            .map(String::as_str)
            .chain(["--otlp.timeout=4s"])
            .chain(EMPTY.iter().copied())
            .collect();
        let memledger = Memledger::start_through(&wrapper, &flags);
        await_up(&memledger, 1.0);
    }
}

/// Passes on what both send, until both have ended.
fn join(client: &TcpStream, server: &TcpStream) {
    let copy = |mut from: &TcpStream, mut to: &TcpStream| {
        let mut buffer = [0; 16 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| copy(client, server));
        copy(server, client);
    });
}

/// Serves CONNECT requests to `collector.test` by connecting to this host, until the test ends. Counts them.
fn start_proxy() -> (u16, Arc<AtomicUsize>) {
    let (listener, served) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(AtomicUsize::new(0)));
    let (port, count) = (listener.local_addr().unwrap().port(), Arc::clone(&served));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let count = Arc::clone(&count);
            std::thread::spawn(move || relay(&client, &count));
        }
    });
    (port, served)
}

fn relay(client: &TcpStream, count: &AtomicUsize) -> Option<()> {
    let (mut reader, mut line, mut target) = (BufReader::new(client), String::new(), String::new());
    let mut has_password = false;
    while reader.read_line(&mut line).ok()? > 2 {
        if let Some(rest) = line.strip_prefix("CONNECT ") {
            target = rest.split(' ').next()?.to_owned();
        }
        has_password |= line.to_ascii_lowercase().trim_end() == "proxy-authorization: basic yw5uonnly3jlda==";
        line.clear();
    }
    let port = target.strip_prefix("collector.test:")?;
    if !has_password {
        let mut client = client;
        return client.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n").ok();
    }
    let server = TcpStream::connect(format!("127.0.0.1:{port}")).ok()?;
    count.fetch_add(1, Ordering::Relaxed);
    { client }.write_all(b"HTTP/1.1 200 OK\r\n\r\n").ok()?;
    join(client, &server);
    Some(())
}

#[test]
fn endpoint_with_tls_is_reached_through_the_proxy_of_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let file = certificates(folder.path());
    let files = [&*file("server.pem"), &file("server.key"), &file("ca.pem")];
    let Some(receiver) = Receiver::with_tls(&files) else { return };
    let (port, served) = start_proxy();
    let more = [
        format!("--otlp.certificate={}", file("ca.pem")),
        format!("--otlp.client-certificate={}", file("client.pem")),
        format!("--otlp.client-key={}", file("client.key")),
    ];
    for grpc in [true, false] {
        let flags: Vec<_> = receiver
            .flags(grpc)
            .iter()
            .map(|flag| flag.replace("http://localhost", "https://collector.test"))
            .collect();
        let flags: Vec<_> =
            flags.iter().chain(&more).map(String::as_str).chain(EMPTY.iter().copied()).collect();
        let proxy = format!("HTTPS_PROXY=http://ann:secret@127.0.0.1:{port}");
        let before = served.load(Ordering::Relaxed);
        await_up(&Memledger::start_through(&["env", &proxy], &flags), 1.0);
        assert!(served.load(Ordering::Relaxed) > before);
        let refused = Memledger::start_through(&["env", &proxy.replace("ann:secret@", "")], &flags);
        await_up(&refused, 0.0);
        let says = format!(
            "the proxy 127.0.0.1:{port}, set by HTTPS_PROXY or ALL_PROXY, does not connect to collector.test:"
        );
        assert!(refused.log().contains(&says) && !refused.log().contains("secret"), "{}", refused.log());
        // without a proxy the name has no address
        let direct = Memledger::start_through(&["env", &proxy, "NO_PROXY=collector.test"], &flags);
        await_up(&direct, 0.0);
        assert!(direct.log().contains("cannot connect to collector.test:"), "{}", direct.log());
    }
}
