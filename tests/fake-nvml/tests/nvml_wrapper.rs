//! The installed library as nvml-wrapper sees it: loaded from its own directory, with nothing replaced.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use fake_nvml::{
    Ecc, Event, FakeNvml, Field, FieldKind, Memory, MigDevice, Process, RemappedRows, RetiredPages, State,
    Step, UtilizationSample,
};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, PerformancePolicy, RetirementCause, TemperatureSensor,
};
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use serde_json::json;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// A library in a directory of its own, loaded.
struct Host {
    fake: FakeNvml,
    nvml: Nvml,
    _dir: TempDir,
}

fn host(state: &State) -> Host {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fake = FakeNvml::install(dir.path(), state).expect("installing the library");
    let nvml = load(fake.path()).expect("loading the library");
    Host { fake, nvml, _dir: dir }
}

fn load(path: &Path) -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(path.as_os_str()).init()
}

#[test]
fn host_with_two_gpus_has_the_identity_of_each() {
    let host = host(&State::with_gpus(2));
    assert_eq!(host.nvml.device_count().unwrap(), 2);
    assert_eq!(host.nvml.sys_driver_version().unwrap(), "580.95.05");
    assert_eq!(host.nvml.sys_cuda_driver_version().unwrap(), 13000);
    let second = host.nvml.device_by_index(1).unwrap();
    assert_eq!(second.uuid().unwrap(), "GPU-00000000-0000-4000-8000-000000000001");
    assert_eq!(second.name().unwrap(), "NVIDIA H100 80GB HBM3");
    assert_eq!(second.minor_number().unwrap(), 1);
    assert_eq!(second.num_cores().unwrap(), 16896);
    assert_eq!(second.cuda_compute_capability().unwrap().major, 9);
    let pci = second.pci_info().unwrap();
    assert_eq!((pci.bus_id.as_str(), pci.bus), ("00000000:11:00.0", 0x11));
    let by_uuid = host.nvml.device_by_uuid("GPU-00000000-0000-4000-8000-000000000001").unwrap();
    assert_eq!(by_uuid.index().unwrap(), 1);
    assert_eq!(host.nvml.device_by_pci_bus_id("0000:11:00.0").unwrap().index().unwrap(), 1);
    assert!(matches!(host.nvml.device_by_index(2), Err(NvmlError::InvalidArg)));
}

#[test]
fn used_memory_excludes_the_reserved_in_v2_and_includes_it_in_v1() {
    let mut state = State::with_gpus(1);
    state.gpus[0].memory = Memory { total: 80 * GIB, reserved: GIB, used: 20 * GIB, ..Memory::default() };
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    let info = device.memory_info().unwrap();
    assert_eq!((info.total, info.reserved, info.used, info.free), (80 * GIB, GIB, 20 * GIB, 59 * GIB));
    let mut v1 = nvml_wrapper_sys::bindings::nvmlMemory_t { total: 0, free: 0, used: 0 };
    // SAFETY: the handle is the library's own, and `v1` a struct of the type that the symbol writes.
    assert_eq!(unsafe { host.nvml.lib().nvmlDeviceGetMemoryInfo(device.handle(), &mut v1) }, 0);
    assert_eq!((v1.total, v1.used, v1.free), (80 * GIB, 21 * GIB, 59 * GIB));
}

#[test]
fn processes_are_in_the_list_of_their_kind_and_unknown_memory_is_not_a_number() {
    let mut state = State::with_gpus(1);
    state.gpus[0].processes = vec![
        Process::compute(11, Some(5 * GIB)),
        Process::compute(12, None),
        Process { kind: "G".into(), ..Process::compute(13, Some(1)) },
        Process { kind: "CM".into(), ..Process::compute(14, Some(2)) },
    ];
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    let compute = device.running_compute_processes().unwrap();
    let seen: Vec<_> = compute.iter().map(|process| (process.pid, process.used_gpu_memory.clone())).collect();
    let expected = vec![
        (11, UsedGpuMemory::Used(5 * GIB)),
        (12, UsedGpuMemory::Unavailable),
        (14, UsedGpuMemory::Used(2)),
    ];
    assert_eq!(seen, expected);
    assert!(compute.iter().all(|process| process.gpu_instance_id.is_none()));
    let pids = |list: Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>| -> Vec<u32> {
        list.iter().map(|process| process.pid).collect()
    };
    assert_eq!(pids(device.running_graphics_processes().unwrap()), [13]);
    assert_eq!(pids(device.mps_running_compute_processes().unwrap()), [14]);
}

#[test]
fn gpu_lost_between_two_calls_is_lost_in_all_and_recovers() {
    let mut state = State::with_gpus(2);
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    device.temperature(TemperatureSensor::Gpu).unwrap();
    state.gpus[0].lost = true;
    host.fake.set(&state).unwrap();
    assert!(matches!(device.temperature(TemperatureSensor::Gpu), Err(NvmlError::GpuLost)));
    assert!(matches!(device.running_compute_processes(), Err(NvmlError::GpuLost)));
    assert!(matches!(host.nvml.device_by_index(0), Err(NvmlError::GpuLost)));
    assert_eq!(host.nvml.device_count().unwrap(), 2, "a lost GPU is still counted");
    host.nvml.device_by_index(1).unwrap().memory_info().unwrap();
    state.gpus[0].lost = false;
    host.fake.set(&state).unwrap();
    device.memory_info().unwrap();
}

#[test]
fn injected_errors_hit_their_symbol_on_their_gpu_and_no_other() {
    let mut state = State::with_gpus(2);
    state.gpus[1].errors.insert("nvmlDeviceGetPowerUsage".into(), 999);
    state.function_not_found.insert("nvmlDeviceGetTotalEnergyConsumption".into());
    state.errors.insert("nvmlSystemGetNVMLVersion".into(), 4);
    let host = host(&state);
    let [first, second] = [0, 1].map(|index| host.nvml.device_by_index(index).unwrap());
    assert_eq!(first.power_usage().unwrap(), 71_000);
    assert!(matches!(second.power_usage(), Err(NvmlError::Unknown)));
    second.temperature(TemperatureSensor::Gpu).unwrap();
    assert!(matches!(first.total_energy_consumption(), Err(NvmlError::FunctionNotFound)));
    assert!(matches!(host.nvml.sys_nvml_version(), Err(NvmlError::NoPermission)));
}

#[test]
fn values_that_a_gpu_lacks_are_not_supported() {
    let mut state = State::with_gpus(1);
    let gpu = &mut state.gpus[0];
    gpu.memory.supported = false;
    gpu.temperature_c = None;
    gpu.ecc = None;
    gpu.numbers.insert("nvmlDeviceGetPerformanceState".into(), None);
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    assert!(matches!(device.memory_info(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.temperature(TemperatureSensor::Gpu), Err(NvmlError::NotSupported)));
    assert!(matches!(device.is_ecc_enabled(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.performance_state(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.fan_speed(0), Err(NvmlError::NotSupported)));
    assert_eq!(device.clock_info(Clock::Memory).unwrap(), 2619);
}

#[test]
fn script_changes_successive_readings_of_one_symbol_and_repeats_its_last_step() {
    let mut state = State::with_gpus(2);
    state.gpus[0].processes = vec![Process::compute(11, Some(GIB))];
    let steps = vec![
        Step::new(0, json!({"processes": [{"pid": 21, "used": 1}, {"pid": 22, "used": null}]})),
        Step::new(0, json!({"errors": {"nvmlDeviceGetComputeRunningProcesses_v3": 999}})),
        Step::new(0, json!({})),
    ];
    state.script.insert("nvmlDeviceGetComputeRunningProcesses_v3".into(), steps);
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    assert_eq!(host.nvml.device_by_index(1).unwrap().running_compute_processes().unwrap(), []);
    // nvml-wrapper calls twice for one reading, first for the length: that uses no step.
    let pids = |list: Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>| -> Vec<u32> {
        list.iter().map(|process| process.pid).collect()
    };
    assert_eq!(pids(device.running_compute_processes().unwrap()), [21, 22]);
    assert!(matches!(device.running_compute_processes(), Err(NvmlError::Unknown)));
    assert_eq!(pids(device.running_compute_processes().unwrap()), [11]);
    assert_eq!(pids(device.running_compute_processes().unwrap()), [11]);
    host.fake.set(&state).unwrap();
    assert_eq!(
        pids(device.running_compute_processes().unwrap()),
        [21, 22],
        "a new state starts its scripts anew"
    );
}

#[test]
fn new_state_has_a_later_time_also_within_one_clock_tick() {
    let mut state = State::with_gpus(1);
    let host = host(&state);
    let file = std::fs::File::open(format!("{}.json", host.fake.path().display())).unwrap();
    let ahead = file.metadata().unwrap().modified().unwrap() + Duration::from_secs(3600);
    file.set_modified(ahead).unwrap();
    let device = host.nvml.device_by_index(0).unwrap();
    state.gpus[0].temperature_c = Some(35);
    host.fake.set(&state).unwrap();
    assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 35);
    let file = std::fs::File::open(format!("{}.json", host.fake.path().display())).unwrap();
    assert!(file.metadata().unwrap().modified().unwrap() > ahead);
}

#[test]
fn a_torn_state_file_keeps_the_old_state_and_a_missing_one_is_a_host_without_gpus() {
    let state = State::with_gpus(1);
    let host = host(&state);
    let file = format!("{}.json", host.fake.path().display());
    host.nvml.device_by_index(0).unwrap();
    std::fs::write(&file, br#"{"driver_version": "580."#).unwrap();
    assert_eq!(host.nvml.device_count().unwrap(), 1);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(host.nvml.device_count().unwrap(), 0);
    host.fake.set(&state).unwrap();
    assert_eq!(host.nvml.device_count().unwrap(), 1);
}

#[test]
fn driver_is_reported_as_not_loaded_until_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State { init_error: Some(9), ..State::with_gpus(1) };
    let fake = FakeNvml::install(dir.path(), &state).unwrap();
    assert!(matches!(load(fake.path()), Err(NvmlError::DriverNotLoaded)));
    state.init_error = None;
    fake.set(&state).unwrap();
    assert_eq!(load(fake.path()).unwrap().device_count().unwrap(), 1);
}

#[test]
fn after_shutdown_the_library_is_uninitialised_for_its_handles() {
    let Host { fake, nvml, _dir } = host(&State::with_gpus(1));
    let second = load(fake.path()).unwrap();
    nvml.shutdown().unwrap();
    second.device_count().expect("initialised twice, shut down once");
    // SAFETY: takes no argument; the wrapper's own shutdown on drop then fails, which it ignores.
    assert_eq!(unsafe { second.lib().nvmlShutdown() }, 0);
    assert!(matches!(second.device_count(), Err(NvmlError::Uninitialized)));
}

#[test]
fn symbol_can_be_absent_from_the_library() {
    let missing = "nvmlDeviceGetMemoryInfo_v2".to_owned();
    let mut state = State { missing_symbols: [missing].into(), ..State::with_gpus(1) };
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    assert!(matches!(device.memory_info(), Err(NvmlError::FailedToLoadSymbol(_))));
    assert!(host.nvml.lib().nvmlDeviceGetMemoryInfo.is_ok(), "its older version is there");
    state.missing_symbols.clear();
    assert!(host.fake.set(&state).is_err(), "a loaded library cannot grow symbols");
}

#[test]
fn records_of_32_bytes_shift_all_but_the_first_under_a_caller_that_expects_24() {
    let mut state = State::with_gpus_on_r535(1);
    state.gpus[0].processes = (1..=3).map(|pid| Process::compute(pid, Some(GIB))).collect();
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    let seen = device.running_compute_processes().unwrap();
    assert_eq!(seen.len(), 3);
    assert_eq!(seen[0].pid, 1);
    assert_ne!(seen[1].pid, 2, "the second record starts 8 bytes later than the caller believes");
    let mut count = 16;
    // SAFETY: nvmlProcessDetail_v1_t is plain numbers, for which zero is a value.
    let mut records: [nvml_wrapper_sys::bindings::nvmlProcessDetail_v1_t; 16] = unsafe { std::mem::zeroed() };
    let symbol = host.nvml.lib().nvmlDeviceGetComputeRunningProcesses_v3.as_ref().unwrap();
    // SAFETY: the buffer has 16 records of the 32 bytes that this state makes the symbol write.
    let code = unsafe { symbol(device.handle(), &mut count, records.as_mut_ptr().cast()) };
    assert_eq!((code, count), (0, 3));
    assert_eq!(
        records[..3].iter().map(|record| (record.pid, record.usedGpuMemory)).collect::<Vec<_>>(),
        [(1, GIB), (2, GIB), (3, GIB)]
    );
    assert!(host.nvml.lib().nvmlDeviceGetRunningProcessDetailList.is_err());
}

#[test]
fn a_mig_device_has_its_own_memory_and_processes() {
    let mut state = State::with_gpus(1);
    let gpu = &mut state.gpus[0];
    let uuid = "MIG-00000000-0000-4000-8000-000000000007".to_owned();
    let small = Memory { total: 10 * GIB, reserved: 0, used: GIB, ..Memory::default() };
    let of = |gi| Process { gi: Some(gi), ci: Some(0), ..Process::compute(100 + gi, Some(GIB)) };
    gpu.mig = Some(vec![
        MigDevice { gi: 1, ..MigDevice::default() },
        MigDevice { uuid: uuid.clone(), gi: 7, memory: small, ..MigDevice::default() },
    ]);
    gpu.processes = vec![of(1), of(7)];
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    assert_eq!(
        device.running_compute_processes().unwrap().len(),
        2,
        "the GPU lists the processes of all instances"
    );
    assert!(matches!(device.utilization_rates(), Err(NvmlError::NotSupported)));
    let instance = device.mig_device_by_index(1).unwrap();
    assert!(instance.mig_is_mig_device_handle().unwrap());
    assert_eq!(instance.uuid().unwrap(), uuid);
    assert_eq!(instance.memory_info().unwrap().used, GIB);
    let processes = instance.running_compute_processes().unwrap();
    assert_eq!(processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [107]);
    assert_eq!((processes[0].gpu_instance_id, processes[0].compute_instance_id), (Some(7), Some(0)));
    assert_eq!(instance.mig_parent_device().unwrap().index().unwrap(), 0);
    assert!(matches!(device.mig_device_by_index(2), Err(NvmlError::NotFound)));
}

#[test]
fn health_readings_come_from_the_state() {
    let mut state = State::with_gpus(1);
    let gpu = &mut state.gpus[0];
    gpu.ecc = Some(Ecc { corrected: 4, uncorrected: 1, volatile_corrected: 2, volatile_uncorrected: 0 });
    gpu.retired_pages = Some(RetiredPages { single_bit: vec![0x1000, 0x2000], ..RetiredPages::default() });
    gpu.remapped_rows = Some(RemappedRows { uncorrectable: 3, pending: true, ..RemappedRows::default() });
    gpu.pcie.replays = Some(17);
    gpu.violation_ns = BTreeMap::from([(0, 5_000_000_000)]);
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    assert_eq!(device.total_ecc_errors(MemoryError::Corrected, EccCounter::Aggregate).unwrap(), 4);
    assert_eq!(device.total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile).unwrap(), 2);
    assert_eq!(device.retired_pages(RetirementCause::MultipleSingleBitEccErrors).unwrap().len(), 2);
    assert_eq!(device.retired_pages(RetirementCause::DoubleBitEccError).unwrap(), []);
    assert_eq!(device.pcie_replay_counter().unwrap(), 17);
    assert_eq!(device.violation_status(PerformancePolicy::Power).unwrap().violation_time, 5_000_000_000);
    assert!(matches!(device.violation_status(PerformancePolicy::Thermal), Err(NvmlError::NotSupported)));
    let [mut correctable, mut uncorrectable, mut pending, mut failure] = [9; 4];
    let symbol = host.nvml.lib().nvmlDeviceGetRemappedRows.as_ref().unwrap();
    // SAFETY: the handle is the library's own, the four places are of the type that the symbol writes.
    let code =
        unsafe { symbol(device.handle(), &mut correctable, &mut uncorrectable, &mut pending, &mut failure) };
    assert_eq!((code, correctable, uncorrectable, pending, failure), (0, 0, 3, 1, 0));
}

#[test]
fn utilization_samples_and_fields_come_from_the_state() {
    let mut state = State::with_gpus(1);
    let gpu = &mut state.gpus[0];
    let sample =
        |pid, time_us| UtilizationSample { pid, time_us: Some(time_us), sm: 50, ..Default::default() };
    gpu.utilization_samples = vec![sample(1, 1000), sample(2, 2000)];
    gpu.fields = BTreeMap::from([
        (186, Field::from(512_345)),
        (1, Field::typed(FieldKind::U32, 61)),
        (2, Field::error(15)),
    ]);
    let host = host(&state);
    let device = host.nvml.device_by_index(0).unwrap();
    assert_eq!(device.process_utilization_stats(0).unwrap().len(), 2);
    assert_eq!(device.process_utilization_stats(1000).unwrap()[0].pid, 2);
    assert!(matches!(device.process_utilization_stats(2000), Err(NvmlError::NotFound)));
    let fields = device.field_values_for(&[FieldId(186), FieldId(1), FieldId(2), FieldId(3)]).unwrap();
    let values: Vec<_> = fields.into_iter().map(|field| field.unwrap().value).collect();
    assert!(matches!(values[0], Ok(SampleValue::U64(512_345))));
    assert!(matches!(values[1], Ok(SampleValue::U32(61))));
    assert!(matches!(values[2], Err(NvmlError::GpuLost)));
    assert!(matches!(values[3], Err(NvmlError::NotSupported)));
}

#[test]
fn an_xid_is_delivered_once_to_a_set_that_registered_for_its_gpu() {
    let mut state = State::with_gpus(2);
    let host = host(&state);
    let set = host.nvml.create_event_set().unwrap();
    let device = host.nvml.device_by_index(1).unwrap();
    let set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).unwrap();
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    state.events = vec![Event::xid(1, 0, 48), Event::xid(2, 1, 79)];
    host.fake.set(&state).unwrap();
    let event = set.wait(10_000).unwrap();
    assert_eq!(event.device.index().unwrap(), 1);
    assert_eq!(event.event_data, Some(XidError::Value(79)));
    assert!(
        matches!(set.wait(0), Err(NvmlError::Timeout)),
        "GPU 0 is not of this set, and GPU 1 was delivered"
    );
    state.gpus[1].lost = true;
    host.fake.set(&state).unwrap();
    assert!(matches!(set.wait(10_000), Err(NvmlError::GpuLost)));
}
