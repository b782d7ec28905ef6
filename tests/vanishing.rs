//! Containers, processes and pids that appear and disappear while memledger runs. None of it counts as an error or
//! makes other values wrong.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::cgroups::{TestCgroup, is_v2, new_id, parent};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually, in_v2_guest, reaches};

const MIB: f64 = 1_048_576.0;

/// Ids for the containers of one test: the first 6 digits identify the test, the next 6 make each name unique.
struct TestIds {
    prefix: String,
    next: u32,
}

impl TestIds {
    fn new() -> Self {
        // of a new id, the last 4 digits of the pid and 1 of the count; no other test's id begins with `f`, since a pid
        // has at most 22 bits
        let id = new_id();
        Self { prefix: format!("f{}{}", &id[2..6], &id[11..12]), next: 0 }
    }

    fn id(&mut self) -> String {
        self.next += 1;
        format!("{}{:06x}{:0>52}", self.prefix, self.next, "feed")
    }

    fn include(&self) -> String {
        format!("--container.include=^{}", self.prefix)
    }

    fn memledger(&self) -> Memledger {
        Memledger::start(&[&self.include(), "--docker.socket=", "--podman.socket=", "--pss.interval=1s"])
    }
}

fn container(id: &str) -> TestCgroup {
    TestCgroup::at(&format!("{}/{id}", parent()), id)
}

/// Asserts that no collector failed and that no read error was counted.
fn assert_no_errors(metrics: &Metrics) {
    let collectors = metrics.all("memledger_collector_success", &[]);
    assert!(collectors.len() >= 6, "{collectors:?}");
    assert!(collectors.iter().all(|(_, _, success)| *success == 1.0), "{collectors:?}");
    let errors = metrics.all("memledger_collector_read_errors_total", &[]);
    assert!(errors.len() >= 18, "initialised at 0 for each collector: {errors:?}");
    assert!(errors.iter().all(|(_, _, count)| *count == 0.0), "{errors:?}");
    assert!(metrics.all("memledger_series_dropped_total", &[]).is_empty());
}

/// Returns the number of running containers that memledger shows.
fn shown(metrics: &Metrics) -> f64 {
    metrics.sum("memledger_containers", &[])
}

/// A Python program that uses 32 MiB.
const STEADY: &str = "
import mmap, sys
area = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 32 << 20, 4096):
    area[at] = 1
print('ready', flush=True)
sys.stdin.readline()
";

#[test]
fn short_lived_containers_cause_no_errors_and_keep_others_correct() {
    let mut ids = TestIds::new();
    let steady = container(&ids.id());
    let mut python = Python::start(&steady, STEADY);
    python.line();
    let memledger = ids.memledger();
    let labels = [("container_name", steady.name())];
    memledger.eventually("the steady one's process", |metrics| {
        let count = metrics.sum("memledger_container_processes", &labels);
        if count == 1.0 { Ok(()) } else { Err(format!("{count}")) }
    });
    let (mut cycles, mut max_shown) = (BTreeSet::new(), 0.0_f64);
    reaches("twenty cycles while containers come and go", 20, || {
        // three at once, two with a process that exits by itself or is killed with its cgroup
        let short_lived: Vec<_> = (0..3).map(|_| container(&ids.id())).collect();
        let mut short = Command::new("/bin/sh")
            .args(["-c", "echo $$ > \"$0/cgroup.procs\"; (exit 0) & true"])
            .arg(&short_lived[0].path)
            .stdin(Stdio::null())
            .spawn()
            .expect("sh starts");
        let _long = Python::command(&short_lived[1], &["/bin/sleep", "1000"]);
        short.wait().expect("wait");
        let metrics = memledger.metrics();
        assert_no_errors(&metrics);
        let rss = metrics.value("memledger_container_memory_rss_bytes", &labels);
        assert!((31.0 * MIB..64.0 * MIB).contains(&rss), "{rss}");
        assert_eq!(metrics.sum("memledger_container_processes", &labels), 1.0);
        max_shown = max_shown.max(shown(&metrics));
        cycles.insert(metrics.value("memledger_snapshot_timestamp_seconds", &[]).to_bits());
        cycles.len().min(20)
    });
    assert!(max_shown > 1.0, "the short-lived containers were seen too: {max_shown}");
    memledger.eventually("the steady one alone", |metrics| {
        if shown(metrics) == 1.0 { Ok(()) } else { Err(format!("{}", shown(metrics))) }
    });
    assert_no_errors(&memledger.fresh_metrics());
}

#[test]
fn short_lived_processes_cause_no_errors() {
    let mut ids = TestIds::new();
    let cgroup = container(&ids.id());
    // forks children that exit immediately, in bursts, until a line is sent
    let mut python = Python::start(
        &cgroup,
        "
import os, select, sys
print('ready', flush=True)
count = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(20):
        if os.fork() == 0:
            os._exit(0)
        count += 1
    for _ in range(20):
        os.wait()
sys.stdin.readline()
print(count, flush=True)
sys.stdin.readline()
",
    );
    python.line();
    let memledger = ids.memledger();
    let labels = [("container_name", cgroup.name())];
    let mut cycles = BTreeSet::new();
    reaches("twenty cycles", 20, || {
        let metrics = memledger.metrics();
        assert_no_errors(&metrics);
        assert!(metrics.sum("memledger_container_processes", &labels) <= 21.0);
        cycles.insert(metrics.value("memledger_snapshot_timestamp_seconds", &[]).to_bits());
        cycles.len().min(20)
    });
    let forked: u64 = python.step().parse().expect("a count");
    assert!(forked >= 40, "{forked} forks");
    memledger.eventually("one process", |metrics| {
        let count = metrics.sum("memledger_container_processes", &labels);
        if count == 1.0 { Ok(()) } else { Err(format!("{count}")) }
    });
    assert_no_errors(&memledger.fresh_metrics());
}

#[test]
fn reused_pid_is_another_process() {
    let mut ids = TestIds::new();
    let cgroup = container(&ids.id());
    // clone3 gives a child the requested pid, unless another process of the host has it
    let mut python = Python::start(
        &cgroup,
        "
import ctypes, mmap, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def fork_as(pid):
    SYS_clone3, EEXIST = 435, 17
    requested = (ctypes.c_int32 * 1)(pid)
    # flags, pidfd, child_tid, parent_tid, exit_signal, stack, its size, tls, set_tid, its size, cgroup
    args = (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(requested), 1, 0)
    while True:
        pid = libc.syscall(SYS_clone3, ctypes.byref(args), ctypes.sizeof(args))
        if pid >= 0:
            return pid
        if ctypes.get_errno() != EEXIST:
            raise OSError(ctypes.get_errno(), 'clone3')
        time.sleep(0.01)
def child(fork, size, name):
    (ready, notify) = os.pipe()
    pid = fork()
    if pid == 0:
        libc.prctl(15, ctypes.c_char_p(name), 0, 0, 0)
        area = mmap.mmap(-1, size << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, size << 20, 4096):
            area[at] = 1
        os.write(notify, b'x')
        while True:
            signal.pause()
    os.read(ready, 1)
    return pid
first = child(os.fork, 48, b'first')
print(first, flush=True)
sys.stdin.readline()
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
second = child(lambda: fork_as(first), 1, b'second')
print(second, flush=True)
sys.stdin.readline()
",
    );
    let pid: u64 = python.line().parse().expect("a pid");
    let memledger = ids.memledger();
    let process = |name: &str| {
        eventually(name, || {
            let api = memledger.api();
            let found = api["containers"][0]["processes"].as_array().cloned().unwrap_or_default();
            let process = found.iter().find(|process| process["pid"] == pid);
            let named = process.filter(|process| process["name"] == name);
            named.and_then(|process| process["rss_bytes"].as_f64()).ok_or_else(|| format!("{found:?}"))
        })
    };
    assert!(process("first") >= 48.0 * MIB);
    assert_eq!(python.step().parse::<u64>().expect("a pid"), pid);
    assert!(process("second") < 40.0 * MIB, "and it has a resident size of its own");
    assert_no_errors(&memledger.fresh_metrics());
}

#[test]
fn recreated_cgroup_is_reopened() {
    use std::os::unix::fs::MetadataExt;
    let mut ids = TestIds::new();
    let id = ids.id();
    let first = container(&id);
    let inode = |cgroup: &TestCgroup| std::fs::metadata(&cgroup.path).expect("it is there").ino();
    let (before, mut python) = (inode(&first), Python::start(&first, STEADY));
    python.line();
    let memledger = ids.memledger();
    let name = first.name().to_owned();
    let labels = [("container_name", name.as_str())];
    let rss = |metrics: &Metrics| metrics.try_value("memledger_container_memory_rss_bytes", &labels);
    memledger.eventually("32 MiB", |metrics| {
        rss(metrics).and_then(|rss| if rss >= 31.0 * MIB { Ok(()) } else { Err(format!("{rss}")) })
    });

    drop(python);
    drop(first);
    let second = container(&id);
    assert_ne!(inode(&second), before, "another cgroup under the same path");
    memledger.eventually("an empty container", |metrics| {
        let processes = metrics.sum("memledger_container_processes", &labels);
        rss(metrics)
            .and_then(|rss| if rss < MIB && processes == 0.0 { Ok(()) } else { Err(format!("{rss}")) })
    });

    let mut python = Python::start(&second, STEADY);
    python.line();
    memledger.eventually("32 MiB in the new one", |metrics| {
        let processes = metrics.sum("memledger_container_processes", &labels);
        rss(metrics).and_then(|rss| {
            if rss >= 31.0 * MIB && processes == 1.0 { Ok(()) } else { Err(format!("{rss}")) }
        })
    });
    assert_no_errors(&memledger.fresh_metrics());
}

#[test]
fn cgroup_recreated_between_cycles_starts_a_new_run() {
    let mut ids = TestIds::new();
    let id = ids.id();
    let first = container(&id);
    let mut python = Python::start(&first, STEADY);
    python.line();
    // long enough for the following steps to fall between two cycles, also in the guest; otherwise the test covers the
    // easier case
    let flags = [&ids.include(), "--docker.socket=", "--podman.socket=", "--sample.interval=3s"];
    let memledger = Memledger::start(&flags);
    let name = first.name().to_owned();
    let labels = [("container_name", name.as_str())];
    let start = |metrics: &Metrics| metrics.try_value("memledger_container_start_time_seconds", &labels);
    let peak =
        |metrics: &Metrics, of| metrics.try_value(&format!("memledger_container_memory_{of}_bytes"), &labels);
    let began = memledger.eventually("32 MiB", |metrics| {
        let peak = peak(metrics, "unreclaimable_peak")?;
        if peak >= 31.0 * MIB { start(metrics) } else { Err(format!("{peak}")) }
    });

    drop(python);
    drop(first);
    let second = container(&id);
    let _sleeper = Python::command(&second, &["/bin/sleep", "1000"]);
    memledger.eventually("peaks and a start of its own", |metrics| {
        let (peaks, start) =
            ([peak(metrics, "unreclaimable_peak")?, peak(metrics, "peak")?], start(metrics)?);
        let own = peaks.iter().all(|peak| *peak < 8.0 * MIB) && start > began;
        own.then_some(()).ok_or_else(|| format!("{peaks:?}, {start} after {began}"))
    });
    assert_no_errors(&memledger.metrics());
}

/// No runtime is asked, as where its socket is not mounted.
#[test]
fn container_that_no_runtime_names_has_a_new_run_after_it_was_gone() {
    let mut ids = TestIds::new();
    let id = ids.id();
    let first = container(&id);
    let mut python = Python::start(&first, STEADY);
    python.line();
    let memledger = ids.memledger();
    let name = first.name().to_owned();
    let labels = [("container_name", name.as_str())];
    let unknown = [labels[0], ("reason", "unknown")];
    let exits = |metrics: &Metrics| metrics.try_value("memledger_container_exits_total", &unknown);
    let is_count = |count: Result<f64, String>, wanted: f64| {
        count.and_then(|count| if count == wanted { Ok(()) } else { Err(format!("{count} of {wanted}")) })
    };
    memledger.eventually("the container", |metrics| is_count(exits(metrics), 0.0));

    drop(python);
    drop(first);
    memledger.eventually("its end", |metrics| is_count(exits(metrics), 1.0));
    let second = container(&id);
    let mut python = Python::start(&second, STEADY);
    python.line();
    memledger.eventually("its next run", |metrics| {
        is_count(Ok(metrics.sum("memledger_container_processes", &labels)), 1.0)
    });
    memledger.fresh_metrics(); // a cycle later the ledger knows that run
    drop(python);
    drop(second);
    memledger.eventually("the end of that one", |metrics| is_count(exits(metrics), 2.0));
}

#[test]
fn process_name_may_be_any_bytes() {
    let mut ids = TestIds::new();
    let cgroup = container(&ids.id());
    let mut python = Python::start(
        &cgroup,
        r#"
import ctypes, os, signal, sys
names = [b'\xff', b'\xff\xfe ok', b'q"uo\\te', b'new\nline', b') S 1 (x', b'\xc3\xa4\xe2\x82', b'\t\r\x01', b'']
(ready, notify) = os.pipe()
for name in names:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, ctypes.c_char_p(name), 0, 0, 0)
        os.write(notify, b'x')
        while True:
            signal.pause()
    os.read(ready, 1)
print('ready', flush=True)
sys.stdin.readline()
"#,
    );
    python.line();
    let memledger = ids.memledger();
    let own = std::fs::read_to_string(format!("/proc/{}/comm", python.pid())).expect("comm");
    let mut expected: BTreeSet<_> =
        [r"\xff", r"\xff\xfe ok", "q\"uo\\te", r"new\x0aline", ") S 1 (x", r"ä\xe2\x82", r"\x09\x0d\x01", ""]
            .map(str::to_owned)
            .into();
    expected.insert(own.trim_end().to_owned());
    eventually("the names", || {
        let api = memledger.api();
        let found = api["containers"][0]["processes"].as_array().cloned().unwrap_or_default();
        let names: BTreeSet<_> =
            found.iter().map(|process| process["name"].as_str().expect("text").to_owned()).collect();
        if names == expected && found.len() == 9 { Ok(()) } else { Err(format!("{names:?}")) }
    });
    // parsed strictly by the parser of the tests; the roles come when the command lines were read
    let metrics = memledger.eventually("the processes by role", |metrics| {
        let count = metrics.sum("memledger_container_processes", &[("container_name", cgroup.name())]);
        if count == 9.0 { Ok(metrics.clone()) } else { Err(format!("{count}")) }
    });
    assert_no_errors(&metrics);
}

#[test]
fn shows_and_removes_thousands_of_containers() {
    // creating and removing a cgroup is about ten times slower in the guest
    let many = if in_v2_guest() { 200 } else { 2000 };
    let mut ids = TestIds::new();
    let cgroups: Vec<_> = (0..many).map(|_| container(&ids.id())).collect();
    let memledger = ids.memledger();
    let of = |family: &str, metrics: &Metrics| metrics.all(family, &[]).len();
    reaches("all of them", f64::from(many), || shown(&memledger.metrics()));
    let metrics = memledger.fresh_metrics();
    let each = [("info", 1), ("memory_usage_bytes", 1), ("memory_component_bytes", 5), ("processes", 4)];
    for (family, series) in each {
        let count = of(&format!("memledger_container_{family}"), &metrics);
        assert_eq!(count, many as usize * series, "{family}");
    }
    assert_no_errors(&metrics);
    // of these cgroups: memledger also counts the kills of other tests' containers, each by an open file
    let open = || {
        let links = std::fs::read_dir(format!("/proc/{}/fd", memledger.pid())).expect("it runs");
        let targets = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
        targets.filter(|target| target.to_string_lossy().contains(&format!("/{}", ids.prefix))).count()
    };
    assert!(open() >= many as usize, "{} files", open());
    drop(cgroups);
    reaches("none of them", 0.0, || shown(&memledger.metrics()));
    reaches("no file of them is open", 0, open);
    assert_eq!(of("memledger_container_memory_usage_bytes", &memledger.fresh_metrics()), 0);
    assert_no_errors(&memledger.fresh_metrics());
}

#[test]
fn finds_ids_in_every_layout_and_merges_nested_containers() {
    let mut ids = TestIds::new();
    let tree = format!("{}/tree-{}", parent(), &ids.id()[..12]);
    let layouts = [
        ("docker/ID", "docker"),
        ("system.slice/docker-ID.scope", "docker"),
        ("kubepods/burstable/pod1b2c-3d/ID", "unknown"),
        (
            "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1b.slice/cri-containerd-ID.scope",
            "containerd",
        ),
        ("kubepods.slice/kubepods-pod1b.slice/crio-ID.scope", "cri-o"),
        ("system.slice/containerd.service/kubepods-burstable-pod1b.slice:cri-containerd:ID", "containerd"),
        ("machine.slice/libpod-ID.scope/container", "podman"),
        ("libpod_parent/libpod-ID", "podman"),
        ("default/ID", "unknown"),
    ];
    let mut cgroups = Vec::new();
    let mut expected = BTreeSet::new();
    let make = |cgroups: &mut Vec<TestCgroup>, layout: &str, id: &str| {
        cgroups.push(TestCgroup::at(&format!("{tree}/{}", layout.replace("ID", id)), id));
    };
    for (layout, runtime) in layouts {
        let id = ids.id();
        make(&mut cgroups, layout, &id);
        expected.insert((id[..12].to_owned(), id, runtime.to_owned()));
    }
    // monitors; and without its engine's word, what a user can make
    for layout in [
        "machine.slice/libpod-conmon-ID.scope",
        "system.slice/crio-conmon-ID.scope",
        "user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope",
        "slurm/uid_1000/job_1/step_0/task_0/ID",
    ] {
        make(&mut cgroups, layout, &ids.id());
    }
    make(&mut cgroups, "docker/ID", &ids.id()[..63]);
    let outer_id = ids.id();
    expected.insert((outer_id[..12].to_owned(), outer_id.clone(), "docker".to_owned()));
    make(&mut cgroups, &format!("docker/{outer_id}/docker/ID"), &ids.id());
    let inner = cgroups.last().expect("made");
    let mut python = Python::start(inner, STEADY);
    python.line();

    let memledger = ids.memledger();
    memledger.eventually("the containers, each once", |metrics| {
        let info = metrics.all("memledger_container_info", &[]);
        let found: BTreeSet<_> = info
            .iter()
            .map(|(_, labels, _)| {
                (labels["container_name"].clone(), labels["container_id"].clone(), labels["runtime"].clone())
            })
            .collect();
        (found == expected && info.len() == expected.len()).then_some(()).ok_or_else(|| format!("{found:?}"))
    });
    let metrics = memledger.fresh_metrics();
    assert_eq!(shown(&metrics), expected.len() as f64);
    let version = if is_v2() { "2" } else { "1" };
    assert_eq!(metrics.all("memledger_container_info", &[("cgroup_version", version)]).len(), expected.len());
    let outer = [("container_name", &outer_id[..12])];
    assert_eq!(metrics.sum("memledger_container_processes", &outer), 1.0, "the inner one's process");
    let rss = metrics.value("memledger_container_memory_rss_bytes", &outer);
    assert!(rss >= 31.0 * MIB, "the inner one's memory: {rss}");
    let used = metrics.value("memledger_host_memory_component_bytes", &[("component", "containers")]);
    assert!((31.0 * MIB..64.0 * MIB).contains(&used), "counted once: {used}");
    assert_no_errors(&metrics);
    // in reverse order: each removes the levels that it created
    drop(python);
    while cgroups.pop().is_some() {}
}

#[test]
fn processes_hidden_by_proc_are_unknown_not_zero() {
    let cgroup = TestCgroup::container();
    let mut python = Python::start(&cgroup, "print('ready'); input()");
    python.line();
    // as with hidepid=2 or ProtectProc=invisible: the cgroup lists pids that this procfs does not show
    let proc = tempfile::tempdir().expect("a folder");
    for file in ["meminfo", "stat", "uptime"] {
        let text = std::fs::read(Path::new("/proc").join(file)).expect("procfs");
        std::fs::write(proc.path().join(file), text).expect("copied");
    }
    let procfs = format!("--path.procfs={}", proc.path().display());
    let memledger = Memledger::start(&["--docker.socket=", "--podman.socket=", &cgroup.include(), &procfs]);
    let metrics = memledger.fresh_metrics();
    let labels = [("container_name", cgroup.name())];
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "process")]), 0.0);
    for family in ["memledger_container_processes", "memledger_container_process_rss_bytes"] {
        assert!(metrics.all(family, &labels).is_empty(), "{family}: unknown is not 0");
    }
    assert!(
        metrics.value("memledger_container_memory_usage_bytes", &labels) > 0.0,
        "other metrics are still present"
    );
}
