//! `memledger why` with causes that are provoked for real, side by side with one memledger and its store.
//!
//! The table of `tests/why` has every cause with synthetic events; here the kernel, the engine and programs produce
//! them, and the verdict must be what really happened.

use std::sync::Mutex;

use crate::support::cgroups::is_v2;
use crate::support::docker::{Container, signal};
use crate::support::oom::{CgroupParent, Ledger, Scene, has_printed, limit, wait_for_cgroups_in_the_log};
use crate::support::{eventually, eventually_true, run_on_ledger as run};

/// An action on a container, and the verdict that it must get.
struct Case {
    container: Container,
    cause: &'static str,
    confidence: &'static str,
    /// Texts on the screen.
    expected: &'static [&'static str],
    /// Its OOM kills and its exits in the ledger.
    events: (usize, usize),
}

impl Case {
    /// Creates a certain case without a kill, for a container that has ended.
    fn ended(container: Container, cause: &'static str, expected: &'static [&'static str]) -> Self {
        Self { container, cause, confidence: "certain", expected, events: (0, 1) }
    }

    fn likely(self) -> Self {
        Self { confidence: "likely", ..self }
    }

    fn with(self, kills: usize, exits: usize) -> Self {
        Self { events: (kills, exits), ..self }
    }

    /// Waits until all events are recorded and settled; earlier verdicts are provisional.
    fn settles(&self, ledger: &Ledger) {
        eventually(&format!("{}: events settled", self.container.name), || {
            let name = self.container.name.as_str();
            let events = ledger.events();
            let ours: Vec<_> = events.iter().filter(|event| event["container_name"] == name).collect();
            let of = |kind: &str, settled: &str| {
                ours.iter().filter(|event| event["type"] == kind && event[settled].is_string()).count()
            };
            let found = (of("oom_kill", "victim"), of("exit", "reason"));
            let all = ours.len() == found.0 + found.1;
            (all && found == self.events).then_some(()).ok_or_else(|| format!("{found:?}: {ours:?}"))
        });
    }

    /// Runs the command, with JSON and with the screen, and checks cause, confidence and text.
    fn check_verdict(&self, state: &str) -> Result<(), String> {
        let name = &self.container.name;
        let (code, json, error) = run(&["why", name, "--json", state]);
        let verdict: serde_json::Value =
            serde_json::from_str(&json).map_err(|e| format!("{name}: {code:?}: {error}: {e}"))?;
        let (code, screen, error) = run(&["why", name, state]);
        assert_eq!(code, Some(0), "{error}");
        println!("{screen}"); // a failed test shows all screens
        let found = (verdict["cause"].as_str(), verdict["confidence"].as_str());
        let wanted = (Some(self.cause), Some(self.confidence));
        if found != wanted {
            return Err(format!("{name}: {found:?} instead of {wanted:?}\n{screen}"));
        }
        // a text may be wrapped
        let text = screen.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = self.expected.iter().copied().chain([name.as_str()]);
        let missing: Vec<_> = words.filter(|word| !text.contains(word)).collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("{name}: no {missing:?} in\n{screen}")) }
    }
}

/// A trainer with two workers, named as by PyTorch: the first eats when `/control/eat-WHAT` exists. The second only waits: if it needed
/// memory while the first one's is being freed, the kernel would kill it too. The code after it is what the trainer does when a worker
/// has ended.
const TRAINER: &str = r#"
import os, signal, sys, time
def wait_for(file):
    while not os.path.exists('/control/' + file):
        time.sleep(0.01)
def work(eats):
    with open('/proc/self/comm', 'w') as comm:
        comm.write('pt_data_worker')
    kept = [bytearray(b'x' * (8 << 20))]
    if not eats:
        signal.pause()
    wait_for('eat-' + what)
    while True:
        kept.append(bytearray(b'x' * (1 << 20)))
for eats in (True, False):
    if os.fork() == 0:
        work(eats)
os.wait()
"#;

fn trainer(scene: &Scene, ledger: &Ledger, what: &str, then: &str) -> Container {
    let program = format!("what = '{what}'\n{TRAINER}{then}\n");
    let flags = ["--memory=64m", "-v", "/usr:/usr:ro", "--env=NUM_WORKERS=2"];
    let container = scene.run(what, &flags, &["/usr/bin/python3", "-u", "-c", &program]);
    let labels = [("container_name", container.name.as_str()), ("role", "dataloader_worker")];
    ledger.eventually("two workers", |metrics| {
        match metrics.try_value("memledger_container_processes", &labels)? {
            2.0 => Ok(()),
            other => Err(format!("{other}")),
        }
    });
    scene.release(&format!("eat-{what}"));
    container
}

const AT_ITS_LIMIT: &str = "OUT OF MEMORY at its own limit: the container was ended";

fn at_its_limit(scene: &Scene, ledger: &Ledger) -> Vec<Case> {
    let expected: &[&str] = &[AT_ITS_LIMIT, "because the container reached its memory limit of 16.0 MiB"];
    let first = scene.run("first", &[], &["eat"]);
    let wrapped = scene.run("wrapped", &[], &["/bin/sh", "-c", "/hog eat; exit $?"]);
    let lives = trainer(scene, ledger, "lives", "wait_for('never')");
    let fails = trainer(scene, ledger, "fails", "wait_for('fail'); sys.exit(1)");
    // wait until the ledger is certain that this kill did not end it
    ledger.settles(&fails.name, 0, 1);
    scene.release("fail");
    let worker: &[&str] = &[
        "a child process was killed",
        "pt_data_worker",
        "a DataLoader worker",
        "the container kept running.",
        "memory limit of 64.0 MiB",
        "Fewer NUM_WORKERS (now 2)",
    ];
    let then: &[&str] = &[
        "OUT OF MEMORY at its own limit of 64.0 MiB: a child was killed; the container went on and ended with 1,",
        "kept running and ended",
        "with exit code 1",
    ];
    vec![
        Case::ended(first, "oom_limit_main", expected).with(1, 1),
        Case::ended(wrapped, "oom_limit_main", expected).with(1, 1),
        Case::ended(lives, "oom_limit_worker", worker).with(1, 0),
        Case::ended(fails, "oom_limit_worker_then_exit", then).with(1, 1),
    ]
}

fn at_a_parents_limit(scene: &Scene, ledger: &Ledger) -> Vec<Case> {
    let parent = CgroupParent::new("why");
    let big = scene.run(
        "big",
        &[&parent.flag, "--memory=200m"],
        &["eat=40", "say=ready", "wait=/control/big", "eat"],
    );
    eventually_true("it has its memory", || has_printed(&big, "ready"));
    limit(&parent.folder, 64 << 20);
    ledger.eventually("it is known", |metrics| {
        metrics
            .try_value("memledger_container_memory_usage_bytes", &[("container_name", &big.name)])
            .map(drop)
    });
    scene.release("big");
    ledger.settles(&big.name, 1, 0);
    eventually_true("its cgroup is gone", || std::fs::remove_dir(&parent.folder).is_ok());
    let expected = &["OUT OF MEMORY at the limit of a cgroup above it", "memory limit of 64.0 MiB"];
    vec![Case::ended(big, "oom_parent_limit", expected).with(1, 1)]
}

/// Waits until a sample has so many bytes in the container's `/dev/shm`.
fn wait_for_shm(ledger: &Ledger, container: &Container, bytes: f64) {
    let labels = [("container_name", container.name.as_str())];
    ledger.eventually("its shared memory", |metrics| {
        let used = metrics.try_value("memledger_container_shm_used_bytes", &labels)?;
        if used >= bytes { Ok(()) } else { Err(format!("{used}")) }
    });
    ledger.memledger.fresh_metrics(); // now the ledger has that sample
}

/// Fills a `/dev/shm` of 8 MiB, waits for a sample of it, and then runs the given code.
fn fills_shm(scene: &Scene, ledger: &Ledger, what: &str, then: &str) -> Container {
    let program = format!(
        "import mmap, os, time\n\
         file = open('/dev/shm/batch', 'wb', buffering=0)\n\
         try:\n    while True: file.write(b'x' * 65536)\n\
         except OSError as error: print(error)\n\
         while not os.path.exists('/control/{what}'): time.sleep(0.01)\n{then}\n"
    );
    let flags = ["--memory=64m", "--shm-size=8m", "-v", "/usr:/usr:ro"];
    let container = scene.run(what, &flags, &["/usr/bin/python3", "-u", "-c", &program]);
    wait_for_shm(ledger, &container, f64::from(8 << 20));
    scene.release(what);
    container
}

fn of_shared_memory(scene: &Scene, ledger: &Ledger) -> Vec<Case> {
    let write = "dd if=/dev/zero of=/dev/shm/a bs=1M count=11; until [ -e /control/grow ]; do sleep 0.05; done; \
                 dd if=/dev/zero of=/dev/shm/b bs=1M count=40; exit $?";
    let grows = scene.run("grows", &["--shm-size=64m"], &["/bin/sh", "-c", write]);
    wait_for_shm(ledger, &grows, f64::from(11 << 20));
    scene.release("grow");
    let refused = fills_shm(scene, ledger, "refused", "raise SystemExit(1)");
    let touched = "file = open('/dev/shm/more', 'w+b'); file.truncate(1 << 20)\n\
                   mmap.mmap(file.fileno(), 1 << 20).write(b'x' * (1 << 20))";
    let bus = fills_shm(scene, ledger, "bus", touched);
    let grown = &["mostly by shared memory", "A larger --shm-size does not help here", "16.0 MiB"];
    let full =
        &["SHARED MEMORY FULL (most likely)", "8.0 MiB of the 8.0 MiB of its /dev/shm", "larger --shm-size"];
    vec![
        Case::ended(grows, "oom_limit_shm", grown).with(1, 1),
        Case::ended(refused, "shm_full", full).likely(),
        Case::ended(bus, "shm_full", &["SHARED MEMORY FULL (most likely)", "SIGBUS", "larger --shm-size"])
            .likely(),
    ]
}

fn on_request(scene: &Scene, ledger: &Ledger) -> Vec<Case> {
    let obeys = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.1; done";
    let obeys = scene.run("obeys", &[], &["/bin/sh", "-c", obeys]);
    eventually_true("it listens", || has_printed(&obeys, "ready"));
    let [stubborn, killed, removed, outside] =
        ["stubborn", "killed", "removed", "outside"].map(|what| scene.run(what, &[], &["eat=8", "hold"]));
    obeys.docker(&["stop", "-t", "30"]);
    stubborn.docker(&["stop", "-t", "1"]);
    killed.docker(&["kill"]);
    ledger.settles(&removed.name, 0, 0); // it is known before it is removed
    removed.docker(&["rm", "-f"]);
    signal("KILL", outside.pid());
    vec![
        Case::ended(obeys, "stopped", &["STOPPED on request", "SIGTERM", "exit code 143"]),
        Case::ended(
            stubborn,
            "stopped",
            &["STOPPED on request", "did not exit on SIGTERM", "stop_grace_period"],
        ),
        Case::ended(killed, "killed_by_request", &["KILLED on request", "docker kill"]),
        Case::ended(removed, "killed_by_request", &["KILLED on request", "docker rm -f"]),
        Case::ended(outside, "killed_outside", &["KILLED (SIGKILL), not an OOM kill", "systemd-oomd"]),
    ]
}

fn by_itself(scene: &Scene, _: &Ledger) -> Vec<Case> {
    let program = "import ctypes; ctypes.string_at(0)";
    let python = ["/usr/bin/python3", "-c", program];
    let segv = scene.run("segv", &["--memory=64m", "-v", "/usr:/usr:ro"], &python);
    let abort = scene.run("abort", &["--init"], &["abort"]);
    let [one, zero, claims] =
        ["exit=1", "exit=0", "exit=137"].map(|step| scene.run(&step.replace('=', "-"), &[], &[step]));
    vec![
        Case::ended(segv, "crashed_signal", &["CRASHED", "SIGSEGV", "abort()"]),
        Case::ended(abort, "crashed_signal", &["CRASHED", "SIGABRT", "std::bad_alloc"]),
        Case::ended(one, "error_exit", &["ENDED WITH AN ERROR", "exit code 1", "No OOM kill", "docker logs"]),
        Case::ended(zero, "completed", &["COMPLETED", "without an error"]),
        Case::ended(
            claims,
            "killed_outside",
            &["not an OOM kill", "exits with code 137 by itself looks the same"],
        ),
    ]
}

fn waiting_for_memory(scene: &Scene, _: &Ledger) -> Vec<Case> {
    if is_v2() {
        return vec![]; // v2 has no oom_kill_disable
    }
    let container = scene.run("waits", &["--oom-kill-disable"], &["eat"]);
    eventually("it waits", || {
        let text = std::fs::read_to_string(container.cgroup().join("memory.oom_control")).unwrap_or_default();
        if text.contains("under_oom 1") { Ok(()) } else { Err(text) }
    });
    container.docker(&["kill"]);
    vec![Case::ended(
        container,
        "killed_by_request",
        &["KILLED on request", "oom event, which is also sent without a kill"],
    )]
}

#[test]
fn every_provoked_cause_gets_its_verdict() {
    let Some(scene) = Scene::new("why") else { return };
    wait_for_cgroups_in_the_log();
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let cases = Mutex::new(Vec::new());
    let groups =
        [at_its_limit, at_a_parents_limit, of_shared_memory, on_request, by_itself, waiting_for_memory];
    std::thread::scope(|scope| {
        for group in groups {
            let (scene, ledger, cases) = (&scene, &ledger, &cases);
            scope.spawn(move || {
                let made = group(scene, ledger);
                cases.lock().expect("no holder panics").extend(made);
            });
        }
    });
    let cases = cases.into_inner().expect("no holder panics");
    let wrong: Vec<_> = cases
        .iter()
        .filter_map(|case| {
            case.settles(&ledger);
            case.check_verdict(&state).err()
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} wrong:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    assert!(cases.len() >= 17, "{} causes", cases.len());
}

#[test]
fn running_container_without_events_has_nothing_to_explain() {
    let Some(scene) = Scene::new("nothing") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["eat=4", "hold"]);
    ledger.settles(&container.name, 0, 0);
    ledger.eventually("the container", |metrics| {
        metrics
            .try_value("memledger_container_memory_usage_bytes", &[("container_name", &container.name)])
            .map(drop)
    });
    let (status, text) = ledger.memledger.get(&format!("/api/v1/containers/{}/why", container.name));
    let verdict: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{status} {text}"));
    assert_eq!((status, verdict["cause"].as_str()), (200, Some("nothing")), "{text}");
    let what = verdict["what"].as_str().expect("a sentence");
    assert!(what.contains(&container.name) && what.contains("neither an OOM kill nor an exit"), "{what}");
}

#[test]
fn kills_known_only_from_counters_are_reported_as_such() {
    let Some(scene) = Scene::new("counter") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state, "--oom.kernel-log=off"]);
    let [child, main] = [("child", "seq=1:eat"), ("main", "eat")]
        .map(|(what, kill)| scene.run(what, &[], &["wait=/control/go", kill, "hold"]));
    for container in [&child, &main] {
        ledger.settles(&container.name, 0, 0);
    }
    scene.release("go");
    scene.wait_for_kills(2);
    let expected =
        &["known from the kernel's counters only (most likely)", "name and size are not known", "/dev/kmsg"];
    let case = Case::ended(child, "oom_unnamed", expected).likely().with(1, 0);
    case.settles(&ledger);
    case.check_verdict(&state).expect("the verdict");
    // the counter of the other container is gone with it, but the kernel's counter still shows a kill
    ledger.eventually("its end", |metrics| {
        match metrics.sum(crate::support::oom::EXITS, &[("container_name", &main.name)]) {
            1.0 => Ok(()),
            ends => Err(format!("{ends}")),
        }
    });
    let (code, screen, error) = run(&["why", &main.name, &state]);
    println!("{screen}");
    assert_eq!(code, Some(0), "{error}");
    assert!(!screen.contains("NOT an OOM kill") && screen.contains("OOM kill"), "{screen}");
}

/// What a shell does after its child was killed, and how the second line of each answer goes on.
const ENDS: [(&str, &str, &str); 4] = [
    ("zero", "/hog eat; exit 0", "the container went on and ended with 0,"),
    ("pipe", "/hog eat | cat", "the container went on and ended with 0,"),
    ("other", "/hog eat; exit 138", "the container went on and ended with 138,"),
    ("late", "/hog eat; status=$?; sleep 8; exit $status", "the container went on and ended with 137,"),
];

/// A kill is never hidden by what came after it: while memledger runs, from its store, and without any.
#[test]
fn kill_of_a_child_leads_however_its_container_ends() {
    let Some(scene) = Scene::new("went-on") else { return };
    wait_for_cgroups_in_the_log();
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let containers = ENDS.map(|(what, program, _)| {
        let container = scene.run(what, &["--memory=48m"], &["/bin/sh", "-c", program]);
        (container, what)
    });
    let check = |how: &str, answer: &dyn Fn(&str) -> String| {
        for ((container, what), (_, _, end)) in containers.iter().zip(ENDS) {
            let screen = answer(&container.name);
            println!("{how} {what}\n{screen}");
            let second = screen.lines().nth(1).unwrap_or_default().to_owned();
            let headline = screen.lines().skip(1).take(2).collect::<Vec<_>>().join(" ");
            assert!(
                second.contains("OUT OF MEMORY") && second.contains("48.0 MiB"),
                "{how} {what}: {screen}"
            );
            assert!(
                headline.contains("a child was killed") && headline.contains(end),
                "{how} {what}: {screen}"
            );
            assert!(!screen.contains("NOT an OOM"), "{how} {what}: {screen}");
            assert!(
                screen.contains("What to try") && screen.contains("At the kill"),
                "{how} {what}: {screen}"
            );
        }
    };
    for (container, _) in &containers {
        ledger.settles(&container.name, 0, 1);
        ledger.eventually("its end", |metrics| {
            match metrics.sum(crate::support::oom::EXITS, &[("container_name", &container.name)]) {
                1.0 => Ok(()),
                ends => Err(format!("{ends}")),
            }
        });
    }
    let exits = |name: &str| {
        let metrics = ledger.memledger.fresh_metrics();
        let of = |reason| {
            metrics.value(crate::support::oom::EXITS, &[("container_name", name), ("reason", reason)])
        };
        ["completed", "error", "killed", "signal"].map(of)
    };
    for ((container, what), (_, _, end)) in containers.iter().zip(ENDS) {
        let wanted = if end.contains("with 0") { [1.0, 0.0, 0.0, 0.0] } else { [0.0, 1.0, 0.0, 0.0] };
        assert_eq!(exits(&container.name), wanted, "{what}: {end}");
    }
    check("from the service's store", &|name| run(&["why", name, &state]).1);
    let (_, json, _) = run(&["why", &containers[0].0.name, "--json", &state]);
    assert!(json.contains("\"headline\": \"OUT OF MEMORY at its own limit of 48.0 MiB"), "{json}");
    assert!(json.contains("\"cause\": \"oom_limit_worker\""), "{json}");
    let (_, runs, _) = run(&["runs", &state]);
    println!("{runs}");
    assert!(runs.contains("completed (1 OOM kill)") && runs.contains("error (1 OOM kill)"), "{runs}");
    drop(ledger);
    check("from the store alone", &|name| run(&["why", name, &state]).1);
    check("without a ledger", &|name| {
        super::unrecorded::verb(&scene, &["why", name, super::unrecorded::NO_LEDGER]).1
    });
}
