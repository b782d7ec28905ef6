//! The log records and runtime events of the world, as memledger reads them.

use std::sync::Arc;

use super::{Ending, Group, NAMES, Runtime, STOP_REQUEST, TrueKill, World};
use crate::clock::Timestamp;
use crate::discover::{ContainerSpec, EventKind, RuntimeEvent};
use crate::events::OomScope;
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::sources::kernel_log::{LogEntry, LogPosition};
use crate::parse::kernel_log::{Killed, Line, OomContext};

impl World {
    /// Returns true if a record that was logged until then, after a position, was overwritten.
    pub fn has_lost_records(&self, begin: Timestamp, after: u64, at: u64) -> bool {
        let lost = |kill: &&TrueKill| kill.trace.lost && kill.logged <= at;
        self.kills.iter().filter(lost).any(|kill| self.stamp(begin, kill.logged) > after)
    }

    /// Returns the kernel log until then, after a position. `None`: it cannot be read.
    pub fn log(&self, begin: Timestamp, after: u64, at: u64) -> Option<Vec<(LogEntry, ProcInfo)>> {
        if !self.sources.log {
            return None;
        }
        let mut entries = Vec::new();
        for kill in self.kills.iter().filter(|kill| !kill.trace.lost && kill.logged <= at) {
            entries.extend(self.lines(begin, kill, at));
        }
        for logged in self.skipped.iter().filter(|logged| **logged <= at) {
            let usec = self.stamp(begin, *logged) + 100;
            for number in 0..10 {
                let task_cgroups = vec![format!("/{}", self.cgroup(0))];
                let context = OomContext { task_cgroups, pid: Some(9_999), ..OomContext::default() };
                for (place, line) in [Line::Invoked, Line::Context(context)].into_iter().enumerate() {
                    let usec = usec + 2 * number + place as u64;
                    let position = LogPosition { sequence: Some(usec), usec };
                    entries.push((
                        LogEntry { position, line, text: "a line".into(), report: None },
                        ProcInfo::default(),
                    ));
                }
            }
        }
        if let Some((when, _)) = self.suspend.filter(|(when, _)| *when <= at) {
            let position = LogPosition { sequence: None, usec: self.stamp(begin, when) };
            let entry = LogEntry { position, line: Line::Resumed, text: "a line".into(), report: None };
            entries.push((entry, ProcInfo::default()));
        }
        entries.sort_by_key(|(entry, _)| entry.position.usec);
        entries.retain(|(entry, _)| entry.position.usec > after);
        Some(entries)
    }

    /// Returns the stamps of records until then, after a position, that have nothing to do with OOM: those of the network
    /// devices of a container that starts.
    pub fn other_stamps(&self, begin: Timestamp, after: u64, at: u64) -> Vec<u64> {
        let starts = self.runs.iter().flatten().map(|run| run.start);
        let logged = starts.flat_map(|start| start..start + 3).filter(|logged| *logged <= at);
        logged.map(|logged| self.stamp(begin, logged)).filter(|usec| *usec > after).collect()
    }

    /// Returns the stamp of a record that is logged then.
    pub fn stamp(&self, begin: Timestamp, logged: u64) -> u64 {
        self.stamp_of_begin(begin) + logged * 1_000
    }

    /// Returns when a record with this stamp is logged.
    pub fn logged(&self, begin: Timestamp, usec: u64) -> u64 {
        usec.saturating_sub(self.stamp_of_begin(begin)) / 1_000
    }

    fn stamp_of_begin(&self, begin: Timestamp) -> u64 {
        let tolerated = begin.kernel_usec() as i64 / 10_000;
        begin.kernel_usec().saturating_add_signed(tolerated * self.sources.drift / 100)
    }

    fn lines(&self, begin: Timestamp, kill: &TrueKill, at: u64) -> Vec<(LogEntry, ProcInfo)> {
        let path = match kill.owner {
            Some((container, _)) => format!("/{}", self.cgroup(container)),
            None => "/system.slice/cron.service".to_owned(),
        };
        let entry_at = |logged: u64, number: u64, line: Line| {
            let usec = self.stamp(begin, logged) + number;
            let position = LogPosition { sequence: Some(usec), usec };
            LogEntry { position, line, text: Arc::from("a line"), report: None }
        };
        let entry = |number: u64, line: Line| entry_at(kill.logged, number, line);
        let mut lines = Vec::new();
        if kill.trace.context {
            lines.push((entry(0, Line::Invoked), ProcInfo::default()));
            let context = OomContext {
                global: kill.scope == OomScope::Host,
                task_cgroups: vec![path.clone()],
                oom_cgroup: (kill.scope == OomScope::Container).then(|| path.clone()),
                pid: Some(kill.pid),
                ..OomContext::default()
            };
            lines.push((entry(1, Line::Context(context)), ProcInfo::default()));
        }
        let killed = || {
            Line::Killed(Killed {
                pid: kill.pid,
                process: NAMES[kill.trace.name].into(),
                global: Some(kill.scope == OomScope::Host),
                ..Killed::default()
            })
        };
        let hint = ProcInfo { cgroup: kill.trace.hint.then(|| path.clone()), ..ProcInfo::default() };
        lines.push((entry(2, killed()), hint));
        if kill.group == Group::Chosen {
            lines.push((entry(3, Line::Group { path }), ProcInfo::default()));
        }
        if let Some(repeated) = kill.repeated.filter(|repeated| *repeated <= at) {
            lines.push((entry_at(repeated, 4, killed()), ProcInfo::default()));
        }
        lines
    }

    /// Returns the events of a socket between these times, in order.
    pub fn runtime_events(&self, begin: Timestamp, socket: &str, after: u64, at: u64) -> Vec<RuntimeEvent> {
        let kind = self.sources.kind;
        let mut runtime_events: Vec<(u64, RuntimeEvent)> = Vec::new();
        let is_reported = |container: usize| {
            self.sources.runtime && self.nameless != Some(container) && kind.socket_of(container) == socket
        };
        for (container, runs) in self.runs.iter().enumerate().filter(|(container, _)| is_reported(*container))
        {
            let mut add = |when: u64, what| {
                runtime_events.push((when, self.runtime_event(begin, container, when, what)))
            };
            for (number, run) in runs.iter().enumerate() {
                add(run.start, EventKind::Started);
                if run.reports_pid() {
                    add(run.start + 100, EventKind::Running { pid: Some(run.pid) });
                }
                let is_own =
                    |kill: &&TrueKill| kill.owner == Some((container, number)) && kind.has_requests();
                for kill in self.kills.iter().filter(is_own) {
                    add(kill.at, EventKind::Oom);
                }
                let Some((end, (code, _))) = run.end.zip(run.ending.truth(kind)) else { continue };
                match run.ending {
                    _ if !kind.has_requests() => {}
                    Ending::Stopped => {
                        add(end - STOP_REQUEST, EventKind::SignalRequested { signal: Some(15) })
                    }
                    Ending::DockerKill => {
                        add(end - STOP_REQUEST, EventKind::SignalRequested { signal: Some(9) })
                    }
                    _ => {}
                }
                let oom_flag = match kind {
                    Runtime::Pods { with_reasons: true } => Some(matches!(run.ending, Ending::Oom(_))),
                    Runtime::Pods { with_reasons: false } => None,
                    Runtime::Docker | Runtime::TwoSockets => Some(false),
                };
                add(end, EventKind::Ended { exit_code: Some(code), oom_flag });
                if run.ending == Ending::Stopped && kind.has_requests() {
                    add(end + 1, EventKind::SignalRequested { signal: None });
                }
            }
        }
        runtime_events.sort_by_key(|(when, _)| *when);
        let reported = runtime_events.into_iter().filter(|(when, _)| (after..at).contains(when));
        reported.map(|(_, runtime_event)| runtime_event).collect()
    }

    /// Returns what the runtime lists of the containers of its sockets then: the last run of each, and of one that runs the end of the run
    /// before, of which an engine keeps only the time.
    pub fn past_of_runtime(&self, begin: Timestamp, at: u64) -> Vec<RuntimeEvent> {
        let mut listed = Vec::new();
        let is_reported = |container: &usize| self.sources.runtime && self.nameless != Some(*container);
        for container in (0..self.runs.len()).filter(is_reported) {
            let mut add = |when: u64, what| listed.push(self.runtime_event(begin, container, when, what));
            let runs: Vec<_> = self.runs[container].iter().filter(|run| run.start < at).collect();
            let Some((last, before)) = runs.split_last() else { continue };
            let ended = last.end.filter(|end| *end < at).zip(last.ending.truth(self.sources.kind));
            let before = before.last().and_then(|run| run.end).filter(|_| ended.is_none());
            if let Some(end) = before.filter(|_| self.sources.kind.has_requests()) {
                add(end, EventKind::Ended { exit_code: None, oom_flag: None });
            }
            let pid = Some(last.pid).filter(|_| ended.is_none() && last.reports_pid());
            add(last.start + 100, EventKind::Running { pid });
            if let Some((end, (code, _))) = ended {
                add(end, EventKind::Ended { exit_code: Some(code), oom_flag: Some(false) });
            }
        }
        listed
    }

    /// Returns one event; `Running` has the time of the start.
    pub fn runtime_event(
        &self,
        begin: Timestamp,
        container: usize,
        when: u64,
        what: EventKind,
    ) -> RuntimeEvent {
        let when = if matches!(what, EventKind::Running { .. }) { when - 100 } else { when };
        RuntimeEvent {
            socket: self.sources.kind.socket_of(container).into(),
            runtime: self.sources.kind.runtime(),
            id: Self::id(container),
            at: self.clocks(begin, when).unix_seconds(),
            named: Some(Arc::new(ContainerSpec {
                name: Self::name(container).into(),
                image: "image".into(),
                labels_match: true,
                ..ContainerSpec::default()
            })),
            what,
        }
    }
}
