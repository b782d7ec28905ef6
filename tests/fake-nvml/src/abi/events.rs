//! Event sets.
//!
//! An event of the state file goes once to the first waiter whose set is registered for its GPU and kind;
//! events of lower `seq` go first. Unlike a driver this also hands out what was in the file before the
//! registration, so that a test need not know when the program under test has registered.

use std::ffi::{c_uint, c_ulonglong};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeAll};

use super::{
    GPU_IS_LOST, INVALID_ARGUMENT, NO_INSTANCE, NOT_SUPPORTED, NvmlResult, Out, TIMEOUT, UNINITIALIZED,
    entry_points, handle,
};
use crate::library::library;

/// How often a waiter reads the state file.
const LOOK_EVERY: Duration = Duration::from_millis(5);

entry_points! {
    fn nvmlEventSetCreate(call, set: Out<nvmlEventSet_t>) {
        call.loaded()?;
        let mut library = library();
        let number = library.event_sets.keys().next_back().copied().unwrap_or(0) + 1;
        set.put(std::ptr::without_provenance_mut(number))?;
        library.event_sets.insert(number, Vec::new());
        Ok(())
    }

    fn nvmlEventSetFree(call, set: nvmlEventSet_t) {
        call.loaded()?;
        library().event_sets.remove(&set.addr()).map(drop).ok_or(INVALID_ARGUMENT)
    }

    fn nvmlDeviceRegisterEvents(call, device: nvmlDevice_t, kinds: c_ulonglong, set: nvmlEventSet_t) {
        let target = call.target(device)?;
        if kinds & !supported_kinds() != 0 {
            return Err(NOT_SUPPORTED);
        }
        let mut library = library();
        let registrations = library.event_sets.get_mut(&set.addr()).ok_or(INVALID_ARGUMENT)?;
        registrations.push((target.index, kinds));
        Ok(())
    }

    fn nvmlDeviceGetSupportedEventTypes(call, device: nvmlDevice_t, kinds: Out<c_ulonglong>) {
        call.gpu(device)?;
        kinds.put(supported_kinds())
    }

    fn nvmlEventSetWait_v2(call, set: nvmlEventSet_t, data: Out<nvmlEventData_t>, timeout_ms: c_uint) {
        call.loaded()?;
        let start = now();
        loop {
            if let Some(event) = next_event(set.addr())? {
                return data.put(event);
            }
            if start.elapsed() >= Duration::from_millis(timeout_ms.into()) {
                return Err(TIMEOUT);
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

fn supported_kinds() -> u64 {
    u64::from(nvmlEventTypeAll)
}

/// Returns the next event for a set, from the current state file.
///
/// # Errors
/// The set was freed, the library shut down, or one of the set's GPUs lost.
fn next_event(set: usize) -> NvmlResult<Option<nvmlEventData_t>> {
    let mut library = library();
    let loaded = library.current();
    if library.initialised == 0 {
        return Err(UNINITIALIZED);
    }
    let registrations = library.event_sets.get(&set).ok_or(INVALID_ARGUMENT)?;
    let wanted =
        |gpu: usize, kind: u64| registrations.iter().any(|(index, mask)| *index == gpu && mask & kind != 0);
    let events = loaded.state.events.iter().filter(|event| wanted(event.gpu, event.kind));
    let next = events.filter(|event| !library.delivered.contains(&event.seq)).min_by_key(|event| event.seq);
    if let Some(event) = next {
        library.delivered.insert(event.seq);
        return Ok(Some(nvmlEventData_t {
            device: handle(event.gpu, None),
            eventType: event.kind,
            eventData: event.data,
            gpuInstanceId: event.gi.unwrap_or(NO_INSTANCE),
            computeInstanceId: event.ci.unwrap_or(NO_INSTANCE),
        }));
    }
    if registrations.iter().any(|(index, _)| loaded.gpus.get(*index).is_some_and(|gpu| gpu.lost)) {
        return Err(GPU_IS_LOST);
    }
    Ok(None)
}

#[allow(clippy::disallowed_methods)] // a driver has a clock of its own
fn now() -> Instant {
    Instant::now()
}
