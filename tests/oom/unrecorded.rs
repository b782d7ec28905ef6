//! `memledger why` and `events` where no ledger reaches: on a host where memledger never ran, and for what happened while it
//! did not run. Everything comes from the kernel log and the engine.

use std::process::Command;

use serde_json::Value;

use crate::events::{exit, store_with};
use crate::support::cgroups::is_v2;
use crate::support::docker::Container;
use crate::support::oom::Scene;
use crate::support::{binary, eventually, run};

/// Where memledger never ran.
pub const NO_LEDGER: &str = "--state.path=/nonexistent/ledger";

/// Runs a verb on this host, with the scene's engine.
pub fn verb(scene: &Scene, words: &[&str]) -> (Option<i32>, String) {
    let engine = scene.engine.flag();
    let (code, out, err) = run(&[words, &[&engine, "--podman.socket=", "--cri.endpoint="]].concat());
    assert_ne!(code, Some(2), "{err}");
    (code, out + &err)
}

/// Runs a verb until the engine has responded to it: a busy engine may exceed the verb's time-out of a second, and the output says so.
fn verb_with_engine(scene: &Scene, words: &[&str]) -> (Option<i32>, String) {
    eventually("a response of the engine", || match verb(scene, words) {
        (_, text) if self::words(&text).contains("The containers of docker are unknown") => Err(text),
        result => Ok(result),
    })
}

/// Returns the words of a screen, whose lines may be wrapped.
fn words(screen: &str) -> String {
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns whether the kernel has logged the cgroup of a kill in this container. Beside bursts of other tests it may not: it does
/// so for ten kills in five seconds.
fn is_logged_with_its_cgroup(container: &Container) -> bool {
    let log = Command::new("dmesg").output().expect("dmesg");
    let log = String::from_utf8_lossy(&log.stdout).into_owned();
    log.lines().any(|line| line.contains("task_memcg=") && line.contains(&container.id))
}

/// Runs containers until the kernel has logged a kill with its cgroup; returns that container, which has ended. After ten kills the next
/// ones may have none for five seconds, however many these are.
fn killed(scene: &Scene, what: &str) -> Container {
    let mut attempts = 0..;
    eventually("a kill that is logged with its cgroup", || {
        let attempt = attempts.next().unwrap_or(0);
        let container = scene.run(&format!("{what}{attempt}"), &[], &["eat"]);
        eventually("its end", || match container.inspect("{{.State.Status}}").as_str() {
            "exited" => Ok(()),
            other => Err(other.to_owned()),
        });
        if is_logged_with_its_cgroup(&container) { Ok(container) } else { Err(format!("attempt {attempt}")) }
    })
}

#[test]
fn why_explains_a_kill_on_a_host_where_memledger_never_ran() {
    let Some(scene) = Scene::new("never") else { return };
    let container = killed(&scene, "it");
    for wanted in [container.name.as_str(), &container.id, container.short_id()] {
        let (code, screen) = verb_with_engine(&scene, &["why", wanted, NO_LEDGER]);
        let text = words(&screen);
        assert_eq!(code, Some(0), "{screen}");
        for expected in [
            container.name.as_str(),
            "OUT OF MEMORY at its own limit: the container was ended",
            "because the container reached its memory limit of 16.0 MiB",
            "that ended the container with exit code 137",
            "What to try",
            "OOM kill",
            "There is no ledger in /nonexistent/ledger",
        ] {
            assert!(text.contains(expected), "{wanted}: no {expected:?} in {screen}");
        }
    }
    let json = |words: &[&str]| -> Value {
        let (code, text) = verb_with_engine(&scene, &[words, &["--json", NO_LEDGER]].concat());
        assert_eq!(code, Some(0), "{text}");
        serde_json::from_str(&text).expect("JSON")
    };
    // likely while kills without a logged cgroup, as those of a test before, may be of this container
    let verdict = eventually("a certain verdict", || {
        let verdict = json(&["why", &container.name]);
        if verdict["confidence"] == "certain" { Ok(verdict) } else { Err(verdict.to_string()) }
    });
    assert_eq!(verdict["cause"], "oom_limit_main");
    assert!(verdict["coverage"]["kills_in_log"].as_u64() >= Some(1), "{verdict}");
    let last = json(&["why", "--last"]);
    // each reads the clocks anew, which gives other microseconds
    let [at_last, at] = [&last, &verdict].map(|verdict| verdict["at"].as_f64().expect("a time"));
    assert!(at_last > at - 0.01, "at least this one: {last} {verdict}");
    assert!(!std::path::Path::new("/nonexistent").exists(), "nothing is written");
}

#[test]
fn events_list_a_kill_and_its_exit_on_a_host_where_memledger_never_ran() {
    let Some(scene) = Scene::new("never-ran") else { return };
    let container = killed(&scene, "it");
    let listed = || {
        let filter = format!("--container={}", container.name);
        let (code, text) = verb_with_engine(&scene, &["events", "--json", &filter, NO_LEDGER]);
        assert_eq!(code, Some(0), "{text}");
        let events: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        events
    };
    // the reason is open while kills without a logged cgroup, as those of a test before, may be of this container
    let events = eventually("the reason of the exit", || {
        let events = listed();
        let is_decided = events.last().is_some_and(|event| !event["reason"].is_null());
        if is_decided { Ok(events) } else { Err(format!("{events:?}")) }
    });
    let kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["oom_kill", "exit"], "{events:?}");
    assert_eq!((&events[1]["reason"], &events[1]["exit_code"]), (&"oom_container".into(), &137.into()));
    assert!(events.iter().all(|event| event["before_counting"] == true), "no counter has them: {events:?}");
    // the numbers are those of one answer
    assert_eq!(events[1]["ended_by"], events[0]["id"], "{events:?}");
}

#[test]
fn kill_in_a_removed_container_is_found_by_name_or_listed_without() {
    let Some(scene) = Scene::new("removed") else { return };
    // each of its events has the labels: together they are larger than a single event may be
    let label = format!("--label=long={}", "x".repeat(120_000));
    for number in 0..6 {
        let long = scene.run(&format!("long{number}"), &[&label], &["/bin/sh", "-c", "exit 0"]);
        long.docker(&["wait"]);
    }
    let container = killed(&scene, "it");
    let (name, id) = (container.name.clone(), container.id.clone());
    drop(container); // docker rm
    let (code, screen) = verb_with_engine(&scene, &["why", &name, NO_LEDGER]);
    assert!(code == Some(0) && screen.contains(&id[..12]), "an event of the engine names it: {screen}");
    // Compose creates another one under its name
    let again = scene.run(&name[scene.name.len() + 1..], &[], &["hold"]);
    assert_eq!(again.name, name);
    let (code, screen) = verb_with_engine(&scene, &["why", &name, NO_LEDGER]);
    assert!(code == Some(0) && screen.contains(&id[..12]), "the one that was killed: {screen}");
    let newer = format!("A newer container of that name is running: {}", &again.id[..12]);
    assert!(words(&screen).contains(&newer), "{screen}");
    // where no runtime has it
    let no_runtime = ["--docker.socket=", "--podman.socket=", "--cri.endpoint="];
    let (code, out, _) = run(&[&["why", name.as_str(), NO_LEDGER], &no_runtime[..]].concat());
    let text = words(&out);
    assert_eq!(code, Some(1), "{out}");
    for expected in ["One of them may have been in it", &scene.tag, &id[..12], "The kernel log"] {
        assert!(text.contains(expected), "no {expected:?} in {out}");
    }
    // nor does an older end of that name hide it
    let old = tempfile::tempdir().expect("a folder");
    drop(store_with(old.path(), [exit(1, &name, 1e9)]));
    let state = format!("--state.path={}", old.path().display());
    let (code, out, _) = run(&[&["why", name.as_str(), &state], &no_runtime[..]].concat());
    let text = words(&out);
    assert_eq!(code, Some(0), "{out}");
    for expected in
        ["ENDED WITH AN ERROR", "One of them may have been in it", &scene.tag, &id[..12], "The kernel log"]
    {
        assert!(text.contains(expected), "no {expected:?} in {out}");
    }
    let json = |wanted: &str| -> Value {
        let (_, out, err) = run(&[&["why", wanted, "--json", &state], &no_runtime[..]].concat());
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
    };
    let listed = |verdict: Value| verdict["kills_of_unknown_containers"].to_string().contains(&id);
    assert!(listed(json(&name)));
    assert!(!listed(json(&format!("{:064}", 1))), "by its id no other container is meant");
}

#[test]
fn containers_without_a_kill_are_described_with_what_is_known() {
    let Some(scene) = Scene::new("alive") else { return };
    let running = scene.run("running", &[], &["hold"]);
    let failed = scene.run("failed", &[], &["/bin/sh", "-c", "exit 3"]);
    let stopped = scene.run("stopped", &[], &["hold"]);
    stopped.docker(&["stop", "-t", "1"]);
    let (code, screen) = eventually("a limit", || match verb(&scene, &["why", &running.name, NO_LEDGER]) {
        (code, screen) if words(&screen).contains("of its limit of 16.0 MiB") => Ok((code, screen)),
        (_, screen) => Err(screen),
    });
    assert!(code == Some(1) && words(&screen).contains("is running, and neither an OOM kill"), "{screen}");
    let (code, screen) = eventually("its exit", || match verb(&scene, &["why", &failed.name, NO_LEDGER]) {
        (code, screen) if screen.contains("ENDED WITH AN ERROR") => Ok((code, screen)),
        (_, screen) => Err(screen),
    });
    assert_eq!(code, Some(0), "{screen}");
    for expected in
        ["with exit code 3", "docker logs --tail 50", "looks there for errors of GPU memory (CUDA)"]
    {
        assert!(words(&screen).contains(expected), "no {expected:?} in {screen}");
    }
    let (code, screen) = eventually("its exit", || match verb(&scene, &["why", &stopped.name, NO_LEDGER]) {
        (code, screen) if screen.contains("STOPPED on request") => Ok((code, screen)),
        (_, screen) => Err(screen),
    });
    assert_eq!(code, Some(0), "{screen}");
}

#[test]
fn only_the_flag_of_the_engine_is_left_without_the_kernel_log() {
    let Some(scene) = Scene::new("flag") else { return };
    if crate::support::cgroups::is_v2() {
        return; // the engine loses its OOM events there
    }
    // the engine loses the OOM event of a cgroup that is removed before it has read it
    let flagged = |attempt: u32| {
        let container = scene.run(&format!("it{attempt}"), &[], &["eat"]);
        container.docker(&["wait"]);
        (container.inspect("{{.State.OOMKilled}}") == "true").then_some(container)
    };
    let container = (0..20).find_map(flagged).expect("the engine flags one of 20 kills");
    // a young exit is pending for some seconds
    let (code, screen) = eventually("its exit", || {
        match verb(&scene, &["why", &container.name, NO_LEDGER, "--oom.kernel-log=off"]) {
            (code, screen) if words(&screen).contains("OUT OF MEMORY, without a record of the kill") => {
                Ok((code, screen))
            }
            (_, screen) => Err(screen),
        }
    });
    let text = words(&screen);
    assert_eq!(code, Some(0), "{screen}");
    assert!(text.contains("The kernel log was not read (--oom.kernel-log=off)"), "{screen}");
}

#[test]
fn kill_while_memledger_is_down_is_found_and_keeps_one_entry_after_its_start() {
    let Some(scene) = Scene::new("down") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let known = scene.run_known(&ledger, "known", &[], &["eat"]);
    ledger.settles(&known.name, 1, 0);
    drop(ledger);
    let container = killed(&scene, "it");
    let (code, screen) = verb_with_engine(&scene, &["why", &container.name, &state]);
    assert!(code == Some(0) && screen.contains("OUT OF MEMORY at its own limit"), "{screen}");
    let (code, screen) = verb(&scene, &["why", &known.name, &state]);
    assert!(
        code == Some(0) && screen.contains("OUT OF MEMORY at its own limit"),
        "the ledger has it: {screen}"
    );
    let kills = || {
        let filter = format!("--container={}", container.name);
        let (_, text) = verb_with_engine(&scene, &["events", "--json", "--limit=0", &filter, &state]);
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.filter(|event| event["type"] == "oom_kill").map(|kill| kill["id"].clone()).collect::<Vec<_>>()
    };
    let before = kills();
    assert_eq!(before.len(), 1, "{before:?}");
    let ledger = scene.start_memledger(&[&state]);
    ledger.settles(&container.name, 1, 0);
    let after = kills();
    assert_eq!(after.len(), 1, "{after:?}");
}

#[test]
fn empty_or_damaged_ledger_and_one_of_another_boot_do_not_hide_a_kill() {
    let Some(scene) = Scene::new("boot") else { return };
    let (empty, damaged) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    drop(store_with(empty.path(), []));
    drop(store_with(damaged.path(), []));
    let file = damaged.path().join("ledger.sqlite3");
    let mut bytes = std::fs::read(&file).expect("the ledger");
    bytes[4096..].fill(0xA5); // it opens, and its tables cannot be read
    std::fs::write(&file, &bytes).expect("damaged");
    let damaged = format!("--state.path={}", damaged.path().display());
    let state = scene.state();
    let reboot = scene.reboot_wrapper();
    let reboot: Vec<&str> = reboot.iter().map(String::as_str).collect();
    drop(scene.start_memledger_through(&reboot, &[&state]));
    let container = killed(&scene, "it");
    for state in [format!("--state.path={}", empty.path().display()), state, damaged.clone()] {
        // an end of the last seconds is undecided while evidence may come
        let screen = eventually("the kill", || match verb(&scene, &["why", &container.name, &state]) {
            (Some(0), screen) if screen.contains("OUT OF MEMORY at its own limit") => Ok(screen),
            (_, screen) => Err(screen),
        });
        assert_eq!(screen.contains("The ledger cannot be read"), state == damaged, "{screen}");
    }
}

#[test]
fn user_without_rights_gets_the_command_that_has_them() {
    let Some(scene) = Scene::new("rights") else { return };
    let container = killed(&scene, "it");
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--bounding-set=-all",
        "--inh-caps=-all",
    ]);
    let engine = scene.engine.flag();
    command.arg(binary()).args([
        "why",
        &container.name,
        NO_LEDGER,
        &engine,
        "--podman.socket=",
        "--cri.endpoint=",
    ]);
    let output = command.output().expect("setpriv runs");
    let text = words(&String::from_utf8_lossy(&output.stdout));
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("Permission denied") {
        return crate::support::skip("nobody cannot run the binary here");
    }
    assert_eq!(output.status.code(), Some(3), "{text}{errors}");
    for expected in [
        "The containers of docker are unknown: no permission for",
        &format!("sudo {} why {}", binary().display(), container.name),
        "--cri.endpoint=", // with its options
        "The kernel log",
    ] {
        assert!(text.contains(expected), "no {expected:?} in {text}{errors}");
    }
}

/// The log of a container is read only on request, and only for the line of an error.
#[test]
fn end_with_an_error_is_explained_by_the_log_on_request() {
    let Some(scene) = Scene::new("logs") else { return };
    let shm = "say=ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).";
    let cuda = "say=torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 12.00 GiB of which \
        1.00 GiB is free. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated.";
    for (name, line, title, shown) in [
        (
            "cuda",
            cuda,
            "OUT OF GPU MEMORY: its cache is fragmented (most likely)",
            "tried 2.00 GiB, free 1024.00 MiB",
        ),
        ("shm", shm, "SHARED MEMORY FULL (most likely)", "typical of a full /dev/shm"),
        ("none", "say=epoch 3 secret", "ENDED WITH AN ERROR", "have no out-of-memory error that is known"),
    ] {
        let container = scene.run(name, &[], &[line, "exit=1"]);
        let text = eventually("its end", || match verb(&scene, &["why", &container.name, NO_LEDGER]) {
            (Some(0), screen) if screen.contains("ENDED WITH AN ERROR") => Ok(words(&screen)),
            (_, screen) => Err(screen),
        });
        // beside kills of other tests whose container is not known, the cause stays open
        let is_open = text.contains("of an unknown container");
        assert!(is_open || text.contains("--logs"), "unasked: {text}");
        let (_, screen) = verb_with_engine(&scene, &["why", &container.name, NO_LEDGER, "--logs"]);
        let text = words(&screen);
        let is_open = is_open || text.contains("of an unknown container");
        assert!(text.contains(shown) && (is_open || text.contains(title)), "{name}: {screen}");
        assert!(!text.contains("--logs") && !text.contains("secret"), "{name}: {screen}");
    }
}

/// What real programs printed, by containers that end as the programs did.
#[test]
fn log_of_each_recorded_death_has_its_headline() {
    let Some(scene) = Scene::new("texts") else { return };
    let refused = "MEMORY WAS REFUSED: an allocation failed, and nothing was killed";
    let (own, threads, shm) =
        ("ITS OWN LIMIT was reached", "THREADS OR PROCESSES WERE REFUSED", "SHARED MEMORY FULL");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/log-texts");
    let mount = format!("{folder}:/texts:ro");
    for (name, status, title, advice) in [
        ("refused-numpy", "1", refused, "overcommit"),
        ("refused-rust", "139", refused, "ulimit -v"),
        ("refused-map-count", "1", refused, "vm.max_map_count"),
        ("refused-jax-cpu", "1", refused, ""),
        ("pin-memory", "1", refused, "memlock"),
        ("heap-node", "139", own, "--max-old-space-size"),
        ("heap-java-crash", "127", own, "-XX:MaxRAMPercentage"),
        ("heap-java-thread-pool", "0", "COMPLETED", ""),
        ("limit-duckdb", "1", own, "memory_limit"),
        ("threads-openblas", "130", threads, "--pids-limit"),
        ("threads-bash", "254", threads, "ulimit -u"),
        ("shm-torch-allocate", "1", shm, "--shm-size"),
        ("nccl-shm", "1", shm, "--shm-size"),
        ("monitor-ray", "1", "KILLED by Ray", "RAY_memory_usage_threshold"),
        ("dask-nanny", "1", "KILLED by dask's nanny", "memory_limit"),
        ("none-enospc-without-path", "1", "ENDED WITH AN ERROR", ""),
        ("none-ray-worker-crashed", "1", "ENDED WITH AN ERROR", ""),
    ] {
        let print = format!("cat /texts/{name}.txt >&2; exit {status}");
        let flags = ["-v", &mount, "--entrypoint", "sh"];
        let container = scene.engine.run(&scene.container_name(name), &flags, &["-c", &print]);
        container.docker(&["wait"]);
        let (_, screen) = verb_with_engine(&scene, &["why", &container.name, NO_LEDGER, "--logs"]);
        let text = words(&screen);
        // beside kills of other tests whose container is not known, the cause stays open
        let is_open = text.contains("of an unknown container") || text.contains("UNKNOWN");
        assert!(is_open || text.contains(title) && text.contains(advice), "{name}: {screen}");
        let is_crash = !is_open && ["own error", "it crashed"].iter().any(|words| text.contains(words));
        assert!(!is_crash || title == "ENDED WITH AN ERROR", "{name} has a reason: {screen}");
    }
}

#[test]
fn log_of_a_running_container_and_of_the_newest_end_is_read_on_request() {
    let Some(scene) = Scene::new("logs-newest") else { return };
    let shm = "say=ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).";
    let running = scene.run("running", &[], &[shm, "hold"]);
    eventually("the line", || {
        let (_, screen) = verb_with_engine(&scene, &["why", &running.name, NO_LEDGER, "--logs"]);
        let text = words(&screen);
        let is_told = text.contains("is running") && text.contains("typical of a full /dev/shm");
        if is_told { Ok(()) } else { Err(screen) }
    });
    let (_, screen) = verb_with_engine(&scene, &["why", &running.name, NO_LEDGER]);
    assert!(!screen.contains("/dev/shm"), "unasked: {screen}");
    // other tests may cause a newer end: then it is about that one, whose log was read or is gone
    for flags in [&["why", NO_LEDGER, "--logs"][..], &["why", NO_LEDGER, "--logs", "--last"]] {
        let ended = scene.run("newest", &[], &[shm, "exit=1"]);
        ended.docker(&["wait"]);
        let (code, screen) = verb_with_engine(&scene, flags);
        let text = words(&screen);
        assert_eq!(code, Some(0), "{screen}");
        assert!(text.contains("typical of a full /dev/shm") || !text.contains(&ended.name), "{screen}");
        assert!(text.contains("Its log ") || text.contains("of its log have no"), "it was read: {screen}");
    }
}

#[test]
fn container_that_never_started_has_the_engines_error() {
    let Some(scene) = Scene::new("unstarted") else { return };
    let container = scene.engine.create(&scene.container_name("missing"), &["--entrypoint", "/nothing"], &[]);
    assert!(container.try_docker(&["start"]).is_err());
    let (code, screen) = verb_with_engine(&scene, &["why", &container.name, NO_LEDGER]);
    let text = words(&screen);
    assert_eq!(code, Some(0), "{screen}");
    for expected in ["NEVER STARTED", "no such file or directory", "check entrypoint, command and volumes"] {
        assert!(text.contains(expected), "no {expected:?} in {screen}");
    }
    assert!(!text.contains("whose container is not known"), "{screen}");
}

/// The kernel's records name other containers, and no other one can have had this name.
#[test]
fn kills_of_others_are_not_listed_below_an_end_that_is_known() {
    let Some(scene) = Scene::new("others") else { return };
    let other = killed(&scene, "other");
    other.docker(&["rm"]);
    let container = scene.run("own", &[], &["exit=3"]);
    eventually("its end", || match container.inspect("{{.State.Status}}").as_str() {
        "exited" => Ok(()),
        status => Err(status.to_owned()),
    });
    let later = killed(&scene, "later");
    later.docker(&["rm"]);
    let (_, screen) = verb_with_engine(&scene, &["why", &container.name, NO_LEDGER]);
    assert!(screen.contains("exit code 3") && !screen.contains("whose container is not known"), "{screen}");
}

/// cgroup v1 alone can switch the OOM killer off.
#[test]
fn container_that_hangs_at_its_limit_says_so() {
    let Some(scene) = Scene::new("hang") else { return };
    if is_v2() {
        return; // runtimes ignore the flag there
    }
    let container = scene.run("it", &["--oom-kill-disable"], &["eat=100000000"]);
    let screen = eventually("its hang", || match verb(&scene, &["why", &container.name, NO_LEDGER]) {
        (Some(0), screen) if screen.contains("AT ITS MEMORY LIMIT") => Ok(screen),
        (_, screen) => Err(screen),
    });
    let text = words(&screen);
    assert!(
        text.contains("Its OOM killer is switched off") && text.contains("docker update --memory"),
        "{screen}"
    );
}
