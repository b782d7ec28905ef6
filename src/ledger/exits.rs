//! Why a container ended. Pure.
//!
//! Exit code 137 is no proof of an OOM, and the runtime's OOMKilled flag is wrong in both directions; only a kill of the
//! ledger makes an end an OOM. So an end by SIGKILL waits for a moment for the kernel's record.

use std::sync::Arc;
use std::time::Duration;

use super::attribution::BY_SIGKILL;
use super::entries::{Event, Evidence, Exit, Reason, Scope, Victim, Whose};
use super::machine::{Machine, Said};
use super::runs::{End, Run};
use crate::clock::Moment;
use crate::discover::ContainerId;

/// The kernel's record of a kill comes before the runtime's word; without the log the counters need a moment.
const EVIDENCE_MAY_TAKE: Duration = Duration::from_secs(3);
/// Signals that ask a process to end.
const ASKING: [i32; 4] = [2, 3, 9, 15];

/// An end of which the reason is not known yet.
#[derive(Clone, Debug)]
pub struct OpenExit {
    /// What is known.
    pub exit: Exit,
    /// Its container.
    pub id: ContainerId,
    noticed: Moment,
    stored: bool,
}

impl OpenExit {
    /// A new one.
    pub fn new(number: u64, end: End, now: Moment) -> Self {
        let End { id, subject, run, before, peak_usage_bytes, peak_unreclaimable_bytes } = end;
        let at = run.ended.unwrap_or_else(|| now.unix_seconds());
        let exit = Exit {
            id: number,
            at,
            reason: None,
            exit_code: run.exit_code,
            runtime_oom_flag: run.oom_flag,
            asked_signals: run.asked_before(at).collect(),
            kernel_log_read: false,
            duration_seconds: subject.started.map(|started| (at - started).max(0.0)),
            oom_kills: run.kills,
            peak_usage_bytes,
            peak_unreclaimable_bytes,
            evidence: evidence(&run, at),
            before: before.map(Arc::new),
            subject,
        };
        Self { exit, id, noticed: now, stored: false }
    }

    /// One that was stored before a restart.
    pub fn stored(exit: Exit, now: Moment) -> Self {
        Self { id: ContainerId::new(&exit.subject.container_id), exit, noticed: now, stored: true }
    }
}

fn evidence(run: &Run, at: f64) -> Vec<Evidence> {
    let mut lines = Vec::new();
    let mut say = |text: String| lines.push(Evidence::new("runtime", text));
    for asked in run.asked_before(at) {
        match asked {
            Some(signal) => say(format!("somebody asked for signal {signal} (docker stop or kill)")),
            None => say("somebody asked for its end".to_owned()),
        }
    }
    if run.oom_told {
        say("an oom event, which also comes without a kill".to_owned());
    }
    match run.exit_code {
        Some(code) => say(format!("exit code {code}")),
        None => say("nobody told its exit code".to_owned()),
    }
    if let Some(flag) = run.oom_flag {
        say(format!("OOMKilled {flag}, which is often wrong"));
    }
    lines
}

impl Machine {
    /// Decides the reasons that can be decided.
    pub(super) fn decide_exits(&mut self, now: Moment) {
        for mut open in std::mem::take(&mut self.exits) {
            self.learn(&mut open.exit, &open.id);
            let Some(reason) = self.reason(&open, now) else {
                if !open.stored {
                    open.stored = true;
                    self.changes.events.insert(open.exit.id, Event::Exit(open.exit.clone()));
                }
                self.exits.push(open);
                continue;
            };
            open.exit.reason = Some(reason);
            open.exit.kernel_log_read = self.log_up;
            let exit = open.exit;
            self.totals.ended(&exit.subject.name, reason, exit.exit_code, exit.at);
            self.changes.events.insert(exit.id, Event::Exit(exit.clone()));
            self.said.push(Said::Settled(Event::Exit(exit)));
        }
    }

    /// What became known of the run since it ended.
    fn learn(&self, exit: &mut Exit, id: &ContainerId) {
        let Some(run) = self.runs.get(id).and_then(|known| known.run_ended_at(exit.at)) else { return };
        exit.oom_kills = exit.oom_kills.max(run.kills);
        if exit.exit_code.is_none() && run.exit_code.is_some() {
            exit.exit_code = run.exit_code;
            exit.asked_signals = run.asked_before(exit.at).collect();
            exit.evidence = evidence(run, exit.at);
        }
    }

    fn reason(&mut self, open: &OpenExit, now: Moment) -> Option<Reason> {
        let exit = &open.exit;
        if let Some(scope) = self.killed_main(open) {
            return Some(match scope {
                Scope::Container => Reason::OomContainer,
                Scope::Host => Reason::OomHost,
            });
        }
        let by_request = !exit.asked_signals.is_empty()
            && exit.asked_signal().is_none_or(|signal| {
                ASKING.contains(&signal) || exit.exit_code == Some(128 + i64::from(signal))
            });
        let code = match exit.exit_code {
            Some(code) if code != BY_SIGKILL && by_request => return Some(Reason::Stopped),
            Some(0) => return Some(Reason::Completed),
            Some(code @ 129..=192) if code != BY_SIGKILL => return Some(Reason::Signal),
            Some(code) if code != BY_SIGKILL => return Some(Reason::Error),
            code => code,
        };
        // SIGKILL, or nobody tells: a kill may have done it whose owner is not known yet
        let undecided = self.open.iter().any(|kill| {
            let may_be_its = kill.container.is_none() || kill.container.as_ref() == Some(&open.id);
            may_be_its && kill.kill.whose != Whose::Host && (-1.0..10.0).contains(&(exit.at - kill.kill.at))
        });
        let waits = now.since(open.noticed) < EVIDENCE_MAY_TAKE && !by_request;
        if undecided || waits || self.kernel.waits() {
            return None;
        }
        Some(match code {
            _ if by_request => Reason::Stopped,
            Some(_) => Reason::Killed,
            None => Reason::Unknown,
        })
    }

    /// The scope of the kill that ended this run, if one did.
    fn killed_main(&self, open: &OpenExit) -> Option<Scope> {
        let known = self.runs.get(&open.id)?;
        known.run_ended_at(open.exit.at)?.ended_by
    }
}

impl Run {
    /// Notes a kill, which may have ended this run.
    pub fn note(&mut self, victim: Victim, scope: Scope) {
        self.kills += 1;
        if victim == Victim::Main {
            self.ended_by = Some(scope);
        }
    }
}
