//! A memledger behind a web configuration, and clients of it.

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
        // of another name than what it issues: openssl takes that for self-signed else
        params.distinguished_name.push(DnType::CommonName, "memledger test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Its own certificate, as PEM.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for these names, and its key, both as PEM.
    pub fn issue(&self, names: &[&str]) -> (String, String) {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// A folder with a web configuration, and the authority of its certificates.
pub struct Site {
    pub folder: tempfile::TempDir,
    pub authority: Authority,
}

impl Site {
    /// A certificate of this host in `cert.pem` and `key.pem`, its authority in `ca.pem`, and this configuration.
    pub fn new(config: &str) -> Self {
        let site = Self { folder: tempfile::tempdir().unwrap(), authority: Authority::new() };
        site.write("ca.pem", &site.authority.pem());
        site.certify();
        site.write("web.yml", config);
        site
    }

    /// Makes the certificate anew.
    pub fn certify(&self) {
        let (certificate, key) = self.authority.issue(&["127.0.0.1", "localhost"]);
        self.write("cert.pem", &certificate);
        self.write("key.pem", &key);
    }

    /// Puts a file in place, whole.
    pub fn write(&self, name: &str, text: &str) {
        let temporary = self.path("new");
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, self.path(name)).unwrap();
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// A memledger with this configuration, which has a snapshot.
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

    /// A client that trusts the authority and shows no certificate.
    pub fn client(&self) -> Client {
        Client::trusting(&self.authority, None)
    }

    /// A client that shows a certificate.
    pub fn client_with(&self, certificate: &(String, String)) -> Client {
        Client::trusting(&self.authority, Some(certificate))
    }
}

/// TLS on with the site's certificate.
pub const TLS: &str = "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n";

/// One user whose password is `secret`.
pub fn user(name: &str) -> String {
    format!("basic_auth_users:\n  {name}: {}\n", bcrypt::hash("secret", 4).unwrap())
}

/// The header of basic authentication.
pub fn basic(name: &str, password: &str) -> String {
    use base64::Engine;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{name}:{password}"));
    format!("Authorization: Basic {encoded}\r\n")
}

/// A client of HTTP/1 in TLS.
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

    /// The same, which speaks nothing but HTTP/2.
    pub fn of_two(&self) -> Self {
        let mut config = ClientConfig::clone(&self.0);
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(Arc::new(config))
    }

    /// A connection whose handshake is not done yet.
    pub fn connect(&self, memledger: &Memledger) -> StreamOwned<ClientConnection, TcpStream> {
        let name = "127.0.0.1".try_into().unwrap();
        let connection = ClientConnection::new(Arc::clone(&self.0), name).unwrap();
        StreamOwned::new(connection, connect(memledger))
    }

    /// Status and whole answer of a GET with more headers, each with its line end.
    pub fn get(&self, memledger: &Memledger, path: &str, headers: &str) -> Result<(u16, String), String> {
        exchange(self.connect(memledger), &get(path, headers))
    }

    /// The metrics.
    pub fn metrics(&self, memledger: &Memledger, headers: &str) -> Metrics {
        let (status, answer) = self.get(memledger, "/metrics", headers).unwrap();
        assert_eq!(status, 200, "{answer}");
        Metrics::parse(answer.split_once("\r\n\r\n").expect("a body").1)
    }
}

/// The text of a GET after which the connection ends.
pub fn get(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}\r\n")
}

/// Sends a text and reads to the end: the status, and all that came.
pub fn exchange(mut stream: impl Read + Write, request: &str) -> Result<(u16, String), String> {
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut answer = Vec::new();
    let ended = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    match (status, ended) {
        (Some(status), _) => Ok((status, answer)),
        (None, Err(error)) => Err(error.to_string()),
        (None, Ok(_)) => Err("closed without an answer".to_owned()),
    }
}
