//! `memledger healthcheck` and `doctor` where there is TLS.

use super::site::{Site, TLS, user};
use crate::support::{Memledger, run};

fn healthcheck(memledger: &Memledger, site: &Site) -> (Option<i32>, String, String) {
    let address = format!("--web.listen-address={}", memledger.address);
    run(&["healthcheck", &address, &format!("--web.config.file={}", site.path("web.yml"))])
}

#[test]
fn a_health_check_goes_through_tls_and_needs_no_password() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let memledger = site.start(&[]);
    let (code, said, complaint) = healthcheck(&memledger, &site);
    assert_eq!((code, said.as_str()), (Some(0), "memledger is ready.\n"), "{complaint}");
    // a file that broke at run time leaves a healthy memledger healthy
    site.write("web.yml", "nonsense: 1\n");
    assert_eq!(healthcheck(&memledger, &site).0, Some(0));
}

#[test]
fn a_health_check_goes_without_tls_where_the_file_has_none() {
    let site = Site::new(&user("ann"));
    let file = format!("--web.config.file={}", site.path("web.yml"));
    let memledger = Memledger::start(&[super::site::ALONE, &[&file]].concat());
    assert_eq!(memledger.get("/metrics").0, 401);
    let (code, said, complaint) = healthcheck(&memledger, &site);
    assert_eq!((code, said.as_str()), (Some(0), "memledger is ready.\n"), "{complaint}");
}

#[test]
fn a_health_check_that_lacks_a_certificate_says_what_it_does_not_know() {
    for version in ["TLS12", "TLS13"] {
        let site = Site::new(&format!(
            "{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n  max_version: {version}\n"
        ));
        let memledger = site.start_unready(&[]);
        let (code, said, complaint) = healthcheck(&memledger, &site);
        assert_eq!(code, Some(0), "{version}: {complaint}");
        assert!(said.contains("wants a client certificate"), "{said}");
    }
}

#[test]
fn doctor_says_who_may_ask_and_what_is_wrong_with_the_file() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let file = format!("--web.config.file={}", site.path("web.yml"));
    let (code, text, _) = run(&["doctor", &file]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("serving          TLS, 1 user, by "), "{text}");
    assert!(run(&["doctor"]).1.contains("serving          plain HTTP, no passwords"));
    std::fs::remove_file(site.path("key.pem")).unwrap();
    let (code, text, _) = run(&["doctor", &file]);
    assert_eq!(code, Some(1), "serve would not start: {text}");
    assert!(text.contains("web.yml:3: cannot read ") && text.contains("key.pem: No such file"), "{text}");
}
