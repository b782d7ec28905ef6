use super::*;
use std::path::Path;

use crate::discover::Container;
use crate::reporter::directory;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};

#[test]
fn no_process_is_accepted_before_a_cycle_has_listed_the_containers() {
    let folder = tempfile::tempdir().unwrap();
    let state = Arc::new(ReporterState::default());
    let listener = directory::listen(folder.path()).unwrap();
    let mut server = Server::new(listener, Arc::clone(&state), HostPaths::default(), false);
    let client = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&client, &SocketAddrUnix::new(folder.path().join("reporter.sock")).unwrap()).unwrap();
    let ready = |server: &mut Server| {
        server.refresh_owners();
        server.wait(Timestamp::now()).unwrap().len()
    };
    assert_eq!(ready(&mut server), 0);
    state.take(&Arc::default());
    assert_eq!(ready(&mut server), 1, "it has waited");
}

/// A server for which this process is in a cgroup, and the socket's path.
fn server_with_process_in(folder: &Path, cgroup: &str) -> (Server, SocketAddrUnix) {
    let (proc, reporter) = (folder.join("proc"), folder.join("reporter"));
    let own = proc.join(std::process::id().to_string());
    std::fs::create_dir_all(&own).unwrap();
    std::fs::copy("/proc/self/stat", own.join("stat")).unwrap();
    std::fs::write(own.join("cgroup"), format!("0::/{cgroup}\n")).unwrap();
    let listener = directory::listen(&reporter).unwrap();
    let host_paths = HostPaths { proc, ..HostPaths::default() };
    let server = Server::new(listener, Arc::default(), host_paths, false);
    (server, SocketAddrUnix::new(reporter.join("reporter.sock")).unwrap())
}

/// The same, where it is in container `a`.
fn server_of_container_a(folder: &Path) -> (Server, SocketAddrUnix) {
    let id = "a".repeat(64);
    let path = format!("docker/{id}");
    let (mut server, address) = server_with_process_in(folder, &path);
    server.state.take(&Arc::new(Inventory {
        containers: vec![Container::in_cgroup(&id, &path)],
        ..Inventory::default()
    }));
    server.refresh_owners();
    (server, address)
}

fn connected_client(address: &SocketAddrUnix) -> OwnedFd {
    let client = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&client, address).unwrap();
    client
}

fn send_all(client: &OwnedFd, messages: &[&str]) {
    for message in messages {
        send(client, message.as_bytes(), SendFlags::NOSIGNAL).unwrap();
    }
}

const HELLO: &str = r#"{"t":"hello","v":1}"#;

#[test]
fn reports_of_a_process_that_ends_without_reading_the_welcome_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_of_container_a(folder.path());
    let client = connected_client(&address);
    server.accept();
    send_all(&client, &[HELLO]);
    let mut buffer = vec![0; MAX_PACKET_BYTES];
    server.serve(PollTarget::Socket(0), &mut buffer);
    let last = r#"{"t":"operation","component":"system","operation":"experiment_end","rss":9}"#;
    let records = r#"{"t":"records","of":[["system","experiment_end",5,9,null,null,null]]}"#;
    send_all(&client, &[r#"{"t":"sample","lost":5}"#, r#"{"t":"step","n":7}"#, last, records]);
    drop(client); // with the welcome in it
    server.serve(PollTarget::Socket(0), &mut buffer);
    assert!(server.connections.is_empty());
    let reports = server.state.lock();
    let steps: Vec<u64> =
        reports.containers.values().flat_map(|of| of.progress.values()).map(|of| of.steps).collect();
    assert_eq!(steps, [7]);
    drop(reports);
    server.state.take(&Arc::default()); // the container is not listed any more
    let reports = server.state.take_process_reports();
    let [records, end] = reports.as_slice() else { panic!("{reports:?}") };
    assert!(matches!(&records.content, ProcessReportContent::Records(_, of) if of[0].bytes[0] == Some(9)));
    let ProcessReportContent::End(end) = &end.content else { panic!("{end:?}") };
    let operations: Vec<_> = end.container.operations.keys().map(|(_, operation)| &**operation).collect();
    assert_eq!((operations, end.container.progress[&0].steps), (vec!["experiment_end"], 7));
    assert!(server.state.take_process_reports().is_empty(), "once");
}

#[test]
fn cleanup_is_requested_over_the_connection_and_ends_with_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_of_container_a(folder.path());
    let client = connected_client(&address);
    server.accept();
    send_all(&client, &[HELLO]);
    let mut buffer = vec![0; MAX_PACKET_BYTES];
    server.serve(PollTarget::Socket(0), &mut buffer);
    let container = server.inventory.containers[0].id.clone();
    let mut result = server.state.request_cleanup(container.clone(), Duration::from_secs(9));
    server.start_cleanups(Timestamp::now());
    let mut received = || {
        let (length, _) =
            rustix::net::recv(&client, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert!(received().contains("welcome"));
    assert_eq!(received(), r#"{"t":"cleanup","id":1,"deadline_ms":9000}"#);
    send_all(&client, &[r#"{"t":"cleaned","id":1,"ms":2,"dev":[{"i":0,"before":5,"after":1}]}"#]);
    server.serve(PollTarget::Socket(0), &mut buffer);
    server.end_cleanups(Timestamp::now());
    assert_eq!(result.try_recv().unwrap().unwrap().freed_bytes, 4);

    // one whose process ends
    server.state.cleanups().forget_last();
    let mut result = server.state.request_cleanup(container, Duration::from_secs(9));
    drop(client);
    server.start_cleanups(Timestamp::now());
    server.serve(PollTarget::Socket(0), &mut buffer);
    server.end_cleanups(Timestamp::now());
    let report = result.try_recv().unwrap().unwrap();
    assert_eq!(report.processes[0].outcome, CleanupOutcome::Ended);
}

#[test]
fn only_the_first_hello_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_of_container_a(folder.path());
    let client = connected_client(&address);
    server.accept();
    send_all(&client, &[HELLO, HELLO, HELLO]);
    let mut buffer = vec![0; MAX_PACKET_BYTES];
    server.serve(PollTarget::Socket(0), &mut buffer);
    let flags = rustix::net::RecvFlags::DONTWAIT;
    assert!(rustix::net::recv(&client, &mut buffer[..], flags).is_ok());
    assert_eq!(rustix::net::recv(&client, &mut buffer[..], flags).err(), Some(Errno::AGAIN));
}

#[test]
fn connections_are_polled_in_rounds_and_the_listener_always() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_of_container_a(folder.path());
    let client = connected_client(&address);
    server.accept();
    send_all(&client, &[HELLO]);
    let _new = connected_client(&address);
    let now = Timestamp::now();
    server.next_round = now.plus(Duration::from_secs(60));
    let ready = |server: &Server, at| server.wait(at).unwrap().len();
    assert_eq!(ready(&server, now), 1, "the listener");
    assert_eq!(ready(&server, server.next_round), 2, "the listener and the connection");
}

#[test]
fn connection_ends_with_a_first_message_of_another_version_or_rank() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_of_container_a(folder.path());
    let mut buffer = vec![0; MAX_PACKET_BYTES];
    for (number, rejected) in (0..).zip([r#"{"t":"hello","v":2}"#, r#"{"t":"hello","v":1,"local_rank":64}"#])
    {
        let client = connected_client(&address);
        server.accept();
        send_all(&client, &[rejected, r#"{"t":"step","n":7}"#]);
        server.serve(PollTarget::Socket(number), &mut buffer);
        assert!(server.connections.is_empty(), "{rejected}");
    }
    assert_eq!(server.state.stats().rejected(ReportRejection::Malformed), 0);
}

#[test]
fn sample_with_others_waiting_behind_it_is_not_published() {
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_of_container_a(folder.path());
    let client = connected_client(&address);
    server.accept();
    send_all(&client, &[HELLO]);
    let count = MESSAGES.1 as usize + 5; // over the rate: some stay in the socket
    send_all(&client, &vec![r#"{"t":"sample","dev":[{"i":0,"alloc":1}]}"#; count]);
    let mut buffer = vec![0; MAX_PACKET_BYTES];
    server.serve(PollTarget::Socket(0), &mut buffer);
    let sampled = |server: &Server| -> Vec<bool> {
        server.state.lock().processes.values().map(|process| process.sampled.is_some()).collect()
    };
    assert_eq!(sampled(&server), [false]);
    server.connections.get_mut(&0).unwrap().messages = RateLimit::new(Timestamp::now(), 20, 100);
    server.serve(PollTarget::Socket(0), &mut buffer);
    assert_eq!(sampled(&server), [true]);
}

#[test]
fn process_of_a_container_that_becomes_known_connects_again() {
    let (outer, inner) = ("a".repeat(64), "b".repeat(64));
    let path = format!("docker/{outer}/docker/{inner}");
    let folder = tempfile::tempdir().unwrap();
    let (mut server, address) = server_with_process_in(folder.path(), &path);
    let connected = |server: &mut Server| {
        let client = connected_client(&address);
        server.accept();
        client
    };
    let owners = |server: &Server| -> Vec<String> {
        server.connections.values().map(|open| open.peer.container.as_str().to_owned()).collect()
    };
    let mut inventory = Inventory::default();
    let _first = connected(&mut server);
    for (id, own, wanted) in [(&outer, &path[..71], vec![outer.clone()]), (&inner, &path[..], vec![])] {
        inventory.containers.push(Container::in_cgroup(id, own));
        let containers = inventory.containers.clone();
        server.state.take(&Arc::new(Inventory { containers, ..Inventory::default() }));
        server.refresh_owners();
        assert_eq!(owners(&server), wanted);
    }
    let _again = connected(&mut server);
    assert_eq!(owners(&server), [inner]);
}
