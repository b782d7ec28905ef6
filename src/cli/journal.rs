//! What systemd-oomd wrote into the journal: it kills before the kernel does, and leaves no record in the kernel's log.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::clock::Timestamp;
use crate::events::Evidence;
use crate::explain::{Cause, Confidence, Verdict};

/// A journal that is not read in this time is left out.
const TIMEOUT: Duration = Duration::from_millis(800);
/// An end and its line are that close in time, in seconds.
const MAX_SECONDS: f64 = 15.0;
/// So much of the journal is read.
const MAX_BYTES: u64 = 64 << 10;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Adds to the verdict on a SIGKILL from elsewhere what systemd-oomd or earlyoom wrote about that moment, if the journal can be read.
pub fn add_monitor(verdict: &mut Verdict) {
    let Some(at) = verdict.at.filter(|_| verdict.cause == Cause::KilledOutside) else { return };
    let id = verdict.subject.as_ref().map(|subject| subject.container_id.to_string()).unwrap_or_default();
    let lines = read(at).unwrap_or_default();
    let Some(line) = lines.lines().find(|line| is_about(line, &id)) else { return };
    let who = if line.contains("earlyoom") { "earlyoom" } else { "systemd-oomd" };
    verdict.cause = Cause::KilledByMonitor;
    verdict.confidence =
        if !id.is_empty() && line.contains(&id) { Confidence::Certain } else { Confidence::Likely };
    verdict.also.insert(
        0,
        format!("The journal says that {who} killed it: memory was low, and the kernel had not acted yet."),
    );
    verdict.evidence.push(Evidence::new("journal", line.to_owned()));
    verdict.advice = vec![
        "Less memory in use on the host, more swap, or a limit for the container, so that only that one is killed.".to_owned(),
        format!("What {who} watches and when it acts: oomctl; ManagedOOMPreference=avoid of a unit exempts it."),
    ];
}

/// Returns whether a line of a monitor is about this container. earlyoom names processes only.
fn is_about(line: &str, container_id: &str) -> bool {
    let is_oomd = line.contains("oomd") && line.contains("Killed ") && line.contains(" due to ");
    is_oomd && !container_id.is_empty() && line.contains(container_id)
        || line.contains("earlyoom") && line.contains("sending SIGKILL")
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
    let reader = std::thread::Builder::new().name("journal".into());
    reader
        .spawn(move || {
            let mut text = String::new();
            let _ = output.take(MAX_BYTES).read_to_string(&mut text); // what is there
            let _ = sender.send(text);
        })
        .ok()?;
    let began = Timestamp::now();
    let text = receiver.recv_timeout(TIMEOUT).ok();
    while child.try_wait().ok()?.is_none() {
        if Timestamp::now().since(began) > TIMEOUT {
            let _ = child.kill();
            let _ = child.wait();
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
        assert!(is_about(&line, &id));
        assert!(!is_about(&line, &"0".repeat(64)) && !is_about(&line, ""));
        let other = "2026-11-27T08:00:00+0000 host systemd-oomd[512]: Memory pressure is high";
        assert!(!is_about(other, &id));
    }
}
