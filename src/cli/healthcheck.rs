//! `memledger healthcheck`: checks whether the memledger of this host or container responds and has a sample.
//!
//! For container images, which have neither a shell nor curl. It requests `/-/ready` on the control socket, which says so whatever TLS and
//! passwords the network port has; where none answers, from the first address of `--web.listen-address`, without TLS. So it needs the same
//! settings as `serve`: in a container, those of its environment.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Command;

use super::control;
use crate::config::Config;
use crate::http::HTTPS_REQUIRED;

/// Longer than any response takes; Docker repeats health checks anyway.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The route of readiness.
const READY: &str = "/-/ready";

/// Returns the verb. Its exit status is that of probes: 1 whatever is wrong.
pub fn command() -> Command {
    Command::new("healthcheck")
        .about("Check whether memledger responds and has a sample, for probes of containers.")
        .after_help(
            "Exit status: 0 if so, also if there is neither a control socket nor an HTTP listener, or no control socket and the listener \
             uses TLS, which does not say whether it has a sample; else 1.",
        )
}

pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let on_socket =
        config.local.socket.as_ref().map(|path| control::exchange(path, "GET", READY, "*/*", TIMEOUT));
    // a socket that refuses this process is of another memledger, or of another container
    if let Some(Ok((status @ (200 | 503), text))) = on_socket {
        return ready_or("the control socket", status == 200, text.trim_end());
    }
    let Some(address) = config.listen.first() else {
        super::print(
            "--web.listen-address is empty and no control socket answers: there is nothing to query, so nothing was checked\n",
        )?;
        return Ok(ExitCode::SUCCESS);
    };
    let url = format!("http://{}{READY}", connect_address(*address));
    let response = request(connect_address(*address)).with_context(|| format!("{url} does not respond"))?;
    if response == HTTPS_REQUIRED {
        super::print(
            "memledger responds. It uses TLS, so whether it has a sample is known on its control socket only.\n",
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = String::from_utf8_lossy(&response);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.lines().next().unwrap_or_default();
    let is_ready = status.split_whitespace().nth(1) == Some("200");
    ready_or(&url, is_ready, &format!("{status:?}: {}", body.lines().next().unwrap_or_default()))
}

fn ready_or(asked: &str, is_ready: bool, otherwise: &str) -> anyhow::Result<ExitCode> {
    if !is_ready {
        bail!("{asked} responds {otherwise}");
    }
    super::print("memledger is ready.\n")?;
    Ok(ExitCode::SUCCESS)
}

/// Replaces *all addresses* by the loopback address.
fn connect_address(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        // a socket on [::] accepts IPv4 too, also where IPv6 has no loopback
        IpAddr::V6(ip) if ip == Ipv6Addr::UNSPECIFIED => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// Sends the request and returns the beginning of the response.
fn request(address: SocketAddr) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(format!("GET {READY} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
    let mut response = Vec::new();
    stream.take(4096).read_to_end(&mut response)?;
    if response.is_empty() {
        return Err(std::io::Error::other("the connection was closed without a response"));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connects_to_loopback_if_server_listens_on_all_addresses() {
        for (listens, connects) in [
            ("[::]:10853", "127.0.0.1:10853"),
            ("0.0.0.0:1", "127.0.0.1:1"),
            ("192.0.2.7:10853", "192.0.2.7:10853"),
            ("[::1]:10853", "[::1]:10853"),
        ] {
            assert_eq!(connect_address(listens.parse().unwrap()).to_string(), connects);
        }
    }
}
