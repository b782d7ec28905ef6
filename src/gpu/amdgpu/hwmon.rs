//! Power, temperature and clocks from the hardware monitor (hwmon) of amdgpu, whose units are microwatts, millidegrees and hertz.

use std::path::Path;

use super::sysfs::{names, number, text, value};
use crate::gpu::DeviceHealth;

/// Values above these are no measurements.
const MAX_MICROWATTS: u64 = 100_000_000_000;
const MAX_MILLIDEGREES: u64 = 200_000;
const MAX_HERTZ: u64 = 100_000_000_000;
/// amdgpu has up to this number of temperature sensors: edge, junction, memory.
const SENSORS: u8 = 3;

/// Reads the values of a device into `health`. What its driver does not report stays as it is.
pub fn read(device: &Path, health: &mut DeviceHealth, read_errors: &mut Vec<&'static str>) {
    let hwmon = device.join("hwmon");
    let monitors = value(names(&hwmon, "hwmon"), read_errors).unwrap_or_default();
    let Some(folder) = monitors.first().map(|name| hwmon.join(name)) else { return };
    if !text(&folder.join("name")).is_ok_and(|name| name == "amdgpu") {
        return;
    }
    let mut read = |name: &str, max, unit| {
        let number = value(number(&folder.join(name), max), read_errors)?;
        Some(number as f64 / unit)
    };
    // the second name since Linux 6.6, for GPUs that report only the power of this moment
    health.power_watts =
        read("power1_average", MAX_MICROWATTS, 1e6).or_else(|| read("power1_input", MAX_MICROWATTS, 1e6));
    health.power_limit_watts = read("power1_cap", MAX_MICROWATTS, 1e6);
    health.clocks_hertz = [read("freq1_input", MAX_HERTZ, 1.0), read("freq2_input", MAX_HERTZ, 1.0)];
    let [mut edge, mut junction] = [None; 2];
    for sensor in 1..=SENSORS {
        let label = text(&folder.join(format!("temp{sensor}_label")));
        let place = match label.as_deref() {
            Ok("edge") => &mut edge,
            Ok("junction") => &mut junction,
            Ok("mem") => &mut health.memory_temperature_celsius,
            Err(_) if sensor == 1 => &mut edge, // GPUs with a single sensor have no label in old kernels
            _ => continue,
        };
        *place = read(&format!("temp{sensor}_input"), MAX_MILLIDEGREES, 1e3).or(*place);
    }
    health.temperature_celsius = edge.or(junction);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is read of a device with these files of its monitor.
    fn health(files: &[(&str, &str)]) -> (DeviceHealth, Vec<&'static str>) {
        let device = tempfile::tempdir().unwrap();
        let folder = device.path().join("hwmon/hwmon4");
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let (mut health, mut read_errors) = Default::default();
        read(device.path(), &mut health, &mut read_errors);
        (health, read_errors)
    }

    #[test]
    fn reads_the_units_and_sensors_of_amdgpu() {
        let (found, read_errors) = health(&[
            ("name", "amdgpu\n"),
            ("power1_average", "211000000\n"),
            ("power1_cap", "327000000\n"),
            ("freq1_input", "2482000000\n"),
            ("freq2_input", "1249000000\n"),
            ("temp1_label", "edge\n"),
            ("temp1_input", "54000\n"),
            ("temp2_label", "junction\n"),
            ("temp2_input", "71000\n"),
            ("temp3_label", "mem\n"),
            ("temp3_input", "82500\n"),
        ]);
        let wanted = DeviceHealth {
            power_watts: Some(211.0),
            power_limit_watts: Some(327.0),
            clocks_hertz: [Some(2.482e9), Some(1.249e9)],
            temperature_celsius: Some(54.0),
            memory_temperature_celsius: Some(82.5),
            ..DeviceHealth::default()
        };
        assert_eq!((found, read_errors), (wanted, vec![]));
    }

    #[test]
    fn missing_sensors_are_absent_and_impossible_values_counted() {
        let (found, read_errors) = health(&[
            ("name", "amdgpu\n"),
            ("power1_input", "95500000\n"),
            ("temp1_label", "junction\n"),
            ("temp1_input", "60000\n"),
            ("freq1_input", "18446744073709551615\n"),
        ]);
        let wanted = DeviceHealth {
            power_watts: Some(95.5),
            temperature_celsius: Some(60.0),
            ..DeviceHealth::default()
        };
        assert_eq!((found, read_errors), (wanted, vec!["malformed"]));
        assert_eq!(health(&[("name", "nvme\n"), ("temp1_input", "1\n")]), Default::default());
    }
}
