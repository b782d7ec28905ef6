//! Compares our verdict on configuration files with the format's own checker, `promtool check web-config`. Where we are
//! stricter, the table gives the reason.
//!
//! Keys that the tested promtool (Debian's 2.42) does not know are in a separate table; its error message proves that it does
//! not know them.

use std::process::Command;

use super::site::{Site, TLS};
use crate::prometheus::provided;
use crate::support::run;

const HASH: &str = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG";

fn promtool(binary: &str, site: &Site) -> (bool, String) {
    let output = Command::new(binary)
        .args(["check", "web-config"])
        .arg(site.path("web.yml"))
        .output()
        .expect("promtool runs");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    (output.status.success(), text)
}

/// Returns whether memledger accepts the file, and its message if not. `doctor` reads it as `serve` does.
fn ours(site: &Site) -> (bool, String) {
    let (code, text, _) = run(&["doctor", &format!("--web.config.file={}", site.path("web.yml"))]);
    let line = text.lines().find(|line| line.contains(" serving ")).expect("a line about it").to_owned();
    assert_eq!(code == Some(0), line.trim_start().starts_with("ok"), "{text}");
    (code == Some(0), line)
}

fn with_tls(more: &str) -> String {
    format!("{TLS}{more}")
}

/// Files that both accept, and files that both reject.
fn agreed() -> (Vec<String>, Vec<String>) {
    let header = |text: &str| format!("http_server_config:\n  headers:\n    {text}\n");
    let good = vec![
        String::new(),
        "tls_server_config: {}\n".into(),
        TLS.into(),
        with_tls("  min_version: TLS12\n  max_version: TLS13\n"),
        with_tls("  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"),
        with_tls("  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.pem\n"),
        with_tls("  client_auth_type: NoClientCert\n"),
        "http_server_config:\n  http2: false\n".into(),
        header("X-Frame-Options: deny"),
        header("X-Content-Type-Options: nosniff"),
        header("Strict-Transport-Security: max-age=31536000"),
        header("X-XSS-Protection: 1; mode=block"),
        header("Content-Security-Policy: default-src 'self'"),
        format!("basic_auth_users:\n  ann: {HASH}\n  bob: {HASH}\n"),
    ];
    let bad = vec![
        "users: {}\n".into(),
        "a: [\n".into(),
        with_tls("  min_vers: TLS12\n"),
        "tls_server_config:\n  cert_file: cert.pem\n".into(),
        "tls_server_config:\n  key_file: key.pem\n".into(),
        "tls_server_config:\n  cert_file: \"\"\n  key_file: key.pem\n".into(),
        "tls_server_config:\n  cert_file: key.pem\n  key_file: cert.pem\n".into(),
        "tls_server_config:\n  cert_file: nowhere.pem\n  key_file: key.pem\n".into(),
        "tls_server_config:\n  cert_file: ca.pem\n  key_file: key.pem\n".into(),
        "tls_server_config:\n  client_auth_type: RequireAndVerifyClientCert\n".into(),
        with_tls("  client_ca_file: ca.pem\n"),
        with_tls("  client_auth_type: NoClientCert\n  client_ca_file: ca.pem\n"),
        with_tls("  client_auth_type: Always\n"),
        with_tls("  min_version: TLS14\n"),
        with_tls("  cipher_suites: [TLS_NOTHING]\n"),
        with_tls("  curve_preferences: [P256]\n"),
        header("X-Frame-Options: DENY"),
        header("x-frame-options: deny"),
        header("X-Content-Type-Options: \"\""),
        header("X-Powered-By: memledger"),
        "http_server_config:\n  http2: 1\n".into(),
        "basic_auth_users:\n  ann: secret\n".into(),
        "basic_auth_users:\n  ann: \"\"\n".into(),
        "basic_auth_users: [ann]\n".into(),
        format!("basic_auth_users:\n  ann: {}\n", HASH.replace("$10$", "$40$")),
        format!("basic_auth_users:\n  ann: {HASH}\n  ann: {HASH}\n"),
    ];
    (good, bad)
}

/// Files that promtool accepts and memledger rejects, because it could not do what they say.
fn stricter() -> Vec<(String, &'static str)> {
    vec![
        ("tls_server_config:\n  min_version: TLS13\n".into(), "TLS needs a certificate"),
        (with_tls("  min_version: TLS13\n  max_version: TLS12\n"), "no version is left"),
        (with_tls("  client_auth_type: RequireAnyClientCert\n"), "verifies no certificate"),
        (
            with_tls("  client_auth_type: RequireClientCert\n  client_ca_file: ca.pem\n"),
            "verifies no certificate",
        ),
        (with_tls("  client_auth_type: RequestClientCert\n"), "verifies no certificate"),
        (with_tls("  min_version: TLS10\n"), "not offered"),
        (with_tls("  cipher_suites: [TLS_AES_128_GCM_SHA256]\n"), "`cipher_suites` is not supported"),
        (with_tls("  curve_preferences: [X25519]\n"), "`curve_preferences` is not supported"),
        (with_tls("  prefer_server_cipher_suites: yes\n"), "`prefer_server_cipher_suites` is not supported"),
        (with_tls("  client_auth_type: RequireAndVerifyClientCert\n"), "verified against client_ca_file"),
        (
            with_tls("  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: key.pem\n"),
            "no certificate",
        ),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace(".zou", ".zov")), "was changed"),
        (with_tls("---\nusers: {}\n"), "one document only"),
        (format!("basic_auth_users:\n  \"\": {HASH}\n"), "not empty"),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace("$10$", "$31$")), "04 to 16"),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace("7zG", "_zG")), "53 letters"),
        ("http_server_config:\n  headers:\n    Content-Security-Policy: \"a\\nb\"\n".into(), "one line"),
    ]
}

#[test]
fn agrees_with_promtool_about_files() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let site = Site::new("");
    let judged = |text: &str| {
        site.write("web.yml", text);
        (promtool(&binary, &site), ours(&site))
    };
    let (good, bad) = agreed();
    for text in good {
        let (theirs, ours) = judged(&text);
        assert!(theirs.0 && ours.0, "{text}\npromtool: {}\nmemledger: {}", theirs.1, ours.1);
    }
    for text in bad {
        let (theirs, ours) = judged(&text);
        assert!(!theirs.0 && !ours.0, "{text}\npromtool: {}\nmemledger: {}", theirs.1, ours.1);
        assert!(ours.1.contains("web.yml:"), "no file and line: {}", ours.1);
    }
    for (text, expected) in stricter() {
        let (theirs, ours) = judged(&text);
        assert!(theirs.0 && !ours.0, "{text}\npromtool: {}\nmemledger: {}", theirs.1, ours.1);
        assert!(ours.1.contains("web.yml:") && ours.1.contains(expected), "{text}: {}", ours.1);
    }
}

#[test]
fn checks_keys_that_promtool_does_not_support() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let site = Site::new("");
    let read = |name: &str| std::fs::read_to_string(site.path(name)).unwrap().replace('\n', "\n    ");
    let inline = format!(
        "tls_server_config:\n  cert: |\n    {}\n  key: |\n    {}\n",
        read("cert.pem"),
        read("key.pem")
    );
    let sans = "  client_allowed_sans: [prometheus]\n";
    let named = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n";
    for (text, is_good) in [
        ("rate_limit: {interval: 1s, burst: 5}\n".to_owned(), true),
        ("rate_limit: {interval: 0, burst: 5}\n".to_owned(), true),
        ("rate_limit: {interval: soon, burst: 5}\n".to_owned(), false),
        (inline.clone(), true),
        (format!("{inline}  cert_file: cert.pem\n"), false),
        (with_tls(&format!("{named}{sans}")), true),
        (with_tls(&format!("{named}  client_allowed_sans: [10.0.0.1, a@b.example]\n")), false),
        (with_tls(sans), false),
    ] {
        site.write("web.yml", &text);
        let theirs = promtool(&binary, &site).1;
        assert!(
            theirs.contains("not found in type"),
            "this promtool supports the key; move it to the other table: {text}: {theirs}"
        );
        assert_eq!(ours(&site).0, is_good, "{text}: {}", ours(&site).1);
    }
}

#[test]
fn serve_rejects_an_unusable_file_before_it_starts() {
    let site = Site::new(&with_tls("  client_ca_file: ca.pem\n"));
    let file = format!("--web.config.file={}", site.path("web.yml"));
    let (code, _, error) = run(&["serve", "--web.listen-address=127.0.0.1:0", "--state.path=", &file]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("web.yml:4: a client CA has no effect without client_auth_type"), "{error}");
    assert!(!error.contains("listening"), "{error}");
    let (code, _, error) = run(&["serve", "--state.path=", "--web.config.file=/nowhere.yml"]);
    assert!(code == Some(2) && error.contains("/nowhere.yml"), "{error}");
}
