//! The thread that talks to the driver.
//!
//! It may hang in a call for ever. Everything it shares is behind a lock that is never held during a call, so that a
//! hang leaves the last answer readable and ageing.
//!
//! While a call hangs, a second thread would only hang beside it. So there is another one only once the library's file
//! was replaced: then the old thread is left where it is, and ends should its call ever return.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvml_wrapper::error::NvmlError;

use super::control::Control;
use super::health::Totals;
use super::nvml::library::Library;
use super::nvml::{Session, describe};
use super::owners::Owners;
use super::probe::Probe;
use super::reading::{Reading, Sample};
use crate::clock::Moment;
use crate::config::GpuSettings;
use crate::host::Roots;

/// Pause before the library is tried again: the first, doubling up to the last.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Samples that wait for a cycle; a cycle that is later than that loses the oldest.
const MOST_SAMPLES: usize = 2_000;
/// Threads that hang in a library that was replaced, at most.
const MOST_ABANDONED: usize = 3;
/// A quick look is followed by a rest of so many times its own length, however short the sampling interval is.
const REST: u32 = 4;

/// What a worker needs to know.
#[derive(Clone, Debug)]
struct Task {
    settings: GpuSettings,
    roots: Roots,
    cgroup_v1: bool,
    control: Arc<Control>,
}

/// The cycle's end of the thread.
#[derive(Debug)]
pub struct Worker {
    task: Task,
    shared: Arc<Shared>,
    /// Threads that hang in a library that was replaced.
    abandoned: Vec<Arc<Shared>>,
}

/// What the cycle finds when it looks.
#[derive(Debug)]
pub struct Look {
    /// The newest answer, however old.
    pub latest: Option<Arc<Reading>>,
    /// What was held since the last look, oldest first; the newest answer is among it, once.
    pub samples: Vec<Sample>,
    /// Faults since the last look.
    pub faults: Vec<&'static str>,
    /// The library has answered at least once, be it with an error.
    pub answered: bool,
    /// When the thread was started.
    pub waits_since: Moment,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    latest: Option<Arc<Reading>>,
    samples: VecDeque<Sample>,
    faults: Vec<&'static str>,
    answered: bool,
    started: Moment,
    /// Since when the thread has been in the library.
    busy: Option<Moment>,
    library: Option<Library>,
    /// The library was replaced while the thread was in it.
    replaced: bool,
    /// A thread looks whether it was.
    watched: bool,
    totals: Totals,
    abandoned: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The library is about to be called.
    fn enter(&self) {
        self.lock().busy = Some(Moment::now());
    }

    /// It has returned. False if the thread was given up meanwhile.
    fn leave(&self) -> bool {
        let mut inner = self.lock();
        inner.busy = None;
        !inner.abandoned
    }

    /// From this moment on the first answer may take a while again: that is no failure.
    fn begin_anew(&self, at: Moment) {
        let mut inner = self.lock();
        (inner.answered, inner.started) = (false, at);
    }

    /// Nothing is known of the GPUs any more.
    fn forget(&self) {
        let mut inner = self.lock();
        inner.latest = None;
        inner.samples.clear();
    }
}

impl Worker {
    /// Starts the thread. It ends with the process.
    pub fn start(settings: GpuSettings, roots: Roots, cgroup_v1: bool, control: Arc<Control>) -> Self {
        let task = Task { settings, roots, cgroup_v1, control };
        let shared = spawn(&task, Totals::new());
        Self { task, shared, abandoned: vec![] }
    }

    /// Takes what there is, and starts another thread if the old one hangs in a library that was replaced.
    pub fn look(&mut self, now: Moment) -> Look {
        self.replace_if_useful(now);
        let mut inner = self.shared.lock();
        Look {
            latest: inner.latest.clone(),
            samples: inner.samples.drain(..).collect(),
            faults: std::mem::take(&mut inner.faults),
            answered: inner.answered,
            waits_since: inner.started,
        }
    }

    fn replace_if_useful(&mut self, now: Moment) {
        self.abandoned.retain(|shared| Arc::strong_count(shared) > 1); // its thread holds the other
        let has_ended = Arc::strong_count(&self.shared) == 1;
        let totals = {
            let mut inner = self.shared.lock();
            let hangs = inner.busy.is_some_and(|since| now.since(since) > self.task.settings.deadline);
            let has_rested = now.since(inner.started) > RETRY.1;
            if has_ended && has_rested {
                self.task.control.closed(); // what it had open went with it
                tracing::error!(
                    "the thread of the GPU driver ended by itself, which is a bug; starting another"
                );
            } else if hangs && self.abandoned.len() < MOST_ABANDONED && inner.replaced {
                tracing::warn!(
                    "a call of the GPU driver hangs, and its library was replaced: opening the new one"
                );
            } else {
                if let (true, false, Some(library)) = (hangs, inner.watched, inner.library.clone()) {
                    inner.watched = true;
                    drop(inner);
                    watch(library, &self.task, &self.shared);
                }
                return;
            }
            inner.abandoned = true;
            std::mem::take(&mut inner.totals)
        };
        let shared = spawn(&self.task, totals);
        self.abandoned.push(std::mem::replace(&mut self.shared, shared));
    }
}

fn spawn(task: &Task, totals: Totals) -> Arc<Shared> {
    let shared = Arc::new(Shared {
        inner: Mutex::new(Inner {
            latest: None,
            samples: VecDeque::new(),
            faults: vec![],
            answered: false,
            started: Moment::now(),
            busy: None,
            library: None,
            replaced: false,
            watched: false,
            totals: totals.clone(),
            abandoned: false,
        }),
    });
    let (task, theirs) = (task.clone(), Arc::clone(&shared));
    let thread = std::thread::Builder::new().name("nvml".into()).stack_size(1024 * 1024);
    if let Err(error) = thread.spawn(move || run(&task, totals, &theirs)) {
        tracing::warn!(%error, "no thread for the GPU driver");
    }
    shared
}

/// Looks whether a library was replaced, on a thread of its own: its file may be on a disk that does not answer either.
fn watch(library: Library, task: &Task, shared: &Arc<Shared>) {
    let (chosen, theirs) = (task.settings.library.clone(), Arc::clone(shared));
    let thread = std::thread::Builder::new().name("nvml-watch".into()).stack_size(256 * 1024);
    let started = thread.spawn(move || {
        let replaced = library.was_replaced(chosen.as_deref());
        let mut inner = theirs.lock();
        let is_same = inner.library.as_ref() == Some(&library); // else the call has returned meanwhile
        (inner.replaced, inner.watched) = (replaced && is_same, false);
    });
    if started.is_err() {
        shared.lock().watched = false;
    }
}

/// Why a session ended.
enum Ended {
    Failed(NvmlError),
    Released,
    Abandoned,
}

/// Opens the library again and again; while it is open, reads it at every interval.
fn run(task: &Task, mut totals: Totals, shared: &Shared) {
    let mut owners = Owners::new(task.roots.clone(), task.cgroup_v1);
    let mut pause = RETRY.0;
    let mut told = String::new();
    loop {
        let requests = task.control.requests();
        if let Some(rest) = task.control.remaining(Moment::now()) {
            shared.forget();
            // a cycle may come between the end of the time and that of the wait
            shared.begin_anew(Moment::now().plus(rest));
            task.control.wait(rest, requests);
            shared.begin_anew(Moment::now());
            continue;
        }
        let library = Library::find(task.settings.library.as_deref());
        {
            let mut inner = shared.lock();
            (inner.library, inner.replaced) = (Some(library.clone()), false);
        }
        task.control.opening();
        shared.enter();
        let opened = library.open(&task.control);
        let mut wanted = shared.leave();
        match opened {
            Ok(nvml) => {
                tracing::info!("GPU driver opened");
                pause = RETRY.0;
                told.clear();
                let mut session = Session::new(&nvml, task.settings.interval + task.settings.deadline);
                let ended = read_until(&mut session, task, &mut owners, &mut totals, shared);
                shared.enter();
                drop(session);
                let closed = nvml.shutdown();
                wanted = shared.leave();
                if matches!(ended, Ended::Released) {
                    shared.begin_anew(Moment::now()); // nor is it a failure before it is told as closed
                }
                shared.forget();
                say(&ended, closed.err().as_ref());
                if matches!(ended, Ended::Failed(_)) {
                    shared.lock().faults.push("io");
                }
            }
            Err(error) => {
                let text = describe(&error);
                task.control.tell(Err(text.clone()));
                shared.lock().answered = true;
                if text != told {
                    tracing::info!(reason = %text, "no GPU driver; memory of the host and its containers goes on");
                    told = text;
                }
            }
        }
        task.control.closed();
        if !wanted {
            return;
        }
        task.control.wait(pause, requests);
        pause = (pause * 2).min(RETRY.1);
    }
}

fn say(ended: &Ended, not_closed: Option<&NvmlError>) {
    match ended {
        Ended::Failed(error) => tracing::warn!(error = %describe(error), "GPU driver lost, trying again"),
        Ended::Released => tracing::info!("GPU driver let go, as was asked for"),
        Ended::Abandoned => tracing::info!("a call of the GPU driver that was given up has returned"),
    }
    if let Some(error) = not_closed {
        tracing::debug!(error = %describe(error), "GPU driver did not close");
    }
}

fn read_until(
    session: &mut Session<'_>,
    task: &Task,
    owners: &mut Owners,
    totals: &mut Totals,
    shared: &Shared,
) -> Ended {
    let settings = &task.settings;
    let mut next_whole = Moment::now();
    loop {
        let requests = task.control.requests();
        if task.control.remaining(Moment::now()).is_some() {
            return Ended::Released;
        }
        let began = Moment::now();
        let is_whole = began >= next_whole;
        shared.enter();
        let looked = look(session, is_whole, task, owners, totals);
        let wanted = shared.leave();
        let ended = Moment::now();
        let took = ended.since(began);
        match looked {
            Ok((reading, samples)) => publish(shared, reading, samples, totals),
            Err(error) => return Ended::Failed(error),
        }
        if !wanted {
            return Ended::Abandoned;
        }
        if is_whole {
            next_whole = began.plus(settings.interval).max(ended.plus(settings.interval / 4));
        }
        let quick = began.plus(settings.sample_interval).max(ended.plus(took * REST));
        let next = if settings.sample_interval.is_zero() { next_whole } else { next_whole.min(quick) };
        task.control.wait(next.since(Moment::now()), requests);
    }
}

fn look(
    session: &mut Session<'_>,
    is_whole: bool,
    task: &Task,
    owners: &mut Owners,
    totals: &mut Totals,
) -> Result<(Option<Reading>, Vec<Sample>), NvmlError> {
    session.take_xids(totals)?;
    if is_whole {
        let looked = session.read(&task.roots, owners, totals)?;
        task.control.tell(Ok(Probe::of(&looked.reading, session)));
        return Ok((Some(looked.reading), looked.samples));
    }
    Ok((None, vec![session.look_quickly(&task.roots, owners)?]))
}

fn publish(shared: &Shared, reading: Option<Reading>, samples: Vec<Sample>, totals: &Totals) {
    let mut inner = shared.lock();
    inner.answered = true;
    inner.samples.extend(samples);
    let late = inner.samples.len().saturating_sub(MOST_SAMPLES);
    inner.samples.drain(..late);
    if let Some(reading) = reading {
        inner.faults.extend(reading.faults.iter());
        inner.faults.truncate(1_000);
        inner.latest = Some(Arc::new(reading));
        inner.totals = totals.clone();
    }
}
