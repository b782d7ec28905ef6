//! CUDA out-of-memory errors that processes report, or that are in the logs of containers: their container and run, who held the GPU, and whether the process ended by
//! them. Pure.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::Reconciler;
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::ledger::events::{ContainerRef, CudaOom, GpuHolder, LedgerEvent};
use crate::ledger::exchange::GpuUse;
use crate::ledger::totals::CudaOomSource;
use crate::reporter::message::normalized_uuid;
use crate::reporter::ooms::ReportedOom;
use crate::reporter::reports::ProcessKey;

/// How long to wait for the message that the process ended by an error. It unwinds before, and may save its state.
const UNCAUGHT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of holders of an event.
const MAX_HOLDERS: usize = 5;

/// An error of which it may still be reported that the process ended by it.
#[derive(Clone, Debug)]
pub struct PendingCudaOom {
    pub(super) event: CudaOom,
    process: ProcessKey,
    number: u64,
    since: Timestamp,
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

impl Reconciler {
    /// Sets the containers whose logs are being read.
    pub fn set_logs_being_read(&mut self, containers: HashSet<ContainerId>) {
        self.logs_being_read = containers;
    }

    /// Adds errors that processes reported, or that were read in logs.
    pub fn add_cuda_ooms(&mut self, now: Timestamp, reported: Vec<ReportedOom>) {
        for oom in reported {
            let at = now.unix_seconds() - now.since(oom.at).as_secs_f64();
            if oom.message.is_only_uncaught() && self.mark_uncaught(&oom, at) {
                continue;
            }
            let errors = 1_u64.saturating_add(oom.skipped);
            let subject = self.record_in_run(&oom, at, errors);
            self.totals.count_cuda_ooms(&subject.name, source_of(&oom), errors, at);
            let event = CudaOom { id: self.new_id(), ..self.event_of(&oom, at, subject) };
            if let Some(process) = oom.process {
                let (event, number) = (event.clone(), oom.message.number);
                self.pending_cuda_ooms.push(PendingCudaOom { event, process, number, since: now });
            }
            self.changes.events.insert(event.id, LedgerEvent::CudaOom(event));
        }
    }

    fn event_of(&self, oom: &ReportedOom, at: f64, subject: ContainerRef) -> CudaOom {
        let message = &oom.message;
        let gpu = self.gpu_of(oom);
        let (component, operation) = message.scope.clone().unwrap_or_default();
        let holder = |user: &crate::ledger::exchange::GpuUser| GpuHolder {
            name: Arc::clone(&user.name),
            own: user.container.as_ref() == Some(&oom.container),
            bytes: user.bytes,
        };
        CudaOom {
            id: 0,
            at,
            pid: oom.process.map(|(pid, _)| pid),
            rank: oom.rank,
            gpu: gpu.map(|gpu| Arc::clone(&gpu.index)).unwrap_or_default(),
            gpu_uuid: gpu.map(|gpu| Arc::clone(&gpu.uuid)).unwrap_or_default(),
            source: source_of(oom).label().into(),
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
            subject,
        }
    }

    /// Marks the error by which a process ended. Returns false if it is not known.
    fn mark_uncaught(&mut self, oom: &ReportedOom, at: f64) -> bool {
        let is_it = |pending: &&mut PendingCudaOom| {
            (Some(pending.process), pending.number) == (oom.process, oom.message.number)
        };
        let Some(pending) = self.pending_cuda_ooms.iter_mut().find(is_it) else { return false };
        pending.event.uncaught = Some(true);
        if let Some(run) = self.containers.modify(&oom.container).run_at_mut(at) {
            run.uncaught_cuda_oom = Some(at);
        }
        true
    }

    /// Records an error in the run of its container, and returns the container as its subject.
    fn record_in_run(&mut self, oom: &ReportedOom, at: f64, errors: u64) -> ContainerRef {
        let id = &oom.container;
        let known = self.containers.modify(id);
        let mut number = None;
        if let Some(run) = known.run_at_mut(at) {
            match source_of(oom) {
                CudaOomSource::Reporter => {
                    run.cuda_oom = Some(at);
                    run.figures.count_cuda_ooms(errors);
                }
                CudaOomSource::Log => {
                    run.cuda_oom_in_log = Some(at);
                    run.figures.count_logged_cuda_ooms(errors);
                }
            }
            if oom.message.is_uncaught {
                run.uncaught_cuda_oom = Some(at);
            }
            number = Some(run.number);
        }
        known.subject(id, number.and_then(|number| known.run(number)).or(known.run.as_ref()))
    }

    /// Decides the errors of which no more is reported, and writes them.
    pub(super) fn settle_cuda_ooms(&mut self, now: Timestamp) {
        let mut pending = std::mem::take(&mut self.pending_cuda_ooms);
        pending.retain_mut(|pending| {
            if pending.event.uncaught.is_none() && now.since(pending.since) < UNCAUGHT_TIMEOUT {
                return true;
            }
            pending.event.uncaught.get_or_insert(false);
            self.changes.events.insert(pending.event.id, LedgerEvent::CudaOom(pending.event.clone()));
            false
        });
        self.pending_cuda_ooms = pending;
    }

    /// Settles an error that was pending when memledger stopped: its process has another connection now.
    pub(super) fn reopen_cuda_oom(&mut self, mut event: CudaOom) {
        event.uncaught = Some(false);
        self.changes.events.insert(event.id, LedgerEvent::CudaOom(event));
    }

    /// Takes the GPUs of a cycle.
    pub(super) fn apply_gpus(&mut self, at: Timestamp, gpus: &[GpuUse]) {
        let previous = self.gpus.pop();
        self.gpus.clear();
        self.gpus.extend(previous);
        self.gpus.push(GpuUseReading { at, gpus: gpus.to_vec() });
    }

    /// Returns the GPU of an error before it: by its UUID, else the only one that its process is on, or its container where the
    /// process is unknown.
    fn gpu_of(&self, oom: &ReportedOom) -> Option<&GpuUse> {
        let before = self.gpus.iter().rev().find(|reading| reading.at <= oom.at);
        let gpus = &before.or(self.gpus.first())?.gpus;
        let by_uuid = gpus.iter().find(|gpu| Some(&normalized_uuid(&gpu.uuid)) == oom.device.as_ref());
        by_uuid.or_else(|| {
            let is_on = |gpu: &&GpuUse| match &oom.process {
                Some(process) => gpu.processes.contains(process),
                None => gpu.holders.iter().any(|holder| holder.container.as_ref() == Some(&oom.container)),
            };
            let mut on = gpus.iter().filter(is_on);
            on.next().filter(|_| on.next().is_none())
        })
    }
}
