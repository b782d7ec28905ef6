//! `--report.s3-url`.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::servers::{BUCKET, Fault, KEYS, Relay, Server};
use super::{Host, await_written, json, value};
use crate::support::{Memledger, eventually, eventually_true};

fn flags(url: &str) -> [String; 2] {
    [format!("--report.s3-url=s3://{BUCKET}/team a/memory"), format!("--report.s3-endpoint={url}")]
}

/// Returns a host that writes reports to this server.
fn host(url: &str, variables: &[&str]) -> Host {
    let flags = flags(url);
    Host::new(&flags.each_ref().map(String::as_str), variables)
}

/// Waits until a report could not be written.
fn await_failure(memledger: &Memledger) {
    eventually("a failure", || match value(memledger, "memledger_report_up", "s3") {
        Some(0.0) => Ok(()),
        up => Err(format!("{up:?}: {}", memledger.log())),
    });
}

/// Checks that these runs, and no others, are in the bucket, each complete.
fn assert_complete(server: &Server, runs: &[String]) {
    let keys = server.keys();
    let mut wanted = Vec::new();
    for run in runs {
        let start = format!("team a/memory/{run}.");
        let report = keys.iter().find(|key| key.starts_with(&start) && key.ends_with("/report.json"));
        let report = report.unwrap_or_else(|| panic!("no report of {run}: {keys:?}"));
        let folder = report.trim_end_matches("report.json");
        for name in ["memory_usage.json", "report.html", "report.json"] {
            wanted.push(format!("{folder}{name}"));
        }
        assert_eq!(json(&server.object(report))["container_name"], **run);
        let page = String::from_utf8(server.object(&format!("{folder}report.html"))).unwrap();
        assert!(page.ends_with("</html>\n"), "{page}");
    }
    wanted.sort();
    assert_eq!(keys, wanted);
}

/// Writes reports of runs through all faults, over a SIGKILL of memledger: each run is in the bucket once.
fn gets_each_run_once(server: &Server, variables: &[&str]) {
    let relay = Relay::start(server.port);
    let host = host(&relay.url(), variables);
    let mut memledger = host.serve(&[]);
    let mut runs = Vec::new();
    for (number, fault) in [Fault::Closed, Fault::Busy, Fault::Cut, Fault::Silent].into_iter().enumerate() {
        relay.fail(fault);
        runs.push(host.run(&[], &["true"]));
        if fault == Fault::Silent {
            eventually_true("a pending report", || {
                value(&memledger, "memledger_reports_waiting", "s3") == Some(1.0)
            });
            // kills, exits and scrapes go on meanwhile
            let exits = || memledger.metrics().sum("memledger_container_exits_total", &[]);
            let before = exits();
            runs.push(host.run(&[], &["true"]));
            eventually_true("an exit", || exits() > before);
        } else {
            await_failure(&memledger);
        }
        if number % 2 == 1 {
            memledger.signal("KILL");
            memledger = host.serve(&[]);
        }
        relay.fail(Fault::None);
        eventually("no pending report", || {
            match (
                value(&memledger, "memledger_reports_waiting", "s3"),
                value(&memledger, "memledger_report_up", "s3"),
            ) {
                (Some(0.0), Some(1.0)) => Ok(()),
                found => Err(format!("{fault:?}: {found:?}: {}", memledger.log())),
            }
        });
        assert_complete(server, &runs);
    }
    assert_eq!(value(&memledger, "memledger_reports_lost_total", "s3"), Some(0.0));
    let secret = variables[1].split_once('=').unwrap().1;
    assert!(!memledger.log().contains(secret), "{}", memledger.log());
    assert!(!memledger.log().contains("X-Amz-Signature"), "{}", memledger.log());
}

#[test]
fn moto_gets_each_run_once_through_all_faults() {
    let Some(server) = Server::moto() else { return };
    gets_each_run_once(&server, &KEYS);
}

#[test]
fn s3s_fs_gets_each_run_once_through_all_faults() {
    let Some(server) = Server::s3s() else { return };
    gets_each_run_once(&server, &KEYS);
}

#[test]
fn bucket_that_is_made_later_gets_the_runs_before() {
    let Some(server) = Server::moto() else { return };
    let flags = ["--report.s3-url=s3://later", &format!("--report.s3-endpoint={}", server.url())];
    let host = Host::new(&flags, &KEYS);
    let (is_good, text) = host.check();
    assert!(!is_good && text.contains("NoSuchBucket") && text.contains("create the bucket"), "{text}");
    let memledger = host.serve(&[]);
    let run = host.run(&[], &["true"]);
    await_failure(&memledger);
    assert!(memledger.log().contains("NoSuchBucket"), "{}", memledger.log());
    ureq::put(format!("{}/later", server.url())).send_empty().unwrap();
    await_written(&memledger, "s3", 1.0);
    let list =
        ureq::get(format!("{}/later", server.url())).call().unwrap().body_mut().read_to_string().unwrap();
    assert!(list.contains(&format!("<Key>{run}.")), "{list}");
    let (is_good, text) = host.check();
    assert!(is_good && text.contains("written and removed"), "{text}");
}

#[test]
fn credentials_that_are_missing_or_without_rights_are_errors_with_advice() {
    let relay = Relay::start(1);
    relay.fail(Fault::Denied);
    for (variables, wanted) in
        [(&[][..], "AWS_ACCESS_KEY_ID"), (&KEYS[..], "allow these credentials s3:PutObject")]
    {
        let (is_good, text) = host(&relay.url(), variables).check();
        assert!(!is_good && text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
fn s3s_fs_rejects_wrong_credentials() {
    let Some(server) = Server::s3s() else { return };
    let (is_good, text) = host(&server.url(), &KEYS).check();
    assert!(is_good && text.contains("written and removed"), "{text}");
    for wrong in [[KEYS[0], "AWS_SECRET_ACCESS_KEY=wrong"], ["AWS_ACCESS_KEY_ID=nobody", KEYS[1]]] {
        let (is_good, text) = host(&server.url(), &wrong).check();
        assert!(!is_good && text.contains("check the credentials"), "{text}");
    }
}

#[test]
fn credentials_come_from_files_and_from_the_token_service() {
    let (Some(server), folder) = (Server::moto(), tempfile::tempdir().unwrap()) else { return };
    let (file, token) = (folder.path().join("credentials"), folder.path().join("token"));
    std::fs::write(&file, "[lab]\naws_access_key_id = a\naws_secret_access_key = b\n").unwrap();
    std::fs::write(&token, "a.web.token\n").unwrap();
    let of_file = format!("AWS_SHARED_CREDENTIALS_FILE={}", file.display());
    let of_token = format!("AWS_WEB_IDENTITY_TOKEN_FILE={}", token.display());
    let service = format!("AWS_ENDPOINT_URL_STS={}", server.url());
    let role = "AWS_ROLE_ARN=arn:aws:iam::123456789012:role/reports";
    for variables in [&[&of_file, "AWS_PROFILE=lab"][..], &[&of_token, role, &service]] {
        let (is_good, text) = host(&server.url(), variables).check();
        assert!(is_good, "{variables:?}: {text}");
    }
    let (is_good, text) =
        host(&server.url(), &[&of_token, role, "AWS_ENDPOINT_URL_STS=http://127.0.0.1:1"]).check();
    assert!(!is_good && text.contains("AssumeRoleWithWebIdentity failed"), "{text}");
}

/// Writes a certificate authority, and a certificate of this host with its key.
fn certificates(folder: &Path) {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    std::fs::write(folder.join("ca"), authority.pem()).unwrap();
    std::fs::write(folder.join("certificate"), certificate.pem()).unwrap();
    std::fs::write(folder.join("key"), key.serialize_pem()).unwrap();
}

#[test]
fn private_certificate_authority_is_trusted_where_it_is_set() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path());
    let Some(server) = Server::moto_with_tls(&folder.path().join("certificate"), &folder.path().join("key"))
    else {
        return;
    };
    let url = server.url().replace("http:", "https:");
    let authority = format!("--report.s3-certificate={}", folder.path().join("ca").display());
    let [bucket, endpoint] = flags(&url);
    let (is_good, text) = Host::new(&[&bucket, &endpoint], &KEYS).check();
    assert!(!is_good && text.contains("--report.s3-certificate"), "{text}");
    // the connection is trusted, and the bucket is missing
    let (_, text) = Host::new(&[&bucket, &endpoint, &authority], &KEYS).check();
    assert!(text.contains("NoSuchBucket"), "{text}");
    let variable = format!("AWS_CA_BUNDLE={}", folder.path().join("ca").display());
    let (_, text) = Host::new(&[&bucket, &endpoint], &[KEYS[0], KEYS[1], &variable]).check();
    assert!(text.contains("NoSuchBucket"), "{text}");
}
