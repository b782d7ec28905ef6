//! Requests to the control socket of the memledger that runs on this host.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::config::Config;

/// Longer than any response takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Sends a request to the control socket and returns status and body.
pub fn request(config: &Config, method: &str, target: &str, accept: &str) -> anyhow::Result<(u16, String)> {
    let Some(path) = &config.local.socket else {
        bail!("--local.socket is empty, so there is no control socket to query");
    };
    exchange(path, method, target, accept, TIMEOUT)
        .with_context(|| format!("no memledger serve answers on the control socket {}", path.display()))
}

/// Returns whether a memledger listens on the control socket.
pub fn is_available(config: &Config) -> bool {
    config.local.socket.as_ref().is_some_and(|path| UnixStream::connect(path).is_ok())
}

/// Queries what `memledger serve` knows about the events of its ledger. Returns the body of a successful response.
pub fn query(config: &Config, target: &str, accept: &str) -> anyhow::Result<String> {
    let response = request(config, "GET", target, accept);
    let response = match config.state.path {
        None => response.context("--state.path is empty, so the ledger is in the memory of memledger serve"),
        Some(_) => response,
    };
    match response? {
        (200, body) => Ok(body),
        (_, text) => bail!("{}", text.trim_end()),
    }
}

/// Sends a request to a control socket and returns status and body. `timeout` is that of each read and write.
pub fn exchange(
    path: &Path,
    method: &str,
    target: &str,
    accept: &str,
    timeout: Duration,
) -> std::io::Result<(u16, String)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    // HTTP/1.0: the end of the connection is the end of the body
    write!(stream, "{method} {target} HTTP/1.0\r\nHost: memledger\r\nAccept: {accept}\r\n\r\n")?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response)?;
    let response = String::from_utf8_lossy(&response);
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| std::io::Error::other("its response is not HTTP"))?, body.to_owned()))
}

/// Encodes text as one component of a path, or as a value of a query.
pub fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        match byte {
            b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_text_decodes_to_itself() {
        for text in ["train", "ns/pod/a b", "é%&=+#?", ".."] {
            let encoded = percent_encoded(text);
            assert!(!encoded.contains(['/', '&', ' ', '#', '?']), "{encoded}");
            assert_eq!(crate::config::percent::decoded(&encoded).as_deref(), Some(text));
        }
    }
}
