//! The past of runs, as the spools have it.

use std::collections::HashSet;
use std::path::Path;

use super::super::history::RuntimeHistory;
use super::record::SpooledRun;
use super::spool;
use crate::config::Filter;
use crate::discover::RuntimeKind;
use crate::host::HostPaths;

/// Reads what the spools know. `None` if there is no run in them.
pub fn history<'a>(
    spools: impl IntoIterator<Item = &'a Path>,
    host_paths: &HostPaths,
    filter: &Filter,
) -> Option<RuntimeHistory> {
    let mut seen = HashSet::new();
    let read = spools.into_iter().flat_map(|spool| spool::read(spool, host_paths));
    let mut runs: Vec<SpooledRun> = read.filter(|run| seen.insert(run.container_id())).collect();
    runs.sort_by(|one, other| one.started.total_cmp(&other.started));
    if runs.is_empty() {
        return None;
    }
    let boot_id = host_paths.boot_id().unwrap_or_default();
    let mut history = RuntimeHistory { runtime: RuntimeKind::Run, ..RuntimeHistory::default() };
    for run in &runs {
        history.containers.push(run.existing(run.is_running(&boot_id), filter));
        history.events.push(run.running(filter));
        history.events.extend(run.signals.iter().map(|received| run.signal(*received, filter)));
        history.events.extend(run.ended(filter));
    }
    Some(history)
}
