//! Xids, from an event set of the library.
//!
//! One event set for all GPUs is polled without waiting. When several Xids occur between two polls, NVML reports the
//! newest for each of them: the number of events is right, the Xids may not be.
//!
//! The most important Xid is that of a GPU that has fallen off the bus, which no longer answers. So an event is assigned
//! to its GPU by its handle, without a call to the GPU.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};

use super::device::NvmlGpu;
use super::ffi;
use super::library::{is_library_error, is_transient};
use crate::clock::Timestamp;
use crate::text::error_chain;

/// Maximum number of events that one poll takes.
const MAX_EVENTS: usize = 64;
/// The number of `XidError::Unknown` in NVML.
const UNKNOWN_XID: u64 = 999;
/// How long to wait before registering a GPU again that failed: each failure invalidates the whole set.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The event set.
#[derive(Debug, Default)]
pub struct Events<'nvml> {
    set: Option<EventSet<'nvml>>,
    registered: HashSet<Arc<str>>,
    /// GPUs that could not be registered, and when to retry each.
    retry_at: HashMap<Arc<str>, Timestamp>,
    /// The UUID of each handle, also of lost GPUs: a handle is valid as long as the library is open.
    handles: HashMap<usize, Arc<str>>,
    /// The Xids that were not taken yet, each with the UUID of its GPU.
    xids: Vec<(Arc<str>, u64)>,
}

impl<'nvml> Events<'nvml> {
    /// Registers the GPUs that are not registered.
    pub fn register<'a>(
        &mut self,
        nvml: &'nvml Nvml,
        now: Timestamp,
        gpus: impl Iterator<Item = &'a NvmlGpu<'nvml>>,
    ) where
        'nvml: 'a,
    {
        self.retry_at.retain(|_, until| now < *until);
        let gpus: Vec<_> = gpus.collect();
        // a failure invalidates the set, so all GPUs are registered again without the one that failed
        for _ in 0..=gpus.len() {
            if gpus.iter().all(|gpu| self.register_one(nvml, now, gpu)) {
                return;
            }
        }
    }

    /// Returns false if the set was lost.
    fn register_one(&mut self, nvml: &'nvml Nvml, now: Timestamp, gpu: &NvmlGpu<'nvml>) -> bool {
        let uuid = &gpu.identity.uuid;
        if self.is_registered(uuid) || self.retry_at.contains_key(uuid) {
            return true;
        }
        match gpu.handle.supported_event_types() {
            Ok(types) if types.contains(EventTypes::CRITICAL_XID_ERROR) => {}
            Err(error) if is_transient(&error) => return true,
            _ => {
                self.retry_at.insert(Arc::clone(uuid), now.plus(RETRY_INTERVAL));
                return true;
            }
        }
        let set = self.set.take().map_or_else(|| nvml.create_event_set(), Ok);
        let registered = set.and_then(|set| {
            let registered = gpu.handle.register_events(EventTypes::CRITICAL_XID_ERROR, set);
            registered.map_err(|error| error.error)
        });
        match registered {
            Ok(set) => {
                self.set = Some(set);
                self.registered.insert(Arc::clone(uuid));
                self.handles.insert(ffi::address(&gpu.handle), Arc::clone(uuid));
                true
            }
            Err(error) => {
                tracing::debug!(gpu = %uuid, error = %error_chain(&error), "registering a GPU for Xid events failed");
                self.discard_set();
                self.retry_at.insert(Arc::clone(uuid), now.plus(RETRY_INTERVAL));
                false
            }
        }
    }

    fn discard_set(&mut self) {
        self.set = None;
        self.registered.clear();
    }

    /// Returns whether this GPU is registered for Xid events now.
    pub fn is_registered(&self, uuid: &Arc<str>) -> bool {
        self.set.is_some() && self.registered.contains(uuid)
    }

    /// Removes a lost GPU, so that it can be registered again when it answers.
    pub fn forget(&mut self, uuid: &Arc<str>) {
        self.retry_at.remove(uuid);
        self.registered.remove(uuid);
    }

    /// Takes the Xids that were polled.
    pub fn take_xids(&mut self) -> Vec<(Arc<str>, u64)> {
        std::mem::take(&mut self.xids)
    }

    /// Polls for pending events. Returns true if the set was lost, so that the GPUs must be registered again.
    ///
    /// # Errors
    /// The library must be reopened.
    pub fn poll(&mut self) -> Result<bool, NvmlError> {
        for _ in 0..MAX_EVENTS {
            let Some(set) = &self.set else { return Ok(false) };
            let event = match set.wait(0) {
                Ok(event) => event,
                Err(NvmlError::Timeout) => return Ok(false),
                Err(error) => {
                    self.discard_set(); // a lost GPU invalidates the whole set
                    return if is_library_error(&error) { Err(error) } else { Ok(true) };
                }
            };
            let xid = match event.event_data {
                Some(XidError::Value(xid)) => xid,
                Some(XidError::Unknown) => UNKNOWN_XID,
                None => continue,
            };
            if let Some(uuid) = self.handles.get(&ffi::address(&event.device)) {
                self.xids.push((Arc::clone(uuid), xid));
            }
        }
        Ok(false)
    }
}
