//! Finds the processes that have a graphics device open.
//!
//! Only the links in `/proc/PID/fd` show that, with one system call each. A large host has many, and one process may have a
//! million. So the known GPU descriptors are read in every reading, and all others are scanned in turn, one part of each
//! process at a time, within the time budget of a reading: first processes that have a GPU open, which may have opened
//! another one; then new processes; then the rest, each at most every two seconds. No process can use up the time of the
//! others: a device that is opened late is found later.
//!
//! Reading has a time budget too. If it is too short, the cgroups with the fewest descriptors are read first, and processes
//! that were not read completely have no value.
//!
//! A device that a container has under a path outside `/dev/dri` is not found, and its memory stays unattributed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use super::client_memory::{Descriptor, DrmProcessKey};
use super::drm_process::{DrmProcess, FdScan};
use crate::clock::Timestamp;
use crate::collect::gpu::ProcessOwner;
use crate::host::bounds::NAMES;
use crate::host::{Dir, HostPaths, ReadError};

/// The time budgets of the parts of a reading.
#[derive(Clone, Copy, Debug)]
struct Budget {
    /// The scan of other processes in the first reading, and in each one after it.
    scan: (Duration, Duration),
    /// The scan for new devices of processes that have a GPU open.
    rescan: Duration,
    /// The reading of known descriptors.
    read: Duration,
    /// The interval between two scans of a process without a GPU, or without permission.
    rescan_interval: Duration,
    /// Maximum number of descriptors of one process in a single scan.
    max_fds: usize,
}

impl Default for Budget {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self {
            scan: (ms(250), ms(20)),
            rescan: ms(10),
            read: ms(500),
            rescan_interval: ms(2_000),
            max_fds: 4 * 1024,
        }
    }
}

/// The deadline of a budget.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    began: Timestamp,
    budget: Duration,
}

impl Deadline {
    fn now(budget: Duration) -> Self {
        Self { began: Timestamp::now(), budget }
    }

    /// Returns true once the budget is used up.
    pub fn is_over(&self) -> bool {
        Timestamp::now().since(self.began) >= self.budget
    }
}

/// The state that lasts from reading to reading.
#[derive(Debug, Default)]
pub struct FdScanner {
    gpu_processes: BTreeMap<u32, DrmProcess>,
    /// Processes without a known GPU descriptor.
    other_processes: HashMap<u32, OtherProcess>,
    /// Processes that may not be read, and when that was found. They are scanned again too: a pid may have been reused, and
    /// a process may be readable after an exec.
    denied: HashMap<u32, Timestamp>,
    /// The last pid of the scan of all processes.
    cursor: u32,
    /// The last pid of the scan of processes with a GPU.
    gpu_cursor: u32,
    has_scanned: bool,
    buffer: Vec<u8>,
    budget: Budget,
}

/// A process without a known GPU descriptor.
#[derive(Clone, Copy, Debug)]
struct OtherProcess {
    scanned_at: Timestamp,
    /// The position at which its scan continues; 0 if it was completed.
    position: u64,
}

/// The result of one reading.
#[derive(Debug, Default)]
pub struct ScanResult {
    /// The graphics descriptors, each with the name of its node as its process sees it.
    pub descriptors: Vec<(String, Descriptor)>,
    /// The owner of each process.
    pub owners: HashMap<DrmProcessKey, ProcessOwner>,
    /// Processes that use a compute device, whose work the engine statistics do not include.
    pub computing: BTreeSet<DrmProcessKey>,
    /// Processes that were read in part, and their known nodes.
    pub in_part: BTreeMap<DrmProcessKey, BTreeSet<String>>,
    /// The number of processes whose descriptors could be read.
    pub readable: usize,
    /// The number of processes whose descriptors could not be read for lack of permission.
    pub denied: usize,
    /// One entry for each failed read.
    pub read_errors: Vec<&'static str>,
}

impl FdScanner {
    /// Scans for processes that have a GPU open, and reads all known ones.
    ///
    /// # Errors
    /// The processes cannot be listed.
    pub fn scan(&mut self, host_paths: &HostPaths, cgroup_v1: bool) -> Result<ScanResult, ReadError> {
        let pids = self.pids(host_paths)?;
        self.gpu_processes.retain(|pid, _| pids.contains(pid));
        self.other_processes.retain(|pid, _| pids.contains(pid));
        self.denied.retain(|pid, _| pids.contains(pid));
        let mut read_errors = Vec::new();
        self.scan_gpu_processes(&mut read_errors);
        self.scan_other_processes(host_paths, cgroup_v1, &pids, &mut read_errors);
        let mut found = self.read_known();
        found.read_errors.append(&mut read_errors);
        found.readable = self.other_processes.len() + self.gpu_processes.len();
        found.denied = self.denied.len();
        Ok(found)
    }

    /// Reads all known processes again.
    pub fn read_known(&mut self) -> ScanResult {
        let mut found = ScanResult::default();
        let deadline = Deadline::now(self.budget.read);
        for pid in self.reading_order() {
            let Some(process) = self.gpu_processes.get_mut(&pid) else { continue };
            let read = process.read(&mut found, deadline, &mut self.buffer);
            if !matches!(read, Ok(true)) {
                self.gpu_processes.remove(&pid); // scanned as a new process in the next reading
            }
            found.read_errors.extend(read.err().and_then(|error| error.reason_label()));
        }
        found
    }

    /// Returns the pids to read, those of the cgroups with the fewest descriptors first.
    fn reading_order(&self) -> Vec<u32> {
        let mut of_cgroups: HashMap<&str, usize> = HashMap::new();
        for process in self.gpu_processes.values() {
            *of_cgroups.entry(process.cgroup()).or_default() += process.count();
        }
        let weight = |process: &DrmProcess| (of_cgroups.get(&**process.cgroup()).copied(), process.count());
        let mut order: Vec<_> =
            self.gpu_processes.iter().map(|(pid, process)| (weight(process), *pid)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, pid)| pid).collect()
    }

    fn pids(&mut self, host_paths: &HostPaths) -> Result<BTreeSet<u32>, ReadError> {
        let mut pids = BTreeSet::new();
        Dir::open(&host_paths.proc)?.for_each(NAMES.max, &mut self.buffer, |name, _| {
            let number = crate::parse::number(name.as_bytes());
            pids.extend(number.and_then(|pid| u32::try_from(pid).ok()));
        })?;
        Ok(pids)
    }

    /// Scans processes with a GPU for devices that they opened since, in turn.
    fn scan_gpu_processes(&mut self, read_errors: &mut Vec<&'static str>) {
        let deadline = Deadline::now(self.budget.rescan);
        let after = self.gpu_processes.range((Excluded(self.gpu_cursor), Unbounded));
        let before = self.gpu_processes.range((Unbounded, Included(self.gpu_cursor)));
        let order: Vec<u32> = after.chain(before).map(|(pid, _)| *pid).collect();
        for pid in order {
            if deadline.is_over() {
                return;
            }
            self.gpu_cursor = pid;
            let Some(process) = self.gpu_processes.get_mut(&pid) else { continue };
            if let Err(error) = process.scan_for_devices(self.budget.max_fds, &mut self.buffer) {
                read_errors.extend(error.reason_label());
                self.gpu_processes.remove(&pid);
            }
        }
    }

    /// Scans processes without a known GPU: half of the time new ones, then all in turn.
    fn scan_other_processes(
        &mut self,
        host_paths: &HostPaths,
        cgroup_v1: bool,
        pids: &BTreeSet<u32>,
        read_errors: &mut Vec<&'static str>,
    ) {
        let budget = if self.has_scanned { self.budget.scan.1 } else { self.budget.scan.0 };
        self.has_scanned = true;
        let (half, deadline) = (Deadline::now(budget / 2), Deadline::now(budget));
        let is_known = |scanner: &Self, pid: u32| {
            scanner.gpu_processes.contains_key(&pid)
                || scanner.other_processes.contains_key(&pid)
                || scanner.denied.contains_key(&pid)
        };
        for pid in pids.iter().copied().filter(|pid| !is_known(self, *pid)).collect::<Vec<_>>() {
            if half.is_over() {
                break;
            }
            self.scan_process(host_paths, cgroup_v1, pid, read_errors);
        }
        let after = pids.range((Excluded(self.cursor), Unbounded));
        for pid in after.chain(pids.range(..=self.cursor)).copied() {
            if deadline.is_over() {
                return;
            }
            self.cursor = pid;
            if !self.gpu_processes.contains_key(&pid) && self.is_due(pid) {
                self.scan_process(host_paths, cgroup_v1, pid, read_errors);
            }
        }
    }

    fn is_due(&self, pid: u32) -> bool {
        let in_part = self.other_processes.get(&pid).is_some_and(|other| other.position != 0);
        let scanned_at =
            self.other_processes.get(&pid).map(|other| other.scanned_at).or(self.denied.get(&pid).copied());
        in_part
            || scanned_at
                .is_none_or(|scanned_at| Timestamp::now().since(scanned_at) >= self.budget.rescan_interval)
    }

    fn scan_process(
        &mut self,
        host_paths: &HostPaths,
        cgroup_v1: bool,
        pid: u32,
        read_errors: &mut Vec<&'static str>,
    ) {
        let mut scan = FdScan::from(self.other_processes.get(&pid).map_or(0, |other| other.position));
        let from_start = scan.position == 0;
        let scanned = Dir::open(&host_paths.process(pid)).and_then(|dir| {
            let ended = scan.advance(&dir, self.budget.max_fds, &mut self.buffer)?;
            if !scan.has_devices() {
                return Ok(None);
            }
            let is_complete = from_start && ended;
            DrmProcess::of(dir, pid, cgroup_v1, &scan, is_complete, &mut self.buffer).map(Some)
        });
        let (scanned_at, position) = (Timestamp::now(), scan.position);
        self.other_processes.remove(&pid);
        let was_denied = self.denied.remove(&pid).is_some();
        match scanned {
            Ok(Some(process)) => drop(self.gpu_processes.insert(pid, process)),
            Ok(None) => {
                self.other_processes.insert(pid, OtherProcess { scanned_at, position });
            }
            Err(error) if error.is_gone() => {
                self.other_processes.insert(pid, OtherProcess { scanned_at, position: 0 });
            }
            Err(error) if error.reason_label() == Some("permission") => {
                self.denied.insert(pid, scanned_at);
                // counted once for each process, not in each scan
                read_errors.extend((!was_denied).then_some("permission"));
            }
            Err(error) => read_errors.extend(error.reason_label()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::drm::DrmClient;

    /// A procfs in a directory.
    struct Host(tempfile::TempDir);

    /// Returns the fdinfo of a client.
    fn client(id: u32) -> String {
        format!(
            "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{id}\ndrm-resident-vram:\t5\n"
        )
    }

    impl Host {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn host_paths(&self) -> HostPaths {
            HostPaths { proc: self.0.path().to_path_buf(), ..HostPaths::default() }
        }

        /// Creates a process with these descriptors: number, target, and fdinfo.
        fn process(&self, pid: u32, comm: &str, descriptors: &[(u32, &str, &str)]) {
            let folder = self.0.path().join(pid.to_string());
            let _ = std::fs::remove_dir_all(&folder);
            for below in ["fd", "fdinfo"] {
                std::fs::create_dir_all(folder.join(below)).unwrap();
            }
            let zeros = "0 ".repeat(17);
            std::fs::write(folder.join("stat"), format!("{pid} ({comm}) S 1 {zeros}{pid}00 0\n")).unwrap();
            std::fs::write(folder.join("cgroup"), "0::/docker/abc\n").unwrap();
            for (number, target, info) in descriptors {
                std::os::unix::fs::symlink(target, folder.join(format!("fd/{number}"))).unwrap();
                if !info.is_empty() {
                    std::fs::write(folder.join(format!("fdinfo/{number}")), info).unwrap();
                }
            }
        }
    }

    /// Returns the pid, node and client id of each descriptor.
    fn clients(found: &ScanResult) -> Vec<(u32, &str, String)> {
        assert_eq!(found.read_errors, Vec::<&str>::new());
        let id = |client: &DrmClient| {
            String::from_utf8_lossy(client.id.as_deref().unwrap_or_default()).into_owned()
        };
        let mut all: Vec<_> =
            found.descriptors.iter().map(|(node, d)| (d.process.pid, &**node, id(&d.client))).collect();
        all.sort();
        all
    }

    #[test]
    fn finds_gpu_processes_and_reads_only_their_devices() {
        let host = Host::new();
        host.process(5, "sh", &[(0, "/dev/null", "pos: 0\n"), (1, "pipe:[7]", ""), (2, "/dev/driver", "")]);
        host.process(
            7,
            "train) R 1",
            &[
                (3, "/dev/dri/renderD128", &client(1)),
                (4, "/dev/kfd", "pos: 0\n"),
                (9, "/dev/dri/card0", &client(2)),
            ],
        );
        host.process(8, "top", &[(3, "/dev/dri/renderD128 (deleted)", "pos: 0\n")]);
        std::fs::create_dir(host.0.path().join("sys")).unwrap();
        let mut scanner = FdScanner::unlimited();
        let found = scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!(clients(&found), [(7, "card0", "2".into()), (7, "renderD128", "1".into())]);
        let key = DrmProcessKey { start_ticks: 700, pid: 7 };
        let owner =
            ProcessOwner { start_ticks: 700, comm: "train) R 1".into(), cgroup: "/docker/abc".into() };
        assert_eq!(found.owners.get(&key), Some(&owner));
        assert_eq!(found.computing, BTreeSet::from([key]));
        assert_eq!((found.readable, found.denied), (3, 0));
    }

    #[test]
    fn forgets_a_process_that_closes_its_device_or_ends() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut scanner = FdScanner::unlimited();
        assert_eq!(clients(&scanner.scan(&host.host_paths(), false).unwrap()).len(), 1);
        std::fs::write(host.0.path().join("7/fdinfo/3"), client(4)).unwrap();
        assert_eq!(clients(&scanner.read_known()), [(7, "renderD128", "4".into())]);
        std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
        assert_eq!(clients(&scanner.read_known()), []);
        host.process(8, "train", &[(3, "/dev/dri/renderD128", &client(5))]);
        assert_eq!(
            clients(&scanner.scan(&host.host_paths(), false).unwrap()),
            [(8, "renderD128", "5".into())]
        );
        std::fs::remove_dir_all(host.0.path().join("8")).unwrap();
        assert_eq!(clients(&scanner.scan(&host.host_paths(), false).unwrap()), []);
    }

    impl FdScanner {
        /// Returns a scanner with unlimited time, however busy the machine is, and small parts.
        fn unlimited() -> Self {
            let long = Duration::from_secs(3600);
            let rescan_interval = Budget::default().rescan_interval;
            let budget =
                Budget { scan: (long, long), rescan: long, read: long, rescan_interval, max_fds: 100 };
            Self { budget, ..Self::default() }
        }

        /// Leaves no time for anything but known descriptors.
        fn stop_scanning(&mut self) {
            let none = Duration::ZERO;
            self.budget = Budget { scan: (none, none), rescan: none, ..self.budget };
        }
    }

    /// Returns descriptors that are no devices.
    fn files(count: u32) -> Vec<(u32, &'static str, &'static str)> {
        (0..count).map(|number| (number, "/dev/null", "")).collect()
    }

    #[test]
    fn reads_a_known_device_without_a_scan() {
        let host = Host::new();
        let text = client(1);
        let many: Vec<_> = files(250).into_iter().chain([(250, "/dev/dri/renderD128", &*text)]).collect();
        host.process(7, "train", &many);
        let mut scanner = FdScanner::unlimited();
        let scans = (0..20).map(|_| scanner.scan(&host.host_paths(), false).unwrap());
        let found: Vec<_> = scans.take_while(|found| found.owners.is_empty()).collect();
        assert!(found.len() < 10, "the scan continues where it stopped");
        scanner.stop_scanning();
        let found = scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!(clients(&found), [(7, "renderD128", "1".into())]);
        assert_eq!(found.in_part.len(), 1, "it may have more devices");
        scanner.budget = FdScanner::unlimited().budget;
        for _ in 0..4 {
            scanner.scan(&host.host_paths(), false).unwrap();
        }
        assert_eq!(scanner.read_known().in_part, BTreeMap::new());
    }

    #[test]
    fn processes_with_many_descriptors_do_not_starve_others() {
        let host = Host::new();
        let text = client(1);
        for pid in 1..5 {
            let gpu = (900, "/dev/dri/renderD128", "pos: 0\n");
            host.process(pid, "hoard", &[&files(450)[..], &[gpu]].concat());
        }
        host.process(9, "train", &[(3, "/dev/dri/renderD128", &text)]);
        let mut scanner = FdScanner { has_scanned: true, ..FdScanner::unlimited() };
        scanner.budget.scan = Budget::default().scan;
        scanner.budget.rescan_interval = Duration::ZERO;
        let mut scans = 0;
        while !scanner.scan(&host.host_paths(), false).unwrap().owners.keys().any(|key| key.pid == 9) {
            scans += 1;
            assert!(scans < 1_000);
        }
        for _ in 0..3 {
            assert_eq!(
                clients(&scanner.scan(&host.host_paths(), false).unwrap()),
                [(9, "renderD128", "1".into())]
            );
        }
    }

    #[test]
    fn finds_late_devices_and_forgets_closed_ones() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut scanner = FdScanner::unlimited();
        scanner.scan(&host.host_paths(), false).unwrap();
        std::os::unix::fs::symlink("/dev/dri/renderD129", host.0.path().join("7/fd/5")).unwrap();
        std::fs::write(host.0.path().join("7/fdinfo/5"), client(2)).unwrap();
        let both = [(7, "renderD128", "1".into()), (7, "renderD129", "2".into())];
        assert_eq!(clients(&scanner.scan(&host.host_paths(), false).unwrap()), both);
        std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
        std::os::unix::fs::symlink("/dev/null", host.0.path().join("7/fd/3")).unwrap();
        assert_eq!(
            clients(&scanner.read_known()),
            [(7, "renderD129", "2".into())],
            "its number is another file's"
        );
    }

    #[test]
    fn too_many_devices_are_read_in_part_with_an_error() {
        let host = Host::new();
        let text = client(1);
        let devices: Vec<_> = (0..600).map(|number| (number, "/dev/dri/card0", &*text)).collect();
        host.process(7, "train", &devices);
        host.process(8, "train", &[(3, "/dev/dri/card0", &client(2))]);
        let mut scanner = FdScanner::unlimited();
        for _ in 0..10 {
            scanner.scan(&host.host_paths(), false).unwrap();
        }
        let found = scanner.read_known();
        let key = DrmProcessKey { start_ticks: 700, pid: 7 };
        assert_eq!(found.in_part, BTreeMap::from([(key, BTreeSet::from(["card0".to_owned()]))]));
        assert_eq!(found.read_errors, ["io"]);
        assert_eq!(found.descriptors.len(), crate::collect::drm::drm_process::MAX_CLIENTS + 1);
    }

    #[test]
    fn exceeded_time_budget_is_a_partial_reading_with_an_error() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/card0", &client(1))]);
        let mut scanner = FdScanner::unlimited();
        scanner.budget.read = Duration::ZERO;
        let found = scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!((found.in_part.len(), found.owners.len(), found.descriptors.len()), (1, 1, 0));
        assert_eq!(found.read_errors, ["io"]);
    }

    #[test]
    fn reads_cgroups_with_few_devices_first() {
        let host = Host::new();
        let text = client(1);
        for (pid, devices, cgroup) in [(5, 2, "hoard"), (6, 2, "hoard"), (7, 3, "train"), (8, 1, "one")] {
            let devices: Vec<_> = (0..devices).map(|number| (number, "/dev/dri/card0", &*text)).collect();
            host.process(pid, "python3", &devices);
            std::fs::write(host.0.path().join(format!("{pid}/cgroup")), format!("0::/{cgroup}\n")).unwrap();
        }
        let mut scanner = FdScanner::unlimited();
        scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!(scanner.reading_order(), [8, 7, 5, 6]);
    }

    #[test]
    fn rescans_a_denied_pid_after_the_interval() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/card0", &client(1))]);
        let mut scanner = FdScanner::unlimited();
        scanner.denied.insert(7, Timestamp::now());
        let found = scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!((clients(&found), found.denied), (vec![], 1), "not at once");
        scanner.budget.rescan_interval = Duration::ZERO;
        let found = scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!((clients(&found), found.denied), (vec![(7, "card0", "1".into())], 0));
    }

    #[test]
    fn reused_pid_is_not_read_as_the_old_process() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut scanner = FdScanner::unlimited();
        scanner.scan(&host.host_paths(), false).unwrap();
        // a new directory with the same name, as for a reused pid
        host.process(7, "other", &[(3, "/dev/dri/renderD128", &client(2))]);
        let found = scanner.read_known();
        assert_eq!(found.descriptors.len(), 0);
        let found = scanner.scan(&host.host_paths(), false).unwrap();
        assert_eq!(clients(&found), [(7, "renderD128", "2".into())]);
    }
}
