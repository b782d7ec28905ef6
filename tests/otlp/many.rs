//! 20,000 points: all arrive, in requests that a receiver takes by default, at our own receiver and at a real collector.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::{Receiver, list};
use crate::prometheus::provided;
use crate::recorded::Host;
use crate::support::{Memledger, eventually};

const CONTAINERS: usize = 800;
const POINTS: f64 = 20_000.0;

/// The recorded host with so many containers: the second of its containers again and again, without processes.
fn crowded() -> Host {
    let host = Host::unpack("v2-docker", 2);
    let slice = host.path("cgroup/system.slice");
    let scopes = std::fs::read_dir(&slice).unwrap().map(|entry| entry.unwrap().path());
    let is_limited = |scope: &Path| {
        std::fs::read_to_string(scope.join("memory.max")).is_ok_and(|max| max.starts_with(char::is_numeric))
    };
    let model = scopes.filter(|path| path.is_dir()).find(|path| is_limited(path)).expect("one with a limit");
    for number in 0..CONTAINERS {
        let copy = slice.join(format!("docker-{number:064x}.scope"));
        std::fs::create_dir(&copy).unwrap();
        for file in std::fs::read_dir(&model).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), copy.join(file.file_name())).unwrap();
        }
        std::fs::write(copy.join("cgroup.procs"), "").unwrap();
    }
    host
}

fn start(host: &Host, flags: Vec<String>) -> Memledger {
    let more = ["--no-collector.gpu", "--sample.interval=1s"].map(str::to_owned);
    let memledger = host.start(&[flags, more.to_vec()].concat());
    memledger.eventually("all containers", |metrics| match metrics.series.len() as f64 {
        series if series >= POINTS => Ok(()),
        series => Err(format!("{series} series")),
    });
    memledger
}

/// Waits for a push after this, that was taken as a whole.
fn pushed(memledger: &Memledger) {
    let sent = |memledger: &Memledger| {
        memledger.metrics().value("memledger_otlp_sent_total", &[("signal", "metrics")])
    };
    let before = sent(memledger);
    eventually("a whole push", || match sent(memledger) - before {
        more if more >= 2.0 * POINTS => Ok(()),
        more => Err(format!("{more} more; {}", memledger.log())),
    });
    for reason in ["unreachable", "refused", "too_large"] {
        let labels = [("signal", "metrics"), ("reason", reason)];
        assert_eq!(memledger.metrics().value("memledger_otlp_lost_total", &labels), 0.0, "{reason}");
    }
}

#[test]
fn all_points_of_a_crowded_host_arrive_in_requests_of_a_mebibyte() {
    let Some(receiver) = Receiver::start() else { return };
    for grpc in [true, false] {
        let host = crowded();
        let memledger = start(&host, receiver.flags(grpc));
        receiver.take();
        pushed(&memledger);
        let taken = receiver.take();
        let by_time =
            list(&taken, "points").iter().fold(std::collections::BTreeMap::new(), |mut counts, point| {
                *counts.entry(point["time"].as_u64()).or_insert(0) += 1;
                counts
            });
        assert!(by_time.values().any(|count| *count as f64 >= POINTS), "{by_time:?}");
        let requests = list(&taken, "requests");
        let sizes: Vec<_> = requests.iter().filter_map(|request| request["size"].as_u64()).collect();
        assert!(sizes.iter().all(|size| *size <= 1 << 20), "{sizes:?}");
        assert!(
            sizes.iter().any(|size| *size > 900 << 10),
            "they are not cut smaller than need be: {sizes:?}"
        );
        assert_eq!(requests[0]["wire"], if grpc { "grpc" } else { "http" });
    }
}

/// rotel, a collector written in Rust. Killed when dropped.
struct Rotel {
    child: Child,
    folder: tempfile::TempDir,
    ports: [u16; 2],
}

impl Rotel {
    fn start() -> Option<Self> {
        let python = provided("MEMLEDGER_TEST_PYTHON")?;
        let folder = tempfile::tempdir().unwrap();
        // it cannot tell which ports it got, so free ones are looked for; if another takes one, it ends and we fail
        let free = || {
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port()
        };
        let ports = [free(), free()];
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(Path::new(&python).with_file_name("rotel-agent"))
            .arg("start")
            .args([
                format!("--otlp-grpc-endpoint=127.0.0.1:{}", ports[0]),
                format!("--otlp-http-endpoint=127.0.0.1:{}", ports[1]),
            ])
            .args([
                "--exporter=blackhole",
                "--debug-log=metrics",
                "--debug-log=logs",
                "--debug-log-verbosity=detailed",
            ])
            .current_dir(folder.path())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .expect("rotel starts");
        Some(Self { child, folder, ports })
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Rotel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_real_collector_takes_all_of_it() {
    let Some(rotel) = Rotel::start() else { return };
    for (protocol, port) in [("grpc", rotel.ports[0]), ("http/protobuf", rotel.ports[1])] {
        let host = crowded();
        let flags = [
            format!("--otlp.endpoint=http://127.0.0.1:{port}"),
            format!("--otlp.protocol={protocol}"),
            "--otlp.interval=1s".to_owned(),
            "--otlp.compression=gzip".to_owned(),
        ];
        let memledger = start(&host, flags.to_vec());
        memledger.eventually("a push that is taken", |metrics| {
            let up = metrics.ask("memledger_otlp_up", &[("signal", "metrics")])?;
            if up == 1.0 { Ok(()) } else { Err(format!("{}; {}", memledger.log(), rotel.log())) }
        });
        let seen: Value = json!("memledger.container.memory.working_set");
        eventually("rotel has seen it", || {
            if rotel.log().contains(seen.as_str().unwrap()) { Ok(()) } else { Err("not yet".to_owned()) }
        });
    }
}
