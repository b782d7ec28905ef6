//! Measures how reading a process's files affects other processes when the kernel OOM-kills that process.
//!
//! A cgroup at its limit with two processes: the victim, and one that allocates and frees memory all the time. While a reader
//! has a reference to the memory of the victim, its memory is not freed, and the kernel kills the second process too.
//! `make bench` counts how often, with a reader that reads one file of the victim in a loop, which is the worst case, and
//! writes its part of docs/performance.md. Needs root.

mod document;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const RUNS: usize = 20;
const LIMIT_MIB: usize = 600;
/// The memory that the second process allocates and frees.
const CHURN_MIB: usize = 250;
/// The readers, with the files that each reads in a loop.
const READERS: [(&str, &[&str]); 5] = [
    ("nothing is read", &[]),
    ("`statm`, `stat`, `comm`, `cgroup`", &["statm", "stat", "comm", "cgroup"]),
    ("`status`, `maps`", &["status", "maps"]),
    ("`cmdline`", &["cmdline"]),
    ("`smaps_rollup`", &["smaps_rollup"]),
];

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The memory cgroup of the bench; drop removes it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Outcome<Self> {
        let (v1, v2) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let (root, limit) = if v1.is_dir() { (v1, "memory.limit_in_bytes") } else { (v2, "memory.max") };
        let this = Self(root.join(format!("memledger-bench-{}", std::process::id())));
        std::fs::create_dir(&this.0)?;
        std::fs::write(this.0.join(limit), (LIMIT_MIB << 20).to_string())?;
        Ok(this)
    }

    fn pids(&self) -> Outcome<Vec<u32>> {
        let text = std::fs::read_to_string(self.0.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Returns the program of the tests that allocates memory.
fn hog() -> Outcome<PathBuf> {
    let cache = Command::new("tests/setup/setup.sh").arg("cache").output()?.stdout;
    let hog = Path::new(String::from_utf8(cache)?.trim()).join("hog/release/hog");
    if hog.is_file() { Ok(hog) } else { Err("run tests/setup/setup.sh hog first".into()) }
}

/// Starts both in the cgroup. Returns the second process, which is the parent of the victim, and the victim's pid.
fn start(hog: &Path, cgroup: &Cgroup) -> Outcome<(Child, u32)> {
    let script = "echo $$ > \"$1\"; exec \"$2\" spawn=1:score=1000,eat churn=\"$3\"";
    let mut parent = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(cgroup.0.join("cgroup.procs"))
        .arg(hog)
        .arg(CHURN_MIB.to_string())
        .stdout(Stdio::null())
        .spawn()?;
    for _ in 0..500 {
        if let Some(pid) = cgroup.pids()?.into_iter().find(|pid| *pid != parent.id()) {
            return Ok((parent, pid));
        }
        std::thread::sleep(Duration::from_millis(1)); // a bench measures time
    }
    let _ = parent.kill();
    Err("the victim did not start".into())
}

/// Returns true if the kernel killed both.
fn both_are_killed(hog: &Path, cgroup: &Cgroup, files: &[&str]) -> Outcome<bool> {
    let (mut parent, pid) = start(hog, cgroup)?;
    let status = std::thread::scope(|scope| {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        if !files.is_empty() {
            scope.spawn(move || while files.iter().all(|file| std::fs::read(folder.join(file)).is_ok()) {});
        }
        parent.wait()
    })?;
    Ok(!status.success())
}

fn part() -> Outcome<String> {
    let (hog, cgroup) = (hog()?, Cgroup::new()?);
    let mut rows = String::new();
    for (name, files) in READERS {
        eprintln!("{name} ...");
        let mut both = 0;
        for _ in 0..RUNS {
            both += usize::from(both_are_killed(&hog, &cgroup, files)?);
        }
        rows.push_str(&format!("| {name} | {both} of {RUNS} |\n"));
    }
    Ok(format!(
        "{}\n\nA cgroup with a limit of {LIMIT_MIB} MiB, a victim, and another process that allocates and frees \
         {CHURN_MIB} MiB all the time. A reader reads files of the victim in a loop until it \
         has ended: the worst case. See [decision 0017](decisions/0017-nothing-holds-on-to-memory-that-runs-out.md) for \
         what memledger does about it.\n\n| read of the victim | the kernel killed both |\n| --- | --- |\n{rows}",
        document::HEADINGS[4],
    ))
}

fn main() -> Outcome<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    Ok(document::write(&part()?)?)
}
