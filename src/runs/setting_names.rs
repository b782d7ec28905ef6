//! The names that programs give to settings of a training, and which settings its memory depends on.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Settings of a run by name, in lower case.
type RunSettingMap = BTreeMap<Arc<str>, Arc<str>>;

/// A setting that advice computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownSetting {
    /// Samples of one rank at a time.
    Batch,
    /// Steps over which gradients are accumulated.
    Accumulation,
    /// DataLoader workers of a rank.
    Workers,
    /// Ranks.
    Devices,
    /// Precision of the numbers.
    Precision,
}

impl KnownSetting {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Batch, Self::Accumulation, Self::Workers, Self::Devices, Self::Precision];

    /// Returns its names: memledger's own, then those of trainers and of people. A batch of all ranks has another name and is none.
    const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Batch => &[
                "batch_size",
                "per_device_train_batch_size",
                "per_gpu_train_batch_size",
                "micro_batch_size",
                "train_micro_batch_size_per_gpu",
                "microbatch_size",
                "batch_size_per_gpu",
                "batch",
                "bs",
            ],
            Self::Accumulation => &[
                "accum",
                "gradient_accumulation_steps",
                "accumulate_grad_batches",
                "grad_accum",
                "grad_accum_steps",
                "grad_accumulation_steps",
                "accumulation_steps",
                "accum_steps",
                "gradient_accumulation",
            ],
            Self::Workers => &["num_workers", "dataloader_num_workers", "workers", "n_workers"],
            Self::Devices => &["num_devices", "devices", "num_gpus", "n_gpus", "gpus", "nproc_per_node"],
            Self::Precision => &[
                "precision",
                "mixed_precision",
                "use_mixed_precision",
                "use_amp",
                "amp",
                "dtype",
                "torch_dtype",
                "amp_dtype",
            ],
        }
    }

    /// Returns which setting has this name; `None` for another one.
    pub fn of(name: &str) -> Option<Self> {
        let key = key(name);
        Self::ALL.into_iter().find(|known| known.names().contains(&&*key))
    }

    /// Returns name and value in these settings; of several names the first that is known.
    pub fn find<'a>(
        self,
        settings: impl IntoIterator<Item = (&'a Arc<str>, &'a Arc<str>)>,
    ) -> Option<(&'a str, &'a str)> {
        let rank = |name: &str| self.names().iter().position(|known| **known == *key(name));
        let ranked = settings.into_iter().filter_map(|(name, value)| Some((rank(name)?, &**name, &**value)));
        ranked.min_by_key(|(rank, ..)| *rank).map(|(_, name, value)| (name, value))
    }

    /// Returns its name as a program with these settings has it: memledger's own as a variable of the environment.
    pub fn word<'a>(
        self,
        settings: impl IntoIterator<Item = (&'a Arc<str>, &'a Arc<str>)> + Clone,
    ) -> String {
        let own = self.names()[0];
        match self.find(settings.clone()) {
            Some((name, _)) if name != own => name.to_owned(),
            // beside a batch with the name of a trainer, that of the same trainer
            None if self == Self::Accumulation
                && Self::Batch.find(settings).is_some_and(|(name, _)| name.contains("per_device")) =>
            {
                "gradient_accumulation_steps".to_owned()
            }
            _ => own.to_uppercase(),
        }
    }
}

/// Settings that cannot change how much memory a training takes.
const WITHOUT_MEMORY: [&str; 50] = [
    "lr",
    "learning_rate",
    "base_lr",
    "max_lr",
    "min_lr",
    "warmup",
    "warmup_steps",
    "warmup_ratio",
    "weight_decay",
    "wd",
    "momentum",
    "beta1",
    "beta2",
    "adam_beta1",
    "adam_beta2",
    "eps",
    "adam_epsilon",
    "gamma",
    "scheduler",
    "lr_scheduler",
    "lr_scheduler_type",
    "seed",
    "random_seed",
    "data_seed",
    "epochs",
    "num_epochs",
    "max_epochs",
    "num_train_epochs",
    "max_steps",
    "steps",
    "num_steps",
    "total_steps",
    "max_grad_norm",
    "clip_grad_norm",
    "gradient_clip_val",
    "name",
    "run_name",
    "run_id",
    "experiment",
    "experiment_name",
    "exp_name",
    "project",
    "tag",
    "tags",
    "notes",
    "date",
    "time",
    "timestamp",
    "output_dir",
    "log_dir",
];

/// Returns the last part of a name, as of `trainer.max_epochs`, with `_` between its words.
fn key(name: &str) -> String {
    name.rsplit('.').next().unwrap_or(name).replace('-', "_")
}

/// Returns the settings that the memory of a run depends on; those that advice knows have memledger's name.
pub fn of_memory(settings: &RunSettingMap) -> BTreeMap<String, &str> {
    let relevant = settings.iter().filter(|(name, _)| !WITHOUT_MEMORY.contains(&&*key(name)));
    relevant
        .map(|(name, value)| {
            (KnownSetting::of(name).map_or(&**name, |known| known.names()[0]).to_owned(), &**value)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> RunSettingMap {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn names_of_trainers_and_people_are_known() {
        for (name, known, word) in [
            ("batch_size", KnownSetting::Batch, "BATCH_SIZE"),
            ("per_device_train_batch_size", KnownSetting::Batch, "per_device_train_batch_size"),
            ("data.batch-size", KnownSetting::Batch, "data.batch-size"),
            ("gradient_accumulation_steps", KnownSetting::Accumulation, "gradient_accumulation_steps"),
            ("accumulate_grad_batches", KnownSetting::Accumulation, "accumulate_grad_batches"),
            ("dataloader_num_workers", KnownSetting::Workers, "dataloader_num_workers"),
            ("trainer.devices", KnownSetting::Devices, "trainer.devices"),
        ] {
            let settings = settings(&[(name, "4"), ("train_batch_size", "512"), ("lr", "0.1")]);
            assert_eq!(known.find(&settings), Some((name, "4")));
            assert_eq!(known.word(&settings), word);
        }
        let both = settings(&[("bs", "1"), ("batch_size", "2")]);
        assert_eq!(KnownSetting::Batch.find(&both), Some(("batch_size", "2")));
        let trainer = settings(&[("per_device_train_batch_size", "8")]);
        assert_eq!(KnownSetting::Accumulation.word(&trainer), "gradient_accumulation_steps");
        assert_eq!(KnownSetting::Accumulation.word(&settings(&[("batch_size", "8")])), "ACCUM");
    }

    #[test]
    fn settings_without_memory_do_not_count() {
        let one = settings(&[
            ("batch_size", "8"),
            ("lr", "1e-3"),
            ("optim.seed", "1"),
            ("run_name", "a"),
            ("seq_len", "512"),
        ]);
        let other = settings(&[
            ("per_device_train_batch_size", "8"),
            ("lr", "2e-3"),
            ("epochs", "3"),
            ("seq_len", "512"),
        ]);
        assert_eq!(of_memory(&one), of_memory(&other));
        assert_eq!(of_memory(&one).len(), 2);
    }
}
