//! Tests of the scan.

use super::*;

const LONG: Duration = Duration::from_secs(3600);
const UNLIMITED: Budget = Budget {
    scan: LONG,
    first_scan: LONG,
    read: LONG,
    rescan_interval: Duration::from_secs(2),
    max_fds: 100,
};

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

    /// Returns a scanner of it with unlimited time, however busy the machine is, and small parts.
    fn scanner(&self) -> FdScanner {
        let host_paths = HostPaths { proc: self.0.path().to_path_buf(), ..HostPaths::default() };
        FdScanner { budget: UNLIMITED, ..FdScanner::new(host_paths, false) }
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
fn clients(reading: &Reading) -> Vec<(u32, &str, String)> {
    assert_eq!(reading.read_errors, Vec::<&str>::new());
    let mut all = Vec::new();
    for (key, process) in &reading.processes {
        for (node, client) in &process.descriptors {
            let id = client.id.as_deref().map(|id| String::from_utf8_lossy(id).into_owned());
            all.extend(id.map(|id| (key.pid, &**node, id)));
        }
    }
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
        &[(3, "/dev/dri/renderD128", &client(1)), (9, "/dev/dri/card0", &client(2))],
    );
    host.process(8, "top", &[(3, "/dev/dri/renderD128 (deleted)", "pos: 0\n")]);
    std::fs::create_dir(host.0.path().join("sys")).unwrap();
    host.process(2, "kthreadd", &[]);
    let mut scanner = host.scanner();
    let found = scanner.reading();
    assert_eq!(clients(&found), [(7, "card0", "2".into()), (7, "renderD128", "1".into())]);
    let key = DrmProcessKey { start_ticks: 700, pid: 7 };
    let owner = ProcessOwner { start_ticks: 700, comm: "train) R 1".into(), cgroup: "/docker/abc".into() };
    assert_eq!(found.processes[&key].owner, owner);
    assert_eq!(scanner.access(), (3, 0));
}

#[test]
fn list_without_descriptors_is_no_proof_of_permission() {
    let host = Host::new();
    (2..200).for_each(|pid| host.process(pid, "kworker", &[]));
    host.process(300, "sh", &[(0, "/dev/null", "")]);
    let mut scanner = host.scanner();
    scanner.reading();
    assert_eq!(scanner.access(), (1, 0));
    host.process(301, "many", &files(250));
    scanner.budget.rescan_interval = Duration::ZERO;
    for _ in 0..4 {
        scanner.reading();
        assert_eq!(scanner.access(), (2, 0), "also while it is scanned in part");
    }
}

#[test]
fn forgets_a_process_that_closes_its_device_or_ends() {
    let host = Host::new();
    host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
    let mut scanner = host.scanner();
    assert_eq!(clients(&scanner.reading()).len(), 1);
    std::fs::write(host.0.path().join("7/fdinfo/3"), client(4)).unwrap();
    assert_eq!(clients(&scanner.known()), [(7, "renderD128", "4".into())]);
    std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
    std::fs::remove_file(host.0.path().join("7/fdinfo/3")).unwrap();
    assert_eq!(clients(&scanner.known()), []);
    host.process(8, "train", &[(3, "/dev/dri/renderD128", &client(5))]);
    assert_eq!(clients(&scanner.reading()), [(8, "renderD128", "5".into())]);
    std::fs::remove_dir_all(host.0.path().join("8")).unwrap();
    assert_eq!(clients(&scanner.reading()), []);
}

impl FdScanner {
    /// Scans and reads once.
    fn reading(&mut self) -> Reading {
        let mut read_errors = vec![];
        self.scan(&mut read_errors).unwrap();
        let processes = self.read(&mut read_errors);
        Reading { processes, read_errors }
    }

    /// Reads the known descriptors only.
    fn known(&mut self) -> Reading {
        let mut read_errors = vec![];
        Reading { processes: self.read(&mut read_errors), read_errors }
    }
}

/// The result of a reading.
struct Reading {
    processes: DrmProcesses,
    read_errors: Vec<&'static str>,
}

impl Reading {
    /// Returns the pids of the processes that were read in part.
    fn in_part(&self) -> Vec<u32> {
        let in_part = self.processes.iter().filter(|(_, process)| !process.is_complete);
        in_part.map(|(key, _)| key.pid).collect()
    }

    /// Returns the number of descriptors whose statistics were read.
    fn count(&self) -> usize {
        let descriptors = self.processes.values().flat_map(|process| &process.descriptors);
        descriptors.filter(|(_, client)| !client.driver.is_empty()).count()
    }

    /// Returns whether the memory of each descriptor is known.
    fn has_memory(&self, pid: u32) -> Vec<bool> {
        let (_, process) = self.processes.iter().find(|(key, _)| key.pid == pid).unwrap();
        let regions = process.descriptors.iter().flat_map(|(_, client)| client.regions.values());
        regions.map(|region| region.resident().is_some()).collect()
    }
}

/// Returns descriptors that are no devices.
fn files(count: u32) -> Vec<(u32, &'static str, &'static str)> {
    (0..count).map(|number| (number, "/dev/null", "")).collect()
}

#[test]
fn reads_a_known_device_without_a_scan() {
    let host = Host::new();
    let texts = [client(1), client(2)];
    let [first, second] = [(0, &texts[0]), (198, &texts[1])]
        .map(|(number, text)| (number, "/dev/dri/renderD128", text.as_str()));
    // with `.` and `..` there are 201 names, so the last part has one, and another part has a device
    let others: Vec<_> = files(198).into_iter().skip(1).collect();
    host.process(7, "train", &[&[first, second], &others[..]].concat());
    let mut scanner = host.scanner();
    let scans = (0..20).map(|_| scanner.reading());
    let found = scans.take_while(|found| found.processes.is_empty()).count();
    assert!(found < 2, "the scan continues where it stopped");
    let none = Duration::ZERO;
    scanner.budget = Budget { scan: none, ..UNLIMITED };
    let found = scanner.reading();
    assert!(!clients(&found).is_empty());
    assert_eq!(found.in_part(), [7], "it may have more devices");
    assert!(found.has_memory(7).iter().all(|has_memory| !has_memory));
    scanner.budget = UNLIMITED;
    for _ in 0..4 {
        scanner.reading();
    }
    let found = scanner.known();
    assert_eq!((clients(&found).len(), found.in_part()), (2, vec![]));
    assert_eq!(found.has_memory(7), [true, true]);
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
    let mut scanner = host.scanner();
    scanner.budget.scan = Budget::default().scan;
    scanner.budget.first_scan = scanner.budget.scan;
    scanner.budget.rescan_interval = Duration::ZERO;
    let mut scans = 0;
    while !scanner.reading().processes.keys().any(|key| key.pid == 9) {
        scans += 1;
        assert!(scans < 1_000);
    }
    for _ in 0..3 {
        assert_eq!(clients(&scanner.reading()), [(9, "renderD128", "1".into())]);
    }
}

#[test]
fn finds_late_devices_and_forgets_closed_ones() {
    let host = Host::new();
    host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
    let mut scanner = host.scanner();
    scanner.reading();
    std::os::unix::fs::symlink("/dev/dri/renderD129", host.0.path().join("7/fd/5")).unwrap();
    std::fs::write(host.0.path().join("7/fdinfo/5"), client(2)).unwrap();
    let both = [(7, "renderD128", "1".into()), (7, "renderD129", "2".into())];
    assert_eq!(clients(&scanner.reading()), both);
    std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
    std::os::unix::fs::symlink("/dev/null", host.0.path().join("7/fd/3")).unwrap();
    std::fs::write(host.0.path().join("7/fdinfo/3"), "pos: 0\n").unwrap();
    assert_eq!(clients(&scanner.known()), [(7, "renderD129", "2".into())], "its number is another file's");
}

#[test]
fn too_many_devices_are_read_in_part_with_an_error() {
    let host = Host::new();
    let text = client(1);
    let devices: Vec<_> = (0..600).map(|number| (number, "/dev/dri/card0", &*text)).collect();
    host.process(7, "train", &devices);
    host.process(8, "train", &[(3, "/dev/dri/card0", &client(2))]);
    let mut scanner = host.scanner();
    for _ in 0..10 {
        scanner.reading();
    }
    let found = scanner.known();
    assert_eq!((found.in_part(), &found.read_errors[..]), (vec![7], &["io"][..]));
    assert_eq!(found.count(), DRM_CLIENTS.max + 1 + 1, "one more than the limit, and the other process");
}

#[test]
fn process_with_a_reused_pid_is_incomplete_until_it_is_scanned() {
    let host = Host::new();
    host.process(7, "sh", &files(3));
    let mut scanner = host.scanner();
    scanner.budget.rescan_interval = Duration::ZERO;
    scanner.reading();
    let text = client(1);
    let devices: Vec<_> = (0..250).map(|number| (number, "/dev/dri/card0", &*text)).collect();
    host.process(7, "train", &devices);
    assert_eq!(scanner.reading().in_part(), [7]);
    for _ in 0..2 {
        scanner.reading();
    }
    assert_eq!(scanner.known().in_part(), Vec::<u32>::new());
}

#[test]
fn exceeded_time_budget_is_a_partial_reading_with_an_error() {
    let host = Host::new();
    host.process(7, "train", &[(3, "/dev/dri/card0", &client(1))]);
    let mut scanner = host.scanner();
    scanner.budget.read = Duration::ZERO;
    for _ in 0..2 {
        let found = scanner.reading();
        assert_eq!((found.in_part(), found.count(), &found.read_errors[..]), (vec![7], 0, &["io"][..]));
    }
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
    let mut scanner = host.scanner();
    scanner.reading();
    assert_eq!(scanner.reading_order(), [8, 7, 5, 6]);
}

#[test]
fn rescans_a_denied_pid_after_the_interval() {
    let host = Host::new();
    host.process(7, "train", &[(3, "/dev/dri/card0", &client(1))]);
    let mut scanner = host.scanner();
    let denied =
        ScannedProcess { scanned_at: Some(Timestamp::now()), is_denied: true, ..ScannedProcess::default() };
    scanner.processes.insert(7, denied);
    let found = scanner.reading();
    assert_eq!((clients(&found), scanner.access()), (vec![], (0, 1)), "not at once");
    scanner.budget.rescan_interval = Duration::ZERO;
    let found = scanner.reading();
    assert_eq!((clients(&found), scanner.access()), (vec![(7, "card0", "1".into())], (1, 0)));
}

#[test]
fn reused_pid_is_not_read_as_the_old_process() {
    let host = Host::new();
    host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
    let mut scanner = host.scanner();
    scanner.reading();
    host.process(7, "other", &[(3, "/dev/dri/renderD128", &client(2))]);
    let stat = host.0.path().join("7/stat");
    let started_later = std::fs::read_to_string(&stat).unwrap().replace("700 0", "701 0");
    std::fs::write(&stat, started_later).unwrap();
    assert_eq!(scanner.known().count(), 0);
    let found = scanner.reading();
    assert_eq!(clients(&found), [(7, "renderD128", "2".into())]);
}
