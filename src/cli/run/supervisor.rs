//! Supervises the command: forwards signals, waits for its end, and records both.
//!
//! The command is in the process group of `memledger run`, so that the shell's job control works. A signal of the terminal reaches
//! both, and one that is sent to `memledger run` alone is forwarded. One that is sent to the whole group reaches the command twice.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use rustix::process::{Pid, kill_process};

use super::cgroup::RunCgroup;
use super::{HOLD_VERB, LAUNCH_ERROR, START_VERB, note};
use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::run::record::{ReceivedSignal, RecordedEnd, SpooledRun};
use crate::discover::run::spool::UserSpool;
use crate::host::process::ProcessId;
use crate::host::signals;

/// The signals that are forwarded.
const FORWARDED: [Signal; 7] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
];
/// Those of them that ask a program to end, which are recorded.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
/// Maximum number of signals in a record.
const MAX_SIGNALS: usize = 16;
/// Those that a terminal sends to the command too, and the `si_code` that they then have.
const OF_TERMINAL: [Signal; 3] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT];
const SI_KERNEL: i32 = 0x80;
const SIGKILL: i32 = 9;

/// One run from its start to its end.
pub struct Supervisor<'a> {
    pub config: &'a Config,
    pub spool: UserSpool,
    pub run: SpooledRun,
    pub cgroup: Option<RunCgroup>,
    /// Keeps another start of this user from the same name, until the run is recorded.
    pub lock: Option<OwnedFd>,
}

/// The process that keeps the cgroup. It ends when its standard input is closed.
struct Holder(Child);

impl Holder {
    fn start() -> anyhow::Result<Self> {
        Command::new(own_program()?)
            .arg(HOLD_VERB)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0) // without the signals of the terminal
            .spawn()
            .map(Self)
            .context("cannot start a process of memledger")
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Supervisor<'_> {
    /// Runs the command, and returns its exit status.
    ///
    /// # Errors
    /// It cannot be started; then nothing is recorded.
    pub fn supervise(
        mut self,
        arguments: &[OsString],
        variables: &[(&str, OsString)],
    ) -> anyhow::Result<ExitCode> {
        signals::expect_children();
        // before signals are blocked, which it would inherit; it waits for its record, and ends with this process until then
        let mut child = self.start_waiting(arguments, variables)?;
        let (signals, holder) = match self.release(&child) {
            Ok(released) => released,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        let status = self.wait(child, &signals)?;
        self.finish(status, holder);
        Ok(ExitCode::from(exit_code(status) as u8))
    }

    /// Starts the process that becomes the command once the run is recorded.
    fn start_waiting(&self, arguments: &[OsString], variables: &[(&str, OsString)]) -> anyhow::Result<Child> {
        let mut command = Command::new(own_program()?);
        command.arg(START_VERB).arg(self.spool.path(&self.run)).args(arguments);
        let variables = variables.iter().map(|(name, value)| (name, value));
        command.envs(variables).spawn().context("cannot start a process of memledger")
    }

    /// Puts the command into its cgroup, and records the run, for which it waits.
    fn release(&mut self, child: &Child) -> anyhow::Result<(SignalFd, Option<Holder>)> {
        let holder = self.cgroup.as_ref().filter(|cgroup| cgroup.ends_with_processes());
        let holder = holder.map(|_| Holder::start()).transpose()?;
        // one that this process ignores, as under nohup, the command ignores too
        let ignored = signals::ignored();
        let received = FORWARDED.into_iter().filter(|signal| ignored >> (*signal as u32 - 1) & 1 == 0);
        let signals: SigSet = received.chain([Signal::SIGCHLD]).collect();
        signals.thread_block().context("cannot block signals")?;
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("cannot read signals")?;
        if let Some(cgroup) = &mut self.cgroup {
            let SpooledRun { id, name, limit_bytes, .. } = &self.run;
            let pids: Vec<u32> = [Some(child), holder.as_ref().map(|Holder(child)| child)]
                .into_iter()
                .flatten()
                .map(Child::id)
                .collect();
            cgroup.make(id, name, *limit_bytes, &pids)?;
        }
        self.run.command = ProcessId::read(&self.config.host_paths.proc, child.id()).ok();
        self.run.started = Timestamp::now().unix_seconds();
        self.spool.write(&self.run).with_context(|| {
            let place = self.spool.path(&self.run);
            format!("cannot record the run as {}; set --run.spool to another directory", place.display())
        })?;
        drop(self.lock.take());
        Ok((signals, holder))
    }

    /// Waits for the end of the command, and forwards signals until then.
    fn wait(&mut self, mut child: Child, signals: &SignalFd) -> anyhow::Result<ExitStatus> {
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            match signals.read_signal() {
                Ok(Some(received)) => self.forward(&child, &received),
                Ok(None) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error).context("cannot read signals"),
            }
        }
    }

    fn forward(&mut self, child: &Child, received: &siginfo) {
        let signal = Signal::try_from(received.ssi_signo.cast_signed()).ok();
        let Some(signal) = signal.filter(|signal| FORWARDED.contains(signal)) else { return };
        let is_of_terminal = received.ssi_code == SI_KERNEL && OF_TERMINAL.contains(&signal);
        if !is_of_terminal
            && let (Some(pid), Some(number)) = (
                Pid::from_raw(child.id().cast_signed()),
                rustix::process::Signal::from_named_raw(signal as i32),
            )
        {
            // not reaped yet, so the pid is still the command's
            let _ = kill_process(pid, number);
        }
        if ENDING.contains(&signal) {
            if self.run.signals.len() >= MAX_SIGNALS {
                self.run.signals.remove(0);
            }
            let at = Timestamp::now().unix_seconds();
            self.run.signals.push(ReceivedSignal { signal: signal as i32, at });
            self.record();
        }
    }

    /// Records the end, and says what a shell would not.
    fn finish(&mut self, status: ExitStatus, holder: Option<Holder>) {
        let oom_kills = self.cgroup.as_ref().and_then(RunCgroup::oom_kills);
        let at = Timestamp::now().unix_seconds();
        self.run.end = Some(RecordedEnd { at, exit_code: exit_code(status), oom_kills });
        self.record();
        drop(holder);
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove(&self.run.id);
        }
        let kills = oom_kills.unwrap_or(0);
        if kills > 0 || status.signal() == Some(SIGKILL) {
            let name = &self.run.name;
            let what = match kills {
                0 => "was killed by SIGKILL".to_owned(),
                1 => "lost a process to the kernel's OOM killer".to_owned(),
                many => format!("lost {many} processes to the kernel's OOM killer"),
            };
            note(&format!("{name} {what}; `memledger why {name}` explains it"));
        }
    }

    /// Writes the record. A failure is only a warning: the command goes on.
    fn record(&self) {
        if let Err(error) = self.spool.write(&self.run) {
            note(&format!("recording the run failed: {error}"));
        }
    }
}

fn own_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("the path of memledger is unknown")
}

/// Returns the exit status as shells have it.
fn exit_code(status: ExitStatus) -> i64 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.map_or(i64::from(LAUNCH_ERROR), i64::from)
}
