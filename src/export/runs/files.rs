//! A run for other tools: its timeline as CSV, and the `memory_usage.json` of older ones.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::runs::{GpuPeak, OperationPeak, RunRecord};

/// Bytes of the unit that `memory_usage` calls MB.
const MB: f64 = 1_048_576.0;

/// Returns the timeline of a run as CSV, in bytes; a value that was not measured is empty.
pub fn csv(run: &RunRecord) -> String {
    let cell = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
    let header = "timestamp,unreclaimable_bytes,gpu_bytes,torch_reserved_bytes\n".to_owned();
    run.timeline.iter().fold(header, |mut text, point| {
        let cells = [point.unreclaimable_bytes, point.gpu_bytes, point.torch_reserved_bytes].map(cell);
        let _ = writeln!(text, "{:.3},{}", point.at, cells.join(","));
        text
    })
}

/// Returns a run as the `memory_usage.json` of the Python client and of older tools: MB are 2^20 bytes, `null` is not measured, and GPU
/// memory is 0 on a host without a GPU. One entry for each record that the program reported; of a program that reports none, for each
/// operation, else for each point of the timeline.
pub fn memory_usage(run: &RunRecord) -> Value {
    let entry = |component: &str, operation: &str, at: f64, bytes: [Option<u64>; 4]| {
        let [cpu, used, peak, reserved] = in_mb(run, bytes);
        json!({"component": component, "operation": operation, "timestamp": at, "cpu_ram_used_mb": cpu,
            "gpu_ram_used_mb": used, "gpu_ram_peak_mb": peak, "reserved_gpu_ram_mb": reserved})
    };
    let name = &run.subject.identity.name;
    let records = run.log.iter();
    let mut log: Vec<Value> =
        records.map(|record| entry(&record.component, &record.operation, record.at, record.bytes)).collect();
    if log.is_empty() {
        let of = |peak: &OperationPeak| {
            let torch =
                [peak.torch_allocated_bytes, peak.torch_allocated_peak_bytes, peak.torch_reserved_bytes];
            let [used, highest, reserved] = torch;
            entry(&peak.component, &peak.operation, peak.at, [peak.rss_bytes, used, highest, reserved])
        };
        log = run.operations.iter().map(of).collect();
    }
    if log.is_empty() {
        let points = run.timeline.iter();
        log = points
            .map(|point| {
                let bytes = [point.unreclaimable_bytes, point.gpu_bytes, None, point.torch_reserved_bytes];
                entry(name, "sample", point.at, bytes)
            })
            .collect();
    }
    let at = |entry: &Value| entry["timestamp"].as_f64().unwrap_or_default();
    log.sort_by(|one, other| at(one).total_cmp(&at(other)));
    json!({"detailed_log": log, "peak_usage": peaks(run)})
}

/// Returns bytes of host memory, and three of GPU memory, in MB. What is on no GPU takes none.
fn in_mb(run: &RunRecord, bytes: [Option<u64>; 4]) -> [Option<f64>; 4] {
    let none = (run.host_has_gpu == Some(false)).then_some(0);
    let [cpu, used, peak, reserved] = bytes;
    [cpu, used.or(none), peak.or(none), reserved.or(none)].map(|bytes| bytes.map(|bytes| bytes as f64 / MB))
}

/// Returns the peaks of a run, by the rule of the Python client: the higher of what the operations and what the whole run had. Where a
/// program reports no operations, `gpu_ram_used_mb` is the memory of its processes, as the driver says.
fn peaks(run: &RunRecord) -> Value {
    let most = |of: fn(&OperationPeak) -> Option<u64>| run.operations.iter().filter_map(of).max();
    let logged = |number: usize| run.log.iter().filter_map(|record| record.bytes[number]).max();
    let sum =
        |of: fn(&GpuPeak) -> Option<u64>| run.gpus.values().filter_map(of).reduce(|one, other| one + other);
    let reports = !run.operations.is_empty() || !run.log.is_empty();
    let used = if reports { None } else { sum(|gpu| gpu.peak_bytes) };
    let [cpu, used, peak, reserved] = in_mb(
        run,
        [
            most(|peak| peak.rss_bytes).max(run.unreclaimable_peak_bytes).max(logged(0)),
            most(|peak| peak.torch_allocated_bytes).max(used).max(logged(1)),
            most(|peak| peak.torch_allocated_peak_bytes)
                .max(sum(|gpu| gpu.torch_allocated_peak_bytes))
                .max(logged(2)),
            most(|peak| peak.torch_reserved_bytes)
                .max(sum(|gpu| gpu.torch_reserved_peak_bytes))
                .max(logged(3)),
        ],
    );
    json!({"cpu_ram_used_mb": cpu, "gpu_ram_used_mb": used, "gpu_ram_peak_mb": peak, "reserved_gpu_ram_mb": reserved})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::runs::tests::run;
    use crate::runs::TimelinePoint;
    use crate::runs::operation_log::OperationRecord;

    #[test]
    fn memory_usage_has_operations_or_else_the_timeline() {
        let mut run = run("train", "32", 4 << 20);
        run.timeline =
            vec![TimelinePoint { at: 1.5, unreclaimable_bytes: Some(3 << 20), ..TimelinePoint::default() }];
        let entry = json!({"component": "train", "operation": "sample", "timestamp": 1.5,
            "cpu_ram_used_mb": 3.0, "gpu_ram_used_mb": null, "gpu_ram_peak_mb": null, "reserved_gpu_ram_mb": null});
        assert_eq!(memory_usage(&run)["detailed_log"], json!([entry]));
        let peaks = json!({"cpu_ram_used_mb": 2.0, "gpu_ram_used_mb": 4.0, "gpu_ram_peak_mb": null, "reserved_gpu_ram_mb": null});
        assert_eq!(memory_usage(&run)["peak_usage"], peaks);
        let gpu = run.gpus.get_mut("GPU-a").expect("a GPU");
        gpu.torch_allocated_peak_bytes = Some(1 << 20);
        assert_eq!(memory_usage(&run)["peak_usage"]["gpu_ram_used_mb"], 4.0, "as the entries, by the driver");
        run.operations = vec![OperationPeak {
            component: "model".into(),
            operation: "load".into(),
            at: 2.0,
            torch_allocated_bytes: Some(1 << 20),
            torch_allocated_peak_bytes: Some(2 << 20),
            torch_reserved_bytes: Some(3 << 20),
            rss_bytes: Some(4 << 20),
        }];
        let entry = json!({"component": "model", "operation": "load", "timestamp": 2.0,
            "cpu_ram_used_mb": 4.0, "gpu_ram_used_mb": 1.0, "gpu_ram_peak_mb": 2.0, "reserved_gpu_ram_mb": 3.0});
        assert_eq!(memory_usage(&run)["detailed_log"], json!([entry]));
        let peaks = json!({"cpu_ram_used_mb": 4.0, "gpu_ram_used_mb": 1.0, "gpu_ram_peak_mb": 2.0, "reserved_gpu_ram_mb": 3.0});
        assert_eq!(memory_usage(&run)["peak_usage"], peaks, "no lower than the log");
        run.gpus.get_mut("GPU-a").expect("a GPU").torch_allocated_peak_bytes = Some(20 << 30);
        let peak = memory_usage(&run)["peak_usage"]["gpu_ram_peak_mb"].clone();
        assert_eq!(peak, 20_480.0, "an operation that is not tracked had more");
        run.operations
            .insert(0, OperationPeak { operation: "train".into(), at: 3.0, ..run.operations[0].clone() });
        let log = memory_usage(&run)["detailed_log"].clone();
        assert_eq!([&log[0]["operation"], &log[1]["operation"]], ["load", "train"], "by time");
        assert_eq!(csv(&run).lines().nth(1), Some("1.500,3145728,,"));
    }

    #[test]
    fn memory_usage_has_each_record_at_its_time_and_zeros_on_a_host_without_a_gpu() {
        let record = |at: f64, bytes| OperationRecord {
            component: "model".into(),
            operation: "generate".into(),
            at,
            bytes,
        };
        let log = vec![
            record(5.0, [Some(1 << 20), None, None, None]),
            record(6.5, [Some(2 << 20), None, None, None]),
        ];
        let mut run = RunRecord {
            operations: vec![],
            host_has_gpu: Some(false),
            gpus: [].into(),
            log,
            ..run("a", "8", 1)
        };
        let entry = |at: f64, cpu: f64, gpu: Option<f64>| {
            json!({"component": "model", "operation": "generate", "timestamp": at, "cpu_ram_used_mb": cpu,
                "gpu_ram_used_mb": gpu, "gpu_ram_peak_mb": gpu, "reserved_gpu_ram_mb": gpu})
        };
        let log = memory_usage(&run)["detailed_log"].clone();
        assert_eq!(log, json!([entry(5.0, 1.0, Some(0.0)), entry(6.5, 2.0, Some(0.0))]));
        assert_eq!(memory_usage(&run)["peak_usage"]["gpu_ram_peak_mb"], 0.0);
        for unknown in [None, Some(true)] {
            run.host_has_gpu = unknown;
            assert_eq!(memory_usage(&run)["detailed_log"][0], entry(5.0, 1.0, None), "{unknown:?}");
        }
        run.log[0].bytes[2] = Some(3 << 20);
        assert_eq!(memory_usage(&run)["detailed_log"][0]["gpu_ram_peak_mb"], 3.0);
        assert_eq!(memory_usage(&run)["peak_usage"]["gpu_ram_peak_mb"], 3.0, "no lower than the log");
    }
}
