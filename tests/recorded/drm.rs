//! GPUs of DRM drivers. These hosts follow the kernel's documentation: nothing was recorded on such hardware.

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
fn discrete_amd_gpu_counts_clients_and_shared_buffers_once() {
    let host = Host::unpack("drm-amdgpu", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    let card = |pid, mib| ("card0".to_owned(), pid, mib);
    // two descriptors of one client, inherited by two workers, are 6 GiB once; the second client adds 4 MiB
    let notebook = 1024.0 - 32.0; // minus the buffers shared with the other process
    assert_eq!(process_memory(&metrics), [card(904, 6148.0), card(949, notebook), card(975, 256.0)]);
    assert_balanced(&metrics);
    let gpu = [("gpu", "card0")];
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 284.0 * MIB);
    assert_eq!(metrics.value("memledger_gpu_memory_accounting_conflicts_total", &gpu), 0.0);
    for container in [TRAINER, NOTEBOOK] {
        let of = [("gpu", "card0"), ("container_name", container)];
        assert_eq!(metrics.value("memledger_container_gpu_processes", &of), 1.0);
    }
    host.compare("drm-amdgpu", &no_nvml());
}

#[test]
fn amd_gpu_has_the_values_of_its_hardware_monitor() {
    let host = Host::unpack("drm-amdgpu", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    let value = |name: &str| metrics.get(&format!("memledger_gpu_{name}"), &[("gpu", "card0")]);
    assert_eq!((value("power_watts"), value("power_limit_watts")), (Some(211.0), Some(327.0)));
    assert_eq!((value("temperature_celsius"), value("memory_temperature_celsius")), (Some(54.0), Some(82.0)));
    for (clock, hertz) in [("sm", 2.482e9), ("memory", 1.249e9)] {
        assert_eq!(metrics.value("memledger_gpu_clock_hertz", &[("gpu", "card0"), ("clock", clock)]), hertz);
    }
}

#[test]
fn computing_process_has_its_memory_without_fdinfo() {
    let host = Host::unpack("drm-amdgpu", 2);
    // such as a process whose device has another path than /dev/dri in its container
    for number in [12, 15, 16] {
        std::fs::remove_file(host.path(&format!("proc/904/fd/{number}"))).unwrap();
    }
    for pid in [917, 918] {
        for number in [12, 15] {
            std::fs::remove_file(host.path(&format!("proc/{pid}/fd/{number}"))).unwrap();
        }
    }
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    let card = |pid, mib| ("card0".to_owned(), pid, mib);
    assert_eq!(process_memory(&metrics), [card(904, 6144.0), card(949, 992.0), card(975, 256.0)]);
    let of = [("gpu", "card0"), ("container_name", TRAINER)];
    assert_eq!(metrics.value("memledger_container_gpu_memory_used_bytes", &of), 6144.0 * MIB);
    assert_balanced(&metrics);
}

#[test]
fn graphics_of_a_processor_beside_nvidia_are_not_read() {
    let host = Host::unpack("drm-intel", 2);
    std::fs::write(host.path("dev/nvidiactl"), "").unwrap();
    let memledger = host.start(&no_nvml());
    let time = |metrics: &Metrics| metrics.value("memledger_snapshot_timestamp_seconds", &[]);
    let start = time(&memledger.fresh_metrics());
    // a reading of such a GPU takes 50 ms
    let metrics = memledger.eventually("cycles of three seconds", |metrics| match time(metrics) - start {
        passed if passed >= 3.0 => Ok(metrics.clone()),
        passed => Err(format!("{passed} s")),
    });
    for collector in ["drm", "drm_attribution"] {
        let success = metrics.get("memledger_collector_success", &[("collector", collector)]);
        assert_eq!(success, None, "{collector}");
    }
}

#[test]
fn integrated_gpu_has_process_memory_and_no_totals() {
    let host = Host::unpack("drm-intel", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    let card = |pid, mib| ("card0".to_owned(), pid, mib);
    assert_eq!(process_memory(&metrics), [card(904, 300.0), card(975, 120.0)]);
    for part in ["total", "used", "free", "reserved", "unattributed"] {
        let family = format!("memledger_gpu_memory_{part}_bytes");
        assert_eq!(metrics.all(&family, &[]), Vec::<&_>::new(), "{family}");
    }
    host.compare("drm-intel", &no_nvml());
}

#[test]
fn nvidia_card_is_read_by_nvml_only_beside_other_cards() {
    let host = Host::unpack("drm-mixed", 2);
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
        [row("0", 904, 2048.0), row("card1", 949, 2048.0), row("card1", 975, 64.0)]
    );
    let vendors: Vec<_> = metrics
        .all("memledger_gpu_info", &[])
        .iter()
        .map(|(_, labels, _)| labels["vendor"].clone())
        .collect();
    assert_eq!(vendors, ["nvidia", "intel"]);
    for (family, source) in
        ["visible", "expected"].into_iter().flat_map(|family| [(family, "nvml"), (family, "drm")])
    {
        let count = metrics.value(&format!("memledger_gpus_{family}"), &[("source", source)]);
        assert_eq!(count, 1.0, "{family} {source}");
    }
    assert_balanced(&metrics);
    host.compare("drm-mixed", &flags);
}

#[test]
fn host_without_render_nodes_has_no_drm_source() {
    let host = Host::unpack("v2-docker", 2);
    let metrics = Metrics::parse(&host.text(&no_nvml()));
    assert_eq!(metrics.all("memledger_collector_success", &[("collector", "drm")]), Vec::<&_>::new());
    assert_eq!(metrics.all("memledger_gpus_visible", &[]), Vec::<&_>::new());
}

fn rewrite(path: &Path, change: impl Fn(&str) -> String) {
    let text = std::fs::read_to_string(path).unwrap();
    let new = path.with_extension("new");
    std::fs::write(&new, change(&text)).unwrap();
    std::fs::rename(&new, path).unwrap(); // atomically
}

#[test]
fn client_moves_to_the_oldest_child_when_the_parent_ends() {
    let host = Host::unpack("drm-amdgpu", 2);
    let memledger = host.start(&no_nvml());
    let wait = |pid: u32, mib: f64| {
        memledger.eventually(&format!("{mib} MiB of {pid}"), |metrics| {
            match process_memory(metrics).iter().find(|(_, of, _)| *of == pid) {
                Some((_, _, found)) if *found == mib => Ok(()),
                found => Err(format!("{found:?}; {}", memledger.log())),
            }
        });
    };
    wait(904, 6148.0);
    std::fs::remove_dir_all(host.path("proc/904")).unwrap();
    wait(917, 6144.0);
    let metrics = memledger.fresh_metrics();
    assert_balanced(&metrics);
    assert!(
        process_memory(&metrics).iter().all(|(_, pid, _)| *pid != 918),
        "its sibling has no memory of its own"
    );
}

#[test]
fn counts_conflict_if_processes_use_more_than_the_device() {
    let host = Host::unpack("drm-amdgpu", 2);
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
            rest if rest == 284.0 * MIB => Ok(()),
            rest => Err(format!("{rest} bytes unattributed")),
        }
    });
}

#[test]
fn missing_driver_fails_and_its_families_return_with_it() {
    let host = Host::unpack("drm-amdgpu", 2);
    let memledger = host.start(&no_nvml());
    let is = |up: f64| {
        memledger.eventually(&format!("collector drm is {up}"), |metrics| {
            match metrics.get("memledger_collector_success", &[("collector", "drm")]) {
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
    let host = Host::unpack("drm-amdgpu", 2);
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

#[test]
fn utilization_comes_from_engines_and_is_absent_for_kfd() {
    let host = Host::unpack("drm-amdgpu", 2);
    let memledger = host.start(&no_nvml());
    let share = |metrics: &Metrics, pid: &str| {
        metrics.get("memledger_process_gpu_utilization_ratio", &[("gpu", "card0"), ("pid", pid)])
    };
    memledger.eventually("a second reading", |metrics| share(metrics, "949").ok_or_else(|| memledger.log()));
    let mut busy_ns = 1_000_000_000_u64;
    memledger.eventually("work", |metrics| {
        busy_ns += 5_000_000; // it keeps working
        rewrite(&host.path("proc/949/fdinfo/8"), |text| {
            let (before, rest) = text.split_once("drm-engine-gfx:\t").unwrap();
            format!("{before}drm-engine-gfx:\t{busy_ns} ns\n{}", rest.split_once('\n').unwrap().1)
        });
        match share(metrics, "949") {
            Some(busy) if busy > 0.0 && busy <= 1.0 => Ok(()),
            busy => Err(format!("{busy:?}")),
        }
    });
    let metrics = memledger.fresh_metrics();
    assert_eq!(share(&metrics, "904"), None, "the driver does not report work through /dev/kfd");
    assert_eq!(
        metrics.get("memledger_container_gpu_utilization_ratio", &[("container_name", TRAINER)]),
        None
    );
    assert_eq!(
        metrics.value("memledger_gpu_utilization_ratio", &[("gpu", "card0")]),
        0.87,
        "by its firmware"
    );
}

/// Waits for a counted read error.
fn after_malformed_value(memledger: &Memledger) -> Metrics {
    let malformed = [("collector", "drm"), ("reason", "malformed")];
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
    let host = Host::unpack("drm-amdgpu", 2);
    rewrite(&host.path("proc/949/fdinfo/8"), |text| text.replace("1048576 KiB", "26214400 KiB"));
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
    let host = Host::unpack("drm-amdgpu", 2);
    rewrite(&host.path("proc/949/fdinfo/8"), |text| text.replace("1048576 KiB", "18446744073709551615 KiB"));
    let memledger = host.start(&no_nvml());
    let metrics = after_malformed_value(&memledger);
    assert!(process_memory(&metrics).iter().all(|(_, pid, _)| *pid != 949), "{:?}", process_memory(&metrics));
    let of = [("container_name", NOTEBOOK)];
    assert_eq!(metrics.get("memledger_container_gpu_memory_used_bytes", &of), None);
    assert!(metrics.series.iter().all(|(_, _, value)| *value < 2f64.powi(62)));
    assert_balanced(&metrics);
}

#[test]
fn process_over_the_descriptor_limit_has_no_value() {
    let host = Host::unpack("drm-amdgpu", 2);
    let info = std::fs::read(host.path("proc/949/fdinfo/8")).unwrap();
    for number in 1000..1600 {
        let link = host.path(&format!("proc/949/fd/{number}"));
        std::os::unix::fs::symlink("/dev/dri/renderD128", link).unwrap();
        std::fs::write(host.path(&format!("proc/949/fdinfo/{number}")), &info).unwrap();
    }
    let memledger = host.start(&no_nvml());
    let io = [("collector", "drm"), ("reason", "io")];
    memledger.eventually("a read error", |metrics| {
        match metrics.try_value("memledger_collector_read_errors_total", &io)? {
            0.0 => Err("none yet".to_owned()),
            _ => Ok(()),
        }
    });
    let metrics = memledger.fresh_metrics();
    let card = |pid, mib| ("card0".to_owned(), pid, mib);
    assert_eq!(process_memory(&metrics), [card(904, 6148.0), card(975, 256.0)]);
    let of = |name| [("gpu", "card0"), ("container_name", name)];
    let family = "memledger_container_gpu_memory_used_bytes";
    assert_eq!(metrics.get(family, &of(NOTEBOOK)), None, "a partial sum is not exported");
    assert_eq!(metrics.value(family, &of(TRAINER)), 6148.0 * MIB);
    assert_balanced(&metrics);
}

#[test]
fn without_permission_attributes_nothing_and_doctor_has_the_fix() {
    let host = Host::unpack("drm-amdgpu", 2);
    // the real processes of this machine, as a user without access to those of others
    std::fs::set_permissions(host.root.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
    let sysfs = format!("--path.sysfs={}", host.path("sys").display());
    let flags = [
        &sysfs,
        "--docker.socket=",
        "--podman.socket=",
        "--oom.kernel-log=off",
        "--state.path=",
        "--no-collector.gpu",
    ];
    if !std::path::Path::new("/proc/self/ns/pid")
        .read_link()
        .is_ok_and(|link| link.as_os_str() == "pid:[4026531836]")
    {
        return crate::support::skip("these tests do not run in the initial pid namespace");
    }
    let doctor = std::process::Command::new(user[0])
        .args(&user[1..])
        .arg(crate::support::binary())
        .arg("doctor")
        .args(flags)
        .output()
        .expect("setpriv runs");
    let text = String::from_utf8_lossy(&doctor.stdout);
    let row = text.lines().skip_while(|line| !line.contains(" DRM ")).take(3).collect::<Vec<_>>().join("\n");
    assert!(
        row.contains("MISSING") && row.contains("card0 (amdgpu)") && row.contains("SYS_PTRACE"),
        "{text}"
    );
    let mut all = vec!["--gpu.interval=50ms"];
    all.extend(flags);
    let memledger = crate::support::Memledger::start_through(&user, &all);
    let denied = [("collector", "drm"), ("reason", "permission")];
    memledger.eventually("read errors", |metrics| {
        match metrics.try_value("memledger_collector_read_errors_total", &denied)? {
            0.0 => Err("none yet".to_owned()),
            _ => Ok(()),
        }
    });
    let metrics = memledger.fresh_metrics();
    let gpu = [("gpu", "card0")];
    assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), 7680.0 * MIB);
    assert_eq!(metrics.get("memledger_gpu_host_processes_memory_bytes", &gpu), None, "unknown is not zero");
    assert!(memledger.log().contains("CAP_SYS_PTRACE"), "{}", memledger.log());
    let errors = metrics.value("memledger_collector_read_errors_total", &denied);
    let later = memledger.fresh_metrics();
    let new = later.value("memledger_collector_read_errors_total", &denied) - errors;
    assert!(new < errors, "a process counts once, not at each scan: {errors} and then {new} more");
}
