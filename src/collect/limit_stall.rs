//! Containers at their memory limit whose processes wait for memory, and which the kernel does not kill.
//!
//! While page cache is left, the kernel frees a little of it again and again in place of a kill: also the pages of the programs themselves,
//! which are read from the disk at once. The run goes on at a small part of its speed. Usage alone does not show that: page cache fills
//! each limit that is smaller than what is read.

use std::time::Duration;

use super::container_memory::ContainerMemory;
use crate::clock::Timestamp;

/// A container is full from this distance to its limit on: a part in so many of it.
const FULL_DIVISOR: u64 = 50;
/// Page cache that is read again is no lack of memory where more than this share of the limit is free for it.
const MAX_CACHE_DIVISOR: u64 = 4;
/// Less is read again by any program.
const MIN_REREAD_BYTES: f64 = 16.0 * 1_048_576.0;
/// A container whose tasks wait for a smaller share of the time runs.
const MIN_STALLED: f64 = 0.3;
/// It is at its limit once that has held for so long.
const MIN_TIME: Duration = Duration::from_secs(10);

/// What shows whether the processes of a container wait for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitUse {
    /// All charged memory.
    pub usage: u64,
    /// The limit of its own.
    pub limit: u64,
    /// Memory that the kernel cannot take back.
    pub unreclaimable: Option<u64>,
    /// Page cache without shared memory.
    pub file: Option<u64>,
}

impl LimitUse {
    /// Returns whether it is full.
    pub fn is_full(&self) -> bool {
        self.usage >= self.limit - self.limit / FULL_DIVISOR
    }

    /// Returns whether page cache is read again because nearly all memory is taken: within a second all that is left of it.
    /// `reread`: bytes per second.
    pub fn is_rereading(&self, reread: f64) -> bool {
        let is_small = |unreclaimable: u64| unreclaimable >= self.limit - self.limit / MAX_CACHE_DIVISOR;
        self.is_full()
            && self.unreclaimable.is_some_and(is_small)
            && self.file.is_some_and(|file| reread >= MIN_REREAD_BYTES.max(file as f64))
    }

    /// Returns whether its tasks wait. `stalled`: the share of the time in which all of them waited for memory.
    pub fn is_stalled(&self, stalled: f64) -> bool {
        self.is_full() && stalled >= MIN_STALLED
    }
}

/// Watches one container.
#[derive(Debug, Default)]
pub(super) struct LimitStall {
    refaults: Option<(Timestamp, u64)>,
    pressure: Option<(Timestamp, u64)>,
    /// By the newest two readings of the pressure, which is not read in each cycle.
    is_stalled: bool,
    since: Option<Timestamp>,
}

impl LimitStall {
    /// Returns whether the container is at its limit and waits; `None` without a limit, or where nothing shows that.
    pub(super) fn update(&mut self, now: Timestamp, memory: &ContainerMemory) -> Option<bool> {
        let limit = memory.limit?;
        let used =
            LimitUse { usage: memory.usage, limit, unreclaimable: memory.unreclaimable, file: memory.file };
        let refaults = memory.refaults[1];
        let page_size = rustix::param::page_size() as f64;
        let reread = rate(&mut self.refaults, now, refaults).map(|pages| pages * page_size);
        let stalled_usec = memory.pressure.map(|[_, full]| full);
        // it is read in every fifth cycle: between two readings it stands still
        if stalled_usec != self.pressure.map(|(_, usec)| usec) {
            let stalled = rate(&mut self.pressure, now, stalled_usec).map(|usec| usec / 1e6);
            self.is_stalled = stalled.is_some_and(|stalled| used.is_stalled(stalled));
        }
        refaults.or(stalled_usec)?;
        let waits =
            reread.is_some_and(|reread| used.is_rereading(reread)) || self.is_stalled && used.is_full();
        self.since = self.since.or(Some(now)).filter(|_| waits);
        Some(self.since.is_some_and(|since| now.since(since) >= MIN_TIME))
    }
}

/// Returns how fast a counter grew since its last reading, per second.
fn rate(last: &mut Option<(Timestamp, u64)>, now: Timestamp, value: Option<u64>) -> Option<f64> {
    let before = std::mem::replace(last, value.map(|value| (now, value)))?;
    let seconds = now.since(before.0).as_secs_f64();
    (seconds > 0.0).then(|| value.map(|value| value.saturating_sub(before.1) as f64 / seconds)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns the seconds at which it is at its limit, of readings once a second.
    fn seconds(memory: impl Fn(u64) -> ContainerMemory) -> Vec<u64> {
        let mut stall = LimitStall::default();
        let began = Timestamp::hours_after_boot(1);
        let at = |second| began.plus(Duration::from_secs(second));
        (0..40).filter(|second| stall.update(at(*second), &memory(*second)) == Some(true)).collect()
    }

    fn memory(usage: u64, anon: u64, file: u64) -> ContainerMemory {
        ContainerMemory {
            usage: usage * MIB,
            limit: Some(300 * MIB),
            unreclaimable: Some(anon * MIB),
            file: Some(file * MIB),
            ..ContainerMemory::default()
        }
    }

    #[test]
    fn run_that_reads_its_last_page_cache_again_is_at_its_limit_after_ten_seconds() {
        // 270 of 300 MiB are anonymous, and 160 MiB are read in circles: measured, 270,000 pages a second
        let thrashes = |second: u64| ContainerMemory {
            refaults: [Some(0), Some(270_000 * second.min(30))],
            ..memory(299, 272, 25)
        };
        assert_eq!(seconds(thrashes), (11..=30).collect::<Vec<_>>());
        // a data set that is larger than the page cache is read again, too, and nothing lacks
        let reads = |second: u64| ContainerMemory {
            refaults: [Some(0), Some(270_000 * second)],
            ..memory(300, 80, 215)
        };
        assert!(seconds(reads).is_empty());
        // little is read
        let idles =
            |second: u64| ContainerMemory { refaults: [Some(0), Some(500 * second)], ..memory(299, 272, 25) };
        assert!(seconds(idles).is_empty());
        // not full
        let below = |second: u64| ContainerMemory {
            refaults: [Some(0), Some(270_000 * second)],
            ..memory(290, 272, 16)
        };
        assert!(seconds(below).is_empty());
    }

    #[test]
    fn run_whose_tasks_all_wait_for_memory_is_at_its_limit() {
        let pressure = |second: u64, usec: u64| Some([0, second / 5 * 5 * usec]);
        let waits =
            |second: u64| ContainerMemory { pressure: pressure(second, 600_000), ..memory(299, 100, 190) };
        assert_eq!(seconds(waits).first(), Some(&15));
        let waits_little =
            |second: u64| ContainerMemory { pressure: pressure(second, 200_000), ..memory(299, 100, 190) };
        assert!(seconds(waits_little).is_empty());
    }

    #[test]
    fn nothing_is_said_without_a_limit_or_a_counter() {
        let update =
            |memory: ContainerMemory| LimitStall::default().update(Timestamp::hours_after_boot(1), &memory);
        assert_eq!(update(memory(299, 272, 25)), None);
        let refaults = [Some(0), Some(0)];
        assert_eq!(update(ContainerMemory { refaults, limit: None, ..memory(299, 272, 25) }), None);
        assert_eq!(update(ContainerMemory { refaults, ..memory(299, 272, 25) }), Some(false));
    }
}
