//! `memledger healthcheck`: checks whether the memledger of this host or container responds and has a sample.
//!
//! For container images, which have neither a shell nor curl. It requests `/-/ready` from the first address of
//! `--web.listen-address`, so it needs the same settings as `serve`: in a container, those of its environment.
//!
//! With `--web.config.file` it connects with TLS, and without where the server does not use TLS. It does not read the file,
//! which may be invalid while memledger keeps using the last valid one. It needs no password, and accepts any certificate:
//! nothing secret is sent, and the response comes from a port of this host.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Command;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned,
};

use crate::config::Config;

/// Longer than any response takes; Docker repeats health checks anyway.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the verb. Its exit status is that of probes: 1 whatever is wrong.
pub fn command() -> Command {
    Command::new("healthcheck")
        .about("Check whether memledger responds and has a sample, for probes of containers.")
        .after_help(
            "Exit status: 0 if so, also without an HTTP listener, or if it requires a client certificate and so does not say whether \
             it has one; else 1.",
        )
}

pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let Some(address) = config.listen.first() else {
        super::print(
            "--web.listen-address is empty: there is no HTTP listener to query, so nothing was checked\n",
        )?;
        return Ok(ExitCode::SUCCESS);
    };
    let address = connect_address(*address);
    let mut url = format!("http://{address}/-/ready");
    let mut response = None;
    if config.web_config.is_some() {
        match connect(address).and_then(|stream| request(with_tls(stream)?)) {
            Err(error) if is_not_tls(&error) => {}
            Err(error) if requires_certificate(&error) => {
                super::print(
                    "memledger responds. It requires a client certificate, so whether it has a sample is unknown.\n",
                )?;
                return Ok(ExitCode::SUCCESS);
            }
            other => {
                url = format!("https://{address}/-/ready");
                response = Some(other);
            }
        }
    }
    let response = response.unwrap_or_else(|| connect(address).and_then(request));
    let (status, text) = response.with_context(|| format!("{url} does not respond"))?;
    if status.split_whitespace().nth(1) == Some("200") {
        super::print("memledger is ready.\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    bail!("{url} responds {status:?}: {text}")
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

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Sends the request and returns the status line of the response, and the first line of its text.
fn request(mut stream: impl Read + Write) -> std::io::Result<(String, String)> {
    stream.write_all(b"GET /-/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut response = Vec::new();
    stream.take(4096).read_to_end(&mut response)?;
    let text = String::from_utf8_lossy(&response);
    let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok((first(&text), first(body)))
}

fn with_tls(stream: TcpStream) -> std::io::Result<impl Read + Write> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(std::io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
        .with_no_client_auth();
    let name = ServerName::from(IpAddr::from(Ipv4Addr::LOCALHOST));
    let client = ClientConnection::new(Arc::new(config), name).map_err(std::io::Error::other)?;
    Ok(StreamOwned::new(client, stream))
}

fn tls_error(error: &std::io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Returns true if the server does not use TLS.
fn is_not_tls(error: &std::io::Error) -> bool {
    matches!(tls_error(error), Some(rustls::Error::InvalidMessage(_)))
}

fn requires_certificate(error: &std::io::Error) -> bool {
    matches!(tls_error(error), Some(rustls::Error::AlertReceived(AlertDescription::CertificateRequired)))
}

/// Accepts any certificate whose key the server has.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
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
