//! What systemd-oomd wrote into the journal: it kills before the kernel does, and leaves no record in the kernel's log.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::clock::Timestamp;
use crate::diagnose::{Cause, Confidence, Diagnosis, MonitorFinding, MonitorRemedy};
use crate::events::Evidence;

/// A journal that is not read in this time is left out.
const TIMEOUT: Duration = Duration::from_millis(800);
/// An end and its line are that close in time, in seconds.
const MAX_SECONDS: f64 = 15.0;
/// So much of the journal is read.
const MAX_BYTES: u64 = 64 << 10;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Adds to the diagnosis of a SIGKILL from elsewhere what systemd-oomd or earlyoom wrote about that moment, if the journal can be read.
pub fn add_monitor(diagnosis: &mut Diagnosis) {
    let Some(at) = diagnosis.at.filter(|_| diagnosis.cause == Cause::KilledOutside) else { return };
    let id = diagnosis.subject.as_ref().map(|subject| subject.container_id.to_string()).unwrap_or_default();
    let lines = read(at).unwrap_or_default();
    if let Some(line) = lines.lines().find(|line| is_oomd_about(line, &id)) {
        (diagnosis.cause, diagnosis.confidence) = (Cause::KilledByMonitor, Confidence::Certain);
        diagnosis.findings.insert(0, MonitorFinding::OomdKilledCgroup.into());
        diagnosis.evidence.push(Evidence::new("journal", line.to_owned()));
        diagnosis.advice = vec![MonitorRemedy::OomdSettings.into(), MonitorRemedy::LessMemory.into()];
    } else if let Some(line) =
        lines.lines().find(|line| line.contains("earlyoom") && line.contains("sending SIG"))
    {
        // it names processes; their container is not known any more
        diagnosis.findings.push(MonitorFinding::EarlyoomKilledAProcess.into());
        diagnosis.evidence.push(Evidence::new("journal", line.to_owned()));
        diagnosis.confidence = diagnosis.confidence.max(Confidence::Likely);
    }
}

/// Returns whether a line of systemd-oomd is about the cgroup of this container.
fn is_oomd_about(line: &str, container_id: &str) -> bool {
    let is_kill = line.contains("oomd") && line.contains("Killed ") && line.contains(" due to ");
    is_kill && !container_id.is_empty() && line.contains(container_id)
}

/// Reads the journal around this Unix time; `None` if that is not possible, or takes too long.
fn read(at: f64) -> Option<String> {
    let time = |at: f64| format!("@{}", at.round());
    let mut child = Command::new("journalctl")
        .args(["--no-pager", "-q", "-o", "short-iso", "-u", "systemd-oomd", "-u", "earlyoom"])
        .args(["--since", &time(at - MAX_SECONDS), "--until", &time(at + MAX_SECONDS)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let output = child.stdout.take()?;
    let (sender, receiver) = std::sync::mpsc::channel();
    let reader = std::thread::Builder::new().name("journal".into()).spawn(move || {
        let mut bytes = Vec::new();
        let _ = output.take(MAX_BYTES).read_to_end(&mut bytes); // what is there
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    if reader.is_err() {
        let _ = child.kill(); // and no answer
    }
    let began = Timestamp::now();
    let text = receiver.recv_timeout(TIMEOUT).ok();
    while child.try_wait().ok()?.is_none() {
        if Timestamp::now().since(began) > TIMEOUT {
            let _ = child.kill(); // it is reaped when this short command ends
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_oomd_is_about_the_container_whose_cgroup_it_names() {
        let id = "3f2a".repeat(16);
        let line = format!(
            "2026-11-27T08:00:00+0000 host systemd-oomd[512]: Killed /system.slice/docker-{id}.scope due to memory pressure for /system.slice \
             being 71.06% > 50.00% for > 20s with reclaim activity"
        );
        assert!(is_oomd_about(&line, &id));
        assert!(!is_oomd_about(&line, &"0".repeat(64)) && !is_oomd_about(&line, ""));
        let other = "2026-11-27T08:00:00+0000 host systemd-oomd[512]: Memory pressure is high";
        assert!(!is_oomd_about(other, &id));
    }
}
