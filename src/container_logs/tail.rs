//! The end of one container's log, read once: for `memledger why NAME --logs`. Only errors are kept, and of each its line.

use std::collections::VecDeque;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::errors::Error;
use bollard::query_parameters::LogsOptions;
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::docker::{split_timestamp, unreadable_driver};
use super::files::{LogFile, path};
use super::lines::LineBuffer;
use crate::config::Config;
use crate::discover::history::ExistingContainer;
use crate::discover::{RuntimeKind, docker};
use crate::host::in_pod;
use crate::parse::log_error::{LogError, find_errors};
use crate::text::error_chain;

/// So much of the end of a log is read.
pub const TAIL_BYTES: usize = 1 << 20;
/// Lines that an engine is asked for: it counts them, and not bytes.
const TAIL_LINES: &str = "20000";
/// What gives memledger's own pod the logs of others.
const MOUNT_LOGS: &str =
    "in the values of the Helm chart, settings: {container.logs: labelled} mounts /var/log/pods";
/// A runtime that does not respond in time has failed.
const TIMEOUT: Duration = Duration::from_secs(5);

/// An error in a log.
#[derive(Clone, Debug, PartialEq)]
pub struct LoggedError {
    /// Unix time of its line.
    pub at: f64,
    /// What it is.
    pub error: LogError,
    /// Its line.
    pub line: String,
}

/// Reads the last [`TAIL_BYTES`] of a container's log, and returns the last out-of-memory error in it; `None` if it has none.
///
/// # Errors
/// A text that says what failed: the log is gone, is not readable, or its runtime does not respond.
pub fn last_error(config: &Config, container: &ExistingContainer) -> Result<Option<LoggedError>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let lines = runtime.block_on(async {
        let read = async {
            match container.runtime {
                RuntimeKind::Cri => of_pod(config, container).await,
                RuntimeKind::Run => {
                    Err("memledger keeps no output of a run: it is where it was started".to_owned())
                }
                _ => of_engine(config, container).await,
            }
        };
        let timed_out = || Err("it was not read in time".to_owned());
        tokio::time::timeout(TIMEOUT, read).await.unwrap_or_else(|_| timed_out())
    });
    runtime.shutdown_background(); // a file system that hangs is not waited for
    let lines = lines?;
    let texts: Vec<&str> = lines.lines.iter().map(|(_, line)| line.as_str()).collect();
    let last = find_errors(&texts).into_iter().next_back();
    Ok(last.map(|(number, error)| {
        let (at, line) = &lines.lines[number];
        let error = error.on_host(config.host_paths.has_gpu());
        LoggedError { at: *at, error, line: line.clone() }
    }))
}

/// The last lines of a log, with their times.
#[derive(Default)]
struct LastLines {
    lines: VecDeque<(f64, String)>,
    bytes: usize,
}

impl LastLines {
    fn add(&mut self, at: f64, line: &str) {
        self.bytes += line.len();
        self.lines.push_back((at, line.to_owned()));
        while self.bytes > TAIL_BYTES {
            self.bytes -= self.lines.pop_front().map_or(self.bytes, |(_, line)| line.len());
        }
    }
}

async fn of_engine(config: &Config, container: &ExistingContainer) -> Result<LastLines, String> {
    let endpoints = config.endpoints.iter().filter(|endpoint| endpoint.runtime == container.runtime);
    let mut failed = "no engine knows it".to_owned();
    for socket in endpoints.flat_map(|endpoint| docker::matches(&endpoint.socket)) {
        let (engine, allowance) = docker::client(&socket).map_err(|error| error_chain(&error))?;
        let tail = TAIL_LINES.to_owned();
        let options =
            LogsOptions { stdout: true, stderr: true, timestamps: true, tail, ..LogsOptions::default() };
        let mut frames = std::pin::pin!(engine.logs(container.id.as_str(), Some(options)));
        let (mut lines, mut out, mut err) =
            (LastLines::default(), LineBuffer::default(), LineBuffer::default());
        let (mut last, mut is_read) = (0.0, true);
        while let Some(frame) = frames.next().await {
            let frame = match frame {
                Ok(frame) => frame,
                Err(error) => {
                    (failed, is_read) = (describe(&error), false);
                    break;
                }
            };
            allowance.renew();
            let buffer = if matches!(frame, LogOutput::StdErr { .. }) { &mut err } else { &mut out };
            let (at, text) = split_timestamp(frame.as_ref());
            last = at;
            buffer.add(text, |line| lines.add(at, line));
        }
        if is_read {
            [out, err].iter_mut().for_each(|buffer| buffer.end(|line| lines.add(last, line)));
            return Ok(lines);
        }
    }
    Err(failed)
}

/// Describes why an engine did not return a log.
fn describe(error: &Error) -> String {
    match unreadable_driver(error) {
        Some(message) => format!("its log driver keeps nothing that can be read ({message})"),
        None => error_chain(error),
    }
}

async fn of_pod(config: &Config, container: &ExistingContainer) -> Result<LastLines, String> {
    let pod = container.named.pod.as_deref().ok_or("its pod is unknown")?;
    let mut path = path(&config.cri.pod_logs, pod, &container.named.name);
    let mut opened = LogFile::open(path.clone()).await;
    // the kubelet may keep its logs elsewhere
    let is_missing = opened.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
    if let Some(reported) = container.log_path.as_ref().filter(|reported| is_missing && **reported != path) {
        path.clone_from(reported);
        opened = LogFile::open(path.clone()).await;
    }
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound if in_pod() => format!("{}: {error}; {MOUNT_LOGS}", path.display()),
        _ => format!("{}: {error}", path.display()),
    };
    let mut log = opened.map_err(failed)?;
    let length = log.file.metadata().await.map_err(failed)?.len();
    let begin = length.saturating_sub(TAIL_BYTES as u64);
    log.file.seek(std::io::SeekFrom::Start(begin)).await.map_err(failed)?;
    if begin > 0 {
        // the rest of a line
        while log.file.read_u8().await.map_err(failed)? != b'\n' {}
    }
    let mut lines = LastLines::default();
    while log.read(|at, line| lines.add(at, line)).await.map_err(failed)? > 0 {}
    Ok(lines)
}
