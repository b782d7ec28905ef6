//! Gaps: kills that a counter shows and the log does not. A record that arrives late fills its gap instead of counting
//! again. Pure.

use std::sync::Arc;

use super::Reconciler;
use super::owner::{Hints, PendingKill};
use crate::clock::Timestamp;
use crate::discover::PathOwner;
use crate::events::{Evidence, Kill, KillOwner, LedgerEvent, Method, Victim};
use crate::ledger::interval::Interval;
use crate::ledger::totals::Total;
use crate::lifecycle::timing::LATE_RECORD_TIMEOUT;

/// Maximum number of settled gaps that a late record can fill; beyond that the oldest are dropped. Also the maximum number of pending
/// kills to which gaps are added: further ones are counted as unattributed at once, without events of their own.
const MAX_GAPS: usize = 4_096;

/// Where a gap is kept.
#[derive(Clone, Copy, Debug)]
enum GapPlace {
    Settled(usize),
    Pending(usize),
}

impl Reconciler {
    /// Applies the kernel's counter, read after the log was read to its end.
    pub fn apply_vmstat(&mut self, now: Timestamp, counter: u64) {
        let difference = self.accounting.compare(now, counter, self.log_up);
        let (after, before) = self.accounting.lost_between();
        let happened = Interval::new(after.unwrap_or(self.config.booted_at), before);
        let with_event = difference.lost.min(MAX_GAPS.saturating_sub(self.pending.len()) as u64);
        for _ in 0..with_event {
            let text = "the kernel counted a kill whose log record is missing";
            self.add_gap(now, happened, Evidence::new("vmstat", text));
        }
        self.count_without_event(difference.lost - with_event);
        let (mut late, mut at) = (difference.late, 0);
        // the late records are the oldest of this step; first those that fit a gap
        for any in [false, true] {
            while late > 0 && at < self.pending.len() {
                let record = &self.pending[at];
                if record.is_new_record() && (any || self.gap_of(record).is_some()) {
                    self.fill_gap(at);
                    late -= 1;
                } else {
                    at += 1;
                }
            }
            at = 0;
        }
    }

    /// Counts kills without a record, of which there are too many for an event each: the newest pending kill notes them.
    fn count_without_event(&mut self, kills: u64) {
        if kills == 0 {
            return;
        }
        for total in [Total::Host, Total::WithoutRecord, Total::Unattributed] {
            self.totals.add(total, kills as i64);
        }
        if let Some(newest) = self.pending.back_mut() {
            let text = format!("{kills} more kills without a record until then have no event of their own");
            newest.kill.evidence.push(Evidence::new("vmstat", text));
        }
    }

    fn add_gap(&mut self, now: Timestamp, happened: Interval, evidence: Evidence) {
        let kill = Kill {
            id: self.new_id(),
            at: happened.latest,
            earliest: Some(happened.earliest),
            boot_id: Arc::clone(&self.config.boot_id),
            evidence: vec![evidence],
            ..Kill::unknown()
        };
        self.totals.add(Total::Host, 1);
        self.pending.push_back(PendingKill::new(kill, happened, Hints::default(), now));
    }

    /// Returns the gap whose record this can be: one of the same container first, then one that is likely by the record's stamp, then the
    /// oldest.
    fn gap_of(&self, record: &PendingKill) -> Option<GapPlace> {
        let owner = self.find_owner(record).map(|(owner, _)| owner);
        let is_host = matches!(owner, Some(PathOwner::Host | PathOwner::Unproven));
        let owner = match owner {
            Some(PathOwner::Container(id)) => Some(id),
            _ => None,
        };
        let settled = self.settled_gaps.iter().map(|(_, gap)| gap).enumerate();
        let settled = settled.map(|(at, gap)| (GapPlace::Settled(at), gap));
        let pending = self.pending.iter().enumerate().map(|(at, gap)| (GapPlace::Pending(at), gap));
        let fits = |gap: &PendingKill| {
            gap.kill.kernel_usec.is_none()
                && gap.happened.overlaps(&record.happened)
                && (gap.container.is_none() || owner.is_none() && !is_host || gap.container == owner)
        };
        let is_likely =
            |gap: &PendingKill| gap.happened.overlaps(&Interval::new(record.kill.at, record.kill.at));
        let gaps = settled.chain(pending).filter(|(_, gap)| fits(gap));
        let best = gaps.min_by_key(|(_, gap)| (owner.is_none() || gap.container != owner, !is_likely(gap)));
        best.map(|(place, _)| place)
    }

    /// Moves a record that was added as a new kill into its gap. If none fits, the oldest gap gets it: the kernel's
    /// counter shows that it is counted already.
    fn fill_gap(&mut self, at: usize) {
        let place = self.gap_of(&self.pending[at]);
        let Some(record) = self.pending.remove(at) else { return };
        self.totals.add(Total::Host, -1);
        let after_removal = |gap: usize| if gap > at { gap - 1 } else { gap };
        let oldest = || self.pending.iter().position(|gap| gap.kill.kernel_usec.is_none());
        let pending = match place {
            Some(GapPlace::Settled(_)) => None,
            Some(GapPlace::Pending(gap)) => Some(after_removal(gap)),
            None => oldest(),
        };
        if let Some(gap) = pending {
            let pending = &mut self.pending[gap];
            pending.kill.filled_by(record.kill);
            (pending.hints, pending.happened, pending.group) = (record.hints, record.happened, record.group);
            self.changes.put_event(LedgerEvent::OomKill(pending.kill.clone()));
            return;
        }
        let settled = if let Some(GapPlace::Settled(settled)) = place { settled } else { 0 };
        if let Some((_, mut gap)) = self.settled_gaps.remove(settled) {
            let owner = self.owner_of_late(&gap, &record);
            gap.kill.filled_by(record.kill);
            if let Some((owner, method)) = owner {
                (gap.kill.owner, gap.kill.victim, gap.kill.method) =
                    (owner, Some(Victim::Unknown), Some(method));
            }
            self.changes.put_event(LedgerEvent::OomKill(gap.kill));
        }
    }

    /// Returns the owner that a late record shows of a gap which was settled without one. The counts stay: none may decrease.
    fn owner_of_late(&self, gap: &PendingKill, record: &PendingKill) -> Option<(KillOwner, Method)> {
        let (PathOwner::Container(id), method) = self.find_owner(record)? else { return None };
        let state = self.containers.get(&id).filter(|_| gap.kill.owner == KillOwner::Unattributed)?;
        let pid = record.kill.pid.filter(|_| self.config.host_pids);
        let run = state.run_of_kill(&record.happened, record.kill.at, pid, |_| false).map(|(run, _)| run);
        Some((KillOwner::Container(state.subject(&id, run)), method))
    }

    /// Drops the settled gaps that no record will fill any more.
    pub(super) fn forget_settled_gaps(&mut self, now: Timestamp) {
        self.settled_gaps.retain(|(at, _)| now.since(*at) < LATE_RECORD_TIMEOUT);
        self.settled_gaps.drain(..self.settled_gaps.len().saturating_sub(MAX_GAPS));
    }
}

impl Kill {
    /// Fills a gap with the data of its record.
    fn filled_by(&mut self, record: Kill) {
        let mut evidence = record.evidence;
        evidence.append(&mut self.evidence);
        let (id, owner, victim) = (self.id, self.owner.clone(), self.victim);
        let (role, method, before) = (self.role, self.method, self.before.take());
        let scope = if victim.is_some() { self.scope } else { record.scope };
        *self = Self { id, owner, victim, scope, role, method, before, evidence, ..record };
    }
}
