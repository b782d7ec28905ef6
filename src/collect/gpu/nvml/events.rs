//! Xids, through an event set of the library.
//!
//! One set for all GPUs, looked at without waiting. When several Xids come between two looks, NVML names the newest for
//! each of them: their number is right, their kinds may not be.

use std::collections::HashSet;
use std::sync::Arc;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};

use super::device::Gpu;
use super::library::describe;
use crate::clock::Moment;
use crate::collect::gpu::health::Totals;

/// Events that are taken in one look at most.
const MOST: usize = 64;
/// `XidError::Unknown` is this number on the wire.
const UNKNOWN_XID: u64 = 999;

/// The event set.
#[derive(Debug, Default)]
pub struct Events<'nvml> {
    set: Option<EventSet<'nvml>>,
    registered: HashSet<Arc<str>>,
    /// GPUs that cannot be registered.
    refused: HashSet<Arc<str>>,
}

impl<'nvml> Events<'nvml> {
    /// Registers GPUs that are new.
    pub fn register<'a>(
        &mut self,
        nvml: &'nvml Nvml,
        gpus: impl Iterator<Item = &'a Gpu<'nvml>>,
        totals: &mut Totals,
    ) where
        'nvml: 'a,
    {
        for gpu in gpus {
            let uuid = &gpu.identity.uuid;
            if self.refused.contains(uuid) || (self.set.is_some() && self.registered.contains(uuid)) {
                continue;
            }
            let registered = match self.set.take() {
                Some(set) => Ok(set),
                None => {
                    self.registered.clear();
                    nvml.create_event_set()
                }
            };
            let registered = registered.and_then(|set| {
                let supported = gpu.handle.supported_event_types();
                if !supported.is_ok_and(|kinds| kinds.contains(EventTypes::CRITICAL_XID_ERROR)) {
                    self.refused.insert(Arc::clone(uuid));
                    return Ok(set);
                }
                let registered = gpu.handle.register_events(EventTypes::CRITICAL_XID_ERROR, set);
                let set = registered.map_err(|error| error.error)?;
                self.registered.insert(Arc::clone(uuid));
                totals.entry(Arc::clone(uuid)).or_default().bear_xids();
                Ok(set)
            });
            match registered {
                Ok(set) => self.set = Some(set),
                Err(error) => {
                    // the set is gone with it; the others are registered anew in the next reading
                    tracing::debug!(gpu = %uuid, error = %describe(&error), "no Xids of this GPU");
                    self.refused.insert(Arc::clone(uuid));
                }
            }
        }
    }

    /// A GPU answers again after it was lost: it may be registered anew.
    pub fn forget(&mut self, uuid: &Arc<str>) {
        self.refused.remove(uuid);
        self.registered.remove(uuid);
    }

    /// Takes what has come.
    ///
    /// # Errors
    /// The library has to be opened anew.
    pub fn take(&mut self, now: Moment, totals: &mut Totals) -> Result<(), NvmlError> {
        for _ in 0..MOST {
            let Some(set) = &self.set else { return Ok(()) };
            let event = match set.wait(0) {
                Ok(event) => event,
                Err(NvmlError::Timeout) => return Ok(()),
                Err(error) => {
                    self.set = None; // a lost GPU spoils the whole set; the next reading makes another
                    self.registered.clear();
                    return if super::library::error_is_the_librarys(&error) { Err(error) } else { Ok(()) };
                }
            };
            let xid = match event.event_data {
                Some(XidError::Value(xid)) => xid,
                Some(XidError::Unknown) => UNKNOWN_XID,
                None => continue,
            };
            if let Ok(uuid) = event.device.uuid() {
                totals.entry(uuid.into()).or_default().count_xid(xid, now.unix_seconds());
            }
        }
        Ok(())
    }
}
