//! What must outlive a cycle.
//!
//! Two sides. The cycle's side (here, [`containers`] and [`gpus`]) keeps peaks, ended containers and how many GPUs there
//! once were.
//! The ledger proper is kept by a thread of its own ([`keeper`]): it reads the sources of OOM kills, a pure state machine
//! ([`machine`]) reconciles them, [`store`] keeps the facts on disk. The two meet at the [`desk`].
//!
//! | file | what it decides |
//! | --- | --- |
//! | `log_watch.rs`, `witness.rs` | what is read of a kill at once, while its process is still there |
//! | `kernel.rs` | which kills there were: records against the kernel's counter |
//! | `runs.rs` | which containers there are, and when a run began and ended |
//! | `history.rs` | what a container held in the last minutes |
//! | `attribution.rs`, `whose.rs`, `sets.rs`, `fit.rs`, `counters.rs`, `pods.rs` | whose a kill was, and whether it ended the container |
//! | `exits.rs` | why a container ended |
//! | `totals.rs` | the counts that never fall |
//! | `why.rs` | what a person is told |

mod attribution;
mod containers;
mod counters;
pub mod desk;
pub mod entries;
pub mod events_file;
mod exits;
mod fit;
mod gpu_errors;
mod gpus;
mod history;
pub mod keeper;
mod kernel;
mod log_watch;
mod machine;
mod pods;
mod runs;
mod say;
mod sets;
pub mod store;
mod totals;
mod whose;
pub mod why;
mod witness;
mod xids;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

pub use containers::Ended;
use desk::{ContainerFigures, Desk, Figures, Handed, Held, Process};
use entries::{GpuError, Name, Reason, Sample};

use crate::attribute::Attribution;
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::{Context, Readings};
use crate::discover::{Container, ContainerId, Identity};
use crate::series::Series;

/// The cycle's side of the ledger.
#[derive(Debug)]
pub struct Ledger {
    containers: containers::Books,
    desk: Arc<Desk>,
    gpus: gpus::Gpus,
    xids: xids::Xids,
    gpu_errors: gpu_errors::Errors,
}

impl Ledger {
    /// An empty ledger that keeps ended containers so long, is told how many GPUs there should be, and meets the
    /// ledger's thread at this desk.
    pub fn new(keep_ended: Duration, gpus_expected: Option<usize>, desk: Arc<Desk>) -> Self {
        let (containers, gpus) = (containers::Books::new(keep_ended), gpus::Gpus::new(gpus_expected));
        Self {
            containers,
            desk,
            gpus,
            xids: xids::Xids::default(),
            gpu_errors: gpu_errors::Errors::default(),
        }
    }

    /// True once the ledger's thread has put figures out.
    pub fn has_figures(&self) -> bool {
        self.desk.figures().is_some()
    }

    /// Enters one cycle and writes what the ledger knows. Returns the ended containers that are still shown; their
    /// numbers follow those of the running ones.
    pub fn enter(
        &mut self,
        context: &Context<'_>,
        ended: &[Arc<Container>],
        readings: &Readings,
        attribution: &Attribution,
        series: &mut Series,
    ) -> Vec<Arc<Container>> {
        self.gpus.enter(context.now, readings, &attribution.gpus, series);
        let xids = self.xids.enter(context, readings, &attribution.gpus, &self.desk.take_xids());
        self.containers.enter(context, ended, readings, &attribution.gpus);
        for told in &xids {
            if let Some(name) = told.container.as_ref().and_then(|id| self.containers.identity(id)) {
                self.xids.count(context.now, told, name);
            }
        }
        self.enter_gpu_errors(context, readings, xids);
        self.hand_over(context, readings, attribution, series);
        let mut shown = self.containers.write(context, series);
        if let Some(figures) = self.desk.figures() {
            write_host(&figures, series);
            write_containers(&figures, context, &mut shown, series);
            if figures.sources.contains(&("kmsg", true)) {
                self.xids.bear(context, readings, &attribution.gpus);
            }
        }
        let containers = context.inventory.containers.iter().chain(&shown);
        self.xids.write(context.now, containers, series);
        shown
    }

    /// Hands the errors of GPUs over, that they become events.
    fn enter_gpu_errors(&mut self, context: &Context<'_>, readings: &Readings, told: Vec<xids::Told>) {
        let figures = self.desk.figures();
        let is_log_read = figures.is_some_and(|figures| figures.sources.contains(&("kmsg", true)));
        let of_log = told.into_iter().map(|told| {
            let subject = told.container.as_ref().and_then(|id| self.containers.subject(id));
            let (gpu, gpu_uuid) = told.gpu;
            let source = "kmsg".into();
            GpuError { id: 0, at: told.at, gpu, gpu_uuid, xid: told.xid, pid: told.pid, subject, source }
        });
        let errors = self.gpu_errors.enter(context.now, readings, of_log.collect(), is_log_read);
        if !errors.is_empty() {
            self.desk.enter_gpu_errors(errors);
        }
    }

    /// Hands the ledger's thread what this cycle saw.
    fn hand_over(
        &self,
        context: &Context<'_>,
        readings: &Readings,
        attribution: &Attribution,
        series: &Series,
    ) {
        let running = &context.inventory.containers;
        let mut containers = vec![Held::default(); running.len()];
        for (number, held) in containers.iter_mut().enumerate() {
            held.sample = sample(context.now, readings, number);
            (held.peak_usage_bytes, held.peak_unreclaimable_bytes) =
                self.containers.peaks(&running[number].id);
        }
        let all = (0..running.len()).flat_map(|number| readings.processes.of(number));
        for (process, attributed) in std::iter::zip(all, &attribution.processes) {
            containers[attributed.container as usize].processes.push(Process {
                pid: attributed.pid,
                ppid: process.facts.ppid,
                comm: Arc::clone(&attributed.comm),
                role: attributed.role,
                python: process.facts.command.python,
                rss_bytes: attributed.rss_bytes,
                pss_bytes: attributed.pss_bytes,
            });
        }
        let mut host_memory = (None, None);
        for row in series.rows() {
            let sample = || containers.get(row.container as usize)?.sample;
            match row.family {
                Id::HOST_MEMORY_TOTAL => host_memory.0 = Some(row.value as u64),
                Id::HOST_MEMORY_AVAILABLE => host_memory.1 = Some(row.value as u64),
                Id::CONTAINER_SHM_USED | Id::CONTAINER_SHM_SIZE => {
                    let Some(mut sample) = sample() else { continue };
                    let used = row.family == Id::CONTAINER_SHM_USED;
                    let field = if used { &mut sample.shm_used_bytes } else { &mut sample.shm_size_bytes };
                    *field = Some(row.value as u64);
                    containers[row.container as usize].sample = Some(sample);
                }
                _ => {}
            }
        }
        self.desk.hand_over(Handed {
            at: context.now,
            inventory: Arc::clone(context.inventory),
            containers,
            host_memory: host_memory.0.zip(host_memory.1),
        });
    }
}

fn sample(now: Moment, readings: &Readings, number: usize) -> Option<Sample> {
    let memory = readings.memory.get(number)?.as_ref()?;
    Some(Sample {
        at: now.unix_seconds(),
        usage_bytes: memory.usage,
        unreclaimable_bytes: memory.unreclaimable,
        anon_bytes: memory.anon,
        shmem_bytes: memory.shmem,
        file_bytes: memory.file,
        limit_bytes: memory.limit,
        effective_limit_bytes: memory.effective_limit,
        shm_used_bytes: None,
        shm_size_bytes: None,
    })
}

fn write_host(figures: &Figures, series: &mut Series) {
    series.global(HOST_OOM_KILLS, [], figures.host_kills as f64);
    series.global(HOST_PROCESS_OOM_KILLS, [], figures.host_process_kills as f64);
    series.global(OOM_UNATTRIBUTED, [], figures.unattributed as f64);
    series.global(OOM_GAPS, [], figures.gaps as f64);
    series.global(OOM_DUPLICATE_LINES, [], figures.duplicate_lines as f64);
    for (source, up) in &figures.sources {
        series.global(OOM_SOURCE_UP, [(*source).into()], f64::from(u8::from(*up)));
    }
    if let Some(up) = figures.store_up {
        series.global(STORE_UP, [], f64::from(u8::from(up)));
    }
}

/// Writes the counts of all names: of running containers, of ended ones that are shown already, and of those that only
/// the ledger remembers, which are added to `shown`. A container that the ledger's thread has not heard of yet has none
/// for a cycle: its name may have counts of earlier days, and 0 would be wrong.
fn write_containers(
    figures: &Figures,
    context: &Context<'_>,
    shown: &mut Vec<Arc<Container>>,
    series: &mut Series,
) {
    let by_name: HashMap<&Name, &ContainerFigures> =
        figures.containers.iter().map(|figures| (&figures.name, figures)).collect();
    let running = &context.inventory.containers;
    let mut written = HashSet::new();
    for (number, container) in running.iter().chain(shown.iter()).enumerate() {
        let name = Name::from(&container.identity);
        if let Some(figures) = by_name.get(&name) {
            write_container(figures, number as u32, series);
        }
        written.insert(name);
    }
    for figures in figures.containers.iter().filter(|figures| !written.contains(&figures.name)) {
        let number = running.len() + shown.len();
        write_container(figures, number as u32, series);
        shown.push(Arc::new(remembered(&figures.name)));
    }
}

/// A container of which only the name is left.
fn remembered(name: &Name) -> Container {
    Container {
        id: ContainerId::new(""),
        identity: Identity {
            k8s_namespace: Arc::clone(&name.k8s_namespace_name),
            k8s_pod: Arc::clone(&name.k8s_pod_name),
            name: Arc::clone(&name.container_name),
        },
        runtime: "",
        pod: None,
        image: "".into(),
        compose_project: "".into(),
        compose_service: "".into(),
        settings: vec![],
        gpus: Arc::default(),
        started: None,
        cgroup: None,
        nested: false,
    }
}

fn write_container(figures: &ContainerFigures, number: u32, series: &mut Series) {
    for (victim, scopes) in std::iter::zip(["main", "child"], figures.kills) {
        for (scope, kills) in std::iter::zip(["container", "host"], scopes) {
            series.container(CONTAINER_OOM_KILLS, number, [victim.into(), scope.into()], kills as f64);
        }
    }
    for (reason, exits) in std::iter::zip(Reason::ALL, figures.exits) {
        series.container(CONTAINER_EXITS, number, [reason.label().into()], exits as f64);
    }
    series.container(CONTAINER_RESTARTS, number, [], figures.restarts as f64);
    if let Some(at) = figures.last_kill {
        series.container(CONTAINER_LAST_OOM_KILL, number, [], at);
    }
    if let Some(code) = figures.last_exit_code {
        series.container(CONTAINER_LAST_EXIT_CODE, number, [], code as f64);
    }
}
