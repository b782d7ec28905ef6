//! Which containers are about to run out of memory: what holds on to the memory of their processes must not be read then.
//!
//! Who walks a process's memory keeps it from being freed until he is done, also when the kernel kills that process
//! meanwhile. The container is then still full, the victim is no longer there to wait for, and the kernel kills a second
//! process (docs/decisions/0017). So the walk waits while less than a part of the limit is left, or less than what was
//! taken in the last two cycles.

use std::collections::{HashMap, HashSet};

use super::{Context, Readings};
use crate::discover::ContainerId;

/// What must be left of a limit: one part of so many.
const PART: u64 = 32;
/// What must be left besides: what was taken since the cycle before, so many times.
const CYCLES: i64 = 2;

/// Memory of the host, as /proc/meminfo has it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// MemTotal.
    pub total: u64,
    /// MemAvailable.
    pub available: u64,
}

/// Watches how much is left.
#[derive(Debug, Default)]
pub struct Room {
    before: HashMap<ContainerId, i64>,
    host_before: Option<i64>,
}

/// Who is about to run out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tight {
    host: bool,
    containers: HashSet<ContainerId>,
}

impl Tight {
    /// True if this container is, or the whole host.
    pub fn is(&self, container: &ContainerId) -> bool {
        self.host || self.containers.contains(container)
    }
}

impl Room {
    /// Enters one cycle. What was not read is not known to be tight; a container whose cgroup is gone is.
    pub fn enter(&mut self, context: &Context<'_>, readings: &Readings) -> Tight {
        let host = readings.host.map(|host| (host.available as i64, host.total));
        let mut tight = Tight {
            host: host.is_some_and(|(left, total)| is_tight(left, total, self.host_before)),
            ..Tight::default()
        };
        self.host_before = host.map(|(left, _)| left);
        let before = std::mem::take(&mut self.before);
        for (container, memory) in std::iter::zip(&context.inventory.containers, &readings.memory) {
            let Some(memory) = memory else {
                tight.containers.insert(container.id.clone());
                continue;
            };
            let Some((left, limit)) = memory.headroom.zip(memory.effective_limit) else { continue };
            if is_tight(left, limit, before.get(&container.id).copied()) {
                tight.containers.insert(container.id.clone());
            }
            self.before.insert(container.id.clone(), left);
        }
        tight
    }
}

fn is_tight(left: i64, limit: u64, before: Option<i64>) -> bool {
    let taken = before.map_or(0, |before| before.saturating_sub(left).max(0));
    left < (limit / PART) as i64 || left < taken.saturating_mul(CYCLES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: i64 = 1 << 30;

    #[test]
    fn a_limit_of_which_a_thirty_second_is_left_is_tight() {
        assert!(!is_tight(GIB, 32 << 30, None));
        assert!(is_tight(GIB - 1, 32 << 30, None));
    }

    #[test]
    fn what_is_left_must_last_two_cycles_at_the_present_pace() {
        assert!(!is_tight(4 * GIB, 32 << 30, Some(6 * GIB)));
        assert!(is_tight(4 * GIB, 32 << 30, Some(7 * GIB)));
    }

    #[test]
    fn a_container_that_gives_back_or_stands_over_its_limit_is_judged_by_what_is_left() {
        assert!(!is_tight(4 * GIB, 32 << 30, Some(GIB)));
        assert!(is_tight(-1, 32 << 30, Some(-1)));
    }
}
