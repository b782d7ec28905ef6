//! Reads a victim's /proc entry and its cgroup's limit while both still exist, which is for some milliseconds; and after a kill
//! on the host, in which containers the largest processes are that still run.
//!
//! Of a victim, only `cgroup` and `stat` are read, because they do not delay the release of its memory; other files do, which
//! can make the kernel kill a second process (docs/decisions/0017).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use procfs::{FromBufRead, Meminfo};

use super::interval::Interval;
use super::reconcile::ProcInfo;
use crate::discover::{CgroupMaker, CgroupOwners, ContainerId, Hierarchy, Version};
use crate::host::process::read_stat;
use crate::host::{Dir, HostPaths};
use crate::ledger::sources::cgroup_namespace::CgroupNamespace;
use crate::lifecycle::timing::START_RESOLUTION;
use crate::parse::container_id;
use crate::parse::kernel_log::Killed;
use crate::parse::kernel_log::kills::KillRecord;
use crate::parse::kernel_log::report::OomReport;
use crate::parse::process::cgroup_path;

/// Reads the data of victims.
#[derive(Debug)]
pub struct VictimProbe {
    host_paths: HostPaths,
    /// Root of the memory hierarchy, and whether it is cgroup v1.
    hierarchy: Option<(PathBuf, bool)>,
    /// The kernel log's pids are valid in this pid namespace.
    host_pids: bool,
    /// The cgroup namespace, to which paths in /proc/PID/cgroup are relative.
    namespace: CgroupNamespace,
}

impl VictimProbe {
    /// Creates a probe for this host.
    pub fn new(host_paths: &HostPaths, hierarchy: Option<&Hierarchy>) -> Self {
        Self {
            host_paths: host_paths.clone(),
            hierarchy: hierarchy.map(|found| (found.root.clone(), found.version == Version::V1)),
            host_pids: host_paths.in_initial_pid_namespace(),
            namespace: CgroupNamespace::detect(host_paths, hierarchy).unwrap_or(CgroupNamespace::Unknown),
        }
    }

    /// Returns what /proc and the cgroups show of the victim of a kill that was just read.
    pub fn probe(&self, record: &KillRecord, written: &Interval) -> ProcInfo {
        let (killed, context, group, report) = match record {
            KillRecord::Kill { killed, context, group, report } => (killed, context, group.as_ref(), report),
            KillRecord::Group { path, .. } => {
                return ProcInfo { makers: self.makers([path]), ..ProcInfo::default() };
            }
            KillRecord::Second { .. } => return ProcInfo::default(),
        };
        let mut proc_info = self.proc_info(killed, written);
        let limit_cgroup = context.as_ref().and_then(|context| context.oom_cgroup.as_deref());
        proc_info.limit_bytes = limit_cgroup.and_then(|path| self.limit(path));
        proc_info.host_swap_bytes = self.host_swap();
        if let Some(report) = report.as_deref().filter(|report| report.host && self.host_pids) {
            proc_info.report_cgroups = self.report_cgroups(report, killed.pid, written);
        }
        let of_record = context.iter().flat_map(|context| &context.task_cgroups).chain(group);
        let paths = of_record.chain(&proc_info.cgroup).chain(proc_info.report_cgroups.values());
        proc_info.makers = self.makers(paths);
        proc_info
    }

    /// Returns the size of the host's swap.
    fn host_swap(&self) -> Option<u64> {
        let proc = Dir::open(&self.host_paths.proc).ok()?;
        let mut buffer = Vec::new();
        let text = proc.file("meminfo").ok()?.read_once(&mut buffer).ok()?;
        Meminfo::from_buf_read(text).ok().map(|info| info.swap_total)
    }

    /// Returns the cgroup of a container from the root of the tree, by its first process.
    pub fn container_cgroup(&self, id: &ContainerId, pid: u32) -> Option<PathBuf> {
        let dir = Dir::open(&self.host_paths.process(pid)).ok().filter(|_| self.host_pids)?;
        let path = self.cgroup(&dir)?;
        let path = Path::new(path.trim_start_matches('/'));
        let is_its = |path: &&Path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.contains(id.as_str()))
        };
        path.ancestors().find(is_its).map(Path::to_path_buf)
    }

    /// Returns who can have made the containers' cgroups in these paths.
    fn makers<'a>(&self, paths: impl IntoIterator<Item = &'a String>) -> BTreeMap<String, CgroupMaker> {
        let Some((root, _)) = &self.hierarchy else { return BTreeMap::new() };
        let owners = CgroupOwners::new(root);
        let named = paths.into_iter().filter(|path| container_id::outermost(path).is_some());
        named.map(|path| (path.clone(), owners.maker(path))).collect()
    }

    /// Returns the limit of a cgroup by its path from the root; `None` also if it is unlimited.
    fn limit(&self, path: &str) -> Option<u64> {
        let (root, v1) = self.hierarchy.as_ref()?;
        let dir = Dir::open(&root.join(path.trim_start_matches('/'))).ok()?;
        let name = if *v1 { "memory.limit_in_bytes" } else { "memory.max" };
        crate::parse::cgroup::limit(dir.file(name).ok()?.read_once(&mut Vec::new()).ok()?).flatten()
    }

    fn proc_info(&self, victim: &Killed, written: &Interval) -> ProcInfo {
        if !self.host_pids {
            return ProcInfo::default(); // the log's pids are from another namespace
        }
        let Ok(dir) = Dir::open(&self.host_paths.process(victim.pid)) else { return ProcInfo::default() };
        let cgroup = self.cgroup(&dir); // first: the cgroup may be gone soon
        let latest_start = written.earliest + START_RESOLUTION;
        let is_victim = self.has_started(&dir, &victim.process, latest_start) == Some(true);
        ProcInfo { cgroup: cgroup.filter(|_| is_victim), ..ProcInfo::default() }
    }

    /// Returns whether a process has this name and began before this Unix time; otherwise its pid was reused. `None`: it is gone.
    fn has_started(&self, dir: &Dir, comm: &str, before: f64) -> Option<bool> {
        let stat = read_stat(dir, &mut Vec::new()).ok()?;
        let since_boot = stat.start_ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        let started = self.host_paths.boot_time().ok()? as f64 + since_boot;
        Some(crate::text::printable(&stat.comm) == comm && started <= before)
    }

    /// Returns the cgroup paths of the largest processes of a report that still run, without the victim.
    fn report_cgroups(&self, report: &OomReport, victim: u32, written: &Interval) -> BTreeMap<u32, String> {
        let pids = report.processes.iter().take(OomReport::MAX_PROCESSES).filter_map(|row| {
            let pid = row.tgid.unwrap_or(row.pid);
            let dir = Dir::open(&self.host_paths.process(pid)).ok().filter(|_| pid != victim)?;
            let is_same = self.has_started(&dir, &row.process, written.latest)?;
            Some((pid, self.cgroup(&dir).filter(|_| is_same)?))
        });
        pids.collect()
    }

    /// Returns the cgroup path of a process.
    fn cgroup(&self, dir: &Dir) -> Option<String> {
        let v1 = self.hierarchy.as_ref().is_some_and(|(_, v1)| *v1);
        let mut buffer = Vec::new();
        let text = dir.file("cgroup").ok()?.read_once(&mut buffer).ok()?;
        let path = String::from_utf8(cgroup_path(text, v1)?.to_vec()).ok()?;
        let named = container_id::in_path(&path).next().is_some();
        match self.namespace.absolute(&path) {
            Some(path) => (path != "/").then_some(path), // an exiting process is shown in the root
            None => named.then_some(path), // in an unknown namespace only container ids are reliable
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::parse::kernel_log::OomContext;
    use crate::parse::kernel_log::report::ReportProcess;

    const ID: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    /// Returns a probe in a directory in which process 7 runs in a container with a limit of 64 MiB.
    fn probe(root: &std::path::Path) -> VictimProbe {
        let (cgroup, process) = (root.join("cgroup/docker").join(ID), root.join("proc/7"));
        std::fs::create_dir_all(&cgroup).unwrap();
        std::fs::create_dir_all(&process).unwrap();
        std::fs::write(cgroup.join("memory.max"), "67108864\n").unwrap();
        let uptime = 100 * rustix::param::clock_ticks_per_second();
        std::fs::write(process.join("stat"), format!("7 (python) S 1 {}{uptime} 0\n", "0 ".repeat(17)))
            .unwrap();
        let booted_at = Timestamp::now().unix_whole_seconds() - 1_000;
        std::fs::write(root.join("proc/stat"), format!("btime {booted_at}\n")).unwrap();
        std::fs::write(process.join("cgroup"), format!("0::/docker/{ID}\n")).unwrap();
        VictimProbe {
            host_paths: HostPaths { proc: root.join("proc"), ..HostPaths::default() },
            hierarchy: Some((root.join("cgroup"), false)),
            host_pids: true,
            namespace: CgroupNamespace::Unknown,
        }
    }

    /// Returns the record of the kill of process 7.
    fn killed(context: Option<OomContext>, report: Option<OomReport>) -> KillRecord {
        let killed = Killed { pid: 7, process: "python".into(), ..Killed::default() };
        KillRecord::Kill { killed, context, group: None, report: report.map(Into::into) }
    }

    #[test]
    fn process_that_began_after_the_record_is_not_its_victim() {
        let (root, now) = (tempfile::tempdir().unwrap(), Timestamp::now());
        let probe = probe(root.path()); // the process runs for 900 seconds
        let cgroup = |age: f64| {
            let written = Interval::at(now.unix_seconds() - age);
            probe.probe(&killed(None, None), &written).cgroup
        };
        for age in [0.0, 60.0, 890.0] {
            assert_eq!(cgroup(age), Some(format!("/docker/{ID}")), "{age}: it still exists");
        }
        for age in [910.0, 3_600.0] {
            assert_eq!(cgroup(age), None, "{age}: its pid belongs to another process now");
        }
        let (uncertain, end) = (now.unix_seconds() - 1_500.0, now.unix_seconds() - 300.0);
        let found = probe.probe(&killed(None, None), &Interval::new(uncertain, end));
        assert_eq!(found.cgroup, None, "it may have begun later");
    }

    #[test]
    fn dead_process_keeps_its_container_after_its_cgroup_was_removed() {
        let (root, now) = (tempfile::tempdir().unwrap(), Timestamp::now());
        let probe = probe(root.path());
        std::fs::write(root.path().join("proc/7/cgroup"), format!("0::/docker/{ID} (deleted)\n")).unwrap();
        let found = probe.probe(&killed(None, None), &Interval::at(now.unix_seconds()));
        assert_eq!(found.cgroup, Some(format!("/docker/{ID}")));
    }

    #[test]
    fn processes_of_a_report_on_the_host_have_their_cgroups_while_they_run() {
        let (root, now) = (tempfile::tempdir().unwrap(), Timestamp::now());
        let probe = probe(root.path());
        let process = |pid: u32, comm: &str, uptime: u64| {
            let folder = root.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(&folder).unwrap();
            let ticks = uptime * rustix::param::clock_ticks_per_second();
            let stat = format!("{pid} ({comm}) S 1 {}{ticks} 0\n", "0 ".repeat(17));
            std::fs::write(folder.join("stat"), stat).unwrap();
            std::fs::write(folder.join("cgroup"), format!("0::/docker/{ID}\n")).unwrap();
        };
        let booted_at = now.unix_whole_seconds() - 1_000;
        std::fs::write(root.path().join("proc/stat"), format!("btime {booted_at}\n")).unwrap();
        let killed_at = Interval::at(booted_at as f64 + 900.0);
        process(7, "python", 100);
        process(8, "python", 899);
        process(9, "python", 901);
        process(10, "another", 100);
        let rows = [7, 8, 9, 10, 11].map(|pid| ReportProcess {
            pid,
            process: "python".into(),
            ..ReportProcess::default()
        });
        let cgroups = |host| {
            let report = OomReport { host, processes: rows.to_vec(), ..OomReport::default() };
            let found = probe.probe(&killed(None, Some(report)), &killed_at);
            found.report_cgroups.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(cgroups(true), [(8, format!("/docker/{ID}"))], "not the victim, nor those of reused pids");
        assert_eq!(cgroups(false), []);
    }

    #[test]
    fn limit_is_that_of_the_cgroup_in_the_context_line() {
        let (root, now) = (tempfile::tempdir().unwrap(), Timestamp::now());
        let probe = probe(root.path());
        let context = OomContext { oom_cgroup: Some(format!("/docker/{ID}")), ..OomContext::default() };
        let limit =
            |context| probe.probe(&killed(context, None), &Interval::at(now.unix_seconds())).limit_bytes;
        assert_eq!((limit(Some(context)), limit(None)), (Some(64 << 20), None));
    }
}
