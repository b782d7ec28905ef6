//! The metrics in a real Prometheus, and in its linter.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};

use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::support::cgroups::TestCgroup;
use crate::support::docker::{Engine, unique};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually, skip};

const EMPTY: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

/// Returns the value of an environment variable that `tests/setup/setup.sh` sets.
///
/// Also `None` where `setup.sh` could not fetch it: not a defect of this repository, so it is skipped even where tests are required.
/// `make test-all` repeats the reason at its end.
pub(crate) fn provided(name: &str) -> Option<String> {
    let missing = std::env::var(name.replacen("MEMLEDGER_TEST_", "MEMLEDGER_TEST_NO_", 1));
    if let Some(reason) = missing.ok().filter(|reason| !reason.is_empty()) {
        eprintln!("SKIPPED: {reason}");
        return None;
    }
    let value = std::env::var(name).ok();
    if value.is_none() {
        skip(&format!("{name} is not set; run tests/setup/setup.sh and load its env file"));
    }
    value
}

/// Asserts that `promtool check metrics` has no complaints.
fn assert_clean(promtool: &str, text: &str) {
    let mut child = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("promtool reads");
    let output = child.wait_with_output().expect("promtool ends");
    let output_text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && output_text.is_empty(), "{}: {output_text}", output.status);
}

#[test]
fn promtool_accepts_an_empty_host() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let memledger = Memledger::start(EMPTY);
    let text = memledger.get("/metrics").1;
    assert!(Metrics::parse(&text).all("memledger_container_info", &[]).is_empty());
    assert_clean(&promtool, &text);
}

#[test]
fn promtool_accepts_a_host_with_containers() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let Some(engine) = Engine::shared() else { return };
    let hostile = "BATCH_SIZE=3\"2\\n\\\n# TYPE x gauge\n{a=\"b\"} ü";
    let flags = ["--memory=256m", "-e", hostile, "-e", "NUM_WORKERS=4"];
    let container = engine.run(&unique("promtool"), &flags, &["sleep", "1000"]);
    let include = format!("--container.include=^{}$", container.name);
    let memledger = Memledger::start(&[&engine.flag(), "--podman.socket=", "--pss.interval=1s", &include]);
    let me = [("container_name", container.name.as_str())];
    memledger.eventually("the families with an interval of their own", |metrics| {
        metrics.try_value("memledger_container_shm_used_bytes", &me)?;
        metrics.try_value("memledger_container_process_pss_bytes", &[me[0], ("role", "other")])
    });
    assert_clean(&promtool, &memledger.get("/metrics").1);
}

#[test]
fn promtool_rejects_bad_metrics() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let bad = std::panic::catch_unwind(|| assert_clean(&promtool, "# TYPE a_total gauge\na_total 1\n"));
    assert!(bad.is_err(), "promtool accepts everything: these tests check nothing");
}

/// Returns a free port of this host for a program that does not report its own, and what keeps it: a socket that is bound and
/// never listens. Nobody else gets the port, and the program may listen on it, as servers do, with SO_REUSEADDR.
fn reserved_port() -> (OwnedFd, SocketAddr) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    sockopt::set_socket_reuseaddr(&socket, true).expect("reusable");
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a port");
    let address = rustix::net::getsockname(&socket).expect("an address").try_into().expect("of IPv4");
    (socket, address)
}

/// A Prometheus that scrapes one memledger every second. Killed when dropped.
pub(crate) struct Prometheus {
    child: Child,
    address: String,
    folder: tempfile::TempDir,
    _port: OwnedFd,
}

impl Prometheus {
    pub(crate) fn scraping(binary: &str, memledger: &Memledger) -> Self {
        Self::configured(
            binary,
            &format!(
                "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n- job_name: memledger\n  \
                 static_configs: [{{targets: ['{}']}}]\n",
                memledger.address
            ),
        )
    }

    /// Starts one with this configuration.
    pub(crate) fn configured(binary: &str, config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("prometheus.yml"), config).expect("a configuration");
        let (port, address) = reserved_port();
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let child = Command::new(binary)
            .current_dir(folder.path())
            // an alert that fires before Alertmanager is discovered is sent again after this
            .args([
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                "--rules.alert.resend-delay=1s",
            ])
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("Prometheus starts");
        let mut this = Self { child, address: address.to_string(), folder, _port: port };
        eventually("Prometheus is ready", || {
            let ended = this.child.try_wait().expect("wait");
            assert!(ended.is_none(), "Prometheus ended: {}", this.log());
            this.get("/-/ready").map(drop)
        });
        this
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn get(&self, path: &str) -> Result<String, String> {
        let mut response =
            ureq::get(format!("http://{}{path}", self.address)).call().map_err(|error| error.to_string())?;
        response.body_mut().read_to_string().map_err(|error| error.to_string())
    }

    /// Returns the values of an instant query.
    pub(crate) fn query(&self, query: &str) -> Result<Vec<f64>, String> {
        let url = format!("http://{}/api/v1/query", self.address);
        let mut response =
            ureq::get(url).query("query", query).call().map_err(|error| format!("{query}: {error}"))?;
        let text = response.body_mut().read_to_string().map_err(|error| error.to_string())?;
        let response: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let result = response["data"]["result"].as_array().ok_or_else(|| text.clone())?;
        let value = |entry: &serde_json::Value| entry["value"][1].as_str()?.parse().ok();
        Ok(result.iter().filter_map(value).collect())
    }

    /// Asserts that no scrape failed. One that took the whole second of its timeout is the busy host's.
    pub(crate) fn assert_no_failed_scrape(&self) {
        let failed = "sum_over_time(((1 - up) * (scrape_duration_seconds < bool 0.9))[5m:1s])";
        eventually("a scrape", || match self.one(failed)? {
            0.0 => Ok(()),
            count => panic!("{count} scrapes failed: {}", self.get("/api/v1/targets")?),
        });
    }

    /// Returns the value of an instant query with one series.
    pub(crate) fn one(&self, query: &str) -> Result<f64, String> {
        match self.query(query)?[..] {
            [value] => Ok(value),
            ref other => Err(format!("{query} is {other:?}")),
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn prometheus_scrapes_without_errors_and_sums_match() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    let Some(engine) = Engine::shared() else { return };
    let name = unique("scraped");
    let container = engine.run(&name, &["--memory=256m"], &["sleep", "1000"]);
    let include = format!("--container.include=^{name}");
    let memledger = Memledger::start(&[&engine.flag(), "--podman.socket=", &include]);
    let prometheus = Prometheus::scraping(&binary, &memledger);
    let at_least = |query: &str, min: f64| {
        eventually(query, || match prometheus.one(query)? {
            value if value >= min => Ok(value),
            value => Err(format!("{value}")),
        })
    };
    at_least("sum_over_time(up{job=\"memledger\"}[5m])", 3.0);
    // series come and go between scrapes
    let other = engine.run(&format!("{name}-other"), &[], &["sleep", "1000"]);
    let usage = |name: &str| format!("memledger_container_memory_usage_bytes{{container_name=\"{name}\"}}");
    at_least(&usage(&other.name), 1.0);
    engine.docker(&["restart", "-t", "0", &container.id]);
    engine.docker(&["rm", "-f", &other.id]);
    eventually("the series of the other ends", || match prometheus.query(&usage(&other.name))?[..] {
        [] => Ok(()),
        ref values => Err(format!("{values:?}")),
    });
    at_least("sum_over_time(up{job=\"memledger\"}[5m])", 6.0);
    prometheus.assert_no_failed_scrape();

    // a scrape that exceeds its second ends all series until the next one
    let one = |query: &str| eventually(query, || prometheus.one(query));
    assert!(one("scrape_samples_scraped{job=\"memledger\"}") > 50.0);
    let ours = memledger.metrics().value("memledger_host_memory_total_bytes", &[]);
    assert_eq!(one("memledger_host_memory_total_bytes"), ours);
    let rest = "sum(memledger_host_memory_component_bytes) - on() memledger_host_memory_total_bytes";
    assert_eq!(one(rest), 0.0, "the components of RAM sum to MemTotal");
    let parts = format!(
        "sum(memledger_container_memory_component_bytes{{container_name=\"{name}\"}}) - on() {}",
        usage(&name)
    );
    // usage and components are in two files of the kernel, read one after the other
    eventually("the components of a container's usage to sum to its usage", || {
        match prometheus.one(&parts)? {
            0.0 => Ok(()),
            rest => Err(rest.to_string()),
        }
    });
    assert_eq!(
        one(&format!("memledger_container_memory_limit_bytes{{container_name=\"{name}\"}}")),
        268_435_456.0
    );
    // the join of the dashboards, which fails if an info family has two series for one identity
    let joined =
        format!("{} * on(instance, container_name) group_left(image) memledger_container_info", usage(&name));
    assert!(one(&joined) > 0.0);

    let own = Metrics::parse(&prometheus.get("/metrics").unwrap());
    for trouble in [
        "prometheus_target_scrapes_sample_duplicate_timestamp_total",
        "prometheus_target_scrapes_sample_out_of_order_total",
        "prometheus_target_scrapes_sample_out_of_bounds_total",
        "prometheus_target_scrapes_exceeded_sample_limit_total",
        "prometheus_target_scrapes_exceeded_body_size_limit_total",
    ] {
        assert_eq!(own.value(trouble, &[]), 0.0, "{trouble}");
    }
    let log = prometheus.log();
    assert!(!log.contains("level=warn") && !log.contains("level=error"), "{log}");
}

#[test]
fn concurrent_scrapers_get_the_same_snapshot() {
    let cgroup = TestCgroup::container();
    let mut process = Python::start(&cgroup, "print('ready'); input()");
    process.line();
    // one sample only: the next is due in an hour
    let flags = ["--docker.socket=", "--podman.socket=", "--sample.interval=1h", &cgroup.include()];
    let memledger = Memledger::start(&flags);
    let barrier = Arc::new(Barrier::new(10));
    let texts: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let scrapers: Vec<_> = (0..10)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    let (status, _, body) = memledger.get_with("/metrics", &[]);
                    assert_eq!(status, 200);
                    body
                })
            })
            .collect();
        scrapers.into_iter().map(|scraper| scraper.join().unwrap()).collect()
    });
    let name = format!("container_name=\"{}\"", cgroup.name());
    assert!(String::from_utf8_lossy(&texts[0]).contains(&name));
    for text in &texts {
        assert!(text == &texts[0], "scrapers of one snapshot got different texts");
    }
}
