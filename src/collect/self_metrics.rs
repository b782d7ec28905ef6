//! memledger's own process, under the standard `process_*` names.

use procfs::FromRead;
use procfs::process::Stat;
use rustix::process::{Resource, getrlimit};

use super::{CollectOutcome, Collector, Context, Output};
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::series::Series;
use std::time::Duration;

/// Minimum interval between reads: these values change slowly.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// The collector. Reads `/proc/self` of its own mount namespace, not of the host's procfs.
#[derive(Debug, Default)]
pub struct SelfMetrics {
    last: Option<(Timestamp, SelfUsage)>,
    started: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct SelfUsage {
    cpu_seconds: f64,
    resident: u64,
    virtual_size: u64,
    open_fds: u64,
}

impl SelfMetrics {
    fn read(&mut self) -> Option<SelfUsage> {
        let stat = Stat::from_read(std::fs::File::open("/proc/self/stat").ok()?).ok()?;
        let ticks = rustix::param::clock_ticks_per_second();
        // since kernel 6.2 the size of the directory is the number of its entries
        let fds = std::fs::metadata("/proc/self/fd").ok()?.len();
        let open_fds = if fds > 0 { fds } else { std::fs::read_dir("/proc/self/fd").ok()?.count() as u64 };
        if self.started.is_none() {
            let boot = crate::host::HostPaths::default().boot_time().ok()?;
            self.started = Some(boot as f64 + stat.starttime as f64 / ticks as f64);
        }
        Some(SelfUsage {
            cpu_seconds: (stat.utime + stat.stime) as f64 / ticks as f64,
            resident: stat.rss * rustix::param::page_size() as u64,
            virtual_size: stat.vsize,
            open_fds,
        })
    }

    /// Writes the metrics of this process.
    pub fn record(&mut self, now: Timestamp, series: &mut Series) -> CollectOutcome {
        let cached = self.last.filter(|(at, _)| now.since(*at) < MIN_INTERVAL);
        let usage = match cached {
            Some((_, usage)) => usage,
            None => match self.read() {
                Some(usage) => {
                    self.last = Some((now, usage));
                    usage
                }
                None => return CollectOutcome::Failed,
            },
        };
        self.write(usage, series);
        CollectOutcome::Ok
    }

    fn write(&self, usage: SelfUsage, series: &mut Series) {
        series.global(PROCESS_CPU, [], usage.cpu_seconds);
        series.global(PROCESS_RESIDENT, [], usage.resident as f64);
        series.global(PROCESS_VIRTUAL, [], usage.virtual_size as f64);
        series.global(PROCESS_OPEN_FDS, [], usage.open_fds as f64);
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            series.global(PROCESS_MAX_FDS, [], limit as f64);
        }
        if let Some(started) = self.started {
            series.global(PROCESS_START_TIME, [], started);
        }
    }
}

impl Collector for SelfMetrics {
    fn name(&self) -> &'static str {
        "own"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        self.record(context.now, output.series)
    }
}
