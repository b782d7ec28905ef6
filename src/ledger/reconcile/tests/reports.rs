//! What the ledger adds to the kernel's report: roles by the pids of the last sample, else by name.

use std::sync::Arc;

use super::story::{DOCKER_UP, Story, id, killed, path};
use crate::attribute::roles::Role;
use crate::discover::EventKind;
use crate::events::{OomReport, ReportProcess};
use crate::ledger::interval::Written;
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::sources::kernel_log::{LogEntry, LogPosition};
use crate::parse::kernel_log::{Line, OomContext};
use crate::runs::usage::ProcessUsage;

const WORKERS: u32 = 30;

/// Applies a kill with a report.
fn kill_with_report(story: &mut Story, at: f64, pid: u32, report: OomReport) {
    let written = Written::exactly(story.at(at).unix_seconds());
    let usec = story.at(at).kernel_usec();
    let context = OomContext { task_cgroups: vec![path('a')], pid: Some(pid), ..OomContext::default() };
    let block = &mut story.block;
    let records = [Line::Context(context), Line::Killed(killed(pid))].into_iter().zip(1_u64..).filter_map(
        |(line, number)| {
            let position = LogPosition { sequence: Some(number), usec: usec + number };
            let report = matches!(line, Line::Killed(_)).then(|| Arc::new(report.clone()));
            let entry = LogEntry { position, line, text: Arc::from("a line"), report };
            super::observed(block, entry, written, ProcInfo::default())
        },
    );
    let records: Vec<_> = records.collect();
    story.reconciler.apply_log(story.at(at), Some(&records), records[0].position);
}

#[test]
fn roles_are_those_of_the_sample_and_count_all_processes() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let process = |pid: u32, comm: &str, role| ProcessUsage {
        pid,
        ppid: 1,
        comm: comm.into(),
        role,
        python: true,
        memory: crate::collect::process::ResidentMemory { rss_bytes: 1 << 20, anon_bytes: 1 << 20 },
        pss_bytes: None,
        program: None,
    };
    // workers and trainer have the same name: only the sample tells them apart
    let workers = 100..100 + WORKERS;
    story.usage.processes =
        workers.clone().map(|pid| process(pid, "python3", Role::DataloaderWorker)).collect();
    story.usage.processes.push(process(7, "python3", Role::Trainer));
    story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
    let row = |pid: u32, name: &str, rss_mib: u64| ReportProcess {
        pid,
        process: name.into(),
        rss_bytes: rss_mib << 20,
        ..ReportProcess::default()
    };
    let mut processes = vec![row(7, "python3", 900)];
    processes.extend(workers.map(|pid| row(pid, "python3", 100 - u64::from(pid - 100))));
    processes.push(row(8, "pt_data_worker", 50)); // no sample had it
    processes.push(row(9, "nvidia-smi", 10));
    processes.sort_by_key(|row| std::cmp::Reverse(row.rss_bytes));
    let report = OomReport {
        context_pid: Some(7),
        process_count: Some(processes.len() as u32),
        processes,
        ..OomReport::default()
    };
    kill_with_report(&mut story, 2.0, 7, report);
    story.settle(2.0);
    let kill = story.last_kill();
    let report = kill.report.as_ref().expect("a report");
    let roles: Vec<_> = report.roles.iter().map(|range| (range.role, range.processes)).collect();
    assert_eq!(
        roles,
        [(Role::Trainer, 1), (Role::DataloaderWorker, WORKERS + 1)],
        "more than the {} rows",
        report.processes.len()
    );
    let (smallest, largest) = (report.roles[1].min_rss_bytes >> 20, report.roles[1].max_rss_bytes >> 20);
    assert_eq!((smallest, largest), (50, 100), "by the sample and by name");
    assert_eq!(report.processes.len(), OomReport::MAX_PROCESSES);
    assert_eq!(report.processes[0].role, Some(Role::Trainer));
    assert_eq!(kill.role, Some(Role::Trainer));
    assert!(story.owner().is_some(), "{}", id('a').as_str());
}
