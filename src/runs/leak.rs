//! A leak of GPU memory: what PyTorch holds between two steps of a training grows.

use super::RunRecord;

/// A training allocates for the first time until then: optimizer state, caches, buckets of gradients. In seconds.
const WARM_UP: f64 = 900.0;
/// Shortest time after that within which growth is a leak, in seconds.
const MIN_TIME: f64 = 3_600.0;
/// Parts of that time: each has to hold more than the one before.
const PARTS: usize = 4;
/// Least growth in all, in bytes, and from part to part as a share of all: a batch that is changed is one step and not four.
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

/// Returns the leak of a run; `None` if its memory does not grow all the time, or if it is too short to say so.
pub fn torch_leak(run: &RunRecord) -> Option<TorchLeak> {
    let begin = run.timeline.first()?.at + WARM_UP;
    let values = run.timeline.iter().filter_map(|point| Some((point.at, point.torch_allocated_min_bytes?)));
    let points: Vec<_> = values.filter(|(at, _)| *at >= begin).collect();
    let (first, last) = (points.first()?.0, points.last()?.0);
    let part_of = |at: f64| (((at - first) / (last - first) * PARTS as f64) as usize).min(PARTS - 1);
    if last - first < MIN_TIME {
        return None;
    }
    let least = |part| points.iter().filter(|(at, _)| part_of(*at) == part).map(|(_, bytes)| *bytes).min();
    let parts: Vec<u64> = (0..PARTS).map(least).collect::<Option<_>>()?;
    let grown_bytes = parts.last()?.checked_sub(*parts.first()?)?;
    let grows = |pair: &[u64]| pair[1] as f64 - pair[0] as f64 >= MIN_SHARE * grown_bytes as f64;
    let is_leak = grown_bytes >= MIN_GROWTH && parts.windows(2).all(grows);
    let seconds = (last - first) * (PARTS - 1) as f64 / PARTS as f64;
    is_leak.then_some(TorchLeak { grown_bytes, seconds })
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
        let leak = torch_leak(&run(|minute| 4 * GIB + (minute << 20))).unwrap();
        let per_hour = leak.grown_bytes as f64 * 3_600.0 / leak.seconds / f64::from(1 << 20);
        assert!((55.0..65.0).contains(&per_hour), "{leak:?}");
        // also beside validations, which hold less
        assert!(
            torch_leak(&run(|minute| 4 * GIB + (minute << 21) - (minute % 30 / 27) * (1 << 19))).is_some()
        );
    }

    #[test]
    fn training_that_warms_up_validates_or_changes_its_batch_has_no_leak() {
        type Held = fn(u64) -> u64;
        let runs: [(&str, Held); 6] = [
            ("constant", |_| 4 * GIB),
            ("warms up", |minute| GIB + minute.min(12) * GIB / 4),
            ("validates", |minute| if minute % 30 < 24 { 4 * GIB } else { GIB }),
            ("changes its batch", |minute| if minute < 90 { 4 * GIB } else { 6 * GIB }),
            ("changes it twice", |minute| 4 * GIB + minute / 60 * GIB),
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
