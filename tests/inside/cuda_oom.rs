//! CUDA out-of-memory errors: real containers whose programs end by one, or survive it. The allocator is the stand-in's.

use std::path::Path;

use serde_json::Value;

use super::{Host, MIB};
use crate::support::docker::{Engine, of, unique};
use crate::support::{Memledger, eventually, run_on_ledger};

const GIB: u64 = 1 << 30;
const OOMS: &str = "memledger_container_cuda_ooms_total";

/// A program that has 4 GiB of tensors and 6 GiB of cache on a GPU of 12 GiB, and does something when it gets a signal.
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
    let response: Value = serde_json::from_str(&text).expect("JSON");
    response["events"].as_array().expect("a list").clone()
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

/// Starts memledger with a ledger on disk.
fn host_with_ledger(engine: &Engine, name: &str) -> Host {
    Host::start_with(engine, name, |folder| vec![state_flag(folder)])
}

fn state_flag(folder: &Path) -> String {
    format!("--state.path={}", folder.join("state").display())
}

/// Returns the screen of `memledger why`, which has at most 24 lines.
fn screen(host: &Host, id: &str) -> String {
    let (code, out, err) = run_on_ledger(&["why", id, &state_flag(host.folder.path())]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    assert!(out.lines().count() <= 24, "{out}");
    out
}

#[test]
fn program_that_ends_by_an_error_is_explained_with_its_numbers() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("cuda-oom");
    let host = host_with_ledger(&engine, &name);
    let container = host.run(
        &engine,
        &name,
        &program(
            "import memledger_client\ntry:\n    with memledger_client.track('model', 'forward'):\n        torch.cuda.standin_allocate(20 << 30)\n\
             except RuntimeError as error:\n    print(error)\n    raise",
        ),
    );
    host.set_gpu_memory(&container, 10 * GIB + 300 * MIB);
    host.memledger.eventually("its memory", |metrics| {
        metrics
            .try_value("memledger_container_torch_reserved_bytes", &[of(&name)[0], ("rank", "0")])
            .map(drop)
    });
    host.memledger.eventually("its count", |metrics| match metrics.try_value(OOMS, &of(&name))? {
        0.0 => Ok(()),
        count => Err(format!("it begins at {count}")),
    });
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
        let found = (
            metrics.try_value(OOMS, &of(&name))?,
            metrics.try_value("memledger_container_exits_total", &reason)?,
        );
        if found == (1.0, 1.0) { Ok(()) } else { Err(format!("{found:?}")) }
    });
    let last = "memledger_container_last_cuda_oom_timestamp_seconds";
    assert!(host.memledger.fresh_metrics().value(last, &of(&name)) > 0.0);
    let (status, text) = host.memledger.get(&format!("/api/v1/containers/{name}/why"));
    let verdict: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &verdict["cause"]), (200, &"cuda_oom".into()), "{text}");
    let what = verdict["what"].as_str().expect("a sentence");
    assert!(what.contains("tried to allocate 20.00 GiB on GPU 0 in model/forward"), "{what}");
    assert!(what.contains("2.00 GiB of 12.00 GiB were free"), "{what}");
    // as in the text that the program printed
    let printed = container.docker(&["logs"]);
    let screen = screen(&host, &container.id);
    for (number, of_text) in [
        ("tried 20.00 GiB", "Tried to allocate 20.00 GiB"),
        ("total 12.00 GiB", "total capacity of 12.00 GiB"),
        ("free 2.00 GiB", "2.00 GiB is free"),
        ("allocated 4.00 GiB", "4.00 GiB is allocated by PyTorch"),
        ("unallocated 6.00 GiB", "6.00 GiB is reserved by PyTorch but unallocated"),
    ] {
        assert!(screen.contains(number) && printed.contains(of_text), "{number}:\n{screen}\n{printed}");
    }
}

#[test]
fn fragmentation_is_distinguished() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("fragmented");
    let host = host_with_ledger(&engine, &name);
    // the stand-in's cache is never in pieces; the error of one that is
    let fragmented = r#"
from torch import _C
while not _C.observers:
    time.sleep(0.02)
_C.observers[0](0, 5 << 30, 12 << 30, 2 << 30)
raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")
"#;
    let container = host.run(&engine, &name, &program(fragmented));
    host.set_gpu_memory(&container, 10 * GIB + 300 * MIB);
    // a program that ends while it still connects is not known
    host.memledger.eventually("its memory", |metrics| {
        metrics
            .try_value("memledger_container_torch_reserved_bytes", &[of(&name)[0], ("rank", "0")])
            .map(drop)
    });
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name).0, "cuda_oom");
    let (_, text) = host.memledger.get(&format!("/api/v1/containers/{name}/why"));
    let verdict: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(verdict["cause"], "cuda_oom_fragmented", "{text}");
    assert!(text.contains("expandable_segments:True"), "{text}");
    let screen = screen(&host, &container.id);
    for words in
        ["its cache is fragmented", "tried 5.00 GiB", "inactive split 6.00 GiB", "PYTORCH_ALLOC_CONF"]
    {
        assert!(screen.contains(words), "{words}:\n{screen}");
    }
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
    host.set_gpu_memory(&container, 10 * GIB + 300 * MIB);
    container.docker(&["kill", "-s", "USR1"]);
    // the last errors are sent at the end of the process, and may arrive after the runtime has reported the exit
    eventually("its exit and three errors", || match exit_of(&host.memledger, &name) {
        (reason, 3) if reason == "completed" => Ok(()),
        other => Err(format!("{other:?}")),
    });
}
