//! What the samples before a kill show: growth, page cache, and who held the host's memory.

use serde::Serialize;

use crate::events::{Kill, MemoryHolder, PriorUsage, Role, UsageSample};

/// Page cache above this share of the usage may look like the cause.
const MIN_CACHE_SHARE: f64 = 0.1;
/// Growth below this share of the usage is ignored.
const MIN_GROWTH: f64 = 0.05;
/// Growth in less time is ignored.
const MIN_GROWTH_SECONDS: f64 = 60.0;

/// A fact of the samples before a kill.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum UsageFinding {
    /// It grew over the samples.
    Grew {
        /// At the first sample.
        from_bytes: u64,
        /// At the last sample.
        to_bytes: u64,
        /// Between the two.
        seconds: f64,
    },
    /// It grew after the last sample.
    GrewSuddenly {
        /// At the last sample.
        bytes: u64,
        /// From it to the kill.
        seconds: f64,
    },
    /// Page cache, which is not the cause.
    PageCache {
        /// At the last sample.
        bytes: u64,
    },
    /// What it held of its limit at the last sample.
    Held {
        /// What the kernel could not drop.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Workers of this container, where the limit is that of a cgroup above.
    WorkersHeld {
        /// Their role.
        role: Role,
        /// How many.
        processes: u32,
        /// Their proportional share.
        bytes: u64,
        /// The number of workers that is set.
        #[serde(skip_serializing_if = "Option::is_none")]
        num_workers: Option<String>,
    },
    /// The largest holders of the host's memory at the last sample.
    LargestHolders {
        /// The host's memory.
        #[serde(skip_serializing_if = "Option::is_none")]
        host_bytes: Option<u64>,
        /// The holders, the largest first.
        holders: Vec<LargestHolder>,
    },
    /// Only samples of `memledger serve` show the holders.
    HoldersNotSampled,
    /// An `oom_score_adj` that may have decided who was killed.
    Score {
        /// The role of the victim.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<Role>,
        /// Its `oom_score_adj`.
        oom_score_adj: i32,
        /// Kubernetes sets it.
        is_of_pod: bool,
    },
}

/// A holder of the host's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LargestHolder {
    /// Name of the container, or what is outside containers.
    pub name: String,
    /// Memory that the kernel could not reclaim.
    pub unreclaimable_bytes: u64,
    /// It is the container that the answer is about.
    pub is_own: bool,
}

impl LargestHolder {
    /// Returns a holder; `own`: the name of the container that the answer is about.
    pub(super) fn of(holder: &MemoryHolder, own: &str) -> Self {
        Self {
            name: holder.name.to_string(),
            unreclaimable_bytes: holder.unreclaimable_bytes,
            is_own: !own.is_empty() && &*holder.name == own,
        }
    }
}

/// Returns the newest sample before an event.
pub(super) fn newest_sample(before: Option<&PriorUsage>) -> Option<&UsageSample> {
    before.and_then(|before| before.samples.last())
}

/// Returns growth over the samples, which a higher limit only delays.
pub(super) fn growth(before: Option<&PriorUsage>) -> Option<UsageFinding> {
    let (first, last) = (before?.samples.first()?, newest_sample(before)?);
    let (from_bytes, to_bytes) = (first.unreclaimable_bytes?, last.unreclaimable_bytes?);
    let seconds = last.at - first.at;
    let is_growth = to_bytes.saturating_sub(from_bytes) as f64 >= MIN_GROWTH * to_bytes as f64;
    (seconds >= MIN_GROWTH_SECONDS && is_growth).then_some(UsageFinding::Grew {
        from_bytes,
        to_bytes,
        seconds,
    })
}

/// Returns growth after the last sample.
pub(super) fn sudden(kill: &Kill, before: Option<&PriorUsage>) -> Option<UsageFinding> {
    let last = newest_sample(before)?;
    let (bytes, limit) = (last.unreclaimable_bytes?, kill.limit_bytes?);
    let seconds = kill.at - last.at;
    (seconds >= 0.0 && bytes < limit.div_ceil(2)).then_some(UsageFinding::GrewSuddenly { bytes, seconds })
}

/// Returns page cache that may look like the cause. The kernel's report has the page cache at the kill.
pub(super) fn page_cache(kill: &Kill, before: Option<&PriorUsage>) -> Option<UsageFinding> {
    let last = newest_sample(before).filter(|_| kill.report.is_none())?;
    let is_much = |bytes: &u64| *bytes as f64 >= MIN_CACHE_SHARE * last.usage_bytes as f64;
    last.file_bytes.filter(is_much).map(|bytes| UsageFinding::PageCache { bytes })
}
