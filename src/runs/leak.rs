//! A leak of GPU memory: what PyTorch holds between two steps of a training grows.

use super::{RunFigures, RunRecord, TimelinePoint};
use crate::events::HeldGrowth;
use crate::text::human_bytes;

/// A training allocates for the first time until then: optimizer state, caches, buckets of gradients. In seconds.
const WARM_UP: f64 = 900.0;
/// Shortest part of the time after that, in seconds: longer ones where points are farther apart.
const MIN_PART: f64 = 900.0;
/// So many parts one after the other have to hold more than the one before.
const PARTS: usize = 4;
/// Least growth in them, in bytes, and from part to part as a share of it: a batch that is changed is one step and not three.
const MIN_GROWTH: u64 = 64 << 20;
const MIN_SHARE: f64 = 0.1;

/// Least number of steps, and of points of time, before a failure that show a leak.
const MIN_STEPS: f64 = 20.0;
const MIN_POINTS: usize = 3;
/// Least growth until a failure as a share of what was held first: as much as one that matters for the failure.
const MIN_FAILURE_SHARE: f64 = 0.25;

/// Growth of what PyTorch holds between two steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TorchLeak {
    /// What it held first, in bytes.
    pub from_bytes: u64,
    /// In bytes, all GPUs together.
    pub grown_bytes: u64,
    /// Within this time in seconds.
    pub seconds: f64,
}

impl TorchLeak {
    /// Returns it as text.
    pub fn text(&self) -> String {
        growth_text(self.from_bytes, self.from_bytes + self.grown_bytes, self.seconds)
    }
}

/// Returns such a growth as text.
pub fn growth_text(from_bytes: u64, to_bytes: u64, seconds: f64) -> String {
    let size = |bytes: u64| human_bytes(bytes as f64);
    let minutes = seconds / 60.0;
    let within = if minutes < 2.0 { format!("{seconds:.0} s") } else { format!("{minutes:.0} min") };
    format!(
        "what PyTorch holds between two steps grew from {} to {} in {within}",
        size(from_bytes),
        size(to_bytes)
    )
}

/// Returns the growth of what PyTorch held between two steps of a training until it ended, where it grew from each point of time to the
/// next: also of a run of half a minute. It is no leak by itself, but explains that the memory was exhausted.
pub fn leak_before_failure(run: &RunRecord) -> Option<TorchLeak> {
    let steps = run.steps_per_second? * run.observed_seconds?;
    growth_to_the_end(steps, &run.timeline, run.torch_held_bytes.zip(run.last_sampled))
}

impl RunFigures {
    /// Returns the same of a run so far.
    pub fn held_growth(&self) -> Option<HeldGrowth> {
        let last = self.torch_allocated_min_bytes.zip(self.last_sampled);
        let leak = growth_to_the_end(self.steps.rate()? * self.observed_seconds, &self.timeline, last)?;
        let TorchLeak { from_bytes, grown_bytes, seconds } = leak;
        Some(HeldGrowth { from_bytes, to_bytes: from_bytes + grown_bytes, seconds })
    }
}

fn growth_to_the_end(steps: f64, timeline: &[TimelinePoint], last: Option<(u64, f64)>) -> Option<TorchLeak> {
    if steps < MIN_STEPS {
        return None; // it was loading
    }
    let last = last.map(|(held, at)| (at, held));
    let values = timeline.iter().filter_map(|point| Some((point.at, point.torch_allocated_min_bytes?)));
    // what holds nothing yet loads
    let points: Vec<_> = values.chain(last).filter(|(_, bytes)| *bytes > 0).collect();
    let (first, last) = (points.first()?, points.last()?);
    let grown = last.1.checked_sub(first.1)?;
    let rises = |pair: &[(f64, u64)]| {
        pair[1].1 as f64 - pair[0].1 as f64 >= MIN_SHARE * grown as f64 / points.len() as f64
    };
    let is_leak = points.len() >= MIN_POINTS
        && grown >= MIN_GROWTH.max((MIN_FAILURE_SHARE * first.1 as f64) as u64)
        && points.windows(2).all(rises);
    is_leak.then_some(TorchLeak { from_bytes: first.1, grown_bytes: grown, seconds: last.0 - first.0 })
}

/// Returns the leak of a run: memory that grew for at least an hour, and was not given back afterwards. `None` if there is none, or if
/// the run is too short to say so.
pub fn torch_leak(run: &RunRecord) -> Option<TorchLeak> {
    let begin = run.timeline.first()?.at + WARM_UP;
    let values = run.timeline.iter().filter_map(|point| Some((point.at, point.torch_allocated_min_bytes?)));
    let points: Vec<_> = values.filter(|(at, _)| *at >= begin).collect();
    let farthest = points.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(0.0, f64::max);
    let part = MIN_PART.max(farthest);
    let parts = ((points.last()?.0 - points.first()?.0) / part) as usize;
    let least = |number: usize| {
        let from = points[0].0 + part * number as f64;
        points.iter().filter(|(at, _)| (from..from + part).contains(at)).map(|(_, bytes)| *bytes).min()
    };
    let parts: Vec<u64> = (0..parts).map(least).collect::<Option<_>>()?;
    let is_growth = |begin: &usize| {
        let window = &parts[*begin..begin + PARTS];
        let grown = window[PARTS - 1].saturating_sub(window[0]);
        let rises = |pair: &[u64]| pair[1] as f64 - pair[0] as f64 >= MIN_SHARE * grown as f64;
        let stays = parts[begin + PARTS..].iter().all(|later| *later >= window[PARTS - 1]);
        grown >= MIN_GROWTH && stays && window.windows(2).all(rises)
    };
    let grows: Vec<usize> = (0..(parts.len() + 1).saturating_sub(PARTS)).filter(is_growth).collect();
    let (first, last) = (*grows.first()?, grows.last()? + PARTS - 1);
    let (from_bytes, grown_bytes) = (parts[first], parts[last] - parts[first]);
    Some(TorchLeak { from_bytes, grown_bytes, seconds: part * (last - first) as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Returns a run of three hours, with what is held at a minute.
    fn run(held: impl Fn(u64) -> u64) -> RunRecord {
        let point = |minute: u64| TimelinePoint {
            at: 1e9 + 60.0 * minute as f64,
            torch_allocated_min_bytes: Some(held(minute)),
            ..TimelinePoint::default()
        };
        RunRecord { timeline: (0..180).step_by(3).map(point).collect(), ..RunRecord::default() }
    }

    #[test]
    fn finds_memory_that_grows_at_each_step() {
        let leak = torch_leak(&run(|minute| 4 * GIB + (minute << 21))).unwrap();
        let per_hour = leak.grown_bytes as f64 * 3_600.0 / leak.seconds / f64::from(1 << 20);
        assert!((115.0..125.0).contains(&per_hour), "{leak:?}");
        // also beside validations, which hold less
        assert!(
            torch_leak(&run(|minute| 4 * GIB + (minute << 21) - (minute % 30 / 27) * (1 << 19))).is_some()
        );
    }

    /// Returns a training that was sampled for half a minute, with what it held at each point.
    fn short_run(held: &[u64], last: Option<u64>) -> RunRecord {
        let point = |(number, held): (usize, &u64)| TimelinePoint {
            at: 1e9 + 10.0 * number as f64,
            torch_allocated_min_bytes: Some(*held),
            ..TimelinePoint::default()
        };
        RunRecord {
            timeline: held.iter().enumerate().map(point).collect(),
            torch_held_bytes: last,
            last_sampled: Some(1e9 + 10.0 * held.len() as f64),
            steps_per_second: Some(6.0),
            observed_seconds: Some(22.0),
            ..RunRecord::default()
        }
    }

    #[test]
    fn growth_of_half_a_minute_until_a_failure_is_found() {
        let leak = leak_before_failure(&short_run(&[0, 3 * GIB, 6 * GIB], Some(9 * GIB))).unwrap();
        assert_eq!(leak.text(), "what PyTorch holds between two steps grew from 3.0 GiB to 9.0 GiB in 20 s");
        for (held, last) in [
            (vec![GIB, 4 * GIB, 4 * GIB], Some(4 * GIB)), // its optimizer began, and the batch was too large
            (vec![4 * GIB, 4 * GIB + (1 << 26), 4 * GIB + (1 << 27)], None),
            (vec![3 * GIB, 2 * GIB, 6 * GIB], Some(9 * GIB)),
            (vec![3 * GIB], Some(9 * GIB)),
            (vec![], None),
        ] {
            assert_eq!(leak_before_failure(&short_run(&held, last)), None, "{held:?}");
        }
        let loading =
            RunRecord { steps_per_second: None, ..short_run(&[GIB, 3 * GIB, 6 * GIB], Some(9 * GIB)) };
        assert_eq!(leak_before_failure(&loading), None, "no step was made");
    }

    #[test]
    fn training_that_warms_up_validates_or_changes_its_batch_has_no_leak() {
        type Held = fn(u64) -> u64;
        let runs: [(&str, Held); 7] = [
            ("constant", |_| 4 * GIB),
            ("warms up", |minute| GIB + minute.min(12) * GIB / 4),
            ("validates", |minute| if minute % 30 < 24 { 4 * GIB } else { GIB }),
            ("changes its batch", |minute| if minute < 90 { 4 * GIB } else { 6 * GIB }),
            ("changes it twice", |minute| 4 * GIB + minute / 60 * GIB),
            ("gives it back", |minute| 4 * GIB + if minute < 120 { minute << 23 } else { 0 }),
            ("noise", |minute| 4 * GIB + ((minute * 7_919 % 64) << 20)),
        ];
        for (name, held) in runs {
            assert_eq!(torch_leak(&run(held)), None, "{name}");
        }
        let mut short = run(|minute| 4 * GIB + (minute << 24));
        short.timeline.truncate(20);
        assert_eq!(torch_leak(&short), None, "an hour");
    }
}
