//! The largest batch that fits into the memory of a GPU: a line through the peaks of measured runs, with the interval in which the
//! next run will be.

/// Share of the GPU's memory for the peak at the largest batch: the rest is for fragmentation, libraries and larger samples.
const MAXIMUM_SHARE: f64 = 0.7;
/// Shares of that for a recommended and for a safe batch.
const RECOMMENDED_SHARE: f64 = 0.6;
const SAFE_SHARE: f64 = 0.4;
/// Fewer sizes say too little about the next one.
pub const MIN_SIZES: usize = 4;
/// No size beyond this many times the largest that was measured is proposed.
const MAX_EXTRAPOLATION: u64 = 2;
/// Quantiles of Student's t, one-sided 97.5 %, for 1 to 30 degrees of freedom.
const T_QUANTILES: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// The same for more.
const T_QUANTILE_OF_MANY: f64 = 2.04;

/// Batch sizes and peaks of runs that differ in nothing else.
#[derive(Clone, Debug, Default)]
pub struct MeasuredSizes {
    /// Batch size and peak of allocated bytes of each run.
    pub peaks: Vec<(u64, f64)>,
    /// Batch sizes of runs that had CUDA out-of-memory errors, or that ran out of RAM, where no later run with a larger batch completed.
    /// Their peaks are no measurements: they needed more.
    pub failed: Vec<u64>,
    /// The smallest batch that failed for a reason that is not known, where no larger one completed.
    pub unexplained: Option<u64>,
    /// The largest batch for which there is RAM, where that is known.
    pub largest_for_ram: Option<u64>,
    /// The most memory of the GPU that a run held outside of PyTorch, in bytes, if these are peaks of PyTorch.
    pub outside: f64,
    /// Memory of the GPU in bytes.
    pub total: f64,
}

/// Batch sizes, powers of two; `None` if even 1 does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Its peak is within 70 % of the GPU's memory.
    pub maximum: Option<u64>,
    /// Its peak is within 60 % of that.
    pub recommended: Option<u64>,
    /// Its peak is within 40 % of that.
    pub safe: Option<u64>,
}

/// The line and its interval.
#[derive(Clone, Copy, Debug)]
pub struct VramFit {
    /// Bytes without a sample.
    pub base: f64,
    /// Bytes for each sample.
    pub per_sample: f64,
    /// Bytes outside of PyTorch.
    pub outside: f64,
    runs: f64,
    mean_size: f64,
    spread: f64,
    deviation: f64,
    quantile: f64,
    /// The largest size that may be proposed, because of what was measured.
    max_by_measurement: u64,
    /// The same, because of runs that ran out of memory.
    max_by_failure: u64,
    /// The same, because of runs that failed for a reason that is not known.
    max_by_error: u64,
    /// The same, because of the RAM.
    max_by_ram: u64,
    total: f64,
}

impl MeasuredSizes {
    /// Returns the measured sizes, ascending.
    pub fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = self.peaks.iter().map(|(size, _)| *size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Returns the sizes to measure next, until there are enough: powers of two below the largest, then above it, below those that
    /// failed.
    pub fn next_sizes(&self) -> Vec<u64> {
        let limit = self.failed.iter().copied().chain(self.unexplained).min().unwrap_or(u64::MAX);
        let mut sizes = self.sizes();
        let mut next = Vec::new();
        while sizes.len() < MIN_SIZES {
            // without a measurement the next one is just below what failed
            let largest = sizes.iter().copied().max().unwrap_or(if limit < u64::MAX { limit } else { 16 });
            let below =
                (0..32).rev().map(|power| 1 << power).find(|size| *size < largest && !sizes.contains(size));
            let Some(size) = below.or_else(|| largest.checked_mul(2).filter(|size| *size < limit)) else {
                break;
            };
            sizes.push(size);
            next.push(size);
        }
        next
    }

    /// Fits the line; `None` with fewer than [`MIN_SIZES`] sizes, or if a larger batch does not need more.
    pub fn fit(&self) -> Option<VramFit> {
        let sizes = self.sizes();
        if sizes.len() < MIN_SIZES {
            return None;
        }
        let runs = self.peaks.len() as f64;
        let mean_size = self.peaks.iter().map(|(size, _)| *size as f64).sum::<f64>() / runs;
        let mean_peak = self.peaks.iter().map(|(_, peak)| peak).sum::<f64>() / runs;
        let deviations =
            || self.peaks.iter().map(|(size, peak)| (*size as f64 - mean_size, peak - mean_peak));
        let spread: f64 = deviations().map(|(size, _)| size * size).sum();
        let per_sample = deviations().map(|(size, peak)| size * peak).sum::<f64>() / spread;
        if per_sample <= 0.0 {
            return None;
        }
        let base = mean_peak - per_sample * mean_size;
        let errors = self.peaks.iter().map(|(size, peak)| peak - base - per_sample * *size as f64);
        let freedom = self.peaks.len() - 2;
        let deviation = (errors.map(|error| error * error).sum::<f64>() / freedom as f64).sqrt();
        let largest = sizes.last().copied().unwrap_or(0) * MAX_EXTRAPOLATION;
        let below = |failed: Option<u64>| failed.map_or(u64::MAX, |failed| failed.saturating_sub(1));
        Some(VramFit {
            base,
            per_sample,
            outside: self.outside,
            runs,
            mean_size,
            spread,
            deviation,
            quantile: T_QUANTILES.get(freedom - 1).copied().unwrap_or(T_QUANTILE_OF_MANY),
            max_by_measurement: largest,
            max_by_failure: below(self.failed.iter().copied().min()),
            max_by_error: below(self.unexplained),
            max_by_ram: self.largest_for_ram.unwrap_or(u64::MAX),
            total: self.total,
        })
    }
}

impl VramFit {
    /// Returns the bytes below which the memory of a run with this batch size will stay, 97.5 times in a hundred.
    pub fn upper_bound(&self, size: u64) -> f64 {
        let distance = size as f64 - self.mean_size;
        let width = (1.0 + 1.0 / self.runs + distance * distance / self.spread).sqrt();
        self.outside + self.base + self.per_sample * size as f64 + self.quantile * self.deviation * width
    }

    /// Returns the batch sizes for this GPU.
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes {
            maximum: self.largest_within(MAXIMUM_SHARE),
            recommended: self.largest_within(MAXIMUM_SHARE * RECOMMENDED_SHARE),
            safe: self.largest_within(MAXIMUM_SHARE * SAFE_SHARE),
        }
    }

    /// Returns why no larger size than this maximum is proposed.
    pub fn bound_above(&self, maximum: u64) -> &'static str {
        let next = maximum.saturating_mul(2);
        if next > self.max_by_failure {
            "a larger one ran out of memory"
        } else if next > self.max_by_error {
            "a larger one failed"
        } else if next > self.max_by_ram {
            "more needs too much RAM"
        } else if next > self.max_by_measurement {
            "twice the largest that was measured"
        } else {
            "70 % of the GPU"
        }
    }

    /// Returns the largest power of two whose peak stays within a share of the GPU's memory.
    fn largest_within(&self, share: f64) -> Option<u64> {
        let bounds = [self.max_by_measurement, self.max_by_failure, self.max_by_error, self.max_by_ram];
        let limit = bounds.into_iter().min().unwrap_or(0);
        let powers = (0..63).map(|power| 1_u64 << power).take_while(|size| *size <= limit);
        powers.filter(|size| self.upper_bound(*size) <= share * self.total).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    /// Numbers that repeat with their seed.
    struct Random(u64);

    impl Random {
        /// A number from 0 to 1.
        fn uniform(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as f64 / (1_u64 << 31) as f64
        }

        /// A normally distributed number: the sum of twelve uniform ones.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
        }
    }

    const GIB: f64 = (1_u64 << 30) as f64;

    #[test]
    fn size_that_failed_is_never_proposed() {
        // a card of 12 GB: four sizes were measured, and 256 failed
        let peaks = [(16, 1.1), (32, 1.4), (64, 2.0), (128, 3.2)].map(|(size, gib)| (size, gib * GIB));
        let mut measured =
            MeasuredSizes { peaks: peaks.into(), failed: vec![256], total: 12e9, ..MeasuredSizes::default() };
        let sizes = measured.fit().unwrap().batch_sizes();
        assert_eq!((sizes.maximum, sizes.recommended), (Some(128), Some(128)));
        measured.failed.clear();
        assert_eq!(measured.fit().unwrap().batch_sizes().maximum, Some(256), "not beyond twice the largest");
    }

    #[test]
    fn fewer_than_four_sizes_have_no_fit_but_say_what_to_measure() {
        let mut measured = MeasuredSizes { total: 12e9, ..MeasuredSizes::default() };
        for (size, next) in
            [(0, vec![8, 4, 2, 1]), (32, vec![16, 8, 4]), (32, vec![16, 8, 4]), (1, vec![16, 8])]
        {
            if size > 0 {
                measured.peaks.push((size, size as f64 * 1e8));
            }
            assert!(measured.fit().is_none());
            assert_eq!(measured.next_sizes(), next, "{:?}", measured.peaks);
        }
        let failed =
            MeasuredSizes { peaks: vec![(1, 1e9)], failed: vec![4], total: 12e9, ..MeasuredSizes::default() };
        assert_eq!(failed.next_sizes(), [2]);
        let unmeasured = MeasuredSizes { failed: vec![256], total: 12e9, ..MeasuredSizes::default() };
        assert_eq!(unmeasured.next_sizes(), [128, 64, 32, 16]);
    }

    /// A thousand GPUs with four measured sizes. The peak of twice the largest is where a decision is hard: within two standard deviations
    /// of the budget; or, with `room`, well below it.
    struct Simulation {
        /// Draws whose peak at the maximum was within the budget.
        within: u32,
        /// Draws whose maximum was below half the largest size that fits.
        too_small: u32,
        /// Draws whose maximum was the largest size that fits, up to twice the largest that was measured.
        largest: u32,
    }

    /// Runs it with the interval multiplied by `factor`: 0 leaves the line alone.
    fn simulate(factor: f64, has_room: bool) -> Simulation {
        let mut random = Random(1);
        let mut outcome = Simulation { within: 0, too_small: 0, largest: 0 };
        for _ in 0..1_000 {
            let total = (8.0 + 72.0 * random.uniform()) * GIB;
            let (budget, noise) = (0.7 * total, 0.01 * total);
            let slack = match has_room {
                true => (0.02 + 0.4 * random.uniform()) * total,
                false => (4.0 * random.uniform() - 2.0) * noise,
            };
            let base = total * 0.05 * random.uniform();
            let per_sample = (budget - slack - base) / 256.0;
            let expected = |size: u64| base + per_sample * size as f64;
            let peak = |size: u64, random: &mut Random| expected(size) + noise * random.normal();
            let largest =
                (0..12).map(|power| 1 << power).filter(|size| expected(*size) <= budget).max().unwrap();
            let peaks = [16, 32, 64, 128].map(|size| (size, peak(size, &mut random))).into();
            let fit = MeasuredSizes { peaks, total, ..MeasuredSizes::default() }.fit().unwrap();
            let fit = VramFit { quantile: factor * fit.quantile, ..fit };
            let maximum = fit.batch_sizes().maximum.unwrap_or(0);
            outcome.too_small += u32::from(maximum < largest / 2);
            outcome.largest += u32::from(maximum == largest.min(256));
            outcome.within += u32::from(peak(maximum, &mut random) <= budget);
        }
        outcome
    }

    #[test]
    fn maximum_keeps_its_budget_where_the_line_alone_does_not() {
        let within = |factor| simulate(factor, false).within;
        assert!(within(1.0) >= 950, "{} of 1000 within the budget", within(1.0));
        assert!(within(0.0) < 900, "{} of 1000: these draws prove nothing about the interval", within(0.0));
    }

    #[test]
    fn maximum_is_not_needlessly_small() {
        for has_room in [false, true] {
            assert_eq!(simulate(1.0, has_room).too_small, 0, "below half of what fits, room: {has_room}");
        }
        let (reached, wide) = (simulate(1.0, true).largest, simulate(5.0, true));
        assert!(reached >= 700, "{reached} of 1000 reach the largest size that fits");
        assert!(wide.too_small > 100, "these draws prove nothing about an interval that is too wide");
    }
}
