//! Whose process was at work when a GPU reported an error: NVML tells the error, the kernel log the pid.
//!
//! The process has mostly ended by the time the line is read. So it is remembered for a while which container each
//! process on a GPU was in. A pid that none of them had is nobody's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::attribute::gpu::Attributed;
use crate::clock::Moment;
use crate::collect::{Context, Readings};
use crate::discover::ContainerId;
use crate::parse::kernel_log::{PciAddress, Xid};

/// A process is remembered so long after it was last seen on a GPU.
const REMEMBERED: Duration = Duration::from_secs(60);

/// What is needed to tell whose an error was.
#[derive(Debug)]
pub struct Xids {
    /// Older lines are of before memledger's start: their pids say nothing.
    since_usec: u64,
    processes: HashMap<u32, (ContainerId, Moment)>,
    /// Index and UUID of every GPU that was seen, also of one that is lost by now.
    gpus: HashMap<PciAddress, (Arc<str>, Arc<str>)>,
}

/// An error that a container's process was at work for.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    /// Whose.
    pub container: ContainerId,
    /// Index and UUID of the GPU.
    pub gpu: (Arc<str>, Arc<str>),
    /// Its number.
    pub xid: u64,
    /// Unix time.
    pub at: f64,
}

impl Xids {
    /// Errors count from now on.
    pub fn new(now: Moment) -> Self {
        Self { since_usec: now.kernel_usec(), processes: HashMap::new(), gpus: HashMap::new() }
    }

    /// Enters one cycle. Returns what the kernel log told since the cycle before, as far as it is some container's.
    pub fn enter(
        &mut self,
        context: &Context<'_>,
        readings: &Readings,
        attributed: &Attributed,
        told: &[(u64, Xid)],
    ) -> Vec<Owned> {
        for held in &attributed.held {
            for (pid, container) in &held.owners {
                self.processes.insert(*pid, (container.clone(), held.at));
            }
        }
        self.processes.retain(|_, (_, at)| context.now.since(*at) < REMEMBERED);
        for (_, device) in readings.gpu_devices() {
            let identity = &device.identity;
            if let Some(address) = PciAddress::of(identity.pci_bus_id.as_bytes()) {
                self.gpus.insert(address, (Arc::clone(&identity.index), Arc::clone(&identity.uuid)));
            }
        }
        let owned = told.iter().filter(|(usec, _)| *usec > self.since_usec).filter_map(|(usec, xid)| {
            let (container, _) = self.processes.get(&xid.pid?)?;
            let gpu = self.gpus.get(&xid.gpu)?.clone();
            let at = context.now.unix_seconds_of_kernel(*usec);
            Some(Owned { container: container.clone(), gpu, xid: xid.xid, at })
        });
        owned.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::gpu::Held;
    use crate::collect::gpu::{Device, Identity, Pids, Reading};
    use crate::discover::Inventory;
    use crate::host::Roots;
    use crate::parse::kernel_log::Line;

    fn xid(text: &str) -> Xid {
        match Line::of(text.as_bytes()) {
            Some(Line::Xid(xid)) => xid,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn reading(now: Moment) -> Reading {
        let gpu = |index: &str, bus: &str| Identity {
            index: index.into(),
            uuid: format!("GPU-{index}").into(),
            pci_bus_id: bus.into(),
            ..Identity::default()
        };
        let gpus = [gpu("0", "00000000:65:00.0"), gpu("1", "00000000:66:00.0")];
        Reading {
            source: "gpu",
            at: now,
            took: Duration::ZERO,
            driver_version: None,
            cuda_version: None,
            counted: 2,
            devices: gpus.into_iter().map(|identity| Device::new(Arc::new(identity))).collect(),
            silent: vec![],
            pids: Pids::Proven,
            faults: vec![],
        }
    }

    #[test]
    fn an_error_is_the_containers_whose_process_was_on_a_gpu_a_moment_ago() {
        let start = Moment::now();
        let mut xids = Xids::new(start);
        let (roots, inventory) =
            (Roots::default(), Arc::new(Inventory { containers: vec![], runtimes: vec![] }));
        let mut enter = |now: Moment, owners: &[(u32, &str)], told: &[(u64, Xid)]| {
            let owners = owners.iter().map(|(pid, id)| (*pid, ContainerId::new(id))).collect();
            let (containers, processes) = (HashMap::new(), vec![]);
            let held = Held { at: now, device: "GPU-0".into(), used: None, containers, processes, owners };
            let attributed = Attributed { held: vec![held], ..Attributed::default() };
            let readings = Readings { gpus: vec![Arc::new(reading(now))], ..Readings::default() };
            let context = Context { now, roots: &roots, hierarchy: None, inventory: &inventory };
            xids.enter(&context, &readings, &attributed, told)
        };
        let later = start.plus(Duration::from_secs(5));
        let usec = later.kernel_usec();
        assert_eq!(enter(later, &[(7, "a"), (8, "b")], &[]), []);
        let fault = xid("NVRM: Xid (PCI:0000:66:00): 31, pid=7, name=python, Ch 00000008");
        let strangers = xid("NVRM: Xid (PCI:0000:66:00): 31, pid=9, name=python");
        let silent = xid("NVRM: Xid (PCI:0000:66:00): 79, GPU has fallen off the bus.");
        let elsewhere = xid("NVRM: Xid (PCI:0000:67:00): 31, pid=7, name=python");
        let told = [(usec, fault), (usec, strangers), (usec, silent), (usec, elsewhere), (1, fault)];
        let owned = enter(later, &[], &told);
        let gpu = ("1".into(), "GPU-1".into());
        assert_eq!(owned.len(), 1, "old lines, strangers and unknown GPUs are nobody's: {owned:?}");
        assert_eq!((&owned[0].container, &owned[0].gpu, owned[0].xid), (&ContainerId::new("a"), &gpu, 31));
        let much_later = later.plus(REMEMBERED);
        assert_eq!(
            enter(much_later, &[], &[(much_later.kernel_usec(), fault)]),
            [],
            "somebody else may have that pid"
        );
    }
}
