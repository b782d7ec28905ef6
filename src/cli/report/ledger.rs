//! The look at what the ledger of OOM kills and exits reads, and at the place where it is kept.
//!
//! Nothing here holds a running memledger up: the kernel log is read through an own opening, the ledger as any reader
//! reads it, and who writes it is asked of the kernel's list of locks, not by taking the lock.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

use super::{CAP_SYSLOG, Check, Look, has_capability};
use crate::clock::Moment;
use crate::collect::kernel_log::{KernelLog, Way};
use crate::collect::oom_cgroups::CgroupCounters;
use crate::collect::oom_counter::OomCounter;
use crate::collect::own_cgroup::Namespace;
use crate::config::{Config, KernelLogChoice};
use crate::discover::Hierarchy;
use crate::ledger::store::{FILE, Query, Reader, StoreError};

/// The file beside the ledger that its one writer holds locked.
const LOCK: &str = "ledger.lock";
/// Events are counted so far; a ledger may hold tens of thousands.
const MOST_COUNTED: usize = 10_000;
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;
const OVERLAY: i64 = 0x794c_7630;

/// Looks at all of them once.
pub fn examine(config: &Config, look: Look) -> [Check; 5] {
    [
        kernel_log(config),
        kernel_counter(config),
        cgroup_counters(config),
        cgroup_namespace(config),
        state(config, look),
    ]
}

/// An error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn kernel_log(config: &Config) -> Check {
    const LOST: &str = "of an OOM kill neither process nor memory nor limit; kills are still counted (kernel counter), but \
                        those in containers that are gone at once may stay unattributed";
    const FIX: &str = "docker run --device /dev/kmsg:/dev/kmsg:r --cap-add SYSLOG; Compose: devices: \
                       [/dev/kmsg:/dev/kmsg:r], cap_add: [SYSLOG]; Kubernetes: capabilities.add: [SYSLOG], then \
                       syslog(2) is used; systemd: AmbientCapabilities=CAP_SYSLOG; privileged is not needed";
    let name = "kernel log";
    let ways: &[Way] = match config.oom.kernel_log {
        KernelLogChoice::Auto => &[Way::Device, Way::Syslog],
        KernelLogChoice::Device => &[Way::Device],
        KernelLogChoice::Syslog => &[Way::Syslog],
        KernelLogChoice::Off => {
            return Check::none(name, "not read (--oom.kernel-log=off)", LOST, "--oom.kernel-log=auto");
        }
    };
    let mut refused = Vec::new();
    for way in ways {
        match (KernelLog::open(&config.roots, *way), way) {
            (Ok(_), Way::Device) => return Check::good(name, "/dev/kmsg can be read").detail(),
            (Ok(_), Way::Syslog) => {
                let why = refused.first().map_or_else(String::new, |error| format!(" ({error})"));
                return Check::good(name, format!("syslog(2) in place of /dev/kmsg{why}")).weaker(
                    "a kill is noticed up to 1 s later instead of at once",
                    "docker run --device /dev/kmsg:/dev/kmsg:r; Compose: devices: [/dev/kmsg:/dev/kmsg:r]",
                );
            }
            (Err(error), _) => refused.push(chain(&error)),
        }
    }
    let mut found = refused.join("; ");
    if !has_capability(CAP_SYSLOG) && is_restricted(config) {
        found.push_str("; kernel.dmesg_restrict is 1 and CAP_SYSLOG is not there");
    }
    Check::bad(name, found, LOST, FIX)
}

/// The kernel shows its log only to those with CAP_SYSLOG.
fn is_restricted(config: &Config) -> bool {
    let value = std::fs::read(config.roots.proc.join("sys/kernel/dmesg_restrict")).unwrap_or_default();
    value.trim_ascii() == b"1"
}

fn kernel_counter(config: &Config) -> Check {
    let name = "kernel counter";
    match OomCounter::open(&config.roots).and_then(|mut counter| counter.read()) {
        Ok(kills) => {
            Check::good(name, format!("oom_kill of /proc/vmstat: {kills} since this machine's boot")).detail()
        }
        Err(error) => Check::bad(
            name,
            chain(&error),
            "a kill whose record the kernel log has lost is not counted",
            "Linux 4.13 or later; the host's /proc readable at --path.procfs",
        ),
    }
}

fn cgroup_counters(config: &Config) -> Check {
    const LOST: &str =
        "kills that come faster than the kernel names their cgroup (ten in 5 s) may stay unattributed";
    let name = "cgroup counters";
    let Ok(hierarchy) = Hierarchy::detect(&config.roots) else {
        return Check::bad(name, "no cgroups, see above", LOST, "see cgroups").detail();
    };
    let (readings, outcome) = CgroupCounters::new(&hierarchy).sweep(Moment::now());
    match outcome {
        Ok(()) => Check::good(name, format!("oom_kill of {} cgroups of containers", readings.len())).detail(),
        Err(error) => Check::bad(
            name,
            chain(&error),
            LOST,
            "mount the host's /sys/fs/cgroup read-only, set --path.cgroupfs to it, and let memledger read it",
        ),
    }
}

/// Seen as the ledger sees it.
fn cgroup_namespace(config: &Config) -> Check {
    let name = "cgroup namespace";
    let hierarchy = Hierarchy::detect(&config.roots).ok();
    match Namespace::detect(&config.roots, hierarchy.as_ref()) {
        Ok(Namespace::Own(root)) => {
            let root = root.display();
            Check::good(name, format!("one of its own, at /{root}: paths are made the host's")).detail()
        }
        Ok(Namespace::Unknown) => {
            Check::good(name, "one of its own: paths in /proc/PID/cgroup are not the host's").weaker(
                "a killed process of the host whose cgroup the kernel log does not name stays unattributed",
                "the host's /sys/fs/cgroup at --path.cgroupfs, and the host's pid namespace; or docker run \
                 --cgroupns=host; Compose: cgroup: host",
            )
        }
        Ok(Namespace::Host) => Check::good(name, "the host's, as far as /proc/1/cgroup tells").detail(),
        Err(error) => Check::none(
            name,
            format!("cannot be told: {}: {error}", config.roots.process(1).join("cgroup").display()),
            "whose a killed process was is not told by /proc",
            "the host's /proc readable at --path.procfs, and the host's pid namespace",
        ),
    }
}

fn state(config: &Config, look: Look) -> Check {
    const LOST: &str = "counts begin anew and events are forgotten when memledger starts again";
    const FIX: &str = "docker run -v memledger:/var/lib/memledger; Compose: volumes: [memledger:/var/lib/memledger]; \
                       systemd: StateDirectory=memledger; or another directory with --state.path";
    let name = "state path";
    let Some(directory) = &config.state.path else {
        let found = "the ledger is in memory (--state.path is empty)";
        return Check::none(name, found, LOST, "--state.path=/var/lib/memledger, on a volume");
    };
    let mut found = directory.display().to_string();
    if let Err(why) = writable(directory) {
        return Check::bad(name, format!("{found}: {why}"), LOST, FIX);
    }
    if look == Look::Full {
        match events(directory) {
            Ok(text) => found = format!("{found}: {text}{}", written_by(config, directory)),
            Err(error) => return Check::bad(name, chain(&error), LOST, FIX),
        }
    }
    match kept_by_nobody(directory) {
        Some(kind) => Check::good(name, format!("{found}; {kind}")).weaker(LOST, FIX),
        None => Check::good(name, found),
    }
}

/// The directory, or the one in which it will be made.
fn existing(directory: &Path) -> PathBuf {
    let found = directory.ancestors().find(|path| path.as_os_str().is_empty() || path.exists());
    found.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

fn writable(directory: &Path) -> Result<(), String> {
    let place = existing(directory);
    if !place.is_dir() {
        return Err(format!("{} is no directory", place.display()));
    }
    let refused = |what: &Path, errno| Err(format!("{} cannot be written: {errno}", what.display()));
    if let Err(errno) = rustix::fs::access(&place, Access::WRITE_OK | Access::EXEC_OK) {
        return refused(&place, errno);
    }
    for file in [FILE, LOCK].map(|file| directory.join(file)) {
        match rustix::fs::access(&file, Access::WRITE_OK) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(errno) => return refused(&file, errno),
        }
    }
    Ok(())
}

/// What kind of file system does not outlive a restart.
fn kept_by_nobody(directory: &Path) -> Option<&'static str> {
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures")]
    match rustix::fs::statfs(existing(directory)).ok()?.f_type as i64 {
        TMPFS | RAMFS => Some("a tmpfs, which ends with this machine's boot or this container"),
        OVERLAY => Some("the overlay of a container, which ends with it"),
        _ => None,
    }
}

fn events(directory: &Path) -> Result<String, StoreError> {
    let reader = match Reader::open(directory) {
        Ok(reader) => reader,
        Err(StoreError::NoLedger { .. }) => return Ok("no ledger yet, it can be made".to_owned()),
        Err(error) => return Err(error),
    };
    let query = Query { most: MOST_COUNTED, ..Query::default() };
    Ok(match reader.bodies(&query)?.len() {
        1 => "1 event".to_owned(),
        MOST_COUNTED => format!("{MOST_COUNTED} events or more"),
        events => format!("{events} events"),
    })
}

/// Who holds the ledger's lock, by the kernel's list of locks. It shows only those of this pid namespace.
fn written_by(config: &Config, directory: &Path) -> String {
    let lock = directory.join(LOCK);
    let Ok(inode) = std::fs::metadata(&lock).map(|file| file.ino()) else { return String::new() };
    let Ok(locks) = std::fs::read_to_string(config.roots.proc.join("locks")) else { return String::new() };
    match holder(&locks, inode) {
        Some(_) => {
            let told = std::fs::read_to_string(lock).unwrap_or_default();
            format!(", written by the memledger that is {}", told.trim())
        }
        None => ", written by nobody that can be seen from here".to_owned(),
    }
}

/// The pid of the process that holds a file's `flock`. `1: FLOCK  ADVISORY  WRITE 4711 fe:00:2099 0 EOF`.
fn holder(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        // a waiting one has an arrow after its number
        let [_, "FLOCK", _, _, pid, file, ..] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        let of = file.rsplit(':').next()?.parse() == Ok(inode);
        of.then(|| pid.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_told_by_the_inode() {
        let locks = "1: FLOCK  ADVISORY  WRITE 4711 fe:00:2099 0 EOF\n2: -> FLOCK ADVISORY WRITE 8 fe:00:7 0 EOF\n\
                     3: POSIX  ADVISORY  READ 9 fe:00:7 128 128\n4: FLOCK  ADVISORY  WRITE 12 00:2f:7 0 EOF\n";
        assert_eq!([2099, 7, 99].map(|inode| holder(locks, inode)), [Some(4711), Some(12), None]);
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_judged_by_the_one_above() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(existing(&dir.path().join("a/b")), dir.path());
        assert_eq!(existing(Path::new("no-such-folder/b")), Path::new("."));
        assert!(writable(&dir.path().join("a/b")).is_ok());
        std::fs::write(dir.path().join("file"), "").expect("written");
        assert!(writable(&dir.path().join("file/b")).is_err_and(|why| why.ends_with("file is no directory")));
    }
}
