//! The whole state file: the driver, its faults, the GPUs and their events.
//!
//! A field that is left out takes its default, an unknown one is refused, and so is a symbol name that this
//! library does not have: a misspelt name in a test would otherwise inject nothing and let the test pass.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;
use crate::script::{self, Step};

/// What the library answers; see the README for the same as JSON.
///
/// `State::default()` is a driver without any GPU, which is also what the library answers when it has no
/// state file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct State {
    /// As `nvidia-smi` prints it.
    pub driver_version: String,
    /// CUDA's major version, a dot, the driver's version.
    pub nvml_version: String,
    /// 1000 * major + 10 * minor, as NVML reports it.
    pub cuda_version: i32,
    /// What each form of `nvmlInit` answers instead of success; 9 is *driver not loaded*.
    pub init_error: Option<u32>,
    /// Symbols that answer this code whatever they are asked. 0 injects nothing.
    pub errors: BTreeMap<String, u32>,
    /// Symbols that answer only after so many milliseconds.
    pub slow_ms: BTreeMap<String, u64>,
    /// Symbols that never return. A call that hangs does so for ever, also when the state no longer names its
    /// symbol.
    pub hang: BTreeSet<String>,
    /// The library's destructor never returns, as if it waited for the lock of a call that hangs.
    pub hang_at_exit: bool,
    /// Symbols that exist and answer 13 (*function not found*), as a library newer than its driver does.
    pub function_not_found: BTreeSet<String>,
    /// Symbols that the library does not have at all, as in an older one. Removed from the copy by
    /// [`FakeNvml::install`](crate::FakeNvml::install); a state file written by other means cannot do that.
    pub missing_symbols: BTreeSet<String>,
    /// Size of one record of the `_v3` process lists: 24 as in the header, or 32 as in some R535 drivers.
    pub process_record_bytes: u32,
    /// Answers that change from call to call, by symbol.
    pub script: BTreeMap<String, Vec<Step>>,
    /// Count the calls of every symbol; see [`FakeNvml::calls`](crate::FakeNvml::calls).
    pub count_calls: bool,
    /// In the order of their index.
    pub gpus: Vec<Gpu>,
    /// For event sets; each is delivered once per loaded library.
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
            hang: BTreeSet::new(),
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
    /// A healthy, idle host with `count` GPUs, each with its own UUID, bus id and minor number.
    pub fn with_gpus(count: u32) -> Self {
        Self { gpus: (0..count).map(Gpu::numbered).collect(), ..Self::default() }
    }

    /// The same host under an early R535 driver: process records of 32 bytes, and no process detail list.
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
    /// What is wrong, in words: JSON that does not parse, an unknown field, or what [`State::check`] says.
    pub fn from_json(json: &[u8]) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        state.check()?;
        Ok(state)
    }

    /// Whether every symbol, script step, record size and process kind makes sense.
    ///
    /// # Errors
    /// The first fault found, in words.
    pub fn check(&self) -> Result<(), String> {
        if ![24, 32].contains(&self.process_record_bytes) {
            return Err(format!("process_record_bytes is {}, not 24 or 32", self.process_record_bytes));
        }
        let known: BTreeSet<&str> = crate::symbols().collect();
        let of_state = [&self.hang, &self.function_not_found, &self.missing_symbols].into_iter().flatten();
        let of_gpus = self.gpus.iter().flat_map(|gpu| gpu.errors.keys());
        let of_maps = self.errors.keys().chain(self.slow_ms.keys()).chain(self.script.keys());
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

/// Something that happened to a GPU, for `nvmlEventSetWait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Number of this event, never used twice in the life of one installed library. Lower ones are delivered
    /// first.
    pub seq: u64,
    /// Index of the GPU.
    pub gpu: usize,
    /// Which kind, as in `nvmlEventType*`. Default: 8, an Xid.
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
    /// An Xid on a whole GPU.
    pub fn xid(seq: u64, gpu: usize, xid: u64) -> Self {
        Self { seq, gpu, kind: Self::xid_type(), data: xid, gi: None, ci: None }
    }

    fn xid_type() -> u64 {
        u64::from(nvml_wrapper_sys::bindings::nvmlEventTypeXidCriticalError)
    }
}
