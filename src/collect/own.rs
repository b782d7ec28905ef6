//! memledger's own process, under the standard `process_*` names.

use procfs::FromRead;
use procfs::process::Stat;
use rustix::process::{Resource, getrlimit};

use super::{Collector, Context, Outcome, Output};
use crate::catalog::*;
use crate::clock::Moment;
use crate::series::Series;
use std::time::Duration;

/// The own figures change slowly; they are read no more often.
const EVERY: Duration = Duration::from_secs(5);

/// The collector. Reads `/proc/self` of this mount namespace, not of the host's procfs.
#[derive(Debug, Default)]
pub struct Own {
    last: Option<(Moment, Figures)>,
    started: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Figures {
    cpu_seconds: f64,
    resident: u64,
    virtual_size: u64,
    open_fds: u64,
}

impl Own {
    fn read(&mut self) -> Option<Figures> {
        let stat = Stat::from_read(std::fs::File::open("/proc/self/stat").ok()?).ok()?;
        let ticks = rustix::param::clock_ticks_per_second();
        // since kernel 6.2 the size of the directory is the number of its entries
        let fds = std::fs::metadata("/proc/self/fd").ok()?.len();
        let open_fds = if fds > 0 { fds } else { std::fs::read_dir("/proc/self/fd").ok()?.count() as u64 };
        if self.started.is_none() {
            let boot = crate::host::Roots::default().boot_time().ok()?;
            self.started = Some(boot as f64 + stat.starttime as f64 / ticks as f64);
        }
        Some(Figures {
            cpu_seconds: (stat.utime + stat.stime) as f64 / ticks as f64,
            resident: stat.rss * rustix::param::page_size() as u64,
            virtual_size: stat.vsize,
            open_fds,
        })
    }

    fn write(&self, figures: Figures, series: &mut Series) {
        series.global(PROCESS_CPU, [], figures.cpu_seconds);
        series.global(PROCESS_RESIDENT, [], figures.resident as f64);
        series.global(PROCESS_VIRTUAL, [], figures.virtual_size as f64);
        series.global(PROCESS_OPEN_FDS, [], figures.open_fds as f64);
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            series.global(PROCESS_MAX_FDS, [], limit as f64);
        }
        if let Some(started) = self.started {
            series.global(PROCESS_START_TIME, [], started);
        }
    }
}

impl Collector for Own {
    fn name(&self) -> &'static str {
        "own"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        let cached = self.last.filter(|(at, _)| context.now.since(*at) < EVERY);
        let figures = match cached {
            Some((_, figures)) => figures,
            None => match self.read() {
                Some(figures) => {
                    self.last = Some((context.now, figures));
                    figures
                }
                None => return Outcome::Failed,
            },
        };
        self.write(figures, output.series);
        Outcome::Read
    }
}
