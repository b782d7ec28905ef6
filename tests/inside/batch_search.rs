//! A search for a batch size on the CPU in a container with a limit: it knows the limit, takes no more than what that leaves, and its
//! answer can be trained with. The kernel counts the kills of the container, with either version of cgroups.

use std::path::Path;

use crate::support::Memledger;
use crate::support::docker::{Engine, unique};

/// The stand-in for torch: the cgroup v2 guest has no sources.
const STANDIN: [(&str, &str); 5] = [
    ("__init__.py", include_str!("../../python/tests/standin/torch/__init__.py")),
    ("_C.py", include_str!("../../python/tests/standin/torch/_C.py")),
    ("standin_cpu.py", include_str!("../../python/tests/standin/torch/standin_cpu.py")),
    ("cuda/__init__.py", include_str!("../../python/tests/standin/torch/cuda/__init__.py")),
    ("cuda/memory.py", include_str!("../../python/tests/standin/torch/cuda/memory.py")),
];

/// Models of 100 MB and of 40 MB, and steps of a training with the answer, if there is one. The search begins with a batch that does not
/// fit.
const SEARCH: &str = r#"
import time, warnings, torch
from torch.standin_cpu import AdamW, Layers, Tensor
from memledger_client.compat import auto_select_batch_size
for parameters in (5 << 20, 2 << 20):
    model = Layers(layers=5, parameters=parameters, activations=1 << 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = auto_select_batch_size(model, "cpu", 4096, sample=Tensor)
    optimizer = AdamW(model.parameters())
    for _ in range(2 if size else 0):
        model(Tensor(size)).backward()
        optimizer.step()
        model.zero_grad()
    print(size, [str(warning.message) for warning in caught], flush=True)
    del model, optimizer
print("ready", flush=True)
while True:
    time.sleep(60)
"#;

#[test]
fn batch_search_in_a_container_of_512_mib_kills_nothing() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("search");
    let folder = tempfile::Builder::new().prefix("mlt-search-").tempdir().expect("a folder");
    let (reporter, standin) = (folder.path().join("reporter"), folder.path().join("standin"));
    for (file, text) in STANDIN {
        let path = standin.join("torch").join(file);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("the stand-in");
    }
    // it writes the client
    let directory = format!("--reporter.directory={}", reporter.display());
    let _memledger = Memledger::start(&[&engine.flag(), "--podman.socket=", &directory]);
    let mount = |path: &Path, place: &str| format!("{}:{place}:ro", path.display());
    let (client, standin) = (mount(&reporter, "/reporter"), mount(&standin, "/standin"));
    let path = "PYTHONPATH=/reporter/python:/standin";
    let flags = ["--memory", "512m", "-v", &client, "-v", &standin, "-e", path];
    let container = engine.run_python(&name, &flags, SEARCH);
    let log = container.docker(&["logs"]);
    let answers: Vec<_> = log.lines().filter_map(|line| line.split_once(' ')).collect();
    let sizes: Vec<u64> = answers.iter().filter_map(|(size, _)| size.parse().ok()).collect();
    // Adam's state and gradients of 100 MB take more than the share that may be used
    assert!(matches!(sizes.as_slice(), [0, second] if (1..4096).contains(second)), "{log}");
    assert!(answers.iter().all(|(_, words)| words.contains("of the 512.00 MB of the cgroup")), "{log}");
    let state = container.docker(&["inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}"]);
    assert_eq!(state.trim(), "true false", "{log}");
    let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", container.pid())).expect("its cgroup");
    let (kills, highest) = figures(&cgroup);
    assert_eq!(kills, 0, "{log}");
    // page cache is in it, of little more than Python; a kernel before 5.19 keeps no peak with v2
    assert!(highest.is_none_or(|bytes| bytes as f64 <= 0.95 * (512 << 20) as f64), "{highest:?}");
}

/// Returns the OOM kills of a cgroup, and its highest usage.
fn figures(cgroup: &str) -> (u64, Option<u64>) {
    let v1 = cgroup.lines().find_map(|line| line.split_once(":memory:").map(|(_, path)| path));
    let v2 = cgroup.lines().find_map(|line| line.strip_prefix("0::"));
    let (directory, events, peak) = match v1 {
        Some(path) => {
            (format!("/sys/fs/cgroup/memory{path}"), "memory.oom_control", "memory.max_usage_in_bytes")
        }
        None => (format!("/sys/fs/cgroup{}", v2.expect("a cgroup")), "memory.events", "memory.peak"),
    };
    let events = std::fs::read_to_string(format!("{directory}/{events}")).expect("its events");
    let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
    let peak = std::fs::read_to_string(format!("{directory}/{peak}")).ok();
    (kills.expect("a count of kills"), peak.and_then(|text| text.trim().parse().ok()))
}
