//! The newest snapshot, and its text, made when first asked for and shared by all who ask.

use std::io::Write;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use axum::body::Bytes;

use crate::clock::Moment;
use crate::export::prometheus;
use crate::snapshot::Snapshot;

/// A snapshot with its rendered forms.
#[derive(Debug)]
pub struct Newest {
    snapshot: Snapshot,
    text: OnceLock<Result<Bytes, String>>,
    gzip: OnceLock<Result<Bytes, String>>,
}

impl Newest {
    /// The snapshot itself.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The metrics as text, plain or compressed, if they were made already.
    pub fn made(&self, gzip: bool) -> Option<Result<Bytes, String>> {
        if gzip { self.gzip.get().cloned() } else { self.text.get().cloned() }
    }

    /// The metrics as text, plain or compressed. Made once; who asks meanwhile waits for it.
    ///
    /// # Errors
    /// The encoder's refusal, as text.
    pub fn text(&self, gzip: bool) -> Result<Bytes, String> {
        let plain = self.text.get_or_init(|| {
            prometheus::render(&self.snapshot).map(Bytes::from).map_err(|error| error.to_string())
        });
        if !gzip {
            return plain.clone();
        }
        let compressed = self.gzip.get_or_init(|| plain.clone().and_then(|text| compress(&text)));
        compressed.clone()
    }
}

fn compress(text: &[u8]) -> Result<Bytes, String> {
    let mut encoder =
        flate2::write::GzEncoder::new(Vec::with_capacity(text.len() / 10), flate2::Compression::fast());
    encoder
        .write_all(text)
        .and_then(|()| encoder.finish())
        .map(Bytes::from)
        .map_err(|error| error.to_string())
}

/// Why there is nothing to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSnapshot {
    /// The first cycle is under way.
    #[error("the first snapshot is not finished yet")]
    NotYet,
    /// Cycles do not finish any more.
    #[error(
        "the newest snapshot is {0} s old: sampling hangs, most likely in a read that the kernel does not answer"
    )]
    Stale(u64),
}

/// Where the cycle leaves its snapshots and the routes find them.
#[derive(Debug, Default)]
pub struct Published {
    newest: RwLock<Option<Arc<Newest>>>,
}

impl Published {
    /// Takes the place of the snapshot before.
    pub fn publish(&self, snapshot: Snapshot) {
        let newest = Arc::new(Newest { snapshot, text: OnceLock::new(), gzip: OnceLock::new() });
        *self.newest.write().unwrap_or_else(PoisonError::into_inner) = Some(newest);
    }

    /// The newest snapshot.
    ///
    /// # Errors
    /// There is none yet; or it is older than `stale_after`, and showing it would be a lie: sampling hangs.
    pub fn newest(&self, now: Moment, stale_after: Duration) -> Result<Arc<Newest>, NoSnapshot> {
        let newest = self.newest.read().unwrap_or_else(PoisonError::into_inner).clone();
        let newest = newest.ok_or(NoSnapshot::NotYet)?;
        let age = now.since(newest.snapshot.finished);
        if age > stale_after { Err(NoSnapshot::Stale(age.as_secs())) } else { Ok(newest) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Series;

    #[test]
    fn a_snapshot_that_is_too_old_is_not_shown() {
        let published = Published::default();
        let now = Moment::now();
        let patience = Duration::from_secs(30);
        assert_eq!(published.newest(now, patience).err(), Some(NoSnapshot::NotYet));
        published.publish(Snapshot {
            finished: now,
            series: Series::default(),
            containers: vec![],
            running: 0,
            gpus: vec![],
            processes: vec![],
        });
        assert!(published.newest(now.plus(patience), patience).is_ok());
        let late = now.plus(patience + Duration::from_secs(1));
        assert_eq!(published.newest(late, patience).err(), Some(NoSnapshot::Stale(31)));
    }

    #[test]
    fn text_is_made_once_and_compressed_text_is_the_same_text() {
        use std::io::Read;
        let mut series = Series::default();
        series.global(crate::catalog::HOST_MEMORY_TOTAL, [], 1024.0);
        let published = Published::default();
        let now = Moment::now();
        let snapshot = Snapshot {
            finished: now,
            series,
            containers: vec![],
            running: 0,
            gpus: vec![],
            processes: vec![],
        };
        published.publish(snapshot);
        let newest = published.newest(now, Duration::MAX).unwrap();
        let (first, again) = (newest.text(false).unwrap(), newest.text(false).unwrap());
        assert_eq!(first.as_ptr(), again.as_ptr(), "one rendering serves all");
        let mut plain = String::new();
        flate2::read::GzDecoder::new(&newest.text(true).unwrap()[..]).read_to_string(&mut plain).unwrap();
        assert_eq!(plain.as_bytes(), &first[..]);
    }
}
