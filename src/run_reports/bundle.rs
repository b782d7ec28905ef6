//! The files of one report.

use serde_json::Value;

use crate::export::runs;
use crate::runs::RunRecord;

/// What replaces a reason that no longer holds.
const ENDED_WELL: &str =
    "The run ended well. An earlier report of it was written while it was taken for ended.\n";
/// Longest name of a container in the name of a folder, in bytes.
const MAX_NAME_BYTES: usize = 100;

/// One file of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportFile {
    /// Its name within the folder of the run.
    pub name: &'static str,
    /// Its media type.
    pub content_type: &'static str,
    /// Its content.
    pub content: Vec<u8>,
}

/// Returns the files of a run on this host; `why` says why it ended, for a run that did not end well. A report of a run whose
/// end was corrected has that file in any case, because an older one may be there. `report.json` is last.
///
/// # Errors
/// The record cannot be written as JSON.
pub fn files(
    run: &RunRecord,
    host: &str,
    why: Option<String>,
    is_corrected: bool,
) -> serde_json::Result<Vec<ReportFile>> {
    let json = |value: &Value| serde_json::to_string_pretty(value).map(|text| (text + "\n").into_bytes());
    let mut report = serde_json::to_value(run)?;
    report["host"] = host.into();
    let file = |name, content_type, content| ReportFile { name, content_type, content };
    let page = runs::page(run, host, why.as_deref()).into_bytes();
    let mut files = vec![
        file("memory_usage.json", "application/json", json(&runs::memory_usage(run))?),
        file("report.html", "text/html; charset=utf-8", page),
    ];
    if let Some(why) = why.or(is_corrected.then(|| ENDED_WELL.to_owned())) {
        files.push(file("why.txt", "text/plain; charset=utf-8", why.into_bytes()));
    }
    files.push(file("report.json", "application/json", json(&report)?));
    Ok(files)
}

/// Returns the name of the folder of a run: the name of its container, in a pod after that of the pod, and the id of the run. A container
/// that is restarted at once has several runs of one id; `same_ids` is the number of those before.
pub fn folder_name(run: &RunRecord, same_ids: u64) -> String {
    let identity = &run.subject.identity;
    let name = match &*identity.k8s_pod {
        "" => identity.name.to_string(),
        pod => format!("{pod}_{}", identity.name),
    };
    let again = if same_ids == 0 { String::new() } else { format!("-{}", same_ids + 1) };
    format!("{}.{}{again}", plain(&name, MAX_NAME_BYTES), plain(&run.run, MAX_NAME_BYTES))
}

/// Returns true if a folder may have been named by [`folder_name`]: its name ends with the id of a run.
pub fn is_folder_name(name: &str) -> bool {
    let id = name.rsplit('.').next().unwrap_or("");
    let digits = id.split('-').next().unwrap_or("");
    name.contains('.')
        && !name.starts_with('.')
        && digits.len() == 12
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns a name that is one part of a path and of a URL: other characters than those of names of containers become `_`.
fn plain(name: &str, max: usize) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let plain: String = name.chars().map(|c| if is_plain(c) { c } else { '_' }).take(max).collect();
    match plain.strip_prefix('.') {
        Some(rest) => format!("_{rest}"),
        None if plain.is_empty() => "_".to_owned(),
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Identity;

    fn run(name: &str, pod: &str) -> RunRecord {
        let mut run = RunRecord { run: "798f84577f47-20261125T030736Z".into(), ..RunRecord::default() };
        run.subject.identity = Identity { k8s_pod: pod.into(), ..Identity::named(name) };
        run
    }

    #[test]
    fn folder_is_one_part_of_a_path() {
        for (name, pod, folder) in [
            ("piper-1", "", "piper-1"),
            ("trainer", "piper-x7k2p", "piper-x7k2p_trainer"),
            ("../../etc", "", "_._.._etc"),
            ("a/b c\u{e9}", "", "a_b_c_"),
            ("", "", "_"),
        ] {
            let folder = format!("{folder}.798f84577f47-20261125T030736Z");
            assert_eq!(folder_name(&run(name, pod), 0), folder);
            assert!(is_folder_name(&folder), "{folder}");
            assert_eq!(folder_name(&run(name, pod), 1), folder + "-2");
        }
        assert!(folder_name(&run(&"x".repeat(500), &"y".repeat(500)), 0).len() < 255);
    }

    #[test]
    fn report_is_last_and_names_the_host() {
        let names = |why: Option<&str>| -> Vec<&str> {
            let files = files(&run("train", ""), "gpu-1", why.map(str::to_owned), false).unwrap();
            files.iter().map(|file| file.name).collect()
        };
        assert_eq!(names(None), ["memory_usage.json", "report.html", "report.json"]);
        assert_eq!(names(Some("KILLED")), ["memory_usage.json", "report.html", "why.txt", "report.json"]);
        let replaced = files(&run("train", ""), "gpu-1", None, true).unwrap();
        assert_eq!((replaced[2].name, &*replaced[2].content), ("why.txt", ENDED_WELL.as_bytes()));
        let files = files(&run("train", ""), "gpu-1", None, false).unwrap();
        let report: Value = serde_json::from_slice(&files[2].content).unwrap();
        assert_eq!((&report["host"], &report["container_name"]), (&"gpu-1".into(), &"train".into()));
    }
}
