//! CUDA out-of-memory errors: real containers whose programs end by one, or survive it. The allocator is the stand-in's.

use serde_json::Value;

use super::{Host, MIB};
use crate::support::docker::{Engine, of, unique};
use crate::support::{Memledger, eventually};

const GIB: u64 = 1 << 30;
const OOMS: &str = "memledger_container_cuda_ooms_total";

/// A program that holds 4 GiB of tensors and 6 GiB of cache on a GPU of 12 GiB, and does something when it gets a signal.
fn program(more: &str) -> String {
    format!(
        r#"
import signal, time, torch
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
torch.cuda.init()
torch.cuda.standin_allocate(10 << 30)
torch.cuda.standin_free(6 << 30)
print("ready", flush=True)
signal.sigwait({{signal.SIGUSR1}})
{more}
"#
    )
}

pub fn events(memledger: &Memledger, name: &str) -> Vec<Value> {
    let (status, text) = memledger.get(&format!("/api/v1/events?container={name}"));
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    answer["events"].as_array().expect("a list").clone()
}

/// Returns the reason of the exit, and the number of errors.
pub fn exit_of(memledger: &Memledger, name: &str) -> (String, u64) {
    eventually("the exit", || {
        let events = events(memledger, name);
        let exit = events.iter().find(|event| event["type"] == "exit" && event["reason"].is_string());
        let reason = exit.ok_or_else(|| format!("{events:?}"))?["reason"].as_str().expect("text").to_owned();
        let errors = events.iter().filter(|event| event["type"] == "cuda_oom");
        Ok((reason, errors.map(|event| 1 + event["skipped"].as_u64().unwrap_or(0)).sum()))
    })
}

#[test]
fn program_that_ends_by_an_error_is_explained_with_its_numbers() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("cuda-oom");
    let host = Host::start(&engine, &name);
    let container = host.run(
        &engine,
        &name,
        &program("import memledger\nwith memledger.track('model', 'forward'):\n    torch.cuda.standin_allocate(20 << 30)"),
    );
    host.hold(&container, 10 * GIB + 300 * MIB);
    host.memledger.eventually("its memory", |metrics| {
        metrics.ask("memledger_container_torch_reserved_bytes", &[of(&name)[0], ("rank", "0")]).map(drop)
    });
    assert_eq!(host.memledger.fresh_metrics().value(OOMS, &of(&name)), 0.0, "it begins at 0");
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name), ("cuda_oom".to_owned(), 1));
    let events = events(&host.memledger, &name);
    let oom = events.iter().find(|event| event["type"] == "cuda_oom").expect("the error");
    for (field, bytes) in [
        ("tried_bytes", 20 * GIB),
        ("free_bytes", 2 * GIB),
        ("total_bytes", 12 * GIB),
        ("allocated_bytes", 4 * GIB),
        ("reserved_bytes", 10 * GIB),
        ("inactive_split_bytes", 6 * GIB),
    ] {
        assert_eq!(oom[field], bytes, "{oom}");
    }
    assert_eq!((&oom["component"], &oom["operation"]), (&"model".into(), &"forward".into()), "{oom}");
    assert_eq!((&oom["gpu"], &oom["source"]), (&"0".into(), &"reporter".into()), "{oom}");
    assert_eq!(oom["holders"][0]["name"], name.as_str(), "{oom}");
    host.memledger.eventually("the counters", |metrics| {
        let reason = [of(&name)[0], ("reason", "cuda_oom")];
        let found =
            (metrics.ask(OOMS, &of(&name))?, metrics.ask("memledger_container_exits_total", &reason)?);
        if found == (1.0, 1.0) { Ok(()) } else { Err(format!("{found:?}")) }
    });
    let (status, text) = host.memledger.get(&format!("/api/v1/containers/{name}/why"));
    let verdict: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &verdict["cause"]), (200, &"cuda_oom".into()), "{text}");
    let what = verdict["what"].as_str().expect("a sentence");
    assert!(what.contains("tried to allocate 20.0 GiB on GPU 0 in model/forward"), "{what}");
    assert!(what.contains("2.0 GiB of 12.0 GiB were free"), "{what}");
}

#[test]
fn fragmentation_is_told_apart() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("fragmented");
    let host = Host::start(&engine, &name);
    // the stand-in's cache is never in pieces; the error of one that is
    let fragmented = r#"
from torch import _C
while not _C.observers:
    time.sleep(0.02)
_C.observers[0](0, 5 << 30, 12 << 30, 2 << 30)
raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")
"#;
    let container = host.run(&engine, &name, &program(fragmented));
    host.hold(&container, 10 * GIB + 300 * MIB);
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name).0, "cuda_oom");
    let (_, text) = host.memledger.get(&format!("/api/v1/containers/{name}/why"));
    let verdict: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(verdict["cause"], "cuda_oom_fragmented", "{text}");
    assert!(text.contains("expandable_segments:True"), "{text}");
}

#[test]
fn survived_errors_are_counted_and_end_nothing() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("survivor");
    let host = Host::start(&engine, &name);
    let survives = r#"
from torch import _C
while not _C.observers:
    time.sleep(0.02)
for _ in range(3):
    try:
        torch.cuda.standin_allocate(20 << 30)
    except RuntimeError:
        pass
"#;
    let container = host.run(&engine, &name, &program(survives));
    host.hold(&container, 10 * GIB + 300 * MIB);
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name), ("completed".to_owned(), 3));
}
