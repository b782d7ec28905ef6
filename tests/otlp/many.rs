//! 20,000 points: all arrive, within the default size limit, at our own receiver and at a real collector.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::{Receiver, list};
use crate::prometheus::provided;
use crate::support::recorded::Host;
use crate::support::{Memledger, eventually};

const CONTAINERS: usize = 800;
const POINTS: f64 = 20_000.0;

fn start(host: &Host, flags: Vec<String>) -> Memledger {
    let more = ["--no-collector.gpu", "--sample.interval=1s"].map(str::to_owned);
    let memledger = host.start(&[flags, more.to_vec()].concat());
    memledger.eventually("all containers", |metrics| match metrics.series.len() as f64 {
        series if series >= POINTS => Ok(()),
        series => Err(format!("{series} series")),
    });
    memledger
}

/// Waits for two exports without a loss.
fn await_two_exports(memledger: &Memledger) {
    let sum = |name: &str| memledger.metrics().sum(name, &[("signal", "metrics")]);
    let (sent, lost) = (sum("memledger_otlp_sent_total"), sum("memledger_otlp_lost_total"));
    eventually("two complete exports", || match sum("memledger_otlp_sent_total") - sent {
        more if more >= 2.0 * POINTS => Ok(()),
        more => Err(format!("{more} more; {}", memledger.log())),
    });
    assert_eq!(sum("memledger_otlp_lost_total"), lost, "{}", memledger.log());
}

#[test]
fn crowded_host_is_exported_in_requests_of_one_mebibyte() {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(json!({"as": "count"}));
    let host = Host::crowded(CONTAINERS);
    for grpc in [true, false] {
        let memledger = start(&host, receiver.flags(grpc));
        await_two_exports(&memledger);
        let taken = receiver.take();
        let of_one_snapshot = taken["times"].as_object().expect("counts").values();
        let most = of_one_snapshot.filter_map(Value::as_f64).fold(0.0, f64::max);
        assert!(most >= POINTS, "{most} points");
        let requests = list(&taken, "requests");
        let sizes: Vec<_> = requests.iter().filter_map(|request| request["size"].as_u64()).collect();
        assert!(sizes.iter().all(|size| *size <= 1 << 20), "{sizes:?}");
        assert!(sizes.iter().any(|size| *size > 900 << 10), "requests are smaller than necessary: {sizes:?}");
        // the first may be a late one of the round before
        let last = requests.last().expect("requests");
        assert_eq!(last["wire"], if grpc { "grpc" } else { "http" });
    }
}

/// Returns the path of the program in its Python wheel.
fn agent(python: &str) -> String {
    let code = "import pathlib, rotel; print(pathlib.Path(rotel.__file__).with_name('rotel-agent'))";
    let output = Command::new(python).args(["-c", code]).output().expect("Python runs");
    String::from_utf8(output.stdout).expect("a path").trim().to_owned()
}

/// rotel, a collector written in Rust. Killed when dropped.
struct Rotel {
    child: Child,
    folder: tempfile::TempDir,
    ports: [u16; 2],
}

impl Rotel {
    /// Starts it, and waits until it listens.
    fn start() -> Option<Self> {
        let agent = agent(&provided("MEMLEDGER_TEST_PYTHON")?);
        let mut rotel = Self::spawn(&agent);
        eventually("rotel listens", || {
            if rotel.child.try_wait().expect("its state").is_some() {
                let log = rotel.log();
                rotel = Self::spawn(&agent); // on other ports: one was taken
                return Err(log);
            }
            let listens = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_ok();
            rotel.ports.iter().all(listens).then_some(()).ok_or_else(|| rotel.log())
        });
        Some(rotel)
    }

    fn spawn(agent: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // it does not report its ports, so free ones are chosen here
        let free = || {
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port()
        };
        let ports = [free(), free()];
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(agent)
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
        Self { child, folder, ports }
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
fn real_collector_accepts_everything() {
    let Some(rotel) = Rotel::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    super::events::write(folder.path(), [super::events::exit(1, "train")]);
    let flags = |protocol: &str, port: u16| {
        vec![
            format!("--otlp.endpoint=http://127.0.0.1:{port}"),
            format!("--otlp.protocol={protocol}"),
            "--otlp.interval=2s".to_owned(),
            "--otlp.compression=gzip".to_owned(),
            format!("--state.path={}", folder.path().display()),
        ]
    };
    let words = ["memledger.container.memory.working_set", "memledger.exit"];
    let seen = |word: &str| rotel.log().contains(word);
    let host = Host::crowded(CONTAINERS);
    let crowd = start(&host, flags("grpc", rotel.ports[0]));
    await_two_exports(&crowd);
    eventually("rotel has received both signals", || {
        if words.into_iter().all(seen) { Ok(()) } else { Err(crowd.log()) }
    });
    drop(crowd);
    let over_http = super::memledger(super::EMPTY, &flags("http/protobuf", rotel.ports[1]), &[]);
    over_http.eventually("both signals are accepted", |metrics| {
        let up = |signal| metrics.try_value("memledger_otlp_up", &[("signal", signal)]);
        match (up("metrics")?, up("logs")?) {
            (1.0, 1.0) => Ok(()),
            up => Err(format!("{up:?}; {}", over_http.log())),
        }
    });
}
