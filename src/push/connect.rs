//! A connection to an endpoint: TCP, and TLS by rustls over it.
//!
//! Certificates are read at every connection, and a connection lives for one push: a certificate that was renewed, or a
//! name that leads elsewhere now, is seen at the next push.

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
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use crate::config::otlp::Target;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers there, or the name is not known.
    #[error("cannot connect to {authority}")]
    Unreachable {
        /// Host and port.
        authority: String,
        /// Why.
        source: io::Error,
    },
    /// There is somebody, but no agreement on TLS.
    #[error(
        "no TLS with {authority}; see --otlp.certificate, --otlp.client-certificate, and whether the endpoint speaks TLS"
    )]
    Tls {
        /// Host and port.
        authority: String,
        /// Why.
        source: io::Error,
    },
    /// A PEM file cannot be used.
    #[error("cannot use {path}; a PEM file with a certificate or key is wanted")]
    Pem {
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// The certificates, or the name of the endpoint, cannot be used.
    #[error("the settings for TLS cannot be used")]
    Settings(#[from] rustls::Error),
    /// The host has no certificate authorities.
    #[error("no certificate authorities were found on this host; name a file with --otlp.certificate")]
    NoAuthorities,
    /// The name cannot stand in a certificate.
    #[error("{0:?} can be no name in a certificate")]
    Name(String),
}

/// An open connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A connection in the form that hyper takes.
pub type Connection = TokioIo<Box<dyn Stream>>;

/// Opens connections to one endpoint.
#[derive(Clone, Debug)]
pub struct Connector(Arc<Target>);

impl Connector {
    /// For this endpoint.
    pub fn new(target: &Arc<Target>) -> Self {
        Self(Arc::clone(target))
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(&self) -> Result<Connection, ConnectError> {
        let endpoint = &self.0.endpoint;
        let authority = || endpoint.authority();
        let tls = if endpoint.tls { Some(tls(&self.0)?) } else { None };
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|source| ConnectError::Unreachable { authority: authority(), source })?;
        let _ = stream.set_nodelay(true); // without it a request is slower, no more
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

/// For tonic, which connects by a service. It is given the endpoint's address, which is known here.
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

fn tls(target: &Target) -> Result<ClientConfig, ConnectError> {
    let mut roots = RootCertStore::empty();
    match &target.certificate {
        Some(path) => {
            for certificate in certificates(path)? {
                roots.add(certificate)?;
            }
        }
        // what of the host's cannot be read is left out, as others do; all of them cannot be missing
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
        Some((certificate, key)) => {
            let key_file = key.clone();
            let key = PrivateKeyDer::from_pem_file(key)
                .map_err(|source| ConnectError::Pem { path: key_file, source })?;
            builder.with_client_auth_cert(certificates(certificate)?, key)?
        }
    };
    config.alpn_protocols = vec![if target.grpc { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ConnectError> {
    let wrap = |source| ConnectError::Pem { path: path.to_path_buf(), source };
    let found =
        CertificateDer::pem_file_iter(path).map_err(wrap)?.collect::<Result<Vec<_>, _>>().map_err(wrap)?;
    if found.is_empty() { Err(wrap(pem::Error::NoItemsFound)) } else { Ok(found) }
}
