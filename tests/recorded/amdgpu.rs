//! GPUs of AMD. The host follows the kernel's documentation and source: nothing was recorded on such hardware.

use std::path::Path;

use fake_nvml::{FakeNvml, Process, State};

use super::Host;
use crate::support::{Memledger, Metrics};

const MIB: f64 = 1048576.0;
const PROCESS_MEMORY: &str = "memledger_process_gpu_memory_used_bytes";
const TRAINER: &str = "ce5d6d4195c3";
const NOTEBOOK: &str = "9f04b65ba7e9";

/// Flags without NVML, whatever the machine of the test has.
fn no_nvml() -> Vec<String> {
    vec!["--no-collector.gpu".to_owned(), "--gpu.interval=50ms".to_owned()]
}

/// Returns GPU, pid and MiB of every process with a value.
fn process_memory(metrics: &Metrics) -> Vec<(String, u32, f64)> {
    let rows = metrics.all(PROCESS_MEMORY, &[]).into_iter();
    let row = |(_, labels, bytes): &(String, std::collections::BTreeMap<String, String>, f64)| {
        (labels["gpu"].clone(), labels["pid"].parse().unwrap(), bytes / MIB)
    };
    let mut rows: Vec<_> = rows.map(row).collect();
    rows.sort_by(|a, b| a.partial_cmp(b).unwrap());
    rows
}

/// Asserts for every GPU with memory that used = containers + host processes + unattributed.
fn assert_balanced(metrics: &Metrics) {
    for (_, labels, used) in metrics.all("memledger_gpu_memory_used_bytes", &[]) {
        let gpu = [("gpu", labels["gpu"].as_str())];
        let containers = metrics.sum("memledger_container_gpu_memory_used_bytes", &gpu);
        let host = metrics.value("memledger_gpu_host_processes_memory_bytes", &gpu);
        let rest = metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu);
        assert_eq!(*used, containers + host + rest, "{labels:?}");
    }
}

#[test]
fn memory_of_computing_processes_balances() {
    let host = Host::unpack("amdgpu", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    let card = |pid, mib| ("card0".to_owned(), pid, mib);
    assert_eq!(process_memory(&metrics), [card(904, 6144.0), card(949, 992.0), card(975, 256.0)]);
    assert_balanced(&metrics);
    let gpu = [("gpu", "card0")];
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 288.0 * MIB);
    assert_eq!(metrics.value("memledger_gpu_memory_accounting_conflicts_total", &gpu), 0.0);
    assert_eq!(metrics.value("memledger_gpu_utilization_ratio", &gpu), 0.87, "by its firmware");
    for container in [TRAINER, NOTEBOOK] {
        let of = [("gpu", "card0"), ("container_name", container)];
        assert_eq!(metrics.value("memledger_container_gpu_processes", &of), 1.0);
        let share = metrics.get("memledger_container_gpu_utilization_ratio", &of);
        assert_eq!(share, None, "the driver does not report it by process");
    }
    host.compare("amdgpu", &no_nvml());
}

#[test]
fn amd_gpu_has_the_values_of_its_hardware_monitor() {
    let host = Host::unpack("amdgpu", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    let value = |name: &str| metrics.get(&format!("memledger_gpu_{name}"), &[("gpu", "card0")]);
    assert_eq!((value("power_watts"), value("power_limit_watts")), (Some(211.0), Some(327.0)));
    assert_eq!((value("temperature_celsius"), value("memory_temperature_celsius")), (Some(54.0), Some(82.0)));
    for (clock, hertz) in [("sm", 2.482e9), ("memory", 1.249e9)] {
        assert_eq!(metrics.value("memledger_gpu_clock_hertz", &[("gpu", "card0"), ("clock", clock)]), hertz);
    }
}

#[test]
fn without_the_compute_driver_all_memory_is_unattributed() {
    let host = Host::unpack("amdgpu", 2);
    std::fs::remove_file(host.path("sys/class/kfd/kfd")).unwrap();
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    assert_eq!(process_memory(&metrics), []);
    let gpu = [("gpu", "card0")];
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 7680.0 * MIB);
    assert_eq!(metrics.get("memledger_gpu_host_processes_memory_bytes", &gpu), None, "unknown is not zero");
}

#[test]
fn nvidia_card_is_read_by_nvml_only_beside_an_amd_card() {
    let host = Host::unpack("amdgpu", 2);
    let device = host.path("sys/class/drm/renderD129/device");
    std::fs::create_dir_all(&device).unwrap();
    std::fs::write(device.join("uevent"), "DRIVER=nvidia\nPCI_ID=10DE:2684\nPCI_SLOT_NAME=0000:01:00.0\n")
        .unwrap();
    let mut state = State::with_gpus(1);
    state.gpus[0].memory.used = 3 << 30;
    state.gpus[0].bus_id = "00000000:01:00.0".into();
    state.gpus[0].processes = vec![Process::compute(904, Some(2 << 30))];
    let fake = FakeNvml::install(host.root.path(), &state).unwrap();
    let flags =
        [format!("--gpu.nvml-library={}", fake.path().display()), "--gpu.interval=50ms".to_owned()].to_vec();
    let metrics = Metrics::parse(&host.text(&flags));
    let row = |gpu: &str, pid, mib| (gpu.to_owned(), pid, mib);
    assert_eq!(
        process_memory(&metrics),
        [
            row("0", 904, 2048.0),
            row("card0", 904, 6144.0),
            row("card0", 949, 992.0),
            row("card0", 975, 256.0)
        ]
    );
    let vendors: Vec<_> = metrics
        .all("memledger_gpu_info", &[])
        .iter()
        .map(|(_, labels, _)| labels["vendor"].clone())
        .collect();
    assert_eq!(vendors, ["nvidia", "amd"]);
    for (family, source) in
        ["visible", "expected"].into_iter().flat_map(|family| [(family, "nvml"), (family, "amdgpu")])
    {
        let count = metrics.value(&format!("memledger_gpus_{family}"), &[("source", source)]);
        assert_eq!(count, 1.0, "{family} {source}");
    }
    assert_balanced(&metrics);
}

#[test]
fn host_without_render_nodes_has_no_such_source() {
    let host = Host::unpack("v2-docker", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    assert_eq!(metrics.all("memledger_collector_success", &[("collector", "amdgpu")]), Vec::<&_>::new());
    assert_eq!(metrics.all("memledger_gpus_visible", &[]), Vec::<&_>::new());
}

fn rewrite(path: &Path, change: impl Fn(&str) -> String) {
    let text = std::fs::read_to_string(path).unwrap();
    let new = path.with_extension("new");
    std::fs::write(&new, change(&text)).unwrap();
    std::fs::rename(&new, path).unwrap(); // atomically
}

#[test]
fn counts_conflict_if_processes_use_more_than_the_device() {
    let host = Host::unpack("amdgpu", 2);
    let used = host.path("sys/devices/pci0000:00/0000:03:00.0/mem_info_vram_used");
    rewrite(&used, |_| "1048576\n".to_owned());
    let memledger = host.start(&no_nvml());
    let gpu = [("gpu", "card0")];
    let conflicts = |metrics: &Metrics| match metrics
        .try_value("memledger_gpu_memory_accounting_conflicts_total", &gpu)?
    {
        conflicts if conflicts >= 2.0 => Ok(metrics.clone()),
        conflicts => Err(format!("{conflicts} conflicts")),
    };
    let metrics = memledger.eventually("two conflicts", conflicts);
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 0.0);
    rewrite(&used, |_| format!("{}\n", 7680_u64 << 20));
    memledger.eventually("the sum to match", |metrics| {
        match metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu) {
            rest if rest == 288.0 * MIB => Ok(()),
            rest => Err(format!("{rest} bytes unattributed")),
        }
    });
}

#[test]
fn missing_driver_fails_and_its_families_return_with_it() {
    let host = Host::unpack("amdgpu", 2);
    let memledger = host.start(&no_nvml());
    let is = |up: f64| {
        memledger.eventually(&format!("collector amdgpu is {up}"), |metrics| {
            match metrics.get("memledger_collector_success", &[("collector", "amdgpu")]) {
                Some(value) if value == up => Ok(metrics.clone()),
                value => Err(format!("{value:?}; {}", memledger.log())),
            }
        })
    };
    is(1.0);
    let (class, away) = (host.path("sys/class/drm"), host.path("sys/class/away"));
    std::fs::rename(&class, &away).unwrap();
    let metrics = is(0.0);
    assert_eq!(metrics.all("memledger_gpu_info", &[]), Vec::<&_>::new());
    assert!(metrics.value("memledger_container_memory_usage_bytes", &[("container_name", TRAINER)]) > 0.0);
    std::fs::rename(&away, &class).unwrap();
    assert_eq!(is(1.0).all("memledger_gpu_info", &[]).len(), 1);
}

#[test]
fn attributes_nothing_outside_the_initial_pid_namespace() {
    let host = Host::unpack("amdgpu", 2);
    let link = host.path("proc/self/ns/pid");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("pid:[4026532999]", &link).unwrap();
    let memledger = host.start(&no_nvml());
    memledger.eventually("the GPU", |metrics| metrics.try_value("memledger_gpus_visible", &[]));
    let metrics = memledger.fresh_metrics();
    assert_eq!(process_memory(&metrics), []);
    let gpu = [("gpu", "card0")];
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 7680.0 * MIB);
    assert_eq!(metrics.get("memledger_gpu_host_processes_memory_bytes", &gpu), None, "unknown is not zero");
    assert!(memledger.log().contains("pid namespace"), "{}", memledger.log());
}

/// Waits for a counted read error.
fn after_malformed_value(memledger: &Memledger) -> Metrics {
    let malformed = [("collector", "amdgpu"), ("reason", "malformed")];
    memledger.eventually("a read error", |metrics| {
        match metrics.try_value("memledger_collector_read_errors_total", &malformed)? {
            0.0 => Err("none yet".to_owned()),
            _ => Ok(()),
        }
    });
    memledger.fresh_metrics()
}

#[test]
fn rejects_processes_with_more_memory_than_the_device() {
    let host = Host::unpack("amdgpu", 2);
    rewrite(&host.path("sys/class/kfd/kfd/proc/949/vram_30381"), |_| format!("{}\n", 25_u64 << 30));
    let memledger = host.start(&no_nvml());
    let metrics = after_malformed_value(&memledger);
    let gpu = [("gpu", "card0")];
    assert_eq!(process_memory(&metrics), []);
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 7680.0 * MIB);
    assert_eq!(metrics.get("memledger_gpu_host_processes_memory_bytes", &gpu), None, "unknown is not zero");
    assert_eq!(metrics.value("memledger_gpu_memory_accounting_conflicts_total", &gpu), 0.0);
}

#[test]
fn impossible_values_are_absent_and_counted() {
    let host = Host::unpack("amdgpu", 2);
    rewrite(&host.path("sys/class/kfd/kfd/proc/949/vram_30381"), |_| "18446744073709551615\n".to_owned());
    let memledger = host.start(&no_nvml());
    let metrics = after_malformed_value(&memledger);
    assert!(process_memory(&metrics).iter().all(|(_, pid, _)| *pid != 949), "{:?}", process_memory(&metrics));
    let of = [("container_name", NOTEBOOK)];
    assert_eq!(metrics.get("memledger_container_gpu_memory_used_bytes", &of), None);
    assert!(metrics.series.iter().all(|(_, _, value)| *value < 2f64.powi(62)));
    assert_balanced(&metrics);
}
