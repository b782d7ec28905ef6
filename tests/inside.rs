//! The view from inside: real containers whose programs report through the mounted directory.
//!
//! The client is the real one, as memledger writes it into the directory. The GPU is not: the driver is `tests/fake-nvml`, and
//! `python/tests/standin` replaces torch. Both report the amounts that the test chose.

mod batch_search;
mod cleanup;
mod container_logs;
mod cuda_oom;
mod records;

use std::path::Path;

use fake_nvml::{FakeNvml, Process, State};

use crate::support::docker::{Container, Engine, of, unique};
use crate::support::{Memledger, Metrics, eventually};

const MIB: u64 = 1 << 20;
const HOLDER: &str = "memledger_container_gpu_memory_holder_bytes";
const USED: &str = "memledger_container_gpu_memory_used_bytes";

/// memledger with a reporter directory of its own, and a GPU.
struct Host {
    memledger: Memledger,
    fake: FakeNvml,
    folder: tempfile::TempDir,
    flags: Vec<String>,
}

impl Host {
    fn start(engine: &Engine, name: &str) -> Self {
        Self::start_with(engine, name, |_| vec![])
    }

    /// Starts memledger with more flags, which can name files in its folder.
    fn start_with(engine: &Engine, name: &str, more: impl Fn(&Path) -> Vec<String>) -> Self {
        let folder = tempfile::Builder::new().prefix("mlt-inside-").tempdir().expect("a folder");
        let fake = FakeNvml::install(folder.path(), &State::with_gpus(1)).expect("the fake library");
        let mut flags = vec![
            engine.flag(),
            "--podman.socket=".to_owned(),
            format!("--container.include=^{name}$"),
            format!("--gpu.nvml-library={}", fake.path().display()),
            "--gpu.interval=100ms".to_owned(),
            format!("--reporter.directory={}", folder.path().join("reporter").display()),
        ];
        flags.extend(more(folder.path()));
        let memledger = Self::memledger(&flags);
        Self { memledger, fake, folder, flags }
    }

    fn memledger(flags: &[String]) -> Memledger {
        Memledger::start(&flags.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Starts a container that has the directory and the stand-in for torch, and nothing else of memledger.
    fn run(&self, engine: &Engine, name: &str, program: &str) -> Container {
        self.run_with(engine, name, program, &[])
    }

    /// The same, with arguments.
    fn run_with(&self, engine: &Engine, name: &str, program: &str, arguments: &[&str]) -> Container {
        let mount = format!("{}:/run/memledger-reporter:ro", self.folder.path().join("reporter").display());
        let standin = concat!(env!("CARGO_MANIFEST_DIR"), "/python/tests/standin:/standin:ro");
        let uuids = format!("STANDIN_GPUS={}", State::with_gpus(1).gpus[0].uuid.trim_start_matches("GPU-"));
        let path = "PYTHONPATH=/run/memledger-reporter/python:/standin";
        let flags =
            ["-v", &mount, "-v", standin, "-e", path, "-e", &uuids, "--tmpfs", "/work", "-w", "/work"];
        engine.run_python_with(name, &flags, program, arguments)
    }

    /// Sets the memory that the driver reports for the container's first process, and waits until memledger has read it.
    fn set_gpu_memory(&self, container: &Container, used: u64) {
        let mut state = State::with_gpus(1);
        state.gpus[0].memory.used = used + 50 * MIB;
        state.gpus[0].processes = vec![Process::compute(container.pid(), Some(used))];
        self.fake.set(&state).expect("the state is written");
        self.memledger.eventually("its GPU memory", |metrics| {
            match metrics.get(USED, &of(&container.name)) {
                Some(read) if read == used as f64 => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }
}

/// Returns the parts of a container's GPU memory in MiB, and fails unless they add up.
fn holders(metrics: &Metrics, name: &str) -> Result<[Option<f64>; 4], String> {
    let part = |holder| metrics.get(HOLDER, &[of(name)[0], ("holder", holder)]);
    let parts = ["tensors", "torch_cache", "outside_torch", "not_reporting"].map(part);
    if parts.iter().any(Option::is_some) {
        let sum: f64 = parts.iter().flatten().sum();
        assert_eq!(Some(sum), metrics.get(USED, &of(name)), "the parts add up");
        return Ok(parts.map(|bytes| bytes.map(|bytes| bytes / MIB as f64)));
    }
    Err(format!("no parts: {:?}", metrics.all("memledger_reporter_holders_withheld_total", &[])))
}

/// A program without memledger's client.
const UNMODIFIED: &str = r#"
import signal, torch
torch.cuda.init()
torch.cuda.standin_allocate(301 << 20)
torch.cuda.standin_free(101 << 20)
print("ready", flush=True)
while True:
    signal.pause()
"#;

#[test]
fn unmodified_program_shows_its_partition() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("inside");
    let host = Host::start(&engine, &name);
    let container = host.run(&engine, &name, UNMODIFIED);
    host.set_gpu_memory(&container, 450 * MIB);
    let wanted = [Some(200.0), Some(102.0), Some(148.0), Some(0.0)];
    host.memledger.eventually("the partition", |metrics| match holders(metrics, &name)? {
        parts if parts == wanted => Ok(()),
        parts => Err(format!("{parts:?}")),
    });
    let metrics = host.memledger.fresh_metrics();
    let torch = |family: &str| {
        metrics.get(&format!("memledger_container_torch_{family}"), &[of(&name)[0], ("rank", "0")])
    };
    let mib = |bytes: u64| Some((bytes * MIB) as f64);
    assert_eq!(torch("allocated_bytes"), mib(200));
    assert_eq!(torch("reserved_bytes"), mib(302));
    assert_eq!(torch("allocated_peak_bytes"), mib(301));
    assert_eq!(torch("reserved_peak_bytes"), mib(302));
    assert_eq!(torch("inactive_split_bytes"), mib(102));
    assert_eq!(metrics.value("memledger_container_torch_ooms_total", &of(&name)), 0.0);
    assert_eq!(metrics.value("memledger_container_torch_alloc_retries_total", &of(&name)), 0.0);
    assert_eq!(metrics.value("memledger_reporter_connections", &[]), 1.0);
    assert_eq!(metrics.value("memledger_reporter_lost_total", &[]), 0.0);
    assert_eq!(metrics.value("memledger_reporter_overlapping_operations_total", &[]), 0.0);
    let api = host.memledger.api();
    let gpus = &api["containers"][0]["gpus"][&State::with_gpus(1).gpus[0].uuid];
    assert_eq!(gpus["memory_holder_bytes"]["tensors"], 200 * MIB, "{gpus}");
    assert_eq!(gpus["torch_allocated_bytes"]["0"], 200 * MIB, "{gpus}");
    // the driver's figure is lower than what torch reports: no part is guessed
    host.set_gpu_memory(&container, 300 * MIB);
    host.memledger.eventually("the partition to be withheld", |metrics| {
        let negative = metrics.value("memledger_reporter_holders_withheld_total", &[("reason", "negative")]);
        let parts = metrics.all(HOLDER, &of(&name)).len();
        (negative > 0.0 && parts == 0).then_some(()).ok_or_else(|| format!("{negative} {parts}"))
    });
}

#[test]
fn program_without_the_client_is_not_reporting() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("silent");
    let host = Host::start(&engine, &name);
    let container = engine.run_python(&name, &[], "import signal\nprint('ready')\nsignal.pause()");
    host.set_gpu_memory(&container, 450 * MIB);
    host.memledger.eventually("all of it not reporting", |metrics| match holders(metrics, &name)? {
        [None, None, None, Some(450.0)] => Ok(()),
        parts => Err(format!("{parts:?}")),
    });
}

/// A program of before, of which only the import line changed.
const TRACKED: &str = r#"
import torch
from memledger_client.compat import MemoryTracker
tracker = MemoryTracker()
tracker.log_memory("system", "experiment_start")
torch.cuda.standin_allocate(300 << 20)
torch.cuda.standin_free(100 << 20)
tracker.log_memory("model", "after_generate")
tracker.save_log()
print(open("memory_usage.json").read().replace("\n", ""), flush=True)
print("ready", flush=True)
import signal
signal.pause()
"#;

#[test]
fn memory_tracker_writes_the_old_file_and_its_components_are_metrics() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("tracker");
    let host = Host::start(&engine, &name);
    let container = host.run(&engine, &name, TRACKED);
    let log = container.docker(&["logs"]);
    let report: serde_json::Value =
        serde_json::from_str(log.lines().next().expect("the file")).expect("JSON");
    let generate = &report["detailed_log"][1];
    assert_eq!((&generate["component"], &generate["operation"]), (&"model".into(), &"after_generate".into()));
    assert_eq!(generate["gpu_ram_used_mb"], 200.0, "{report}");
    assert_eq!(report["peak_usage"]["gpu_ram_peak_mb"], 300.0, "{report}");
    let labels = [of(&name)[0], ("component", "model"), ("operation", "after_generate")];
    let mib = |metrics: &Metrics, figure: &str| {
        let bytes = metrics.try_value(&format!("memledger_container_operation_{figure}_bytes"), &labels)?;
        Ok::<f64, String>(bytes / MIB as f64)
    };
    host.memledger.eventually("the component", |metrics| {
        assert_eq!((mib(metrics, "torch_allocated")?, mib(metrics, "torch_reserved")?), (200.0, 300.0));
        assert!(
            mib(metrics, "torch_allocated_peak").is_err(),
            "that of the process is none of the operation"
        );
        assert!(mib(metrics, "rss")? > 1.0);
        Ok(())
    });
}

#[test]
fn program_reports_again_after_a_restart_of_memledger() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("restart");
    let mut host = Host::start(&engine, &name);
    let container = host.run(&engine, &name, UNMODIFIED);
    host.set_gpu_memory(&container, 450 * MIB);
    let reports = |metrics: &Metrics| match holders(metrics, &name)? {
        [Some(200.0), ..] => Ok(()),
        parts => Err(format!("{parts:?}")),
    };
    host.memledger.eventually("the partition", reports);
    host.memledger.signal("KILL");
    host.memledger = eventually("the socket to be free", || {
        let memledger = Host::memledger(&host.flags);
        if memledger.log().contains("no view from inside") { Err(memledger.log()) } else { Ok(memledger) }
    });
    host.memledger.eventually("the partition again", reports);
}
