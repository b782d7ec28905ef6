//! Containers at their memory limit that the kernel does not kill, with a real engine.

use serde_json::Value;

use super::unrecorded::{NO_LEDGER, verb};
use crate::support::docker::of;
use crate::support::oom::Scene;
use crate::support::{eventually, run};

const AT_LIMIT: &str = "memledger_container_at_memory_limit";
const REFAULTS: &str = "memledger_container_refaults_total";

/// Keeps argv[1] MiB of anonymous memory, and reads a file of argv[2] MiB in circles, through a mapping.
const REREADS: &str = r#"
import mmap, os, sys
anonymous, size = int(sys.argv[1]), int(sys.argv[2]) << 20
with open("/data", "wb") as file:
    for _ in range(size >> 20):
        file.write(os.urandom(1 << 20))
    file.flush()
    os.fsync(file.fileno())
kept = [bytearray(os.urandom(1 << 20)) for _ in range(anonymous)]
data = mmap.mmap(os.open("/data", os.O_RDONLY), size, prot=mmap.PROT_READ)
print("ready", flush=True)
while True:
    for at in range(0, size, 4096):
        data[at]
"#;

/// The limit is 256 MiB. Beside 228 MiB of anonymous memory next to nothing is left for the file; beside 20 MiB there is page cache, which
/// fills the limit too.
#[test]
fn run_that_reads_its_last_page_cache_again_is_at_its_limit() {
    let Some(scene) = Scene::new("full") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let socket = format!("--local.socket={}/control.sock", folder.path().display());
    let ledger = scene.start_memledger(&[&socket]);
    let start = |what: &str, anonymous: &str, file: &str| {
        let limits = ["--memory=256m", "--memory-swap=256m"];
        scene.engine.run_python_with(&scene.container_name(what), &limits, REREADS, &[anonymous, file])
    };
    let (crawls, reads) = (start("crawls", "228", "96"), start("reads", "20", "320"));
    ledger.memledger.eventually("the state of both", |metrics| {
        let states = [&crawls, &reads].map(|it| metrics.try_value(AT_LIMIT, &of(&it.name)));
        let reread = metrics.try_value(REFAULTS, &[("container_name", &*reads.name), ("kind", "file")]);
        match (&states, &reread) {
            ([Ok(1.0), Ok(0.0)], Ok(100_000.0..)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    let (_, text) = verb(&scene, &["why", &crawls.name, NO_LEDGER, "--json"]);
    let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!((&answer["cause"], &answer["found"]), (&"at_limit".into(), &true.into()), "{text}");
    assert!(answer["findings"][0]["reread_bytes_per_second"].as_f64() > Some(16e6), "{text}");
    let (_, text) = verb(&scene, &["why", &reads.name, NO_LEDGER]);
    assert!(text.contains("NO KILL OR EXIT KNOWN") && text.contains("page cache included."), "{text}");
    let state = |name: &str| {
        eventually("its row", || {
            let (_, lines, error) = run(&["ps", "--json", &socket]);
            let rows = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let row = rows.into_iter().find(|row| row["name"] == name);
            row.map(|row| row["state"].clone()).ok_or(error + &lines)
        })
    };
    assert_eq!([state(&crawls.name), state(&reads.name)], ["at_limit", "running"]);
}
