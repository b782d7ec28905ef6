//! Which clients have access to which routes.

use std::net::TcpStream;

use super::site::{ALONE, Site, basic, connect, exchange, get, user};
use crate::support::load::{other_address, own_address};
use crate::support::{Memledger, eventually, eventually_true, skip};

/// Starts memledger without TLS: the same access rules apply.
fn plain(config: &str, flags: &[&str]) -> (Site, Memledger) {
    let site = Site::new(config);
    let file = format!("--web.config.file={}", site.path("web.yml"));
    let memledger = Memledger::start(&[ALONE, &[&file], flags].concat());
    (site, memledger)
}

fn status(memledger: &Memledger, path: &str, headers: &str) -> u16 {
    exchange(connect(memledger), &get(path, headers)).unwrap().0
}

#[test]
fn everything_but_health_needs_the_password() {
    let (_site, memledger) = plain(&user("ann"), &["--web.enable-api"]);
    let right = basic("ann", "secret");
    for path in [
        "/metrics",
        "/",
        "/api/v1/containers",
        "/api/v1/events",
        "/nothing",
        "/-/ready/",
        "/-/healthy/../../metrics",
    ] {
        let (code, text) = exchange(connect(&memledger), &get(path, "")).unwrap();
        assert_eq!(code, 401, "{path}");
        assert!(text.contains("\r\nwww-authenticate: Basic realm=\"memledger\""), "{text}");
    }
    for path in ["/metrics", "/", "/api/v1/containers", "/api/v1/events"] {
        assert_eq!(status(&memledger, path, &right), 200, "{path}");
    }
    assert_eq!(status(&memledger, "/nothing", &right), 404);
    for path in ["/-/healthy", "/-/ready", "/-/ready?x=1"] {
        assert_eq!(status(&memledger, path, ""), 200, "{path}");
    }
    let wrong = [
        basic("ann", "Secret"),
        basic("ann", "secret "),
        basic("ann", ""),
        basic("", "secret"),
        basic("bob", "secret"),
        format!("{right}{right}"),
        right.replace("Basic", "Bearer"),
        "Authorization: Basic\r\n".to_owned(),
        "Authorization: Basic !!!\r\n".to_owned(),
        "Authorization: Basic YW5u\r\n".to_owned(), // no colon
    ];
    for headers in wrong {
        assert_eq!(status(&memledger, "/metrics", &headers), 401, "{headers}");
    }
    assert_eq!(status(&memledger, "/metrics", &right.replace("Basic", "bAsIc")), 200, "schemes have no case");
    // counts appear in the next cycle
    eventually_true("rejections are counted", || {
        let metrics = exchange(connect(&memledger), &get("/metrics", &right)).unwrap().1;
        metrics.contains("reason=\"password\"}") && !metrics.contains("reason=\"password\"} 0\n")
    });
}

#[test]
fn password_gives_access_to_api_and_admin_routes() {
    let folder = tempfile::tempdir().unwrap();
    let reporter = format!("--reporter.directory={}", folder.path().join("reporter").display());
    let (_site, memledger) = plain(&user("ann"), &["--web.enable-admin", "--no-web.enable-api", &reporter]);
    let known = basic("ann", "secret");
    assert_eq!(status(&memledger, "/api/v1/containers", &known), 200);
    for (path, done) in [("/-/release-gpu", 200), ("/api/v1/containers/nobody/cleanup", 404)] {
        let post = |headers: &str| {
            let request = get(path, headers).replacen("GET", "POST", 1);
            exchange(connect(&memledger), &request).unwrap().0
        };
        assert_eq!(post(""), 401, "this host too");
        assert_eq!(post(&format!("{known}Origin: http://attacker.example\r\n")), 403);
        assert_eq!(post(&format!("{known}Origin: http://127.0.0.1\r\n")), done);
        assert_eq!(post(&known), done);
    }
}

#[test]
fn configured_headers_are_on_every_response() {
    let text = format!("{}http_server_config:\n  headers: {{X-Frame-Options: deny}}\n", user("ann"));
    let (_site, memledger) = plain(&text, &[]);
    for (path, headers) in [
        ("/metrics", ""),
        ("/-/healthy", ""),
        ("/nothing", &basic("ann", "secret")),
        ("/", &basic("ann", "secret")),
    ] {
        let (_, text) = exchange(connect(&memledger), &get(path, headers)).unwrap();
        assert!(text.contains("\r\nx-frame-options: deny\r\n"), "{path}: {text}");
    }
}

#[test]
fn rate_limit_responds_429_and_exempts_health() {
    let (_site, memledger) = plain("rate_limit: {interval: 1h, burst: 3}\n", &[]);
    for _ in 0..3 {
        assert_eq!(status(&memledger, "/", ""), 200);
    }
    for _ in 0..3 {
        assert_eq!(status(&memledger, "/", ""), 429);
        assert_eq!(status(&memledger, "/-/ready", ""), 200);
    }
    let (_site, memledger) = plain("rate_limit: {interval: 200ms, burst: 1}\n", &[]);
    assert_eq!(status(&memledger, "/", ""), 200);
    eventually("the next token", || match status(&memledger, "/", "") {
        200 => Ok(()),
        other => Err(other.to_string()),
    });
}

#[test]
fn requests_of_one_address_do_not_use_up_the_rate_of_another() {
    let Some(address) = own_address() else { return skip("this host has no address but loopback") };
    let listen = format!("--web.listen-address={address}:0");
    let (_site, memledger) =
        plain(&format!("{}rate_limit: {{interval: 1h, burst: 3}}\n", user("ann")), &[&listen]);
    let other = other_address(&memledger);
    let strangers: Vec<_> = (0..4).map(|_| status(&memledger, "/", "")).collect();
    assert_eq!(strangers, [401, 401, 401, 429]);
    let right = get("/", &basic("ann", "secret"));
    let known: Vec<_> =
        (0..4).map(|_| exchange(TcpStream::connect(other).unwrap(), &right).unwrap().0).collect();
    assert_eq!(known, [200, 200, 200, 429], "the same rate applies to authenticated requests");
}

#[test]
fn concurrent_first_requests_with_a_password_share_one_check() {
    // a cost at which all requests arrive while the first one is checked
    let hash = bcrypt::hash("secret", 11).unwrap();
    let (_site, memledger) = plain(&format!("basic_auth_users:\n  ann: {hash}\n"), &[]);
    let right = basic("ann", "secret");
    let statuses: Vec<_> = std::thread::scope(|scope| {
        let requests: Vec<_> =
            (0..8).map(|_| scope.spawn(|| status(&memledger, "/metrics", &right))).collect();
        requests.into_iter().map(|request| request.join().unwrap()).collect()
    });
    assert_eq!(statuses, [200; 8]);
}

#[test]
fn remote_address_needs_a_password_for_api_and_admin_routes() {
    let Some(address) = own_address() else { return skip("this host has no address but loopback") };
    let site = Site::new(&user("ann"));
    let with = format!("--web.config.file={}", site.path("web.yml"));
    let listen = format!("--web.listen-address={address}:0");
    for (flags, denied, password, allowed) in
        [(vec![], 403, String::new(), 403), (vec![with.as_str()], 401, basic("ann", "secret"), 200)]
    {
        let memledger = Memledger::start(
            &[ALONE, &["--web.enable-admin", "--no-web.enable-api", &listen], &flags].concat(),
        );
        let log = memledger.log();
        let line = log.lines().filter_map(|line| line.split_once("message=listening address=")).nth(1);
        let remote_address = line.expect("the second address").1;
        let status_of =
            |request: &str| exchange(TcpStream::connect(remote_address).unwrap(), request).unwrap().0;
        let release = |headers: &str| get("/-/release-gpu", headers).replacen("GET", "POST", 1);
        assert_eq!(status_of(&get("/api/v1/containers", "")), denied, "{flags:?}");
        assert_eq!(status_of(&release("")), denied, "{flags:?}");
        assert_eq!(status_of(&get("/api/v1/containers", &password)), allowed, "{flags:?}");
        assert_eq!(status_of(&release(&password)), allowed, "{flags:?}");
        assert_eq!(status_of(&get("/-/ready", "")), 200, "{flags:?}");
        let warns = memledger.log().contains("sends passwords in clear text");
        assert_eq!(warns, !flags.is_empty(), "{}", memledger.log());
    }
}
