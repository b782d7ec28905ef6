//! The NVML process: what it may do, and that its crash, hang, growth or noise harms nothing else.

use std::process::Command;

use fake_nvml::{Fault, Process, State};

use super::faults::{assert_no_gpu, await_success, success};
use super::mig::{instance, mig_gpu};
use super::{
    Driver, GIB, MEMORY_INFO, MIB, OF_CONTAINER, RESTARTS, UNKILLABLE, USED, assert_stops_in_time,
    await_value, children, gpus, nvml_process, nvml_processes, process_in,
};
use crate::support::cgroups::TestCgroup;
use crate::support::{Memledger, Metrics, binary, eventually, eventually_true, run, skip};

/// The shortest deadline: a process has 1.2 s for its first reading.
const SHORT: [&str; 2] = ["--gpu.interval=50ms", "--gpu.deadline=100ms"];
/// A deadline that a process also meets beside many others.
const LONGER: [&str; 2] = ["--gpu.interval=50ms", "--gpu.deadline=400ms"];

fn kill(pid: u32) {
    // an error means that it has ended
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).output();
}

fn restarts(memledger: &Memledger, reason: &str) -> f64 {
    memledger.metrics().get(RESTARTS, &[("reason", reason)]).unwrap_or(0.0)
}

fn await_restarts(memledger: &Memledger, what: &str, reason: &str, at_least: f64) {
    memledger.eventually(
        &format!("{what}: {at_least} restarts because of {reason}"),
        |metrics| match metrics.try_value(RESTARTS, &[("reason", reason)])? {
            found if found >= at_least => Ok(()),
            found => Err(format!("{found}; {}", memledger.log())),
        },
    );
}

/// Returns the number in a line of `/proc/PID/status`.
fn status(pid: u32, line: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = text.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':')).expect(line);
    value.split_whitespace().next().and_then(|number| number.parse().ok()).expect(line)
}

fn is_mapped(pid: u32, driver: &Driver) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.contains(driver.fake.path().to_str().unwrap())
}

/// Fails unless the GPU families are absent, and the memory of the host and of containers is there.
fn assert_only_gpus_are_missing(metrics: &Metrics, what: &str) {
    assert_eq!(success(metrics), Some(0.0), "{what}");
    assert_no_gpu(metrics);
    assert!(metrics.value("memledger_host_memory_total_bytes", &[]) > 0.0, "{what}");
    assert!(metrics.value("memledger_container_memory_usage_bytes", &[]) > 0.0, "{what}");
    let vmstat = [("source", "vmstat")];
    assert_eq!(metrics.value("memledger_oom_source_up", &vmstat), 1.0, "the ledger continues: {what}");
}

#[test]
fn only_the_process_loads_the_library_and_it_is_restricted() {
    let driver = Driver::new(&gpus(&[GIB; 8]));
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[("gpu", "7")], GIB);
    let pid = nvml_process(&memledger);
    assert!(is_mapped(pid, &driver));
    assert!(!is_mapped(memledger.pid(), &driver));
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let set = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a set");
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    for name in ["CapEff:", "CapPrm:"] {
        assert_eq!(set(name) & !(1 << 1), 0, "{name} at most DAC_OVERRIDE");
    }
    assert_eq!(set("CapInh:") | set("CapAmb:"), 0);
    assert_eq!(status(pid, "NoNewPrivs"), 1);
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let limit = |name: &str| limits.lines().find(|line| line.starts_with(name)).expect("a limit").to_owned();
    assert!(limit("Max data size").contains(&(96 * MIB).to_string()), "{limits}");
    assert!(limit("Max open files").contains(" 1024 "), "{limits}");
    assert!(limit("Max core file size").contains(" 0 "), "{limits}");
    // without the pages of the program, which it shares with memledger
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let private = smaps.lines().filter(|line| line.starts_with("Private_"));
    let private: u64 = private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
    assert!((1..=8 * 1024).contains(&private), "{private} KiB");
    // those of the test's own start may be there too
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let targets = links.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let targets: Vec<_> = targets.map(|target| target.to_string_lossy().into_owned()).collect();
    let sockets: std::collections::BTreeSet<_> =
        targets.iter().filter(|target| target.starts_with("socket:")).collect();
    let of_memledger = ["/proc", "/sys", "anon_inode:", "/dev/kmsg"];
    let leaked = targets.iter().find(|target| of_memledger.iter().any(|prefix| target.starts_with(prefix)));
    assert_eq!((sockets.len(), leaked), (1, None), "{targets:?}");
    // these signals are memledger's, and may reach both
    for signal in ["TERM", "INT", "HUP", "USR1"] {
        assert!(
            Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap().success()
        );
    }
    memledger.fresh_metrics();
    assert_eq!(nvml_process(&memledger), pid, "it ignores them");
    assert_stops_in_time(memledger);
}

/// Returns a GPU with a process, and one under MIG.
fn two_gpus(pid: u32) -> State {
    let mut state = gpus(&[GIB, 0]);
    state.gpus[0].processes = vec![Process::compute(pid, Some(GIB))];
    state.gpus[1] = mig_gpu(1, vec![instance(1, 0, GIB)], vec![]);
    state
}

/// Returns all functions of the library that a start and readings of [`two_gpus`] call.
fn called_functions() -> Vec<String> {
    let mut state = two_gpus(std::process::id());
    state.count_calls = true;
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[("gpu", "0")], GIB);
    let expected =
        ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlEventSetCreate", "nvmlEventSetWait_v2"];
    eventually("a reading after the first", || {
        let calls: Vec<_> = driver.fake.calls().unwrap().into_keys().collect();
        let missing = expected.iter().find(|name| !calls.iter().any(|call| call == *name));
        if missing.is_none() && calls.len() > 30 {
            Ok(calls)
        } else {
            Err(format!("{missing:?} of {calls:?}"))
        }
    })
}

/// Damages each call, each in a memledger of its own: a process that is new, so that calls at its start are reached too.
fn damage_each_call(flags: &[&str], reason: &str, damage: impl Fn(&mut State, &str) + Sync) {
    let symbols = called_functions();
    std::thread::scope(|scope| {
        for part in symbols.chunks(symbols.len().div_ceil(4)) {
            let damage = &damage;
            scope.spawn(move || part.iter().for_each(|symbol| damage_call(symbol, flags, reason, damage)));
        }
    });
}

fn damage_call(symbol: &str, flags: &[&str], reason: &str, damage: impl Fn(&mut State, &str)) {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = two_gpus(python.pid());
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[&container], flags);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    // a ledger that has caught up with the host
    memledger.eventually("the ledger", |metrics| {
        metrics.try_value("memledger_oom_source_up", &[("source", "vmstat")]).map(drop)
    });
    let good = state.clone();
    damage(&mut state, symbol);
    driver.set(&state);
    let before = restarts(&memledger, reason);
    nvml_processes(&memledger).into_iter().for_each(kill);
    await_restarts(&memledger, symbol, reason, before + 2.0); // one may be that of the kill
    // the first reading of each process is complete if the call comes after it
    assert_only_gpus_are_missing(&await_success(&memledger, Some(0.0)), symbol);
    driver.set(&good);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    assert!(!is_mapped(memledger.pid(), &driver), "by memledger itself: {symbol}");
    assert_stops_in_time(memledger);
}

#[test]
fn segmentation_fault_in_any_call_removes_only_gpu_families() {
    damage_each_call(&LONGER, "ended", |state, symbol| {
        state.faults.insert(symbol.into(), Fault::Segfault);
    });
}

#[test]
fn abort_in_any_call_removes_only_gpu_families() {
    damage_each_call(&LONGER, "ended", |state, symbol| {
        state.faults.insert(symbol.into(), Fault::Abort);
    });
}

#[test]
fn hang_in_any_call_removes_only_gpu_families() {
    damage_each_call(&SHORT, "timeout", |state, symbol| {
        state.hang.insert(symbol.into());
    });
}

#[test]
fn hang_removes_gpu_families_within_five_seconds() {
    let mut state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[], &["--gpu.interval=1s", "--gpu.deadline=4s"]); // the defaults
    await_value(&memledger, USED, &[], GIB);
    state.hang.insert(MEMORY_INFO.into());
    driver.set(&state);
    let hung_at = memledger::clock::Timestamp::now().unix_seconds();
    // by the times of the snapshots, however late this test reads them
    let mut last_seen = hung_at;
    memledger.eventually("no GPU", |metrics| {
        let at = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
        match metrics.get(USED, &[]) {
            Some(_) => {
                last_seen = last_seen.max(at);
                Err(format!("{:.1} s after the hang", at - hung_at))
            }
            None => Ok(()),
        }
    });
    assert!(last_seen - hung_at <= 5.0, "{:.1} s", last_seen - hung_at);
    assert_eq!(success(&memledger.fresh_metrics()), Some(0.0));
}

#[test]
fn growth_and_noise_end_only_the_process() {
    let container = TestCgroup::container();
    let _python = process_in(&container);
    let good = gpus(&[GIB]);
    let driver = Driver::new(&good);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, USED, &[], GIB);
    let resident = memledger.anonymous_bytes();
    for (fault, reason) in [(Fault::Grow, "ended"), (Fault::Garbage, "invalid_message")] {
        let mut state = good.clone();
        state.faults.insert(MEMORY_INFO.into(), fault);
        driver.set(&state);
        await_restarts(&memledger, &format!("{fault:?}"), reason, 2.0);
        for pid in nvml_processes(&memledger) {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
            let peak: u64 = peak.and_then(|kib| kib.parse().ok()).unwrap_or(0);
            assert!(peak <= 128 * 1024, "{peak} KiB");
        }
        assert_only_gpus_are_missing(&memledger.fresh_metrics(), &format!("{fault:?}"));
        driver.set(&good);
        await_value(&memledger, USED, &[], GIB);
    }
    let grown = memledger.anonymous_bytes().saturating_sub(resident);
    assert!(grown < 8 * MIB, "memledger itself grew by {grown} bytes");
}

#[test]
fn process_ends_with_a_killed_memledger_also_while_it_hangs() {
    for hangs in [false, true] {
        let mut state = gpus(&[GIB]);
        let driver = Driver::new(&state);
        let memledger = driver.memledger(&[]);
        await_value(&memledger, USED, &[], GIB);
        let pid = nvml_process(&memledger);
        if hangs {
            state.hang.insert(MEMORY_INFO.into());
            state.count_calls = true;
            driver.set(&state);
            eventually_true("a call that hangs", || {
                driver.fake.calls().is_ok_and(|calls| calls.contains_key(MEMORY_INFO))
            });
        }
        memledger.signal("KILL");
        let _ = memledger.wait();
        eventually_true("the end of the NVML process", || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ") // reaped by init
        });
    }
}

#[test]
fn starts_again_after_its_binary_was_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("memledger");
    std::fs::copy(binary(), &program).unwrap();
    let driver = Driver::new(&gpus(&[GIB]));
    let library = format!("--gpu.nvml-library={}", driver.fake.path().display());
    let script = format!("shift; exec {} \"$@\"", program.display());
    let flags = ["--docker.socket=", "--podman.socket=", "--gpu.interval=50ms", &library];
    let memledger = Memledger::start_through(&["/bin/sh", "-c", &script, "sh"], &flags);
    await_value(&memledger, USED, &[], GIB);
    std::fs::write(dir.path().join("new"), "not a program").unwrap();
    std::fs::rename(dir.path().join("new"), &program).unwrap();
    let before = nvml_process(&memledger);
    kill(before);
    eventually_true("another process", || nvml_processes(&memledger).iter().any(|pid| *pid != before));
    await_value(&memledger, USED, &[], GIB);
}

/// Returns the number of open descriptors and of threads.
fn resources(memledger: &Memledger) -> (usize, usize) {
    let count = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", memledger.pid())).unwrap().count();
    (count("fd"), count("task"))
}

/// Returns the time since boot in clock ticks of 10 ms.
fn now_ticks() -> u64 {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    (uptime.split(' ').next().unwrap().parse::<f64>().unwrap() * 100.0) as u64
}

/// Returns when a process was started, if it runs.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// `make soak` sets a higher number.
#[test]
fn many_restarts_leak_nothing() {
    let wanted = std::env::var("MEMLEDGER_TEST_RESTARTS").map_or(50, |text| text.parse().expect("a number"));
    let driver = Driver::new(&gpus(&[GIB]));
    // its ledger in memory would hold the kills of other tests
    let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--oom.kernel-log=off"]);
    await_value(&memledger, USED, &[], GIB);
    let mut before = None;
    for round in 1..=wanted {
        let pid = nvml_process(&memledger);
        let killed = now_ticks();
        kill(pid);
        let other = eventually("another process that reads", || {
            let other = nvml_processes(&memledger).into_iter().find(|other| *other != pid);
            let other = other.ok_or_else(|| "none".to_owned())?;
            let maps = std::fs::read_to_string(format!("/proc/{other}/maps")).unwrap_or_default();
            if maps.contains("libnvidia-ml") { Ok(other) } else { Err("no library".to_owned()) }
        });
        // one that worked for four times the last pause is replaced without a longer pause
        let pause = start_ticks(other).expect("it runs").saturating_sub(killed);
        let enough = now_ticks() + 4 * pause + 20;
        eventually_true("it has worked for long enough", || now_ticks() >= enough);
        if round == wanted.min(10) {
            await_value(&memledger, USED, &[], GIB);
            before = Some((resources(&memledger), memledger.anonymous_bytes()));
        }
    }
    await_value(&memledger, USED, &[], GIB);
    let (resources_before, resident_before) = before.unwrap();
    // a response that ends, or a thread that is idle, is no leak
    eventually("as many descriptors and threads as before", || {
        let (fds, threads) = resources(&memledger);
        let is_like_before = fds <= resources_before.0 + 2 && threads <= resources_before.1 + 2;
        if is_like_before { Ok(()) } else { Err(format!("{fds} {threads}, before {resources_before:?}")) }
    });
    let grown = memledger.anonymous_bytes().saturating_sub(resident_before);
    eprintln!("{grown} bytes more after {wanted} restarts");
    assert!(grown < 4 * MIB, "{grown} bytes more after {wanted} restarts");
    nvml_process(&memledger); // and no zombie
    assert!(!is_mapped(memledger.pid(), &driver), "by memledger itself");
    assert!(restarts(&memledger, "ended") >= wanted as f64);
}

/// A cgroup whose processes do not even end when they are killed, like those that wait in the kernel for a device.
struct Freezer(std::path::PathBuf);

impl Freezer {
    fn new() -> Option<Self> {
        let path = std::path::PathBuf::from("/sys/fs/cgroup/freezer")
            .join(format!("memledger-test-{}", std::process::id()));
        std::fs::create_dir(&path).ok().map(|()| Self(path))
    }

    /// Freezes the child of memledger.
    fn freeze_child(&self, memledger: &Memledger) {
        let read = |file: &str| std::fs::read_to_string(self.0.join(file)).unwrap();
        eventually("a frozen process", || {
            let child = children(memledger.pid()).into_iter().next().ok_or("no process")?.to_string();
            // on a busy machine one that misses its deadline is being replaced
            let text = |error: std::io::Error| format!("{child}: {error}");
            std::fs::write(self.0.join("cgroup.procs"), &child).map_err(text)?;
            std::fs::write(self.0.join("freezer.state"), "FROZEN").unwrap();
            let frozen = read("cgroup.procs");
            let is_frozen = read("freezer.state").trim() == "FROZEN" && frozen.contains(&child);
            if is_frozen { Ok(()) } else { Err(format!("{child} of {frozen:?}")) }
        });
    }

    fn thaw(&self) {
        let _ = std::fs::write(self.0.join("freezer.state"), "THAWED");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        crate::support::holds_in_time(|| std::fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn process_that_cannot_be_killed_is_left_and_counted() {
    let Some(freezer) = Freezer::new() else { return skip("no freezer of cgroup v1") };
    let driver = Driver::new(&gpus(&[GIB]));
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock").display().to_string();
    let listen = format!("--local.socket={socket}");
    let flags = ["--gpu.interval=50ms", "--gpu.deadline=300ms", "--gpu.release-for=1s", &listen];
    let memledger = driver.memledger_with(&[], &flags);
    await_value(&memledger, USED, &[], GIB);
    freezer.freeze_child(&memledger);
    await_value(&memledger, UNKILLABLE, &[], 1);
    await_success(&memledger, Some(0.0));
    for _ in 0..5 {
        memledger.fresh_metrics();
        assert_eq!(nvml_processes(&memledger).len(), 1, "no second one is started");
    }
    let (code, body) = super::driver_release::release(&socket);
    assert_eq!(
        (code, body["closed"].as_bool()),
        (Some(1), Some(false)),
        "the driver is not released: {body}"
    );
    freezer.thaw();
    await_value(&memledger, USED, &[], GIB);
    await_value(&memledger, UNKILLABLE, &[], 0);
    nvml_process(&memledger);
}

#[test]
fn doctor_reports_a_crash_and_a_hang_and_leaves_no_process() {
    let mut state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let library = format!("--gpu.nvml-library={}", driver.fake.path().display());
    let doctor = || run(&["doctor", "--docker.socket=", "--podman.socket=", "--state.path=", &library]).1;
    state.faults.insert(MEMORY_INFO.into(), Fault::Segfault);
    driver.set(&state);
    let output = doctor();
    assert!(output.contains("MISSING  NVML") && output.contains("NVML process failed"), "{output}");
    state.faults.clear();
    state.hang.insert(MEMORY_INFO.into());
    driver.set(&state);
    let output = doctor();
    assert!(output.contains("MISSING  NVML") && output.contains("does not respond within"), "{output}");
    let maps = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let library = driver.fake.path().display().to_string();
    let left: Vec<_> = pids.filter(|pid| maps(pid).contains(&library)).collect();
    assert_eq!(left, Vec::<u32>::new());
}
