//! Attributes GPU errors (Xids) to containers by the pid in the kernel log, and counts them. NVML reports errors
//! without a pid.
//!
//! The process has usually ended when the line is read. So the container of each process on a GPU is remembered for a
//! while. Errors of other pids are not attributed.
//!
//! The counts belong to the container's name, as those of kills do: they continue when the container is started again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::attribute::gpu::GpuAttribution;
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::{Context, CycleData};
use crate::discover::{Container, ContainerId, Identity};
use crate::gpu::GpuIdentity;
use crate::parse::kernel_log::{PciAddress, Xid};
use crate::series::{Label, Series};

/// How long a process is remembered after it was last seen on a GPU.
const PROCESS_RETENTION: Duration = Duration::from_secs(60);

/// How long a name is remembered after it was last shown.
const NAME_RETENTION: Duration = Duration::from_secs(3600);
/// Xids that an application can cause: their counters start at 0 for every GPU that a container uses.
const APPLICATION_XIDS: [u64; 5] = [13, 31, 43, 45, 94];

/// Index and UUID of a GPU.
type GpuRef = (Arc<str>, Arc<str>);
/// GPU instance and compute instance; empty for a whole GPU, and if unknown.
type InstanceRef = (Arc<str>, Arc<str>);

/// Counts of one container name.
#[derive(Debug)]
struct ContainerXids {
    /// By GPU, instance and Xid: the count, and the Unix time of the last one.
    counts: BTreeMap<(GpuRef, InstanceRef, u64), (u64, Option<f64>)>,
    shown: Timestamp,
}

/// The counts, and the data to attribute errors.
#[derive(Debug, Default)]
pub struct XidCounts {
    processes: HashMap<u32, (ContainerId, Timestamp)>,
    /// Index and UUID of every GPU that was ever seen, even if it is lost now.
    gpus: HashMap<PciAddress, GpuRef>,
    /// The MIG instances of each GPU, by its UUID, as they were last seen.
    instances: HashMap<Arc<str>, BTreeSet<InstanceRef>>,
    names: HashMap<Identity, ContainerXids>,
}

/// An Xid from the kernel log.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedXid {
    /// The process that used the GPU.
    pub pid: Option<u32>,
    /// The container of this process.
    pub container: Option<ContainerId>,
    /// Index and UUID of the GPU.
    pub gpu: GpuRef,
    /// Its MIG instance.
    pub instance: InstanceRef,
    /// Xid.
    pub xid: u64,
    /// Unix time.
    pub at: f64,
}

impl XidCounts {
    fn entry(&mut self, now: Timestamp, name: &Identity) -> &mut ContainerXids {
        let new = || ContainerXids { counts: BTreeMap::new(), shown: now };
        self.names.entry(name.clone()).or_insert_with(new)
    }

    /// Initializes the counts of containers that use a GPU now to 0. Call it only while the kernel log can be read.
    pub fn init_at_zero(
        &mut self,
        context: &Context<'_>,
        cycle_data: &CycleData,
        attributed: &GpuAttribution,
    ) {
        let devices: Vec<_> = cycle_data.gpu_devices().map(|(_, device)| &device.identity).collect();
        let mut done = HashSet::new();
        for process in attributed.processes.iter().filter(|p| done.insert((p.container, p.gpu))) {
            let Some(container) = context.inventory.containers.get(process.container as usize) else {
                continue;
            };
            let Some(gpu) = devices.get(process.gpu as usize).filter(|gpu| gpu.vendor == "nvidia") else {
                continue;
            };
            let (gpu, instance) = ((Arc::clone(&gpu.index), Arc::clone(&gpu.uuid)), instance_of(gpu));
            let counts = &mut self.entry(context.now, &container.identity).counts;
            for xid in APPLICATION_XIDS {
                counts.entry((gpu.clone(), instance.clone(), xid)).or_insert((0, None));
            }
        }
    }

    /// Counts an error for the name of its container, which may have ended with the error.
    pub fn count(&mut self, now: Timestamp, xid_report: &ReportedXid, name: &Identity) {
        let counts = &mut self.entry(now, name).counts;
        let key = (xid_report.gpu.clone(), xid_report.instance.clone(), xid_report.xid);
        let (count, last) = counts.entry(key).or_insert((0, None));
        *count += 1;
        *last = Some(last.map_or(xid_report.at, |last| last.max(xid_report.at)));
    }

    /// Writes the counts of these containers, numbered in this order, and removes names that were not shown for
    /// [`NAME_RETENTION`].
    pub fn write<'a>(
        &mut self,
        now: Timestamp,
        containers: impl Iterator<Item = &'a Arc<Container>>,
        series: &mut Series,
    ) {
        let mut written = HashSet::new();
        for (number, container) in containers.enumerate() {
            let Some(entry) = self.names.get_mut(&container.identity) else { continue };
            entry.shown = now;
            if !written.insert(&container.identity) {
                continue;
            }
            for (((gpu, uuid), (gi, ci), xid), (count, last)) in &entry.counts {
                let labels = || [gpu.into(), uuid.into(), gi.into(), ci.into(), Label::Number(*xid)];
                series.container(CONTAINER_GPU_XIDS, number as u32, labels(), *count as f64);
                if let Some(last) = last {
                    series.container(CONTAINER_GPU_LAST_XID, number as u32, labels(), *last);
                }
            }
        }
        self.names.retain(|_, entry| now.since(entry.shown) < NAME_RETENTION);
    }

    /// Records one cycle. Returns the kernel log's errors since the previous cycle, for GPUs that are or were present.
    pub fn record(
        &mut self,
        context: &Context<'_>,
        cycle_data: &CycleData,
        attributed: &GpuAttribution,
        reported: &[(f64, Xid)],
    ) -> Vec<ReportedXid> {
        for held in &attributed.held {
            for (pid, container) in &held.owners {
                self.processes.insert(*pid, (container.clone(), held.at));
            }
        }
        self.processes.retain(|_, (_, at)| context.now.since(*at) < PROCESS_RETENTION);
        let mut seen = HashSet::new();
        for (_, device) in cycle_data.gpu_devices() {
            let identity = &device.identity;
            if seen.insert(&identity.uuid) {
                self.instances.remove(&identity.uuid);
            }
            if identity.instance.is_some() {
                let instances = self.instances.entry(Arc::clone(&identity.uuid)).or_default();
                instances.insert(instance_of(identity));
            }
            if let Some(address) = PciAddress::of(identity.pci_bus_id.as_bytes()) {
                self.gpus.insert(address, (Arc::clone(&identity.index), Arc::clone(&identity.uuid)));
            }
        }
        let xid_report = reported.iter().filter_map(|(at, xid)| {
            let container = xid.pid.and_then(|pid| Some(self.processes.get(&pid)?.0.clone()));
            let gpu = self.gpus.get(&xid.gpu)?.clone();
            let instance = self.instance(&gpu.1, xid.instance);
            Some(ReportedXid { pid: xid.pid, container, gpu, instance, xid: xid.xid, at: *at })
        });
        xid_report.collect()
    }

    /// Returns the instance that the driver names. It may leave out the compute instance, which is known if the GPU instance
    /// has only one.
    fn instance(
        &self,
        gpu_uuid: &Arc<str>,
        [gpu_instance, compute_instance]: [Option<u64>; 2],
    ) -> InstanceRef {
        let text = |id: Option<u64>| id.map_or_else(Arc::default, |id| id.to_string().into());
        let named: InstanceRef = (text(gpu_instance), text(compute_instance));
        let known = self.instances.get(gpu_uuid).into_iter().flatten();
        let mut within = known.filter(|(gpu_instance, _)| *gpu_instance == named.0);
        match (within.next(), within.next()) {
            (Some(only), None) if named.1.is_empty() => only.clone(),
            _ => named,
        }
    }
}

/// Returns the instance that a device is.
fn instance_of(identity: &GpuIdentity) -> InstanceRef {
    identity.instance.as_ref().map_or_else(Default::default, |instance| {
        (Arc::clone(&instance.gpu_instance_id), Arc::clone(&instance.compute_instance_id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::gpu::DeviceUsage;
    use crate::discover::Inventory;
    use crate::events::Identity;
    use crate::gpu::{GpuDevice, GpuReading};
    use crate::host::HostPaths;
    use crate::parse::kernel_log::Line;

    fn xid(text: &str) -> Xid {
        match Line::of(text.as_bytes()) {
            Some(Line::Xid(xid)) => xid,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn reading(now: Timestamp) -> GpuReading {
        let gpu = |index: &str, bus: &str| crate::gpu::GpuIdentity {
            index: index.into(),
            uuid: format!("GPU-{index}").into(),
            pci_bus_id: bus.into(),
            vendor: "nvidia",
            ..Default::default()
        };
        let gpus = [gpu("0", "00000000:65:00.0"), gpu("1", "00000000:66:00.0")];
        let devices = gpus.into_iter().map(|identity| GpuDevice::new(Arc::new(identity)));
        GpuReading::of_devices(now, devices.collect())
    }

    #[test]
    fn counts_start_at_0_and_continue_over_runs_of_a_name() {
        let start = Timestamp::now();
        let mut xids = XidCounts::default();
        let host_paths = HostPaths::default();
        let name = Identity { name: "train".into(), ..Identity::default() };
        let run = |id: &str| {
            Arc::new(Container { id: ContainerId::new(id), ..Container::known_by_name(name.clone()) })
        };
        let on_gpu = crate::attribute::gpu::DeviceProcess {
            container: 0,
            gpu: 1,
            device: "GPU-1".into(),
            id: crate::host::process::ProcessId::new(7, 7),
            labels: [Label::Number(7), "".into(), "".into()],
            used: None,
            busy: None,
        };
        let attributed = GpuAttribution { processes: vec![on_gpu], ..GpuAttribution::default() };
        let mut cycle = |after: u64, id: &str, errors: usize| {
            let inventory = Arc::new(Inventory { containers: vec![run(id)], ..Inventory::default() });
            let now = start.plus(Duration::from_secs(after));
            let context = Context { now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
            let cycle_data = CycleData { gpus: vec![Arc::new(reading(now))], ..CycleData::default() };
            xids.init_at_zero(&context, &cycle_data, &attributed);
            let gpu = ("1".into(), "GPU-1".into());
            let (pid, container) = (Some(7), Some(ContainerId::new(id)));
            let instance = InstanceRef::default();
            let xid_report = ReportedXid { pid, container, gpu, instance, xid: 31, at: now.unix_seconds() };
            (0..errors).for_each(|_| xids.count(now, &xid_report, &Identity::named("train")));
            let mut series = Series::default();
            xids.write(now, inventory.containers.iter(), &mut series);
            let of =
                |family| series.rows().iter().filter(move |row| row.family == family).map(|row| row.value);
            (
                of(FamilyId::CONTAINER_GPU_XIDS).collect::<Vec<_>>(),
                of(FamilyId::CONTAINER_GPU_LAST_XID).count(),
            )
        };
        assert_eq!(cycle(1, "a", 0), (vec![0.0; 5], 0));
        assert_eq!(cycle(2, "a", 2), (vec![0.0, 2.0, 0.0, 0.0, 0.0], 1));
        assert_eq!(cycle(3, "b", 1), (vec![0.0, 3.0, 0.0, 0.0, 0.0], 1), "recreated with the same name");
        let later = 3 + NAME_RETENTION.as_secs();
        assert_eq!(cycle(later - 1, "b", 0).0[1], 3.0);
    }

    #[test]
    fn instance_is_that_of_the_line_and_of_the_only_compute_instance() {
        let instance = |gpu: &str, compute: &str| -> InstanceRef { (gpu.into(), compute.into()) };
        let known = BTreeSet::from([instance("5", "0"), instance("7", "0"), instance("7", "1")]);
        let instances = HashMap::from([("GPU-0".into(), known)]);
        let xids = XidCounts { instances, ..XidCounts::default() };
        let of = |ids| xids.instance(&"GPU-0".into(), ids);
        assert_eq!(of([Some(5), None]), instance("5", "0"));
        assert_eq!(of([Some(7), None]), instance("7", ""), "it has two");
        assert_eq!(of([Some(7), Some(1)]), instance("7", "1"));
        assert_eq!((of([None, None]), of([Some(9), None])), (instance("", ""), instance("9", "")));
    }

    #[test]
    fn attributes_error_to_container_of_recent_gpu_process() {
        let start = Timestamp::now();
        let mut xids = XidCounts::default();
        let (host_paths, inventory) = (HostPaths::default(), Arc::new(Inventory::default()));
        let mut record = |now: Timestamp, owners: &[(u32, &str)], reported: &[(f64, Xid)]| {
            let owners = owners.iter().map(|(pid, id)| (*pid, ContainerId::new(id))).collect();
            let (containers, processes) = (HashMap::new(), vec![]);
            let held =
                DeviceUsage { at: now, device: "GPU-0".into(), used: None, containers, processes, owners };
            let attributed = GpuAttribution { held: vec![held], ..GpuAttribution::default() };
            let cycle_data = CycleData { gpus: vec![Arc::new(reading(now))], ..CycleData::default() };
            let context = Context { now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
            xids.record(&context, &cycle_data, &attributed, reported)
        };
        let later = start.plus(Duration::from_secs(5));
        let at = later.unix_seconds();
        assert_eq!(record(later, &[(7, "a"), (8, "b")], &[]), []);
        let fault = xid("NVRM: Xid (PCI:0000:66:00): 31, pid=7, name=python, Ch 00000008");
        let strangers = xid("NVRM: Xid (PCI:0000:66:00): 31, pid=9, name=python");
        let silent = xid("NVRM: Xid (PCI:0000:66:00): 79, GPU has fallen off the bus.");
        let elsewhere = xid("NVRM: Xid (PCI:0000:67:00): 31, pid=7, name=python");
        let reported = [(at, fault), (at, strangers), (at, silent), (at, elsewhere)];
        let reported = record(later, &[], &reported);
        let gpu = ("1".into(), "GPU-1".into());
        assert_eq!(reported.len(), 3, "unknown GPUs are omitted: {reported:?}");
        let owners: Vec<_> = reported.iter().map(|reported| reported.container.as_ref()).collect();
        assert_eq!(owners, [Some(&ContainerId::new("a")), None, None], "unknown pids are not attributed");
        assert_eq!((&reported[0].gpu, reported[0].xid, reported[2].pid), (&gpu, 31, None));
        let much_later = later.plus(PROCESS_RETENTION);
        let reported = record(much_later, &[], &[(much_later.unix_seconds(), fault)]);
        assert_eq!(reported[0].container, None, "the pid may have been reused");
    }
}
