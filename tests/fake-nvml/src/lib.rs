//! A stand-in for `libnvidia-ml.so.1`, for tests.
//!
//! Built as a `cdylib`, it is a shared library with the C symbols of NVML, which nvml-wrapper, nvidia-ml-py and tools
//! based on them load unmodified. Its values come from a JSON file beside the loaded library. So every test copies the
//! library into its own directory, tests run in parallel, and no environment variable is needed.
//!
//! Built as an `rlib`, it is the API with which tests write that file: [`State`] and its parts, and
//! [`FakeNvml::install`].
//! ```ignore
//! let mut state = State::with_gpus(1);
//! state.gpus[0].memory.used = 21 << 30;
//! state.gpus[0].processes.push(Process::compute(std::process::id(), Some(20 << 30)));
//! let fake = FakeNvml::install(dir.path(), &state)?;
//! let nvml = Nvml::builder().lib_path(fake.path().as_os_str()).init()?;
//! ```
//!
//! It models the header and NVIDIA's documentation, not a driver: where the documentation has nothing, the README lists
//! the choices made here.
//!
//! `abi` has the C functions, `library` the state of the loaded library between calls.

#[allow(non_snake_case)] // the names are those of nvml.h
mod abi;
mod gpu;
mod install;
mod library;
mod script;
mod state;

pub use gpu::{
    Bar1, Clocks, Ecc, Field, FieldError, FieldKind, Gpu, Memory, MigDevice, NvLink, Pcie, Process,
    RemappedRows, RetiredPages, TypedField, Utilization, UtilizationSample,
};
pub use install::FakeNvml;
pub use script::Step;
pub use state::{Event, Fault, State};

/// Every NVML symbol that the library has, in no particular order.
pub fn symbols() -> impl Iterator<Item = &'static str> {
    abi::names()
}
