//! The cgroup of a command: a transient scope of systemd, else one of memledger's own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::geteuid;

use crate::clock::Timestamp;
use crate::discover::{Hierarchy, Version};
use crate::host::HostPaths;
use crate::parse::cgroup::values;
use crate::parse::container_id;
use crate::parse::process::cgroup_path;

/// A cgroup is there within this time, or there is none.
pub const PLACED_WITHIN: Duration = Duration::from_secs(15);
/// The directory of memledger's own cgroups.
const OWN_PARENT: &str = "memledger";
/// Interval of looking at a process's cgroup, and of trying to remove one.
const POLL: Duration = Duration::from_millis(2);
/// A cgroup stays busy for a moment after its last process has ended.
const REMOVED_WITHIN: Duration = Duration::from_millis(500);
/// Where systemd runs.
const SYSTEMD: &str = "/run/systemd/system";
/// How a command runs without a cgroup.
const WITHOUT: &str = "Or run it without one: memledger run --no-cgroup -- COMMAND (exit, wall time and reports from inside; no limit, no memory)";

/// Why the command cannot have a cgroup, and what would allow it.
#[derive(Debug, thiserror::Error)]
pub enum NoCgroup {
    /// The hierarchy is unusable.
    #[error("the command cannot have a cgroup: {0}. {WITHOUT}")]
    NoHierarchy(String),
    /// This shell is in a container.
    #[error("this is inside a container, which has a cgroup and a limit already. {WITHOUT}")]
    InContainer,
    /// This shell is in a job of Slurm.
    #[error("this is in a Slurm job, whose limit counts (sbatch --mem)")]
    InJob,
    /// This shell is in a run.
    #[error("this is in a run of memledger run, whose limit counts")]
    InRun,
    /// Users may not make cgroups on this host.
    #[error(
        "the command cannot have a cgroup: {reason}. As root it can: sudo memledger run -- COMMAND. {WITHOUT}"
    )]
    Unprivileged {
        /// What is missing.
        reason: String,
    },
    /// An attempt failed.
    #[error("the command cannot have a cgroup: {what}: {error}. {WITHOUT}")]
    Failed {
        /// What was tried.
        what: String,
        /// Its error.
        error: String,
    },
}

/// Who makes the cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    /// systemd; of the user's manager with `true`.
    Systemd { is_user: bool },
    /// memledger.
    Own,
}

/// A cgroup for one command.
#[derive(Clone, Debug)]
pub struct RunCgroup {
    maker: Maker,
    hierarchy: Hierarchy,
    /// Roots of further hierarchies of cgroup v1 that are read of containers.
    further_roots: Vec<PathBuf>,
    /// Its directory in the hierarchy of the memory controller, once it is there.
    directory: Option<PathBuf>,
}

impl RunCgroup {
    /// Chooses how a cgroup is made. Makes none.
    ///
    /// # Errors
    /// It cannot be made here.
    pub fn choose(host_paths: &HostPaths, is_root: bool) -> Result<Self, NoCgroup> {
        let hierarchy =
            Hierarchy::detect(host_paths).map_err(|error| NoCgroup::NoHierarchy(error.to_string()))?;
        let own = own_path(&hierarchy, "self").unwrap_or_default();
        if container_id::in_path(&own).any(|found| !found.runtime.is_run()) {
            return Err(NoCgroup::InContainer);
        }
        if container_id::in_path(&own).next().is_some() {
            return Err(NoCgroup::InRun); // its memory is part of that run's
        }
        if own.split('/').any(is_job) {
            return Err(NoCgroup::InJob);
        }
        let has_systemd = Path::new(SYSTEMD).is_dir();
        let maker = match (is_root, has_systemd) {
            (true, true) => Maker::Systemd { is_user: false },
            (true, false) => Maker::Own,
            (false, _) => match unprivileged_obstacle(&hierarchy, has_systemd) {
                None => Maker::Systemd { is_user: true },
                Some(reason) => return Err(NoCgroup::Unprivileged { reason }),
            },
        };
        let further_roots = match hierarchy.version {
            Version::V1 => accounting_roots(&host_paths.cgroup, &hierarchy.root),
            Version::V2 => vec![],
        };
        Ok(Self { maker, hierarchy, further_roots, directory: None })
    }

    /// Returns whether the cgroup is removed with its last process, before its counters can be read.
    pub fn ends_with_processes(&self) -> bool {
        self.maker != Maker::Own
    }

    /// Makes the cgroup, with these processes in it.
    ///
    /// # Errors
    /// It cannot be made. What was made is removed.
    pub fn make(&mut self, id: &str, name: &str, limit: Option<u64>, pids: &[u32]) -> Result<(), NoCgroup> {
        let made = match self.maker {
            Maker::Systemd { is_user } => self.start_scope(is_user, id, name, limit, pids),
            Maker::Own => self.create(id, limit, pids),
        };
        if made.is_err() {
            self.remove(id);
        }
        made
    }

    fn start_scope(
        &mut self,
        is_user: bool,
        id: &str,
        name: &str,
        limit: Option<u64>,
        pids: &[u32],
    ) -> Result<(), NoCgroup> {
        let failed = |error: String| NoCgroup::Failed { what: "systemd started no scope".to_owned(), error };
        let output = scope_request(is_user, id, name, limit, pids).output();
        match output {
            Ok(Output { status, .. }) if status.success() => {}
            Ok(Output { stderr, .. }) => {
                return Err(failed(String::from_utf8_lossy(&stderr).trim().to_owned()));
            }
            Err(error) => return Err(failed(format!("busctl: {error}"))),
        }
        let began = Timestamp::now();
        while self.directory.is_none() {
            let first = pids.first().map(u32::to_string).unwrap_or_default();
            let path = own_path(&self.hierarchy, &first).filter(|path| path.contains(id));
            self.directory = path.map(|path| self.hierarchy.root.join(path.trim_start_matches('/')));
            if Timestamp::now().since(began) > PLACED_WITHIN {
                return Err(failed(format!("not within {} s", PLACED_WITHIN.as_secs())));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    fn create(&mut self, id: &str, limit: Option<u64>, pids: &[u32]) -> Result<(), NoCgroup> {
        let parent = self.hierarchy.root.join(OWN_PARENT);
        let failed = |what: &Path, error: io::Error| NoCgroup::Failed {
            what: what.display().to_string(),
            error: error.to_string(),
        };
        fs::create_dir_all(&parent).map_err(|error| failed(&parent, error))?;
        remove_empty(&parent);
        if self.hierarchy.version == Version::V2 {
            for above in [&self.hierarchy.root, &parent] {
                let control = above.join("cgroup.subtree_control");
                fs::write(&control, "+memory").map_err(|error| failed(&control, error))?;
                let _ = fs::write(&control, "+cpu"); // for throttling alone
            }
        }
        let directory = parent.join(id);
        fs::create_dir(&directory).map_err(|error| failed(&directory, error))?;
        self.directory = Some(directory.clone());
        if let Some(limit) = limit {
            let (file, swap, swap_limit) = match self.hierarchy.version {
                Version::V1 => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", limit),
                Version::V2 => ("memory.max", "memory.swap.max", 0),
            };
            let file = directory.join(file);
            fs::write(&file, limit.to_string()).map_err(|error| failed(&file, error))?;
            let _ = fs::write(directory.join(swap), swap_limit.to_string()); // absent where swap is not accounted
        }
        for root in &self.further_roots {
            remove_empty(&root.join(OWN_PARENT));
            let directory = root.join(OWN_PARENT).join(id);
            let _ = fs::create_dir_all(&directory); // without it CPU times are absent
            pids.iter().for_each(|pid| drop(fs::write(directory.join("cgroup.procs"), pid.to_string())));
        }
        let procs = directory.join("cgroup.procs");
        pids.iter()
            .try_for_each(|pid| fs::write(&procs, pid.to_string()))
            .map_err(|error| failed(&procs, error))
    }

    /// Returns the number of OOM kills in the cgroup, and in those below it on cgroup v2; `None` if it cannot be read.
    pub fn oom_kills(&self) -> Option<u64> {
        let file = match self.hierarchy.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        let text = fs::read(self.directory.as_ref()?.join(file)).ok()?;
        let [kills] = values(&text, [b"oom_kill"]);
        kills
    }

    /// Removes a cgroup of memledger's own, unless processes are left in it. systemd removes a scope itself.
    pub fn remove(&self, id: &str) {
        if self.maker != Maker::Own {
            return;
        }
        for root in std::iter::once(&self.hierarchy.root).chain(&self.further_roots) {
            let directory = root.join(OWN_PARENT).join(id);
            let began = Timestamp::now();
            while fs::remove_dir(&directory).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
                && Timestamp::now().since(began) < REMOVED_WITHIN
            {
                std::thread::sleep(POLL);
            }
        }
    }
}

/// Removes the cgroups of earlier runs that are empty: those of a `memledger run` that was killed, or left processes behind.
fn remove_empty(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_empty = fs::read(entry.path().join("cgroup.procs")).is_ok_and(|pids| pids.is_empty());
        let is_old = entry.metadata().and_then(|found| found.modified()).is_ok_and(|modified| {
            modified.elapsed().is_ok_and(|age| age > PLACED_WITHIN) // not one that is about to get its processes
        });
        if is_empty && is_old {
            let _ = fs::remove_dir(entry.path()); // fails with cgroups below it
        }
    }
}

/// Returns the request for a transient scope with these processes.
fn scope_request(is_user: bool, id: &str, name: &str, limit: Option<u64>, pids: &[u32]) -> Command {
    const MANAGER: [&str; 4] = [
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
    ];
    let mut properties: Vec<Vec<String>> = vec![
        words(["Description", "s", &format!("memledger run: {name}")]),
        words(["CollectMode", "s", "inactive-or-failed"]),
        words(["MemoryAccounting", "b", "true"]),
        words(["CPUAccounting", "b", "true"]),
        words(["Delegate", "b", "true"]), // else systemd ends the scope at its first OOM kill
        std::iter::chain(words(["PIDs", "au", &pids.len().to_string()]), pids.iter().map(u32::to_string))
            .collect(),
    ];
    if let Some(limit) = limit {
        properties.push(words(["MemoryMax", "t", &limit.to_string()]));
        properties.push(words(["MemorySwapMax", "t", "0"]));
    }
    let mut request = Command::new("busctl");
    if is_user && std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        request.env("XDG_RUNTIME_DIR", format!("/run/user/{}", geteuid().as_raw())); // as in cron and su
    }
    request.args(if is_user { &["--user"][..] } else { &[] });
    request.args(["--quiet", "--timeout=10", "call"]).args(MANAGER).args(["ssa(sv)a(sa(sv))"]);
    request.args([&format!("memledger-{id}.scope"), "fail", &properties.len().to_string()]);
    request.args(properties.into_iter().flatten()).arg("0");
    request
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).into()
}

/// Returns the cgroup of a process in the hierarchy of the memory controller.
fn own_path(hierarchy: &Hierarchy, process: &str) -> Option<String> {
    let text = fs::read(format!("/proc/{process}/cgroup")).ok()?;
    let path = cgroup_path(&text, hierarchy.version == Version::V1)?;
    Some(String::from_utf8_lossy(path).into_owned())
}

/// Returns whether a component of a cgroup path is of a job of Slurm.
fn is_job(component: &str) -> bool {
    component == "slurm" || component.ends_with("slurmstepd.scope") || component.starts_with("slurm_")
}

/// Returns why a user cannot have a scope with a memory limit; `None` if nothing is known against it.
fn unprivileged_obstacle(hierarchy: &Hierarchy, has_systemd: bool) -> Option<String> {
    if hierarchy.version == Version::V1 {
        return Some("this host uses cgroup v1, where only root may make one".to_owned());
    }
    if !has_systemd {
        return Some("systemd does not run here, and only root may make one".to_owned());
    }
    let uid = geteuid().as_raw();
    let manager =
        hierarchy.root.join(format!("user.slice/user-{uid}.slice/user@{uid}.service/cgroup.controllers"));
    match fs::read_to_string(&manager) {
        Err(_) => Some(format!(
            "no systemd of this user runs (log in by ssh or at a terminal, or as root: loginctl enable-linger {uid})"
        )),
        Ok(controllers) if !controllers.split_whitespace().any(|name| name == "memory") => Some(
            "the memory controller is not delegated to users (Delegate=memory in a drop-in of user@.service)"
                .to_owned(),
        ),
        Ok(_) => None,
    }
}

/// Returns the roots of the v1 hierarchies besides that of `memory` that count the CPU time of cgroups.
fn accounting_roots(top: &Path, memory: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(top).into_iter().flatten().flatten() {
        // cpu and cpuacct may be links to one directory
        let Ok(root) = fs::canonicalize(entry.path()) else { continue };
        let counts = root.join("cpuacct.usage").exists() || root.join("cpu.shares").exists();
        if counts && root != memory && !roots.contains(&root) {
            roots.push(root);
        }
    }
    roots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_is_requested_with_its_limit_and_without_ending_at_a_kill() {
        let request = scope_request(true, "ab", "train", Some(64 << 20), &[7, 8]);
        let arguments: Vec<_> = request.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let text = arguments.join(" ");
        assert!(text.starts_with("--user --quiet --timeout=10 call org.freedesktop.systemd1 "), "{text}");
        assert!(text.contains(" memledger-ab.scope fail 8 Description s memledger run: train "), "{text}");
        assert!(
            text.contains(" Delegate b true PIDs au 2 7 8 MemoryMax t 67108864 MemorySwapMax t 0 0"),
            "{text}"
        );
        let unlimited = scope_request(false, "ab", "train", None, &[7, 8]);
        let text: Vec<_> = unlimited.get_args().map(|word| word.to_string_lossy()).collect();
        assert!(
            text.contains(&"6".into())
                && !text.contains(&"MemoryMax".into())
                && !text.contains(&"--user".into())
        );
    }

    #[test]
    fn slurms_cgroups_are_known() {
        let is_of_job = |path: &str| path.split('/').any(is_job);
        assert!(is_of_job("/slurm/uid_1000/job_42/step_0"));
        assert!(is_of_job("/slurm_node1/uid_1000/job_42"));
        assert!(is_of_job("/system.slice/node1_slurmstepd.scope/job_42/step_0/user/task_0"));
        assert!(!is_of_job("/user.slice/user-1000.slice/session-3.scope"));
    }
}
