//! Opens connections to an endpoint: TCP, with TLS by rustls if needed.
//!
//! Certificates are read for every connection, and a connection lives for one export. A renewed certificate or a changed DNS
//! record is therefore used from the next export on.

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use super::{FILE_PERMITS, run_blocking};
use crate::config::otlp::OtlpTarget;
use crate::config::pem::{certificates, private_key};
use crate::stats::otlp_stats::OtlpSignal;

/// Why connecting failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The endpoint is unreachable, or its name does not resolve.
    #[error("cannot connect to {authority}")]
    Unreachable {
        /// Host and port.
        authority: String,
        /// The cause.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error(
        "TLS handshake with {authority} failed; check --otlp.certificate, --otlp.client-certificate, and that the endpoint uses TLS"
    )]
    Tls {
        /// Host and port.
        authority: String,
        /// The cause.
        source: io::Error,
    },
    /// A PEM file is unreadable or invalid.
    #[error("cannot read {path}: {reason}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The cause, and what is expected.
        reason: String,
    },
    /// rustls rejected the certificates.
    #[error("invalid TLS settings")]
    Settings(#[from] rustls::Error),
    /// The host has no certificate authorities.
    #[error("no certificate authorities found on this host; set --otlp.certificate")]
    NoAuthorities,
    /// The endpoint's host is not a valid server name.
    #[error("{0:?} is not a valid TLS server name")]
    Name(String),
}

/// An open connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A connection as hyper needs it.
pub type Connection = TokioIo<Box<dyn Stream>>;

/// Opens connections to one endpoint.
#[derive(Clone, Debug)]
pub struct Connector {
    target: Arc<OtlpTarget>,
    signal: OtlpSignal,
}

impl Connector {
    /// Creates a connector for this endpoint.
    pub fn new(target: &Arc<OtlpTarget>, signal: OtlpSignal) -> Self {
        Self { target: Arc::clone(target), signal }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(&self) -> Result<Connection, ConnectError> {
        let endpoint = &self.target.endpoint;
        let authority = || endpoint.authority();
        let tls = if endpoint.tls { Some(self.tls_config().await?) } else { None };
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|source| ConnectError::Unreachable { authority: authority(), source })?;
        let _ = stream.set_nodelay(true); // a failure only costs latency
        let Some(config) = tls else { return Ok(TokioIo::new(Box::new(stream))) };
        let name = ServerName::try_from(endpoint.host.clone())
            .map_err(|_| ConnectError::Name(endpoint.host.clone()))?;
        let stream = TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
            .map_err(|source| ConnectError::Tls { authority: authority(), source })?;
        Ok(TokioIo::new(Box::new(stream)))
    }
}

impl Connector {
    /// Reads the certificates.
    async fn tls_config(&self) -> Result<ClientConfig, ConnectError> {
        let target = Arc::clone(&self.target);
        run_blocking(&FILE_PERMITS[self.signal as usize], move || tls_config(&target)).await
    }
}

/// tonic connects by a service. The address that it passes is the endpoint's, which is known here.
impl Service<Uri> for Connector {
    type Response = Connection;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Connection, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { this.connect().await })
    }
}

fn tls_config(target: &OtlpTarget) -> Result<ClientConfig, ConnectError> {
    let mut roots = RootCertStore::empty();
    match &target.certificate {
        Some(path) => {
            for certificate in read_pem(path, certificates)? {
                roots.add(certificate)?;
            }
        }
        // invalid certificates of the host are skipped, as other programs do; it is an error if none is left
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    if roots.is_empty() {
        return Err(ConnectError::NoAuthorities);
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match &target.client {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(read_pem(certificate, certificates)?, read_pem(key, private_key)?)?,
    };
    config.alpn_protocols = vec![if target.grpc { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}

/// Reads a PEM file.
fn read_pem<T>(path: &Path, parse: impl FnOnce(&[u8]) -> Result<T, String>) -> Result<T, ConnectError> {
    let wrap = |reason| ConnectError::Pem { path: path.to_path_buf(), reason };
    let text = std::fs::read(path).map_err(|error| wrap(error.to_string()))?;
    parse(&text).map_err(wrap)
}
