//! Utilization of a GPU and of each process on it, from the work of its engines for each client between two readings.
//!
//! A GPU has several engines (render, compute, copy, video) that work in parallel, so their shares do not add up to one
//! value. The GPU's utilization here is that of the busiest engine over all clients, and a process's utilization is its
//! share of that engine. So the shares of the processes add up to the GPU's.
//!
//! A driver may report a smaller value than before for a while (the kernel's documentation allows it): then the larger
//! value stays. A client has no share at its first reading.
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::client_memory::CardClient;
use super::drm_process::DrmProcessKey;
use crate::clock::Timestamp;
use crate::parse::drm::Engine;

/// GPU, client, and engine.
type EngineKey = (Arc<str>, Vec<u8>, Vec<u8>);

/// The work of an engine for a client, and the time in the same unit: nanoseconds, or cycles if the driver counts those.
type EngineSample = (u64, u64);

/// The engines' counters at the previous reading.
#[derive(Debug, Default)]
pub struct Engines {
    previous: HashMap<EngineKey, EngineSample>,
    current: HashMap<EngineKey, EngineSample>,
}

/// The utilization of a GPU between two readings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// The share of time in which the busiest engine worked, from 0 to 1.
    pub busy: Option<f64>,
    /// The part of each process. Processes that have only new clients are omitted.
    pub by_process: BTreeMap<DrmProcessKey, f64>,
}

impl Engines {
    /// Returns the work of the clients of one GPU since the previous reading. `at`: when they were read.
    pub fn work(&mut self, gpu: &Arc<str>, clients: &[CardClient<'_>], at: Timestamp) -> Work {
        let mut by_engine: BTreeMap<&[u8], BTreeMap<DrmProcessKey, f64>> = BTreeMap::new();
        for (process, client) in clients {
            let Some(id) = &client.id else { continue };
            for (name, engine) in &client.engines {
                if let Some(share) = self.share((Arc::clone(gpu), id.clone(), name.clone()), engine, at) {
                    *by_engine.entry(name).or_default().entry(*process).or_insert(0.0) += share;
                }
            }
        }
        let sum = |shares: &BTreeMap<DrmProcessKey, f64>| shares.values().sum::<f64>();
        let busiest = by_engine.into_values().max_by(|a, b| sum(a).total_cmp(&sum(b)));
        let Some(mut by_process) = busiest else { return Work::default() };
        let total = sum(&by_process);
        if total > 1.0 {
            // an engine with several queues, whose number the driver does not report
            by_process.values_mut().for_each(|share| *share /= total);
        }
        Work { busy: Some(total.min(1.0)), by_process }
    }

    /// Ends a reading after the last GPU. Clients that are gone are forgotten.
    pub fn end_reading(&mut self) {
        self.previous = std::mem::take(&mut self.current);
    }

    /// Returns the share of the time since the previous reading that an engine worked for a client.
    fn share(&mut self, key: EngineKey, engine: &Engine, at: Timestamp) -> Option<f64> {
        let (busy, time) = match (engine.busy_ns, engine.cycles) {
            (Some(busy), _) => (busy, at.kernel_usec() * 1_000),
            (None, Some(busy)) => (busy, engine.total_cycles?),
            _ => return None,
        };
        let previous = self.previous.get(&key).copied();
        let busy = busy.max(previous.map_or(0, |(busy, _)| busy));
        self.current.insert(key, (busy, time));
        let (busy_before, time_before) = previous?;
        let available = time.checked_sub(time_before)? as f64 * engine.capacity.unwrap_or(1) as f64;
        (available > 0.0).then(|| (busy - busy_before) as f64 / available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::drm::DrmClient;
    use std::time::Duration;

    /// A client of a process.
    type Descriptor = (DrmProcessKey, DrmClient);

    /// Returns a client `id` of `pid` with these lines of its fdinfo.
    fn client(pid: u32, id: u32, lines: &str) -> Descriptor {
        let text = format!("drm-driver: i915\ndrm-client-id: {id}\n{lines}");
        let process = DrmProcessKey { start_ticks: u64::from(pid), pid };
        (process, DrmClient::parse(text.as_bytes()).unwrap())
    }

    /// Takes readings one second apart and returns the work at the last of them, in percent.
    fn percent_after(readings: &[&[Descriptor]]) -> (Option<i64>, Vec<(u32, i64)>) {
        let mut engines = Engines::default();
        let (mut at, mut work) = (Timestamp::now(), Work::default());
        for descriptors in readings {
            let clients: Vec<_> = descriptors.iter().map(|(process, client)| (*process, client)).collect();
            work = engines.work(&"gpu".into(), &clients, at);
            engines.end_reading();
            at = at.plus(Duration::from_secs(1));
        }
        let percent = |share: f64| (share * 100.0).round() as i64;
        (
            work.busy.map(percent),
            work.by_process.iter().map(|(key, share)| (key.pid, percent(*share))).collect(),
        )
    }

    fn ns(render: u64, copy: u64) -> String {
        format!("drm-engine-render: {render} ns\ndrm-engine-copy: {copy} ns\n")
    }

    #[test]
    fn process_shares_add_up_to_the_busiest_engine() {
        let first = [client(7, 1, &ns(0, 0)), client(8, 2, &ns(0, 0)), client(8, 3, &ns(0, 0))];
        let then = [
            client(7, 1, &ns(300_000_000, 900_000_000)),
            client(8, 2, &ns(400_000_000, 0)),
            client(8, 3, &ns(250_000_000, 0)),
        ];
        assert_eq!(percent_after(&[&first, &then]), (Some(95), vec![(7, 30), (8, 65)]));
    }

    #[test]
    fn new_client_has_no_share_and_idle_is_zero() {
        let idle = [client(7, 1, &ns(5, 5))];
        assert_eq!(percent_after(&[&idle]), (None, vec![]));
        assert_eq!(percent_after(&[&idle, &idle]), (Some(0), vec![(7, 0)]));
        let with_new = [client(7, 1, &ns(5, 5)), client(8, 2, &ns(999_999_999, 0))];
        assert_eq!(percent_after(&[&idle, &with_new]), (Some(0), vec![(7, 0)]));
        assert_eq!(
            percent_after(&[&[client(7, 1, "")], &[client(7, 1, "")]]),
            (None, vec![]),
            "no engines, no value"
        );
    }

    #[test]
    fn divides_cycles_by_elapsed_cycles() {
        let cycles = |busy: u64, elapsed: u64| {
            [client(7, 1, &format!("drm-cycles-rcs: {busy}\ndrm-total-cycles-rcs: {elapsed}\n"))]
        };
        assert_eq!(percent_after(&[&cycles(10, 1_000), &cycles(60, 1_200)]), (Some(25), vec![(7, 25)]));
        assert_eq!(
            percent_after(&[&cycles(10, 1_000), &cycles(60, 1_000)]),
            (None, vec![]),
            "no cycle elapsed"
        );
        assert_eq!(
            percent_after(&[&cycles(10, 1_000), &cycles(60, 900)]),
            (None, vec![]),
            "the counter was reset"
        );
        assert_eq!(
            percent_after(&[&[client(7, 1, "drm-cycles-rcs: 1\n")], &[client(7, 1, "drm-cycles-rcs: 2\n")]])
                .0,
            None
        );
    }

    #[test]
    fn divides_by_the_capacity_of_an_engine() {
        let lines = |busy: u64| {
            [client(7, 1, &format!("drm-engine-video: {busy} ns\ndrm-engine-capacity-video: 4\n"))]
        };
        assert_eq!(percent_after(&[&lines(0), &lines(1_000_000_000)]), (Some(25), vec![(7, 25)]));
    }

    #[test]
    fn scales_shares_down_to_one() {
        let first = [client(7, 1, &ns(0, 0)), client(8, 2, &ns(0, 0))];
        let then = [client(7, 1, &ns(3_000_000_000, 0)), client(8, 2, &ns(1_000_000_000, 0))];
        assert_eq!(percent_after(&[&first, &then]), (Some(100), vec![(7, 75), (8, 25)]));
    }

    #[test]
    fn keeps_the_larger_value_when_a_counter_decreases() {
        let at = |busy: u64| [client(7, 1, &ns(busy, 0))];
        assert_eq!(percent_after(&[&at(500_000_000), &at(400_000_000)]).0, Some(0));
        assert_eq!(percent_after(&[&at(500_000_000), &at(400_000_000), &at(600_000_000)]).0, Some(10));
    }

    #[test]
    fn forgets_a_client_that_is_gone() {
        let at = |busy: u64| [client(7, 1, &ns(busy, 0))];
        assert_eq!(percent_after(&[&at(0), &[], &at(600_000_000)]).0, None);
    }
}
