//! CUDA out-of-memory errors that processes report, or that are in the logs of containers: their container and run, who held the GPU,
//! and whether the process ended by them. Pure.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::Reconciler;
use crate::clock::{ClockStep, Timestamp};
use crate::discover::ContainerId;
use crate::events::{
    ContainerRef, CudaOom, CudaOomSource, GpuHolder, HeldGrowth, LedgerEvent, OwnGpuProcess,
};
use crate::host::process::ProcessId;
use crate::ledger::exchange::{GpuProcessUse, GpuUse, GpuUser};
use crate::lifecycle::timing::{LATE_LINE, MAX_EARLIER_AGE, MAX_RECENT_AGE, UNCAUGHT_TIMEOUT};
use crate::parse::log_error::HostErrorText;
use crate::reporter::message::normalized_uuid;
use crate::reporter::ooms::ReportedOom;

/// Maximum number of holders of an event.
const MAX_HOLDERS: usize = 5;
/// Maximum number of settled errors that a later message can still mark: a process may save its state for long before it ends.
const MAX_SETTLED: usize = 256;
/// Time between two earlier readings of the GPUs, and their number.
const EARLIER_INTERVAL: Duration = Duration::from_secs(60);
const MAX_EARLIER: usize = 6;
/// Maximum number of these readings.
const MAX_RECENT: usize = 64;
/// Maximum number of processes and holders in these readings.
const MAX_RECENT_USES: usize = 16_384;

/// An error of which it may still be reported that the process ended by it.
#[derive(Clone, Debug)]
pub struct PendingCudaOom {
    pub(super) event: CudaOom,
    process: ProcessId,
    number: u64,
    since: Timestamp,
}

/// What is known of errors and of the GPUs.
#[derive(Clone, Debug, Default)]
pub struct CudaOoms {
    /// Errors that are not settled.
    pub(super) pending: Vec<PendingCudaOom>,
    /// Errors that were settled as caught, oldest first.
    settled: VecDeque<PendingCudaOom>,
    /// The readings of the last seconds, oldest first.
    recent: VecDeque<GpuUseReading>,
    /// Readings of the minutes before, oldest first.
    earlier: VecDeque<GpuUseReading>,
}

/// The GPUs at one time.
#[derive(Clone, Debug)]
pub struct GpuUseReading {
    pub(super) at: Timestamp,
    pub(super) gpus: Vec<GpuUse>,
}

fn source_of(oom: &ReportedOom) -> CudaOomSource {
    match oom.process {
        Some(_) => CudaOomSource::Reporter,
        None => CudaOomSource::Log,
    }
}

/// Returns the other processes of the container of an error on its GPU, largest first; none where the process is unknown.
fn own_processes(gpu: &GpuUse, oom: &ReportedOom) -> Vec<OwnGpuProcess> {
    let Some(process) = oom.process else { return vec![] };
    let is_other =
        |used: &&GpuProcessUse| used.container.as_ref() == Some(&oom.container) && used.id != process;
    let others = gpu.processes.iter().filter(is_other);
    let mut others: Vec<_> = others
        .filter_map(|used| {
            Some(OwnGpuProcess { pid: used.id.pid, bytes: used.bytes.filter(|bytes| *bytes > 0)? })
        })
        .collect();
    others.sort_by_key(|process| std::cmp::Reverse(process.bytes));
    others.truncate(MAX_HOLDERS);
    others
}

type Settings = Vec<(Arc<str>, Arc<str>)>;

impl Reconciler {
    /// Sets the containers whose logs are being read.
    pub fn set_logs_being_read(&mut self, containers: Option<HashSet<ContainerId>>) {
        self.reads_logs = containers.is_some();
        self.logs_being_read = containers.unwrap_or_default();
    }

    /// Sets the containers with a process that is connected to the reporter.
    pub fn set_connected(&mut self, containers: HashSet<ContainerId>) {
        self.connected = containers;
    }

    /// Adds errors that processes reported, or that were read in logs.
    pub fn add_cuda_ooms(&mut self, now: Timestamp, reported: Vec<ReportedOom>) {
        for oom in reported {
            let at = now.unix_seconds() - now.since(oom.at).as_secs_f64();
            let is_known = oom.message.is_update() && self.update_cuda_oom(&oom, at);
            if is_known || oom.message.is_update() && !oom.message.is_uncaught {
                continue;
            }
            let (subject, settings, growth) = self.record_in_run(&oom, at);
            self.totals.count_cuda_ooms(&subject.identity, source_of(&oom), oom.errors, at);
            // one without a known error has no numbers
            if !oom.is_event || oom.message.is_only_uncaught() {
                continue;
            }
            let event = CudaOom { id: self.new_id(), settings, growth, ..self.event_of(&oom, at, subject) };
            if let Some(process) = oom.process {
                let (event, number) = (event.clone(), oom.message.number);
                self.cuda_ooms.pending.push(PendingCudaOom { event, process, number, since: now });
            }
            self.changes.put_event(LedgerEvent::CudaOom(event));
        }
    }

    /// Adds errors that were read in logs and are not of GPU memory, of each container oldest first.
    pub fn add_host_errors(
        &mut self,
        now: Timestamp,
        errors: HashMap<ContainerId, Vec<(Timestamp, HostErrorText)>>,
    ) {
        for (id, errors) in errors {
            if self.containers.get(&id).is_none() {
                continue;
            }
            let state = self.containers.modify(&id);
            for (at, error) in errors {
                let at = now.unix_seconds() - now.since(at).as_secs_f64();
                // an engine may stamp the last line after the end
                let number = [at, at - LATE_LINE].iter().find_map(|at| Some(state.runs.at_mut(*at)?.number));
                if let Some(run) = number.and_then(|number| state.runs.get_mut(number)) {
                    run.evidence.log_error = Some((at, error));
                }
            }
        }
    }

    fn event_of(&self, oom: &ReportedOom, at: f64, subject: ContainerRef) -> CudaOom {
        let message = &oom.message;
        let (read_at, gpu) = self.cuda_ooms.gpu_of(oom).unzip();
        let earlier = gpu.and_then(|gpu| self.cuda_ooms.earlier(oom.at, gpu));
        // one that is new may have taken the place of one that has left, as a container that was created again
        let is_there =
            |user: &GpuUser| gpu.is_some_and(|gpu| gpu.holders.iter().any(|now| now.is_same(user)));
        let has_left = earlier.is_some_and(|gpu| gpu.holders.iter().any(|user| !is_there(user)));
        let (component, operation) = message.operation.clone().unwrap_or_default();
        let holder = |user: &GpuUser| GpuHolder {
            name: Arc::clone(&user.name),
            own: user.container.as_ref() == Some(&oom.container),
            bytes: user.bytes,
            earlier_bytes: earlier.and_then(|gpu| {
                let same = gpu.holders.iter().find(|other| other.is_same(user));
                same.map_or(if has_left { None } else { Some(0) }, |same| same.bytes)
            }),
        };
        CudaOom {
            id: 0,
            at,
            pid: oom.process.map(|process| process.pid),
            rank: oom.rank,
            gpu: gpu.map(|gpu| Arc::clone(&gpu.index)).unwrap_or_default(),
            gpu_uuid: gpu.map(|gpu| Arc::clone(&gpu.uuid)).unwrap_or_default(),
            framework: message.framework.unwrap_or_default().into(),
            source: source_of(oom),
            tried_bytes: message.tried,
            total_bytes: message.total,
            free_bytes: message.free,
            allocated_bytes: message.allocated,
            reserved_bytes: message.reserved,
            inactive_split_bytes: message.inactive_split,
            component,
            operation,
            uncaught: message.is_uncaught.then_some(true),
            skipped: oom.skipped,
            holders: gpu
                .map(|gpu| gpu.holders.iter().take(MAX_HOLDERS).map(holder).collect())
                .unwrap_or_default(),
            own_processes: gpu.map_or_else(Vec::new, |gpu| own_processes(gpu, oom)),
            // by the same clock as the error
            holders_at: read_at.map(|read_at| at - oom.at.since(read_at).as_secs_f64()),
            snapshot: message.snapshot.clone().unwrap_or_default(),
            settings: vec![],
            growth: None,
            subject,
        }
    }

    /// Adds to an error that its process ended by it, or where its snapshot is, also to one that was settled as caught. Returns false if
    /// it is not known.
    fn update_cuda_oom(&mut self, oom: &ReportedOom, at: f64) -> bool {
        let is_it =
            |state: &PendingCudaOom| (Some(state.process), state.number) == (oom.process, oom.message.number);
        let state = &mut self.cuda_ooms;
        let update = |event: &mut CudaOom| {
            if oom.message.is_uncaught {
                event.uncaught = Some(true);
            }
            if let Some(snapshot) = &oom.message.snapshot {
                event.snapshot = Arc::clone(snapshot);
            }
        };
        if let Some(pending) = state.pending.iter_mut().find(|pending| is_it(pending)) {
            update(&mut pending.event);
        } else if let Some(place) = state.settled.iter().position(is_it) {
            update(&mut state.settled[place].event);
            self.changes.put_event(LedgerEvent::CudaOom(state.settled[place].event.clone()));
            if oom.message.is_uncaught {
                state.settled.remove(place);
            }
        } else {
            return false;
        }
        if !oom.message.is_uncaught {
            return true;
        }
        if let Some(run) = self.containers.modify(&oom.container).runs.at_mut(at) {
            run.evidence.uncaught_cuda_oom = Some(at);
        }
        true
    }

    /// Records an error in the run of its container, and returns the container as its subject, the settings of the run, and how what it held
    /// between two steps grew.
    fn record_in_run(&mut self, oom: &ReportedOom, at: f64) -> (ContainerRef, Settings, Option<HeldGrowth>) {
        let (id, errors) = (&oom.container, oom.errors);
        let state = self.containers.modify(id);
        let of_container = state.settings().to_vec();
        let (mut number, mut settings, mut growth) = (None, vec![], None);
        if let Some(run) = state.runs.at_mut(at) {
            match source_of(oom) {
                CudaOomSource::Reporter => {
                    run.evidence.cuda_oom = Some(at);
                    run.evidence.figures.count_cuda_ooms(errors);
                }
                CudaOomSource::Log => {
                    run.evidence.cuda_oom_in_log = Some(at);
                    run.evidence.figures.count_logged_cuda_ooms(errors);
                }
            }
            if oom.message.is_uncaught {
                run.evidence.uncaught_cuda_oom = Some(at);
            }
            settings = run.evidence.figures.settings_over(&of_container);
            growth = run.evidence.figures.held_growth();
            number = Some(run.number);
        }
        (
            state.subject(id, number.and_then(|number| state.runs.get(number)).or(state.runs.current())),
            settings,
            growth,
        )
    }

    /// Decides the errors of which no more is reported, and writes them.
    pub(super) fn settle_cuda_ooms(&mut self, now: Timestamp) {
        for mut pending in std::mem::take(&mut self.cuda_ooms.pending) {
            if pending.event.uncaught.is_none() && now.since(pending.since) < UNCAUGHT_TIMEOUT {
                self.cuda_ooms.pending.push(pending);
                continue;
            }
            pending.event.uncaught.get_or_insert(false);
            self.changes.put_event(LedgerEvent::CudaOom(pending.event.clone()));
            if pending.event.uncaught == Some(false) {
                let settled = &mut self.cuda_ooms.settled;
                settled.push_back(pending);
                settled.drain(..settled.len().saturating_sub(MAX_SETTLED));
            }
        }
    }

    /// Settles an error that was pending when memledger stopped: its process has another connection now.
    pub(super) fn reopen_cuda_oom(&mut self, mut event: CudaOom) {
        event.uncaught = Some(false);
        self.changes.put_event(LedgerEvent::CudaOom(event));
    }

    /// Takes the GPUs of a cycle.
    pub(super) fn apply_gpus(&mut self, at: Timestamp, gpus: &[GpuUse]) {
        let state = &mut self.cuda_ooms;
        let reading = GpuUseReading { at, gpus: gpus.to_vec() };
        if state.earlier.back().is_none_or(|last| at.since(last.at) >= EARLIER_INTERVAL) {
            state.earlier.push_back(reading.clone());
            state.earlier.drain(..state.earlier.len().saturating_sub(MAX_EARLIER));
        }
        state.recent.push_back(reading);
        let is_old = |reading: &GpuUseReading| at.since(reading.at) > MAX_RECENT_AGE;
        let uses = |reading: &GpuUseReading| {
            reading.gpus.iter().map(|gpu| gpu.processes.len() + gpu.holders.len()).sum::<usize>()
        };
        let mut all_uses: usize = state.recent.iter().map(uses).sum();
        // an old one stays while the next one is not old: it was the newest for a part of that time
        while state.recent.len() > MAX_RECENT
            || state.recent.len() > 2 && all_uses > MAX_RECENT_USES
            || state.recent.get(1).is_some_and(is_old)
        {
            all_uses -= state.recent.pop_front().as_ref().map_or(0, uses);
        }
    }
}

impl CudaOoms {
    /// Corrects the times, if the clock was set.
    pub(super) fn correct_times(&mut self, step: &ClockStep) {
        self.pending.iter_mut().chain(&mut self.settled).for_each(|oom| step.correct(&mut oom.event.at));
    }

    /// Returns a GPU some minutes before an error at this time.
    fn earlier(&self, at: Timestamp, gpu: &GpuUse) -> Option<&GpuUse> {
        let is_earlier = |age: Duration| (EARLIER_INTERVAL..=MAX_EARLIER_AGE).contains(&age);
        let reading = self.earlier.iter().find(|reading| is_earlier(at.since(reading.at)))?;
        reading.gpus.iter().find(|earlier| earlier.uuid == gpu.uuid)
    }

    /// Returns the GPU of an error before it, and when that was read: by its UUID, else the only one that its process is on, or its container where the
    /// process is unknown.
    fn gpu_of(&self, oom: &ReportedOom) -> Option<(Timestamp, &GpuUse)> {
        let before = self.recent.iter().rev().find(|reading| reading.at <= oom.at);
        let GpuUseReading { at, gpus } = before.or(self.recent.front())?;
        let by_uuid = gpus.iter().find(|gpu| Some(&normalized_uuid(&gpu.uuid)) == oom.device.as_ref());
        let found = by_uuid.or_else(|| {
            let is_on = |gpu: &&GpuUse| match &oom.process {
                Some(process) => gpu.processes.iter().any(|used| used.id == *process),
                None => gpu.holders.iter().any(|holder| holder.container.as_ref() == Some(&oom.container)),
            };
            let mut on = gpus.iter().filter(is_on);
            on.next().filter(|_| on.next().is_none())
        });
        Some((*at, found?))
    }
}
