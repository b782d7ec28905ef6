//! Requests to the control socket of the memledger that runs on this host.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};

use crate::config::Config;
use crate::http::{MAX_EVENTS, MAX_RUNS};
use crate::ledger::store::{Query, RunQuery};
use crate::runs::RunRecord;

/// What stands for itself neither in a component of a path nor in a value of a query.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Longer than any response takes.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Longer than a memledger that is not stuck takes to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of the text of an error.
const MAX_REJECTION: u64 = 64 << 10;
/// How the responses to rejected connections begin.
const REJECTIONS: [&[u8]; 2] = [b"HTTP/1.0 503", b"HTTP/1.0 403"];

/// Sends a request to the control socket and returns status and body.
pub fn request(config: &Config, method: &str, target: &str, accept: &str) -> anyhow::Result<(u16, String)> {
    request_within(config, method, target, accept, TIMEOUT)
}

/// Like [`request`], with the time that connecting, and each read and write, may take.
pub fn request_within(
    config: &Config,
    method: &str,
    target: &str,
    accept: &str,
    timeout: Duration,
) -> anyhow::Result<(u16, String)> {
    let Some(path) = &config.local.socket else {
        bail!("--local.socket is empty, so there is no control socket to query");
    };
    exchange(path, method, target, accept, timeout)
        .with_context(|| format!("no memledger serve answers on the control socket {}", path.display()))
}

/// Returns whether a memledger listens on the control socket and accepts a connection in this time.
pub fn is_available(config: &Config, timeout: Duration) -> bool {
    config.local.socket.as_ref().is_some_and(|path| connect(path, timeout.min(CONNECT_TIMEOUT)).is_ok())
}

/// Connects to a Unix socket. The standard library would wait for ever while the socket's queue of connections is full.
fn connect(path: &Path, timeout: Duration) -> std::io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::AGAIN) => {
            Err(std::io::Error::new(ErrorKind::TimedOut, "it does not accept connections"))
        }
        connected => Ok(connected.map(|()| UnixStream::from(socket))?),
    }
}

/// Queries what `memledger serve` knows about the events of its ledger. Returns the body of a successful response.
pub fn query(config: &Config, target: &str, accept: &str, timeout: Duration) -> anyhow::Result<String> {
    let response = request_within(config, "GET", target, accept, timeout);
    let response = match config.state.path {
        None => response.context("--state.path is empty, so the ledger is in the memory of memledger serve"),
        Some(_) => response,
    };
    match response? {
        (200, body) => Ok(body),
        (_, text) => bail!("{}", text.trim_end()),
    }
}

/// Queries the newest events of the ledger of `memledger serve`, oldest first, at most [`MAX_EVENTS`]. They are read one by one, because
/// all together may need more memory than a container has.
pub fn events(config: &Config, query: &Query, timeout: Duration) -> anyhow::Result<EventLines> {
    let Some(path) = &config.local.socket else {
        bail!("--local.socket is empty, so there is no control socket to query");
    };
    let no_answer = || format!("no memledger serve answers on the control socket {}", path.display());
    let opened = EventLines::request(path, &events_target(query), timeout).with_context(no_answer);
    let (status, mut lines) = match config.state.path {
        None => opened.context("--state.path is empty, so the ledger is in the memory of memledger serve")?,
        Some(_) => opened?,
    };
    if status != 200 {
        let mut text = String::new();
        lines.body.by_ref().take(MAX_REJECTION).read_to_string(&mut text)?;
        bail!("{}", text.trim_end());
    }
    Ok(lines)
}

/// The events of a response of `/api/v1/events` as JSON, each of which is a line of it.
pub struct EventLines {
    body: BufReader<UnixStream>,
    /// The end of the list was read.
    is_complete: bool,
}

impl EventLines {
    /// Sends a request, and returns the status of the response.
    fn request(path: &Path, target: &str, timeout: Duration) -> std::io::Result<(u16, Self)> {
        let mut stream = connect(path, timeout.min(CONNECT_TIMEOUT))?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let request = format!("GET {target} HTTP/1.0\r\nHost: memledger\r\nAccept: application/json\r\n\r\n");
        let written = stream.write_all(request.as_bytes());
        let (mut body, mut head, mut status) = (BufReader::new(stream), String::new(), None);
        // a connection that is rejected may be closed before its request is written
        while body.read_line(&mut head)? > 0 && head != "\r\n" {
            status = status.or_else(|| head.split(' ').nth(1)?.parse().ok());
            head.clear();
        }
        if status.is_none() {
            written?;
        }
        let status = status.ok_or_else(|| std::io::Error::other("its response is not HTTP"))?;
        Ok((status, Self { body, is_complete: false }))
    }
}

impl Iterator for EventLines {
    type Item = anyhow::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let mut line = String::new();
            let incomplete = || anyhow::anyhow!("the control socket sent no complete response");
            let read = match self.body.read_line(&mut line) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => Err(incomplete()),
                Err(error) => Err(error.into()),
                Ok(0) if self.is_complete => return None,
                // memledger ends a response in its middle if it cannot read on
                Ok(_) if !line.ends_with('\n') && !line.ends_with("]}") => Err(incomplete()),
                Ok(_) => Ok(line.trim_end().trim_end_matches(',')),
            };
            let event = match read {
                Ok(event) => event,
                Err(error) => {
                    self.is_complete = true; // nothing more is read
                    return Some(Err(error));
                }
            };
            let is_frame = event.starts_with("{\"events\":[") || event.starts_with("]}");
            self.is_complete |= is_frame && event.ends_with("]}");
            if !is_frame {
                return Some(Ok(event.to_owned()));
            }
        }
    }
}

/// Queries the newest records of runs of the ledger of `memledger serve`, oldest first, at most [`MAX_RUNS`].
pub fn runs(config: &Config, query: &RunQuery, timeout: Duration) -> anyhow::Result<Vec<RunRecord>> {
    /// The response of `/api/v1/runs`.
    #[derive(serde::Deserialize)]
    struct RunList {
        runs: Vec<RunRecord>,
    }
    let limit = if query.limit == 0 { MAX_RUNS } else { query.limit.min(MAX_RUNS) };
    let since = query.since.map(|since| format!("&since={since}")).unwrap_or_default();
    let name = query.name.as_deref().map(percent_encoded);
    let name = name.map(|name| format!("&run={name}")).unwrap_or_default();
    let timelines = if query.timelines { "&timelines=true" } else { "" };
    let target = format!("/api/v1/runs?limit={limit}{since}{name}{timelines}");
    let RunList { runs } = serde_json::from_str(&self::query(config, &target, "application/json", timeout)?)?;
    Ok(runs)
}

/// Returns the path and query of the request for these events.
fn events_target(query: &Query) -> String {
    let limit = if query.limit == 0 { MAX_EVENTS } else { query.limit.min(MAX_EVENTS) };
    // in seconds: a date cannot express every number, and events of all times would come without the parameter
    let mut target = format!("/api/v1/events?limit={limit}");
    let mut add = |key: &str, value: Option<String>| {
        target.extend(value.map(|value| format!("&{key}={value}")));
    };
    add("since", query.since.map(|since| since.to_string()));
    add("until", query.until.map(|until| until.to_string()));
    add("container", query.container.as_deref().map(percent_encoded));
    add("notable", query.only_notable.then(|| "true".to_owned()));
    let ids: Vec<String> = query.ids.iter().map(u64::to_string).collect();
    add("ids", (!ids.is_empty()).then(|| ids.join(",")));
    target
}

/// Sends a request to a control socket and returns status and body. `timeout` is that of connecting, and of each read and write.
pub fn exchange(
    path: &Path,
    method: &str,
    target: &str,
    accept: &str,
    timeout: Duration,
) -> std::io::Result<(u16, String)> {
    let mut stream = connect(path, timeout.min(CONNECT_TIMEOUT))?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    // HTTP/1.0: the end of the connection is the end of the body
    // in one piece: who answers the beginning of a request may close before the rest is written
    let request = format!("{method} {target} HTTP/1.0\r\nHost: memledger\r\nAccept: {accept}\r\n\r\n");
    let mut response = Vec::new();
    let written = stream.write_all(request.as_bytes());
    let read = stream.read_to_end(&mut response).map(drop);
    match written.and(read) {
        // a connection that is rejected may be closed before its request is written
        Err(_) if REJECTIONS.iter().any(|begin| response.starts_with(begin)) => {}
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            let text = format!("no complete response within {timeout:?}");
            return Err(std::io::Error::new(ErrorKind::TimedOut, text));
        }
        outcome => outcome?,
    }
    let response = String::from_utf8_lossy(&response);
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| std::io::Error::other("its response is not HTTP"))?, body.to_owned()))
}

/// Encodes text as one component of a path, or as a value of a query.
pub fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, RESERVED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_sent_as_a_filter() {
        for (since, sent) in [
            (Some(86_400.5), "&since=86400.5"),
            (Some(-1.0), "&since=-1"),
            (Some(1e12), "&since=1000000000000"),
            (None, ""),
        ] {
            let query = Query { since, limit: 7, ..Query::default() };
            assert_eq!(events_target(&query), format!("/api/v1/events?limit=7{sent}"));
        }
    }

    #[test]
    fn list_that_ends_in_its_middle_is_an_error() {
        let read = |text: &str| {
            let (mut server, client) = UnixStream::pair().unwrap();
            server.write_all(text.as_bytes()).unwrap();
            drop(server);
            let lines = EventLines { body: BufReader::new(client), is_complete: false };
            lines.map(|line| line.map_err(|_| ())).collect::<Vec<_>>()
        };
        let (one, other) = (Ok("{1}".to_owned()), Ok("{2}".to_owned()));
        assert_eq!(read("{\"events\":[]}\n"), []);
        assert_eq!(read("{\"events\":[\n{1},\n{2}\n]}\n"), [one.clone(), other.clone()]);
        assert_eq!(read("{\"events\":[\n{1},\n{2}\n"), [one.clone(), other, Err(())]);
        assert_eq!(read("{\"events\":[\n{1},\n{2"), [one, Err(())]);
        assert_eq!(read(""), [Err(())]);
    }

    #[test]
    fn connecting_to_a_socket_that_accepts_nothing_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let mut waiting = vec![];
        let error = loop {
            match connect(&path, Duration::from_millis(50)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 10, "the queue has no end");
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        let target = exchange(&path, "GET", "/", "*/*", Duration::from_millis(50));
        assert_eq!(target.unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn connection_without_a_response_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let error = exchange(&path, "GET", "/", "*/*", Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.to_string(), "no complete response within 50ms");
    }
}
