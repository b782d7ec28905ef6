//! What other programs than the kernel write of processes that were killed for memory: systemd, the kubelet, containerd, `kubectl`, and the
//! monitors that kill before the kernel does.
//!
//! A notice says who was killed and by whom, and not what filled the memory: the kernel's own lines have that. It proves what its
//! author wants: any program can write such a line.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::Value;

use super::container_id;
use crate::text::printable;

/// Notices that are kept, the newest.
const MAX_NOTICES: usize = 200;
/// Length of a container's id.
const ID: usize = 64;

/// Who reported a kill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeSource {
    /// systemd, of one of its units.
    #[default]
    Systemd,
    /// The kubelet.
    Kubelet,
    /// containerd or an engine above it.
    Containerd,
    /// The API of Kubernetes: `kubectl describe`, `kubectl get`.
    Kubectl,
    /// systemd-oomd.
    Oomd,
    /// earlyoom.
    Earlyoom,
    /// nohang.
    Nohang,
    /// The OOM controller of Talos.
    Talos,
}

impl NoticeSource {
    /// Returns the name of the program that killed, if that was not the kernel.
    pub fn killer(self) -> Option<&'static str> {
        match self {
            Self::Oomd => Some("systemd-oomd"),
            Self::Earlyoom => Some("earlyoom"),
            Self::Nohang => Some("nohang"),
            Self::Talos => Some("the OOM controller of Talos"),
            Self::Systemd | Self::Kubelet | Self::Containerd | Self::Kubectl => None,
        }
    }
}

/// A kill as a program reports it. Texts are empty where it does not say.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KillNotice {
    /// Who says so.
    pub source: NoticeSource,
    /// The time as the text has it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub time: String,
    /// The unit of systemd.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// The cgroup.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The container's id.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// The container's name in its pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container: String,
    /// The pod, and its namespace.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// See `pod`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The node of the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node: String,
    /// The process.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Its pid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its resident memory, as the text has it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resident: String,
    /// The peak of its unit, as the text has it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub peak: String,
    /// How often its pod was restarted.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub restarts: String,
    /// The memory limit, as the text has it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub limit: String,
    /// The exit code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// Why a monitor killed, as it says.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Reads a text line by line.
#[derive(Debug, Default)]
pub struct NoticeReader {
    notices: Vec<KillNotice>,
    /// Units that lost a process, and whether they have failed since.
    units: HashMap<String, bool>,
    /// The unit that `systemctl status` describes.
    described_unit: String,
    /// What `kubectl describe pod` said so far.
    described: KillNotice,
    is_described: bool,
    has_containers: bool,
    /// earlyoom only shows what it would do.
    is_dry_run: bool,
    /// The process that nohang is about to kill.
    victim: KillNotice,
    /// Nodes whose events the text has.
    nodes: Vec<String>,
    /// A pod that is restarted again and again: its name.
    restarted: String,
}

impl NoticeReader {
    /// Reads a line; `stamp`: the time beside it, in another field.
    pub fn push(&mut self, line: &[u8], stamp: Option<&str>) {
        const MAX_LINE: usize = 64 << 10;
        let line = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE)]);
        let line = line.trim_end();
        let line = line.strip_prefix("> ").unwrap_or(line);
        self.read_kubectl(line);
        let (time, program, text) = syslog_parts(line);
        let found = match program {
            "systemd" => return self.read_unit(first_of(time, stamp), text),
            "systemd-oomd" => parse_oomd(text),
            "earlyoom" => self.read_earlyoom(text),
            "nohang" => self.read_nohang(text),
            "" | "kubelet" => {
                parse_kubelet(line).or_else(|| parse_containerd(line)).or_else(|| parse_talos(line))
            }
            "containerd" | "dockerd" | "k3s" | "rke2" => parse_containerd(line),
            _ => None,
        };
        if program.is_empty() {
            self.read_status(line);
        }
        if let Some(notice) = found {
            let time = Some(&*notice.time).filter(|time| !time.is_empty()).unwrap_or(time).to_owned();
            self.add(KillNotice { time: first_of(&time, stamp), ..notice });
        }
    }

    /// Returns the notices, oldest first.
    pub fn finish(mut self) -> Vec<KillNotice> {
        self.end_of_container();
        self.notices
    }

    /// Returns the node whose events the text has, if it is one, and a pod of it that is restarted; both may be empty.
    pub fn events(&self) -> (&str, &str) {
        match &self.nodes[..] {
            [node] => (node, &self.restarted),
            _ => ("", ""),
        }
    }

    /// Adds a notice, or what it adds to the newest one, if that is of the same death by another source.
    fn add(&mut self, notice: KillNotice) {
        let is_same = |known: &KillNotice| {
            let same = |one: &str, other: &str| !one.is_empty() && one == other;
            known.source != notice.source && same(&known.container_id, &notice.container_id)
                || known.source == notice.source && known.pid.is_some() && known.pid == notice.pid
        };
        match self.notices.last_mut().filter(|known| is_same(known)) {
            Some(known) => known.merge(notice),
            None => self.notices.push(notice),
        }
        if self.notices.len() > MAX_NOTICES {
            self.notices.remove(0);
        }
    }

    /// Reads what systemd says of a unit: that it lost a process, that it failed, and then its peak.
    fn read_unit(&mut self, time: String, text: &str) {
        const KILLED: [&str; 2] = [
            "A process of this unit has been killed by the OOM killer.",
            "The kernel OOM killer killed some processes in this unit.",
        ];
        let Some((unit, rest)) = text.split_once(": ") else { return };
        let unit = printable(unit.as_bytes());
        let of_unit = |known: &KillNotice| known.unit == unit || unit_of(&known.cgroup) == unit;
        let is_failure = rest == "Failed with result 'oom-kill'.";
        if KILLED.contains(&rest) || is_failure {
            let is_known = is_failure
                && self.notices.last().is_some_and(|last| last.source == NoticeSource::Oomd && of_unit(last));
            if self.units.insert(unit.clone(), is_failure) != Some(false) && !is_known {
                self.add(KillNotice { unit, time, ..KillNotice::default() });
            }
        } else if rest.starts_with("systemd-oomd killed ") && rest.ends_with(" in this unit.") {
            if !self.notices.last().is_some_and(of_unit) {
                self.add(KillNotice {
                    source: NoticeSource::Oomd,
                    unit: unit.clone(),
                    time,
                    ..KillNotice::default()
                });
            }
            self.units.insert(unit, false);
        } else if ["Start", "Stopped", "Deactivated successfully", "Scheduled restart"]
            .iter()
            .any(|it| rest.starts_with(it))
        {
            self.units.remove(&unit);
        } else if let Some(peak) = rest.split(", ").find_map(|part| part.strip_suffix(" memory peak"))
            && self.units.remove(&unit).is_some()
            && let Some(known) = self.notices.iter_mut().rev().find(|known| of_unit(known))
        {
            known.peak = printable(peak.as_bytes());
        }
    }

    /// Reads the output of `systemctl status`.
    fn read_status(&mut self, line: &str) {
        let text = line.trim_start();
        if let Some(rest) = line
            .split_once(' ')
            .filter(|(mark, _)| matches!(*mark, "\u{25cf}" | "\u{d7}" | "*"))
            .map(|(_, rest)| rest)
        {
            self.described_unit = printable(rest.split(' ').next().unwrap_or_default().as_bytes());
        } else if text.starts_with("Active: failed (Result: oom-kill)") && !self.described_unit.is_empty() {
            let time =
                text.split_once(" since ").map_or("", |(_, time)| time.split(';').next().unwrap_or(time));
            let unit = self.described_unit.clone();
            self.add(KillNotice { unit, time: printable(time.as_bytes()), ..KillNotice::default() });
        }
    }

    /// `sending SIGTERM to process 319 uid 0 "python": badness 1301, VmRSS 58 MiB`.
    fn read_earlyoom(&mut self, text: &str) -> Option<KillNotice> {
        self.is_dry_run |= text.contains("dryrun") || text.contains("dry run");
        if text.starts_with("kill failed") {
            self.notices.pop_if(|last| last.source == NoticeSource::Earlyoom);
        }
        let rest = text
            .strip_prefix("sending SIGTERM to process ")
            .or_else(|| text.strip_prefix("sending SIGKILL to process "))?;
        let (pid, rest) = rest.split_once(' ')?;
        let mut quotes = rest.split('"');
        let process = quotes.nth(1)?;
        let resident = rest.rsplit_once("VmRSS ").map_or("", |(_, resident)| resident);
        let notice = KillNotice {
            source: NoticeSource::Earlyoom,
            pid: Some(pid.parse().ok()?),
            process: printable(process.as_bytes()),
            resident: printable(resident.as_bytes()),
            reason: "free memory and swap were below its limits".to_owned(),
            ..KillNotice::default()
        };
        Some(notice).filter(|_| !self.is_dry_run)
    }

    fn read_nohang(&mut self, text: &str) -> Option<KillNotice> {
        let text = text.trim_start();
        if let Some(rest) = text.strip_prefix("PID: ") {
            let mut parts = rest.split(", ");
            let pid = parts.next()?.trim().parse().ok()?;
            let name = parts.next()?.strip_prefix("name: ")?;
            self.victim =
                KillNotice { pid: Some(pid), process: printable(name.as_bytes()), ..KillNotice::default() };
        } else if let Some(cgroup) =
            text.strip_prefix("cgroup_v2: ").or_else(|| text.strip_prefix("cgroup_v1: "))
        {
            self.victim.cgroup = printable(cgroup.trim().as_bytes());
        } else if let Some(rest) =
            text.split_once("RSS: ").filter(|_| text.starts_with("Vm, MiB:")).map(|(_, rest)| rest)
        {
            self.victim.resident = rest
                .split(' ')
                .next()
                .map_or_else(String::new, |rss| format!("{} MiB", printable(rss.as_bytes())));
        }
        let is_kill = text.starts_with("Sending SIGTERM to the victim")
            || text.starts_with("Sending SIGKILL to the victim");
        let victim = Some(self.victim.clone()).filter(|victim| is_kill && victim.pid.is_some())?;
        Some(KillNotice {
            source: NoticeSource::Nohang,
            container_id: id_in(&victim.cgroup),
            reason: "available memory was below its threshold".to_owned(),
            ..victim
        })
    }

    /// Reads the output of `kubectl describe pod`, of `kubectl get pods`, and of `kubectl get events`.
    fn read_kubectl(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            // NAME READY STATUS RESTARTS AGE, which may have a namespace before it
            [name, ready, "OOMKilled" | "Init:OOMKilled", restarts, ..]
            | [_, name, ready, "OOMKilled" | "Init:OOMKilled", restarts, ..]
                if is_ready(ready) && restarts.bytes().all(|byte| byte.is_ascii_digit()) =>
            {
                let namespace = words.first().filter(|first| **first != name).copied().unwrap_or("");
                let is_again =
                    self.notices.iter().any(|known| known.pod == name && known.restarts == restarts);
                if is_again {
                    return; // of `kubectl get pods -w`
                }
                self.add(KillNotice {
                    source: NoticeSource::Kubectl,
                    pod: printable(name.as_bytes()),
                    namespace: printable(namespace.as_bytes()),
                    restarts: restarts.to_owned(),
                    ..KillNotice::default()
                });
            }
            [_, "Warning", "OOMKilling" | "SystemOOM", object, ..] => {
                let node = printable(object.strip_prefix("node/").unwrap_or(object).as_bytes());
                if !self.nodes.contains(&node) && self.nodes.len() < MAX_NOTICES {
                    self.nodes.push(node);
                }
            }
            [_, "Warning", "BackOff", object, ..] if object.starts_with("pod/") => {
                self.restarted = printable(&object.as_bytes()["pod/".len()..]);
            }
            _ => self.read_description(line),
        }
    }

    fn read_description(&mut self, line: &str) {
        let Some((key, value)) = line.split_once(':') else { return };
        let (is_indented, value) = (key.starts_with(' '), value.trim());
        let text = || printable(value.as_bytes());
        match key.trim() {
            "Name" if !is_indented => {
                self.end_of_container();
                self.described = KillNotice { pod: text(), ..KillNotice::default() };
                self.has_containers = false;
            }
            "Namespace" if !is_indented => self.described.namespace = text(),
            "Node" if !is_indented => {
                self.described.node = text().split('/').next().unwrap_or_default().to_owned();
            }
            "Containers" | "Init Containers" if !is_indented && value.is_empty() => {
                self.end_of_container();
                self.has_containers = true;
            }
            name if self.has_containers && value.is_empty() && key.len() == name.len() + 2 => {
                self.end_of_container();
                self.described.container = printable(name.as_bytes());
            }
            _ if !self.has_containers => {}
            "Container ID" => self.described.container_id = id_in(value),
            "Reason" if value == "OOMKilled" && key.starts_with("      ") => self.is_described = true,
            "Exit Code" if self.is_described && self.described.exit_code.is_none() => {
                self.described.exit_code = value.parse().ok();
            }
            "Finished" if self.is_described && self.described.time.is_empty() => self.described.time = text(),
            "memory" if self.described.limit.is_empty() => self.described.limit = text(),
            "Requests" if self.described.limit.is_empty() => self.described.limit = "none".to_owned(),
            _ => {}
        }
    }

    /// Adds the container that was described, if it was killed.
    fn end_of_container(&mut self) {
        let KillNotice { pod, namespace, node, .. } = self.described.clone();
        let next =
            KillNotice { source: NoticeSource::Kubectl, pod, namespace, node, ..KillNotice::default() };
        let described = std::mem::replace(&mut self.described, next);
        if std::mem::take(&mut self.is_described) {
            let limit = if described.limit.is_empty() { "none".to_owned() } else { described.limit.clone() };
            let described = KillNotice { limit, ..described };
            self.notices.push(KillNotice { source: NoticeSource::Kubectl, ..described });
        }
    }
}

impl KillNotice {
    /// Adds what another notice says of the same death.
    fn merge(&mut self, other: Self) {
        let Self { source, unit, cgroup, container_id, process, pid, resident, reason, .. } = other;
        // who killed says more than who noticed
        if source.killer().is_some() && self.source.killer().is_none() {
            (self.source, self.reason) = (source, reason);
        }
        let texts = [
            (&mut self.unit, unit),
            (&mut self.cgroup, cgroup),
            (&mut self.container_id, container_id),
            (&mut self.process, process),
            (&mut self.resident, resident),
        ];
        for (own, other) in texts {
            if own.is_empty() {
                *own = other;
            }
        }
        self.pid = self.pid.or(pid);
    }

    /// Returns whether it is about what is called so.
    pub fn matches(&self, wanted: &str) -> bool {
        let Self { unit, container_id, container, pod, namespace, process, cgroup, .. } = self;
        let names = [unit, container, pod, process];
        !wanted.is_empty()
            && (names.iter().any(|name| *name == wanted)
                || *unit == format!("{wanted}.service")
                || *wanted == format!("{namespace}/{pod}")
                || *wanted == format!("{namespace}/{pod}/{container}")
                || wanted.len() >= 12 && container_id.starts_with(wanted)
                || cgroup
                    .split('/')
                    .any(|part| part == wanted || part.ends_with(wanted) && wanted.len() >= 32))
    }
}

/// Splits a line of syslog or the journal into its time, its program and the program's text; the program is empty in another form.
fn syslog_parts(line: &str) -> (&str, &str, &str) {
    let Some(open) = line.find("]: ") else { return ("", "", line) };
    let head = &line[..open];
    let Some((before, pid)) = head.rsplit_once('[') else { return ("", "", line) };
    if pid.is_empty() || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
        return ("", "", line);
    }
    let (before, program) = before.rsplit_once(' ').unwrap_or(("", before));
    let time = before.rsplit_once(' ').map_or(before, |(time, _host)| time);
    (time.trim(), program, &line[open + 3..])
}

/// Returns the time of a line, else that beside it.
fn first_of(time: &str, stamp: Option<&str>) -> String {
    let time = if time.is_empty() { stamp.unwrap_or_default() } else { time };
    printable(time.as_bytes())
}

/// `Killed /system.slice/a.service due to memory pressure for ...`, or `due to memory used ...`.
fn parse_oomd(text: &str) -> Option<KillNotice> {
    let (cgroup, reason) = text.strip_prefix("Killed ")?.split_once(" due to ")?;
    if !cgroup.starts_with('/') {
        return None;
    }
    let cgroup = printable(cgroup.as_bytes());
    Some(KillNotice {
        source: NoticeSource::Oomd,
        container_id: id_in(&cgroup),
        cgroup,
        reason: printable(reason.as_bytes()),
        ..KillNotice::default()
    })
}

/// `"Got sys oom event" event={...}`, and `System OOM encountered, victim process: python3, pid: 1557026`.
fn parse_kubelet(line: &str) -> Option<KillNotice> {
    let node = KillNotice { source: NoticeSource::Kubelet, ..KillNotice::default() };
    if let Some((_, event)) = line.split_once("\"Got sys oom event\" event=") {
        let mut events = serde_json::Deserializer::from_str(event).into_iter::<Value>();
        let event = events.next()?.ok()?;
        let text = |key: &str| {
            event.get(key).and_then(Value::as_str).map_or_else(String::new, |it| printable(it.as_bytes()))
        };
        let cgroup = text("VictimContainerName");
        return Some(KillNotice {
            container_id: id_in(&cgroup),
            cgroup,
            process: text("ProcessName"),
            pid: event.get("Pid").and_then(Value::as_u64).and_then(|pid| pid.try_into().ok()),
            ..node
        });
    }
    let (_, rest) = line.split_once("System OOM encountered, victim process: ")?;
    let (process, pid) = rest.split_once(", pid: ")?;
    let digits = pid.bytes().take_while(u8::is_ascii_digit).count();
    Some(KillNotice {
        process: printable(process.as_bytes()),
        pid: Some(pid[..digits].parse().ok()?),
        ..node
    })
}

/// `TaskOOM event container_id:"..."`, of containerd, and `topic=/tasks/oom` of dockerd.
fn parse_containerd(line: &str) -> Option<KillNotice> {
    // `TIME container oom ID (image=...)` is of `docker events`
    let event = line.split_once(" container oom ").filter(|(time, _)| !time.contains(' '));
    let is_oom = line.contains("TaskOOM event") || line.contains("topic=/tasks/oom") || event.is_some();
    let container_id = id_in(line);
    (is_oom && !container_id.is_empty()).then(|| KillNotice {
        source: NoticeSource::Containerd,
        time: printable(event.map_or_else(|| time_field(line), |(time, _)| time).as_bytes()),
        container_id,
        ..KillNotice::default()
    })
}

/// Returns the time of `time="..."`; empty without it.
fn time_field(line: &str) -> &str {
    line.split_once("time=\"").and_then(|(_, rest)| rest.split_once('"')).map_or("", |(time, _)| time)
}

/// `[talos] Sending SIGKILL to cgroup {... "cgroup": "/sys/fs/cgroup/kubepods/..."}`.
fn parse_talos(line: &str) -> Option<KillNotice> {
    let (head, event) = line.split_once("Sending SIGKILL to cgroup ")?;
    let event: Value = serde_json::from_str(event).ok()?;
    let cgroup = event.get("cgroup")?.as_str()?;
    let cgroup = printable(cgroup.strip_prefix("/sys/fs/cgroup").unwrap_or(cgroup).as_bytes());
    let is_talos = head.contains("[talos]") || line.contains("runtime.OOMController");
    let time = head.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(time, _)| time);
    is_talos.then(|| KillNotice {
        source: NoticeSource::Talos,
        time: printable(time.as_bytes()),
        container_id: id_in(&cgroup),
        cgroup,
        reason: "memory pressure".to_owned(),
        ..KillNotice::default()
    })
}

/// Returns the id of a container in a text; empty without one.
fn id_in(text: &str) -> String {
    if let Some(found) = container_id::in_path(text).next() {
        return found.id.to_owned();
    }
    let mut parts = text.split(|byte: char| !byte.is_ascii_hexdigit());
    parts.find(|part| part.len() == ID).unwrap_or_default().to_owned()
}

fn unit_of(cgroup: &str) -> &str {
    cgroup.rsplit('/').next().unwrap_or_default()
}

/// Returns whether a word is a number of ready containers, such as `0/1`.
fn is_ready(word: &str) -> bool {
    word.split_once('/').is_some_and(|(ready, all)| {
        [ready, all].iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<KillNotice> {
        let mut reader = NoticeReader::default();
        text.lines().for_each(|line| reader.push(line.as_bytes(), None));
        reader.finish()
    }

    fn one(text: &str) -> KillNotice {
        let mut found = read(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        found.remove(0)
    }

    #[test]
    fn unit_of_systemd_has_one_notice_with_its_peak() {
        let notice = one(
            "Oct 03 20:19:36 gpu1 systemd[1]: llama.service: A process of this unit has been killed by the OOM killer.\n\
             Oct 03 20:19:36 gpu1 systemd[1]: llama.service: Failed with result 'oom-kill'.\n\
             Oct 03 20:19:36 gpu1 systemd[1]: llama.service: Consumed 35min CPU time, 57.4G memory peak, 7.9G memory swap peak.",
        );
        assert_eq!(
            (&*notice.unit, &*notice.peak, &*notice.time),
            ("llama.service", "57.4G", "Oct 03 20:19:36")
        );
        assert!(notice.matches("llama") && notice.matches("llama.service") && !notice.matches("ll"));
        assert!(
            read(
                "Oct 03 20:19:36 gpu1 systemd[1]: llama.service: Consumed 35min CPU time, 57.4G memory peak."
            )
            .is_empty()
        );
        assert!(
            read("Oct 03 20:19:36 gpu1 app[7]: x: A process of this unit has been killed by the OOM killer.")
                .is_empty()
        );
    }

    #[test]
    fn each_failure_of_a_unit_is_a_death_and_a_stop_is_none() {
        let line = |day: u32, rest: &str| format!("Oct 0{day} 12:00:00 h systemd[1]: a.service: {rest}\n");
        let failed = |day| {
            line(day, "A process of this unit has been killed by the OOM killer.")
                + &line(day, "Failed with result 'oom-kill'.")
        };
        let loops = read(
            &(failed(3)
                + &line(3, "Scheduled restart job, restart counter is at 1.")
                + &failed(4)
                + &failed(5)),
        );
        assert_eq!(
            loops.iter().map(|notice| &notice.time[..6]).collect::<Vec<_>>(),
            ["Oct 03", "Oct 04", "Oct 05"]
        );
        let stopped = read(
            &(failed(3)
                + &line(5, "Deactivated successfully.")
                + &line(5, "Consumed 1min CPU time, 900M memory peak")),
        );
        assert_eq!((stopped.len(), &*stopped[0].peak), (1, ""));
        let status = "\u{d7} a.service - A\n     Active: failed (Result: oom-kill) since Fri 2026-10-02 10:00:00 UTC; 1min ago";
        assert_eq!(one(status).unit, "a.service");
    }

    #[test]
    fn prose_is_no_notice() {
        let id = "a".repeat(64);
        for text in [
            format!("Oct 03 10:00:00 host ci[1]: Fixed container oom in image sha256:{id}"),
            format!("no TaskOOM was seen for {id}"),
            "see 1/2 OOMKilled in table".to_owned(),
            "Name: foo\nContainers: x\nReason: OOMKilled".to_owned(),
            "h systemd-oomd[1]: Killed my temper due to stress".to_owned(),
            "h bash[1]: \"Got sys oom event\" event={\"Pid\":1,\"ProcessName\":\"x\"}".to_owned(),
        ] {
            assert!(read(&text).is_empty(), "{text}: {:?}", read(&text));
        }
    }

    #[test]
    fn earlyoom_has_killed_only_where_it_sent_a_signal() {
        let sent =
            "h earlyoom[1]: sending SIGTERM to process 319 uid 0 \"py thon\": badness 1301, VmRSS 58 MiB";
        assert_eq!(
            (one(sent).pid, &*one(sent).process, &*one(sent).resident),
            (Some(319), "py thon", "58 MiB")
        );
        for none in [
            "h earlyoom[1]: sending SIGTERM when mem <= 10.00% and swap <= 10.00%,".to_owned(),
            format!("h earlyoom[1]: dryrun, not actually sending any signal\n{sent}"),
            format!("{sent}\nh earlyoom[1]: kill failed: Operation not permitted"),
            sent.replace("earlyoom", "bash"),
        ] {
            assert!(read(&none).is_empty(), "{none}");
        }
    }

    #[test]
    fn description_of_a_pod_names_the_container_that_was_killed() {
        let text = "Name:             train-llama-0\nNamespace:        ml\nNode:             gpu-7/192.0.2.7\nContainers:\n  side:\n    State:          Running\n  trainer:\n    Container ID:   containerd://ID\n    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n      Finished:     Tue, 09 Mar 2026 21:28:16 +0000\n    Limits:\n      memory:          32Gi\n    Requests:\n      memory:          1Gi\n";
        let notice = one(&text.replace("ID\n", &("a".repeat(64) + "\n")));
        assert_eq!(
            (&*notice.pod, &*notice.container, &*notice.namespace, &*notice.node),
            ("train-llama-0", "trainer", "ml", "gpu-7")
        );
        assert_eq!((notice.exit_code, &*notice.limit, notice.container_id.len()), (Some(137), "32Gi", 64));
        assert!(read(&text.replace("OOMKilled", "Error")).is_empty());
        assert_eq!(one("ml   train-0   0/1   OOMKilled   4   10m").pod, "train-0");
    }

    #[test]
    fn kill_by_a_monitor_is_one_notice() {
        let notice = one(
            "Nov 03 11:20:06 ws systemd-oomd[840]: Killed /user.slice/a/vte.scope due to memory pressure for /user.slice being 71.07% > 50.00%\n\
             Nov 03 11:20:06 ws systemd[1837]: vte.scope: systemd-oomd killed 12 process(es) in this unit.\n\
             Nov 03 11:20:06 ws systemd[1837]: vte.scope: Failed with result 'oom-kill'.",
        );
        assert_eq!((notice.source, &*notice.cgroup), (NoticeSource::Oomd, "/user.slice/a/vte.scope"));
        assert!(notice.reason.starts_with("memory pressure for"), "{notice:?}");
    }
}
