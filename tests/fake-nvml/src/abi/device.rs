//! Lists devices, and their constant properties.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlPciInfo_t};

use super::{
    Call, GPU_IS_LOST, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, NvmlResult, Out, Text, entry_points,
    handle, injected, put_chars,
};
use crate::gpu::Gpu;
use crate::library::library;

entry_points! {
    fn nvmlDeviceGetCount(call, count: Out<c_uint>) {
        count.put(call.loaded()?.gpus.len() as c_uint)
    }

    fn nvmlDeviceGetCount_v2(call, count: Out<c_uint>) {
        count.put(call.loaded()?.gpus.len() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex(call, index: c_uint, device: Out<nvmlDevice_t>) {
        device.put(by_index(call, index as usize)?)
    }

    fn nvmlDeviceGetHandleByIndex_v2(call, index: c_uint, device: Out<nvmlDevice_t>) {
        device.put(by_index(call, index as usize)?)
    }

    fn nvmlDeviceGetHandleByUUID(call, uuid: Text, device: Out<nvmlDevice_t>) {
        let uuid = uuid.get()?;
        let found = find(call, |gpu| gpu.uuid == uuid).or_else(|code| mig_by_uuid(call, &uuid).ok_or(code))?;
        device.put(found)
    }

    fn nvmlDeviceGetHandleBySerial(call, serial: Text, device: Out<nvmlDevice_t>) {
        let serial = serial.get()?;
        device.put(find(call, |gpu| gpu.serial.as_ref() == Some(&serial))?)
    }

    fn nvmlDeviceGetHandleByPciBusId(call, bus_id: Text, device: Out<nvmlDevice_t>) {
        device.put(by_bus_id(call, &bus_id.get()?)?)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(call, bus_id: Text, device: Out<nvmlDevice_t>) {
        device.put(by_bus_id(call, &bus_id.get()?)?)
    }

    /// Of a MIG device: its index among the MIG devices of its GPU.
    fn nvmlDeviceGetIndex(call, device: nvmlDevice_t, index: Out<c_uint>) {
        let target = call.target(device)?;
        let place = |uuid: &str| target.gpu.mig.iter().flatten().position(|mig| mig.uuid == uuid);
        let number = target.mig.as_ref().and_then(|mig| place(&mig.uuid)).unwrap_or(target.index);
        index.put(number as c_uint)
    }

    fn nvmlDeviceGetUUID(call, device: nvmlDevice_t, uuid: Out<c_char>, length: c_uint) {
        let target = call.target(device)?;
        uuid.put_text(length, target.mig.as_ref().map_or(&target.gpu.uuid, |mig| &mig.uuid))
    }

    fn nvmlDeviceGetName(call, device: nvmlDevice_t, name: Out<c_char>, length: c_uint) {
        let target = call.target(device)?;
        let of_mig = target.mig.as_ref().and_then(|mig| mig.name.as_ref());
        name.put_text(length, of_mig.unwrap_or(&target.gpu.name))
    }

    fn nvmlDeviceGetSerial(call, device: nvmlDevice_t, serial: Out<c_char>, length: c_uint) {
        serial.put_text(length, call.gpu(device)?.serial.as_ref().ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetVbiosVersion(call, device: nvmlDevice_t, version: Out<c_char>, length: c_uint) {
        version.put_text(length, call.gpu(device)?.vbios.as_ref().ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetMinorNumber(call, device: nvmlDevice_t, minor: Out<c_uint>) {
        minor.put(call.gpu(device)?.minor)
    }

    fn nvmlDeviceGetNumGpuCores(call, device: nvmlDevice_t, cores: Out<c_uint>) {
        cores.put(call.gpu(device)?.cores.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetCudaComputeCapability(call, device: nvmlDevice_t, major: Out<c_int>, minor: Out<c_int>) {
        let capability = call.target(device)?.gpu.compute_capability;
        major.put(capability[0])?;
        minor.put(capability[1])
    }

    fn nvmlDeviceGetPciInfo_v3(call, device: nvmlDevice_t, info: Out<nvmlPciInfo_t>) {
        let gpu = call.target(device)?.gpu;
        info.put(pci_info(&gpu.bus_id).ok_or(INVALID_ARGUMENT)?)
    }

    /// Windows only.
    fn nvmlDeviceGetDriverModel(call, device: nvmlDevice_t, _current: Out<c_uint>, _pending: Out<c_uint>) {
        call.gpu(device).and(Err(NOT_SUPPORTED))
    }
}

/// A lost GPU is still counted, but has no handle.
fn by_index(call: &Call, index: usize) -> NvmlResult<nvmlDevice_t> {
    let loaded = call.loaded()?;
    let gpu = library().take_step(loaded, call.symbol, index).ok_or(INVALID_ARGUMENT)?;
    if gpu.lost {
        return Err(GPU_IS_LOST);
    }
    injected(gpu.errors.get(call.symbol))?;
    Ok(handle(index, None))
}

fn find(call: &Call, wanted: impl Fn(&Gpu) -> bool) -> NvmlResult<nvmlDevice_t> {
    let index = call.loaded()?.gpus.iter().position(|gpu| wanted(gpu)).ok_or(NOT_FOUND)?;
    by_index(call, index)
}

fn by_bus_id(call: &Call, bus_id: &str) -> NvmlResult<nvmlDevice_t> {
    let address = bus_address(bus_id).ok_or(NOT_FOUND)?;
    find(call, |gpu| bus_address(&gpu.bus_id) == Some(address))
}

fn mig_by_uuid(call: &Call, uuid: &str) -> Option<nvmlDevice_t> {
    let gpus = call.loaded.gpus.iter().enumerate();
    gpus.filter(|(_, gpu)| !gpu.lost).find_map(|(index, gpu)| {
        let number = gpu.mig.iter().flatten().position(|mig| mig.uuid == uuid)?;
        Some(handle(index, Some(number)))
    })
}

/// Domain, bus, device and function of `[domain:]bus:device.function`, all hexadecimal.
pub(crate) fn bus_address(bus_id: &str) -> Option<[u32; 4]> {
    let (rest, function) = bus_id.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let number = |digits: &str| u32::from_str_radix(digits, 16).ok();
    Some([number(domain)?, number(bus)?, number(device)?, number(function)?])
}

fn pci_info(bus_id: &str) -> Option<nvmlPciInfo_t> {
    let [domain, bus, device, function] = bus_address(bus_id)?;
    let mut info = nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain,
        bus,
        device,
        // An H100 SXM, device in the high half and vendor in the low one.
        pciDeviceId: 0x2330_10de,
        pciSubSystemId: 0x16c1_10de,
        busId: [0; 32],
    };
    put_chars(&mut info.busIdLegacy, &format!("{domain:04X}:{bus:02X}:{device:02X}.{function:X}"));
    put_chars(&mut info.busId, &format!("{domain:08X}:{bus:02X}:{device:02X}.{function:X}"));
    Some(info)
}
