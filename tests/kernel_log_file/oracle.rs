//! Compares with a parser that shares no code with memledger, on each recorded log that it can read: every kill, and in the report of
//! a kill the usage, limits, components, host's counters, context line and processes.

use std::collections::{BTreeMap, BTreeSet};

use linux_oom_parser::{
    CgroupResource, CgroupStatValue, Constraint, MemoryMetric, MemoryValue, OomContext, OomMessage, Record,
    Task, TotalKind,
};
use serde_json::Value;

use super::{folder, logs, verdicts};

/// The logs that it refuses.
const REFUSED: [(&str, &str); 2] =
    [("v1-3.10-container.dmesg", OLD_COUNTERS), ("v1-4.19-pod.journal", OLD_COUNTERS)];
const OLD_COUNTERS: &str = "it does not know the counters of a cgroup in one line, as before 5.3";
/// The logs of which only the kills can be compared.
const ONLY_KILLS: [(&str, &str); 4] = [
    ("host-6.12-cpuset.dmesg", "a line that it does not know ends its block"),
    ("v1-6.18-begin-lost.kmsg", "its block begins with the request, which is lost"),
    ("v2-6.1-host.dmesg", "a line that it does not know ends its block"),
    ("v2-6.1-skipped.dmesg", "the kill is of another block than the report before it"),
];

/// No limit is a number without sense.
const MAX_LIMIT: u64 = 1 << 62;

/// What the other parser has read of the block before a kill.
#[derive(Default)]
struct Block {
    invoked: Option<(String, i32)>,
    budgets: BTreeMap<&'static str, (u64, u64)>,
    counters: BTreeMap<String, u64>,
    pages: BTreeMap<&'static str, u64>,
    swap: BTreeMap<&'static str, u64>,
    tasks: Vec<Task>,
    context: Option<OomContext>,
}

impl Block {
    fn of(records: &[Record]) -> Self {
        let mut block = Self::default();
        for record in records {
            block.add(&record.message);
        }
        block
    }

    fn add(&mut self, message: &OomMessage) {
        match message {
            OomMessage::Invoked(invoked) => self.invoked = Some((invoked.name.clone(), invoked.order)),
            OomMessage::CgroupBudget(budget) => {
                let resource = match budget.resource {
                    CgroupResource::Memory => "memory",
                    CgroupResource::MemoryAndSwap => "memory+swap",
                    CgroupResource::Swap => "swap",
                    _ => "kmem",
                };
                self.budgets.insert(resource, (budget.usage.as_u64(), budget.limit.as_u64()));
            }
            OomMessage::CgroupStat(stat) => {
                if let CgroupStatValue::Bytes(bytes) = &stat.value {
                    self.counters.insert(stat.name.clone(), bytes.as_u64());
                }
            }
            OomMessage::MemoryCounters(counters) => {
                for counter in counters {
                    let name = match counter.metric {
                        MemoryMetric::ActiveAnon => "active_anon",
                        MemoryMetric::InactiveAnon => "inactive_anon",
                        MemoryMetric::IsolatedAnon => "isolated_anon",
                        MemoryMetric::Shmem => "shmem",
                        MemoryMetric::Free => "free",
                        _ => continue,
                    };
                    if let MemoryValue::Pages(pages) = counter.value {
                        self.pages.insert(name, pages);
                    }
                }
            }
            OomMessage::MemoryTotal(total) => {
                let (name, to) = match total.kind {
                    TotalKind::Ram => ("ram", &mut self.pages),
                    TotalKind::Reserved => ("reserved", &mut self.pages),
                    TotalKind::FreeSwap => ("free", &mut self.swap),
                    TotalKind::TotalSwap => ("total", &mut self.swap),
                    _ => return,
                };
                to.extend(match &total.value {
                    MemoryValue::Pages(amount) => Some((name, *amount)),
                    MemoryValue::Bytes(bytes) => Some((name, bytes.as_u64())),
                    _ => None,
                });
            }
            OomMessage::Task(task) => self.tasks.push(task.clone()),
            OomMessage::OomContext(context) => self.context = Some(context.clone()),
            _ => {}
        }
    }

    /// Asserts that the report of a verdict has the same figures; returns how many were compared.
    fn compare(&self, name: &str, verdict: &Value, page: u64) -> usize {
        let report = &verdict["report"];
        let mut compared = 0;
        let mut same = |field: &str, other: Option<u64>| {
            if let Some(other) = other {
                assert_eq!(report[field].as_u64(), Some(other), "{name}: {field} of {report}");
                compared += 1;
            }
        };
        let budget = |resource: &str| self.budgets.get(resource).copied();
        let limited = |limit: u64| Some(limit).filter(|limit| *limit < MAX_LIMIT);
        same("usage_bytes", budget("memory").map(|(usage, _)| usage));
        same("limit_bytes", budget("memory").and_then(|(_, limit)| limited(limit)));
        same("swap_bytes", budget("swap").map(|(usage, _)| usage));
        same("swap_limit_bytes", budget("swap").and_then(|(_, limit)| limited(limit)));
        let both = budget("memory+swap").and_then(|(_, limit)| limited(limit));
        same("swap_limit_bytes", both.and_then(|both| Some(both - limited(budget("memory")?.1)?)));
        same("kernel_bytes", budget("kmem").map(|(usage, _)| usage));
        let counter = |names: &[&str]| names.iter().find_map(|name| self.counters.get(*name).copied());
        let shmem = counter(&["total_shmem", "shmem"]);
        let cache = counter(&["total_cache", "cache", "file"]);
        same("anon_bytes", counter(&["anon", "total_rss", "rss"]));
        same("shmem_bytes", shmem);
        same("file_bytes", cache.zip(shmem).map(|(cache, shmem)| cache - shmem));
        let pages =
            |names: &[&str]| names.iter().map(|name| self.pages.get(name).copied()).sum::<Option<u64>>();
        let bytes = |pages: u64| pages * page;
        same("free_bytes", pages(&["free"]).map(bytes));
        same("shmem_bytes", pages(&["shmem"]).map(bytes));
        let lists = pages(&["active_anon", "inactive_anon", "isolated_anon"]).zip(pages(&["shmem"]));
        same("anon_bytes", lists.map(|(lists, shmem)| bytes(lists - shmem)));
        same("limit_bytes", pages(&["ram"]).zip(pages(&["reserved"])).map(|(all, not)| bytes(all - not)));
        let swap = |name: &str| self.swap.get(name).copied();
        same("swap_limit_bytes", swap("total"));
        same("swap_bytes", swap("total").zip(swap("free")).map(|(all, free)| all - free));
        same("process_count", Some(self.tasks.len() as u64).filter(|count| *count > 0));
        if let Some((requested_by, order)) = &self.invoked {
            assert_eq!(report["requested_by"], requested_by.as_str(), "{name}");
            assert_eq!(report["order"], *order, "{name}");
        }
        for task in &self.tasks {
            compare_task(name, report, task, page);
        }
        if let Some(context) = &self.context {
            compare_context(name, verdict, context);
        }
        compared + self.tasks.len()
    }
}

fn compare_task(name: &str, report: &Value, task: &Task, page: u64) {
    let rows = report["processes"].as_array().unwrap_or_else(|| panic!("{name}: processes of {report}"));
    let Some(row) = rows.iter().find(|row| row["pid"] == task.pid) else {
        let smallest = rows.last().and_then(|row| row["rss_bytes"].as_u64());
        assert!(rows.len() == 20 && Some(task.rss_pages * page) <= smallest, "{name}: {task:?}");
        return;
    };
    assert_eq!(row["rss_bytes"], task.rss_pages * page, "{name}");
    assert_eq!(row["swap_bytes"], task.swap_entries * page, "{name}");
    assert_eq!(row["oom_score_adj"], task.oom_score_adj, "{name}");
    assert_eq!(row["uid"], task.uid, "{name}");
    assert_eq!(row["process"], task.name.as_str(), "{name}");
    for (field, pages) in [
        ("anon_bytes", task.rss_anon_pages),
        ("file_bytes", task.rss_file_pages),
        ("shmem_bytes", task.rss_shmem_pages),
    ] {
        assert_eq!(row[field].as_u64(), pages.map(|pages| pages * page), "{name}: {field}");
    }
}

fn compare_context(name: &str, verdict: &Value, context: &OomContext) {
    let path = context.task_memcg.as_deref().unwrap_or_default();
    match verdict["subject"]["container_id"].as_str() {
        Some(id) => assert!(path.contains(id), "{name}: {id} is not in {path}"),
        None => assert!(!path.contains("docker"), "{name}: {path} has a container"),
    }
    let victim = [&verdict["pid"], &verdict["report"]["victim_pid"]];
    assert!(victim.contains(&&context.pid.into()), "{name}: {victim:?} is not {}", context.pid);
    let nodes = match context.constraint {
        Constraint::Cpuset => context.mems_allowed.as_ref(),
        Constraint::MemoryPolicy => context.nodemask.as_ref(),
        _ => None,
    };
    let range =
        |(start, end): (u32, u32)| if start == end { format!("{start}") } else { format!("{start}-{end}") };
    let nodes = nodes
        .map(|nodes| nodes.iter().map(|node| range((node.start, node.end))).collect::<Vec<_>>().join(","));
    assert_eq!(verdict["report"]["nodes"].as_str(), nodes.as_deref(), "{name}");
}

#[test]
fn agrees_with_an_independent_parser_on_every_log() {
    let refused: BTreeMap<&str, &str> = REFUSED.into();
    let mut compared = BTreeMap::new();
    for name in logs() {
        let log = std::fs::read_to_string(folder().join(&name)).expect("a log");
        let events = linux_oom_parser::parse_events(as_dmesg(&log));
        if refused.contains_key(&*name) {
            assert!(events.is_err(), "{name} can be compared: {}", refused[&*name]);
            continue;
        }
        let events = events.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let page = if name.contains("arm64") { 1 << 16 } else { 1 << 12 };
        let verdicts = verdicts(&name, &[]);
        let (mut killed, mut figures) = (BTreeSet::new(), 0);
        for event in &events {
            for record in &event.records {
                let OomMessage::Killed(victim) = &record.message else { continue };
                let is_new = killed.insert(victim.pid);
                let is_of = |verdict: &&Value| {
                    let with = killed_with(verdict)["processes"].as_array();
                    let is_with = with.is_some_and(|with| with.iter().any(|it| it["pid"] == victim.pid));
                    verdict["pid"] == victim.pid || is_with
                };
                let verdict = verdicts.iter().find(is_of);
                let verdict = verdict.unwrap_or_else(|| panic!("{name}: no verdict on {}", victim.pid));
                // the other victims of a group have the report of the first
                if is_new && killed_first(event, victim.pid) && verdict.get("report").is_some() {
                    figures += Block::of(&event.records).compare(&name, verdict, page);
                }
            }
        }
        let with = verdicts.iter().filter_map(|verdict| killed_with(verdict)["count"].as_u64());
        assert_eq!(killed.len(), verdicts.len() + with.sum::<u64>() as usize, "{name}: kills");
        compared.insert(name, figures);
    }
    let only_kills = compared.iter().filter(|(_, figures)| **figures == 0).map(|(name, _)| name.as_str());
    assert!(only_kills.eq(ONLY_KILLS.map(|(name, _)| name)), "figures compared: {compared:?}");
}

/// Returns what was found of processes that were killed with the victim; null without any.
fn killed_with(verdict: &Value) -> &Value {
    let findings = verdict["findings"].as_array().expect("a list");
    findings.iter().find(|it| it["finding"] == "killed_with_it").unwrap_or(&Value::Null)
}

/// Returns whether this is the first victim of an event.
fn killed_first(event: &linux_oom_parser::OomEvent, pid: u32) -> bool {
    let first = event.records.iter().find_map(|record| match &record.message {
        OomMessage::Killed(killed) => Some(killed.pid),
        _ => None,
    });
    first == Some(pid)
}

/// Returns a log in a format that the other parser reads: without quotes, escapes and JSON.
fn as_dmesg(log: &str) -> String {
    let line = |line: &str| {
        let line = line.strip_prefix("> ").unwrap_or(line);
        // a time of day, and the thread that printed it
        let without_time = line
            .split_once("] ")
            .filter(|(stamp, _)| stamp.starts_with('[') && stamp.contains(':'))
            .map(|(_, rest)| rest);
        let line = without_time.unwrap_or(line);
        let without_caller = line
            .split_once("][ ")
            .and_then(|(stamp, rest)| Some(format!("{stamp}]{}", rest.split_once(']')?.1)));
        let line = without_caller.as_deref().unwrap_or(line);
        if line.starts_with('{') {
            let entry: Value = serde_json::from_str(line).expect("JSON");
            return format!("{}\n", entry["MESSAGE"].as_str().unwrap_or_default());
        }
        match line.split_once(';') {
            Some((head, text)) if head.split(',').count() >= 4 => {
                let usec: u64 = head.split(',').nth(2).and_then(|usec| usec.parse().ok()).expect("a stamp");
                let text = text.replace("\\x0a", "\n");
                format!("[{:5}.{:06}] {text}\n", usec / 1_000_000, usec % 1_000_000)
            }
            _ => {
                let level = ["<4>", "<6>", "<3>"].iter().find_map(|level| line.strip_prefix(level));
                format!("{}\n", level.unwrap_or(line).replace("#012", "\n"))
            }
        }
    };
    // the call trace is no part of a report, and written logs have a short one
    let is_trace =
        |line: &&str| line.contains("CPU: ") || line.contains("Call Trace") || line.contains("+0x");
    log.lines().filter(|line| !is_trace(line)).map(line).collect()
}
