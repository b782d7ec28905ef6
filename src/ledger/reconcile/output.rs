//! What a step changes in the store, and the figures that are published. Pure.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use super::{ANY_SOCKET, AccountingCheckpoint, Reconciler};
use crate::clock::{MIN_CLOCK_STEP, Timestamp};
use crate::events::{Identity, LedgerEvent};
use crate::ledger::exchange::{ContainerFigures, LedgerFigures};
use crate::ledger::store::StateKind;
use crate::ledger::totals::Total;
use crate::lifecycle::timing::{MAX_EVENT_DELAY, MAX_LIVE_EVENT_DELAY};

/// Interval between removals of ended containers.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between writes of how far the sources were read if there are no events.
const CHECKPOINT_INTERVAL: f64 = 600.0;
/// Maximum number of ended containers whose figures are shown, newest first.
const MAX_ENDED_SHOWN: usize = 500;

impl Reconciler {
    pub(super) fn write(&mut self, now: Timestamp) {
        for pending in &mut self.pending {
            let persisted = pending.persisted();
            if pending.stored.as_ref() != Some(&persisted) {
                self.changes.put(StateKind::PendingKill, pending.kill.id, &persisted);
                pending.stored = Some(persisted);
            }
        }
        let containers = &self.containers;
        self.totals
            .write(&mut self.changes, |name| containers.iter().any(|(_, state)| state.identity == *name));
        if let Some(last) = self.containers.take_last_run() {
            self.changes.put(StateKind::LastRun, "", &last);
        }
        for id in self.containers.take_changed() {
            let state = self
                .containers
                .get(&id)
                .filter(|state| state.runs.current().is_some() || state.first_event_at > 0.0);
            match state {
                Some(state) => self.changes.put(StateKind::Container, id, state),
                None => self.changes.remove(StateKind::Container, id),
            }
        }
        for (inode, attributed) in self.counters.take_changed() {
            match attributed {
                Some(attributed) => self.changes.put(StateKind::CgroupKills, inode, &attributed),
                None => self.changes.remove(StateKind::CgroupKills, inode),
            }
        }
        if self.last_forget.is_none_or(|last_forget| now.since(last_forget) >= FORGET_INTERVAL) {
            self.last_forget = Some(now);
            let before = now.unix_seconds() - self.config.keep_ended.as_secs_f64().max(3600.0);
            let kills = self.pending.iter().filter_map(|pending| pending.container.as_ref());
            let needed: HashSet<_> = kills.chain(self.pending_exits.iter().map(|exit| &exit.id)).collect();
            for id in self.containers.remove_ended(before, |id| needed.contains(id)) {
                self.changes.remove(StateKind::Container, id);
            }
        }
        self.write_checkpoints(now);
    }

    /// Writes the running containers with the next step.
    pub fn mark_running_changed(&mut self) {
        self.containers.mark_running_changed();
    }

    /// Writes the whole state with the next step: the store lost it.
    pub fn mark_all_changed(&mut self) {
        self.containers.mark_all_changed();
        self.totals.mark_all_changed();
        self.counters.mark_all_changed();
        self.stored_checkpoint = None;
        self.pending.iter_mut().for_each(|pending| pending.stored = None);
        let kills = self.pending.iter().map(|pending| LedgerEvent::OomKill(self.shown(pending)));
        let exits = self.pending_exits.iter().map(|pending| LedgerEvent::Exit(pending.exit.clone()));
        let ooms = self.cuda_ooms.pending.iter().map(|pending| LedgerEvent::CudaOom(pending.event.clone()));
        kills
            .chain(exits)
            .chain(ooms)
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|event| self.changes.put_event(event));
    }

    /// Returns the highest id of an event.
    pub fn last_id(&self) -> u64 {
        self.next_id - 1
    }

    /// Stores how far the sources were read: together with events, else only occasionally, because reading old lines
    /// without kills again changes nothing.
    fn write_checkpoints(&mut self, now: Timestamp) {
        let mut account = self.accounting.checkpoint().clone();
        account.cgroups_explained_at = self.counters.explained_at();
        let counts = |account: &AccountingCheckpoint| {
            let written = account.balanced_at.map(|at| (at / CHECKPOINT_INTERVAL) as u64);
            (account.records, account.duplicates, account.gaps, account.opened_at, written)
        };
        let moved = self
            .stored_checkpoint
            .as_ref()
            .is_none_or(|stored| counts(stored) != counts(&account) || stored.boot_id != account.boot_id);
        if moved || !self.changes.is_empty() {
            self.changes.put(StateKind::Accounting, "", &account);
            self.stored_checkpoint = Some(account);
            for (socket, since) in &mut self.last_event_times {
                // older events have arrived; a runtime would repeat those of containers that are forgotten by now, also once it was away
                if self.live_sockets.values().flatten().any(|live| live == socket) {
                    *since = since.max(now.unix_seconds() - MAX_LIVE_EVENT_DELAY);
                }
                self.changes.put(StateKind::RuntimeCursor, socket, since);
            }
            self.changes.put(StateKind::RuntimeCursor, ANY_SOCKET, &(now.unix_seconds() - MAX_EVENT_DELAY));
        }
    }

    /// Returns the current figures. The caller adds the state of the sources and of the store.
    pub fn figures(&self, now: Timestamp) -> LedgerFigures {
        let shown_since = now.unix_seconds() - self.config.keep_ended.as_secs_f64();
        let mut shown: Vec<(f64, &Identity)> = Vec::new();
        let mut of_former_names: HashMap<&Identity, (u64, Option<f64>)> = HashMap::new();
        for (_, state) in self.containers.iter().filter(|(_, state)| !state.hidden) {
            // what was counted under a former name is shown as that of a container that ended then
            let former = state.former.iter().filter(|former| former.until > shown_since);
            let former = former.filter(|former| former.identity.is_included(&self.config.filter));
            shown.extend(former.map(|former| (former.until, &former.identity)));
            if state.former_kills() > 0 && state.is_running() {
                let (kills, last) = of_former_names.entry(&state.identity).or_default();
                *kills += state.former_kills();
                *last = last.iter().copied().chain(state.last_kill).reduce(f64::max);
            }
            let until = match state.runs.current() {
                Some(run) => run.ended().unwrap_or(f64::INFINITY),
                // one of its processes was killed before it was seen running
                None => self.totals.figures(&state.identity).last_kill.unwrap_or(0.0),
            };
            if until > shown_since {
                shown.push((until, &state.identity));
            }
        }
        shown.sort_by(|one, other| other.0.total_cmp(&one.0));
        let running = shown.iter().take_while(|(until, _)| until.is_infinite()).count();
        shown.truncate(running + MAX_ENDED_SHOWN);
        let latest = now.unix_seconds() + MIN_CLOCK_STEP;
        let figures = |name: &Identity| {
            let figures = self.totals.figures(name);
            // of a clock that was wrong; an alert on it would last until then
            let past = |at: Option<f64>| at.filter(|at| *at <= latest);
            let (last_kill, last_cuda_oom) = (past(figures.last_kill), past(figures.last_cuda_oom));
            let (former_kills, former_last_kill) = of_former_names.get(name).copied().unwrap_or_default();
            ContainerFigures {
                last_kill,
                last_cuda_oom,
                former_kills,
                former_last_kill: past(former_last_kill),
                ..figures
            }
        };
        let containers: BTreeMap<&Identity, ContainerFigures> =
            shown.into_iter().map(|(_, name)| (name, figures(name))).collect();
        LedgerFigures {
            host_kills: self.totals.get(Total::Host),
            host_process_kills: self.totals.get(Total::HostProcess),
            host_process_kills_at_limit: self.totals.get(Total::HostProcessAtLimit),
            unattributed: self.totals.get(Total::Unattributed),
            gaps: self.totals.get(Total::WithoutRecord),
            duplicate_lines: self.totals.get(Total::Duplicates),
            reads_logs: self.reads_logs,
            containers: containers.into_values().collect(),
            ..LedgerFigures::default()
        }
    }
}
