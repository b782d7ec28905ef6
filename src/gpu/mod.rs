//! GPUs: devices, their memory, and the memory of each process on them.
//!
//! The driver's library may hang for ever when a GPU falls off the bus, or crash. So only a process of its own loads it
//! ([`driver_process`]), which a thread supervises ([`supervisor`]) at its own interval. Nothing waits for that thread: a cycle takes
//! its newest output ([`reader_output`]).
//!
//! Not here: attribution of processes to containers, and sums (`attribute`).

pub mod amdgpu;
mod assembler;
pub mod device_metrics;
pub mod driver_process;
mod driver_state;
mod nvml;
pub mod pid_resolver;
mod probe;
pub mod protocol;
pub mod reader_output;
pub mod supervisor;
pub mod types;

use std::sync::Arc;

use crate::catalog::*;
use crate::series::{Label, Series};

pub use device_metrics::{DeviceHealth, XidCount};
pub use driver_state::DriverState;
pub use probe::{NvmlProbe, probe};
pub use reader_output::{ReaderOutput, SharedOutput};
pub use types::{
    DeviceMemory, DeviceSample, GpuDevice, GpuIdentity, GpuProcess, GpuReading, GpuSample, MigInstance,
    PidTrust,
};

/// Writes the series of each device by itself. `first` is the number of the first device.
pub fn write(reading: &GpuReading, first: u32, series: &mut Series) {
    let text = |value: &Option<Arc<str>>| value.as_ref().map_or(Label::Fixed(""), Label::from);
    for (number, device) in (first..).zip(&reading.devices) {
        let identity = &device.identity;
        let labels = [
            Label::from(&identity.model),
            identity.vendor.into(),
            text(&reading.driver_version),
            text(&reading.cuda_version),
            (&identity.compute_capability).into(),
            (&identity.cuda_cores).into(),
            (&identity.pci_bus_id).into(),
            identity.instance.as_ref().map_or(Label::Fixed(""), |instance| (&instance.uuid).into()),
        ];
        series.gpu(GPU_INFO, number, labels, 1.0);
        let memory = device.memory;
        let parts = [
            (GPU_MEMORY_TOTAL, memory.total),
            (GPU_MEMORY_USED, memory.used),
            (GPU_MEMORY_FREE, memory.free),
            (GPU_MEMORY_RESERVED, memory.reserved),
        ];
        for (family, bytes) in parts {
            if let Some(bytes) = bytes {
                series.gpu(family, number, [], bytes as f64);
            }
        }
        device.health.write(number, series);
    }
}
