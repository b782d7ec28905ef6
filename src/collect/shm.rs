//! `/dev/shm` of containers and of the host: its size and use.
//!
//! That of a container is reached through `/proc/PID/root` in the container's mount namespace, all of which the container controls. So
//! the lookup stays below the container's root, follows no link, and uses only names in the kernel's cache
//! ([`ResolveFlags::CACHED`]), so that no request reaches a file system of the container; and the mount must be a tmpfs
//! by the kernel's own mount table before its size is read. Nothing stays open, since that would keep the memory of an
//! ended container. The reads run on another thread ([`ReadPool`]), because there may be other ways to block them.
//!
//! Before Linux 5.12 there is no such lookup. The mount table has the size of the tmpfs then, and its use is unknown.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags, fstatfs, makedev, open, openat, openat2, statx,
};
use rustix::io::Errno;

use super::container_owner::ContainerOwner;
use super::{CollectOutcome, Collector, Context, Output};
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::discover::{Container, ContainerId};
use crate::host::process::ProcessId;
use crate::host::read_pool::{PoolConfig, ReadOutcome, ReadPool};
use crate::host::{Dir, HostPaths, KernelFile, ReadError, classify};
use crate::parse::mount;

/// Minimum interval between reads of the sizes.
const MIN_INTERVAL: Duration = Duration::from_secs(5);
/// How long a size is shown that could not be read again.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Maximum wait of a cycle for sizes, if a container is new or cycles are rare. Later results are used in a later cycle.
const MAX_WAIT: Duration = Duration::from_millis(10);
const POOL_CONFIG: PoolConfig = PoolConfig {
    name: "shm-sizes",
    handover_after: Duration::from_millis(4),
    timeout: Duration::from_secs(2),
    rest_factor: 9,
    turn: Duration::ZERO,
};
/// `f_type` of tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A mount: its id, and the device of its file system, which containers may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MountKey {
    /// The id that no later mount gets, unlike the one in the mount table. `None` before Linux 6.8.
    unique_id: Option<u64>,
    device: u64,
}

/// A container's own `/dev/shm`.
#[derive(Clone, Copy, Debug)]
struct ContainerShm {
    mount: MountKey,
    /// Used bytes, if they are known, and total ones.
    size: (Option<u64>, u64),
    /// Start of the container's oldest process, in clock ticks since boot.
    start_ticks: u64,
    read_at: Timestamp,
}

/// What a container has at `/dev/shm`.
#[derive(Clone, Copy, Debug)]
enum ShmFound {
    Tmpfs(ContainerShm),
    /// Nothing, or that of the host.
    NotItsOwn,
    /// Something else than a tmpfs, such as a link.
    NoTmpfs,
    /// The path is not in the kernel's cache, or something was mounted anywhere on the host during the lookup.
    NotCached,
}

/// `STATX_MNT_ID_UNIQUE`, which rustix does not name.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The collector.
#[derive(Debug, Default)]
pub struct SharedMemory {
    last: Option<Timestamp>,
    pool: Option<ReadPool<ContainerOwner, ShmRead, ShmFound>>,
    /// Containers with a pending read.
    pending: HashSet<ContainerId>,
    /// Containers that were read; `None` if a container has no `/dev/shm` of its own, or it could not be read.
    sizes: HashMap<ContainerId, Option<ContainerShm>>,
    /// Containers whose first read found nothing in the kernel's cache.
    not_cached: HashSet<ContainerId>,
    host: Arc<Mutex<HostShm>>,
    denied: bool,
}

/// A queued read: the process whose view of `/dev/shm` is read, the device of the host's own, and the mount that was found to be
/// the container's own tmpfs when it was last read.
#[derive(Clone, Copy, Debug)]
struct ShmRead {
    process: ProcessId,
    host: Option<u64>,
    known: Option<MountKey>,
}

/// The host's own `/dev/shm`. Keeps no descriptor of it, which would keep the mount busy.
#[derive(Debug, Default)]
pub struct HostShm {
    /// The mount table of process 1, and the device of what that has at `/dev/shm`.
    mountinfo: Option<(KernelFile, Option<u64>)>,
}

impl HostShm {
    /// Returns its used and total bytes, or `None` if it is not a tmpfs or not visible.
    pub fn sizes(&mut self, host_paths: &HostPaths) -> Option<(u64, u64)> {
        sizes(&self.open(host_paths)?).ok()?
    }

    /// Opens it. In a container, memledger's own may be the container's: it is the host's if process 1 of the host has the
    /// same file system there. Otherwise the one of process 1 is opened, which needs more rights; if that fails, memledger's own is
    /// used only if `/dev` was configured.
    fn open(&mut self, host_paths: &HostPaths) -> Option<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let ours = open(host_paths.dev.join("shm"), flags, Mode::empty()).ok();
        if host_paths.in_initial_pid_namespace() {
            let first = host_paths.process(1);
            if let Some(Ok(mount)) = ours.as_ref().map(mount_of)
                && self.device(&first) == Some(mount.device)
            {
                return ours;
            }
            if let Ok(root) = open(first.join("root"), flags, Mode::empty()) {
                return openat2(&root, "dev/shm", flags, Mode::empty(), ResolveFlags::IN_ROOT).ok();
            }
        }
        ours.filter(|_| host_paths.dev != HostPaths::default().dev)
    }

    /// Returns the device of what process 1 has there. Its mount table, which is long on a host with many containers, is read only
    /// after a change.
    fn device(&mut self, first: &Path) -> Option<u64> {
        if let Some((file, device)) = &self.mountinfo
            && !file.has_changed()
        {
            return *device;
        }
        self.mountinfo = KernelFile::open(&first.join("mountinfo")).ok().map(|file| {
            let mut device = None;
            let read = file.find_line(&mut Vec::new(), |lines| {
                device = mount::at(lines, b"/dev/shm").and_then(|mount| mount.device()).or(device);
                None::<()>
            });
            let device = device.filter(|_| read.is_ok()).map(|(major, minor)| makedev(major, minor));
            (file, device)
        });
        self.mountinfo.as_ref()?.1
    }
}

/// Returns used and total bytes; `None` if it is not a tmpfs with a size.
fn sizes(fd: &impl AsFd) -> Result<Option<(u64, u64)>, Errno> {
    let stat = fstatfs(fd)?;
    if stat.f_type as u64 != TMPFS_MAGIC || stat.f_blocks == 0 {
        return Ok(None); // not a tmpfs, or a tmpfs without a size limit
    }
    let block = stat.f_bsize as u64;
    Ok(Some(((stat.f_blocks - stat.f_bfree) * block, stat.f_blocks * block)))
}

/// Returns the attributes of an open descriptor that are those of its mount, without a request to the file system (`DONT_SYNC`).
fn statx_mount(fd: &impl AsFd, mask: StatxFlags) -> Result<Statx, Errno> {
    statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, mask)
}

/// Returns the mount of an open descriptor.
fn mount_of(fd: &impl AsFd) -> Result<MountKey, Errno> {
    let stat = statx_mount(fd, MNT_ID_UNIQUE)?;
    let is_unique = stat.stx_mask & MNT_ID_UNIQUE.bits() != 0;
    let device = makedev(stat.stx_dev_major, stat.stx_dev_minor);
    Ok(MountKey { unique_id: is_unique.then_some(stat.stx_mnt_id), device })
}

/// Reads the container's own `/dev/shm` as one of its processes sees it.
///
/// The mount table is most of the cost, so it is read only for a mount that is not known yet, as is whether the pid is still that of
/// the process: whoever sees the container's mount sees its size. Before Linux 6.8 it is always read: a later mount can get the id of
/// a tmpfs and its device. If that is a FUSE file system that does not answer, the thread hangs, and the process cannot end.
fn container_shm(
    host_paths: &HostPaths,
    ShmRead { process, host, known }: ShmRead,
    buffer: &mut Vec<u8>,
) -> Result<ShmFound, ReadError> {
    let dir = Dir::open(&host_paths.process(process.pid))?;
    let what = || format!("/dev/shm of process {}", process.pid);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(&dir, "root", flags, Mode::empty()).map_err(|errno| classify(errno, what()))?;
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::CACHED;
    let shm = openat2(&root, "dev/shm", flags, Mode::empty(), resolve);
    let opened = shm.and_then(|shm| Ok((mount_of(&shm)?, shm)));
    let is_known = opened.as_ref().is_ok_and(|(mount, _)| mount.unique_id.is_some() && known == Some(*mount));
    if !is_known {
        process.check(&dir, buffer)?;
    }
    let (mount, shm) = match opened {
        Ok(opened) => opened,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(ShmFound::NotItsOwn),
        Err(Errno::AGAIN) => return Ok(ShmFound::NotCached),
        Err(Errno::LOOP | Errno::XDEV) => return Ok(ShmFound::NoTmpfs),
        // Linux 5.6 has openat2, 5.12 has the flag
        Err(Errno::INVAL | Errno::NOSYS) => return listed_shm(&dir, process, host, buffer),
        Err(errno) => return Err(classify(errno, what())),
    };
    if host == Some(mount.device) {
        return Ok(ShmFound::NotItsOwn); // shared with the host, not reported again
    }
    if !is_known {
        let listed = statx_mount(&shm, StatxFlags::MNT_ID).map_err(|errno| classify(errno, what()))?;
        let is_tmpfs = dir.file("mountinfo")?.find_line(buffer, |lines| {
            let found = mount::find(lines, listed.stx_mnt_id)?;
            Some(found.fs_type == b"tmpfs" && found.mount_point.ends_with(b"/dev/shm"))
        })?;
        if is_tmpfs != Some(true) {
            return Ok(ShmFound::NoTmpfs);
        }
    }
    let size = sizes(&shm).map_err(|errno| classify(errno, what()))?;
    Ok(size.map_or(ShmFound::NotItsOwn, |size| {
        ShmFound::Tmpfs(ContainerShm {
            mount,
            size: (Some(size.0), size.1),
            start_ticks: process.start_ticks,
            read_at: Timestamp::now(),
        })
    }))
}

/// Returns the container's own `/dev/shm` by the mount table of one of its processes, without its use.
fn listed_shm(
    dir: &Dir,
    process: ProcessId,
    host: Option<u64>,
    buffer: &mut Vec<u8>,
) -> Result<ShmFound, ReadError> {
    process.check(dir, buffer)?;
    let mut last = None; // it hides the others
    dir.file("mountinfo")?.find_line(buffer, |lines| {
        last = mount::at(lines, b"/dev/shm").map(|mount| (mount.device(), mount.tmpfs_size())).or(last);
        None::<()>
    })?;
    let Some((Some((major, minor)), Some(total))) = last else { return Ok(ShmFound::NotItsOwn) };
    let mount = MountKey { unique_id: None, device: makedev(major, minor) };
    if host == Some(mount.device) {
        return Ok(ShmFound::NotItsOwn);
    }
    let (start_ticks, read_at) = (process.start_ticks, Timestamp::now());
    Ok(ShmFound::Tmpfs(ContainerShm { mount, size: (None, total), start_ticks, read_at }))
}

impl SharedMemory {
    /// Creates the collector. `host`: shared with the collector of the host.
    pub fn new(host: Arc<Mutex<HostShm>>) -> Self {
        Self { host, ..Self::default() }
    }

    /// Queues reads of the sizes of all containers, and may wait a little for the outcomes.
    fn submit(&mut self, context: &Context<'_>, output: &Output<'_>, must_wait: bool) {
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner).open(context.host_paths);
        let host = host.and_then(|fd| Some(mount_of(&fd).ok()?.device));
        let mut reads = Vec::new();
        for (number, container) in context.inventory.containers.iter().enumerate() {
            // the oldest process has the container's own view; later ones may have changed theirs
            let processes = output.cycle_data.processes.of(number);
            let Some(oldest) = processes.iter().min_by_key(|p| (p.meta.start_ticks, p.pid)) else {
                self.sizes.remove(&container.id); // read with its next process
                continue;
            };
            if self.pending.insert(container.id.clone()) {
                let process = ProcessId { pid: oldest.pid, start_ticks: oldest.meta.start_ticks };
                let known = self.sizes.get(&container.id).copied().flatten().map(|shm| shm.mount);
                reads.push((ContainerOwner::of(container), ShmRead { process, host, known }));
            }
        }
        self.denied = false;
        let pool = self.pool.get_or_insert_with(|| {
            let host_paths = context.host_paths.clone();
            ReadPool::new(POOL_CONFIG, move |read: &ShmRead, buffer| {
                container_shm(&host_paths, *read, buffer)
            })
        });
        pool.submit(reads);
        if must_wait {
            pool.wait(MAX_WAIT);
        }
    }

    fn take(&mut self, now: Timestamp, output: &mut Output<'_>) {
        let outcomes = self.pool.as_ref().map(ReadPool::take).unwrap_or_default();
        for (ContainerOwner { id, .. }, _, outcome) in outcomes {
            self.pending.remove(&id);
            let size = match outcome {
                ReadOutcome::Finished(Ok(ShmFound::Tmpfs(size))) => Some(size),
                ReadOutcome::Finished(Ok(ShmFound::NotItsOwn)) => None,
                // the last size stays for a while: it may also have been removed, of which the cache has nothing
                ReadOutcome::Finished(Ok(ShmFound::NotCached)) => {
                    if !self.sizes.contains_key(&id) && self.not_cached.insert(id.clone()) {
                        continue; // a new container is read again at once, a second time
                    }
                    let last = self.sizes.get(&id).copied().flatten();
                    last.filter(|shm| now.since(shm.read_at) < MAX_AGE)
                }
                ReadOutcome::Finished(Ok(ShmFound::NoTmpfs)) => {
                    output.read_errors.warn(
                        &id,
                        "no_tmpfs",
                        &"its /dev/shm is no tmpfs, its size is omitted",
                    );
                    None
                }
                ReadOutcome::Finished(Err(error)) if error.is_gone() => {
                    self.sizes.remove(&id); // read again with its next process
                    continue;
                }
                ReadOutcome::Finished(Err(error)) => {
                    self.denied |= error.reason_label() == Some("permission");
                    output.read_errors.record_of(&id, &error);
                    None
                }
                ReadOutcome::Skipped => {
                    output.read_errors.count("blocked");
                    None
                }
            };
            self.sizes.insert(id, size);
        }
    }
}

impl SharedMemory {
    /// Writes the sizes of each container for the ledger, and as series, where the one that the containers of a pod share is
    /// written once: for the first with a name, or else for the one that started last, since a pod's sandbox starts first.
    fn write(&self, containers: &[Arc<Container>], output: &mut Output<'_>) {
        let found: Vec<_> =
            containers.iter().map(|container| self.sizes.get(&container.id).copied().flatten()).collect();
        output.cycle_data.shm.extend(found.iter().map(|found| found.map(|shm| shm.size)));
        let mut found: Vec<_> =
            found.into_iter().enumerate().filter_map(|(number, shm)| Some((number, shm?))).collect();
        found.sort_by_key(|(number, shm)| {
            let container = &containers[*number];
            (*container.identity.name == *container.id.short()).then_some(Reverse(shm.start_ticks))
        });
        let mut shown = HashSet::new();
        for (number, ContainerShm { mount, size: (used, size), .. }) in found {
            if shown.insert(mount.device) {
                if let Some(used) = used {
                    output.series.container(CONTAINER_SHM_USED, number as u32, [], used as f64);
                }
                output.series.container(CONTAINER_SHM_SIZE, number as u32, [], size as f64);
            }
        }
    }
}

impl Collector for SharedMemory {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        output.read_errors.init_at_zero("blocked");
        output.read_errors.init_at_zero("timeout");
        output.read_errors.init_at_zero("too_large");
        let has_new = context.inventory.containers.iter().enumerate().any(|(number, container)| {
            !self.sizes.contains_key(&container.id) && !output.cycle_data.processes.of(number).is_empty()
        });
        self.take(context.now, output);
        let age = self.last.map(|last| context.now.since(last));
        if age.is_none_or(|age| age >= MIN_INTERVAL || (has_new && age >= Duration::from_secs(1))) {
            let running = context.inventory.ids();
            self.sizes.retain(|id, _| running.contains(id));
            self.not_cached.retain(|id| running.contains(id));
            // with a long sampling interval the next cycle would be late to show them
            let is_rare = age.is_some_and(|age| age >= MIN_INTERVAL + Duration::from_secs(1));
            self.submit(context, output, has_new || is_rare);
            self.last = Some(context.now);
        }
        self.take(context.now, output);
        self.write(&context.inventory.containers, output);
        let nothing = self.sizes.values().all(Option::is_none);
        match () {
            () if (self.denied && nothing) || !output.cycle_data.processes.readable => CollectOutcome::Failed,
            () => CollectOutcome::Ok,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Identity;

    /// As before Linux 5.12, for a process of this test.
    #[test]
    fn mount_table_has_the_size_without_a_lookup() {
        let pid = std::process::id();
        let dir = Dir::open(Path::new(&format!("/proc/{pid}"))).unwrap();
        let mut buffer = Vec::new();
        let stat = dir.file("stat").unwrap().read_once(&mut buffer).map(crate::parse::process::Stat::parse);
        let process = ProcessId { pid, start_ticks: stat.unwrap().unwrap().start_ticks };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let shm = open("/dev/shm", flags, Mode::empty()).unwrap();
        let listed = listed_shm(&dir, process, None, &mut buffer).unwrap();
        match (sizes(&shm).unwrap(), listed) {
            (Some((_, total)), ShmFound::Tmpfs(found)) => {
                assert_eq!(found.size, (None, total));
                assert_eq!(found.mount.device, mount_of(&shm).unwrap().device);
                let hosts = listed_shm(&dir, process, Some(found.mount.device), &mut buffer);
                assert!(matches!(hosts, Ok(ShmFound::NotItsOwn)), "shared with the host");
            }
            // the kernel lists no size where it is the default
            (_, listed) => assert!(matches!(listed, ShmFound::NotItsOwn), "{listed:?}"),
        }
    }

    #[test]
    fn size_of_shared_one_is_known_for_each_container_and_exported_once() {
        let ids = ["own", "sidecar", "trainer", "pause", "trainer-2", "pause-2"];
        let shm = |device, (used, size), start_ticks| {
            let mount = MountKey { unique_id: Some(30 + device), device };
            let size = (Some(used), size);
            Some(ContainerShm { mount, size, start_ticks, read_at: Timestamp::now() })
        };
        let pod = |start_ticks| shm(7, (60, 64), start_ticks);
        let unnamed = |start_ticks| shm(9, (2, 64), start_ticks);
        let sizes = [shm(8, (1, 64), 1), pod(12), pod(11), pod(10), unnamed(21), unnamed(20)];
        let sizes = ids.map(ContainerId::new).into_iter().zip(sizes).collect();
        let collector = SharedMemory { sizes, ..SharedMemory::default() };
        let (mut series, mut cycle_data, mut read_errors) = Default::default();
        let mut output =
            Output { series: &mut series, cycle_data: &mut cycle_data, read_errors: &mut read_errors };
        let plain = |id: &str| Container::in_cgroup(id, id);
        let named = |id: &str| {
            let identity = Identity::named(&format!("{id}-1"));
            Arc::new(Container { identity, ..Container::clone(&plain(id)) })
        };
        let unnamed = ["none", "own", "pause", "pause-2", "trainer-2"].map(plain);
        let containers: Vec<_> = unnamed.into_iter().chain([named("sidecar"), named("trainer")]).collect();
        collector.write(&containers, &mut output);
        let (pod, unnamed) = (Some((Some(60), 64)), Some((Some(2), 64)));
        assert_eq!(cycle_data.shm, [None, Some((Some(1), 64)), pod, unnamed, unnamed, pod, pod]);
        let used = series.rows().iter().filter(|row| row.family == FamilyId::CONTAINER_SHM_USED);
        let mut used: Vec<_> = used.map(|row| (row.container, row.value)).collect();
        used.sort_by_key(|(container, _)| *container);
        assert_eq!(used, [(1, 1.0), (4, 2.0), (5, 60.0)], "the first with a name, or else the youngest");
    }
}
