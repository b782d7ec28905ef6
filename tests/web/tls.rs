//! TLS versions and certificates, tested with openssl and curl.

use std::process::{Command, Stdio};

use super::site::{Client, Site, TLS, connect, exchange, get};
use crate::support::{Memledger, eventually};

/// Returns the output of `openssl s_client`; an error if the handshake failed.
fn openssl(memledger: &Memledger, flags: &[&str]) -> Result<String, String> {
    let output = Command::new("openssl")
        .args(["s_client", "-connect", &memledger.address])
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .expect("openssl runs");
    let output = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.contains("Cipher is (NONE)") || !output.contains("Cipher is ") {
        Err(output)
    } else {
        Ok(output)
    }
}

fn ready(site: &Site) -> Memledger {
    site.start(&[])
}

#[test]
fn offers_only_configured_versions_and_forward_secrecy() {
    let all = Site::new(TLS);
    let memledger = ready(&all);
    for (flag, name) in [("-tls1_2", "TLSv1.2"), ("-tls1_3", "TLSv1.3")] {
        let output = openssl(&memledger, &[flag]).unwrap();
        assert!(output.contains(&format!("New, {name}, Cipher is ")), "{output}");
    }
    let old = openssl(&memledger, &["-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0"]).unwrap_err();
    assert!(old.contains("alert"), "{old}");
    assert!(
        openssl(&memledger, &["-tls1_2", "-cipher", "AES128-SHA"]).is_err(),
        "no cipher without forward secrecy"
    );

    let new = Site::new(&format!("{TLS}  min_version: TLS13\n"));
    let memledger = ready(&new);
    assert!(openssl(&memledger, &["-tls1_2"]).unwrap_err().contains("alert protocol version"));
    for (group, output) in [("X25519", "X25519, 253 bits"), ("P-384", "ECDH, secp384r1, 384 bits")] {
        let text = openssl(&memledger, &["-tls1_3", "-groups", group]).unwrap();
        assert!(text.contains(output), "{text}");
    }

    let old = Site::new(&format!("{TLS}  max_version: TLS12\n"));
    let memledger = ready(&old);
    assert!(openssl(&memledger, &["-tls1_3"]).is_err());
    assert!(openssl(&memledger, &["-tls1_2"]).is_ok());
}

/// Returns the HTTP version that curl negotiates, and the status.
fn curl(memledger: &Memledger, site: &Site, flags: &[&str]) -> String {
    let output = Command::new("curl")
        .args([
            "-sS",
            "-o",
            "/dev/null",
            "-w",
            "%{http_version} %{http_code}",
            "--cacert",
            &site.path("ca.pem"),
        ])
        .args(flags)
        .arg(format!("https://{}/metrics", memledger.address))
        .output()
        .expect("curl runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn serves_http1_to_clients_that_prefer_http2() {
    for http2 in ["", "http_server_config: {http2: true}\n"] {
        let site = Site::new(&format!("{TLS}{http2}"));
        assert_eq!(curl(&ready(&site), &site, &["--http2"]), "1.1 200");
    }
}

#[test]
fn plain_http_on_a_tls_port_gets_a_clear_error() {
    let site = Site::new(TLS);
    let memledger = ready(&site);
    let before = site.client().metrics(&memledger, "");
    assert_eq!(before.value("memledger_web_refused_total", &[("reason", "handshake")]), 0.0);
    let (status, text) = exchange(connect(&memledger), &get("/metrics", "")).unwrap();
    assert_eq!(status, 400);
    assert!(text.ends_with("Client sent an HTTP request to an HTTPS server.\n"), "{text}");
    eventually("the rejection is counted", || {
        match site
            .client()
            .metrics(&memledger, "")
            .value("memledger_web_refused_total", &[("reason", "handshake")])
        {
            1.0 => Ok(()),
            count => Err(count.to_string()),
        }
    });
}

/// Returns whether each of four clients gets a response: without a certificate, with a certificate of another authority, with
/// one of the configured authority, and with one of that authority that has the allowed name.
fn admitted_clients(policy: &str) -> [bool; 4] {
    let site = Site::new(&format!("{TLS}{policy}"));
    let memledger = site.start_unready(&["--web.enable-admin"]);
    let stranger = super::site::Authority::new().issue(&["prometheus.example"]);
    let other = site.authority.issue(&["other.example"]);
    let wanted = site.authority.issue(&["prometheus.example"]);
    let is_admitted = |client: Client| match client.get(&memledger, "/-/healthy", "") {
        Ok((200, _)) => true,
        Ok(other) => panic!("{other:?}"),
        Err(_) => false,
    };
    let clients =
        [site.client(), site.client_with(&stranger), site.client_with(&other), site.client_with(&wanted)];
    clients.map(is_admitted)
}

#[test]
fn client_auth_type_admits_the_right_clients() {
    let ca = "  client_ca_file: ca.pem\n";
    let of = |word: &str, more: &str| admitted_clients(&format!("  client_auth_type: {word}\n{more}"));
    assert_eq!(of("NoClientCert", ""), [true; 4]);
    assert_eq!(of("VerifyClientCertIfGiven", ca), [true, false, true, true]);
    assert_eq!(of("RequireAndVerifyClientCert", ca), [false, false, true, true]);
    let names = format!("{ca}  client_allowed_sans: [prometheus.example]\n");
    assert_eq!(of("RequireAndVerifyClientCert", &names), [false, false, false, true]);
}

#[test]
fn client_without_a_certificate_reads_why_it_is_rejected() {
    let site = Site::new(&format!(
        "{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
    ));
    let memledger = site.start_unready(&[]);
    // with TLS 1.3 a client sends its request before the server has seen that there is no certificate
    let request = get("/metrics", &format!("X-Large: {}\r\n", "a".repeat(60_000)));
    for _ in 0..50 {
        let error = exchange(site.client().connect(&memledger), &request).unwrap_err();
        assert!(error.contains("CertificateRequired"), "{error}");
    }
}

#[test]
fn names_of_client_certificates_are_compared_as_they_are_written() {
    let policy = |name: &str| {
        format!(
            "{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [{name:?}]\n"
        )
    };
    let uri = "spiffe://example/prometheus";
    for (allowed, certified, is_admitted) in [
        ("a.example", "*.example", false),
        ("A.example", "a.example", true),
        (uri, uri, true),
        (uri, "spiffe://example/other", false),
        ("192.0.2.7", "192.0.2.7", true),
        ("192.0.2.7", "192.0.2.8", false),
    ] {
        let site = Site::new(&policy(allowed));
        let memledger = site.start_unready(&[]);
        let client = site.client_with(&site.authority.issue(&[certified]));
        assert_eq!(
            client.get(&memledger, "/-/healthy", "").is_ok(),
            is_admitted,
            "{allowed} for {certified}"
        );
    }
}

#[test]
fn only_verified_certificates_give_api_access() {
    for (policy, opens) in [
        ("RequireAndVerifyClientCert\n  client_ca_file: ca.pem", true),
        ("VerifyClientCertIfGiven\n  client_ca_file: ca.pem", true),
        ("NoClientCert", false),
    ] {
        let site = Site::new(&format!("{TLS}  client_auth_type: {policy}\n"));
        let memledger = site.start_unready(&["--no-web.enable-api"]);
        let client = site.client_with(&site.authority.issue(&["ann.example"]));
        let status = eventually("a snapshot", || match client.get(&memledger, "/api/v1/containers", "")? {
            (503, text) => Err(text),
            (status, _) => Ok(status),
        });
        assert_eq!(status, if opens { 200 } else { 403 }, "{policy}");
    }
}
