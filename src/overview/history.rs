//! What takes more than one snapshot: rates, the last hour, and growth.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::float;
use crate::clock::Timestamp;
use crate::discover::{Container, ContainerId};
use crate::snapshot::Snapshot;

/// Length of the history, in seconds.
pub const SPAN: f64 = 3600.0;
/// Seconds of a point, and with more than [`MANY`] containers.
const STEP: f64 = 5.0;
const COARSE_STEP: f64 = 10.0;
const MANY: usize = 100;
/// Containers with a history; those that ended first lose theirs first.
const MAX_TRACKS: usize = 256;

/// Time over which growth is measured, in so many parts, and the shortest run for which it is given.
const GROWTH_WINDOW: f64 = 1800.0;
const PARTS: usize = 6;
/// A container that had processes has most likely ended if it has had none for so many seconds: a runtime that works reports an end sooner.
pub const EMPTY_AFTER: f64 = 10.0;

/// Least growth from the first part to the last: in bytes, and as a share of the limit.
const MIN_GROWTH: f64 = (64 << 20) as f64;
const MIN_GROWTH_SHARE: f64 = 0.01;

/// A point of a history. Memory is the highest in its step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Unreclaimable memory in [`UNIT`]s, or [`UNKNOWN`].
    memory: u32,
    /// GPU memory in [`UNIT`]s, or [`UNKNOWN`].
    gpu: u32,
}

/// Bytes of the unit of a point.
const UNIT: f64 = 65_536.0;
const UNKNOWN: u32 = u32::MAX;

impl Point {
    /// Nothing is known of this time.
    const GAP: Point = Point { memory: UNKNOWN, gpu: UNKNOWN };

    fn of(memory: Option<f64>, gpu: Option<f64>) -> Self {
        let units = |bytes: Option<f64>| bytes.map_or(UNKNOWN, |bytes| (bytes / UNIT).round() as u32);
        Self { memory: units(memory), gpu: units(gpu) }
    }

    fn highest(self, other: Self) -> Self {
        let highest = |one: u32, other: u32| match (one, other) {
            (UNKNOWN, value) | (value, UNKNOWN) => value,
            (one, other) => one.max(other),
        };
        Self { memory: highest(self.memory, other.memory), gpu: highest(self.gpu, other.gpu) }
    }

    /// Returns the unreclaimable memory in bytes.
    pub fn memory_bytes(self) -> Option<f64> {
        (self.memory != UNKNOWN).then(|| f64::from(self.memory) * UNIT)
    }

    /// Returns the GPU memory in bytes.
    pub fn gpu_bytes(self) -> Option<f64> {
        (self.gpu != UNKNOWN).then(|| f64::from(self.gpu) * UNIT)
    }
}

/// The last hour of a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Track {
    /// Seconds of a step.
    pub step: f64,
    /// Number of the newest step, counted from 1970.
    newest: u64,
    /// Points, a step apart, the newest last.
    pub points: VecDeque<Point>,
}

impl Track {
    /// Begins without a point.
    pub fn new(step: f64) -> Self {
        Self { step, newest: 0, points: VecDeque::new() }
    }

    /// Adds what was in use at a time, in bytes.
    pub fn add(&mut self, at: f64, memory: Option<f64>, gpu: Option<f64>) {
        self.add_point(at, Point::of(memory, gpu));
    }

    fn add_point(&mut self, at: f64, point: Point) {
        let number = (at / self.step) as u64;
        if number < self.newest {
            self.points.clear(); // the clock was set back
        }
        match self.points.back_mut() {
            Some(last) if number <= self.newest => *last = last.highest(point),
            _ => {
                let length = (SPAN / self.step) as usize;
                let missed = if self.points.is_empty() { 0 } else { number - self.newest - 1 };
                for _ in 0..missed.min(length as u64) {
                    self.points.push_back(Point::GAP);
                }
                self.points.push_back(point);
                let surplus = self.points.len().saturating_sub(length);
                drop(self.points.drain(..surplus));
                self.newest = number;
            }
        }
    }

    /// Returns the same with longer steps.
    fn coarser(&self, step: f64) -> Self {
        let mut track = Self::new(step);
        for (at, point) in self.timed() {
            track.add_point(at, point);
        }
        track
    }

    /// Returns the points with the time at which each begins.
    pub fn timed(&self) -> impl Iterator<Item = (f64, Point)> {
        let first = self.newest + 1 - self.points.len() as u64;
        self.points
            .iter()
            .enumerate()
            .map(move |(number, point)| ((first + number as u64) as f64 * self.step, *point))
    }

    /// Returns the growth of the memory in bytes per second: of the lowest values of the parts of the window, so that neither a saw nor
    /// a single step is one.
    fn growth(&self, now: f64, limit: Option<f64>) -> Option<f64> {
        if self.timed().next()?.0 > now - GROWTH_WINDOW {
            return None;
        }
        let part = GROWTH_WINDOW / PARTS as f64;
        let lowest = |number: usize| {
            let from = now - GROWTH_WINDOW + part * number as f64;
            let points = self.timed().filter(|(at, _)| (from..from + part).contains(at));
            points.filter_map(|(_, point)| point.memory_bytes()).reduce(f64::min)
        };
        let lowest: Vec<f64> = (0..PARTS).map(lowest).collect::<Option<_>>()?;
        let mut rises: Vec<f64> = lowest.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let still_rises = rises.last().is_some_and(|rise| *rise > 0.0);
        rises.sort_by(f64::total_cmp);
        let median = rises[rises.len() / 2];
        let grown = lowest[PARTS - 1] - lowest[0];
        let least = MIN_GROWTH.max(limit.unwrap_or(0.0) * MIN_GROWTH_SHARE);
        (still_rises && median > 0.0 && grown >= least).then_some(median / part)
    }
}

/// CPU of a container.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    /// Seconds so far.
    seconds: f64,
    /// Cores in use since the snapshot before; `None` for one that was not in it.
    cores: Option<f64>,
}

/// Keeps what later overviews need of each snapshot.
#[derive(Debug)]
pub struct Recorder {
    /// Snapshots that come sooner after the last one that was recorded are left out.
    min_interval: f64,
    /// Unix time of that one.
    recorded: f64,
    cpu: HashMap<ContainerId, Cpu>,
    /// Seconds for which a task of the host waited for memory.
    waiting_seconds: Option<f64>,
    memory_waiting_ratio: Option<f64>,
    step: f64,
    tracks: HashMap<ContainerId, Track>,
    /// Listed runs that had processes, and since when they have none.
    empty_since: HashMap<u64, Option<Timestamp>>,
}

impl Default for Recorder {
    /// For a service: rates are those of a step.
    fn default() -> Self {
        Self::with_interval(STEP)
    }
}

impl Recorder {
    /// Rates are at least those of this many seconds.
    pub fn with_interval(seconds: f64) -> Self {
        Self {
            min_interval: seconds,
            recorded: 0.0,
            cpu: HashMap::new(),
            waiting_seconds: None,
            memory_waiting_ratio: None,
            step: STEP,
            tracks: HashMap::new(),
            empty_since: HashMap::new(),
        }
    }

    /// Records a snapshot.
    pub fn add(&mut self, snapshot: &Snapshot) {
        let (cycle, at) = (&snapshot.cycle, snapshot.finished.unix_seconds());
        let running = &snapshot.containers[..snapshot.running];
        self.record_processes(snapshot, running);
        let since = at - self.recorded;
        if (0.0..self.min_interval * 0.9).contains(&since) {
            return;
        }
        self.recorded = at;
        let per_second = |now: f64, before: f64| (since > 0.0).then_some((now - before).max(0.0) / since);
        let waiting = cycle.host.memory.and_then(|memory| memory.waiting_seconds);
        self.memory_waiting_ratio =
            waiting.zip(self.waiting_seconds).and_then(|(now, before)| per_second(now, before));
        self.waiting_seconds = waiting;
        let before = std::mem::take(&mut self.cpu);
        self.cpu = std::iter::zip(running, &cycle.containers)
            .filter_map(|(container, found)| {
                let seconds = found.cpu_seconds?;
                let before = before.get(&container.id).map(|before| before.seconds);
                let cores = before.and_then(|before| per_second(seconds, before));
                Some((container.id.clone(), Cpu { seconds, cores }))
            })
            .collect();
        let found = std::iter::zip(&cycle.containers, cycle.gpu_bytes());
        for (container, (found, gpu)) in std::iter::zip(running, found) {
            if self.tracks.contains_key(&container.id) || self.can_add(running) {
                let new = || Track::new(self.step);
                let track = self.tracks.entry(container.id.clone()).or_insert_with(new);
                track.add(at, found.unreclaimable.map(float), gpu.map(float));
            }
        }
        self.tracks.retain(|_, track| (track.newest as f64 + 1.0) * track.step > at - SPAN);
        self.coarsen();
    }

    /// Records which containers have processes.
    fn record_processes(&mut self, snapshot: &Snapshot, running: &[Arc<Container>]) {
        let before = std::mem::take(&mut self.empty_since);
        for (number, container) in running.iter().enumerate() {
            let before = before.get(&container.listed_run).copied();
            let has_any = match snapshot.processes_of(number) {
                Some(processes) => Some(!processes.is_empty()),
                None => container.cgroup.is_none().then_some(false),
            };
            let empty_since = match (has_any, before) {
                (Some(true), _) => None,
                (Some(false), Some(before)) => Some(before.unwrap_or(snapshot.finished)),
                // one that never had any may have them where its cgroup does not show them
                (Some(false), None) | (None, None) => continue,
                (None, Some(before)) => before,
            };
            self.empty_since.insert(container.listed_run, empty_since);
        }
    }

    /// Returns whether another container can have a history, after the removal of one that ended. Those that run keep theirs.
    fn can_add(&mut self, running: &[Arc<Container>]) -> bool {
        if self.tracks.len() >= MAX_TRACKS {
            let runs: HashSet<&ContainerId> = running.iter().map(|container| &container.id).collect();
            let ended = self.tracks.iter().filter(|(id, _)| !runs.contains(id));
            let oldest = ended.min_by_key(|(_, track)| track.newest).map(|(id, _)| id.clone());
            if let Some(id) = oldest {
                self.tracks.remove(&id);
            }
        }
        self.tracks.len() < MAX_TRACKS
    }

    /// Lengthens the steps where there are many containers. They stay so until few are left.
    fn coarsen(&mut self) {
        let step = match self.tracks.len() {
            many if many > MANY => COARSE_STEP,
            few if few <= MANY / 2 => STEP,
            _ => self.step,
        };
        if step > self.step {
            self.tracks = std::mem::take(&mut self.tracks)
                .into_iter()
                .map(|(id, track)| (id, track.coarser(step)))
                .collect();
        }
        self.step = step; // finer ones are those of new containers
    }

    /// Returns what an overview of this snapshot needs. The history is that of the container with this id.
    pub fn figures(&self, snapshot: &Snapshot, history_of: Option<&str>) -> Figures {
        let now = snapshot.finished.unix_seconds();
        let limit = |number: usize| snapshot.cycle.containers.get(number)?.effective_limit.map(float);
        let running = &snapshot.containers[..snapshot.running];
        Figures {
            cpu_cores: running.iter().map(|container| self.cpu.get(&container.id)?.cores).collect(),
            growth: running
                .iter()
                .enumerate()
                .map(|(number, container)| self.growth(container, now, limit(number)))
                .collect(),
            has_no_process: running
                .iter()
                .map(|container| {
                    let empty_since = self.empty_since.get(&container.listed_run).copied().flatten();
                    empty_since
                        .is_some_and(|since| snapshot.finished.since(since).as_secs_f64() >= EMPTY_AFTER)
                })
                .collect(),
            memory_waiting_ratio: self.memory_waiting_ratio,
            history: history_of.and_then(|id| self.tracks.get(&ContainerId::new(id)).cloned()),
        }
    }

    /// Returns the growth of a container in bytes per second. `None` without, and in its first half hour.
    fn growth(&self, container: &Container, now: f64, limit: Option<f64>) -> Option<f64> {
        if container.started.is_some_and(|started| now - started < GROWTH_WINDOW) {
            return None;
        }
        self.tracks.get(&container.id)?.growth(now, limit)
    }
}

/// What an overview has from earlier snapshots, for each running container of one.
#[derive(Debug, Default)]
pub struct Figures {
    /// Cores in use.
    pub cpu_cores: Vec<Option<f64>>,
    /// Growth of the memory in bytes per second.
    pub growth: Vec<Option<f64>>,
    /// It had processes and has had none for [`EMPTY_AFTER`].
    pub has_no_process: Vec<bool>,
    /// Share of time in which a task of the host waited for memory.
    pub memory_waiting_ratio: Option<f64>,
    /// The last hour of the one container that was asked for.
    pub history: Option<Track>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1 << 30) as f64;

    fn track(minutes: u64, memory: impl Fn(u64) -> Option<f64>) -> Track {
        let mut track = Track::new(STEP);
        for second in (0..minutes * 60).step_by(5) {
            if let Some(memory) = memory(second) {
                track.add(second as f64, Some(memory), None);
            }
        }
        track
    }

    #[test]
    fn gap_is_a_gap_and_an_hour_is_kept() {
        let found = track(90, |second| (!(5000..5100).contains(&second)).then_some(GIB));
        assert_eq!(found.points.len(), 720);
        let gaps: Vec<f64> =
            found.timed().filter(|(_, point)| point.memory_bytes().is_none()).map(|(at, _)| at).collect();
        assert_eq!((gaps.len(), gaps[0]), (20, 5000.0));
        let mut long = found.clone();
        long.add(1e6, Some(2.0 * GIB), Some(GIB));
        assert_eq!(long.points.len(), 720);
        assert_eq!(long.points.back().and_then(|point| point.gpu_bytes()), Some(GIB));
        assert_eq!(long.points.iter().filter(|point| point.memory_bytes().is_some()).count(), 1);
    }

    #[test]
    fn longer_steps_keep_the_highest() {
        let fine = track(30, |second| Some(if second == 605 { 3.0 * GIB } else { GIB }));
        let coarse = fine.coarser(COARSE_STEP);
        assert_eq!(coarse.points.len(), 180);
        let highest: Vec<_> =
            coarse.timed().filter(|(_, point)| point.memory_bytes() > Some(2.0 * GIB)).collect();
        assert_eq!((highest.len(), highest[0].0), (1, 600.0));
    }

    #[test]
    fn growth_is_that_of_the_lowest_values() {
        let of = |found: Track| found.growth(3600.0, Some(100.0 * GIB));
        let saw = |second: u64| (second % 280) as f64 / 280.0 * GIB;
        assert_eq!(of(track(60, |second| Some(GIB + saw(second)))), None);
        let rising = of(track(60, |second| Some(saw(second) + second as f64 * GIB / 300.0))).expect("growth");
        assert!((rising * 300.0 / GIB - 1.0).abs() < 0.1, "{rising}");
        // a step is no growth, whenever it was
        for minute in 1..60 {
            let step = of(track(60, |second| Some(if second >= 60 * minute { 9.0 * GIB } else { GIB })));
            assert_eq!(step, None, "at minute {minute}");
        }
        // it grew, and does no longer
        assert_eq!(of(track(60, |second| Some(second.min(3000) as f64 * GIB / 300.0))), None);
        assert_eq!(
            of(track(60, |second| (second > 2000).then_some(second as f64 * GIB))),
            None,
            "a short history"
        );
        assert_eq!(
            of(track(60, |second| Some(second as f64 * GIB / 3600.0))),
            None,
            "a hundredth of the limit is more"
        );
    }

    #[test]
    fn clock_that_is_set_back_begins_the_history_again() {
        let mut found = track(60, |_| Some(GIB));
        found.add(1800.0, Some(2.0 * GIB), None);
        assert_eq!(found.timed().map(|(at, _)| at).collect::<Vec<_>>(), [1800.0]);
    }

    #[test]
    fn those_that_run_keep_their_histories() {
        let containers = |range: std::ops::Range<usize>| -> Vec<Arc<Container>> {
            range.map(|number| Container::in_cgroup(&format!("{number:064}"), "/c")).collect()
        };
        let mut recorder = Recorder::default();
        let add = |recorder: &mut Recorder, running: &[Arc<Container>], at: f64| {
            for container in running {
                if recorder.tracks.contains_key(&container.id) || recorder.can_add(running) {
                    recorder.tracks.entry(container.id.clone()).or_insert_with(|| Track::new(STEP)).add(
                        at,
                        Some(GIB),
                        None,
                    );
                }
            }
        };
        for step in 0..10 {
            add(&mut recorder, &containers(0..300), 5.0 * f64::from(step));
        }
        assert!(
            recorder.tracks.len() == MAX_TRACKS
                && recorder.tracks.values().all(|track| track.points.len() == 10)
        );
        add(&mut recorder, &containers(100..350), 50.0);
        assert!(containers(300..350).iter().all(|container| recorder.tracks.contains_key(&container.id)));
    }

    #[test]
    fn memory_of_many_histories_is_bounded() {
        let bytes = |containers: usize| {
            let mut recorder = Recorder::default();
            for number in 0..containers {
                let mut full = track(60, |_| Some(GIB));
                full.points.shrink_to_fit();
                if !recorder.can_add(&[]) {
                    continue;
                }
                recorder.tracks.insert(ContainerId::new(&format!("{number:064}")), full);
                recorder.coarsen();
            }
            let points: usize = recorder.tracks.values().map(|track| track.points.capacity()).sum();
            (recorder.tracks.len(), points * size_of::<Point>())
        };
        assert!(bytes(100).1 <= 3 << 19, "1.5 MiB, with 100: {}", bytes(100).1);
        let (kept, size) = bytes(1000);
        assert!(kept == MAX_TRACKS && size <= 2 << 20, "{kept} {size}");
    }
}
