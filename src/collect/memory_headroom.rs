//! Detects containers that are close to their memory limit, so that `smaps_rollup` of their processes is not read.
//!
//! Walking the memory of a process delays freeing it until the walk ends, also if the kernel kills that process
//! meanwhile. The container is then still full, the victim has already exited so the kernel does not wait for it, and
//! the kernel kills a second process (docs/decisions/0017). So the walk is skipped while less than a fraction of the
//! limit is free, or less than the growth of two cycles.

use std::collections::{HashMap, HashSet};

use super::{Context, CycleData};
use crate::discover::ContainerId;

/// Headroom is low below this fraction of the limit: one part in this many.
const MIN_FREE_DIVISOR: u64 = 32;
/// Headroom is also low if it covers less than this many cycles of the present growth.
const MIN_FREE_CYCLES: i64 = 2;

/// Tracks the headroom of the host and of each container.
#[derive(Debug, Default)]
pub struct MemoryHeadroom {
    before: HashMap<ContainerId, i64>,
    host_before: Option<i64>,
}

/// The containers with low headroom in one cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LowHeadroom {
    host: bool,
    containers: HashSet<ContainerId>,
}

impl LowHeadroom {
    /// Returns true if the headroom of this container or of the whole host is low.
    pub fn contains(&self, container: &ContainerId) -> bool {
        self.host || self.containers.contains(container)
    }
}

impl MemoryHeadroom {
    /// Updates the headroom with the data of one cycle. A container whose memory was not read counts as low: its cgroup
    /// may be gone. A container without a limit does not.
    pub fn update(&mut self, context: &Context<'_>, cycle_data: &CycleData) -> LowHeadroom {
        let host = cycle_data.host.and_then(|host| Some((host.available? as i64, host.total)));
        let mut low = LowHeadroom {
            host: host.is_some_and(|(left, total)| is_low(left, total, self.host_before)),
            ..LowHeadroom::default()
        };
        self.host_before = host.map(|(left, _)| left);
        let before = std::mem::take(&mut self.before);
        for (container, memory) in std::iter::zip(&context.inventory.containers, &cycle_data.memory) {
            let Some(memory) = memory else {
                low.containers.insert(container.id.clone());
                continue;
            };
            let Some((left, limit)) = memory.headroom.zip(memory.effective_limit) else { continue };
            if is_low(left, limit, before.get(&container.id).copied()) {
                low.containers.insert(container.id.clone());
            }
            self.before.insert(container.id.clone(), left);
        }
        low
    }
}

fn is_low(left: i64, limit: u64, before: Option<i64>) -> bool {
    let growth = before.map_or(0, |before| before.saturating_sub(left).max(0));
    left < (limit / MIN_FREE_DIVISOR) as i64 || left < growth.saturating_mul(MIN_FREE_CYCLES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: i64 = 1 << 30;

    #[test]
    fn headroom_is_low_below_a_thirty_second_of_limit() {
        assert!(!is_low(GIB, 32 << 30, None));
        assert!(is_low(GIB - 1, 32 << 30, None));
    }

    #[test]
    fn headroom_is_low_below_growth_of_two_cycles() {
        assert!(!is_low(4 * GIB, 32 << 30, Some(6 * GIB)));
        assert!(is_low(4 * GIB, 32 << 30, Some(7 * GIB)));
    }

    #[test]
    fn falling_usage_or_exceeded_limit_uses_remaining_headroom() {
        assert!(!is_low(4 * GIB, 32 << 30, Some(GIB)));
        assert!(is_low(-1, 32 << 30, Some(-1)));
    }
}
