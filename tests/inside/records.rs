//! The record of a run whose program reports from inside: settings, steps, operations, and a search for a batch size that is not part
//! of it.

use std::path::Path;

use serde_json::Value;

use super::cuda_oom::exit_of;
use super::{Host, MIB};
use crate::support::docker::{Engine, of, unique};
use crate::support::run_on_ledger;

const GIB: u64 = 1 << 30;
/// Beside torch.
const CONTEXT: u64 = 300 * MIB;
const RESERVED: &str = "memledger_container_torch_reserved_bytes";

/// Holds 1 GiB, searches with 7 GiB until it runs out of memory, and trains with 2 GiB; goes on with each signal.
const PROGRAM: &str = r#"
import memledger_client, signal, threading, torch
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
memledger_client.start(settings={"batch_size": 16})
torch.cuda.standin_allocate(1 << 30)
print("ready", flush=True)
signal.sigwait({signal.SIGUSR1})
with memledger_client.batch_search():
    torch.cuda.standin_allocate(6 << 30)
    try:
        torch.cuda.standin_allocate(20 << 30)
    except RuntimeError:
        pass
    signal.sigwait({signal.SIGUSR1})
    torch.cuda.standin_free(6 << 30)
    torch.cuda.empty_cache()
with memledger_client.track("model", "forward"):
    torch.cuda.standin_allocate(1 << 30)
barrier = threading.Barrier(2)
def load():
    with memledger_client.track("data", "load"):
        barrier.wait()
        barrier.wait()
threads = [threading.Thread(target=load) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
while signal.sigtimedwait({signal.SIGUSR1}, 0.02) is None:
    memledger_client.step(batch_size=16)
"#;

fn state_flag(folder: &Path) -> String {
    format!("--state.path={}", folder.join("state").display())
}

#[test]
fn record_has_what_the_program_reported_without_its_search_for_a_batch_size() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("searches");
    let host = Host::start_with(&engine, &name, |folder| vec![state_flag(folder)]);
    let arguments = ["--batch-size", "99", "--num-workers=3", "--token", "12345"];
    let container = host.run_with(&engine, &name, PROGRAM, &arguments);
    let grow_to = |gib: u64| {
        host.set_gpu_memory(&container, gib * GIB + CONTEXT);
        host.memledger.eventually("its memory", |metrics| {
            let torch = metrics.try_value(RESERVED, &[of(&name)[0], ("rank", "0")])?;
            let driver = metrics.try_value(super::USED, &of(&name))?;
            let wanted = ((gib * GIB) as f64, (gib * GIB + CONTEXT) as f64);
            if (torch, driver) == wanted { Ok(()) } else { Err(format!("{torch} {driver}")) }
        });
    };
    let go_on = || container.docker(&["kill", "-s", "USR1"]);
    grow_to(1);
    go_on();
    grow_to(7);
    host.set_gpu_memory(&container, 2 * GIB + CONTEXT);
    go_on();
    grow_to(2);
    host.memledger.eventually("many steps", |metrics| {
        let steps =
            metrics.try_value("memledger_container_training_steps_total", &[of(&name)[0], ("rank", "0")])?;
        if steps > 100.0 { Ok(()) } else { Err(format!("{steps} steps")) }
    });
    host.memledger.eventually("two operations that overlapped", |metrics| {
        match metrics.value("memledger_reporter_overlapping_operations_total", &[]) {
            2.0 => Ok(()),
            other => Err(other.to_string()),
        }
    });
    go_on();
    assert_eq!(exit_of(&host.memledger, &name), ("completed".to_owned(), 0));
    let (code, out, err) =
        run_on_ledger(&["report", &name, "--format=json", &state_flag(host.folder.path())]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    let record: Value = serde_json::from_str(&out).expect("JSON");
    let gpu = record["gpus"].as_object().and_then(|gpus| gpus.values().next()).expect("a GPU");
    assert_eq!(gpu["peak_bytes"], 2 * GIB + CONTEXT, "{record}");
    assert_eq!(gpu["torch_allocated_peak_bytes"], 2 * GIB, "{record}");
    assert_eq!(record["torch_ooms"], 0, "{record}");
    // what the program reports precedes its arguments, of which only numbers of a training are kept
    let settings = serde_json::json!({"batch_size": "16", "num_workers": "3"});
    assert_eq!(record["settings"], settings, "{record}");
    let operations = record["operations"].as_array().expect("operations");
    let peaks: Vec<_> = operations
        .iter()
        .map(|operation| (operation["operation"].as_str(), operation["torch_allocated_peak_bytes"].as_u64()))
        .collect();
    // two that overlap have none
    assert_eq!(peaks, [(Some("load"), None), (Some("forward"), Some(2 * GIB))], "{record}");
    let steps = record["steps_per_second"].as_f64().expect("steps");
    let samples = record["samples_per_second"].as_f64().expect("samples");
    assert!(steps > 0.0 && (samples / steps - 16.0).abs() < 0.01, "{record}");
}

/// Holds 1 GiB; at a signal it takes 5 GiB more for a moment, logs its end, and ends at once.
const ENDS_AT_ONCE: &str = r#"
import signal, torch
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
from memledger_client.compat import MemoryTracker
tracker = MemoryTracker()
torch.cuda.standin_allocate(1 << 30)
for number in range(3):
    tracker.log_memory("model", "after_generate")
print("ready", flush=True)
signal.sigwait({signal.SIGUSR1})
torch.cuda.standin_allocate(5 << 30)
torch.cuda.standin_free(5 << 30)
tracker.log_memory("system", "experiment_end")
"#;

#[test]
fn what_a_program_reports_in_its_last_second_is_in_its_record() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("last");
    let host = Host::start_with(&engine, &name, |folder| vec![state_flag(folder)]);
    let container = host.run(&engine, &name, ENDS_AT_ONCE);
    host.set_gpu_memory(&container, GIB + CONTEXT);
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name), ("completed".to_owned(), 0));
    let report = |format: &str| -> Value {
        let flags = ["report", &name, &format!("--format={format}"), &state_flag(host.folder.path())];
        let (code, out, err) = run_on_ledger(&flags);
        assert_eq!((code, &*err), (Some(0), ""), "{out}");
        serde_json::from_str(&out).expect("JSON")
    };
    let record = report("json");
    let gpu = record["gpus"].as_object().and_then(|gpus| gpus.values().next()).expect("a GPU");
    assert_eq!(gpu["torch_allocated_peak_bytes"], 6 * GIB, "{record}");
    let usage = report("memory_usage");
    let log = usage["detailed_log"].as_array().expect("the log");
    let entries: Vec<_> = log.iter().map(|entry| (&entry["operation"], &entry["gpu_ram_peak_mb"])).collect();
    let (generate, end) = (Value::from("after_generate"), Value::from("experiment_end"));
    let (one, six) = (Value::from(1024.0), Value::from(6144.0));
    assert_eq!(entries, [(&generate, &one), (&generate, &one), (&generate, &one), (&end, &six)], "{usage}");
    let times: Vec<_> = log.iter().map(|entry| entry["timestamp"].as_f64().expect("a time")).collect();
    assert!(times.windows(2).all(|pair| pair[0] < pair[1]), "each has its own time: {usage}");
    assert_eq!(usage["peak_usage"]["gpu_ram_peak_mb"], 6144.0, "{usage}");
}
