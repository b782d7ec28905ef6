//! `--report.dir`.

use std::path::Path;

use super::{Host, await_written, json, value};
use crate::support::{eventually_true, run};

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn directory_gets_a_folder_for_each_run_with_the_reason_of_a_bad_end() {
    let mut host = Host::new(&[], &[]);
    let reports = host.path("reports");
    host.flags.push(format!("--report.dir={}", reports.display()));
    let memledger = host.serve(&[]);
    let name = host.run(&[], &["true"]);
    let killed = host.run(&["--memory=64M"], &["python3", "-c", "b = bytearray(200 << 20)"]);
    await_written(&memledger, "directory", 2.0);
    let folders = names(&reports);
    let folder = |name: &str| {
        let found = folders.iter().find(|folder| folder.starts_with(&format!("{name}.")));
        reports.join(found.unwrap_or_else(|| panic!("no {name} in {folders:?}")))
    };
    assert_eq!(names(&folder(&name)), ["memory_usage.json", "report.html", "report.json"]);
    assert_eq!(names(&folder(&killed)), ["memory_usage.json", "report.html", "report.json", "why.txt"]);
    let why = std::fs::read_to_string(folder(&killed).join("why.txt")).unwrap();
    assert!(
        why.contains("because the run reached its memory limit of 64.0 MiB") && !why.contains(" ago"),
        "{why}"
    );
    let report = json(&std::fs::read(folder(&killed).join("report.json")).unwrap());
    assert_eq!(
        (&report["exit_reason"], &report["container_name"]),
        (&"oom_container".into(), &killed.clone().into())
    );
    assert!(report["host"].as_str().is_some_and(|host| !host.is_empty()), "{report}");
    let run = report["run"].as_str().unwrap();
    assert_eq!(folder(&killed).file_name().unwrap().to_str().unwrap(), format!("{killed}.{run}"));
    let usage = host.verb(&["report", run, "--format=memory_usage"]).stdout;
    assert_eq!(
        std::fs::read(folder(&killed).join("memory_usage.json")).unwrap(),
        usage,
        "as the verb prints it"
    );
    let page = std::fs::read_to_string(folder(&killed).join("report.html")).unwrap();
    assert!(page.contains("Why it ended") && page.contains(run), "{page}");
    eventually_true("none waiting", || {
        value(&memledger, "memledger_reports_waiting", "directory") == Some(0.0)
    });
    // nothing is written again
    memledger.signal("TERM");
    memledger.wait();
    std::fs::remove_dir_all(folder(&killed)).unwrap();
    let memledger = host.serve(&[]);
    host.run(&[], &["true"]);
    await_written(&memledger, "directory", 1.0);
    assert_eq!(names(&reports).len(), 2);
}

#[test]
fn directory_that_cannot_be_written_gets_all_reports_later() {
    let mut host = Host::new(&[], &[]);
    let place = host.path("place");
    std::fs::write(&place, "a file in place of a directory").unwrap();
    host.flags.push(format!("--report.dir={}", place.display()));
    let (is_good, text) = host.check();
    assert!(!is_good && text.contains("--report.dir"), "{text}");
    let memledger = host.serve(&["--report.dir-max-runs=2"]);
    for _ in 0..3 {
        host.run(&[], &["true"]);
    }
    let pending = || value(&memledger, "memledger_reports_waiting", "directory");
    eventually_true("three pending reports", || pending() == Some(3.0));
    eventually_true("a failed attempt", || {
        value(&memledger, "memledger_report_up", "directory") == Some(0.0)
    });
    std::fs::remove_file(&place).unwrap();
    await_written(&memledger, "directory", 3.0);
    assert_eq!(names(&place).len(), 2, "the oldest is removed");
    eventually_true("none pending", || pending() == Some(0.0));
    let warnings = memledger.log().matches("writing the report of a run failed").count();
    assert_eq!(warnings, 1, "{}", memledger.log());
    assert!(host.check().0);
}

#[test]
fn check_without_a_target_says_what_to_set() {
    let (status, _, error) = run(&["report", "--check"]);
    assert_eq!(status, Some(3), "{error}");
    assert!(error.contains("--report.dir") && error.contains("--report.s3-url"), "{error}");
}
