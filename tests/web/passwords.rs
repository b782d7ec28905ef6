//! Who may ask for what.

use std::net::{IpAddr, TcpStream, UdpSocket};
use std::process::Command;

use super::site::{ALONE, Site, TLS, basic, connect, exchange, get, user};
use crate::support::{Memledger, eventually, eventually_true, skip};

/// Without TLS: what is asked for is the same.
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
    // the next cycle shows what was counted in this one
    eventually_true("refusals that are counted", || {
        let metrics = exchange(connect(&memledger), &get("/metrics", &right)).unwrap().1;
        metrics.contains("reason=\"password\"}") && !metrics.contains("reason=\"password\"} 0\n")
    });
}

#[test]
fn a_password_opens_the_api_and_the_admin_route_to_a_foreign_host() {
    let (_site, memledger) = plain(&user("ann"), &["--web.enable-admin"]);
    let foreign = "X-Forwarded-For: 10.0.0.1\r\n";
    let known = format!("{foreign}{}", basic("ann", "secret"));
    assert_eq!(status(&memledger, "/api/v1/containers", &known), 200);
    let post = |headers: &str| {
        let request = get("/-/release-gpu", headers).replacen("GET", "POST", 1);
        exchange(connect(&memledger), &request).unwrap().0
    };
    assert_eq!(post(foreign), 401);
    assert_eq!(post(""), 401, "this host too");
    assert_eq!(post(&known), 200);
    // without a file, only this host
    let open = Memledger::start(&[ALONE, &["--web.enable-admin"]].concat());
    let request = get("/-/release-gpu", foreign).replacen("GET", "POST", 1);
    assert_eq!(exchange(connect(&open), &request).unwrap().0, 403);
    let whole = request.replace(foreign, "").replacen(" /", " http://gpu7.example/", 1);
    assert_eq!(exchange(connect(&open), &whole).unwrap().0, 403, "a foreign host in the URL itself");
}

#[test]
fn a_foreign_authority_of_http_2_is_no_loopback() {
    let site = Site::new(TLS);
    let memledger = site.start(&[]);
    let port = memledger.address.rsplit_once(':').unwrap().1;
    let ask = |host: &str| {
        let output = Command::new("curl")
            .args(["-sSk", "-o", "/dev/null", "-w", "%{http_version} %{http_code}"])
            .args(["--resolve", &format!("{host}:{port}:127.0.0.1")])
            .arg(format!("https://{host}:{port}/api/v1/containers"))
            .output()
            .expect("curl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(ask("localhost"), "2 200");
    assert_eq!(ask("attacker.example"), "2 403");
}

#[test]
fn headers_of_the_file_are_on_every_answer() {
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
fn who_asks_too_often_is_told_so_and_health_goes_on() {
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
    eventually("another request may come", || match status(&memledger, "/", "") {
        200 => Ok(()),
        other => Err(other.to_string()),
    });
}

#[test]
fn strangers_who_ask_too_often_do_not_use_up_what_a_known_password_may_ask() {
    let (_site, memledger) = plain(&format!("{}rate_limit: {{interval: 1h, burst: 3}}\n", user("ann")), &[]);
    let right = basic("ann", "secret");
    assert_eq!(status(&memledger, "/", &right), 200, "checked, and known from now on");
    let strangers: Vec<_> = (0..4).map(|_| status(&memledger, "/", "")).collect();
    assert_eq!(strangers, [401, 401, 429, 429]);
    assert_eq!(status(&memledger, "/", &basic("ann", "guess")), 429, "a guess is a stranger's");
    let known: Vec<_> = (0..4).map(|_| status(&memledger, "/", &right)).collect();
    assert_eq!(known, [200, 200, 200, 429], "the same rate holds for her alone");
}

/// The address by which other hosts reach this one.
pub(super) fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.254:9").ok()?; // sends nothing
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then_some(address)
}

#[test]
fn from_another_address_only_a_password_opens_what_names_processes_or_changes_anything() {
    let Some(address) = own_address() else { return skip("this host has no address but loopback") };
    let site = Site::new(&user("ann"));
    let with = format!("--web.config.file={}", site.path("web.yml"));
    let listen = format!("--web.listen-address={address}:0");
    for (flags, denied, password, allowed) in
        [(vec![], 403, String::new(), 403), (vec![with.as_str()], 401, basic("ann", "secret"), 200)]
    {
        let memledger = Memledger::start(&[ALONE, &["--web.enable-admin", &listen], &flags].concat());
        let log = memledger.log();
        let place = log.lines().filter_map(|line| line.split_once("message=listening address=")).nth(1);
        let place = place.expect("the second address").1;
        let ask = |request: &str| exchange(TcpStream::connect(place).unwrap(), request).unwrap().0;
        let release = |headers: &str| get("/-/release-gpu", headers).replacen("GET", "POST", 1);
        assert_eq!(ask(&get("/api/v1/containers", "")), denied, "{flags:?}");
        assert_eq!(ask(&release("")), denied, "{flags:?}");
        assert_eq!(ask(&get("/api/v1/containers", &password)), allowed, "{flags:?}");
        assert_eq!(ask(&release(&password)), allowed, "{flags:?}");
        assert_eq!(ask(&get("/-/ready", "")), 200, "{flags:?}");
        let warns = memledger.log().contains("passwords are asked for without TLS");
        assert_eq!(warns, !flags.is_empty(), "{}", memledger.log());
    }
}
