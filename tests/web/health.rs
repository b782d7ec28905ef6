//! `memledger healthcheck` and `doctor` with a web configuration.

use super::site::{Site, TLS, user};
use crate::support::{Memledger, run};

fn healthcheck(memledger: &Memledger, site: &Site) -> (Option<i32>, String, String) {
    let address = format!("--web.listen-address={}", memledger.address);
    let file = format!("--web.config.file={}", site.path("web.yml"));
    run(&["healthcheck", &address, &file, "--local.socket="])
}

#[test]
fn healthcheck_of_a_port_with_tls_and_passwords_uses_the_control_socket() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let socket = format!("--local.socket={}", site.path("control.sock"));
    let memledger = site.start(&[&socket]);
    let address = format!("--web.listen-address={}", memledger.address);
    let check = || run(&["healthcheck", &address, &socket]);
    let (code, output, errors) = check();
    assert_eq!((code, output.as_str()), (Some(0), "memledger is ready.\n"), "{errors}");
    // a configuration that becomes invalid at run time does not make memledger unhealthy
    site.write("web.yml", "nonsense: 1\n");
    assert_eq!(check().0, Some(0));
}

#[test]
fn healthcheck_uses_plain_http_without_tls_settings() {
    let site = Site::new(&user("ann"));
    let file = format!("--web.config.file={}", site.path("web.yml"));
    let memledger = Memledger::start(&[super::site::ALONE, &[&file]].concat());
    assert_eq!(memledger.get("/metrics").0, 401);
    let (code, output, errors) = healthcheck(&memledger, &site);
    assert_eq!((code, output.as_str()), (Some(0), "memledger is ready.\n"), "{errors}");
}

#[test]
fn healthcheck_of_a_port_with_tls_alone_reports_that_readiness_is_unknown() {
    for version in ["TLS12", "TLS13"] {
        let site = Site::new(&format!(
            "{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n  max_version: {version}\n"
        ));
        let memledger = site.start_unready(&[]);
        let (code, output, errors) = healthcheck(&memledger, &site);
        assert_eq!(code, Some(0), "{version}: {errors}");
        assert!(output.contains("It uses TLS"), "{output}");
    }
}

#[test]
fn doctor_summarizes_web_configuration_or_reports_errors() {
    let site = Site::new(&format!("{TLS}{}", user("ann")));
    let file = format!("--web.config.file={}", site.path("web.yml"));
    let (code, text, _) = run(&["doctor", &file]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("serving          TLS, 1 user, by "), "{text}");
    assert!(run(&["doctor", "--all"]).1.contains("serving          plain HTTP, no passwords"));
    std::fs::remove_file(site.path("key.pem")).unwrap();
    let (code, text, _) = run(&["doctor", &file]);
    assert_eq!(code, Some(1), "serve would not start: {text}");
    assert!(text.contains("web.yml:3: cannot read ") && text.contains("key.pem: No such file"), "{text}");
}
