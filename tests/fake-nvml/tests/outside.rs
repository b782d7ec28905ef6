//! The installed library as NVIDIA's own Python binding sees it: a reader that shares no code with this
//! project.
//!
//! Needs `nvidia-ml-py` for the interpreter that `MEMLEDGER_TEST_PYTHON` names (default `python3`). Without
//! it the test is skipped and prints the reason; where `CI` or `MEMLEDGER_TESTS_REQUIRED` is set, that is a failure.

use std::env;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use fake_nvml::{Ecc, FakeNvml, Gpu, Memory, MigDevice, Process, RemappedRows, State};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;
/// The script's exit status without the binding.
const NO_BINDING: i32 = 77;

/// Returns the values that the script reads from a library, or why it cannot run.
fn query(library: &Path) -> Result<Value, String> {
    let python = env::var("MEMLEDGER_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside.py");
    let directory = library.parent().expect("the library is in a directory");
    let output = Command::new(&python).arg(script).env("LD_LIBRARY_PATH", directory).output();
    let output = output.map_err(|error| format!("{python} does not start: {error}"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(NO_BINDING) {
        return Err(format!("{python} has no nvidia-ml-py: {}", words.trim()));
    }
    assert!(output.status.success(), "{python} ended with {}: {words}", output.status);
    Ok(serde_json::from_slice(&output.stdout).expect("the script prints JSON"))
}

fn training_gpu() -> Gpu {
    Gpu {
        memory: Memory { total: 80 * GIB, reserved: GIB, used: 20 * GIB, ..Memory::default() },
        processes: vec![Process::compute(11, Some(19 * GIB)), Process::compute(12, None)],
        power_mw: Some(512_345),
        temperature_c: None,
        ecc: Some(Ecc { corrected: 2, ..Ecc::default() }),
        remapped_rows: Some(RemappedRows { correctable: 1, pending: true, ..RemappedRows::default() }),
        fields: [(186, 512_345.into())].into(),
        ..Gpu::numbered(0)
    }
}

fn split_gpu() -> Gpu {
    let mut gpu = Gpu::numbered(1);
    let memory = Memory { total: 10 * GIB, reserved: 0, used: GIB, ..Memory::default() };
    gpu.mig = Some(vec![MigDevice { gi: 7, memory, ..MigDevice::default() }]);
    gpu.processes = vec![Process { gi: Some(7), ci: Some(0), ..Process::compute(13, Some(GIB)) }];
    gpu.errors.insert("nvmlDeviceGetPowerUsage".into(), 999);
    gpu.remapped_rows = None;
    gpu
}

/// What the script prints of a GPU.
fn expected_training_gpu() -> Value {
    json!({
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "bus_id": "00000000:10:00.0",
        "memory": {"total": 80 * GIB, "reserved": GIB, "used": 20 * GIB, "free": 59 * GIB},
        "processes": [[11, 19 * GIB, u32::MAX], [12, null, u32::MAX]],
        "power_mw": 512_345,
        "temperature_c": {"error": 3},
        "corrected": 2,
        "remapped_rows": [1, 0, 1, 0],
        "field_186": [0, 3, 512_345],
        "mig": [],
    })
}

fn expected_split_gpu() -> Value {
    json!({
        "uuid": "GPU-00000000-0000-4000-8000-000000000001",
        "name": "NVIDIA H100 80GB HBM3",
        "bus_id": "00000000:11:00.0",
        "memory": {"total": 80 * GIB, "reserved": 600 << 20, "used": 0, "free": (80 * GIB) - (600 << 20)},
        "processes": [[13, GIB, 7]],
        "power_mw": {"error": 999},
        "temperature_c": 34,
        "corrected": 0,
        "remapped_rows": {"error": 3},
        "field_186": [3, 0, 0],
        "mig": [{
            "uuid": "MIG-00000000-0000-4000-8000-000000000000",
            "ids": [7, 0],
            "memory": {"total": 10 * GIB, "reserved": 0, "used": GIB, "free": 9 * GIB},
            "processes": [[13, GIB, 7]],
        }],
    })
}

#[test]
fn nvidias_python_binding_reads_the_state() {
    let lost = Gpu { lost: true, ..Gpu::numbered(2) };
    let state = State { gpus: vec![training_gpu(), split_gpu(), lost], ..State::default() };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fake = FakeNvml::install(dir.path(), &state).expect("installing the library");
    match query(fake.path()) {
        Ok(seen) => {
            let gpus = [expected_training_gpu(), expected_split_gpu(), json!({"error": 15})];
            assert_eq!(seen, json!({"driver": "580.95.05", "gpus": gpus}));
        }
        Err(reason) => {
            let required = ["CI", "MEMLEDGER_TESTS_REQUIRED"].iter().any(|name| env::var_os(name).is_some());
            assert!(!required, "this test must run here, but {reason}");
            // Not eprintln: the test harness would swallow it.
            writeln!(io::stderr(), "skipped: {reason}").expect("writing to stderr");
        }
    }
}
