//! Checks of the sources and the database of the ledger of OOM kills and exits.
//!
//! Nothing here delays a running memledger: the kernel log is opened separately, the ledger is read as by any reader, and
//! its writer is found in the kernel's list of locks, not by taking the lock.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::directory::{existing, writable};
use super::{CAP_SYSLOG, Check, Verbosity, has_capability};
use crate::clock::Timestamp;
use crate::config::{Config, KernelLogChoice};
use crate::discover::cgroup_tree::CgroupTree;
use crate::discover::{ContainerId, Hierarchy, PathClaim};
use crate::host::KernelFile;
use crate::ledger::sources::cgroup_namespace::CgroupNamespace;
use crate::ledger::sources::cgroup_oom_events::CgroupCounters;
use crate::ledger::sources::kernel_log::{KernelLog, LogBackend};
use crate::ledger::sources::vmstat_oom::OomCounter;
use crate::ledger::store::{FILE, StoreError, StoreReader, files_moved_aside};
use crate::text::error_chain;

/// The lock file of the ledger's only writer.
const LOCK: &str = "ledger.lock";
/// Maximum number of counted events; a ledger may contain tens of thousands.
const MAX_COUNTED: usize = 10_000;
const TMPFS: i64 = 0x0102_1994;
const RAMFS: i64 = 0x8584_58f6;
const OVERLAY: i64 = 0x794c_7630;

/// Checks each of them once.
pub fn run_checks(config: &Config, verbosity: Verbosity) -> [Check; 5] {
    [
        kernel_log(config),
        kernel_counter(config),
        cgroup_counters(config),
        cgroup_namespace(config),
        state(config, verbosity),
    ]
}

fn kernel_log(config: &Config) -> Check {
    const LOST: &str = "OOM kills have neither process nor memory nor limit; they are still counted (kernel counter), but \
                        those in containers that are removed at once may stay unattributed";
    const FIX: &str = "docker run --device /dev/kmsg:/dev/kmsg:r --cap-add SYSLOG; Compose: devices: \
                       [/dev/kmsg:/dev/kmsg:r], cap_add: [SYSLOG]; Kubernetes: capabilities.add: [SYSLOG], then \
                       syslog(2) is used; systemd: AmbientCapabilities=CAP_SYSLOG; privileged is not needed";
    let name = "kernel log";
    let backends: &[LogBackend] = match config.oom.kernel_log {
        KernelLogChoice::Auto => &[LogBackend::Device, LogBackend::Syslog],
        KernelLogChoice::Device => &[LogBackend::Device],
        KernelLogChoice::Syslog => &[LogBackend::Syslog],
        KernelLogChoice::Off => {
            return Check::none(name, "not read (--oom.kernel-log=off)", LOST, "--oom.kernel-log=auto");
        }
    };
    let mut refused = Vec::new();
    for backend in backends {
        match (KernelLog::open(&config.host_paths, *backend), backend) {
            (Ok(_), LogBackend::Device) => return Check::good(name, "/dev/kmsg is readable").detail(),
            (Ok(_), LogBackend::Syslog) => {
                let why = refused.first().map_or_else(String::new, |error| format!(" ({error})"));
                return Check::good(name, format!("syslog(2) instead of /dev/kmsg{why}")).weaker(
                    "a kill is detected up to 1 s later instead of at once",
                    "docker run --device /dev/kmsg:/dev/kmsg:r; Compose: devices: [/dev/kmsg:/dev/kmsg:r]",
                );
            }
            (Err(error), _) => refused.push(error_chain(&error)),
        }
    }
    let mut found = refused.join("; ");
    if !has_capability(CAP_SYSLOG) && is_restricted(config) {
        found.push_str("; kernel.dmesg_restrict is 1 and CAP_SYSLOG is missing");
    }
    Check::bad(name, found, LOST, FIX)
}

/// Returns true if the kernel log is readable only with CAP_SYSLOG.
fn is_restricted(config: &Config) -> bool {
    let value = std::fs::read(config.host_paths.proc.join("sys/kernel/dmesg_restrict")).unwrap_or_default();
    value.trim_ascii() == b"1"
}

fn kernel_counter(config: &Config) -> Check {
    let name = "kernel counter";
    match OomCounter::open(&config.host_paths).and_then(|mut counter| counter.read()) {
        Ok(kills) => {
            Check::good(name, format!("oom_kill of /proc/vmstat: {kills} since the boot of this host"))
                .detail()
        }
        Err(error) => Check::bad(
            name,
            error_chain(&error),
            "a kill whose kernel log record is lost is not counted",
            "Linux 4.13 or later; the host's /proc readable at --path.procfs",
        ),
    }
}

fn cgroup_counters(config: &Config) -> Check {
    const LOST: &str =
        "kills at a higher rate than the kernel logs their cgroup (ten in 5 s) may stay unattributed";
    let name = "cgroup counters";
    let Ok(hierarchy) = Hierarchy::detect(&config.host_paths) else {
        return Check::bad(name, "no cgroups, see above", LOST, "see cgroups").detail();
    };
    let claim = |_: &ContainerId, _: &Path| PathClaim::Possible { user: None };
    let (readings, outcome) = CgroupCounters::new(CgroupTree::new(&hierarchy)).sweep(Timestamp::now(), claim);
    match outcome {
        Ok(()) => Check::good(name, format!("oom_kill of {} cgroups of containers", readings.len())).detail(),
        Err(error) => Check::bad(
            name,
            error_chain(&error),
            LOST,
            "mount the host's /sys/fs/cgroup read-only, set --path.cgroupfs to it, and make it readable for memledger",
        ),
    }
}

/// Checks the cgroup namespace in the same way as the ledger.
fn cgroup_namespace(config: &Config) -> Check {
    let name = "cgroup namespace";
    let hierarchy = Hierarchy::detect(&config.host_paths).ok();
    match CgroupNamespace::detect(&config.host_paths, hierarchy.as_ref()) {
        Ok(CgroupNamespace::Own(root)) => {
            let root = root.display();
            Check::good(name, format!("private, at /{root}: paths are converted to the host's")).detail()
        }
        Ok(CgroupNamespace::Unknown) => {
            Check::good(name, "private: paths in /proc/PID/cgroup are not the host's").weaker(
                "a killed process of the host whose cgroup is not in the kernel log stays unattributed",
                "the host's /sys/fs/cgroup at --path.cgroupfs, and the host's pid namespace; or docker run \
                 --cgroupns=host; Compose: cgroup: host",
            )
        }
        Ok(CgroupNamespace::Host) => Check::good(name, "the host's, according to /proc/1/cgroup").detail(),
        Err(error) => Check::none(
            name,
            format!("unknown: {}: {error}", config.host_paths.process(1).join("cgroup").display()),
            "killed processes cannot be attributed by /proc",
            "the host's /proc readable at --path.procfs, and the host's pid namespace",
        ),
    }
}

fn state(config: &Config, verbosity: Verbosity) -> Check {
    const LOST: &str = "counters restart at 0 and events are lost when memledger restarts";
    const FIX: &str = "docker run -v memledger:/var/lib/memledger; Compose: volumes: [memledger:/var/lib/memledger]; \
                       systemd: StateDirectory=memledger; or another directory with --state.path";
    let name = "state path";
    let Some(directory) = &config.state.path else {
        let found = "the ledger is in memory (--state.path is empty)";
        return Check::none(name, found, LOST, "--state.path=/var/lib/memledger, on a volume");
    };
    let mut found = directory.display().to_string();
    if let Err(why) = writable(directory, &[FILE, LOCK]) {
        return Check::bad(name, format!("{found}: {why}"), LOST, FIX);
    }
    if verbosity == Verbosity::Full {
        match events(directory) {
            Ok(text) => found = format!("{found}: {text}{}", written_by(config, directory)),
            Err(error) => return Check::bad(name, error_chain(&error), LOST, FIX),
        }
        let aside = files_moved_aside(directory).into_iter().map(|path| path.display().to_string());
        let aside: Vec<_> = aside.collect();
        if !aside.is_empty() {
            found = format!(
                "{found}; earlier events and runs are in {}, which this memledger does not read",
                aside.join(", ")
            );
        }
    }
    match kept_by_nobody(directory) {
        Some(kind) => Check::good(name, format!("{found}; {kind}")).weaker(LOST, FIX),
        None => Check::good(name, found),
    }
}

/// Describes the file system of the directory if it does not survive a restart.
fn kept_by_nobody(directory: &Path) -> Option<&'static str> {
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures")]
    match rustix::fs::statfs(existing(directory)).ok()?.f_type as i64 {
        TMPFS | RAMFS => Some("a tmpfs, which is lost at a reboot or with this container"),
        OVERLAY => Some("the overlay of a container, which is lost with it"),
        _ => None,
    }
}

fn events(directory: &Path) -> Result<String, StoreError> {
    let reader = match StoreReader::open(directory) {
        Ok(reader) => reader,
        Err(StoreError::NoLedger { .. }) => return Ok("no ledger yet, it can be created".to_owned()),
        Err(error) => return Err(error),
    };
    let events = match reader.count(MAX_COUNTED)? {
        1 => "1 event".to_owned(),
        MAX_COUNTED => format!("{MAX_COUNTED} events or more"),
        events => format!("{events} events"),
    };
    // a file of an earlier version has no runs until memledger serve has opened it
    Ok(match reader.count_runs() {
        Err(_) | Ok(0) => events,
        Ok(1) => format!("{events}, 1 run"),
        Ok(runs) => format!("{events}, {runs} runs"),
    })
}

/// Describes the holder of the ledger's lock, from the kernel's list of locks, which contains only those of this pid
/// namespace.
fn written_by(config: &Config, directory: &Path) -> String {
    let lock = directory.join(LOCK);
    let Ok(inode) = std::fs::metadata(&lock).map(|file| file.ino()) else { return String::new() };
    let find = |lines: &[u8]| holder(&String::from_utf8_lossy(lines), inode);
    let locks = KernelFile::open(&config.host_paths.proc.join("locks"));
    match locks.and_then(|file| file.find_line(&mut Vec::new(), find)) {
        Err(_) => ", its writer is unknown".to_owned(),
        Ok(Some(_)) => {
            let holder = std::fs::read_to_string(lock).unwrap_or_default();
            format!(", written by the memledger with {}", holder.trim())
        }
        Ok(None) => ", no writer visible from here".to_owned(),
    }
}

/// Returns the pid of the process that holds a file's `flock`. `1: FLOCK  ADVISORY  WRITE 4711 fe:00:2099 0 EOF`.
fn holder(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        // a waiting process has an arrow after its number
        let [_, "FLOCK", _, _, pid, file, ..] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        let of = file.rsplit(':').next()?.parse() == Ok(inode);
        of.then(|| pid.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::events::ContainerRef;
    use crate::ledger::store::{Store, WriteBatch};
    use crate::runs::RunRecord;

    #[test]
    fn finds_the_lock_holder_by_inode() {
        let locks = "1: FLOCK  ADVISORY  WRITE 4711 fe:00:2099 0 EOF\n2: -> FLOCK ADVISORY WRITE 8 fe:00:7 0 EOF\n\
                     3: POSIX  ADVISORY  READ 9 fe:00:7 128 128\n4: FLOCK  ADVISORY  WRITE 12 00:2f:7 0 EOF\n";
        assert_eq!([2099, 7, 99].map(|inode| holder(locks, inode)), [Some(4711), Some(12), None]);
    }

    #[test]
    fn runs_of_the_ledger_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path(), Duration::from_secs(1)).unwrap().store;
        for (id, text) in [(0, "0 events"), (1, "0 events, 1 run"), (2, "0 events, 2 runs")] {
            if id > 0 {
                let subject = ContainerRef { run_number: Some(id), ..ContainerRef::default() };
                let record = RunRecord { subject, ended: Some(1.0), ..RunRecord::default() };
                store.commit(&WriteBatch { runs: [(id, record)].into(), ..WriteBatch::default() }).unwrap();
            }
            assert_eq!(events(folder.path()).unwrap(), text);
        }
    }
}
