//! `memledger why --kernel-log`: recorded kernel logs, read by the real binary. The whole output is compared with
//! `tests/golden/kernel-logs`.
//!
//! The logs of 6.1 and 6.18 with an id of their own are recorded; the other variants are written after the kernel's source and
//! public logs, because no such kernel runs here. Their names: cgroup version or `host`, kernel, case, format.

mod forms;
mod oracle;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{binary, golden, run};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel-logs")
}

fn logs() -> Vec<String> {
    names_in(&folder())
}

fn names_in(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).expect("the recorded logs").map(|file| file.expect("a file"));
    let files = files.filter(|file| file.file_type().expect("a type").is_file());
    let mut names: Vec<_> = files.map(|file| file.file_name().into_string().expect("a name")).collect();
    names.sort();
    names
}

/// Returns the verdicts on a recorded log.
fn verdicts(name: &str, more: &[&str]) -> Vec<Value> {
    let path = folder().join(name);
    let path = path.to_str().expect("a path");
    let (code, json, error) = run(&[&["why", "--kernel-log", path, "--json"], more].concat());
    assert_eq!(code, Some(0), "{name}: {error}");
    json.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{name}: {error}: {json}")))
        .collect()
}

/// Runs the command with this standard input; returns exit code, output and errors.
fn piped(arguments: &[&str], input: &[u8]) -> (Option<i32>, String, String) {
    let mut command = Command::new(binary());
    command.args(["why", "--kernel-log", "-"]).args(arguments);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().expect("memledger runs");
    let mut stdin = child.stdin.take().expect("a pipe");
    let output = std::thread::scope(|scope| {
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().expect("memledger ends")
    });
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn explains_the_newest_kill_of_every_variant() {
    for name in logs() {
        let mut verdicts = verdicts(&name, &["--last"]);
        verdicts.iter_mut().for_each(|verdict| drop(verdict.as_object_mut().unwrap().remove("requested_at")));
        let json = serde_json::to_string_pretty(&verdicts).unwrap() + "\n";
        golden(&format!("tests/golden/kernel-logs/{name}.json"), &json);
        let path = folder().join(&name);
        let (code, screen, _) = run(&["why", "--kernel-log", path.to_str().unwrap(), "--last"]);
        assert_eq!(code, Some(0), "{name}");
        golden(&format!("tests/golden/kernel-logs/{name}.txt"), &screen);
        assert!(screen.lines().all(|line| line.chars().count() <= 100), "{name} is too wide:\n{screen}");
        assert!(screen.lines().count() <= 30, "{name} is too long:\n{screen}");
    }
}

/// What people posted: the screen, and what is said about the log.
#[test]
fn explains_logs_as_people_post_them() {
    let folder = folder().join("cases");
    for name in names_in(&folder) {
        let log = std::fs::read(folder.join(&name)).expect("a log");
        let (code, screen, error) = piped(&[], &log);
        assert_eq!(code, Some(0), "{name}: {error}");
        golden(&format!("tests/golden/kernel-log-cases/{name}"), &(screen + &error));
    }
}

/// What is like a kill and none.
#[test]
fn claims_no_kill_where_a_log_has_none() {
    let folder = folder().join("none");
    for name in names_in(&folder) {
        let log = std::fs::read(folder.join(&name)).expect("a log");
        let (code, screen, error) = piped(&[], &log);
        assert_eq!((code, &*screen), (Some(1), ""), "{name}: {error}");
        golden(&format!("tests/golden/kernel-log-none/{name}"), &error);
    }
}

/// The number of a job or a machine is a name, and so is what a notice names.
#[test]
fn selects_by_the_number_of_a_job_and_the_name_of_a_pod() {
    for (name, wanted) in [
        ("47-pbs.txt", "482311"),
        ("48-slurm-v2.txt", "918273"),
        ("46-htcondor.txt", "slot1_3"),
        ("42-proxmox-vm.txt", "101"),
        ("39-kubectl-describe-pod.txt", "ml/train-llama-0"),
        ("44-systemd-unit-lines.txt", "llama"),
    ] {
        let log = std::fs::read(folder().join("cases").join(name)).expect("a log");
        assert_eq!(piped(&[wanted], &log).0, Some(0), "{name} has {wanted}");
        assert_eq!(piped(&["4711"], &log).0, Some(1), "{name} has nothing else");
    }
}

#[test]
fn every_kill_has_a_verdict_and_the_newest_is_last() {
    let burst = verdicts("v1-6.18-burst.kmsg", &[]);
    assert_eq!(burst.len(), 30);
    assert_eq!(
        burst.iter().filter(|verdict| verdict.get("report").is_some()).count(),
        10,
        "the kernel's limit"
    );
    let times: Vec<f64> =
        burst.iter().map(|verdict| verdict["log_time"].as_str().unwrap().parse().unwrap()).collect();
    assert!(times.is_sorted(), "{times:?}");
    let group = verdicts("v2-6.12-group.dmesg-T", &[]);
    assert_eq!((group.len(), &group[0]["pid"]), (1, &2957.into()), "a group is one incident");
    let with = &group[0]["findings"][0];
    assert_eq!((&with["finding"], &with["count"]), (&"killed_with_it".into(), &2.into()), "{with}");
    let text = with["text"].as_str().expect("a sentence");
    assert!(text.contains("2 more processes were killed with it") && text.contains("(2740)"), "{text}");
}

#[test]
fn id_that_a_user_can_have_written_names_no_container() {
    for name in ["29-id-in-a-job-of-a-user.txt", "30-id-in-the-slice-of-a-user.txt"] {
        let log = std::fs::read(folder().join("cases").join(name)).expect("a log");
        let (code, text, error) = piped(&["--json", "aaaaaaaaaaaa"], &log);
        assert_eq!(code, Some(0), "the id still finds it: {name}: {text}{error}");
        let verdict: serde_json::Value = serde_json::from_str(text.trim()).expect("a verdict");
        assert!(verdict.get("container_id").is_none() && verdict["pid"].is_u64(), "{verdict}");
    }
}

#[test]
fn newest_kill_of_a_name_is_selected_last() {
    let newest = verdicts("v2-6.12-group.dmesg-T", &["--last", "sh"]);
    assert_eq!(
        (newest.len(), &newest[0]["pid"]),
        (1, &2957.into()),
        "the kill with which it died: {newest:?}"
    );
}

#[test]
fn evidence_binds_a_kill_to_the_block_before_it() {
    let verdict = |name: &str| verdicts(name, &["--last"]).remove(0);
    let has_owner = |verdict: &Value| verdict.get("subject").is_some();
    // the victim of the block was exiting; this kill is of another block, whose begin was not logged
    let skipped = verdict("v2-6.1-skipped.dmesg");
    assert!(!has_owner(&skipped) && skipped.get("report").is_none(), "{skipped}");
    assert_eq!(skipped["cause"], "oom_unattributed");
    // before the log there may have been ten blocks, and no table lists this member of the group
    let member = verdict("v2-6.1-group-without-table.txt");
    assert!(!has_owner(&member) && member.get("report").is_none(), "{member}");
    let thread = verdict("v1-5.4-thread.syslog");
    assert!(has_owner(&thread), "{thread}");
    assert_eq!((&thread["pid"], &thread["report"]["victim_pid"]), (&7537.into(), &7493.into()));
}

#[test]
fn selects_by_id_cgroup_or_process() {
    let count = |name: &str, wanted: &str| verdicts(name, &[wanted]).len();
    assert_eq!(count("v1-6.18-burst.kmsg", "c60321ca422b"), 10, "those with a cgroup");
    assert_eq!(count("v1-6.18-burst.kmsg", "par-worker"), 30);
    assert_eq!(count("host-6.12-fragmented.dmesg", "user-1000.slice"), 1);
    let path = folder().join("v1-6.18-burst.kmsg");
    let (code, out, error) = run(&["why", "--kernel-log", path.to_str().unwrap(), "train"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(
        error.contains("none of the 30 OOM kills") && error.contains("no names of containers"),
        "{error}"
    );
}

#[test]
fn unknown_and_truncated_input_is_reported() {
    let log = std::fs::read(folder().join("v1-6.18-container.kmsg")).expect("a log");
    for (input, expected) in [
        (&b""[..], "standard input is empty"),
        (b"Dear all,\nthe training died again.\n", "none of its 2 lines has the form of a kernel log"),
        (b"[    1.000001] eth0: link up\n", "no OOM kill in standard input (1 lines, 1 with a stamp)"),
        (&log[..log.len() / 2], "it ends within a report of the OOM killer"),
    ] {
        let (code, out, error) = piped(&[], input);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let twice = [&log[..], &log[..log.len() / 2]].concat();
    let (code, out, error) = piped(&[], &twice);
    assert!(code == Some(0) && out.contains("hog (pid 22212"), "{out}");
    assert!(error.contains("ends within a report"), "{error}");
    let (code, _, error) = run(&["why", "--kernel-log", "/nonexistent"]);
    assert!(code != Some(0) && error.contains("/nonexistent cannot be opened"), "{error}");
}

/// The address space is limited, so that a line or a log that is kept whole fails.
#[test]
fn garbage_of_a_gibibyte_needs_little_memory() {
    let good = folder().join("v2-6.1-container.kmsg");
    let script = format!(
        "ulimit -v 524288; {{ head -c 1073741824 /dev/zero; echo; yes 'a line without meaning' | head -c 4194304; echo; \
         yes '[ 7] 1 1 1 1 1 1 1 x' | head -c 4194304; echo; cat {}; }} | {} why --kernel-log - --json",
        good.display(),
        binary().display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().expect("sh");
    let error = String::from_utf8_lossy(&output.stderr);
    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{error}"));
    assert_eq!(verdict["report"]["limit_bytes"], 64 << 20);
}
