//! The record of one run, as it is in the spool: JSON, without the command line and without other variables than settings.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::RUNTIME;
use crate::config::{Filter, RunSettings, label_settings, merged};
use crate::discover::history::ExistingContainer;
use crate::discover::{ContainerId, ContainerRecord, EventKind, RuntimeEvent};
use crate::host::process::{ProcessId, read_stat};
use crate::host::{Dir, HostPaths};
use crate::series::bounded;

/// Random hexadecimal digits of an id. The others are [`ID_SUFFIX`].
const RANDOM_DIGITS: usize = 56;
/// The last digits of each id, `-run` in ASCII: a record cannot have the id of a container of another runtime.
const ID_SUFFIX: &str = "2d72756e";

/// A process of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedProcess {
    /// Its pid.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
}

impl RecordedProcess {
    /// Returns its identity.
    pub fn id(self) -> ProcessId {
        ProcessId::new(self.pid, self.start_ticks)
    }

    /// Returns whether it runs: not as a zombie, which an init that does not reap would leave for ever.
    pub fn runs(self, host_paths: &HostPaths) -> bool {
        let stat = Dir::open(&host_paths.process(self.pid)).and_then(|dir| read_stat(&dir, &mut Vec::new()));
        stat.is_ok_and(|stat| stat.start_ticks == self.start_ticks && !stat.has_ended())
    }

    /// Reads the start of a process; `None` if it has ended.
    pub fn read(host_paths: &HostPaths, pid: u32) -> Option<Self> {
        let dir = Dir::open(&host_paths.process(pid)).ok()?;
        let stat = read_stat(&dir, &mut Vec::new()).ok()?;
        Some(Self { pid, start_ticks: stat.start_ticks })
    }
}

/// A signal that `memledger run` received for its command.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceivedSignal {
    /// The signal.
    pub signal: i32,
    /// Unix time.
    pub at: f64,
}

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunEnd {
    /// Unix time.
    pub at: f64,
    /// Exit status; 128 + n after signal n.
    pub exit_code: i64,
    /// OOM kills in its cgroup; `None` if unknown.
    pub oom_kills: Option<u64>,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpooledRun {
    /// 64 hexadecimal digits, see [`new_id`].
    pub id: String,
    /// Its name.
    pub name: String,
    /// Unix time at which the command was started.
    pub started: f64,
    /// The boot in which it was started.
    pub boot_id: String,
    /// `--label`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The variables of its environment that are settings, as label names and values.
    #[serde(default)]
    pub settings: RunSettings,
    /// Memory limit in bytes.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// `memledger run`.
    pub supervisor: RecordedProcess,
    /// The command; `None` until it is started.
    #[serde(default)]
    pub command: Option<RecordedProcess>,
    /// The newest signals, oldest first.
    #[serde(default)]
    pub signals: Vec<ReceivedSignal>,
    /// `None` while it runs, and if `memledger run` itself was killed.
    #[serde(default)]
    pub end: Option<RunEnd>,
}

/// Returns a new id, at random.
///
/// # Errors
/// The kernel has no random numbers.
pub fn new_id() -> std::io::Result<String> {
    let mut bytes = [0; RANDOM_DIGITS / 2];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(digits + ID_SUFFIX)
}

/// Returns whether this is the id of a run.
pub fn is_id(text: &str) -> bool {
    text.len() == RANDOM_DIGITS + ID_SUFFIX.len()
        && text.ends_with(ID_SUFFIX)
        && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl SpooledRun {
    /// Returns its id as that of a container.
    pub fn container_id(&self) -> ContainerId {
        ContainerId::new(&self.id)
    }

    /// Returns whether the command runs, as far as its processes show. While `memledger run` exists it may still write the end.
    pub fn is_running(&self, host_paths: &HostPaths, boot_id: &str) -> bool {
        let mut processes = [self.command, Some(self.supervisor)].into_iter().flatten();
        self.end.is_none() && self.boot_id == boot_id && processes.any(|process| process.runs(host_paths))
    }

    fn labels(&self) -> HashMap<String, String> {
        self.labels.clone().into_iter().collect()
    }

    /// Returns it as a container.
    pub fn container(&self, filter: &Filter) -> ContainerRecord {
        let labels = self.labels();
        ContainerRecord {
            id: self.container_id(),
            runtime: RUNTIME,
            name: bounded(&self.name).to_string(),
            pod: None,
            image: "".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: merged(label_settings(&labels), self.settings.clone()),
            gpus: Arc::default(),
            started: Some(self.started),
            labels_match: filter.labels_match(&labels),
            reads_log: false,
        }
    }

    /// Returns an event of it.
    pub fn event(&self, at: f64, what: EventKind, filter: &Filter) -> RuntimeEvent {
        RuntimeEvent {
            runtime: RUNTIME,
            socket: Arc::default(),
            id: self.container_id(),
            at,
            named: Some(self.container(filter).details()),
            what,
        }
    }

    /// Returns that it has run since its start.
    pub fn running(&self, filter: &Filter) -> RuntimeEvent {
        let pid = self.command.map(|command| command.pid);
        self.event(self.started, EventKind::Running { pid }, filter)
    }

    /// Returns a signal that it received.
    pub fn signal(&self, received: ReceivedSignal, filter: &Filter) -> RuntimeEvent {
        let what = EventKind::SignalRequested { signal: Some(received.signal) };
        self.event(received.at, what, filter)
    }

    /// Returns its end, if that is recorded.
    pub fn ended(&self, filter: &Filter) -> Option<RuntimeEvent> {
        let end = self.end.as_ref()?;
        let oom_flag = end.oom_kills.map(|kills| kills > 0);
        let what = EventKind::Ended { exit_code: Some(end.exit_code), oom_flag };
        Some(self.event(end.at.max(self.started), what, filter))
    }

    /// Returns it as a container that exists.
    pub fn existing(&self, is_running: bool, filter: &Filter) -> ExistingContainer {
        ExistingContainer {
            id: self.container_id(),
            runtime: RUNTIME,
            named: self.container(filter).details(),
            is_running,
            started: Some(self.started),
            ended: self.end.as_ref().map(|end| end.at),
            limit_bytes: self.limit_bytes,
            start_error: None,
            restarts: None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn spooled(id: &str, name: &str, started: f64) -> SpooledRun {
        SpooledRun {
            id: id.to_owned(),
            name: name.to_owned(),
            started,
            boot_id: "boot".to_owned(),
            labels: BTreeMap::new(),
            settings: vec![],
            limit_bytes: None,
            supervisor: RecordedProcess { pid: 0, start_ticks: 0 },
            command: None,
            signals: vec![],
            end: None,
        }
    }

    #[test]
    fn id_is_random_and_never_that_of_another_runtime() {
        let (one, other) = (new_id().unwrap(), new_id().unwrap());
        assert!(is_id(&one) && is_id(&other) && one != other);
        assert!(!is_id(&"a".repeat(64)) && !is_id(&one[1..]) && !is_id(&one.to_uppercase()));
        assert_eq!(crate::parse::container_id::in_component(&one, "memledger").unwrap().runtime, RUNTIME);
    }

    #[test]
    fn run_of_an_earlier_boot_or_without_its_processes_does_not_run() {
        let host_paths = HostPaths::default();
        let own = RecordedProcess::read(&host_paths, std::process::id()).unwrap();
        let run = SpooledRun { supervisor: own, ..spooled("a", "train", 1.0) };
        assert!(run.is_running(&host_paths, "boot"));
        assert!(!run.is_running(&host_paths, "another boot"));
        let reused = RecordedProcess { start_ticks: own.start_ticks + 1, ..own };
        let gone = SpooledRun { supervisor: reused, ..run.clone() };
        assert!(!gone.is_running(&host_paths, "boot"));
        assert!(SpooledRun { command: Some(own), ..gone }.is_running(&host_paths, "boot"));
        let end = Some(RunEnd { at: 2.0, exit_code: 0, oom_kills: None });
        assert!(!SpooledRun { end, ..run }.is_running(&host_paths, "boot"));
    }
}
