//! The newest snapshot, and its text, made when first asked for and shared by all who ask.

use std::io::Write;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use axum::body::Bytes;

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

    /// The newest snapshot; `None` before the first.
    pub fn newest(&self) -> Option<Arc<Newest>> {
        self.newest.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
