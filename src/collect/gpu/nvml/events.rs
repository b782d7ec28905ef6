//! Xids, through an event set of the library.
//!
//! One set for all GPUs, looked at without waiting. When several Xids come between two looks, NVML names the newest for
//! each of them: their number is right, their kinds may not be.
//!
//! The Xid that matters most is that of a GPU that has fallen off the bus, which answers nothing any more. So an event is
//! given to its GPU by the handle that it names, without a question to the GPU.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};

use super::device::Gpu;
use super::library::{describe, error_is_the_librarys, error_may_pass};
use super::raw;
use crate::clock::Moment;
use crate::collect::gpu::health::Totals;

/// Events that are taken in one look at most.
const MOST: usize = 64;
/// `XidError::Unknown` is this number on the wire.
const UNKNOWN_XID: u64 = 999;
/// A GPU that cannot be registered is tried again after this: each failure costs the whole set.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// The event set.
#[derive(Debug, Default)]
pub struct Events<'nvml> {
    set: Option<EventSet<'nvml>>,
    registered: HashSet<Arc<str>>,
    /// GPUs that cannot be registered, and until when they are left alone.
    refused: HashMap<Arc<str>, Moment>,
    /// Whose handle each is, also of GPUs that are lost by now: a handle is good as long as the library is open.
    handles: HashMap<usize, Arc<str>>,
}

impl<'nvml> Events<'nvml> {
    /// Registers the GPUs that are not registered.
    pub fn register<'a>(
        &mut self,
        nvml: &'nvml Nvml,
        now: Moment,
        gpus: impl Iterator<Item = &'a Gpu<'nvml>>,
        totals: &mut Totals,
    ) where
        'nvml: 'a,
    {
        self.refused.retain(|_, until| now < *until);
        let gpus: Vec<_> = gpus.collect();
        // a failure takes the set along, and everybody is registered anew: without the one that failed
        for _ in 0..=gpus.len() {
            if gpus.iter().all(|gpu| self.register_one(nvml, now, gpu, totals)) {
                return;
            }
        }
    }

    /// False if the set was lost.
    fn register_one(
        &mut self,
        nvml: &'nvml Nvml,
        now: Moment,
        gpu: &Gpu<'nvml>,
        totals: &mut Totals,
    ) -> bool {
        let uuid = &gpu.identity.uuid;
        if self.listens_to(uuid) || self.refused.contains_key(uuid) {
            return true;
        }
        match gpu.handle.supported_event_types() {
            Ok(kinds) if kinds.contains(EventTypes::CRITICAL_XID_ERROR) => {}
            Err(error) if error_may_pass(&error) => return true,
            _ => {
                self.refused.insert(Arc::clone(uuid), now.plus(ASK_AGAIN));
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
                self.handles.insert(raw::address(&gpu.handle), Arc::clone(uuid));
                totals.entry(Arc::clone(uuid)).or_default().bear_xids();
                true
            }
            Err(error) => {
                tracing::debug!(gpu = %uuid, error = %describe(&error), "no Xids of this GPU");
                self.lose();
                self.refused.insert(Arc::clone(uuid), now.plus(ASK_AGAIN));
                false
            }
        }
    }

    fn lose(&mut self) {
        self.set = None;
        self.registered.clear();
    }

    /// Whether an Xid of this GPU would be heard now.
    pub fn listens_to(&self, uuid: &Arc<str>) -> bool {
        self.set.is_some() && self.registered.contains(uuid)
    }

    /// A GPU was lost. When it answers again it may be registered anew.
    pub fn forget(&mut self, uuid: &Arc<str>) {
        self.refused.remove(uuid);
        self.registered.remove(uuid);
    }

    /// Takes what has come. True if the set was lost, so that GPUs have to be registered anew.
    ///
    /// # Errors
    /// The library has to be opened anew.
    pub fn take(&mut self, now: Moment, totals: &mut Totals) -> Result<bool, NvmlError> {
        for _ in 0..MOST {
            let Some(set) = &self.set else { return Ok(false) };
            let event = match set.wait(0) {
                Ok(event) => event,
                Err(NvmlError::Timeout) => return Ok(false),
                Err(error) => {
                    self.lose(); // a lost GPU spoils the whole set
                    return if error_is_the_librarys(&error) { Err(error) } else { Ok(true) };
                }
            };
            let xid = match event.event_data {
                Some(XidError::Value(xid)) => xid,
                Some(XidError::Unknown) => UNKNOWN_XID,
                None => continue,
            };
            if let Some(uuid) = self.handles.get(&raw::address(&event.device)) {
                totals.entry(Arc::clone(uuid)).or_default().count_xid(xid, now.unix_seconds());
            }
        }
        Ok(false)
    }
}
