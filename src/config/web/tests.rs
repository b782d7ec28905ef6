use super::*;

const HASH: &str = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG";

fn parse(text: &str) -> Result<WebConfig, String> {
    WebConfig::parse(Path::new("/etc/web.yml"), text).map_err(|error| error.to_string())
}

#[test]
fn parses_all_settings() {
    let config = parse(&format!(
        "tls_server_config:\n  cert_file: tls/cert.pem\n  key_file: /key.pem\n  client_ca: CA\n  \
         client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [prometheus, 10.0.0.1]\n  \
         min_version: TLS13\n\
         http_server_config:\n  http2: false\n  headers: {{X-Frame-Options: deny, Strict-Transport-Security: max-age=1}}\n\
         basic_auth_users: {{ann: {HASH}}}\nrate_limit: {{interval: 100ms, burst: 7}}\n"
    ))
    .unwrap();
    let tls = config.tls.unwrap();
    assert_eq!(tls.certificate, At { value: Pem::File("/etc/tls/cert.pem".into()), line: 2 });
    assert_eq!(tls.key.value, Pem::File("/key.pem".into()));
    assert_eq!(tls.client_ca, Some(At { value: Pem::Inline("CA".into()), line: 4 }));
    assert_eq!((tls.client_auth, tls.client_names.len()), (ClientAuth::RequireAndVerify, 2));
    assert_eq!((tls.lowest, tls.highest), (TlsVersion::Tls13, TlsVersion::Tls13));
    assert_eq!(config.headers.len(), 2);
    assert_eq!(config.users["ann"].cost(), 10);
    assert_eq!(config.rate, Some(Rate { interval: Duration::from_millis(100), burst: 7 }));
}

#[test]
fn empty_file_means_plain_http_without_authentication() {
    for text in
        ["", "# nothing\n", "tls_server_config:\nbasic_auth_users: {}\n", "rate_limit: {interval: 0}\n"]
    {
        assert_eq!(parse(text), Ok(WebConfig::default()), "{text:?}");
    }
}

#[test]
fn errors_have_line_and_fix() {
    let pair = "tls_server_config:\n  cert_file: c\n  key_file: k\n";
    for (text, line, says) in [
        ("tls_server_config:\n  cert_fle: c\n".to_owned(), 2, "allowed: cert_file"),
        ("users: {}\n".to_owned(), 1, "allowed: tls_server_config"),
        ("tls_server_config:\n  cert_file: c\n".to_owned(), 2, "set key_file"),
        ("tls_server_config:\n  key: k\n".to_owned(), 2, "set cert_file"),
        ("tls_server_config:\n  min_version: TLS13\n".to_owned(), 2, "set cert_file and key_file"),
        (format!("{pair}  cert: c\n"), 4, "leave one out"),
        (format!("{pair}  client_ca_file: c\n"), 4, "client_auth_type"),
        (format!("{pair}  client_auth_type: VerifyClientCertIfGiven\n"), 4, "client_ca_file"),
        (format!("{pair}  client_auth_type: Yes\n"), 4, "RequireAndVerifyClientCert"),
        (format!("{pair}  client_allowed_sans: [a]\n"), 4, "without a certificate"),
        (format!("{pair}  client_allowed_sans: [ann@example.org]\n"), 4, "no mail addresses"),
        (format!("{pair}  client_allowed_sans: [\"*.example.org\"]\n"), 4, "no wildcards"),
        (format!("{pair}  min_version: TLS10\n"), 4, "allowed: TLS12, TLS13"),
        (format!("{pair}  min_version: TLS13\n  max_version: TLS12\n"), 4, "no version is left"),
        ("http_server_config: {http2: 1}\n".to_owned(), 1, "true or false"),
        ("http_server_config:\n  headers:\n    X-Frame-Options: DENY\n".to_owned(), 3, "deny, sameorigin"),
        ("http_server_config:\n  headers:\n    X-Foo: a\n".to_owned(), 3, "allowed: Content-Security-Policy"),
        (
            "http_server_config:\n  headers:\n    Content-Security-Policy: \"a\\nb\"\n".to_owned(),
            3,
            "one line",
        ),
        ("basic_auth_users:\n  ann: secret\n".to_owned(), 2, "htpasswd -nBC 10"),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace("$10$", "$31$")), 2, "04 to 16"),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace("zG", "_G")), 2, "53 letters"),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace(".zou", ".zov")), 2, "was changed"),
        (format!("basic_auth_users:\n  ann: {}\n", HASH.replace("7zG", "7zH")), 2, "was changed"),
        (format!("basic_auth_users:\n  ann: {HASH}\n  ann: {HASH}\n"), 3, "duplicate mapping key"),
        (format!("basic_auth_users:\n  \"\": {HASH}\n"), 2, "not empty"),
        ("basic_auth_users: [ann]\n".to_owned(), 1, "KEY: VALUE"),
        ("rate_limit: {interval: often}\n".to_owned(), 1, "such as 200ms"),
        ("rate_limit: {interval: 1s}\n".to_owned(), 1, "burst"),
        ("rate_limit: {interval: 1s, burst: 0}\n".to_owned(), 1, "at least 1"),
        ("tls_server_config: [\n".to_owned(), 1, "KEY: VALUE"),
        ("--- {}\n--- {}\n".to_owned(), 2, "one document only"),
    ] {
        let error = parse(&text).unwrap_err();
        assert!(error.starts_with(&format!("/etc/web.yml:{line}: ")), "{text}: {error}");
        assert!(error.contains(says), "{text}: {error}");
        assert!(!error.contains("secret"), "a password in a log: {error}");
    }
}

#[test]
fn choice_of_cipher_suites_or_curves_is_refused() {
    let pair = "tls_server_config:\n  cert_file: c\n  key_file: k\n";
    for (key, values) in [
        ("cipher_suites", ["[]", "", "\n  - TLS_AES_128_GCM_SHA256"]),
        ("curve_preferences", ["[X25519]", "", "\n  - CurveP256"]),
        ("prefer_server_cipher_suites", ["true", "false", ""]),
    ] {
        for value in values {
            let error = parse(&format!("{pair}  {key}: {value}\n")).unwrap_err();
            assert!(error.starts_with(&format!("/etc/web.yml:4: `{key}` is not supported")), "{error}");
            assert!(error.contains("remove the key"), "{error}");
        }
    }
    let error = parse(&format!("{pair}  cipher_suits: []\n")).unwrap_err();
    assert!(error.contains("unknown key") && !error.contains("cipher_suites"), "{error}");
}

#[test]
fn user_names_stay_as_they_are_written() {
    let text = ["007", "0x1f", "1.50", "on", "~x"].map(|name| format!("  {name}: {HASH}\n")).concat();
    let users = parse(&format!("basic_auth_users:\n{text}")).unwrap().users;
    assert_eq!(users.keys().collect::<Vec<_>>(), ["007", "0x1f", "1.50", "on", "~x"]);
}

#[test]
fn debug_output_omits_hashes_and_keys() {
    let text = format!("tls_server_config: {{cert: CERT, key: KEY}}\nbasic_auth_users: {{ann: {HASH}}}\n");
    let shown = format!("{:?}", parse(&text).unwrap());
    assert!(!shown.contains("KEY") && !shown.contains("X0h1"), "{shown}");
}
