//! A real Prometheus scrapes with TLS, a password and a client certificate.

use super::site::{Site, TLS, user};
use crate::prometheus::{Prometheus, provided};
use crate::support::eventually;

/// Lets Prometheus scrape `address` with these settings, and checks that every scrape succeeds.
fn assert_scraped(binary: &str, address: &str, settings: &str) {
    let config = format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n- job_name: memledger\n  \
         scheme: https\n{settings}  static_configs: [{{targets: ['{address}']}}]\n"
    );
    let prometheus = Prometheus::configured(binary, &config);
    eventually("three scrapes", || match prometheus.one("sum_over_time(up[5m])")? {
        scrapes if scrapes >= 3.0 => Ok(()),
        scrapes => Err(format!("{scrapes}; {}", prometheus.get("/api/v1/targets")?)),
    });
    prometheus.assert_no_failed_scrape();
    let in_use = eventually("its metrics", || prometheus.one("memledger_web_config_success"));
    assert_eq!(in_use, 1.0);
    let log = prometheus.log();
    assert!(!log.contains("level=warn") && !log.contains("level=error"), "{log}");
}

#[test]
fn prometheus_scrapes_with_tls_and_password() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    let site = Site::new(&format!("{TLS}{}", user("prometheus")));
    let memledger = site.start(&[]);
    let settings = format!(
        "  basic_auth: {{username: prometheus, password: secret}}\n  tls_config: {{ca_file: '{}'}}\n",
        site.path("ca.pem")
    );
    assert_scraped(&binary, &memledger.address, &settings);
}

#[test]
fn prometheus_scrapes_with_client_certificate_and_password() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    let config = format!(
        "{TLS}  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n  \
         client_allowed_sans: [prometheus.example]\n{}",
        user("prometheus")
    );
    let site = Site::new(&config);
    let shown = site.authority.issue(&["prometheus.example"]);
    site.write("client.pem", &shown.0);
    site.write("client-key.pem", &shown.1);
    let memledger = site.start_unready(&[]);
    let settings = format!(
        "  basic_auth: {{username: prometheus, password: secret}}\n  \
         tls_config: {{ca_file: '{}', cert_file: '{}', key_file: '{}'}}\n",
        site.path("ca.pem"),
        site.path("client.pem"),
        site.path("client-key.pem")
    );
    let client = site.client_with(&shown);
    eventually("the first snapshot", || match client.get(&memledger, "/-/ready", "")? {
        (200, _) => Ok(()),
        (status, _) => Err(status.to_string()),
    });
    assert_scraped(&binary, &memledger.address, &settings);
    let log = memledger.log();
    // a kill of another test is a warning, too
    let is_warning = |line: &str| line.contains("level=warn") && !line.contains("ledger::event_log");
    assert!(!log.lines().any(is_warning), "{log}");
}
