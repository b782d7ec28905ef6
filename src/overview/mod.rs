//! What the screens show: who uses RAM and VRAM now, and who is nearest to a limit. One document for `ps`, `top` and the page at `/`.

mod gpus;
pub mod history;
pub mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::attribute::{ContainerProcess, Role};
use crate::collect::cycle::{Cycle, PodMemory};
use crate::discover::RuntimeKind;
use crate::gpu::GpuIdentity;
use crate::snapshot::Snapshot;
pub use gpus::{GpuAllocation, GpuOverview, OtherDevice};
use gpus::{gpus, other_devices};
use history::{Figures, Track};

/// What uses the memory of this host and of its GPUs. Amounts are in bytes; what is unknown is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// Unix time of the cycle.
    pub at: f64,
    /// The host.
    pub host: HostUse,
    /// The GPUs, and their MIG instances.
    pub gpus: Vec<GpuOverview>,
    /// Running containers, the one that is nearest to its limit first.
    pub containers: Vec<ContainerUse>,
    /// Pods, the one that holds the most beyond its containers first, if processes were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodUse>,
    /// Devices that the kubelet allocated under other names than those of the GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_devices: Vec<OtherDevice>,
    /// Runtimes that have a socket that does not respond.
    #[serde(default)]
    pub runtimes_unreachable: Vec<String>,
}

/// The memory of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostUse {
    /// MemTotal.
    pub memory_total_bytes: Option<f64>,
    /// What can be given out without swapping, as the kernel estimates it.
    pub memory_available_bytes: Option<f64>,
    /// Size of the swap space.
    pub swap_total_bytes: Option<f64>,
    /// Swap space in use.
    pub swap_used_bytes: Option<f64>,
    /// Share of the last seconds in which at least one task waited for memory.
    pub memory_waiting_ratio: Option<f64>,
    /// OOM kills on this host that the ledger counted, also of containers.
    pub oom_kills: Option<f64>,
}

impl HostUse {
    /// Returns what is not available.
    pub fn used_bytes(&self) -> Option<f64> {
        Some(self.memory_total_bytes? - self.memory_available_bytes?)
    }

    /// Returns that as a share of all memory.
    pub fn used_ratio(&self) -> Option<f64> {
        Some(self.used_bytes()? / self.memory_total_bytes.filter(|total| *total > 0.0)?)
    }
}

/// Whether a container that is listed runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ListedState {
    /// Its runtime says so, or without one its cgroup.
    #[default]
    Running,
    /// It is at its limit, is not killed, and its processes wait for memory.
    AtLimit,
    /// Its runtime does not respond, at one of its sockets: its name and settings may be those of the last response.
    RuntimeUnreachable,
    /// Its cgroup had processes and has had none for [`history::EMPTY_AFTER`], or is gone, and its runtime has not reported an end.
    NoProcess,
}

impl ListedState {
    /// Returns the word for a column; `None` for one that runs.
    pub fn word(self) -> Option<&'static str> {
        match self {
            Self::Running => None,
            Self::AtLimit => Some("at limit"),
            Self::RuntimeUnreachable => Some("unreachable"),
            Self::NoProcess => Some("no process"),
        }
    }
}

/// A container that is listed as running.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerUse {
    /// `NAME`, in a pod `NAMESPACE/POD/NAME`.
    pub name: String,
    /// Full id.
    pub id: String,
    /// Such as `docker`.
    pub runtime: RuntimeKind,
    /// Whether it runs.
    pub state: ListedState,
    /// Unix time of its start.
    pub started: Option<f64>,
    /// Memory that the kernel cannot take back: what counts against the limit.
    pub unreclaimable_bytes: Option<f64>,
    /// The lowest limit that applies.
    pub limit_bytes: Option<f64>,
    /// What is left until an OOM kill.
    pub headroom_bytes: Option<f64>,
    /// Unreclaimable memory as a share of the limit.
    pub limit_ratio: Option<f64>,
    /// Growth per second; absent in its first half hour, and without growth.
    pub growth_bytes_per_second: Option<f64>,
    /// Until the headroom is used up, if it grows on like this.
    pub seconds_to_limit: Option<f64>,
    /// Memory of its processes by role: proportional shares, else resident.
    pub role_bytes: BTreeMap<String, f64>,
    /// Processes by role.
    pub processes_by_role: BTreeMap<String, f64>,
    /// Cores in use.
    pub cpu_cores: Option<f64>,
    /// GPU memory, all GPUs together; absent where it is not known on one of them.
    pub gpu_bytes: Option<f64>,
    /// GPU memory by index of the GPU.
    pub gpus: BTreeMap<String, f64>,
    /// Share of time in which it computed, of the GPUs that it holds, the mean.
    pub gpu_utilization_ratio: Option<f64>,
    /// Its GPU memory by holder: `tensors`, `torch_cache`, `outside_torch`, `not_reporting`.
    pub gpu_holder_bytes: BTreeMap<String, f64>,
    /// OOM kills of its processes, also under former names, and of earlier containers of its name.
    pub oom_kills: Option<f64>,
    /// Unix time of the last one.
    pub last_oom_kill: Option<f64>,
    /// CUDA out-of-memory errors; absent where none was reported.
    pub cuda_ooms: Option<f64>,
    /// Its processes, if they were asked for and are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<Vec<ProcessUse>>,
    /// Its last hour, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<Track>,
}

/// A pod of which a container runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodUse {
    /// `NAMESPACE/POD`.
    pub name: String,
    /// Everything that is charged to its cgroup, page cache included.
    pub usage_bytes: Option<f64>,
    /// The limit of its cgroup.
    pub limit_bytes: Option<f64>,
    /// Of its containers that run.
    pub containers_bytes: Option<f64>,
    /// What it holds beyond them: volumes in memory of a container that was restarted, what ended containers left, the pause process.
    pub rest_bytes: Option<f64>,
}

/// A process of a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessUse {
    /// Pid on the host.
    pub pid: u32,
    /// Its name.
    pub name: Arc<str>,
    /// Its role.
    pub role: Role,
    /// Resident memory.
    pub rss_bytes: u64,
    /// Proportional share.
    pub pss_bytes: Option<u64>,
    /// GPU memory.
    pub gpu_bytes: Option<u64>,
}

/// For which containers an overview has details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Details<'a> {
    /// Neither processes nor history.
    None,
    /// Processes of all.
    Processes,
    /// Processes and history of the one with this id.
    One(&'a str),
}

impl Details<'_> {
    /// Returns the id of the container whose history is wanted.
    pub fn history_of(&self) -> Option<&str> {
        if let Details::One(id) = self { Some(id) } else { None }
    }
}

impl Overview {
    /// Returns the overview of a snapshot, with what earlier ones add.
    pub fn from_snapshot(snapshot: &Snapshot, figures: Figures, details: Details<'_>) -> Self {
        let cycle = &snapshot.cycle;
        let host = host(cycle, &figures);
        let runtimes_unreachable = runtimes_unreachable(cycle);
        let mut containers = containers(snapshot, &figures);
        for container in &mut containers {
            let is_unreachable = runtimes_unreachable.iter().any(|it| it == container.runtime.as_str());
            if container.state == ListedState::Running && is_unreachable {
                container.state = ListedState::RuntimeUnreachable;
            }
        }
        let mut history = figures.history;
        for (number, container) in containers.iter_mut().enumerate() {
            let is_selected = details == Details::One(&container.id);
            if is_selected || details == Details::Processes {
                container.processes = snapshot.processes_of(number).map(process_list);
            }
            container.history = if is_selected { history.take() } else { None };
        }
        let gpus = gpus(snapshot, &containers);
        containers.sort_by(|one, other| Sort::Limit.compare(one, other));
        let pods = if details == Details::Processes { pods(cycle) } else { vec![] };
        Self {
            at: snapshot.finished.unix_seconds(),
            host,
            gpus,
            containers,
            pods,
            other_devices: other_devices(snapshot),
            runtimes_unreachable,
        }
    }
}

/// What containers are sorted by; names break ties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Nearest to its limit.
    Limit,
    /// Memory.
    Memory,
    /// GPU memory.
    Gpu,
    /// CPU.
    Cpu,
    /// Newest kill.
    Kills,
    /// Name.
    Name,
}

impl Sort {
    /// All, with the words of `--sort`.
    pub const ALL: [(&'static str, Sort); 6] = [
        ("limit", Sort::Limit),
        ("memory", Sort::Memory),
        ("gpu", Sort::Gpu),
        ("cpu", Sort::Cpu),
        ("kills", Sort::Kills),
        ("name", Sort::Name),
    ];

    /// Compares two containers: the one to be shown first is less.
    pub fn compare(self, one: &ContainerUse, other: &ContainerUse) -> std::cmp::Ordering {
        let of = |container: &ContainerUse| match self {
            Sort::Limit => container.limit_ratio,
            Sort::Memory => container.unreclaimable_bytes,
            Sort::Gpu => container.gpu_bytes,
            Sort::Cpu => container.cpu_cores,
            Sort::Kills => container.last_oom_kill,
            Sort::Name => None,
        };
        let key = |container| of(container).unwrap_or(-1.0);
        key(other).total_cmp(&key(one)).then_with(|| one.name.cmp(&other.name))
    }
}

/// Returns an amount as documents have it.
fn float(bytes: u64) -> f64 {
    bytes as f64
}

/// Returns the runtimes that have a socket that does not respond.
fn runtimes_unreachable(cycle: &Cycle) -> Vec<String> {
    let down = cycle.runtimes.iter().filter(|(_, is_up)| !is_up);
    down.map(|(runtime, _)| runtime.as_str().to_owned()).collect()
}

/// Returns the short name of a GPU.
fn gpu_name(identity: &GpuIdentity) -> String {
    match &identity.instance {
        None => identity.index.to_string(),
        Some(instance) if instance.compute_instance_id.is_empty() => {
            format!("{}/{}", identity.index, instance.gpu_instance_id)
        }
        Some(instance) => {
            format!("{}/{}/{}", identity.index, instance.gpu_instance_id, instance.compute_instance_id)
        }
    }
}

fn host(cycle: &Cycle, figures: &Figures) -> HostUse {
    let memory = cycle.host.memory;
    HostUse {
        memory_total_bytes: memory.map(|memory| float(memory.total)),
        memory_available_bytes: memory.and_then(|memory| memory.available).map(float),
        swap_total_bytes: memory.map(|memory| float(memory.swap_total)),
        swap_used_bytes: memory.map(|memory| float(memory.swap_used)),
        memory_waiting_ratio: figures.memory_waiting_ratio,
        oom_kills: cycle.host.oom_kills.map(float),
    }
}

fn containers(snapshot: &Snapshot, figures: &Figures) -> Vec<ContainerUse> {
    let cycle = &snapshot.cycle;
    let gpu_bytes = cycle.gpu_bytes();
    let mut found: Vec<ContainerUse> = std::iter::zip(&snapshot.containers, &cycle.containers)
        .enumerate()
        .map(|(number, (container, sampled))| {
            let (counts, growth) = (sampled.counts, figures.growth[number]);
            let headroom = sampled.headroom.map(|bytes| bytes as f64);
            ContainerUse {
                name: container.identity.path(),
                id: container.id.to_string(),
                runtime: container.runtime,
                state: match figures.has_no_process[number] {
                    true => ListedState::NoProcess,
                    false if sampled.is_at_limit => ListedState::AtLimit,
                    false => ListedState::Running,
                },
                started: container.started,
                unreclaimable_bytes: sampled.unreclaimable.map(float),
                limit_bytes: sampled.effective_limit.map(float),
                headroom_bytes: headroom,
                limit_ratio: sampled.limit_utilization,
                growth_bytes_per_second: growth,
                seconds_to_limit: headroom.zip(growth).map(|(left, growth)| left.max(0.0) / growth),
                cpu_cores: figures.cpu_cores[number],
                gpu_bytes: gpu_bytes[number].map(float),
                oom_kills: counts.map(|counts| float(counts.oom_kills)),
                last_oom_kill: counts.and_then(|counts| counts.last_oom_kill),
                cuda_ooms: counts.and_then(|counts| counts.cuda_ooms).map(float),
                ..ContainerUse::default()
            }
        })
        .collect();
    for role in &cycle.roles {
        let container = &mut found[role.container as usize];
        // a proportional share goes before what is resident
        container.role_bytes.insert(role.role.to_owned(), float(role.pss.unwrap_or(role.rss)));
        container.processes_by_role.insert(role.role.to_owned(), float(role.processes));
    }
    for ((container, _), partition) in &cycle.gpu_holders {
        for (holder, bytes) in partition.parts() {
            let holders = &mut found[*container as usize].gpu_holder_bytes;
            *holders.entry(holder.to_owned()).or_default() += float(bytes);
        }
    }
    let mut shares = vec![(0.0, 0.0); found.len()];
    for used in &cycle.gpu_uses {
        let number = used.container as usize;
        if let Some(bytes) = used.used {
            let gpu = gpu_name(&snapshot.gpus[used.gpu as usize]);
            *found[number].gpus.entry(gpu).or_default() += float(bytes);
        }
        if let Some(busy) = used.busy {
            let (sum, count) = shares[number];
            shares[number] = (sum + busy, count + 1.0);
        }
    }
    for (container, (sum, count)) in std::iter::zip(&mut found, shares) {
        container.gpu_utilization_ratio = (count > 0.0).then_some(sum / count);
    }
    found
}

fn pods(cycle: &Cycle) -> Vec<PodUse> {
    let pod = |memory: &PodMemory| PodUse {
        name: format!("{}/{}", memory.pod.namespace, memory.pod.name),
        usage_bytes: Some(float(memory.usage)),
        limit_bytes: memory.limit.map(float),
        containers_bytes: Some(float(memory.containers)),
        rest_bytes: Some(float(memory.rest())),
    };
    let mut pods: Vec<&PodMemory> = cycle.pods.iter().collect();
    pods.sort_by_key(|memory| std::cmp::Reverse(memory.rest())); // stable: they are in the order of their names
    pods.into_iter().map(pod).collect()
}

fn process_list(processes: &[ContainerProcess]) -> Vec<ProcessUse> {
    let mut found: Vec<ProcessUse> = processes
        .iter()
        .map(|process| ProcessUse {
            pid: process.pid,
            name: Arc::clone(&process.comm),
            role: process.role,
            rss_bytes: process.memory.rss_bytes,
            pss_bytes: process.pss_bytes,
            gpu_bytes: process.gpu_bytes,
        })
        .collect();
    found.sort_by_key(|process| (std::cmp::Reverse(process.gpu_bytes), std::cmp::Reverse(process.rss_bytes)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::collect::cycle::{AllocatedDevice, CycleContainer, CycleGpu, GpuUseByContainer};
    use crate::discover::{Container, Pod};
    use crate::gpu::MigInstance;
    use crate::series::Series;

    const GIB: f64 = (1 << 30) as f64;

    fn gpu(index: &str, instance: Option<(&str, &str)>) -> Arc<GpuIdentity> {
        let uuid = format!("GPU-{index}");
        let instance = instance.map(|(gpu, compute)| MigInstance {
            gpu_instance_id: gpu.into(),
            compute_instance_id: compute.into(),
            uuid: format!("MIG-{index}-{gpu}-{compute}").into(),
        });
        Arc::new(GpuIdentity { index: index.into(), uuid: uuid.into(), instance, ..GpuIdentity::default() })
    }

    fn process_of(container: u32) -> ContainerProcess {
        ContainerProcess {
            container,
            pid: 71,
            comm: "python".into(),
            role: Role::Other,
            memory: crate::collect::process::ResidentMemory { rss_bytes: 1, anon_bytes: 1 },
            pss_bytes: None,
            gpu_bytes: None,
        }
    }

    #[test]
    fn container_that_lost_its_processes_has_ended_and_one_without_a_runtime_is_remembered() {
        let mut recorder = history::Recorder::default();
        let mut at = |seconds: u64, processes: &[u32]| {
            let now = Timestamp::hours_after_boot(1).plus(std::time::Duration::from_secs(seconds));
            let mut snapshot = Snapshot::of_series(now, Series::default());
            snapshot.cycle.runtimes = vec![(RuntimeKind::Docker, false)];
            let container = |(name, listed_run): (&str, u64)| {
                let container = Container::clone(&Container::in_cgroup(name, name));
                Arc::new(Container { runtime: RuntimeKind::Docker, listed_run, ..container })
            };
            snapshot.containers = [("a", 1), ("b", 2)].map(container).into();
            snapshot.running = 2;
            snapshot.cycle.containers = vec![CycleContainer::default(); 2];
            snapshot.processes = processes.iter().map(|container| process_of(*container)).collect();
            snapshot.processes_complete = vec![true, true];
            recorder.add(&snapshot);
            let overview =
                Overview::from_snapshot(&snapshot, recorder.figures(&snapshot, None), Details::None);
            assert_eq!(overview.runtimes_unreachable, ["docker"]);
            let text = table::text(&overview, 0);
            assert!(text.contains("docker does not respond"), "{text}");
            let state = |name: &str| overview.containers.iter().find(|it| it.name == name).map(|it| it.state);
            [state("a"), state("b")].map(Option::unwrap)
        };
        use ListedState::{NoProcess, RuntimeUnreachable};
        assert_eq!(at(0, &[0]), [RuntimeUnreachable; 2]);
        assert_eq!(at(5, &[]), [RuntimeUnreachable; 2]);
        assert_eq!(at(10, &[]), [RuntimeUnreachable; 2], "for 5 s");
        assert_eq!(at(15, &[]), [NoProcess, RuntimeUnreachable], "the other one never had a process here");
        assert_eq!(at(20, &[0]), [RuntimeUnreachable; 2], "it has been started again");
    }

    #[test]
    fn pods_are_listed_with_processes_by_what_they_hold_beyond_their_containers() {
        let mut snapshot = Snapshot::of_series(Timestamp::now(), Series::default());
        let pod = |(name, usage, limit, containers): (&str, u64, Option<u64>, u64)| PodMemory {
            pod: Arc::new(Pod { namespace: "ml".into(), name: name.into(), ..Pod::default() }),
            usage: usage << 30,
            limit: limit.map(|limit| limit << 30),
            containers: containers << 29,
        };
        snapshot.cycle.pods =
            [("idle", 1, None, 1), ("train-0", 5, Some(8), 9), ("web", 3, None, 2)].map(pod).into();
        let overview = |details| {
            let figures = history::Recorder::default().figures(&snapshot, None);
            Overview::from_snapshot(&snapshot, figures, details)
        };
        assert!(overview(Details::None).pods.is_empty());
        assert!(!table::text(&overview(Details::None), 0).contains("POD"));
        let text = table::text(&overview(Details::Processes), 0);
        let (_, pods) = text.split_once("POD ").expect("a table");
        let rows: Vec<Vec<&str>> = pods.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["USAGE", "/", "LIMIT", "CONTAINERS", "REST"]);
        assert_eq!(rows[1], ["ml/web", "3.0", "GiB", "/", "-", "1.0", "GiB", "2.0", "GiB"]);
        assert_eq!(rows[2], ["ml/idle", "1.0", "GiB", "/", "-", "512.0", "MiB", "512.0", "MiB"]);
        assert_eq!(rows[3], ["ml/train-0", "5.0", "/", "8.0", "GiB", "4.5", "GiB", "512.0", "MiB"]);
    }

    #[test]
    fn memory_of_gpus_adds_up_or_is_unknown() {
        let mut snapshot = Snapshot::of_series(Timestamp::now(), Series::default());
        snapshot.containers = ["a", "b"].map(|name| Container::in_cgroup(name, name)).into();
        snapshot.running = 2;
        snapshot.cycle.containers = vec![CycleContainer::default(); 2];
        let uses = [(0, 1, Some(20)), (0, 2, Some(10)), (1, 3, Some(5)), (1, 4, None)];
        let used = |(container, gpu, gib): (u32, u32, Option<u64>)| GpuUseByContainer {
            container,
            gpu,
            used: gib.map(|gib| gib << 30),
            busy: None,
        };
        snapshot.cycle.gpu_uses = uses.map(used).into();
        snapshot.cycle.gpus = vec![CycleGpu::default(); 5];
        let instances = [
            gpu("0", None),
            gpu("0", Some(("1", "0"))),
            gpu("0", Some(("1", "1"))),
            gpu("1", None),
            gpu("2", None),
        ];
        snapshot.gpus = instances.into();
        let figures = history::Recorder::default().figures(&snapshot, None);
        let overview = Overview::from_snapshot(&snapshot, figures, Details::None);
        let names: Vec<_> = overview.gpus.iter().map(|gpu| gpu.gpu.as_str()).collect();
        assert_eq!(names, ["0", "0/1/0", "0/1/1", "1", "2"]);
        assert_eq!(overview.gpus[0].holders, [("a".to_owned(), 30.0 * GIB)], "of the instances");
        let [a, b] = overview.containers.as_slice() else { panic!("{overview:?}") };
        assert_eq!((a.gpu_bytes, a.gpus.values().sum::<f64>()), (Some(30.0 * GIB), 30.0 * GIB));
        assert_eq!(b.gpu_bytes, None, "5 GiB is not all of it");
    }

    #[test]
    fn gpu_is_allocated_also_to_a_container_that_does_not_run() {
        let mut snapshot = Snapshot::of_series(Timestamp::now(), Series::default());
        snapshot.containers = ["train", "ended"].map(|name| Container::in_cgroup(name, name)).into();
        snapshot.running = 1;
        snapshot.cycle.containers = vec![CycleContainer::default()];
        snapshot.cycle.gpu_allocations = vec![(1, 0), (0, 0), (1, 3)];
        let device = |container, source: &str, pool: Option<&str>, device: &str| AllocatedDevice {
            container,
            source: source.into(),
            pool: pool.map(Into::into),
            device: device.into(),
        };
        snapshot.cycle.other_devices = vec![
            device(1, "gpu.nvidia.com", Some("node1"), "gpu\u{1b}"),
            device(0, "nvidia.com/gpu", None, "GPU-0-1"),
        ];
        snapshot.gpus = vec![gpu("0", None), gpu("1", None), gpu("2", None), gpu("1", Some(("7", "0")))];
        snapshot.cycle.gpus = vec![CycleGpu::default(); 4];
        let figures = history::Recorder::default().figures(&snapshot, None);
        let overview = Overview::from_snapshot(&snapshot, figures, Details::None);
        let text = table::text(&overview, 0);
        let rows: Vec<_> = text.lines().skip_while(|line| !line.starts_with("GPU")).collect();
        let cells: Vec<_> =
            rows[..5].iter().map(|row| row.split("  ").last().unwrap_or_default().trim()).collect();
        assert_eq!(cells, ["ALLOCATED TO", "*ended, train", "*ended", "-", "*ended"]);
        assert!(rows[5].starts_with("*: it does not run"), "{text}");
        assert_eq!(rows[8..10], ["train: nvidia.com/gpu GPU-0-1", "ended: gpu.nvidia.com node1/gpu\\u{1b}"]);
        let json = serde_json::to_value(&overview).expect("JSON");
        assert_eq!(json["gpus"][1]["allocated_to"][0]["running"], false);
        assert_eq!(serde_json::from_value::<Overview>(json).expect("an overview"), overview);
    }
}
