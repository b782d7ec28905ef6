//! Versions, ciphers and certificates, asked for by openssl and curl.

use std::process::{Command, Stdio};

use super::site::{Client, Site, TLS, connect, exchange, get};
use crate::support::{Memledger, eventually};

/// What `openssl s_client` finds; an error if no TLS came about.
fn openssl(memledger: &Memledger, flags: &[&str]) -> Result<String, String> {
    let output = Command::new("openssl")
        .args(["s_client", "-connect", &memledger.address])
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .expect("openssl runs");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if said.contains("Cipher is (NONE)") || !said.contains("Cipher is ") { Err(said) } else { Ok(said) }
}

fn ready(site: &Site) -> Memledger {
    site.start(&[])
}

#[test]
fn only_versions_and_ciphers_that_were_chosen_are_spoken() {
    let all = Site::new(TLS);
    let memledger = ready(&all);
    for (flag, name) in [("-tls1_2", "TLSv1.2"), ("-tls1_3", "TLSv1.3")] {
        let said = openssl(&memledger, &[flag]).unwrap();
        assert!(said.contains(&format!("New, {name}, Cipher is ")), "{said}");
    }
    let old = openssl(&memledger, &["-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0"]).unwrap_err();
    assert!(old.contains("alert"), "{old}");
    assert!(
        openssl(&memledger, &["-tls1_2", "-cipher", "AES128-SHA"]).is_err(),
        "no cipher without forward secrecy"
    );

    let new = Site::new(&format!("{TLS}  min_version: TLS13\n  curve_preferences: [CurveP384]\n"));
    let memledger = ready(&new);
    assert!(openssl(&memledger, &["-tls1_2"]).unwrap_err().contains("alert protocol version"));
    let said = openssl(&memledger, &["-tls1_3", "-groups", "X25519:P-384"]).unwrap();
    assert!(said.contains("ECDH, secp384r1, 384 bits"), "{said}");
    assert!(openssl(&memledger, &["-tls1_3", "-groups", "X25519"]).is_err());

    let one = Site::new(&format!(
        "{TLS}  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n"
    ));
    let memledger = ready(&one);
    assert!(openssl(&memledger, &["-tls1_3"]).is_err());
    let said =
        openssl(&memledger, &["-cipher", "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-CHACHA20-POLY1305"])
            .unwrap();
    assert!(said.contains("Cipher is ECDHE-ECDSA-CHACHA20-POLY1305"), "the server's order counts: {said}");
    assert!(openssl(&memledger, &["-cipher", "ECDHE-ECDSA-AES256-GCM-SHA384"]).is_err());
}

/// The version of HTTP that curl comes to, and the status.
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
fn http_2_is_spoken_where_both_want_it() {
    let site = Site::new(TLS);
    let memledger = ready(&site);
    assert_eq!(curl(&memledger, &site, &[]), "2 200");
    assert_eq!(curl(&memledger, &site, &["--http1.1"]), "1.1 200");
    let without = Site::new(&format!("{TLS}http_server_config: {{http2: false}}\n"));
    assert_eq!(curl(&ready(&without), &without, &[]), "1.1 200");
}

#[test]
fn plain_http_on_the_port_of_tls_is_told_so() {
    let site = Site::new(TLS);
    let memledger = ready(&site);
    let before = site.client().metrics(&memledger, "");
    assert_eq!(before.value("memledger_web_refused_total", &[("reason", "handshake")]), 0.0);
    let (status, text) = exchange(connect(&memledger), &get("/metrics", "")).unwrap();
    assert_eq!(status, 400);
    assert!(text.ends_with("this port speaks HTTPS\n"), "{text}");
    eventually("the refusal is counted", || {
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

/// Whether each of four clients gets an answer: one without a certificate, with one of a stranger, with one of the authority,
/// and with one of the authority that has the wanted name.
fn who_gets_in(policy: &str) -> [bool; 4] {
    let site = Site::new(&format!("{TLS}{policy}"));
    let memledger = site.start_unready(&["--web.enable-admin"]);
    let stranger = super::site::Authority::new().issue(&["prometheus.example"]);
    let other = site.authority.issue(&["other.example"]);
    let wanted = site.authority.issue(&["prometheus.example"]);
    let gets_in = |client: Client| match client.get(&memledger, "/-/healthy", "") {
        Ok((200, _)) => true,
        Ok(other) => panic!("{other:?}"),
        Err(_) => false,
    };
    let clients =
        [site.client(), site.client_with(&stranger), site.client_with(&other), site.client_with(&wanted)];
    clients.map(gets_in)
}

#[test]
fn each_policy_of_client_certificates_lets_in_whom_it_says() {
    let ca = "  client_ca_file: ca.pem\n";
    let of = |word: &str, more: &str| who_gets_in(&format!("  client_auth_type: {word}\n{more}"));
    assert_eq!(of("NoClientCert", ""), [true; 4]);
    assert_eq!(of("RequestClientCert", ""), [true; 4]);
    assert_eq!(of("RequireAnyClientCert", ""), [false, true, true, true]);
    assert_eq!(of("VerifyClientCertIfGiven", ca), [true, false, true, true]);
    assert_eq!(of("RequireAndVerifyClientCert", ca), [false, false, true, true]);
    let names = format!("{ca}  client_allowed_sans: [prometheus.example]\n");
    assert_eq!(of("RequireAndVerifyClientCert", &names), [false, false, false, true]);
    let names = "  client_allowed_sans: [prometheus.example]\n";
    assert_eq!(of("RequireAnyClientCert", names), [false, true, false, true], "nobody verifies who made it");
}

#[test]
fn a_verified_certificate_opens_the_api_to_a_foreign_host_and_an_unverified_one_does_not() {
    let foreign = "X-Forwarded-For: 10.0.0.1\r\n";
    for (policy, opens) in [
        ("RequireAndVerifyClientCert\n  client_ca_file: ca.pem", true),
        ("VerifyClientCertIfGiven\n  client_ca_file: ca.pem", true),
        ("RequireAnyClientCert", false),
        ("RequestClientCert", false),
    ] {
        let site = Site::new(&format!("{TLS}  client_auth_type: {policy}\n"));
        let memledger = site.start_unready(&[]);
        let client = site.client_with(&site.authority.issue(&["ann.example"]));
        let status =
            eventually("a snapshot", || match client.get(&memledger, "/api/v1/containers", foreign)? {
                (503, text) => Err(text),
                (status, _) => Ok(status),
            });
        assert_eq!(status, if opens { 200 } else { 403 }, "{policy}");
    }
}
