//! A stand-in for `libnvidia-ml.so.1`, for tests.
//!
//! Built as a `cdylib` it is a shared library with the C symbols of NVML, which nvml-wrapper, nvidia-ml-py
//! and tools built on them load unmodified. Its answers come from a JSON file beside the loaded library, so
//! every test copies the library into a directory of its own and tests run in parallel, with no environment
//! variable between them.
//!
//! Built as an `rlib` it is what a test writes that file with: [`State`] and its parts, and
//! [`FakeNvml::install`].
//! ```ignore
//! let mut state = State::with_gpus(1);
//! state.gpus[0].memory.used = 21 << 30;
//! state.gpus[0].processes.push(Process::compute(std::process::id(), Some(20 << 30)));
//! let fake = FakeNvml::install(dir.path(), &state)?;
//! let nvml = Nvml::builder().lib_path(fake.path().as_os_str()).init()?;
//! ```
//!
//! It models the header and NVIDIA's documentation, not a driver: what no document says is a choice made
//! here, and the README lists those choices.
//!
//! `abi` has the C functions, `library` what the loaded library remembers between two calls.

#[allow(non_snake_case)] // the names are those of nvml.h
mod abi;
mod gpu;
mod install;
mod library;
mod script;
mod state;

pub use gpu::{
    Accounting, Bar1, Clocks, Ecc, Field, FieldError, FieldKind, Gpu, Memory, MigDevice, NvLink, Pcie,
    Process, RemappedRows, RetiredPages, TypedField, Utilization, UtilizationSample,
};
pub use install::FakeNvml;
pub use script::Step;
pub use state::{Event, State};

/// Every NVML symbol that the library has, in no particular order.
pub fn symbols() -> impl Iterator<Item = &'static str> {
    abi::names()
}
