//! `/dev/shm` of containers: how large, and how full.
//!
//! The way leads through `/proc/PID/root` into the container's mount namespace, where everything may be made to mislead
//! us. So: the lookup stays below the container's root, follows no link, and uses only names that the kernel has in its
//! cache ([`ResolveFlags::CACHED`]), so that no file system of the container is asked anything; and the mount that was
//! reached must be a tmpfs by the kernel's own list of mounts before it is asked for its size. Nothing stays open, since
//! that would keep the memory of a container that ended.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags, fstatfs, makedev, open, openat2, statx};
use rustix::io::Errno;

use super::process::Process;
use super::{Collector, Context, Outcome, Output};
use crate::catalog::*;
use crate::clock::Moment;
use crate::discover::ContainerId;
use crate::host::{KernelFile, ReadError, Roots, classify};
use crate::parse::mount;

/// The sizes are read again no sooner than this.
const EVERY: Duration = Duration::from_secs(5);
/// `f_type` of tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The collector.
#[derive(Debug, Default)]
pub struct SharedMemory {
    last: Option<Moment>,
    /// Containers that were looked at; `None`: it has no `/dev/shm` of its own, or it could not be read.
    sizes: HashMap<ContainerId, Option<(u64, u64)>>,
    denied: bool,
    /// This kernel cannot look into a container safely.
    absent: bool,
    buffer: Vec<u8>,
}

/// Used and total bytes of the host's own `/dev/shm`; `None` if it is no tmpfs or cannot be seen from here.
pub fn host_shm(roots: &Roots) -> Option<(u64, u64)> {
    sizes(&open_host_shm(roots)?).ok()?
}

/// The host's own `/dev/shm`. Ours may be a container's: it is the host's if the host's first process has the same
/// mount. Otherwise that process's own is looked at; and where it cannot be, only a `/dev` that a setting named is
/// believed to be the host's.
fn open_host_shm(roots: &Roots) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let ours = open(roots.dev.join("shm"), flags, Mode::empty()).ok();
    if roots.in_first_pid_namespace() {
        let first = roots.process(1);
        if let Some(Ok((id, _))) = ours.as_ref().map(mount_and_device)
            && let Ok(mountinfo) = KernelFile::open(&first.join("mountinfo"))
            && let Ok(text) = mountinfo.read_all(&mut Vec::new())
            && mount::find(text, id).is_some()
        {
            return ours;
        }
        if let Ok(root) = open(first.join("root"), flags, Mode::empty()) {
            return openat2(&root, "dev/shm", flags, Mode::empty(), ResolveFlags::IN_ROOT).ok();
        }
    }
    ours.filter(|_| roots.dev != Roots::default().dev)
}

fn sizes(fd: &impl AsFd) -> Result<Option<(u64, u64)>, Errno> {
    let stat = fstatfs(fd)?;
    if stat.f_type as u64 != TMPFS_MAGIC || stat.f_blocks == 0 {
        return Ok(None); // a tmpfs without a size limit has no size to run out of
    }
    let block = stat.f_bsize as u64;
    Ok(Some(((stat.f_blocks - stat.f_bfree) * block, stat.f_blocks * block)))
}

/// The mount and the device that an open descriptor lies on, without asking the file system (`DONT_SYNC`).
fn mount_and_device(fd: &impl AsFd) -> Result<(u64, u64), Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(fd, c"", flags, StatxFlags::MNT_ID)?;
    Ok((stat.stx_mnt_id, makedev(stat.stx_dev_major, stat.stx_dev_minor)))
}

/// A container's own `/dev/shm`, as one of its processes sees it.
fn container_shm(
    roots: &Roots,
    process: &Process,
    host: Option<u64>,
    buffer: &mut Vec<u8>,
) -> Result<Option<(u64, u64)>, ReadError> {
    let dir = roots.process(process.pid);
    let what = || format!("/dev/shm of process {}", process.pid);
    let root = open(dir.join("root"), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| classify(errno, what()))?;
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::CACHED;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let shm = match openat2(&root, "dev/shm", flags, Mode::empty(), resolve) {
        Ok(shm) => shm,
        // no such directory, a link, or a lookup that would have to ask the container's file system
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::AGAIN) => return Ok(None),
        // Linux 5.6 knows openat2, 5.12 the flag that makes it safe
        Err(Errno::INVAL) => return Err(ReadError::Absent("openat2 with RESOLVE_CACHED".to_owned())),
        Err(errno) => return Err(classify(errno, what())),
    };
    let (id, device) = mount_and_device(&shm).map_err(|errno| classify(errno, what()))?;
    if host == Some(device) {
        return Ok(None); // the container shares the host's, which is not repeated
    }
    let mountinfo = KernelFile::open(&dir.join("mountinfo"))?;
    let mount = mount::find(mountinfo.read_all(buffer)?, id);
    if mount.is_none_or(|mount| mount.fs_type != b"tmpfs" || !mount.mount_point.ends_with(b"/dev/shm")) {
        return Ok(None);
    }
    sizes(&shm).map_err(|errno| classify(errno, what()))
}

impl SharedMemory {
    fn read(&mut self, context: &Context<'_>, output: &mut Output<'_>) {
        let host = open_host_shm(context.roots).and_then(|fd| Some(mount_and_device(&fd).ok()?.1));
        let mut sizes = HashMap::with_capacity(self.sizes.len());
        self.denied = false;
        for (number, container) in context.inventory.containers.iter().enumerate() {
            // the oldest process has the container's own view; later ones may have made themselves another
            let processes = output.readings.processes.of(number);
            let Some(oldest) = processes.iter().min_by_key(|p| (p.facts.start_ticks, p.pid)) else {
                continue;
            };
            match container_shm(context.roots, oldest, host, &mut self.buffer) {
                Ok(size) => drop(sizes.insert(container.id.clone(), size)),
                Err(error) if error.is_gone() => {} // looked at again with its next process
                Err(error) => {
                    self.denied |= error.fault_reason() == Some("permission");
                    self.absent |= matches!(error, ReadError::Absent(_));
                    output.faults.note(&error);
                    sizes.insert(container.id.clone(), None);
                }
            }
        }
        self.sizes = sizes;
    }
}

impl Collector for SharedMemory {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        let newcomer = context.inventory.containers.iter().enumerate().any(|(number, container)| {
            !self.sizes.contains_key(&container.id) && !output.readings.processes.of(number).is_empty()
        });
        let age = self.last.map(|last| context.now.since(last));
        if age.is_none_or(|age| age >= EVERY || (newcomer && age >= Duration::from_secs(1))) {
            self.read(context, output);
            self.last = Some(context.now);
        }
        for (number, container) in context.inventory.containers.iter().enumerate() {
            if let Some(Some((used, size))) = self.sizes.get(&container.id) {
                output.series.container(CONTAINER_SHM_USED, number as u32, [], *used as f64);
                output.series.container(CONTAINER_SHM_SIZE, number as u32, [], *size as f64);
            }
        }
        let nothing = self.sizes.values().all(Option::is_none);
        match () {
            () if self.absent && nothing => Outcome::Absent,
            () if (self.denied && nothing) || !output.readings.processes.readable => Outcome::Failed,
            () => Outcome::Read,
        }
    }
}
