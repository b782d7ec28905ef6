//! Who a process on a GPU is: pid to start time, name and cgroup, from `/proc/PID`.

use std::collections::HashMap;
use std::sync::Arc;

use super::reading::Owner;
use crate::host::{Dir, KernelFile, ReadError, Roots};
use crate::parse::process::{Stat, cgroup_path};

/// A clock tick, and a little more for the two clocks involved.
const START_SLACK_TICKS: u64 = 3;

/// The processes of the last reading, so that a cgroup is looked up once per process.
#[derive(Debug, Default)]
pub struct Owners {
    known: HashMap<(u32, u64), Owner>,
    found: HashMap<(u32, u64), Owner>,
}

impl Owners {
    /// Who a pid is; `None` if no such process can be seen, or if it started after `uptime_ticks`, the moment before
    /// the driver was asked: such a process has only inherited the number.
    pub fn of(
        &mut self,
        roots: &Roots,
        pid: u32,
        uptime_ticks: u64,
        cgroup_v1: bool,
        faults: &mut Vec<&'static str>,
    ) -> Option<Owner> {
        match self.look(roots, pid, cgroup_v1) {
            Ok(owner) if owner.start_ticks <= uptime_ticks + START_SLACK_TICKS => {
                self.found.insert((pid, owner.start_ticks), owner.clone());
                Some(owner)
            }
            Ok(_) => None,
            Err(error) => {
                faults.extend(error.fault_reason());
                None
            }
        }
    }

    /// The reading is complete: processes that were not asked for in it are forgotten.
    pub fn end_reading(&mut self) {
        self.known = std::mem::take(&mut self.found);
    }

    fn look(&self, roots: &Roots, pid: u32, cgroup_v1: bool) -> Result<Owner, ReadError> {
        let mut buffer = Vec::new();
        let dir = Dir::open(&roots.process(pid))?;
        let stat = Stat::parse(dir.file("stat")?.read_once(&mut buffer)?);
        let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
        if let Some(known) = self.known.get(&(pid, stat.start_ticks)) {
            let comm = String::from_utf8_lossy(&stat.comm);
            let comm = if *known.comm == *comm { Arc::clone(&known.comm) } else { comm.into() };
            return Ok(Owner { comm, ..known.clone() });
        }
        let file = dir.file("cgroup")?;
        let cgroup = cgroup_path(file.read_once(&mut buffer)?, cgroup_v1);
        let cgroup = cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?;
        let cgroup = String::from_utf8_lossy(cgroup).into();
        let comm = String::from_utf8_lossy(&stat.comm).into();
        Ok(Owner { start_ticks: stat.start_ticks, comm, cgroup })
    }
}

/// Clock ticks since boot, from `/proc/uptime` of the same host as the processes.
pub fn uptime_ticks(roots: &Roots) -> Option<u64> {
    let mut buffer = Vec::new();
    let file = KernelFile::open(&roots.proc.join("uptime")).ok()?;
    let text = std::str::from_utf8(file.read_once(&mut buffer).ok()?).ok()?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Some((seconds * rustix::param::clock_ticks_per_second() as f64) as u64)
}
