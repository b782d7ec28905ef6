//! One process that holds descriptors of graphics devices: which they are, and what the driver tells of each.
//!
//! A process may have a million descriptors, and nothing but the link of each tells which is a GPU's. So the numbers that
//! were GPUs are remembered and read at every reading, and the list is gone through a part at a time, again and again.
//!
//! What is not known whole is not told: until the list was gone through once, and where a process has more descriptors of
//! GPUs than are read, its memory is absent.

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::sync::Arc;

use rustix::fs::readlinkat_raw;

use super::books::{Descriptor, Key};
use super::search::{Found, Until};
use crate::collect::gpu::Owner;
use crate::host::{Dir, ReadError, classify};
use crate::parse::drm::Client;
use crate::parse::process::{Stat, cgroup_path};

/// Descriptors of one process that are looked at in one go.
const AT_ONCE: usize = 4 * 1024;
/// Descriptors of graphics devices of one process that are read.
pub const MOST_CLIENTS: usize = 512;

const DEVICES: &[u8] = b"/dev/dri/";
/// AMD's device for computing: work that is given to it does not pass the engines' statistics.
const COMPUTE: &[u8] = b"/dev/kfd";

/// A descriptor of a graphics device: its number, and the name of its node as its process sees it.
type Link = (OsString, String);

/// How far the descriptors of a process have been gone through, and what was found on the way.
#[derive(Debug, Default)]
pub struct Listing {
    /// Where to go on; 0 at the start.
    pub place: u64,
    devices: Vec<Link>,
    computing: bool,
}

impl Listing {
    /// One that goes on from here.
    pub fn from(place: u64) -> Self {
        Self { place, ..Self::default() }
    }

    /// True if a graphics device was found.
    pub fn found_any(&self) -> bool {
        !self.devices.is_empty()
    }

    /// Goes on for a part. True at the end of the list.
    ///
    /// The links are read and not followed: a look at what is behind one could hang on a dead file server.
    pub fn go_on(&mut self, process: &Dir, buffer: &mut Vec<u8>) -> Result<bool, ReadError> {
        let fds = process.below("fd")?;
        let next = fds.for_some(self.place, AT_ONCE, buffer, |number| match target(&fds, number) {
            Ok(Target::Device(node)) => {
                // one more than are read, which tells that there are too many
                if self.devices.len() <= MOST_CLIENTS {
                    self.devices.push((number.to_owned(), node));
                }
                Ok(())
            }
            Ok(Target::Compute) => {
                self.computing = true;
                Ok(())
            }
            Ok(Target::Other) => Ok(()),
            Err(error) if error.is_gone() => Ok(()),
            Err(error) => Err(error),
        })?;
        self.place = next.unwrap_or(0);
        Ok(next.is_none())
    }
}

enum Target {
    /// A graphics device, with the name of its node.
    Device(String),
    Compute,
    Other,
}

/// What a descriptor leads to.
fn target(fds: &Dir, number: &OsStr) -> Result<Target, ReadError> {
    let mut target = [MaybeUninit::uninit(); 64]; // a longer one is cut, and is none of these
    let (target, _) = readlinkat_raw(fds, number, &mut target)
        .map_err(|errno| classify(errno, fds.path().join(number).display().to_string()))?;
    Ok(match target.strip_prefix(DEVICES) {
        Some(node) => Target::Device(String::from_utf8_lossy(node).into_owned()),
        None if target == COMPUTE => Target::Compute,
        None => Target::Other,
    })
}

/// A process that holds a descriptor of a graphics device.
#[derive(Debug)]
pub struct Holder {
    /// Answers *gone* once the process has ended, also when its pid is another's by then.
    dir: Dir,
    key: Key,
    owner: Owner,
    devices: Vec<Link>,
    computing: bool,
    /// All descriptors were gone through at least once.
    whole: bool,
    /// It has more descriptors of devices than are read.
    too_many: bool,
    listing: Listing,
}

impl Holder {
    /// The process of this directory, and what was found of it. `whole`: that is all that it holds.
    pub fn of(
        dir: Dir,
        pid: u32,
        cgroup_v1: bool,
        found: &Listing,
        whole: bool,
        buffer: &mut Vec<u8>,
    ) -> Result<Self, ReadError> {
        let (start_ticks, comm) = who(&dir, buffer)?;
        let file = dir.file("cgroup")?;
        let cgroup = cgroup_path(file.read_once(buffer)?, cgroup_v1);
        let cgroup = cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?;
        let cgroup = String::from_utf8_lossy(cgroup).into();
        let key = Key { start_ticks, pid };
        let owner = Owner { start_ticks, comm, cgroup };
        let mut holder = Self {
            dir,
            key,
            owner,
            devices: vec![],
            computing: false,
            whole,
            too_many: false,
            listing: Listing::default(),
        };
        holder.learn(found);
        Ok(holder)
    }

    /// Descriptors that are read at every reading.
    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// Its cgroup.
    pub fn cgroup(&self) -> &Arc<str> {
        &self.owner.cgroup
    }

    /// Goes through a part of its descriptors, for devices that it opened since.
    pub fn look_for_more(&mut self, buffer: &mut Vec<u8>) -> Result<(), ReadError> {
        if self.listing.go_on(&self.dir, buffer)? {
            let listing = std::mem::take(&mut self.listing);
            (self.devices, self.computing, self.whole) = (listing.devices, listing.computing, true);
            self.too_many = self.devices.len() > MOST_CLIENTS;
        } else {
            let listing = std::mem::take(&mut self.listing);
            self.learn(&listing);
            self.listing = listing;
        }
        Ok(())
    }

    fn learn(&mut self, listing: &Listing) {
        for device in &listing.devices {
            if self.devices.len() <= MOST_CLIENTS && !self.devices.contains(device) {
                self.devices.push(device.clone());
            }
        }
        self.too_many |= self.devices.len() > MOST_CLIENTS;
        self.computing |= listing.computing;
    }

    /// Reads the descriptors that are known. False if none of them is a graphics device's any more.
    pub fn read(&mut self, found: &mut Found, until: Until, buffer: &mut Vec<u8>) -> Result<bool, ReadError> {
        let mut whole = self.whole && !self.too_many;
        let mut closed = Vec::new();
        if !until.is_over() {
            let (_, comm) = who(&self.dir, buffer)?;
            if *comm != *self.owner.comm {
                self.owner.comm = comm;
            }
        }
        let (fds, infos) = (self.dir.below("fd")?, self.dir.below("fdinfo")?);
        for (at, (number, node)) in self.devices.iter().enumerate().take(MOST_CLIENTS) {
            if until.is_over() {
                whole = false;
                break;
            }
            match read_one(&fds, &infos, number, node, buffer) {
                Ok(Some(client)) => {
                    found.descriptors.push((node.clone(), Descriptor { holder: self.key, client }));
                }
                // a device that keeps no statistics
                Ok(None) => {}
                Err(error) if error.is_gone() => closed.push(at),
                Err(error) => return Err(error),
            }
        }
        for at in closed.into_iter().rev() {
            self.devices.remove(at);
        }
        if self.devices.is_empty() {
            return Ok(false);
        }
        if !whole {
            // where it is only not gone through yet, nothing has failed
            found.faults.extend(self.whole.then_some("io"));
            let nodes = self.devices.iter().map(|(_, node)| node.clone()).collect();
            found.in_part.insert(self.key, nodes);
        }
        if self.computing {
            found.computing.insert(self.key);
        }
        found.owners.insert(self.key, self.owner.clone());
        Ok(true)
    }
}

/// What the driver tells of one descriptor; `None` if nothing.
///
/// # Errors
/// [`ReadError::Gone`] if it was closed, also if its number is another file's by now.
fn read_one(
    fds: &Dir,
    infos: &Dir,
    number: &OsStr,
    node: &str,
    buffer: &mut Vec<u8>,
) -> Result<Option<Client>, ReadError> {
    if !matches!(target(fds, number)?, Target::Device(now) if now == node) {
        return Err(ReadError::Gone(fds.path().join(number).display().to_string()));
    }
    Ok(Client::parse(infos.file_of(number)?.read_once(buffer)?))
}

/// Start time and printable name of a process.
fn who(dir: &Dir, buffer: &mut Vec<u8>) -> Result<(u64, Arc<str>), ReadError> {
    let stat = Stat::parse(dir.file("stat")?.read_once(buffer)?);
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    Ok((stat.start_ticks, crate::parse::printable(&stat.comm).into()))
}
