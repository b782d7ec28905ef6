//! Which processes hold a descriptor of a graphics device, and what the driver tells of each.
//!
//! Nothing lists them but the links in `/proc/PID/fd`, one system call each; on a large host there are many. So a process
//! that holds one is read at every reading, and the others are looked at in turn: new ones at once, the rest as the time
//! budget of a reading allows, each at most every two seconds. A process that opens a GPU late is seen that much later.
//!
//! The links are read and not followed: a look at what is behind one could hang on a dead file server. A device that a
//! container was given under a path outside `/dev/dri` is therefore not seen, and its memory stays unattributed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::readlinkat_raw;

use super::books::{Descriptor, Key};
use crate::clock::Moment;
use crate::collect::gpu::Owner;
use crate::host::{Dir, ReadError, Roots, classify};
use crate::parse::drm::Client;
use crate::parse::process::{Stat, cgroup_path};

/// Time for the search in the first reading, and in each one after it.
const BUDGET: (Duration, Duration) = (Duration::from_millis(250), Duration::from_millis(20));
/// A process that holds no GPU is looked at again after this.
const AGAIN: Duration = Duration::from_secs(2);
/// Descriptors of one process that are looked at. A process with more can hide a GPU behind them.
const MOST_DESCRIPTORS: usize = 16 * 1024;
/// Descriptors of graphics devices of one process that are read.
const MOST_CLIENTS: usize = 512;

const DEVICES: &[u8] = b"/dev/dri/";
/// AMD's device for computing: work that is given to it does not pass the engines' statistics.
const COMPUTE: &[u8] = b"/dev/kfd";

/// What is remembered between two readings.
#[derive(Debug, Default)]
pub struct Search {
    holders: HashMap<u32, Holder>,
    /// Processes that hold no GPU, and when that was seen.
    others: HashMap<u32, Moment>,
    denied: HashSet<u32>,
    /// The last pid that was looked at in its turn.
    cursor: u32,
    begun: bool,
    buffer: Vec<u8>,
}

/// A process that holds a descriptor of a graphics device.
#[derive(Debug)]
struct Holder {
    /// Answers *gone* once the process has ended, also when its pid is another's by then.
    dir: Dir,
    key: Key,
    owner: Owner,
}

/// What one reading found.
#[derive(Debug, Default)]
pub struct Found {
    /// Descriptors of graphics devices, each with the name of its node as its process sees it.
    pub descriptors: Vec<(String, Descriptor)>,
    /// Who the holders are.
    pub owners: HashMap<Key, Owner>,
    /// Holders whose work passes the engines' statistics by.
    pub computing: BTreeSet<Key>,
    /// Processes whose descriptors could be read, and could not for want of permission.
    pub readable: usize,
    /// See `readable`.
    pub denied: usize,
    /// Failed readings.
    pub faults: Vec<&'static str>,
}

/// The descriptors of one process that matter here: number and node.
#[derive(Debug, Default)]
struct Links {
    devices: Vec<(OsString, String)>,
    computing: bool,
}

impl Search {
    /// Reads all known holders, and looks for others.
    ///
    /// # Errors
    /// The processes cannot be listed.
    pub fn round(&mut self, roots: &Roots, cgroup_v1: bool) -> Result<Found, ReadError> {
        let pids = self.pids(roots)?;
        self.others.retain(|pid, _| pids.contains(pid));
        self.denied.retain(|pid| pids.contains(pid));
        let mut found = self.known();
        self.look_around(roots, cgroup_v1, &pids, &mut found);
        found.readable = self.others.len() + self.holders.len();
        found.denied = self.denied.len();
        Ok(found)
    }

    /// Reads all known holders once more.
    pub fn known(&mut self) -> Found {
        let mut found = Found::default();
        let Self { holders, others, buffer, .. } = self;
        holders.retain(|pid, holder| match holder.read(&mut found, buffer) {
            Ok(true) => true,
            Ok(false) => {
                others.insert(*pid, Moment::now());
                false
            }
            Err(error) => {
                found.faults.extend(error.fault_reason());
                false
            }
        });
        found
    }

    fn pids(&mut self, roots: &Roots) -> Result<BTreeSet<u32>, ReadError> {
        let mut pids = BTreeSet::new();
        Dir::open(&roots.proc)?.for_each(&mut self.buffer, |name, _| {
            let number = crate::parse::number(name.as_bytes());
            pids.extend(number.and_then(|pid| u32::try_from(pid).ok()));
        })?;
        Ok(pids)
    }

    /// Looks at processes that are not known to hold a GPU: new ones first, then the others in their turn.
    fn look_around(&mut self, roots: &Roots, cgroup_v1: bool, pids: &BTreeSet<u32>, found: &mut Found) {
        let began = Moment::now();
        let budget = if self.begun { BUDGET.1 } else { BUDGET.0 };
        self.begun = true;
        let new = |pid: &&u32| !self.others.contains_key(*pid) && !self.denied.contains(*pid);
        let mut queue: Vec<u32> = pids.iter().filter(new).copied().collect();
        let news = queue.len();
        queue.extend(pids.range(self.cursor.saturating_add(1)..).chain(pids.range(..=self.cursor)));
        for (at, pid) in queue.into_iter().enumerate() {
            let now = Moment::now();
            if now.since(began) > budget {
                return;
            }
            let in_turn = at >= news;
            if in_turn {
                self.cursor = pid;
            }
            let fresh = self.others.get(&pid).is_some_and(|seen| now.since(*seen) < AGAIN);
            if fresh || self.holders.contains_key(&pid) || (in_turn && self.denied.contains(&pid)) {
                continue;
            }
            self.look_at(roots, cgroup_v1, pid, found);
        }
    }

    fn look_at(&mut self, roots: &Roots, cgroup_v1: bool, pid: u32, found: &mut Found) {
        let looked = Dir::open(&roots.process(pid)).and_then(|dir| {
            let links = links(&dir, &mut self.buffer)?;
            if links.devices.is_empty() {
                return Ok(None);
            }
            let mut holder = Holder::of(dir, pid, cgroup_v1, &mut self.buffer)?;
            Ok(holder.read(found, &mut self.buffer)?.then_some(holder))
        });
        match looked {
            Ok(Some(holder)) => drop(self.holders.insert(pid, holder)),
            Ok(None) => drop(self.others.insert(pid, Moment::now())),
            Err(error) if error.is_gone() => drop(self.others.insert(pid, Moment::now())),
            Err(error) => {
                // counted once for each process, not at each look
                let denied = error.fault_reason() == Some("permission");
                if !denied || self.denied.insert(pid) {
                    found.faults.extend(error.fault_reason());
                }
            }
        }
    }
}

impl Holder {
    fn of(dir: Dir, pid: u32, cgroup_v1: bool, buffer: &mut Vec<u8>) -> Result<Self, ReadError> {
        let (start_ticks, comm) = who(&dir, buffer)?;
        let file = dir.file("cgroup")?;
        let cgroup = cgroup_path(file.read_once(buffer)?, cgroup_v1);
        let cgroup = cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?;
        let cgroup = String::from_utf8_lossy(cgroup).into();
        Ok(Self { dir, key: Key { start_ticks, pid }, owner: Owner { start_ticks, comm, cgroup } })
    }

    /// Reads its descriptors of graphics devices. False if it has none any more.
    fn read(&mut self, found: &mut Found, buffer: &mut Vec<u8>) -> Result<bool, ReadError> {
        let links = links(&self.dir, buffer)?;
        if links.devices.is_empty() {
            return Ok(false);
        }
        let (_, comm) = who(&self.dir, buffer)?;
        if *comm != *self.owner.comm {
            self.owner.comm = comm;
        }
        let infos = self.dir.below("fdinfo")?;
        for (number, node) in links.devices.into_iter().take(MOST_CLIENTS) {
            let text = infos.file_of(&number).and_then(|file| file.read_once(buffer).map(<[u8]>::to_vec));
            match text {
                // `None`: closed since, and the number is another file's
                Ok(text) => {
                    if let Some(client) = Client::parse(&text) {
                        found.descriptors.push((node, Descriptor { holder: self.key, client }));
                    }
                }
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        if links.computing {
            found.computing.insert(self.key);
        }
        found.owners.insert(self.key, self.owner.clone());
        Ok(true)
    }
}

/// Start time and printable name of a process.
fn who(dir: &Dir, buffer: &mut Vec<u8>) -> Result<(u64, Arc<str>), ReadError> {
    let stat = Stat::parse(dir.file("stat")?.read_once(buffer)?);
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    Ok((stat.start_ticks, crate::parse::printable(&stat.comm).into()))
}

/// The descriptors of a process that are graphics devices.
fn links(dir: &Dir, buffer: &mut Vec<u8>) -> Result<Links, ReadError> {
    let fds = dir.below("fd")?;
    let mut links = Links::default();
    let mut looked = 0;
    let mut failed = None;
    fds.for_each_while(buffer, |number, _| {
        looked += 1;
        let mut target = [MaybeUninit::uninit(); 64]; // a longer one is cut, and is none of these
        match readlinkat_raw(&fds, number, &mut target) {
            Ok((target, _)) => links.enter(number, target),
            Err(errno) => {
                let error = classify(errno, fds.path().join(number).display().to_string());
                if !error.is_gone() {
                    failed = Some(error);
                    return false;
                }
            }
        }
        looked < MOST_DESCRIPTORS
    })?;
    failed.map_or(Ok(links), Err)
}

impl Links {
    fn enter(&mut self, number: &OsStr, target: &[u8]) {
        if let Some(node) = target.strip_prefix(DEVICES) {
            self.devices.push((number.to_owned(), String::from_utf8_lossy(node).into_owned()));
        }
        self.computing |= target == COMPUTE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A procfs in a folder.
    struct Host(tempfile::TempDir);

    /// The fdinfo of a client.
    fn client(id: u32) -> String {
        format!(
            "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{id}\ndrm-resident-vram:\t5\n"
        )
    }

    impl Host {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn roots(&self) -> Roots {
            Roots { proc: self.0.path().to_path_buf(), ..Roots::default() }
        }

        /// A process with these descriptors: number, target, and fdinfo.
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
                std::fs::write(folder.join(format!("fdinfo/{number}")), info).unwrap();
            }
        }
    }

    /// Pid of the holder, node and id of each descriptor.
    fn told(found: &Found) -> Vec<(u32, &str, String)> {
        assert_eq!(found.faults, Vec::<&str>::new());
        let id =
            |client: &Client| String::from_utf8_lossy(client.id.as_deref().unwrap_or_default()).into_owned();
        let mut all: Vec<_> =
            found.descriptors.iter().map(|(node, d)| (d.holder.pid, &**node, id(&d.client))).collect();
        all.sort();
        all
    }

    #[test]
    fn holders_are_found_among_all_processes_and_only_their_devices_are_read() {
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
        let mut search = Search::default();
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!(told(&found), [(7, "card0", "2".into()), (7, "renderD128", "1".into())]);
        let key = Key { start_ticks: 700, pid: 7 };
        let owner = Owner { start_ticks: 700, comm: "train) R 1".into(), cgroup: "/docker/abc".into() };
        assert_eq!(found.owners.get(&key), Some(&owner));
        assert_eq!(found.computing, BTreeSet::from([key]));
        assert_eq!((found.readable, found.denied), (3, 0));
    }

    #[test]
    fn a_holder_is_read_each_time_and_forgotten_when_it_closes_its_device_or_ends() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut search = Search::default();
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()).len(), 1);
        std::fs::write(host.0.path().join("7/fdinfo/3"), client(4)).unwrap();
        assert_eq!(told(&search.known()), [(7, "renderD128", "4".into())]);
        std::fs::remove_file(host.0.path().join("7/fd/3")).unwrap();
        assert_eq!(told(&search.known()), []);
        host.process(8, "train", &[(3, "/dev/dri/renderD128", &client(5))]);
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()), [(8, "renderD128", "5".into())]);
        std::fs::remove_dir_all(host.0.path().join("8")).unwrap();
        assert_eq!(told(&search.round(&host.roots(), false).unwrap()), []);
    }

    #[test]
    fn a_process_whose_pid_is_anothers_by_now_is_read_no_more() {
        let host = Host::new();
        host.process(7, "train", &[(3, "/dev/dri/renderD128", &client(1))]);
        let mut search = Search::default();
        search.round(&host.roots(), false).unwrap();
        // the folder is another one under the same name, as with a pid
        host.process(7, "other", &[(3, "/dev/dri/renderD128", &client(2))]);
        let found = search.known();
        assert_eq!(found.descriptors.len(), 0);
        let found = search.round(&host.roots(), false).unwrap();
        assert_eq!(told(&found), [(7, "renderD128", "2".into())]);
    }
}
