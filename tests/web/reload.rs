//! Changes of the files while memledger runs.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::limits::until_closed;
use super::site::{Authority, Site, TLS, basic, exchange, get, user};
use crate::support::{Memledger, eventually};

/// Waits until the file, as it stands, is or is not in use.
fn await_use(site: &Site, memledger: &Memledger, headers: &str, is_used: f64) {
    eventually("the file is judged", || {
        match site.client().metrics(memledger, headers).value("memledger_web_config_success", &[]) {
            value if value == is_used => Ok(()),
            value => Err(format!("{value}; {}", memledger.log())),
        }
    });
}

/// The certificate that is shown.
fn shown(site: &Site, memledger: &Memledger) -> Vec<u8> {
    let mut stream = site.client().connect(memledger);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock).unwrap();
    }
    stream.conn.peer_certificates().unwrap()[0].to_vec()
}

#[test]
fn a_new_certificate_is_shown_without_a_restart_and_nobody_notices() {
    let site = Site::new(TLS);
    let memledger = site.start(&[]);
    let (stop, answers) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let client = site.client();
                while !stop.load(Ordering::Relaxed) {
                    let (status, _) = client.get(&memledger, "/metrics", "").expect("an answer");
                    assert_eq!(status, 200);
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 1..=3 {
            let old = shown(&site, &memledger);
            site.certify();
            eventually("the new certificate", || match shown(&site, &memledger) == old {
                true => Err(format!("round {round}; {}", memledger.log())),
                false => Ok(()),
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(answers.load(Ordering::Relaxed) > 20, "there was load");
    await_use(&site, &memledger, "", 1.0);
}

#[test]
fn half_a_pair_leaves_the_old_one_in_use_and_is_told_once() {
    let site = Site::new(TLS);
    let memledger = site.start(&[]);
    let old = shown(&site, &memledger);
    let (certificate, key) = site.authority.issue(&["127.0.0.1"]);
    site.write("cert.pem", &certificate);
    await_use(&site, &memledger, "", 0.0);
    assert_eq!(shown(&site, &memledger), old);
    memledger_looks_again(&memledger, &site);
    let complaints = memledger.log().matches("the last good one goes on").count();
    assert_eq!(complaints, 1, "{}", memledger.log());
    assert!(
        memledger.log().contains("web.yml:2: this certificate and key cannot be used"),
        "{}",
        memledger.log()
    );
    site.write("key.pem", &key);
    await_use(&site, &memledger, "", 1.0);
    assert_ne!(shown(&site, &memledger), old);
    assert!(memledger.log().contains("is in use as it is now"), "{}", memledger.log());
}

/// Waits until the files were looked at twice more: a look takes a second, and a cycle 100 ms.
fn memledger_looks_again(memledger: &Memledger, site: &Site) {
    let stamp = || site.client().metrics(memledger, "").value("memledger_snapshot_timestamp_seconds", &[]);
    let begin = stamp();
    eventually("two more looks", || match stamp() - begin {
        passed if passed > 2.2 => Ok(()),
        passed => Err(format!("{passed} s")),
    });
}

#[test]
fn users_come_and_go_without_a_restart() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let memledger = site.start(&[]);
    let client = site.client();
    let ask =
        |name: &str| client.get(&memledger, "/metrics", &basic(name, "secret")).map(|(status, _)| status);
    assert_eq!((ask("ann"), ask("bob")), (Ok(200), Ok(401)));
    site.write("web.yml", &format!("{TLS}{}", user("bob")));
    // a connection that the change finds without a request is closed without an answer, and who has that asks again
    eventually("bob may ask", || match ask("bob")? {
        200 => Ok(()),
        other => Err(other.to_string()),
    });
    assert_eq!(ask("ann"), Ok(401), "what was known of her is forgotten");
}

/// Asks on a connection that stays open.
fn asks(stream: &mut (impl Read + Write), headers: &str) -> u16 {
    write!(stream, "GET /-/healthy HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n").unwrap();
    let mut answer = [0; 1_024];
    let length = stream.read(&mut answer).unwrap();
    let text = String::from_utf8_lossy(&answer[..length]).into_owned();
    text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn a_connection_that_is_kept_ends_with_the_rules_that_let_it_in_and_not_for_less() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let memledger = site.start(&["--web.idle-timeout=1h", "--web.header-timeout=5m"]);
    let mut kept = site.client().connect(&memledger);
    assert_eq!(asks(&mut kept, ""), 200);
    // half a request is none: what comes of it later is judged by the rules of then
    let mut half = site.client().connect(&memledger);
    half.write_all(b"GET /-/healthy HTTP/1.1\r\n").unwrap();
    // headers, and the server's own certificate, let nobody in
    let headers = "http_server_config: {headers: {X-Frame-Options: deny}}\n";
    let text = std::fs::read_to_string(site.path("web.yml")).unwrap() + headers;
    site.write("web.yml", &text);
    site.certify();
    eventually("the headers", || match site.client().get(&memledger, "/-/healthy", "")? {
        (_, answer) if answer.contains("x-frame-options: deny") => Ok(()),
        (_, answer) => Err(answer),
    });
    assert_eq!(asks(&mut kept, ""), 200, "it goes on");
    site.write("web.yml", &format!("{TLS}{}", user("bob")));
    assert_eq!(until_closed(kept), "");
    let rest = half.write_all(b"Host: 127.0.0.1\r\n\r\n").map(|()| until_closed(half));
    assert!(
        !rest.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")),
        "a request under older rules is refused"
    );
    assert_eq!(site.client().get(&memledger, "/metrics", &basic("bob", "secret")).unwrap().0, 200);
}

#[test]
fn with_another_ca_the_clients_of_the_old_one_are_let_go() {
    let site = Site::new(&format!(
        "{TLS}  client_ca_file: clients.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
    ));
    let (old, new) = (Authority::new(), Authority::new());
    site.write("clients.pem", &old.pem());
    let memledger = site.start_unready(&["--web.idle-timeout=1h"]);
    let (ann, bob) = (old.issue(&["ann.example"]), new.issue(&["bob.example"]));
    let mut kept = site.client_with(&ann).connect(&memledger);
    assert_eq!(asks(&mut kept, ""), 200);
    assert!(exchange(site.client_with(&bob).connect(&memledger), &get("/-/healthy", "")).is_err());
    site.write("clients.pem", &new.pem());
    assert_eq!(until_closed(kept), "");
    assert!(exchange(site.client_with(&ann).connect(&memledger), &get("/-/healthy", "")).is_err());
    assert_eq!(site.client_with(&bob).get(&memledger, "/-/healthy", "").unwrap().0, 200);
}

#[test]
fn a_file_that_would_open_what_was_closed_or_is_broken_changes_nothing() {
    let (version, rate) = ("  min_version: TLS13\n", "rate_limit: {interval: 1ms, burst: 1000}\n");
    let closed = format!(
        "{TLS}{version}  client_ca_file: ca.pem\n  client_auth_type: VerifyClientCertIfGiven\n{}{rate}",
        user("ann")
    );
    let site = Site::new(&closed);
    let memledger = site.start(&[]);
    let password = basic("ann", "secret");
    for (text, says) in [
        (String::new(), "TLS would be off"),
        (TLS.to_owned(), "nobody would be asked for a password"),
        (user("ann"), "TLS would be off"),
        (closed.replace(version, ""), "an older version of TLS would do"),
        (closed.replace(rate, ""), "rate_limit would be off"),
        ("tls_server_config: [\n".to_owned(), "not YAML"),
        (closed.replace("ann:", "ann: x"), "is no hash"),
    ] {
        site.write("web.yml", &text);
        await_use(&site, &memledger, &password, 0.0);
        assert_eq!(site.client().get(&memledger, "/metrics", "").unwrap().0, 401, "{text}");
        eventually("the reason in the log", || match memledger.log().contains(says) {
            true => Ok(()),
            false => Err(memledger.log()),
        });
        site.write("web.yml", &closed);
        await_use(&site, &memledger, &password, 1.0);
    }
    std::fs::remove_file(site.path("web.yml")).unwrap();
    await_use(&site, &memledger, &password, 0.0);
    assert_eq!(site.client().get(&memledger, "/metrics", "").unwrap().0, 401);
}

#[test]
fn certificates_and_their_names_stay_wanted_until_a_restart() {
    let verified = format!("{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n");
    let named = format!("{verified}  client_allowed_sans: [ann.example]\n");
    let site = Site::new(&named);
    let memledger = site.start_unready(&[]);
    let (ann, bob) = (site.authority.issue(&["ann.example"]), site.authority.issue(&["bob.example"]));
    for (text, says) in [(&verified, "any name would do"), (&TLS.to_owned(), "have to show a certificate")] {
        site.write("web.yml", text);
        eventually("the reason in the log", || match memledger.log().contains(says) {
            true => Ok(()),
            false => Err(memledger.log()),
        });
        assert!(site.client_with(&ann).get(&memledger, "/-/healthy", "").is_ok());
        assert!(site.client_with(&bob).get(&memledger, "/-/healthy", "").is_err());
        assert!(site.client().get(&memledger, "/-/healthy", "").is_err());
    }
}
