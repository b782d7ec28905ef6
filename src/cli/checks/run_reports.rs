//! Checks where reports of runs are written: writes a small file to each target, and removes it.

use super::{Check, RESPONSE_TIMEOUT};
use crate::config::Config;
use crate::run_reports::check;
use crate::stats::report_stats::ReportTarget;

pub(super) const NAME: &str = "run reports";

/// Returns one check per target, or one that says that there is none.
pub async fn run_checks(config: &Config) -> Vec<Check> {
    let checks = check(&config.report, RESPONSE_TIMEOUT).await;
    if checks.is_empty() {
        let fix = "--report.dir or --report.s3-url: see docs/runs.md";
        let found = "off (--report.dir and --report.s3-url are empty)";
        return vec![Check::none(NAME, found, "reports of runs are only in the ledger", fix).detail()];
    }
    let of = |check: crate::run_reports::TargetCheck| {
        let name = match check.target {
            ReportTarget::Directory => "reports in a directory",
            ReportTarget::S3 => "reports in S3",
        };
        match check.result {
            Ok(written) => Check::good(name, format!("{}: {written}", check.place)),
            Err(reason) => {
                let fix = "see docs/runs.md; the service may have other variables and rights: its log says whether it fails too";
                Check::bad(name, format!("{}: {reason}", check.place), "reports wait in the ledger", fix)
            }
        }
    };
    checks.into_iter().map(of).collect()
}
