//! The newest snapshot and its rendered text, which is made on the first request and shared by all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use axum::body::Bytes;

use crate::clock::Timestamp;
use crate::export::{self, json, prometheus};
use crate::overview::history::Recorder;
use crate::overview::{Details, Overview};
use crate::snapshot::Snapshot;

/// A snapshot with its rendered forms.
#[derive(Debug)]
pub struct RenderedSnapshot {
    snapshot: Snapshot,
    text: OnceLock<Result<Bytes, String>>,
    gzip: OnceLock<Result<Bytes, String>>,
    json: OnceLock<Bytes>,
}

impl RenderedSnapshot {
    fn of(snapshot: Snapshot) -> Arc<Self> {
        Arc::new(Self { snapshot, text: OnceLock::new(), gzip: OnceLock::new(), json: OnceLock::new() })
    }

    /// Returns the snapshot.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Returns the metrics as text, plain or compressed, if they are rendered already.
    pub fn cached(&self, gzip: bool) -> Option<Result<Bytes, String>> {
        if gzip { self.gzip.get().cloned() } else { self.text.get().cloned() }
    }

    /// Returns the metrics as text, plain or compressed. The first caller renders them; concurrent callers block until then.
    ///
    /// # Errors
    /// The encoder failed.
    pub fn text(&self, gzip: bool) -> Result<Bytes, String> {
        let plain = self.text.get_or_init(|| {
            prometheus::render(&self.snapshot).map(Bytes::from).map_err(|error| error.to_string())
        });
        if !gzip {
            return plain.clone();
        }
        let compressed = self.gzip.get_or_init(|| {
            let text = plain.clone()?;
            export::gzip(&text).map(Bytes::from).map_err(|error| error.to_string())
        });
        compressed.clone()
    }

    /// Returns the containers as JSON, if they are rendered already.
    pub fn cached_containers(&self) -> Option<Bytes> {
        self.json.get().cloned()
    }

    /// Returns the containers as JSON. The first caller renders them; concurrent callers block until then.
    pub fn containers(&self) -> Bytes {
        self.json.get_or_init(|| json::containers(&self.snapshot).into()).clone()
    }
}

/// Why there is no snapshot to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSnapshot {
    /// The first cycle is in progress.
    #[error("the first snapshot is not finished yet")]
    NotYet,
    /// No cycle has finished for a while.
    #[error(
        "the newest snapshot is {0} s old: sampling hangs, most likely in a kernel read that does not return"
    )]
    Stale(u64),
    /// Cycles panic.
    #[error("the last cycles failed, which is a bug in memledger; see its log")]
    Failing,
}

/// Passes snapshots from the sampler to the routes.
#[derive(Debug)]
pub struct SnapshotCache {
    /// When the first snapshot began to be due.
    created: Timestamp,
    newest: RwLock<Option<Arc<RenderedSnapshot>>>,
    /// What is still known while a cycle hangs.
    partial: RwLock<Option<Arc<RenderedSnapshot>>>,
    /// Cycles fail: the newest snapshot will not be replaced soon.
    is_failing: AtomicBool,
    /// What overviews need of earlier snapshots.
    recorder: Mutex<Recorder>,
}

impl Default for SnapshotCache {
    fn default() -> Self {
        Self {
            created: Timestamp::now(),
            newest: RwLock::default(),
            partial: RwLock::default(),
            is_failing: AtomicBool::default(),
            recorder: Mutex::default(),
        }
    }
}

impl SnapshotCache {
    /// Replaces the newest snapshot.
    pub fn publish(&self, snapshot: Snapshot) {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner).add(&snapshot);
        *self.newest.write().unwrap_or_else(PoisonError::into_inner) = Some(RenderedSnapshot::of(snapshot));
        self.is_failing.store(false, Ordering::Relaxed);
    }

    /// Returns the overview of a snapshot. The sampler, which records the next one, waits only for the figures.
    pub fn overview(&self, snapshot: &Snapshot, details: Details<'_>) -> Overview {
        let recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        let figures = recorder.figures(snapshot, details.history_of());
        drop(recorder);
        Overview::from_snapshot(snapshot, figures, details)
    }

    /// From now on, until the next snapshot, the newest one is not served.
    pub fn set_failing(&self) {
        self.is_failing.store(true, Ordering::Relaxed);
    }

    /// While cycles fail, or the newest snapshot is older than `max_age`, or there has been none for as long, replaces the partial
    /// one by `build`, which gets the newest one. Removes it otherwise.
    pub fn refresh_partial(&self, max_age: Duration, build: impl FnOnce(Option<&Snapshot>) -> Snapshot) {
        let newest = self.newest.read().unwrap_or_else(PoisonError::into_inner).clone();
        let newest = newest.as_ref().map(|newest| &newest.snapshot);
        let since = newest.map_or(self.created, |newest| newest.finished);
        let is_stale = self.is_failing.load(Ordering::Relaxed) || Timestamp::now().since(since) > max_age;
        let partial = is_stale.then(|| RenderedSnapshot::of(build(newest)));
        *self.partial.write().unwrap_or_else(PoisonError::into_inner) = partial;
    }

    /// Returns the newest snapshot, or while that is stale the partial one.
    ///
    /// # Errors
    /// There is neither.
    pub fn newest_or_partial(
        &self,
        now: Timestamp,
        stale_after: Duration,
    ) -> Result<Arc<RenderedSnapshot>, NoSnapshot> {
        self.newest(now, stale_after).or_else(|reason| {
            let partial = self.partial.read().unwrap_or_else(PoisonError::into_inner).clone();
            partial.filter(|partial| now.since(partial.snapshot.finished) <= stale_after).ok_or(reason)
        })
    }

    /// Returns the newest snapshot.
    ///
    /// # Errors
    /// There is none yet, cycles fail, or it is older than `stale_after`, because sampling hangs.
    pub(super) fn newest(
        &self,
        now: Timestamp,
        stale_after: Duration,
    ) -> Result<Arc<RenderedSnapshot>, NoSnapshot> {
        let newest = self.newest.read().unwrap_or_else(PoisonError::into_inner).clone();
        if self.is_failing.load(Ordering::Relaxed) {
            return Err(NoSnapshot::Failing);
        }
        let newest = newest.ok_or(NoSnapshot::NotYet)?;
        let age = now.since(newest.snapshot.finished);
        if age > stale_after { Err(NoSnapshot::Stale(age.as_secs())) } else { Ok(newest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Series;

    fn empty_snapshot(finished: Timestamp) -> Snapshot {
        Snapshot::of_series(finished, Series::default())
    }

    #[test]
    fn partial_snapshot_needs_no_finished_cycle() {
        let snapshot_cache = SnapshotCache::default();
        let (now, max_age) = (snapshot_cache.created, Duration::from_secs(30));
        let partial = || snapshot_cache.newest_or_partial(now, max_age).map(|found| found.snapshot.finished);
        snapshot_cache.refresh_partial(Duration::from_secs(3600), |_| panic!("the first cycle is not late"));
        assert_eq!(partial(), Err(NoSnapshot::NotYet));
        while Timestamp::now().since(now).is_zero() {}
        snapshot_cache.refresh_partial(Duration::ZERO, |last| {
            assert!(last.is_none());
            empty_snapshot(now)
        });
        assert_eq!(partial(), Ok(now));
        assert_eq!(snapshot_cache.newest(now, max_age).err(), Some(NoSnapshot::NotYet), "not ready");
        snapshot_cache.publish(empty_snapshot(now.plus(Duration::from_secs(1))));
        assert_eq!(partial(), Ok(now.plus(Duration::from_secs(1))), "the first cycle has finished");
    }

    #[test]
    fn failing_cycles_leave_the_partial_snapshot_until_one_succeeds() {
        let snapshot_cache = SnapshotCache::default();
        let (now, day) = (Timestamp::now(), Duration::from_secs(86_400));
        snapshot_cache.publish(empty_snapshot(now));
        snapshot_cache.set_failing();
        assert_eq!(snapshot_cache.newest_or_partial(now, day).err(), Some(NoSnapshot::Failing));
        let later = now.plus(Duration::from_secs(1));
        snapshot_cache.refresh_partial(day, |last| {
            assert!(last.is_some());
            empty_snapshot(later)
        });
        assert_eq!(snapshot_cache.newest_or_partial(now, day).unwrap().snapshot.finished, later);
        assert_eq!(snapshot_cache.newest(now, day).err(), Some(NoSnapshot::Failing), "not ready");
        snapshot_cache.publish(empty_snapshot(later));
        assert!(snapshot_cache.newest(now, day).is_ok());
    }

    #[test]
    fn rejects_stale_snapshots() {
        let snapshot_cache = SnapshotCache::default();
        let now = Timestamp::now();
        let max_age = Duration::from_secs(30);
        assert_eq!(snapshot_cache.newest(now, max_age).err(), Some(NoSnapshot::NotYet));
        snapshot_cache.publish(empty_snapshot(now));
        assert!(snapshot_cache.newest(now.plus(max_age), max_age).is_ok());
        let late = now.plus(max_age + Duration::from_secs(1));
        assert_eq!(snapshot_cache.newest(late, max_age).err(), Some(NoSnapshot::Stale(31)));
        assert_eq!(snapshot_cache.newest_or_partial(late, max_age).err(), Some(NoSnapshot::Stale(31)));
    }

    #[test]
    fn renders_once_and_compresses_the_same_text() {
        use std::io::Read;
        let mut series = Series::default();
        series.global(crate::catalog::HOST_MEMORY_TOTAL, [], 1024.0);
        let snapshot_cache = SnapshotCache::default();
        let now = Timestamp::now();
        snapshot_cache.publish(Snapshot::of_series(now, series));
        let newest = snapshot_cache.newest(now, Duration::MAX).unwrap();
        let (first, again) = (newest.text(false).unwrap(), newest.text(false).unwrap());
        assert_eq!(first.as_ptr(), again.as_ptr(), "rendered once");
        let mut plain = String::new();
        flate2::read::GzDecoder::new(&newest.text(true).unwrap()[..]).read_to_string(&mut plain).unwrap();
        assert_eq!(plain.as_bytes(), &first[..]);
        assert_eq!(newest.cached_containers(), None);
        let (first, again) = (newest.containers(), newest.containers());
        assert_eq!(first.as_ptr(), again.as_ptr(), "rendered once");
        assert_eq!(newest.cached_containers().as_ref(), Some(&first));
    }
}
