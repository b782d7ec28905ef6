//! Opens connections to servers that memledger sends to: TCP, through a proxy where the environment names one, with TLS by rustls if needed.
//!
//! A name may have several addresses, of which some do not answer: each gets its share of the timeout, and the other family is tried
//! beside a slow one. Proxies are those of the standard variables, for endpoints with TLS, by CONNECT: what goes without TLS stays in the
//! own network, and gRPC without TLS passes no proxy anyway.
//!
//! Certificates are read for every connection, and a connection lives for one export. A renewed certificate or a changed DNS
//! record is therefore used from the next export on.

use std::future::{Future, poll_fn};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Body;
use hyper::client::conn::http1;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use tokio::sync::Semaphore;

use crate::config::pem::{certificates, private_key};
use crate::text::error_chain;

/// Share of the timeout of a request in which a connection has to be open.
const CONNECT_SHARE: f64 = 0.75;

/// Why connecting failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The endpoint is unreachable, or its name does not resolve.
    #[error("cannot connect to {authority}")]
    Unreachable {
        /// Host and port.
        authority: String,
        /// The cause.
        source: BoxError,
    },
    /// The proxy does not connect to the endpoint.
    #[error(
        "the proxy {proxy}, set by HTTPS_PROXY or ALL_PROXY, does not connect to {authority}; NO_PROXY excludes a host"
    )]
    Proxy {
        /// Host and port of the proxy.
        proxy: String,
        /// Host and port.
        authority: String,
        /// The cause.
        source: BoxError,
    },
    /// The TLS handshake failed.
    #[error("TLS handshake with {authority} failed; check {settings}, and that the endpoint uses TLS")]
    Tls {
        /// Host and port.
        authority: String,
        /// The settings of the certificates.
        settings: &'static str,
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
    #[error("no certificate authorities found on this host; set {0}")]
    NoAuthorities(&'static str),
    /// The endpoint's host is not a valid server name.
    #[error("{0:?} is not a valid TLS server name")]
    Name(String),
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An open connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A connection as hyper needs it.
pub type Connection = TokioIo<Box<dyn Stream>>;

/// A server, and how to connect to it.
#[derive(Clone, Debug)]
pub struct RemoteServer {
    /// Connect with TLS.
    pub tls: bool,
    /// The host name or address, without brackets.
    pub host: String,
    /// Host and port in the form of a URL.
    pub authority: String,
    /// Timeout of a request; most of it may be used to connect.
    pub timeout: Duration,
    /// PEM file of the trusted certificate authorities; `None`: those of the host.
    pub certificate: Option<PathBuf>,
    /// PEM files of memledger's own certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
    /// HTTP/2 instead of HTTP/1.1.
    pub http2: bool,
    /// The settings of the certificates, for errors.
    pub settings: &'static str,
    /// The permit for reading the certificates: a file system that hangs blocks one thread and no more.
    pub file_permit: &'static Semaphore,
}

/// Opens connections to one server.
#[derive(Clone, Debug)]
pub struct Connector(Arc<RemoteServer>);

impl Connector {
    /// Creates a connector for this server.
    pub fn new(server: RemoteServer) -> Self {
        Self(Arc::new(server))
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(&self) -> Result<Connection, ConnectError> {
        let server = &self.0;
        let tls = if server.tls { Some(self.tls_config().await?) } else { None };
        let stream = self.connect_tcp().await?;
        let Some(config) = tls else { return Ok(TokioIo::new(Box::new(stream))) };
        let name =
            ServerName::try_from(server.host.clone()).map_err(|_| ConnectError::Name(server.host.clone()))?;
        let failed = |source| ConnectError::Tls {
            authority: server.authority.clone(),
            settings: server.settings,
            source,
        };
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(failed)?;
        Ok(TokioIo::new(Box::new(stream)))
    }

    /// Opens a connection for requests of HTTP/1.1. It ends with the returned sender.
    ///
    /// # Errors
    /// A message for people.
    pub async fn connect_http1<B>(&self) -> Result<http1::SendRequest<B>, String>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let connection = self.connect().await.map_err(|error| error_chain(&error))?;
        let (sender, driver) = http1::handshake(connection).await.map_err(|error| error_chain(&error))?;
        tokio::spawn(driver);
        Ok(sender)
    }

    /// Connects to the server, or to a proxy that connects to it.
    async fn connect_tcp(&self) -> Result<TcpStream, ConnectError> {
        let server = &self.0;
        let authority = server.authority.clone();
        let mut addresses = HttpConnector::new();
        addresses.enforce_http(false); // TLS is added here
        addresses.set_nodelay(true);
        // divided among the addresses of a name; some of the timeout is left for what comes after
        addresses.set_connect_timeout(Some(server.timeout.mul_f64(CONNECT_SHARE)));
        let uri = |scheme: &str| format!("{scheme}://{authority}").parse::<Uri>();
        let unreachable =
            |source: BoxError| ConnectError::Unreachable { authority: authority.clone(), source };
        let uri =
            uri(if server.tls { "https" } else { "http" }).map_err(|error| unreachable(error.into()))?;
        let stream = match proxy(&uri, &server.host).filter(|_| server.tls) {
            None => addresses.call(uri).await.map_err(|error| unreachable(error.into()))?,
            Some(proxy) => {
                let (host, auth) =
                    (proxy.uri().authority().map(ToString::to_string), proxy.basic_auth().cloned());
                let mut tunnel = Tunnel::new(proxy.uri().clone(), addresses);
                if let Some(auth) = auth {
                    tunnel = tunnel.with_auth(auth);
                }
                let failed = |source: BoxError| ConnectError::Proxy {
                    proxy: host.unwrap_or_default(),
                    authority: authority.clone(),
                    source,
                };
                poll_fn(|context| tunnel.poll_ready(context))
                    .await
                    .map_err(|error| unreachable(error.into()))?;
                tunnel.call(uri).await.map_err(|error| failed(error.into()))?
            }
        };
        Ok(stream.into_inner())
    }

    /// Reads the certificates.
    async fn tls_config(&self) -> Result<ClientConfig, ConnectError> {
        let server = Arc::clone(&self.0);
        run_blocking(self.0.file_permit, move || tls_config(&server)).await
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

/// Returns the proxy that the environment names for a host; `None` for this host itself, as in other programs.
fn proxy(uri: &Uri, host: &str) -> Option<Intercept> {
    let is_local = host == "localhost"
        || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
    if is_local { None } else { Matcher::from_env().intercept(uri) }
}

fn tls_config(server: &RemoteServer) -> Result<ClientConfig, ConnectError> {
    let mut roots = RootCertStore::empty();
    match &server.certificate {
        Some(path) => {
            for certificate in read_pem(path, certificates)? {
                roots.add(certificate)?;
            }
        }
        // invalid certificates of the host are skipped, as other programs do; it is an error if none is left
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    if roots.is_empty() {
        return Err(ConnectError::NoAuthorities(server.settings));
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match &server.client {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(read_pem(certificate, certificates)?, read_pem(key, private_key)?)?,
    };
    config.alpn_protocols = vec![if server.http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}

/// Runs work that can block outside of the executor, whose other tasks go on.
pub async fn run_blocking<T: Send + 'static>(
    permits: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let permit = permits.acquire().await;
    let work = move || {
        let _permit = permit;
        work()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()), // the runtime cancels none while this one waits
    }
}

/// Reads a PEM file.
fn read_pem<T>(path: &Path, parse: impl FnOnce(&[u8]) -> Result<T, String>) -> Result<T, ConnectError> {
    let wrap = |reason| ConnectError::Pem { path: path.to_path_buf(), reason };
    let text = std::fs::read(path).map_err(|error| wrap(error.to_string()))?;
    parse(&text).map_err(wrap)
}
