//! `memledger healthcheck`: does the memledger of this host, or of this container, answer and have a sample?
//!
//! For container images, which have neither a shell nor curl. It asks `/-/ready` on the first address of
//! `--web.listen-address`, so it must be given the same settings as `serve`: in a container those of its environment.
//!
//! With `--web.config.file` it asks by TLS, and plainly where that is not spoken; it does not read the file, which may be
//! broken while memledger goes on with the last good one. It needs no password, and the certificate need not be one that
//! somebody trusts: nothing secret is sent, and the answer is one of this host's own port.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned,
};

use crate::config::Config;

/// Longer than any answer takes; a health check of Docker is repeated anyway.
const PATIENCE: Duration = Duration::from_secs(3);

pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let Some(address) = config.listen.first() else { bail!("--web.listen-address names no address") };
    let address = reachable(*address);
    let mut url = format!("http://{address}/-/ready");
    let mut answer = None;
    if config.web_config.is_some() {
        match connect(address).and_then(|stream| ask(in_tls(stream)?)) {
            Err(error) if is_not_tls(&error) => {}
            Err(error) if wants_certificate(&error) => {
                println!(
                    "memledger answers. It wants a client certificate, so whether it has a sample is not known."
                );
                return Ok(ExitCode::SUCCESS);
            }
            other => {
                url = format!("https://{address}/-/ready");
                answer = Some(other);
            }
        }
    }
    let answer = answer.unwrap_or_else(|| connect(address).and_then(ask));
    let status = answer.with_context(|| format!("{url} does not answer"))?;
    if status.split_whitespace().nth(1) == Some("200") {
        println!("memledger is ready.");
        return Ok(ExitCode::SUCCESS);
    }
    bail!("{url} answers {status:?}: no sample has been taken yet")
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

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The status line of the answer.
fn ask(mut stream: impl Read + Write) -> std::io::Result<String> {
    stream.write_all(b"GET /-/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(4096).read_to_end(&mut answer)?;
    let text = String::from_utf8_lossy(&answer);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn in_tls(stream: TcpStream) -> std::io::Result<impl Read + Write> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(std::io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Whoever(provider)))
        .with_no_client_auth();
    let name = ServerName::from(IpAddr::from(Ipv4Addr::LOCALHOST));
    let client = ClientConnection::new(Arc::new(config), name).map_err(std::io::Error::other)?;
    Ok(StreamOwned::new(client, stream))
}

fn of_tls(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Something else than TLS answered.
fn is_not_tls(error: &std::io::Error) -> bool {
    matches!(of_tls(error), Some(rustls::Error::InvalidMessage(_)))
}

fn wants_certificate(error: &std::io::Error) -> bool {
    matches!(of_tls(error), Some(rustls::Error::AlertReceived(AlertDescription::CertificateRequired)))
}

/// Takes any certificate whose key the server has.
#[derive(Debug)]
struct Whoever(Arc<CryptoProvider>);

impl ServerCertVerifier for Whoever {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
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
