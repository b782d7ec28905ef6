//! The dry run of `tests/gpu/check.sh`, with stand-ins for the GPU, nvidia-smi and torch. It tests the script, not real
//! hardware: the script runs, passes if all values agree, and fails if one differs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fake_nvml::{FakeNvml, State};

use super::{GIB, MIB};
use crate::support::OwnedChild;

/// A directory with the fake library and the report.
struct DryRun {
    folder: tempfile::TempDir,
    fake: FakeNvml,
}

impl DryRun {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut state = State::with_gpus(1);
        state.gpus[0].memory.total = 16 * GIB;
        state.gpus[0].memory.reserved = 300 * MIB;
        state.gpus[0].memory.used = 400 * MIB;
        let fake = FakeNvml::install(folder.path(), &state).unwrap();
        Self { folder, fake }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Returns the command of the check with these parts; one of the stand-ins may report wrong values.
    fn command(&self, only: &str, lie: &str) -> Command {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu");
        let mut command = Command::new(tests.join("check.sh"));
        command
            .arg("--out")
            .arg(self.out())
            .arg("--binary")
            .arg(crate::support::binary())
            .args(["--python", "/usr/bin/python3", "--only", only])
            .arg("--nvml-library")
            .arg(self.fake.path())
            .arg("--nvidia-smi")
            .arg(tests.join("standin/nvidia-smi"))
            .arg("--stand-in")
            .arg(tests.join("standin"))
            .env("STANDIN_LIE", lie)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    fn run(&self, only: &str, lie: &str) -> Output {
        self.command(only, lie).output().expect("check.sh runs")
    }

    fn report(&self) -> String {
        std::fs::read_to_string(self.out().join("report.md")).unwrap_or_default()
    }

    /// Returns the cgroups that the check created.
    fn cgroups(&self) -> Vec<PathBuf> {
        let text = std::fs::read_to_string(self.out().join("cgroups.txt")).unwrap_or_default();
        text.lines().map(PathBuf::from).collect()
    }

    /// Fails if the check created no cgroup, or left one.
    fn assert_nothing_left(&self) {
        let made = self.cgroups();
        assert!(!made.is_empty(), "{}", self.report());
        let left: Vec<_> = made.into_iter().filter(|path| path.exists()).collect();
        assert_eq!(left, Vec::<PathBuf>::new());
    }
}

fn all(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_dry_run_passes_if_all_values_agree() {
    let dry = DryRun::new();
    let output = dry.run("", "");
    assert_eq!(output.status.code(), Some(0), "{}", all(&output));
    let report = dry.report();
    assert!(report.contains("every comparison agrees") && report.contains("A dry run"), "{report}");
    assert!(!report.contains("| FAILED |"), "{report}");
    for part in [
        "known", "devices", "two", "inside", "tracked", "analyze", "spike", "leak", "compute", "exhaust",
        "cleanup", "ends", "always",
    ] {
        assert!(report.contains(&format!("| ok | {part} |")), "nothing was compared in {part}: {report}");
    }
    let trees = std::fs::read_to_string(dry.out().join("trees.jsonl")).unwrap();
    let trees: Vec<serde_json::Value> =
        trees.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(trees.len(), 5, "{report}");
    for tree in trees {
        let processes = tree["processes"].as_array().unwrap();
        assert!(processes.iter().any(|one| one["role"] == "trainer" && one["holds_gpu"] == true), "{tree}");
        assert!(processes.iter().any(|one| one["role"] == "dataloader_worker"), "{tree}");
        assert!(
            !tree.to_string().contains(dry.folder.path().to_str().unwrap()),
            "no path is recorded: {tree}"
        );
    }
    dry.assert_nothing_left();
    let after: serde_json::Value = serde_json::from_str(
        &std::fs::read_to_string(format!("{}.json", dry.fake.path().display())).unwrap(),
    )
    .unwrap();
    assert_eq!(after["gpus"][0]["processes"].as_array().map(Vec::len), Some(0), "all processes have ended");
}

#[test]
fn stopped_check_leaves_nothing_behind() {
    let dry = DryRun::new();
    let check = dry.command("", "").stdout(std::process::Stdio::null()).spawn();
    let mut check = OwnedChild(check.expect("check.sh runs"));
    let pids = crate::support::eventually("its processes", || {
        let pids: Vec<String> = dry
            .cgroups()
            .iter()
            .flat_map(|path| {
                let text = std::fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
                text.lines().map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        if pids.len() >= 3 { Ok(pids) } else { Err(format!("{pids:?}")) }
    });
    // to its group, and more than once: as timeout(1), which the check runs under, and an impatient person send it
    let group = format!("-{}", check.0.id());
    let status = crate::support::eventually("its end", || {
        Command::new("kill")
            .args(["-TERM", "--", &group])
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        check.0.try_wait().unwrap().ok_or_else(|| "it runs".to_owned())
    });
    assert_ne!(status.code(), Some(0), "a stopped check has not passed");
    dry.assert_nothing_left();
    for pid in pids {
        assert!(!Path::new("/proc").join(&pid).join("exe").exists(), "{pid} still runs");
    }
    assert!(dry.report().contains("| FAILED |"), "{}", dry.report());
}

/// Fails unless the check fails with this comparison in its report.
fn assert_reported(lie: &str, only: &str, comparison: &str) {
    let dry = DryRun::new();
    let output = dry.run(only, lie);
    assert_eq!(output.status.code(), Some(1), "{lie}: {}", all(&output));
    let report = dry.report();
    let row = report.lines().find(|line| line.starts_with("| FAILED |") && line.contains(comparison));
    assert!(row.is_some(), "{lie}: no row for {comparison:?} in {report}");
}

#[test]
fn check_fails_if_a_process_differs_from_nvidia_smi() {
    assert_reported("smi-process", "known", "1 GiB: as nvidia-smi");
}

#[test]
fn check_fails_if_the_device_differs_from_nvidia_smi() {
    assert_reported("smi-device", "devices", "used: as nvidia-smi");
}

#[test]
fn check_fails_if_growth_differs_from_torch() {
    assert_reported("torch-growth", "known", "growth by 2 GiB");
}

#[test]
fn check_fails_if_the_total_differs_from_cuda() {
    assert_reported("torch-total", "devices", "total: as CUDA");
}

#[test]
fn check_fails_if_the_view_from_inside_differs_from_torch() {
    assert_reported("torch-statistics", "inside", "tensors: as torch's");
}

#[test]
fn check_fails_if_the_event_of_an_error_differs_from_its_text() {
    assert_reported("torch-oom", "exhaust", "event: free: as in torch's text");
}

#[test]
fn check_fails_if_the_peak_of_an_operation_differs_from_torch() {
    assert_reported("torch-statistics", "tracked", "peak of an operation");
}

#[test]
fn check_fails_if_a_training_takes_more_than_was_said() {
    assert_reported("training", "analyze", "stand-in fp32: a batch of 32");
}

#[test]
fn check_fails_if_a_cleanup_differs_from_torch() {
    assert_reported("torch-growth", "cleanup", "reserved before: as torch's");
}

#[test]
fn check_fails_if_a_role_is_wrong() {
    assert_reported("truth", "dataloader-fork", "roles of all processes");
}

#[test]
fn check_skips_processes_that_the_driver_does_not_list() {
    let dry = DryRun::new();
    let output = dry.run("known,devices", "smi-listing");
    let report = dry.report();
    assert!(
        report.contains("| skipped | known |") && report.contains("lists no processes that exist here"),
        "{report}"
    );
    assert!(report.contains("| ok | devices | total: as nvidia-smi"), "{report}");
    // the fake library still lists them, which the check reports as a contradiction
    assert_eq!(output.status.code(), Some(1), "{}", all(&output));
}

#[test]
fn check_reports_a_missing_binary_or_driver() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/check.sh");
    let output = Command::new(&script).args(["--binary", "/nonexistent"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(all(&output).contains("cargo build --release"), "{}", all(&output));
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(&script)
        .arg("--out")
        .arg(folder.path())
        .arg("--binary")
        .arg(crate::support::binary())
        .args(["--nvidia-smi", "/nonexistent"])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(all(&output).contains("needs an NVIDIA driver"), "{}", all(&output));
}

#[test]
fn usage_of_the_check_lists_every_part() {
    let dry = DryRun::new();
    let output = dry.run("nonsense", "");
    let output_text = all(&output);
    assert_eq!(output.status.code(), Some(64), "{output_text}");
    let known = output_text.split_once("--only has ").and_then(|(_, rest)| rest.split_once(", not nonsense"));
    let known: Vec<_> = known.unwrap_or_else(|| panic!("{output_text}")).0.split(' ').collect();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/check.sh");
    let usage = all(&Command::new(script).arg("--help").output().unwrap());
    let missing: Vec<_> = known.iter().filter(|part| !usage.contains(**part)).collect();
    assert!(known.len() > 10 && missing.is_empty(), "{missing:?} in {usage}");
}
