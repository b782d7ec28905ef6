//! What processes report from inside becomes part of the record of their run, also what arrives with its exit or after it. Pure.

use std::sync::Arc;

use super::Reconciler;
use crate::clock::Timestamp;
use crate::reporter::process_reports::{EndReport, ProcessReport, ProcessReportContent};
use crate::runs::operation_log::OperationRecord;
use crate::runs::process_end::{ProcessEnd, TorchPeaks};
use crate::runs::sample::{OperationSample, ReportingRank, RunSample};

impl Reconciler {
    /// Adds reports of processes to the run in which each of them connected.
    pub fn add_process_reports(&mut self, now: Timestamp, reports: Vec<ProcessReport>) {
        let unix = |at: Timestamp| now.unix_seconds() - now.since(at).as_secs_f64();
        for ProcessReport { container, connected, content } in reports {
            if self.containers.get(&container).is_none() {
                continue;
            }
            let Some(run) = self.containers.modify(&container).runs.at_mut(unix(connected)) else { continue };
            match content {
                ProcessReportContent::Records(received, records) => {
                    run.evidence.figures.log_operations(records.into_iter().map(|record| OperationRecord {
                        component: record.pair.0,
                        operation: record.pair.1,
                        at: unix(received) - record.ago.as_secs_f64(),
                        bytes: record.bytes,
                    }));
                }
                ProcessReportContent::End(end) => {
                    run.evidence.figures.record_process_end(process_end(unix(end.at), &end))
                }
            }
        }
    }
}

fn process_end(at: f64, end: &EndReport) -> ProcessEnd {
    let (process, container) = (&end.process, &end.container);
    let operations = container.operations.iter().filter_map(|(pair, by_rank)| {
        Some((pair.clone(), OperationSample::from(by_rank.get(&process.rank)?)))
    });
    let progress = container.progress.values();
    let samples = progress.clone().filter_map(|of| of.samples).map(|samples| samples as f64);
    let ooms = container.failures.values().map(|failures| failures.ooms);
    let rank = ReportingRank { rank: process.rank, start_ticks: end.id.start_ticks, pid: end.id.pid };
    ProcessEnd {
        at,
        gpus: end
            .devices()
            .iter()
            .map(|device| TorchPeaks {
                uuid: device.uuid.as_ref().map(Arc::clone),
                allocated_bytes: device.memory.alloc.max(device.memory.alloc_peak),
                reserved_bytes: device.memory.res.max(device.memory.res_peak),
            })
            .collect(),
        peaks_forgotten: container.peaks_forgotten.map(|at| at.unix_seconds()),
        sample: RunSample {
            samples: samples.clone().reduce(|one, other| one + other),
            ranks_with_samples: samples.count(),
            steps: progress.clone().map(|of| of.steps as f64).reduce(f64::max),
            torch_ooms: ooms.reduce(u64::saturating_add).map(|ooms| ooms as f64),
            operations: operations.collect(),
            settings: process.settings.clone(),
            settings_of: (!process.settings.is_empty()).then_some(rank),
            ..RunSample::default()
        },
    }
}
