//! A leak of GPU memory: what PyTorch holds between two steps of a training grows.

use super::RunRecord;

/// A training allocates for the first time until then: optimizer state, caches, buckets of gradients. In seconds.
const WARM_UP: f64 = 900.0;
/// Shortest part of the time after that, in seconds: longer ones where points are farther apart.
const MIN_PART: f64 = 900.0;
/// So many parts one after the other have to hold more than the one before.
const PARTS: usize = 4;
/// Least growth in them, in bytes, and from part to part as a share of it: a batch that is changed is one step and not three.
const MIN_GROWTH: u64 = 64 << 20;
const MIN_SHARE: f64 = 0.1;

/// Growth of what PyTorch holds between two steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TorchLeak {
    /// In bytes, all GPUs together.
    pub grown_bytes: u64,
    /// Within this time in seconds.
    pub seconds: f64,
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
    Some(TorchLeak { grown_bytes: parts[last] - parts[first], seconds: part * (last - first) as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::TimelinePoint;

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
