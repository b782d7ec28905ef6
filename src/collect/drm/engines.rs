//! How busy a GPU is, and whose work it is, from what its engines did for each client between two readings.
//!
//! A GPU has engines of several names (render, compute, copy, video), which work side by side; their shares do not add up
//! to one figure. The figure here is that of the engine that had most to do over all clients, and a process's share is its
//! share of that engine: so the shares of processes add up to the GPU's.
//!
//! A driver may tell a smaller value than before for a while (the kernel's documentation allows it): then the larger one
//! stands. A client that is seen for the first time has no share yet.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::books::{Descriptor, Key};
use crate::clock::Moment;
use crate::parse::drm::Engine;

/// GPU, client, and engine.
type Place = (Arc<str>, Vec<u8>, Vec<u8>);

#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Nanoseconds or cycles of work.
    worked: u64,
    /// Cycles that went by, if the driver counts those and not time.
    went_by: Option<u64>,
    at: Moment,
}

/// What the engines had done at the reading before.
#[derive(Debug, Default)]
pub struct Engines {
    before: HashMap<Place, Sample>,
    now: HashMap<Place, Sample>,
}

/// Who made a GPU busy between two readings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// The busiest engine's share of the time, from 0 to 1.
    pub busy: Option<f64>,
    /// Of it, by process. Processes whose clients are all new are left out.
    pub by_process: BTreeMap<Key, f64>,
}

impl Engines {
    /// What the clients of one GPU did since the reading before. `at`: when they were read.
    pub fn work(&mut self, gpu: &Arc<str>, clients: &[&Descriptor], at: Moment) -> Work {
        let mut by_engine: BTreeMap<&[u8], BTreeMap<Key, f64>> = BTreeMap::new();
        for descriptor in clients {
            let Some(id) = &descriptor.client.id else { continue };
            for engine in &descriptor.client.engines {
                let place = (Arc::clone(gpu), id.clone(), engine.name.clone());
                if let Some(share) = self.share(place, engine, at) {
                    let of_engine = by_engine.entry(&engine.name).or_default();
                    *of_engine.entry(descriptor.holder).or_insert(0.0) += share;
                }
            }
        }
        let sum = |shares: &BTreeMap<Key, f64>| shares.values().sum::<f64>();
        let busiest = by_engine.into_values().max_by(|a, b| sum(a).total_cmp(&sum(b)));
        let Some(mut by_process) = busiest else { return Work::default() };
        let all = sum(&by_process);
        if all > 1.0 {
            // an engine with several queues whose driver does not tell how many
            by_process.values_mut().for_each(|share| *share /= all);
        }
        Work { busy: Some(all.min(1.0)), by_process }
    }

    /// All GPUs of this reading were asked for: clients that are gone are forgotten.
    pub fn end_reading(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    /// The part of the time since the reading before that an engine worked for a client.
    fn share(&mut self, place: Place, engine: &Engine, at: Moment) -> Option<f64> {
        let (worked, went_by) = match (engine.busy_ns, engine.cycles, engine.total_cycles) {
            (Some(worked), ..) => (worked, None),
            (None, Some(worked), Some(went_by)) => (worked, Some(went_by)),
            _ => return None,
        };
        let Some(before) = self.before.get(&place).copied() else {
            self.now.insert(place, Sample { worked, went_by, at });
            return None;
        };
        let sample = Sample { worked: worked.max(before.worked), went_by, at };
        self.now.insert(place, sample);
        let whole = match (before.went_by, went_by) {
            (Some(before), Some(now)) => now.checked_sub(before)? as f64,
            (None, None) => at.since(before.at).as_nanos() as f64,
            _ => return None,
        };
        let whole = whole * engine.capacity.map_or(1.0, |capacity| capacity as f64);
        (whole > 0.0).then(|| (sample.worked - before.worked) as f64 / whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::drm::Client;
    use std::time::Duration;

    /// A client `id` of `pid` with these lines of its fdinfo.
    fn client(pid: u32, id: u32, lines: &str) -> Descriptor {
        let text = format!("drm-driver: i915\ndrm-client-id: {id}\n{lines}");
        let holder = Key { start_ticks: u64::from(pid), pid };
        Descriptor { holder, client: Client::parse(text.as_bytes()).unwrap() }
    }

    /// Readings one second apart; the work at the last of them, as percent.
    fn after(readings: &[&[Descriptor]]) -> (Option<i64>, Vec<(u32, i64)>) {
        let mut engines = Engines::default();
        let (mut at, mut work) = (Moment::now(), Work::default());
        for descriptors in readings {
            let all: Vec<_> = descriptors.iter().collect();
            work = engines.work(&"gpu".into(), &all, at);
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
    fn the_busiest_engine_counts_and_the_shares_of_processes_add_up_to_it() {
        let first = [client(7, 1, &ns(0, 0)), client(8, 2, &ns(0, 0)), client(8, 3, &ns(0, 0))];
        let then = [
            client(7, 1, &ns(300_000_000, 900_000_000)),
            client(8, 2, &ns(400_000_000, 0)),
            client(8, 3, &ns(250_000_000, 0)),
        ];
        assert_eq!(after(&[&first, &then]), (Some(95), vec![(7, 30), (8, 65)]));
    }

    #[test]
    fn what_is_seen_once_has_no_share_and_idle_is_zero() {
        let idle = [client(7, 1, &ns(5, 5))];
        assert_eq!(after(&[&idle]), (None, vec![]));
        assert_eq!(after(&[&idle, &idle]), (Some(0), vec![(7, 0)]));
        let with_new = [client(7, 1, &ns(5, 5)), client(8, 2, &ns(999_999_999, 0))];
        assert_eq!(after(&[&idle, &with_new]), (Some(0), vec![(7, 0)]));
        assert_eq!(
            after(&[&[client(7, 1, "")], &[client(7, 1, "")]]),
            (None, vec![]),
            "no engines, no figure"
        );
    }

    #[test]
    fn cycles_are_measured_by_the_cycles_that_went_by() {
        let cycles = |worked: u64, went_by: u64| {
            [client(7, 1, &format!("drm-cycles-rcs: {worked}\ndrm-total-cycles-rcs: {went_by}\n"))]
        };
        assert_eq!(after(&[&cycles(10, 1_000), &cycles(60, 1_200)]), (Some(25), vec![(7, 25)]));
        assert_eq!(after(&[&cycles(10, 1_000), &cycles(60, 1_000)]), (None, vec![]), "no cycle went by");
        assert_eq!(after(&[&cycles(10, 1_000), &cycles(60, 900)]), (None, vec![]), "the counter was reset");
        assert_eq!(
            after(&[&[client(7, 1, "drm-cycles-rcs: 1\n")], &[client(7, 1, "drm-cycles-rcs: 2\n")]]).0,
            None
        );
    }

    #[test]
    fn engines_of_one_name_share_the_work() {
        let lines = |busy: u64| {
            [client(7, 1, &format!("drm-engine-video: {busy} ns\ndrm-engine-capacity-video: 4\n"))]
        };
        assert_eq!(after(&[&lines(0), &lines(1_000_000_000)]), (Some(25), vec![(7, 25)]));
    }

    #[test]
    fn more_work_than_time_is_shared_out_over_the_whole() {
        let first = [client(7, 1, &ns(0, 0)), client(8, 2, &ns(0, 0))];
        let then = [client(7, 1, &ns(3_000_000_000, 0)), client(8, 2, &ns(1_000_000_000, 0))];
        assert_eq!(after(&[&first, &then]), (Some(100), vec![(7, 75), (8, 25)]));
    }

    #[test]
    fn a_value_that_falls_back_stands_still_until_it_is_caught_up() {
        let at = |busy: u64| [client(7, 1, &ns(busy, 0))];
        assert_eq!(after(&[&at(500_000_000), &at(400_000_000)]).0, Some(0));
        assert_eq!(after(&[&at(500_000_000), &at(400_000_000), &at(600_000_000)]).0, Some(10));
    }

    #[test]
    fn a_client_that_went_is_forgotten() {
        let at = |busy: u64| [client(7, 1, &ns(busy, 0))];
        assert_eq!(after(&[&at(0), &[], &at(600_000_000)]).0, None);
    }
}
