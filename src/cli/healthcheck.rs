//! `memledger healthcheck`: does the memledger of this host, or of this container, answer and have a sample?
//!
//! For container images, which have neither a shell nor curl. It asks `/-/ready` on the first address of
//! `--web.listen-address`, so it must be given the same settings as `serve`: in a container those of its environment.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::config::Config;

/// Longer than any answer takes; a health check of Docker is repeated anyway.
const PATIENCE: Duration = Duration::from_secs(3);

pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let Some(address) = config.listen.first() else { bail!("--web.listen-address names no address") };
    let address = reachable(*address);
    let status = ask(address).with_context(|| format!("http://{address}/-/ready does not answer"))?;
    if status.split_whitespace().nth(1) == Some("200") {
        println!("memledger is ready.");
        return Ok(ExitCode::SUCCESS);
    }
    bail!("http://{address}/-/ready answers {status:?}: no sample has been taken yet")
}

/// Where to ask one that listens on all addresses: its loopback.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        // a socket on [::] takes IPv4 too, also where IPv6 has no loopback
        IpAddr::V6(ip) if ip == Ipv6Addr::UNSPECIFIED => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// The status line of the answer.
fn ask(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /-/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(4096).read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_listens_everywhere_is_asked_on_the_loopback() {
        for (listens, asked) in [
            ("[::]:10853", "127.0.0.1:10853"),
            ("0.0.0.0:1", "127.0.0.1:1"),
            ("192.0.2.7:10853", "192.0.2.7:10853"),
            ("[::1]:10853", "[::1]:10853"),
        ] {
            assert_eq!(reachable(listens.parse().unwrap()).to_string(), asked);
        }
    }
}
