//! Changes of the web configuration at run time.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::limits::until_closed;
use super::site::{Authority, Client, Site, TLS, basic, connect, exchange, get, user};
use crate::support::{Memledger, eventually};

/// Waits until the metrics show whether the current file is in use.
fn await_use(site: &Site, memledger: &Memledger, headers: &str, is_in_use: f64) {
    eventually("the configuration is read", || {
        match site.client().metrics(memledger, headers).value("memledger_web_config_success", &[]) {
            value if value == is_in_use => Ok(()),
            value => Err(format!("{value}; {}", memledger.log())),
        }
    });
}

/// Returns the server's certificate.
fn server_certificate(site: &Site, memledger: &Memledger) -> Vec<u8> {
    let mut stream = site.client().connect(memledger);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).unwrap();
    }
    stream.conn.peer_certificates().unwrap()[0].to_vec()
}

#[test]
fn new_certificate_is_used_without_failed_requests() {
    let site = Site::new(TLS);
    let memledger = site.start(&[]);
    let (stop, responses) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let client = site.client();
                while !stop.load(Ordering::Relaxed) {
                    let (status, _) = client.get(&memledger, "/metrics", "").expect("a response");
                    assert_eq!(status, 200);
                    responses.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 1..=3 {
            let old = server_certificate(&site, &memledger);
            site.certify();
            eventually("the new certificate", || match server_certificate(&site, &memledger) == old {
                true => Err(format!("round {round}; {}", memledger.log())),
                false => Ok(()),
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(responses.load(Ordering::Relaxed) > 20, "there was load");
    await_use(&site, &memledger, "", 1.0);
}

#[test]
fn certificate_without_its_key_keeps_the_old_pair_and_is_logged_once() {
    let site = Site::new(TLS);
    let memledger = site.start(&[]);
    let old = server_certificate(&site, &memledger);
    let (certificate, key) = site.authority.issue(&["127.0.0.1"]);
    site.write("cert.pem", &certificate);
    await_use(&site, &memledger, "", 0.0);
    assert_eq!(server_certificate(&site, &memledger), old);
    await_two_reads(&memledger, &site);
    let complaints = memledger.log().matches("the previous one stays in use").count();
    assert_eq!(complaints, 1, "{}", memledger.log());
    assert!(memledger.log().contains("web.yml:2: certificate and key are unusable"), "{}", memledger.log());
    site.write("key.pem", &key);
    await_use(&site, &memledger, "", 1.0);
    assert_ne!(server_certificate(&site, &memledger), old);
    assert!(memledger.log().contains("web configuration reloaded"), "{}", memledger.log());
}

/// Waits until the files were read twice more: they are read every second, and a cycle takes 100 ms.
fn await_two_reads(memledger: &Memledger, site: &Site) {
    let stamp = || site.client().metrics(memledger, "").value("memledger_snapshot_timestamp_seconds", &[]);
    let begin = stamp();
    eventually("two more reads of the files", || match stamp() - begin {
        passed if passed > 2.2 => Ok(()),
        passed => Err(format!("{passed} s")),
    });
}

#[test]
fn users_change_without_a_restart() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let memledger = site.start(&[]);
    let client = site.client();
    let status_as =
        |name: &str| client.get(&memledger, "/metrics", &basic(name, "secret")).map(|(status, _)| status);
    assert_eq!((status_as("ann"), status_as("bob")), (Ok(200), Ok(401)));
    site.write("web.yml", &format!("{TLS}{}", user("bob")));
    // the change closes a connection without a request; a client whose connection was closed retries
    eventually("bob is admitted", || match status_as("bob")? {
        200 => Ok(()),
        other => Err(other.to_string()),
    });
    assert_eq!(status_as("ann"), Ok(401), "her cached password is not valid any more");
}

/// Sends a request on a connection that stays open, and returns the status.
fn status_on(stream: &mut (impl Read + Write), headers: &str) -> u16 {
    write!(stream, "GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n").unwrap();
    let mut response = [0; 1_024];
    let length = stream.read(&mut response).unwrap();
    let text = String::from_utf8_lossy(&response[..length]).into_owned();
    text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn changed_access_rules_close_connections_and_other_changes_do_not() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let memledger = site.start(&["--web.idle-timeout=1h", "--web.header-timeout=5m"]);
    let mut kept = site.client().connect(&memledger);
    assert_eq!(status_on(&mut kept, ""), 200);
    // half a request is not in progress: when it completes, the new rules apply
    let mut half = site.client().connect(&memledger);
    half.write_all(b"GET /-/healthy HTTP/1.1\r\n").unwrap();
    // headers and the server's own certificate do not affect access
    let headers = "http_server_config: {headers: {X-Frame-Options: deny}}\n";
    let text = std::fs::read_to_string(site.path("web.yml")).unwrap() + headers;
    site.write("web.yml", &text);
    site.certify();
    eventually("the headers", || match site.client().get(&memledger, "/-/healthy", "")? {
        (_, response) if response.contains("x-frame-options: deny") => Ok(()),
        (_, response) => Err(response),
    });
    assert_eq!(status_on(&mut kept, ""), 200, "the connection stays open");
    site.write("web.yml", &format!("{TLS}{}", user("bob")));
    assert_eq!(until_closed(kept), "");
    let rest = half.write_all(b"Host: 127.0.0.1\r\n\r\n").map(|()| until_closed(half));
    assert!(
        !rest.is_ok_and(|response| response.starts_with("HTTP/1.1 200")),
        "a request under older rules is refused"
    );
    assert_eq!(site.client().get(&memledger, "/metrics", &basic("bob", "secret")).unwrap().0, 200);
}

#[test]
fn new_client_ca_closes_connections_of_the_old_one() {
    let site = Site::new(&format!(
        "{TLS}  client_ca_file: clients.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
    ));
    let (old, new) = (Authority::new(), Authority::new());
    site.write("clients.pem", &old.pem());
    let memledger = site.start_unready(&["--web.idle-timeout=1h"]);
    let (ann, bob) = (old.issue(&["ann.example"]), new.issue(&["bob.example"]));
    let mut kept = site.client_with(&ann).connect(&memledger);
    assert_eq!(status_on(&mut kept, ""), 200);
    assert!(exchange(site.client_with(&bob).connect(&memledger), &get("/-/healthy", "")).is_err());
    site.write("clients.pem", &new.pem());
    assert_eq!(until_closed(kept), "");
    assert!(exchange(site.client_with(&ann).connect(&memledger), &get("/-/healthy", "")).is_err());
    assert_eq!(site.client_with(&bob).get(&memledger, "/-/healthy", "").unwrap().0, 200);
}

#[test]
fn broken_configuration_keeps_the_old_rules() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let closed = std::fs::read_to_string(site.path("web.yml")).unwrap();
    let memledger = site.start(&[]);
    let password = basic("ann", "secret");
    for (text, expected) in [
        ("tls_server_config: [\n".to_owned(), "expected KEY: VALUE"),
        (closed.replace("ann:", "ann: x"), "the password hash of"),
        (TLS.replace("key.pem", "none.pem"), "none.pem: No such file"),
        (user("ann") + "tls_server_config: {min_version: TLS13}\n", "TLS needs a certificate"),
    ] {
        site.write("web.yml", &text);
        eventually("the reason in the log", || match memledger.log().contains(expected) {
            true => Ok(()),
            false => Err(memledger.log()),
        });
        assert_eq!(site.client().get(&memledger, "/metrics", "").unwrap().0, 401, "{text}");
        await_use(&site, &memledger, &password, 0.0);
        site.write("web.yml", &closed);
        await_use(&site, &memledger, &password, 1.0);
    }
    std::fs::remove_file(site.path("web.yml")).unwrap();
    await_use(&site, &memledger, &password, 0.0);
    assert_eq!(site.client().get(&memledger, "/metrics", "").unwrap().0, 401);
}

#[test]
fn valid_configuration_is_applied_as_written_also_without_protection() {
    let verified = format!("{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n");
    let site = Site::new(&format!("{verified}{}", user("ann")));
    let memledger = site.start_unready(&["--web.idle-timeout=1h"]);
    let (ann, password) = (site.authority.issue(&["ann.example"]), basic("ann", "secret"));
    let metrics = |client: &Client, headers: &str| client.get(&memledger, "/metrics", headers);
    eventually("a snapshot", || match metrics(&site.client_with(&ann), &password)? {
        (200, _) => Ok(()),
        (status, text) => Err(format!("{status} {text}")),
    });
    assert!(metrics(&site.client(), &password).is_err(), "no certificate");
    let mut kept = site.client_with(&ann).connect(&memledger);
    assert_eq!(status_on(&mut kept, ""), 200);
    let becomes =
        |what: &str, text: &str, request: &dyn Fn() -> Result<(u16, String), String>, wanted: u16| {
            site.write("web.yml", text);
            eventually(what, || match request()? {
                (status, _) if status == wanted => Ok(()),
                (status, _) => Err(format!("{status}; {}", memledger.log())),
            });
        };
    becomes("no certificate", &format!("{TLS}{}", user("ann")), &|| metrics(&site.client(), &password), 200);
    assert_eq!(until_closed(kept), "", "connections of older rules are closed");
    assert_eq!(metrics(&site.client(), "").unwrap().0, 401);
    becomes("no password", TLS, &|| metrics(&site.client(), ""), 200);
    let plain = || exchange(connect(&memledger), &get("/metrics", ""));
    assert_eq!(plain().unwrap().0, 400, "plain HTTP to a port with TLS");
    becomes("no TLS", "", &plain, 200);
    assert!(memledger.log().contains("access=\"plain HTTP, no passwords\""), "{}", memledger.log());
    becomes("a password", &user("ann"), &plain, 401);
    becomes("TLS", &format!("{TLS}{}", user("bob")), &|| metrics(&site.client(), &password), 401);
    assert_eq!(metrics(&site.client(), &basic("bob", "secret")).unwrap().0, 200);
}

#[test]
fn read_that_hangs_is_shown_and_the_old_rules_stay() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let memledger = site.start(&[]);
    // as on a network file system whose server is away: a FIFO that nobody writes to
    let (path, spare) = (site.path("web.yml"), site.path("spare"));
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&spare).status().unwrap().success());
    std::fs::rename(&spare, &path).unwrap();
    let password = basic("ann", "secret");
    await_use(&site, &memledger, &password, 0.0);
    assert!(memledger.log().contains("its file system hangs"), "{}", memledger.log());
    assert_eq!(site.client().get(&memledger, "/metrics", "").unwrap().0, 401);
    let mut writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all(text.as_bytes()).unwrap();
    drop(writer);
    site.write("web.yml", &text);
    await_use(&site, &memledger, &password, 1.0);
}
