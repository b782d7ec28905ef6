//! Compares memledger with other programs that read the same library at the same time: NVIDIA's own Python binding, and
//! nvitop-exporter. They share no code with memledger, nor with the fake library.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use fake_nvml::{Gpu, Memory, MigDevice, Process, State, Utilization, UtilizationSample};
use serde_json::Value;

use super::{Driver, GIB, MIB, OF_CONTAINER, OF_PROCESS, UNUSED_PID, USED, await_value, process_in};
use crate::support::cgroups::TestCgroup;
use crate::support::{Metrics, eventually, free_port, skip};

/// Returns the interpreter with these programs, or why they cannot run here.
fn python() -> Result<PathBuf, String> {
    let python = std::env::var_os("MEMLEDGER_TEST_PYTHON").ok_or("MEMLEDGER_TEST_PYTHON is not set")?;
    Ok(python.into())
}

/// Returns two GPUs with processes in every list, one without memory, and one that has ended.
fn host(pids: &[u32]) -> State {
    let mut state = State::with_gpus(2);
    let gpu = &mut state.gpus[0];
    gpu.memory = Memory { total: 80 * GIB, reserved: 600 * MIB, used: 21 * GIB, ..Memory::default() };
    let kind = |kind: &str, process| Process { kind: kind.into(), ..process };
    gpu.processes = vec![
        Process::compute(pids[0], Some(12 * GIB)),
        kind("G", Process::compute(pids[1], Some(3 * GIB))),
        kind("CG", Process::compute(pids[2], Some(2 * GIB))),
        Process::compute(UNUSED_PID, Some(GIB)),
    ];
    gpu.utilization = Some(Utilization { gpu: 93, memory: 47, ..Utilization::default() });
    (gpu.power_mw, gpu.temperature_c) = (Some(431_500), Some(66));
    gpu.utilization_samples = vec![UtilizationSample {
        pid: pids[0],
        sm: 61,
        time_us: Some(u64::MAX >> 12),
        ..UtilizationSample::default()
    }];
    state.gpus[1].memory.used = 5 * GIB;
    state.gpus[1].processes = vec![Process::compute(pids[0], Some(4 * GIB)), Process::compute(pids[1], None)];
    state
}

/// nvitop-exporter on its own port. Ended when dropped.
struct Nvitop {
    child: Child,
    address: String,
}

impl Nvitop {
    fn start(exporter: &Path, library: &Path) -> Self {
        let port = free_port();
        let child = Command::new(exporter)
            .args(["--bind-address", "127.0.0.1", "--interval", "0.25", "--port", &port.to_string()])
            .env("LD_LIBRARY_PATH", library.parent().unwrap())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, address: format!("127.0.0.1:{port}") }
    }

    fn metrics(&self) -> Result<Metrics, String> {
        let words = |error: std::io::Error| error.to_string();
        let mut stream = std::net::TcpStream::connect(&self.address).map_err(words)?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").map_err(words)?;
        let mut text = String::new();
        stream.read_to_string(&mut text).map_err(words)?;
        match text.split_once("\r\n\r\n") {
            Some((head, body)) if head.contains(" 200 ") => Ok(Metrics::parse(body)),
            _ => Err(text),
        }
    }
}

impl Drop for Nvitop {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn nvitop_exporter_agrees_on_devices_and_processes() {
    let exporter = match python().map(|python| python.with_file_name("nvitop-exporter")) {
        Ok(exporter) if exporter.exists() => exporter,
        Ok(exporter) => return skip(&format!("there is no {}", exporter.display())),
        Err(reason) => return skip(&reason),
    };
    let container = TestCgroup::container();
    let pythons = [process_in(&container), process_in(&container), process_in(&container)];
    let pids: Vec<u32> = pythons.iter().map(|python| python.pid()).collect();
    let driver = Driver::new(&host(&pids));
    let memledger = driver.memledger(&[&container]);
    let ours = await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], 17 * GIB);
    let nvitop = Nvitop::start(&exporter, driver.fake.path());
    // it exports one GPU after the other, processes last
    let theirs = eventually("nvitop's figures", || {
        let metrics = nvitop.metrics()?;
        let last = [("index", "1"), ("pid", &*pids[0].to_string())];
        metrics.try_value("process_gpu_decoder_utilization_Percentage", &last)?;
        metrics.try_value("gpu_temperature_C", &last[..1])?;
        Ok(metrics)
    });
    for gpu in ["0", "1"] {
        let of = |family: &str, scale: f64| theirs.value(family, &[("index", gpu)]) * scale;
        let mib = MIB as f64;
        for (family, wanted) in [
            ("memory_total_bytes", of("gpu_memory_total_MiB", mib)),
            ("memory_used_bytes", of("gpu_memory_used_MiB", mib)),
            ("memory_free_bytes", of("gpu_memory_free_MiB", mib)),
            ("utilization_ratio", of("gpu_utilization_Percentage", 0.01)),
            ("memory_utilization_ratio", of("gpu_memory_utilization_Percentage", 0.01)),
            ("power_watts", of("gpu_power_usage_W", 1.0)),
            ("temperature_celsius", of("gpu_temperature_C", 1.0)),
        ] {
            let found = ours.value(&format!("memledger_gpu_{family}"), &[("gpu", gpu)]);
            assert!(
                (found - wanted).abs() <= wanted.abs() * 1e-3,
                "GPU {gpu}: {family}: {found}, theirs {wanted}"
            );
        }
    }
    let mut compared = 0;
    for (_, labels, mebibytes) in theirs.all("process_gpu_memory_MiB", &[]) {
        let pid = [("gpu", labels["index"].as_str()), ("pid", labels["pid"].as_str())];
        match ours.get(OF_PROCESS, &pid) {
            Some(bytes) => assert_eq!(bytes, mebibytes * MIB as f64, "{labels:?}"),
            // not available: nvitop exports NaN, memledger nothing
            None if mebibytes.is_nan() => {}
            // nvitop exports the unused pid; in memledger it is unattributed
            None => assert_eq!(labels["pid"], UNUSED_PID.to_string(), "{mebibytes}"),
        }
        compared += 1;
    }
    let listed = ours.all(OF_PROCESS, &[]).len();
    assert!(
        compared >= listed && listed == 4,
        "nvitop exports all processes of memledger: {listed} of {compared}"
    );
    let busy = [("index", "0"), ("pid", &pids[0].to_string())];
    let theirs_busy = theirs.value("process_gpu_sm_utilization_Percentage", &busy);
    let ours_busy =
        ours.value("memledger_process_gpu_utilization_ratio", &[("gpu", "0"), ("pid", busy[1].1)]);
    assert!((ours_busy * 100.0 - theirs_busy).abs() < 1e-6, "{ours_busy}, theirs {theirs_busy} %");
}

#[test]
fn python_binding_agrees_on_devices_instances_and_processes() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => return skip(&reason),
    };
    let container = TestCgroup::container();
    let pythons = [process_in(&container), process_in(&container), process_in(&container)];
    let pids: Vec<u32> = pythons.iter().map(|python| python.pid()).collect();
    let mut state = host(&pids);
    let memory = Memory { total: 20 * GIB, reserved: 16 * MIB, used: 7 * GIB, ..Memory::default() };
    let mut mig_gpu = Gpu::numbered(2);
    mig_gpu.memory.used = 8 * GIB;
    mig_gpu.mig = Some(vec![MigDevice { gi: 4, ci: 0, memory, ..MigDevice::default() }]);
    mig_gpu.processes =
        vec![Process { gi: Some(4), ci: Some(0), ..Process::compute(pids[2], Some(6 * GIB)) }];
    state.gpus.push(mig_gpu);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, USED, &[("gpu", "1")], 5 * GIB);
    let ours = memledger.fresh_metrics();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-nvml/tests/outside.py");
    let folder = driver.fake.path().parent().unwrap();
    let output = Command::new(python).arg(script).env("LD_LIBRARY_PATH", folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let theirs: Value = serde_json::from_slice(&output.stdout).unwrap();
    let compare = |device: &Value, labels: &[(&str, &str)]| {
        for part in ["total", "reserved", "used", "free"] {
            let family = format!("memledger_gpu_memory_{part}_bytes");
            let found = ours.all(&family, labels);
            let own = |row: &&&(_, crate::support::metrics::Labels, _)| {
                row.1.contains_key("gpu_instance_id")
                    == labels.iter().any(|label| label.0 == "gpu_instance_id")
            };
            let found = found.iter().find(own).unwrap_or_else(|| panic!("{family} {labels:?}")).2;
            assert_eq!(Some(found as u64), device["memory"][part].as_u64(), "{family} {labels:?}");
        }
        // the script lists compute processes only
        for process in device["processes"].as_array().unwrap() {
            let pid = process[0].to_string();
            let found = ours.get(OF_PROCESS, &[labels, &[("pid", &pid)]].concat());
            let is_unused = pid == UNUSED_PID.to_string();
            assert_eq!(found.map(|bytes| bytes as u64), process[1].as_u64().filter(|_| !is_unused), "{pid}");
        }
    };
    let gpus = theirs["gpus"].as_array().unwrap();
    for (gpu, index) in gpus.iter().zip(["0", "1"]) {
        compare(gpu, &[("gpu", index)]);
    }
    compare(&gpus[2]["mig"][0], &[("gpu", "2"), ("gpu_instance_id", "4"), ("compute_instance_id", "0")]);
    assert_eq!(
        gpus[2]["processes"], gpus[2]["mig"][0]["processes"],
        "the binding lists it twice, memledger once"
    );
    assert_eq!(ours.all(OF_PROCESS, &[("gpu", "2")]).len(), 1);
}
