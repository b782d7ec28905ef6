//! Renders events of the ledger: as JSON for `/api/v1/events`, and as a table for people.
//!
//! Names in events come from processes and images that may be hostile: [`sanitize_for_terminal`] escapes control sequences
//! in them.

use std::fmt::Write;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::events::{
    ContainerRef, CudaOom, Exit, ExitReason, GpuError, Kill, KillOwner, LedgerEvent, OomScope, Victim,
};
use crate::text::{duration, human_bytes, sanitize_for_terminal};

/// Maximum characters of a name in the table; the rest is cut off. JSON has the whole name.
const MAX_NAME_CHARS: usize = 48;

/// Returns a part of a response of the API, `{"NAME":[...]}`, from a page of rows of JSON, one per line. `is_first`: the page begins
/// the response; `is_last`: the page ends it. Only the last page may be empty.
pub fn json_page(name: &str, raw_json: &[String], is_first: bool, is_last: bool) -> String {
    let mut text = String::with_capacity(raw_json.iter().map(|row| row.len() + 2).sum::<usize>() + 32);
    if is_first {
        let _ = write!(text, "{{\"{name}\":[");
    }
    for (index, row) in raw_json.iter().enumerate() {
        text.push_str(if is_first && index == 0 { "\n" } else { ",\n" });
        text.push_str(row);
    }
    if is_last {
        text.push_str(if is_first && raw_json.is_empty() { "]}\n" } else { "\n]}\n" });
    }
    text
}

/// A table with one line per event, in the given order. It is rendered part by part, so that its length costs no memory.
#[derive(Debug)]
pub struct EventTable {
    zone: TimeZone,
    widths: [usize; 3],
    /// Events that no counter has are marked.
    marks_uncounted: bool,
}

impl EventTable {
    const HEADER: [&str; 4] = ["TIME", "WHAT", "CONTAINER", "DETAILS"];

    /// Creates a table with times in this zone.
    pub fn new(zone: TimeZone) -> Self {
        let [time, what, container, _] = Self::HEADER.map(str::len);
        Self { zone, widths: [time, what, container], marks_uncounted: false }
    }

    /// Marks the events from before the first start of memledger, which no counter has.
    pub fn marking_uncounted(self) -> Self {
        Self { marks_uncounted: true, ..self }
    }

    /// Widens the columns for this event.
    pub fn fit(&mut self, event: &LedgerEvent) {
        let row = self.row(event);
        for (width, text) in std::iter::zip(&mut self.widths, &row) {
            *width = (*width).max(text.chars().count());
        }
    }

    /// Returns the first line.
    pub fn header(&self) -> String {
        self.line(&Self::HEADER.map(str::to_owned))
    }

    /// Returns the line of an event.
    pub fn render(&self, event: &LedgerEvent) -> String {
        self.line(&self.row(event))
    }

    fn row(&self, event: &LedgerEvent) -> [String; 4] {
        let (what, mut details) = describe(event);
        if self.marks_uncounted && event.is_before_counting() {
            details.push_str("; before counting");
        }
        [time(event.at(), &self.zone), what.to_owned(), container(event), details]
    }

    fn line(&self, [time, what, container, details]: &[String; 4]) -> String {
        let [first, second, third] = self.widths;
        format!("{time:<first$}  {what:<second$}  {container:<third$}  {details}\n")
    }
}

/// Describes an event on one line: type, container, details.
pub fn sentence(event: &LedgerEvent) -> String {
    let (what, details) = describe(event);
    format!("{what}: {}: {details}", container(event))
}

fn describe(event: &LedgerEvent) -> (&'static str, String) {
    match event {
        LedgerEvent::OomKill(kill) => ("oom kill", kill_details(kill)),
        LedgerEvent::Exit(exit) => ("exit", exit_details(exit)),
        LedgerEvent::GpuError(error) => ("gpu error", gpu_error_details(error)),
        LedgerEvent::CudaOom(oom) => ("cuda oom", cuda_oom_details(oom)),
    }
}

/// Formats local time with its offset, because one hour repeats at the end of daylight saving time.
pub(super) fn time(unix: f64, zone: &TimeZone) -> String {
    match Timestamp::from_millisecond((unix * 1e3) as i64) {
        Ok(time) => time.to_zoned(zone.clone()).strftime("%Y-%m-%d %H:%M:%S%:z").to_string(),
        Err(_) => format!("{unix}"),
    }
}

fn container(event: &LedgerEvent) -> String {
    match event {
        LedgerEvent::OomKill(Kill { owner, .. }) => match owner {
            KillOwner::Container(subject) => container_path(subject),
            KillOwner::Pending => "(pending)".to_owned(),
            KillOwner::Host => "(outside containers)".to_owned(),
            KillOwner::Unattributed => "(unknown)".to_owned(),
        },
        LedgerEvent::Exit(exit) => container_path(&exit.subject),
        LedgerEvent::CudaOom(oom) => container_path(&oom.subject),
        LedgerEvent::GpuError(error) => {
            error.subject.as_ref().map_or_else(|| "(unknown)".to_owned(), container_path)
        }
    }
}

fn container_path(subject: &ContainerRef) -> String {
    let own = &subject.identity;
    let parts = [&own.k8s_namespace, &own.k8s_pod, &own.name];
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).map(|part| name(part)).collect();
    if parts.is_empty() { name(subject.container_id.get(..12).unwrap_or("")) } else { parts.join("/") }
}

fn kill_details(kill: &Kill) -> String {
    let mut who = if kill.process.is_empty() { "a process".to_owned() } else { name(&kill.process) };
    let pid = kill.pid.map(|pid| format!("pid {pid}"));
    let role = kill.role.map(|role| role.label().replace('_', " "));
    let about: Vec<_> = pid.into_iter().chain(role).collect();
    if !about.is_empty() {
        let _ = write!(who, " ({})", about.join(", "));
    }
    let mut parts = vec![who];
    match kill.victim {
        Some(Victim::Main) => parts.push("main: it ended the container".to_owned()),
        Some(Victim::Unknown) => parts.push("whether its container ended is not known".to_owned()),
        Some(Victim::Child) => parts.push("child: the container kept running".to_owned()),
        None => {}
    }
    let held = [(kill.anon_bytes, "anonymous"), (kill.file_bytes, "file"), (kill.shmem_bytes, "shared")];
    let held: Vec<_> = held
        .into_iter()
        .filter_map(|(bytes, kind)| Some(format!("{} {kind}", human_bytes(bytes? as f64))))
        .collect();
    if !held.is_empty() {
        parts.push(format!("held {}", held.join(", ")));
    }
    parts.push(match kill.scope {
        OomScope::Host => match kill.report.as_ref().map(|report| name(&report.nodes)) {
            Some(nodes) if !nodes.is_empty() => format!("NUMA nodes {nodes} ran out of memory"),
            _ => "the host ran out of memory".to_owned(),
        },
        OomScope::Container => {
            let limit =
                kill.limit_bytes.map_or_else(String::new, |bytes| format!(" {}", human_bytes(bytes as f64)));
            let of = if kill.limit_cgroup.is_empty() {
                String::new()
            } else {
                format!(" of {}", name(&kill.limit_cgroup))
            };
            format!("hit the limit{limit}{of}")
        }
    });
    if kill.kernel_usec.is_none() {
        parts.push("known only from a counter: the kernel log record is missing".to_owned());
    }
    parts.join("; ")
}

fn gpu_error_details(error: &GpuError) -> String {
    let used_by = error.pid.map(|pid| format!("; pid {pid} was using it")).unwrap_or_default();
    format!("Xid {} of GPU {} ({}){used_by}", error.xid, name(&error.gpu), name(&error.gpu_uuid))
}

fn cuda_oom_details(oom: &CudaOom) -> String {
    let bytes = |bytes: Option<u64>| bytes.map(|bytes| human_bytes(bytes as f64));
    let what = match bytes(oom.tried_bytes) {
        Some(tried) => format!("tried to allocate {tried}"),
        None => "an allocation failed".to_owned(),
    };
    let on = if oom.gpu.is_empty() { String::new() } else { format!(" on GPU {}", name(&oom.gpu)) };
    let mut parts = vec![format!("{what}{on}")];
    if let Some((free, total)) = bytes(oom.free_bytes).zip(bytes(oom.total_bytes)) {
        parts.push(format!("{free} of {total} free"));
    }
    if let Some((allocated, reserved)) = bytes(oom.allocated_bytes).zip(bytes(oom.reserved_bytes)) {
        parts.push(format!("the process held {reserved}, {allocated} of it in tensors"));
    }
    if !oom.component.is_empty() {
        parts.push(format!("in {}/{}", name(&oom.component), name(&oom.operation)));
    }
    parts.extend(oom.pid.map(|pid| format!("pid {pid}")));
    if !oom.snapshot.is_empty() {
        parts.push(format!("history of allocations in {}", sanitize_for_terminal(&oom.snapshot)));
    }
    parts.join("; ")
}

fn exit_details(exit: &Exit) -> String {
    let mut parts = vec![
        match exit.reason {
            Some(ExitReason::Completed) => "completed",
            Some(ExitReason::OomContainer) => "OOM: a memory limit was hit",
            Some(ExitReason::OomHost) => "OOM: the host ran out of memory",
            Some(ExitReason::Stopped) => "stopped on request",
            Some(ExitReason::Killed) => "killed from outside, no OOM",
            Some(ExitReason::Signal) => "ended by a signal",
            Some(ExitReason::Error) => "ended with an error",
            Some(ExitReason::HostRestart) => "ended by a restart of the host",
            Some(ExitReason::CudaOom) => "ended after a CUDA out-of-memory error",
            Some(ExitReason::Refused) => "ended after memory was refused, by its log",
            Some(ExitReason::OwnLimit) => "ended at a limit of the program's own, by its log",
            Some(ExitReason::Threads) => "ended after threads or processes were refused, by its log",
            Some(ExitReason::Shm) => "ended after /dev/shm was full, by its log",
            Some(ExitReason::Unknown) if exit.runtime_oom_flag == Some(true) => match exit.subject.is_run() {
                true => "OOM: its cgroup counted a kill of which there is no record",
                false => "OOM by its runtime's flag, most likely; there is no record of the kill",
            },
            Some(ExitReason::Unknown) => "unknown reason",
            None => "reason pending",
        }
        .to_owned(),
    ];
    if let Some(code) = exit.exit_code {
        parts.push(format!("exit code {code}"));
    }
    if let Some(signal) = exit.requested_signal() {
        parts.push(format!("stop requested with signal {signal}"));
    }
    if let Some(seconds) = exit.duration_seconds {
        parts.push(format!("ran {}", duration(seconds)));
    }
    match exit.oom_kills {
        0 => {}
        1 => parts.push("1 OOM kill".to_owned()),
        kills => parts.push(format!("{kills} OOM kills")),
    }
    if let Some(peak) = exit.peak_unreclaimable_bytes {
        parts.push(format!("peak {} unreclaimable", human_bytes(peak as f64)));
    } else if let Some(peak) = exit.peak_usage_bytes {
        parts.push(format!("peak {} including page cache", human_bytes(peak as f64)));
    }
    parts.join("; ")
}

/// Returns a name for a terminal: sanitized, and of bounded length.
fn name(text: &str) -> String {
    match text.char_indices().nth(MAX_NAME_CHARS) {
        Some((end, _)) => format!("{}…", sanitize_for_terminal(&text[..end])),
        None => sanitize_for_terminal(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn event(value: Value) -> LedgerEvent {
        serde_json::from_value(value).unwrap()
    }

    fn examples() -> Vec<LedgerEvent> {
        const GIB: u64 = 1 << 30;
        let id = "c0ffee".repeat(11);
        [
            json!({
                "type": "oom_kill", "id": 1, "at": 1_700_000_000.25, "boot_id": "b", "kernel_usec": 5, "pid": 4711,
                "process": "pt_data_worker", "role": "dataloader_worker", "owner": "container",
                "container_name": "train", "container_id": id, "victim": "child", "scope": "container",
                "anon_bytes": 3 * GIB, "file_bytes": 0, "shmem_bytes": GIB / 2, "limit_cgroup": "/docker/c0ffee",
                "limit_bytes": 4 * GIB, "evidence": [],
            }),
            json!({
                "type": "exit", "id": 2, "at": 1_700_000_060.0, "container_name": "train", "container_id": id,
                "reason": "oom_container", "exit_code": 137, "duration_seconds": 7384.2, "oom_kills": 2,
                "peak_unreclaimable_bytes": 4 * GIB, "evidence": [],
            }),
            json!({
                "type": "oom_kill", "id": 3, "at": 1_700_000_061.0, "boot_id": "b", "kernel_usec": 6, "pid": 1,
                "process": "a\u{1b}[2J\nb", "owner": "host", "scope": "host", "evidence": [],
            }),
            json!({
                "type": "oom_kill", "id": 4, "at": 1_700_000_062.0, "boot_id": "b", "owner": "unattributed",
                "scope": "container", "evidence": [],
            }),
            json!({
                "type": "exit", "id": 5, "at": 1_700_000_063.0, "k8s_namespace_name": "ml", "k8s_pod_name": "piper-0",
                "container_name": "main", "container_id": id, "reason": "stopped", "exit_code": 0,
                "stop_signals": [15], "kernel_log_read": true, "duration_seconds": 4.0, "oom_kills": 0, "peak_usage_bytes": GIB, "evidence": [],
            }),
            json!({
                "type": "oom_kill", "id": 6, "at": 1_700_000_064.0, "boot_id": "b", "kernel_usec": 7, "pid": 9,
                "process": "python3", "role": "trainer", "owner": "pending", "victim": "main", "scope": "host",
                "evidence": [],
            }),
            json!({
                "type": "cuda_oom", "id": 7, "at": 1_700_000_065.0, "container_name": "train", "container_id": id,
                "pid": 4711, "gpu": "0", "source": "reporter", "tried_bytes": 2 * GIB, "free_bytes": GIB,
                "total_bytes": 12 * GIB, "allocated_bytes": 9 * GIB, "reserved_bytes": 10 * GIB, "component": "model",
                "operation": "forward",
            }),
        ]
        .map(event)
        .to_vec()
    }

    #[test]
    fn table_describes_events() {
        let zone = TimeZone::fixed(jiff::tz::offset(1));
        let expected = "\
TIME                       WHAT      CONTAINER             DETAILS
2023-11-14 23:13:20+01:00  oom kill  train                 pt_data_worker (pid 4711, dataloader worker); child: the container kept running; held 3.0 GiB anonymous, 0 B file, 512.0 MiB shared; hit the limit 4.0 GiB of /docker/c0ffee
2023-11-14 23:14:20+01:00  exit      train                 OOM: a memory limit was hit; exit code 137; ran 2h 03m; 2 OOM kills; peak 4.0 GiB unreclaimable
2023-11-14 23:14:21+01:00  oom kill  (outside containers)  a\\u{1b}[2J\\nb (pid 1); the host ran out of memory
2023-11-14 23:14:22+01:00  oom kill  (unknown)             a process; hit the limit; known only from a counter: the kernel log record is missing
2023-11-14 23:14:23+01:00  exit      ml/piper-0/main       stopped on request; exit code 0; stop requested with signal 15; ran 4.0s; peak 1.0 GiB including page cache
2023-11-14 23:14:24+01:00  oom kill  (pending)             python3 (pid 9, trainer); main: it ended the container; the host ran out of memory
2023-11-14 23:14:25+01:00  cuda oom  train                 tried to allocate 2.0 GiB on GPU 0; 1.0 GiB of 12.0 GiB free; the process held 10.0 GiB, 9.0 GiB of it in tensors; in model/forward; pid 4711
";
        let mut table = EventTable::new(zone);
        examples().iter().for_each(|event| table.fit(event));
        let rows: String = examples().iter().map(|event| table.render(event)).collect();
        assert_eq!(table.header() + &rows, expected);
    }

    #[test]
    fn escapes_control_sequences_in_names() {
        for (text, printed) in [
            ("python3", "python3"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("a\r\tb\u{7f}", "a\\r\\tb\\u{7f}"),
            ("\u{202e}live\u{200b}", "\\u{202e}live\\u{200b}"),
            ("训练\u{fffd}", "训练\u{fffd}"),
        ] {
            assert_eq!(sanitize_for_terminal(text), printed);
        }
        assert_eq!(name(&"ä".repeat(500)).chars().count(), MAX_NAME_CHARS + 1);
    }

    #[test]
    fn json_contains_events_unchanged() {
        let bodies: Vec<_> = examples().iter().map(|event| serde_json::to_string(event).unwrap()).collect();
        let response: Value = serde_json::from_str(&json_page("events", &bodies, true, true)).unwrap();
        assert_eq!(response["events"].as_array().unwrap().len(), 7);
        assert_eq!(response["events"][0]["process"], "pt_data_worker");
        assert_eq!(response["events"][3].get("pid"), None, "absent is not zero");
        assert_eq!(json_page("events", &[], true, true), "{\"events\":[]}\n");
        let (first, rest) = bodies.split_at(1);
        let pages = [
            json_page("events", first, true, false),
            json_page("events", rest, false, false),
            json_page("events", &[], false, true),
        ];
        assert_eq!(pages.concat(), json_page("events", &bodies, true, true), "pages are parts of the whole");
    }
}
