//! How much memory other settings would need: a budget of measured parts.

use serde::Serialize;

use super::measurement::human;

/// Maximum number of steps in a proposal of which the gradients are accumulated.
const MAX_ACCUMULATION: u64 = 4_096;

/// What a training needs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RamModel {
    /// Beside the ranks: `/dev/shm`, buffers, the kernel's own memory.
    pub fixed: f64,
    /// Each rank: interpreter, libraries, model.
    pub per_rank: f64,
    /// Each worker of each rank.
    pub per_worker: f64,
    /// Each sample of the batch of each rank.
    pub per_sample: f64,
}

/// Settings of a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingSettings {
    /// Number of ranks, one per GPU.
    pub ranks: u64,
    /// Workers of each rank.
    pub workers: u64,
    /// Batch size of each rank.
    pub batch: u64,
    /// Steps of which the gradients are accumulated.
    pub accumulation: u64,
}

/// The parts of what settings need, in bytes, against what there is. They sum to `total_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RamBudgetParts {
    /// What others hold of the host, where the host is the bound.
    pub others_bytes: u64,
    /// All ranks.
    pub ranks_bytes: u64,
    /// All workers.
    pub workers_bytes: u64,
    /// The batches of all ranks.
    pub batch_bytes: u64,
    /// `/dev/shm`.
    pub shm_bytes: u64,
    /// The rest: buffers, the kernel's own memory, other processes.
    pub buffers_bytes: u64,
    /// The sum.
    pub total_bytes: u64,
    /// What there is: the limit, or the memory of the host.
    pub available_bytes: u64,
    /// The settings.
    #[serde(skip)]
    pub settings: TrainingSettings,
}

impl RamBudgetParts {
    /// Returns the parts of these settings, of which `shm` is in the fixed part, beside what `others` hold of the `available` bytes.
    pub fn new(model: &RamModel, settings: &TrainingSettings, shm: f64, others: f64, available: f64) -> Self {
        let ranks = settings.ranks as f64;
        let parts = [
            others,
            ranks * model.per_rank,
            ranks * settings.workers as f64 * model.per_worker,
            ranks * settings.batch as f64 * model.per_sample,
            shm,
            model.fixed - shm,
        ];
        let parts = parts.map(|bytes| bytes as u64);
        let [others_bytes, ranks_bytes, workers_bytes, batch_bytes, shm_bytes, buffers_bytes] = parts;
        Self {
            others_bytes,
            ranks_bytes,
            workers_bytes,
            batch_bytes,
            shm_bytes,
            buffers_bytes,
            total_bytes: parts.into_iter().fold(0, u64::saturating_add),
            available_bytes: available as u64,
            settings: *settings,
        }
    }

    /// Returns them as a sum; parts that are 0 or not measured are omitted.
    pub fn text(&self) -> String {
        let TrainingSettings { ranks, workers, batch, .. } = self.settings;
        let count = |number: u64, what: &str| match number {
            1 => format!("1 {what}"),
            _ => format!("{number} {what}s"),
        };
        let parts = [
            ("others".to_owned(), self.others_bytes),
            (count(ranks, "rank"), self.ranks_bytes),
            (count(ranks * workers, "worker"), self.workers_bytes),
            (count(ranks * batch, "sample"), self.batch_bytes),
            ("/dev/shm".to_owned(), self.shm_bytes),
            ("buffers".to_owned(), self.buffers_bytes),
        ];
        let size = |bytes: u64| human(bytes as f64);
        let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let sum: Vec<_> = parts.map(|(what, bytes)| format!("{what} {}", size(*bytes))).collect();
        format!("{} = {} of {}", sum.join(" + "), size(self.total_bytes), size(self.available_bytes))
    }
}

impl TrainingSettings {
    /// Returns the number of samples between two updates of the weights.
    pub fn effective_batch(&self) -> u64 {
        self.ranks * self.batch * self.accumulation
    }
}

impl RamModel {
    /// Returns the bytes that these settings need.
    pub fn needs(&self, settings: &TrainingSettings) -> f64 {
        let ranks = settings.ranks as f64;
        self.fixed
            + ranks
                * (self.per_rank
                    + self.per_worker * settings.workers as f64
                    + self.per_sample * settings.batch as f64)
    }

    /// Returns settings that fit into `available` bytes and keep the effective batch, best first: those given, else with fewer workers
    /// and the same batch, else with a smaller batch and more accumulation. Empty if none fit.
    /// Settings with as many workers and as large a batch as some that are `excluded` do not fit, whatever is computed.
    pub fn fitting(
        &self,
        wanted: &TrainingSettings,
        available: f64,
        excluded: &[TrainingSettings],
    ) -> Vec<TrainingSettings> {
        let is_excluded = |settings: &TrainingSettings| {
            excluded.iter().any(|least| least.workers <= settings.workers && least.batch <= settings.batch)
        };
        let fits = |settings: &TrainingSettings| self.needs(settings) <= available && !is_excluded(settings);
        if fits(wanted) {
            return vec![*wanted];
        }
        let least = wanted.workers.min(1);
        let fewer =
            (least..wanted.workers).rev().map(|workers| TrainingSettings { workers, ..*wanted }).find(fits);
        let smaller = |workers: u64| {
            let samples = wanted.batch * wanted.accumulation;
            let split = move |accumulation| TrainingSettings {
                workers,
                accumulation,
                batch: samples / accumulation,
                ..*wanted
            };
            let steps = wanted.accumulation + 1..=samples.min(MAX_ACCUMULATION);
            let whole = steps.filter(move |steps| samples.is_multiple_of(*steps));
            whole.map(split).find(fits)
        };
        let accumulated = smaller(wanted.workers).or_else(|| smaller(least));
        fewer.into_iter().chain(accumulated).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GB: f64 = 1e9;

    fn model(fixed: f64, per_rank: f64, per_worker: f64, per_sample: f64) -> RamModel {
        let [fixed, per_rank, per_worker, per_sample] =
            [fixed, per_rank, per_worker, per_sample].map(|gb| gb * GB);
        RamModel { fixed, per_rank, per_worker, per_sample }
    }

    fn settings(ranks: u64, workers: u64, batch: u64, accumulation: u64) -> TrainingSettings {
        TrainingSettings { ranks, workers, batch, accumulation }
    }

    /// Each row has its own parts: system and buffers, each rank, each worker, each sample.
    #[test]
    fn known_tables() {
        for (what, model, settings, available, needs) in [
            ("6 + 10 + 3 + 6 + 4", model(10.0, 10.0, 3.0, 0.25), settings(1, 1, 24, 1), 32.0, 29.0),
            ("6 + 10 + 7 + 8 + 4", model(10.0, 10.0, 1.75, 0.25), settings(1, 4, 32, 1), 32.0, 35.0),
            ("8 + 12 + 6 + 16", model(8.0, 3.0, 1.5, 0.25), settings(4, 1, 16, 1), 44.0, 42.0),
            ("8 + 12 + 16 + 16", model(8.0, 3.0, 1.0, 0.25), settings(4, 4, 16, 1), 44.0, 52.0),
            ("8 + 12 + 6 + 12", model(8.0, 3.0, 1.5, 0.25), settings(4, 1, 12, 2), 44.0, 38.0),
        ] {
            assert_eq!(model.needs(&settings), needs * GB, "{what}");
            let fits = model.fitting(&settings, available * GB, &[]) == [settings];
            assert_eq!(fits, needs <= available, "{what}");
        }
        assert_eq!(settings(4, 1, 12, 2).effective_batch(), 96);
    }

    #[test]
    fn fewer_workers_come_before_a_smaller_batch() {
        let (model, wanted) = (model(8.0, 3.0, 1.0, 0.25), settings(4, 4, 16, 1));
        assert_eq!(model.fitting(&wanted, 44.0 * GB, &[]), [settings(4, 2, 16, 1), settings(4, 4, 8, 2)]);
        assert_eq!(model.fitting(&wanted, 28.0 * GB, &[]), [settings(4, 1, 4, 4)]);
        assert_eq!(model.fitting(&wanted, 20.0 * GB, &[]), []);
    }

    proptest! {
        #[test]
        fn each_proposal_fits_and_keeps_the_effective_batch(
            parts in (0.0..10.0, 0.0..10.0, 0.0..4.0, 0.0..0.5), ranks in 1..9_u64, workers in 0..17_u64,
            batch in 1..300_u64, accumulation in 1..9_u64, available in 0.0..200.0,
        ) {
            let model = model(parts.0, parts.1, parts.2, parts.3);
            let wanted = settings(ranks, workers, batch, accumulation);
            for proposal in model.fitting(&wanted, available * GB, &[]) {
                prop_assert!(model.needs(&proposal) <= available * GB);
                prop_assert_eq!(proposal.effective_batch(), wanted.effective_batch());
                prop_assert!(proposal.workers <= workers && proposal.batch <= batch);
            }
        }
    }
}
