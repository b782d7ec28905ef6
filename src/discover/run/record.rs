//! The record of one run, as it is in the spool: JSON, without the command line and without other variables than settings.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::config::{Filter, RunSettings, merged, variable_name};
use crate::discover::history::ExistingContainer;
use crate::discover::{ContainerId, ContainerRecord, ContainerSpec, EventKind, RuntimeEvent, RuntimeKind};
use crate::host::process::{ProcessId, read_stat};
use crate::host::{Dir, HostPaths};
use crate::parse::container_id::RUN_ID_SUFFIX;
use crate::text::bounded;

/// Random hexadecimal digits of an id. Those of the user and [`RUN_ID_SUFFIX`] follow.
const RANDOM_DIGITS: usize = 48;
/// Hexadecimal digits of a user's id.
const USER_DIGITS: usize = 8;
/// Maximum number of labels, settings and signals of a record.
const MAX_ENTRIES: usize = 32;
/// Maximum length of a name.
pub const MAX_NAME: usize = 64;

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
pub struct RecordedEnd {
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
    pub supervisor: ProcessId,
    /// The command; `None` until it is started.
    #[serde(default)]
    pub command: Option<ProcessId>,
    /// The newest signals, oldest first.
    #[serde(default)]
    pub signals: Vec<ReceivedSignal>,
    /// `None` while it runs, and if `memledger run` itself was killed.
    #[serde(default)]
    pub end: Option<RecordedEnd>,
    /// One of its processes existed when it was read.
    #[serde(skip)]
    pub is_alive: bool,
    /// The user whose run it is.
    #[serde(skip)]
    pub uid: u32,
}

/// Returns a new id of a run of this user, at random.
///
/// # Errors
/// The kernel has no random numbers.
pub fn new_id(uid: u32) -> std::io::Result<String> {
    let mut bytes = [0; RANDOM_DIGITS / 2];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{digits}{uid:08x}{RUN_ID_SUFFIX}"))
}

/// Returns whether this is the id of a run of this user: nobody can record the end of another user's run.
pub fn is_id_of(uid: u32, text: &str) -> bool {
    text.len() == RANDOM_DIGITS + USER_DIGITS + RUN_ID_SUFFIX.len()
        && text.ends_with(&format!("{uid:08x}{RUN_ID_SUFFIX}"))
        && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns whether a container could have this name too.
pub fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    text.len() <= MAX_NAME
        && text.bytes().all(is_plain)
        && text.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}

/// Returns whether a process runs, and is this user's or a child of `parent`: `sudo` makes a command root's. A zombie does not run: an
/// init that reaps none would leave it for ever.
fn runs_for(process: ProcessId, host_paths: &HostPaths, uid: u32, parent: Option<ProcessId>) -> bool {
    let path = host_paths.process(process.pid);
    let stat = Dir::open(&path).and_then(|dir| read_stat(&dir, &mut Vec::new()));
    let Ok(stat) = stat else { return false };
    let is_own = || std::fs::metadata(&path).is_ok_and(|found| found.uid() == uid);
    let is_child = parent.is_some_and(|parent| stat.ppid == parent.pid);
    stat.start_ticks == process.start_ticks && !stat.has_ended() && (is_child || is_own())
}

impl SpooledRun {
    /// Returns its id as that of a container.
    pub fn container_id(&self) -> ContainerId {
        ContainerId::new(&self.id)
    }

    /// Makes a record that was read consistent: it may be forged. `uid`: the owner of its file. `None` if it is of no use.
    pub fn checked(mut self, uid: u32, host_paths: &HostPaths, now: f64) -> Option<Self> {
        if !is_id_of(uid, &self.id) || !is_name(&self.name) || !self.started.is_finite() {
            return None;
        }
        let allowed = |(name, value): &(Arc<str>, Arc<str>)| {
            Some((variable_name(name).ok()?.to_ascii_lowercase().into(), bounded(value)))
        };
        self.settings = self.settings.iter().filter_map(allowed).take(MAX_ENTRIES).collect();
        let excess = self.signals.len().saturating_sub(MAX_ENTRIES);
        self.signals.drain(..excess);
        while self.labels.len() > MAX_ENTRIES {
            self.labels.pop_last();
        }
        self.uid = uid;
        self.started = self.started.clamp(0.0, now);
        self.signals.iter_mut().for_each(|received| received.at = received.at.clamp(self.started, now));
        if let Some(end) = &mut self.end {
            end.at = end.at.clamp(self.started, now);
            end.exit_code = end.exit_code.clamp(0, 255);
        }
        // in another pid namespace a pid means another process, or none
        let sees_processes = host_paths.in_initial_pid_namespace();
        let supervisor =
            Some(self.supervisor).filter(|it| !sees_processes || runs_for(*it, host_paths, uid, None));
        let runs = |command: &ProcessId| {
            supervisor != Some(*command) && runs_for(*command, host_paths, uid, supervisor)
        };
        let is_own = self.command.filter(runs);
        self.is_alive = !sees_processes || supervisor.is_some() || is_own.is_some();
        // of a command that has ended the pid explains a kill; whose it was cannot be proven any more
        let is_trusted = uid == 0 || uid == geteuid().as_raw();
        self.command = if self.end.is_some() && is_trusted { self.command } else { is_own };
        Some(self)
    }

    /// Returns whether the command runs, as far as its processes show. While `memledger run` exists it may still write the end.
    pub fn is_running(&self, boot_id: &str) -> bool {
        self.end.is_none() && self.boot_id == boot_id && self.is_alive
    }

    fn labels(&self) -> HashMap<String, String> {
        self.labels.clone().into_iter().collect()
    }

    /// Returns it as a container.
    pub fn container(&self, filter: &Filter) -> ContainerRecord {
        let labels = self.labels();
        let labelled = ContainerSpec::labelled([&self.name, ""], &labels, filter);
        let spec = ContainerSpec {
            compose_project: Arc::default(),
            compose_service: Arc::default(),
            settings: merged(labelled.settings, self.settings.clone()),
            user: Some(self.uid),
            reads_log: false,
            ..labelled
        };
        ContainerRecord {
            started: Some(self.started),
            pid: self.command.map(|command| command.pid),
            ..ContainerRecord::new(&self.id, RuntimeKind::Run, spec)
        }
    }

    /// Returns an event of it.
    pub fn event(&self, at: f64, what: EventKind, filter: &Filter) -> RuntimeEvent {
        self.container(filter).event(at, what)
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
            runtime: RuntimeKind::Run,
            named: self.container(filter).spec,
            is_running,
            first_process: None,
            has_lost_process: false,
            started: Some(self.started),
            ended: self.end.as_ref().map(|end| end.at),
            limit_bytes: self.limit_bytes,
            start_error: None,
            log_path: None,
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
            supervisor: ProcessId::new(0, 0),
            command: None,
            signals: vec![],
            end: None,
            is_alive: false,
            uid: 0,
        }
    }

    #[test]
    fn id_is_random_and_of_one_user_alone() {
        let (one, other) = (new_id(1000).unwrap(), new_id(1000).unwrap());
        assert!(is_id_of(1000, &one) && is_id_of(1000, &other) && one != other);
        assert!(!is_id_of(1001, &one) && !is_id_of(1000, &"a".repeat(64)) && !is_id_of(1000, &one[1..]));
        let in_path = |id: &str| crate::parse::container_id::in_component(id, "memledger").unwrap().runtime;
        assert_eq!((in_path(&one), in_path(&"a".repeat(64))), (RuntimeKind::Run, RuntimeKind::Unknown));
    }

    #[test]
    fn run_of_an_earlier_boot_or_without_its_processes_does_not_run() {
        let (host_paths, uid) = (HostPaths::default(), geteuid().as_raw());
        if !host_paths.in_initial_pid_namespace() {
            return eprintln!("SKIPPED: not in the host's pid namespace");
        }
        let own = ProcessId::read(&host_paths.proc, std::process::id()).unwrap();
        let run = SpooledRun { supervisor: own, ..spooled(&new_id(uid).unwrap(), "train", 1.0) };
        let is_running = |run: &SpooledRun, boot: &str| {
            run.clone().checked(uid, &host_paths, 9.0).unwrap().is_running(boot)
        };
        assert!(is_running(&run, "boot") && !is_running(&run, "another boot"));
        let reused = ProcessId::new(own.pid, own.start_ticks + 1);
        let gone = SpooledRun { supervisor: reused, ..run.clone() };
        assert!(!is_running(&gone, "boot"));
        assert!(is_running(&SpooledRun { command: Some(own), ..gone }, "boot"));
        let end = Some(RecordedEnd { at: 2.0, exit_code: 0, oom_kills: None });
        assert!(!is_running(&SpooledRun { end, ..run }, "boot"));
    }

    #[test]
    fn forged_record_has_neither_labels_of_others_nor_their_processes_nor_a_future() {
        let (host_paths, uid) = (HostPaths::default(), geteuid().as_raw() + 1);
        let own = ProcessId::read(&host_paths.proc, std::process::id()).ok();
        let forged = SpooledRun {
            command: own,
            settings: [("a=\"1\"} 1\nx{b", "v"), ("container_name", "v"), ("batch_size", "8\n")]
                .map(|(name, value)| (name.into(), value.into()))
                .into(),
            signals: vec![ReceivedSignal { signal: 15, at: 1e12 }; 100],
            end: Some(RecordedEnd { at: 1e12, exit_code: i64::MAX, oom_kills: None }),
            ..spooled(&new_id(uid).unwrap(), "train", 1e12)
        };
        let read = forged.clone().checked(uid, &host_paths, 9.0).unwrap();
        assert_eq!((read.command, read.is_alive), (None, !host_paths.in_initial_pid_namespace()));
        let end = read.end.unwrap();
        assert_eq!((read.started, end.at, end.exit_code, read.signals.len()), (9.0, 9.0, 255, MAX_ENTRIES));
        let early = SpooledRun { started: -1e300, ..forged.clone() };
        assert_eq!(early.checked(uid, &host_paths, 9.0).unwrap().started, 0.0);
        assert_eq!(read.settings, [("batch_size".into(), bounded("8\n"))]);
        assert_eq!(forged.clone().checked(uid + 1, &host_paths, 9.0), None, "the id is of another user");
        for name in ["", "a\nb", "-x", &"x".repeat(65)] {
            assert_eq!(
                SpooledRun { name: name.to_owned(), ..forged.clone() }.checked(uid, &host_paths, 9.0),
                None
            );
        }
    }
}
