//! Logs by the API of Docker and Podman.

use std::path::Path;

use bollard::container::LogOutput;
use bollard::errors::Error;
use bollard::query_parameters::LogsOptions;
use futures_util::StreamExt;

use super::budget::LogBudget;
use super::lines::LineBuffer;
use super::{LogEnd, LogFollower, ReadPosition, SkipRead};
use crate::clock::Timestamp;
use crate::config::RuntimeEndpoint;
use crate::discover::docker;
use crate::text::error_chain;

/// What a frame costs beside its bytes: its header, and the work for it. A program may print empty lines.
const FRAME_COST: usize = 64;
/// A frame that is older than the one before by at most these seconds was sent before; by more, the clock was set back.
const MAX_REPEATED: f64 = 10.0;

impl LogFollower {
    /// Reads the log by the first engine that knows the container, until it ends; while the container runs, also what comes.
    pub(super) async fn read_api(&self, position: &mut ReadPosition, is_running: bool) -> LogEnd {
        let of_runtime = |endpoint: &&RuntimeEndpoint| endpoint.runtime == self.container.runtime;
        let mut failed = None;
        for endpoint in self.sources.endpoints.iter().filter(of_runtime) {
            for socket in docker::matches(&endpoint.socket) {
                match self.read_socket(&socket, position, is_running).await {
                    None => {}
                    Some(LogEnd::Failed(reason)) => failed = Some(reason),
                    Some(end) => return end,
                }
            }
        }
        match failed {
            Some(reason) => LogEnd::Failed(reason),
            None => LogEnd::Never("no engine knows the container".to_owned()),
        }
    }

    /// Reads the log by one engine; `None` if that does not know the container.
    async fn read_socket(
        &self,
        socket: &Path,
        position: &mut ReadPosition,
        is_running: bool,
    ) -> Option<LogEnd> {
        let (engine, allowance) = match docker::client(socket) {
            Ok(client) => client,
            Err(error) => return Some(LogEnd::Failed(error_chain(&error))),
        };
        let options = LogsOptions {
            follow: is_running,
            stdout: true,
            stderr: true,
            timestamps: true,
            since: position.at.map_or(0, |at| at as i32), // whole seconds
            // the engine reads all of the log to find a time
            tail: if position.at.is_some() { "all" } else { "0" }.to_owned(),
            ..LogsOptions::default()
        };
        let mut frames = std::pin::pin!(engine.logs(self.container.id.as_str(), Some(options)));
        let (mut out, mut err) = (LogStream::default(), LogStream::default());
        let (mut budget, mut skip) = (LogBudget::new(&self.logs.budget), position.skip());
        let mut last = Timestamp::now().unix_seconds();
        if position.at.is_none() {
            *position = ReadPosition::new(Some(last)); // where the next connection begins
        }
        while let Some(frame) = frames.next().await {
            let frame = match frame {
                Ok(frame) => frame,
                Err(Error::DockerResponseServerError { status_code: 404, .. }) => return None,
                Err(error) if unreadable_driver(&error).is_some() => {
                    return Some(LogEnd::Never(unreadable_driver(&error)?));
                }
                Err(_) if allowance.is_exceeded() => return Some(LogEnd::TooFast), // a frame without end
                Err(error) => return Some(LogEnd::Failed(error_chain(&error))),
            };
            allowance.renew();
            let is_err = matches!(frame, LogOutput::StdErr { .. });
            let stream = if is_err { &mut err } else { &mut out };
            let (at, text) = split_timestamp(frame.as_ref());
            if skip.is_new(at) && stream.is_new(at) {
                position.advance(at);
                last = at;
                stream.line.add(text, |line| self.add(at, line));
            }
            if !budget.take(frame.as_ref().len() + FRAME_COST, at).await {
                *position = ReadPosition::new(None);
                return Some(LogEnd::TooFast);
            }
        }
        for stream in [&mut out, &mut err] {
            stream.line.end(|line| self.add(last, line));
        }
        Some(LogEnd::Complete)
    }
}

/// One of the two streams of a connection. When the log rotates, Docker 20.10 sends the first lines of the new file twice.
struct LogStream {
    line: LineBuffer,
    newest: ReadPosition,
    repeated: SkipRead,
}

impl Default for LogStream {
    fn default() -> Self {
        let newest = ReadPosition::new(None);
        Self { line: LineBuffer::default(), newest, repeated: newest.skip() }
    }
}

impl LogStream {
    /// Returns whether a frame with this time was not sent before.
    fn is_new(&mut self, at: f64) -> bool {
        if self.newest.at.is_some_and(|newest| (newest - MAX_REPEATED..newest).contains(&at)) {
            self.repeated = self.newest.skip();
        }
        let is_new = self.repeated.is_new(at);
        if is_new {
            self.newest.advance(at);
        }
        is_new
    }
}

/// Returns the message of an engine whose log driver keeps no readable log; `None` for another error. Podman (observed: 5.8) returns
/// status 500 for the driver `none`.
pub(super) fn unreadable_driver(error: &Error) -> Option<String> {
    match error {
        Error::DockerResponseServerError { status_code: 400 | 501, message } => Some(message.clone()),
        Error::DockerResponseServerError { status_code: 500, message }
            if message.contains("is not logging output") =>
        {
            Some(message.clone())
        }
        _ => None,
    }
}

/// Returns Unix time and text of a frame, which begins with its time. Now, if it does not.
pub(super) fn split_timestamp(frame: &[u8]) -> (f64, &[u8]) {
    let end = frame.iter().take(64).position(|byte| *byte == b' ');
    let time = end.and_then(|end| std::str::from_utf8(&frame[..end]).ok()?.parse::<jiff::Timestamp>().ok());
    match (time, end) {
        (Some(time), Some(end)) => (time.as_nanosecond() as f64 / 1e9, &frame[end + 1..]),
        _ => (Timestamp::now().unix_seconds(), frame),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_are_sent_twice_are_read_once() {
        let mut stream = LogStream::default();
        let mut read =
            |frames: &[f64]| -> Vec<f64> { frames.iter().copied().filter(|at| stream.is_new(*at)).collect() };
        assert_eq!(
            read(&[100.0, 101.0, 102.0, 102.0]),
            [100.0, 101.0, 102.0, 102.0],
            "parts of a line have one time"
        );
        assert_eq!(read(&[101.0, 102.0, 102.0, 103.0]), [103.0]);
        assert_eq!(read(&[102.0, 103.0, 103.0]), [103.0], "the second with that time");
        assert_eq!(read(&[50.0, 51.0]), [50.0, 51.0], "the clock was set back");
    }

    #[test]
    fn time_of_a_frame_is_that_at_its_begin() {
        let (at, text) = split_timestamp(b"2026-11-23T10:00:00.500000000Z CUDA out of memory\n");
        assert_eq!((at, text), (1_795_428_000.5, &b"CUDA out of memory\n"[..]));
        for frame in [&b"no time here\n"[..], b"", b"2026-11-23T10:00:00.5Z"] {
            assert_eq!(split_timestamp(frame).1, frame);
        }
    }
}
