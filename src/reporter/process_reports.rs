//! What processes report on its way to the records of their runs: memory at each point of the program, and at the end of a process all
//! that it had reported. A cycle may come after that end, when the container is not listed any more.

use super::message::ReportedRecord;
use super::reports::{ContainerReports, ReportedDevice, ReportingProcess};
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::host::process::ProcessId;

/// Maximum number of reports that wait for the ledger, which takes them with each step; more are dropped.
const MAX_WAITING: usize = 1_024;

/// A report of one process for the record of its run.
#[derive(Clone, Debug)]
pub struct ProcessReport {
    /// Its container.
    pub container: ContainerId,
    /// When the process connected: the report is of the run of that time.
    pub connected: Timestamp,
    /// What it reports.
    pub content: ProcessReportContent,
}

/// What is reported.
#[derive(Clone, Debug)]
pub enum ProcessReportContent {
    /// Memory at points of the program, received at this time.
    Records(Timestamp, Vec<ReportedRecord>),
    /// The connection of a process ended.
    End(Box<EndReport>),
}

/// All that a process had reported when its connection ended.
#[derive(Clone, Debug)]
pub struct EndReport {
    /// When that was.
    pub at: Timestamp,
    /// The process.
    pub id: ProcessId,
    /// Its settings, its rank, and its last sample.
    pub process: ReportingProcess,
    /// What its container reported.
    pub container: ContainerReports,
}

impl EndReport {
    /// Returns the memory of torch on each device at the last sample.
    pub fn devices(&self) -> &[ReportedDevice] {
        &self.process.devices
    }
}

/// Reports that the ledger has not taken yet.
#[derive(Debug, Default)]
pub struct ProcessReportQueue(Vec<ProcessReport>);

impl ProcessReportQueue {
    /// Adds a report. Returns false if too many wait.
    pub fn add(&mut self, report: ProcessReport) -> bool {
        let has_room = self.0.len() < MAX_WAITING;
        self.0.extend(has_room.then_some(report));
        has_room
    }

    /// Takes the reports that were added since the last call.
    pub fn take(&mut self) -> Vec<ProcessReport> {
        std::mem::take(&mut self.0)
    }
}
