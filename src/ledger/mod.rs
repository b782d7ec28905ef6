//! What must outlive a cycle: peaks, the faces of containers that ended, how many GPUs there once were.
//!
//! In memory for now. The ledger of OOM kills and exits, with its store, gets its room here.

mod containers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub use containers::Ended;

use crate::attribute::Attribution;
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::{Context, Readings};
use crate::discover::Container;
use crate::series::Series;

/// The ledger.
#[derive(Debug)]
pub struct Ledger {
    containers: containers::Books,
    gpus_expected: usize,
    races: BTreeMap<Arc<str>, u64>,
    /// When the reading that was entered last was complete: several cycles may see one reading.
    gpus_read: Option<Moment>,
}

impl Ledger {
    /// An empty ledger that keeps ended containers so long.
    pub fn new(keep_ended: Duration) -> Self {
        Self {
            containers: containers::Books::new(keep_ended),
            gpus_expected: 0,
            races: BTreeMap::new(),
            gpus_read: None,
        }
    }

    /// Enters one cycle and writes what the ledger knows. Returns the ended containers that are still shown; their
    /// numbers follow those of the running ones.
    pub fn enter(
        &mut self,
        context: &Context<'_>,
        ended: &[Arc<Container>],
        readings: &Readings,
        attribution: &Attribution,
        series: &mut Series,
    ) -> Vec<Arc<Container>> {
        self.enter_gpus(readings, attribution, series);
        self.containers.enter(context, ended, readings);
        self.containers.write(context, series)
    }

    fn enter_gpus(&mut self, readings: &Readings, attribution: &Attribution, series: &mut Series) {
        if let Some(reading) = &readings.gpu {
            if self.gpus_read.replace(reading.at) != Some(reading.at) {
                for uuid in &attribution.raced {
                    *self.races.entry(Arc::clone(uuid)).or_insert(0) += 1;
                }
            }
            self.gpus_expected = self.gpus_expected.max(reading.counted);
            series.global(GPUS_VISIBLE, [], reading.devices.len() as f64);
            for (gpu, device) in reading.devices.iter().enumerate() {
                let races = *self.races.entry(Arc::clone(&device.identity.uuid)).or_insert(0);
                series.gpu(GPU_BOOKS_RACES, gpu as u32, [], races as f64);
            }
        }
        if self.gpus_expected > 0 {
            series.global(GPUS_EXPECTED, [], self.gpus_expected as f64);
        }
    }
}
