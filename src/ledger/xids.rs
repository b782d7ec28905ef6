//! Whose process was at work when a GPU reported an error: NVML tells the error, the kernel log the pid.
//!
//! The process has mostly ended by the time the line is read. So it is remembered for a while which container each
//! process on a GPU was in. A pid that none of them had is nobody's.
//!
//! The counts are those of a name, like those of kills: they go on when the container is started again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::attribute::gpu::Attributed;
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::{Context, Readings};
use crate::discover::{Container, ContainerId, Identity};
use crate::parse::kernel_log::{PciAddress, Xid};
use crate::series::{Label, Series};

/// A process is remembered so long after it was last seen on a GPU.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A name is remembered so long after it was shown last.
const NAMES_REMEMBERED: Duration = Duration::from_secs(3600);
/// Errors that a process's own work causes: they begin at 0 on every GPU that a container uses.
const CAUSED_BY_WORK: [u64; 5] = [13, 31, 43, 45, 94];

/// Index and UUID of a GPU.
type Gpu = (Arc<str>, Arc<str>);

/// Errors of one container's name.
#[derive(Debug)]
struct OfName {
    /// By GPU and number: how many, and when the last one came.
    counts: BTreeMap<(Gpu, u64), (u64, Option<f64>)>,
    shown: Moment,
}

/// What is needed to tell whose an error was, and the counts.
#[derive(Debug, Default)]
pub struct Xids {
    processes: HashMap<u32, (ContainerId, Moment)>,
    /// Index and UUID of every GPU that was seen, also of one that is lost by now.
    gpus: HashMap<PciAddress, Gpu>,
    names: HashMap<Identity, OfName>,
}

/// An error as the kernel log tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// The process that was at work.
    pub pid: Option<u32>,
    /// The container that it was in.
    pub container: Option<ContainerId>,
    /// Index and UUID of the GPU.
    pub gpu: Gpu,
    /// Its number.
    pub xid: u64,
    /// Unix time.
    pub at: f64,
}

impl Xids {
    fn of_name(&mut self, now: Moment, name: &Identity) -> &mut OfName {
        let new = || OfName { counts: BTreeMap::new(), shown: now };
        self.names.entry(name.clone()).or_insert_with(new)
    }

    /// The errors of the containers that are on a GPU now begin at 0. To be called only while the kernel log can be read.
    pub fn bear(&mut self, context: &Context<'_>, readings: &Readings, attributed: &Attributed) {
        let devices: Vec<_> = readings.gpu_devices().map(|(_, device)| &device.identity).collect();
        let mut done = HashSet::new();
        for process in attributed.processes.iter().filter(|p| done.insert((p.container, p.gpu))) {
            let Some(container) = context.inventory.containers.get(process.container as usize) else {
                continue;
            };
            let Some(gpu) = devices.get(process.gpu as usize).filter(|gpu| gpu.vendor == "nvidia") else {
                continue;
            };
            let gpu = (Arc::clone(&gpu.index), Arc::clone(&gpu.uuid));
            let counts = &mut self.of_name(context.now, &container.identity).counts;
            for xid in CAUSED_BY_WORK {
                counts.entry((gpu.clone(), xid)).or_insert((0, None));
            }
        }
    }

    /// Counts an error for the name of its container, which may have ended with it.
    pub fn count(&mut self, now: Moment, owned: &Told, name: &Identity) {
        let counts = &mut self.of_name(now, name).counts;
        let (count, last) = counts.entry((owned.gpu.clone(), owned.xid)).or_insert((0, None));
        *count += 1;
        *last = Some(last.map_or(owned.at, |last| last.max(owned.at)));
    }

    /// Writes the counts of those containers, in the order of their numbers, and forgets the names that were not shown
    /// for long.
    pub fn write<'a>(
        &mut self,
        now: Moment,
        containers: impl Iterator<Item = &'a Arc<Container>>,
        series: &mut Series,
    ) {
        let mut written = HashSet::new();
        for (number, container) in containers.enumerate() {
            let Some(of_name) = self.names.get_mut(&container.identity) else { continue };
            of_name.shown = now;
            if !written.insert(&container.identity) {
                continue;
            }
            for (((gpu, uuid), xid), (count, last)) in &of_name.counts {
                let labels = || [Label::from(gpu), uuid.into(), Label::Number(*xid)];
                series.container(CONTAINER_GPU_XIDS, number as u32, labels(), *count as f64);
                if let Some(last) = last {
                    series.container(CONTAINER_GPU_LAST_XID, number as u32, labels(), *last);
                }
            }
        }
        self.names.retain(|_, of_name| now.since(of_name.shown) < NAMES_REMEMBERED);
    }

    /// Enters one cycle. Returns what the kernel log told since the cycle before, of GPUs that are or were there.
    pub fn enter(
        &mut self,
        context: &Context<'_>,
        readings: &Readings,
        attributed: &Attributed,
        told: &[(f64, Xid)],
    ) -> Vec<Told> {
        for held in attributed.held.iter().filter(|held| held.is_dated) {
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
        let owned = told.iter().filter_map(|(at, xid)| {
            let container = xid.pid.and_then(|pid| Some(self.processes.get(&pid)?.0.clone()));
            let gpu = self.gpus.get(&xid.gpu)?.clone();
            Some(Told { pid: xid.pid, container, gpu, xid: xid.xid, at: *at })
        });
        owned.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::gpu::Held;
    use crate::collect::gpu::{Device, Pids, Reading};
    use crate::discover::Inventory;
    use crate::host::Roots;
    use crate::ledger::entries::Name;
    use crate::parse::kernel_log::Line;

    fn xid(text: &str) -> Xid {
        match Line::of(text.as_bytes()) {
            Some(Line::Xid(xid)) => xid,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn reading(now: Moment) -> Reading {
        let gpu = |index: &str, bus: &str| crate::collect::gpu::Identity {
            index: index.into(),
            uuid: format!("GPU-{index}").into(),
            pci_bus_id: bus.into(),
            vendor: "nvidia",
            ..Default::default()
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
    fn counts_begin_at_0_and_are_a_names_whatever_run_it_is_in() {
        let start = Moment::now();
        let mut xids = Xids::default();
        let roots = Roots::default();
        let name = Name { container_name: "train".into(), ..Name::default() };
        let run =
            |id: &str| Arc::new(Container { id: ContainerId::new(id), ..super::super::remembered(&name) });
        let on_gpu = crate::attribute::gpu::OnGpu {
            container: 0,
            gpu: 1,
            device: "GPU-1".into(),
            who: (7, 7),
            labels: Some([Label::Number(7), "".into(), "".into()]),
            used: None,
            driver_peak: None,
            busy: None,
        };
        let attributed = Attributed { processes: vec![on_gpu], ..Attributed::default() };
        let mut cycle = |after: u64, id: &str, errors: usize| {
            let inventory = Arc::new(Inventory { containers: vec![run(id)], runtimes: vec![] });
            let now = start.plus(Duration::from_secs(after));
            let context = Context { now, roots: &roots, hierarchy: None, inventory: &inventory };
            let readings = Readings { gpus: vec![Arc::new(reading(now))], ..Readings::default() };
            xids.bear(&context, &readings, &attributed);
            let gpu = ("1".into(), "GPU-1".into());
            let (pid, container) = (Some(7), Some(ContainerId::new(id)));
            let owned = Told { pid, container, gpu, xid: 31, at: now.unix_seconds() };
            (0..errors).for_each(|_| xids.count(now, &owned, &Identity::named("train")));
            let mut series = Series::default();
            xids.write(now, inventory.containers.iter(), &mut series);
            let of =
                |family| series.rows().iter().filter(move |row| row.family == family).map(|row| row.value);
            (of(Id::CONTAINER_GPU_XIDS).collect::<Vec<_>>(), of(Id::CONTAINER_GPU_LAST_XID).count())
        };
        assert_eq!(cycle(1, "a", 0), (vec![0.0; 5], 0));
        assert_eq!(cycle(2, "a", 2), (vec![0.0, 2.0, 0.0, 0.0, 0.0], 1));
        assert_eq!(cycle(3, "b", 1), (vec![0.0, 3.0, 0.0, 0.0, 0.0], 1), "made anew under the same name");
        let later = 3 + NAMES_REMEMBERED.as_secs();
        assert_eq!(cycle(later - 1, "b", 0).0[1], 3.0);
    }

    #[test]
    fn an_error_is_the_containers_whose_process_was_on_a_gpu_a_moment_ago() {
        let start = Moment::now();
        let mut xids = Xids::default();
        let (roots, inventory) =
            (Roots::default(), Arc::new(Inventory { containers: vec![], runtimes: vec![] }));
        let mut enter = |now: Moment, owners: &[(u32, &str)], told: &[(f64, Xid)]| {
            let owners = owners.iter().map(|(pid, id)| (*pid, ContainerId::new(id))).collect();
            let (containers, processes) = (HashMap::new(), vec![]);
            let held = Held {
                at: now,
                is_dated: true,
                device: "GPU-0".into(),
                used: None,
                containers,
                processes,
                owners,
            };
            let attributed = Attributed { held: vec![held], ..Attributed::default() };
            let readings = Readings { gpus: vec![Arc::new(reading(now))], ..Readings::default() };
            let context = Context { now, roots: &roots, hierarchy: None, inventory: &inventory };
            xids.enter(&context, &readings, &attributed, told)
        };
        let later = start.plus(Duration::from_secs(5));
        let at = later.unix_seconds();
        assert_eq!(enter(later, &[(7, "a"), (8, "b")], &[]), []);
        let fault = xid("NVRM: Xid (PCI:0000:66:00): 31, pid=7, name=python, Ch 00000008");
        let strangers = xid("NVRM: Xid (PCI:0000:66:00): 31, pid=9, name=python");
        let silent = xid("NVRM: Xid (PCI:0000:66:00): 79, GPU has fallen off the bus.");
        let elsewhere = xid("NVRM: Xid (PCI:0000:67:00): 31, pid=7, name=python");
        let told = [(at, fault), (at, strangers), (at, silent), (at, elsewhere)];
        let told = enter(later, &[], &told);
        let gpu = ("1".into(), "GPU-1".into());
        assert_eq!(told.len(), 3, "unknown GPUs are left out: {told:?}");
        let owners: Vec<_> = told.iter().map(|told| told.container.as_ref()).collect();
        assert_eq!(owners, [Some(&ContainerId::new("a")), None, None], "strangers are nobody's");
        assert_eq!((&told[0].gpu, told[0].xid, told[2].pid), (&gpu, 31, None));
        let much_later = later.plus(REMEMBERED);
        let told = enter(much_later, &[], &[(much_later.unix_seconds(), fault)]);
        assert_eq!(told[0].container, None, "somebody else may have that pid");
    }
}
