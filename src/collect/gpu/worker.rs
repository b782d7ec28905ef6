//! The thread that talks to the driver.
//!
//! It may hang in a call for ever. Everything it shares is behind a lock that is never held during a call, so that a
//! hang leaves the last answer readable and ageing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Reading, nvml};
use crate::clock::Moment;
use crate::config::GpuSettings;
use crate::host::Roots;

/// Pause before the library is tried again: the first, doubling up to the last.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The cycle's end of the thread.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    latest: Option<Arc<Reading>>,
    faults: Vec<&'static str>,
    /// An answer, or a clear *no* from the library, has come at least once.
    answered: bool,
    waits_since: Option<Moment>,
}

impl Worker {
    /// Starts the thread. It ends with the process.
    pub fn start(settings: GpuSettings, roots: Roots, cgroup_v1: bool) -> Self {
        let shared = Arc::new(Mutex::new(Shared { waits_since: Some(Moment::now()), ..Shared::default() }));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nvml".into()).stack_size(1024 * 1024);
        if let Err(error) = thread.spawn(move || run(&settings, &roots, cgroup_v1, &theirs)) {
            tracing::warn!(%error, "no thread for the GPU driver");
        }
        Self { shared }
    }

    /// The newest answer, however old.
    pub fn latest(&self) -> Option<Arc<Reading>> {
        lock(&self.shared).latest.clone()
    }

    /// Faults since they were last taken.
    pub fn take_faults(&self) -> Vec<&'static str> {
        std::mem::take(&mut lock(&self.shared).faults)
    }

    /// True once the library has answered, be it with an error.
    pub fn has_answered(&self) -> bool {
        lock(&self.shared).answered
    }

    /// When the thread was started.
    pub fn waits_since(&self) -> Option<Moment> {
        lock(&self.shared).waits_since
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the library again and again; while it is open, reads it at every interval.
fn run(settings: &GpuSettings, roots: &Roots, cgroup_v1: bool, shared: &Mutex<Shared>) {
    let mut pause = RETRY.0;
    let mut told = String::new();
    loop {
        match nvml::Session::open(settings.library.as_deref()) {
            Ok(mut session) => {
                tracing::info!("GPU driver opened");
                if !roots.in_first_pid_namespace() {
                    tracing::warn!(
                        "GPU memory stays unattributed: memledger does not run in the host's pid namespace; start it with --pid=host, or hostPID: true on Kubernetes"
                    );
                }
                pause = RETRY.0;
                told.clear();
                let error = read_until_it_fails(&mut session, settings, roots, cgroup_v1, shared);
                tracing::warn!(error = %nvml::describe(&error), "GPU driver lost, trying again");
                let mut shared = lock(shared);
                shared.latest = None;
                shared.faults.push("io");
            }
            Err(error) => {
                let text = nvml::describe(&error);
                let mut shared = lock(shared);
                shared.answered = true;
                if text != told {
                    tracing::info!(reason = %text, "no GPU driver; memory of the host and its containers goes on");
                    told = text;
                }
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(RETRY.1);
    }
}

fn read_until_it_fails(
    session: &mut nvml::Session,
    settings: &GpuSettings,
    roots: &Roots,
    cgroup_v1: bool,
    shared: &Mutex<Shared>,
) -> nvml_wrapper::error::NvmlError {
    loop {
        let began = Moment::now();
        match session.read(roots, cgroup_v1) {
            Ok(reading) => {
                let mut shared = lock(shared);
                shared.answered = true;
                shared.faults.extend(reading.faults.iter());
                shared.faults.truncate(1_000);
                shared.latest = Some(Arc::new(reading));
            }
            Err(error) => return error,
        }
        let took = Moment::now().since(began);
        std::thread::sleep(settings.interval.saturating_sub(took).max(settings.interval / 4));
    }
}
