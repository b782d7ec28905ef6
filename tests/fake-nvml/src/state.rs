//! The state file: the driver, its faults, the GPUs and their events.
//!
//! A missing field has its default. Unknown fields are rejected, and so are symbol names that this library does not
//! have: a misspelt name in a test would otherwise inject nothing and let the test pass.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::script::{self, Step};

/// The state of the library; the README describes it as JSON.
///
/// `State::default()` is a driver without GPUs, which the library also uses without a state file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct State {
    /// The version that `nvidia-smi` prints.
    pub driver_version: String,
    /// CUDA's major version, a dot, and the driver's version.
    pub nvml_version: String,
    /// 1000 * major + 10 * minor, as NVML reports it.
    pub cuda_version: i32,
    /// The code that each form of `nvmlInit` returns instead of success; 9 is *driver not loaded*.
    pub init_error: Option<u32>,
    /// Symbols that always return this code. 0 injects nothing.
    pub errors: BTreeMap<String, u32>,
    /// Symbols that are delayed by this many milliseconds.
    pub slow_ms: BTreeMap<String, u64>,
    /// Symbols that use this many microseconds of CPU first.
    pub busy_us: BTreeMap<String, u64>,
    /// Symbols that never return. A call that hangs does so for ever, even when its symbol is removed from the state.
    pub hang: BTreeSet<String>,
    /// Symbols that damage the process that calls them, or end it.
    pub faults: BTreeMap<String, Fault>,
    /// Whether the library's destructor never returns, as if it waited for the lock of a call that hangs.
    pub hang_at_exit: bool,
    /// Symbols that exist and return 13 (*function not found*), like a library that is newer than its driver.
    pub function_not_found: BTreeSet<String>,
    /// Symbols that the library does not have, like an older one. [`FakeNvml::install`](crate::FakeNvml::install)
    /// removes them from the copy; a state file that is written by other means cannot do that.
    pub missing_symbols: BTreeSet<String>,
    /// The size of a record of the `_v3` process lists: 24 as in the header, or 32 as in some R535 drivers.
    pub process_record_bytes: u32,
    /// Values that change from call to call, by symbol.
    pub script: BTreeMap<String, Vec<Step>>,
    /// Whether to count the calls of every symbol; see [`FakeNvml::calls`](crate::FakeNvml::calls).
    pub count_calls: bool,
    /// The GPUs, in the order of their index.
    pub gpus: Vec<Gpu>,
    /// The events for event sets; each is delivered once per loaded library.
    pub events: Vec<Event>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            driver_version: "580.95.05".into(),
            nvml_version: "13.580.95.05".into(),
            cuda_version: 13000,
            init_error: None,
            errors: BTreeMap::new(),
            slow_ms: BTreeMap::new(),
            busy_us: BTreeMap::new(),
            hang: BTreeSet::new(),
            faults: BTreeMap::new(),
            hang_at_exit: false,
            function_not_found: BTreeSet::new(),
            missing_symbols: BTreeSet::new(),
            process_record_bytes: 24,
            script: BTreeMap::new(),
            count_calls: false,
            gpus: Vec::new(),
            events: Vec::new(),
        }
    }
}

impl State {
    /// Returns a healthy, idle host with `count` GPUs, each with its own UUID, bus id and minor number.
    pub fn with_gpus(count: u32) -> Self {
        Self { gpus: (0..count).map(Gpu::numbered).collect(), ..Self::default() }
    }

    /// Returns the same host with an early R535 driver: process records of 32 bytes, and no process detail list.
    pub fn with_gpus_on_r535(count: u32) -> Self {
        Self {
            driver_version: "535.54.03".into(),
            nvml_version: "12.535.54.03".into(),
            cuda_version: 12020,
            process_record_bytes: 32,
            missing_symbols: BTreeSet::from(["nvmlDeviceGetRunningProcessDetailList".into()]),
            ..Self::with_gpus(count)
        }
    }

    /// Reads a state file and checks it.
    ///
    /// # Errors
    /// A text: JSON that does not parse, an unknown field, or an error of [`State::check`].
    pub fn from_json(json: &[u8]) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        state.check()?;
        Ok(state)
    }

    /// Checks that every symbol, script step, record size and process kind is valid.
    ///
    /// # Errors
    /// The first fault, as a text.
    pub fn check(&self) -> Result<(), String> {
        if ![24, 32].contains(&self.process_record_bytes) {
            return Err(format!("process_record_bytes is {}, not 24 or 32", self.process_record_bytes));
        }
        let known: BTreeSet<&str> = crate::symbols().collect();
        let of_state = [&self.hang, &self.function_not_found, &self.missing_symbols].into_iter().flatten();
        let of_gpus = self.gpus.iter().flat_map(|gpu| gpu.errors.keys());
        let delays = self.slow_ms.keys().chain(self.busy_us.keys());
        let of_maps = self.errors.keys().chain(delays).chain(self.faults.keys()).chain(self.script.keys());
        if let Some(name) = of_state.chain(of_maps).chain(of_gpus).find(|name| !known.contains(name.as_str()))
        {
            return Err(format!("this library has no symbol {name}"));
        }
        for gpu in &self.gpus {
            gpu.check()?;
        }
        for event in &self.events {
            if event.gpu >= self.gpus.len() {
                return Err(format!("event {} names GPU {}, which does not exist", event.seq, event.gpu));
            }
        }
        script::expand(self).map(drop)
    }
}

/// What a broken library does to its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Accesses an address that is not mapped: SIGSEGV.
    Segfault,
    /// Calls `abort`: SIGABRT.
    Abort,
    /// Allocates and touches memory until an allocation fails, at most 512 MiB; then never returns.
    Grow,
    /// Writes 64 KiB of noise to standard input, which may be a socket, and then returns.
    Garbage,
}

/// An event of a GPU, for `nvmlEventSetWait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// The number of this event, unique in the life of one installed library. Lower numbers are delivered first.
    pub seq: u64,
    /// The index of the GPU.
    pub gpu: usize,
    /// The kind, as in `nvmlEventType*`. Default: 8, an Xid.
    #[serde(default = "Event::xid_type", rename = "type")]
    pub kind: u64,
    /// The Xid, or 0 for other kinds.
    #[serde(default)]
    pub data: u64,
    /// GPU instance under MIG.
    #[serde(default)]
    pub gi: Option<u32>,
    /// Compute instance under MIG.
    #[serde(default)]
    pub ci: Option<u32>,
}

impl Event {
    /// Returns an Xid of a whole GPU.
    pub fn xid(seq: u64, gpu: usize, xid: u64) -> Self {
        Self { seq, gpu, kind: Self::xid_type(), data: xid, gi: None, ci: None }
    }

    fn xid_type() -> u64 {
        u64::from(nvml_wrapper_sys::bindings::nvmlEventTypeXidCriticalError)
    }
}
