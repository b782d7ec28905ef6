//! Completes the kernel's report: roles of processes, and for a kill on the host their containers. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ObservedRecord;
use crate::attribute::roles::role_by_name;
use crate::discover::{ContainerId, PathOwner, owner_of_paths};
use crate::events::{OomReport, ReportProcess, Role, RoleRange};
use crate::ledger::container_table::ContainerTable;

/// The completed reports: the victims of one group kill share theirs.
#[derive(Debug, Default)]
pub(super) struct ReportLabels {
    /// The newest report as the kernel logged it, and completed.
    newest: Option<(Arc<OomReport>, Arc<OomReport>)>,
}

impl ReportLabels {
    /// Returns the completed report: with the roles of all processes in ranges, and the largest processes in rows.
    /// `containers`: `None` if the pids of the log are of another pid namespace.
    pub(super) fn label(
        &mut self,
        report: &Arc<OomReport>,
        line: &ObservedRecord,
        containers: Option<&ContainerTable>,
    ) -> Arc<OomReport> {
        if let Some((_, completed)) = self.newest.as_ref().filter(|(logged, _)| Arc::ptr_eq(logged, report)) {
            return Arc::clone(completed);
        }
        let mut completed = complete(report, |row| {
            if let Some(containers) = containers {
                label_process(row, report.host, line, containers);
            }
        });
        completed.host_swap_bytes = line.proc_info.host_swap_bytes;
        let completed = Arc::new(completed);
        self.newest = Some((Arc::clone(report), Arc::clone(&completed)));
        completed
    }
}

/// Returns the report with the roles of all processes in ranges, and the largest processes in rows. `label` sets what is known
/// of a process.
pub fn complete(report: &OomReport, label: impl Fn(&mut ReportProcess)) -> OomReport {
    let mut completed = report.clone();
    for row in &mut completed.processes {
        label(row);
        row.role = row.role.or_else(|| role_by_name(&row.process));
    }
    completed.roles = role_ranges(&completed.processes);
    completed.processes.truncate(OomReport::MAX_PROCESSES);
    completed
}

/// Sets what the last cycles show of a process; its container also by its cgroup, if it still runs.
fn label_process(row: &mut ReportProcess, is_host: bool, line: &ObservedRecord, containers: &ContainerTable) {
    let pid = row.tgid.unwrap_or(row.pid);
    let sampled = containers.find_by_pid(pid, &row.process, &line.written.within);
    let state = sampled.as_ref().and_then(|id| containers.get(id));
    let usage = state.and_then(|state| state.runs.all().find_map(|run| run.process(pid)));
    row.role = usage.map(|usage| usage.role);
    if !is_host {
        return;
    }
    let by_cgroup = || {
        let path = line.proc_info.report_cgroups.get(&pid)?.as_str();
        let claim = |id: &ContainerId, path: &str| containers.claim(id, path);
        match owner_of_paths([path], claim, |path| line.proc_info.maker(path)) {
            PathOwner::Container(id) => Some(id),
            _ => None,
        }
    };
    if let Some(id) = sampled.or_else(by_cgroup) {
        let named = containers.get(&id).map(|state| state.identity.name.to_string());
        row.container = named.unwrap_or_else(|| id.short().to_owned());
    }
}

/// Returns the ranges of the roles that are known, by the resident memory of their largest process.
fn role_ranges(rows: &[ReportProcess]) -> Vec<RoleRange> {
    let mut ranges: BTreeMap<Role, RoleRange> = BTreeMap::new();
    for (role, row) in rows.iter().filter_map(|row| Some((row.role?, row))) {
        let new = RoleRange { role, processes: 0, min_rss_bytes: u64::MAX, max_rss_bytes: 0 };
        let range = ranges.entry(role).or_insert(new);
        range.processes += 1;
        range.min_rss_bytes = range.min_rss_bytes.min(row.rss_bytes);
        range.max_rss_bytes = range.max_rss_bytes.max(row.rss_bytes);
    }
    let mut ranges: Vec<RoleRange> = ranges.into_values().collect();
    ranges.sort_by_key(|range| std::cmp::Reverse(range.max_rss_bytes));
    ranges
}
