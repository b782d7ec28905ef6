//! A memledger with a web configuration, and clients of it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

pub use crate::support::load::connect;
use crate::support::{Memledger, Metrics, eventually};

pub const ALONE: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

/// A certification authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        // its name must differ from those of its certificates: openssl would take them for self-signed
        params.distinguished_name.push(DnType::CommonName, "memledger test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Returns its own certificate in PEM format.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for these names. Returns certificate and key in PEM format.
    pub fn issue(&self, names: &[&str]) -> (String, String) {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) if name.contains("://") => SanType::URI((*name).try_into().unwrap()),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// A directory with a web configuration, and the authority of its certificates.
pub struct Site {
    pub folder: tempfile::TempDir,
    pub authority: Authority,
}

impl Site {
    /// Writes a certificate of this host to `cert.pem` and `key.pem`, its authority to `ca.pem`, and the configuration.
    pub fn new(config: &str) -> Self {
        let site = Self { folder: tempfile::tempdir().unwrap(), authority: Authority::new() };
        site.write("ca.pem", &site.authority.pem());
        site.certify();
        site.write("web.yml", config);
        site
    }

    /// Renews the certificate.
    pub fn certify(&self) {
        let (certificate, key) = self.authority.issue(&["127.0.0.1", "localhost"]);
        self.write("cert.pem", &certificate);
        self.write("key.pem", &key);
    }

    /// Replaces a file atomically.
    pub fn write(&self, name: &str, text: &str) {
        let temporary = self.path("new");
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, self.path(name)).unwrap();
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Starts memledger with this configuration and waits for the first snapshot.
    pub fn start(&self, flags: &[&str]) -> Memledger {
        let memledger = self.start_unready(flags);
        let client = self.client();
        eventually("the first snapshot", || match client.get(&memledger, "/-/ready", "") {
            Ok((200, _)) => Ok(()),
            other => Err(format!("{other:?}; log: {}", memledger.log())),
        });
        memledger
    }

    pub fn start_unready(&self, flags: &[&str]) -> Memledger {
        let file = format!("--web.config.file={}", self.path("web.yml"));
        Memledger::start_unready(&[ALONE, &[&file], flags].concat())
    }

    /// Returns a client that trusts the authority and has no certificate.
    pub fn client(&self) -> Client {
        Client::trusting(&self.authority, None)
    }

    /// Returns a client with a certificate.
    pub fn client_with(&self, certificate: &(String, String)) -> Client {
        Client::trusting(&self.authority, Some(certificate))
    }
}

/// Settings for TLS with the site's certificate.
pub const TLS: &str = "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n";

/// Settings for one user whose password is `secret`.
pub fn user(name: &str) -> String {
    format!("basic_auth_users:\n  {name}: {}\n", bcrypt::hash("secret", 4).unwrap())
}

/// Returns the header of basic authentication.
pub fn basic(name: &str, password: &str) -> String {
    use base64::Engine;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{name}:{password}"));
    format!("Authorization: Basic {encoded}\r\n")
}

/// A client of HTTP/1 over TLS.
#[derive(Clone)]
pub struct Client(Arc<ClientConfig>);

impl Client {
    fn trusting(authority: &Authority, shows: Option<&(String, String)>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        Self(Arc::new(match shows {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        }))
    }

    /// Connects; the handshake is done on the first read or write.
    pub fn connect(&self, memledger: &Memledger) -> StreamOwned<ClientConnection, TcpStream> {
        let name = "127.0.0.1".try_into().unwrap();
        let connection = ClientConnection::new(Arc::clone(&self.0), name).unwrap();
        StreamOwned::new(connection, connect(memledger))
    }

    /// Sends a GET with these header lines. Returns the status and the whole response.
    pub fn get(&self, memledger: &Memledger, path: &str, headers: &str) -> Result<(u16, String), String> {
        exchange(self.connect(memledger), &get(path, headers))
    }

    /// Returns the metrics.
    pub fn metrics(&self, memledger: &Memledger, headers: &str) -> Metrics {
        let (status, response) = self.get(memledger, "/metrics", headers).unwrap();
        assert_eq!(status, 200, "{response}");
        Metrics::parse(response.split_once("\r\n\r\n").expect("a body").1)
    }
}

/// Formats a GET request that closes the connection.
pub fn get(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}\r\n")
}

/// Sends a request and reads to the end. Returns the status and the whole response.
pub fn exchange(mut stream: impl Read + Write, request: &str) -> Result<(u16, String), String> {
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    let ended = stream.read_to_end(&mut response);
    let response = String::from_utf8_lossy(&response).into_owned();
    let status = response.split(' ').nth(1).and_then(|status| status.parse().ok());
    match (status, ended) {
        (Some(status), _) => Ok((status, response)),
        (None, Err(error)) => Err(error.to_string()),
        (None, Ok(_)) => Err("closed without a response".to_owned()),
    }
}
