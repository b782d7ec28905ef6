//! Scenes of the OOM ledger: real containers with processes that the kernel kills, and the resulting ledger.
//!
//! Every memledger of every test sees all kills of this kernel, and tests run in parallel. So a scene gives its
//! processes a name that no other test has ([`Scene::tag`]), reads the kernel log itself for their kills, and
//! checks only its own containers and processes in the ledger. [`Ledger::matches_kernel_count`] is the only check of the whole
//! host, and tolerates the kills of other tests.

pub mod ledger;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memledger::clock::Timestamp;

use super::cgroups::{self, TestCgroup};
use super::docker::{Container, Engine, PrivateEngine, unique};
use super::python::Python;
use super::{Memledger, OwnedChild, eventually, in_v2_guest, reaches, skip};

pub use ledger::Ledger;

pub const HOST_KILLS: &str = "memledger_host_oom_kills_total";
pub const DUPLICATES: &str = "memledger_oom_duplicate_lines_total";
pub const GAPS: &str = "memledger_oom_kills_without_record_total";
pub const UNATTRIBUTED: &str = "memledger_oom_kills_unattributed_total";
pub const SOURCE_UP: &str = "memledger_oom_source_up";
pub const KILLS: &str = "memledger_container_oom_kills_total";
pub const EXITS: &str = "memledger_container_exits_total";
pub const RESTARTS: &str = "memledger_container_restarts_total";

/// Memory of a container that is to be killed: enough for runc, and exhausted in a few milliseconds.
const LIMIT: &str = "--memory=16m";

/// Returns the path of the program that eats memory, `tests/hog`: `MEMLEDGER_TEST_HOG`, in the guest beside the test
/// executable.
pub fn hog() -> Option<PathBuf> {
    let beside = || std::env::current_dir().ok().map(|folder| folder.join("hog"));
    let path = std::env::var_os("MEMLEDGER_TEST_HOG").map(PathBuf::from).or_else(beside)?;
    if path.is_file() {
        return Some(path);
    }
    skip("MEMLEDGER_TEST_HOG is not set; run tests/setup/setup.sh and load its env file");
    None
}

/// Returns the kernel's count of OOM kills since boot.
pub fn oom_kills() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").expect("vmstat");
    let value = text.lines().find_map(|line| line.strip_prefix("oom_kill ")).expect("oom_kill");
    value.trim().parse().expect("a number")
}

/// Waits until five seconds have passed without a kill: the kernel logs the cgroups of ten in that time, and the test before may have had
/// more. For tests with nothing beside them, whose kills are attributed by that line alone.
pub fn wait_for_cgroups_in_the_log() {
    let mut last = (oom_kills(), Timestamp::now());
    eventually("five seconds without a kill", || {
        let (kills, now) = (oom_kills(), Timestamp::now());
        if kills != last.0 {
            last = (kills, now);
        }
        let quiet = now.since(last.1);
        if quiet > Duration::from_millis(5_100) { Ok(()) } else { Err(format!("{quiet:?}")) }
    });
}

/// Writes a line to the kernel log as any privileged user can. The kernel marks it as from user space.
pub fn write_kernel_log(line: &str) {
    // opened for each line: writes through one open file are rate limited
    std::fs::write("/dev/kmsg", line).expect("/dev/kmsg is written");
}

/// Returns the seconds since this machine started.
pub fn uptime() -> f64 {
    let text = std::fs::read_to_string("/proc/uptime").expect("it");
    text.split(' ').next().and_then(|seconds| seconds.parse().ok()).expect("seconds")
}

/// Overwrites the whole kernel log with irrelevant lines.
pub fn flood_kernel_log() {
    let line = "a line of a test that fills the kernel log; ".repeat(20);
    for _ in 0..400 {
        write_kernel_log(&line);
    }
}

/// The kills of the processes with one name in the kernel log.
#[derive(Clone, Default)]
struct KernelKills {
    /// Pids in the records of kills.
    killed: Arc<Mutex<Vec<u32>>>,
    /// Pids in the lines with the cgroup, of which there are ten in five seconds.
    named: Arc<Mutex<Vec<u32>>>,
}

impl KernelKills {
    /// Starts a thread that reads the log for as long as the test runs; earlier kills are not seen.
    fn of(tag: &str) -> Self {
        let mut log = std::fs::File::options().read(true).open("/dev/kmsg").expect("root reads /dev/kmsg");
        std::io::Seek::seek(&mut log, std::io::SeekFrom::End(0)).expect("seek");
        let (this, needle, task) = (Self::default(), format!(" ({tag}) "), format!(",task={tag},pid="));
        let (killed, named) = (Arc::clone(&this.killed), Arc::clone(&this.named));
        std::thread::spawn(move || {
            let _ = rustix::process::nice(-10); // the kernel's buffer holds the records of about 30 kills
            let mut record = vec![0; 32 << 10];
            loop {
                // EPIPE after an overrun: the next read continues
                let Ok(read) = log.read(&mut record) else { continue };
                let text = String::from_utf8_lossy(&record[..read]);
                if let Some((_, rest)) = text.split_once(&task) {
                    let pid = rest.split(',').next().and_then(|pid| pid.parse().ok()).expect("a pid");
                    named.lock().expect("no holder panics").push(pid);
                    continue;
                }
                let ours = text.split_once(";Memory cgroup out of memory: Killed process ");
                let ours = ours.or_else(|| text.split_once(";Out of memory: Killed process "));
                let Some((head, rest)) = ours.filter(|(_, rest)| rest.contains(&needle)) else { continue };
                let facility: u32 = head.split(',').next().and_then(|p| p.parse().ok()).expect("a prefix");
                let pid = rest.split(' ').next().and_then(|pid| pid.parse().ok()).expect("a pid");
                if facility >> 3 == 0 {
                    killed.lock().expect("no holder panics").push(pid);
                }
            }
        });
        this
    }

    fn pids(&self) -> Vec<u32> {
        self.killed.lock().expect("no holder panics").clone()
    }
}

/// The environment of one test.
pub struct Scene {
    pub engine: Engine,
    /// Prefix of the names of all its containers.
    pub name: String,
    /// Name of all its processes that eat memory.
    pub tag: String,
    folder: tempfile::TempDir,
    truth: KernelKills,
    /// The kernel's count before and after the start of the scene's first memledger that keeps its state.
    began: Mutex<Option<(u64, u64)>>,
}

impl Scene {
    /// Creates a scene on the shared engine; returns `None`, and prints the reason, if something is missing.
    pub fn new(what: &str) -> Option<Self> {
        Engine::shared().and_then(|engine| Self::on(engine, what))
    }

    /// Creates a scene with a Docker daemon of its own, which the test may stop.
    pub fn with_private_docker(what: &str) -> Option<(PrivateEngine, Self)> {
        let shared = Engine::shared()?;
        let mut private = PrivateEngine::new();
        private.start();
        private.load_from(&shared);
        let scene = Self::on(private.engine.clone(), what)?;
        Some((private, scene))
    }

    /// Creates a scene on this engine.
    fn on(engine: Engine, what: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let hog = hog()?;
        let tag = format!("h{:x}.{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::Builder::new().prefix("mlt-oom-").tempdir().expect("a folder");
        for part in ["control", "state", "bin"] {
            std::fs::create_dir(folder.path().join(part)).expect("a folder");
        }
        // until it sets a name, a process has the name of its file
        std::fs::copy(hog, folder.path().join("bin").join(&tag)).expect("a copy");
        let (truth, name, began) = (KernelKills::of(&tag), unique(what), Mutex::default());
        Some(Self { engine, name, tag, folder, truth, began })
    }

    /// Returns the state directory of its memledgers that run with [`Scene::state`].
    pub fn state_folder(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Returns the flag for this directory.
    pub fn state(&self) -> String {
        format!("--state.path={}", self.state_folder().display())
    }

    /// Starts a memledger that shows the containers of this scene; its ledger is in memory by default.
    pub fn start_memledger(&self, flags: &[&str]) -> Ledger {
        let include = format!("--container.include=^{}", self.name);
        self.start_memledger_for_all(&[flags, &[include.as_str()]].concat())
    }

    /// Like [`Scene::start_memledger`], but shows what the flags select.
    pub fn start_memledger_for_all(&self, flags: &[&str]) -> Ledger {
        self.start_memledger_through(&[], flags)
    }

    /// Like [`Scene::start_memledger`], but started by a command that executes it, and with only these flags.
    pub fn start_memledger_through(&self, wrapper: &[&str], flags: &[&str]) -> Ledger {
        let docker = self.engine.flag();
        let mut all = vec![docker.as_str(), "--podman.socket="];
        let keeps_state = flags.iter().any(|flag| flag.starts_with("--state.path"));
        if !keeps_state {
            all.push("--state.path=");
        }
        all.extend(flags);
        let before = oom_kills();
        let memledger = Memledger::start_through(wrapper, &all);
        let mut began = (before, oom_kills());
        if keeps_state {
            began = *self.began.lock().expect("no holder panics").get_or_insert(began);
        }
        Ledger { memledger, began }
    }

    /// Returns the name of one of its containers.
    pub fn container_name(&self, what: &str) -> String {
        format!("{}-{what}", self.name)
    }

    fn flags(&self, more: &[&str]) -> Vec<String> {
        let mut flags: Vec<String> = more.iter().map(|&flag| flag.to_owned()).collect();
        if !more.iter().any(|flag| flag.starts_with("--memory")) {
            flags.push(LIMIT.to_owned());
        }
        flags.push(format!("--env=HOG_NAME={}", self.tag));
        flags.push(format!("--env=HOG_EXE=/hogs/{}", self.tag));
        flags.push(format!("--volume={}:/hog:ro", self.hog().display()));
        flags.push(format!("--volume={}:/hogs:ro", self.path("bin").display()));
        flags.push(format!("--volume={}:/control", self.folder.path().join("control").display()));
        flags
    }

    /// Runs a container in the background. A command without a `/` consists of steps of the hog, which is at `/hog`.
    pub fn run(&self, what: &str, flags: &[&str], command: &[&str]) -> Container {
        let flags = self.flags(flags);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        self.engine.run(&self.container_name(what), &flags, &steps(command))
    }

    /// Like [`Scene::run`], but its steps begin when the ledger has the container.
    pub fn run_known(&self, ledger: &Ledger, what: &str, flags: &[&str], command: &[&str]) -> Container {
        let wait = format!("wait=/control/{what}");
        let container = self.run(what, flags, &[&[wait.as_str()], command].concat());
        ledger.knows(&container);
        self.release(what);
        container
    }

    /// Runs a container with `--rm` until it exits, and returns its exit code.
    pub fn run_to_exit(&self, what: &str, command: &[&str]) -> i32 {
        self.end_of(what, command).0
    }

    /// Returns its exit code, and how many children its first process reported as killed.
    fn end_of(&self, what: &str, command: &[&str]) -> (i32, usize) {
        let output = Command::new("docker")
            .args(["-H", &format!("unix://{}", self.engine.socket.display()), "run", "--rm"])
            .args([
                "--label",
                &super::test_label(),
                "--network",
                "none",
                "--name",
                &self.container_name(what),
            ])
            .args(self.flags(&[]))
            .arg(&self.engine.image)
            .args(steps(command))
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .expect("docker runs");
        let printed = String::from_utf8_lossy(&output.stdout);
        let killed =
            printed.lines().filter(|line| line.starts_with("child ") && line.ends_with(" -9")).count();
        (output.status.code().expect("a code"), killed)
    }

    /// Runs `containers` with `--rm`, `at_once` at a time; in each, children are killed one after another, then the
    /// first process: `kills` in all. Returns the expected number of kills of each.
    ///
    /// All kills have happened when it returns: each first process has reported its children, and has been killed
    /// itself. Rarely, the kernel kills the first process although a child has just been killed: then there are fewer
    /// kills, by what it reported and the kernel's counter. The child of that moment may be killed too, unreported: if that is
    /// so in some of several such containers, the numbers of each are ambiguous.
    pub fn burst(&self, containers: usize, kills: usize, at_once: usize) -> BTreeMap<String, usize> {
        let children = format!("seq={}:eat", kills - 1);
        let next = AtomicU32::new(0);
        let cut_short = Mutex::new(Vec::new());
        let before = oom_kills();
        std::thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    while let Some(n) =
                        Some(next.fetch_add(1, Ordering::Relaxed) as usize).filter(|n| *n < containers)
                    {
                        let name = format!("b{n}");
                        let (code, killed) = self.end_of(&name, &[&children, "eat"]);
                        assert_eq!(code, 137, "it was killed");
                        if killed + 1 < kills {
                            let end = (self.container_name(&name), killed + 1);
                            cut_short.lock().expect("no holder panics").push(end);
                        }
                    }
                });
            }
        });
        let mut truth: BTreeMap<_, _> =
            (0..containers).map(|n| (self.container_name(&format!("b{n}")), kills)).collect();
        let cut_short = cut_short.into_inner().expect("no holder panics");
        if cut_short.is_empty() {
            return truth; // the kernel's counter is not needed: other processes may be killed meanwhile
        }
        truth.extend(cut_short.iter().cloned());
        let reported: usize = truth.values().sum();
        let unreported = ((oom_kills() - before) as usize).saturating_sub(reported);
        eprintln!(
            "first processes that were killed before their children: {cut_short:?}, {unreported} unreported"
        );
        match unreported {
            0 => {}
            _ if cut_short.len() == 1 => *truth.get_mut(&cut_short[0].0).expect("one of them") += unreported,
            _ if cut_short.len() == unreported => {
                cut_short.iter().for_each(|(name, _)| *truth.get_mut(name).expect("one of them") += 1);
            }
            _ => panic!("{unreported} kills of {cut_short:?}: it is unknown whose"),
        }
        truth
    }

    /// Runs a hog in a cgroup outside any engine. The kernel may kill it even if the test process is protected.
    pub fn run_in(&self, cgroup: &TestCgroup, steps: &[&str]) -> Python {
        let name = format!("HOG_NAME={}", self.tag);
        let (hog, exe) = (self.hog(), format!("HOG_EXE={}", self.hog().display()));
        let hog = hog.to_str().expect("text");
        Python::command(
            cgroup,
            &[&["/usr/bin/env", name.as_str(), exe.as_str(), hog, "score=0"], steps].concat(),
        )
    }

    /// Runs a hog on the host, outside all containers. It is killed when dropped.
    pub fn run_on_host(&self, steps: &[&str]) -> OwnedChild {
        let hog = Command::new(self.hog()).args(steps).env("HOG_NAME", &self.tag).spawn();
        OwnedChild(hog.expect("the hog starts"))
    }

    /// Returns the path of the hog under the scene's name.
    fn hog(&self) -> PathBuf {
        self.path("bin").join(&self.tag)
    }

    /// Ends a `wait=/control/WHAT`.
    pub fn release(&self, what: &str) {
        std::fs::write(self.folder.path().join("control").join(what), "").expect("a file");
    }

    /// Returns the path of a file of this scene on the host.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns a command that executes another one with another boot id, as after a reboot; otherwise the kernel is the
    /// same.
    pub fn reboot_wrapper(&self) -> Vec<String> {
        let boot = self.path("boot_id");
        std::fs::write(&boot, "01234567-89ab-4cde-8f01-23456789abcd\n").expect("a file");
        let script = r#"mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;
        let mut words = ["unshare", "--mount", "/bin/sh", "-c", script].map(str::to_owned).to_vec();
        words.push(boot.display().to_string());
        words
    }

    /// Waits until the kernel has killed so many processes of the scene, and returns their pids. The deadline is for the next
    /// one of them: how long a hundred take is the host's.
    pub fn wait_for_kills(&self, count: usize) -> Vec<u32> {
        reaches("the kernel's kills", count, || self.truth.pids().len());
        self.truth.pids()
    }

    /// Returns the pids of the kernel's records so far; one that is logged twice appears twice.
    pub fn killed_pids(&self) -> Vec<u32> {
        self.truth.pids()
    }

    /// Returns the pids of the kernel's lines with a cgroup so far.
    pub fn named_pids(&self) -> Vec<u32> {
        self.truth.named.lock().expect("no holder panics").clone()
    }

    /// Returns the number of kills so far.
    pub fn kill_count(&self) -> usize {
        self.truth.pids().len()
    }
}

/// Puts the hog in front of steps of the hog; returns another command unchanged.
fn steps<'a>(command: &[&'a str]) -> Vec<&'a str> {
    match command {
        [first, ..] if first.starts_with('/') && !first.contains('=') => command.to_vec(),
        _ => [&["/hog"], command].concat(),
    }
}

/// Returns true if a container has printed this line.
pub fn has_printed(container: &Container, line: &str) -> bool {
    container.try_docker(&["logs"]).is_ok_and(|log| log.lines().any(|printed| printed == line))
}

/// Returns the directory of a process's cgroup in the memory hierarchy.
pub fn cgroup_of(pid: u32) -> PathBuf {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it runs");
    let v1 = text.lines().find_map(|line| line.split_once(":memory:"));
    let path = v1.map(|(_, path)| path).or_else(|| text.lines().find_map(|line| line.strip_prefix("0::")));
    cgroups::root().join(path.expect("a memory cgroup").trim_start_matches('/'))
}

/// Sets the memory limit of a cgroup by its directory.
pub fn limit(cgroup: &Path, bytes: u64) {
    let file = if cgroups::is_v2() { "memory.max" } else { "memory.limit_in_bytes" };
    std::fs::write(cgroup.join(file), bytes.to_string()).expect("the limit is set");
}

/// A parent for containers, a slice where systemd keeps the cgroups. Removed when dropped, which has to be after its containers
/// have ended.
pub struct CgroupParent {
    /// The topmost cgroup that is its own.
    top: String,
    /// Its folder in the memory hierarchy.
    pub folder: PathBuf,
    /// `--cgroup-parent=...`
    pub flag: String,
}

impl CgroupParent {
    pub fn new(what: &str) -> Self {
        let name = unique(what).replace('-', "_"); // a dash in a slice's name is a level
        let (flag, relative) = if in_v2_guest() {
            (format!("--cgroup-parent={name}.slice"), format!("{name}.slice"))
        } else {
            let relative = format!("{}/{name}", cgroups::parent());
            (format!("--cgroup-parent=/{relative}"), relative)
        };
        Self { folder: cgroups::root().join(&relative), top: relative, flag }
    }

    /// One below others, by its path from a cgroup of its own; not under systemd.
    pub fn below(what: &str, path: &str) -> Self {
        let top = format!("{}/{}", cgroups::parent(), unique(what));
        let relative = format!("{top}/{path}");
        Self { folder: cgroups::root().join(&relative), flag: format!("--cgroup-parent=/{relative}"), top }
    }
}

impl Drop for CgroupParent {
    fn drop(&mut self) {
        cgroups::remove_tree_everywhere(&self.top);
    }
}
