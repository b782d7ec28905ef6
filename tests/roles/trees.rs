//! Recorded process trees of training: each process has the role that the training itself reported.
//!
//! `tests/gpu/check.sh` records them:
//!
//! * `pytorch-1.13-without-gpu.jsonl`: real DataLoaders and real torchrun of PyTorch 1.13 (Debian 12's), on a machine without
//!   a GPU. The ranks have memory of one only by an entry in the fake library's list.
//! * `h200-torch-2.11.jsonl`: PyTorch 2.11 with CUDA 13.0 and NCCL on an H200, driver 580.159.04, 2026-11-26.
//! * `stand-in.jsonl`: the dry run, so Python's own `multiprocessing` and not PyTorch. Its workers have the name that newer
//!   PyTorch gives them.

use std::path::Path;
use std::sync::Arc;

use memledger::attribute::roles::classify;
use memledger::collect::process::{Process, ProcessMeta};
use memledger::parse::process::Command;
use serde_json::Value;

/// A process as the collector would have read it.
fn process(entry: &Value, all: &[Value]) -> Process {
    let number = |entry: &Value, key: &str| entry[key].as_u64().unwrap_or_else(|| panic!("{key} of {entry}"));
    // the recorded arguments are shapes, so equal ones are distinguished
    let mut of = entry;
    while of["arguments_are_the_parents"] == true {
        let Some(parent) = all.iter().find(|other| other["pid"] == of["ppid"]) else { break };
        of = parent;
    }
    let words = entry["arguments"].as_array().expect("a list").iter();
    let words: Vec<_> = words.map(|word| word.as_str().expect("text")).collect();
    let meta = ProcessMeta {
        settings: None,
        comm: entry["comm"].as_str().expect("text").into(),
        ppid: number(entry, "ppid") as u32,
        start_ticks: number(entry, "start_ticks"),
        command: Command::of(words.join("\0").as_bytes()),
        command_hash: Some(number(of, "pid")),
        zombie: false,
    };
    Process {
        pid: number(entry, "pid") as u32,
        memory: memledger::collect::process::ResidentMemory::default(),
        meta: Arc::new(meta),
    }
}

#[test]
fn each_process_of_a_recorded_training_has_the_role_that_the_training_reported() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/trees");
    let mut trees = 0;
    for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let tree: Value =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            let entries = tree["processes"].as_array().expect("a list");
            let processes: Vec<_> = entries.iter().map(|entry| process(entry, entries)).collect();
            let has_gpu_memory = |process: &Process| {
                entries.iter().any(|entry| entry["pid"] == process.pid && entry["holds_gpu"] == true)
            };
            let roles: Vec<_> =
                classify(&processes, has_gpu_memory).into_iter().map(|role| role.label()).collect();
            let reported: Vec<_> =
                entries.iter().map(|entry| entry["role"].as_str().expect("text")).collect();
            assert_eq!(roles, reported, "{} in {}: {entries:#?}", tree["tree"], file.display());
            trees += 1;
        }
    }
    assert!(trees >= 10, "only {trees} trees");
}
