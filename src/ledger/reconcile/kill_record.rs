//! What the kernel log shows of a kill. Pure.

use std::sync::Arc;

use crate::events::{Evidence, Kill, KillOwner, OomReport, OomScope};
use crate::parse::kernel_log::{Killed, OomContext};

fn context_text(context: &OomContext) -> String {
    let what = match (&context.oom_cgroup, context.global) {
        (Some(limit), _) => format!("the limit of {limit} was hit"),
        (None, true) if !context.nodes.is_empty() => {
            format!("NUMA nodes {} ran out of memory", context.nodes)
        }
        (None, true) => "a request of the machine failed, at no cgroup's limit".to_owned(),
        (None, false) => "a limit was hit".to_owned(),
    };
    match context.task_cgroups.join(" or ") {
        victim if victim.is_empty() => what,
        victim => format!("{what}; the victim was in {victim}"),
    }
}

/// Returns the path if there is only one.
fn only(paths: &[String]) -> &str {
    if let [path] = paths { path } else { "" }
}

impl Kill {
    /// Returns what the kernel log shows of a kill.
    pub fn of_record(
        usec: u64,
        text: &str,
        killed: &Killed,
        context: Option<&OomContext>,
        report: Option<Arc<OomReport>>,
    ) -> Self {
        // before 5.1 the record does not show whose memory was exhausted
        let by_report =
            || report.as_ref().filter(|report| report.usage_bytes.is_some()).map(|report| report.host);
        let global =
            killed.global.or(context.map(|context| context.global)).or_else(by_report).unwrap_or(false);
        let mut evidence = vec![Evidence::new("kmsg", text)];
        if let Some(context) = context {
            evidence.insert(0, Evidence::new("kmsg", context_text(context)));
        }
        let reported = || report.as_ref().map(|report| &*report.cgroup).filter(|_| !global);
        let limit_cgroup = context.and_then(|context| context.oom_cgroup.as_deref()).or_else(reported);
        Self {
            kernel_usec: Some(usec),
            pid: Some(killed.pid),
            process: killed.process.as_str().into(),
            scope: if global { OomScope::Host } else { OomScope::Container },
            anon_bytes: killed.anon_bytes,
            file_bytes: killed.file_bytes,
            shmem_bytes: killed.shmem_bytes,
            oom_score_adj: killed.oom_score_adj,
            cgroup: context.map(|context| &*context.task_cgroups).map_or("", only).into(),
            limit_cgroup: Arc::from(limit_cgroup.unwrap_or_default()),
            limit_bytes: report.as_ref().filter(|report| !report.host).and_then(|report| report.limit_bytes),
            report,
            evidence,
            ..Self::unknown()
        }
    }

    /// Returns a kill of which nothing is known.
    pub fn unknown() -> Self {
        Self {
            id: 0,
            at: 0.0,
            earliest: None,
            boot_id: "".into(),
            kernel_usec: None,
            pid: None,
            process: "".into(),
            role: None,
            parent_pid: None,
            program: "".into(),
            owner: KillOwner::Pending,
            victim: None,
            number: None,
            scope: OomScope::Container,
            anon_bytes: None,
            file_bytes: None,
            shmem_bytes: None,
            oom_score_adj: None,
            cgroup: "".into(),
            group: "".into(),
            limit_cgroup: "".into(),
            limit_bytes: None,
            alone_in_pod: false,
            before_counting: false,
            method: None,
            report: None,
            evidence: vec![],
            before: None,
        }
    }
}
