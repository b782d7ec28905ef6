//! memledger with limited privileges: as a user who is not root, with two capabilities and with none.
//!
//! `setpriv` sets the privileges as systemd's `User=` and `AmbientCapabilities=` do. A container with `cap_drop: [ALL]` and
//! a read-only root is in `deploy.rs`, a socket proxy that allows three requests in `daemon.rs`.

use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;
use std::process::Command;

use crate::support::docker::{Engine, unique};
use crate::support::{Memledger, Metrics, binary, skip};

/// The user `nobody`.
const NOBODY: u32 = 65_534;

/// Returns the command that executes another as nobody, with only these capabilities and this group.
fn setpriv_nobody(capabilities: &[&str], group: u32) -> Vec<String> {
    let set: Vec<_> = std::iter::once("-all".to_owned())
        .chain(capabilities.iter().map(|name| format!("+{name}")))
        .collect();
    let set = set.join(",");
    vec![
        "setpriv".to_owned(),
        "--no-new-privs".to_owned(),
        format!("--reuid={NOBODY}"),
        format!("--regid={NOBODY}"),
        format!("--groups={group}"),
        format!("--bounding-set={set}"),
        format!("--inh-caps={set}"),
        format!("--ambient-caps={set}"),
    ]
}

/// Starts a memledger as nobody.
fn start_as_nobody(capabilities: &[&str], group: u32, flags: &[&str]) -> Memledger {
    let words = setpriv_nobody(capabilities, group);
    Memledger::start_through(&words.iter().map(String::as_str).collect::<Vec<_>>(), flags)
}

/// Returns a line of the `/proc/PID/status` of memledger.
fn status(memledger: &Memledger, name: &str) -> String {
    line_of(&format!("/proc/{}/status", memledger.pid()), name)
}

fn line_of(path: &str, name: &str) -> String {
    line_in(&std::fs::read_to_string(path).unwrap(), name)
}

fn line_in(text: &str, name: &str) -> String {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("the line");
    line.trim().to_owned()
}

/// Checks that these sources of the ledger are up, which the first snapshots may precede.
fn all_up(metrics: &Metrics, sources: &[&str]) -> Result<(), String> {
    sources.iter().try_for_each(|source| is_up(metrics, "memledger_oom_source_up", &[("source", source)]))
}

fn is_up(metrics: &Metrics, family: &str, labels: &[(&str, &str)]) -> Result<(), String> {
    match metrics.try_value(family, labels)? {
        1.0 => Ok(()),
        up => Err(format!("{family} {labels:?} is {up}")),
    }
}

/// Returns true if setpriv works here and nobody can run the binary.
fn can_run_as_nobody() -> bool {
    let words = setpriv_nobody(&[], NOBODY);
    let output = Command::new(&words[0]).args(&words[1..]).arg(binary()).arg("--version").output();
    match output {
        Ok(output) if output.status.success() => true,
        other => {
            skip(&format!("the binary cannot be run by another user: {other:?}"));
            false
        }
    }
}

#[test]
fn nobody_with_two_capabilities_reads_everything() {
    if !can_run_as_nobody() {
        return;
    }
    let Some(engine) = Engine::shared() else { return };
    // a process of root in a container: other users cannot read its memory
    let container = engine.run(&unique("root"), &["--memory=64m"], &["sleep", "1000"]);
    let include = format!("--container.include=^{}$", container.name);
    let state = tempfile::tempdir().unwrap();
    chown(state.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let path = format!("--state.path={}", state.path().display());
    let group = std::fs::metadata(&engine.socket).unwrap().gid();
    let flags = [&engine.flag(), "--podman.socket=", "--pss.interval=1s", &include, &path];
    let memledger = start_as_nobody(&["sys_ptrace", "syslog"], group, &flags);
    assert_eq!(status(&memledger, "Uid").split_whitespace().next(), Some("65534"));
    let two = format!("{:016x}", 1_u64 << 19 | 1 << 34);
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        assert_eq!(status(&memledger, set), two, "{set}");
    }
    // not inherited by child processes
    for set in ["CapInh", "CapAmb"] {
        assert_eq!(status(&memledger, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(&memledger, "NoNewPrivs"), "1");
    let me = [("container_name", container.name.as_str())];
    let metrics = memledger.eventually("the families that need capabilities", |metrics| {
        metrics.try_value("memledger_container_process_pss_bytes", &[me[0], ("role", "other")])?;
        metrics.try_value("memledger_container_shm_size_bytes", &me)?;
        is_up(metrics, "memledger_store_up", &[])?;
        all_up(metrics, &["kmsg", "vmstat", "cgroup", "runtime"])?;
        Ok(metrics.clone())
    });
    for collector in ["own", "host", "cgroup", "process", "shm", "pss"] {
        assert_eq!(
            metrics.value("memledger_collector_success", &[("collector", collector)]),
            1.0,
            "{collector}"
        );
    }
    assert_eq!(metrics.value("memledger_runtime_up", &[("runtime", "docker")]), 1.0);
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &me), 67_108_864.0);
    for (_, labels, count) in metrics.all("memledger_collector_read_errors_total", &[]) {
        assert_eq!(*count, 0.0, "{labels:?}");
    }
}

#[test]
fn nobody_without_capabilities_still_attributes_memory() {
    if !can_run_as_nobody() {
        return;
    }
    let Some(engine) = Engine::shared() else { return };
    let container = engine.run(&unique("bare"), &["--memory=64m"], &["sleep", "1000"]);
    let include = format!("--container.include=^{}$", container.name);
    let group = std::fs::metadata(&engine.socket).unwrap().gid();
    let memledger =
        start_as_nobody(&[], group, &[&engine.flag(), "--podman.socket=", "--pss.interval=1s", &include]);
    assert_eq!(status(&memledger, "CapEff"), "0000000000000000");
    let me = [("container_name", container.name.as_str())];
    let metrics = memledger.eventually("the container", |metrics| {
        metrics.try_value("memledger_container_memory_usage_bytes", &me)?;
        metrics.try_value("memledger_container_processes", &[me[0], ("role", "other")])?;
        all_up(metrics, &["vmstat"])?;
        Ok(metrics.clone())
    });
    assert_eq!(metrics.get("memledger_container_process_pss_bytes", &[me[0], ("role", "other")]), None);
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "cgroup")]), 1.0);
    // doctor reports what is missing
    let words = setpriv_nobody(&[], group);
    let doctor =
        Command::new(&words[0]).args(&words[1..]).arg(binary()).args(["doctor", &engine.flag()]).output();
    let doctor = doctor.unwrap();
    let text = String::from_utf8_lossy(&doctor.stdout);
    assert!(doctor.status.success(), "memledger can run: {text}");
    assert!(text.contains("MISSING  CAP_SYS_PTRACE") && text.contains("no proportional set size"), "{text}");
}

#[test]
fn nobody_reads_gpus_by_a_process_without_capabilities() {
    use std::os::unix::fs::PermissionsExt;
    if !can_run_as_nobody() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let fake = fake_nvml::FakeNvml::install(dir.path(), &fake_nvml::State::with_gpus(2)).unwrap();
    let library = format!("--gpu.nvml-library={}", fake.path().display());
    let memledger = start_as_nobody(&["sys_ptrace", "syslog"], NOBODY, &["--docker.socket=", &library]);
    let children = |parent: u32| {
        let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let parent = format!("PPid:\t{parent}\n");
        let is_child = |path: &std::path::PathBuf| {
            std::fs::read_to_string(path.join("status")).is_ok_and(|status| status.contains(&parent))
        };
        processes.filter(is_child).collect::<Vec<_>>()
    };
    memledger.eventually("both GPUs", |metrics| match metrics.try_value("memledger_gpus_visible", &[])? {
        2.0 => Ok(()),
        found => Err(format!("{found}")),
    });
    let [process] = &children(memledger.pid())[..] else { panic!("one NVML process") };
    let status = process.join("status").display().to_string();
    assert_eq!(line_of(&status, "Uid").split_whitespace().next(), Some("65534"));
    for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        assert_eq!(line_of(&status, set), "0000000000000000", "{set}");
    }
    assert_eq!(line_of(&status, "NoNewPrivs"), "1");
}

/// The capabilities that memledger keeps: CHOWN, DAC_OVERRIDE, SYS_PTRACE, SYS_NICE and SYSLOG.
const USED: u64 = 1 | 1 << 1 | 1 << 19 | 1 << 23 | 1 << 34;

/// Returns a capability set that is the same in all threads, and the number of threads.
fn capabilities_of_threads(memledger: &Memledger, set: &str) -> (u64, usize) {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", memledger.pid())).unwrap();
    // a thread may end meanwhile
    let status = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("status")).ok()
    };
    let sets: Vec<_> =
        tasks.filter_map(status).map(|text| u64::from_str_radix(&line_in(&text, set), 16).unwrap()).collect();
    assert!(sets.iter().all(|one| *one == sets[0]), "{set}: {sets:x?}");
    (sets[0], sets.len())
}

#[test]
fn root_drops_unused_capabilities_in_every_thread() {
    let own = u64::from_str_radix(&line_of("/proc/self/status", "CapEff"), 16).unwrap();
    if own & USED != USED || own.count_ones() < 10 {
        return skip("the tests do not run with root's capabilities");
    }
    let Some(engine) = Engine::shared() else { return };
    // a process of another user: unreadable without capabilities
    let container = engine.run(&unique("giveup"), &["--memory=64m", "--user=1234"], &["sleep", "1000"]);
    let include = format!("--container.include=^{}$", container.name);
    let state = tempfile::tempdir().unwrap();
    chown(state.path(), Some(1234), None).unwrap();
    let path = format!("--state.path={}", state.path().display());
    let flags = [&engine.flag(), "--podman.socket=", "--pss.interval=1s", &include, &path];
    let memledger = Memledger::start(&flags);
    let me = [("container_name", container.name.as_str())];
    memledger.eventually("the families that need capabilities", |metrics| {
        metrics.try_value("memledger_container_process_pss_bytes", &[me[0], ("role", "other")])?;
        metrics.try_value("memledger_container_shm_size_bytes", &me)?;
        is_up(metrics, "memledger_store_up", &[])?;
        all_up(metrics, &["kmsg"])
    });
    for (set, wanted) in [("CapEff", USED), ("CapPrm", USED), ("CapBnd", USED), ("CapInh", 0), ("CapAmb", 0)]
    {
        let (found, threads) = capabilities_of_threads(&memledger, set);
        assert_eq!(found, wanted, "{set}: {found:x}");
        assert!(threads > 4, "it has more than one thread: {threads}");
    }
    assert_eq!(capabilities_of_threads(&memledger, "NoNewPrivs").0, 1);
    let log = memledger.log();
    assert!(log.contains("kept=chown,dac_override,sys_ptrace,sys_nice,syslog"), "{log}");
    assert!(!log.contains("failed to drop capabilities"), "{log}");
    // doctor drops nothing and reports the capabilities it has
    let (_, text, _) = crate::support::run(&["doctor", &engine.flag()]);
    assert!(text.contains("CAP_SYS_PTRACE") && !text.contains("MISSING  CAP_SYS_PTRACE"), "{text}");
}

/// Returns the files of a state directory.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Returns true for the files that SQLite keeps beside an open database.
fn is_sqlite_companion(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "sqlite3-journal")
}

#[test]
fn root_leaves_no_root_owned_files_in_another_users_state() {
    if u64::from_str_radix(&line_of("/proc/self/status", "CapEff"), 16).unwrap() & 1 == 0 {
        return skip("the tests have no CAP_CHOWN");
    }
    let state = tempfile::tempdir().unwrap();
    let path = format!("--state.path={}", state.path().display());
    let serve = || Memledger::start(&["--docker.socket=", "--podman.socket=", &path]);
    let first = serve();
    first.eventually("the store", |metrics| is_up(metrics, "memledger_store_up", &[]));
    first.signal("TERM");
    let _ = first.wait();
    // chown root's files to the other user, as if that user had written them
    for file in files(state.path()).iter().filter(|file| !is_sqlite_companion(file)) {
        chown(file, Some(1234), Some(1234)).unwrap();
    }
    chown(state.path(), Some(1234), Some(1234)).unwrap();
    let memledger = serve();
    memledger
        .eventually("a commit", |metrics| is_up(metrics, "memledger_oom_source_up", &[("source", "vmstat")]));
    memledger.signal("KILL");
    let _ = memledger.wait();
    let companions: Vec<_> =
        files(state.path()).into_iter().filter(|file| is_sqlite_companion(file)).collect();
    assert!(!companions.is_empty(), "SQLite has files beside it: {:?}", files(state.path()));
    for file in companions {
        assert_eq!(std::fs::metadata(&file).unwrap().uid(), 1234, "{}", file.display());
    }
}

#[test]
fn keeps_net_bind_service_for_a_low_port() {
    let own = u64::from_str_radix(&line_of("/proc/self/status", "CapEff"), 16).unwrap();
    if own & 1 << 10 == 0 {
        return skip("the tests have no CAP_NET_BIND_SERVICE");
    }
    // 7 is the unused port of echo; on an address of its own, in case it is used
    let memledger = Memledger::start(&["--web.listen-address=127.10.85.3:7", "--docker.socket="]);
    assert_eq!(capabilities_of_threads(&memledger, "CapEff").0, USED | 1 << 10);
}

#[test]
fn without_setpcap_drops_the_rest_silently() {
    if !can_run_as_nobody() {
        return;
    }
    let memledger = start_as_nobody(&["sys_ptrace", "sys_admin", "net_raw"], NOBODY, &["--docker.socket="]);
    assert_eq!(capabilities_of_threads(&memledger, "CapEff").0, 1 << 19);
    assert_eq!(capabilities_of_threads(&memledger, "CapPrm").0, 1 << 19);
    assert_eq!(
        capabilities_of_threads(&memledger, "NoNewPrivs").0,
        1,
        "so that the bounding set cannot be gained"
    );
    assert!(!memledger.log().contains("failed to drop capabilities"), "{}", memledger.log());
}

#[test]
fn systemd_unit_has_the_documented_exposure_score() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd/memledger.service");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("SECURITY.md");
    let analyzed = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold=33"])
        .arg(unit)
        .output();
    let Ok(analyzed) = analyzed else { return skip("systemd-analyze is not installed") };
    let text = String::from_utf8_lossy(&analyzed.stdout);
    let line = text.lines().last().unwrap_or_default();
    assert!(analyzed.status.success(), "exposure above 3.3: {line}");
    let score =
        line.split_once("memledger.service: ").and_then(|(_, rest)| rest.split(' ').next()).expect("a score");
    let documented = std::fs::read_to_string(docs).unwrap();
    assert!(documented.contains(&format!("scores {score} ")), "SECURITY.md does not say {score}");
}
