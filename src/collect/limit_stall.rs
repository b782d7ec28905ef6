//! Containers at their memory limit whose processes wait for memory, and which the kernel does not kill.
//!
//! While page cache is left, the kernel frees a little of it again and again in place of a kill: also the pages of the programs themselves,
//! which are read from the disk at once. The run goes on at a small part of its speed. Usage alone does not show that: page cache fills
//! each limit that is smaller than what is read.
//!
//! The kernel measures it (`memory.pressure`, cgroup v2): what tasks wait for, and not what a program reads that streams its data. Where
//! it does not, on v1, it shows in what is read again while nearly all memory is taken.

use std::time::Duration;

use super::container_memory::ContainerMemory;
use crate::clock::Timestamp;

/// A container is full from this distance to its limit on: a part in so many of it, and no more than so many bytes.
const FULL_DIVISOR: u64 = 50;
const MAX_DISTANCE: u64 = 256 << 20;
/// What is read again is page cache that a program has no more need of where more than this part of the limit is left for it.
const MAX_CACHE_DIVISOR: u64 = 10;
/// Less is read again by any program.
const MIN_REREAD_BYTES: f64 = 16.0 * 1_048_576.0;
/// A container whose tasks wait for a smaller share of the time runs.
const MIN_STALLED: f64 = 0.3;
/// Counters of memory.stat are late by up to two seconds.
const MIN_WINDOW: Duration = Duration::from_secs(2);
/// It is at its limit once that has held for so long.
const MIN_TIME: Duration = Duration::from_secs(10);

/// What a container uses of its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitUse {
    /// All charged memory.
    pub usage: u64,
    /// The lower of the limit of its own and of `memory.high`.
    pub limit: u64,
    /// Anonymous and shared memory.
    pub taken: Option<u64>,
    /// Page cache without shared memory.
    pub file: Option<u64>,
}

impl LimitUse {
    /// Returns the use of a container with a limit; `None` without one.
    pub fn of(memory: &ContainerMemory) -> Option<Self> {
        let limit = memory.limit.into_iter().chain(memory.high).min()?;
        let taken = memory.anon.zip(memory.shmem).map(|(anon, shmem)| anon.saturating_add(shmem));
        Some(Self { usage: memory.usage, limit, taken, file: memory.file })
    }

    /// Returns whether it is full.
    pub fn is_full(&self) -> bool {
        self.usage >= self.limit - (self.limit / FULL_DIVISOR).min(MAX_DISTANCE)
    }

    /// Returns whether it is full, and nearly all of it is taken.
    pub fn is_taken(&self) -> bool {
        let is_most = |taken: u64| taken >= self.limit - self.limit / MAX_CACHE_DIVISOR;
        self.is_full() && self.taken.is_some_and(is_most)
    }

    /// Returns whether what was evicted is read again at once: within a second as much as all page cache that is left. `reread`: bytes per
    /// second.
    pub fn is_rereading(&self, reread: f64) -> bool {
        self.is_taken() && self.file.is_some_and(|file| reread >= MIN_REREAD_BYTES.max(file as f64))
    }

    /// Returns whether its tasks wait. `stalled`: the share of the time in which all of them waited for memory.
    pub fn is_stalled(&self, stalled: f64) -> bool {
        self.is_full() && stalled >= MIN_STALLED
    }
}

/// Watches one container.
#[derive(Debug, Default)]
pub(super) struct LimitStall {
    /// The begin of the window, and the counter then.
    window: Option<(Timestamp, u64)>,
    /// Its reading with the most usage: what the kernel frees leaves a small limit for a moment.
    fullest: LimitUse,
    /// By the last window.
    waits: bool,
    /// The begin of the first window in which it waited, since when it has.
    since: Option<Timestamp>,
}

impl LimitStall {
    /// Returns whether the container is at its limit and waits; `None` without a limit, or where nothing shows that. `is_pressure_new`:
    /// the pressure was read in this cycle.
    pub(super) fn update(
        &mut self,
        now: Timestamp,
        memory: &ContainerMemory,
        is_pressure_new: bool,
    ) -> Option<bool> {
        let used = LimitUse::of(memory)?;
        let refaults = memory.refaults.into_iter().flatten().reduce(u64::saturating_add);
        let (counter, is_new) = match memory.pressure {
            Some([_, full]) => (full, is_pressure_new),
            None => (refaults?, true),
        };
        let (began, before) = *self.window.get_or_insert((now, counter));
        let elapsed = now.since(began);
        if used.usage >= self.fullest.usage {
            self.fullest = used;
        }
        if is_new && elapsed >= MIN_WINDOW {
            let rate = counter.saturating_sub(before) as f64 / elapsed.as_secs_f64();
            self.waits = match memory.pressure {
                Some(_) => self.fullest.is_stalled(rate / 1e6),
                None => self.fullest.is_rereading(rate * rustix::param::page_size() as f64),
            };
            self.since = self.since.or(Some(began)).filter(|_| self.waits);
            (self.window, self.fullest) = (Some((now, counter)), LimitUse::default());
        }
        Some(self.since.is_some_and(|since| now.since(since) >= MIN_TIME))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns the seconds at which it is at its limit, of readings at these seconds. The pressure is new in each fifth second.
    fn seconds(at: impl Iterator<Item = u64>, memory: impl Fn(u64) -> ContainerMemory) -> Vec<u64> {
        let mut stall = LimitStall::default();
        let began = Timestamp::hours_after_boot(1);
        let is_at_limit = |second: &u64| {
            let now = began.plus(Duration::from_secs(*second));
            stall.update(now, &memory(*second), second.is_multiple_of(5)) == Some(true)
        };
        at.filter(is_at_limit).collect()
    }

    fn memory(usage: u64, anon: u64, file: u64) -> ContainerMemory {
        ContainerMemory {
            usage: usage * MIB,
            limit: Some(300 * MIB),
            anon: Some(anon * MIB),
            shmem: Some(0),
            file: Some(file * MIB),
            ..ContainerMemory::default()
        }
    }

    #[test]
    fn run_that_reads_its_last_page_cache_again_is_at_its_limit_after_ten_seconds() {
        let refaults = |pages: u64| [Some(0), Some(pages)];
        // 272 of 300 MiB are anonymous, and 160 MiB are read in circles: measured, 270,000 pages a second
        let thrashes = |second: u64| ContainerMemory {
            refaults: refaults(270_000 * second.min(30)),
            ..memory(299, 272, 25)
        };
        assert_eq!(seconds(0..40, thrashes), (10..32).collect::<Vec<_>>());
        // also in one window of five minutes
        let rarely =
            |second: u64| ContainerMemory { refaults: refaults(270_000 * second), ..memory(299, 272, 25) };
        assert_eq!(seconds((0..1_000).step_by(300), rarely), [300, 600, 900]);
        // a counter that is late stands still for a second
        let late = |second: u64| ContainerMemory {
            refaults: refaults(540_000 * (second / 2)),
            ..memory(299, 272, 25)
        };
        assert_eq!(seconds(0..40, late), (10..40).collect::<Vec<_>>());
        // what was just freed leaves the limit for a moment, and what was freed for good ends it with its window
        let sways = |second: u64| ContainerMemory {
            refaults: refaults(270_000 * second),
            ..memory(if second % 2 == 1 && second < 30 { 299 } else { 290 }, 272, 16)
        };
        assert_eq!(seconds(0..40, sways), (10..32).collect::<Vec<_>>());
        // swap that is read again is in the anonymous counter
        let swaps = |second: u64| ContainerMemory {
            refaults: [Some(9_000 * second), Some(0)],
            ..memory(299, 290, 5)
        };
        assert_eq!(seconds(0..40, swaps).first(), Some(&10));
        // a data set that is larger than the page cache is read again, too, and nothing lacks
        for (usage, anon, file) in [(300, 80, 215), (300, 262, 33)] {
            let reads = |second: u64| ContainerMemory {
                refaults: refaults(270_000 * second),
                ..memory(usage, anon, file)
            };
            assert!(seconds(0..40, reads).is_empty(), "{anon}");
        }
        // little is read
        let idles =
            |second: u64| ContainerMemory { refaults: refaults(500 * second), ..memory(299, 272, 25) };
        assert!(seconds(0..40, idles).is_empty());
        // not full
        let below =
            |second: u64| ContainerMemory { refaults: refaults(270_000 * second), ..memory(290, 272, 16) };
        assert!(seconds(0..40, below).is_empty());
    }

    #[test]
    fn where_the_kernel_measures_what_tasks_wait_for_that_alone_decides() {
        let waits = |usec: u64, until: u64| {
            move |second: u64| ContainerMemory {
                pressure: Some([0, (second / 5 * 5).min(until) * usec]),
                refaults: [Some(0), Some(270_000 * second)],
                ..memory(299, 100, 190)
            }
        };
        assert_eq!(seconds(0..40, waits(600_000, 100)), (10..40).collect::<Vec<_>>());
        assert!(seconds(0..40, waits(200_000, 100)).is_empty());
        // it has stopped: the counter stands still, and was read
        assert_eq!(seconds(0..60, waits(600_000, 20)), (10..25).collect::<Vec<_>>());
        // a quiet hour before does not hide it
        let late = |second: u64| ContainerMemory {
            pressure: Some([0, (second / 5 * 5).saturating_sub(3_600) * 600_000]),
            ..memory(299, 100, 190)
        };
        assert_eq!(seconds(0..3_640, late).first(), Some(&3_610));
        // 270 of 300 MiB are the bound of memory.high
        let throttled = |second: u64| ContainerMemory {
            high: Some(270 * MIB),
            usage: 269 * MIB,
            ..waits(600_000, 100)(second)
        };
        assert_eq!(seconds(0..40, throttled).first(), Some(&10));
    }

    #[test]
    fn distance_to_a_large_limit_is_bounded() {
        let used = |usage: u64| LimitUse { usage, limit: 1 << 40, ..LimitUse::default() };
        assert!(used((1 << 40) - (255 << 20)).is_full() && !used((1 << 40) - (257 << 20)).is_full());
    }

    #[test]
    fn nothing_is_said_without_a_limit_or_a_counter() {
        let update = |memory: ContainerMemory| {
            LimitStall::default().update(Timestamp::hours_after_boot(1), &memory, true)
        };
        assert_eq!(update(memory(299, 272, 25)), None);
        let refaults = [Some(0), Some(0)];
        assert_eq!(update(ContainerMemory { refaults, limit: None, ..memory(299, 272, 25) }), None);
        assert_eq!(update(ContainerMemory { refaults, ..memory(299, 272, 25) }), Some(false));
    }
}
